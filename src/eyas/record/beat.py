"""The beat: 4,096 bytes in memory that say what a run does now, for any process that maps them.

A fixed record of 8-byte slots (native byte order) and a few texts; the table in docs/run-directory.md is the format,
and the constants below are its slots. Writing a slot is one store into mapped memory: no lock, no system call, 50 ns.
What belongs together is written between two increments of `SEQ` (odd: being written), so that a reader can tell.

The record lies in /dev/shm and the run directory holds a link to it: a store into a mapped file on a disk can block
for seconds while that page is being written back, and for ever when the disk is gone. At the end of the run a plain
copy takes the link's place.

Standard library only: the sidecar and `eyas why` read it too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

MAGIC, VERSION, SIZE = b"EYASBEAT", 1, 4096
# slots
MAGIC_SLOT, VERSION_SLOT, SEQ, PID, STARTTIME, RANK, WORLD, STARTED, STARTED_WALL = range(9)
NOW, WALL, STEP, TOTAL = range(9, 13)
PHASE, SINCE, MOVED, PART, PARTS = range(13, 18)
TOKENS, BYTES, QUEUE, LOSS, SPOKE, PYTHON, STATE, EXIT, DUMP_SIGNAL, SIDECAR, FIRST_STEP, GPU_BUSY = range(18, 30)
NAMES, RUN_OPEN = 30, 31  # how many phases have a name; 1 when the run directory is there
TABLE, PHASES = 32, 24  # from slot 32: 24 rows of (times entered, ns spent in all, ns of the last time)
LEFT, PACE = 104, 105  # ns until the last step, -1 if not known; ns that a step takes of late, 0 before the first
# texts, UTF-8, filled up with NUL: (offset, size)
PHASE_NAMES, NAME_SIZE = 1024, 24  # 24 of these
FILE, RUN, UNIT = (2048, 256), (2304, 128), (2432, 32)

RUNNING, ENDED, FAILED, INTERRUPTED = range(4)  # STATE
STATES = ("running", "ended", "failed", "interrupted")
FIXED_PHASES = (
    "starting",
    "reading verifier",
    "indexing",
    "compiling",
    "waiting for data",
    "copying",
    "forward",
    "backward",
    "optimiser",
    "logging",
    "validating",
    "saving",
    "finishing",
    "computing",  # inside the loop and in no other phase
    "waiting for ranks",
)
SHM = Path("/dev/shm")


class Beat:
    """The writer's side. `slots` and `floats` are the same memory as int64 and as float64.

    path: where the record lies; None keeps it in this process's memory alone.
    """

    def __init__(
        self, run: str, rank: int = 0, world: int = 1, total: int = 0, path: Path | None = None, unit: str = "step"
    ) -> None:
        self.path = path
        if path is None:
            self.memory = mmap.mmap(-1, SIZE)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, SIZE)  # a full disk says so here, not as SIGBUS at the first store
                self.memory = mmap.mmap(fd, SIZE)
            finally:
                os.close(fd)
        self.slots = memoryview(self.memory).cast("q")
        self.floats = memoryview(self.memory).cast("d")
        q, now = self.slots, time.monotonic_ns()
        q[VERSION_SLOT], q[PID], q[STARTTIME], q[RANK], q[WORLD] = VERSION, os.getpid(), starttime(), rank, world
        q[STARTED] = q[NOW] = q[SINCE] = q[MOVED] = q[SPOKE] = q[PYTHON] = now
        q[STARTED_WALL] = q[WALL] = time.time_ns()
        q[TOTAL], q[QUEUE], q[LEFT] = total, -1, -1
        self.floats[LOSS] = float("nan")
        self.text(RUN, run)
        self.text(UNIT, unit)
        for name in FIXED_PHASES:
            self.name(name)
        self.memory[:8] = MAGIC  # last: who finds it finds a whole record

    def text(self, place: tuple[int, int], words: str) -> None:
        """Write one of the texts, cut to its place."""
        offset, size = place
        raw = words.encode(errors="replace")[: size - 1]
        self.memory[offset : offset + size] = raw.decode(errors="ignore").encode().ljust(size, b"\0")

    def name(self, phase: str) -> int:
        """Give a phase its number; ValueError when there are more than 24."""
        count = self.slots[NAMES]
        if count == PHASES:
            raise ValueError(f"no room for the phase {phase!r}: a run has at most {PHASES}")
        self.text((PHASE_NAMES + NAME_SIZE * count, NAME_SIZE), phase)
        self.slots[NAMES] = count + 1
        return count

    def unlink(self) -> None:
        """Remove the file; the mapping stays."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def file_name(rank: int) -> str:
    """The beat's name in the run directory."""
    return "beat" if rank == 0 else f"beat.{rank}"


