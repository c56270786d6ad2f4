"""Counters that no format knows, and sentences that only look like them."""

from __future__ import annotations

import json

import pytest
from loglines import said


@pytest.mark.parametrize(
    ("line", "step", "total"),
    [
        ("Episode {n} reward {x:.2f} eps 0.10", 8, None),
        ("{n}/20000 loss: {x:.3f}", 8, 20000),
        ("s={n} l={x:.3f}", 8, None),
        ("Train: {n}/500 cost={x:.3f}", 8, 500),
        ("{n:05d} | ppl {x:.2f}", 8, None),
        ("generation {n}: best 3.1e-4, mean {x:.4f}", 8, None),
        ("game {n} nan", 8, None),
    ],
)
def test_a_sentence_that_counts_is_progress(line: str, step: int, total: int | None) -> None:
    facts = said("".join(line.format(n=n, x=3 / n) + "\n" for n in range(1, 9)))
    assert (facts.step, facts.total, facts.progress_lines) == (step, total, 8)
    assert facts.last_progress == line.format(n=8, x=3 / 8)


@pytest.mark.parametrize(
    "line",
    [
        "heartbeat {n}, memory 3.{n} GB",
        "still alive after {n} s (load 1.{n})",
        "WARNING shard: refused; retry {n} in 2.{n} s",
        "tick {n}",
        "loaded shard {n} in 0.{n} s",
        "GPU busy (17.{n} GB in use), waiting 60s",
    ],
)
def test_a_sign_of_life_is_no_progress(line: str) -> None:
    assert said("".join(line.format(n=n) + "\n" for n in range(1, 9))).progress_lines == 0


def test_two_lines_are_not_enough() -> None:
    assert said("Episode 1 reward 0.1\nEpisode 2 reward 0.2\n").progress_lines == 0


def test_records_printed_over_several_lines() -> None:
    records = [{"epoch": 0, "global_step": n, "metrics": {"loss": 3 / n}} for n in range(1, 6)]
    assert said("".join(json.dumps(r, indent=2) + "\n" for r in records)).step == 5
