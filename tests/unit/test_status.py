"""A run speaks at its first step and then at least every interval, whatever its loop does, and not more often.

Time is a number here that the tests move, so that nothing depends on how fast the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from eyas.train import status as status_module
from eyas.train.status import Status


class Clock:
    """Stands in for `time` in the module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    fake = Clock()
    monkeypatch.setattr(status_module, "time", fake)
    yield fake


def looked(status: Status, clock: Clock, seconds: float) -> None:
    """Let `seconds` pass in which the loop says nothing while the thread looks every quarter."""
    for _ in range(round(seconds * 4)):
        clock.now += 0.25
        status._look()


def test_the_first_step_is_said_at_once(clock: Clock) -> None:
    said: list[str] = []
    status = Status(said.append, 10)
    status.begin()
    status.phase = "waiting for data"
    looked(status, clock, 3)
    assert said == []
    status.step("step 1/50", lambda: "step 1/50 · loss 2.0", force=True)
    assert said == ["step 1/50 · loss 2.0"]


@pytest.mark.parametrize("pace", [0.01, 0.3, 1.0, 4.0, 9.0])
def test_steady_steps_are_said_at_least_every_interval_and_not_much_more(clock: Clock, pace: float) -> None:
    said: list[float] = []
    status = Status(lambda _text: said.append(clock.now), 10)
    status.begin()
    for n in range(round(100 / pace)):
        status.phase = "training step"
        status._look()
        clock.now += pace
        status.step(f"step {n}", lambda: "line", force=n == 0)
    gaps = [b - a for a, b in pairwise(said)]
    assert max(gaps) <= 10 + 1e-6
    assert min(gaps) >= min(5.0, 10 - pace) - 1e-6
    assert len(said) <= 100 / min(gaps) + 2


def test_a_loop_that_hangs_is_spoken_for(clock: Clock) -> None:
    said: list[tuple[float, str]] = []
    status = Status(lambda text: said.append((clock.now, text)), 10)
    status.begin()
    status.step("step 812/45,000", lambda: "fine", force=True)
    status.phase = "waiting for data"
    looked(status, clock, 35)
    assert [text for _, text in said] == [
        "fine",
        "step 812/45,000 · waiting for data for 10 s",
        "step 812/45,000 · waiting for data for 20 s",
        "step 812/45,000 · waiting for data for 30 s",
    ]
    assert [at - 1000 for at, _ in said] == [0, 10, 20, 30]


def test_a_run_that_never_gets_its_first_batch_says_so(clock: Clock) -> None:
    said: list[str] = []
    status = Status(said.append, 10)
    status.begin()
    status.phase = "waiting for data"
    looked(status, clock, 21)
    assert said == ["starting · waiting for data for 10 s", "starting · waiting for data for 20 s"]


def test_a_line_of_any_kind_restarts_the_interval(clock: Clock) -> None:
    said: list[str] = []
    status = Status(said.append, 10)
    status.begin()
    status.phase = "validating"
    looked(status, clock, 8)
    status.line("validation: 1.8")
    looked(status, clock, 8)
    assert said == ["validation: 1.8"]


def test_the_line_is_made_only_when_it_is_said(clock: Clock) -> None:
    made: list[int] = []
    status = Status(lambda _text: None, 10)
    status.begin()
    for n in range(100):
        clock.now += 0.1
        status.step(f"step {n}", lambda: made.append(1) or "line", force=n == 0)  # type: ignore[func-returns-value]
    assert len(made) <= 2


def test_the_thread_itself_speaks_while_the_loop_is_stuck() -> None:
    spoken = threading.Event()
    with Status(lambda text: spoken.set() if "stuck for" in text else None, interval=0.05) as status:
        status.phase = "stuck"
        assert spoken.wait(30)
    assert not any(t.name == "eyas-status" for t in threading.enumerate())


def test_a_run_that_fails_stops_the_thread() -> None:
    with pytest.raises(RuntimeError), Status(lambda _text: None, interval=5) as status:
        status.phase = "training step"
        raise RuntimeError
    assert not any(t.name == "eyas-status" for t in threading.enumerate())
