"""The run is over: how it ended. Also a run that is over in all but name (it lingers)."""

from __future__ import annotations

import signal

from eyas.why.facts import Facts
from eyas.why.ras import read_ras
from eyas.why.verdicts.base import Case, Look, Rule, log_kinds, log_line, span_words, trainers_wait, tries
from eyas.why.verdicts.traces import exit_status, oom_signs, scheduler

_UNWINDS = ("exception", "gpu-oom", "gpu-error", "interrupted", "time-limit", "preempted")
_CRASHES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}


def _over(look: Look) -> bool:
    """The process is gone, or the log's last word is a failure and nothing moves any more."""
    f = look.f
    if not f.alive:
        return True
    return bool(f.log and f.log.error and f.log.error.final and f.still and not f.moved("main-cpu"))


def _alive_note(case: Case, f: Facts) -> Case:
    """A failed run whose process still exists is a weaker case: it may be handled, or hang for another reason."""
    if f.alive:
        case.no(f.forward, 8, "work still moves: " + "; ".join(s.text for s in f.forward[:2]), "samples")
        case.no(True, 1.5, "the process still exists", "/proc/PID/stat")
        waits = trainers_wait(f) and (f.idle or 0) >= 30
        case.yes(waits, 1.5, "its main thread waits, as after an exception with threads left", "wchan")
    return case


def finished_ok(look: Look) -> Case | None:
    f = look.f
    if f.alive:
        return None
    case, log = Case("finished.ok"), f.log
    code, sig = exit_status(f)
    case.yes(code == 0, 6, "it exited with code 0", "wait status")
    case.yes(scheduler(f).startswith("COMPLETED"), 6, "Slurm says COMPLETED", "sacct")
    if log is not None:
        case.yes(log.ended, 5, "the log ends with an end-of-training line", "log", log.ended_line)
        case.yes(
            log.at_last_step,
            4,
            f"the log's last step is the last one ({log.step} of {log.total})",
            "log",
            log.last_progress,
        )
        short = log.step is not None and log.total is not None and log.step < log.total and not log.ended
        case.no(short, 4, f"the log stops at step {log.step} of {log.total}", "log", log.last_progress)
        case.no(
            log_kinds(f) and not log.ended,
            5,
            "the log's last word is a failure",
            "log",
            log.error.line if log.error else None,
        )
    saved = [o for o in f.snap.get("outputs") or [] if o.get("kind") == "checkpoint" and not o.get("tmp")]
    case.yes(
        saved and (log is None or log.ended or log.at_last_step),
        1,
        "a complete checkpoint was written",
        "outputs",
        saved[0].get("path") if saved else None,
    )
    case.no(code, 8, f"it exited with code {code}", "wait status")
    case.no(sig, 8, f"it was ended by signal {sig}", "wait status")
    case.no(oom_signs(f) and code != 0 and not (log and log.ended), 3, "there was an out-of-memory kill", "kernel")
    return case


def finished_lingering(look: Look) -> Case | None:
    f = look.f
    log = f.log
    if (
        not f.alive
        or log is None
        or not (log.ended or log.at_last_step or (log.phase.id if log.phase else "") == "uploading")
    ):
        return None
    case = Case("finished.lingering")
    case.yes(log.ended, 4, "the log says that training has ended", "log", log.ended_line)
    case.yes(log.at_last_step, 3, f"the last step is done ({log.step} of {log.total})", "log", log.last_progress)
    uploading = log.phase is not None and log.phase.id == "uploading"
    case.yes(uploading, 2, "it was uploading when it fell silent", "log", log.phase.line if log.phase else None)
    case.yes(f.gpu.idle, 1, f.gpu.words, "nvml")
    case.yes(not f.moved("data", "main-cpu", "worker-cpu"), 1, "no data is read and no CPU is used", "samples")
    case.yes(f.of_kind("tracker"), 0.5, "a tracker process is still there", "children")
    case.no(f.gpu.working, 4, "the GPU computes: " + f.gpu.words, "nvml")
    case.no(f.moved("data", "worker-cpu") and not uploading, 2, "data is still read", "samples")
    case.no(f.moved("output"), 2, "an output still grows (a final checkpoint?)", "outputs")
    return case


