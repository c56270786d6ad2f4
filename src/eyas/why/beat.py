"""The beat of an eyas run, read by `eyas why`, and held against what /proc shows.

A run of eyas says what it does, so most questions are answered in a third of a second: two looks at the beat, two at
the process. What the beat claims is checked: the process must be the one that wrote it, and a phase that means work
must show work. Where they differ, or the run may be stuck, `answer` gives None and the whole look follows, with what
was found here as evidence.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.record import beat, events
from eyas.record.look import Process, look, read_bytes
from eyas.record.words import clock, phase_words, step_words
from eyas.why.target import Target
from eyas.why.waits import is_storage

SPAN = 0.3  # seconds between the two looks
WORK = ("copying", "forward", "backward", "optimiser", "computing", "logging")
QUIET = {
    "starting": ("quiet.initialising", "starts"),
    "reading verifier": ("quiet.initialising", "reads the verifier"),
    "indexing": ("quiet.initialising", "reads the index of the data"),
    "compiling": ("quiet.compiling", "compiles"),
    "starting the engine": ("quiet.initialising", "starts the engine"),
    "validating": ("quiet.evaluating", "validates"),
    "saving": ("quiet.checkpointing", "saves a checkpoint"),
    "finishing": ("quiet.initialising", "finishes"),
}
LONG = 60.0  # a phase that has not moved for longer is looked at wholly


@dataclass
class Seen:
    """Both looks at one run, and where its words and /proc differ."""

    path: str
    first: dict[str, Any]
    b: dict[str, Any]
    before: Process
    process: Process
    alive: bool
    read: int  # bytes between the looks
    now: float  # monotonic
    differs: list[str] = field(default_factory=list)

    @property
    def moving(self) -> bool:
        """Whether work went on between the looks."""
        a, b = self.first, self.b
        return any(a[key] != b[key] for key in ("step", "moved", "since", "part", "tokens", "bytes"))

    @property
    def cpu(self) -> float:
        return (self.process.cpu - self.before.cpu) / SPAN

    @property
    def still(self) -> float:
        """Seconds since anything moved."""
        return float(self.now - max(self.b["since"], self.b["moved"]))

    @property
    def words(self) -> str:
        return f"{step_words(self.b)}, {phase_words(self.b, self.now, self.read / SPAN)}"


def find(target: Target) -> str | None:
    """Where the beat of a target of this host lies; None when it has none."""
    if target.host is not None:
        return None
    if target.kind == "pid" and isinstance(target.value, int):
        with contextlib.suppress(OSError), open(f"/proc/{target.value}/maps", errors="replace") as file:  # noqa: PTH123
            for line in file:
                found = re.search(r" (/\S*/eyas-\S+\.beat)$", line.rstrip())
                if found:
                    return f"/proc/{target.value}/root{found.group(1)}"
    if target.kind in ("run_dir", "log") and target.value is not None:
        place = Path(str(target.value))
        if target.kind == "log":
            place = place.parent
            if not (place / "events.jsonl").exists():
                return None
            found_here = [place / "beat"]
        else:  # a run, a store with its record, or the folder of several: the one that runs is meant
            found_here = [
                place / name / "beat" for name in ("", "record", "eval", "train", "train/eval", "store/record")
            ]
        running = next((p for p in found_here if _runs(p)), None)
        ended = next((p for p in found_here[:2] if p.exists()), None)  # of a part that has ended, nothing follows
        chosen = running or ended
        return str(chosen) if chosen is not None else None
    return None


def pid_here(b: dict[str, Any]) -> int:
    """The PID that a beat's process has on this side: another one where it runs in a container; its own if unknown."""
    pid, start = int(b["pid"]), b["starttime"]
    if beat.starttime(pid) == start:
        return pid
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and start and beat.starttime(name) == start:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{name}/status").read_text(errors="replace")
                inside = re.search(r"^NSpid:.*\s(\d+)$", status, re.M)
                if inside is not None and int(inside.group(1)) == pid:
                    return int(name)
    return pid


def _runs(path: Path) -> bool:
    """Whether the process that writes this beat lives and has not ended its run."""
    try:
        b = beat.read(path)
    except (OSError, ValueError):
        return False
    return bool(b["state"] == "running" and beat.starttime(pid_here(b)) == b["starttime"])


