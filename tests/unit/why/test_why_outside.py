"""Mechanisms that a judgement on programs from outside the lab brought to light (docs/accuracy-unseen.md)."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from eyas.why.facts import Facts
from eyas.why.judge import judge

CORPUS = Path(__file__).parents[2] / "faults" / "corpus"
UNSEEN = sorted((CORPUS.parent / "unseen").glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@pytest.mark.parametrize("path", UNSEEN, ids=[p.stem for p in UNSEEN])
def test_recorded_run(path: Path) -> None:
    """Snapshots of real runs, as they were seen; each was called wrong once."""
    entry = load(path)
    found = judge(entry["snapshot"])
    assert found.verdict in entry["expect"], [(c.verdict, c.score) for c in found.cases[:4]]


def recorded(name: str) -> dict[str, Any]:
    return copy.deepcopy(load(CORPUS.parent / "unseen" / f"{name}.json")["snapshot"])


def test_children_that_talk_are_ranks() -> None:
    facts = Facts(recorded("sleeping_rank"))
    assert [p.rank for p in facts.ranks] == [0, 1, 2]
    assert not facts.workers
    assert facts.main is facts.ranks[0]
    assert facts.procs[int(facts.job["main"])].kind == "launcher"


def test_children_that_do_not_talk_are_workers() -> None:
    snap = recorded("sleeping_rank")
    snap["sockets"] = []
    assert not Facts(snap).ranks


def test_children_numbered_by_their_environment_are_ranks() -> None:
    snap = recorded("own_launcher")
    snap["sockets"] = []
    assert [p.rank for p in Facts(snap).ranks] == [0, 1]


def test_a_queue_that_is_full_is_no_output_that_is_full() -> None:
    """The thread of a pool that hands out tasks waits for room most of the time."""
    verdicts = {c.verdict for c in judge(recorded("pool_worker_killed")).cases}
    assert "stuck.stdout-pipe" not in verdicts


def test_an_endless_loop_is_called_so_only_without_numerical_libraries_or_after_long() -> None:
    snap = recorded("numpy_metric_long")
    main = snap["processes"][str(snap["job"]["main"])]
    assert judge(snap).state == "quiet"
    main["libs"] = []
    assert judge(snap).verdict == "stuck.livelock"


@pytest.mark.parametrize(("lines", "habit"), [(200, True), (3, False)])
def test_a_log_is_late_by_a_habit_not_by_its_first_lines(lines: int, habit: bool) -> None:
    """A spinning main thread and no line for 20 min, after lines every two seconds. Many of them are a habit; three
    may be the quick steps before the long ones."""
    snap = copy.deepcopy(load(CORPUS / "D16.json")["snapshot"])
    log = snap["logs"][0]
    kept = b"".join(base64.b64decode(log["tail"]["b64"]).splitlines(keepends=True)[-lines:])
    log.update(tail={"offset": 0, "b64": base64.b64encode(kept).decode()}, size=len(kept), growth=[len(kept)] * 3)
    found = judge(snap)
    assert (found.verdict == "stuck.livelock") == habit, [(c.verdict, c.score) for c in found.cases[:4]]
