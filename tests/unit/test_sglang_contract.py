"""SGLang's contract without SGLang: its loader's rules written down again here, run over folders of every form.

The rules are the facts of the contract (docs/eagle3.md): which names find a parameter, what happens to the others, what
is left as it was made, and which states a list of layers means. They share nothing with eyas' own tables, so that the
two can disagree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import (
    HEADS,
    INNER,
    KV,
    LAYERS,
    VD,
    D,
    H,
    N,
    V,
    eagle3,
    make_verifier,
    mla,
    speculators,
    vocabulary,
    write,
)
from safetensors.torch import load_file
from torch import Tensor

from eyas.check.run import check
from eyas.drafter.checkpoint import load_checkpoint, save_checkpoint
from eyas.verifier import Verifier

pytestmark = pytest.mark.usefixtures("one_thread")
NEW, MIDDLE, OLD = RELEASES = "0.5.23", "0.5.14", "0.5.5 to 0.5.9"


class Slot:
    """A parameter, filled in pieces (q, k and v are one; gate and up too)."""

    def __init__(self, shape: tuple[int, ...], pieces: dict[str, slice] | None = None) -> None:
        self.value = torch.full(shape, torch.nan)
        self.pieces = pieces or {"": slice(None)}

    def fill(self, piece: str, weight: Tensor) -> None:
        target = self.value[self.pieces[piece]]
        assert target.shape == weight.shape
        self.value[self.pieces[piece]] = weight.float()


class LlamaDrafter:
    """SGLang's drafter with llama attention, as far as loading it goes."""

    def __init__(self, config: dict[str, Any], release: str) -> None:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        self.layer = "midlayer" if release == OLD else "layers.0"
        q, k = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
        h, inner = config["hidden_size"], config["intermediate_size"]
        self.map: Tensor | None = None
        layer = f"model.{self.layer}."
        self.slots = {
            "model.fc.weight": Slot((h, 3 * config.get("target_hidden_size", h))),
            f"{layer}self_attn.qkv_proj.weight": Slot(
                (q + 2 * k, 2 * h), {"q": slice(q), "k": slice(q, q + k), "v": slice(q + k, None)}
            ),
            f"{layer}self_attn.o_proj.weight": Slot((h, q)),
            f"{layer}mlp.gate_up_proj.weight": Slot((2 * inner, h), {"gate": slice(inner), "up": slice(inner, None)}),
            f"{layer}mlp.down_proj.weight": Slot((h, inner)),
            f"{layer}hidden_norm.weight": Slot((h,)),
            f"{layer}input_layernorm.weight": Slot((h,)),
            f"{layer}post_attention_layernorm.weight": Slot((h,)),
            "model.norm.weight": Slot((h,)),
            "model.embed_tokens.weight": Slot((config["vocab_size"], h)),
            "lm_head.weight": Slot((config["draft_vocab_size"], h)),
        }

    def load(self, weights: dict[str, Tensor]) -> list[str]:
        """Fill from a file's tensors; returns the names that were passed over without a word."""
        over = []
        for name, weight in weights.items():
            if "d2t" in name:
                self.map = weight + torch.arange(len(weight))
                continue
            short, piece = name, ""
            if self.layer == "layers.0":
                short = short.replace("midlayer", "layers.0")
            for part, joined in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
                if f".{part}_proj" in short:
                    short, piece = short.replace(f".{part}_proj", f".{joined}_proj"), part
                    break
            slot = self.slots.get(short) or self.slots.get(f"model.{short}")
            if slot is None:
                over.append(name)
            else:
                slot.fill(piece, weight)
        return over

    def unfilled(self) -> set[str]:
        """Parameters of which a number is still as it was made; the embedding is replaced by the verifier's anyway."""
        left = {n for n, s in self.slots.items() if s.value.isnan().any() and n != "model.embed_tokens.weight"}
        return {n.replace("layers.0", "midlayer") for n in left}


