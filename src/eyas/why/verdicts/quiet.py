"""Healthy, or quiet for a good reason: something that only real work moves has moved between the looks."""

from __future__ import annotations

import re

from eyas.why.facts import TRICKLE, Facts
from eyas.why.procs import is_model_file
from eyas.why.verdicts.base import Case, Look, Rule, frames, log_kinds, phase, span_words, starved
from eyas.why.waits import is_storage

_BARS_ON_STDERR = {"tqdm", "hf-trainer-bar", "logging", "rich", "deepspeed", "speculators"}
_BLOCK = 8192


def _moving(f: Facts) -> float:
    """How sure it is that work goes on: forward signals count 1 each, a busy main thread or GPU a little less."""
    level = float(len(f.forward))
    if f.moved("main-cpu"):
        level += 0.8
    gpu = f.signal("gpu")
    if gpu is not None and gpu.moved and not gpu.forward and not f.gpu.spinning:
        level += 0.8
    return level


def _start(look: Look, verdict: str, *, need: bool = True) -> Case:
    """The common ground of everything quiet: alive, no failure at the end, and movement."""
    f = look.f
    case = Case(verdict)
    level = _moving(f)
    names = [s.text for s in f.signals if s.moved and s.name != "wake-ups"]
    case.yes(level > 0, min(3.0, 1.5 + 0.75 * level), "work moves: " + "; ".join(names[:3]), "samples")
    case.no(need and level == 0 and len(f.samples) > 1, 3, "nothing moved between the looks", "samples")
    case.no(log_kinds(f), 2, "the log ends in an error", "log", f.log.error.line if f.log and f.log.error else None)
    case.no(f.main is not None and f.main.state in ("T", "t"), 6, "it is stopped", "/proc/PID/stat")
    return case


def training(look: Look) -> Case | None:
    f = look.f
    if not f.alive:
        return None
    case = _start(look, "healthy.training")
    case.yes(f.moved("log") and not f.heartbeat and f.stepped, 3, "the log reports steps and grows", "log", f.log.last_progress if f.log else None)
    due = f.fresh and f.stepped and not f.heartbeat and not f.moved("log")
    case.yes(due and f.idle is not None, 1.5, f"the last line is {f.idle or 0:.0f} s old", "log")
    case.yes(f.gpu.working, 1, f.gpu.words, "nvml")
    idle_workers = f.live_workers and all(w.critical.share("poll", "epoll", "pipe-read", "futex") >= 0.6 for w in f.live_workers)
    case.yes(idle_workers and (f.moved("main-cpu") or f.gpu.working), 1.5, "the workers wait for the trainer: data is not the limit", "wchan")
    case.no(not f.fresh and f.log is not None, 3, f"the log has been silent for {span_words(f.idle)}", "log")
    case.no(f.log is not None and not f.stepped and f.gpu.working is not True, 1.5, "no step is in the log yet", "log")
    case.no(phase(f, "evaluating", "checkpointing", "compiling", "initialising", "loading-model", "tokenising", "downloading"), 1.5,
            "the log announced another phase", "log", f.log.phase.line if f.log and f.log.phase else None)  # fmt: skip
    case.no(f.heartbeat, 5, "the log only repeats one line that is no step", "log", f.log.last_line if f.log else None)
    return case


