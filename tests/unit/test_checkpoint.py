"""The checkpoint that engines load: names, shapes, dtypes and config of the contract, both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.drafter.checkpoint import config_json, load_checkpoint, save_checkpoint, sglang_layer_ids, write_folder
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.errors import EyasError
from eyas.verifier import VerifierConfig
from eyas.vocab import DraftVocab

H, HT, INNER, V, VD, HEADS, KV, D = 32, 24, 40, 50, 20, 4, 2, 8
SIZES = DrafterConfig(H, HT, INNER, HEADS, KV, D, V, VD, rms_norm_eps=1e-6, rope_theta=50_000.0)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LAYERS = (2, 4, 5)  # of eight: the default


def verifier(**changes: Any) -> VerifierConfig:
    sizes: dict[str, Any] = {
        "path": Path("v"), "name": "org/tiny", "model_type": "llama", "hidden_size": HT, "num_layers": 8,
        "vocab_size": V, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
        "rms_norm_eps": 1e-6, "rope_theta": 50_000.0, "rope_scaling": None, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": None,
        "torch_dtype": "bfloat16", "norm_adds_one": False,
    }  # fmt: skip
    return VerifierConfig(**{**sizes, **changes})


def make_drafter(config: DrafterConfig = SIZES, seed: int = 0) -> Drafter:
    g = torch.Generator().manual_seed(seed)
    drafter = Drafter(config, torch.randn(V, config.hidden_size, generator=g))
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    return drafter


def make_vocab(size: int = VD) -> DraftVocab:
    targets = np.sort(np.random.default_rng(0).permutation(V)[:size])
    t2d = np.zeros(V, bool)
    t2d[targets] = True
    return DraftVocab(targets - np.arange(size), t2d)


def save(folder: Path, config: DrafterConfig = SIZES, vocab: DraftVocab | None = None, **options: Any) -> Drafter:
    drafter = make_drafter(config)
    save_checkpoint(folder, drafter, vocab or make_vocab(config.draft_vocab_size), verifier(), LAYERS, **options)
    return drafter


def contract(embedding: bool = False, vocab: bool = True) -> dict[str, tuple[int, ...]]:
    """Section 4 of the contract."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * HT),
        "midlayer.self_attn.q_proj.weight": (HEADS * D, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV * D, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV * D, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * D),
        "midlayer.mlp.gate_proj.weight": (INNER, H),
        "midlayer.mlp.up_proj.weight": (INNER, H),
        "midlayer.mlp.down_proj.weight": (H, INNER),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (VD, H),
    }
    if vocab:
        shapes |= {"d2t": (VD,), "t2d": (V,)}
    if embedding:
        shapes["embed_tokens.weight"] = (V, H)
    return shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("embedding", [False, True])
def test_names_shapes_and_dtypes_are_the_contracts(tmp_path: Path, dtype: torch.dtype, embedding: bool) -> None:
    drafter = save(tmp_path / "c", dtype=dtype, with_embedding=embedding)
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == contract(embedding)
    for name, t in tensors.items():
        assert t.dtype == {"d2t": torch.int64, "t2d": torch.bool}.get(name, dtype), name
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["config.json", "model.safetensors"]
    for name, p in drafter.named_parameters():
        assert torch.equal(tensors[name], p.detach().to(dtype)), name


def test_d2t_is_offsets_and_t2d_marks_where_they_lead(tmp_path: Path) -> None:
    save(tmp_path / "c")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    targets = torch.arange(VD) + tensors["d2t"]
    assert targets.tolist() == make_vocab().targets.tolist()
    assert (targets.diff() > 0).all()
    assert torch.nonzero(tensors["t2d"])[:, 0].tolist() == targets.tolist()


def test_the_whole_vocabulary_has_no_d2t_and_t2d(tmp_path: Path) -> None:
    save(tmp_path / "c", replace(SIZES, draft_vocab_size=V), make_vocab(V))
    names = load_file(tmp_path / "c" / "model.safetensors")
    assert "d2t" not in names and "t2d" not in names
    assert names["lm_head.weight"].shape == (V, H)
    _, vocab = load_checkpoint(tmp_path / "c", verifier())
    assert vocab.size == V and vocab.targets.tolist() == list(range(V)) and vocab.t2d.all()


def test_config_is_the_contracts(tmp_path: Path) -> None:
    save(tmp_path / "c", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "target_hidden_size": HT,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "vocab_size": V,
        "draft_vocab_size": VD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 50_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
    }


def nulls(value: Any, where: str = "") -> list[str]:
    if isinstance(value, dict):
        return [n for k, v in value.items() for n in nulls(v, f"{where}.{k}")]
    return [where] if value is None else []


