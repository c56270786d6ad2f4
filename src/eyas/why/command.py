"""`eyas why` and `eyas ps`: from the words on the command line to an exit code.

0 healthy, quiet or finished · 1 slow · 2 stuck or failed · 3 unknown
64 usage · 69 host unreachable · 77 no permission · 124 deadline
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.why import remote
from eyas.why.ps import render_ps
from eyas.why.target import Target, UsageError, check_host, parse

EXIT = {"healthy": 0, "quiet": 0, "finished": 0, "slow": 1, "stuck": 2, "failed": 2, "unknown": 3}
USAGE, UNREACHABLE, NO_PERMISSION, DEADLINE = 64, 69, 77, 124


class NoPermission(EyasError):
    """The host shows this user nothing of the target (exit code 77)."""


def run_why(
    target: str | None = None,
    *,
    json_out: bool = False,
    stacks: bool = False,
    deep: bool = False,
    timeout: float = 15.0,
    log: str | None = None,
    fail_on: str | None = None,
    replay: str | None = None,
    save: str | None = None,
    whole: bool = False,
) -> int:
    """Look, judge, print the answer; returns the exit code. A run of eyas is answered from its beat where that settles
    it; whole: look at the process in any case."""
    try:
        failing = _fail_on(fail_on)
        seen = None
        if replay is not None:
            snapshot = _replay(replay)
        else:
            named = parse(target)
            seen = _beat(named)
            if seen is not None and not (whole or stacks or deep or save):
                from eyas.why import beat

                if (quick := beat.answer(seen, named)) is not None:
                    return _print(quick, json_out, failing)
            snapshot = look(named, timeout, stacks=stacks, deep=deep, log=log)
            _check_wall(snapshot)
            try:
                _check_there(snapshot)
            except UsageError:
                if (told := _of_the_dead(named, snapshot)) is None:
                    raise
                return _print(told, json_out, failing)
        from eyas.why.answer import redact, to_json
        from eyas.why.judge import judge

        if save is not None:
            _save(redact(snapshot), save)
        hangs = snapshot.get("probes_timed_out")  # then its files are not touched
        if replay is None and not whole and not hangs and not snapshot["target"]["exists"]:
            from eyas.why import rundir

            place = rundir.place_of(named)
            if place is not None and (told := rundir.answer(place, named, snapshot)) is not None:
                return _print(told, json_out, failing)
        answer = judge(snapshot, _now(snapshot))
        found = to_json(answer)
        if seen is not None:
            from eyas.why import beat

            found["beat"] = beat.as_json(seen)
        return _print(found, json_out, failing)
    except EyasError as error:
        return _complain(error)
    except BrokenPipeError:
        return 0


def _beat(target: Target) -> Any:
    """What the beat of a run of eyas on this host says, held against /proc; None where there is none."""
    from eyas.why import beat

    path = beat.find(target)
    return beat.see(path) if path is not None else None


def _print(found: dict[str, Any], json_out: bool, failing: set[str] | None) -> int:
    """Print an answer; returns the exit code."""
    from eyas.why.answer import render_answer

    if json_out:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print(render_answer(found, color=_color()))
    state = str(found["state"])
    if failing is not None:
        return max(1, EXIT[state]) if state in failing else 0
    return EXIT.get(state, 3)


def run_ps(host: str | None = None, *, json_out: bool = False, timeout: float = 15.0) -> int:
    """List the training processes of this host or another."""
    try:
        request = {"mode": "ps", "kind": "search", "times": [0.0, 1.0], "soft_s": min(4.5, max(1.5, timeout - 0.4))}
        listing = remote.ask(request, timeout, check_host(host) if host else None)
        print(
            json.dumps(listing, indent=2)
            if json_out
            else render_ps(listing, shutil.get_terminal_size((140, 40)).columns)
        )
    except EyasError as error:
        return _complain(error)
    except BrokenPipeError:
        return 0
    return 0


def look(
    target: Target, timeout: float = 15.0, *, stacks: bool = False, deep: bool = False, log: str | None = None
) -> dict[str, Any]:
    """The snapshot of a target."""
    request: dict[str, Any] = {**target.request(), "mode": "why", "stacks": stacks or deep, "deep": deep}
    if log is not None:
        request["log"] = str(Path(log).expanduser().absolute()) if target.host is None else log
    if target.host is None and (stacks or deep):
        request["py_spy"] = _py_spy()
    return remote.ask(request, timeout, target.host)


def _py_spy() -> str:
    """py-spy on the path, or beside this interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else "py-spy")


def _fail_on(words: str | None) -> set[str] | None:
    """`--fail-on stuck,failed`: the states that make the exit code non-zero; the others give 0."""
    if words is None:
        return None
    states = {word.strip() for word in words.split(",") if word.strip()}
    wrong = sorted(states - set(EXIT))
    if wrong or not states:
        raise UsageError(
            f"--fail-on {words}: no such state {', '.join(wrong) or words!r}; give one or more of {', '.join(EXIT)}"
        )
    return states


