"""Order, split, packing, and threads that read ahead.

Everything is decided from the index before any data is read: which samples train and which validate, the order of
each epoch, and which samples share a pack. So the number of steps is known at the start, and a run with the same seed
sees the same batches with any number of threads.

Samples are packed whole, one behind the other, without padding; a pack holds at most `batch_tokens` tokens. Closing a
pack when the next sample does not fit leaves about half a sample of it empty.

Threads, not processes: they read straight into tensors (the GIL is released while they do), and no tensor crosses a
process boundary.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from eyas.drafter.plan import Plan, count_trained, make_plan
from eyas.record.outlet import name_thread
from eyas.store.reader import Source


@dataclass
class Batch:
    """One pack, ready for a step.

    states: [T, 3 Ht] the verifier's low, middle and high state at the plan's key rows
    last: [R, Ht] its last state at the plan's target rows
    samples: indices into the source; tokens: packed tokens, the untouched ones included; nbytes: read from the store
    """

    plan: Plan
    states: Tensor
    last: Tensor
    samples: list[int]
    tokens: int
    nbytes: int


def split_samples(ids: list[str], val_ratio: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the training and of the validation samples: disjoint, and together all of them.

    Decided by a hash of each sample's id, so that a store that grows keeps its split but for the edge. Samples cut from
    one conversation (`id#1`, `id#2`) fall on the same side. At least one group validates where there are two or more
    and val_ratio > 0, and at least one always trains.
    """
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(ids):
        groups.setdefault(name.rsplit("#", 1)[0], []).append(i)
    ranked = sorted(groups, key=lambda name: (xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()), name))
    count = min(round(len(ranked) * val_ratio), len(ranked) - 1)
    if val_ratio > 0 and len(ranked) > 1:
        count = max(count, 1)
    val = sorted(i for name in ranked[:count] for i in groups[name])
    train = sorted(i for name in ranked[count:] for i in groups[name])
    return train, val


def split_source(source: Source, max_seq_len: int, val_ratio: float) -> tuple[list[int], list[int], int]:
    """Training and validation samples of a source, and how many are left out because nothing in them is trained.

    Does not depend on the run's seed, so that runs on the same data are validated on the same samples.
    """
    usable = [i for i in range(len(source.ids)) if count_trained(source.tokens(i)[1][:max_seq_len])]
    train, val = split_samples([source.ids[i] for i in usable], val_ratio, seed=0)
    return [usable[i] for i in train], [usable[i] for i in val], len(source.ids) - len(usable)


def pack(samples: list[int], lengths: np.ndarray, batch_tokens: int, max_seq_len: int) -> list[list[int]]:
    """Samples in order, closed into packs of at most batch_tokens tokens. lengths: [all samples]."""
    packs: list[list[int]] = []
    room = 0
    for i in samples:
        length = min(int(lengths[i]), max_seq_len)
        if length > room or not packs:
            packs.append([])
            room = batch_tokens
        packs[-1].append(i)
        room -= length
    return packs


def epoch_order(samples: list[int], seed: int, epoch: int) -> list[int]:
    """The samples in this epoch's order: seeded, another one each epoch."""
    order = np.random.default_rng((seed, epoch)).permutation(len(samples))
    return [samples[i] for i in order]


def load_batch(source: Source, samples: list[int], steps: int, max_seq_len: int) -> Batch:
    """Read one pack. Raises EyasError naming the sample when its data is not what the index says."""
    documents = []
    for i in samples:
        ids, mask = source.tokens(i)
        documents.append((ids[:max_seq_len], mask[:max_seq_len]))
    plan = make_plan(documents, steps)
    tokens = sum(len(ids) for ids, _ in documents)
    Ht = source.manifest.hidden_size
    states, last = torch.empty(len(plan.key_row), 3 * Ht, dtype=torch.bfloat16), []
    nbytes = first = first_target = 0
    targets = plan.target_row.numpy()
    for i, (ids, _), doc in zip(samples, documents, plan.documents, strict=True):
        read = source.states(i, stop=len(ids))  # [4, T, Ht]
        nbytes += read.numel() * read.element_size()
        rows = doc.key_stop - doc.key_start
        states[doc.key_start : doc.key_stop].view(rows, 3, Ht).copy_(read[:3, :rows].transpose(0, 1))
        stop_target = int(np.searchsorted(targets, first + len(ids)))
        last.append(read[3, plan.target_row[first_target:stop_target] - first])
        first, first_target = first + len(ids), stop_target
    return Batch(plan, states, torch.cat(last) if last else torch.empty(0, Ht), samples, tokens, nbytes)


class Loader:
    """Iterates over batches in order, read ahead by `threads` threads; counts how long the consumer waited.

    waited: seconds that `next` blocked so far; nbytes: bytes read so far; reading: samples of the batch waited for;
    ready: batches that are read and not yet taken.
    Closing the iterator (or leaving its loop) stops the threads.
    """

    def __init__(self, source: Source, packs: list[list[int]], steps: int, max_seq_len: int, threads: int) -> None:
        self.source, self.packs, self.steps, self.max_seq_len, self.threads = source, packs, steps, max_seq_len, threads
        self.waited = 0.0
        self.nbytes = 0
        self.reading: list[int] = []
        self._ahead: deque[tuple[list[int], Future[Batch]]] = deque()

    @property
    def ready(self) -> int:
        return sum(future.done() for _, future in list(self._ahead))

    def __iter__(self) -> Iterator[Batch]:
        if self.threads == 0:
            for samples in self.packs:
                self.reading, started = samples, time.monotonic()
                batch = load_batch(self.source, samples, self.steps, self.max_seq_len)
                self._count(batch, started)
                yield batch
            return
        pool = ThreadPoolExecutor(self.threads, "eyas-read", name_thread, ("eyas-read",))
        waiting = iter(self.packs)
        ahead = self._ahead

        def submit() -> None:
            for samples in itertools.islice(waiting, 1):
                ahead.append((samples, pool.submit(load_batch, self.source, samples, self.steps, self.max_seq_len)))

        try:
            for _ in range(self.threads + 1):
                submit()
            while ahead:
                (self.reading, future), started = ahead.popleft(), time.monotonic()
                batch = future.result()
                self._count(batch, started)
                submit()
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _count(self, batch: Batch, started: float) -> None:
        self.waited += time.monotonic() - started
        self.nbytes += batch.nbytes
        self.reading = []
