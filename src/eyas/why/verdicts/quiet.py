"""Healthy, or quiet for a good reason: something that only real work moves has moved between the looks."""

from __future__ import annotations

from eyas.why.facts import Facts
from eyas.why.pipes import unread
from eyas.why.procs import Thread, grew
from eyas.why.verdicts.base import Case, Look, Rule, may_compute, movement, phase, quiet, span_words
from eyas.why.verdicts.phases import PHASE_RULES

_BARS_ON_STDERR = {"tqdm", "hf-trainer-bar", "logging", "rich", "deepspeed", "speculators"}
_BLOCK = 8192


def training(look: Look) -> Case | None:
    f = look.f
    if not f.alive:
        return None
    early = f.stepped and f.overdue is not None and f.overdue < 1.5
    case = quiet(look, "healthy.training", need=not early)
    case.no(early and not movement(f), 0.5, "nothing moved between the looks", "samples")
    case.yes(early and not movement(f), 1.5, "the next line is not due yet", "log")
    case.yes(
        f.moved("log") and not f.heartbeat and f.stepped,
        3,
        "the log reports steps and grows",
        "log",
        f.log.last_progress if f.log else None,
    )
    due = f.fresh and f.stepped and not f.heartbeat and not f.moved("log")
    case.yes(due and f.idle is not None, 1.5, f"the last line is {f.idle or 0:.0f} s old", "log")
    case.yes(f.gpu.working, 1, f.gpu.words, "nvml")
    idle_workers = f.live_workers and all(
        w.critical.share("poll", "epoll", "pipe-read", "futex") >= 0.6 for w in f.live_workers
    )
    case.yes(
        idle_workers and (f.moved("main-cpu") or f.gpu.working),
        1.5,
        "the workers wait for the trainer: data is not the limit",
        "wchan",
    )
    case.no(not f.fresh and f.log is not None, 3, f"the log has been silent for {span_words(f.idle)}", "log")
    case.no(f.log is not None and not f.stepped and f.gpu.working is not True, 1.5, "no step is in the log yet", "log")
    case.no(
        phase(
            f, "evaluating", "checkpointing", "compiling", "initialising", "loading-model", "tokenising", "downloading"
        ),
        1.5,
        "the log announced another phase",
        "log",
        f.log.phase.line if f.log and f.log.phase else None,
    )
    gone = f.log_entry.get("deleted") or f.log_entry.get("rotated")
    case.no(
        gone, 3, "but into a file that was deleted or rotated away: nobody sees it", "fd 1", f.log_entry.get("path")
    )
    case.no(_gpu_idles(f), 2, f"it holds a GPU that has little to do: {f.gpu.words}", "nvml")
    slowed = [g for g in f.gpu.mine if g.slowed]
    case.no(slowed, 2, f"GPU {slowed[0].index if slowed else ''} runs at lower clocks", "nvml")
    case.no(f.heartbeat, 5, "the log only repeats one line that is no step", "log", f.log.last_line if f.log else None)
    return case


def _gpu_idles(f: Facts) -> bool:
    """Its own GPU was at little work at every look."""
    return f.gpu.used and not f.gpu.working and all((g.util if g.util is not None else 100) < 30 for g in f.gpu.mine)


