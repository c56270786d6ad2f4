"""From a judgement to an answer: the sentence, the four questions, progress, silence, commands; all as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from eyas.why.chain import size
from eyas.why.facts import Facts
from eyas.why.idle import idle_words
from eyas.why.judge import Judgement
from eyas.why.logs.silence import ProcessFacts, Silence, why_silent
from eyas.why.procs import grew
from eyas.why.verdicts.base import Case, span_words
from eyas.why.verdicts.traces import exit_status
from eyas.why.verdicts.words import WORDS

SCHEMA = "eyas.why/1"
_FIELD = re.compile(r"\{(\w+)\}")


def compose(j: Judgement, took_s: float | None = None) -> dict[str, Any]:
    """The answer, in the documented schema."""
    f, words = j.facts, WORDS[j.verdict]
    silence = _explained(j, silence_of(f))
    fields = _fields(j, silence)
    when = float(f.meta.get("started") or 0.0)
    sentence = _fill(words.sentence, fields)
    idle = idle_words(f) if j.verdict == "unknown" else None
    if idle is not None:
        sentence = f"{fields['name']} {idle}. Whether that is meant, nothing here can tell."
    if f.training is False and f.alive:
        sentence += " " + _what_it_is(f)
    return {
        "schema": SCHEMA,
        "target": _target(f),
        "took_s": round(float(took_s if took_s is not None else f.meta.get("took_s") or 0.0), 2),
        "state": j.state,
        "verdict": j.verdict,
        "grade": j.grade,
        "sentence": sentence,
        "questions": _questions(j, silence),
        "evidence": [e.to_dict(when) for e in sorted(j.case.support, key=lambda e: -e.weight)],
        "against": [e.to_dict(when) for e in sorted(j.case.against, key=lambda e: -e.weight)],
        "runner_up": _runner(j),
        "also": [{"verdict": c.verdict, "evidence": [e.derived for e in c.support[:2]]} for c in j.also],
        "chain": j.chain,
        "ranks": _ranks(j),
        "progress": _progress(f, j),
        "data": _data(f),
        "silence": silence.to_dict(),
        "next": [_fill(line, fields) for line in words.next],
        "do_not": [_fill(line, fields) for line in words.do_not],
        "not_visible": _not_visible(f),
        "beat": None,
    }


def _fill(text: str, fields: Mapping[str, str]) -> str:
    filled = _FIELD.sub(lambda m: fields.get(m.group(1), m.group(0)), text)
    return re.sub(r" +", " ", filled).replace(" .", ".").replace(" ,", ",").strip()


def _target(f: Facts) -> dict[str, Any]:
    main = f.main
    return {
        "asked": f.target.get("asked"),
        "host": f.target.get("host") or f.meta.get("host"),
        "pid": main.pid if main else f.target.get("pid"),
        "name": script_name(f),
        "user": main.raw.get("user") if main else None,
        "age_s": main.age if main else None,
        "members": len(f.job.get("members") or []) or None,
        "log": f.log_path,
        "note": f.target.get("note"),
        "training": f.training,
    }


def script_name(f: Facts) -> str:
    """A short name for the target."""
    python = (f.main.raw.get("python") or {}) if f.main else {}
    name = (
        python.get("script")
        or python.get("module")
        or f.target.get("name")
        or (f.main.comm if f.main else None)
        or f.log_path
        or "the run"
    )
    return PurePosixPath(str(name)).name


def _what_it_is(f: Facts) -> str:
    main = f.main
    if f.target.get("kernel_thread"):
        return f"PID {f.target.get('pid')} is a kernel thread, not a training process."
    if main is None:
        return "It does not look like a training process."
    return (
        f"PID {main.pid} is {main.cmd[:80] or main.comm}: not a training process as far as can be seen; its main thread"
        f" is {main.critical.wait.words}."
    )


def _fields(j: Judgement, silence: Silence) -> dict[str, str]:
    f, case, log = j.facts, j.case, j.facts.log
    main, data = f.main, f.data
    pid = main.pid if main else f.target.get("pid")
    moves = [s.text for s in f.signals if s.moved and s.name not in ("wake-ups",)]
    values = {k: str(v) for k, v in case.values.items() if v is not None}
    launcher = f.job.get("launcher") or pid
    workers = len(f.live_workers)
    due = f", the next line is due in {span_words(silence.expected_in_s)}" if (silence.expected_in_s or 0) > 0 else ""
    since = f" for {span_words(f.idle)}" if f.idle is not None and f.idle >= 5 and not f.heartbeat else ""
    files = [p.rsplit("/", 1)[-1] for p in data.files[:2]]
    gpus = f.gpu.words
    fields = {
        "name": f"{script_name(f)} (PID {pid})" if pid else script_name(f),
        "pid": str(pid or "PID"),
        "target": str(f.target.get("asked") or pid or ""),
        "who": case.who or "not known",
        "who_pid": str(case.pids[0]) if case.pids else str(pid or ""),
        "who_or_all": f"look at {case.who}" if case.who else "every rank that can be seen waits",
        "look_at": f"; look at {case.who} first" if case.who else "",
        "warm_advice": _warm_advice(f),
        "who_or_worker": case.who or "no worker holds it any more",
        "idle": span_words(f.idle),
        "since": since,
        "at_step": _at_step(f),
        "does": "at work" if log and log.format == "eyas" and log.unit != "step" else "training",
        "due": due,
        "moves": "; ".join(moves[:2])
        or (f"its last line is {f.idle:.0f} s old" if f.idle is not None else "something moves"),
        "rate": size(max(data.rate, data.read_rate or 0.0 if data.mount and data.mount.remote else data.rate)),
        "mount": data.mount.words if data.mount else "an unknown mount",
        "cached": f", {100 * data.cached:.0f} % of it in the page cache" if data.cached is not None else "",
        "file_words": (", ".join(files) + " ") if files else "",
        "workers": str(workers),
        "workers_words": f"{workers} worker(s)" if workers else "the process itself",
        "cpus": str(case.values.get("cpus") or f.meta.get("cpus") or "?"),
        "quota_words": (
            f" (quota {case.values['quota']:g} CPUs)"
            if case.values.get("quota")
            else " (pinned to one CPU)"
            if case.values.get("allowed") == 1
            else ""
        ),
        "victim": f" ({log.error.line[:90]})" if log and log.error and log.error.kind == "worker-died" else "",
        "error": str(case.values.get("error") or (log.error.line if log and log.error else None) or "see the log")[
            :200
        ],
        "signal": "a signal",
        "with_signal": f" ({case.values['signal']})" if case.values.get("signal") else "",
        "path": "an unknown place",
        "log": f.log_path or "the log",
        "launcher": str(launcher or "PID"),
        "gpu_words": f.gpu.error or gpus,
        "holder": "HOLDER",
        "holder_words": case.who or "a process that was not seen",
        "reader": "of the other end",
        "pids": " ".join(map(str, case.pids[:16])),
        "memory_words": "; its memory grows" if any("memory grows" in e.derived for e in case.support) else "",
        "unknown_why": _unknown_why(f),
        "typist": "somebody to type",
        "lock_words": "its main thread waits on a lock and not one thread runs",
        "stop_words": (
            " (frozen by its cgroup)"
            if case.values.get("frozen")
            else f" (traced by PID {case.values['tracer']})"
            if case.values.get("tracer")
            else ""
        ),
        "resume": _resume(case, pid),
        "host": str(f.meta.get("host") or ""),
        "peer": "the service",
    }
    values.pop("rate", None)
    values.pop("mount", None)
    values.pop("workers", None)
    return fields | values


def _warm_advice(f: Facts) -> str:
    warms, total, room = f.data.warms, size(f.data.total), size(f.data.memory)
    if warms is None:
        return "Let it run if the data set fits in memory: then the next pass is faster"
    if warms:
        return f"Let it run: the data set ({total}) fits in memory ({room}), the next pass is faster"
    return f"It will not warm up: the data set ({total}) is larger than the free memory ({room})"


def _resume(case: Case, pid: object) -> str:
    if case.values.get("frozen"):
        return "echo 0 > CGROUP/cgroup.freeze (v2), or echo THAWED > CGROUP/freezer.state (v1), for the cgroup " + str(
            case.values.get("cgroup")
        )
    if case.values.get("tracer"):
        return f"end the tracer: kill -TERM {case.values['tracer']}"
    targets = " ".join(map(str, case.pids)) or str(pid)
    return f"kill -CONT {targets}"


def _at_step(f: Facts) -> str:
    if f.log is None or f.log.step is None:
        return ""
    total = f" of {f.log.total:,}" if f.log.total else ""
    return f" at {f.log.unit} {f.log.step:,}{total}"


def _unknown_why(f: Facts) -> str:
    if not f.target.get("exists") and f.log is None:
        return ": the process does not exist and no log was found"
    if not f.alive:
        return ": the process is gone, and its log does not say how it ended"
    hidden = [n.get("what") for n in f.snap.get("not_visible") or []][:2]
    if hidden:
        return ": not visible were " + " and ".join(map(str, hidden))
    return f": its main thread is {f.main.critical.wait.words}, and nothing else stands out" if f.main else ""


def silence_of(f: Facts) -> Silence:
    """Why the log is silent, by the log reader's rules and what the process looks like."""
    main = f.main
    if not f.alive:
        return Silence("unknown", "The process is over: nothing more will be written.", (), None)
    out, err = (_stdio_kind(main.stdio.get(n, {})) if main else "unknown" for n in (1, 2))
    python = (main.raw.get("python") or {}) if main else {}
    unbuffered: bool | None = None
    if python.get("unbuffered_flag") or python.get("unbuffered_env"):
        unbuffered = True
    elif python.get("unbuffered_flag") is False and python.get("unbuffered_env") is False:
        unbuffered = False
    grown = tuple(str(o.get("path")) for o in f.snap.get("outputs") or [] if (grew(o) or 0) > 0)
    facts = ProcessFacts(
        stdout="deleted" if f.log_entry.get("deleted") else out,  # type: ignore[arg-type]
        stderr=err,  # type: ignore[arg-type]
        unbuffered=unbuffered,
        python=bool(python) or main is None or "python" in (main.cmd or main.comm),
        uses_rich="rich" in main.libs if main and main.visible.get("maps") else None,
        rank=main.rank if main else None,
        world_size=f.world_size,
        log_growth=f.log_growth,
        idle_s=f.idle,
        age_s=main.age if main else None,
        progressing=bool(f.forward) or f.moved("main-cpu") if f.samples else None,
        other_outputs=grown,
        log_is_stdout=f.log_entry.get("how") in ("fd1", "fd2", "tee") if f.log_entry else None,
    )
    return why_silent(f.log, facts)


