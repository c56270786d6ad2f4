"""Where training starts from.

`random`: N(0, 0.02) for projections, ones for norms.

`verifier`: the same, and then what the verifier knows already. Its head and final norm are the drafter's, which saves
learning to read its own output; `fc` passes the highest of the three states through, so that the layer starts on the
residual stream it knows; and the layer itself is a copy of the verifier's layer that reads that state, where the
shapes are the same (its attention looks at the state alone at first, the token comes in by noise of 0.02). What does
not fit (other sizes, experts, latent attention, norms on queries and keys) stays random; what was taken is returned.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.drafter.model import Drafter
from eyas.verifier import Verifier

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


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
    heads, head_dim = drafter.config.num_kv_heads, drafter.config.head_dim
    for name in ("self_attn.k_proj", "self_attn.v_proj"):
        # With more key/value heads than the verifier has, each of its heads is there several times: the same function.
        if name in theirs and len(theirs[name]) % head_dim == 0 and heads * head_dim % len(theirs[name]) == 0:
            each = theirs[name].view(-1, head_dim, theirs[name].shape[1])
            theirs[name] = each.repeat_interleave(heads // len(each), dim=0).flatten(0, 1)

    def fits(names: tuple[str, ...]) -> bool:
        return all(n in theirs and theirs[n].shape == wanted(ours.get_submodule(n)).shape for n in names)

    def wanted(module: nn.Module) -> Tensor:
        weight: Tensor = module.weight  # type: ignore[assignment]
        return (
            weight[:, H:] if module in (ours.self_attn.q_proj, ours.self_attn.k_proj, ours.self_attn.v_proj) else weight
        )

    sandwich = any(n.startswith(("pre_feedforward", "post_feedforward")) for n in theirs)
    if not sandwich and "self_attn.q_norm" not in theirs and "input_layernorm" in theirs and fits(ATTENTION):
        for name in ATTENTION:
            wanted(ours.get_submodule(name)).copy_(theirs[name])
        ours.hidden_norm.weight.copy_(theirs["input_layernorm"] + norm.adds_one)
        taken.append(f"attention of layer {high}")
    if not sandwich and "post_attention_layernorm" in theirs and fits(MLP):
        for name in MLP:
            wanted(ours.get_submodule(name)).copy_(theirs[name])
        ours.post_attention_layernorm.weight.copy_(theirs["post_attention_layernorm"] + norm.adds_one)
        taken.append(f"MLP of layer {high}")
    return taken
