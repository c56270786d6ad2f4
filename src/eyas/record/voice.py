"""Where a run speaks: standard output, log.txt, events.jsonl. Each behind a thread, so that no disk holds up the run.

Lines begin before there is a run directory, and the run may still refuse to make one: what was said by then is kept,
and written first when it is there. Where one place refuses, the others tell of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from eyas.record import events
from eyas.record.console import Say
from eyas.record.outlet import Outlet, stamped


class Voice:
    """The three places of one rank. say: writes a line on standard output, and may block or raise."""

    def __init__(self, rank: int, say: Say) -> None:
        self.rank = rank
        self._out = Outlet("standard output", lambda data: say(data.decode().rstrip("\n")), self._failed)
        self._log: Outlet | None = None
        self._events: Outlet | None = None
        self._early: tuple[list[bytes], list[bytes]] = ([], [])  # of log.txt, of events.jsonl; with their own times

    @property
    def kept(self) -> bool:
        """Whether there is a run directory to write into."""
        return self._log is not None

    def open(self, folder: Path, **start: Any) -> None:
        """Write into the run directory from now on: the event "start", and what came before it."""
        self._log = Outlet("log.txt", events.Appender(folder / "log.txt"), self._failed)
        self._events = Outlet("events.jsonl", events.Appender(folder / "events.jsonl"), self._failed)
        self.event("start", schema=events.SCHEMA, **start)
        for outlet, early in zip((self._log, self._events), self._early, strict=True):
            while early:
                outlet.put(early.pop(0))

    def line(self, text: str) -> None:
        """On standard output and in log.txt."""
        self._out.put(text.encode(errors="replace"))
        self.keep(text)

    def keep(self, text: str) -> None:
        """In log.txt alone."""
        put = self._log.put if self._log is not None else self._early[0].append
        put(stamped(text))

    def event(self, kind: str, /, **fields: Any) -> None:
        """In events.jsonl."""
        put = self._events.put if self._events is not None else self._early[1].append
        put(events.line(kind, self.rank, **fields))

    def shown(self, seconds: float) -> bool:
        """Wait until everything is on standard output, at most this long; whether it is."""
        return self._out.flush(seconds)

    def close(self, seconds: float) -> None:
        """Write what is left, at most so long in all."""
        until = time.monotonic() + seconds
        for outlet in (self._out, self._log, self._events):
            if outlet is not None:
                outlet.close(max(0.0, until - time.monotonic()))

    def _failed(self, text: str) -> None:
        """A place refuses: tell the others."""
        self.event("warning", text=text)
        if not text.startswith("log.txt"):
            self.keep(f"warning: {text}")
        if not text.startswith(self._out.name):
            self._out.put(f"warning: {text}".encode())