def _now(snapshot: dict[str, Any]) -> float:
    """The moment of the looking, by the clock of the host that was looked at."""
    meta = snapshot.get("meta") or {}
    return float(meta.get("started") or 0.0) + float(meta.get("took_s") or 0.0)


def _replay(path: str) -> dict[str, Any]:
    """A saved snapshot, as --save wrote it or as a case of the corpus that holds one."""
    hint = "a snapshot is made with: eyas why PID --save NEW_FILE"
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no {path}; {hint}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no saved snapshot (it is no JSON); {hint}") from None
    if isinstance(found, dict) and isinstance(found.get("snapshot"), dict):
        found = found["snapshot"]
    if not isinstance(found, dict) or not str(found.get("schema", "")).startswith("eyas.snapshot/"):
        raise UsageError(f"{path} is no saved snapshot; {hint}")
    return found


def _save(snapshot: dict[str, Any], path: str) -> None:
    try:
        Path(path).write_text(json.dumps(snapshot, indent=1), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _check_wall(snapshot: dict[str, Any]) -> None:
    """Nothing at all could be seen: say so instead of guessing."""
    target, meta = snapshot["target"], snapshot["meta"]
    denied = [e["path"] for e in snapshot["logs"] if "Permission" in str(e.get("error"))]
    if target["exists"] or any(e.get("tail") for e in snapshot["logs"]):
        return
    if target["kind"] in ("log", "run_dir") and denied:
        raise NoPermission(
            f"{denied[0]} cannot be read by {meta.get('user') or meta.get('uid')}; ask as its owner, or with sudo"
        )
    if target["kind"] == "pid" and meta.get("hidepid") and not meta.get("root"):
        who = meta.get("user") or meta.get("uid")
        raise NoPermission(f"process {target['pid']} is hidden from {who} on this host (hidepid); ask with sudo")


def _check_there(snapshot: dict[str, Any]) -> None:
    """There is no such process, GPU user or job, and nothing of it was left behind: one line instead of a verdict."""
    target, job = snapshot["target"], snapshot.get("slurm") or {}
    kind, pid, host = target["kind"], target.get("pid"), target.get("host")
    seen = target["exists"] or any(e.get("size") is not None for e in snapshot["logs"])
    if seen or kind not in ("pid", "name", "gpu", "slurm", "search"):
        return
    if kind == "slurm" and job.get("state"):
        return
    if kind == "gpu" and (snapshot.get("gpu") or {}).get("status") not in ("ok", "absent"):
        return  # a GPU tool that hangs or fails is a finding
    killed = (snapshot.get("kernel_log") or {}).get("lines") or []
    if pid is not None and any(re.search(rf"(?:Killed process |\bpid=){pid}\b", str(e.get("text"))) for e in killed):
        return  # the kernel's log still knows it
    where, asked = f"on {host}" if host else "here", str(target.get("asked") or "").rpartition(":")[2]
    words = {
        "pid": f"no process {pid} {where}",
        "name": f"no process named {asked} {where}" + ("" if host else ", and no file or directory of that name"),
        "gpu": str(target.get("note") or f"no process uses {asked} {where}"),
        "slurm": f"no process of Slurm's job {asked} {where}, and Slurm says nothing of it",
        "search": f"no training process {where}",
    }
    if kind == "gpu" and (snapshot.get("gpu") or {}).get("status") == "absent":
        words["gpu"] = f"no GPU is to be seen {where}"
    meta = snapshot["meta"]
    hidden = " (other users' processes are hidden on this host: ask with sudo)"
    unseen = hidden if meta.get("hidepid") and not meta.get("root") else ""
    see = f"see eyas ps {host}" if host else "see eyas ps"
    if kind == "pid" and not host:  # what an eyas run that is over was, its folder tells
        see += "; if it was a run of eyas, name its folder: eyas why DIR"
    raise UsageError(f"{words[kind]}{unseen}; {see}")


def _of_the_dead(target: Target, snapshot: dict[str, Any]) -> dict[str, Any] | None:
    """The answer for a PID of this host that is gone, where a run of eyas on record was that process."""
    if target.kind != "pid" or target.host is not None or not isinstance(target.value, int):
        return None
    from eyas.why import rundir

    place = rundir.of_pid(target.value)
    if place is None:
        return None
    was = f"PID {target.value} is gone; it was the eyas run in {place}"
    told = rundir.answer(place, target, snapshot)
    if told is None:
        raise UsageError(f"{was}: see {place / 'log.txt'}")
    return told | {"sentence": f"{was}. {told['sentence']}"}


def _color() -> bool:
    """NO_COLOR and CLICOLOR_FORCE are honoured; otherwise colour on a terminal only."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0") or sys.stdout.isatty())


def _complain(error: EyasError) -> int:
    print(f"eyas: {error}", file=sys.stderr)
    for kind, code in (
        (UsageError, USAGE),
        (remote.HostUnreachable, UNREACHABLE),
        (NoPermission, NO_PERMISSION),
        (remote.DeadlinePassed, DEADLINE),
    ):
        if isinstance(error, kind):
            return code
    return 3
