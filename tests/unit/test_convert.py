"""A store made of other tools' files, or of a store: the same states under the same checksums, resumed to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from foreign_files import WRITERS, expected, write

from eyas.errors import EyasError
from eyas.store import convert as module
from eyas.store.convert import convert
from eyas.store.reader import StoreSource, open_source
from eyas.store.writer import StoreWriter
from eyas.train.batches import Loader
from eyas.verifier import Verifier
from storekit import flip


def quiet(_line: str) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which holds the time."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".json"}


@pytest.mark.parametrize("kind", list(WRITERS))
def test_every_source_becomes_a_store(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, kind: str) -> None:
    verifier = Verifier(tiny_verifier)
    folder = write(kind, tmp_path / "d", on_policy)
    report = convert(folder, tmp_path / "store", verifier, say=quiet)
    assert (report["samples"], report["converted"], report["skipped"]) == (len(on_policy), len(on_policy), [])
    source = open_source(tmp_path / "store", verifier.config, verifier.fingerprint)
    assert source.ids == open_source(folder).ids
    assert source.manifest.norm_side == ("after" if kind.startswith(("specforge", "deepspec")) else "before")
    assert source.manifest.layers == (2, 4, 5, 8)
    for i, s in enumerate(on_policy):
        wanted = expected(kind, s)
        assert torch.equal(source.states(i), wanted)
        assert source.tokens(i)[0].tolist() == s["input_ids"].tolist()
        for part, layer in zip(source.records[i].parts, wanted, strict=True):
            assert part.xxh3 == xxhash.xxh3_64_hexdigest(layer.contiguous().view(torch.uint8).numpy().data)


@pytest.mark.parametrize("kind", list(WRITERS))
def test_training_reads_other_tools_files_as_it_reads_the_store(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, kind: str
) -> None:
    folder = write(kind, tmp_path / "d", on_policy)
    convert(folder, tmp_path / "store", Verifier(tiny_verifier), say=quiet)
    packs = [[3, 0, 7], [11, 2], [1]]
    for cut in (512, 18):
        loaders = [Loader(open_source(path), packs, 3, cut, 2) for path in (folder, tmp_path / "store")]
        for a, b in zip(*loaders, strict=True):
            assert torch.equal(a.states, b.states)
            assert torch.equal(a.last, b.last)
            assert torch.equal(a.plan.tokens, b.plan.tokens)


def test_a_store_of_a_store_has_the_same_checksums(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    convert(write("founding", tmp_path / "d", on_policy), tmp_path / "a", Verifier(tiny_verifier), say=quiet)
    convert(tmp_path / "a", tmp_path / "b", say=quiet)
    first, second = (open_source(tmp_path / name) for name in "ab")
    assert [r.parts for r in first.records] == [r.parts for r in second.records]
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_a_stopped_conversion_goes_on_to_the_same_bytes(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, verifier = write("speculators", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    convert(folder, tmp_path / "whole", verifier, say=quiet)

    class Stops(StoreWriter):
        def add(self, *args: Any, **kwargs: Any) -> None:
            if len(self.done_ids) + len(self._pending_ids) == after:
                raise Stopped
            super().add(*args, **kwargs)

    monkeypatch.setattr(module, "StoreWriter", Stops)
    with pytest.raises(Stopped):
        convert(folder, tmp_path / "store", verifier, say=quiet)
    monkeypatch.undo()
    report = convert(folder, tmp_path / "store", verifier, say=quiet)
    assert report["converted"] == len(on_policy) - after
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    again = convert(folder, tmp_path / "store", verifier, say=quiet)
    assert (again["converted"], again["samples"]) == (0, len(on_policy))


def test_a_sample_that_cannot_be_read_is_lost_alone_and_named(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    real = module.open_source

    def opened(*args: Any) -> Any:  # the file is cut after it was indexed
        source = real(*args)
        victim = folder / "data_6.pt"
        victim.write_bytes(victim.read_bytes()[:3000])
        return source

    monkeypatch.setattr(module, "open_source", opened)
    report = convert(folder, tmp_path / "store", verifier, say=quiet)
    assert [name for name, _ in report["skipped"]] == ["data_6.pt"]
    assert report["samples"] == len(on_policy) - 1
    source = open_source(tmp_path / "store")
    for i, name in enumerate(source.ids):
        assert torch.equal(source.states(i), expected("founding", on_policy[int(name[5:-3])]))


def test_what_cannot_be_converted_is_refused_in_one_line(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    with pytest.raises(EyasError, match="does not say whose states it holds"):
        convert(folder, tmp_path / "store", say=quiet)
    with pytest.raises(EyasError, match="is the source"):
        convert(folder, folder, verifier, say=quiet)
    assert not (tmp_path / "store").exists()
    convert(folder, tmp_path / "store", verifier, say=quiet)
    other = write("founding", tmp_path / "other", on_policy[:4])
    with pytest.raises(EyasError, match="holds states of another run"):
        convert(other, tmp_path / "store", verifier, say=quiet)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("", (), {"free": 1000})())
    with pytest.raises(EyasError, match=r"need 0\.3 MB, and 0\.0 MB are free"):
        convert(folder, tmp_path / "full", verifier, say=quiet)
    assert not (tmp_path / "full").exists()


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
def test_an_unreadable_first_sample_costs_itself_in_every_codec(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, codec: str
) -> None:
    verifier = Verifier(tiny_verifier)
    convert(write("founding", tmp_path / "d", on_policy), tmp_path / "store", verifier, say=quiet)
    first = StoreSource(tmp_path / "store").records[0]
    flip(tmp_path / "store" / first.shard, first.parts[1].offset + 7)
    said: list[str] = []
    report = convert(tmp_path / "store", tmp_path / "made", codec=codec, say=said.append)
    assert [name for name, _ in report["skipped"]] == [first.id]
    assert report["samples"] == len(on_policy) - 1
    assert any(line.startswith(f"left out {first.id}: ") for line in said)
    assert open_source(tmp_path / "made").ids == open_source(tmp_path / "store").ids[1:]


def test_what_the_source_leaves_out_is_named(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    folder = write("founding", tmp_path / "d", on_policy)
    (folder / "data_99.pt").touch()
    said: list[str] = []
    convert(folder, tmp_path / "store", Verifier(tiny_verifier), say=said.append)
    assert "left out data_99.pt: is empty" in said
