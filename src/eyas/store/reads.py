"""From extents to bytes in a buffer: which calls to make, making them, and verifying what came.

A sample's states are described by extents: where the rows of one layer lie in a file. Whoever can say that of a file
(a store, a torch zip, a safetensors file) has it read by this path. A batch's extents are sorted and neighbours are
joined, so that a batch of 100 MB takes a few calls of 32 MiB and more, each at a multiple of the page and into a
page-aligned buffer: direct I/O (O_DIRECT) needs that, and costs a fifth of what reading through the page cache costs.
Where a file system refuses direct I/O, its files are read through the page cache.

What is read is hashed a piece at a time, and where a batch on the CPU has a place for its rows (landing.py) each piece
goes there at once, out of the core's cache. Out of the page cache such rows pass through one piece of memory and never
lie in a buffer of their own.

Cost: 0.06 CPU s/GB past the page cache and 0.13 out of it, xxh3-64 included; no allocation.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from eyas.errors import EyasError
from eyas.store.landing import Landing
from eyas.store.layout import OPEN_SUFFIX, PAGE
from eyas.store.logits import pack
from eyas.store.remote import fetch_again

CALL_BYTES = 32 << 20  # a call grows to at least this where the batch has that much in one piece
PIECE_BYTES = 1 << 20  # of the page cache's, and of what is hashed and copied: what a core's own cache holds
AHEAD_FROM = 6  # pieces of a call from which on the kernel reads ahead: one more is then at most a sixth
GAP_BYTES = 64 << 10  # a hole this small is cheaper to read than to leave out
Slot = AbstractContextManager[object]  # held while the disk is read
NO_LIMIT: Slot = contextlib.nullcontext()
PASSING = (True, True)  # through the page cache, with a place of its own
_OPEN_FILES = 256  # file descriptors kept; the usual limit of a process is 1,024
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


class Extent(NamedTuple):
    """Rows of one layer of one sample: where they lie, and what they are.

    sample: the sample's id, for messages
    path: the file. For a shard of a store its final name, which need not exist yet
    offset, nbytes: from the first byte of the first row to the last byte of the last one
    layer: id out of the manifest's `layers`
    dtype: "bfloat16", "float16", "float32"; "float8_e4m3fn", "float8_e5m2" or "int8", usually with `scales`;
        "int32" for token ids, with their log p as `scales`: kept logits (logits.py)
    row_bytes: bytes of one row; its values are contiguous
    stride: bytes from one row to the next; more than row_bytes where a file is token-major
    xxh3: xxh3-64 of the nbytes in hex, or None where nobody knows (a part of what was hashed, another tool's file)
    scales: one float32 for each row that multiplies it (row_bytes 4), or None; behind "int32" as many float16 a row
    channels: [values] float32 that multiply every row as well, on the CPU, or None
    behind: bytes behind these that the checksum covers too: read and verified with them, and not used
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
    channels: Tensor | None = None
    behind: int = 0

    @property
    def end(self) -> int:
        """Where in the file the reading ends."""
        return self.offset + self.nbytes + self.behind

    @property
    def rows(self) -> int:
        return (self.nbytes - self.row_bytes) // self.stride + 1 if self.nbytes else 0


class Call(NamedTuple):
    """One read: bytes [start, stop) of a file, both multiples of the page, to byte `at` of the buffer.

    need: the end of what extents want, between the two: a file may end behind it
    buffered: through the page cache
    passing: a piece at a time through the memory of one; `at` means nothing
    extents: indices of the extents that lie inside
    """

    path: str
    start: int
    stop: int
    at: int
    need: int
    buffered: bool
    passing: bool
    extents: list[int]


class ReadPlan(NamedTuple):
    """calls: in the order of the files; places: extent k begins at byte places[k] of a buffer of `nbytes`, or at none
    where its call is passing."""

    calls: list[Call]
    places: list[int]
    nbytes: int


def plan_reads(
    extents: Sequence[Extent],
    buffered: Sequence[bool] | None = None,
    call_bytes: int = CALL_BYTES,
    gap_bytes: int = GAP_BYTES,
    landing: Container[int] = (),
) -> ReadPlan:
    """The calls that bring `extents` into one buffer, whatever their order and overlap.

    buffered: which extents go through the page cache; default none; landing: which have a place of their own.
    A call ends at the first extent behind call_bytes or behind a hole of more than gap_bytes. Extents that overlap
    (the layers of a token-major file) always share one, but for such as pass.
    """
    cached = [False] * len(extents) if buffered is None else buffered
    flags = [(cached[k], cached[k] and k in landing) for k in range(len(extents))]
    order = sorted(range(len(extents)), key=lambda k: (extents[k].path, flags[k], extents[k].offset))
    calls: list[Call] = []
    places = [0] * len(extents)
    at = i = 0
    while i < len(order):
        first = extents[order[i]]
        kind, start, need, members = flags[order[i]], first.offset // PAGE * PAGE, first.offset, list[int]()
        while i < len(order):
            k = order[i]
            e = extents[k]
            far = e.offset > need + gap_bytes or (need - start >= call_bytes and e.offset >= need)
            far = far or (kind == PASSING and e.offset < need)  # read once, it is gone
            if members and (e.path != first.path or flags[k] != kind or far):
                break
            members.append(k)
            places[k] = at + e.offset - start
            need = max(need, e.end)
            i += 1
        stop = -(-need // PAGE) * PAGE
        calls.append(Call(first.path, start, stop, at, need, *kind, members))
        at += 0 if kind == PASSING else stop - start
    return ReadPlan(calls, places, at)


class File:
    """A file descriptor that closes when the last thread that reads from it lets go.

    direct: past the page cache; ahead: through it, and the kernel reads ahead of what is asked for.
    """

    def __init__(self, path: str, direct: bool, ahead: bool = False) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        self.direct = direct
        if not direct and not ahead:  # the kernel shall keep what is asked for, and not what lies behind it
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Files:
    """Files by name, opened once, each with direct I/O or without. For many threads.

    say: told once when a file system refuses direct I/O.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._refuses: set[int] = set()  # numbers of the devices whose file system refuses direct I/O
        self.get = functools.lru_cache(_OPEN_FILES)(self._open)

    def for_call(self, call: Call, direct: bool) -> File:
        """The file to make a call with; direct: past the page cache, where the file system can.

        A long call through the page cache lets the kernel read ahead: it then fills the cache in large folios, a
        third faster and for a third of the CPU time, and copying out of them is twice as fast as out of single pages.
        The price is one piece behind the call's end, so short ones ask for their own pages only. The descriptor is
        the call's own, because the kernel watches for sequences by descriptor.
        """
        file = self.get(call.path, direct)
        if file.direct:
            return file
        ahead = max(PIECE_BYTES, _read_ahead(os.fstat(file.fd).st_dev))
        return file if call.need - call.start < AHEAD_FROM * ahead else self._open(call.path, False, True)

    def _open(self, path: str, direct: bool, ahead: bool = False) -> File:
        for candidate in (path, path + OPEN_SUFFIX, path):  # a writer may close the shard between two looks
            try:
                if direct and Path(candidate).stat().st_dev not in self._refuses:
                    try:
                        return File(candidate, True)
                    except OSError as error:
                        if error.errno != errno.EINVAL:
                            raise
                        self.refused(candidate, Path(candidate).stat().st_dev)
                return File(candidate, False, ahead)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise EyasError(f"{candidate} cannot be read: {error.strerror}") from None
        raise EyasError(f"{path} is missing: restore it, or capture into another folder")

    def fetch_again(self, path: str) -> bool:
        """Whether a file whose content is wrong is another one now (remote.py)."""
        if not fetch_again(path, self._say):
            return False
        self.get.cache_clear()  # what is open is the old one
        return True

    def refused(self, path: str, device: int) -> None:
        """Direct I/O does not work on the file system of `path`: from now on its files go through the page cache."""
        if device not in self._refuses:
            self._refuses.add(device)
            if self._say is not None:
                self._say(f"{Path(path).parent}: its file system refuses direct I/O, so it is read through the cache")


@functools.lru_cache(64)
def _read_ahead(device: int) -> int:
    """Bytes that the kernel reads ahead on a device."""
    try:
        text = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text()
        return int(text) << 10
    except (OSError, ValueError):  # a layered file system does not say whose device is below it
        return 128 << 10  # the kernel's default


class Memory(NamedTuple):
    """Where what is read goes.

    buffer: page-aligned, plan.nbytes; piece: PIECE_BYTES, for calls that are passing
    landings: extent -> where its rows belong besides
    slot: held while the disk is read, or the page cache; not while what came past it is hashed
    """

    buffer: memoryview
    piece: memoryview = memoryview(b"")
    landings: Mapping[int, Landing] = {}
    slot: Slot = NO_LIMIT


def read(files: Files, extents: Sequence[Extent], plan: ReadPlan, memory: Memory) -> None:
    """Make the calls of `plan` into `memory` and verify every extent that has a checksum.

    What does not match is read once more, from the disk; of an object store, the file is fetched once more. Raises
    EyasError that names sample, file and offset, and what to do.
    """
    for call in plan.calls:
        wrong = _wrong(files, extents, call, memory)
        again = "read twice"
        try:
            fetched = bool(wrong) and files.fetch_again(call.path)
        except EyasError as error:  # what is wrong with the copy matters more than that no other one came
            fetched, again = False, f"read twice; it could not be fetched once more: {error}"
        if fetched:
            wrong, again = _wrong(files, extents, call, memory), "read twice, fetched again and read twice"
        if wrong:
            bad = extents[wrong[0]]
            raise EyasError(
                f"{bad.path}: sample {bad.sample} at byte {bad.offset} does not match its checksum ({again}): restore"
                f" the file, or leave such samples out: eyas store check {Path(bad.path).parent} --quarantine"
            )


def _wrong(files: Files, extents: Sequence[Extent], call: Call, memory: Memory) -> list[int]:
    """Make a call, twice where it has to be; which of its extents do not match their checksum."""
    wrong: list[int] = []
    for _ in range(2):
        with memory.slot if call.buffered else NO_LIMIT:
            wrong = _bring(files, extents, call, memory)
        if not wrong:
            break
        file = files.get(call.path, False)  # the page cache may hold the bad copy: ask the disk
        os.posix_fadvise(file.fd, call.start, call.stop - call.start, os.POSIX_FADV_DONTNEED)
    return wrong


def _bring(files: Files, extents: Sequence[Extent], call: Call, memory: Memory) -> list[int]:
    """Make one call; the extents that do not match their checksums.

    Direct I/O brings all of it at once, the page cache a piece at a time. A piece is hashed, and copied to where its
    rows belong, while it is in the core's cache: neither then reads memory, and memory is the bound there.
    """
    done, wrong, file = 0, list[int](), files.for_call(call, not call.buffered)
    buffer = memory.piece if call.passing else memory.buffer
    zero = call.at  # where in the buffer the call's first byte would be
    for k in call.extents:
        e, hashed, landing = extents[k], xxhash.xxh3_64(), memory.landings.get(k)
        first, at, stop = e.offset - call.start, e.offset - call.start, e.end - call.start
        while at < stop:
            while done <= at:  # a hole may be longer than a piece
                zero = -done if call.passing else call.at
                with NO_LIMIT if call.buffered else memory.slot:
                    done, file = _read_on(files, file, extents, call, buffer[zero + done :], done)
            got = min(stop, done, at + PIECE_BYTES)
            if e.xxh3 is not None:
                hashed.update(buffer[zero + at : zero + got])  # without the GIL; the one-shot functions keep it
            if landing is not None and at < first + e.nbytes:
                landing.put(at - first, buffer[zero + at : zero + min(got, first + e.nbytes)])
            at = got
        if e.xxh3 is not None and hashed.hexdigest() != e.xxh3:
            wrong.append(k)
    return wrong


def _read_on(
    files: Files, file: File, extents: Sequence[Extent], call: Call, into: memoryview, done: int
) -> tuple[int, File]:
    """Read behind the first `done` bytes of a call: all that is needed, or a piece. Returns how many there are now, and
    the file to go on with: another one where direct I/O is refused. into: what lies behind them in memory."""
    all_needed, before = call.need - call.start, done
    while True:
        need = all_needed if file.direct else min(all_needed, done + PIECE_BYTES, before + len(into))
        stop = call.stop - call.start if need == all_needed and not call.passing else need
        try:
            got = os.preadv(file.fd, [into[done - before : stop - before]], call.start + done)
        except OSError as error:
            if error.errno == errno.EINVAL and file.direct:  # refused at a read, not when opened
                files.refused(call.path, os.fstat(file.fd).st_dev)
                file = files.for_call(call, False)
                continue
            e = _wanted_at(extents, call, call.start + done)
            raise EyasError(
                f"{call.path}: sample {e.sample} at byte {call.start + done} cannot be read: {error.strerror}"
            ) from None
        last, done = done, done + got
        if got == 0 or (done < need and os.fstat(file.fd).st_size <= call.start + done):
            e = _wanted_at(extents, call, call.start + done)
            raise EyasError(f"{call.path} ends before sample {e.sample} (byte {e.offset}) does: restore it")
        if done >= need:
            return done, file
        if file.direct:
            done -= done % PAGE  # it goes on at a page
            if done == last:  # less than a page at a time: not that way
                file = files.for_call(call, False)


def _wanted_at(extents: Sequence[Extent], call: Call, position: int) -> Extent:
    """The extent of a call that wants the byte of the file at `position`, or the next one that is wanted."""
    return next(e for k in call.extents if (e := extents[k]).end > position)


def with_scales(extents: Sequence[Extent]) -> list[Extent]:
    """Every extent, and behind it that of its scales where it has one: what has to be read."""
    return [each for e in extents for each in (e, e.scales) if each is not None]


def as_wanted(e: Extent) -> bool:
    """Whether an extent's bytes are its rows, bfloat16, one behind the other."""
    return e.dtype == "bfloat16" and e.scales is None and e.channels is None and e.stride == e.row_bytes


def decode(memory: Tensor, flat: Sequence[Extent], places: Sequence[int]) -> list[Tensor]:
    """The rows of every extent but the scales, [rows, values] bfloat16: views of `memory` where they are stored so; of
    kept logits the words of logits.py.

    memory: uint8, as `read` filled it, here or copied to a device; flat: of `with_scales`.
    """
    rows: list[Tensor] = []
    k = 0
    while k < len(flat):
        e, values = flat[k], _rows(memory, flat[k], places[k])
        k += 1
        if e.dtype == "int32":
            rows.append(pack(values, _rows(memory, flat[k], places[k])))
            k += 1
            continue
        if e.scales is not None:
            values = values.float().mul_(_rows(memory, e.scales, places[k]))
            k += 1
        if e.channels is not None:
            values = values.float().mul_(_on(e.channels, memory.device))
        rows.append(values.to(torch.bfloat16))
    return rows


@functools.lru_cache(256)
def _on(channels: Tensor, device: torch.device) -> Tensor:
    """Channels on a device: one copy for all batches."""
    return channels.to(device)


def _rows(memory: Tensor, e: Extent, place: int) -> Tensor:
    """[rows, values] of an extent in its own dtype; float32 for scales."""
    dtype = _DTYPES[e.dtype]
    raw = memory[place : place + e.nbytes]
    if place % dtype.itemsize:  # a file that does not align its tensors
        raw = raw.clone()
    shape = (e.rows, e.row_bytes // dtype.itemsize)
    return raw.view(dtype).as_strided(shape, (e.stride // dtype.itemsize, 1))


def read_tensors(files: Files, extents: Sequence[Extent]) -> list[Tensor]:
    """The rows of each extent, [rows, values] bfloat16, through the page cache: for a look at a few samples."""
    flat = with_scales(extents)
    plan = plan_reads(flat, [True] * len(flat))
    memory = np.empty(plan.nbytes, dtype=np.uint8)
    read(files, flat, plan, Memory(memory.data))
    return decode(torch.from_numpy(memory), flat, plan.places)


def read_bytes(files: Files, extent: Extent) -> Any:
    """The bytes of one extent through the page cache, uint8 [nbytes]."""
    plan = plan_reads([extent], [True])
    memory = np.empty(plan.nbytes, dtype=np.uint8)
    read(files, [extent], plan, Memory(memory.data))
    return memory[plan.places[0] : plan.places[0] + extent.nbytes]
