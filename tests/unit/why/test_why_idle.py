"""Idle by design, in words; a pool with nothing in flight; children born after the last line (docs/accuracy-unseen.md)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from eyas.why.compose import compose
from eyas.why.facts import Facts
from eyas.why.idle import idle_words
from eyas.why.judge import judge
from eyas.why.pools import drained, replaced

UNSEEN = Path(__file__).parents[2] / "faults" / "unseen"
FUTEX = ("futex_do_wait", {"name": "futex", "uaddr": 4096, "timeout": False})
POLL = ("poll_schedule_timeout", {"name": "poll", "timeout": False})
READ = ("anon_pipe_read", {"name": "read", "fd": 3, "kind": "pipe"})
SLEEP = ("hrtimer_nanosleep", {"name": "clock_nanosleep", "timeout": True})
ACCEPT = ("inet_csk_accept", {"name": "accept4", "fd": 3, "kind": "socket"})


def recorded(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((UNSEEN / f"{name}.json").read_text("utf-8"))
    return copy.deepcopy(entry["snapshot"])  # type: ignore[no-any-return]


def asleep(snap: dict[str, Any], waits: dict[int, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The same run with every thread asleep from the first look to the last; `waits`: TID -> where."""
    first = copy.deepcopy(snap["samples"][0]["procs"])
    for proc in first.values():
        for tid, thread in (proc.get("threads") or {}).items():
            site, call = waits.get(int(tid), FUTEX)
            thread.update(state="S", wchan=site, syscall=dict(call))
        proc["stat"]["state"] = "S"
    for sample in snap["samples"]:
        sample["procs"] = copy.deepcopy(first)
    return snap


def pool(**ages: float) -> dict[str, Any]:
    """A pool of two: the owner on a condition, one worker on the task queue, the other on that queue's lock."""
    snap = asleep(recorded("pool_worker_killed"), {7405: POLL, 7407: READ, 7403: READ})
    for pid, age in ages.items():
        snap["processes"][pid.lstrip("p")]["age_s"] = age
    return snap


def test_a_drained_pool_with_a_replaced_worker_lost_an_item() -> None:
    snap = pool()
    facts = judge(snap).facts
    assert drained(facts)
    young = replaced(facts)
    assert young is not None
    assert young.pid == 7443
    found = judge(snap)
    assert found.verdict == "stuck.worker-dead"
    assert any("younger than its siblings" in e.derived for e in found.case.support)


def test_workers_of_one_age_were_not_replaced() -> None:
    assert replaced(judge(pool(p7403=24.2)).facts) is None


def test_a_pool_whose_owner_sleeps_by_the_clock_is_not_drained() -> None:
    snap = asleep(recorded("pool_worker_killed"), {7402: SLEEP, 7405: POLL, 7407: READ, 7403: READ})
    assert not drained(Facts(snap))


def test_a_pool_with_a_worker_at_work_is_not_drained() -> None:
    snap = asleep(recorded("pool_worker_killed"), {7405: POLL, 7407: READ, 7403: READ, 7443: SLEEP})
    assert not drained(Facts(snap))


@pytest.mark.parametrize(
    ("wait", "ports", "words"),
    [
        (SLEEP, [], "asleep in a timer of its own"),
        (ACCEPT, [8000], "waits for connections on port 8000"),
        (POLL, [], "waits for an event"),
    ],
)
def test_what_an_idle_process_waits_for(wait: tuple[str, dict[str, Any]], ports: list[int], words: str) -> None:
    snap = recorded("numpy_metric_long")
    main = int(snap["job"]["main"])
    threads = snap["samples"][0]["procs"][str(main)].get("threads") or {}
    asleep(snap, {int(tid): wait for tid in threads} | {main: wait})
    snap["listening"] = [{"port": p, "addr": "0.0.0.0", "pid": main, "comm": "python"} for p in ports]
    found = judge(snap)
    assert found.state in ("unknown", "quiet")
    text = idle_words(found.facts)
    assert text is not None
    assert words in text
    if found.state == "unknown":
        assert words in compose(found)["sentence"]


def test_a_process_at_work_is_not_idle() -> None:
    assert idle_words(judge(recorded("numpy_metric_long")).facts) is None
