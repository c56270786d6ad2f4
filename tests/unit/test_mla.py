"""The drafter with latent attention: its function, its gradients, its names and shapes, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import make_verifier, mla, write
from safetensors.torch import load_file
from torch import Tensor

from eyas.check.run import check
from eyas.config import load_config
from eyas.drafter import attention as attention_module
from eyas.drafter.checkpoint import load_checkpoint, save_checkpoint
from eyas.drafter.conventions import parameters
from eyas.drafter.mla import LatentAttention, MlaSizes, rotate_pairs
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.drafter.plan import make_plan, trained_mask
from eyas.drafter.start import start_from_verifier, start_random
from eyas.errors import EyasError
from eyas.evaluate.decode import EagleDraft
from eyas.export import export
from eyas.importing import import_drafter
from eyas.plan.step import parameters as counted
from eyas.train.setup import drafter_config
from eyas.verifier import Verifier
from eyas.vocab import DraftVocab

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = MlaSizes(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7
}  # fmt: skip
CONFIG = DrafterConfig(32, 24, 40, 3, 3, SIZES.head_dim, 50, 20, mla=SIZES)
Documents = list[tuple[Any, Any]]


def make_drafter(config: DrafterConfig = CONFIG) -> Drafter:
    g = torch.Generator().manual_seed(0)
    drafter = Drafter(config, torch.randn(50, 32, generator=g))
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
    return drafter.double()


def make_documents(*masks: str) -> Documents:
    """Documents of random tokens; `#` is trained."""
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 50, len(m)).astype(np.int32), np.array([c == "#" for c in m])) for m in masks]


def reference(drafter: Drafter, ids: Any, states: Tensor, steps: int) -> list[Tensor]:
    """K tensors [T, H] of one document, in plain loops over positions and heads, from DeepSeek's formulas."""
    w, s, n = dict(drafter.named_parameters()), SIZES, CONFIG.num_heads
    T = len(ids)

    def weight(name: str) -> Tensor:
        return w[f"midlayer.{name}.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + CONFIG.rms_norm_eps) * weight(name)

    def turn(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for i in range(s.qk_rope_head_dim // 2):
            angle = position * CONFIG.rope_theta ** (-2 * i / s.qk_rope_head_dim)
            a, b = x[..., 2 * i], x[..., 2 * i + 1]
            out[..., 2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[..., 2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
        return out

    outputs, keys, values, queries = [], {}, {}, {}
    hidden = [w["fc.weight"] @ states[p] for p in range(T)]
    for k in range(steps):
        for p in range(T):
            e = drafter.embedding[int(ids[min(p + 1 + k, T - 1)])].to(states.dtype)
            a = torch.cat([norm(e, "input_layernorm"), norm(hidden[p], "hidden_norm")])
            q = weight("self_attn.q_b_proj") @ norm(weight("self_attn.q_a_proj") @ a, "self_attn.q_a_layernorm")
            q = q.view(n, s.head_dim)
            queries[k, p] = torch.cat([q[:, : s.qk_nope_head_dim], turn(q[:, s.qk_nope_head_dim :], p + k)], -1)
            narrow = weight("self_attn.kv_a_proj_with_mqa") @ a
            latent = norm(narrow[: s.kv_lora_rank], "self_attn.kv_a_layernorm")
            both = (weight("self_attn.kv_b_proj") @ latent).view(n, s.qk_nope_head_dim + s.v_head_dim)
            shared = turn(narrow[s.kv_lora_rank :], p + k).expand(n, -1)
            keys[k, p] = torch.cat([both[:, : s.qk_nope_head_dim], shared], -1)
            values[k, p] = both[:, s.qk_nope_head_dim :]
        out = []
        for p in range(T):
            seen = [(0, j) for j in range(p + 1)] + [(i, p) for i in range(1, k + 1)]
            heads = []
            for head in range(n):
                score = torch.stack([queries[k, p][head] @ keys[at][head] for at in seen]) / math.sqrt(s.head_dim)
                share = torch.softmax(score, 0)
                heads.append(sum(share[i] * values[at][head] for i, at in enumerate(seen)))
            r = hidden[p] + weight("self_attn.o_proj") @ torch.cat(heads)  # type: ignore[arg-type]
            x = norm(r, "post_attention_layernorm")
            gate, up = weight("mlp.gate_proj") @ x, weight("mlp.up_proj") @ x
            out.append(r + weight("mlp.down_proj") @ (gate * torch.sigmoid(gate) * up))
        hidden = out
        outputs.append(torch.stack(out))
    return outputs


@pytest.mark.parametrize("keep", [0, 1 << 23])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_packed_documents_equal_the_fp64_reference_forward_and_backward(
    steps: int, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "KEEP", keep)
    monkeypatch.setattr(attention_module, "BLOCK", 60)  # several blocks of queries a document
    drafter, documents = make_drafter(), make_documents("......###.....####", ".....######.")
    states = torch.randn(30, 3 * 24, generator=torch.Generator().manual_seed(1)).double()
    plan = make_plan(documents, steps)
    assert len(plan.query_row) < len(plan.key_row) and all(len(rows) for rows in plan.trained)
    ours = drafter(plan, states[plan.key_row])
    mix = torch.randn(32, generator=torch.Generator().manual_seed(2)).double()
    loss = sum((out[rows] @ mix).square().sum() for out, rows in zip(ours, plan.trained, strict=True))
    expected, first = torch.zeros((), dtype=torch.float64), 0
    for ids, mask in documents:
        outputs = reference(drafter, ids, states[first : first + len(ids)], steps)
        for k in range(steps):
            expected = expected + (outputs[k][torch.from_numpy(trained_mask(mask, k))] @ mix).square().sum()
        first += len(ids)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # the angles of RoPE are fp32
    weights = [p for name, p in drafter.named_parameters() if name not in ("norm.weight", "lm_head.weight")]
    for a, b in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


@pytest.mark.parametrize("scaling", [None, YARN])
def test_projections_scale_and_rope_are_those_of_transformers_deepseek_v3(scaling: dict[str, Any] | None) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    c = replace(CONFIG, rms_norm_eps=1e-6, rope_scaling=scaling)
    drafter, T = make_drafter(c), 11
    config = DeepseekV3Config(
        hidden_size=64, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=12, kv_lora_rank=10,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, max_position_embeddings=4096, attention_bias=False,
        rope_parameters={"rope_theta": 10_000.0, **(scaling or {"rope_type": "default"})},
        attn_implementation="eager",
    )  # fmt: skip
    theirs = DeepseekV3Attention(config, 0).double().eval()
    ours = drafter.midlayer.self_attn
    assert isinstance(ours, LatentAttention)
    for name, module in ours.named_children():
        if name != "o_proj":
            theirs.get_submodule(name).load_state_dict(module.state_dict())
    theirs.o_proj = torch.nn.Identity()  # theirs would write 2H numbers
    mixed = torch.randn(1, T, 64, generator=torch.Generator().manual_seed(3)).double()
    position = torch.arange(T)
    turn = DeepseekV3RotaryEmbedding(config)(mixed, position[None])
    mask = torch.full((T, T), -math.inf, dtype=torch.float64).triu(1)[None, None]
    expected, _ = theirs(mixed, position_embeddings=turn, attention_mask=mask)
    query, key, value = (x.transpose(0, 1) for x in ours.project(mixed[0], *drafter.rotary(position, torch.float64)))
    out = torch.softmax(query @ key.mT * ours.scale + mask[0], -1) @ value
    torch.testing.assert_close(out.transpose(0, 1).flatten(1), expected[0], rtol=1e-5, atol=1e-6)  # their cos is fp32


@pytest.mark.parametrize(
    ("given", "score", "turn"),
    [  # m(1) = 1 + 0.1 ln 8 = 1.2079442, m(0.7) = 1.1455609
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.2079442**2, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.7}, 1.1455609**2, 1.2079442 / 1.1455609),
        ({"mscale_all_dim": 0.7}, 1.1455609**2, 1.2079442 / 1.1455609),
        ({"mscale": 0.7}, 1.0, 1.1455609),
        ({}, 1.0, 1.2079442),
        ({"mscale": 0, "mscale_all_dim": 0}, 1.0, 1.0),
        ({"mscale": None, "mscale_all_dim": None, "truncate": True}, 1.0, 1.2079442),
        ({"factor": 1.0, "mscale_all_dim": 0.7}, 1.0, 1.0),
    ],
)
def test_yarn_scales_scores_and_turns_as_deepseek_defines_it(
    given: dict[str, Any], score: float, turn: float, tmp_path: Path
) -> None:
    """vLLM 0.32, deepseek_scaling_rope.py and deepseek_v2.py; SGLang's DeepseekScalingRotaryEmbedding says the same."""
    base = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    drafter = make_drafter(replace(CONFIG, rope_scaling=base | given))
    attention = drafter.midlayer.self_attn
    assert isinstance(attention, LatentAttention)
    assert attention.scale * math.sqrt(SIZES.head_dim) == pytest.approx(score, rel=1e-6)
    cos, sin = drafter.rotary(torch.arange(300), torch.float64)  # beyond the 64 positions before scaling
    assert cos[0].tolist() == [pytest.approx([turn] * 4, rel=1e-6)] and not sin[0].any()
    # Two frequencies, 1 and 0.01; the ramp lets the first be and divides the second by the factor.
    low, high = (4 * math.log(64 / (n * 2 * math.pi)) / (2 * math.log(10_000)) for n in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), 3)
    factor = (base | given)["factor"]
    for i, plain in enumerate((1.0, 0.01)):
        share = min(max((i - low) / (high - low), 0), 1)
        angle = 299 * (plain / factor * share + plain * (1 - share))
        assert cos[299, 0, i].item() == pytest.approx(turn * math.cos(angle), abs=1e-4), i
    # Nothing typed null is written, and what is written is read again as the same function.
    config = DrafterConfig(64, 64, 48, 4, 4, SIZES.head_dim, 120, 40, rope_scaling=base | given, mla=SIZES)
    verifier = Verifier(make_verifier(tmp_path / "v"))
    checkpoint(tmp_path / "c", config, verifier)
    told = json.loads((tmp_path / "c" / "config.json").read_text())
    assert None not in told["rope_scaling"].values() and None not in told["rope_parameters"].values()
    assert (
        told["rope_scaling"].items() <= told["rope_parameters"].items() and told["rope_scaling"]["rope_type"] == "yarn"
    )
    back = load_checkpoint(tmp_path / "c", verifier.config)[0]
    assert back.midlayer.self_attn.scale == attention.scale
    assert all(
        torch.equal(a, b) for a, b in zip(back.rotary(torch.arange(300), torch.float64), (cos, sin), strict=True)
    )


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, "RoPE of the type llama3 is not computed by engines"),
        (YARN | {"attention_factor": 1.0}, "attention_factor of YaRN is not computed by engines"),
        (YARN | {"truncate": False}, "truncate of YaRN is not computed by engines"),
        ({k: v for k, v in YARN.items() if not k.startswith("orig")}, "YaRN without original_max_position_embeddings"),
    ],
)
def test_rope_that_engines_do_not_compute_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(EyasError, match=f"{message}.*use --attention llama"):
        Drafter(replace(CONFIG, rope_scaling=scaling))


