"""Looking at many files on every core: Python's parser of their pickles holds the GIL, so threads cannot.

A few processes of this module (a fresh interpreter with numpy, no torch: 0.2 s) are sent groups of files and send back
what `look` found. They are asked by one thread each. One that dies, or cannot be started, costs its speed and nothing
else: its groups are looked at here. They end when their input does, which is when this process does. What is pickled
goes between this process and a child that it started, through a pipe: nothing of a file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from eyas.store.foreign.torchzip import Unreadable

MOST = 16  # processes
NO_ANSWER = "cannot be opened"  # what the file system refused: it may be there next time, whatever its size and time
THREADS = 8  # in each: a network file system answers many at once

Result = Any  # a Found, or why there is none


def try_look(look: Callable[[Any], Any], what: Any) -> Result:
    """What `look` finds, or the reason that it gives."""
    try:
        return look(what)
    except Unreadable as reason:
        return str(reason)
    except (FileNotFoundError, IsADirectoryError) as error:
        return f"cannot be read ({error.strerror or error})"
    except OSError as error:
        return f"{NO_ANSWER} ({error.strerror or error})"


class Looking:
    """Looks at groups of files, in processes of its own. For many threads. Close it."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look, self.count = look, min(MOST, len(os.sched_getaffinity(0)))
        self._local = threading.local()
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def __call__(self, group: Sequence[Any]) -> list[Result]:
        """One result for each of `group`."""
        child = self._child()
        if child is not None:
            assert child.stdin is not None and child.stdout is not None
            try:
                pickle.dump(list(group), child.stdin)
                child.stdin.flush()
                found: list[Result] = pickle.load(child.stdout)
                return found
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):  # it has died, or is being closed
                self._local.child = None
        return [try_look(self.look, what) for what in group]

    def _child(self) -> subprocess.Popen[bytes] | None:
        """This thread's process, started at its first group."""
        if not hasattr(self._local, "child"):
            self._local.child = None
            with self._lock, contextlib.suppress(OSError):
                if not self._closed:
                    command = [sys.executable, "-m", "eyas.store.foreign.processes"]
                    path = os.pathsep.join(p for p in sys.path if p)  # wherever this process has eyas from
                    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                    child = subprocess.Popen(
                        command, **pipes, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
                    )
                    self._children.append(child)
                    self._local.child = child
                    pickle.dump(self.look, child.stdin)  # type: ignore[arg-type]
        found: subprocess.Popen[bytes] | None = self._local.child
        return found

    def close(self) -> None:
        """End the processes, whatever they are at."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
                child.wait()
                for pipe in (child.stdin, child.stdout):
                    with contextlib.suppress(OSError):
                        pipe.close()  # type: ignore[union-attr]


def main() -> None:
    """One process: `look`, then groups, from standard input; results to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the one that asks decides
    source, out = sys.stdin.buffer, sys.stdout.buffer
    look = pickle.load(source)
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            try:
                group = pickle.load(source)
            except EOFError:
                return
            pickle.dump(list(pool.map(lambda what: try_look(look, what), group)), out)
            out.flush()


if __name__ == "__main__":
    main()
