"""Which samples train, in what order, in which packs, and that reading them with threads changes nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.errors import EyasError
from eyas.store.layout import Manifest
from eyas.store.reader import Source, open_source
from eyas.store.writer import StoreWriter
from eyas.train.batches import Batch, Loader, epoch_order, load_batch, pack, split_samples, split_source

H = 8
MANIFEST = Manifest("tiny", "f00d", H, 8, 100, (2, 4, 5, 8), "before")


def write_store(folder: Path, masks: list[np.ndarray]) -> Source:
    """One sample for each loss mask; the states of sample i at layer j and position t are i + j / 4 + t / 1024."""
    with StoreWriter(folder, MANIFEST) as store:
        for i, mask in enumerate(masks):
            states = torch.randn(4, len(mask), H, generator=torch.Generator().manual_seed(i))
            store.add(f"s{i}", (np.arange(len(mask)) * 7 + i) % 100, mask, states)
    return open_source(folder)


def answer(prompt: int, tokens: int) -> np.ndarray:
    return np.arange(prompt + tokens) >= prompt


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return write_store(tmp_path / "store", [answer(3 + i % 4, 4 + 5 * i) for i in range(12)])


# -- the split ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("val_ratio", [0.0, 0.01, 0.1, 0.5, 0.99])
def test_train_and_validation_are_disjoint_and_complete_for_1_to_200_samples(val_ratio: float) -> None:
    for n in range(1, 201):
        train, val = split_samples([f"c-{i}" for i in range(n)], val_ratio, seed=0)
        assert not set(train) & set(val)
        assert sorted(train + val) == list(range(n))
        assert train, "something always trains"
        if n > 1 and val_ratio > 0:
            assert len(val) == min(max(1, round(n * val_ratio)), n - 1)
        else:
            assert val == []


def test_samples_of_one_conversation_fall_on_the_same_side() -> None:
    ids = [f"c{i}#{part}" for i in range(60) for part in range(1, 4)] + [f"d{i}" for i in range(40)]
    train, val = split_samples(ids, 0.3, seed=0)
    sides = [{ids[i].split("#")[0] for i in side} for side in (train, val)]
    assert not sides[0] & sides[1]
    assert sorted(train + val) == list(range(len(ids)))
    assert len(sides[1]) == 30  # of 100 conversations


def test_the_split_does_not_depend_on_the_order_of_the_samples() -> None:
    ids = [f"c{i}" for i in range(50)]
    turned = ids[::-1]
    val = {ids[i] for i in split_samples(ids, 0.2, seed=0)[1]}
    assert val == {turned[i] for i in split_samples(turned, 0.2, seed=0)[1]}
    assert val != {ids[i] for i in split_samples(ids, 0.2, seed=1)[1]}


def test_a_store_that_grows_keeps_what_it_validates_on() -> None:
    ids = [f"c{i}" for i in range(400)]
    before = {ids[i] for i in split_samples(ids[:300], 0.1, seed=0)[1]}
    train = {ids[i] for i in split_samples(ids, 0.1, seed=0)[0]}
    assert len(before & train) <= 3  # the edge of the ranking


def test_samples_that_train_nothing_are_left_out_of_both_sides(tmp_path: Path) -> None:
    masks = [answer(3, 5), answer(6, 1), answer(3, 5), answer(20, 9)]  # one answer token trains no position
    source = write_store(tmp_path / "store", masks)
    train, val, left_out = split_source(source, 10, 0.5)  # and sample 3 has its answer behind the cut
    assert sorted(train + val) == [0, 2]
    assert left_out == 2


# -- packs and order -------------------------------------------------------------------------------------------------


def test_packs_hold_every_sample_once_in_order_and_no_more_than_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 300)
    samples = [int(i) for i in np.random.default_rng(1).permutation(300)]
    packs = pack(samples, lengths, 256, 128)
    assert list(itertools.chain(*packs)) == samples
    sizes = [int(np.minimum(lengths[p], 128).sum()) for p in packs]
    assert max(sizes) <= 256
    firsts = [min(int(lengths[p[0]]), 128) for p in packs[1:]]
    assert all(size + first > 256 for size, first in zip(sizes, firsts, strict=False)), "closed only when it must be"


def test_a_sample_larger_than_the_budget_is_a_pack_of_its_own() -> None:
    assert pack([0, 1, 2, 3], np.array([4, 50, 4, 4]), 10, 100) == [[0], [1], [2, 3]]


def test_no_samples_make_no_packs() -> None:
    assert pack([], np.array([5]), 10, 10) == []


def test_each_epoch_has_its_own_order_that_the_seed_decides() -> None:
    samples = [3, 5, 8, 13, 21, 34, 55, 89]
    orders = [epoch_order(samples, 0, epoch) for epoch in range(4)]
    assert all(sorted(order) == samples for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders == [epoch_order(samples, 0, epoch) for epoch in range(4)]
    assert epoch_order(samples, 1, 0) != orders[0]


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_holds_the_states_of_the_plans_rows(source: Source) -> None:
    batch = load_batch(source, [5, 0, 9], 3, 20)
    cut = [min(int(source.lengths[i]), 20) for i in (5, 0, 9)]
    states = torch.cat([source.states(i)[:, :n] for i, n in zip((5, 0, 9), cut, strict=True)], dim=1)  # [4, N, H]
    ids = np.concatenate([source.tokens(i)[0][:n] for i, n in zip((5, 0, 9), cut, strict=True)])
    plan = batch.plan
    for j in range(3):
        assert torch.equal(batch.states[:, j * H : (j + 1) * H], states[j, plan.key_row])
    assert torch.equal(batch.last, states[3, plan.target_row])
    assert plan.key_token.tolist() == ids[plan.key_row + 1].tolist()
    assert plan.next_token.tolist() == ids[plan.target_row + 1].tolist()
    assert batch.tokens == sum(cut) and batch.samples == [5, 0, 9]
    assert batch.nbytes == sum(cut) * 4 * H * 2


def same(a: Batch, b: Batch) -> bool:
    return a.samples == b.samples and torch.equal(a.states, b.states) and torch.equal(a.last, b.last)


@pytest.mark.parametrize("threads", [0, 1, 2, 5, 40])
def test_any_number_of_threads_gives_the_same_batches_in_the_same_order(source: Source, threads: int) -> None:
    packs = pack(epoch_order(list(range(12)), 0, 0), source.lengths, 60, 50)
    expected = [load_batch(source, samples, 3, 50) for samples in packs]
    loader = Loader(source, packs, 3, 50, threads)
    for _ in range(2):  # and a loader can be iterated again
        found = list(loader)
        assert len(found) == len(expected) > 3
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert loader.nbytes == 2 * sum(b.nbytes for b in expected)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_the_first_batch_of_a_step_says_what_all_of_its_packs_train(source: Source, threads: int, group: int) -> None:
    def trained(samples: list[int], k: int) -> int:
        masks = [source.tokens(i)[1][:50] for i in samples]
        return sum(int((mask[1 + k : -1] & mask[2 + k :]).sum()) for mask in masks)

    packs = pack(epoch_order(list(range(12)), 0, 0), source.lengths, 60, 50)[1:]
    for start in (0, 1):  # a step that is gone on from begins anew there
        loader = Loader(source, packs, 3, 50, threads, start=start, group=group)
        loader.reads.memory = 1  # no room to read ahead: what a step trains is known all the same
        loader.depth.memory = 1
        for i, batch in enumerate(loader, start=start):
            rest = packs[i : start + (i - start) // group * group + group]
            assert batch.trained == [sum(trained(samples, k) for samples in rest) for k in range(3)]
            assert batch.trained[0] > 0


@pytest.mark.parametrize("threads", [0, 3])
def test_a_damaged_sample_stops_the_loader_with_its_name(tmp_path: Path, threads: int) -> None:
    source = write_store(tmp_path / "store", [answer(3, 20)] * 6)
    (shard,) = (tmp_path / "store").glob("shard-*")
    record: Any = source.records[4]  # type: ignore[attr-defined]
    with shard.open("r+b") as file:
        file.seek(record.parts[1].offset + 9)
        file.write(b"\x55\x55")
    loader = Loader(source, [[i] for i in range(6)], 3, 50, threads)
    read = []
    with pytest.raises(EyasError, match=r"sample s4 .*checksum"):
        read.extend(batch.samples for batch in loader)
    assert read == [[0], [1], [2], [3]], "what lies before it is read"


def test_a_loader_that_is_left_early_stops_its_threads(source: Source) -> None:
    import threading

    before = Counter(t.name.split("_")[0] for t in threading.enumerate())["eyas-read"]
    batches = iter(Loader(source, [[i] for i in range(12)], 3, 50, 4))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert Counter(t.name.split("_")[0] for t in threading.enumerate())["eyas-read"] == before


def test_a_plan_of_a_shorter_max_seq_len_reads_no_more_rows(source: Source) -> None:
    whole, cut = load_batch(source, [11], 3, 1000), load_batch(source, [11], 3, 12)
    assert cut.tokens == 12 and cut.nbytes == 12 * 4 * H * 2 < whole.nbytes
    assert torch.equal(cut.states, whole.states[: len(cut.states)])
    assert replace(cut).plan.steps == 3
