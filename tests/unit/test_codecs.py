"""Eight bits: what is read back is close to what was put in, and a store in any codec is as safe as one in bf16."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import write
from safetensors import safe_open

from eyas.errors import EyasError
from eyas.store import codecs
from eyas.store.check import check
from eyas.store.convert import convert
from eyas.store.layout import Manifest
from eyas.store.reader import open_source
from eyas.store.writer import StoreWriter
from eyas.train.batches import Loader, load_batch
from eyas.verifier import Verifier

T, H = 40, 96
EVERY = list(product(codecs.CODECS, codecs.LAST_ROWS))


def quiet(_line: str) -> None:
    pass


@pytest.fixture
def states() -> torch.Tensor:
    """[4, T, H] like a transformer's: a few channels and the first token a hundred times larger than the rest."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(4, T, H, generator=rng)
    x[:, :, [5, 60]] *= 100
    x[:, 0] *= 100
    return x.to(torch.bfloat16)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The mean relative error of the channels, each measured by its own size."""
    size = b.float().square().mean(dim=0).sqrt()
    return float((((a.float() - b.float()) / size).square().mean(dim=0).sqrt()).median())


def test_int8_with_its_channels_keeps_small_channels_where_fp8_and_plain_int8_lose_them(states: torch.Tensor) -> None:
    channels = codecs.calibrate([states], 4, H)
    assert channels[0, 5] > 30 * channels[0].median()
    by = {
        "int8": codecs.decode(*codecs.encode(states[0, 1:], "int8", channels[0]), channels[0]),
        "plain": codecs.decode(*codecs.encode(states[0, 1:], "int8")),
        "fp8": codecs.decode(*codecs.encode(states[0, 1:], "fp8")),
    }
    error = {name: distance(x, states[0, 1:]) for name, x in by.items()}
    assert error["int8"] < 0.012
    assert error["int8"] < error["fp8"] / 2
    assert error["int8"] < error["plain"] / 10


def test_values_that_fit_come_back_exactly() -> None:
    x = torch.tensor([[127.0, -64, 0, 1], [0, 0, 0, 0], [-448, 224, 112, 0]]).to(torch.bfloat16)
    assert torch.equal(codecs.decode(*codecs.encode(x[:2], "int8")), x[:2])
    assert torch.equal(codecs.decode(*codecs.encode(x[1:], "fp8")), x[1:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(states: torch.Tensor, bad: float) -> None:
    states[2, 7, 3] = bad
    for codec in ("fp8", "int8"):
        with pytest.raises(EyasError, match="NaN or infinite"):
            codecs.encode(states[2], codec)
    assert torch.isfinite(codecs.calibrate([states], 4, H)).all()


@pytest.mark.parametrize(("codec", "last"), EVERY)
def test_a_store_gives_back_what_the_codec_makes(tmp_path: Path, states: torch.Tensor, codec: str, last: str) -> None:
    channels = codecs.calibrate([states], 4, H) if codec == "int8" else None
    said = codecs.said_channels(channels) if channels is not None else ""
    manifest = Manifest("v", "", H, 8, 99, (2, 4, 5, 8), "before", codec=codec, last_rows=last, channels=said)
    mask = torch.arange(T) % 3 > 0
    with StoreWriter(tmp_path, manifest) as writer:
        for n in (T, 17):
            writer.add(f"s{n}", np.arange(n), mask[:n].numpy(), states[:, :n])
    source = open_source(tmp_path)
    for i, n in enumerate((T, 17)):
        wanted = states[:, :n].clone()
        if codec != "bf16":
            each = [None] * 4 if channels is None else channels
            wanted = torch.stack(
                [codecs.decode(*codecs.encode(x, codec, c), c) for x, c in zip(wanted, each, strict=True)]
            )
        if last == "trained":
            wanted[3, ~mask[:n]] = torch.nan
        for start, stop in ((0, n), (3, 11), (0, 5), (n - 1, n)):
            for layers in ((2, 4, 5, 8), (8,), (4, 2)):
                got = source.states(i, start, stop, layers)
                assert torch.equal(got.isnan(), wanted[[manifest.layers.index(k) for k in layers], start:stop].isnan())
                rows = wanted[[manifest.layers.index(k) for k in layers], start:stop]
                assert torch.equal(got.nan_to_num(), rows.nan_to_num())
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="pt") as shard:  # any safetensors tool opens it
        kept = T if last == "all" else int(mask.sum())
        assert shard.get_slice("0.h8").get_shape() == [kept, H]
        if codec != "bf16":
            assert shard.get_tensor("0.s8").shape == (kept,)
            assert shard.get_tensor("0.h2").dtype == {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[codec]


@pytest.mark.parametrize(("codec", "last"), EVERY)
def test_training_batches_hold_the_same_rows(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, codec: str, last: str
) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    convert(folder, tmp_path / "s", verifier, codec=codec, last=last, say=quiet)
    plain, packed = open_source(folder), open_source(tmp_path / "s")
    packs = [[3, 0, 7], [11], [1, 2, 4, 5, 6]]
    for cut in (512, 19):
        for pack, batch in zip(packs, Loader(packed, packs, 3, cut, 2), strict=True):
            wanted = load_batch(plain, pack, 3, cut)
            assert batch.tokens == wanted.tokens
            assert batch.last.shape == wanted.last.shape
            near = 0 if codec == "bf16" else 0.06 if codec == "fp8" else 0.02
            for a, b in ((batch.states, wanted.states), (batch.last, wanted.last)):
                assert torch.isfinite(a).all()
                assert float((a.float() - b.float()).norm()) <= near * float(b.float().norm())


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_a_flip_in_rows_or_scales_is_caught(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, codec: str
) -> None:
    store = tmp_path / "s"
    convert(write("founding", tmp_path / "d", on_policy), store, Verifier(tiny_verifier), codec=codec, say=quiet)
    shard = next(store.glob("*.safetensors"))
    good, record = shard.read_bytes(), open_source(store).records[4]
    assert len(record.parts) == 8
    for part in record.parts:
        data = bytearray(good)
        data[part.offset + part.nbytes // 2] ^= 16
        shard.write_bytes(data)
        with pytest.raises(EyasError, match="does not match its checksum"):
            open_source(store).states(4)
        assert [f["sample"] for f in check(store, say=quiet)["findings"]] == [record.id]


def test_a_stopped_int8_conversion_goes_on_with_the_same_channels(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path
) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    convert(folder, tmp_path / "a", verifier, codec="int8", last="trained", say=quiet)
    one = open_source(tmp_path / "a")
    with StoreWriter(tmp_path / "b", one.manifest) as writer:
        for i in range(5):
            writer.add(one.ids[i], *open_source(folder).tokens(i), open_source(folder).states(i))
    report = convert(folder, tmp_path / "b", verifier, codec="int8", last="trained", say=quiet)
    assert report["converted"] == len(on_policy) - 5
    assert [[p.xxh3 for p in r.parts] for r in open_source(tmp_path / "b").records] == [
        [p.xxh3 for p in r.parts] for r in one.records
    ]


def test_the_cost_of_a_conversion_is_told_against_its_original(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path
) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    foreseen = {c["codec"]: c for c in check(folder, verifier, say=quiet)["codecs"]}
    for codec, last in (("int8", "all"), ("fp8", "trained")):
        store = tmp_path / codec
        convert(folder, store, verifier, codec=codec, last=last, say=quiet)
        report = check(store, verifier, against=folder, say=quiet)
        assert report["ok"]
        (cost,) = report["codecs"]
        assert cost["codec"] == codec
        assert cost["kl"] == pytest.approx(foreseen[codec]["kl"], rel=0.5)
        size = foreseen[codec]["bytes_per_token"]
        assert cost["bytes_per_token"] == pytest.approx(size) if last == "all" else cost["bytes_per_token"] < size


def test_what_cannot_be_is_refused(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    for options, reason in (({"codec": "int4"}, "--codec int4: use one of"), ({"last": "first"}, "--last first: use")):
        with pytest.raises(EyasError, match=reason):
            convert(folder, tmp_path / "x", verifier, say=quiet, **options)
    convert(folder, tmp_path / "a", verifier, codec="fp8", last="trained", say=quiet)
    with pytest.raises(EyasError, match="--last trained"):
        convert(tmp_path / "a", tmp_path / "b", codec="fp8", say=quiet)
    with pytest.raises(EyasError, match="is in fp8 already"):
        convert(tmp_path / "a", tmp_path / "b", codec="int8", last="trained", say=quiet)
    convert(tmp_path / "a", tmp_path / "b", codec="fp8", last="trained", say=quiet)
    ids = open_source(tmp_path / "a").ids
    assert open_source(tmp_path / "b").ids == ids
