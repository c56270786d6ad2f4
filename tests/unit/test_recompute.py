"""--recompute: the MLP's numbers made again in the backward pass are the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.drafter.mla import MlaSizes
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.drafter.plan import make_plan

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = DrafterConfig(32, 24, 40, 4, 2, 8, 50, 20)
MLA = replace(LLAMA, num_kv_heads=4, head_dim=10, mla=MlaSizes(12, 10, 6, 4, 5))
ADDED_BY_STEP = ("gate_proj", "up_proj", "down_proj", "post_attention_layernorm")


def gradients(c: DrafterConfig, steps: int, dropout: float, recompute: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs of all steps and the gradients by all weights, fp32."""
    g = torch.Generator().manual_seed(0)
    drafter = Drafter(c, torch.randn(50, 32, generator=g))
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3 + (p.ndim == 1))
    drafter.midlayer.dropout = drafter.midlayer.mlp.dropout = dropout
    drafter.midlayer.recompute = recompute
    mask = np.arange(30) >= 12
    plan = make_plan([(np.arange(30, dtype=np.int32), mask), (np.arange(9, dtype=np.int32), mask[12:21])], steps)
    states = torch.randn(39, 72, generator=g)[plan.key_row]
    torch.manual_seed(1)
    out = drafter(plan, states)
    (out * torch.randn(out.shape, generator=g)).sum().backward()
    return out.detach(), {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("c", [LLAMA, MLA], ids=["llama", "mla"])
def test_recomputed_gradients_are_the_same_to_the_bit_but_for_sums_over_steps(
    c: DrafterConfig, steps: int, dropout: float
) -> None:
    (out, kept), (out_again, again) = (gradients(c, steps, dropout, recompute) for recompute in (False, True))
    assert torch.equal(out, out_again) and kept.keys() == again.keys()
    for name, gradient in kept.items():
        if c.mla is None and steps > 1 and any(n in name for n in ADDED_BY_STEP):
            torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
        else:
            assert torch.equal(again[name], gradient), name


def test_nothing_of_the_mlp_is_kept_between_the_passes() -> None:
    def numbers(recompute: bool) -> int:
        c = replace(LLAMA, intermediate_size=4000)
        drafter = Drafter(c, torch.randn(50, 32))
        drafter.midlayer.recompute = recompute
        mask = np.arange(200) >= 10
        plan = make_plan([(np.arange(200, dtype=np.int32) % 50, mask)], 3)
        out = drafter(plan, torch.randn(len(plan.key_row), 72))
        found = [t for t in vars(out.grad_fn)["by_step"] if isinstance(t, Tensor)]  # type: ignore[arg-type]
        return sum(t.numel() for t in found)

    assert numbers(False) - numbers(True) == 3 * 191 * 3 * 4000  # steps, positions 7 to 197, and gate, up and both
