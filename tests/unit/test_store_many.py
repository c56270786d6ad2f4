"""Many writers, one store: at once in one folder, or in folders of their own that are merged."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eyas.cli import app
from eyas.errors import EyasError
from eyas.store import layout
from eyas.store.check import check
from eyas.store.convert import convert
from eyas.store.info import describe, info
from eyas.store.layout import Manifest
from eyas.store.merge import Merged, merge
from eyas.store.reader import StoreSource, open_source
from eyas.store.writer import StoreWriter
from storekit import LAYERS, LENGTHS, MANIFEST, SMALL, assert_right, files, flip, run_to_death, sample


def write(path: Path, numbers: Any, writer: str = "0", manifest: Manifest = MANIFEST) -> None:
    with StoreWriter(path, manifest, writer=writer, **SMALL) as store:
        for i in numbers:
            if f"s{i}" not in store.done_ids:
                store.add(*sample(i))


def merged(folders: list[Path], output: Path) -> Merged:
    return merge(folders, output, lambda _: None)


def ids(path: Path) -> list[str]:
    return sorted(open_source(path).ids, key=lambda name: int(name[1:]))


def test_eight_writers_that_begin_at_once_fill_one_folder(tmp_path: Path) -> None:
    for i in range(48):
        sample(i)
    started = threading.Barrier(8)
    failures: list[BaseException] = []

    def one(writer: int) -> None:
        try:
            started.wait()
            write(tmp_path, range(writer, 48, 8), f"w{writer}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    source = open_source(tmp_path)
    assert ids(tmp_path) == [f"s{i}" for i in range(48)]
    assert source.skipped == []
    assert_right(source)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_merged_stores_hold_every_sample_once_and_copy_no_states(tmp_path: Path) -> None:
    write(tmp_path / "a", range(4))
    write(tmp_path / "b", range(3, 8))  # s3 is in both
    write(tmp_path / "b", range(8, 10), "1")
    before = {name: files(tmp_path / name) for name in "ab"}
    done = merged([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert (done.samples, done.added, done.duplicates, done.differing, done.copied) == (10, 10, 1, 0, 0)
    assert ids(tmp_path / "all") == [f"s{i}" for i in range(10)]
    assert_right(open_source(tmp_path / "all"))
    assert open_source(tmp_path / "all").manifest == MANIFEST
    assert {name: files(tmp_path / name) for name in "ab"} == before
    shard = next((tmp_path / "all").glob("shard-a_*"))
    assert shard.stat().st_nlink == 2
    again = merged([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert (again.samples, again.added) == (10, 0)


def test_a_merge_goes_on_when_a_folder_has_grown(tmp_path: Path) -> None:
    write(tmp_path / "a", range(4))
    merged([tmp_path / "a"], tmp_path / "all")
    write(tmp_path / "a", range(9))
    assert merged([tmp_path / "a"], tmp_path / "all").added == 5
    assert ids(tmp_path / "all") == [f"s{i}" for i in range(9)]
    assert_right(open_source(tmp_path / "all"))


def test_a_shard_that_a_killed_writer_left_open_is_merged_too(tmp_path: Path) -> None:
    write(tmp_path / "whole", range(5))
    with pytest.raises(RuntimeError), StoreWriter(tmp_path / "a", MANIFEST, **SMALL) as store:
        for i in range(5):
            store.add(*sample(i))
        raise RuntimeError
    assert list((tmp_path / "a").glob("*.part"))
    merged([tmp_path / "a"], tmp_path / "all")
    assert ids(tmp_path / "all") == [f"s{i}" for i in range(5)]
    assert_right(open_source(tmp_path / "all"))
    assert files(tmp_path / "a") == files(tmp_path / "whole")


def test_a_folder_whose_writer_is_at_work_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a", MANIFEST) as store:
        store.add(*sample(0))
        store.commit()
        with pytest.raises(EyasError, match="being written by another process"):
            merged([tmp_path / "a"], tmp_path / "all")


def test_stores_of_two_kinds_are_not_merged(tmp_path: Path) -> None:
    write(tmp_path / "a", range(2))
    write(tmp_path / "b", range(2, 4), manifest=replace(MANIFEST, norm_side="after"))
    with pytest.raises(EyasError, match=r"b cannot be merged with .*a: norm_side"):
        merged([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert not (tmp_path / "all").exists()
    with pytest.raises(EyasError, match="is not a store"):
        merged([tmp_path / "nothing"], tmp_path / "all")
    with pytest.raises(EyasError, match="into itself"):
        merged([tmp_path / "a"], tmp_path / "a")


def test_shares_of_different_prepared_data_have_a_source_of_their_own(tmp_path: Path) -> None:
    for name, part in (("a", range(2)), ("b", range(2, 4))):
        write(tmp_path / name, part, manifest=replace(MANIFEST, source=name))
    merged([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    merged([tmp_path / "b", tmp_path / "a"], tmp_path / "ba")
    sources = {Manifest.load(tmp_path / name).source for name in ("ab", "ba")}
    assert len(sources) == 1
    assert not sources & {"a", "b", ""}


def test_samples_that_differ_under_one_id_are_counted_and_the_first_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "a", range(3))
    with StoreWriter(tmp_path / "b", MANIFEST) as store:
        name, tokens, mask, states = sample(1)
        store.add(name, tokens, mask, states + 1)
    done = merged([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert (done.samples, done.duplicates, done.differing) == (3, 1, 1)
    assert_right(open_source(tmp_path / "all"))


@pytest.mark.parametrize("damaged", [False, True])
def test_where_there_are_no_links_shards_are_copied_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    write(tmp_path / "a", range(6))
    record = layout.read_journal(tmp_path / "a" / "journal-0.jsonl").records[2]
    if damaged:
        flip(tmp_path / "a" / record.shard, record.parts[1].offset + 7)

    def no_link(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", no_link)
    done = merged([tmp_path / "a"], tmp_path / "all")
    assert done.linked == 0
    assert done.copied == sum(p.stat().st_size for p in (tmp_path / "a").glob("shard-*"))
    assert ids(tmp_path / "all") == [f"s{i}" for i in range(6) if not damaged or i != 2]
    assert [name for name, _ in done.damaged] == (["s2"] if damaged else [])
    assert_right(open_source(tmp_path / "all"))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_merge_killed_at_any_call_is_finished_by_the_next(tmp_path: Path) -> None:
    write(tmp_path / "a", range(4))
    write(tmp_path / "b", range(4, 7))
    folders = [tmp_path / "a", tmp_path / "b"]
    merged(folders, tmp_path / "whole")
    expected, deaths = files(tmp_path / "whole"), 0
    for at in range(1000):
        output = tmp_path / f"at{at}"
        if not run_to_death(lambda output=output: merged(folders, output), at, torn=True, power_cut=False):
            break
        deaths += 1
        if (output / layout.MANIFEST).exists() and layout.journals(output):
            assert_right(open_source(output))
        merged(folders, output)
        assert files(output) == expected, f"killed at call {at}"
    assert deaths > 15


def test_info_tells_sizes_lengths_and_the_trained_share(tmp_path: Path) -> None:
    write(tmp_path / "a", range(9))
    told = info(tmp_path / "a")
    lengths = [LENGTHS[i] for i in range(9)]
    trained = sum(T - T // 2 for T in lengths)
    assert (told["samples"], told["tokens"], told["trained_tokens"]) == (9, sum(lengths), trained)
    assert told["trained_share"] == round(trained / sum(lengths), 4)
    assert told["state_bytes"] == sum(lengths) * len(LAYERS) * 24 * 2
    assert told["lengths"]["histogram"] == [[0, 16, 6], [64, 128, 1], [128, 256, 1], [256, 512, 1]]
    assert sum(n for _, _, n in told["lengths"]["histogram"]) == 9
    assert (told["lengths"]["min"], told["lengths"]["max"]) == (1, 400)


def test_an_unfinished_store_is_told_with_what_to_do(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, some in ((a, range(5)), (b, range(9))):
        with StoreWriter(folder, replace(MANIFEST, samples=9), **SMALL) as store:
            for i in some:
                store.add(*sample(i))
    (line,) = info(a)["remarks"]
    assert line.startswith(f"{a} is unfinished: it has 5 of 9 samples: run the same eyas capture ")
    assert line in describe(info(a)) and info(a)["wanted_samples"] == 9
    report = check(a, say=lambda _line: None)
    assert (report["remarks"], report["ok"]) == ([line], True), "what is there is good"
    assert info(b)["remarks"] == [], "all nine are there"
    write(tmp_path / "old", range(5))  # a manifest that does not say how many
    assert (info(tmp_path / "old")["remarks"], info(tmp_path / "old")["wanted_samples"]) == ([], None)
    with StoreWriter(a, MANIFEST, **SMALL) as store:  # a writer that does not know the number goes on
        for i in range(5, 9):
            store.add(*sample(i))
    assert info(a)["remarks"] == []


def test_a_merge_says_which_folder_is_unfinished_and_a_conversion_stays_so(tmp_path: Path) -> None:
    said: list[str] = []
    with StoreWriter(tmp_path / "a", replace(MANIFEST, samples=9), **SMALL) as store:
        for i in range(5):
            store.add(*sample(i))
    merge([tmp_path / "a"], tmp_path / "all", said.append)
    assert [line for line in said if line.startswith("warning: ")] == [
        f"warning: {info(tmp_path / 'a')['remarks'][0]}; then merge again"
    ]
    assert "it has 5 of 9 samples" in info(tmp_path / "all")["remarks"][0]
    (tmp_path / "a" / layout.QUARANTINE).write_text('{"s0": "not wanted"}')
    convert(tmp_path / "a", tmp_path / "fp8", codec="fp8", say=lambda _line: None)
    assert "it has 4 of 8 samples" in info(tmp_path / "fp8")["remarks"][0], "what is in quarantine is not missed"


def test_parts_of_one_capture_that_make_it_whole_together_are_not_unfinished(tmp_path: Path) -> None:
    said: list[str] = []
    for name, some in (("a", range(5)), ("b", range(5, 8)), ("c", range(7, 9))):
        with StoreWriter(tmp_path / name, replace(MANIFEST, samples=9), **SMALL) as store:
            for i in some:
                store.add(*sample(i))
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "two", said.append)
    assert sum(line.startswith("warning: ") for line in said) == 2 and info(tmp_path / "two")["remarks"]
    said.clear()
    merge([tmp_path / name for name in "abc"], tmp_path / "all", said.append)
    assert not any("unfinished" in line for line in said) and info(tmp_path / "all")["remarks"] == []
    for name in "abc":
        said.clear()
        merge([tmp_path / name], tmp_path / "one by one", said.append)
    assert not any("unfinished" in line for line in said) and info(tmp_path / "one by one")["remarks"] == []


def test_a_conversion_that_lost_a_sample_is_whole_once_that_sample_is_in_quarantine(tmp_path: Path) -> None:
    a, fp8 = tmp_path / "a", tmp_path / "fp8"
    with StoreWriter(a, replace(MANIFEST, samples=9), **SMALL) as store:
        for i in range(9):
            store.add(*sample(i))
    bad = StoreSource(a).records[4]
    flip(a / bad.shard, bad.parts[2].offset)
    convert(a, fp8, codec="fp8", say=lambda _line: None)
    assert "it has 8 of 9 samples" in info(fp8)["remarks"][0]
    check(a, quarantine=True, say=lambda _line: None)
    convert(a, fp8, codec="fp8", say=lambda _line: None)
    assert (info(fp8)["remarks"], info(fp8)["wanted_samples"], info(fp8)["samples"]) == ([], 8, 8)


def test_samples_of_a_cut_shard_are_counted_as_lost(tmp_path: Path) -> None:
    write(tmp_path / "a", range(9))
    shard = open_source(tmp_path / "a")._index.shards[0]  # type: ignore[attr-defined]
    lost = sum(r.shard == shard for r in open_source(tmp_path / "a").records)  # type: ignore[attr-defined]
    (tmp_path / "a" / shard).write_bytes(b"")
    assert info(tmp_path / "a")["remarks"] == [
        f"{lost} of 9 samples are lost: in {tmp_path / 'a'}, {shard} is truncated at byte 0: restore the file from a"
        f" copy, or delete {tmp_path / 'a'} and make it again"
    ]


def test_the_command_line_merges_and_tells(tmp_path: Path) -> None:
    write(tmp_path / "a", range(3))
    write(tmp_path / "b", range(3, 6))
    run = CliRunner().invoke
    result = run(app, ["store", "merge", f"{tmp_path}/a", f"{tmp_path}/b", "--output-dir", f"{tmp_path}/all"])
    assert result.exit_code == 0
    assert "6 samples, 6 added" in result.output
    result = run(app, ["store", "info", f"{tmp_path}/all", "--json"])
    assert json.loads(result.output)["samples"] == 6
    assert json.loads(result.output)["writers"] == sorted(json.loads(result.output)["writers"])
    assert "6 samples of tiny" in run(app, ["store", "info", f"{tmp_path}/all"]).output


def test_states_of_a_merged_store_open_in_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write(tmp_path / "a", range(3))
    merged([tmp_path / "a"], tmp_path / "all")
    found = [load_file(p) for p in sorted((tmp_path / "all").glob("shard-*"))]
    states = {name: tensor for part in found for name, tensor in part.items()}
    for j, layer in enumerate(LAYERS):
        assert torch.equal(states[f"2.h{layer}"], sample(2)[3][j])


@pytest.mark.parametrize("fault", ["quarantine", "shard", "tokens", "gone"])
def test_what_a_folder_cannot_use_is_not_merged_and_a_good_copy_elsewhere_is(tmp_path: Path, fault: str) -> None:
    write(tmp_path / "a", range(6))
    shutil.copytree(tmp_path / "a", tmp_path / "good")
    records = layout.read_journal(tmp_path / "a" / "journal-0.jsonl").records
    shard = tmp_path / "a" / records[-1].shard
    lost = [r.id for r in records if r.shard == records[-1].shard]
    if fault == "quarantine":
        (tmp_path / "a" / layout.QUARANTINE).write_text(json.dumps({"s3": "not finite"}))
        lost = ["s3"]
    elif fault == "shard":
        os.truncate(shard, next(r for r in records if r.shard == shard.name).parts[-1].offset)
    elif fault == "tokens":
        os.truncate(tmp_path / "a" / "tokens-0.bin", records[-1].text_end - 1)
        lost = ["s5"]
    else:
        shard.unlink()
    done = merged([tmp_path / "a"], tmp_path / "all")
    assert [name for name, _ in done.damaged] == lost
    assert ids(tmp_path / "all") == [f"s{i}" for i in range(6) if f"s{i}" not in lost]
    assert open_source(tmp_path / "all").skipped == []
    told = CliRunner().invoke(app, ["store", "merge", str(tmp_path / "a"), "--output-dir", str(tmp_path / "all")])
    assert told.exit_code == 1 and f"left out {lost[0]}: " in told.output
    again = merged([tmp_path / "good"], tmp_path / "all")
    assert (again.added, again.damaged) == (len(lost), [])
    assert ids(tmp_path / "all") == [f"s{i}" for i in range(6)]
    assert_right(open_source(tmp_path / "all"))


def test_an_object_store_is_not_written_to_and_no_folder_of_its_name_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", range(2))
    tries: list[Any] = [
        lambda: merged([tmp_path / "a"], Path("s3://bucket/all")),
        lambda: merged([Path("s3://bucket/a")], tmp_path / "all"),
        lambda: convert(tmp_path / "a", Path("s3://bucket/all"), say=lambda _: None),
        lambda: StoreWriter(Path("gs://bucket/all"), MANIFEST),
    ]
    for attempt in tries:
        with pytest.raises(EyasError, match=r"(s3|gs)://bucket/a(ll)?: eyas reads from object stores and writes to"):
            attempt()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_prepared_samples_are_no_states(tmp_path: Path) -> None:
    (tmp_path / "prepared.parquet").write_bytes(b"")
    with pytest.raises(EyasError, match="holds prepared samples, without states: name the store"):
        open_source(tmp_path)


def test_a_store_is_not_made_at_a_link_that_leads_back_to_itself(tmp_path: Path) -> None:
    write(tmp_path / "a", range(3))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(EyasError, match="loop cannot be written"):
        merge([tmp_path / "a"], loop)
    with pytest.raises(EyasError, match="loop cannot be written"):
        convert(tmp_path / "a", loop, say=lambda _line: None)


def test_a_conversion_into_a_store_of_another_codec_says_of_which(tmp_path: Path) -> None:
    write(tmp_path / "a", range(3))
    write(tmp_path / "b", range(3))
    with pytest.raises(EyasError, match="b is a store in bf16, not in int8: name another folder"):
        convert(tmp_path / "a", tmp_path / "b", codec="int8", say=lambda _line: None)
