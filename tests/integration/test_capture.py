"""What capture stores is what the verifier computes, and it says so when it is not."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.capture import local
from eyas.capture.common import capture_layers
from eyas.capture.local import capture
from eyas.errors import EyasError
from eyas.prepare import prepare, read_prepared
from eyas.store import layout
from eyas.store.agreement import norm_side
from eyas.store.reader import open_source
from eyas.verifier import Verifier


def quiet(_line: str) -> None:
    pass


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return Verifier(tiny_verifier)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, verifier: Verifier) -> Path:
    """30 short conversations of many lengths."""
    folder = tmp_path_factory.mktemp("prepared")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "sleeps"]
    lines = []
    for i in range(30):
        question, answer = " ".join(words[: 1 + i % 9]), " ".join(words[i % 5 :] * (1 + i % 3))
        messages = [{"role": "user", "content": f"{question} {i}?"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"c{i}", "messages": messages}))
    (folder / "c.jsonl").write_text("\n".join(lines))
    prepare(verifier, [folder / "c.jsonl"], folder / "prepared", max_seq_len=256, show=0, say=quiet)
    return folder / "prepared"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, verifier: Verifier, prepared: Path) -> Path:
    path = tmp_path_factory.mktemp("captured") / "store"
    summary = capture(verifier, prepared, path, batch_tokens=300, dtype="fp32", say=quiet)
    assert summary["samples"] == summary["captured_samples"] == 30
    assert summary["agreement"] > 0.98
    return path


def own_states(model: Any, ids: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(hidden_states of one sample run alone, its state before the final norm)."""
    kept: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _m, args: kept.append(args[0][0]))
    with torch.inference_mode():
        states = model(torch.from_numpy(ids).long()[None], output_hidden_states=True).hidden_states
    hook.remove()
    return [s[0] for s in states], kept[0]


def test_captured_states_are_the_verifiers_hidden_states(verifier: Verifier, prepared: Path, captured: Path) -> None:
    model, source, given = verifier.load_model(torch.float32), open_source(captured), read_prepared(prepared)
    assert sorted(source.ids) == sorted(given.ids)
    for i, name in enumerate(source.ids):
        ids, mask = source.tokens(i)
        j = given.ids.index(name)
        assert ids.tolist() == given.input_ids[j].tolist()
        assert mask.tolist() == given.loss_mask[j].tolist()
        states, last = own_states(model, ids)
        expected = torch.stack([states[2], states[4], states[5], last])
        torch.testing.assert_close(source.states(i).float(), expected, rtol=1e-2, atol=1e-3)


def test_the_manifest_says_what_the_states_are(verifier: Verifier, captured: Path) -> None:
    manifest = open_source(captured, verifier.config, verifier.fingerprint).manifest
    assert manifest.layers == (2, 4, 5, 8)
    assert (manifest.layer_unit, manifest.norm_side, manifest.dtype) == ("hf", "before", "bfloat16")
    assert manifest.fingerprint == verifier.fingerprint
    assert manifest.template_hash == verifier.template_hash
    assert "float32" in manifest.extractor


def test_the_stored_last_state_is_before_the_norm_by_the_heads_own_word(verifier: Verifier, captured: Path) -> None:
    source, model = open_source(captured), verifier.load_model(torch.float32)
    states = torch.cat([source.states(i)[-1] for i in range(10)])
    with torch.inference_mode():
        rows = [model(torch.from_numpy(source.tokens(i)[0]).long()[None]).logits[0] for i in range(10)]
    said = torch.cat(rows).argmax(dim=1)
    side, share = norm_side(states, said, verifier.lm_head(), verifier.final_norm())
    assert side == "before"
    assert share > 0.98


def test_other_layers_are_captured_when_asked(verifier: Verifier, prepared: Path, tmp_path: Path) -> None:
    capture(verifier, prepared, tmp_path / "s", layers=(1, 3, 7), dtype="fp32", say=quiet)
    source, model = open_source(tmp_path / "s"), verifier.load_model(torch.float32)
    assert source.manifest.layers == (1, 3, 7, 8)
    states, _ = own_states(model, source.tokens(0)[0])
    torch.testing.assert_close(
        source.states(0, layers=[1, 3, 7]).float(), torch.stack([states[k] for k in (1, 3, 7)]), rtol=1e-2, atol=1e-3
    )


