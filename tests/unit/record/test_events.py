"""events.jsonl: whole lines whatever happens, JSON that every parser takes, and a stalled disk that stalls nothing."""

from __future__ import annotations

import json
import os
import threading
from multiprocessing import get_context
from pathlib import Path

from eyas.record import events
from eyas.record.outlet import Outlet


def test_numbers_that_json_does_not_have_become_words() -> None:
    raw = events.line("step", 1, loss=float("nan"), accuracy=[1.0, float("inf")], path=Path("a"), more={"x": None})
    assert raw.endswith(b"\n") and raw.count(b"\n") == 1
    got = json.loads(raw, parse_constant=lambda _word: 1 / 0)
    assert got.pop("time") > 1.7e9
    assert got == {
        "event": "step", "rank": 1, "loss": "nan", "accuracy": [1.0, "inf"], "path": "a", "more": {"x": None},
    }  # fmt: skip


def _append(path: Path, who: int) -> None:
    appender = events.Appender(path)
    for i in range(300):
        appender(events.line("step", who, step=i, text="x" * (i % 200)))


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    workers = [get_context("fork").Process(target=_append, args=(path, who)) for who in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for who in range(3):
        assert [e["step"] for e in lines if e["rank"] == who] == list(range(300))


def test_a_line_cut_by_a_full_disk_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    appender = events.Appender(path)
    appender(events.line("start"))
    os.write(appender._fd, b'{"event": "st')
    appender._cut = True  # as after a write that came back short
    appender(events.line("end"))
    assert [e["event"] for e in events.read(path)] == ["start", "end"]


def test_who_puts_a_line_never_waits_for_the_disk() -> None:
    stuck, written = threading.Event(), []

    def write(data: bytes) -> None:
        stuck.wait()
        written.append(data)

    outlet = Outlet("a hanging disk", write)
    for i in range(100):
        outlet.put(b"%d" % i)
    assert not outlet.flush(0.05) and written == []
    stuck.set()
    assert outlet.flush(5) and written == [b"%d" % i for i in range(100)]
    outlet.close(5)


def test_lost_lines_are_counted_and_told_of() -> None:
    full, written, failures = [True], [], []

    def write(data: bytes) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        written.append(data)

    outlet = Outlet("log.txt", write, failures.append)
    for _ in range(3):
        outlet.put(b"lost\n")
    assert outlet.flush(5)
    full[0] = False
    outlet.put(b"there\n")
    assert outlet.flush(5)
    assert written == [b"there\n", b"(3 lines before this could not be written here)\n"]
    assert failures == ["log.txt cannot be written (No space left on device); the run goes on without it"]
