"""The drafter's forward pass, gradients, alignment and causality, against an independent fp64 reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.config import parse_loss
from eyas.drafter import attention as attention_module
from eyas.drafter.attention import Inputs, attend, attend_backward, dense_attention, make_blocks
from eyas.drafter.loss import distribution, first_choice, greedy_choice, head_loss, row_loss, state_loss
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.drafter.plan import Plan, count_trained, make_plan, trained_mask

CONFIG = DrafterConfig(
    hidden_size=32,
    target_hidden_size=24,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=20,
    rope_theta=10_000.0,
)
Documents = list[tuple[np.ndarray, np.ndarray]]


def make_drafter(dtype: torch.dtype = torch.float64, seed: int = 0) -> Drafter:
    g = torch.Generator().manual_seed(seed)
    drafter = Drafter(CONFIG, torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g))
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
    return drafter.to(dtype)


def make_documents(lengths: list[int], seed: int = 0, share: float = 0.6) -> Documents:
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, CONFIG.vocab_size, T).astype(np.int32), rng.random(T) < share) for T in lengths]


def make_states(documents: Documents, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    N = sum(len(ids) for ids, _ in documents)
    Ht = CONFIG.target_hidden_size
    return torch.randn(N, 3 * Ht, generator=g, dtype=torch.float64), torch.randn(N, Ht, generator=g).double()


def reference_outputs(drafter: Drafter, ids: np.ndarray, states: Tensor, steps: int) -> list[Tensor]:
    """The contract's forward pass for one document in plain loops over positions and heads. K tensors [T, H]."""
    w = dict(drafter.named_parameters())
    c = CONFIG
    T = len(ids)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + c.rms_norm_eps) * weight

    def rope(x: Tensor, position: int) -> Tensor:
        out, half = x.clone(), c.head_dim // 2
        for i in range(half):
            angle = position * c.rope_theta ** (-2 * i / c.head_dim)
            a, b = x[:, i], x[:, i + half]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    outputs: list[Tensor] = []
    keys: dict[tuple[int, int], Tensor] = {}
    values: dict[tuple[int, int], Tensor] = {}
    queries: dict[tuple[int, int], Tensor] = {}
    hidden = [w["fc.weight"] @ states[p] for p in range(T)]
    for k in range(steps):
        for p in range(T):
            token = int(ids[min(p + 1 + k, T - 1)])
            e = drafter.embedding[token].to(states.dtype)
            a = torch.cat(
                [norm(e, w["midlayer.input_layernorm.weight"]), norm(hidden[p], w["midlayer.hidden_norm.weight"])]
            )
            shape = (-1, c.head_dim)
            queries[k, p] = rope((w["midlayer.self_attn.q_proj.weight"] @ a).view(shape), p + k)
            keys[k, p] = rope((w["midlayer.self_attn.k_proj.weight"] @ a).view(shape), p + k)
            values[k, p] = (w["midlayer.self_attn.v_proj.weight"] @ a).view(shape)
        out = []
        for p in range(T):
            seen = [(0, j) for j in range(p + 1)] + [(i, p) for i in range(1, k + 1)]
            heads = []
            for head in range(c.num_heads):
                group = head // (c.num_heads // c.num_kv_heads)
                score = torch.stack([queries[k, p][head] @ keys[s][group] for s in seen]) / math.sqrt(c.head_dim)
                weight = torch.softmax(score, 0)
                heads.append(sum(weight[i] * values[s][group] for i, s in enumerate(seen)))
            r = hidden[p] + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
            x = norm(r, w["midlayer.post_attention_layernorm.weight"])
            gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
            out.append(r + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        hidden = out
        outputs.append(torch.stack(out))
    return outputs


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_forward_and_gradients_equal_the_fp64_reference(steps: int) -> None:
    drafter, documents = make_drafter(), make_documents([11, 9], share=0.9)
    states, _ = make_states(documents)
    plan = make_plan(documents, steps)
    assert all(len(rows) for rows in plan.trained)
    ours = drafter(plan, states[plan.key_row])
    weight = torch.randn(CONFIG.hidden_size, dtype=torch.float64)
    loss = sum((out[rows] @ weight).square().sum() for out, rows in zip(ours, plan.trained, strict=True))
    grads = torch.autograd.grad(loss, list(drafter.parameters())[:-2])  # norm and lm_head are not in the outputs

    expected = torch.zeros((), dtype=torch.float64)
    first = 0
    for ids, mask in documents:
        outputs = reference_outputs(drafter, ids, states[first : first + len(ids)], steps)
        for k in range(steps):
            expected = expected + (outputs[k][torch.from_numpy(trained_mask(mask, k))] @ weight).square().sum()
        first += len(ids)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # norms keep fp32 statistics
    for ours_g, reference_g in zip(grads, torch.autograd.grad(expected, list(drafter.parameters())[:-2]), strict=True):
        torch.testing.assert_close(ours_g, reference_g, rtol=1e-4, atol=1e-5 * float(reference_g.abs().max()))


def test_gradients_with_dropout_are_the_slope_of_the_loss() -> None:
    drafter, documents = make_drafter(), make_documents([11, 9], share=0.9)
    drafter.midlayer.dropout, drafter.midlayer.mlp.dropout = 0.3, 0.4
    states, _ = make_states(documents)
    plan = make_plan(documents, 3)
    parameters = list(drafter.parameters())[:-2]
    direction = [
        torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for p in parameters
    ]

    def loss() -> Tensor:
        torch.manual_seed(0)  # the same positions dropped each time
        return drafter(plan, states[plan.key_row]).square().mean()

    def moved(along: float) -> float:
        vector = torch.nn.utils.parameters_to_vector(parameters)
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(
                vector + along * torch.cat([d.flatten() for d in direction]), parameters
            )
            value = loss().item()
            torch.nn.utils.vector_to_parameters(vector, parameters)
        return value

    slope = sum(float((g * d).sum()) for g, d in zip(torch.autograd.grad(loss(), parameters), direction, strict=True))
    assert slope == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-4)
    dropped = loss().item()
    drafter.eval()
    assert loss().item() != dropped


