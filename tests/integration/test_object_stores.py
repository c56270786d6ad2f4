"""Data in a bucket, from a real S3 server on this machine: staged, checked, gone on with, and trained on."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from eyas.errors import EyasError
from eyas.store import remote
from eyas.store.reader import open_source
from eyas.store.readpath import ReadPath

obstore = pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    made = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An empty bucket `states`, whose keys and address are in the environment, and an empty staging folder."""
    for name, value in (
        ("AWS_ENDPOINT_URL", server), ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_REGION", "us-east-1"), ("EYAS_STAGE_DIR", str(tmp_path / "stage")),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST")).close()
    urllib.request.urlopen(urllib.request.Request(f"{server}/states", method="PUT")).close()
    from obstore.store import from_url

    yield from_url("s3://states", client_options={"allow_http": True})


def put(bucket: Any, folder: Path, prefix: str) -> dict[str, bytes]:
    """Every file of a folder below `prefix`; what they hold, by name."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    for name, data in files.items():
        obstore.put(bucket, f"{prefix}/{name}", data)
    return files


def held(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not p.name.startswith(".")
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(object, bytes) of every request for content."""
    found: list[tuple[str, int]] = []
    real = obstore.get

    def get(store: Any, path: str, *, options: Any) -> Any:
        found.append((path, options["range"][1] - options["range"][0]))
        return real(store, path, options=options)

    monkeypatch.setattr(obstore, "get", get)
    return found


def test_a_run_on_a_bucket_is_the_run_on_the_folder(tiny: Any, bucket: Any, eyas: Any, tmp_path: Path) -> None:
    files = put(bucket, tiny.store, "runs/store")
    url = "s3://states/runs/store"
    done = eyas("store", "info", url)
    assert done.code == 0, done.err
    assert "in 4 of 4 files are fetched to" in done.out[0]
    assert done.out[1].startswith("fetched ")
    folder = tmp_path / "stage" / "s3" / "states" / "runs" / "store"
    assert held(folder) == files
    vocab = eyas("vocab", "--verifier-path", tiny.verifier, "--data", url, "--size", 96, "--output-dir", tmp_path / "v")
    assert vocab.code == 0, vocab.err
    figures = []
    for name, data in (("a", tiny.store), ("b", f"{url}/")):
        done = eyas(
            "train", "--verifier-path", tiny.verifier, "--data-dir", data, "--vocab-mapping-dir", tmp_path / "v",
            "--output-dir", tmp_path / name, "--epochs", 1, "--max-seq-len", 128,
        )  # fmt: skip
        assert done.code == 0, done.err
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        figures.append((summary["final_loss"], summary["validations"][0]["accept_length"]))
    assert figures[0] == figures[1]
    assert any("4 files" in line and "are staged in" in line for line in done.out)
    assert yaml.safe_load((tmp_path / "b" / "run.yaml").read_text())["config"]["data_dir"] == url
    done = eyas("store", "check", url, "--stage-dir", tmp_path / "other")
    assert (done.code, done.out[-1]) == (0, "nothing wrong was found")
    assert held(tmp_path / "other" / "s3" / "states" / "runs" / "store") == files