def states_read(config: dict[str, Any], family: str, n: int, release: str) -> list[int]:
    """HF indices of the states that SGLang hands over."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return [2, n // 2, n - 3]
    if release != OLD and family in ("deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite") and ids[0] != 1:
        return list(ids)
    if release == NEW and family == "gpt_oss" and max(ids) == n:
        return list(ids)
    return [k + 1 for k in ids]


def predicted(folder: Path, verifier: Path) -> dict[str, dict[str, Any]]:
    """What `eyas check` says of SGLang, by release."""
    lines: list[str] = []
    check(folder, verifier_path=str(verifier), engine="sglang", as_json=True, say=lines.append)
    return {e["versions"]: e for e in json.loads("\n".join(lines))["engines"]}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_verifier(tmp_path_factory.mktemp("v") / "verifier")


INNER_NAME = {
    "midlayer.self_attn.q_proj.weight": "model.midlayer.self_attn.qkv_proj.weight",
    "midlayer.self_attn.k_proj.weight": "model.midlayer.self_attn.qkv_proj.weight",
    "midlayer.self_attn.v_proj.weight": "model.midlayer.self_attn.qkv_proj.weight",
    "midlayer.mlp.gate_proj.weight": "model.midlayer.mlp.gate_up_proj.weight",
    "midlayer.mlp.up_proj.weight": "model.midlayer.mlp.gate_up_proj.weight",
}


def inner(name: str) -> str:
    """The parameter of SGLang that a tensor of the contract fills."""
    return INNER_NAME.get(name, name if name == "lm_head.weight" else f"model.{name}")


def renamed(old: str, new: str) -> Any:
    def change(_config: Any, tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith(old) and name not in ("d2t", "t2d"):
                tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def dropped(name: str) -> Any:
    return lambda _config, tensors: tensors.pop(name)


FORMS = {
    "eyas": lambda _c, _t: None,
    "SpecForge": lambda c, t: (c.pop("norm_before_residual"), t.update({"embed_tokens.weight": torch.ones(V, H)})),
    "the EAGLE reference": lambda c, _t: c.pop("rope_parameters"),
    "layers.0": renamed("midlayer.", "layers.0."),
    "model.": renamed("", "model."),
    "model.layers.0": renamed("midlayer.", "model.layers.0."),
    "a DDP wrapper": renamed("", "module."),
    "no head": dropped("lm_head.weight"),
    "no fc": dropped("fc.weight"),
    "no up_proj": dropped("midlayer.mlp.up_proj.weight"),
    "more than a drafter": lambda _c, t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("form", FORMS)
def test_check_says_what_sglangs_loader_does(verifier: Path, tmp_path: Path, form: str, release: str) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier), FORMS[form])
    loader = LlamaDrafter(json.loads((folder / "config.json").read_text()), release)
    over = loader.load(load_file(folder / "model.safetensors"))
    said = predicted(folder, verifier)[release]
    assert said["refuses"] is None
    assert {inner(n) for n in said["random"]} == loader.unfilled()
    # The embedding is loaded and then replaced, which comes to the same as passing it over.
    assert {n for n in said["ignores"] if "embed_tokens" not in n} == set(over)
    assert ("d2t" in said["loads"]) == (loader.map is not None)


@pytest.mark.parametrize("release", RELEASES)
def test_sglang_fills_every_parameter_from_what_eyas_writes(verifier: Path, tmp_path: Path, release: str) -> None:
    about = Verifier(verifier)
    drafter, vocab = load_checkpoint(write(tmp_path / "c", *eagle3(verifier)), about.config, about.embedding())
    save_checkpoint(tmp_path / "ours", drafter, vocab, about.config, LAYERS)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    loader = LlamaDrafter(config, release)
    assert loader.load(load_file(tmp_path / "ours" / "model.safetensors")) == ["t2d"]
    assert loader.unfilled() == set()
    assert loader.map is not None and np.array_equal(loader.map.numpy(), vocabulary())
    weight = loader.slots[f"model.{loader.layer}.self_attn.qkv_proj.weight"].value
    layer = drafter.midlayer.self_attn
    assert torch.equal(weight, torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))
    assert weight.shape == ((HEADS + 2 * KV) * D, 2 * H) and loader.slots["lm_head.weight"].value.shape == (VD, H)
    assert loader.slots[f"model.{loader.layer}.mlp.gate_up_proj.weight"].value.shape == (2 * INNER, H)
    assert states_read(config, "llama", N, release) == list(LAYERS)


@pytest.mark.parametrize("form", [n for n in FORMS if n not in ("no fc", "no up_proj", "more than a drafter")])
@pytest.mark.parametrize("release", RELEASES)
def test_sglang_fills_every_parameter_from_a_repaired_copy(
    verifier: Path, tmp_path: Path, form: str, release: str
) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier), FORMS[form])
    if any(x["random"] for x in predicted(folder, verifier).values()):
        check(folder, verifier_path=str(verifier), fix=tmp_path / "fixed", say=lambda _text: None)
        folder = tmp_path / "fixed"
    loader = LlamaDrafter(json.loads((folder / "config.json").read_text()), release)
    loader.load(load_file(folder / "model.safetensors"))
    assert loader.unfilled() == set()


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "kimi_k25", "glm4_moe_lite", "gpt_oss"])
@pytest.mark.parametrize("ids", [None, [0, 2, 5], [1, 3, 5], [2, 4, 8], [3, 4, 6]])
def test_check_names_the_states_that_sglang_hands_over(tmp_path: Path, family: str, ids: list[int] | None) -> None:
    verifier = make_verifier(tmp_path / "v", model_type=family)
    config, tensors = eagle3(verifier)
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    folder = write(tmp_path / "c", config, tensors)
    for release, said in predicted(folder, verifier).items():
        assert said["layers"] == states_read(config, family, N, release)


def test_sglang_takes_neither_speculators_form_nor_another_architecture(verifier: Path, tmp_path: Path) -> None:
    said = predicted(write(tmp_path / "s", *speculators(verifier)), verifier)
    assert all("speculators" in x["refuses"] for x in said.values())
    config, tensors = eagle3(verifier)
    folder = write(tmp_path / "c", {**config, "architectures": ["LlamaForCausalLM"]}, tensors)
    assert all("LlamaForCausalLM is no drafter" in x["refuses"] for x in predicted(folder, verifier).values())


MLA_JOINED = {"q_a_proj": "fused_qkv_a_proj_with_mqa", "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa"}


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.midlayer."])
def test_check_says_what_sglangs_loader_does_with_an_mla_drafter(verifier: Path, tmp_path: Path, prefix: str) -> None:
    """Its loader puts `model.` before every name but lm_head, takes both names of the layer, and joins the first two
    projections when it has seen both; anything else is passed over with a warning."""
    folder = write(tmp_path / "c", *mla(verifier), renamed("midlayer.", prefix))
    file = load_file(folder / "model.safetensors")
    joined = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", **MLA_JOINED}
    pieces: dict[str, set[str]] = {"lm_head.weight": {"lm_head"}}
    layer = ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_a_layernorm", "self_attn.q_b_proj"]
    layer += ["self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    for name in ("fc", "norm", *(f"midlayer.{n}" for n in layer)):
        stem, last = name.rpartition(".")[0], name.rpartition(".")[2]
        slot = f"model.{stem + '.' if stem else ''}{joined.get(last, last)}.weight"
        pieces.setdefault(slot, set()).add(last)
    over = []
    for name in file:
        inside = "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        inside = inside if inside.startswith("lm_head.") else f"model.{inside}"
        stem = inside.removesuffix(".weight")
        last = stem.rpartition(".")[2]
        slot = f"{stem.removesuffix(last)}{joined.get(last, last)}.weight"
        if last in pieces.get(slot, set()):
            pieces[slot].remove(last)
        else:
            over.append(name)
    said = predicted(folder, verifier)[NEW]
    assert set(said["ignores"]) == set(over)
    assert bool(said["random"]) == any(pieces.values()) == (prefix == "model.midlayer.")
    assert len(said["random"]) == sum(map(len, pieces.values()))
