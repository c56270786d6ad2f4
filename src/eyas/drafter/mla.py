"""The drafter with DeepSeek's multi-head latent attention, as engines serve it for Kimi (Eagle3DeepseekV2ForCausalLM).

Queries and keys pass through narrow layers (`DeepSeek-V2`, section 2.1): of a = [token, state], both normed,

    query      q_b(norm(q_a a)), n heads of nope + rope numbers
    latent     c = norm((kv_a a)[:kv_lora]), from which kv_b makes n heads of nope numbers of key and of a value
    key        [nope numbers of its head; the rope numbers (kv_a a)[kv_lora:], which all heads share]

RoPE turns neighbouring numbers (2i, 2i + 1) of the rope part alone. Scores are scaled by 1 / sqrt(nope + rope). YaRN
is DeepSeek's own, as both engines have it (`yarn_scales`). Only the latent and the shared part are cached in serving;
training makes the heads.

The steps of training-time test are autograd's here, not written out as in `drafter.ttt`: the two narrow projections
hold a tenth of a llama's attention, so that little is to be had from sharing them between steps. Rows, blocks and
memory of the attention are `drafter.attention`'s: nothing of size [T, T] is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eyas.drafter.attention import Inputs, make_blocks
from eyas.drafter.conventions import yarn_m
from eyas.drafter.flash import attend, attend_backward
from eyas.drafter.parts import Linear, RMSNorm
from eyas.drafter.plan import Plan
from eyas.errors import EyasError

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter, DrafterConfig

# What both engines read of YaRN's settings in a drafter of this kind.
YARN = (
    *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)


@dataclass(frozen=True)
class MlaSizes:
    """Sizes of latent attention, by their names in config.json.

    Raises EyasError for values wider than keys: flash kernels take one width, to which values are padded, here and in
    engines.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        if self.v_head_dim > self.head_dim:
            raise EyasError(
                f"v_head_dim {self.v_head_dim} is wider than the keys' qk_nope_head_dim + qk_rope_head_dim ="
                f" {self.head_dim}, which attention kernels do not take: make it {self.head_dim} at most"
            )

    @property
    def head_dim(self) -> int:
        """Numbers of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class LatentAttention(nn.Module):
    """Projections of latent attention; the scores are in `drafter.attention`. scale: of the scores.

    Raises EyasError for a kind of RoPE that engines do not compute in it.
    """

    def __init__(self, c: DrafterConfig, sizes: MlaSizes) -> None:
        super().__init__()
        n, double = c.num_heads, 2 * c.hidden_size
        self.sizes, self.num_heads = sizes, n
        self.scale = sizes.head_dim**-0.5 * yarn_scales(c.rope_scaling)[0]
        self.q_a_proj = Linear(double, sizes.q_lora_rank)
        self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = Linear(sizes.q_lora_rank, n * sizes.head_dim)
        self.kv_a_proj_with_mqa = Linear(double, sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = Linear(sizes.kv_lora_rank, n * (sizes.qk_nope_head_dim + sizes.v_head_dim))
        self.o_proj = Linear(n * sizes.v_head_dim, c.hidden_size)

    def queries(self, mixed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention input [R, 2H] -> [R, n, nope + rope]. cos, sin: [R, 1, rope] as `Drafter.rotary` gives them."""
        s = self.sizes
        heads = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(mixed))).view(len(mixed), self.num_heads, s.head_dim)
        plain, turned = heads.split([s.qk_nope_head_dim, s.qk_rope_head_dim], dim=-1)
        return torch.cat([plain, rotate_pairs(turned, cos, sin)], dim=-1)

    def keys_and_values(self, mixed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input [R, 2H] -> keys [R, n, nope + rope] and values [R, n, v]."""
        s, n = self.sizes, self.num_heads
        latent, shared = self.kv_a_proj_with_mqa(mixed).split([s.kv_lora_rank, s.qk_rope_head_dim], dim=-1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).view(len(mixed), n, s.qk_nope_head_dim + s.v_head_dim)
        plain, value = heads.split([s.qk_nope_head_dim, s.v_head_dim], dim=-1)
        turned = rotate_pairs(shared[:, None], cos, sin).expand(-1, n, -1)
        return torch.cat([plain, turned], dim=-1), value

    def project(self, mixed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same rows, for decoding."""
        return self.queries(mixed, cos, sin), *self.keys_and_values(mixed, cos, sin)


def yarn_scales(scaling: dict[str, Any] | None) -> tuple[float, float]:
    """What multiplies the scores, and what cos and sin: m(mscale_all_dim)^2 and m(mscale) / m(mscale_all_dim).

    m(x) = 0.1 x ln(factor) + 1, where mscale is 1 and mscale_all_dim 0 unless they are named: DeepSeek's YaRN, to
    which vLLM and SGLang turn every scaling of such a drafter. (1, 1) without one. transformers' own YaRN has the
    second only where both are named. Raises EyasError for what engines do not compute, or cannot start with.
    """
    given = {k: v for k, v in (scaling or {}).items() if v is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return 1.0, 1.0
    instead = "in a drafter with MLA attention: use --attention llama"
    if kind != "yarn":
        raise EyasError(f"RoPE of the type {kind} is not computed by engines {instead}")
    for key, value in given.items():
        if key not in YARN and not (key == "truncate" and value):
            raise EyasError(f"{key} of YaRN is not computed by engines {instead}")
    for key in ("factor", "original_max_position_embeddings"):
        if key not in given:
            raise EyasError(f"YaRN without {key} is refused by engines {instead}")
    factor = float(given["factor"])
    turn, score = yarn_m(factor, given.get("mscale", 1)), yarn_m(factor, given.get("mscale_all_dim", 0))
    return score**2, turn / score


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring numbers. x: [R, heads, rope]; cos, sin: [R, 1, rope], two halves that agree."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    a, b = x.view(*x.shape[:-1], half, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def mla_steps(drafter: Drafter, plan: Plan, states: Tensor) -> Tensor:
    """Outputs of every TTT step before the final norm, [K, Q, H], as `ttt_steps` gives them. states: [T, 3 Ht]."""
    layer, attention, dtype = drafter.midlayer, drafter.midlayer.self_attn, states.dtype
    assert isinstance(attention, LatentAttention)
    length = max((d.key_stop - d.key_start for d in plan.documents), default=0)
    cos, sin = drafter.rotary(torch.arange(length + plan.steps, device=states.device), dtype)
    token = drafter.embed(plan.token, dtype)  # [E, H]
    blocks = make_blocks(plan.documents, plan.query_row, attention.num_heads)

    hidden = drafter.fc(states)  # [T, H]
    mixed = layer.mix(token[: len(plan.key_row)], hidden)  # [T, 2H]
    at = plan.key_position
    key, value = (_heads_first(x) for x in attention.keys_and_values(mixed, cos[at], sin[at]))
    hidden, mixed = hidden[plan.query_row], mixed[plan.query_row]
    own: list[Tensor] = []  # keys and values of the steps behind the first, by turns
    outputs = []
    for step in range(plan.steps):
        at = plan.key_position[plan.query_row] + step
        if step:
            mixed = layer.mix(token[plan.token_row[step]], hidden)
            own += [_heads_first(x) for x in attention.keys_and_values(mixed, cos[at], sin[at])]
        query = _heads_first(attention.queries(mixed, cos[at], sin[at])) * attention.scale
        out: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
            plan.query_row, blocks, query, key, value, *own
        )
        hidden = layer.finish(hidden, out.transpose(0, 1))
        outputs.append(hidden)
    return torch.stack(outputs)


def _heads_first(x: Tensor) -> Tensor:
    """[R, heads, d] -> [heads, R, d]."""
    return x.transpose(0, 1).contiguous()


class _Attend(torch.autograd.Function):
    """`attend` of one step for autograd; own: keys and values of later steps by turns."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, blocks: Any, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        x = Inputs(query, key, value, list(own[::2]), list(own[1::2]), rows, blocks)
        out, ctx.kept = attend(x, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(query, key, value, *own)
        ctx.rows, ctx.blocks = rows, blocks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *own = ctx.saved_tensors
        x = Inputs(query, key, value, own[::2], own[1::2], ctx.rows, ctx.blocks)
        d_key, d_value = torch.zeros_like(key).mT.contiguous(), torch.zeros_like(value).mT.contiguous()
        d_own = [torch.zeros_like(y) for y in own]
        d_query = attend_backward(x, ctx.kept, grads[0].contiguous(), d_key, d_value, d_own[::2], d_own[1::2])
        return None, None, d_query, d_key.mT, d_value.mT, *d_own
