"""`eyas store check` finds what has reached training unseen elsewhere, and names the sample; clean data is clean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import WRITERS, write

from eyas.errors import EyasError
from eyas.store.check import check, faults
from eyas.store.layout import QUARANTINE
from eyas.store.reader import open_source
from eyas.store.writer import StoreWriter
from eyas.verifier import Verifier

T, H = 30, 64
LAYERS = (2, 4, 5, 8)


def quiet(_line: str) -> None:
    pass


def by_sample(report: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for f in report["findings"]:
        found.setdefault(f["sample"], set()).add(f["test"])
    return found


@pytest.mark.parametrize("kind", list(WRITERS))
def test_clean_data_is_clean(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, kind: str) -> None:
    report = check(write(kind, tmp_path / "d", on_policy), Verifier(tiny_verifier), say=quiet)
    assert report["findings"] == []
    assert report["ok"]
    assert report["samples"] == len(on_policy)
    assert report["agreement"]["share"] > 0.9
    assert max(report["agreement"]["earlier"], report["agreement"]["later"]) < 0.5  # the tiny verifier repeats itself


def test_each_fault_of_one_sample_is_found() -> None:
    ids = np.arange(T, dtype=np.int32)
    good = torch.randn(4, T, H, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def found(change: Any, tokens: Any = ids) -> list[tuple[str, str]]:
        states = good.clone()
        change(states)
        return faults(list(states), tokens, LAYERS)

    def put(layer: int, rows: Any, value: Any) -> Any:
        return lambda states: states[layer].__setitem__(rows, value)

    assert found(lambda _: None) == []
    assert found(put(1, (7, 3), torch.nan)) == [("not finite", "layer 4 at 1 of 30 positions, the first at 7")]
    assert found(put(3, (2, 0), -torch.inf)) == [("not finite", "layer 8 at 1 of 30 positions, the first at 2")]
    assert found(put(0, slice(None), 0)) == [("zero", "layer 2 is all zero")]
    assert found(put(2, slice(9, 12), -0.0)) == [("zero", "layer 5 is zero at 3 positions, the first at 9")]
    assert found(put(3, slice(None), good[3, 0])) == [("constant", "layer 8 is the same at every position")]
    assert found(put(0, 5, good[0, 4])) == [("repeated", "layer 2: 1 rows equal the one before, the first at 5")]
    assert found(put(1, slice(None), good[0])) == [("equal", "layers 2 and 4 are the same")]
    # The same token twice may give the same row (a model without positions would).
    assert found(put(0, 5, good[0, 4]), np.where(np.arange(T) == 5, 4, ids)) == []


def test_faults_among_samples_are_found(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    samples = [
        {**s, "input_ids": s["input_ids"].clone(), "before": [h.clone() for h in s["before"]]} for s in on_policy
    ]
    model = Verifier(tiny_verifier).load_model(torch.float32)
    for s in samples:  # one conversation's beginning for all, as a chat template gives it
        s["input_ids"][0] = 1
        with torch.inference_mode():
            states = model(s["input_ids"][None], output_hidden_states=True).hidden_states
        s["before"][:3] = [states[k][0] for k in (2, 4, 5)]
    samples[4]["before"] = [h.roll(1, dims=0) for h in samples[4]["before"]]
    samples[7]["before"] = [h[:32].clone() for h in samples[8]["before"][:4]]  # of another sample's beginning
    samples[7] = {**samples[7], "input_ids": samples[7]["input_ids"], "loss_mask": samples[7]["loss_mask"]}
    samples[9]["before"] = [torch.zeros_like(h) if k == 3 else h for k, h in enumerate(samples[9]["before"])]
    samples[2] = {**samples[5], "input_ids": samples[5]["input_ids"].flip(0)}
    samples[11] = samples[10]
    report = check(write("founding", tmp_path / "d", samples), say=quiet)
    found = by_sample(report)
    assert found["data_4.pt"] == {"shifted"}
    assert found["data_9.pt"] == {"zero"}
    assert found["data_5.pt"] == {"duplicate"}  # the second of the two
    assert set(found) == {"data_4.pt", "data_9.pt", "data_5.pt"}
    assert report["same_tokens_twice"] == 1
    assert not report["ok"]


@pytest.mark.parametrize("by", [-1, 1])
def test_rows_that_are_all_shifted_are_told_by_the_head(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, by: int
) -> None:
    good = write("founding", tmp_path / "good", on_policy)
    source = open_source(good, Verifier(tiny_verifier).config)
    rolled = [{**s, "before": [h.roll(by, dims=0) for h in s["before"]]} for s in on_policy]
    # As a store would hold them: opening other tools' files refuses such states at once.
    with StoreWriter(tmp_path / "store", source.manifest) as writer:
        for i, s in enumerate(rolled):
            writer.add(f"s{i}", s["input_ids"], s["loss_mask"].bool(), torch.stack(s["before"]))
    report = check(tmp_path / "store", Verifier(tiny_verifier), say=quiet)
    assert {f["test"] for f in report["findings"]} == {"shifted"}
    assert len({f["sample"] for f in report["findings"]}) == len(on_policy)


def test_states_of_another_verifier_are_told(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    manifest = open_source(write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier).config).manifest
    with StoreWriter(tmp_path / "store", manifest) as writer:
        for i, s in enumerate(on_policy):
            states = torch.stack([h.roll(1, dims=1) for h in s["before"]])
            writer.add(f"s{i}", s["input_ids"], s["loss_mask"].bool(), states)
    report = check(tmp_path / "store", Verifier(tiny_verifier), say=quiet)
    assert [f["sample"] for f in report["findings"]] == ["*"]
    assert "states of another verifier, or damaged" in report["findings"][0]["detail"]


def test_a_sample_with_anothers_last_states_is_told_by_the_head(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path
) -> None:
    samples = [dict(s) for s in on_policy]
    other = samples[6]["before"][3][: len(samples[3]["input_ids"])]
    samples[3] = {**samples[3], "before": [*samples[3]["before"][:3], other.flip(0)]}
    report = check(write("founding", tmp_path / "d", samples), Verifier(tiny_verifier), say=quiet)
    assert by_sample(report)["data_3.pt"] >= {"agreement"}
    assert set(by_sample(report)) == {"data_3.pt"}


def test_a_flipped_bit_in_a_store_is_found_and_shut_out(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path
) -> None:
    from eyas.store.convert import convert

    store = tmp_path / "store"
    convert(write("founding", tmp_path / "d", on_policy), store, Verifier(tiny_verifier), say=quiet)
    shard = next(store.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    record = open_source(store).records[5]
    data[record.parts[2].offset + 77] ^= 2
    shard.write_bytes(data)
    report = check(store, quarantine=True, say=quiet)
    assert by_sample(report) == {record.id: {"unreadable"}}
    assert report["checksums"].startswith("xxh3")
    assert list(json.loads((store / QUARANTINE).read_text())) == [record.id]
    again = check(store, say=quiet)
    assert again["findings"] == []
    assert again["skipped"][0][0] == record.id
    assert "is in quarantine (unreadable" in again["skipped"][0][1]
    assert again["skipped"][0][1].endswith("(read twice): restore the file)"), "and no advice that has been taken"
    assert record.id not in open_source(store).ids


def test_quarantine_works_for_other_tools_files_and_a_damaged_list_is_one_line(
    tmp_path: Path, on_policy: list[Any]
) -> None:
    samples = [dict(s) for s in on_policy]
    samples[1] = {**samples[1], "before": [h * torch.nan for h in samples[1]["before"]]}
    folder = write("founding", tmp_path / "d", samples)
    assert by_sample(check(folder, quarantine=True, say=quiet)) == {"data_1.pt": {"not finite"}}
    assert "data_1.pt" not in open_source(folder).ids
    (folder / QUARANTINE).write_text("[1")
    with pytest.raises(EyasError, match=r"quarantine\.json cannot be read"):
        open_source(folder)


def test_codecs_are_compared_through_the_head(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    report = check(write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier), say=quiet)
    cost = {c["codec"]: c for c in report["codecs"]}
    assert list(cost) == ["bf16", "fp8", "int8", "bf16, logits:64", "bf16, logits:128"]
    assert cost["bf16, logits:64"]["kl"] > cost["bf16, logits:128"]["kl"] > 0
    assert cost["bf16, logits:64"]["error"] == 0
    assert (cost["bf16"]["kl"], cost["bf16"]["top1"], cost["bf16"]["error"]) == (0, 1, 0)
    assert cost["bf16"]["bytes_per_token"] == 4 * 64 * 2
    assert cost["int8"]["bytes_per_token"] == 4 * (64 + 4)
    assert 0 < cost["int8"]["error"] < cost["fp8"]["error"] < 0.05
    assert 0 < cost["int8"]["kl"] < cost["fp8"]["kl"]
