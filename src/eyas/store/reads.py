"""From extents to bytes in a buffer: which calls to make, making them, and verifying what came.

A sample's states are described by extents: where the rows of one layer lie in a file. Whoever can say that of a file
(a store, a torch zip, a safetensors file) has it read by this path. A batch's extents are sorted and neighbours are
joined, so that a batch of 100 MB takes a few calls of 32 MiB and more, each at a multiple of the page and into a
page-aligned buffer: direct I/O (O_DIRECT) needs that, and costs a fifth of what reading through the page cache costs.
Where a file system refuses direct I/O, its files are read through the page cache.

Cost: 0.05 CPU s/GB for the reads, 0.03 for xxh3-64. The GIL is released while reading and hashing.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from eyas.errors import EyasError
from eyas.store.layout import OPEN_SUFFIX, PAGE

CALL_BYTES = 32 << 20  # a call grows to at least this where the batch has that much in one piece
GAP_BYTES = 64 << 10  # a hole this small is cheaper to read than to leave out
_OPEN_FILES = 256  # file descriptors kept of each kind; the usual limit of a process is 1,024


class Extent(NamedTuple):
    """Rows of one layer of one sample: where they lie, and what they are.

    sample: the sample's id, for messages
    path: the file. For a shard of a store its final name, which need not exist yet
    offset, nbytes: from the first byte of the first row to the last byte of the last one
    layer: id out of the manifest's `layers`
    dtype: "bfloat16", "float16", "float32", or "float8_e4m3fn" or "int8" with `scales`
    row_bytes: bytes of one row; its values are contiguous
    stride: bytes from one row to the next; more than row_bytes where a file is token-major
    xxh3: xxh3-64 of the nbytes in hex, or None where nobody knows (a part of what was hashed, another tool's file)
    scales: rows x one float32 that multiply the rows, or None
    """

    sample: str
    path: str
    offset: int
    nbytes: int
    layer: int
    dtype: str
    row_bytes: int
    stride: int
    xxh3: str | None = None
    scales: Extent | None = None

    @property
    def rows(self) -> int:
        return (self.nbytes - self.row_bytes) // self.stride + 1 if self.nbytes else 0

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Call(NamedTuple):
    """One read: bytes [start, stop) of a file, both multiples of the page, to byte `at` of the buffer.

    need: the last byte that an extent wants, exclusive: a file may end between it and `stop`
    extents: indices of the extents that lie inside
    """

    path: str
    start: int
    stop: int
    at: int
    need: int
    extents: list[int]


class ReadPlan(NamedTuple):
    """calls: in the order of the files; places: extent k begins at byte places[k] of a buffer of `nbytes`."""

    calls: list[Call]
    places: list[int]
    nbytes: int


def plan_reads(extents: Sequence[Extent], call_bytes: int = CALL_BYTES, gap_bytes: int = GAP_BYTES) -> ReadPlan:
    """The calls that bring `extents` into one buffer, each byte once, whatever their order and overlap.

    Overlapping extents (layers of a token-major file) and neighbours share a call. A call is not continued beyond
    call_bytes unless the next extent begins inside what it reads anyway.
    """
    calls: list[Call] = []
    places = [0] * len(extents)
    at = 0
    path, start, need, members = "", 0, 0, list[int]()

    def close() -> None:
        nonlocal at
        if not members:
            return
        stop = -(-need // PAGE) * PAGE
        calls.append(Call(path, start, stop, at, need, list(members)))
        for k in members:
            places[k] = at + extents[k].offset - start
        at += stop - start

    for k in sorted(range(len(extents)), key=lambda k: (extents[k].path, extents[k].offset)):
        e = extents[k]
        inside = e.path == path and members and e.offset < -(-need // PAGE) * PAGE and e.offset % PAGE != 0
        joins = e.path == path and members and e.offset <= need + gap_bytes and need - start < call_bytes
        if inside or joins or (e.path == path and members and e.offset < need):
            need = max(need, e.end)
        else:
            close()
            path, start, need = e.path, e.offset // PAGE * PAGE, e.end
            members = []
        members.append(k)
    close()
    return ReadPlan(calls, places, at)


class File:
    """A file descriptor that closes when the last thread that reads from it lets go."""

    def __init__(self, path: Path | str, direct: bool) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        self.direct = direct
        if not direct:  # the kernel shall keep what is asked for, and not what lies beside it
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
