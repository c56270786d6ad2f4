"""Order, split, packing, and threads that read ahead.

Everything is decided from the index before any data is read: which samples train and which validate, the order of
each epoch, and which samples share a pack. So the number of steps is known at the start, and a run with the same seed
sees the same batches with any number of threads, from any pack on.

Samples are packed whole, one behind the other, without padding; a pack holds at most `batch_tokens` tokens. Closing a
pack when the next sample does not fit leaves about half a sample of it empty.

Threads, not processes: they read into reused buffers (the GIL is released while they do), and no tensor crosses a
process boundary. How many packs are under way follows from what reading and a step take, within a memory budget.

A pack is planned before it is read, and the packs of one optimiser step are planned together: what all of them train is
known at the first of them, from tokens that the threads have read, and the loop's own thread reads nothing.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from eyas.drafter.plan import Plan, make_plan
from eyas.record.outlet import name_thread
from eyas.store.landing import Landing
from eyas.store.reader import Source
from eyas.store.readpath import Loaded, ReadPath
from eyas.store.reads import NO_LIMIT, Slot

MORE = 2  # threads than read at a time: they hash and copy what has come, and the disk does not wait for that
SLOWEST_OF = 16  # reads whose slowest one the next ones are expected to take
AHEAD_OF_SLOWEST = 4  # so many of them are covered by packs under way


@dataclass
class Planned:
    """One pack before its states are read.

    lengths: tokens of each sample;
    kept: for each sample, where in the last layer the row of each token is, or None where every token has one.
    widths: values of a row of a state, and of the last layer.
    """

    plan: Plan
    samples: list[int]
    lengths: list[int]
    kept: list[np.ndarray] | None
    widths: tuple[int, int]

    @property
    def trained(self) -> list[int]:
        """[K] positions that TTT step k trains."""
        return [len(rows) for rows in self.plan.trained]


@dataclass
class Pack(Planned):
    """One pack as it was read."""

    loaded: Loaded


@dataclass
class Batch:
    """One pack, ready for a step.

    states: [T, 3 Ht] the verifier's low, middle and high state at the plan's key rows
    last: [R, Ht] its last state at the plan's target rows, or the logits kept in its place, [R, 3 k] (store/logits.py)
    samples: indices into the source; tokens: packed tokens, the untouched ones included; nbytes: read from the store
    trained: [K] positions that TTT step k trains, in this pack and in what is left of its group (`Loader`)
    """

    plan: Plan
    states: Tensor
    last: Tensor
    samples: list[int]
    tokens: int
    nbytes: int
    trained: list[int]


def split_samples(ids: list[str], val_ratio: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the training and of the validation samples: disjoint, and together all of them.

    Decided by a hash of each sample's id, so that a store that grows keeps its split but for the edge. Samples cut from
    one conversation (`id#1`, `id#2`) fall on the same side. At least one group validates where there are two or more
    and val_ratio > 0, and at least one always trains.
    """
    group: dict[str, int] = {}
    of = np.array([group.setdefault(name.rsplit("#", 1)[0], len(group)) for name in ids], dtype=np.int64)
    count = min(round(len(group) * val_ratio), len(group) - 1)
    if val_ratio > 0 and len(group) > 1:
        count = max(count, 1)
    digests = np.array([xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) for name in group], dtype=np.uint64)
    validates = np.zeros(len(group), dtype=np.bool_)
    validates[np.argsort(digests, kind="stable")[:count]] = True
    return np.flatnonzero(~validates[of]).tolist(), np.flatnonzero(validates[of]).tolist()


def split_source(source: Source, max_seq_len: int, val_ratio: float) -> tuple[list[int], list[int], int]:
    """Training and validation samples of a source, and how many are left out because nothing in them is trained.

    Does not depend on the run's seed, so that runs on the same data are validated on the same samples.
    """
    usable = np.flatnonzero((source.needs > 0) & (source.needs <= max_seq_len)).tolist()
    train, val = split_samples([source.ids[i] for i in usable], val_ratio, seed=0)
    return [usable[i] for i in train], [usable[i] for i in val], len(source.ids) - len(usable)


