"""Where training starts from.

`random`: N(0, 0.02) for projections, ones for norms.

`verifier`: the same, and then what the verifier knows already. Its head and final norm are the drafter's, which saves
learning to read its own output; `fc` passes the highest of the three states through, so that the layer starts on the
residual stream it knows; and the layer itself is a copy of the verifier's layer that reads that state, where the
shapes are the same (its attention looks at the state alone at first, the token comes in by noise of 0.02): a llama's
attention by a llama's, latent attention by latent attention. What does not fit (other sizes, experts, norms on queries
and keys) stays random; what was taken is returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafter.conventions import ATTENTION as NAMES
from eyas.drafter.model import Drafter
from eyas.verifier import Verifier

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = {kind: tuple(f"self_attn.{n.removesuffix('.weight')}" for n in NAMES[kind]) for kind in ("llama", "mla")}
READ_BOTH = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")  # [token, state], of which theirs has half


@torch.no_grad()
def start_random(drafter: Drafter, seed: int) -> None:
    """Fresh weights from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    for p in drafter.parameters():
        if p.ndim > 1:
            p.normal_(0.0, 0.02, generator=generator)
        else:
            p.fill_(1.0)


@torch.no_grad()
def start_from_verifier(drafter: Drafter, verifier: Verifier, targets: Tensor, high: int) -> list[str]:
    """Put the verifier's own weights where they fit, over those of `start_random`; returns what was put.

    targets: [Vd] verifier ids of the draft vocabulary; high: HF index of the highest state that `fc` reads.
    """
    H = drafter.config.hidden_size
    if drafter.config.target_hidden_size != H:
        return []
    norm = verifier.final_norm()
    drafter.lm_head.weight.copy_(verifier.lm_head(targets))
    drafter.norm.weight.copy_(norm.weight + norm.adds_one)
    drafter.fc.weight[:, 2 * H :] += torch.eye(H)
    taken = ["head", "norm", "fc"]
    theirs, ours = verifier.decoder_layer(high), drafter.midlayer
    attention = ATTENTION["llama" if drafter.config.mla is None else "mla"]
    heads, head_dim = drafter.config.num_kv_heads, drafter.config.head_dim
    for name in ("self_attn.k_proj", "self_attn.v_proj"):
        # With more key/value heads than the verifier has, each of its heads is there several times: the same function.
        if name in theirs and len(theirs[name]) % head_dim == 0 and heads * head_dim % len(theirs[name]) == 0:
            each = theirs[name].view(-1, head_dim, theirs[name].shape[1])
            theirs[name] = each.repeat_interleave(heads // len(each), dim=0).flatten(0, 1)

    def fits(names: tuple[str, ...]) -> bool:
        return all(n in theirs and theirs[n].shape == wanted(n).shape for n in names)

    def wanted(name: str) -> Tensor:
        weight: Tensor = ours.get_submodule(name).weight  # type: ignore[assignment]
        return weight[:, H:] if name.endswith(READ_BOTH) else weight

    sandwich = any(n.startswith(("pre_feedforward", "post_feedforward")) for n in theirs)
    if not sandwich and "self_attn.q_norm" not in theirs and "input_layernorm" in theirs and fits(attention):
        for name in attention:
            wanted(name).copy_(theirs[name])
        ours.hidden_norm.weight.copy_(theirs["input_layernorm"] + norm.adds_one)
        taken.append(f"attention of layer {high}")
    if not sandwich and "post_attention_layernorm" in theirs and fits(MLP):
        for name in MLP:
            wanted(name).copy_(theirs[name])
        ours.post_attention_layernorm.weight.copy_(theirs["post_attention_layernorm"] + norm.adds_one)
        taken.append(f"MLP of layer {high}")
    return taken
