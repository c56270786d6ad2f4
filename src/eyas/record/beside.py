"""What the recorder starts beside the trainer: handlers that write stacks, the sidecar, the trackers' process.

The two processes are programs of their own, started and not forked, in sessions of their own: what Ctrl-C or a
scheduler sends to the trainer's group does not reach them, and nothing of the trainer's memory or devices is theirs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.record import beat, sidecar

DUMP_SIGNAL = signal.SIGRTMIN + 7  # nobody's: not the C library's, not glibc's, not a scheduler's


class Stacks:
    """Stacks on a signal, and on a fault, into memory that the sidecar shares: no disk is in the way.

    slots: the beat's, which tells the signal. fd, fatal_fd: where they are written; fatal_fd is None where somebody
    else's fault handler was there before.
    """

    def __init__(self, slots: memoryview) -> None:
        self._slots = slots
        self.fd: int = os.memfd_create("eyas-stacks")
        faulthandler.register(DUMP_SIGNAL, file=self.fd, all_threads=True)
        slots[beat.DUMP_SIGNAL] = DUMP_SIGNAL
        self.fatal_fd: int | None = None
        if not faulthandler.is_enabled():
            self.fatal_fd = os.memfd_create("eyas-fault")
            faulthandler.enable(file=self.fatal_fd, all_threads=True)

    def close(self) -> None:
        """Take the handlers away."""
        self._slots[beat.DUMP_SIGNAL] = 0
        faulthandler.unregister(DUMP_SIGNAL)
        os.close(self.fd)
        if self.fatal_fd is not None:
            faulthandler.disable()
            os.close(self.fatal_fd)


def start_sidecar(given: dict[str, Any], stacks: Stacks) -> subprocess.Popen[bytes]:
    """Start the process that speaks when this one cannot. given: what `Sidecar` takes. Raises OSError."""
    pidfd = os.pidfd_open(os.getpid())  # passed on: a run that dies at once still tells of what
    given = {**given, "pid": os.getpid(), "stacks_fd": stacks.fd, "fatal_fd": stacks.fatal_fd, "pidfd": pidfd}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", sidecar.__file__, json.dumps(given)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[fd for fd in (stacks.fd, stacks.fatal_fd, pidfd) if fd is not None],
            start_new_session=True,
        )
    finally:
        os.close(pidfd)


def start_sinks(folder: Path, sinks: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the trackers' process: it follows events.jsonl, so nothing it does can slow the run. Raises OSError."""
    with (folder / "sinks.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "eyas.record.sinks", str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(sinks).encode())  # not in argv: addresses hold tokens
    process.stdin.close()
    return process


def runs_there(folder: Path, rank: int) -> int:
    """The PID of another process that records this rank into the folder now; 0 without one."""
    try:
        b = beat.read(folder / beat.file_name(rank))
    except (OSError, ValueError):
        return 0
    alive = b["state"] == "running" and b["pid"] != os.getpid() and beat.starttime(b["pid"]) == b["starttime"]
    return int(b["pid"]) if alive else 0


def link(folder: Path, rank: int, place: Path) -> None:
    """`beat` in the run directory points at the record, in place of an earlier run's. Raises OSError."""
    name = folder / beat.file_name(rank)
    side = name.with_name(f".{name.name}.{os.getpid()}")
    side.unlink(missing_ok=True)
    side.symlink_to(place)
    side.replace(name)
