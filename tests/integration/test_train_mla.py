"""A drafter with latent attention through the commands: trained, killed, resumed, decoded, exported, taken up."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from ranks import play, settings, tensors, trace
from safetensors.torch import load_file

from conftest import Eyas, Tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "attention": "mla", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}  # fmt: skip


def test_trained_killed_resumed_decoded_exported_and_taken_up_again(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert play(settings(tiny, whole, **SIZES)).codes == [0]
    total = len(trace(whole))
    assert play(settings(tiny, cut, **SIZES, save_every=2), kill_at=3).codes == [-signal.SIGKILL]
    assert play({"output_dir": cut, "resume": True}).codes == [0]
    a, b = tensors(whole, total), tensors(cut, total)
    assert a.keys() == b.keys() and all((a[n] == b[n]).all() for n in a)
    losses = [v["loss"] for v in json.loads((whole / "summary.json").read_text())["validations"]]
    assert losses[-1] < losses[0]

    result = eyas("eval", whole, "--dtype", "fp32", "--max-new-tokens", 12)
    assert result.code == 0, result.err
    decoded = json.loads((whole / "eval.json").read_text())["decode"]
    assert decoded["lossless"] and decoded["identical"] == decoded["prompts"]
    result = eyas("export", whole, "--output-dir", tmp_path / "drafter")
    assert result.code == 0, result.err
    assert eyas("check", tmp_path / "drafter", "--verifier-path", tiny.verifier).code == 0
    assert "midlayer.self_attn.kv_b_proj.weight" in load_file(tmp_path / "drafter" / "model.safetensors")

    flags = ("train", "--verifier-path", tiny.verifier, "--data-dir", tiny.store, "--epochs", 1, "--init-from", whole)
    result = eyas(*flags, "--output-dir", tmp_path / "no")
    assert result.code == 2 and len(result.err) == 1
    assert result.err[0].endswith("has the attention of kind mla, and --init-from keeps it: say --attention mla")
    result = eyas(*flags, "--output-dir", tmp_path / "warm", "--attention", "mla", "--max-seq-len", 64)
    assert result.code == 0, result.err
