"""How fast this machine moves bytes: the disk under these very files, memory, host to device.

The disk is read past the page cache (O_DIRECT), a few threads with calls of 32 MiB, as the read path does; where the
file system refuses, through the cache after asking it to forget the files. Each figure is a median of a few rounds.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CALL = 32 << 20
PAGE = 4096


class DiskRate(NamedTuple):
    """bytes_per_s: sustained, of all threads; direct: past the page cache; nbytes: read to find out."""

    bytes_per_s: float
    direct: bool
    nbytes: int


def disk_rate(files: list[Path], seconds: float = 3.0, threads: int = 4) -> DiskRate | None:
    """Read pieces of `files` in random order for about `seconds`; None where there is too little to tell (< 32 MB)."""
    pieces = _pieces(files)
    if sum(length for _, _, length in pieces) < CALL:
        return None
    random.Random(0).shuffle(pieces)
    direct = all(_open(path, os.O_DIRECT, probe=True) for path in {p for p, _, _ in pieces[:16]})
    rounds: list[float] = []
    total, turn, started = 0, 0, time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        buffers = [mmap.mmap(-1, CALL) for _ in range(threads)]
        while turn < len(pieces) and (time.monotonic() - started < seconds or not rounds):
            batch = pieces[turn : turn + 4 * threads]
            turn += len(batch)
            before = time.perf_counter()
            got = sum(pool.map(lambda n: _read(batch[n::threads], buffers[n], direct), range(threads)))  # noqa: B023
            rounds.append(got / max(time.perf_counter() - before, 1e-9))
            total += got
    return DiskRate(statistics.median(rounds), direct, total)


def _pieces(files: list[Path], most: int = 4096) -> list[tuple[Path, int, int]]:
    """(file, offset, bytes) of up to `most` pieces of CALL bytes or less, spread over the files."""
    chosen = files if len(files) <= most else random.Random(0).sample(files, most)
    pieces = []
    for path in chosen:
        with contextlib.suppress(OSError):
            size = path.stat().st_size // PAGE * PAGE
            pieces += [(path, at, min(CALL, size - at)) for at in range(0, size, CALL)]
    return pieces if len(pieces) <= most else random.Random(0).sample(pieces, most)


def _open(path: Path, flags: int, probe: bool = False) -> int:
    """A file descriptor; with `probe` 1 where opening and reading with these flags works, else 0."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        if probe and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return 0
        raise
    if not probe:
        return fd
    try:
        os.preadv(fd, [mmap.mmap(-1, PAGE)], 0)
        return 1
    except OSError:
        return 0
    finally:
        os.close(fd)


def _read(pieces: list[tuple[Path, int, int]], buffer: mmap.mmap, direct: bool) -> int:
    got = 0
    for path, offset, length in pieces:
        fd = _open(path, os.O_DIRECT if direct else 0)
        try:
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            view = memoryview(buffer)[:length]
            try:
                got += os.preadv(fd, [view], offset)
            finally:
                view.release()
        finally:
            os.close(fd)
    return got


def memcpy_rate(nbytes: int = 256 << 20, rounds: int = 5) -> float:
    """Bytes a second of one thread copying between two buffers that are in memory already."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    times = []
    for _ in range(rounds):
        before = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - before)
    return nbytes / statistics.median(times)


def device_copy_rate(device: str, nbytes: int = 256 << 20, rounds: int = 5) -> float:
    """Bytes a second from pinned memory to a CUDA device."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize(device)
        before = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - before)
    return nbytes / statistics.median(times)
