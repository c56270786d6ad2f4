"""Couriers: what hangs is left behind, what answers is kept, and the deadline holds."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator

import pytest

from eyas.why.probe import Courier, collect


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    Courier.timed_out.clear()
    yield
    Courier.dismiss()
    Courier.timed_out.clear()


def slow_at(bad: int) -> object:
    def work(item: int) -> int:
        if item == bad:
            time.sleep(60)
        return item * item

    return work


def test_one_item_that_hangs_costs_its_deadline_and_nothing_else() -> None:
    began = time.monotonic()
    answers = collect("squares", [1, 2, 3, 4], slow_at(3), began + 5, each=0.3, blame=lambda item: {"pid": item})
    assert answers == [1, 4, None, 16]
    assert time.monotonic() - began < 4
    (late,) = Courier.timed_out
    assert (late["probe"], late["pid"], late["state"]) == ("squares", 3, "S")


def test_a_child_in_uninterruptible_sleep_is_abandoned() -> None:
    def enter_d(item: int) -> int:
        if item == 0:  # vfork: the parent sleeps in D until the child execs or ends
            libc = ctypes.CDLL(None)
            if libc.vfork() == 0:
                libc.sleep(3)
                libc._exit(0)
        return item

    began = time.monotonic()
    answers = collect("d state", [0, 1], enter_d, began + 5, each=0.4)
    assert answers == [None, 1]
    assert time.monotonic() - began < 2.8
    assert Courier.timed_out[0]["state"] == "D"


def test_the_whole_is_given_up_at_its_time() -> None:
    began = time.monotonic()
    assert collect("all hang", list(range(50)), lambda _: time.sleep(60), began + 0.6, each=0.2) == [None] * 50
    assert time.monotonic() - began < 4


def test_restarts_are_bounded() -> None:
    collect("all hang", list(range(50)), lambda _: time.sleep(60), time.monotonic() + 5, each=0.05, restarts=3)
    assert len(Courier.timed_out) == 4


def test_a_busy_child_is_not_taken_for_a_hung_one() -> None:
    def burn(item: int) -> int:
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
        return item

    assert collect("busy", [7], burn, time.monotonic() + 60, each=0.1) == [7]
    assert Courier.timed_out == []


def test_an_error_in_an_item_is_kept_as_words() -> None:
    courier = Courier("errors", [0, 1], lambda item: 1 // item)
    Courier.pump(time.monotonic() + 2, [courier])
    assert courier.out == {1: 1}
    assert "ZeroDivisionError" in courier.errors[0]


def test_a_child_that_dies_ends_its_courier() -> None:
    courier = Courier("dies", [0, 1], lambda _: os._exit(9))
    Courier.pump(time.monotonic() + 2, [courier])
    assert courier.done
    assert courier.out == {}


def test_items_of_a_mount_that_hung_are_not_tried_again() -> None:
    bad: set[str] = set()

    def blame(item: str) -> dict[str, object]:
        bad.add(item[0])
        return {"path": item}

    def work(item: str) -> str:
        if item[0] == "x":
            time.sleep(60)
        return item

    answers = collect(
        "paths",
        ["x1", "a", "x2", "x3", "b"],
        work,
        time.monotonic() + 5,
        each=0.2,
        blame=blame,
        skip=lambda item: item[0] in bad,
    )
    assert answers == [None, "a", None, None, "b"]
    assert [t["path"] for t in Courier.timed_out] == ["x1"]


def test_large_answers_arrive_whole() -> None:
    (blob,) = collect("large", [0], lambda _: b"x" * (5 << 20), time.monotonic() + 30, each=10)
    assert len(blob) == 5 << 20


def test_the_child_is_collected_when_all_answered() -> None:
    courier = Courier("quick", [1, 2], lambda item: item)
    Courier.pump(time.monotonic() + 30, [courier])
    with pytest.raises(ChildProcessError):
        os.waitpid(courier.pid, os.WNOHANG)
