"""Where rows belong in a batch on the CPU, so that they go there as they are read.

What a read brings is in the core's cache for a moment, where it is hashed. Copied to the batch then, a row costs one
pass of reading memory (the page cache, or what the disk wrote) and one of writing it. Copied from a buffer of the whole
batch later, it costs one more of each: 0.25 CPU s/GB in place of 0.17 to 0.21 (bench/RESULTS.md).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_RUNS = 64  # of one sample; copying more of them one by one costs more than a pass through memory


class Landing(NamedTuple):
    """The place of some rows of an extent.

    into: [n, bytes of a row] uint8; its rows may lie apart
    runs: (first row of the extent, first row of `into`, how many), ascending in both
    """

    into: npt.NDArray[np.uint8]
    runs: list[tuple[int, int, int]]

    @staticmethod
    def of(into: npt.NDArray[np.uint8], at: npt.NDArray[np.int64]) -> Landing | None:
        """For row at[n] of the extent to go to into[n], `at` ascending; None where `at` is too scattered for it."""
        if not len(at):
            return Landing(into, [])
        starts = np.flatnonzero(np.diff(at, prepend=at[0] - 2) != 1)
        if len(starts) > MOST_RUNS:
            return None
        counts = np.diff(starts, append=len(at))
        return Landing(into, list(zip(at[starts].tolist(), starts.tolist(), counts.tolist(), strict=True)))

    def put(self, offset: int, piece: memoryview) -> None:
        """`piece` is the extent from its byte `offset` on; rows lie behind one another there."""
        size = self.into.shape[1]
        for row, place, count in self.runs:
            first, stop = max(offset, row * size), min(offset + len(piece), (row + count) * size)
            if first < stop:
                _lay(self.into[place : place + count], first - row * size, piece[first - offset : stop - offset])


def _lay(into: npt.NDArray[np.uint8], at: int, piece: memoryview) -> None:
    """Bytes to byte `at` of the rows of `into`, as if these lay behind one another."""
    size = into.shape[1]
    row, column = divmod(at, size)
    content = np.frombuffer(piece, np.uint8)
    if column:  # the rest of a row
        head = min(size - column, len(content))
        into[row, column : column + head] = content[:head]
        row, content = row + 1, content[head:]
    whole = len(content) // size
    into[row : row + whole] = content[: whole * size].reshape(whole, size)
    if rest := len(content) - whole * size:  # the beginning of one
        into[row + whole, :rest] = content[whole * size :]
