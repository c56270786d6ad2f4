"""The read path brings exactly the bytes that were asked for, verified, in few calls, into memory used again."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.store import memory, reads
from eyas.store.layout import PAGE, Manifest, needs_tokens
from eyas.store.reader import StoreSource, open_source, rows_read, unverified
from eyas.store.readpath import ReadPath
from eyas.store.reads import Extent, Files, plan_reads, read_tensors
from eyas.store.ring import Ring
from eyas.store.writer import StoreWriter
from eyas.train.batches import Batch, Loader, Pack, assemble, epoch_order, load_batch, pack, shard_packs

H = 24
LAYERS = (2, 4, 5, 8)


def extent(path: str | Path, offset: int, nbytes: int, **more: Any) -> Extent:
    fields = {"sample": "s", "layer": 0, "dtype": "uint8", "row_bytes": nbytes, "stride": nbytes, **more}
    return Extent(path=str(path), offset=offset, nbytes=nbytes, **fields)


def store(path: Path, tokens: list[int]) -> StoreSource:
    with StoreWriter(path, Manifest("tiny", "f00d", H, 8, 100, LAYERS, "before")) as writer:
        for i, T in enumerate(tokens):
            states = torch.randn(4, T, H, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)
            writer.add(f"s{i}", np.arange(T) % 100, np.arange(T) >= T // 3, states)
    source = open_source(path)
    assert isinstance(source, StoreSource)
    return source


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_neighbours_share_a_call_until_it_is_large_enough() -> None:
    parts = [extent("a", k * 16 * PAGE, 16 * PAGE) for k in range(10)]
    plan = plan_reads(parts, call_bytes=64 * PAGE)
    assert [(c.start // PAGE, c.stop // PAGE) for c in plan.calls] == [(0, 64), (64, 128), (128, 160)]
    assert plan.places == [e.offset for e in parts]
    assert plan.nbytes == 160 * PAGE


def test_a_small_hole_is_read_and_a_large_one_is_not() -> None:
    parts = [extent("a", 0, 100), extent("a", 2 * PAGE, 100), extent("a", 100 * PAGE, 100)]
    plan = plan_reads(parts, gap_bytes=4 * PAGE)
    assert [(c.start // PAGE, c.stop // PAGE) for c in plan.calls] == [(0, 3), (100, 101)]


def test_any_extents_come_back_as_they_lie_in_the_files(tmp_path: Path) -> None:
    rng = random.Random(0)
    content = {name: rng.randbytes(100_000 + 777 * k) for k, name in enumerate(("a", "b", "c"))}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    for _ in range(100):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            name = rng.choice("abc")
            start = rng.randrange(len(content[name]))
            parts.append(extent(tmp_path / name, start, rng.randrange(1, len(content[name]) - start + 1)))
        flags = [rng.random() < 0.3 for _ in parts]
        plan = plan_reads(parts, flags, call_bytes=rng.choice((PAGE, 30_000)), gap_bytes=rng.choice((0, 9000)))
        buffer = Ring().lease(plan.nbytes)
        buffer[:] = 0xAA
        reads.read(Files(), parts, plan, reads.Memory(buffer.data))
        assert all(c.start % PAGE == c.stop % PAGE == c.at % PAGE == 0 for c in plan.calls)
        for e, place in zip(parts, plan.places, strict=True):
            data = content[Path(e.path).name][e.offset : e.offset + e.nbytes]
            assert buffer[place : place + e.nbytes].tobytes() == data


def test_the_samples_of_a_pack_take_one_call_where_they_are_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = store(tmp_path, [40, 50, 60])
    calls, real = [], os.preadv

    def counted(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append(offset)
        return real(fd, buffers, offset)

    path = ReadPath(source)
    monkeypatch.setattr(os, "preadv", counted)
    path.load([0, 1, 2], [40, 50, 60])
    assert len(calls) == 1


def test_token_major_and_odd_files_are_read_by_the_same_path(tmp_path: Path) -> None:
    states = torch.randn(30, 4, H)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        file = tmp_path / f"{dtype}.safetensors".replace("torch.", "")
        save_file({"x": torch.zeros(3, dtype=torch.uint8), "hidden_states": states.to(dtype)}, file)
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        start = 8 + length + json.loads(raw[8 : 8 + length])["hidden_states"]["data_offsets"][0]
        item = dtype.itemsize
        for first, stop in ((0, 30), (7, 19)):
            parts = [
                Extent(
                    "s",
                    str(file),
                    start + (first * 4 + j) * H * item,
                    ((stop - first - 1) * 4 + 1) * H * item,
                    layer=j,
                    dtype=str(dtype).removeprefix("torch."),
                    row_bytes=H * item,
                    stride=4 * H * item,
                )
                for j in range(4)
            ]
            assert len(plan_reads(parts).calls) == 1, "no byte is read twice"
            found = read_tensors(Files(), parts)
            expected = states[first:stop].to(dtype).to(torch.bfloat16)
            assert all(torch.equal(found[j], expected[:, j]) for j in range(4))


def test_scaled_rows_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    values, scales = torch.randint(-127, 128, (9, H), dtype=torch.int8), torch.rand(9)
    (tmp_path / "x").write_bytes(b"..." + values.numpy().tobytes() + b"." + scales.numpy().tobytes())
    at = extent(tmp_path / "x", 3 + 9 * H + 1, 36, dtype="float32", row_bytes=4, stride=4)
    e = extent(tmp_path / "x", 3, 9 * H, dtype="int8", row_bytes=H, stride=H, scales=at)
    (found,) = read_tensors(Files(), [e])
    assert torch.equal(found, (values.float() * scales[:, None]).to(torch.bfloat16))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_file_system_that_refuses_direct_io_is_said_once_and_read_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, said = store(tmp_path, [40, 50]), []
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    path = ReadPath(source, say=said.append)
    for i in (0, 1, 0):
        rows = path.load([i], [int(source.lengths[i])]).states()[0]
        assert torch.equal(torch.stack(list(rows)), source.states(i))
    assert len(said) == 1
    assert "refuses direct I/O" in said[0]


def test_direct_io_refused_at_the_first_read_is_read_anyway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, said, real = store(tmp_path, [40]), [], os.preadv

    def refuse(fd: int, buffers: list[Any], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    loaded = ReadPath(source, say=said.append).load([0], [40])
    assert torch.equal(torch.stack(list(loaded.states()[0])), source.states(0))
    assert len(said) == 1


def test_direct_io_refused_in_the_middle_of_a_call_goes_on_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system whose blocks are larger than a page may bring less than was asked for, and then refuse to go on."""
    source, said, real, block = store(tmp_path, [400]), [], os.preadv, 4 * PAGE

    def refuse(fd: int, buffers: list[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            if (offset - first) % block:
                raise OSError(22, "Invalid argument")
            return real(fd, [buffers[0][:PAGE]], offset)
        return real(fd, buffers, offset)

    first = source.records[0].parts[0].offset // PAGE * PAGE
    monkeypatch.setattr(os, "preadv", refuse)
    rows = ReadPath(source, say=said.append).load([0], [400]).states()[0]
    assert torch.equal(torch.stack(list(rows)), source.states(0))
    assert len(said) == 1 and "refuses direct I/O" in said[0]


def test_a_mismatch_is_read_again_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = store(tmp_path, [40, 50, 60]), os.preadv
    record = source.records[1]
    wrong = [0]

    def flaky(fd: int, buffers: list[Any], offset: int) -> int:
        got = real(fd, buffers, offset)
        if wrong[0]:
            wrong[0] -= 1
            buffers[0][record.parts[2].offset - offset + 5] ^= 4
        return got

    monkeypatch.setattr(os, "preadv", flaky)
    path = ReadPath(source)
    wrong[0] = 1
    rows = path.load([1], [50]).states()[0]
    wrong[0] = 0
    assert torch.equal(torch.stack(list(rows)), source.states(1))
    wrong[0] = 2
    with pytest.raises(EyasError, match=rf"{record.shard}: sample s1 at byte {record.parts[2].offset} does not match"):
        path.load([1], [50])


def test_pieces_out_of_the_page_cache_are_verified_wherever_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    data = bytearray(rng.randbytes(100_000))
    monkeypatch.setattr(reads, "PIECE_BYTES", 5000)
    for turn in range(200):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            start = rng.randrange(len(data))
            nbytes = rng.randrange(1, len(data) - start + 1)
            digest = xxhash.xxh3_64_hexdigest(data[start : start + nbytes])
            parts.append(extent(tmp_path / "a", start, nbytes, xxh3=digest if rng.random() < 0.7 else None))
        bad, stored = rng.randrange(len(data)), bytearray(data)
        stored[bad] ^= (turn % 2) << rng.randrange(8)
        (tmp_path / "a").write_bytes(stored)
        flags = [rng.random() < 0.8 for _ in parts]
        plan = plan_reads(parts, flags, call_bytes=30_000)
        buffer = Ring().lease(plan.nbytes)
        hit = [e for e in parts if e.xxh3 and e.offset <= bad < e.offset + e.nbytes]
        if turn % 2 and hit:
            with pytest.raises(EyasError, match="does not match its checksum") as raised:
                reads.read(Files(), parts, plan, reads.Memory(buffer.data))
            assert any(f"at byte {e.offset} " in str(raised.value) for e in hit)
        else:
            reads.read(Files(), parts, plan, reads.Memory(buffer.data))
            for e, place in zip(parts, plan.places, strict=True):
                assert buffer[place : place + e.nbytes].tobytes() == stored[e.offset : e.offset + e.nbytes]


def test_direct_reads_of_less_than_a_page_go_on_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = store(tmp_path, [400]), os.preadv

    def little(fd: int, buffers: list[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return min(512, real(fd, buffers, offset))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", little)
    rows = ReadPath(source).load([0], [400]).states()[0]
    assert torch.equal(torch.stack(list(rows)), source.states(0))


def test_a_disk_that_fails_is_told_with_the_sample_that_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = store(tmp_path, [40, 50, 60]), os.preadv
    bad = source.records[2].parts[1].offset
    monkeypatch.setattr(reads, "PIECE_BYTES", PAGE)

    def failing(fd: int, buffers: list[Any], offset: int) -> int:
        if offset <= bad < offset + len(buffers[0]):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(EyasError, match=r"sample s2 at byte \d+ cannot be read: Input/output error"):
        ReadPath(source, cache_gb=1e6).load([0, 1, 2], [40, 50, 60])


def test_only_a_long_call_through_the_page_cache_lets_the_kernel_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(bytes(64 * PAGE))
    asked, real, direct = [], os.preadv, os.O_DIRECT
    random_ones, advise = set(), os.posix_fadvise
    monkeypatch.setattr(reads, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(reads, "_read_ahead", lambda _: 2 * PAGE)

    def seen(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_RANDOM:
            random_ones.add(fd)
        advise(fd, offset, length, advice)

    def counted(fd: int, buffers: list[Any], offset: int) -> int:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        asked.append("direct" if flags & direct else "pages" if fd in random_ones else "ahead")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "posix_fadvise", seen)
    monkeypatch.setattr(os, "preadv", counted)
    for pages, buffered, how in ((11, True, "pages"), (12, True, "ahead"), (64, False, "direct")):
        parts = [extent(tmp_path / "a", 0, pages * PAGE)]
        plan, files = plan_reads(parts, [buffered]), Files()
        reads.read(files, parts, plan, reads.Memory(Ring().lease(plan.nbytes).data))
        if how != "direct" or "direct" in asked:  # tmpfs refuses direct I/O
            assert asked == [how] * len(asked) and len(asked) == (pages if buffered else 1)
        asked.clear()


@pytest.mark.parametrize("flipped", [10, 98])  # a row that is wanted, and one that only the checksum wants
def test_the_beginning_of_a_sample_is_verified_where_it_is_most_of_it(tmp_path: Path, flipped: int) -> None:
    source = store(tmp_path, [100, 400])
    wanted = source.states(0)
    path, part = ReadPath(source), source.records[0].parts[2]
    for stop in (75, 74, 3, 0):  # at three quarters all of it is read, and the rows wanted come out
        loaded = path.load([0], [stop])
        assert torch.equal(torch.stack(list(loaded.states()[0])), wanted[:, :stop])
        assert loaded.nbytes == 4 * 2 * H * (100 if stop == 75 else stop)
    shard = tmp_path / source.records[0].shard
    data = bytearray(shard.read_bytes())
    data[part.offset + flipped * 2 * H] ^= 1
    shard.write_bytes(data)
    with pytest.raises(EyasError, match=rf"sample s0 at byte {part.offset} does not match its checksum"):
        path.load([0], [75])
    path.load([0], [74])
    assert rows_read(source, 75).tolist() == [100, 75] and rows_read(source, 74).tolist() == [74, 74]
    assert [unverified(source, [0, 1], most) for most in (75, 74, 400)] == [1, 2, 0]


def test_a_file_cut_short_after_the_index_was_read_is_named(tmp_path: Path) -> None:
    source = store(tmp_path, [40, 50, 60])
    record = source.records[2]
    os.truncate(tmp_path / record.shard, record.parts[1].offset + 100)
    with pytest.raises(EyasError, match=rf"ends before sample s2 \(byte {record.parts[1].offset}\) does"):
        ReadPath(source).load([2], [60])


def test_a_read_that_comes_back_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real, calls = store(tmp_path, [400, 300]), os.preadv, []

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append(offset)
        return real(fd, [buffers[0][: max(PAGE, len(buffers[0]) // 3) // 512 * 512]], offset)

    path = ReadPath(source)
    monkeypatch.setattr(os, "preadv", short)
    rows = path.load([0, 1], [400, 300]).states()
    monkeypatch.setattr(os, "preadv", real)
    assert len(calls) > 5
    assert all(torch.equal(torch.stack(list(rows[i])), source.states(i)) for i in (0, 1))


def test_a_batch_keeps_its_memory_until_nobody_looks_at_it(tmp_path: Path) -> None:
    source = store(tmp_path, [30] * 6)
    path = ReadPath(source)
    first = load_batch(path, [0, 1], 3, 100)
    copy, part = first.states.clone(), first.states[3:5, :7]
    for i in range(2, 6):
        load_batch(path, [i], 3, 100)
    assert torch.equal(first.states, copy)
    del first
    for i in range(2, 6):
        load_batch(path, [i], 3, 100)
    assert torch.equal(part, copy[3:5, :7]), "a view keeps it too"
    assert path.batches.made == 2
    assert path.ring.made == 1, "what was read is used up when the batch is made"


def test_buffers_grow_to_the_largest_batch_and_stay() -> None:
    ring = Ring()
    for size in (10, 3 << 20, 5 << 20, 10, 5 << 20):
        lease = ring.lease(size)
        assert lease.nbytes == size
        assert lease.ctypes.data % PAGE == 0
        del lease
    assert ring.made == 3
    assert len(ring._free) == 1


# -- order, start, ranks, depth ----------------------------------------------------------------------------------------


def test_a_loader_starts_at_any_pack(tmp_path: Path) -> None:
    source = store(tmp_path, [20 + i for i in range(10)])
    packs = pack(epoch_order(list(range(10)), 0, 0), source.lengths, 60, 50)
    whole = [b.states.clone() for b in Loader(source, packs, 3, 50, 3)]
    for start in (0, 1, 4, len(packs)):
        rest = list(Loader(source, packs, 3, 50, 3, start=start))
        assert len(rest) == len(packs) - start
        assert all(torch.equal(b.states, s) for b, s in zip(rest, whole[start:], strict=True))


def test_ranks_take_equal_steps_and_no_pack_twice() -> None:
    packs = [[i] for i in range(11)]
    shares = [shard_packs(packs, rank, 4) for rank in range(4)]
    assert [len(s) for s in shares] == [2, 2, 2, 2]
    assert sorted(p[0] for s in shares for p in s) == list(range(8))
    assert shard_packs(packs, 0, 1) == packs


def test_no_thread_is_left_after_a_loader(tmp_path: Path) -> None:
    source = store(tmp_path, [30] * 8)
    before = set(threading.enumerate())
    list(Loader(source, [[i] for i in range(8)], 3, 50, 4))
    for batch in Loader(source, [[i] for i in range(8)], 3, 50, 4):
        del batch
        break
    with pytest.raises(ZeroDivisionError):
        for _ in Loader(source, [[i] for i in range(8)], 3, 50, 4):
            raise ZeroDivisionError
    gc.collect()
    assert set(threading.enumerate()) - before == set()  # of earlier tests some may end meanwhile


def test_the_depth_covers_the_slowest_read_within_the_memory(tmp_path: Path) -> None:
    loader = Loader(store(tmp_path, [30]), [[0]], 3, 50, 4)
    depth = loader.depth
    depth.memory = 1 << 30
    assert depth.packs() == 5
    for took in (0.1, 0.5, 0.1):
        depth.read(took, 100 << 20)
    for _ in range(4):
        depth.step(0.2)
    assert depth.packs() == 10  # 4 x 0.5 s / 0.2 s
    depth.step(0.0)
    depth.memory = 800 << 20
    assert depth.packs() == 8
    depth.memory = 0
    assert depth.packs() == 1


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_the_cache_keeps_is_a_fixed_share_and_the_rest_goes_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = store(tmp_path, [100] * 40)
    total = sum(source.nbytes(i) for i in range(40))
    assert memory.kept_samples(source, total).all()
    assert not memory.kept_samples(source, 0).any()
    half = memory.kept_samples(source, total // 2)
    assert half.sum() == 20
    assert (half == memory.kept_samples(source, total // 2)).all()
    less = memory.kept_samples(source, total // 4)
    assert less.sum() == 10 and half[less].all(), "a smaller cache keeps a part of what a larger one does"

    direct: dict[str, bool] = {}
    real = reads.Files.get if hasattr(reads.Files, "get") else None
    assert real is None  # it is an attribute of each object
    path = ReadPath(source, cache_gb=total / 2 / 1e9)
    kind = path._files.get
    asked: list[bool] = []
    monkeypatch.setattr(path._files, "get", lambda name, how: asked.append(how) or kind(name, how))
    for i in range(40):
        asked.clear()
        path.load([i], [100])
        direct[source.ids[i]] = asked[0]
    assert [not d for d in direct.values()] == half.tolist()


def test_auto_is_a_share_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000_000_000)
    assert memory.cache_bytes("auto") == 7_000_000_000
    assert memory.cache_bytes(1.5) == 1_500_000_000
    assert memory.ahead_bytes() == 1_250_000_000


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_what_the_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    group = tmp_path / ("memory/job" if version == 1 else "job")
    group.mkdir(parents=True)
    limit, usage = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    (group / limit).write_text("1000000\n")
    (group / usage).write_text("700000\n")
    (group / "memory.stat").write_text("inactive_file 300000\nactive_file 100000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    real = Path.read_text
    told = "5:memory:/job\n" if version == 1 else "0::/job\n"
    monkeypatch.setattr(
        Path, "read_text", lambda p, *a, **k: told if str(p) == "/proc/self/cgroup" else real(p, *a, **k)
    )
    assert memory.available_memory() == 700_000


# -- the index ---------------------------------------------------------------------------------------------------------


def test_needs_tokens_is_where_the_first_step_begins_to_train() -> None:
    from eyas.drafter.plan import count_trained

    rng = np.random.default_rng(0)
    for _ in range(500):
        mask = rng.random(rng.integers(1, 12)) < 0.4
        counts = [count_trained(mask[:n]) > 0 for n in range(len(mask) + 1)]
        assert needs_tokens(mask) == (counts.index(True) if any(counts) else 0)


def test_the_kept_index_is_the_journals_and_is_not_believed_when_either_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.store import index

    monkeypatch.setattr(index, "KEEP_FROM", 1)
    first = store(tmp_path, [30, 40, 50])
    kept = tmp_path / index.KEPT
    assert kept.exists()
    built: list[int] = []
    real = index._build
    monkeypatch.setattr(index, "_build", lambda *a: built.append(1) or real(*a))
    second = open_source(tmp_path)
    assert not built
    assert isinstance(second, StoreSource)
    assert second.records == first.records
    assert second.needs.tolist() == first.needs.tolist() == [12, 15, 18]
    good = kept.read_bytes()
    rng = random.Random(0)
    for _ in range(40):
        at = rng.randrange(len(good))
        kept.write_bytes(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :])
        again = open_source(tmp_path)
        assert isinstance(again, StoreSource)
        assert again.records == first.records
    built.clear()
    journal = tmp_path / "journal-0.jsonl"
    stat = journal.stat()
    data = bytearray(journal.read_bytes())
    data[data.index(b"s1")] ^= 2
    journal.write_bytes(data)
    os.utime(journal, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_source(tmp_path).ids == ["s0", "s2"]
    assert built


def test_a_journal_that_does_not_say_what_a_sample_needs_is_read_by_its_masks(tmp_path: Path) -> None:
    source = store(tmp_path, [30, 40])
    lines = []
    for record in source.records:
        members = {k: v for k, v in json.loads(record.line()).items() if k not in ("needs", "check")}
        body = json.dumps(members, separators=(",", ":")).encode()[:-1]
        lines.append(body + b',"check":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n')
    (tmp_path / "journal-0.jsonl").write_bytes(b"".join(lines))
    assert open_source(tmp_path).needs.tolist() == source.needs.tolist() == [12, 15]


# -- onto a device -----------------------------------------------------------------------------------------------------


class HereUploader:
    """Stands in for CUDA, which is not here: another thread, another copy of the buffer, the same order."""

    ahead = 2

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="eyas-upload")
        self.under_way = self.most = 0

    def submit(self, read: Future[Pack]) -> Future[Batch]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return self.thread.submit(lambda: assemble(read.result(), read.result().loaded.memory.clone()))

    def hand_over(self, batch: Batch) -> Batch:
        self.under_way -= 1
        return batch

    def close(self) -> None:
        self.thread.shutdown(wait=True, cancel_futures=True)


def test_batches_that_go_to_a_device_are_the_same_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, before = store(tmp_path, [20 + i for i in range(10)]), set(threading.enumerate())
    packs = pack(epoch_order(list(range(10)), 0, 0), source.lengths, 60, 50)
    expected = list(Loader(source, packs, 3, 50, 3))
    uploader = HereUploader()
    monkeypatch.setattr(Loader, "_uploader", lambda _: uploader)
    found = list(Loader(source, packs, 3, 50, 3, device="cuda"))
    assert [b.samples for b in found] == packs
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.states, b.states)
        assert torch.equal(a.last, b.last)
        assert (a.tokens, a.nbytes) == (b.tokens, b.nbytes)
    assert uploader.most == 2, "the batch that is handed over and the one behind it"
    assert set(threading.enumerate()) - before == set()  # of earlier tests some may end meanwhile
    uploader = HereUploader()
    for _ in Loader(source, packs, 3, 50, 3, device="cuda"):
        break
    gc.collect()
    assert set(threading.enumerate()) - before == set()  # of earlier tests some may end meanwhile
