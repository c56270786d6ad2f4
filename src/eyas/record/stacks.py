"""The stacks of a trainer, asked for by a signal, and where its main thread was. Standard library only: the sidecar's.

The handler is faulthandler's, in C: it needs no GIL and writes into memory that the sidecar shares. The signal goes to
a thread that cannot mind it, and only to a process that has a handler for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

from eyas.record.look import Process, catches, look

TRIES, BETWEEN = 20, 0.05  # looks for the answer, seconds between two
NONE = "no stacks: no thread of it can run"


def dump(pid: int, number: int, fd: int | None) -> str | None:
    """All stacks as text, "" when no thread could answer, None when it cannot be asked. fd: where they are written."""
    if fd is None or not catches(pid, number):
        return None
    start = os.fstat(fd).st_size
    if not send(pid, listener(pid, look(pid)), number):
        return None
    text = b""
    for _ in range(TRIES):
        time.sleep(BETWEEN)
        size = os.fstat(fd).st_size
        if size > start and size == start + len(text):
            break
        text = os.pread(fd, size - start, start)
    return text.decode(errors="replace").rstrip("\n")


def listener(pid: int, seen: Process) -> int:
    """The thread that is asked for the stacks.

    One that runs, since it then stands still while the frames are read; else one of the recorder's own, so that no
    system call of the program is interrupted.
    """
    own = [tid for tid, (name, _) in seen.threads.items() if name == "eyas-record"]
    running = [tid for tid, (name, wait) in seen.threads.items() if name != "eyas-record" and wait.family == "run"]
    return pid if pid in running else (running or own or [pid])[0]


def send(pid: int, tid: int, number: int) -> bool:
    """A signal to one thread; whether it went out."""
    try:
        return bool(ctypes.CDLL(None).tgkill(pid, tid, number) == 0)
    except AttributeError:  # a C library without it
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            return True
    return False


def main_thread(dumped: str) -> str:
    """The main thread's innermost line of a dump: faulthandler writes that thread last."""
    return top_line(dumped.strip().split("\n\n")[-1])


def fault(raw: str) -> str:
    """What killed a process, of what faulthandler wrote then: the first line and the innermost frame."""
    blocks = raw.strip().split("\n\n")
    current = next((block for block in blocks if "Current thread" in block), blocks[-1])
    return f"{raw.strip().splitlines()[0]} at {top_line(current)}"


def top_line(block: str) -> str:
    """The innermost frame of one thread of a dump of faulthandler, and who called it if that is Python's own library:
    `threading.py:331 in wait, from train.py:88 in step`."""
    frames = []
    for line in block.splitlines():
        if line.strip().startswith("File "):
            path, _, rest = line.strip().removeprefix('File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            frames.append((path, f"{os.path.basename(path)}:{number} in {function}"))  # noqa: PTH119
    if not frames:
        return "no Python frame"
    outside = next((words for path, words in frames if "/lib/python3" not in path or "-packages/" in path), "")
    first = frames[0][1]
    return first if outside in ("", first) else f"{first}, from {outside}"
