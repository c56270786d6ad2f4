"""The verifier's config and tensors, in every shape in which they are published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import device
from eyas.device import compute_dtype, parse_dtype
from eyas.errors import EyasError
from eyas.verifier import Verifier

V, H = 300, 16
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": H,
    "num_hidden_layers": 9,
    "vocab_size": V,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}


def tensors(prefix: str = "model.", head: str | None = "lm_head.weight", seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    found = {
        f"{prefix}embed_tokens.weight": new(V, H),
        f"{prefix}norm.weight": new(H),
        f"{prefix}layers.0.input_layernorm.weight": new(H),
        f"{prefix}layers.0.self_attn.q_norm.weight": new(4),
        f"{prefix}layers.8.mlp.down_proj.weight": new(H, 32),
    }
    if head:
        found[head] = new(V, H)
    return found


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    where = {n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_file({n: weights[n] for n in names if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_found_under_any_prefix(tmp_path: Path, prefix: str, shards: int) -> None:
    weights = tensors(prefix)
    verifier = Verifier(write(tmp_path / "v", SIZES, weights, shards))
    assert torch.equal(verifier.embedding(), weights[f"{prefix}embed_tokens.weight"].float())
    assert torch.equal(verifier.lm_head(dtype=torch.bfloat16), weights["lm_head.weight"])
    assert torch.equal(verifier.final_norm().weight, weights[f"{prefix}norm.weight"].float())


def test_kimi_k25_shaped_checkpoint_is_read_by_name(tmp_path: Path) -> None:
    text = {**SIZES, "model_type": "kimi_k2", "num_hidden_layers": 61, "v_head_dim": 8, "rope_theta": 5e4}
    text |= {"rope_scaling": {"type": "yarn", "factor": 32.0}, "tie_word_embeddings": False}
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"hidden_size": 99}, "eos_token_id": 7}
    p = "language_model.model."
    weights = tensors(p, "language_model.lm_head.weight")
    for e in range(2):
        name = f"{p}layers.1.mlp.experts.{e}.down_proj.weight"
        weights[f"{name}_packed"] = torch.randint(-(2**31), 2**31 - 1, (H, 4), dtype=torch.int32)
        weights[f"{name}_scale"] = torch.ones(H, 1).bfloat16()
        weights[f"{name}_shape"] = torch.tensor([H, 32])
    weights["vision_tower.encoder.final_layernorm.weight"] = torch.ones(99)
    weights["mm_projector.pre_norm.weight"] = torch.ones(99)
    verifier = Verifier(write(tmp_path / "kimi", config, weights, shards=4))
    c = verifier.config
    assert c.capture_layers() == (2, 30, 58)
    assert (c.model_type, c.hidden_size, c.vocab_size, c.head_dim, c.eos_token_id) == ("kimi_k2", H, V, 8, 7)
    assert (c.rope_theta, c.rope_scaling) == (5e4, {"type": "yarn", "factor": 32.0})
    assert torch.equal(verifier.lm_head(), weights["language_model.lm_head.weight"].float())
    assert torch.equal(verifier.embedding(), weights[f"{p}embed_tokens.weight"].float())
    assert torch.equal(verifier.final_norm().weight, weights[f"{p}norm.weight"].float())
    assert len(verifier.fingerprint) == 32


def test_extra_embeddings_of_prediction_layers_are_not_taken(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.layers.61.embed_tokens.weight"] = torch.zeros(V, H)
    weights["model.layers.61.shared_head.norm.weight"] = torch.zeros(H)
    weights["a.embed_tokens.weight"] = torch.zeros(V, H)  # as far out, but no norm beside it
    verifier = Verifier(write(tmp_path / "v", SIZES, weights))
    assert torch.equal(verifier.embedding(), weights["model.embed_tokens.weight"].float())


def test_several_files_without_an_index(tmp_path: Path) -> None:
    weights = tensors()
    folder = write(tmp_path / "v", SIZES, weights, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert torch.equal(Verifier(folder).lm_head(), weights["lm_head.weight"].float())


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    weights = tensors(head=None)
    verifier = Verifier(write(tmp_path / "v", {**SIZES, "tie_word_embeddings": True}, weights))
    assert verifier.config.tie_word_embeddings
    assert torch.equal(verifier.lm_head(), weights["model.embed_tokens.weight"].float())


def test_missing_head_of_an_untied_model_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "v", {**SIZES, "tie_word_embeddings": False}, tensors(head=None))
    with pytest.raises(EyasError, match=r"no tensor named lm_head\.weight in .*model\.safetensors"):
        Verifier(folder).lm_head()


def test_rows_of_the_head_come_in_the_order_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.verifier.CHUNK_ROWS", 64)  # so that the rows lie in several pieces
    weights = tensors()
    verifier = Verifier(write(tmp_path / "v", SIZES, weights))
    rows = torch.tensor([299, 0, 63, 64, 64, 128])
    assert torch.equal(verifier.lm_head(rows), weights["lm_head.weight"].float()[rows])
    assert torch.equal(verifier.lm_head(), weights["lm_head.weight"].float())
    with pytest.raises(EyasError, match="300"):
        verifier.lm_head(torch.tensor([300]))


@pytest.mark.parametrize(
    ("model_type", "adds_one"),
    [
        ("gemma2", True),
        ("gemma3_text", True),
        ("qwen3_5", True),
        ("qwen3_next", True),
        ("gemma3n_text", False),
        ("qwen3", False),
    ],
)
def test_norm_multiplies_by_one_plus_w_where_the_family_does(tmp_path: Path, model_type: str, adds_one: bool) -> None:
    weights = tensors()
    norm = Verifier(write(tmp_path / "v", {**SIZES, "model_type": model_type}, weights)).final_norm()
    x = torch.randn(5, H, dtype=torch.float64)
    w = weights["model.norm.weight"].double() + adds_one
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
    torch.testing.assert_close(norm(x.float()).double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_head_of_normed_last_state_gives_the_models_own_logits(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{k: v for k, v in SIZES.items() if k not in ("model_type", "torch_dtype")})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.model.norm.weight.normal_()
    model.save_pretrained(tmp_path / "v")
    verifier = Verifier(tmp_path / "v")
    raw: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _m, args, _out: raw.append(args[0]))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = verifier.load_model(torch.float32)(ids).logits
        model(ids)
    torch.testing.assert_close(verifier.final_norm()(raw[0]) @ verifier.lm_head().T, logits, atol=1e-4, rtol=1e-4)


def test_fingerprint_is_that_of_the_weights_and_not_of_the_files(tmp_path: Path, tiny_verifier: Path) -> None:
    single = shutil.copytree(tiny_verifier, tmp_path / "single")
    sharded = shutil.copytree(tiny_verifier, tmp_path / "sharded")
    weights = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    write(sharded, json.loads((single / "config.json").read_text()), weights, shards=3)
    other = shutil.copytree(tiny_verifier, tmp_path / "other")
    weights["lm_head.weight"][5, 5] += 1
    save_file(weights, other / "model.safetensors")
    assert Verifier(single).fingerprint == Verifier(sharded).fingerprint
    assert Verifier(single).fingerprint != Verifier(other).fingerprint


def test_fingerprint_knows_the_final_norm_and_the_sizes(tmp_path: Path) -> None:
    weights = tensors()
    first = Verifier(write(tmp_path / "a", SIZES, weights)).fingerprint
    assert Verifier(write(tmp_path / "b", {**SIZES, "num_hidden_layers": 10}, weights)).fingerprint != first
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    assert Verifier(write(tmp_path / "c", SIZES, weights)).fingerprint != first


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, None),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 1e6, None),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "su", "long_factor": [1.0]}}, 1e6, "longrope"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [1],
                }
            },
            1e6,
            "yarn",
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1e6, "llama3"),
        ({"rope_parameters": {"rope_theta": 2e6, "rope_type": "default"}}, 2e6, None),
        ({"rope_parameters": {"rope_theta": 2e6, "rope_type": "yarn", "factor": 4.0}}, 2e6, "yarn"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                }
            },
            1e6,
            "linear",
        ),
    ],
)
def test_rope_of_transformers_4_and_5(tmp_path: Path, rope: dict[str, Any], theta: float, scaling: str | None) -> None:
    config = {k: v for k, v in SIZES.items() if k != "rope_theta"} | rope
    c = Verifier(write(tmp_path / "v", config, tensors())).config
    assert c.rope_theta == theta
    assert (c.rope_scaling or {}).get("rope_type") == scaling
    assert not {"rope_theta", "partial_rotary_factor", "mrope_section"} & set(c.rope_scaling or {})


def test_fields_left_out_of_a_config_are_the_familys(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 128}
    c = Verifier(write(tmp_path / "v", {"model_type": "gemma3", "text_config": text}, tensors())).config
    assert (c.vocab_size, c.head_dim, c.hidden_size, c.num_layers) == (262208, 256, 64, 6)
    assert c.tie_word_embeddings


@pytest.mark.parametrize("damage", ["no folder", "no config", "bad config", "only bin", "no weights", "no size"])
def test_a_folder_that_is_no_verifier_is_said_in_one_line(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path / "v", SIZES, tensors())
    match = {
        "no folder": "no verifier at",
        "no config": "no config.json",
        "bad config": r"config\.json cannot be read",
        "only bin": "no safetensors in .* only pytorch_model.bin",
        "no weights": "no safetensors in",
        "no size": "gives no vocab_size",
    }[damage]
    if damage == "no folder":
        shutil.rmtree(folder)
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "bad config":
        (folder / "config.json").write_text("{")
    elif damage == "no size":
        (folder / "config.json").write_text(json.dumps({"model_type": "x", "hidden_size": H, "num_hidden_layers": 9}))
    else:
        (folder / "model.safetensors").unlink()
        if damage == "only bin":
            (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(EyasError, match=match) as caught:
        Verifier(folder).embedding()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        ("missing shard", "is missing, though the index"),
        ("cut shard", "cannot be read"),
        ("wrong shape", r"shape \[300, 16\], but config.json says \[301, 16\]"),
        ("no norm", r"no tensor named model\.norm\.weight"),
        ("layer norm", "has a bias"),
        ("quantised", "is quantised"),
    ],
)
def test_weights_that_cannot_be_used_are_said_in_one_line(tmp_path: Path, damage: str, match: str) -> None:
    weights, config = tensors(), dict(SIZES)
    if damage == "wrong shape":
        config["vocab_size"] = 301
    elif damage == "no norm":
        del weights["model.norm.weight"]
    elif damage == "layer norm":
        weights["model.norm.bias"] = torch.zeros(H)
    elif damage == "quantised":
        weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)
    folder = write(tmp_path / "v", config, weights, shards=2)
    for shard in folder.glob("*.safetensors") if damage in ("missing shard", "cut shard") else ():
        if damage == "missing shard":
            shard.unlink()
        else:
            shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(EyasError, match=match) as caught:
        verifier = Verifier(folder)
        verifier.final_norm()
        verifier.lm_head()
    assert "\n" not in str(caught.value)


def test_hub_id_that_cannot_be_had_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(EyasError, match="no folder org/name here, and the hub did not give it") as caught:
        Verifier("org/name")
    assert "\n" not in str(caught.value)


def test_hub_model_fetches_only_the_shards_that_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tensors()
    remote = write(tmp_path / "remote", SIZES, weights, shards=len(weights))
    local = tmp_path / "cache" / "abc123"
    asked: list[str] = []

    def download(repo: str, *, allow_patterns: list[str], revision: str | None = None) -> str:
        assert repo == "org/name" and revision in (None, "abc123")
        asked.extend(p for p in allow_patterns if p.endswith(".safetensors"))
        for pattern in allow_patterns:
            for file in remote.glob(pattern):
                local.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, local)
        return str(local)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    verifier = Verifier("org/name")
    assert verifier.config.name == "org/name" and not asked
    assert torch.equal(verifier.lm_head(), weights["lm_head.weight"].float())
    assert len(asked) == 1 and asked[0] != "*.safetensors"


def test_tokenizer_and_template_of_a_folder(tiny_verifier: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    verifier = Verifier(tiny_verifier)
    assert verifier.chat_template == tiny_tokenizer.chat_template
    assert len(verifier.template_hash) == 16
    bare = shutil.copytree(tiny_verifier, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(EyasError, match="no chat template"):
        _ = Verifier(bare).chat_template
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(EyasError, match="no tokenizer in"):
        _ = Verifier(bare).tokenizer


def test_auto_dtype_is_bf16_where_the_hardware_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: True)
    assert compute_dtype("auto", "cpu") == torch.bfloat16
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: False)
    assert compute_dtype("auto", "cpu") == torch.float32
    assert compute_dtype("bf16", "cpu") == torch.bfloat16
    assert parse_dtype("torch.float16") == torch.float16
    with pytest.raises(EyasError, match="int3"):
        compute_dtype("int3")


@pytest.mark.parametrize("layer", [0, 4, 7])
@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.v_proj", "input_layernorm"])
def test_fingerprint_knows_a_fine_tune_of_the_layers(
    tmp_path: Path, tiny_verifier: Path, layer: int, part: str
) -> None:
    """Norm, head and embedding are the same, as after merging a LoRA."""
    other = shutil.copytree(tiny_verifier, tmp_path / "tiny")
    weights = load_file(other / "model.safetensors")
    weights[f"model.layers.{layer}.{part}.weight"] *= 0.3
    save_file(weights, other / "model.safetensors")
    assert Verifier(other).fingerprint != Verifier(tiny_verifier).fingerprint


def test_fingerprint_knows_the_embedding_of_an_untied_model(tmp_path: Path) -> None:
    weights = tensors()
    first = Verifier(write(tmp_path / "a", SIZES, weights)).fingerprint
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 2
    assert Verifier(write(tmp_path / "b", SIZES, weights)).fingerprint != first


def test_fingerprint_reads_quantised_layers_and_the_first_expert_alone(tmp_path: Path) -> None:
    weights = tensors()
    extra = {
        "self_attn.q_proj.weight": torch.ones(4, H).to(torch.float8_e4m3fn),
        "self_attn.q_proj.weight_scale": torch.tensor(0.5),
        "mlp.experts.0.up_proj.weight_packed": torch.ones(4, 2, dtype=torch.int32),
        "mlp.experts.17.up_proj.weight_packed": torch.ones(4, 2, dtype=torch.int32),
        "self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    weights |= {f"model.layers.4.{name}": t for name, t in extra.items()}
    first = Verifier(write(tmp_path / "a", SIZES, weights, shards=3)).fingerprint
    changed = {}
    for i, name in enumerate(extra):
        other = {**weights, f"model.layers.4.{name}": (extra[name].float() * 2).to(extra[name].dtype)}
        changed[name] = Verifier(write(tmp_path / f"{i}", SIZES, other)).fingerprint != first
    assert list(changed.values()) == [True, True, True, False, False], changed


def test_a_verifier_whose_layers_have_other_names_has_a_fingerprint(tmp_path: Path) -> None:
    weights = {name.replace(".layers.", ".h."): t for name, t in tensors().items()}
    assert len(Verifier(write(tmp_path / "v", SIZES, weights)).fingerprint) == 32


def test_a_layer_missing_from_its_file_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "v", SIZES, tensors(), shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.4.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EyasError, match=r"lacks model\.layers\.4\.mlp\.up_proj\.weight, which the index puts there"):
        _ = Verifier(folder).fingerprint


def test_weights_that_may_not_be_read_are_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier(write(tmp_path / "v", SIZES, tensors(), shards=2))

    def refuse(_path: Path, *_args: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    _ = verifier._files
    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(EyasError, match="may not be read by this user"):
        verifier.final_norm()


def test_an_empty_path_is_not_this_folder() -> None:
    with pytest.raises(EyasError, match="path is empty"):
        Verifier("")


def test_a_folder_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"no tokenizer in .*: fetch its tokenizer\.json"):
        _ = Verifier(write(tmp_path / "v", SIZES, tensors())).tokenizer
