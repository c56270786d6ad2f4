"""Every sample once, in order, at the disk's speed: what checking and converting have in common.

Samples are read in groups of 64 MB by the read path (O_DIRECT, checksums, reused buffers) in a few threads, which also
do the work that is asked for. Where a group cannot be read, its samples are read one by one, so that only the broken
ones are lost, by name. Cost: that of the read path, and `threads` + 1 groups of memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from eyas.errors import EyasError
from eyas.store.reader import Source
from eyas.store.readpath import ReadPath

GROUP_BYTES = 64 << 20

SAY_SECONDS = 2.0

Result = TypeVar("Result")


class Progress:
    """Says how far a scan is, every SAY_SECONDS. what: the word that its lines begin with."""

    def __init__(self, what: str, source: Source, todo: Sequence[int], say: Callable[[str], None]) -> None:
        self.what, self.source, self.say = what, source, say
        self.samples, self.whole = len(todo), sum(source.nbytes(i) for i in todo)
        self.done = self.nbytes = 0
        self.started = self.said = time.monotonic()

    def add(self, i: int) -> None:
        """Sample i is done."""
        self.done, self.nbytes = self.done + 1, self.nbytes + self.source.nbytes(i)
        now = time.monotonic()
        if now - self.said >= SAY_SECONDS:
            self.said, rate = now, self.nbytes / (now - self.started)
            left = (self.whole - self.nbytes) / rate
            place = f"{self.done:,}/{self.samples:,} samples"
            self.say(f"{self.what} {place} · {rate / 1e6:,.0f} MB/s · {left:,.0f} s left")


def scan(
    source: Source, todo: Sequence[int], work: Callable[[int, Sequence[Tensor]], Result], threads: int
) -> Iterator[tuple[int, Result | EyasError]]:
    """(sample, what `work` made of it or why it cannot be read), in the order of `todo`.

    work: called with the sample and its layers, [T, Ht] bfloat16 each, in one of `threads` threads; the layers are
    views of a buffer that is used again when nothing refers to them any more.
    """
    reads = ReadPath(source)

    def run(group: list[int]) -> list[tuple[int, Result | EyasError]]:
        try:
            loaded = reads.load(group, [int(source.lengths[i]) for i in group])
        except EyasError as error:
            if len(group) == 1:
                return [(group[0], error)]
            return [result for i in group for result in run([i])]
        return [(i, work(i, layers)) for i, layers in zip(group, loaded.states(), strict=True)]

    ahead: deque[Future[list[tuple[int, Result | EyasError]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="eyas-scan") as pool:
        try:
            for group in _groups(source, todo):
                ahead.append(pool.submit(run, group))
                if len(ahead) > threads:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _groups(source: Source, todo: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    nbytes = 0
    for i in todo:
        if group and nbytes + source.nbytes(i) > GROUP_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(i)
        nbytes += source.nbytes(i)
    if group:
        yield group
