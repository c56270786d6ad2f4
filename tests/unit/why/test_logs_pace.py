"""Pace, ETA, line interval, spikes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loglines import bar, redraws, said, stamp


@given(st.floats(0.02, 60), st.integers(30, 400))
@settings(max_examples=40, deadline=None)
def test_pace_of_a_bar_is_right_for_any_speed(seconds: float, steps: int) -> None:
    facts = said(redraws(1000, steps, seconds))
    span = seconds * steps
    if span < 20:
        return  # a clock of whole seconds cannot say more
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(seconds, rel=0.2)
    assert facts.eta_s == pytest.approx((1000 - steps) * facts.pace.seconds_per_step, rel=0.01)


def test_the_first_step_and_pauses_do_not_move_the_pace() -> None:
    t, log = 0.0, ""
    for step in range(1, 200):
        t += 90 if step == 1 else 240 if step % 50 == 0 else 2
        log += f"{stamp(t - 2000)},000 - INFO - step {step}/1000 loss 1.0\n"
    facts = said(log)
    assert facts.pace is not None and facts.pace.seconds_per_step == 2
    assert facts.line_interval_s == 2
    assert facts.eta_s == 801 * 2


def test_first_step_is_kept_apart() -> None:
    log = "".join("\r" + bar(i, 50, 0 if i == 0 else 100 + 10 * (i - 1)) for i in range(12))
    facts = said(log)
    assert facts.pace is not None
    assert (facts.pace.first_step, facts.pace.seconds_per_step) == (100, 10)


def test_first_epoch_against_warm_ones() -> None:
    log = (
        redraws(20, 20, 30.0, desc="Epoch 1/3")
        + redraws(20, 20, 3.0, desc="Epoch 2/3")
        + redraws(20, 9, 3.0, desc="Epoch 3/3")
    )
    facts = said(log)
    assert facts.pace is not None
    assert facts.pace.first_epoch == pytest.approx(30)
    assert facts.pace.warm == pytest.approx(3, rel=0.2)
    assert (facts.epoch, facts.epochs, facts.step) == (3, 3, 9)


def test_a_restart_begins_anew() -> None:
    log = redraws(100, 60, 1.0) + "\n" + redraws(100, 30, 4.0)
    facts = said(log)
    assert facts.step == 30
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(4, rel=0.1)


def test_log_interval_and_next_line() -> None:
    log = "".join(f"{stamp(i * 100 - 2000)} step {i * 50}/10000\n" for i in range(1, 15))
    facts = said(log)
    assert (facts.steps_per_line, facts.line_interval_s) == (50, 100)
    assert facts.pace is not None and facts.pace.seconds_per_step == 2


@pytest.mark.parametrize("workers", [4, 8, 12])
def test_spikes_every_num_workers_steps_are_found(workers: int) -> None:
    noise = random.Random(workers)
    log = ""
    for step in range(1, 120):
        ms = (4000 if step % workers == 0 else 300) * noise.uniform(0.9, 1.1)
        log += f"iter {step}: loss 1.0, time {ms:.2f}ms, mfu 1.0%\n"
    spikes = said(log).spikes
    assert spikes is not None and spikes.period == workers
    assert spikes.ratio == pytest.approx(13.3, rel=0.1)


def test_spikes_are_found_in_a_bar() -> None:
    t, log = 0.0, ""
    for step in range(1, 160):
        t += 6.0 if step % 8 == 0 else 0.15
        log += "\r" + bar(step, 1000, t)
    spikes = said(log).spikes
    assert spikes is not None and spikes.period == 8


def test_even_steps_and_rare_pauses_are_no_spikes() -> None:
    noise = random.Random(1)
    even = "".join(f"iter {i}: loss 1.0, time {300 * noise.uniform(0.8, 1.2):.2f}ms, mfu 1.0%\n" for i in range(200))
    pauses = "".join(
        f"iter {i}: loss 1.0, time {5000 if i in (17, 40, 99, 131) else 300}ms, mfu 1.0%\n" for i in range(200)
    )
    assert said(even).spikes is None
    assert said(pauses).spikes is None


def test_head_and_tail_with_unread_bytes_between() -> None:
    lines = [f"{stamp(i * 2 - 80_000)} step {i}/100000 loss 1.0 {'x' * 40}\n" for i in range(1, 40_000)]
    data = "".join(lines).encode()
    assert len(data) > 400_000
    facts = said(data)
    assert facts.step == 39_999 and not facts.lines_exact
    assert facts.lines == pytest.approx(40_000, rel=0.02)
    assert facts.pace is not None and facts.pace.seconds_per_step == 2
    assert facts.first_line.startswith(stamp(2 - 80_000))


def test_bad_loss() -> None:
    facts = said("".join(f"step {i}/100, loss nan\n" for i in range(1, 5)))
    assert facts.bad_loss and "nan" in facts.notes
    assert facts.to_dict()["loss"] == "nan"


def test_facts_survive_json() -> None:
    import json

    from eyas.why.logs.facts import LogFacts

    facts = said(redraws(100, 40, 2.0) + "\nKilled\n")
    again = LogFacts.from_dict(json.loads(json.dumps(facts.to_dict(), allow_nan=False)))
    assert again == facts