def test_rope_of_pairs_keeps_lengths_and_depends_on_distance_alone() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 4, generator=g).double(), torch.randn(1, 1, 4, generator=g).double()
    drafter = make_drafter()

    def at(x: Tensor, p: int) -> Tensor:
        return rotate_pairs(x, *drafter.rotary(torch.tensor([p]), torch.float64))

    assert float((at(q, 7) * at(k, 3)).sum()) == pytest.approx(float((at(q, 104) * at(k, 100)).sum()), rel=1e-5)
    assert float(at(q, 9).norm()) == pytest.approx(float(q.norm()))


def test_decoding_with_a_cache_computes_what_training_does() -> None:
    drafter, (ids, _) = make_drafter().eval(), make_documents("##############")[0]
    plan = make_plan([(ids, np.ones(14, dtype=bool))], 3)
    states = torch.randn(14, 72, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        trained = drafter(plan, states[plan.key_row])
        draft = EagleDraft(drafter, torch.arange(20), torch.float64)
        n = 9  # x[0..9] are known; the drafter reads pairs up to p = 8, in two pieces
        for start, stop in ((0, 5), (5, n)):
            piece = slice(start, stop)
            draft.read(
                torch.from_numpy(ids[start + 1 : stop + 1]).long()[None],
                states[None, piece],
                torch.arange(start, stop)[None],
                torch.ones(1, stop - start, dtype=torch.bool),
            )
        torch.testing.assert_close(draft.hidden[0], trained[0][n - 1], rtol=1e-9, atol=1e-9)


def checkpoint(folder: Path, config: DrafterConfig, verifier: Verifier) -> Drafter:
    g = torch.Generator().manual_seed(4)
    drafter = Drafter(config, torch.zeros(config.vocab_size, config.hidden_size))
    with torch.no_grad():
        for p in drafter.parameters():
            rows = 1 + torch.rand(len(p), generator=g)  # of different sizes, as training leaves them
            p.copy_(torch.einsum("r...,r->r...", torch.randn(p.shape, generator=g), rows))
    t2d = np.zeros(config.vocab_size, dtype=bool)
    t2d[np.linspace(0, config.vocab_size - 1, config.draft_vocab_size).astype(int)] = True
    targets = np.flatnonzero(t2d)
    save_checkpoint(folder, drafter, DraftVocab(targets - np.arange(len(targets)), t2d), verifier.config, (2, 4, 5))
    return drafter


def test_the_checkpoint_has_the_names_shapes_and_keys_that_engines_load(tmp_path: Path) -> None:
    verifier = Verifier(make_verifier(tmp_path / "v"))
    config = DrafterConfig(64, 64, 48, 4, 4, SIZES.head_dim, 120, 40, rms_norm_eps=1e-6, rope_theta=5e4, mla=SIZES)
    drafter = checkpoint(tmp_path / "c", config, verifier)
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    assert sorted(tensors) == sorted((*parameters("mla"), "d2t", "t2d"))
    # vLLM 0.32, models/deepseek_eagle3.py and deepseek_v2.py (DeepseekV2MLAAttention, input_size 2H)
    shapes = {
        "q_a_proj": (12, 128), "q_a_layernorm": (12,), "q_b_proj": (4 * 10, 12), "kv_a_proj_with_mqa": (14, 128),
        "kv_a_layernorm": (10,), "kv_b_proj": (4 * 11, 10), "o_proj": (64, 20),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert tuple(tensors[f"midlayer.self_attn.{name}.weight"].shape) == shape, name
    told = json.loads((tmp_path / "c" / "config.json").read_text())
    assert told["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and told["model_type"] == "deepseek_v2"
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    assert {k: told[k] for k in sizes} == sizes
    assert "head_dim" not in told and told["num_key_value_heads"] == 4 and told["num_hidden_layers"] == 1
    assert sum(p.numel() for p in drafter.parameters()) == sum(counted(config).values())
    assert check(tmp_path / "c", verifier_path=str(verifier.path), say=lambda _text: None) == 0
    back, vocab = load_checkpoint(tmp_path / "c", verifier.config)
    assert back.config == replace(config, max_position_embeddings=512) and vocab.size == 40
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), drafter.parameters(), strict=True))

    export(tmp_path / "c", tmp_path / "out", verifier_path=str(verifier.path), say=lambda _text: None)
    export(tmp_path / "c", tmp_path / "out", verifier_path=str(verifier.path), say=lambda _text: None)  # replaces it
    with pytest.raises(EyasError, match="no drafter with MLA attention: export it with --format eagle3"):
        export(tmp_path / "c", tmp_path / "s", form="speculators", verifier_path=str(verifier.path))


