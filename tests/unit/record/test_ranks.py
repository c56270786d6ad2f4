"""Which rank is slow, and which one the others wait for. Their beats are real; their time is a number here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.record import beat, events
from eyas.record.beat import Beat
from eyas.record.ranks import Ranks


def beats(step: int, slow: float, rank: int = 5, phase: str = "waiting for data") -> dict[int, dict[str, Any]]:
    """Eight ranks after `step` steps of 0.2 s, of which `rank` takes `slow` seconds more than 0.01 in a phase."""
    found = {}
    for r in range(8):
        phases = dict.fromkeys(("waiting for data", "copying", "forward"), (step, step * 0.01, 0.01))
        if r == rank:
            phases[phase] = (step, step * (0.01 + slow), 0.0)
        found[r] = {"rank": r, "step": step, "phases": phases}
    return found


def said(ranks: Ranks, looks: list[dict[int, dict[str, Any]]], every: float = 4.0) -> list[str]:
    """What is said over looks so many seconds apart."""
    lines = []
    for i, each in enumerate(looks):
        ranks.beats = each
        lines.append(ranks.straggler(100.0 + every * i))
    return lines


def test_a_slow_rank_is_named_with_what_it_is_slow_in_after_two_windows_and_once() -> None:
    looks = [beats(20 * i, 0.06) for i in range(6)]
    line = "rank 5 is 3.0 times slower than the others: waiting for data"
    assert said(Ranks(None, 0), looks) == ["", "", line, "", "", ""]
    looks = [beats(20 * i, 0.06, 7, "forward") for i in range(3)]
    assert said(Ranks(None, 0), looks)[-1] == "rank 7 is 3.0 times slower than the others: forward"


def test_one_slow_window_and_a_slowness_that_costs_nothing_are_not_told() -> None:
    cumulated = [beats(0, 0), beats(20, 0.06), beats(40, 0.03), beats(60, 0.02)]  # slow in the first window alone
    assert said(Ranks(None, 0), cumulated) == [""] * 4
    assert said(Ranks(None, 0), [beats(20 * i, 0.016) for i in range(4)]) == [""] * 4, "1.5 times, but 8 % of a step"


def test_long_steps_make_long_windows() -> None:
    lines = said(Ranks(None, 0), [beats(i, 3.0) for i in range(8)])
    assert [i for i, line in enumerate(lines) if line] == [4], "two steps a window, two windows"


def test_ranks_that_stand_still_or_come_late_are_no_stragglers() -> None:
    assert said(Ranks(None, 0), [beats(7, 9.0)] * 5) == [""] * 5
    alone = {0: beats(3, 0)[0]}
    assert said(Ranks(None, 0), [alone, alone, beats(20, 0.06), beats(40, 0.06)]) == [""] * 4


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[Ranks, Path, subprocess.Popen[bytes]]]:
    """Rank 0 is this process, rank 1 one that waits for a signal; both have a beat in the run directory."""
    program = "import signal, time; signal.signal(12, lambda *_: time.sleep(100)); signal.pause()"
    other = subprocess.Popen([sys.executable, "-S", "-c", program])
    ranks = Ranks(tmp_path, 0)
    for rank, pid in enumerate((os.getpid(), other.pid)):
        made = Beat("run", rank, 2, 300, tmp_path / f"{rank}.beat")
        made.slots[beat.PID], made.slots[beat.STARTTIME] = pid, beat.starttime(pid)
        made.slots[beat.STEP] = 12
        (tmp_path / ("beat" if rank == 0 else "beat.1")).symlink_to(tmp_path / f"{rank}.beat")
        setattr(ranks, f"beat{rank}", made)
    ranks.find()
    yield ranks, tmp_path, other
    other.kill()
    other.wait()


def at(ranks: Any, rank: int, phase: str, step: int = 12) -> None:
    slots = getattr(ranks, f"beat{rank}").slots
    slots[beat.PHASE], slots[beat.STEP] = beat.FIXED_PHASES.index(phase), step
    ranks.read()


def test_the_rank_that_stands_before_the_others_is_behind(job: Any) -> None:
    ranks, _, other = job
    at(ranks, 0, "waiting for ranks")
    at(ranks, 1, "waiting for data")
    line = ranks.waited_for(beat.read(ranks.beat1.memory)["since"] + 12)
    assert line.startswith(f"rank 1 (PID {other.pid}) is behind: step 12/300 · waiting for data 12 s")
    at(ranks, 1, "forward", 11)
    assert "is behind: step 11/300 · forward" in ranks.waited_for(100.0)
    at(ranks, 1, "waiting for ranks")
    assert ranks.waited_for(100.0) == "", "both wait: nobody can be named"
    at(ranks, 1, "backward")
    assert ranks.waited_for(100.0) == "", "this rank is behind itself"
    at(ranks, 0, "forward")
    at(ranks, 1, "waiting for data")
    assert ranks.waited_for(100.0) == "", "it computes, and waits for nobody"


def test_of_ranks_at_the_same_place_the_one_that_sleeps_is_waited_for(job: Any) -> None:
    ranks, _, other = job
    at(ranks, 0, "backward")
    at(ranks, 1, "backward")
    while "pause" not in Path(f"/proc/{other.pid}/wchan").read_text():
        time.sleep(0.01)
    assert ranks.waited_for(100.0) == ""
    os.kill(other.pid, 12)  # SIGUSR2
    while not (line := ranks.waited_for(100.0)):
        pass
    assert line.startswith(f"rank 1 (PID {other.pid}) is behind: step 12/300 · backward"), line
    assert "sleeping by the clock" in ranks.waited_for(101.0)


def test_a_rank_that_can_do_nothing_any_more_is_waited_for(job: Any) -> None:
    ranks, folder, other = job
    at(ranks, 0, "backward")
    at(ranks, 1, "backward")
    os.kill(other.pid, 19)  # SIGSTOP
    who = f"rank 1 (PID {other.pid})"
    stopped = f"is stopped (kill -CONT {other.pid} lets it go on)"
    while not ranks.waited_for(100.0):
        pass
    assert ranks.waited_for(100.0) == f"waits for {who}, which {stopped}"
    at(ranks, 0, "forward")
    assert ranks.waited_for(100.0) == f"{who} {stopped}"
    at(ranks, 0, "backward")
    other.kill()
    while "is gone" not in ranks.waited_for(100.0):
        pass
    assert ranks.someone_else()
    (folder / "1.beat").unlink()  # its sidecar has let it go, and said how it ended
    ranks.beat1.slots[beat.STATE], ranks.beat1.slots[beat.EXIT] = beat.FAILED, 9
    ranks.read()
    assert ranks.waited_for(100.0) == f"waits for {who}, which was killed by SIGKILL"


def test_the_first_failure_is_never_one_that_only_followed(tmp_path: Path) -> None:
    mine = {"rank": 0, "started_wall": 1000.0}
    ranks = Ranks(tmp_path, 0)
    assert ranks.first_failure(mine) == "", "no events yet"

    def write(*ends: dict[str, Any]) -> None:
        made = [{"event": "end", "how": "error", **end} for end in ends]
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in made))
        assert len(list(events.read(tmp_path / "events.jsonl"))) == len(ends)

    zero = {"rank": 0, "time": 1010.0, "text": "another rank is gone", "follows": True}
    one = {"rank": 1, "time": 1010.2, "how": "vanished", "text": "rank 1: the end: it was killed"}
    write(zero, one)
    assert ranks.first_failure(mine) == "rank 1 failed first: the end: it was killed"
    write({**zero, "follows": False}, one)
    assert ranks.first_failure(mine) == "", "this rank was the first"
    write({**one, "time": 990.0})
    assert ranks.first_failure(mine) == "", "of an earlier run in this directory"
    write({**one, "how": "done"})
    assert ranks.first_failure(mine) == ""