def see(path: str) -> Seen | None:
    """Look twice; None when there is no beat that this version reads."""
    try:
        first = beat.read(path)
        pid = first["pid"] = pid_here(first) if first["state"] == "running" else first["pid"]
        before, read = look(pid), read_bytes(pid)
        if first["state"] == "running":
            time.sleep(SPAN)
        b = {**beat.read(path), "pid": pid}
    except (OSError, ValueError):
        return None
    process = look(pid)
    alive = process.state not in ("gone", "Z", "X") and beat.starttime(pid) == b["starttime"]
    seen = Seen(path, first, b, before, process, alive, read_bytes(pid) - read, time.monotonic())
    seen.differs = differences(seen)
    return seen


def differences(s: Seen) -> list[str]:
    """Where the beat's words and /proc do not fit together."""
    b, phase, found = s.b, s.b["phase"], []
    if b["state"] == "running" and not s.alive:
        found.append(f"the beat says that it runs, and there is no PID {b['pid']} that started then")
    if not s.alive or b["state"] != "running":
        return found
    main = s.process.threads.get(b["pid"])
    if s.process.stopped:
        found.append(f"the beat says {phase}, and the process is stopped")
    elif (
        phase in WORK and not s.moving and s.cpu < 0.05 and main is not None and main[1].blocked and not _gpu(b["pid"])
    ):
        found.append(
            f"the beat says {phase} for {s.still:.0f} s, and no CPU is used: its main thread is {main[1].words}"
        )
    elif phase == "waiting for data" and not s.moving and main is not None and main[1].family == "run" and s.cpu > 0.9:
        found.append("the beat says waiting for data, and its main thread is on the CPU all the time")
    return found


def _gpu(pid: int) -> bool:
    """Whether the process holds a GPU: work on it needs no CPU."""
    with contextlib.suppress(OSError):
        for fd in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(fd.path).startswith(("/dev/nvidia", "/dev/kfd")):  # noqa: PTH115
                    return True
    return False


def answer(s: Seen, target: Target) -> dict[str, Any] | None:
    """The answer to "what is it doing?" in the schema of docs/why.md, when the beat and /proc settle it; else None."""
    b, phase = s.b, s.b["phase"]
    name = f"{Path(b['run']).name or b['run']} (PID {b['pid']})"
    if b["state"] == "ended" and not s.alive:
        verdict, sentence = "finished.ok", f"{name} is over: {step_words(b)}, ended in order."
    elif b["state"] == "ended" and not s.differs:
        verdict = "finished.lingering"
        sentence = f"{name} is over: {step_words(b)}, ended in order; its process is still there."
    elif b["state"] in ("failed", "interrupted") and not s.alive and (end := _end(b)) is not None:
        verdict, sentence = ending(end), str(end.get("text") or f"{name} has failed at {step_words(b)}")
    elif b["state"] != "running" or s.differs or not s.alive:
        return None
    elif phase in QUIET and (s.moving or s.still < LONG) and (s.moving or s.cpu >= 0.05 or s.read > 0):
        verdict, does = QUIET[phase]
        sentence = f"{name} {does}: {s.words}."
    elif s.moving and b["step"]:
        verdict, sentence = (
            "healthy.training",
            f"{name} {'trains' if b['unit'] == 'step' else 'is at work'}: {s.words}{_pace(b)}.",
        )
    elif phase in WORK and s.cpu >= 0.05 and s.still < max(LONG, 5 * b["phases"][phase][2]):
        verdict, sentence = "quiet.long-step", f"{name} computes: {s.words}."
    else:
        return None
    state = verdict.partition(".")[0]
    main = s.process.threads.get(b["pid"])
    doing = main[1].words if main else "gone"
    raw = main[1].raw if main else None
    storage = sorted(n for n, w in s.process.threads.values() if is_storage(w.family) and w.blocked)
    chain = [{"kind": "main", "words": f"main thread of PID {b['pid']} is {doing}", "pid": b["pid"], "tid": b["pid"],
              "raw": raw, "source": "wchan"}] if main else []  # fmt: skip
    seconds = round(b["pace"], 4) if b["pace"] else None
    wall, whole = time.time(), b["pid"] if s.alive else b["run"]
    evidence = [
        _item("beat", wall, f"the beat says {s.words}", s.path),
        _item("/proc", wall, f"PID {b['pid']} is that process, {s.cpu:.0%} CPU, its main thread {doing}" if s.alive else
              f"PID {b['pid']} is gone", raw),
    ]  # fmt: skip
    if storage:
        evidence.append(
            _item("/proc", wall, f"{len(storage)} thread(s) wait for a disk: {', '.join(storage[:4])}", None)
        )
    return {
        "schema": "eyas.why/1",
        "target": {
            "asked": target.asked, "host": os.uname().nodename, "pid": b["pid"], "name": Path(b["run"]).name,
            "user": None, "age_s": round(s.now - b["started"], 1) if s.alive else None, "members": None,
            "log": str(Path(b["run"]) / "log.txt"), "note": None, "training": True,
        },
        "took_s": SPAN,
        "state": state,
        "verdict": verdict,
        "grade": "established",
        "sentence": sentence,
        "questions": {
            "finished": {"answer": "yes" if state == "finished" else "no", "evidence": f"the beat says {b['state']}"},
            "crashed": {"answer": "yes" if state == "failed" else "no", "evidence": f"the beat says {b['state']}"},
            "stalled": {"answer": "no", "evidence": f"last movement {max(0.0, s.still):.1f} s ago"},
            "only_quiet": {"answer": "yes" if state == "quiet" else "no", "evidence": f"phase: {phase}"},
        },
        "evidence": evidence,
        "against": [],
        "runner_up": {
            "verdict": None, "score": 0.0, "evidence": [], "against": [], "separate": "the whole look: --look",
        },
        "also": [],
        "chain": chain,
        "ranks": None,
        "progress": {
            "step": b["step"] or None, "total": b["total"] or None, "epoch": None, "scope": "run", "unit": b["unit"],
            "seconds_per_step": seconds, "line_interval_s": 10.0, "log_idle_s": round(max(0.0, s.now - b["spoke"]), 1),
            "eta_s": round(b["left"]) if b["left"] is not None else None, "data_pass_s": None,
            "signals": [{"name": "beat", "moved": s.moving, "forward": True, "text": s.words, "source": "beat"}],
        },
        "data": None,
        "silence": {"reason": "not-silent", "sentence": "An eyas run says a line at least every ten seconds.",
                    "evidence": [], "expected_in_s": None},
        "next": [f"tail -n 3 {Path(b['run']) / 'log.txt'}", f"The whole look: eyas why {whole} --look"],
        "do_not": [],
        "not_visible": [],
        "beat": as_json(s),
    }  # fmt: skip


