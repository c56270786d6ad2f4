"""Quiet because the run is in another phase: evaluation, checkpoint, compilation, start-up."""

from __future__ import annotations

import re

from eyas.why.facts import TRICKLE, Facts
from eyas.why.procs import grew, is_model_file
from eyas.why.verdicts.base import Case, Look, Rule, frames, phase, quiet, span_words, starved
from eyas.why.waits import is_storage


def evaluating(look: Look) -> Case | None:
    f = look.f
    line = phase(f, "evaluating", "generating")
    stack = next((x for x in frames(f) if re.search(r"\b(eval\w*|validat\w*|test_loop)\b", x, re.I)), None)
    if not f.alive or not (line or stack):
        return None
    case = quiet(look, "quiet.evaluating")
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
    grows = [o for o in files if (grew(o) or 0) > 0]
    writing = None
    for proc in f.trainers:
        for thread in proc.threads:
            wait = thread.ever("writeback", "write", "disk", "nfs", "fuse", "lustre")
            if (
                wait is not None
                and (wait.call or "").startswith(("write", "pwrite", "fsync", "fdatasync"))
                and wait.kind in ("file", None)
                and wait.path != f.log_path
            ):
                writing = wait
    rate = sum(p.io.get("wchar", 0.0) for p in f.trainers)
    if not (line or grows or writing):
        return None
    case = quiet(look, "quiet.checkpointing")
    case.yes(grows, 4, f"{grows[0].get('path') if grows else ''} grows", "outputs")
    case.yes(line, 3, "the log announced a checkpoint", "log", line)
    case.yes(
        writing,
        2.5,
        f"a thread is writing {writing.path if writing and writing.path else 'a file'}",
        "syscall",
        writing.raw if writing else None,
    )
    case.yes(rate > 16 * TRICKLE, 1.5, f"{rate / 1e6:.0f} MB/s are written", "/proc/PID/io")
    case.no(
        not grows and rate < TRICKLE and not (f.forward or f.moved("main-cpu")),
        3,
        "no checkpoint byte was written while we looked",
        "samples",
    )
    case.no(f.moved("log") and f.stepped and not line, 2, "steps go on", "log")
    return case


_COMPILE = re.compile(
    r"torch/_inductor|torch/_dynamo|triton/(compiler|backends|runtime)|make_cubin|make_llir|sympy|ptxas|torch/utils/cpp_extension|jax/.*(compile|lower)|xla",
    re.I,
)


def compiling(look: Look) -> Case | None:
    f = look.f
    if not f.alive:
        return None
    tools = f.of_kind("compiler")
    pool = [p for p in f.of_kind("compile_worker") if (p.cpu or 0) > 0.05]
    caches = [
        c
        for c in f.snap.get("caches") or []
        if c.get("name") in ("inductor", "triton", "cuda", "torch_extensions", "jax")
    ]
    grown = [c for c in caches if (grew(c) or 0) > 0]
    young = [c for c in caches if c not in grown and (c.get("age_s") if c.get("age_s") is not None else 1e9) < 30]
    line, stack = phase(f, "compiling"), next((x for x in frames(f) if _COMPILE.search(x)), None)
    main_busy = f.moved("main-cpu")
    jit = f.main is not None and "ptxjit" in f.main.libs and not f.stepped and main_busy and f.gpu.working is False
    if not (tools or pool or grown or line or stack or jit or (young and main_busy)):
        return None
    case = quiet(look, "quiet.compiling", need=not tools)
    tool = tools[0] if tools else None
    case.yes(
        tools,
        3.5,
        f"a compiler works for it: {tool.comm if tool else ''} (PID {tool.pid if tool else ''}, state"
        f" {tool.state if tool else ''})",
        "children",
    )
    case.yes(pool, 3.5, f"{len(pool)} compile worker(s) use the CPU", "children")
    case.yes(
        grown,
        3,
        f"the {grown[0].get('name') if grown else ''} cache grows",
        "caches",
        grown[0].get("path") if grown else None,
    )
    case.yes(
        young,
        1.5,
        f"the {young[0].get('name') if young else ''} cache was written {young[0].get('age_s', 0) if young else 0:.0f}"
        " s ago",
        "caches",
    )
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
    case = quiet(look, "quiet.initialising")
    line = phase(f, "initialising", "loading-model", "loading-data", "tokenising", "downloading")
    case.yes(line, 3, "the log announced a preparation that has not ended", "log", line)
    model = [r for p in f.trainers for r in p.readings if is_model_file(r.path)]
    case.yes(model, 2.5, f"it reads a model file: {model[0].path if model else ''}", "fd")
    hub = [c for c in f.snap.get("caches") or [] if str(c.get("name", "")).startswith("hf_") and (grew(c) or 0) > 0]
    case.yes(hub, 3, f"the {hub[0].get('name') if hub else ''} cache grows", "caches")
    loading = any(
        is_storage(p.critical.wait.family)
        and (
            "site-packages" in (p.critical.wait.path or "")
            or (p.critical.wait.path or "").endswith((".py", ".pyc", ".so"))
        )
        for p in f.trainers
    )
    case.yes(loading, 2, "it is importing modules", "syscall")
    case.yes((f.main.age or 1e9) < 90, 2, f"it started {span_words(f.main.age)} ago", "/proc/PID/stat")
    case.yes(f.log is not None and not f.log.progress_lines, 0.5, "no step is in the log yet", "log")
    case.no((f.main.age or 0) > 1800 and not line, 1.5, f"it started {span_words(f.main.age)} ago", "/proc/PID/stat")
    case.no(f.gpu.working, 2, "the GPU computes: " + f.gpu.words, "nvml")
    begun = f.log is not None and f.log.phase is not None and f.log.phase.id == "training"
    case.no(
        begun and not line,
        1.5,
        "the log says that training has begun",
        "log",
        f.log.phase.line if begun and f.log and f.log.phase else None,
    )
    at_work = f.data.readings or any(w.critical.ready > 0.5 for w in f.live_workers)
    case.no(
        starved(f) and f.live_workers and at_work and not model and not line and f.gpu.mine,
        2.5,
        "loader workers are already at work: the first batch is being made",
        "children",
    )
    return case


PHASE_RULES: list[Rule] = [evaluating, checkpointing, compiling, initialising]
