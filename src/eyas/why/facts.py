"""The whole snapshot as facts: who is who in the job, what its log says, and the progress vector.

`read(snapshot)` builds one `Facts`; the wait chain and the verdict rules look at nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eyas.why.gpu import GpuView, read_gpus
from eyas.why.job import company, promoted
from eyas.why.logs.facts import LogFacts
from eyas.why.procs import Proc, Thread, grew, log_bytes, per_second, read_processes
from eyas.why.storage import DataView, Mount, read_data, read_mounts

Json = Mapping[str, Any]
TRICKLE = 64 * 1024  # bytes a second below which reading is housekeeping (a tracker reading /proc), not data
_RECORDER_SAYS = re.compile(  # eyas/record/words.py: `step 31/300 · forward 20 s · ...`, with the time in log.txt
    r"(?:\d{4}-\d\d-\d\d [\d:]{8} )?(?:\[\d+/\d+ [a-z]+\] )?(?:rank \d+: )?"
    r"(?:(?:before the first \w+|\w+ [\d,]+(?:/[\d,]+)?) · [\w ]+? (?:for )?\d+ s(?: · |$)|stall: |eyas why: )"
)
WAITING = ("futex", "poll", "epoll", "pipe-read", "socket", "sleep", "hidden", "event", "lock")


@dataclass(frozen=True)
class Signal:
    """One entry of the progress vector."""

    name: str
    moved: bool | None  # None: not seen
    forward: bool  # True: its movement is work being done; False: it can also be a spin or a heart-beat
    text: str
    source: str


class Facts:
    def __init__(self, snap: Json, log: LogFacts | None = None) -> None:
        snap = tidy(snap)
        self.snap: Json = snap
        self.meta: Json = snap.get("meta") or {}
        self.target: Json = snap.get("target") or {}
        self.job: Json = snap.get("job") or {}
        self.samples: list[Json] = [s for s in snap.get("samples") or [] if isinstance(s, dict)]
        self.span: float = (
            float(self.samples[-1].get("t") or 0) - float(self.samples[0].get("t") or 0) if self.samples else 0.0
        )
        self.procs, self._spawned = promoted(snap, read_processes(snap))
        self.members = {int(p) for p in self.job.get("members") or []} | {int(p) for p in self.procs}
        self.mounts: dict[str, Mount] = read_mounts(snap)
        self.gpu: GpuView = read_gpus(snap, {int(p) for p in self.job.get("members") or []} or self.members)
        logs = snap.get("logs") or []
        self.log_entry: Json = next(
            (e for e in logs if (e.get("tail") or {}).get("b64") or e.get("size")), logs[0] if logs else {}
        )
        self.log = log
        self.now: float = float(self.meta.get("started") or 0.0) + float(
            (self.samples[-1].get("t") if self.samples else 0.0) or 0.0
        )

    # ---- who is who
    @cached_property
    def main(self) -> Proc | None:
        """The process whose main thread the run hangs on."""
        wanted = [self.job.get("main"), self.target.get("pid")]
        found = next((self.procs[int(p)] for p in wanted if p is not None and int(p) in self.procs), None)
        if found is not None and (found.kind == "launcher" or self._spawned) and self.ranks:
            return self.ranks[0]
        return found

    @cached_property
    def ranks(self) -> list[Proc]:
        """The processes of a multi-rank job on this host, by rank; empty when it is a single process."""
        pids = self._spawned or [int(r.get("pid") or 0) for r in self.job.get("ranks") or []]
        found = [self.procs[p] for p in pids if p in self.procs]
        return sorted(found, key=lambda p: (p.rank is None, p.rank, p.pid))

    @cached_property
    def trainers(self) -> list[Proc]:
        return self.ranks or ([self.main] if self.main else [])

    @cached_property
    def workers(self) -> list[Proc]:
        """Loader workers: children of a trainer with its command line, or spawned by multiprocessing."""
        owners = {p.pid for p in self.trainers}
        kinds = ("fork", "spawned")
        return [p for p in self.procs.values() if p.kind in kinds and p.pid not in owners]

    @cached_property
    def live_workers(self) -> list[Proc]:
        return [p for p in self.workers if not p.zombie and not p.gone]

    @cached_property
    def helpers(self) -> list[Proc]:
        """Children that are no Python workers (a converter, a shell script, git), and what feeds its standard input."""
        return company(self.procs, self.trainers)

    @cached_property
    def busy_helper(self) -> Proc | None:
        """A helper that computes, or would if the crowd on the CPUs let it."""
        return next((p for p in self.helpers if (p.cpu or 0) > 0.05 or p.critical.ready > 0.5), None)

    @cached_property
    def newborn(self) -> list[Proc]:
        """The workers, when all were started after the last line of a log that shows steps: for some phase."""
        late = [w for w in self.live_workers if w.age is not None and self.idle is not None and w.age < self.idle]
        return late if self.stepped and len(late) == len(self.live_workers) else []

    @cached_property
    def feeders(self) -> list[Proc]:
        """Processes outside the job that write into a pipe it reads as its standard input."""
        return [p for p in self.procs.values() if p.kind == "feeder"]

    def workers_of(self, proc: Proc) -> list[Proc]:
        mine = [w for w in self.workers if w.ppid == proc.pid]
        return mine or (list(self.workers) if len(self.trainers) == 1 else [])

    def of_kind(self, *kinds: str) -> list[Proc]:
        return [p for p in self.procs.values() if p.kind in kinds]

    @cached_property
    def alive(self) -> bool:
        return (
            bool(self.target.get("exists"))
            and not self.target.get("zombie")
            and not (self.main is not None and self.main.zombie)
        )

    @cached_property
    def training(self) -> bool | None:
        """Whether the target looks like a training process: by what it is, or by a log that shows steps."""
        return True if self.stepped or self.workers or self.ranks else self.target.get("ours")

    @cached_property
    def distributed(self) -> bool:
        return len(self.ranks) > 1 or (self.world_size or 1) > 1

    @cached_property
    def world_size(self) -> int | None:
        size = self.job.get("world_size")
        if size is None and self.main is not None and (self.main.env("WORLD_SIZE") or "").isdigit():
            size = int(self.main.env("WORLD_SIZE") or 1)
        return int(size) if size is not None else None

    @cached_property
    def local_size(self) -> int | None:
        """How many ranks should be on this host."""
        size = self.job.get("launcher_nproc")
        if size is None and self.main is not None and (self.main.env("LOCAL_WORLD_SIZE") or "").isdigit():
            size = int(self.main.env("LOCAL_WORLD_SIZE") or 1)
        return int(size) if size is not None else None

    # ---- storage
    @cached_property
    def data(self) -> DataView:
        return read_data(self.snap, self.trainers + self.live_workers, self.mounts, self.span)

    def mounts_for(self, *uses: str) -> list[Mount]:
        return [m for m in self.mounts.values() if set(m.used_by) & set(uses)]

    # ---- the log
    @cached_property
    def log_path(self) -> str | None:
        return self.log_entry.get("path")

    @cached_property
    def idle(self) -> float | None:
        """Seconds since the log last grew."""
        if self.log is not None and not (self.log.empty and self.log.size == 0):
            return self.log.idle_s
        age = self.log_entry.get("age_s")
        if age is None and self.main is not None:
            return self.main.age if self.log_entry.get("size") == 0 else None
        return None if age is None else float(age)

    @cached_property
    def log_growth(self) -> int | None:
        return grew(self.log_entry)

    @cached_property
    def interval(self) -> float | None:
        """Seconds between progress lines: as the log tells, else at most the process's time over its lines.

        That bound counts the start-up in, so it errs on the patient side. It needs a log that this process began.
        """
        if self.log is None:
            return None
        if self.log.line_interval_s:
            return max(self.log.line_interval_s, 0.05)
        entry, age = self.log_entry, self.main.age if self.main is not None else None
        own = entry.get("how") in ("fd1", "fd2") and not entry.get("append")
        if not own or age is None or self.idle is None or self.log.progress_lines < 3 or not self.log.lines_exact:
            return None
        return max((age - self.idle) / self.log.progress_lines, 0.05)

    @cached_property
    def overdue(self) -> float | None:
        """How many usual line intervals the log has been silent; None where no interval is known."""
        return None if self.idle is None or self.interval is None else self.idle / self.interval

    @cached_property
    def fresh(self) -> bool:
        """A reader of the log would not call it silent."""
        if self.log_growth:
            return True
        if self.idle is None:
            return False
        return self.idle < 10 or (self.overdue is not None and self.overdue < 1.5 and self.idle < 60)

    @cached_property
    def stepped(self) -> bool:
        """The log shows that at least one training step was made."""
        if self.log is None:
            return False
        started = self.log.progress_lines > (1 if self.log.step == 0 else 0)  # a bar at 0/1000 is not a step
        return bool(self.log.step or started)

    @cached_property
    def heartbeat(self) -> bool:
        """The log still grows, but only by the same sentence over and over, or by what the recorder of an eyas run
        says in place of a silent trainer: alive, yet no step."""
        last = self.log_tail.rstrip().rpartition("\n")[2]
        if _RECORDER_SAYS.match(last):
            return True
        lines = [re.sub(r"\d+", "#", line.strip()) for line in self.log_tail.splitlines()[-12:] if line.strip()]
        if len(lines) < 6 or self.log is None:
            return False
        last = re.sub(r"\d+", "#", (self.log.last_progress or "").strip())
        return len(set(lines[-6:])) == 1 and (not last or last not in lines[-1]) and "%" not in lines[-1]

    @cached_property
    def log_tail(self) -> str:
        _, tail, _ = log_bytes(self.log_entry)
        return tail[-32768:].decode("utf-8", "replace").replace("\r", "\n")

    # ---- the progress vector
    @cached_property
    def signals(self) -> list[Signal]:
        return list(_signals(self))

    def signal(self, name: str) -> Signal | None:
        return next((s for s in self.signals if s.name == name), None)

    def moved(self, *names: str) -> bool:
        return any(s.moved for s in self.signals if s.name in names)

    @cached_property
    def forward(self) -> list[Signal]:
        """Signals that moved and that only real work moves."""
        return [s for s in self.signals if s.moved and s.forward]

    @cached_property
    def still(self) -> bool:
        """At least two looks, and nothing that means work moved between them."""
        return len(self.samples) >= 2 and self.span >= 0.9 and not self.forward

    # ---- host
    def host_rate(self, *path: str) -> float | None:
        """The rate of a host counter, e.g. host_rate("vmstat", "pswpin")."""
        if len(self.samples) < 2:
            return None
        first, last = (s.get("host") or {} for s in (self.samples[0], self.samples[-1]))
        for key in path[:-1]:
            first, last = first.get(key) or {}, last.get(key) or {}
        return per_second(first, last, path[-1], self.span)

    def pressure(self, what: str, kind: str = "some") -> float | None:
        """avg10 of a pressure-stall file, in per cent."""
        host = ((self.snap.get("host") or {}).get("pressure") or {}).get(what) or {}
        value = (host.get(kind) or {}).get("avg10")
        return None if value is None else float(value)

    def cgroup_of(self, proc: Proc) -> tuple[str | None, Json]:
        key = proc.raw.get("cgroup")
        return (key, (self.snap.get("cgroups") or {}).get(key) or {}) if key else (None, {})

    def cgroup_rate(self, key: str | None, counter: str) -> float | None:
        return None if key is None else self.host_rate("cgroups", key, counter)

    def kernel_lines(self, *kinds: str) -> list[Json]:
        return [line for line in (self.snap.get("kernel_log") or {}).get("lines") or [] if line.get("kind") in kinds]

    def stack_frames(self, proc: Proc, thread: Thread | None = None) -> list[str]:
        """Frames of a thread, innermost first, as "file:line func"; empty without --stacks."""
        entry = (self.snap.get("stacks") or {}).get(str(proc.pid)) or {}
        threads = entry.get("threads") or []
        wanted = thread.tid if thread else proc.pid
        chosen = next((t for t in threads if t.get("tid") == wanted), threads[0] if threads else {})
        return [f"{f.get('file')}:{f.get('line')} {f.get('func')}" for f in chosen.get("frames") or []]

    @cached_property
    def children_died(self) -> list[Json]:
        return [d for d in self.snap.get("died") or [] if d.get("kind") in ("fork", "spawned", "rank", "main")]


def span_words(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None:
        return "an unknown time"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def tidy(value: Any) -> Any:
    """A copy without nulls: in a snapshot, null and absent mean the same, "not seen"."""
    if isinstance(value, Mapping):
        return {key: tidy(v) for key, v in value.items() if v is not None}
    if isinstance(value, list):
        return [tidy(v) for v in value if v is not None]
    return value


def _signals(f: Facts) -> Any:
    """The progress vector. Each entry says what moved, or that it did not, or that it could not be seen."""
    growth = f.log_growth
    moved = None if growth is None else growth > 0
    text = "the log's growth was not seen" if growth is None else f"the log grew by {growth} bytes in {f.span:.0f} s"
    if moved and f.heartbeat:
        yield Signal("log", True, False, text + ", but only by the same line over and over", "log")
    else:
        yield Signal("log", moved, True, text, "log")

    outputs = [(o, (grew(o) or 0)) for o in f.snap.get("outputs") or []]
    full = [m for m in f.mounts.values() if m.full]
    grown = [o for o, g in outputs if g > 0 and o.get("kind") != "wandb" and not _within(o, full)]
    yield Signal(
        "output",
        bool(grown) if outputs else None,
        True,
        f"{grown[0].get('path')} grows" if grown else "no output file grew",
        "outputs",
    )
    caches = [c for c in f.snap.get("caches") or [] if (grew(c) or 0) > 0]
    known = bool(f.snap.get("caches"))
    yield Signal(
        "cache",
        bool(caches) if known else None,
        True,
        f"the {caches[0].get('name')} cache grows" if caches else "no compile or download cache grew",
        "caches",
    )

    data, readers = f.data, f.trainers + f.live_workers
    seen = bool(data.readings) or data.read_rate is not None
    reads = data.moves or (data.read_rate or 0) > TRICKLE
    yield Signal(
        "data",
        reads if seen else None,
        True,
        f"data is read at {data.speed / 1e6:.1f} MB/s" if reads else "no data is read",
        "/proc/PID/io, fdinfo",
    )
    writes = [p.io["wchar"] for p in readers if "wchar" in p.io]
    yield Signal(
        "writes",
        sum(writes) > TRICKLE if writes else None,
        not any(m.full for m in f.mounts_for("log", "output")),  # on a full file system they are tries
        f"{sum(writes) / 1e6:.2f} MB/s are written",
        "/proc/PID/io",
    )
    faults = [p.majflt for p in readers if p.majflt is not None]
    yield Signal(
        "paging",
        sum(faults) > 20 if faults else None,
        True,
        f"{sum(faults):.0f} pages a second come from disk",
        "/proc/PID/stat",
    )

    yield _cpu_signal("worker-cpu", f.live_workers, 0.10, True)
    yield _cpu_signal("compiler-cpu", f.of_kind("compile_worker", "compiler"), 0.05, True)
    handed = sum(w.io.get("syscw", 0.0) for w in f.live_workers)
    taken = sum(p.io.get("syscr", 0.0) for p in f.trainers)
    yield Signal(
        "batches",
        min(handed, taken) >= 0.5 if any(w.io for w in f.live_workers) else None,
        True,
        f"the workers hand something over {min(handed, taken):.1f} times a second",
        "/proc/PID/io",
    )
    yield _cpu_signal("helper-cpu", f.helpers, 0.10, True)
    yield _cpu_signal("main-cpu", f.trainers, 0.05, False)
    switches = [t.wakeups for p in readers for t in p.threads if t.wakeups is not None]
    yield Signal(
        "wake-ups",
        sum(switches) > 0 if switches else None,
        False,
        f"{sum(switches):.1f} wake-ups a second in all threads",
        "/proc/PID/task/*/schedstat",
    )

    working = f.gpu.working if f.gpu.exact or len(f.gpu.mine) == 1 else (f.gpu.working or None)
    ambiguous = working is None and any((g.util or 0) >= 5 for g in f.gpu.mine)
    yield Signal("gpu", True if working or ambiguous else working, bool(working), f.gpu.words, "nvml")


def _within(output: Json, mounts: list[Mount]) -> bool:
    """The file lies on one of these mounts: on a full one, what grows is the next try."""
    path = str(output.get("path") or "")
    return any(m.mountpoint != "/" and path.startswith(m.mountpoint.rstrip("/") + "/") for m in mounts)


def _cpu_signal(name: str, procs: list[Proc], least: float, forward: bool) -> Signal:
    cpu = [p.cpu for p in procs if p.cpu is not None]
    crowded = sum(p.critical.runq or 0.0 for p in procs)
    names = Counter(p.comm for p in procs).most_common(1)
    who = f"{len(procs)} x {names[0][0]}" if names else "none"
    return Signal(
        name,
        (sum(cpu) > least or (sum(cpu) > least / 5 and crowded > 2 * least) or crowded > 0.5) if cpu else None,
        forward,
        f"{who} used {100 * sum(cpu):.0f} % of a CPU"
        + (f", and waited for one {100 * crowded:.0f} % of the time" if crowded > 0.2 else ""),
        "/proc/PID/stat",
    )