def interval(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.log is None or f.fresh:
        return None
    case = _start(look, "quiet.interval")
    due = f.overdue
    usual = span_words(f.log.line_interval_s)
    case.yes(due is not None and due < 1.6, 3, f"the next line is not due: one comes every {usual}, the last is {span_words(f.idle)} old", "log")
    case.yes(due is not None and 1.6 <= due < 3, 0.5, f"the next line is a little late (usually every {usual})", "log")
    case.yes(due is None and f.gpu.working, 1, "no line interval is known yet, and the GPU computes", "log")
    case.no(due is not None and due >= 3, min(3.0, 1 + (due or 0) / 6), f"the log is {due or 0:.0f} intervals late", "log")
    case.no(f.log.phase is not None and not f.log.phase.closed and f.log.phase.id != "training", 1, "the log announced another phase", "log")
    return case


def buffered(look: Look) -> Case | None:
    f = look.f
    main, log = f.main, f.log
    if not f.alive or main is None or f.fresh or f.log_entry.get("how") in ("given", "run_dir", "slurm") and not main.stdio.get(1):
        return None
    kind = main.stdio.get(1, {}).get("kind")
    python = main.raw.get("python") or {}
    if kind not in ("file", "pipe") or python.get("unbuffered_flag") or python.get("unbuffered_env"):
        return None
    if not python and "python" not in main.cmd and "python" not in main.comm:
        return None
    case = _start(look, "quiet.buffered")
    known = python.get("unbuffered_env") is False or main.raw.get("environ") is not None
    case.yes(True, 1.5 if known else 0.5, f"standard output is a {kind} and Python runs without -u" + (" or PYTHONUNBUFFERED" if known else ""), "cmdline, environ")
    size = int(f.log_entry.get("size") or (log.size if log else 0) or 0)
    old = (main.age or 0) > 45
    case.yes(size == 0 and old and f.log_entry, 2.5, f"its log is empty after {span_words(main.age)}", "log")
    edge = size % _BLOCK
    at_edge = size > 4000 and (edge > _BLOCK - 160 or edge == 0) and (log is None or log.ends_with_newline)
    case.yes(at_edge, 2.5, f"the log stands at {size} bytes, just at a buffer's edge", "log")
    case.yes(log is not None and "block-buffered-hint" in log.notes, 1, "the log comes in blocks", "log")
    wchar = main.io.get("wchar")
    case.yes(wchar is not None and wchar < 1 and f.moved("main-cpu", "data", "gpu"), 0.5, "it writes nothing while it works", "/proc/PID/io")
    case.yes(f.overdue is not None and f.overdue >= 3 and _moving(f) >= 1, 1.5, "lines are overdue while work goes on", "log")
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
    case = _start(look, "quiet.elsewhere")
    entry = f.log_entry
    gone = entry.get("deleted") or entry.get("rotated")
    case.yes(gone, 4, "the file it writes to was " + ("deleted" if entry.get("deleted") else "rotated away"), "fd 1", entry.get("path"))
    null = all(main.stdio.get(n, {}).get("kind") == "null" for n in (1, 2)) or entry.get("kind") == "null"
    case.yes(null, 4, "its output goes to /dev/null", "fd 1")
    piped = entry.get("kind") in ("tty", "socket", "pipe", "journal") and not entry.get("size")
    case.yes(piped, 2, f"its output goes to a {entry.get('kind')} that cannot be read from here", "fd 1")
    rich = "rich" in main.libs and main.stdio.get(1, {}).get("kind") in ("file", "pipe") and (log is None or not log.progress_lines)
    case.yes(rich, 2.5, "its progress bar is drawn by rich, which draws nothing on a file until the end", "maps")
    growing = [o for o in f.snap.get("outputs") or [] if sum(int(g) for g in o.get("growth") or [] if g) > 0 and o.get("kind") in ("tfevents", "wandb", "metrics")]
    recent = [o for o in f.snap.get("outputs") or [] if o.get("kind") in ("tfevents", "wandb", "metrics") and (o.get("age_s") or 1e9) < min(300.0, (f.idle or 300.0) / 2)]
    tracked = (growing or recent)[:1]
    case.yes(growing, 3, f"{tracked[0]['path'] if tracked else ''} grows instead", "outputs")
    case.yes(recent and not growing, 2, f"{tracked[0]['path'] if tracked else ''} was written {tracked[0].get('age_s', 0) if tracked else 0:.0f} s ago", "outputs")
    case.yes(log is not None and log.trackers and not log.progress_lines, 1, "the log names a tracker: " + ", ".join(log.trackers if log else ()), "log")
    other = log is not None and log.rank is not None and log.rank != 0
    case.yes(other, 1.5, f"this log belongs to rank {log.rank if log else ''}; others may log the steps", "log")
    if not (gone or null or piped or rich or tracked or other):
        return None
    case.no(f.fresh and f.stepped, 4, "the log is fresh", "log")
    case.no(f.overdue is not None and f.overdue < 1.6, 2, "the next line is not due yet", "log")
    return case


def evaluating(look: Look) -> Case | None:
    f = look.f
    line = phase(f, "evaluating", "generating")
    stack = next((x for x in frames(f) if re.search(r"\b(eval\w*|validat\w*|test_loop)\b", x, re.I)), None)
    if not f.alive or not (line or stack):
        return None
    case = _start(look, "quiet.evaluating")
    case.yes(line, 4, "the log announced an evaluation that has not ended", "log", line)
    case.yes(stack, 3, "the main thread is in evaluation code", "py-spy", stack)
    open_for = f.overdue or 0
    case.no(open_for > 100 and not f.forward, 1, "it has lasted very long", "log")
    return case


def checkpointing(look: Look) -> Case | None:
    f = look.f
    if not f.alive:
        return None
    line = phase(f, "checkpointing")
    files = [o for o in f.snap.get("outputs") or [] if o.get("kind") == "checkpoint"]
    grows = [o for o in files if sum(int(g) for g in o.get("growth") or [] if g) > 0]
    writing = None
    for proc in f.trainers:
        for thread in proc.threads:
            wait = thread.ever("writeback", "write", "disk", "nfs", "fuse", "lustre")
            if wait is not None and (wait.call or "").startswith(("write", "pwrite", "fsync", "fdatasync")) and wait.kind in ("file", None) and wait.path != f.log_path:
                writing = wait
    rate = sum(p.io.get("wchar", 0.0) for p in f.trainers)
    if not (line or grows or writing):
        return None
    case = _start(look, "quiet.checkpointing")
    case.yes(grows, 4, f"{grows[0]['path'] if grows else ''} grows", "outputs")
    case.yes(line, 3, "the log announced a checkpoint", "log", line)
    case.yes(writing, 2.5, f"a thread is writing {writing.path if writing and writing.path else 'a file'}", "syscall", writing.raw if writing else None)
    case.yes(rate > 16 * TRICKLE, 1.5, f"{rate / 1e6:.0f} MB/s are written", "/proc/PID/io")
    case.no(not grows and rate < TRICKLE and not (f.forward or f.moved("main-cpu")), 3, "no checkpoint byte was written while we looked", "samples")
    case.no(f.moved("log") and f.stepped and not line, 2, "steps go on", "log")
    return case


_COMPILE = re.compile(r"torch/_inductor|torch/_dynamo|triton/(compiler|backends|runtime)|make_cubin|make_llir|sympy|ptxas|torch/utils/cpp_extension|jax/.*(compile|lower)|xla", re.I)


def compiling(look: Look) -> Case | None:
    f = look.f
    if not f.alive:
        return None
    tools = f.of_kind("compiler")
    pool = [p for p in f.of_kind("compile_worker") if (p.cpu or 0) > 0.05]
    caches = [c for c in f.snap.get("caches") or [] if c.get("name") in ("inductor", "triton", "cuda", "torch_extensions", "jax")]
    grown = [c for c in caches if sum(int(g) for g in c.get("growth") or [] if g) > 0]
    young = [c for c in caches if c not in grown and (c.get("age_s") if c.get("age_s") is not None else 1e9) < 30]
    line, stack = phase(f, "compiling"), next((x for x in frames(f) if _COMPILE.search(x)), None)
    main_busy = f.moved("main-cpu")
    jit = f.main is not None and "ptxjit" in f.main.libs and not f.stepped and main_busy and f.gpu.working is False
    if not (tools or pool or grown or line or stack or jit or (young and main_busy)):
        return None
    case = _start(look, "quiet.compiling", need=not tools)
    tool = tools[0] if tools else None
    case.yes(tools, 3.5, f"a compiler works for it: {tool.comm if tool else ''} (PID {tool.pid if tool else ''}, state {tool.state if tool else ''})", "children")
    case.yes(pool, 3.5, f"{len(pool)} compile worker(s) use the CPU", "children")
    case.yes(grown, 3, f"the {grown[0]['name'] if grown else ''} cache grows", "caches", grown[0].get("path") if grown else None)
    case.yes(young, 1.5, f"the {young[0]['name'] if young else ''} cache was written {young[0].get('age_s', 0) if young else 0:.0f} s ago", "caches")
    case.yes(line, 2.5, "the log announced a compilation", "log", line)
    case.yes(stack, 4, "the main thread is in compiler code", "py-spy", stack)
    case.yes(jit, 2.5, "the CUDA driver's PTX compiler is loaded, the main thread computes, and the GPU idles", "maps")
    case.yes(not f.stepped and f.log is not None, 0.5, "no step is in the log yet", "log")
    limit = f.main is not None and memory_runs_away(f)
    case.no(limit, 3, "its memory grows without end", "/proc/PID/stat")
    case.no(f.gpu.working, 2, "the GPU computes: " + f.gpu.words, "nvml")
    case.no(f.moved("log") and f.stepped and f.fresh and not line, 2.5, "steps go on in the log", "log")
    return case


def memory_runs_away(f: Facts) -> bool:
    """RSS grows so fast that it will hit the limit within half an hour."""
    if f.main is None or not f.main.rss_slope or f.main.rss_slope < 5e6:
        return False
    room = f.data.memory
    return room is not None and room / f.main.rss_slope < 1800


def initialising(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.main is None or f.stepped:
        return None
    case = _start(look, "quiet.initialising")
    line = phase(f, "initialising", "loading-model", "loading-data", "tokenising", "downloading")
    case.yes(line, 3, "the log announced a preparation that has not ended", "log", line)
    model = [r for p in f.trainers for r in p.readings if is_model_file(r.path)]
    case.yes(model, 2.5, f"it reads a model file: {model[0].path if model else ''}", "fd")
    hub = [c for c in f.snap.get("caches") or [] if str(c.get("name", "")).startswith("hf_") and sum(int(g) for g in c.get("growth") or [] if g) > 0]
    case.yes(hub, 3, f"the {hub[0]['name'] if hub else ''} cache grows", "caches")
    loading = any(is_storage(p.critical.wait.family) and ("site-packages" in (p.critical.wait.path or "") or (p.critical.wait.path or "").endswith((".py", ".pyc", ".so"))) for p in f.trainers)
    case.yes(loading, 2, "it is importing modules", "syscall")
    case.yes((f.main.age or 1e9) < 90, 2, f"it started {span_words(f.main.age)} ago", "/proc/PID/stat")
    case.yes(f.log is not None and not f.log.progress_lines, 0.5, "no step is in the log yet", "log")
    case.no((f.main.age or 0) > 1800 and not line, 1.5, f"it started {span_words(f.main.age)} ago", "/proc/PID/stat")
    case.no(f.gpu.working, 2, "the GPU computes: " + f.gpu.words, "nvml")
    case.no(starved(f) and f.live_workers and f.data.readings and not model and not line, 2.5, "loader workers are already at work: the first batch is being made", "children")
    return case


def long_step(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.fresh:
        return None
    case = _start(look, "quiet.long-step")
    case.yes(f.gpu.working, 2.5, "the GPU computes: " + f.gpu.words, "nvml")
    no_gpu = not f.gpu.mine and f.moved("main-cpu") and not f.data.moves
    case.yes(no_gpu, 1, "the main process computes on the CPU", "/proc/PID/stat")
    if not (f.gpu.working or no_gpu):
        return None
    case.yes(f.overdue is not None and 1.6 <= f.overdue < 20, 0.75, "the line is late, but the GPU is at work", "log")
    case.no(f.overdue is not None and f.overdue < 1.6, 2, "the next line is not due yet", "log")
    case.no(f.overdue is not None and f.overdue >= 20, 2, f"{f.overdue or 0:.0f} intervals late is too much for one step", "log")
    return case


RULES: list[Rule] = [training, interval, buffered, elsewhere, evaluating, checkpointing, compiling, initialising, long_step]
