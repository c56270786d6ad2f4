"""The beat is what its document says, whole or marked as not, and read by anybody's Python."""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from eyas.record import beat
from eyas.record.beat import Beat
from eyas.record.phases import Phases
from eyas.record.record import Record

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "run-directory.md"


def documented() -> Any:
    """`read_beat` as the document has it."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(next(b for b in blocks if "def read_beat" in b), names)
    return names["read_beat"]


@pytest.fixture
def record(tmp_path: Path) -> Any:
    path = tmp_path / "a.beat"
    made = Record(None)
    made.beat = Beat("/runs/a", rank=2, world=4, total=300, path=path, unit="step")
    made.phases = Phases(made.beat)
    made.enter, made._q, made._memory = made.phases.enter, made.beat.slots, made.beat.memory
    made._floats = made.beat.floats
    return made, path


def test_twenty_lines_from_the_document_read_it(record: Any) -> None:
    rec, path = record
    rec.nbytes = 700
    rec.step(loss=2.5, tokens=120)
    rec.beat.text(beat.FILE, "data_9142.pt")
    rec.enter("forward")
    read = documented()(path)
    assert read.pop("seconds") >= 0
    assert read == {
        "pid": os.getpid(), "step": 1, "total": 300, "phase": "forward", "tokens": 120, "queue": -1, "loss": 2.5,
        "file": "data_9142.pt",
    }  # fmt: skip
    ours = beat.read(path)
    assert all(ours[key] == value for key, value in read.items())
    assert (ours["rank"], ours["world"], ours["bytes"], ours["run"], ours["unit"]) == (2, 4, 700, "/runs/a", "step")


def test_every_slot_is_where_the_document_says() -> None:
    table = dict(re.findall(r"^\| ([\d, ]+) \| ([\w, ]+) \|", DOCUMENT.read_text(), re.M))
    slots = {
        name: int(number)
        for numbers, names in table.items()
        for number, name in zip(numbers.split(", "), names.split(", "), strict=True)
    }
    other = {"seq": "SEQ", "version": "VERSION_SLOT", "magic": "MAGIC_SLOT"}
    for name, number in slots.items():
        assert getattr(beat, other.get(name, name.upper())) == number, name
    assert len(slots) == 34


def test_phases_are_counted_and_timed(record: Any) -> None:
    rec, path = record
    for _ in range(3):
        with rec.phase("forward"), rec.phase("copying"):
            pass
    with rec.phase("my own phase"):
        inside = beat.read(path)
    after = beat.read(path)
    assert inside["phase"] == "my own phase" and after["phase"] == "starting"
    assert after["phases"]["copying"][0] == 3 and after["phases"]["forward"][0] == 6  # left for copying, and again
    assert sum(row[1] for row in after["phases"].values()) <= after["since"] - after["started"] + 1e-6


def test_there_is_room_for_24_phases(record: Any) -> None:
    rec, _ = record
    for i in range(9):
        rec.enter(f"phase {i}")
    with pytest.raises(ValueError, match="at most 24"):
        rec.enter("one more")


def test_a_half_written_record_is_marked(record: Any) -> None:
    rec, path = record
    rec.enter("forward")
    assert beat.read(path)["whole"]
    rec._q[beat.SEQ] += 1
    assert not beat.read(path)["whole"]


def test_what_is_no_beat_is_refused(tmp_path: Path, record: Any) -> None:
    rec, path = record
    (tmp_path / "other").write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match="EYASBEAT"):
        beat.read(tmp_path / "other")
    rec._q[beat.VERSION_SLOT] = 2
    with pytest.raises(ValueError, match="version 2"):
        beat.read(path)


def test_a_slot_is_eight_aligned_bytes(record: Any) -> None:
    """One store each: a reader never sees half a number."""
    rec, path = record
    rec.step(loss=1.0, step=1 << 40)
    raw = path.read_bytes()
    assert len(raw) == beat.SIZE == 4096
    assert struct.unpack_from("q", raw, 8 * beat.STEP)[0] == 1 << 40
    assert math.isclose(struct.unpack_from("d", raw, 8 * beat.LOSS)[0], 1.0)
