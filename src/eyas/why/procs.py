"""From the raw snapshot to typed facts: processes, threads and their roles, rates between samples.

Nothing here judges. A number that was not seen is None, and None never counts as zero anywhere in this package.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from eyas.why.waits import Wait, classify

Json = Mapping[str, Any]

_THREAD_ROLES: list[tuple[str, str]] = [
    (r"pt_nccl_watchdg|nccl.*watchd", "nccl-watchdog"),
    (r"pt_nccl_heartbt", "nccl-heartbeat"),
    (r"nccl.*ras", "nccl-ras"),
    (r"^nccl|nccl_", "nccl"),
    (r"gloo", "gloo"),
    (r"pin_mem", "pin-memory"),
    (r"queuefeeder", "queue-feeder"),
    (r"pt_autograd", "autograd"),
    (r"cuda|nvidia|cupti", "cuda"),
    (r"tokio|rayon|grpc|event_engine|default-executo|jemalloc|iou-wrk|iou-sqp", "runtime"),
    (r"openblas|omp|mkl|tf_|xla|pthreadpool|eigen", "compute-pool"),
    (r"wandb|tensorboard|mlflow", "tracker"),
    (r"threadpoolexec|executor", "executor"),
]
_MODEL_FILE = re.compile(
    r"(model|pytorch_model|adapter|consolidated|weights)[^/]*\.(safetensors|bin|pth?|gguf|h5)$|\.gguf$|-of-\d+\.\w+$"
)


@dataclass(frozen=True)
class Thread:
    pid: int
    tid: int
    comm: str
    role: str
    waits: tuple[Wait, ...]  # one a sample, oldest first
    cpu: float | None = None  # share of one CPU between the first and the last sample
    runq: float | None = None  # share of the time it was runnable without a CPU
    wakeups: float | None = None  # times a second it got a CPU
    majflt: float | None = None  # a second

    @cached_property
    def wait(self) -> Wait:
        """The wait that stands for all looks: the most frequent family, the latest look of it."""
        if not self.waits:
            return Wait("hidden", "?")
        counts = Counter(w.family for w in self.waits)
        best = max(counts.values())
        return next(w for w in reversed(self.waits) if counts[w.family] == best)

    @property
    def ready(self) -> float:
        """Share of the time it wanted a CPU, with or without getting one: on a crowded host busy means runnable."""
        return min(1.0, (self.cpu or 0.0) + (self.runq or 0.0))

    def always(self, *families: str) -> bool:
        """Every look found it in one of these families, and there were at least two looks."""
        return len(self.waits) >= 2 and all(w.family in families for w in self.waits)

    def ever(self, *families: str) -> Wait | None:
        return next((w for w in reversed(self.waits) if w.family in families), None)

    def share(self, *families: str) -> float:
        return sum(w.family in families for w in self.waits) / len(self.waits) if self.waits else 0.0

    @property
    def asleep(self) -> bool:
        """Never seen on a CPU, no CPU time, and no wake-up between the samples."""
        quiet = (self.cpu or 0.0) < 0.005 and all(w.family != "run" for w in self.waits)
        return len(self.waits) >= 2 and quiet and (self.wakeups is None or self.wakeups == 0.0)


@dataclass(frozen=True)
class Reading:
    """An open data file of one process, and how it moved."""

    pid: int
    fd: int
    path: str
    pos: int | None
    moved: int | None  # bytes between the first and the last sample
    fresh: bool  # the file was opened between two samples
    size: int | None = None
    mnt: str | None = None


@dataclass(frozen=True)
class Proc:
    pid: int
    comm: str
    kind: str
    cmd: str
    raw: Json  # processes[PID] of the snapshot
    states: tuple[str, ...]
    threads: tuple[Thread, ...]
    span: float  # seconds between the first and the last sample that hold it
    gone: bool = False  # missing from the last sample
    rank: int | None = None
    ppid: int | None = None
    cpu: float | None = None
    io: Mapping[str, float] = field(default_factory=dict)  # bytes or calls a second; empty: not seen
    switches: float | None = None  # voluntary, main thread, a second
    majflt: float | None = None
    minflt: float | None = None
    rss: int | None = None
    rss_slope: float | None = None  # bytes a second
    swap: int = 0
    tracer: int = 0
    readings: tuple[Reading, ...] = ()
    fds: Mapping[int, Json] = field(default_factory=dict)
    stdio: Mapping[int, Json] = field(default_factory=dict)

    @property
    def state(self) -> str:
        return self.states[-1] if self.states else "?"

    @cached_property
    def main(self) -> Thread:
        return next((t for t in self.threads if t.tid == self.pid), Thread(self.pid, self.pid, self.comm, "main", ()))

    @cached_property
    def critical(self) -> Thread:
        """The thread that the work hangs on: the main thread, unless it idles while another one computes."""
        main = self.main
        if main.wait.family in ("run", "hidden") or main.wait.state == "D" or main.role != "main":
            return main
        busy = max(self.threads, key=lambda t: t.cpu or 0.0, default=main)
        idle = main.wait.family in ("epoll", "poll", "sleep", "signal", "accept", "futex")
        if idle and (main.cpu or 0.0) < 0.05 and (busy.cpu or 0.0) > 0.3 and busy.role in ("other", "executor"):
            return busy
        return main

    @property
    def zombie(self) -> bool:
        return self.state in ("Z", "X")

    @property
    def age(self) -> float | None:
        return self.raw.get("age_s")

    @property
    def environ(self) -> Json:
        return self.raw.get("environ") or {}

    @property
    def libs(self) -> set[str]:
        return set(self.raw.get("libs") or ())

    @property
    def visible(self) -> Json:
        return self.raw.get("visible") or {}

    def env(self, name: str) -> str | None:
        value = self.environ.get(name)
        return None if value is None else str(value)

    @property
    def label(self) -> str:
        rank = f"rank {self.rank}, " if self.rank is not None else ""
        return f"{rank}PID {self.pid} ({self.comm})"


def read_processes(snap: Json) -> dict[int, Proc]:
    """Every process of the snapshot with its rates."""
    samples = [s for s in snap.get("samples") or [] if isinstance(s, dict)]
    ranks = {r.get("pid"): r.get("rank") for r in (snap.get("job") or {}).get("ranks") or []}
    died = {d.get("pid") for d in snap.get("died") or []}
    procs = {}
    for key, raw in (snap.get("processes") or {}).items():
        pid = int(key)
        seen = [(float(s.get("t") or 0.0), s["procs"][key]) for s in samples if key in (s.get("procs") or {})]
        last_holds = bool(samples) and key in (samples[-1].get("procs") or {})
        procs[pid] = _proc(pid, raw, seen, gone=pid in died and not last_holds, rank=ranks.get(pid), snap=snap)
    return procs


def _proc(pid: int, raw: Json, seen: list[tuple[float, Json]], *, gone: bool, rank: int | None, snap: Json) -> Proc:
    span = seen[-1][0] - seen[0][0] if len(seen) > 1 else 0.0
    first, last = (seen[0][1], seen[-1][1]) if seen else ({}, {})
    stat0, stat1 = first.get("stat") or {}, last.get("stat") or {}
    status1 = last.get("status") or {}
    cmdline = raw.get("cmdline") or []
    states = tuple(
        str((s.get("stat") or {}).get("state") or ((s.get("status") or {}).get("State") or "?")[:1]) for _, s in seen
    )
    fds = {int(n): fd for n, fd in (first.get("fds") or {}).items()}
    return Proc(
        pid=pid,
        comm=str(raw.get("comm") or "?"),
        kind=str(raw.get("kind") or "other"),
        cmd=" ".join(map(str, cmdline)),
        raw=raw,
        states=states,
        threads=tuple(_threads(pid, seen, span)),
        span=span,
        gone=gone,
        rank=rank,
        ppid=raw.get("ppid"),
        cpu=_cpu(stat0, stat1, span),
        io=_io(first, last, span),
        switches=per_second(first.get("status"), status1, "voluntary", span),
        majflt=per_second(stat0, stat1, "majflt", span),
        minflt=per_second(stat0, stat1, "minflt", span),
        rss=(raw.get("memory") or {}).get("rss") or status1.get("VmRSS"),
        rss_slope=per_second(stat0, stat1, "rss", span),
        swap=int(status1.get("VmSwap") or (raw.get("memory") or {}).get("swap") or 0),
        tracer=int(status1.get("TracerPid") or 0),
        readings=tuple(_readings(pid, seen, snap)),
        fds=fds,
        stdio={n: raw.get(name) or fds.get(n) or {} for n, name in enumerate(("stdin", "stdout", "stderr"))},
    )


def per_second(first: Json | None, last: Json | None, key: str, span: float) -> float | None:
    """The rate of a counter; None when it was not seen twice."""
    a, b = (first or {}).get(key), (last or {}).get(key)
    if a is None or b is None or span <= 0:
        return None
    return (float(b) - float(a)) / span


def _cpu(first: Json, last: Json, span: float) -> float | None:
    user, system = per_second(first, last, "utime", span), per_second(first, last, "stime", span)
    return None if user is None and system is None else max(0.0, (user or 0.0) + (system or 0.0))


def _io(first: Json, last: Json, span: float) -> dict[str, float]:
    a, b = first.get("io"), last.get("io")
    rates = {key: per_second(a, b, key, span) for key in a or {}}
    return {key: rate for key, rate in rates.items() if rate is not None}


def _threads(pid: int, seen: list[tuple[float, Json]], span: float) -> Iterable[Thread]:
    tids: dict[str, list[Json]] = {}
    for _, sample in seen:
        for tid, thread in (sample.get("threads") or {}).items():
            tids.setdefault(tid, []).append(thread)
    if str(pid) not in tids and seen:  # nothing below task/ was read: the process stands for its main thread
        tids[str(pid)] = [_as_thread(sample) for _, sample in seen]
    for tid, looks in tids.items():
        comm = str(looks[-1].get("comm") or "?")
        if comm == "eyas-record":  # the recorder of an eyas run wakes every second, however stuck the run is
            continue
        waits = tuple(classify(str(x.get("state") or "?"), x.get("wchan"), x.get("syscall")) for x in looks)
        width = span if len(looks) == len(seen) else 0.0
        run, wait = per_second(looks[0], looks[-1], "run_s", width), per_second(looks[0], looks[-1], "wait_s", width)
        cpu = _cpu(looks[0], looks[-1], width)
        role = "main" if int(tid) == pid else thread_role(comm)
        yield Thread(
            pid,
            int(tid),
            comm,
            role,
            waits,
            cpu=run if cpu is None or (run is not None and run > cpu) else cpu,
            runq=wait,
            wakeups=per_second(looks[0], looks[-1], "slices", width),
            majflt=per_second(looks[0], looks[-1], "majflt", width),
        )


def _as_thread(sample: Json) -> dict[str, Any]:
    stat, sched = sample.get("stat") or {}, sample.get("sched") or {}
    return {
        "comm": "main",
        "state": stat.get("state"),
        "utime": stat.get("utime"),
        "stime": stat.get("stime"),
        "wchan": sample.get("wchan"),
        "syscall": sample.get("syscall"),
        "majflt": stat.get("majflt"),
        "run_s": sched.get("run_s"),
        "wait_s": sched.get("wait_s"),
        "slices": sched.get("slices"),
    }


def thread_role(comm: str) -> str:
    low = comm.lower()
    return next((role for pattern, role in _THREAD_ROLES if re.search(pattern, low)), "other")


def _readings(pid: int, seen: list[tuple[float, Json]], snap: Json) -> Iterable[Reading]:
    """Regular files open for reading that hold data, with their offsets."""
    files = snap.get("files") or {}
    looks: dict[tuple[int, str], list[tuple[int, Json]]] = {}
    for index, (_, sample) in enumerate(seen):
        for number, fd in (sample.get("fds") or {}).items():
            if fd.get("kind") == "file" and fd.get("path"):
                looks.setdefault((int(number), str(fd["path"])), []).append((index, fd))
    for (number, path), entries in looks.items():
        info = files.get(path) or {}
        if not is_data(path, info, entries[0][1]):
            continue
        positions = [fd["pos"] for _, fd in entries if fd.get("pos") is not None]
        moved = positions[-1] - positions[0] if len(positions) > 1 else None
        yield Reading(
            pid,
            number,
            path,
            positions[-1] if positions else None,
            moved,
            fresh=entries[0][0] > 0,
            size=info.get("size") or entries[0][1].get("size"),
            mnt=str(info.get("mnt") or entries[0][1].get("mnt") or "") or None,
        )


def is_data(path: str, info: Json, fd: Json) -> bool:
    role = info.get("role")
    if role is not None:
        return bool(role == "data")
    if fd.get("access") in ("w", "rw") or path.startswith(("/proc/", "/sys/", "/dev/", "/usr/", "/lib")):
        return False
    return not re.search(r"\.(so[.\d]*|py[co]?|log|lock|out|err)$", path)


def is_model_file(path: str) -> bool:
    return bool(_MODEL_FILE.search(path))


def log_bytes(entry: Json) -> tuple[bytes, bytes, int]:
    """Head and tail of a log as the probe shipped them, and the offset of the tail."""
    head, tail = entry.get("head") or {}, entry.get("tail") or {}
    return (
        base64.b64decode(head.get("b64") or ""),
        base64.b64decode(tail.get("b64") or ""),
        int(tail.get("offset") or 0),
    )


def grew(entry: Json) -> int | None:
    """By how much a log, an output or a cache grew while we looked; None when it was not seen twice."""
    sizes = [int(g) for g in entry.get("growth") or [] if g is not None]
    return sizes[-1] - sizes[0] if len(sizes) > 1 else None