def _end(b: dict[str, Any]) -> dict[str, Any] | None:
    """The last event of a run that is over, if its events say how it ended: of several ranks, of the one that failed
    first."""
    last = None
    with contextlib.suppress(OSError):
        if b["world"] > 1 and (first := events.first_failure(Path(b["run"]) / "events.jsonl", b["started_wall"])):
            return first if first["rank"] == b["rank"] else {**first, "text": events.first_words(first)}
        for e in events.read(Path(b["run"]) / "events.jsonl"):
            last = e if e.get("event") == "end" and e.get("rank") == b["rank"] else last
    return last if last is not None and last["time"] >= b["started_wall"] else None


def ending(end: dict[str, Any]) -> str:
    """The verdict for the event with which a run ended."""
    how, text = end.get("how"), str(end.get("text") or "")
    if how == "done" or (how == "stopped" and "--max-minutes" in text) or (how == "exit" and not text):
        return "finished.ok"
    number = int(end.get("status") or 0) & 0x7F
    if end.get("oom"):
        return "failed.oom-killed"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return "failed.native-crash"
    if number or how in ("stopped", "interrupted"):
        return "failed.signal"
    return "failed.exception"


def as_json(s: Seen) -> dict[str, Any]:
    """The key "beat" of an answer."""
    b = s.b
    return {
        "path": s.path,
        "run": b["run"],
        "pid": b["pid"],
        "rank": b["rank"],
        "state": b["state"],
        "step": b["step"],
        "total": b["total"] or None,
        "phase": b["phase"],
        "phase_s": round(max(0.0, s.now - b["since"]), 1),
        "still_s": round(max(0.0, s.still), 1),
        "file": b["file"] or None,
        "queue": b["queue"] if b["queue"] >= 0 else None,
        "moving": s.moving,
        "agrees": not s.differs,
        "differs": s.differs,
        "words": s.words,
    }


def _pace(b: dict[str, Any]) -> str:
    """What the run's own lines say: its pace of late, and the time left."""
    if not b["pace"]:
        return ""
    left = f", {clock(b['left'])} left" if b["left"] is not None else ""
    return f", {b['pace']:.3g} s a {b['unit']}{left}"


def _item(source: str, when: float, derived: str, raw: str | None) -> dict[str, Any]:
    return {"source": source, "time": when, "raw": raw, "derived": derived, "weight": 5}
