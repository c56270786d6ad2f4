"""The read path of one source: wanted samples in, verified bytes in a reused buffer out.

    extents of the samples -> calls -> a leased buffer (ring.py) <- preadv, direct or through the page cache -> xxh3

One thread brings one batch; many threads bring many at once. Nothing is allocated for the states: the buffer is one
that an earlier batch has left, and what comes out are views of it. Sources that cannot be read by range (compressed
files) are read by their own `states`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.store.memory import ahead_bytes, cache_bytes, kept_samples
from eyas.store.reader import Source
from eyas.store.reads import Extent, Files, decode, plan_reads, read, with_scales
from eyas.store.ring import Ring


@dataclass
class Loaded:
    """The states of a batch's samples as they were read.

    memory: uint8, the whole buffer; extents, places: what lies in it, and where (reads.py); own: states of the samples
    that came another way, [layers, rows, Ht] each, by position in the batch; count: samples; layers: of each;
    nbytes: of rows that were read
    """

    memory: Tensor
    extents: list[Extent]
    places: list[int]
    own: dict[int, Tensor]
    count: int
    layers: int
    nbytes: int

    def states(self, memory: Tensor | None = None) -> list[Sequence[Tensor]]:
        """Per sample its layers, [rows, Ht] bfloat16 each: views of the buffer, or of a copy of it on a device."""
        memory = self.memory if memory is None else memory
        rows = iter(decode(memory, self.extents, self.places))
        own = {b: states.to(memory.device, torch.bfloat16) for b, states in self.own.items()}
        return [list(own[b]) if b in own else [next(rows) for _ in range(self.layers)] for b in range(self.count)]


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
        self._files = Files(say)

    def load(self, samples: Sequence[int], rows: Sequence[int]) -> Loaded:
        """The first rows[b] rows of samples[b], of every layer. Raises EyasError naming sample, file and offset."""
        extents: list[Extent] = []
        buffered: list[bool] = []
        own: dict[int, Tensor] = {}
        for b, (i, stop) in enumerate(zip(samples, rows, strict=True)):
            parts = self.source.extents(i, stop=stop)
            if parts is None:
                own[b] = self.source.states(i, stop=stop)
            else:
                flat = with_scales(parts)
                extents += flat
                buffered += [bool(self.kept[i])] * len(flat)
        plan = plan_reads(extents, buffered)
        memory = self.ring.lease(plan.nbytes)
        read(self._files, extents, plan, memory.data)
        nbytes = sum(e.rows * e.row_bytes + e.behind for e in extents)
        nbytes += sum(s.numel() * s.element_size() for s in own.values())
        layers = len(self.source.manifest.layers)
        return Loaded(torch.from_numpy(memory), extents, plan.places, own, len(samples), layers, nbytes)
