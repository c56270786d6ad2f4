"""Locks held outside the job, with real locks and real waiters: who is found, and who is not blamed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whylab import look, running

from eyas.why.judge import facts_of, judge
from eyas.why.locks import awaited

TIMES = (0.0, 1.0, 2.2)
HOLD = "import fcntl, sys, time\nf = open(sys.argv[1], 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\nready()\ntime.sleep(600)"
POLL = """
import fcntl, sys, time
ready()
while True:  # as filelock does: open, try, close, nap
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_TRUNC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except OSError:
        os.close(fd)
    time.sleep(0.05)
time.sleep(600)
"""
NAP = "import time\nready()\nwhile True:\n    time.sleep(0.05)"
BATON = """
import sys, time
if sys.argv[2:] == ["make"]:
    fd = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)  # torch's FileBaton: open while held
    ready()
    time.sleep(600)
ready()
while os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""


def waits_for(snap: dict[str, Any], pid: int) -> tuple[str | None, int | None, str] | None:
    f = facts_of(snap)
    found = awaited(f, f.procs[pid])
    return (found.path, found.holder.pid if found.holder else None, found.how) if found else None


@pytest.fixture
def lock(tmp_path: Path) -> str:
    return str(tmp_path / "data.arrow.lock")


@pytest.fixture(params=["all CPUs", "one CPU"])
def cpus(request: pytest.FixtureRequest) -> Iterator[None]:
    """On one CPU the waiter is driven off it by the very look at his opening."""
    before = os.sched_getaffinity(0)
    if request.param == "one CPU":
        os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("cpus")
def test_the_holder_of_a_polled_flock_is_named_though_the_waiter_has_nothing_open(lock: str, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    with running(HOLD, lock, cwd=other) as holder, running(POLL, lock, cwd=other) as waiter:
        snap = look(waiter.pid, times=TIMES)
        assert waits_for(snap, waiter.pid) == (lock, holder.pid, "polled")
        found = judge(snap)
    assert found.verdict == "stuck.lock-file"
    assert any(link["kind"] == "lock" and link["pid"] == holder.pid and lock in link["words"] for link in found.chain)
    assert snap["errors"] == [] and snap["probes_timed_out"] == []


def test_one_who_only_naps_beside_it_is_not_said_to_wait_for_it(lock: str) -> None:
    with running(HOLD, lock), running(POLL, lock), running(NAP) as other:
        snap = look(other.pid, times=TIMES)
    assert next(x for x in snap["lockfiles"] if x["path"] == lock)["opens"] >= 5
    assert waits_for(snap, other.pid) is None
    assert judge(snap).verdict != "stuck.lock-file"


def test_a_blocked_flock_whose_taker_died_is_held_by_the_child_that_inherited_it(lock: str) -> None:
    heir = HOLD.replace("ready()", "pid = os.fork()\nif pid: os._exit(0)\nready()")
    taker = "import fcntl, sys, time\nready()\nf = open(sys.argv[1], 'w')\nfcntl.flock(f, fcntl.LOCK_EX)"
    with running(heir, lock) as gone, running(taker, lock) as waiter:
        snap = look(waiter.pid, times=TIMES)
        found = waits_for(snap, waiter.pid)
        assert found is not None and found[0] == lock and found[2] == "blocked"
        child = found[1]
        assert child not in (None, gone.pid, waiter.pid)
        assert str(Path(f"/proc/{child}/fd/3").readlink()) == lock
        os.kill(int(child or 0), 9)


@pytest.mark.parametrize("alive", [True, False])
def test_a_build_lock_by_existence_has_a_maker_or_none(tmp_path: Path, alive: bool) -> None:
    build = tmp_path / "py311_cpu" / "ext"
    build.mkdir(parents=True)
    path = str(build / "lock")
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with running(BATON, path, "make") as maker:
        old = time.time() - 900
        os.utime(path, (old, old))
        if not alive:
            maker.kill()
            maker.wait()
        with running(BATON, path, env=env) as waiter:
            snap = look(waiter.pid, times=TIMES)
    found = judge(snap)
    assert found.verdict == "stuck.lock-file"
    words = next(link["words"] for link in found.chain if link["kind"] == "lock")
    if alive:
        assert f"held by PID {maker.pid}" in words
        assert found.case.pids == [maker.pid]
    else:
        assert "left behind, there for 15 min: its maker is gone" in words
        assert found.case.pids == []


def test_a_soft_lock_names_its_dead_maker(tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    with running("ready()\nimport time\ntime.sleep(600)") as maker:
        path.write_text(f"{maker.pid}\n{os.uname().nodename}\n")
    old = time.time() - 600
    os.utime(path, (old, old))
    with running(BATON, str(path), cwd=tmp_path) as waiter:
        snap = look(waiter.pid, times=TIMES)
    entry = next(x for x in snap["lockfiles"] if x["path"] == str(path))
    assert entry["owner"] == {"pid": maker.pid, "host": os.uname().nodename, "alive": False}
    assert entry["holders"] == [] and entry["opens"] == 0
    assert "its maker is gone" in " ".join(link["words"] for link in judge(snap).chain)
