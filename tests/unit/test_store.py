"""The store keeps what it recorded, whatever happens, and never hands out anything else."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import struct
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from eyas.errors import EyasError
from eyas.store import layout
from eyas.store.layout import Manifest
from eyas.store.reader import open_source
from eyas.store.writer import StoreWriter
from eyas.verifier import VerifierConfig
from storekit import LAYERS, LENGTHS, MANIFEST, SMALL, H, assert_right, files, flip, run_to_death, sample, write


def test_what_was_written_is_read_back_to_the_bit(tmp_path: Path) -> None:
    write(tmp_path)
    source = open_source(tmp_path)
    assert source.ids == [f"s{i}" for i in range(len(LENGTHS))]
    assert source.skipped == []
    assert source.manifest == MANIFEST
    assert_right(source)
    assert source.nbytes(2) == len(LAYERS) * 200 * H * 2


def test_rows_and_layers_are_read_without_the_rest(tmp_path: Path) -> None:
    write(tmp_path)
    source, states = open_source(tmp_path), sample(2)[3]
    assert torch.equal(source.states(2, 10, 90), states[:, 10:90])
    assert torch.equal(source.states(2, 199, 200, layers=[8]), states[3:, 199:])
    assert torch.equal(source.states(2, layers=(8, 2)), states[[3, 0]])
    assert torch.equal(source.states(2, 0, 50, layers=(2, 5)), states[[0, 2], :50])
    assert source.states(2, 7, 7).shape == (4, 0, H)
    with pytest.raises(IndexError):
        source.states(2, 0, 201)
    # Rows elsewhere may be broken: only what is asked for is touched.
    record = layout.read_journal(tmp_path / "journal-0.jsonl").records[2]
    flip(tmp_path / record.shard, record.parts[1].offset + 150 * H * 2)
    assert torch.equal(open_source(tmp_path).states(2, 10, 90), states[:, 10:90])
    assert torch.equal(open_source(tmp_path).states(2, layers=[2, 5, 8]), states[[0, 2, 3]])


def test_the_index_opens_no_shard(tmp_path: Path) -> None:
    write(tmp_path)
    shards = sorted(tmp_path.glob("shard-*"))
    source = open_source(tmp_path)
    for shard in shards:
        shard.rename(shard.with_suffix(".away"))
    assert source.lengths.tolist() == list(LENGTHS)
    assert source.tokens(3)[0].tolist() == sample(3)[1].tolist()
    with pytest.raises(EyasError, match=r"shard-0-00000\.safetensors is missing"):
        source.states(0)


def test_a_closed_shard_opens_in_plain_safetensors(tmp_path: Path) -> None:
    write(tmp_path)
    shards = sorted(tmp_path.glob("shard-*"))
    assert len(shards) > 2
    assert not list(tmp_path.glob("*.part"))
    found = {name: t for shard in shards for name, t in load_file(shard).items() if not name.startswith("pad.")}
    assert len(found) == len(LENGTHS) * len(LAYERS)
    for i in range(len(LENGTHS)):
        for layer, states in zip(LAYERS, sample(i)[3], strict=True):
            assert torch.equal(found[f"{i}.h{layer}"], states)


def test_every_large_tensor_starts_on_4_kib(tmp_path: Path) -> None:
    write(tmp_path)
    for shard in tmp_path.glob("shard-*"):
        data = shard.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        starts = [8 + length + e["data_offsets"][0] for name, e in header.items() if ".h" in name]
        assert starts
        assert all(s % 4096 == 0 for s in starts)
        assert len(data) % 4096 == 0


def test_a_shard_is_closed_when_its_header_is_full(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, MANIFEST, header_bytes=4096) as store:
        for i in range(20):
            store.add(*sample(i, tokens=1))
    sizes = [len([n for n in load_file(p) if ".h" in n]) // 4 for p in sorted(tmp_path.glob("shard-*"))]
    assert sum(sizes) == 20
    assert len(sizes) > 1
    assert min(sizes[:-1]) > 2


def test_a_sample_larger_than_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, MANIFEST, shard_bytes=10_000) as store:
        for i in (2, 6):
            store.add(*sample(i))
    assert len(list(tmp_path.glob("shard-*"))) == 2
    assert_right(open_source(tmp_path))


# Kills. The child is a fork that dies by its own SIGKILL at a chosen system call: before it, or half-way through it.


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill is the same there, and hundreds of runs wait for no disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("torn", "power_cut"), [(True, False), (False, True)])
def test_kill_at_any_byte_loses_nothing(memory_path: Path, torn: bool, power_cut: bool) -> None:
    write(memory_path / "whole", 6)
    expected, deaths = files(memory_path / "whole"), 0
    assert sum(name.startswith("shard") for name in expected) > 1
    for at in range(10_000):
        path = memory_path / f"at{at}"
        if not run_to_death(lambda path=path: write(path, 6), at, torn=torn, power_cut=power_cut):
            break
        deaths += 1
        if path.exists() and layout.journals(path) and layout.read_journal(layout.journals(path)[0]).records:
            assert_right(open_source(path))  # what a reader is offered before the resume
        if at % 3 == 0:  # a second death, during the resume
            run_to_death(lambda path=path: write(path, 6), at % 7, torn=torn, power_cut=power_cut)
        write(path, 6)
        assert files(path) == expected, f"killed at call {at}"
    assert deaths > 30


def test_a_resume_cuts_off_what_the_journal_does_not_say(tmp_path: Path) -> None:
    for name in ("stopped", "whole"):
        store = StoreWriter(tmp_path / name, MANIFEST)
        store.add(*sample(0))
        store.commit()
        if name == "stopped":  # the sample after it was on its way, and longer than what comes instead
            store.add(*sample(2))
            with (tmp_path / name / "journal-0.jsonl").open("ab") as file:
                file.write(sample(2)[0].encode() * 400)
            with pytest.raises(RuntimeError), store:
                store._broken = True
                raise RuntimeError
            store = StoreWriter(tmp_path / name, MANIFEST)
        with store:
            store.add(*sample(1))
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")
    assert_right(open_source(tmp_path / "stopped"))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_kill_9_at_any_time_loses_nothing(memory_path: Path) -> None:
    """The same by the clock: a process that writes 400 samples is killed from outside again and again."""
    path, rng, limits = memory_path / "store", random.Random(1), {"shard_bytes": 1 << 20, "commit_bytes": 1 << 16}
    for i in range(400):
        sample(i)
    seen = 0
    for _ in range(12):
        child = os.fork()
        if not child:
            write(path, 400, **limits)
            os._exit(0)
        time.sleep(0.05 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if layout.journals(path) and layout.read_journal(path / "journal-0.jsonl").records:
            source = open_source(path)
            assert len(source.ids) >= seen
            seen = len(source.ids)
            assert_right(source)
    write(path, 400, **limits)
    source = open_source(path)
    assert source.ids == [f"s{i}" for i in range(400)]
    assert_right(source)


def test_a_reader_sees_what_the_journal_says_while_the_writer_goes_on(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path, MANIFEST, **{**SMALL, "commit_bytes": 1 << 30}, commit_seconds=1e9)
    store.add(*sample(0))
    with pytest.raises(EyasError, match="no usable sample"):
        open_source(tmp_path)
    store.commit()
    store.add(*sample(1))
    source = open_source(tmp_path)
    assert list(tmp_path.glob("*.part"))
    assert source.ids == ["s0"] == sorted(store.done_ids)
    store.close()
    assert_right(source)  # its shard has another name by now
    assert open_source(tmp_path).ids == ["s0", "s1"]


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    write(tmp_path)
    source = open_source(tmp_path)
    expected = [sample(i)[3] for i in range(len(LENGTHS))]
    with ThreadPoolExecutor(8) as pool:
        right = pool.map(lambda k: torch.equal(source.states(k % 9), expected[k % 9]), range(400))
    assert all(right)


def test_two_writers_share_a_folder_and_one_name_is_one_writer(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, MANIFEST, writer="a") as a, StoreWriter(tmp_path, MANIFEST, writer="b") as b:
        with pytest.raises(EyasError, match="being written by another process"):
            StoreWriter(tmp_path, MANIFEST, writer="a")
        for i in range(6):
            (a if i % 2 else b).add(*sample(i))
    source = open_source(tmp_path)
    assert sorted(source.ids) == [f"s{i}" for i in range(6)]
    assert_right(source)
    with StoreWriter(tmp_path, MANIFEST, writer="c") as c:
        assert c.done_ids == set(source.ids)
        with pytest.raises(ValueError, match="in the store already"):
            c.add(*sample(3))


def way_out(folder: Path) -> str:
    """What the error of a damaged sample says to do."""
    return f"restore the file, or leave such samples out: eyas store check {folder} --quarantine$"


def test_one_flipped_bit_in_the_states_stops_with_sample_shard_and_offset(tmp_path: Path) -> None:
    write(tmp_path)
    record = layout.read_journal(tmp_path / "journal-0.jsonl").records[4]
    flip(tmp_path / record.shard, record.parts[2].offset + 1001)
    source = open_source(tmp_path)
    words = f"{record.shard}: sample s4 at byte {record.parts[2].offset} does not match .*{way_out(tmp_path)}"
    with pytest.raises(EyasError, match=words):
        source.states(4)
    assert torch.equal(source.states(3), sample(3)[3])


def test_a_wrong_first_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    source, real, calls = open_source(tmp_path), os.preadv, []

    def flaky(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        if not calls:
            buffers[0][5] ^= 1
        calls.append(offset)
        return got

    monkeypatch.setattr(os, "preadv", flaky)
    assert torch.equal(source.states(2), sample(2)[3])
    assert len(calls) == 2


def test_every_flipped_bit_of_a_journal_is_caught(tmp_path: Path) -> None:
    write(tmp_path)
    journal = tmp_path / "journal-0.jsonl"
    good, rng = journal.read_bytes(), random.Random(0)
    for _ in range(60):
        flip(journal, rng.randrange(len(good)), rng.randrange(8))
        source = open_source(tmp_path)
        assert len(source.ids) < len(LENGTHS)
        assert source.skipped
        assert "journal-0.jsonl line" in source.skipped[0][0]
        assert_right(source)
        journal.write_bytes(good)


def test_a_sample_with_a_broken_journal_line_is_captured_again(tmp_path: Path) -> None:
    write(tmp_path, 4, shard_bytes=1 << 30)
    journal = tmp_path / "journal-0.jsonl"
    flip(journal, journal.read_bytes().index(b"s1"))
    (tmp_path / "shard-0-00000.safetensors").rename(tmp_path / "shard-0-00000.safetensors.part")
    write(tmp_path, 5)
    source = open_source(tmp_path)
    assert source.ids == ["s0", "s2", "s3", "s1", "s4"]
    assert_right(source)
    for shard in tmp_path.glob("shard-*"):
        load_file(shard)


def test_every_flipped_bit_of_the_manifest_is_caught(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path, rng = tmp_path / layout.MANIFEST, random.Random(0)
    good = path.read_bytes()
    told = json.loads(good)
    for _ in range(200):
        flip(path, rng.randrange(len(good)), rng.randrange(8))
        try:
            same = Manifest.load(tmp_path) == MANIFEST  # a flip in the white space changes nothing
            assert same
            assert json.loads(path.read_bytes()) == told
        except EyasError as error:
            assert str(path) in str(error)
        path.write_bytes(good)


def test_a_flipped_bit_in_the_tokens_is_caught(tmp_path: Path) -> None:
    write(tmp_path)
    flip(tmp_path / "tokens-0.bin", 5 * 5 + 2)  # in sample 1
    source = open_source(tmp_path)
    words = rf"tokens-0\.bin: sample s1 at byte 25 does not match .*{way_out(tmp_path)}"
    with pytest.raises(EyasError, match=words):
        source.tokens(1)
    source.tokens(0)


def test_truncated_and_missing_shards_cost_their_samples_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    records = layout.read_journal(tmp_path / "journal-0.jsonl").records
    last = [r for r in records if r.shard == records[-1].shard]
    os.truncate(tmp_path / last[-1].shard, last[-1].parts[-1].offset + 5)
    gone = [r.id for r in records if r.shard == records[0].shard]
    (tmp_path / records[0].shard).unlink()
    source = open_source(tmp_path)
    assert [name for name, _ in source.skipped] == [*gone, last[-1].id]
    assert "is missing" in source.skipped[0][1]
    assert "is truncated" in source.skipped[-1][1]
    assert len(source.ids) == len(records) - len(gone) - 1
    assert_right(source)


def test_a_sample_that_trains_nothing_is_left_out_by_name(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, MANIFEST) as store:
        store.add(*sample(0))
        name, ids, mask, states = sample(1)
        store.add(name, ids, np.zeros_like(mask), states)
    source = open_source(tmp_path)
    assert (source.ids, source.skipped) == (["s0"], [("s1", "has no trained token")])


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "whole")
    real, written = os.pwritev, [0]

    def full(fd: int, buffers: list[Any], offset: int) -> int:
        room = 100_000 - written[0]
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = b"".join(bytes(b) for b in buffers)[:room]
        written[0] += len(data)
        return real(fd, [data], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(EyasError, match="No space left on device") as caught:
            write(tmp_path / "store")
    assert "\n" not in str(caught.value)
    source = open_source(tmp_path / "store")
    assert 0 < len(source.ids) < len(LENGTHS)
    assert source.skipped == []
    assert_right(source)
    write(tmp_path / "store")
    assert files(tmp_path / "store") == files(tmp_path / "whole")


def test_after_a_failed_sync_nothing_more_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 3)
    real = os.fdatasync

    def failing(_fd: int) -> None:
        monkeypatch.setattr(os, "fdatasync", real)  # the kernel reports a lost page once
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(EyasError, match="Input/output error"):
        write(tmp_path, 9)
    assert open_source(tmp_path).ids == ["s0", "s1", "s2"]


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EyasError, match=r"file/store cannot be written: Not a directory"):
        write(tmp_path / "file" / "store")


def test_an_attempt_that_recorded_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), StoreWriter(tmp_path / "a" / "store", MANIFEST) as store:
        store.add("x", [1], [True], torch.full((4, 1, H), 1.0))
        store._broken = True  # the sync failed
        raise RuntimeError("boom")
    assert list((tmp_path / "a").iterdir()) == []


def config(**changes: Any) -> VerifierConfig:
    sizes = {"hidden_size": H, "num_layers": 8, "vocab_size": 100, "name": "other"}
    names = VerifierConfig.__dataclass_fields__
    return VerifierConfig(**{**dict.fromkeys(names), **sizes, **changes})


@pytest.mark.parametrize(
    ("verifier", "fingerprint", "message"),
    [
        (config(hidden_size=32), "f00d", "hidden size 24, not 32"),
        (config(vocab_size=101), "f00d", "vocabulary of 100, not 101"),
        (config(num_layers=9), None, "8 layers, not 9"),
        (config(), "beef", "captured from tiny, not from other .fingerprint f00d, not beef"),
    ],
)
def test_a_store_of_another_verifier_is_refused(
    tmp_path: Path, verifier: VerifierConfig, fingerprint: str | None, message: str
) -> None:
    write(tmp_path, 2)
    with pytest.raises(EyasError, match=message):
        open_source(tmp_path, verifier, fingerprint)
    open_source(tmp_path, config(), "f00d")


def test_a_store_of_other_settings_is_not_appended_to(tmp_path: Path) -> None:
    write(tmp_path, 2)
    before = files(tmp_path)
    with pytest.raises(EyasError, match="norm_side before, not after"):
        StoreWriter(tmp_path, replace(MANIFEST, norm_side="after"))
    assert files(tmp_path) == before


def test_folders_without_data_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="neither a store"):
        open_source(tmp_path)
    with pytest.raises(EyasError, match="is not a folder"):
        open_source(tmp_path / "nowhere")
    write(tmp_path, 2)
    (tmp_path / layout.MANIFEST).unlink()
    with pytest.raises(EyasError, match=r"has no manifest\.json"):
        open_source(tmp_path)


def test_a_manifest_of_something_else_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "manifest.json"
    said = json.loads(path.read_bytes())
    del said["check"], said["layers"]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(said, sort_keys=True).encode())
    texts = {
        '["check"]': "no JSON object",
        '"check"': "no JSON object",
        json.dumps({**said, "check": digest}): "says nothing of layers",
    }
    for text, why in texts.items():
        path.write_text(text)
        with pytest.raises(EyasError, match=why):
            open_source(tmp_path)
