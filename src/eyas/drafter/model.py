"""The EAGLE-3 drafter: one decoder layer that reads a token and the verifier's states, and says the next token.

The forward pass of the contract (docs/eagle3.md, from the EAGLE-3 paper and the engines that serve it):

    e = embed(x[p+1]);  h = fc(g[p]) at step 0, the drafter's own previous output after that
    a = [input_layernorm(e), hidden_norm(h)]
    r = h + o_proj(attention(q, k, v of a));  out = r + mlp(post_attention_layernorm(r))
    logits = lm_head(norm(out)) over the draft vocabulary;  the next step reads `out`, before the norm

Parameter names are the checkpoint's names. Masters are fp32; products run in the dtype of the states that come in,
with weights cast once a pass. The modules compute one step plainly, for decoding; `drafter.ttt` computes all steps of a
pack, `drafter.mla` where the attention is DeepSeek's. The embedding is the verifier's, frozen, and no parameter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eyas.drafter import flash
from eyas.drafter.mla import LatentAttention, MlaSizes, mla_steps, yarn_scales
from eyas.drafter.parts import Linear, RMSNorm
from eyas.drafter.plan import Plan
from eyas.drafter.ttt import Settings, Weights, norm_rows, ttt_steps
from eyas.errors import EyasError


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter. H hidden_size, Ht target_hidden_size, V vocab_size, Vd draft_vocab_size.

    mla: sizes of latent attention; then as many key as query heads, of the head size that these sizes make.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 4096
    mla: MlaSizes | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class Attention(nn.Module):
    """Projections of the drafter's attention; the scores are in `drafter.attention`."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.head_dim, self.scale = c.head_dim, c.head_dim**-0.5
        self.q_proj = Linear(2 * c.hidden_size, c.num_heads * c.head_dim)
        self.k_proj = Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim)
        self.v_proj = Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size)

    def project(self, mixed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, n, d], keys and values [R, m, d] of attention inputs [R, 2H]; cos, sin: [R, 1, d]."""
        query, key, value = (
            p(mixed).view(len(mixed), -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(query, cos, sin), rotate(key, cos, sin), value


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)
        self.dropout = 0.0  # while training

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        middle = F.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(F.dropout(middle, self.dropout, self.training))
        return out


class MidLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c) if c.mla is None else LatentAttention(c, c.mla)
        self.mlp = MLP(c)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.dropout = 0.0  # while training
        self.recompute = False  # make the MLP's numbers again in the backward pass in place of keeping them

    def mix(self, token: Tensor, hidden: Tensor) -> Tensor:
        """Embedding [T, H] and state [T, H] -> attention input [T, 2H], embedding first."""
        mixed = torch.cat([self.input_layernorm(token), self.hidden_norm(hidden)], dim=-1)
        return F.dropout(mixed, self.dropout, self.training)

    def finish(self, hidden: Tensor, attention: Tensor) -> Tensor:
        """State [Q, H] and attention output [Q, n, d] -> layer output [Q, H], before the final norm."""
        r = hidden + self.self_attn.o_proj(attention.flatten(1))
        x = self.post_attention_layernorm(r)
        again = self.recompute and torch.is_grad_enabled()
        out: Tensor = r + (checkpoint(self.mlp, x, use_reentrant=False) if again else self.mlp(x))
        return out


class Drafter(nn.Module):
    """The drafter. `embedding` [V, H] is the verifier's: a buffer that no checkpoint of ours needs to hold."""

    embedding: Tensor

    def __init__(self, config: DrafterConfig, embedding: Tensor | None = None) -> None:
        super().__init__()
        c = self.config = config
        self.fc = Linear(3 * c.target_hidden_size, c.hidden_size)
        self.midlayer = MidLayer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.draft_vocab_size)
        self.register_buffer("embedding", embedding, persistent=False)
        self._rotary: Any = None

    def for_inference(self, dtype: torch.dtype) -> Drafter:
        """The weights of all products in `dtype` for good, and no gradients: for decoding. Returns itself."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)
        return self.requires_grad_(False).eval()

    def embed(self, token: Tensor, dtype: torch.dtype) -> Tensor:
        """Token ids [..] -> [.., H]."""
        return F.embedding(token, self.embedding).to(dtype)

    def rotary(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RoPE cos and sin [T, 1, d] of positions [T]; d is of the part that turns, all but in latent attention."""
        if self._rotary is None:
            self._rotary = rotary_embedding(self.config)
        like = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32), device=position.device)
        cos, sin = self._rotary(like, position[None])
        return cos[0, :, None].to(dtype), sin[0, :, None].to(dtype)

    def forward(self, plan: Plan, states: Tensor) -> Tensor:
        """Outputs of every TTT step, before the final norm: [K, Q, H].

        plan: from `make_plan`, on the device; states: [T, 3 Ht], the verifier's low, middle and high state at the
        plan's key rows, in the compute dtype.
        """
        layer, dtype = self.midlayer, states.dtype
        if self.config.mla is not None:
            return mla_steps(self, plan, states)
        length = max((d.key_stop - d.key_start for d in plan.documents), default=0)
        cos, sin = self.rotary(torch.arange(length + plan.steps, device=states.device), dtype)
        half = self.config.head_dim // 2
        training = float(self.training)
        settings = Settings(
            self.config.num_kv_heads,
            self.config.head_dim,
            self.config.rms_norm_eps,
            layer.dropout * training,
            layer.mlp.dropout * training,
            layer.recompute,
        )
        return ttt_steps(
            plan, states, self.embed(plan.token, dtype), cos[:, 0, :half], sin[:, 0, :half], settings, self.weights()
        )

    def normed(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """What the head reads, [M, H]: rows of the outputs [K, Q, H] seen as [K Q, H], after the final norm."""
        return norm_rows(outputs.flatten(0, 1), rows, self.norm.weight, self.norm.eps)

    def weights(self) -> Weights:
        """The parameters that the steps of a llama's layer read."""
        layer, a, mlp = self.midlayer, self.midlayer.self_attn, self.midlayer.mlp
        assert isinstance(a, Attention)
        linears = (self.fc, a.q_proj, a.k_proj, a.v_proj, a.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm)
        return Weights(*(m.weight for m in (*linears, *norms)))


def attention_refusal(c: DrafterConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Why the steps of such a drafter run through plain blocks and not through a flash kernel; "" where they do."""
    if device.type != "cuda":
        return "no GPU"
    return flash.refusal(
        device, dtype, c.num_heads, c.num_kv_heads, c.head_dim, c.mla.v_head_dim if c.mla else c.head_dim
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of llama. x: [T, heads, d]; cos, sin: [T, 1, d]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def rotary_embedding(config: DrafterConfig) -> nn.Module:
    """transformers' own rotary embedding of a llama with these settings, so that every scaling it knows is right."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {k: v for k, v in (config.rope_scaling or {}).items() if v is not None}
    share = scaling.pop("partial_rotary_factor", 1.0)
    if share != 1:
        raise EyasError(
            f"the drafter's RoPE turns only a part of each head (partial_rotary_factor {share}): eyas has none such"
        )
    longest = config.max_position_embeddings
    kind = scaling.pop("type", None) or scaling.get("rope_type", "default")
    if kind == "yarn" and {"factor", "original_max_position_embeddings"} <= scaling.keys():
        # Engines go by the factor; transformers 4 goes by the ratio of these two.
        longest = int(scaling["factor"] * scaling["original_max_position_embeddings"])
    if config.mla is not None and kind == "yarn":
        scaling["attention_factor"] = yarn_scales(config.rope_scaling)[1]
    common = {
        "hidden_size": config.num_heads * config.head_dim,  # theirs must be a multiple of the heads; RoPE needs neither
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim if config.mla is None else config.mla.qk_rope_head_dim,
        "max_position_embeddings": longest,
    }
    try:  # transformers 5 keeps everything in rope_parameters
        llama = LlamaConfig(**common, rope_parameters={**scaling, "rope_type": kind, "rope_theta": config.rope_theta})
        assert llama.rope_parameters["rope_theta"] == config.rope_theta
    except (AttributeError, TypeError, KeyError):
        llama = LlamaConfig(
            **common,
            rope_theta=config.rope_theta,
            rope_scaling={**scaling, "rope_type": kind} if kind != "default" else None,
        )
    try:
        module: nn.Module = LlamaRotaryEmbedding(llama)
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise EyasError(f"RoPE cannot be made from {config.rope_scaling}: {error!r}") from None
    return module
