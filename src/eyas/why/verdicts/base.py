"""What a verdict rule works with.

A rule looks at one mechanism. It returns None when that mechanism is not in play at all, else a `Case` with evidence
for and against it, each with a weight: 1 a hint, 2 a sign, 3 strong, 5 nearly proof. The judge adds them up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eyas.why.facts import TRICKLE, WAITING, Facts
from eyas.why.facts import span_words as span_words
from eyas.why.procs import Proc, Thread
from eyas.why.ranks import Split
from eyas.why.waits import is_storage


@dataclass(frozen=True)
class Evidence:
    weight: float
    derived: str  # the sentence
    source: str  # where it was read
    raw: str | None = None  # the words of the source

    def to_dict(self, time: float) -> dict[str, Any]:
        return {"source": self.source, "time": time, "raw": self.raw, "derived": self.derived, "weight": self.weight}


@dataclass
class Case:
    verdict: str
    support: list[Evidence] = field(default_factory=list)
    against: list[Evidence] = field(default_factory=list)
    who: str | None = None  # whom to act on
    pids: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # for the sentence and the commands

    def yes(self, when: object, weight: float, derived: str, source: str = "/proc", raw: str | None = None) -> Case:
        if when:
            self.support.append(Evidence(weight, derived, source, raw))
        return self

    def no(self, when: object, weight: float, derived: str, source: str = "/proc", raw: str | None = None) -> Case:
        if when:
            self.against.append(Evidence(weight, derived, source, raw))
        return self

    @property
    def score(self) -> float:
        return sum(e.weight for e in self.support) - sum(e.weight for e in self.against)

    @property
    def family(self) -> str:
        return self.verdict.split(".", 1)[0]


@dataclass(frozen=True)
class Look:
    """Everything a rule may look at."""

    f: Facts
    split: Split | None = None


Rule = Callable[[Look], Case | None]
_FAILED = re.compile(
    r"refused|reset|unreachable|time.?d?.?out|unavailable|failed|error|HTTP \D{0,10}(?:4\d\d|5\d\d)|no route", re.I
)
_AGAIN = re.compile(r"retry|retries|retrying|again|attempt|back.?off|reconnect", re.I)


def stuck(look: Look, verdict: str) -> Case:
    """The common ground of all stuck verdicts: two looks, nothing forward moved, silence."""
    f = look.f
    case = Case(verdict)
    case.no(
        len(f.samples) < 2 or f.span < 0.9, 20, "there is only one look: nothing can be called stuck from it", "samples"
    )
    moving = [s.text for s in f.forward]
    case.no(moving, 8, "work moves: " + "; ".join(moving[:2]), "samples")
    case.yes(f.still, 1.5, f"nothing that means work moved in {f.span:.0f} s", "samples")
    if f.idle is not None and not f.heartbeat:
        late = f.overdue is not None and f.overdue >= 5
        case.yes(
            f.idle >= 600 or late,
            1,
            f"the log has been silent for {span_words(f.idle)}"
            + (f", {f.overdue:.0f} times its usual interval" if late and f.overdue else ""),
            "log",
        )
        case.no(f.log_growth, 3, "the log grows", "log")
        case.no(f.overdue is not None and f.overdue < 1.6, 3, "the next log line is not due yet", "log")
        case.no(f.overdue is not None and 1.6 <= f.overdue < 3, 1, "the next log line is only a little late", "log")
        case.no(f.overdue is None and f.idle < 5 and f.log is not None, 1.5, "the last log line is seconds old", "log")
    case.no(gpu_unseen(f), 1.5, "it has the GPU's libraries loaded, and the GPU cannot be seen", "maps, nvml")
    return case


def may_compute(f: Facts) -> bool:
    """Numerical libraries are loaded and the silence is short: an evaluation, a metric or a large fit on the CPU makes
    no system call and no page fault for minutes, just as an endless loop does."""
    libs = f.main.libs if f.main is not None else set()
    return bool(libs & {"torch", "numpy", "jax", "tensorflow"}) and (f.idle or 0.0) < 600


def forsaken(f: Facts) -> bool:
    """The target was forked by a process that is gone, and waits for it: parent 1, the leader of its group gone, and
    its pipe held only by its like. (A run under nohup leads its own group, or has work going on.)"""
    main = f.main
    looks = [s.get("procs", {}).get(str(main.pid)) for s in f.samples] if main is not None else []
    stat = next((look.get("stat") or {} for look in looks if look), {})
    leader = stat.get("pgrp")
    if main is None or main.ppid != 1 or leader in (None, 0, main.pid) or leader in f.procs:
        return False
    inode = (main.fds.get(main.critical.wait.fd if main.critical.wait.fd is not None else -1) or {}).get("inode")
    pipe = next((p for p in f.snap.get("pipes") or [] if inode is not None and p.get("inode") == inode), None)
    if pipe is None:
        return main.critical.always("futex") and main.critical.asleep
    holders = {int(e.get("pid") or 0) for end in ("readers", "writers") for e in pipe.get(end) or []} - {main.pid}
    return all(f.procs[p].ppid == 1 for p in holders if p in f.procs)


def tries(f: Facts) -> list[str]:
    """Lines at the log's end that say a request failed and will be made again, with no progress after them."""
    last = ((f.log.last_progress if f.log else None) or "").strip()
    after = f.log_tail[-6000:].rpartition(last)[2] if last else f.log_tail[-6000:]
    return [line.strip()[:200] for line in after.splitlines() if _FAILED.search(line) and _AGAIN.search(line)]