def test_another_trainers_mla_drafter_is_imported_bit_by_bit(tmp_path: Path) -> None:
    verifier = make_verifier(tmp_path / "v")
    config, tensors = mla(verifier)
    folder = write(tmp_path / "theirs", config, tensors)
    import_drafter(folder, str(verifier), tmp_path / "ours", say=lambda _text: None)
    about = Verifier(verifier)
    drafter, vocab = load_checkpoint(tmp_path / "ours", about.config, about.embedding())
    assert vocab.size == 120
    for name, p in drafter.named_parameters():
        assert torch.equal(p, tensors[name].float()), name
    folder = write(tmp_path / "odd", config | {"rope_interleave": False}, tensors)
    with pytest.raises(EyasError, match="rope_interleave false is another function"):
        import_drafter(folder, str(verifier), tmp_path / "no", say=lambda _text: None)
    folder = write(tmp_path / "wide", config | {"v_head_dim": 900}, tensors)
    with pytest.raises(EyasError, match=r"wide/config.json: v_head_dim 900 is wider than the keys'"):
        import_drafter(folder, str(verifier), tmp_path / "no", say=lambda _text: None)


def settings(**given: Any) -> Any:
    return load_config({"verifier_path": ".", "data_dir": ".", "output_dir": ".", "attention": "mla", **given})