def exception(look: Look) -> Case | None:
    f = look.f
    if not _over(look):
        return None
    case, log = Case("failed.exception"), f.log
    code, sig = exit_status(f)
    error = log.error if log else None
    found = error is not None and error.kind in (
        "exception",
        "child-exception",
        "disk-full",
        "worker-died",
        "peer-lost",
        "rendezvous",
        "collective-timeout",
    )
    case.yes(found and error and error.final, 5, "the log ends in an error", "log", error.line if error else None)
    case.yes(
        found and error and not error.final,
        1,
        "the log has an error, with progress after it",
        "log",
        error.line if error else None,
    )
    case.yes(
        code is not None and code not in (0, 137, 143) and not sig, 4.5, f"it exited with code {code}", "wait status"
    )
    case.no(code == 0, 8, "it exited with code 0", "wait status")
    case.no(sig, 4, f"it was ended by signal {sig}", "wait status")
    case.no(log and log.ended, 4, "the log says that training ended well", "log", log.ended_line if log else None)
    said = log.last_line.strip() if log and log.last_line else ""
    told = f"it exited with code {code}" + (f"; its last line is: {said}" if said else "")
    case.values["error"] = error.line if error else told if code else None
    case.no(f.alive and len(tries(f)) >= 2, 4, "the log says that it tries again", "log")
    own = bool(
        f.alive and error and error.final and error.kind == "exception" and f.main and f.main.main.always("futex")
    )
    case.yes(own, 2.5, "its main thread has ended and waits for threads that do not", "wchan")
    return _alive_note(case, f) if case.support else None


def gpu_error(look: Look) -> Case | None:
    f = look.f
    line, xid = log_line(f, "gpu-error"), f.kernel_lines("xid", "nvrm")
    if not (line or xid) or not _over(look):
        return None
    case = Case("failed.gpu-error", values={"error": line or (xid[0].get("text") if xid else None)})
    case.yes(line, 6, "the log ends in a GPU error", "log", line)
    case.yes(xid, 3, "the kernel log has a GPU fault", "kernel log", xid[0].get("text") if xid else None)
    case.yes(exit_status(f)[1] == 6, 1, "ranks aborted (SIGABRT), as NCCL does after a GPU error", "wait status")
    return _alive_note(case, f)


def gpu_oom(look: Look) -> Case | None:
    f = look.f
    line = log_line(f, "gpu-oom")
    if not line or not _over(look):
        return None
    case = Case("failed.gpu-oom", values={"error": line}).yes(
        "gpu-oom" in log_kinds(f), 6.5, "the log ends in a GPU out-of-memory error", "log", line
    )
    case.no(f.log and f.log.ended, 4, "the log says that training ended well", "log")
    return _alive_note(case, f)


def oom_killed(look: Look) -> Case | None:
    f = look.f
    signs = oom_signs(f)
    code, sig = exit_status(f)
    killed = sig == 9 or code == 137 or "killed" in log_kinds(f)
    worker = log_line(f, "worker-died") or ""
    victim = (not f.alive) or f.children_died or any(w.zombie for w in f.workers) or "illed" in worker
    if not (signs or killed) or not victim:
        return None
    case = Case("failed.oom-killed")
    for weight, text, source in signs:
        case.yes(True, weight, text, source)
    case.yes(killed, 3, "it was ended by SIGKILL", "wait status", log_line(f, "killed"))
    case.yes("illed" in worker, 2, "a worker was killed", "log", worker)
    case.no(code is not None and code not in (137, 1), 6, f"it exited with code {code}", "wait status")
    case.no(sig not in (None, 9), 6, f"it was ended by signal {sig}, not by SIGKILL", "wait status")
    own_words = f.log is not None and f.log.error is not None and f.log.error.kind in _UNWINDS and not killed
    case.no(own_words, 4, "it could still say what went wrong: SIGKILL leaves no time for that", "log")
    case.no(killed and not signs, 1.5, "no trace of an out-of-memory kill was seen; anybody may send SIGKILL", "kernel")
    case.no(f.log and f.log.ended and not f.alive, 4, "the log says that training ended well", "log")
    case.no(f.alive and f.forward, 8, "work still moves", "samples")
    return case


def by_signal(look: Look) -> Case | None:
    f = look.f
    if f.alive:
        return None
    code, sig = exit_status(f)
    if sig is None and code in (129, 130, 137, 143):
        sig = code - 128
    kinds = log_kinds(f)
    line = log_line(f, "signal", "interrupted", "cancelled", "killed")
    if (sig is None or sig in _CRASHES) and not line and not scheduler(f).startswith("CANCELLED"):
        return None
    try:
        name = signal.Signals(sig).name if sig else "a signal"
    except ValueError:
        name = f"signal {sig}"
    case = Case("failed.signal", values={"signal": name, "error": line})
    case.yes(sig is not None and sig not in _CRASHES, 5, f"it was ended by {name}", "wait status")
    case.yes(line and kinds & {"signal", "interrupted", "cancelled", "killed"}, 4, "the log says so", "log", line)
    case.yes(scheduler(f).startswith("CANCELLED"), 6, "Slurm says CANCELLED", "sacct")
    case.no(sig == 9 and oom_signs(f), 4, "an out-of-memory kill explains the SIGKILL", "kernel")
    case.no(kinds & {"time-limit", "preempted"}, 3, "the scheduler ended it", "log")
    case.no(f.log and f.log.ended, 3, "the log says that training ended well before", "log")
    case.no(code == 0, 6, "it exited with code 0", "wait status")
    return case


