"""Tiny EAGLE-3 drafters in every trainer's form, and a tiny verifier: files on disk, made in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

H, INNER, V, VD, HEADS, KV, D, N = 64, 48, 120, 40, 4, 2, 16, 8
LAYERS = (2, 4, 5)  # of eight: the default
Config = dict[str, Any]
Tensors = dict[str, Tensor]
Change = Callable[[Config, Tensors], Any]


def make_verifier(folder: Path, **changes: Any) -> Path:
    """A verifier's folder: the config of a llama (or what `changes` makes of it), embedding, final norm and head."""
    g = torch.Generator().manual_seed(1)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "_name_or_path": "org/tiny", "hidden_size": H,
        "intermediate_size": 96, "num_hidden_layers": N, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": V, "rms_norm_eps": 1e-6, "rope_theta": 50_000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    } | changes  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    rows, width = config["vocab_size"], config["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": torch.randn(rows, width, generator=g),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": torch.randn(rows, width, generator=g),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def vocabulary(seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The verifier ids of a draft vocabulary, ascending."""
    return np.sort(np.random.default_rng(seed).permutation(V)[:VD])


def maps(targets: Any) -> Tensors:
    """d2t and t2d of verifier ids."""
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[torch.from_numpy(targets)] = True
    return {"d2t": torch.from_numpy(targets - np.arange(len(targets))), "t2d": t2d}


def trained(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Numbers as training leaves them: rows and columns of different sizes, which a fresh layer does not have."""
    w = torch.randn(shape, generator=g) * 0.02
    if len(shape) == 2:
        w *= torch.rand(shape[0], 1, generator=g) + 0.5
        w *= torch.rand(1, shape[1], generator=g) + 0.5
    return w


def eagle3(verifier: Path, d: int = D) -> tuple[Config, Tensors]:
    """config.json and tensors of the contract, for the verifier, with heads of size d; the head is near its head."""
    g = torch.Generator().manual_seed(2)
    shapes = {
        "fc": (H, 3 * H), "midlayer.self_attn.q_proj": (HEADS * d, 2 * H), "midlayer.self_attn.k_proj": (KV * d, 2 * H),
        "midlayer.self_attn.v_proj": (KV * d, 2 * H), "midlayer.self_attn.o_proj": (H, HEADS * d),
        "midlayer.mlp.gate_proj": (INNER, H), "midlayer.mlp.up_proj": (INNER, H), "midlayer.mlp.down_proj": (H, INNER),
    }  # fmt: skip
    tensors = {f"{name}.weight": trained(shape, g) for name, shape in shapes.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.rand(H, generator=g) + 0.5
    head = load_file(verifier / "model.safetensors")["lm_head.weight"]
    targets = vocabulary()
    tensors["lm_head.weight"] = head[torch.from_numpy(targets)] + 0.1 * torch.randn(VD, H, generator=g)
    return llama_config() | {"head_dim": d}, tensors | maps(targets)


def llama_config() -> Config:
    """The contract's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "hidden_size": H, "intermediate_size": INNER,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "vocab_size": V,
        "draft_vocab_size": VD, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 50_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}, "max_position_embeddings": 512,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "norm_before_residual": False,
        "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def mla(verifier: Path) -> tuple[Config, Tensors]:
    """A drafter with DeepSeek's attention, as TorchSpec makes them for Kimi: the whole vocabulary, no maps."""
    g = torch.Generator().manual_seed(3)
    q_lora, kv_lora, nope, rope, value = 24, 16, 8, 4, 8
    config, tensors = eagle3(verifier)
    tensors = {n: t for n, t in tensors.items() if "self_attn" not in n and n not in ("d2t", "t2d")}
    shapes = {
        "q_a_proj": (q_lora, 2 * H), "q_a_layernorm": (q_lora,), "q_b_proj": (HEADS * (nope + rope), q_lora),
        "kv_a_proj_with_mqa": (kv_lora + rope, 2 * H), "kv_a_layernorm": (kv_lora,),
        "kv_b_proj": (HEADS * (nope + value), kv_lora), "o_proj": (H, HEADS * value),
    }  # fmt: skip
    tensors |= {f"midlayer.self_attn.{n}.weight": trained(shape, g) for n, shape in shapes.items()}
    tensors["lm_head.weight"] = load_file(verifier / "model.safetensors")["lm_head.weight"] + 0.01
    config |= {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "draft_vocab_size": V,
        "q_lora_rank": q_lora, "kv_lora_rank": kv_lora, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }  # fmt: skip
    del config["head_dim"]
    return config, tensors


def speculators(verifier: Path, **flags: bool) -> tuple[Config, Tensors]:
    """The same drafter as speculators 0.9.0 writes it; flags over those of the contract."""
    config, tensors = eagle3(verifier)
    top = {"architectures", "draft_vocab_size", "norm_before_residual", "torch_dtype", "tie_word_embeddings"}
    off = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    nested = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "dtype": "float32",
        "draft_vocab_size": VD, **off, **flags, "target_hidden_size": None, "tie_word_embeddings": False,
        "embed_requires_grad": False, "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "transformer_layer_config": {k: v for k, v in config.items() if k not in top},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    tensors["embed_tokens.weight"] = load_file(verifier / "model.safetensors")["model.embed_tokens.weight"]
    return nested, {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}


def write(folder: Path, config: Config, tensors: Tensors, change: Change | None = None, pickle: bool = False) -> Path:
    """A drafter's folder of `config` and `tensors`, after `change` was made to them."""
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickle:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder
