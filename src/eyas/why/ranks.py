"""Which of N ranks is the odd one out.

In a collective everybody waits for the slowest. The rank that does something else than waiting, or nothing at all
because it is dead or stopped, is the one to look at; the many that wait are only its victims.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eyas.why.facts import Facts
from eyas.why.procs import Proc
from eyas.why.waits import is_storage

_COLLECTIVE = re.compile(
    r"\b(all_?reduce|all_?gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|barrier|monitored_barrier|send|recv|isend|irecv|"
    r"gather\w*|scatter\w*|_allgather_base|batch_isend_irecv|psum|synchronize)\b"
)
# What a rank does, the most suspicious first. `waiting` and `spinning` are what victims do.
_SUSPICION = [
    "dead",
    "stopped",
    "gpu-driver",
    "input",
    "lock",
    "storage",
    "pipe",
    "child",
    "throttled",
    "sleeping",
    "computing",
    "other",
    "spinning",
    "waiting",
]


@dataclass(frozen=True)
class Split:
    expected: int | None  # ranks that should be on this host
    missing: tuple[int, ...]  # rank numbers that are gone or dead
    missing_count: int
    groups: tuple[tuple[str, tuple[Proc, ...]], ...]  # largest first
    odd: tuple[Proc, ...]
    odd_doing: str | None
    rest_doing: str | None
    reported_missing: tuple[int, ...] = ()  # by the watchdog in the log
    by_stack: bool = False

    @property
    def words(self) -> str:
        return "; ".join(f"{_names(procs)}: {doing}" for doing, procs in self.groups)

    @property
    def odd_words(self) -> str | None:
        if self.odd:
            return f"{_names(self.odd)} ({self.odd_doing})"
        if self.missing:
            return "rank " + ", ".join(map(str, self.missing)) + " (gone)"
        if self.reported_missing:
            return "rank " + ", ".join(map(str, self.reported_missing[:8])) + " (not in the time-out reports)"
        return None


def _names(procs: tuple[Proc, ...]) -> str:
    numbers = [str(p.rank) if p.rank is not None else f"PID {p.pid}" for p in procs]
    shown = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return ("rank " if len(numbers) == 1 else "ranks ") + shown


def doing(f: Facts, proc: Proc) -> str:
    """What one rank does, in a word of `_SUSPICION`."""
    if proc.zombie or proc.gone:
        return "dead"
    thread = proc.critical
    family = thread.wait.family
    if proc.state in ("T", "t") or family in ("stop", "frozen"):
        return "stopped"
    gpus = f.gpu.of(proc.pid)
    if family == "gpu" and thread.wait.state == "D":
        return "gpu-driver"
    if any(g.spinning for g in gpus):
        return "spinning"
    if family == "tty":
        return "input"
    if family == "lock":
        return "lock"
    if family == "pipe-write":
        return "pipe"
    if is_storage(family) and thread.share(family) >= 0.5:
        return "storage"
    if family == "run" or (proc.cpu or 0.0) > 0.5:
        return "computing"
    if family in ("sleep", "child"):
        return "sleeping" if family == "sleep" else "child"
    return "waiting" if family in ("futex", "poll", "epoll", "socket", "hidden", "event", "pipe-read") else "other"


def in_collective(f: Facts, proc: Proc) -> str | None:
    """The collective call in the main thread's stack, where stacks were taken."""
    for frame in f.stack_frames(proc):
        match = _COLLECTIVE.search(frame.rsplit(" ", 1)[-1])
        if match and (
            "distributed" in frame
            or "comm" in frame
            or match.group(1) not in ("send", "recv", "gather", "scatter", "synchronize")
        ):
            return match.group(1)
    return None


def split(f: Facts) -> Split | None:
    """Compare the ranks of this host; None when there is only one process and no sign of others."""
    reported = _reported_missing(f)
    if len(f.ranks) < 2 and not reported and (f.local_size or 1) < 2:
        return None
    groups: dict[str, list[Proc]] = {}
    calls = {p.pid: in_collective(f, p) for p in f.ranks}
    by_stack = len({c for c in calls.values() if c}) > 1 or (any(calls.values()) and not all(calls.values()))
    slowed = {p.pid for p in f.ranks if any(g.slowed for g in f.gpu.of(p.pid))}
    for proc in f.ranks:
        word = doing(f, proc)
        if proc.pid in slowed and 2 * len(slowed) < len(f.ranks) and word in ("computing", "spinning", "waiting"):
            word = "throttled"
        if word not in ("dead", "stopped") and by_stack:
            call = calls[proc.pid]
            frames = f.stack_frames(proc)
            word = f"in {call or frames[0]}" if call or frames else word
        groups.setdefault(word, []).append(proc)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    dead = [p for p in f.ranks if p.zombie or p.gone]
    local = f.local_size
    whole = bool(f.ranks) and not f.job.get("left_out")
    absent = max(0, (local or len(f.ranks)) - len(f.ranks)) if whole else 0
    missing = {p.rank for p in dead if p.rank is not None} | _gap(f, local)
    odd, odd_word = _odd(ordered)
    rest = next((w for w, _ in ordered if w != odd_word), None)
    return Split(
        local,
        tuple(sorted(missing)),
        absent + len(dead),
        tuple((w, tuple(p)) for w, p in ordered),
        tuple(odd),
        odd_word,
        rest,
        tuple(reported),
        by_stack,
    )


def _reported_missing(f: Facts) -> tuple[int, ...]:
    """Ranks that do not report the time-out which the others report."""
    found = f.log.collective if f.log else None
    if found is None or found.missing:
        return found.missing if found else ()
    world = found.world_size or f.world_size or 0
    silent = set(range(world)) - set(found.reporting)
    return tuple(sorted(silent)) if found.reporting and 0 < len(silent) <= world // 2 else ()


def _gap(f: Facts, local: int | None) -> set[int]:
    """Rank numbers that should be here and are not, where the numbering on this host is plain."""
    pairs = [(r.get("local_rank"), r.get("rank")) for r in f.job.get("ranks") or []]
    known = [(lr, r) for lr, r in pairs if lr is not None and r is not None]
    if not local or not known:
        return set()
    base = known[0][1] - known[0][0]
    return {base + i for i in range(local)} - {r for _, r in known}


def _odd(groups: list[tuple[str, list[Proc]]]) -> tuple[list[Proc], str | None]:
    if len(groups) < 2:
        return [], None
    victims = ("waiting", "spinning")
    if groups[0][0].startswith("in ") or any(w.startswith("in ") for w, _ in groups):
        smallest = min(groups, key=lambda g: len(g[1]))
        return smallest[1], smallest[0]
    rank = {w: i for i, w in enumerate(_SUSPICION)}
    suspects = [g for g in groups if g[0] not in victims] or [g for g in groups if g[0] != "spinning"]
    if not suspects:
        return [], None
    if len(suspects) == len(groups) and len(groups[0][1]) > len(groups[1][1]):
        suspects = groups[1:]  # nobody waits: the minority is the odd one
    word, procs = min(suspects, key=lambda g: rank.get(g[0], 50))
    total = sum(len(p) for _, p in groups)
    return (procs, word) if len(procs) * 2 <= total else ([], None)