def test_what_is_there_is_not_fetched_again_and_what_changed_is(
    bucket: Any, asked: list[tuple[str, int]], founding: Path
) -> None:
    put(bucket, founding / "D", "d")
    folder = remote.staged("s3://states/d")
    assert len(open_source("s3://states/d").ids) == len(open_source(founding / "D").ids) == 24
    assert {name for name, _ in asked} == {f"data_{i}.pt" for i in range(24)}
    asked.clear()
    remote.staged("s3://states/d")
    assert asked == []
    changed = bytearray((folder / "data_3.pt").read_bytes())
    changed[-1] ^= 1
    obstore.put(bucket, "d/data_3.pt", bytes(changed))  # of the same size
    obstore.delete(bucket, "d/data_5.pt")
    (folder / "data_7.pt").write_bytes(b"cut")
    (folder / "mine").write_bytes(b"not from the bucket")
    remote.staged("s3://states/d")
    assert {name for name, _ in asked} == {"data_3.pt", "data_7.pt"}
    assert (folder / "data_3.pt").read_bytes() == changed
    assert (folder / "data_7.pt").read_bytes() == (founding / "D" / "data_7.pt").read_bytes()
    assert not (folder / "data_5.pt").exists()
    assert (folder / "mine").exists()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_copy_is_fetched_once_more_and_then_believed_no_more(
    tiny: Any, bucket: Any, asked: list[tuple[str, int]]
) -> None:
    files = put(bucket, tiny.store, "store")
    folder, said = remote.staged("s3://states/store"), list[str]()
    record = open_source(tiny.store).records[0]
    wanted = open_source(tiny.store).states(0)
    text = next(name for name in files if name.startswith("tokens-"))
    journal = next(name for name in files if name.startswith("journal-"))
    damaged = {record.shard: record.parts[1].offset, text: 0, journal: 40, "manifest.json": 40}
    for name, at in damaged.items():
        flip(folder / name, at)
    asked.clear()
    source = open_source("s3://states/store", say=said.append)  # by size and etag nothing is to be fetched
    assert {name for name, _ in asked} == {"manifest.json", journal}
    path = ReadPath(source, say=said.append)
    with ThreadPoolExecutor(4) as pool:  # many readers find it at once
        loaded = list(pool.map(lambda _: path.load([0], [len(wanted[0])]), range(8)))
    assert all(torch.equal(torch.stack(list(each.states()[0])), wanted) for each in loaded)
    assert source.tokens(0)[0].tolist() == open_source(tiny.store).tokens(0)[0].tolist()
    assert source.skipped == open_source(tiny.store).skipped
    assert sorted(name for name, _ in asked) == sorted(damaged)
    assert held(folder) == files
    for name in damaged:
        assert said.count(f"{folder / name} is damaged: it is fetched once more from s3://states/store") == 1
    flip(folder / record.shard, record.parts[1].offset)  # again: this disk is not to be trusted
    with pytest.raises(EyasError, match=r"does not match its checksum \(read twice, fetched again and read twice\)"):
        ReadPath(source).load([0], [len(wanted[0])])
    assert len(asked) == len(damaged)


def test_a_damaged_object_and_a_changed_one_are_errors(tiny: Any, bucket: Any) -> None:
    put(bucket, tiny.store, "store")
    record = open_source(tiny.store).records[0]
    bad = bytearray((tiny.store / record.shard).read_bytes())
    bad[record.parts[0].offset] ^= 1
    obstore.put(bucket, f"store/{record.shard}", bytes(bad))
    source = open_source("s3://states/store")
    words = (
        r"read twice, fetched again and read twice\): restore the file, or leave such samples out: eyas store check .*"
    )
    with pytest.raises(EyasError, match=words):
        source.states(0)
    put(bucket, tiny.store, "other")
    source = open_source("s3://states/other")
    flip(remote.folder_of("s3://states/other") / record.shard, record.parts[0].offset)
    obstore.put(bucket, f"other/{record.shard}", b"something else by now")
    with pytest.raises(EyasError, match=r"does not match its checksum \(read twice\)"):
        source.states(0)


