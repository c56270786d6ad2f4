"""The read path of one source: wanted samples in, verified bytes in a reused buffer out.

    extents of the samples -> calls -> a leased buffer (ring.py) <- preadv, direct or through the page cache -> xxh3
                                                                                      -> rows to a batch (landing.py)

One thread brings one batch; many threads bring many at once. Nothing is allocated for the states: the buffer is one
that an earlier batch has left, and what comes out are views of it. Sources that cannot be read by range (compressed
files) are read by their own `states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.store.landing import Landing
from eyas.store.memory import ahead_bytes, cache_bytes, kept_samples
from eyas.store.reader import Source
from eyas.store.reads import (
    NO_LIMIT,
    PIECE_BYTES,
    Extent,
    Files,
    Memory,
    Slot,
    as_wanted,
    decode,
    plan_reads,
    read,
    with_scales,
)
from eyas.store.ring import Ring


@dataclass
class Loaded:
    """The states of a batch's samples as they were read.

    memory: uint8, the whole buffer; extents, places: what lies in it, and where (reads.py); whose: sample, by position
    in the batch, and layer, by number, of each of the extents that are no scales; own: states of the samples that came
    another way, [layers, rows, Ht] each, by position in the batch; nbytes: of rows that were read, those included that
    have landed and are not in it
    """

    memory: Tensor
    extents: list[Extent]
    places: list[int]
    whose: list[tuple[int, int]]
    own: dict[int, Tensor]
    nbytes: int

    def rows(self, memory: Tensor | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """(sample, layer, its rows [rows, Ht] bfloat16): views of the buffer, or of a copy of it on a device."""
        memory = self.memory if memory is None else memory
        for (b, j), rows in zip(self.whose, decode(memory, self.extents, self.places), strict=True):
            yield b, j, rows
        for b, states in self.own.items():
            for j, rows in enumerate(states.to(memory.device, torch.bfloat16)):
                yield b, j, rows

    def states(self) -> list[list[Tensor]]:
        """Per sample its layers, where none has landed."""
        found: dict[int, list[Tensor]] = {}
        for b, _, rows in self.rows():
            found.setdefault(b, []).append(rows)
        return [found[b] for b in sorted(found)]


class ReadPath:
    """How the samples of `source` come into memory. For many threads.

    cache_gb: page cache to count on, in GB, or "auto"; device: where batches go, for buffers that CUDA can fetch from;
    memory: bytes for batches read ahead, default by what is available; say: told once where direct I/O is refused.
    """

    def __init__(
        self,
        source: Source,
        *,
        cache_gb: float | str = 0,
        device: torch.device | None = None,
        memory: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.source = source
        self.memory = ahead_bytes() if memory is None else memory
        self.kept: npt.NDArray[np.bool_] = kept_samples(source, cache_bytes(cache_gb))
        self.ring = Ring(device if device is not None and device.type == "cuda" else None)  # what is read
        self.batches = Ring()  # what a step on the CPU takes
        self.pieces = Ring()  # what passes on its way there
        self._files = Files(say)

    def load(
        self,
        samples: Sequence[int],
        rows: Sequence[int],
        landings: Mapping[tuple[int, int], Landing] | None = None,
        slot: Slot = NO_LIMIT,
    ) -> Loaded:
        """The first rows[b] rows of samples[b], of every layer. Raises EyasError naming sample, file and offset.

        landings: where the rows of a sample (by position) and layer (by number) belong. Those that are stored as they
        are wanted go there; what is not, stays in the buffer. slot: held while reading (`reads.Memory`).
        """
        extents: list[Extent] = []
        buffered: list[bool] = []
        whose: list[tuple[int, int] | None] = []
        places: dict[int, Landing] = {}
        own: dict[int, Tensor] = {}
        for b, (i, stop) in enumerate(zip(samples, rows, strict=True)):
            parts = self.source.extents(i, stop=stop)
            if parts is None:
                own[b] = self.source.states(i, stop=stop)
                continue
            for j, part in enumerate(parts):
                landing = landings.get((b, j)) if landings is not None else None
                if landing is not None and as_wanted(part):
                    places[len(extents)] = landing
                flat = with_scales([part])
                whose += [(b, j), None][: len(flat)]
                extents += flat
                buffered += [bool(self.kept[i])] * len(flat)
        plan = plan_reads(extents, buffered, landing=places)
        memory, piece = self.ring.lease(plan.nbytes), self.pieces.lease(PIECE_BYTES)
        read(self._files, extents, plan, Memory(memory.data, piece.data, places, slot))
        nbytes = sum(e.rows * e.row_bytes + e.behind for e in extents)
        nbytes += sum(s.numel() * s.element_size() for s in own.values())
        stay = [k for k in range(len(extents)) if k not in places]
        return Loaded(
            torch.from_numpy(memory),
            [extents[k] for k in stay],
            [plan.places[k] for k in stay],
            [w for k in stay if (w := whose[k]) is not None],
            own,
            nbytes,
        )