def _explained(j: Judgement, silence: Silence) -> Silence:
    """A silence that the log does not explain, explained by the verdict: lines come after steps, and no step ends."""
    f = j.facts
    if silence.reason != "unknown" or not f.alive or j.state not in ("slow", "stuck"):
        return silence
    begun = "A line comes after steps, and the next steps" if f.stepped else "No step has ended yet: the first ones"
    what = (
        "wait for their data"
        if j.verdict.startswith("slow.data")
        else "take long"
        if j.state == "slow"
        else "do not end"
    )
    return Silence("waiting", f"{begun} {what} ({j.verdict}).", silence.evidence, silence.expected_in_s)


def _stdio_kind(fd: Mapping[str, Any]) -> str:
    if fd.get("deleted") or str(fd.get("path") or "").endswith(" (deleted)"):
        return "deleted"
    kind = str(fd.get("kind") or "unknown")
    return kind if kind in ("file", "pipe", "tty", "null", "socket") else "unknown"


def _questions(j: Judgement, silence: Silence) -> dict[str, dict[str, str]]:
    """The four questions a person asks, each with the evidence for its answer."""
    f, state, case = j.facts, j.state, j.case
    why = case.support[0].derived if case.support else "nothing established"
    best = max(case.support, key=lambda e: e.weight).derived if case.support else why
    pid = f.main.pid if f.main else f.target.get("pid")
    alive = f"PID {pid} is alive" + (f" (state {f.main.state})" if f.main and f.main.state != "?" else "")
    code, sig = exit_status(f)
    gone = "the process is gone" + (
        f", exit code {code}" if code is not None else f", signal {sig}" if sig is not None else ""
    )

    def answer(yes: bool | None, evidence: str) -> dict[str, str]:
        return {"answer": "unknown" if yes is None else "yes" if yes else "no", "evidence": evidence}

    here = alive if f.alive else gone
    finished = True if state == "finished" else None if state == "unknown" and not f.alive else False
    crashed = True if state == "failed" else None if state == "unknown" and not f.alive else False
    moving = "; ".join(s.text for s in f.forward[:2])
    stalled = True if state == "stuck" else None if state == "unknown" else False
    if state == "slow":
        stalled_words = "it is slow, not stuck: " + (moving or best)
    elif state == "stuck":
        stalled_words = best
    elif not f.alive:
        stalled_words = gone
    else:
        stalled_words = moving or "no mechanism that blocks it was found"
    quiet = (
        None
        if state == "unknown"
        else state in ("quiet", "healthy") or (state == "slow" and bool(f.idle and f.idle > 15))
    )
    end_words = here
    if f.log is not None and f.log.ended:
        end_words += "; the log says that training ended"
    elif f.log is not None and f.log.step is not None and f.log.total:
        end_words += f"; the log is at step {f.log.step:,} of {f.log.total:,}"
    crash_words = (
        best
        if state == "failed"
        else here + ("; no error at the end of the log" if f.log is not None and f.log.error is None else "")
    )
    return {
        "finished": answer(finished, best if state == "finished" else end_words),
        "crashed": answer(crashed, crash_words),
        "stalled": answer(stalled, stalled_words),
        "only_quiet": answer(quiet, silence.sentence),
    }


