"""Small real processes in states worth looking at, and the probe's look at them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyas.why import remote

Snapshot = dict[str, Any]


@contextmanager
def running(
    code: str, *argv: str, stdout: Any = None, cwd: Path | None = None, prefix: tuple[str, ...] = (), **more: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that runs `code`; it is ready when it has called `ready()`."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    head = f"import os\ndef ready():\n    os.write({writer}, b'x'); os.close({writer})\n"
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", head + textwrap.dedent(code), *argv],
        stdout=stdout if stdout is not None else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=cwd,
        pass_fds=(writer,),
        **more,
    )
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"x", "the process did not get ready"
        time.sleep(0.05)
        yield process
    finally:
        os.close(reader)
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits on a dead file system goes when that goes
            process.wait(timeout=2)


def look(
    value: int | str,
    kind: str = "pid",
    times: tuple[float, ...] = (0.0, 0.25, 0.6),
    timeout: float = 60.0,
    **request: Any,
) -> Snapshot:
    """The probe's snapshot, with samples closer together than a user's."""
    return remote.ask(
        {
            "kind": kind,
            "value": value,
            "asked": str(value),
            "host": None,
            "mode": "why",
            "times": list(times),
            **request,
        },
        timeout,
    )


def proc(snap: Snapshot, pid: int, sample: int = -1) -> dict[str, Any]:
    found: dict[str, Any] = snap["samples"][sample]["procs"][str(pid)]
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.02)
