"""What is over, told by its own files: a run directory, a store, an eval or a demo folder in which no process works.

events.jsonl is believed first: its last `end`, if no later `start` follows. Without it (an older eyas, a copy)
summary.json counts, unless run.yaml is newer: then it is of an earlier stop. A run that has begun, has not ended and
is silent for longer than a run of eyas can be was killed together with its side process, or went down with its host.
Where none of this tells, `answer` is None and the log is judged. Costs the reading of those files.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eyas.record import beat, events
from eyas.record.words import step_words
from eyas.why.beat import ending, pid_here
from eyas.why.target import Target

FOLDERS = 2000  # looked at for a record
SILENT = 15.0  # seconds; a run of eyas, or the process beside it, says a line every ten


class Told(NamedTuple):
    """How it ended, and which file says so."""

    verdict: str
    sentence: str
    step: int | None
    source: str
    when: float
    grade: str = "established"


def place_of(target: Target) -> Path | None:
    """The folder that a target of this host names, itself or by a log beside an events.jsonl."""
    if target.host is not None or target.kind not in ("run_dir", "log") or target.value is None:
        return None
    place = Path(str(target.value))
    if target.kind == "run_dir":
        return place
    return place.parent if place.name == "log.txt" and place.with_name("events.jsonl").exists() else None


def of_pid(pid: int) -> Path | None:
    """The folder of the run of eyas that a process which is gone was: by the beat that it left behind in /dev/shm, or
    by a record in or below the working directory. None where neither knows it.
    """
    left = {}
    for path in beat.SHM.glob(f"eyas-{pid}-*.beat"):
        with contextlib.suppress(OSError, ValueError):
            b = beat.read(path)
            if b["pid"] == pid and Path(b["run"]).is_dir():
                left[b["started"]] = Path(b["run"])
    if left:
        return left[max(left)]
    found = {}
    for path in _records(Path()):
        with contextlib.suppress(OSError):
            for e in events.read(path):
                if e.get("event") == "start" and e.get("pid") == pid and e.get("host") == os.uname().nodename:
                    found[float(e.get("time") or 0.0)] = path.parent
    return found[max(found)] if found else None


def _records(folder: Path) -> Iterator[Path]:
    """The events.jsonl in a folder and three levels below it; gives up after FOLDERS folders or a second."""
    late = time.monotonic() + 1.0
    level = [folder]
    seen = 0
    for _ in range(4):
        below: list[Path] = []
        for place in level:
            seen += 1
            if seen > FOLDERS or time.monotonic() > late:
                return
            if (place / "events.jsonl").is_file():
                yield place / "events.jsonl"
            with contextlib.suppress(OSError), os.scandir(place) as entries:
                below += [place / e.name for e in entries if not e.name.startswith(".") and _is_dir(e)]
        level = below


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """False also for a link that leads back to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def answer(place: Path, target: Target, snapshot: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer in the schema of docs/why.md; None where the files do not tell how it ended."""
    told = of_demo(place) or of_events(place, place.name) or of_summary(place)
    told = told or of_events(place / "record", place.name) or _failed_stage(place)
    if told is None:
        return None
    verdict, sentence, step, source, when, grade = told
    state = verdict.partition(".")[0]
    finished, failed = state == "finished", state == "failed"
    gone = "no process works in it"
    log = place / "log.txt"
    meta = snapshot.get("meta") or {}

    def item(where: str, text: str) -> dict[str, Any]:
        return {"source": where, "time": when, "raw": None, "derived": text, "weight": 5}

    return {
        "schema": "eyas.why/1",
        "target": {
            "asked": target.asked, "host": meta.get("host"), "pid": None, "name": place.name, "user": None,
            "age_s": None, "members": None, "log": str(log) if log.exists() else None, "note": None, "training": True,
        },
        "took_s": round(float(meta.get("took_s") or 0.0), 2),
        "state": state,
        "verdict": verdict,
        "grade": grade,
        "sentence": sentence,
        "questions": {
            "finished": {"answer": "yes" if finished else "no", "evidence": f"{source} says how it ended"},
            "crashed": {"answer": "yes" if failed else "no", "evidence": f"{source} says how it ended"},
            "stalled": {"answer": "no", "evidence": gone},
            "only_quiet": {"answer": "no", "evidence": "It is over: nothing more will be written."},
        },
        "evidence": [item(source, sentence), item("/proc", gone)],
        "against": [],
        "runner_up": {"verdict": None, "score": 0.0, "evidence": [], "against": [], "separate": f"{place / source}"},
        "also": [],
        "chain": [],
        "ranks": None,
        "progress": {
            "step": step, "total": None, "epoch": None, "scope": "run", "unit": "step", "seconds_per_step": None,
            "line_interval_s": None, "log_idle_s": None, "eta_s": None, "data_pass_s": None, "signals": [],
        },
        "data": None,
        "silence": {"reason": "unknown", "sentence": "It is over: nothing more will be written.", "evidence": [],
                    "expected_in_s": None},
        "next": [f"tail -n 20 {log}"] if log.exists() else [],
        "do_not": [],
        "not_visible": [],
        "beat": None,
    }  # fmt: skip


def of_events(place: Path, name: str) -> Told | None:
    """By the last event of the first rank, when it is an end, or none follows."""
    start = end = None
    with contextlib.suppress(OSError):
        for e in events.read(place / "events.jsonl"):
            if e.get("rank") == 0 and e.get("event") in ("start", "end"):
                start, end = (e, None) if e["event"] == "start" else (start, e)
    if start is None:
        return None
    if end is None:
        return _without_a_word(place, name, start)
    if int(start.get("world") or 1) > 1:  # the last word of the first rank may be that another one is gone
        with contextlib.suppress(OSError):
            first = events.first_failure(place / "events.jsonl", float(start["time"]))
            if first is not None and first["rank"] != end["rank"]:
                end = {**first, "text": events.first_words(first)}
    verdict = ending(end)
    step = end.get("step")
    at = f" at {step:,}" if isinstance(step, int) and step else ""
    text = str(end.get("text") or "")
    sentence = f"{name} has finished: {start.get('name')} ended in order{at}." if not text else f"{name}: {text}"
    return Told(verdict, sentence, step, "events.jsonl", float(end.get("time") or 0.0))


def _without_a_word(place: Path, name: str, start: Mapping[str, Any]) -> Told | None:
    """A run of this host that has begun, has not ended, and can no longer be there; None where it may be."""
    if start.get("host") != os.uname().nodename:  # its processes are not to be seen from here
        return None
    try:
        last = max((place / file).stat().st_mtime for file in ("events.jsonl", "log.txt"))
    except OSError:
        return None
    b: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # a link that leads nowhere after a reboot
        b = beat.read(place / "beat")
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    if booted <= last:
        moves = bool(b) and time.monotonic() - b["python"] < SILENT
        if moves or (b and beat.starttime(pid_here(b)) == b["starttime"]) or time.time() - last < SILENT:
            return None
        verdict, how = "failed.signal", "it was killed together with the process that would have told of it"
    else:
        verdict, how = "failed.host", "its host was booted since"
    whose = f"{start.get('name')} (PID {start.get('pid')})"
    step, at = _last_step(place), ""
    if b and b["pid"] == start.get("pid"):
        step, at = b["step"] or None, f", at {step_words(b)} in {b['phase']}"
    elif step:
        at = f", behind step {step:,}"
    resume = f" · to go on: {start['resume']}" if start.get("resume") else ""
    sentence = f"{name}: {whose} has gone without a word{at}: {how}{resume}"
    return Told(verdict, sentence, step, "events.jsonl", last, "supported")


def _last_step(place: Path) -> int | None:
    """The step of the last event that has one."""
    with contextlib.suppress(OSError):
        steps = [e["step"] for e in events.read(place / "events.jsonl") if isinstance(e.get("step"), int)]
        return int(steps[-1]) if steps else None
    return None


def of_summary(place: Path) -> Told | None:
    """By summary.json of a training run, if the run was not begun again after it."""
    path, settings = place / "summary.json", place / "run.yaml"
    found = _json(path)
    steps = found.get("steps")
    if not isinstance(steps, int) or (place / "events.jsonl").exists():
        return None
    when = path.stat().st_mtime
    if settings.exists() and settings.stat().st_mtime > when + 5:  # a copy makes them almost together
        return None
    stopped = found.get("stopped")
    if stopped == "signal":
        return Told(
            "failed.signal",
            f"{place.name} was stopped by a signal after step {steps:,}, and saved.",
            steps,
            path.name,
            when,
        )
    why = {"time": ", stopped by --max-minutes", "patience": ", stopped by --patience"}.get(str(stopped), "")
    best = f"; best checkpoint {found['best']}" if found.get("best") else ""
    sentence = f"{place.name} has finished: {steps:,} steps in {found.get('seconds') or 0:,.0f} s{why}{best}."
    return Told("finished.ok", sentence, steps, path.name, when)


def of_demo(place: Path) -> Told | None:
    """By the summary.json that `eyas demo` writes last."""
    path = place / "summary.json"
    found = _json(path)
    stages = found.get("stages")
    if not isinstance(stages, list):
        return None
    sentence = (
        f"{place.name} has finished: all {len(stages)} stages of eyas demo in {found.get('seconds') or 0:,.0f} s."
    )
    return Told("finished.ok", sentence, None, path.name, path.stat().st_mtime)


def _failed_stage(place: Path) -> Told | None:
    """A demo without a summary: a stage that failed ended it; one that ended well says nothing of the next."""
    told = of_events(place / "train", place.name) or of_summary(place / "train")
    if told is None or told.verdict.startswith("finished"):
        return None
    return told._replace(source=f"train/{told.source}")


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text("utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
