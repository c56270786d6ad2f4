"""events.jsonl: what happened in a run, one JSON object a line, for programs.

A line is appended with one write, so the trainer, its sidecar and other ranks can share the file without locks, and a
reader sees whole lines but for the last one. A line that a full disk cut short is closed off by the next; who reads
skips what is no JSON. The fields are in docs/run-directory.md. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = "eyas.events/1"
FAILED = ("error", "vanished")


def line(event: str, rank: int = 0, /, **fields: Any) -> bytes:
    """One event as a line. Numbers that JSON does not have become words ("nan").

    A field with one of the names that every event has gets an underscore behind it: fields of other people's loops.
    """
    given = {"time": round(time.time(), 3), "event": event, "rank": rank}
    given |= {f"{name}_" if name in given else name: value for name, value in fields.items()}
    return (json.dumps(_plain(given), ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    try:
        return _plain(float(value))  # a numpy or torch scalar
    except (TypeError, ValueError):
        return str(value)


class Appender:
    """A file that lines are appended to, opened at the first one, and made again when it was deleted.

    Raises OSError when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._cut = False

    def __call__(self, data: bytes) -> None:
        """Append whole lines with one write."""
        if self._fd >= 0 and not os.fstat(self._fd).st_nlink:
            self.close()
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        data = b"\n" + data if self._cut else data
        written = os.write(self._fd, data)
        self._cut = self._cut if written == 0 else data[written - 1 : written] != b"\n"
        if written < len(data):
            os.write(self._fd, data[written:])  # raises, with the reason

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, oldest first; broken lines are left out."""
    with path.open("rb") as file:
        for raw in file:
            try:
                event = json.loads(raw)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def first_failure(path: Path, since: float) -> dict[str, Any] | None:
    """The first end of a rank that failed after `since` (as `time`) and did not only follow another's; None without.

    Raises OSError when the file cannot be read.
    """
    failed = [
        e
        for e in read(path)
        if e.get("event") == "end" and e.get("time", 0) >= since and e.get("how") in FAILED and not e.get("follows")
    ]
    return min(failed, key=lambda e: e["time"], default=None)


def first_words(first: dict[str, Any]) -> str:
    """The line about the rank that failed first, of its end."""
    who = f"rank {first['rank']}"
    return f"{who} failed first: {str(first.get('text')).removeprefix(f'{who}: ')}"