def keep(folder: Path | None, rank: int, place: Path, memory: mmap.mmap) -> None:
    """Remove the record at `place`, and leave a plain copy in the run directory where its link was. Never raises."""
    link = folder / file_name(rank) if folder is not None else None
    with contextlib.suppress(OSError):
        if link is not None and link.is_symlink() and os.readlink(link) == str(place):  # noqa: PTH115
            side = link.with_name(f".{link.name}")
            try:
                side.write_bytes(bytes(memory[:SIZE]))
                side.replace(link)
            except OSError:  # a full disk: no half record, and no link that leads nowhere
                side.unlink(missing_ok=True)
                link.unlink()
    with contextlib.suppress(OSError):
        place.unlink()


def starttime(pid: int | str = "self") -> int:
    """When a process started, in clock ticks since boot (field 22 of /proc/PID/stat); 0 when it cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def shm_path(rank: int) -> Path | None:
    """A name of its own in /dev/shm; None where that cannot be written."""
    if not os.access(SHM, os.W_OK):
        return None
    return SHM / f"eyas-{os.getpid()}-{time.monotonic_ns():x}-{rank}.beat"


def read(source: Path | str | bytes | mmap.mmap) -> dict[str, Any]:
    """The record as plain values: slots by name, `phases` as {name: (times, seconds, last seconds)}.

    Raises OSError where it cannot be read, ValueError where it is no beat of this version.
    """
    if isinstance(source, (str, Path)):
        with open(source, "rb") as file:  # noqa: PTH123 (a path under /proc/PID/root may not be normalised)
            source = file.read(SIZE)
    for _ in range(20):
        raw = bytes(source[:SIZE])
        if len(raw) < SIZE or raw[:8] != MAGIC:
            raise ValueError("no beat: it does not begin with EYASBEAT")
        seq = struct.unpack_from("q", raw, 8 * SEQ)[0]
        if seq % 2 == 0 or isinstance(source, bytes):
            break  # whole; a writer that died in the middle leaves an odd number for ever
    return decode(raw)


def decode(raw: bytes) -> dict[str, Any]:
    """A record's bytes as plain values."""
    q, d = struct.unpack_from("512q", raw), struct.unpack_from("512d", raw)
    if q[VERSION_SLOT] != VERSION:
        raise ValueError(f"a beat of version {q[VERSION_SLOT]}; this eyas reads version {VERSION}")

    def text(offset: int, size: int) -> str:
        return raw[offset : offset + size].split(b"\0")[0].decode(errors="replace")

    names = [text(PHASE_NAMES + NAME_SIZE * i, NAME_SIZE) for i in range(min(q[NAMES], PHASES))]
    rows = [q[TABLE + 3 * i : TABLE + 3 * i + 3] for i in range(len(names))]
    return {
        "version": q[VERSION_SLOT],
        "whole": q[SEQ] % 2 == 0,
        "pid": q[PID],
        "starttime": q[STARTTIME],
        "rank": q[RANK],
        "world": q[WORLD],
        "started": q[STARTED] / 1e9,
        "started_wall": q[STARTED_WALL] / 1e9,
        "now": q[NOW] / 1e9,
        "wall": q[WALL] / 1e9,
        "step": q[STEP],
        "total": q[TOTAL],
        "first_step": q[FIRST_STEP],
        "left": q[LEFT] / 1e9 if q[LEFT] >= 0 and q[PACE] else None,
        "pace": q[PACE] / 1e9 or None,
        "phase": names[q[PHASE]] if 0 <= q[PHASE] < len(names) else "?",
        "since": q[SINCE] / 1e9,
        "moved": q[MOVED] / 1e9,
        "part": q[PART],
        "parts": q[PARTS],
        "tokens": q[TOKENS],
        "bytes": q[BYTES],
        "queue": q[QUEUE],
        "loss": d[LOSS],
        "spoke": q[SPOKE] / 1e9,
        "python": q[PYTHON] / 1e9,
        "gpu_busy": q[GPU_BUSY] / 1e9,
        "state": STATES[q[STATE]] if 0 <= q[STATE] < len(STATES) else "?",
        "exit": q[EXIT],
        "dump_signal": q[DUMP_SIGNAL],
        "sidecar": q[SIDECAR],
        "file": text(*FILE),
        "run": text(*RUN),
        "unit": text(*UNIT),
        "phases": {n: (r[0], r[1] / 1e9, r[2] / 1e9) for n, r in zip(names, rows, strict=True)},
    }