def gpu_unseen(f: Facts) -> bool:
    """The work may be on an accelerator of which nothing is known."""
    libs = f.main.libs if f.main is not None else set()
    return bool(libs & {"cuda", "jax", "tensorflow"}) and not f.gpu.mine


def starved(f: Facts) -> float:
    """How sure it is that the trainers wait for data or for somebody: 0 (they work) to 1."""
    if not f.trainers or f.gpu.working:
        return 0.0
    scores = []
    for proc in f.trainers:
        thread = proc.critical
        if (thread.cpu or 0.0) > 0.5:
            scores.append(0.0)
            continue
        scores.append(thread.share(*WAITING, "disk", "nfs", "fuse", "lustre", "swap", "io", "metadata"))
    level = sum(scores) / len(scores)
    return level if level >= 0.6 else 0.0


def readers(f: Facts) -> list[tuple[Proc, Thread]]:
    """The threads that bring the data: loader workers, else threads of the trainer, else its main thread."""
    found = [(w, w.critical) for w in f.live_workers]
    if found:
        return found
    for proc in f.trainers:
        found += [
            (proc, t)
            for t in proc.threads
            if t.tid != proc.pid
            and t.role in ("other", "executor", "queue-feeder")
            and (is_storage(t.wait.family) or (t.cpu or 0) > 0.1 or t.ever("disk", "nfs", "fuse", "lustre", "socket"))
        ]
    if not found:
        found = [(p, p.critical) for p in f.trainers]
    return found


def reading_share(f: Facts, *families: str) -> float:
    """Mean share of looks in which the readers that are not idle were in one of these wait families."""
    busy = [t for _, t in readers(f) if not t.always("poll", "epoll", "pipe-read", "sleep")]
    return sum(t.share(*families) for t in busy) / len(busy) if busy else 0.0


def trainers_wait(f: Facts) -> bool:
    """Every trainer's critical thread waits, with next to no CPU."""
    return bool(f.trainers) and all(
        p.critical.share(*WAITING) >= 0.6 and (p.critical.cpu or 0.0) < 0.1
        for p in f.trainers
        if not (p.zombie or p.gone)
    )


def log_kinds(f: Facts) -> set[str]:
    """Kinds of the failures that the log reports with nothing after them."""
    return (
        {e.kind for e in f.log.errors if e.final} | ({f.log.error.kind} if f.log.error else set()) if f.log else set()
    )


def log_line(f: Facts, *kinds: str) -> str | None:
    if f.log is None:
        return None
    found = [e for e in ([f.log.error] if f.log.error else []) + list(f.log.errors) if e.kind in kinds]
    return found[0].line if found else None


def phase(f: Facts, *ids: str) -> str | None:
    """The line with which the log announced one of these phases, when the phase is still open."""
    if f.log is None or f.log.phase is None or f.log.phase.closed or f.log.phase.id not in ids:
        return None
    return f.log.phase.line


def frames(f: Facts) -> list[str]:
    """Stack frames of the main process, innermost first."""
    return f.stack_frames(f.main) if f.main is not None else []


def feeds_itself(f: Facts) -> bool:
    """There are no loader workers, and the trainer reads files at a rate that is more than housekeeping."""
    return not f.live_workers and (f.data.read_rate or 0.0) > 8 * TRICKLE


def job_threads(f: Facts) -> list[tuple[Proc, Thread]]:
    """Every thread of the trainers and their live workers."""
    return [(p, t) for p in f.trainers + f.live_workers for t in p.threads]


def movement(f: Facts) -> float:
    """How sure it is that work goes on: forward signals count 1 each, a busy main thread or GPU a little less."""
    level = float(len(f.forward))
    if f.moved("main-cpu"):
        level += 0.8
    gpu = f.signal("gpu")
    if gpu is not None and gpu.moved and not gpu.forward and not f.gpu.spinning:
        level += 0.8
    return level


def quiet(look: Look, verdict: str, *, need: bool = True) -> Case:
    """The common ground of everything quiet: alive, no failure at the end, and movement."""
    f = look.f
    case = Case(verdict)
    level = movement(f)
    names = [s.text for s in f.signals if s.moved and s.name != "wake-ups"]
    case.yes(level > 0, min(3.0, 1.5 + 0.75 * level), "work moves: " + "; ".join(names[:3]), "samples")
    case.no(need and level == 0 and len(f.samples) > 1, 3, "nothing moved between the looks", "samples")
    case.no(log_kinds(f), 2, "the log ends in an error", "log", f.log.error.line if f.log and f.log.error else None)
    case.no(f.main is not None and f.main.state in ("T", "t"), 6, "it is stopped", "/proc/PID/stat")
    return case
