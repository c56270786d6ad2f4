"""Attention by flash kernels: the merge of its parts and gradients against dense attention, by torch's CPU kernel.

The GPU's kernel needs a GPU. What can be known without one is here: that the maths around the kernel is right, and that
torch takes the call (its own shape function, under fake tensors).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from eyas.drafter import flash
from eyas.drafter.attention import Inputs, dense_attention, make_blocks
from eyas.drafter.plan import Plan, make_plan

pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = {
    "answers at the end": [(40, [(15, 40)]), (17, [(9, 17)])],
    "turns, one document without a prompt": [(33, [(5, 12), (20, 33)]), (9, [(0, 9)]), (21, [(7, 8), (12, 21)])],
    "a document that trains nothing between two": [(12, [(4, 12)]), (10, []), (15, [(6, 15)])],
}  # fmt: skip


def plan_of(documents: list[tuple[int, list[tuple[int, int]]]], steps: int) -> Plan:
    pairs = []
    for length, answers in documents:
        mask = np.zeros(length, dtype=bool)
        for start, stop in answers:
            mask[start:stop] = True
        pairs.append((np.arange(length, dtype=np.int32), mask))
    return make_plan(pairs, steps)


def inputs(plan: Plan, own: int, heads: int, kv_heads: int, d: int, width: int, dtype: torch.dtype) -> Inputs:
    g = torch.Generator().manual_seed(4)
    T, Q = len(plan.key_row), len(plan.query_row)

    def make(n: int, rows: int, size: int) -> Tensor:
        return torch.randn(n, rows, size, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    keys, values = ([make(kv_heads, Q, size) for _ in range(own)] for size in (d, width))
    blocks = make_blocks(plan.documents, plan.query_row, heads)
    return Inputs(
        make(heads, Q, d), make(kv_heads, T, d), make(kv_heads, T, width), keys, values, plan.query_row, blocks
    )


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(("own", "sizes"), [(0, (6, 2, 8, 8)), (1, (4, 4, 12, 8)), (3, (6, 2, 8, 8))])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_parts_merged_by_their_log_sum_exp_are_dense_attention_forward_and_backward(
    masks: str, own: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, near: float
) -> None:
    plan = plan_of(MASKS[masks], own + 1)
    x = inputs(plan, own, *sizes, dtype)
    dense = dense_attention(x, plan.documents)
    grad = torch.randn(dense.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    wanted = [x.query, x.key, x.value, *x.own_keys, *x.own_values]
    expected = torch.autograd.grad(dense, wanted, grad)
    with torch.no_grad():
        out, kept = flash.attend_flash(x)
        torch.testing.assert_close(out, dense.detach(), rtol=near, atol=near)
        d_key, d_value = torch.zeros_like(x.key).mT.contiguous(), torch.zeros_like(x.value).mT.contiguous()
        d_keys, d_values = ([torch.zeros_like(y) for y in ys] for ys in (x.own_keys, x.own_values))
        d_query = flash.attend_flash_backward(x, kept, grad, d_key, d_value, d_keys, d_values)
    for a, b in zip([d_query, d_key.mT, d_value.mT, *d_keys, *d_values], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * near, atol=10 * near)


def test_a_pack_that_trains_nothing_asks_no_kernel() -> None:
    plan = plan_of([(10, [])], 2)
    x = inputs(plan, 1, 4, 2, 8, 8, torch.float32)
    with torch.no_grad():
        out, kept = flash.attend_flash(x)
        assert out.shape == (4, 0, 8)
        zeros = [torch.zeros(2, 8, 0), torch.zeros(2, 8, 0)]
        assert flash.attend_flash_backward(x, kept, out, *zeros, x.own_keys, x.own_values).shape == (4, 0, 8)


def test_the_kernel_is_compared_with_the_blocks_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    flash.refusal.cache_clear()
    assert flash.refusal(cpu, torch.bfloat16, 6, 2, 64, 64) == ""
    assert flash.refusal(cpu, torch.float32, 4, 4, 192, 128) == ""
    assert "up to 256 numbers" in flash.refusal(cpu, torch.bfloat16, 4, 4, 264, 264)
    assert "16-bit numbers, not float32" in flash.refusal(torch.device("cuda"), torch.float32, 4, 4, 64, 64)
    right = flash._forward
    monkeypatch.setattr(flash, "_forward", lambda q, k, v, part: right(q, k, v, part._replace(causal=False)))
    flash.refusal.cache_clear()
    assert "away from the plain blocks" in flash.refusal(cpu, torch.bfloat16, 6, 2, 64, 64)

    def missing(*_given: Any) -> Any:
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setattr(flash, "_forward", missing)
    flash.refusal.cache_clear()
    assert flash.refusal(cpu, torch.bfloat16, 6, 2, 64, 64) == "no kernel for this device"
    flash.refusal.cache_clear()


def test_torch_takes_the_call_of_its_gpu_kernel_and_answers_in_the_shapes_read_here() -> None:
    plan = plan_of(MASKS["turns, one document without a prompt"], 2)
    x = inputs(plan, 1, 4, 2, 16, 16, torch.bfloat16)
    [square, before] = flash._layout(x).parts
    assert square.causal and square.spans == [(0, 28), (28, 35), (35, 44)]  # positions 3-30, 0-6 and 10-18
    assert before.spans == [(0, 28), (35, 44)] and before.keys == [(0, 3), (38, 48)]
    with FakeTensorMode():
        for part in (square, before):
            s, t = (sum(b - a for a, b in ranges) for ranges in (part.spans, part.keys))
            q, k = (
                torch.empty(s, 4, 16, device="cuda", dtype=torch.bfloat16),
                torch.empty(t, 4, 16, device="cuda", dtype=torch.bfloat16),
            )
            out, lse = flash._forward(q, k, k, part)
            assert out.shape == q.shape and lse.shape == (4, s) and lse.dtype == torch.float32
            d_q, d_k, d_v = flash._backward(q, q, k, k, out, lse, part)
            assert d_q.shape == q.shape and d_k.shape == d_v.shape == k.shape
