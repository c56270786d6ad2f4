"""What an end leaves behind: a wait status, the scheduler's word, the traces of an out-of-memory kill."""

from __future__ import annotations

import re

from eyas.why.facts import Facts
from eyas.why.verdicts.base import log_line


def exit_status(f: Facts) -> tuple[int | None, int | None]:
    """(exit code, signal) of the main process, from the kernel or from a launcher's word in the log."""
    status = f.target.get("exit_code")
    if status is None and f.main is not None and f.main.zombie:
        status = next((d.get("exit_code") for d in f.snap.get("died") or [] if d.get("pid") == f.main.pid), None)
    if status is not None:
        number = int(status) & 127
        return (None, number) if number else (int(status) >> 8, None)
    code = f.log.error.exitcode if f.log and f.log.error else None
    if code is None:
        return None, f.log.error.signal if f.log and f.log.error else None
    if code < 0:
        return None, -code
    return (None, code - 128) if 128 < code < 160 else (code, None)


def scheduler(f: Facts) -> str:
    slurm = f.snap.get("slurm") or {}
    return str(slurm.get("state") or "").upper()


def oom_signs(f: Facts) -> list[tuple[float, str, str]]:
    """(weight, sentence, source) for every trace an out-of-memory kill leaves."""
    signs = []
    mine = {str(p) for p in f.members} | {str(f.target.get("pid"))} | _named_in_log(f)
    near = [line for line in f.kernel_lines("oom") if _in_its_time(f, line.get("age_s"))]
    victims = [(set(re.findall(r"(?:Killed process |\bpid=)(\d+)", line.get("text", ""))), line) for line in near]
    hit = next((line for pids, line in victims if pids & mine), None)
    others = any(pids for pids, _ in victims)
    unnamed = near[0] if near and not others else None
    known = f.target.get("pid") is not None or f.main is not None or bool(_named_in_log(f))
    theirs = others and known and hit is None  # somebody else was killed, and it is known who ours are
    found = hit or unnamed or (near[0] if near and not known else None)
    if found is not None:
        weight = 5.0 if hit else 2.5 if unnamed else 2.0
        text = f"kernel log: {found.get('text', '')[:120]}"
        signs.append((weight, "the kernel log reports an out-of-memory kill", text))
    kills = max(
        (
            int(((c.get("memory") or {}).get("events") or {}).get("oom_kill") or 0)
            for c in (f.snap.get("cgroups") or {}).values()
        ),
        default=0,
    )
    if kills:
        signs.append((4.0, f"the job's cgroup counts {kills} out-of-memory kill(s)", "cgroup memory.events"))
    moved = f.host_rate("vmstat", "oom_kill")
    if moved and not theirs:
        signs.append((3.0, "the host's oom_kill counter moved while we looked", "/proc/vmstat"))
    if (f.target.get("ended") or {}).get("oom_since") and not theirs:
        signs.append((3.0, "the host's oom_kill counter moved since the run's last output", "/proc/vmstat"))
    if "OUT_OF_ME" in scheduler(f):
        signs.append((7.0, "Slurm says OUT_OF_MEMORY", "sacct"))
    said = log_line(f, "host-oom")
    if said:
        signs.append((4.0, "the log reports an out-of-memory kill", f"log: {said[:120]}"))
    return signs


def _named_in_log(f: Facts) -> set[str]:
    """PIDs that the log reports as failed: a worker, a rank."""
    if f.log is None:
        return set()
    named = [e.pid for e in f.log.errors] + [e.pid for e in f.log.rank_failures]
    return {str(pid) for pid in named if pid}


def _in_its_time(f: Facts, age: float | None) -> bool:
    """Whether a line of the kernel log falls into the run's life and, for a run that is over, near its end."""
    if age is None:
        return True
    if f.main is not None and f.main.age is not None and age > f.main.age + 5:
        return False
    return f.alive or f.idle is None or age <= f.idle + 120
