"""Ctrl-C, SIGTERM and SIGUSR1 ask a run to stop after its step: it saves and tells how to go on. A second one does not
ask. (SIGUSR1 is what schedulers are told to send some minutes before the end: `sbatch --signal=USR1@300`.)

One that follows at once is the same one: a launcher passes on what the terminal has sent to all.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
AT_ONCE = 2.0  # seconds


class Stop:
    """Used as a context manager in the main thread; elsewhere it hears nothing. asked: the signal's name, or None."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._hear) for s in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked, self._at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._at > AT_ONCE:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


def resume_command(output_dir: Path) -> str:
    """The shell command that goes on with the run, from any folder of this machine."""
    words = ["eyas", "train"]
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun
        here, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("WORLD_SIZE", "1"))
        nodes = (
            []
            if here == world
            else ["--nnodes", str(world // here), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]
        )
        words = ["torchrun", *nodes, "--nproc-per-node", str(here), "-m", "eyas", "train"]
    elif Path(sys.argv[0]).name == "__main__.py":
        words = ["python", "-m", "eyas", "train"]
    words += ["--output-dir", str(output_dir), "--resume"]
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"
