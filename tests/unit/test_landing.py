"""Rows go to their place in a batch as they are read: the same rows, whatever the pieces, and verified all the same."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.store import landing, readpath, reads
from eyas.store.landing import Landing
from eyas.store.layout import Manifest
from eyas.store.reader import StoreSource, open_source
from eyas.store.readpath import ReadPath
from eyas.store.reads import Extent, plan_reads
from eyas.store.writer import StoreWriter
from eyas.train.batches import Batch, Loader, load_batch, plan_pack

H = 24
LAYERS = (2, 4, 5, 8)


def store(path: Path, masks: list[np.ndarray], **more: Any) -> StoreSource:
    with StoreWriter(path, Manifest("tiny", "f00d", H, 8, 100, LAYERS, "before", **more)) as writer:
        for i, mask in enumerate(masks):
            states = torch.randn(4, len(mask), H, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)
            writer.add(f"s{i}", np.arange(len(mask)) % 100, mask, states)
    source = open_source(path)
    assert isinstance(source, StoreSource)
    return source


def by_hand(source: StoreSource, samples: list[int], steps: int, most: int) -> tuple[Tensor, Tensor]:
    """states and last of a batch out of whole samples, as the plan says which rows they are."""
    plan = plan_pack(source, samples, steps, most).plan
    whole = torch.cat([source.states(i, stop=min(most, int(source.lengths[i]))) for i in samples], dim=1)
    return torch.cat(list(whole[:3, plan.key_row]), dim=-1), whole[3, plan.target_row]


def small_pieces(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(reads, "PIECE_BYTES", nbytes)
    monkeypatch.setattr(readpath, "PIECE_BYTES", nbytes)


def test_bytes_in_any_pieces_come_to_lie_where_the_rows_belong() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows, size = int(rng.integers(1, 40)), int(rng.integers(1, 9))
        content = rng.integers(0, 256, (rows, size), dtype=np.uint8)
        at = np.flatnonzero(rng.random(rows) < rng.random())
        batch = np.zeros((len(at), 3 * size), np.uint8)
        place = Landing.of(batch[:, size : 2 * size], at)
        assert place is not None
        first = 0
        while first < content.size:
            stop = min(content.size, first + int(rng.integers(1, 4 * size)))
            place.put(first, content.reshape(-1)[first:stop].data)
            first = stop
        assert np.array_equal(batch[:, size : 2 * size], content[at])
        assert not batch[:, :size].any() and not batch[:, 2 * size :].any()


def test_rows_too_scattered_have_no_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "MOST_RUNS", 3)
    into = np.zeros((6, 4), np.uint8)
    assert Landing.of(into, np.array([0, 1, 5, 6, 8, 9])) == (into, [(0, 0, 2), (5, 2, 2), (8, 4, 2)])
    assert Landing.of(into, np.array([0, 1, 5, 6, 8, 10])) is None


def test_what_lands_from_the_page_cache_takes_no_buffer_and_is_read_once() -> None:
    parts = [Extent("s", "a", at, 9000, 0, "bfloat16", 3000, 3000) for at in (0, 12288, 15000, 90_000)]
    plan = plan_reads(parts, [True] * 4, landing={0, 1, 2, 3})
    assert plan.nbytes == 0
    assert [c.extents for c in plan.calls] == [[0, 1], [2], [3]], "an extent that overlaps the one before comes again"
    assert all(c.passing and c.buffered for c in plan.calls)
    plan = plan_reads(parts, [True, True, False, False], landing={0, 3})
    assert [(c.extents, c.passing) for c in plan.calls] == [([2], False), ([3], False), ([1], False), ([0], True)]
    assert plan.nbytes == sum(c.stop - c.start for c in plan.calls[:3])


@pytest.mark.parametrize("last_rows", ["all", "trained"])
def test_batches_are_the_samples_rows_whatever_lands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_rows: str
) -> None:
    """Cached, direct and both, answers in one piece and scattered masks, cut samples, pieces that end anywhere."""
    rng = np.random.default_rng(0)
    masks = [np.arange(n) >= n // 3 if n % 2 else rng.random(n) < 0.5 for n in rng.integers(5, 90, 12).tolist()]
    source = store(tmp_path / "store", masks, last_rows=last_rows)
    monkeypatch.setattr(landing, "MOST_RUNS", 6)
    for turn in range(40):
        small_pieces(monkeypatch, (37, 100, 4096, 1 << 20)[turn % 4])
        path = ReadPath(source, cache_gb=(0, 1, 1e-5)[turn % 3])
        samples, most = rng.permutation(12)[: int(rng.integers(1, 5))].tolist(), int(rng.integers(4, 100))
        if plan_pack(source, samples, 3, most).trained[0] == 0:
            continue
        found = load_batch(path, samples, 3, most)
        states, last = by_hand(source, samples, 3, most)
        assert torch.equal(found.states, states)
        assert torch.equal(found.last, last)


def test_most_of_a_cached_batch_needs_no_buffer(tmp_path: Path) -> None:
    source = store(tmp_path, [np.arange(400) >= 100] * 2)
    cached, direct = ReadPath(source, cache_gb=1), ReadPath(source)
    leased: list[int] = []
    for path in (cached, direct):
        lease = path.ring.lease
        path.ring.lease = lambda nbytes, lease=lease: leased.append(nbytes) or lease(nbytes)  # type: ignore[method-assign]
        load_batch(path, [0, 1], 3, 400)
    assert leased[0] == 0
    assert leased[1] >= 2 * 4 * 400 * H * 2


@pytest.mark.parametrize("cached", [True, False])
def test_a_flipped_bit_on_its_way_to_a_batch_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    small_pieces(monkeypatch, 4096)
    source = store(tmp_path, [np.arange(n) >= 9 for n in (60, 200, 80)])
    shard, rng = next(tmp_path.glob("shard*")), random.Random(0)
    good = shard.read_bytes()
    for _ in range(20):
        part = source.records[1].parts[rng.randrange(4)]
        at = part.offset + rng.randrange(200 * H * 2)
        shard.write_bytes(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :])
        path = ReadPath(source, cache_gb=1 if cached else 0)
        with pytest.raises(EyasError, match=f"sample s1 at byte {part.offset} does not match its checksum"):
            load_batch(path, [0, 1, 2], 3, 200)
        load_batch(path, [0, 2], 3, 200)
    shard.write_bytes(good[: source.records[2].parts[3].offset + 100])
    with pytest.raises(EyasError, match="ends before sample s2"):
        load_batch(ReadPath(source, cache_gb=1 if cached else 0), [0, 2], 3, 200)


@pytest.mark.parametrize("cached", [True, False])
def test_the_disk_is_read_while_what_has_come_is_hashed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """One thread reads at a time. Past the cache the first pack waits, where it is copied, for the second one's read;
    out of the cache copying is the work of reading, so nobody else reads meanwhile."""
    source = store(tmp_path, [np.arange(300) >= 9] * 4)
    reading, most, next_read, real = 0, 0, threading.Event(), os.preadv
    reads_seen: list[int] = []
    together: list[bool] = []

    def counted(fd: int, buffers: list[Any], offset: int) -> int:
        nonlocal reading, most
        reading, most = reading + 1, max(most, reading + 1)
        reads_seen.append(offset)
        if len(reads_seen) > 1:
            next_read.set()
        got = real(fd, buffers, offset)
        reading -= 1
        return got

    put = Landing.put

    def waits(self: Landing, offset: int, piece: memoryview) -> None:
        if not together:
            together.append(next_read.wait(10 if not cached else 0.3))
        put(self, offset, piece)

    path = ReadPath(source, cache_gb=1 if cached else 0)
    told = [source.tokens(i) for i in range(4)]
    path.source.tokens = told.__getitem__  # type: ignore[method-assign]
    direct = not cached and path._files.get(str(next(tmp_path.glob("shard*"))), True).direct
    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(Landing, "put", waits)
    found = list(Loader(path, [[i] for i in range(4)], 3, 300, 1))
    monkeypatch.setattr(os, "preadv", real)
    assert most == 1
    assert len(reads_seen) == 4
    assert together
    if direct or cached:  # elsewhere the file system may refuse direct I/O
        assert together[0] is direct
    for i, batch in enumerate(found):
        states, last = by_hand(source, [i], 3, 300)
        assert torch.equal(batch.states, states) and torch.equal(batch.last, last)


def test_a_wrong_copy_in_the_page_cache_is_read_again_and_lands_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch, 4096)
    source = store(tmp_path, [np.arange(n) >= 9 for n in (60, 200)])
    wrong, real = [3], os.preadv

    def once_wrong(fd: int, buffers: list[Any], offset: int) -> int:
        got = real(fd, buffers, offset)
        if wrong[0]:
            wrong[0] -= 1
            buffers[0][:got] = bytes(got)
        return got

    path = ReadPath(source, cache_gb=1)
    expected: Batch = load_batch(path, [1, 0], 3, 200)
    keep = expected.states.clone(), expected.last.clone()
    del expected
    told = [source.tokens(0), source.tokens(1)]
    path.source.tokens = told.__getitem__  # type: ignore[method-assign]
    monkeypatch.setattr(os, "preadv", once_wrong)
    found = load_batch(path, [1, 0], 3, 200)
    assert wrong == [0]
    assert torch.equal(found.states, keep[0]) and torch.equal(found.last, keep[1])


@pytest.mark.parametrize("cached", [True, False])
def test_reads_that_come_back_short_land_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """A network file system may bring less than a piece at a time, of any length."""
    small_pieces(monkeypatch, 4096)
    source = store(tmp_path, [np.arange(n) >= 9 for n in (60, 200, 80)])
    path, rng, real = ReadPath(source, cache_gb=1 if cached else 0), random.Random(0), os.preadv
    told = [source.tokens(i) for i in range(3)]
    path.source.tokens = told.__getitem__  # type: ignore[method-assign]
    expected = by_hand(source, [1, 0, 2], 3, 200)

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        return real(fd, [buffers[0][: rng.randint(1, len(buffers[0]))]], offset)

    monkeypatch.setattr(os, "preadv", short)
    found = load_batch(path, [1, 0, 2], 3, 200)
    assert torch.equal(found.states, expected[0]) and torch.equal(found.last, expected[1])


@pytest.mark.parametrize("cached", [True, False])
def test_the_memory_of_packs_under_way_is_what_is_read_and_the_batch_beside_it(tmp_path: Path, cached: bool) -> None:
    """Most of these samples is read (a checksum is of all of it) and in no batch."""
    source = store(tmp_path, [np.arange(400) // 10 == 2] * 3)
    path = ReadPath(source, cache_gb=1 if cached else 0)
    loader = Loader(path, [[0], [1], [2]], 1, 400, 2)
    (batch, *_) = list(loader)
    values = batch.states.numel() + batch.last.numel()
    assert batch.nbytes == 4 * 400 * H * 2 > 5 * 2 * values
    loader.depth.memory = batch.nbytes + 2 * values
    assert loader.depth.packs() == 1
    loader.depth.memory = 2 * (batch.nbytes + 2 * values)
    assert loader.depth.packs() == 2