def test_sizes_are_the_verifiers_or_named_and_what_contradicts_is_one_line(tmp_path: Path) -> None:
    own = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    deep = Verifier(make_verifier(tmp_path / "deep", model_type="kimi_k2", **own)).config
    assert drafter_config(settings(), deep, 40).mla == MlaSizes(**own)
    assert drafter_config(settings(q_lora_rank=768), deep, 40).mla == MlaSizes(**{**own, "q_lora_rank": 768})
    assert drafter_config(settings(), deep, 40).head_dim == 192
    assert drafter_config(settings(v_head_dim=192), deep, 40).mla == MlaSizes(**{**own, "v_head_dim": 192})
    plain = Verifier(make_verifier(tmp_path / "plain")).config
    for given, verifier, message in (
        ({"kv_lora_rank": 8}, plain, "no latent attention to take sizes from: set --q-lora-rank, --qk-nope-head-dim"),
        ({"head_dim": 8}, deep, "--head-dim says nothing of a drafter with --attention mla"),
        (
            {"attention": "llama", "v_head_dim": 8},
            plain,
            "--v-head-dim says nothing of a drafter with --attention llama",
        ),
        ({"qk_rope_head_dim": 3}, deep, "a head size of 3 is odd.*set --qk-rope-head-dim"),
        (
            {"v_head_dim": 193},
            deep,
            r"v_head_dim 193 is wider than the keys' qk_nope_head_dim \+ qk_rope_head_dim = 192, .*make it 192 at most",
        ),
    ):
        with pytest.raises(EyasError, match=message):
            drafter_config(settings(**given), verifier, 40)


