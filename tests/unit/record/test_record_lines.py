"""When a run speaks, and what it says of its losses. Time is a number here that the tests move."""

from __future__ import annotations

import io
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyas.errors import EyasError
from eyas.record import events, look
from eyas.record import phases as phases_module
from eyas.record import record as record_module
from eyas.record.console import Live, Prefixed, step_line
from eyas.record.record import Record
from eyas.record.words import clock, phase_words
from eyas.why.waits import classify


class Clock:
    """The monotonic clock, in seconds."""

    now = 1000.0

    def ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock_(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    for module in (record_module, phases_module):
        monkeypatch.setattr(module, "monotonic_ns", fake.ns)
    return fake


@pytest.mark.parametrize("pace", [0.01, 0.3, 1.0, 4.0, 9.0])
def test_steady_steps_are_said_at_least_every_ten_seconds_and_not_much_more(clock_: Clock, pace: float) -> None:
    said: list[float] = []
    rec = Record(None, say=lambda _text: said.append(clock_.now))
    rec.begin(0)
    for _ in range(round(100 / pace)):
        clock_.now += pace
        rec.step(loss=1.0)
    gaps = [b - a for a, b in pairwise(said)]
    assert said[0] == pytest.approx(1000 + pace), "the first step"
    assert max(gaps) <= 10.0 + 1e-6
    assert len(said) <= 100 / max(10 - pace, 1) + 3


def test_a_loop_that_goes_on_behind_its_last_step_has_no_time_left(clock_: Clock) -> None:
    said: list[str] = []
    rec = Record(None, say=said.append)
    rec.begin(5)
    for _ in range(40):
        clock_.now += 1.0
        rec.step(loss=1.0)
    behind = [line for line in said if not line.startswith(("step 1/", "step 5/"))]
    assert behind and not any("left" in line for line in behind)
    assert rec.left is None and rec.beat_values()["left"] is None


def test_the_last_step_is_said(clock_: Clock) -> None:
    said: list[str] = []
    rec = Record(None, say=said.append)
    rec.begin(5)
    for _ in range(5):
        clock_.now += 0.1
        rec.step(loss=1.0)
    assert [line.partition(" · ")[0] for line in said] == ["step 1/5", "step 5/5"]


def test_a_resumed_run_speaks_at_its_own_first_step(clock_: Clock) -> None:
    said: list[str] = []
    rec = Record(None, say=said.append)
    rec.begin(500, step=311)
    clock_.now += 2.0
    rec.step(loss=1.0)
    assert said and said[0].startswith("step 312/500") and said[0].endswith(f"{clock(2.0 * 188)} left")


def test_an_exploding_loss_is_said_at_once_with_its_samples(clock_: Clock) -> None:
    said: list[str] = []
    rec = Record(None, say=said.append)
    rec.begin(0)
    for i in range(40):
        clock_.now += 0.1
        rec.step(loss=2.0 + 0.2 * (i % 3), samples=lambda: ["never"])
    assert len(said) == 1, "noise is no explosion"
    rec.step(loss=9.0, samples=lambda: ["c7", "c9"])
    assert said[1].startswith("warning: the loss explodes: 9 at step 41") and said[1].endswith("samples c7, c9")
    rec.step(loss=9.5, samples=lambda: ["c8"])
    assert len(said) == 2, "once in a while"


def test_a_loss_that_is_no_number_is_said_also_at_the_first_step() -> None:
    said: list[str] = []
    rec = Record(None, say=said.append)
    rec.begin(0)
    rec.step(loss=float("nan"), samples=["c1"])
    assert "the loss is no number: nan at step 1" in said[0] and "c1" in said[0]
    assert rec.bad_loss(float("inf"), 1.0, 2, ["c2", "c3"], skipped=True) == "the loss is inf at step 2: samples c2, c3"
    assert said[-1].endswith("the step is skipped (--on-nan skip)")


def test_data_and_its_loader_are_followed() -> None:
    class Loader:
        nbytes = 0
        closed = False

        def __iter__(self) -> Any:
            try:
                for i in range(3):
                    self.nbytes += 100
                    assert rec.doing == "waiting for data"
                    yield i
            finally:
                self.closed = True

    rec, loader = Record(None), Loader()
    for _ in rec.data(loader):
        assert rec.doing == "computing"
        rec.step()
    assert rec.nbytes == 300 and loader.closed
    rec.step()
    assert rec.beat_values()["bytes"] == 300


def test_parts_of_a_long_phase_count_as_progress() -> None:
    rec = Record(None)
    rec.enter("validating")
    seen = [(rec.beat_values()["part"], rec.beat_values()["parts"]) for _ in rec.follow("abc", 3)]
    assert seen == [(0, 3), (1, 3), (2, 3)] and rec.beat_values()["part"] == 3


def test_the_words_of_a_line() -> None:
    b = {"phase": "waiting for data", "since": 100.0, "part": 0, "parts": 0, "file": "data_9142.pt", "queue": 0}
    assert phase_words(b, 114.2, 212e6, 720e6) == (
        "waiting for data 14 s · data_9142.pt · 0 ready · 212.0 MB/s of the 720 needed"
    )
    speed = {"tokens_per_s": 8120.4, "data_wait": 0.4, "bytes_per_s": 2e8, "bytes_needed_per_s": 5e8, "left": 7000.0}
    figures = {"epoch": "1/10", "loss": 2.03125, "accuracy": [0.5, 0.25], "lr": 1e-3}
    assert step_line(812, 45_000, figures, speed) == (
        "step 812/45,000 · epoch 1/10 · loss 2.0312 · accuracy 0.500/0.250 · lr 1.00e-03 · 8,120 tokens/s · "
        "data wait 40% · 200.0 MB/s of the 500 needed · 1 h 57 min left"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_display_breaks_no_figure_and_stays_within_its_terminal(width: int, clock_: Clock) -> None:
    rec = Record(None, say=lambda _text: None)
    live = Live(rec)
    live.console = Console(width=width, file=io.StringIO(), color_system=None)
    rec.begin(162_000)
    clock_.now += 2
    rec.step(loss=0.1721, tokens=9000, epoch="2/300", accuracy=[0.233, 0.07, 0.116], lr=1.31e-4, grad_norm=0.18)
    rec.enter("waiting for data")
    live.console.print(live.render())
    bar, now, *figures = live.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "step 1/162,000" in bar and "left" in bar and now.startswith("waiting for data ")
    parts = " · ".join(line.rstrip() for line in figures).split(" · ")
    assert {"loss 0.1721", "lr 1.31e-04", "accuracy 0.233/0.070/0.116", "grad norm 0.18"} <= set(parts)
    assert all(len(line) <= width for line in (bar, now, *figures))


def test_shares_of_phases_count_the_one_that_goes_on_and_no_time_twice() -> None:
    rec = Record(None)
    rec.enter("generating")
    time.sleep(0.05)
    rec.begin(10)  # the meter begins here, in the middle of the phase
    time.sleep(0.1)
    first = rec._event_meter.take()["phases"]
    assert set(first) == {"generating"} and first["generating"] == pytest.approx(1.0, abs=0.02)
    time.sleep(0.05)
    rec.enter("saving")
    time.sleep(0.05)
    both = rec._event_meter.take()["phases"]
    assert set(both) == {"generating", "saving"} and sum(both.values()) == pytest.approx(1.0, abs=0.02)


def test_the_time_left_follows_the_work_and_not_the_units(clock_: Clock) -> None:
    rec = Record(None)
    rec.begin(100)
    clock_.now += 10.0
    rec.count(10, 5000, share=0.5)  # the longest samples come first
    assert rec._speed(rec._event_meter)["left"] == pytest.approx(10.0)


def test_the_pace_is_of_late_and_later_epochs_that_cost_more_are_counted(clock_: Clock) -> None:
    """Two epochs of 100 packs, the first at 0.4 of the second's cost; its first step takes a minute more."""
    said: list[str] = []
    rec = Record(None, say=said.append)
    rec.begin(200)
    work = 100 * 0.4 + 100
    for n in range(1, 101):
        clock_.now += 4.0 + 60.0 * (n == 1)
        rec.step(loss=1.0, done=0.4 * n / work)
    b = rec.beat_values()
    assert (b["pace"], b["left"]) == (pytest.approx(4.0), pytest.approx(100 * 10.0)), "not 100 steps of 4.6 s"
    assert said[-1].endswith(f"{clock(1000.0)} left")
    rec.enter("validating")
    clock_.now += 30.0
    rec.enter("forward")
    for n in range(1, 71):
        clock_.now += 10.0
        rec.step(loss=1.0, done=(40 + n) / work)
    b = rec.beat_values()
    assert (b["pace"], b["step"]) == (pytest.approx(10.0), 170), "the cheap epoch is forgotten, the validation none"
    assert b["left"] == pytest.approx(30 * 10.0 + 30.0 * 30 / 170), "validations come on as often as they came"
    assert rec.left == pytest.approx(b["left"])


def test_a_run_of_unknown_length_has_a_pace_and_no_end(clock_: Clock) -> None:
    rec = Record(None, say=lambda _text: None)
    assert (rec.beat_values()["pace"], rec.beat_values()["left"]) == (None, None)
    rec.begin(0)
    clock_.now += 3.0
    rec.step(loss=1.0)
    assert (rec.beat_values()["pace"], rec.beat_values()["left"]) == (3.0, None)


def test_figures_may_be_called_like_what_an_event_has_already(tmp_path: Path) -> None:
    own = {"rank": 7, "time": 0.25, "event": "x", "kind": 3, "memory": 5, "cpu": 1, "phases": 2, "left": 9, "by": "me"}
    with Record(tmp_path / "run", say=lambda _text: None, make=True) as rec:
        rec.step(loss=1.0, **own)
    (step,) = [e for e in events.read(tmp_path / "run" / "events.jsonl") if e["event"] == "step"]
    assert (step["rank"], step["step"], step["loss"]) == (0, 1, 1.0) and step["time"] > 1.7e9
    assert (step["rank_"], step["time_"], step["event_"]) == (7, 0.25, "x")
    assert [step[name] for name in ("kind", "memory", "cpu", "phases", "left", "by")] == [3, 5, 1, 2, 9, "me"]


def test_the_side_process_marks_its_lines_as_the_caller_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    given: dict[str, Any] = {}

    def keep(settings: dict[str, Any], _stacks: object) -> None:
        given.update(settings)
        raise OSError("not in this test")

    monkeypatch.setattr(record_module, "start_sidecar", keep)
    with Record(tmp_path / "run", say=Prefixed("[5/7 train] ", said.append)) as rec:
        rec.line("one\ntwo")
    assert given["prefix"] == "[5/7 train] " and "[5/7 train] one\n[5/7 train] two" in said


def test_a_recorder_is_for_one_run(tmp_path: Path) -> None:
    rec = Record(tmp_path / "run", say=lambda _text: None, make=True)
    with rec:
        rec.step(loss=1.0)
    with pytest.raises(EyasError, match="make a new one for another run"), rec:
        pass
    assert [e["event"] for e in events.read(tmp_path / "run" / "events.jsonl")] == ["start", "step", "end"]


def test_the_display_goes_when_what_was_said_is_there(tmp_path: Path) -> None:
    order: list[str] = []

    class Display:
        def stop(self) -> None:
            order.append("the display goes")

    def slowly(text: str) -> None:
        time.sleep(0.1)
        order.append(text)

    with Record(tmp_path / "run", say=slowly, make=True) as rec:
        rec._live = Display()  # type: ignore[assignment]
        rec.line("the last line")
    assert order[1:] == ["the last line", "the display goes"]


def test_a_loop_that_tells_of_steps_alone_does_not_start_for_ever(clock_: Clock) -> None:
    rec = Record(None, say=lambda _text: None)
    for _ in range(3):
        clock_.now += 2.0
        rec.step(loss=1.0)
    b = rec.beat_values()
    assert (b["phase"], b["since"], b["phases"]["starting"][0]) == ("computing", clock_.now, 1)
    assert b["phases"]["computing"][::2] == (2, 2.0), "what is usual is learnt from step to step"
    rec.enter("validating")
    rec.step(loss=1.0)
    assert rec.doing == "validating", "what the loop says it does stays"


def test_a_directory_that_cannot_be_made_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    rec = Record(tmp_path / "file" / "run", say=said.append, make=True)
    with pytest.raises(EyasError, match="cannot make the run directory"):
        rec.__enter__()
    assert rec._sidecar is not None and rec._sidecar.poll() == 0
    assert rec._stop.is_set() and rec.beat.path is not None and not rec.beat.path.exists()


def test_a_process_without_a_cpu_is_not_said_to_hold_the_gil() -> None:
    def main_thread(cpu: float) -> look.Process:
        return look.Process("R", cpu, {7: ("python", classify("R", None, None))})

    def said(cpu: float) -> str:
        return look.words(7, main_thread(10.0), main_thread(10.0 + cpu), 10.0, python_idle=8.0)

    assert said(0.3) == "no Python code has run for 8 s; the main thread waits for a CPU, of which it got 3%"
    assert said(9.9) == "no Python code has run for 8 s: something holds the GIL; the main thread is on the CPU"