def pack(samples: list[int], lengths: np.ndarray, batch_tokens: int, max_seq_len: int) -> list[list[int]]:
    """Samples in order, closed into packs of at most batch_tokens tokens. lengths: [all samples]."""
    packs: list[list[int]] = []
    room = 0
    cut = np.minimum(lengths[samples], max_seq_len).tolist() if samples else []
    for i, length in zip(samples, cut, strict=True):
        if length > room or not packs:
            packs.append([])
            room = batch_tokens
        packs[-1].append(i)
        room -= length
    return packs


def epoch_order(samples: list[int], seed: int, epoch: int) -> list[int]:
    """The samples in this epoch's order: seeded, another one each epoch."""
    order = np.random.default_rng((seed, epoch)).permutation(len(samples))
    return [samples[i] for i in order.tolist()]


def shard_packs(packs: list[list[int]], rank: int, world: int) -> list[list[int]]:
    """The packs of one of `world` processes, the same number for each: together the first ones of `packs`, in order.

    What is left over, fewer than `world` packs at the end of the epoch, is read by nobody: another order leaves over
    others.
    """
    return packs[rank : len(packs) // world * world : world]


def plan_pack(source: Source, samples: list[int], steps: int, max_seq_len: int) -> Planned:
    """The plan of one pack, from its tokens and loss masks. Raises EyasError naming a sample that cannot be read."""
    documents = []
    for i in samples:
        ids, mask = source.tokens(i)
        documents.append((ids[:max_seq_len], mask[:max_seq_len]))
    kept = None
    if source.manifest.last_rows != "all":
        kept = [np.cumsum(mask) - 1 for _, mask in documents]
    m = source.manifest
    widths = m.hidden_size, 3 * m.logits if m.logits else m.hidden_size  # the words of store/logits.py
    return Planned(make_plan(documents, steps), samples, [len(ids) for ids, _ in documents], kept, widths)


def load_pack(reads: ReadPath, planned: Planned, slot: Slot = NO_LIMIT) -> Pack:
    """The pack with its states. Raises EyasError naming the sample when its data is not what the index says."""
    return Pack(**vars(planned), loaded=reads.load(planned.samples, planned.lengths, slot=slot))


def read_batch(reads: ReadPath, planned: Planned, slot: Slot = NO_LIMIT) -> Batch:
    """The batch of a pack on the CPU; most rows go to their place in it as they are read. Raises as `load_pack`."""
    wanted = _Rows.of(planned, lambda values: torch.from_numpy(reads.batches.lease(2 * values)).view(torch.bfloat16))
    loaded = reads.load(planned.samples, planned.lengths, wanted.landings(), slot)
    return wanted.batch(planned, loaded, None)


def assemble(pack: Pack, memory: Tensor) -> Batch:
    """The batch of a pack on a device, out of what was read: `pack.loaded.memory` there."""
    wanted = _Rows.of(pack, lambda values: torch.empty(values, dtype=torch.bfloat16, device=memory.device))
    return wanted.batch(pack, pack.loaded, memory)


@dataclass
class _Rows:
    """The states of a batch, and which rows of which sample make them.

    places: (sample, layer), by position and number -> (a part of `states` or `last`, [n, values]; the rows [n] of that
    layer that belong there, ascending)
    """

    states: Tensor
    last: Tensor
    places: dict[tuple[int, int], tuple[Tensor, npt.NDArray[np.int64]]]

    @staticmethod
    def of(planned: Planned, empty: Callable[[int], Tensor]) -> _Rows:
        """empty: makes room for so many bfloat16 values, where the batch shall be."""
        plan, (Ht, wide) = planned.plan, planned.widths
        T, R = len(plan.key_row), len(plan.target_row)
        both = empty(3 * T * Ht + R * wide)
        states, last = both[: 3 * T * Ht].view(T, 3 * Ht), both[3 * T * Ht :].view(R, wide)
        targets = plan.target_row.numpy()
        places = {}
        first = first_target = 0
        for b, doc in enumerate(plan.documents):
            rows = np.arange(doc.key_stop - doc.key_start)
            for j in range(3):
                places[b, j] = states[doc.key_start : doc.key_stop, j * Ht : (j + 1) * Ht], rows
            stop = first + planned.lengths[b]
            stop_target = int(np.searchsorted(targets, stop))
            at = targets[first_target:stop_target] - first
            places[b, 3] = last[first_target:stop_target], at if planned.kept is None else planned.kept[b][at]
            first, first_target = stop, stop_target
        return _Rows(states, last, places)

    def landings(self) -> dict[tuple[int, int], Landing]:
        """Where rows can go as they are read, for a batch on the CPU."""
        every = ((key, Landing.of(into.view(torch.uint8).numpy(), at)) for key, (into, at) in self.places.items())
        return {key: landing for key, landing in every if landing is not None}

    def batch(self, planned: Planned, loaded: Loaded, memory: Tensor | None) -> Batch:
        """With what has not landed, from `memory` or what was read."""
        for b, j, rows in loaded.rows(memory):
            into, at = self.places[b, j]
            _take(into, rows, at)
        tokens = sum(planned.lengths)
        return Batch(planned.plan, self.states, self.last, planned.samples, tokens, loaded.nbytes, planned.trained)


def _take(into: Tensor, rows: Tensor, at: npt.NDArray[np.int64]) -> None:
    """rows[at] to `into`; `at` ascending."""
    if not len(at):
        return
    apart = at[-1] - at[0] != len(at) - 1  # rows of an answer are neighbours
    if not apart:
        rows = rows[int(at[0]) : int(at[-1]) + 1]
    if into.is_cpu:  # numpy's copies stay on this thread; torch's would wake one per core for each reader
        source, target = rows.view(torch.int16).numpy(), into.view(torch.int16).numpy()
        if apart:
            np.take(source, at, axis=0, out=target, mode="clip")
        else:
            np.copyto(target, source)
    elif apart:
        torch.index_select(rows, 0, torch.from_numpy(at).to(rows.device), out=into)
    else:
        into.copy_(rows)


def load_batch(source: Source | ReadPath, samples: list[int], steps: int, max_seq_len: int) -> Batch:
    """Plan and read one pack. Raises EyasError naming the sample when its data is not what the index says."""
    reads = source if isinstance(source, ReadPath) else ReadPath(source)
    return read_batch(reads, plan_pack(reads.source, samples, steps, max_seq_len))


@dataclass
class _UnderWay:
    """A pack that is being planned, and then read; `future` brings a Batch, or a Pack while it has not been sent to the
    device, and is None before its turn to be read."""

    samples: list[int]
    planned: Future[Planned]
    future: Future[Any] | None = None
    sent: bool = False


class Depth:
    """How many packs to have under way: as many as the consumer uses up while the slowest of the last reads takes.

    threads: that read; memory: bytes that packs under way may hold. Both figures are measured as they come in.
    """

    def __init__(self, threads: int, memory: int) -> None:
        self.threads, self.memory = threads, memory
        self._took: deque[float] = deque(maxlen=SLOWEST_OF)  # s per read
        self._steps: deque[float] = deque(maxlen=SLOWEST_OF)  # s that the consumer kept a pack
        self._largest = 1

    def read(self, seconds: float, nbytes: int) -> None:
        """A pack of nbytes took so long to read."""
        self._took.append(seconds)
        self._largest = max(self._largest, nbytes)

    def step(self, seconds: float) -> None:
        """The consumer worked for so long on a pack."""
        self._steps.append(seconds)

    def packs(self) -> int:
        """The figure, at least 1."""
        step = sum(self._steps) / len(self._steps) if self._steps else 1.0
        wanted = math.ceil(AHEAD_OF_SLOWEST * max(self._took, default=0.0) / max(step, 1e-3))
        return max(1, min(max(wanted, self.threads + 1), self.memory // self._largest))


class Loader:
    """Iterates over batches in order, read ahead by `threads` threads; counts how long the consumer waited.

    source: what to read, or the path to read it by: give one path to all epochs of a run, it owns the buffers;
    start: the pack to begin at; device: where the batches shall be;
    group: so many packs, counted from `start`, make an optimiser step together: `trained` of the first is of all.
    waited: seconds that `next` blocked so far; nbytes: bytes read so far; reading: samples of the batch waited for;
    ready: batches that are read and not yet taken.
    Closing the iterator (or leaving its loop) stops the threads. A batch is the caller's to keep: its memory is used
    again when nothing refers to its tensors any more.
    """

    def __init__(
        self,
        source: Source | ReadPath,
        packs: list[list[int]],
        steps: int,
        max_seq_len: int,
        threads: int,
        *,
        start: int = 0,
        device: torch.device | str = "cpu",
        group: int = 1,
    ) -> None:
        self.reads = source if isinstance(source, ReadPath) else ReadPath(source)
        self.packs, self.steps, self.max_seq_len, self.threads = packs, steps, max_seq_len, threads
        self.start, self.device, self.group = start, torch.device(device), group
        self.depth = Depth(threads, self.reads.memory)
        self.waited = 0.0
        self.nbytes = 0
        self.reading: list[int] = []
        self._ahead: deque[_UnderWay] = deque()
        self._slot = threading.Semaphore(threads)

    @property
    def ready(self) -> int:
        return sum(each.future is not None and each.future.done() for each in list(self._ahead))

    def __iter__(self) -> Iterator[Batch]:
        if self.threads == 0:
            yield from self._one_by_one()
            return
        waiting = iter(self.packs[self.start :])
        pool = ThreadPoolExecutor(self.threads + MORE, "eyas-read", name_thread, ("eyas-read",))
        uploader = self._uploader()
        ahead = self._ahead
        handed = 0.0
        try:
            for number in itertools.count():
                reading = self.depth.packs()
                for samples in itertools.islice(waiting, max(0, max(reading, self.group) - len(ahead))):
                    ahead.append(_UnderWay(samples, pool.submit(self._plan, samples)))
                for each in itertools.islice(ahead, reading):
                    if each.future is None:
                        each.future = pool.submit(self._load, each.planned)
                if uploader is not None:
                    for each in itertools.islice(ahead, uploader.ahead):
                        if not each.sent and each.future is not None:
                            each.future, each.sent = uploader.submit(each.future), True
                if not ahead:
                    return
                started = time.monotonic()
                if handed:
                    self.depth.step(started - handed)
                self.reading, future = ahead[0].samples, ahead[0].future
                assert future is not None
                group = itertools.islice(ahead, self.group - number % self.group)
                trained = _sum([each.planned.result() for each in group])
                ahead.popleft()
                batch = future.result()
                batch.trained = trained
                self._count(batch, started)
                handed = time.monotonic()
                yield batch if uploader is None else uploader.hand_over(batch)
                del batch, future  # the memory is the next one's
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            ahead.clear()
            if uploader is not None:
                uploader.close()

    def _one_by_one(self) -> Iterator[Batch]:
        """Without threads."""
        packs = self.packs[self.start :]
        for first in range(0, len(packs), self.group):
            started = time.monotonic()
            self.reading = packs[first]
            group = [self._plan(samples) for samples in packs[first : first + self.group]]
            for i, planned in enumerate(group):
                self.reading = planned.samples
                batch = read_batch(self.reads, planned)
                batch.trained = _sum(group[i:])
                self._count(batch, started)
                yield batch
                del batch
                started = time.monotonic()

    def _uploader(self) -> Any:
        if self.device.type != "cuda":
            return None
        from eyas.train.upload import Uploader

        return Uploader(self.device)

    def _plan(self, samples: list[int]) -> Planned:
        return plan_pack(self.reads.source, samples, self.steps, self.max_seq_len)

    def _load(self, planned: Future[Planned]) -> Batch | Pack:
        """A batch, or a pack where its rows are taken on the device. Its plan was asked for before it: it is there, or
        another thread makes it."""
        started = time.monotonic()
        result: Batch | Pack
        if self.device.type == "cuda":
            result = load_pack(self.reads, planned.result(), self._slot)
            held = len(result.loaded.memory)
        else:
            result = read_batch(self.reads, planned.result(), self._slot)
            # The batch's own memory is there before its rows are read, and what is read may be far more than they are.
            held = result.nbytes + 2 * (result.states.numel() + result.last.numel())
        self.depth.read(time.monotonic() - started, held)
        return result

    def _count(self, batch: Batch, started: float) -> None:
        self.waited += time.monotonic() - started
        self.nbytes += batch.nbytes
        self.reading = []


def _sum(group: list[Planned]) -> list[int]:
    return [sum(each) for each in zip(*(planned.trained for planned in group), strict=True)]