@pytest.mark.parametrize("scaling", [None, YARN, {"type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("ids", [None, 3])
def test_no_value_is_null_whatever_the_verifier_leaves_out(scaling: dict[str, Any] | None, ids: int | None) -> None:
    about = verifier(bos_token_id=ids, eos_token_id=ids, pad_token_id=ids)
    for layers in (LAYERS, (1, 3, 6)):
        assert nulls(config_json(replace(SIZES, rope_scaling=scaling), about, layers, "float32")) == []


def test_rope_is_said_for_both_generations_of_transformers() -> None:
    c = config_json(replace(SIZES, rope_scaling=YARN), verifier(), LAYERS, "float32")
    assert c["rope_scaling"] == YARN
    assert c["rope_parameters"] == {**YARN, "rope_theta": 50_000.0}
    old = config_json(replace(SIZES, rope_scaling={"type": "linear", "factor": 2.0}), verifier(), LAYERS, "float32")
    assert old["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_transformers_reads_the_config(tmp_path: Path) -> None:
    from transformers import AutoConfig

    save(tmp_path / "c", replace(SIZES, rope_scaling=YARN))
    config = AutoConfig.from_pretrained(tmp_path / "c")
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers) == (H, D, 1)
    assert config.rope_parameters["factor"] == 4.0 and config.rope_parameters["rope_theta"] == 50_000.0


# -- layer ids ---------------------------------------------------------------------------------------------------------


def test_default_layers_are_not_written() -> None:
    c = config_json(SIZES, verifier(), LAYERS, "float32")
    assert "eagle_config" not in c and "eagle_aux_hidden_state_layer_ids" not in c


def test_other_layers_are_written_in_each_engines_unit() -> None:
    c = config_json(SIZES, verifier(), (1, 3, 6), "float32")
    assert c["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert c["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 5]}


@pytest.mark.parametrize(
    ("family", "layers", "ids"),
    [
        ("llama", (2, 30, 58), [1, 29, 57]),
        ("qwen3", (1, 5, 9), [0, 4, 8]),
        ("deepseek_v2", (2, 30, 58), [1, 29, 57]),  # starts with 1: read as k - 1
        ("deepseek_v3", (3, 30, 58), [3, 30, 58]),  # does not: read as k
        ("kimi_k25", (2, 31, 58), [1, 30, 57]),
        ("glm4_moe_lite", (4, 20, 40), [4, 20, 40]),
        ("gpt_oss", (2, 18, 33), [1, 17, 32]),
    ],
)
def test_layer_ids_are_in_the_unit_of_sglangs_family(family: str, layers: tuple[int, ...], ids: list[int]) -> None:
    assert sglang_layer_ids(layers, family) == ids


def read_by_sglang(ids: list[int], family: str, num_layers: int) -> list[int]:
    """Section 3 of the contract: the HF indices that SGLang takes a list for."""
    if family in ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"):
        return [k + 1 for k in ids] if ids[0] == 1 else ids
    if family == "gpt_oss":
        return ids if max(ids) == num_layers else [k + 1 for k in ids]
    return [k + 1 for k in ids]


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "kimi_k25", "gpt_oss", "qwen3"])
def test_sglang_reads_back_the_layers_that_were_trained_or_the_export_is_refused(family: str) -> None:
    n = 9
    for layers in [(a, b, c) for a in range(1, n) for b in range(a + 1, n) for c in range(b + 1, n)]:
        try:
            ids = sglang_layer_ids(layers, family)
        except EyasError as e:
            assert layers[0] == 1 and "start with another than 1" in str(e)
            continue
        assert read_by_sglang(ids, family, n) == list(layers)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [None, YARN])
def test_what_is_saved_is_loaded(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    config = replace(SIZES, rope_scaling=scaling, max_position_embeddings=512)
    saved = save(tmp_path / "c", config)
    loaded, vocab = load_checkpoint(tmp_path / "c", verifier(), torch.ones(V, H))
    assert loaded.config == config
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    assert torch.equal(loaded.embedding, torch.ones(V, H))
    assert np.array_equal(vocab.d2t, make_vocab().d2t) and np.array_equal(vocab.t2d, make_vocab().t2d)


def test_an_own_embedding_goes_over_the_verifiers(tmp_path: Path) -> None:
    saved = save(tmp_path / "c", with_embedding=True)
    loaded, _ = load_checkpoint(tmp_path / "c", verifier(), torch.ones(V, H))
    assert torch.equal(loaded.embedding, saved.embedding)


def test_bfloat16_is_loaded_as_float32_masters(tmp_path: Path) -> None:
    saved = save(tmp_path / "c", dtype=torch.bfloat16)
    loaded, _ = load_checkpoint(tmp_path / "c", verifier())
    for a, b in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert b.dtype == torch.float32 and torch.equal(a.to(torch.bfloat16).float(), b)


def rewrite(folder: Path, tensors: Any = None, config: Any = None) -> None:
    """Change a checkpoint: `tensors` and `config` take and return what is in it."""
    if tensors:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config(json.loads((folder / "config.json").read_text()))))


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_other_namings_of_the_layer_are_read(tmp_path: Path, prefix: str) -> None:
    saved = save(tmp_path / "c")

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {n.replace("midlayer.", prefix): t for n, t in tensors.items()}
        return {("model." + n if n == "norm.weight" else n): t for n, t in named.items()}

    rewrite(tmp_path / "c", rename)
    loaded, _ = load_checkpoint(tmp_path / "c", verifier())
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))


