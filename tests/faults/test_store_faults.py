"""What happens to stores: kills, bits that flip, files cut short, full disks, little memory. About three minutes."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab.kit import Lab, Unable

from eyas.errors import EyasError
from eyas.store import index, layout
from eyas.store.layout import Manifest
from eyas.store.merge import merge
from eyas.store.reader import StoreSource, open_source
from eyas.store.readpath import ReadPath
from eyas.store.writer import StoreWriter
from eyas.train.batches import Loader, epoch_order, pack
from storekit import LENGTHS, MANIFEST, SMALL, assert_right, files, flip, sample, write

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill is the same there, and hundreds of runs wait for no disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def readable(path: Path) -> bool:
    return (path / layout.MANIFEST).exists() and any(layout.read_journal(j).records for j in layout.journals(path))


def child(work: Callable[[], None]) -> int:
    """Do `work` in a fork; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def kill(pid: int) -> bool:
    """kill -9; whether it came before the end."""
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def write_until(byte: int, work: Callable[[], None]) -> None:
    """Do `work`; die by SIGKILL when it has written so many bytes, in the middle of a call."""
    real, written = os.pwritev, 0

    def pwritev(fd: int, buffers: list[Any], offset: int) -> int:
        nonlocal written
        data = b"".join(bytes(b) for b in buffers)
        if written + len(data) >= byte:
            real(fd, [data[: byte - written]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        written += len(data)
        return real(fd, [data], offset)

    os.pwritev = pwritev  # type: ignore[assignment]
    work()


def test_a_writer_killed_at_200_random_bytes_loses_nothing_it_recorded(memory_path: Path) -> None:
    write(memory_path / "whole", 9)
    expected, rng, deaths = files(memory_path / "whole"), random.Random(1), 0
    # Bytes that the writer hands to the kernel: the shards without what their headers left to zeros, and the journal.
    total = sum(len(data) for name, data in expected.items() if not name.startswith(layout.MANIFEST))
    path = memory_path / "store"

    def killed_at(byte: int) -> bool:
        return os.WIFSIGNALED(os.waitpid(child(lambda: write_until(byte, lambda: write(path, 9))), 0)[1])

    for k in range(200):
        deaths += killed_at(rng.randrange(1, total))
        if readable(path):
            assert_right(open_source(path))
        if k % 2:  # and once more, while it goes on
            killed_at(rng.randrange(1, total))
        write(path, 9)
        assert files(path) == expected
        for file in path.iterdir():
            file.unlink()
    assert deaths > 180


def test_a_merge_that_copies_is_killed_at_any_time_and_finished_by_the_next(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, first in (("a", 0), ("b", 60)):
        with StoreWriter(memory_path / name, MANIFEST, shard_bytes=1 << 19) as store:
            for i in range(first, first + 60):
                store.add(*sample(i))

    def no_link(source: Any, target: Any, **_: Any) -> None:
        if Path(source).suffix == ".safetensors":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(source, target)

    real = os.link
    monkeypatch.setattr(os, "link", no_link)
    folders, deaths, rng = [memory_path / "a", memory_path / "b"], 0, random.Random(2)

    def work(output: Path) -> None:
        merge(folders, output, lambda _: None)

    started = time.monotonic()
    work(memory_path / "whole")
    took, expected = time.monotonic() - started, files(memory_path / "whole")
    assert len(open_source(memory_path / "whole").ids) == 120
    for k in range(20):
        output = memory_path / f"out{k}"
        for _ in range(2):
            pid = child(lambda output=output: work(output))
            time.sleep(took * 1.2 * rng.random())
            deaths += kill(pid)
            if readable(output):
                assert_right(open_source(output))
        work(output)
        assert files(output) == expected
    assert deaths > 10


def test_eight_writing_processes_on_one_folder_killed_and_started_again(memory_path: Path) -> None:
    path, rng = memory_path / "store", random.Random(3)
    for i in range(160):
        sample(i)

    def work(writer: int) -> None:
        with StoreWriter(path, MANIFEST, writer=f"w{writer}", **SMALL) as store:
            for i in range(writer, 160, 8):
                if f"s{i}" not in store.done_ids:
                    store.add(*sample(i))

    for _ in range(4):
        pids = [child(lambda w=w: work(w)) for w in range(8)]
        time.sleep(0.3 * rng.random())
        for pid in rng.sample(pids, 8):
            kill(pid)
        if path.exists() and readable(path):
            assert_right(open_source(path))
    pids = [child(lambda w=w: work(w)) for w in range(8)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 8
    source = open_source(path)
    assert sorted(source.ids) == sorted(f"s{i}" for i in range(160))
    assert source.skipped == []
    assert_right(source)


def test_a_reader_while_the_writer_goes_on_sees_only_what_is_right(tmp_path: Path) -> None:
    path, seen = tmp_path / "store", set[int]()
    for i in range(300):
        sample(i)
    pid = child(lambda: write(path, 300, shard_bytes=1 << 18, commit_bytes=1 << 15, header_bytes=1 << 14))
    running = True
    while running:
        running = os.waitpid(pid, os.WNOHANG) == (0, 0)
        if readable(path):
            source = open_source(path)
            reads = ReadPath(source)
            for i, name in enumerate(source.ids):
                rows = reads.load([i], [int(source.lengths[i])]).states()[0]
                assert torch.equal(torch.stack(list(rows)), sample(int(name[1:]))[3])
            seen.add(len(source.ids))
    assert max(seen) == 300
    assert len(seen) > 3, "it was read on the way"


# -- flips -------------------------------------------------------------------------------------------------------------


def test_each_of_1000_flipped_bits_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In states, tokens, journal, manifest and the kept index: an error or a sample left out by name, never another
    content. A flip in the manifest's white space and one in the kept index, which is made again, change nothing.
    """
    monkeypatch.setattr(index, "KEEP_FROM", 1)
    write(tmp_path, len(LENGTHS))
    source = open_source(tmp_path)
    assert isinstance(source, StoreSource)
    records, rng = source.records, random.Random(4)
    caught = dict.fromkeys(("states", "tokens", "journal", "manifest", "index"), 0)
    for k in range(1000):
        kind = ("states", "tokens", "journal", "manifest", "states", "index", "journal")[k % 7]
        if kind == "states":
            i = rng.randrange(len(records))
            part = rng.choice(records[i].parts)
            place, byte = tmp_path / records[i].shard, part.offset + rng.randrange(part.nbytes)
        else:
            name = {"tokens": "tokens-0.bin", "journal": "journal-0.jsonl", "index": index.KEPT}
            place = tmp_path / name.get(kind, layout.MANIFEST)
            byte = rng.randrange(place.stat().st_size)
        bit = rng.randrange(8)
        flip(place, byte, bit)
        if kind == "states":
            with pytest.raises(EyasError, match=f"sample {records[i].id} at byte {part.offset} does not match"):
                ReadPath(source).load([i], [records[i].tokens])
            caught[kind] += 1
        else:
            caught[kind] += _is_noticed(tmp_path, kind)
        flip(place, byte, bit)
    assert sum(caught.values()) == 1000, caught
    assert_right(open_source(tmp_path))


def _is_noticed(path: Path, kind: str) -> bool:
    try:
        source = open_source(path)
    except EyasError as error:
        return "checksum" in str(error) or "cannot be read" in str(error) or "format" in str(error)
    if kind in ("manifest", "index"):
        assert source.manifest == MANIFEST
        assert len(source.ids) == len(LENGTHS)
        assert_right(source)
        return True
    if kind == "journal":
        assert_right(source)
        return len(source.ids) < len(LENGTHS) and "journal-0.jsonl line" in source.skipped[0][0]
    wrong = 0
    for i, name in enumerate(source.ids):
        try:
            ids, mask = source.tokens(i)
            np.testing.assert_array_equal(ids, sample(int(name[1:]))[1])
            np.testing.assert_array_equal(mask, sample(int(name[1:]))[2])
        except EyasError as error:
            assert f"sample {name}" in str(error)
            wrong += 1
    return wrong == 1


# -- files that are not whole ------------------------------------------------------------------------------------------


def check_all(path: Path) -> tuple[list[str], list[str]]:
    """(samples that are read and right, samples that are left out or raise)."""
    source = open_source(path)
    reads, good, bad = ReadPath(source), [], [name for name, _ in source.skipped]
    for i, name in enumerate(source.ids):
        try:
            source.tokens(i)
            rows = reads.load([i], [int(source.lengths[i])]).states()[0]
        except EyasError as error:
            assert f"sample {name}" in str(error)
            bad.append(name)
        else:
            assert torch.equal(torch.stack(list(rows)), sample(int(name[1:]))[3])
            good.append(name)
    return good, bad


@pytest.mark.parametrize("what", ["states", "tokens"])
@pytest.mark.parametrize("how", ["truncated", "zero-tailed", "missing", "empty"])
def test_files_that_are_not_whole_cost_their_samples_by_name_and_no_others(tmp_path: Path, what: str, how: str) -> None:
    write(tmp_path)
    records = layout.read_journal(tmp_path / "journal-0.jsonl").records
    victim = tmp_path / (records[-1].shard if what == "states" else "tokens-0.bin")
    inside = [r for r in records if what == "tokens" or r.shard == records[-1].shard]
    size = victim.stat().st_size
    cut = inside[-1].parts[1].offset + 50 if what == "states" else inside[-1].text_offset + 3
    if how == "missing":
        victim.unlink()
    elif how == "empty":
        os.truncate(victim, 0)
    else:
        os.truncate(victim, cut)
        if how == "zero-tailed":
            os.truncate(victim, size)
    lost = [r.id for r in inside] if how in ("missing", "empty") else [inside[-1].id]
    if len(lost) == len(records):
        with pytest.raises(EyasError, match=r"holds no usable sample \(9 left out"):
            open_source(tmp_path)
        return
    good, bad = check_all(tmp_path)
    assert bad == lost
    assert sorted(good + bad) == [f"s{i}" for i in range(len(LENGTHS))]


def test_a_journal_cut_anywhere_keeps_the_lines_before(tmp_path: Path) -> None:
    write(tmp_path)
    journal, rng = tmp_path / "journal-0.jsonl", random.Random(5)
    good = journal.read_bytes()
    for _ in range(40):
        cut = rng.randrange(1, len(good))
        journal.write_bytes(good[:cut])
        whole = good[:cut].count(b"\n")
        if whole == 0:
            with pytest.raises(EyasError, match="holds no usable sample"):
                open_source(tmp_path)
            continue
        assert open_source(tmp_path).ids == [f"s{i}" for i in range(whole)]
        journal.write_bytes(good[:cut] + bytes(len(good) - cut))  # the size reached the disk, the content did not
        assert open_source(tmp_path).ids == [f"s{i}" for i in range(whole)]


# -- a full disk, little memory ----------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_with_more_room_the_same_bytes_come_out(tmp_path: Path) -> None:
    write(tmp_path / "whole", 40)
    total = sum(map(len, files(tmp_path / "whole").values()))
    work = {
        "store": lambda path: write(path, 40),
        "merged": lambda path: merge([tmp_path / "whole"], path, lambda _: None),
    }
    with Lab() as lab:
        for name, fill in work.items():
            try:
                disk = lab.tmpfs(name, f"{total // 5}")
            except Unable as error:
                pytest.skip(str(error))
            for share in (0.4, 0.6, 0.8, 2):
                with pytest.raises(EyasError, match="No space left on device") as caught:
                    fill(disk / "it")
                assert "\n" not in str(caught.value)
                if readable(disk / "it"):
                    assert_right(open_source(disk / "it"))
                subprocess.run(["mount", "-o", f"remount,size={int(share * total)}", str(disk)], check=True)
            fill(disk / "it")
            assert len(open_source(disk / "it").ids) == 40
            assert_right(open_source(disk / "it"))
            if name == "store":
                assert files(disk / "it") == files(tmp_path / "whole")


def test_a_store_of_5_gb_is_trained_from_in_1_gb_of_memory(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """`eyas train`, whole, in a memory control group. Each epoch reads every sample."""
    samples, T, width = 310, 2048, 1024
    verifier = wide_verifier(tmp_path / "verifier", tiny_tokenizer, width)
    manifest = Manifest("wide", "", width, 8, len(tiny_tokenizer), (2, 4, 5, 8), "before")
    bits = torch.randint(0, 1 << 14, (4, T, width), dtype=torch.int16)
    with StoreWriter(tmp_path / "store", manifest) as store:
        for i in range(samples):
            mask = np.zeros(T, dtype=bool)
            end = T if i % 10 == 0 else 40  # most samples train at their beginning, so that the steps cost little
            mask[end - 20 : end] = True
            store.add(f"s{i}", np.arange(T) % 300 + 3, mask, bits.roll(i, dims=1).view(torch.bfloat16))
    assert sum(p.stat().st_size for p in (tmp_path / "store").iterdir()) > 5e9
    options = {"epochs": 2, "intermediate-size": 128, "num-heads": 4, "num-kv-heads": 2, "head-dim": 16, "ttt-steps": 1}
    words = [sys.executable, "-m", "eyas", "train", "--verifier-path", verifier, "--data-dir", tmp_path / "store"]
    words += ["--output-dir", tmp_path / "run", "--val-ratio", "0.02", "--init", "random"]
    words += [word for name, value in options.items() for word in (f"--{name}", value)]
    with Lab() as lab:
        try:
            group = lab.cgroup("memory", memory__limit_in_bytes=1 << 30)
        except Unable as error:
            pytest.skip(str(error))
        log = (tmp_path / "log").open("wb")
        train = lab.spawn([str(w) for w in words], cgroups=[group], stdout=log, stderr=log)
        _, status, usage = os.wait4(train.pid, 0)
        said = (tmp_path / "log").read_text()
        assert status == 0, said[-2000:]
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        assert int((group / "memory.max_usage_in_bytes").read_text()) <= 1 << 30
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tokens"] == 2 * (samples - 6) * T
    print(f"\npeak resident {usage.ru_maxrss / 1e3:.0f} MB, {summary['seconds']} s, {used.get('total_cache')} cached")
    assert usage.ru_maxrss * 1024 < 900e6
    assert re.search(r"step 608/608", said)


def wide_verifier(folder: Path, tokenizer: Any, width: int) -> Path:
    """A random llama that is wide and otherwise small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_from_the_second_epoch_on_the_kept_part_needs_no_disk(tmp_path: Path) -> None:
    """By the kernel's own count of what this process had fetched from the disk."""
    counter = Path("/proc/self/io")
    width, count = 1024, 60
    manifest = Manifest("wide", "", width, 8, 400, (2, 4, 5, 8), "before")
    with StoreWriter(tmp_path, manifest) as store:
        for i in range(count):
            states = torch.randint(0, 1 << 14, (4, 256, width), dtype=torch.int16).view(torch.bfloat16)
            store.add(f"s{i}", np.arange(256), np.arange(256) > 5, states)
    for shard in tmp_path.glob("shard-*"):
        fd = os.open(shard, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    source = open_source(tmp_path)
    total = sum(source.nbytes(i) for i in range(count))
    path = ReadPath(source, cache_gb=0.4 * total / 1e9)
    kept = sum(source.nbytes(i) for i in range(count) if path.kept[i])
    assert kept == 24 / 60 * total

    def fetched() -> int:
        (line,) = re.findall(r"^read_bytes: (\d+)", counter.read_text(), re.MULTILINE)
        return int(line)

    from_disk = []
    for epoch in range(3):
        before = fetched()
        packs = pack(epoch_order(list(range(count)), 0, epoch), source.lengths, 512, 512)
        assert sum(b.nbytes for b in Loader(path, packs, 3, 512, 4)) == total
        from_disk.append(fetched() - before)
    if from_disk[0] == 0:
        pytest.skip("the file system is in memory")
    assert from_disk[0] >= total
    assert from_disk[1:] == [total - kept] * 2