class Stop(Exception):
    pass


def test_a_stopped_capture_goes_on_and_ends_with_the_same_states(
    verifier: Verifier, prepared: Path, captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = local._Run.states, []

    def stopping(self: Any, samples: list[Any]) -> list[torch.Tensor]:
        calls.append(len(samples))
        if len(calls) == 4:
            raise Stop
        return real(self, samples)

    monkeypatch.setattr(local._Run, "states", stopping)
    with pytest.raises(Stop):
        capture(verifier, prepared, tmp_path / "s", batch_tokens=300, dtype="fp32", say=quiet)
    there = set(open_source(tmp_path / "s").ids)
    assert len(there) == sum(calls[:3])
    said: list[str] = []
    summary = capture(verifier, prepared, tmp_path / "s", batch_tokens=300, dtype="fp32", say=said.append)
    assert summary["captured_samples"] == 30 - len(there)
    assert any(f"capture {len(there)}/30 samples" in line for line in said)
    source, whole = open_source(tmp_path / "s"), open_source(captured)
    assert sorted(source.ids) == sorted(whole.ids)
    for i, name in enumerate(source.ids):
        other = whole.states(whole.ids.index(name)).float()
        torch.testing.assert_close(source.states(i).float(), other, rtol=1e-2, atol=1e-3)
    assert capture(verifier, prepared, tmp_path / "s", dtype="fp32", say=quiet)["captured_samples"] == 0


def test_progress_says_samples_tokens_pace_and_time_left(verifier: Verifier, prepared: Path, tmp_path: Path) -> None:
    said: list[str] = []
    summary = capture(verifier, prepared, tmp_path / "s", dtype="fp32", say=said.append)
    tokens = f"{summary['tokens']:,}"
    assert any(line == f"capture 0/30 samples · 0/{tokens} tokens" for line in said)
    assert said[-2].startswith(f"capture 30/30 samples · {tokens}/{tokens} tokens · ")
    assert said[-2].endswith(" tokens/s · 0 s left")
    assert said[-1].endswith("the head agrees with the verifier on 100.0% of checked positions")
    assert layout.Manifest.load(tmp_path / "s").samples == 30


def refused(verifier: Verifier, prepared: Path, output: Path, message: str, **settings: Any) -> None:
    with pytest.raises(EyasError, match=message) as caught:
        capture(verifier, prepared, output, say=quiet, **{"dtype": "fp32", **settings})
    assert "\n" not in str(caught.value)


def test_a_store_of_other_settings_is_refused(verifier: Verifier, prepared: Path, captured: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in captured.iterdir()}
    refused(verifier, prepared, captured, r"layers \(2, 4, 5, 8\), not \(1, 2, 3, 8\)", layers=(1, 2, 3))
    assert {p.name: p.stat().st_mtime_ns for p in captured.iterdir()} == before


def test_layers_out_of_order_are_refused(verifier: Verifier, prepared: Path, tmp_path: Path) -> None:
    refused(verifier, prepared, tmp_path / "s", "name three different ones, ascending, from 1 to 7", layers=(4, 2, 5))
    refused(verifier, prepared, tmp_path / "s", "name three different ones", layers=(2, 4, 8))


def test_samples_prepared_for_another_verifier_are_refused(verifier: Verifier, prepared: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(prepared, tmp_path / "prepared")
    manifest = json.loads((folder / "prepare.json").read_text())
    manifest["verifier"] |= {"fingerprint": "beef", "name": "somebody else's"}
    (folder / "prepare.json").write_text(json.dumps(manifest))
    refused(verifier, folder, tmp_path / "s", "was prepared for somebody else's, not for")
    assert not (tmp_path / "s").exists()


def test_a_disk_too_small_is_told_before_anything_is_written(
    verifier: Verifier, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    refused(verifier, prepared, tmp_path / "s", r"need \d+\.\d MB, and 0\.1 MB are free there")
    assert not (tmp_path / "s").exists()


def test_an_unwritable_output_is_one_line(verifier: Verifier, prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(verifier, prepared, tmp_path / "file" / "s", "cannot be written")


def test_an_output_without_the_right_to_write_is_said_before_the_verifier_is_loaded(
    verifier: Verifier, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.capture.common.os.access", lambda _path, _mode: False)  # root may write everywhere
    monkeypatch.setattr(Verifier, "load_model", lambda *_: pytest.fail("it was loaded"))
    refused(verifier, prepared, tmp_path / "s", "cannot be written: Permission denied: .*; name another")


def test_a_store_in_the_folder_of_prepared_samples_is_refused(verifier: Verifier, prepared: Path) -> None:
    before = sorted(p.name for p in prepared.iterdir())
    refused(verifier, prepared, prepared, "holds prepared samples: name another folder for the store")
    assert sorted(p.name for p in prepared.iterdir()) == before


def test_a_device_that_is_not_there_is_one_line(verifier: Verifier, prepared: Path, tmp_path: Path) -> None:
    refused(verifier, prepared, tmp_path / "s", "--device xyz: ", device="xyz")
    if not torch.cuda.is_available():
        refused(verifier, prepared, tmp_path / "s", "--device cuda: ", device="cuda")
    assert not (tmp_path / "s").exists()


def test_a_verifier_of_three_layers_is_too_small(verifier: Verifier) -> None:
    small = Verifier(verifier.path)
    small.config = replace(small.config, num_layers=3)
    with pytest.raises(EyasError, match=r"has 3 layers: .* needs a verifier with 4 layers or more"):
        capture_layers(small, None)


def fine_tuned(verifier: Verifier, folder: Path) -> Verifier:
    """A copy under the same name with other weights in its MLPs: norm, head and embedding stay."""
    shutil.copytree(verifier.path, folder / verifier.path.name)
    file = folder / verifier.path.name / "model.safetensors"
    weights = load_file(file)
    save_file({n: t * 0.3 if "down_proj" in n else t for n, t in weights.items()}, file, metadata={"format": "pt"})
    return Verifier(folder / verifier.path.name)


def begun(captured: Path, folder: Path) -> Path:
    """The store with 10 of its 30 samples, as a kill leaves it."""
    shutil.copytree(captured, folder)
    journal = layout.journal_path(folder, "0")
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:10]))
    shard = folder / layout.shard_name("0", 0)
    shard.rename(f"{shard}{layout.OPEN_SUFFIX}")
    return folder


def test_a_fine_tune_does_not_go_on_with_the_store_of_its_base(
    verifier: Verifier, prepared: Path, captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, store = fine_tuned(verifier, tmp_path), begun(captured, tmp_path / "s")
    refused(tuned, prepared, store, "was prepared for another tiny, not for tiny at .* .other weights.")
    prepare(tuned, [prepared.parent / "c.jsonl"], tmp_path / "p", max_seq_len=256, show=0, say=quiet)
    refused(tuned, tmp_path / "p", store, f"another capture .fingerprint {verifier.fingerprint}, not ")
    with pytest.raises(EyasError, match=r"captured from tiny, not from tiny .fingerprint"):
        open_source(captured, tuned.config, tuned.fingerprint)
    # Where the fingerprint does not see it, the stored states do.
    monkeypatch.setitem(tuned.__dict__, "fingerprint", verifier.fingerprint)
    before = sorted((p.name, p.read_bytes()) for p in store.iterdir())
    refused(tuned, prepared, store, "holds states of another verifier: layer 2 of sample c")
    assert sorted((p.name, p.read_bytes()) for p in store.iterdir()) == before
    made = capture(verifier, prepared, store, dtype="fp32", say=quiet)
    assert (made["samples"], made["captured_samples"]) == (30, 20)


@pytest.mark.parametrize(("codec", "last"), [("fp8", "trained"), ("int8", "all")])
def test_a_store_of_eight_bits_is_gone_on_with(
    verifier: Verifier, prepared: Path, tmp_path: Path, codec: str, last: str
) -> None:
    settings: dict[str, Any] = {"dtype": "fp32", "codec": codec, "last": last, "say": quiet}
    capture(verifier, prepared, tmp_path / "whole", **settings)
    assert capture(verifier, prepared, begun(tmp_path / "whole", tmp_path / "s"), **settings)["captured_samples"] == 20


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("shard-0-00000.safetensors", None, "is damaged: shard-0-00000.safetensors is missing, though its journal"),
        ("shard-0-00000.safetensors", 1 << 20, "is damaged: shard-0-00000.safetensors is truncated at byte 1048576"),
        ("tokens-0.bin", 9, "is damaged: its tokens file is truncated"),
    ],
)
def test_a_damaged_store_is_not_called_complete(
    verifier: Verifier, prepared: Path, captured: Path, tmp_path: Path, name: str, size: int | None, message: str
) -> None:
    store = shutil.copytree(captured, tmp_path / "s")
    if size is None:
        (store / name).unlink()
    else:
        os.truncate(store / name, size)
    refused(verifier, prepared, store, message)
    refused(verifier, prepared, store, "restore the file, or delete the store and capture again")
    with pytest.raises(EyasError, match=r"no usable sample .30 left out.*delete it and capture again"):
        open_source(store)
    assert not local.goes_on(verifier, prepared, store)


def test_a_store_of_other_samples_is_said_to_be_one(
    verifier: Verifier, prepared: Path, captured: Path, tmp_path: Path
) -> None:
    prepare(verifier, [prepared.parent / "c.jsonl"], tmp_path / "p", max_seq_len=20, show=0, say=quiet)
    refused(verifier, tmp_path / "p", captured, "another capture .other prepared samples.: name another folder")


def damage(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let every captured sample [layers, T, Ht] go through `change` before it is checked and stored."""
    real = local._Run.states
    monkeypatch.setattr(local._Run, "states", lambda self, rows: [change(s.clone()) for s in real(self, rows)])


def nan_at_layer_4(s: torch.Tensor) -> torch.Tensor:
    s[1, 2, 5] = torch.nan
    return s


def zero_at_layer_5(s: torch.Tensor) -> torch.Tensor:
    s[2] = 0
    return s


def constant_at_layer_2(s: torch.Tensor) -> torch.Tensor:
    s[0] = s[0, :1].clone()
    return s


def twice_layer_4(s: torch.Tensor) -> torch.Tensor:
    s[2] = s[1]
    return s


def shifted_rows(s: torch.Tensor) -> torch.Tensor:
    return s.roll(1, dims=1)


def last_state_of_a_lower_layer(s: torch.Tensor) -> torch.Tensor:
    s[3] = s[2] + 0.01
    return s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan_at_layer_4, "sample c.* has NaN or infinite states at layer 4"),
        (zero_at_layer_5, "in sample c.*, layer 5 is all zero"),
        (constant_at_layer_2, "in sample c.*, layer 2 is the same at every position"),
        (twice_layer_4, "in sample c.*, layers 4 and 5 are equal"),
        (shifted_rows, "on sample c.* the head, fed with the captured last state .layer 8."),
        (last_state_of_a_lower_layer, "on sample c.* the head, fed with the captured last state"),
    ],
)
def test_wrong_states_stop_the_capture_and_leave_nothing(
    verifier: Verifier, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    damage(monkeypatch, change)
    refused(verifier, prepared, tmp_path / "s", message)
    assert not (tmp_path / "s").exists()


def test_a_normed_last_state_is_noticed(
    verifier: Verifier, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = verifier.final_norm()

    def after_the_norm(s: torch.Tensor) -> torch.Tensor:
        s[3] = norm(s[3])
        return s

    damage(monkeypatch, after_the_norm)
    refused(verifier, prepared, tmp_path / "s", "on sample c.* the head, fed with the captured last state")


def test_nan_in_a_later_batch_keeps_what_was_recorded(
    verifier: Verifier, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def late_nan(s: torch.Tensor) -> torch.Tensor:
        seen.append(s.shape[1])
        return nan_at_layer_4(s) if len(seen) > 20 else s

    damage(monkeypatch, late_nan)
    refused(verifier, prepared, tmp_path / "s", "NaN", batch_tokens=200)
    kept = open_source(tmp_path / "s")
    assert 10 <= len(kept.ids) <= 20
    assert kept.skipped == []
    assert all(torch.isfinite(kept.states(i)).all() for i in range(len(kept.ids)))
    assert len(layout.journals(tmp_path / "s")) == 1