def preempted(look: Look) -> Case | None:
    f = look.f
    line = log_line(f, "time-limit", "preempted")
    state = scheduler(f)
    told = next((s for s in ("TIMEOUT", "PREEMPTED", "DEADLINE") if state.startswith(s)), None)
    if not (line or told) or not _over(look):
        return None
    case = Case("failed.preempted", values={"error": line or f"Slurm: {told}"})
    case.yes(line, 6.5, "the log says that the scheduler ended it", "log", line)
    case.yes(told, 7, f"Slurm says {told}", "sacct")
    return _alive_note(case, f)


def native_crash(look: Look) -> Case | None:
    f = look.f
    if not _over(look):
        return None
    _, sig = exit_status(f)
    line = log_line(f, "native-crash", "shm-full")
    faults = f.kernel_lines("segfault")
    cores = (f.target.get("ended") or {}).get("core_files") or []
    if sig not in _CRASHES and not (line or faults or cores):
        return None
    case = Case("failed.native-crash", values={"error": line, "signal": _CRASHES.get(sig or 0)})
    case.yes(sig in _CRASHES, 5, f"it was ended by {_CRASHES.get(sig or 0)}", "wait status")
    case.yes(line, 4.5, "the log ends in a crash of native code", "log", line)
    case.yes(faults, 3, "the kernel log reports a fault", "kernel log", faults[0].get("text") if faults else None)
    case.yes(cores, 2, "a core file was written", "cwd", str(cores[0].get("path")) if cores else None)
    case.no("gpu-error" in log_kinds(f), 4, "a GPU error came first; the abort is its consequence", "log")
    case.no(sig is not None and sig not in _CRASHES, 5, f"it was ended by signal {sig}", "wait status")
    return _alive_note(case, f)


def rank_dead(look: Look) -> Case | None:
    f, split = look.f, look.split
    failures = f.log.rank_failures if f.log else ()
    lost = split.missing_count if split else 0
    ras = read_ras(f.snap)
    ras_dead = ras is not None and bool(ras.dead_count or ras.missing_count or ras.missing_ranks)
    died = [d for d in f.snap.get("died") or [] if d.get("kind") == "rank"]
    if not (lost or failures or ras_dead or died) or (split is None and not failures and not ras_dead):
        return None
    case = Case(
        "failed.rank-dead",
        who=split.odd_words if split else None,
        values={"missing": lost or len(failures) or len(died)},
    )
    left = len(f.ranks) - (len([p for p in f.ranks if p.zombie or p.gone]))
    case.yes(
        lost,
        5,
        f"{lost} of {split.expected or len(f.ranks)} local ranks are gone" if split else "",
        "/proc",
        split.odd_words if split else None,
    )
    case.yes(died, 2, "a rank died while we looked", "samples")
    case.yes(failures, 3, "the launcher reports failed ranks", "log", failures[0].line if failures else None)
    if ras is not None and ras_dead:
        case.yes(True, 4 if ras.dead_count else 3, f"NCCL RAS: {ras.gone_words}", "NCCL RAS")
    case.yes(lost and left and f.still, 2, f"the other {left} rank(s) wait", "samples")
    case.no(
        not f.alive
        and f.log
        and f.log.error
        and f.log.error.kind not in ("rank-failed", "collective-timeout", "peer-lost", "killed", "signal"),
        3,
        "the log names the cause behind the dead rank",
        "log",
        f.log.error.line if f.log and f.log.error else None,
    )
    case.no(f.alive and f.forward, 5, "work still moves: " + "; ".join(s.text for s in f.forward[:2]), "samples")
    return case


def host_down(look: Look) -> Case | None:
    f = look.f
    line = log_line(f, "node-failure")
    last = (f.target.get("ended") or {}).get("last_output") or (f.log.mtime if f.log else None)
    boot = f.meta.get("boot_time")
    rebooted = (
        not f.alive
        and last is not None
        and boot is not None
        and float(boot) > float(last)
        and not (f.log and f.log.ended)
    )
    failed = scheduler(f).startswith(("NODE_FAIL", "BOOT_FAIL"))
    if not (line or rebooted or failed):
        return None
    case = Case("failed.host", values={"error": line})
    case.yes(
        rebooted,
        6,
        f"the host was booted {span_words(float(boot or 0) - float(last or 0))} after the run's last output",
        "boot time",
    )
    case.yes(failed, 7, f"Slurm says {scheduler(f)}", "sacct")
    case.yes(line, 5, "the log reports a failed node", "log", line)
    return _alive_note(case, f)


RULES: list[Rule] = [
    finished_ok,
    finished_lingering,
    exception,
    gpu_error,
    gpu_oom,
    oom_killed,
    by_signal,
    preempted,
    native_crash,
    rank_dead,
    host_down,
]