def _runner(j: Judgement) -> dict[str, Any] | None:
    case = j.runner
    return {
        "verdict": case.verdict if case else None,
        "score": round(case.score, 2) if case else None,
        "evidence": [e.derived for e in sorted(case.support, key=lambda e: -e.weight)[:2]] if case else [],
        "against": [e.derived for e in sorted(case.against, key=lambda e: -e.weight)[:2]] if case else [],
        "separate": _fill(
            j.separate,
            {
                "target": str(j.facts.target.get("asked") or ""),
                "pid": str(j.facts.main.pid if j.facts.main else "PID"),
                "path": "the path",
                "peer": "the service",
            },
        ),
    }


def _ranks(j: Judgement) -> dict[str, Any] | None:
    s = j.split
    if s is None:
        return None
    return {
        "groups": [{"doing": w, "ranks": [p.rank for p in ps], "pids": [p.pid for p in ps]} for w, ps in s.groups],
        "odd": s.odd_words,
        "missing": list(s.missing or s.reported_missing),
    }


def _progress(f: Facts, j: Judgement) -> dict[str, Any]:
    log, data = f.log, f.data
    eta = None
    if log is not None and log.eta_s is not None and j.state in ("healthy", "quiet", "slow"):
        eta = max(0.0, log.eta_s - (f.idle or 0.0) if f.forward else log.eta_s)
    pace = log.pace if log else None
    return {
        "step": log.step if log else None,
        "total": log.total if log else None,
        "epoch": log.epoch if log else None,
        "scope": log.scope if log else None,
        "unit": log.unit if log else None,
        "seconds_per_step": pace.seconds_per_step if pace else None,
        "line_interval_s": log.line_interval_s if log else None,
        "log_idle_s": f.idle,
        "eta_s": eta,
        "data_pass_s": data.full_pass_s
        if j.verdict.startswith("slow.data")
        else None,  # else something else sets the pace
        "signals": [
            {"name": s.name, "moved": s.moved, "forward": s.forward, "text": s.text, "source": s.source}
            for s in f.signals
        ],
    }


def _data(f: Facts) -> dict[str, Any] | None:
    data = f.data
    if not data.readings and not data.dataset:
        return None
    return {
        "files": data.files[:8],
        "read_bytes_per_s": data.disk_rate,
        "rchar_per_s": data.read_rate,
        "offset_bytes_per_s": data.pos_rate,
        "cached": data.cached,
        "mount": data.mount.words if data.mount else None,
        "dataset": dict(data.dataset) or None,
        "page_cache_room": data.memory,
        "will_warm_up": data.warms,
        "full_pass_s": data.full_pass_s,
    }


def _not_visible(f: Facts) -> list[dict[str, Any]]:
    hidden = [dict(n) for n in f.snap.get("not_visible") or []]
    late = [
        {
            "what": str(probe.get("probe")),
            "why": f"did not come back in {probe.get('after_s', '?')} s",
            "needs": None,
            "command": None,
        }
        for probe in f.snap.get("probes_timed_out") or []
    ]
    return hidden + late
