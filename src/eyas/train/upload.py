"""Batches onto a CUDA device while it computes: one thread, one side stream, one batch ahead of the one in use.

The whole buffer of a pack goes over in one copy from registered memory, and its rows are taken on the device: the host
touches no state at all. The thread waits for each copy (without the GIL), so the host's buffer is free for the next
read as soon as the batch is there, and a batch is complete before anybody sees it.

Cost: two packs of device memory beside the one in use. Not used on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from eyas.train.batches import Batch, Pack, assemble


class Uploader:
    """Packs that were read -> batches on `device`. ahead: how many to have there or on their way."""

    ahead = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eyas-upload")

    def submit(self, read: Future[Pack]) -> Future[Batch]:
        """Upload what `read` brings, behind what was submitted before."""
        return self._thread.submit(self._upload, read)

    def _upload(self, read: Future[Pack]) -> Batch:
        pack = read.result()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            memory = pack.loaded.memory.to(self.device, non_blocking=True)
            batch = assemble(pack, memory)
            batch.plan = batch.plan.to(self.device)
            done = self._stream.record_event()
        done.synchronize()
        return batch

    def hand_over(self, batch: Batch) -> Batch:
        """Tell the allocator that the current stream uses the batch, whose memory is the side stream's."""
        stream = torch.cuda.current_stream(self.device)
        for tensor in _tensors(batch):
            tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield batch.states
    yield batch.last
    for value in vars(batch.plan).values():
        if isinstance(value, Tensor):
            yield value
        elif value and isinstance(value[0], Tensor):
            yield from value
