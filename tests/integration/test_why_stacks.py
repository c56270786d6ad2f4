"""`--stacks` and `--deep`: more is seen, the target goes on as before, and nobody waits for one that cannot answer."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from whylab import look, running, wait_for

from eyas.why.command import _py_spy

BUSY = """
    import time
    def inner_loop():
        ready()
        while True:
            time.sleep(0.01)
    inner_loop()
"""
PY_SPY = _py_spy()
needs_py_spy = pytest.mark.skipif(not shutil.which(PY_SPY), reason="py-spy is an optional extra")


def state(pid: int) -> tuple[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith("State")), next(
        line.split()[1] for line in text.splitlines() if line.startswith("TracerPid")
    )


@needs_py_spy
def test_python_frames_are_shown_and_nothing_is_left_traced() -> None:
    with running(BUSY) as p:
        snap = look(p.pid, stacks=True, py_spy=PY_SPY)
        assert state(p.pid)[1] == "0" and state(p.pid)[0] in "SR"
    stack = snap["stacks"][str(p.pid)]
    assert stack["status"] == "ok"
    assert "inner_loop" in [frame["func"] for thread in stack["threads"] for frame in thread["frames"]]
    assert (stack["tracer_after"], stack["state_after"] in "SR") == (0, True)


@needs_py_spy
def test_stacks_of_a_stopped_process_come_back_and_leave_it_stopped() -> None:
    with running(BUSY) as p:
        os.kill(p.pid, signal.SIGSTOP)
        wait_for(lambda: state(p.pid)[0] == "T")
        began = time.monotonic()
        snap = look(p.pid, stacks=True, py_spy=PY_SPY)
        assert time.monotonic() - began < 15
        assert state(p.pid) == ("T", "0")
    assert snap["stacks"][str(p.pid)]["status"] in ("ok", "error", "timed_out")


@needs_py_spy
def test_stacks_of_a_process_in_uninterruptible_sleep_come_back() -> None:
    code = "import ctypes\nl = ctypes.CDLL(None)\nready()\nif l.vfork() == 0:\n    l.sleep(15)\n    l._exit(0)"
    with running(code) as p:
        began = time.monotonic()
        snap = look(p.pid, stacks=True, py_spy=PY_SPY)
        assert time.monotonic() - began < 15
        for child in Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    assert snap["target"]["exists"]


def test_a_host_without_py_spy_says_so_and_how_to_get_it() -> None:
    with running(BUSY) as p:
        snap = look(p.pid, stacks=True, py_spy="/nonexistent/py-spy")
    assert snap["stacks"][str(p.pid)]["status"] == "absent"
    assert any("pip install py-spy" in missed["needs"] for missed in snap["not_visible"])


def test_a_py_spy_that_hangs_is_left_after_two_seconds(tmp_path: Path) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    tool.chmod(0o755)
    with running(BUSY) as p:
        began = time.monotonic()
        snap = look(p.pid, stacks=True, py_spy=str(tool))
        assert time.monotonic() - began < 15
        assert state(p.pid)[1] == "0"
    assert snap["stacks"][str(p.pid)]["status"] == "timed_out"


def test_two_seconds_of_system_calls_on_request_and_the_target_runs_on() -> None:
    assert shutil.which("strace"), "strace must be installed for this test"
    with running(BUSY) as p:
        snap = look(p.pid, stacks=True, deep=True, py_spy=PY_SPY, timeout=30.0)
        wait_for(lambda: state(p.pid)[1] == "0")
        assert state(p.pid)[0] in "SR"
    calls = snap["deep"][str(p.pid)]["strace"]
    assert calls["status"] == "ok"
    assert sum(calls["counts"].get(name, 0) for name in ("clock_nanosleep", "select", "pselect6")) > 10
    assert snap["deep"][str(p.pid)]["tracer_after"] == 0