def interval(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.log is None or f.fresh:
        return None
    due = f.overdue
    early = due is not None and due < 1.6
    case = quiet(look, "quiet.interval", need=not early)
    case.no(early and not movement(f), 0.5, "nothing moved between the looks", "samples")
    usual = span_words(f.interval)
    case.yes(
        due is not None and due < 1.6,
        3,
        f"the next line is not due: one comes every {usual}, the last is {span_words(f.idle)} old",
        "log",
    )
    case.yes(due is not None and 1.6 <= due < 3, 0.5, f"the next line is a little late (usually every {usual})", "log")
    computes = f.gpu.working or (not f.gpu.mine and f.moved("main-cpu"))
    helper = f.busy_helper if f.moved("helper-cpu") else None
    case.yes(helper, 1.5, f"a program it started works: {helper.label if helper else ''}", "children, stat")
    case.yes(due is None and computes, 1, "no line interval is known, and it computes", "log")
    case.no(
        due is not None and due >= 3, min(3.0, 1 + (due or 0) / 6), f"the log is {due or 0:.0f} intervals late", "log"
    )
    case.no(
        f.log.phase is not None and not f.log.phase.closed and f.log.phase.id != "training",
        1,
        "the log announced another phase",
        "log",
    )
    return case


def buffered(look: Look) -> Case | None:
    f = look.f
    main, log = f.main, f.log
    if (
        not f.alive
        or main is None
        or f.fresh
        or (f.log_entry.get("how") in ("given", "run_dir", "slurm") and not main.stdio.get(1))
    ):
        return None
    kind = main.stdio.get(1, {}).get("kind")
    python = main.raw.get("python") or {}
    if kind not in ("file", "pipe") or python.get("unbuffered_flag") or python.get("unbuffered_env"):
        return None
    if not python and "python" not in main.cmd and "python" not in main.comm:
        return None
    case = quiet(look, "quiet.buffered")
    known = python.get("unbuffered_env") is False or main.raw.get("environ") is not None
    case.yes(
        True,
        1.5 if known else 0.5,
        f"standard output is a {kind} and Python runs without -u" + (" or PYTHONUNBUFFERED" if known else ""),
        "cmdline, environ",
    )
    size = int(f.log_entry.get("size") or (log.size if log else 0) or 0)
    old = (main.age or 0) > 45
    case.yes(size == 0 and old and f.log_entry, 2.5, f"its log is empty after {span_words(main.age)}", "log")
    edge = size % _BLOCK
    at_edge = size > 4000 and (edge > _BLOCK - 160 or edge == 0) and (log is None or log.ends_with_newline)
    case.yes(at_edge, 2.5, f"the log stands at {size} bytes, just at a buffer's edge", "log")
    case.yes(log is not None and "block-buffered-hint" in log.notes, 1, "the log comes in blocks", "log")
    wchar = main.io.get("wchar")
    case.yes(
        wchar is not None and wchar < 1 and f.moved("main-cpu", "data", "gpu"),
        0.5,
        "it writes nothing while it works",
        "/proc/PID/io",
    )
    case.yes(
        f.overdue is not None and f.overdue >= 3 and movement(f) >= 1,
        1.5,
        "lines are overdue while work goes on",
        "log",
    )
    stderr = log is not None and (log.format in _BARS_ON_STDERR or log.bar_lines > 0)
    case.no(stderr, 3, "its lines come over stderr, which is not buffered", "log", log.format if log else None)
    case.no(f.overdue is not None and f.overdue < 1.6, 2.5, "the next line is not due yet", "log")
    case.no(size and not at_edge and f.overdue is None, 1, "the log does not end at a buffer's edge", "log")
    return case


def elsewhere(look: Look) -> Case | None:
    f = look.f
    main, log = f.main, f.log
    if not f.alive or main is None:
        return None
    case = quiet(look, "quiet.elsewhere")
    entry = f.log_entry
    gone = entry.get("deleted") or entry.get("rotated")
    case.yes(
        gone,
        4,
        "the file it writes to was " + ("deleted" if entry.get("deleted") else "rotated away"),
        "fd 1",
        entry.get("path"),
    )
    null = all(main.stdio.get(n, {}).get("kind") == "null" for n in (1, 2)) or entry.get("kind") == "null"
    case.yes(null, 4, "its output goes to /dev/null", "fd 1")
    lost = unread(f)
    case.yes(lost, 4, "its standard output is a pipe, and no reader of it is left", "fd 1")
    piped = entry.get("kind") in ("tty", "socket", "pipe", "journal") and not entry.get("size")
    case.yes(piped, 2, f"its output goes to a {entry.get('kind')} that cannot be read from here", "fd 1")
    rich = (
        "rich" in main.libs
        and main.stdio.get(1, {}).get("kind") in ("file", "pipe")
        and (log is None or not log.progress_lines)
    )
    case.yes(rich, 2.5, "its progress bar is drawn by rich, which draws nothing on a file until the end", "maps")
    drawn = (
        not rich and (log is None or not log.progress_lines) and main.stdio.get(1, {}).get("kind") in ("file", "pipe")
    )
    drawn = drawn and any(_redraws(t) for t in main.threads)
    case.yes(drawn, 2, "a thread of it wakes by the clock many times a second, as one that redraws a bar", "schedstat")
    growing = [
        o
        for o in f.snap.get("outputs") or []
        if (grew(o) or 0) > 0 and o.get("kind") in ("tfevents", "wandb", "metrics")
    ]
    recent = [
        o
        for o in f.snap.get("outputs") or []
        if o.get("kind") in ("tfevents", "wandb", "metrics")
        and (o.get("age_s") or 1e9) < min(300.0, (f.idle or 300.0) / 2)
    ]
    tracked = (growing or recent)[:1]
    case.yes(growing, 3, f"{tracked[0].get('path') if tracked else ''} grows instead", "outputs")
    case.yes(
        recent and not growing,
        2,
        f"{tracked[0].get('path') if tracked else ''} was written"
        f" {tracked[0].get('age_s', 0) if tracked else 0:.0f} s ago",
        "outputs",
    )
    case.yes(
        log is not None and log.trackers and not log.progress_lines,
        1,
        "the log names a tracker: " + ", ".join(log.trackers if log else ()),
        "log",
    )
    other = log is not None and log.rank is not None and log.rank != 0
    case.yes(other, 1.5, f"this log belongs to rank {log.rank if log else ''}; others may log the steps", "log")
    if not (gone or null or lost or piped or rich or drawn or tracked or other):
        return None
    case.no(f.fresh and f.stepped and not gone, 4, "the log is fresh", "log")
    case.no(f.overdue is not None and f.overdue < 1.6 and not gone, 2, "the next line is not due yet", "log")
    return case


def _redraws(thread: Thread) -> bool:
    """As rich's refresh thread does: timed waits, some ten to twenty wake-ups a second, next to no CPU."""
    timed = thread.always("futex") and all(w.timed for w in thread.waits)
    return thread.role == "other" and timed and 3 <= (thread.wakeups or 0) <= 40 and (thread.cpu or 0) < 0.05


def long_step(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.fresh:
        return None
    no_gpu = not f.gpu.mine and f.moved("main-cpu") and not f.data.moves
    helper = f.busy_helper if f.moved("helper-cpu") else None
    child = f.newborn[0] if f.newborn and f.moved("worker-cpu") else None
    if f.overdue is None or not (f.gpu.working or no_gpu or helper or child):
        return None  # without a known pace nothing says that it is one step
    case = quiet(look, "quiet.long-step")
    case.yes(f.gpu.working, 2.5, "the GPU computes: " + f.gpu.words, "nvml")
    case.yes(no_gpu, 1, "the main process computes on the CPU", "/proc/PID/stat")
    case.yes(helper, 2.5, f"a program it started works: {helper.label if helper else ''}", "children, stat")
    case.yes(
        child, 2, f"a process it started after its last line computes: {child.label if child else ''}", "children, stat"
    )
    case.yes(1.6 <= f.overdue < 20, 0.75, f"the line is {f.overdue:.1f} intervals late, and it computes", "log")
    case.no(f.overdue < 1.6, 2, "the next line is not due yet", "log")
    case.yes(no_gpu and may_compute(f), 0.5, "its numerical libraries may be at work", "maps")
    asks = f.main is not None and ((f.main.minflt or 0) >= 1 or f.main.io.get("syscr", 0.0) >= 1)
    case.yes(
        no_gpu and asks, 0.5, "it takes new memory or reads as it goes: it does not run in a small circle", "stat, io"
    )
    case.no(
        f.overdue >= 20 and not (asks or helper or child or may_compute(f)),
        2,
        f"{f.overdue:.0f} intervals late is too much for one step",
        "log",
    )
    return case


RULES: list[Rule] = [training, interval, buffered, elsewhere, long_step, *PHASE_RULES]
