"""docs/kimi.md: every eyas command in it, on a tiny checkpoint with Kimi-K2.5's nesting and tensor names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from conftest import Eyas, Tiny
from eyas.verifier import Verifier

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {  # what the recipe says for the real model -> here
    "--size": "96", "--num-heads": "4", "--num-kv-heads": "2", "--head-dim": "16", "--intermediate-size": "128",
    "--max-seq-len": "128", "--batch-tokens": "512", "--epochs": "1",
}  # fmt: skip
ENGINE = ("--engine", "--engine-args", "--max-new-tokens")  # with a value; and --regenerate


def kimi_shaped(tiny: Path, folder: Path) -> Path:
    """The tiny llama under Kimi's names: sizes in text_config, weights under language_model, in two shards."""
    folder.mkdir()
    for path in tiny.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_bytes((tiny / "chat_template.jinja").read_bytes())
    text = json.loads((tiny / "config.json").read_text())
    text.update(model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    text.update(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"hidden_size": 99}, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"language_model.{name}": t for name, t in load_file(tiny / "model.safetensors").items()}
    names, index = sorted(weights), {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-0000{i}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / shard)
        index.update(dict.fromkeys(part, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def recipe() -> list[list[str]]:
    """The commands of docs/kimi.md that are eyas's, as words."""
    text = (Path(__file__).parents[2] / "docs" / "kimi.md").read_text()
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("    ")]
    return [words[words.index("eyas") + 1 :] for words in lines if "eyas" in words]


def test_every_command_of_the_recipe_runs(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    kimi = kimi_shaped(tiny.verifier, tmp_path / "kimi")
    assert Verifier(kimi).fingerprint == Verifier(tiny.verifier).fingerprint
    commands = recipe()
    assert [words[0] for words in commands] == [
        "prepare",
        "capture",
        "vocab",
        "train",
        "train",
        "train",
        "export",
        "export",
    ]
    for words in commands:
        # Only an engine can run the real one; here the same weights under llama's names stand in for it.
        verifier = tiny.verifier if words[0] == "capture" else kimi
        given: list[str] = []
        for before, word in zip(["", *words], words, strict=False):
            if word in ENGINE or before in ENGINE or word == "--regenerate":
                continue
            given.append(SMALL.get(before, word))
        given = [
            str(verifier) if word == "$V" else str(tiny.conversations) if word == "conversations.jsonl"
            else word.replace("work/", f"{tmp_path}/work/") for word in given
        ]  # fmt: skip
        result = eyas(*given)
        assert (result.code, result.err) == (0, []), given
    served = "\n".join(result.out)
    assert f"--model-path {kimi} --speculative-algorithm EAGLE3" in served
    config = json.loads((tmp_path / "work" / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 96
    assert "eagle_config" not in config, "the usual layers need no word"
    config = json.loads((tmp_path / "work" / "drafter-mla" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and config["kv_lora_rank"] == 16
