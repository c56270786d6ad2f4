"""SpecForge's, speculators' and DeepSpec's files are read in place like the founding story's, by one path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import foreign_files
import pytest
import torch
from foreign_files import WRITERS, expected, write

from eyas.errors import EyasError
from eyas.store.foreign import deepspec, source, specforge, speculators
from eyas.store.info import describe, info
from eyas.store.layout import Manifest
from eyas.store.reader import open_source
from eyas.store.writer import StoreWriter
from eyas.verifier import Verifier

KINDS = list(WRITERS)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_states_are_what_the_tool_saved(tmp_path: Path, on_policy: list[Any], kind: str) -> None:
    source = open_source(write(kind, tmp_path / "d", on_policy))
    assert source.skipped == []
    assert len(source.ids) == len(on_policy)
    for i, s in enumerate(on_policy):
        ids, mask = source.tokens(i)
        assert ids.tolist() == s["input_ids"].tolist()
        assert mask.tolist() == s["loss_mask"].bool().tolist()
        wanted, layers = expected(kind, s), source.manifest.layers
        assert torch.equal(source.states(i), wanted)
        assert torch.equal(source.states(i, 3, 9, layers=[layers[2], layers[0]]), wanted[[2, 0], 3:9])
        assert torch.equal(source.states(i, 24, 25, layers=layers[3:]), wanted[3:, 24:25])
        assert source.states(i, 4, 4).shape == (4, 0, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_verifier_tells_layers_and_side_of_the_norm(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, kind: str
) -> None:
    manifest = open_source(write(kind, tmp_path / "d", on_policy), Verifier(tiny_verifier).config).manifest
    assert manifest.layers == (2, 4, 5, 8)
    assert manifest.layer_unit == "hf"
    assert manifest.norm_side == ("after" if kind.startswith(("specforge", "deepspec")) else "before")
    assert manifest.extractor == kind.split("-")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_extents_name_the_very_bytes(tmp_path: Path, on_policy: list[Any], kind: str) -> None:
    source = open_source(write(kind, tmp_path / "d", on_policy))
    for i in (0, 7):
        extents = source.extents(i, 2, 11)
        if kind == "specforge-gz":
            assert extents is None
            continue
        for extent, layer, wanted in zip(extents, source.manifest.layers, source.states(i, 2, 11), strict=True):
            assert (extent.layer, extent.rows, extent.sample) == (layer, 9, source.ids[i])
            data = Path(extent.path).read_bytes()[extent.offset : extent.offset + extent.nbytes]
            row = torch.frombuffer(bytearray(data[4 * extent.stride :][: extent.row_bytes]), dtype=torch.uint8)
            values = row.view(getattr(torch, extent.dtype)).float()
            if extent.scales is not None:
                at = extent.scales.offset + 4 * extent.scales.stride
                values *= torch.frombuffer(bytearray(Path(extent.path).read_bytes()[at : at + 4]), dtype=torch.float32)
            assert torch.equal(values.to(torch.bfloat16), wanted[4])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_opened_to_plan_once_the_index_is_there(
    tmp_path: Path, on_policy: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(kind, tmp_path / "d", on_policy)
    first = open_source(folder)
    for module in source.FORMATS:
        monkeypatch.setattr(module, "look", lambda *_: pytest.fail("a file was opened"))
        monkeypatch.setattr(module, "jobs", lambda *_: pytest.fail("the index was built again"))
    again = open_source(folder)
    assert again.ids == first.ids
    assert again.lengths.tolist() == first.lengths.tolist()
    assert again.tokens(3)[0].tolist() == on_policy[3]["input_ids"].tolist()
    if kind != "specforge-gz":
        assert again.extents(3) == first.extents(3)


@pytest.mark.parametrize("kind", [k for k in KINDS if "deepspec" not in k])
def test_a_cut_file_is_left_out_by_name(tmp_path: Path, on_policy: list[Any], kind: str) -> None:
    folder = write(kind, tmp_path / "d", on_policy)
    victim = next(p for p in sorted(folder.rglob("*_3.*")))
    data = victim.read_bytes()
    victim.write_bytes(data[: len(data) // 8])
    source = open_source(folder)
    assert [name for name, _ in source.skipped] == [str(victim.relative_to(folder))]
    assert len(source.ids) == len(on_policy) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_after_the_index_was_built_is_one_line(tmp_path: Path, on_policy: list[Any], kind: str) -> None:
    folder = write(kind, tmp_path / "d", on_policy)
    source = open_source(folder)
    pattern = "shard-00000.bin" if "deepspec" in kind else "*_3.*"
    victim = next(p for p in sorted(folder.rglob(pattern)))
    i = 5 if "deepspec" in kind else next(i for i, name in enumerate(source.ids) if victim.name in name)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(EyasError, match=rf"{victim.name}(: sample .* cannot be read| ends before sample)") as caught:
        source.states(i)
    assert "\n" not in str(caught.value)


def test_specforge_records_of_other_methods_are_told(tmp_path: Path, on_policy: list[Any]) -> None:
    s = on_policy[0]
    small = {"input_ids": s["input_ids"], "loss_mask": s["loss_mask"]}
    torch.save({**small, "hidden_states": s["after"][0][None]}, tmp_path / "data_0.ckpt")
    torch.save({**small, "hidden_state": s["after"][0][None]}, tmp_path / "data_1.ckpt")
    wide = {"hidden_state": s["after"][0][None], "aux_hidden_state": torch.cat(s["after"], -1)[None]}
    torch.save({**small, **wide}, tmp_path / "data_2.ckpt")
    short = {"hidden_state": s["after"][0][None], "aux_hidden_state": torch.cat(s["after"][:3], -1)[None, :-1]}
    torch.save({**small, **short}, tmp_path / "data_3.ckpt")
    reasons = []
    for name in ("data_0", "data_1", "data_2", "data_3"):
        with pytest.raises(Exception) as caught:
            specforge.look(tmp_path / f"{name}.ckpt", tmp_path)
        reasons.append(str(caught.value))
    assert "has no tensor 'hidden_state'" in reasons[0]
    assert "has no tensor 'aux_hidden_state'" in reasons[1]
    assert "256 wide, not three times 64" in reasons[2]
    assert "for 25 tokens" in reasons[3]


def test_speculators_states_of_other_tokens_are_left_out(tmp_path: Path, on_policy: list[Any]) -> None:
    folder = write("speculators", tmp_path / "d", on_policy)
    states = folder / "hidden_states"
    (states / "hs_2.safetensors").replace(states / "hs_4.safetensors")
    (states / "hs_1.safetensors").replace(states / "hs_99.safetensors")
    source = open_source(folder)
    reasons = dict(source.skipped)
    assert "holds states of other tokens than row 4" in reasons["hidden_states/hs_4.safetensors"]
    assert "belongs to no row of the dataset, which has 12" in reasons["hidden_states/hs_99.safetensors"]
    assert len(source.ids) == len(on_policy) - 3


def test_a_damaged_arrow_dataset_is_one_line(tmp_path: Path, on_policy: list[Any]) -> None:
    folder = write("speculators", tmp_path / "d", on_policy)
    (folder / "data-00001-of-00002.arrow").write_bytes(b"hello")
    with pytest.raises(EyasError, match="arrow dataset cannot be read") as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)


def test_a_deepspec_cache_is_no_eyas_store_and_the_other_way_round(tmp_path: Path, on_policy: list[Any]) -> None:
    folder = write("deepspec", tmp_path / "d", on_policy)
    assert (folder / "manifest.json").exists()
    assert open_source(folder).manifest.extractor == "deepspec"
    assert deepspec.manifest(folder).layers == (2, 4, 5)
    assert speculators.files(folder) == []


@pytest.mark.parametrize(
    ("kind", "what", "dtype", "side"),
    [
        ("founding", "data_*.pt files", "bfloat16", "before or after the final norm, which its verifier's head will"),
        ("specforge", "SpecForge's data_*.ckpt[.gz]", "bfloat16", "after the final norm, as this tool writes it"),
        ("speculators-fp8", "a speculators data set", "float8_e4m3fn", "before the final norm, as this tool writes it"),
    ],
)
def test_info_says_what_the_files_are_and_all_that_they_take(
    tmp_path: Path, on_policy: list[Any], kind: str, what: str, dtype: str, side: str
) -> None:
    folder = write(kind, tmp_path / "d", on_policy)
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "dataset_info.json"]
    (folder / "runs").mkdir()
    (folder / "runs" / "log.txt").write_text("somebody's run, no data")
    told = info(folder)
    assert (told["kind"], told["files"], told["codec"]) == (kind.split("-")[0], len(files), None)
    assert told["disk_bytes"] == sum(p.stat().st_size for p in files) > 0
    text = describe(told)
    assert f"12 samples in {what}" in text
    assert f"four states of width 64 in {dtype}; the last one is {side}" in text
    assert f"on disk in {len(files):,} files" in text
    assert "unknown" not in text and "shards" not in text


@pytest.mark.parametrize(
    ("kinds", "held"),
    [
        (
            ("founding", "specforge"),
            r"data_\*.pt files \(12 files, data_11.pt\) and SpecForge's .* \(12 files, data_11",
        ),
        (("speculators", "founding"), r"a speculators data set .*hs_11.safetensors\) and data_\*.pt files"),
        (("deepspec", "founding"), r"a DeepSpec target cache .* and data_\*.pt files"),
    ],
)
def test_a_folder_of_two_formats_is_refused_with_both_named(
    tmp_path: Path, on_policy: list[Any], kinds: tuple[str, str], held: str
) -> None:
    for kind in kinds:
        write(kind, tmp_path / "d", on_policy)
    with pytest.raises(EyasError, match=f"d holds {held}.*: name a folder that holds one of them alone"):
        open_source(tmp_path / "d")


def test_what_lies_beside_a_store_is_said_and_not_read(tmp_path: Path, on_policy: list[Any]) -> None:
    folder, said = tmp_path / "d", list[str]()
    with StoreWriter(folder, Manifest("tiny", "f00d", 64, 8, 400, (2, 4, 5, 8), "before")) as writer:
        for i, s in enumerate(on_policy[:2]):
            states = torch.stack(s["before"]).to(torch.bfloat16)
            writer.add(f"s{i}", s["input_ids"].numpy(), s["loss_mask"].numpy().astype(bool), states)
    assert open_source(folder, say=said.append).ids == ["s0", "s1"] and said == []
    write("founding", folder, on_policy)
    assert open_source(folder, say=said.append).ids == ["s0", "s1"]
    assert said == [
        f"{folder} is read as the store that it is; data_*.pt files (12 files, data_11.pt) beside it are not read"
    ]


def test_deepspec_manifests_that_do_not_fit_are_refused(tmp_path: Path, on_policy: list[Any]) -> None:
    folder = write("deepspec", tmp_path / "d", on_policy)
    good = json.loads((folder / "manifest.json").read_text())
    for changes, reason in (
        ({"version": 1}, "is of version 1"),
        ({"hidden_dtype": "float16"}, "states of float16"),
        ({"target_layer_ids": [1, 2]}, "holds 2 auxiliary layers"),
        ({"shards": [{"shard_id": 0, "file_name": "../../etc/passwd"}]}, "outside its folder"),
        ({"shards": [{"shard_id": 0, "file_name": "gone.bin"}]}, "gone.bin is missing"),
        ({"hidden_size": None}, "cannot be read"),
    ):
        (folder / "manifest.json").write_text(json.dumps({**good, **changes}))
        with pytest.raises(EyasError, match=reason):
            open_source(folder)


def test_a_deepspec_shard_that_ends_early_loses_only_what_was_cut(tmp_path: Path, on_policy: list[Any]) -> None:
    folder = write("deepspec", tmp_path / "d", on_policy)
    shard = folder / "shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-10])
    source = open_source(folder)
    assert [name for name, _ in source.skipped] == ["sample-11"]
    assert "reaches past the end of shard-00001.bin" in source.skipped[0][1]
    assert torch.equal(source.states(10), expected("deepspec", on_policy[10]))


def test_speculators_own_library_writes_what_is_read_here(tmp_path: Path, on_policy: list[Any]) -> None:
    """The arrow part by the library that speculators uses, where it is installed."""
    datasets = pytest.importorskip("datasets")
    foreign_files.speculators(tmp_path, on_policy)
    for old in (*tmp_path.glob("*.arrow"), *tmp_path.glob("*.json")):
        old.unlink()
    rows = {
        "input_ids": [s["input_ids"].tolist() for s in on_policy],
        "loss_mask": [s["loss_mask"].tolist() for s in on_policy],
        "seq_len": [len(s["input_ids"]) for s in on_policy],
    }
    dataset = datasets.Dataset.from_dict(rows)
    dataset.set_format(type="torch")
    dataset.save_to_disk(tmp_path, num_shards=3)
    source = open_source(tmp_path)
    assert [source.tokens(i)[0].tolist() for i in range(len(on_policy))] == rows["input_ids"]
    assert torch.equal(source.states(4), expected("speculators", on_policy[4]))