def test_a_deepseek_verifiers_layer_is_where_training_starts(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = make_verifier(tmp_path / "v", hidden_size=32, vocab_size=50, num_attention_heads=3)
    drafter = Drafter(replace(CONFIG, target_hidden_size=32))
    start_random(drafter, 0)
    random = drafter.midlayer.self_attn.q_a_proj.weight.detach().clone()  # type: ignore[union-attr]
    layer = {"model.layers.5.input_layernorm.weight": torch.rand(32)}
    for name, module in drafter.midlayer.self_attn.named_children():
        rows, *columns = module.weight.shape  # type: ignore[misc]
        layer[f"model.layers.5.self_attn.{name}.weight"] = torch.randn(rows, *([32] if "_a_proj" in name else columns))
    save_file(load_file(folder / "model.safetensors") | layer, folder / "model.safetensors")
    taken = start_from_verifier(drafter, Verifier(folder), torch.arange(20), 5)
    assert taken == ["head", "norm", "fc", "attention of layer 5"]
    q_a = drafter.midlayer.self_attn.q_a_proj.weight  # type: ignore[union-attr]
    assert torch.equal(q_a[:, 32:], layer["model.layers.5.self_attn.q_a_proj.weight"])
    assert torch.equal(q_a[:, :32], random[:, :32])  # type: ignore[index]
    kv_b = drafter.midlayer.self_attn.kv_b_proj.weight  # type: ignore[union-attr]
    assert torch.equal(kv_b, layer["model.layers.5.self_attn.kv_b_proj.weight"])