def test_a_checkpoint_replaces_an_older_one_and_leaves_nothing_beside(tmp_path: Path) -> None:
    save(tmp_path / "c", with_embedding=True)
    save(tmp_path / "c", more={"eyas.json": {"step": 3}})
    assert "embed_tokens.weight" not in load_file(tmp_path / "c" / "model.safetensors")
    assert json.loads((tmp_path / "c" / "eyas.json").read_text()) == {"step": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def without(name: str) -> Any:
    return lambda d: {k: v for k, v in d.items() if k != name}


def changed(name: str, value: Any) -> Any:
    return lambda d: {**d, name: value(d[name]) if callable(value) else value}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (without("lm_head.weight"), None, r"tensor lm_head\.weight \[20, 32\] is missing"),
        (without("midlayer.mlp.up_proj.weight"), None, r"midlayer\.mlp\.up_proj\.weight \[40, 32\] is missing"),
        (changed("fc.weight", torch.zeros(H, 2 * HT)), None, r"fc\.weight is \[32, 48\], .* says \[32, 72\]"),
        (without("d2t"), None, "a draft vocabulary of 20 but no d2t"),
        (changed("d2t", lambda d: d + torch.arange(VD)), None, "is it absolute, not offsets"),
        (changed("d2t", lambda d: d[:-1].contiguous()), None, "does not name 20 increasing tokens"),
        (changed("t2d", lambda t: ~t), None, "d2t and t2d disagree"),
        (None, without("hidden_size"), "config.json does not say hidden_size"),
        (None, changed("norm_before_residual", True), "norm_before_residual true is another function"),
        (None, changed("vocab_size", 51), "drafter for a vocab_size of 51, org/tiny has 50"),
        (None, changed("target_hidden_size", 16), "reads states of size 16, org/tiny has 24"),
        (None, lambda _c: [1, 2], "config.json is no JSON object"),
    ],
)
def test_a_checkpoint_that_is_wrong_is_one_line(tmp_path: Path, tensors: Any, config: Any, message: str) -> None:
    save(tmp_path / "c")
    rewrite(tmp_path / "c", tensors, config)
    with pytest.raises(EyasError, match=message) as error:
        load_checkpoint(tmp_path / "c", verifier())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_or_torn_file_is_one_line(tmp_path: Path, name: str) -> None:
    save(tmp_path / "c")
    whole = (tmp_path / "c" / name).read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 3):
        (tmp_path / "c" / name).write_bytes(whole[:size])
        with pytest.raises(EyasError, match="cannot be read") as error:
            load_checkpoint(tmp_path / "c", verifier())
        assert "\n" not in str(error.value)
    (tmp_path / "c" / name).unlink()
    with pytest.raises(EyasError, match=f"is no drafter checkpoint: {name} is missing"):
        load_checkpoint(tmp_path / "c", verifier())


def test_a_failed_write_leaves_the_older_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c")
    before = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()}

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    rename = Path.rename

    def moves_aside_but_not_in(self: Path, target: Path) -> Path:
        if ".old" not in (self.suffix, target.suffix):
            full()
        return rename(self, target)

    for broken, how in (
        ("os.fsync", full),
        ("eyas.drafter.checkpoint.save_file", full),
        ("pathlib.Path.rename", full),
        ("pathlib.Path.rename", moves_aside_but_not_in),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(broken, how)
            with pytest.raises(EyasError, match=r"cannot write the checkpoint .*No space left") as error:
                save(tmp_path / "c", with_embedding=True)
            assert "\n" not in str(error.value)
        assert [p.name for p in tmp_path.iterdir()] == ["c"]
        assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} == before


def test_a_folder_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", {"fc.weight": torch.ones(1)}, {"config.json": {}})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_a_link_that_leads_back_to_itself_is_no_folder_for_a_drafter(tmp_path: Path) -> None:
    from eyas.evaluate.run import find_checkpoint

    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(EyasError, match="loop is neither a run directory"):
        find_checkpoint(loop)
    with pytest.raises(EyasError, match="loop"):
        write_folder(loop, {"fc.weight": torch.ones(1)}, {"config.json": {}})
    assert loop.is_symlink()
