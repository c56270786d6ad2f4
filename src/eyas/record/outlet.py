"""A place that lines go to, behind a thread: who puts them never waits, whatever the disk or the reader does.

Standard library only: the trainer and its sidecar both write through it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

ROOM = 10_000  # lines that may wait; more are dropped and counted


class Outlet:
    """Calls `write(data)` for everything put, in order, in a thread of its own.

    write: raises when it cannot; those lines are counted, and behind the next one that goes through they are told of.
    on_failure: called once with one sentence, in that thread.
    """

    def __init__(
        self, name: str, write: Callable[[bytes], None], on_failure: Callable[[str], None] | None = None
    ) -> None:
        self.name, self.write, self.on_failure = name, write, on_failure
        self.lost = 0
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._work, name=f"eyas-{name.replace(' ', '-')}", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Never blocks."""
        if self._queue.qsize() >= ROOM:
            self.lost += 1
            return
        self._idle.clear()
        self._queue.put(data)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written, at most this long; whether it is."""
        return self._idle.wait(seconds)

    def close(self, seconds: float) -> None:
        """Write what is left, at most this long, and end the thread (or leave it behind in its write)."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        name_thread()
        said = False
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                self._idle.set()
                item = self._queue.get()
                self._idle.clear()
            if item is None:
                self._idle.set()
                return
            try:
                self.write(item)
            except Exception as e:  # a disk, a closed pipe, or other people's `say`
                self.lost += 1
                if not said and self.on_failure is not None:
                    said = True
                    cause = getattr(e, "strerror", None) or str(e)
                    self.on_failure(f"{self.name} cannot be written ({cause}); the run goes on without it")
                continue
            if self.lost:
                lost, self.lost = self.lost, 0
                said = False
                try:
                    self.write(self.gap(lost))
                except Exception:
                    self.lost = lost

    def gap(self, lost: int) -> bytes:
        """The line that stands for lost ones."""
        return f"({lost} lines before this could not be written here)\n".encode()


def name_thread(name: str = "eyas-record") -> None:
    """Show this thread under that name in ps, top and `eyas why`, which leaves the recorder's own threads out."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:  # noqa: PTH123
        file.write(name)


def write_all(fd: int, data: bytes) -> None:
    """Write to a descriptor. Raises OSError when it refuses; a pipe that is full and does not block drops the rest."""
    while data:
        data = data[os.write(fd, data) :]


def hold_standard_descriptors() -> None:
    """Open 0, 1 and 2 on /dev/null where they are closed (`>&-`, some daemons): else the next file that is opened gets
    the number, and what a library or a child process says on standard output is written into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one


def stamped(text: str) -> bytes:
    """A line of log.txt: local time, then the text."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode(errors="replace")