def attention_inputs(plan: Plan, steps: int) -> Inputs:
    g = torch.Generator().manual_seed(4)
    T, Q = len(plan.key_row), len(plan.query_row)

    def make(heads: int, rows: int) -> Tensor:
        return torch.randn(heads, rows, 8, generator=g).requires_grad_()

    own_keys, own_values = ([make(2, Q) for _ in range(steps)] for _ in range(2))
    return Inputs(
        make(6, Q),
        make(2, T),
        make(2, T),
        own_keys,
        own_values,
        plan.query_row,
        make_blocks(plan.documents, plan.query_row, 6),
    )


@pytest.mark.parametrize(("block", "small"), [(1 << 24, 1 << 20), (1 << 24, 0), (200, 0), (200, 1 << 20), (1, 500)])
@pytest.mark.parametrize("keep", [0, 1 << 23])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_attention_in_blocks_equals_dense_attention(
    steps: int, keep: int, block: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "KEEP", keep)
    monkeypatch.setattr(attention_module, "BLOCK", block)
    monkeypatch.setattr(attention_module, "SMALL", small)
    plan = make_plan(make_documents([40, 3, 17], seed=3), steps + 1)
    x = attention_inputs(plan, steps)
    dense = dense_attention(x, plan.documents)
    grad = torch.randn(dense.shape, generator=torch.Generator().manual_seed(5))
    expected = torch.autograd.grad(dense, [x.query, x.key, x.value, *x.own_keys, *x.own_values], grad)
    with torch.no_grad():
        out, kept = attend(x, keep=True)
        assert len(kept) == (len(x.blocks) if keep else 0)
        torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)
        d_key, d_value = torch.zeros(2, 2, 8, x.key.shape[1])
        d_own_keys, d_own_values = ([torch.zeros_like(k) for k in own] for own in (x.own_keys, x.own_values))
        d_query = attend_backward(x, kept, grad, d_key, d_value, d_own_keys, d_own_values)
    for a, b in zip([d_query, d_key.mT, d_value.mT, *d_own_keys, *d_own_values], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_prompt_5_answer_4_trains_positions_4_to_6() -> None:
    mask = np.array([False] * 5 + [True] * 4)
    assert np.flatnonzero(trained_mask(mask, 0)).tolist() == [4, 5, 6]
    assert np.flatnonzero(trained_mask(mask, 1)).tolist() == [3, 4, 5]
    assert np.flatnonzero(trained_mask(mask, 2)).tolist() == [2, 3, 4]
    plan = make_plan([(np.arange(100, 109, dtype=np.int32), mask)], 3)
    assert plan.target_row.tolist() == [5, 6, 7]  # y[5..7] predict x[6..8]: three of the four answer tokens
    assert plan.next_token.tolist() == [106, 107, 108]
    assert plan.key_row.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert plan.key_token.tolist() == [101, 102, 103, 104, 105, 106, 107]
    for k in range(3):
        p = plan.key_row[plan.query_row[plan.trained[k]]]
        assert plan.tokens[k][plan.trained[k]].tolist() == (101 + p + k).tolist()
        assert plan.target_row[plan.target[k]].tolist() == (p + 1 + k).tolist()


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_documents_too_short_to_train_give_an_empty_plan(length: int) -> None:
    ids, mask = np.arange(length, dtype=np.int32), np.ones(length, dtype=bool)
    assert count_trained(mask) == max(0, length - 2)
    plan = make_plan([(ids, mask)], 3)
    assert len(plan.trained[0]) == max(0, length - 2)
    outputs = make_drafter()(plan, torch.zeros(len(plan.key_row), 72, dtype=torch.float64))
    assert [out.shape for out in outputs] == [(len(plan.query_row), 32)] * 3


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_changed_state_moves_nothing_before_it(step: int) -> None:
    drafter = make_drafter()
    ids, mask = np.arange(20, dtype=np.int32), np.ones(20, dtype=bool)
    plan = make_plan([(ids, mask)], 4)
    states, _ = make_states([(ids, mask)])
    before = drafter(plan, states[plan.key_row])[step]
    changed = states.clone()
    changed[9] += 1.0
    after = drafter(plan, changed[plan.key_row])[step]
    moved = (before - after).abs().amax(-1) > 1e-12
    position = plan.key_row[plan.query_row]
    assert not moved[position < 9].any()
    assert moved[position >= 9].all()


def test_two_documents_in_a_pack_equal_each_alone() -> None:
    drafter, documents = make_drafter(), make_documents([13, 9], seed=7)
    states, _ = make_states(documents)
    plan = make_plan(documents, 3)
    packed = drafter(plan, states[plan.key_row])
    first = rows = 0
    for ids, mask in documents:
        alone_plan = make_plan([(ids, mask)], 3)
        alone = drafter(alone_plan, states[first : first + len(ids)][alone_plan.key_row])
        for k in range(3):
            torch.testing.assert_close(packed[k][rows : rows + len(alone[k])], alone[k], rtol=1e-6, atol=1e-6)
        first, rows = first + len(ids), rows + len(alone[0])
    assert rows == len(packed[0])


def test_untrained_positions_are_left_out_without_changing_the_trained_ones() -> None:
    drafter = make_drafter()
    ids = np.arange(30, dtype=np.int32)
    answer = np.zeros(30, dtype=bool)
    answer[12:22] = True
    states, _ = make_states([(ids, answer)])
    short, full = make_plan([(ids, answer)], 3), make_plan([(ids, np.ones(30, dtype=bool))], 3)
    assert len(short.query_row) < len(full.query_row) / 2 and len(short.key_row) < len(full.key_row)
    ours, everything = drafter(short, states[short.key_row]), drafter(full, states[full.key_row])
    for k in range(3):
        position = short.key_row[short.query_row[short.trained[k]]]
        torch.testing.assert_close(ours[k][short.trained[k]], everything[k][position], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kinds", ["kl", "reverse_kl", "tv", "lk", "kl+0.5*tv", "2*lk+reverse_kl"])
def test_each_loss_has_the_right_value_and_gradient(kinds: str) -> None:
    g = torch.Generator().manual_seed(0)
    verifier_logits = torch.randn(4, 11, generator=g, dtype=torch.float64) * 2
    at = torch.tensor([0, 0, 1, 2, 3, 3])
    p = torch.softmax(verifier_logits, -1)[at]
    logits = torch.randn(6, 11, generator=g, dtype=torch.float64, requires_grad=True)
    q = torch.softmax(logits, -1)
    values = {
        "kl": (p * (p.log() - q.log())).sum(-1),
        "reverse_kl": (q * (q.log() - p.log())).sum(-1),
        "tv": (p - q).abs().sum(-1) / 2,
        "lk": -torch.minimum(p, q).sum(-1).log(),
    }
    value = sum(weight * values[kind] for kind, weight in parse_loss(kinds).items())
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    ours, ours_gradient = row_loss(distribution(verifier_logits), at, distribution(logits.detach()), parse_loss(kinds))
    torch.testing.assert_close(ours, value.detach())
    torch.testing.assert_close(ours_gradient, gradient)


def test_the_first_choice_is_argmax_also_among_equals() -> None:
    g = torch.Generator().manual_seed(0)
    for width in (1, 63, 64, 128, 640):
        x = torch.randint(0, 3, (50, width), generator=g).float()  # full of ties: the first of them counts
        assert first_choice(x).tolist() == [row.index(max(row)) for row in x.tolist()]


def test_the_distance_from_the_last_state_is_relative() -> None:
    last = torch.tensor([[3.0, 4.0], [1.0, 0.0]])  # lengths 5 and 1
    hidden = torch.tensor([[3.0, 4.0], [0.0, 4.0], [1.0, 2.0]], requires_grad=True)
    loss = state_loss(hidden, last, torch.tensor([0, 0, 1]))
    assert loss.tolist() == pytest.approx([0, 9 / 25, 4])
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0], [-6 / 25, 0.0], [0.0, 4.0]]))