def test_a_stopped_fetch_goes_on_behind_what_is_there(
    bucket: Any, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PIECE", 1000)
    content = bytes(range(256)) * 40  # 10,240
    obstore.put(bucket, "d/shard", content)
    real = obstore.get

    def stopping(store: Any, path: str, *, options: Any) -> Any:
        if options["range"][0] == 4000:
            raise KeyboardInterrupt
        return real(store, path, options=options)

    monkeypatch.setattr(obstore, "get", stopping)
    with pytest.raises(KeyboardInterrupt):
        remote.staged("s3://states/d")
    folder = remote.folder_of("s3://states/d")
    assert held(folder) == {}  # nothing has its name before it is whole
    assert sum(n for _, n in asked) == 4000
    asked.clear()
    monkeypatch.setattr(obstore, "get", real)
    lines: list[str] = []
    remote.staged("s3://states/d", lines.append)
    assert held(folder) == {"shard": content}
    assert sum(n for _, n in asked) == 6240
    assert "in 1 of 1 files are fetched to" in lines[0]

    # Of another content nothing is kept.
    obstore.put(bucket, "d/other", content)
    monkeypatch.setattr(obstore, "get", stopping)
    with pytest.raises(KeyboardInterrupt):
        remote.staged("s3://states/d")
    obstore.put(bucket, "d/other", content[::-1])
    monkeypatch.setattr(obstore, "get", real)
    asked.clear()
    remote.staged("s3://states/d")
    assert sum(n for _, n in asked) == 10_240
    assert held(folder) == {"other": content[::-1], "shard": content}
    assert not list(folder.glob(".*.part"))


def test_an_object_that_changes_while_it_is_fetched_is_no_mixture(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PIECE", 1000)
    obstore.put(bucket, "d/shard", b"a" * 3000)
    real = obstore.get

    def get(store: Any, path: str, *, options: Any) -> Any:
        if options["range"][0] == 1000:
            obstore.put(bucket, "d/shard", b"b" * 3000)
        return real(store, path, options=options)

    monkeypatch.setattr(obstore, "get", get)
    with pytest.raises(EyasError, match=r"s3://states/d/shard changed while it was fetched: run the same"):
        remote.staged("s3://states/d")
    monkeypatch.setattr(obstore, "get", real)
    assert held(remote.staged("s3://states/d")) == {"shard": b"b" * 3000}


def test_two_at_once_fetch_once(bucket: Any, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    obstore.put(bucket, "d/shard", b"x" * 5000)
    slow = obstore.get

    def get(store: Any, path: str, *, options: Any) -> Any:
        time.sleep(0.3)
        return slow(store, path, options=options)

    monkeypatch.setattr(obstore, "get", get)
    lines: list[str] = []
    both = [threading.Thread(target=remote.staged, args=("s3://states/d", lines.append)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert len(asked) == 1
    assert any("is being staged by another process: waiting for it" in line for line in lines)
    assert any("1 files, 0.0 MB, are staged in" in line for line in lines)


def test_what_is_wrong_is_one_line(bucket: Any, eyas: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    obstore.put(bucket, "d/shard", b"x" * 5000)
    obstore.put(bucket, "other/x", b"x")
    for url, said in (
        ("s3://nowhere/d", "s3://nowhere/d is not there: check the name of the bucket and the path"),
        ("s3://states/nothing", "s3://states/nothing holds nothing: name the folder of a store in that bucket"),
        ("s3://states/other", "holds neither a store"),
        ("s3://states/../d", "a path with .. in it"),
    ):
        done = eyas("store", "info", url)
        assert (done.code, len(done.err)) == (2, 1), done.err
        assert said in done.err[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=4999))
    done = eyas("store", "info", "s3://states/d")
    assert (done.code, len(done.err)) == (2, 1)
    assert "of s3://states/d are to be fetched and 0.0 MB are free there: make room" in done.err[0]
    assert held(tmp_path / "stage" / "s3" / "states" / "d") == {}
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    done = eyas("store", "info", "s3://states/d", "--stage-dir", tmp_path / "stage")
    assert (done.code, len(done.err)) == (2, 1), done.err
    assert "cannot be read" in done.err[0]
    assert "check the network and AWS_ENDPOINT_URL" in done.err[0]
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    done = eyas("store", "info", "s3://states/d")
    assert done.err == ["eyas: s3://states/d: object stores need obstore: pip install 'eyas[s3]'"]


def test_a_path_stays_a_path_and_a_url_survives_pathlib() -> None:
    for text in ("/data/s3", "s3/x", "runs/store", "C:/x", "https://x/y"):
        assert remote.url_of(text) is None
    for text in ("s3://b/a/c", "s3://b/a/c/", Path("s3://b/a/c")):
        assert remote.url_of(text) == "s3://b/a/c"
    assert remote.url_of("gs://b") == "gs://b"
