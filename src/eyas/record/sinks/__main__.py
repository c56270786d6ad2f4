"""`python -m eyas.record.sinks RUN_DIR PID`: follow a run's events.jsonl and hand each event to the sinks.

Its standard output is the run's. Which sinks is a JSON list on standard input, as ["tensorboard", "wandb=PROJECT",
"notify=URL"]: addresses hold tokens, and a command line can be read by everybody. Each sink has a thread, so one that
hangs holds up no other. That a sink is slow, and that it failed, is said once each, in the run's log. Ends with the
run, at the latest a minute behind it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from eyas.record import events
from eyas.record.outlet import stamped, write_all

POLL = 0.5  # seconds between two looks at the file
SLOW = 10.0  # seconds in one call after which a sink is said to hang
GRACE = 60.0  # seconds to finish behind the run's end
KEEP = 10_000  # events that may wait for a sink that hangs


class Sink(Protocol):
    def event(self, e: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def make(spec: str, folder: Path) -> Sink:
    """The sink that a word names. ImportError without its package, ValueError for an unknown word."""
    name, _, value = spec.partition("=")
    if name == "tensorboard":
        from eyas.record.sinks.tensorboard import TensorBoard

        return TensorBoard(folder)
    if name in ("wandb", "trackio"):
        from eyas.record.sinks.trackers import Tracker

        return Tracker(name, value, folder)
    if name == "prometheus":
        from eyas.record.sinks.prometheus import Prometheus

        return Prometheus(int(value), folder)
    if name == "notify":
        from eyas.record.sinks.notify import Notify

        return Notify(value, folder)
    raise ValueError(f"no sink is called {name}")


class Feed:
    """One sink and its thread."""

    def __init__(self, spec: str, folder: Path, warn: Callable[[str], None]) -> None:
        self.spec, self.folder, self.warn = spec, folder, warn
        self.name = spec.partition("=")[0]
        self.queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.busy_since = 0.0  # monotonic, 0 when idle
        self._warned: set[str] = set()
        self.thread = Thread(target=self._work, name=self.name, daemon=True)
        self.thread.start()

    def put(self, e: dict[str, Any] | None) -> None:
        if e is None or self.queue.qsize() < KEEP:
            self.queue.put(e)

    def check(self) -> None:
        """Say it, once, when the sink does not come back."""
        if self.busy_since and time.monotonic() - self.busy_since > SLOW:
            self._warn("slow", f"has not answered for {SLOW:.0f} s; the run does not wait for it")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.warn(f"{self.name} {text}")

    def _work(self) -> None:
        try:
            self.busy_since = time.monotonic()
            sink = make(self.spec, self.folder)
            while True:
                self.busy_since = 0.0
                e = self.queue.get()
                self.busy_since = time.monotonic()
                if e is None:
                    sink.close()
                    break
                sink.event(e)
        except ImportError as e:
            needs = f"needs a package that is not installed (pip install 'eyas[{self.name}]')"
            self._warn("failed", f"{needs}: {e}; the run goes on without it")
        except BaseException as e:  # whatever a tracker throws, SystemExit too
            traceback.print_exc()
            cause = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            self._warn("failed", f"failed: {cause}; the run goes on without it")
        self.busy_since = 0.0


def follow(path: Path, pid: int, tick: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """This run's events, from its start to its end, as they come. The file may hold earlier runs of the directory."""
    begun, buffer, offset, gone = False, b"", 0, 0.0
    while True:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                more = file.read()
        except OSError:
            more = b""
        offset += len(more)
        *lines, buffer = (buffer + more).split(b"\n")
        for raw in lines:
            try:
                e = json.loads(raw)
            except ValueError:
                continue
            if e.get("event") == "start":
                begun = begun or e.get("pid") == pid
            if begun:
                yield e
                if e.get("event") == "end" and e.get("rank") == 0:
                    return
        tick()
        if not more:
            alive = Path(f"/proc/{pid}").exists()
            gone = 0.0 if alive else gone or time.monotonic()
            if gone and time.monotonic() - gone > 5:  # without an end: a sidecar that was killed too
                return
            time.sleep(POLL)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are meant for the trainer
        signal.signal(number, signal.SIG_IGN)
    folder, pid = Path(sys.argv[1]), int(sys.argv[2])
    specs = json.load(sys.stdin)
    log, kept = events.Appender(folder / "log.txt"), events.Appender(folder / "events.jsonl")

    def warn(text: str) -> None:
        for write, data in (
            (lambda d: write_all(1, d), f"warning: {text}\n".encode()),
            (log, stamped(f"warning: {text}")),
            (kept, events.line("warning", by="sinks", text=text)),
        ):
            try:
                write(data)
            except OSError as e:
                print(f"{text} ({e})", file=sys.stderr)

    feeds = [Feed(spec, folder, warn) for spec in specs]

    def check() -> None:
        for feed in feeds:
            feed.check()

    for e in follow(folder / "events.jsonl", pid, check):
        for feed in feeds:
            feed.put(e)
    until = time.monotonic() + GRACE
    for feed in feeds:
        feed.put(None)
    while any(f.thread.is_alive() for f in feeds) and time.monotonic() < until:
        time.sleep(0.1)
        check()
        if not Path(f"/proc/{pid}").exists():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # who reads the run's output waits for its end
    os._exit(0)  # whatever still hangs


if __name__ == "__main__":
    main()
