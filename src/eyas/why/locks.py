"""Which lock file a process waits for, who has it, and since when.

A lock is taken in one of two ways. With flock or fcntl the kernel knows its holder, and a waiter either sleeps in the
kernel or tries again and again, with naps between, during which it has nothing open: the probe saw the file opened in
step with the waiter's wake-ups. With a file that only has to exist, the kernel knows nothing: its maker has it open, or
wrote its number into it, or is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.why.facts import Facts, span_words
from eyas.why.procs import Proc

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Holder:
    pid: int
    comm: str
    cmd: str
    lock: str | None  # "FLOCK WRITE"; None: it has the file open, no more
    member: bool
    age: float | None = None  # of the process

    @property
    def words(self) -> str:
        return f"PID {self.pid} ({self.comm})" + (", a process of this job" if self.member else "")


@dataclass(frozen=True)
class LockFile:
    path: str
    age: float | None  # since its last change
    rate: float | None  # openings a second, by anybody
    pollers: tuple[int, ...]  # processes of the job that open it
    holders: tuple[Holder, ...]
    owner: Json | None  # what the file says of its maker
    searched: bool  # every process's open files were looked through
    opened_here: int | None  # a process of the job has it open

    @property
    def locked(self) -> bool:
        """Somebody holds a lock on it in the kernel, so its mere existence means nothing."""
        return any(h.lock for h in self.holders)

    def holder(self, but: set[int]) -> Holder | None:
        """Who keeps these processes from having it."""
        others = [h for h in self.holders if h.pid not in but]
        return next((h for h in others if h.lock), None) or (next(iter(others), None) if not self.pollers else None)

    @property
    def forsaken(self) -> bool:
        """A lock by existence whose maker is gone."""
        if self.owner is not None and self.owner.get("alive") is not None:
            return not self.owner["alive"]
        return self.searched and not self.holders


def read_lock_files(f: Facts) -> list[LockFile]:
    return [_read(entry) for entry in f.snap.get("lockfiles") or []]


def _read(entry: Json) -> LockFile:
    span = float(entry.get("watch_s") or 0.0)
    opens = int(entry.get("opens") or 0)
    holders = tuple(
        Holder(
            int(h.get("pid") or 0),
            str(h.get("comm") or "?"),
            str(h.get("cmd") or ""),
            h.get("lock"),
            bool(h.get("member")),
            h.get("age_s"),
        )
        for h in entry.get("holders") or []
    )
    return LockFile(
        path=str(entry.get("path")),
        age=entry.get("age_s"),
        rate=opens / span if span else None,
        pollers=_pollers(entry, opens),
        holders=holders,
        owner=entry.get("owner"),
        searched=bool(entry.get("searched")) and not entry.get("unsearched"),
        opened_here=entry.get("pid") if entry.get("open") else None,
    )


def _pollers(entry: Json, opens: int) -> tuple[int, ...]:
    """Who opens it: wakes that fall together with openings, which chance does not explain."""
    looks = [(int(p["pid"]), int(p.get("wakes") or 0), int(p.get("matched") or 0)) for p in entry.get("polls") or []]
    rare = float(entry.get("busy") or 0.0) <= 0.6
    accounted = opens <= 1.3 * sum(wakes for _, wakes, _ in looks)
    return tuple(pid for pid, wakes, matched in looks if wakes >= 3 and matched >= 0.8 * wakes and (rare or accounted))


@dataclass(frozen=True)
class Awaited:
    """What the job waits for."""

    path: str | None
    holder: Holder | None
    how: str  # "blocked": in flock or fcntl; "polled": tried again and again; "exists": its existence is in the way
    file: LockFile | None = None

    @property
    def forsaken(self) -> bool:
        return self.how == "exists" and self.holder is None and self.file is not None and self.file.forsaken

    @property
    def words(self) -> str:
        """Who has it, and since when at most: the file's age where its existence is the lock, else the holder's."""
        there = self.file.age if self.how == "exists" and self.file is not None else None
        lies = f", there for {span_words(there)}" if there is not None else ""
        if self.forsaken:
            return f"left behind{lies}: its maker is gone"
        if self.holder is None:
            return f"whose holder was not seen{lies}"
        began = self.holder.age if there is None else None
        since = f", which started {span_words(began)} ago" if began is not None else lies
        return f"held by {self.holder.words}{since}"


def awaited(f: Facts, proc: Proc) -> Awaited | None:
    """The lock that a process waits for, where that is certain: it sleeps in the kernel for it, or it tries it."""
    files = read_lock_files(f)
    for lock in f.snap.get("locks") or []:
        if proc.pid in (lock.get("waiters") or []):
            pid, path = int(lock.get("holder") or 0), lock.get("path") or proc.critical.wait.path
            file = next((x for x in files if x.path == path), None)
            holder = file.holder({proc.pid}) if file is not None and file.locked else None
            if holder is None and pid > 0:
                comm, cmd = str(lock.get("holder_comm") or "?"), str(lock.get("holder_cmd") or "")
                holder = Holder(pid, comm, cmd, f"{lock.get('type')} {lock.get('mode')}", pid in f.members)
            return Awaited(path, holder, "blocked", file)
    polled = [x for x in files if proc.pid in x.pollers]
    if polled:
        file = max(polled, key=lambda x: (x.holder({proc.pid}) is not None, x.rate or 0.0))
        return Awaited(file.path, file.holder({proc.pid}), "polled", file)
    return None


def naps(proc: Proc) -> bool:
    """Its main thread sleeps by the clock, a little at a time, and uses next to no CPU."""
    main = proc.main
    often = main.wakeups is None or main.wakeups >= 0.3
    return main.share("sleep") >= 0.6 and often and (proc.cpu or 0) < 0.3


def in_the_way(f: Facts, proc: Proc) -> Awaited | None:
    """A file whose existence may keep a process waiting that naps: in a build's folder, or with its maker's number."""
    ours = {proc.pid}
    builds = {c.get("path") for c in f.snap.get("caches") or [] if c.get("name") == "torch_extensions"}
    for file in read_lock_files(f):
        build = file.path.endswith("/lock") and any(b and file.path.startswith(f"{b}/") for b in builds)
        said = int((file.owner or {}).get("pid") or 0)
        if file.locked or said == proc.pid or any(h.pid == proc.pid for h in file.holders):
            continue
        if build or said:
            holder = file.holder(ours)
            if holder is None and said and (file.owner or {}).get("alive"):
                holder = Holder(said, "named in the file", "", None, said in f.members)
            return Awaited(file.path, holder, "exists", file)
    return None