def test_gradients_of_a_pass_in_bf16_come_back_in_fp32() -> None:
    ids, mask = np.arange(9) % 7, np.arange(9) >= 3
    plan = make_plan([(ids, mask)], 3)
    torch.manual_seed(0)
    config = DrafterConfig(16, 16, 24, 2, 1, 8, 7, 7)
    drafter = Drafter(config, torch.randn(7, 16))
    states = torch.randn(9, 48)[plan.key_row]
    for dtype in (torch.float32, torch.bfloat16):
        drafter.zero_grad()
        drafter(plan, states.to(dtype)).float().square().sum().backward()
        grad = drafter.midlayer.mlp.up_proj.weight.grad
        assert grad is not None and grad.dtype == torch.float32
        if dtype == torch.float32:
            exact = grad.clone()
    torch.testing.assert_close(grad, exact, rtol=0.1, atol=0.05 * float(exact.abs().max()))


@pytest.mark.parametrize(("chunk", "block"), [(7, 60), (256, 1 << 18), (1, 1), (9, 1 << 18)])
def test_chunked_head_loss_equals_autograd_of_the_whole(
    chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.drafter.loss.CHUNK", chunk)
    monkeypatch.setattr("eyas.drafter.loss.BLOCK", block)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(30, 16, generator=g, dtype=torch.float64, requires_grad=True)
    last, verifier_head = torch.randn(25, 12, generator=g).double(), torch.randn(30, 12, generator=g).double()
    target = torch.randint(0, 25, (40,), generator=g).sort()[0]
    weight = torch.rand(40, generator=g)
    loss, correct = head_loss(hidden, head, last, verifier_head, target, weight)
    exact = torch.softmax(last @ verifier_head.T, -1)[target]
    log_q = torch.log_softmax(hidden @ head.T, -1)
    whole = ((exact * (exact.log() - log_q)).sum(-1) * weight).sum()
    torch.testing.assert_close(loss.double(), whole, rtol=1e-5, atol=1e-5)
    assert correct.tolist() == (exact.argmax(-1) == log_q.argmax(-1)).tolist()
    for a, b in zip(
        torch.autograd.grad(3 * loss, [hidden, head]), torch.autograd.grad(3 * whole, [hidden, head]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_choice_over_the_whole_vocabulary_is_found_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.drafter.loss.CHUNK", 7)
    monkeypatch.setattr("eyas.drafter.loss.SLICE", 64)
    g = torch.Generator().manual_seed(0)
    last, head = torch.randn(20, 6, generator=g), torch.randn(300, 6, generator=g)
    assert greedy_choice(last, head).tolist() == (last @ head.T).argmax(-1).tolist()


class LargestTensor(TorchDispatchMode):
    """Remembers the most bytes that any result of an operation took."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kinds", ["kl", "reverse_kl", "tv", "lk"])
def test_a_vocabulary_of_163840_needs_no_tensor_of_rows_by_vocabulary(kinds: str) -> None:
    V, R, K = 163_840, 260, 2
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(K * R, 4, generator=g).bfloat16().requires_grad_()
    head = torch.randn(V, 4, generator=g).requires_grad_()
    last, verifier_head = torch.randn(R, 4, generator=g).bfloat16(), torch.randn(V, 4, generator=g).bfloat16()
    target = torch.arange(R).repeat_interleave(K)
    weight = torch.full((K * R,), 1 / (K * R))
    with LargestTensor() as seen:
        loss, _ = head_loss(hidden, head, last, verifier_head, target, weight, parse_loss(kinds))
        loss.backward()
        greedy_choice(last, verifier_head)
    assert seen.largest <= K * 256 * V * 2  # a chunk's logits in bf16; [K R, V] in fp32 is twice that
    rows = torch.tensor([0, 255, 256, 2 * R - 1])  # both sides of the chunks' border
    at = target[rows]
    value, _ = row_loss(
        distribution(last @ verifier_head.T),
        at,
        distribution(hidden.detach()[rows] @ head.bfloat16().T),
        parse_loss(kinds),
    )
    alone, _ = head_loss(hidden[rows], head, last, verifier_head, at, torch.ones(4), parse_loss(kinds))
    torch.testing.assert_close(alone.detach(), value.sum().detach(), rtol=1e-4, atol=1e-4)
