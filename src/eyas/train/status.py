"""What a run says while it goes: a line at the first step, then one at least every ten seconds, whatever happens.

Plain lines that `grep` and `tail -f` like, at most one a second. A thread speaks when the loop has not for ten
seconds, and says what the loop is doing and for how long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

INTERVAL = 10.0


class Status:
    """`say` at least every INTERVAL seconds.

    The loop sets `phase` ("waiting for data") and, at each step, calls `step(line)`, which is printed when the last
    line is old enough. Used as a context manager: the thread lives as long as it.
    """

    def __init__(self, say: Callable[[str], None], interval: float = INTERVAL) -> None:
        self.say, self.interval = say, interval
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._spoke = -float("inf")
        self._stepped = time.monotonic()
        self._where = "starting"
        self.phase = ""
        self._thread = threading.Thread(target=self._watch, name="eyas-status", daemon=True)

    @property
    def phase(self) -> str:
        """What is being done now; setting it restarts its clock."""
        return self._phase

    @phase.setter
    def phase(self, what: str) -> None:
        self._phase, self._since = what, time.monotonic()

    def begin(self) -> None:
        """Start the interval: whatever was said before counts as just said."""
        self._spoke = self._stepped = time.monotonic()

    def line(self, text: str) -> None:
        """Print now."""
        with self._lock:
            self._spoke = time.monotonic()
            self.say(text)

    def step(self, where: str, line: Callable[[], str], force: bool = False) -> None:
        """Tell where the run is ("step 12/300"); print `line()` if forced, or if the next step would be too late."""
        now = time.monotonic()
        self._where, pace, self._stepped = where, now - self._stepped, now
        if force or now + pace - self._spoke >= self.interval:
            self.line(line())

    def _watch(self) -> None:
        while not self._stop.wait(min(0.25, self.interval / 4)):
            self._look()

    def _look(self) -> None:
        """Speak for a loop that has not for too long."""
        if self.phase and time.monotonic() - self._spoke >= self.interval:
            self.line(f"{self._where} · {self.phase} for {time.monotonic() - self._since:.0f} s")

    def __enter__(self) -> Status:
        self.begin()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
