"""The K steps of training-time test over a pack: forward, and the whole gradient written out.

What autograd would do step by step is done here once for all steps:

- The token p sees at step k is the one p + 1 sees at step k - 1, and the projections of [token, state] are the sum of
  the token's and the state's. So each token is embedded, normed and projected once, not K times.
- A norm's weight is folded into the projections that read it (y = x / rms(x) * w; W y = (W w) (x / rms(x))), so that
  only x / rms(x) is formed. With G = d(W w): dW = G w, dw = sum over rows of G W.
- q, k and v are one product, gate and up another; the weights' gradients are one product each over the rows of all
  steps, summed there in fp32.
- Buffers of the forward pass are overwritten by their gradients.

Dropout, where asked for, drops a token's numbers once for all steps, and a state's anew at each.

Rows: T keys, Q queries, E tokens, K steps (`drafter.plan`); C = (n + 2 m) d columns of q, k and v.
Kept for the backward pass, per query and step: 4 H + 2 (n + m) d + 3 I numbers in the compute dtype, and the attention
weights while they are few (`drafter.attention`). With `recompute` the 3 I of the MLP are made again, step by step: a
third more products of the MLP, and its weights' gradients are added up over the steps in fp32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyas.drafter.attention import Inputs, make_blocks
from eyas.drafter.flash import attend, attend_backward
from eyas.drafter.plan import Plan
from eyas.drafter.precision import wide


class Settings(NamedTuple):
    """m key heads of size d, the norms' epsilon, the dropout of the attention's input and of the MLP's middle, and
    whether the MLP is computed again in the backward pass."""

    kv_heads: int
    head_dim: int
    eps: float
    dropout: float
    mlp_dropout: float
    recompute: bool = False


class Weights(NamedTuple):
    """The layer's parameters, in the order that `ttt_steps` takes them."""

    fc: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    token_norm: Tensor
    hidden_norm: Tensor
    mlp_norm: Tensor


class Folded(NamedTuple):
    """The same in the compute dtype, as the products read them: norms folded in, and q's scale 1/sqrt(d)."""

    fc: Tensor  # [H, 3 Ht]
    token: Tensor  # [C, H]
    hidden: Tensor  # [C, H]
    o: Tensor  # [H, n d]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]


def ttt_steps(
    plan: Plan, states: Tensor, token: Tensor, cos: Tensor, sin: Tensor, settings: Settings, weights: Weights
) -> Tensor:
    """Outputs of every step before the final norm, [K, Q, H]; differentiable in the weights alone.

    states: [T, 3 Ht]; token: [E, H], embeddings of the plan's tokens; cos, sin: [positions, d/2], by RoPE position.
    All in the compute dtype.
    """
    out: Tensor = _Steps.apply(plan, states, token, cos, sin, settings, *weights)  # type: ignore[no-untyped-call]
    return out


def norm_rows(x: Tensor, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows of x [N, H], each at most once, after an RMS norm: [M, H]. Statistics wide."""
    out: Tensor = _NormRows.apply(x, rows, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _NormRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        taken = x.index_select(0, rows)
        unit, inverse = _unit(taken, eps)
        ctx.save_for_backward(rows, weight, unit, inverse)
        ctx.shape = x.shape
        return taken.copy_(wide(unit) * weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, unit, inverse = ctx.saved_tensors
        grad = wide(grads[0])
        d_weight = (grad * unit).sum(0).to(weight.dtype)
        d_rows = _unit_backward(grad * weight, unit, inverse)
        return d_rows.new_zeros(ctx.shape).index_copy_(0, rows, d_rows), None, d_weight, None


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        states: Tensor,
        token: Tensor,
        cos: Tensor,
        sin: Tensor,
        settings: Settings,
        *parameters: Tensor,
    ) -> Tensor:
        weights = Weights(*parameters)
        w = _fold(weights, settings, states.dtype)
        m, d, eps = settings.kv_heads, settings.head_dim, settings.eps
        K, Q, T, H = plan.steps, len(plan.query_row), len(plan.key_row), len(w.fc)
        nd = w.o.shape[1]
        position = plan.key_position[plan.query_row]

        token_unit, _ = _unit(token, eps)
        token_unit = _drop(token_unit, _keep(token_unit, settings.dropout))
        token_part = token_unit @ w.token.T  # [E, C]
        state = states @ w.fc.T  # [T, H]
        state_unit, state_inverse = _unit(state, eps)
        state_keep = _keep(state_unit, settings.dropout)
        state_seen = _drop(state_unit, state_keep)
        kv = torch.addmm(token_part[:T, nd:], state_seen, w.hidden[nd:].T)  # [T, 2 m d]
        key = _to_heads(kv[:, : m * d], d, cos[plan.key_position], sin[plan.key_position])
        value = kv[:, m * d :].view(T, m, d).transpose(0, 1).contiguous()

        new = states.new_empty
        # What the backward pass reads, by step: x / rms(x) into the attention and into the MLP, as the norms' gradients
        # (unit) and as the products (seen, with dropout) want them; 1 / rms; attention output; gate, up; silu(gate) up.
        unit, mlp_unit, out = new(K, Q, H), new(K, Q, H), new(K, Q, H)
        seen = unit if settings.dropout == 0 else new(K, Q, H)
        kept_steps = 1 if settings.recompute else K
        attended = new(K, Q, nd)
        gate_up, middle = new(kept_steps, Q, len(w.gate_up)), new(kept_steps, Q, len(w.gate_up) // 2)
        inverse, mlp_inverse, keep, mlp_keep = [], [], [], []
        inputs: list[Inputs] = []
        kept: list[list[Tensor]] = []
        blocks = make_blocks(plan.documents, plan.query_row, nd // d)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        hidden = state.index_select(0, plan.query_row)  # [Q, H]
        for step in range(K):
            if step == 0:
                torch.index_select(state_unit, 0, plan.query_row, out=unit[0])
                inverse.append(state_inverse.index_select(0, plan.query_row))
                keep.append(None if state_keep is None else state_keep.index_select(0, plan.query_row))
            else:
                inverse.append(_unit(hidden, eps, out=unit[step])[1])
                keep.append(_keep(hidden, settings.dropout))
            if seen is not unit:
                seen[step].copy_(_drop(unit[step], keep[step]))
            qkv = token_part.index_select(0, plan.token_row[step])  # [Q, C]
            if step == 0:
                qkv = torch.addmm(qkv[:, :nd], seen[0], w.hidden[:nd].T)
            else:
                qkv.addmm_(seen[step], w.hidden.T)
            at = position + step
            turn = cos[at], sin[at]
            query = _to_heads(qkv[:, :nd], d, *turn)
            if step:
                own_keys.append(_to_heads(qkv[:, nd : nd + m * d], d, *turn))
                own_values.append(qkv[:, nd + m * d :].view(Q, m, d).transpose(0, 1).contiguous())
            inputs.append(Inputs(query, key, value, own_keys[:], own_values[:], plan.query_row, blocks))
            by_head, weight = attend(inputs[step], keep=any(ctx.needs_input_grad))
            kept.append(weight)
            attended[step].view(Q, nd // d, d).copy_(by_head.transpose(0, 1))
            r = torch.addmm(hidden, attended[step], w.o.T)
            mlp_inverse.append(_unit(r, eps, out=mlp_unit[step])[1])
            mlp_keep.append(_keep(middle[0], settings.mlp_dropout))
            here = step % kept_steps
            _mlp_middle(mlp_unit[step], w, mlp_keep[step], gate_up[here], middle[here])
            torch.addmm(r, middle[here], w.down.T, out=out[step])
            hidden = out[step]
        ctx.save_for_backward(*parameters)
        ctx.plan, ctx.settings, ctx.w, ctx.inputs, ctx.cos, ctx.sin = plan, settings, w, (inputs, kept), cos, sin
        ctx.by_state = states, state_unit, state_seen, state_inverse, state_keep, token_unit
        if settings.recompute:
            gate_up = middle = new(0)
        ctx.by_step = unit, seen, inverse, keep, attended, mlp_unit, mlp_inverse, gate_up, middle, mlp_keep
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        w: Folded = ctx.w
        m, d = ctx.settings.kv_heads, ctx.settings.head_dim
        states, state_unit, state_seen, state_inverse, state_keep, token_unit = ctx.by_state
        unit, seen, inverse, keep, attended, mlp_unit, mlp_inverse, gate_up, middle, mlp_keep = ctx.by_step
        inputs: list[Inputs]
        inputs, kept = ctx.inputs
        cos, sin = ctx.cos, ctx.sin
        del ctx.by_state, ctx.by_step, ctx.inputs
        K, Q, H = unit.shape
        T, nd, C = len(plan.key_row), w.o.shape[1], len(w.token)
        position = plan.key_position[plan.query_row]

        d_out = grads[0].clone(memory_format=torch.contiguous_format)  # [K, Q, H]
        d_r, d_qkv = torch.empty_like(d_out), states.new_empty(K, Q, C)
        d_key, d_value = torch.zeros(2, m, d, T, dtype=states.dtype, device=states.device)
        d_own_keys, d_own_values = (
            [torch.zeros_like(x) for x in own] for own in (inputs[-1].own_keys, inputs[-1].own_values)
        )
        again = ctx.settings.recompute
        if again:
            gate_up, middle = states.new_empty(1, Q, len(w.gate_up)), states.new_empty(1, Q, len(w.gate_up) // 2)
            d_gate_up, d_down = (torch.zeros_like(x, dtype=ctx.saved_tensors[0].dtype) for x in (w.gate_up, w.down))
        for step in reversed(range(K)):
            here = 0 if again else step
            if again:
                _mlp_middle(mlp_unit[step], w, mlp_keep[step], gate_up[0], middle[0])
                d_down += d_out[step].T @ middle[0]
            d_middle = _drop(d_out[step] @ w.down, mlp_keep[step])  # [Q, I]
            _swiglu_backward(d_middle, gate_up[here])
            _unit_backward(gate_up[here] @ w.gate_up, mlp_unit[step], mlp_inverse[step], d_out[step], out=d_r[step])
            if again:
                d_gate_up += gate_up[0].T @ mlp_unit[step]
            d_attended = (d_r[step] @ w.o).view(Q, nd // d, d).transpose(0, 1).contiguous()  # [n, Q, d]
            d_query = attend_backward(
                inputs[step], kept[step], d_attended, d_key, d_value, d_own_keys[:step], d_own_values[:step]
            )
            at = position + step
            turn = cos[at], sin[at]
            _from_heads(d_query, *turn, out=d_qkv[step, :, :nd])
            if step == 0:
                break
            _from_heads(d_own_keys[step - 1], *turn, out=d_qkv[step, :, nd : nd + m * d])
            d_qkv[step, :, nd + m * d :].view(Q, m, d).copy_(d_own_values[step - 1].transpose(0, 1))
            d_seen = _drop(d_qkv[step] @ w.hidden, keep[step])
            d_out[step - 1] += _unit_backward(d_seen, unit[step], inverse[step], d_r[step])
        d_query0 = d_qkv[0, :, :nd]
        d_kv = states.new_empty(T, C - nd)
        _from_heads(d_key.transpose(1, 2), cos[plan.key_position], sin[plan.key_position], out=d_kv[:, : m * d])
        d_kv[:, m * d :].view(T, m, d).copy_(d_value.permute(2, 0, 1))
        d_seen = (d_kv @ w.hidden[nd:]).index_add_(0, plan.query_row, d_query0 @ w.hidden[:nd])
        d_state = _unit_backward(_drop(d_seen, state_keep), state_unit, state_inverse)  # [T, H]
        d_state.index_add_(0, plan.query_row, d_r[0])

        d_token_part = states.new_zeros(len(token_unit), C)
        d_token_part[:T, nd:] = d_kv
        d_token_part[:, :nd].index_add_(0, plan.token_row[0], d_query0)
        for step in range(1, K):
            d_token_part.index_add_(0, plan.token_row[step], d_qkv[step])
        d_hidden = d_qkv[1:].view(-1, C).T @ seen[1:].view(-1, H)  # [C, H]
        d_hidden[:nd].addmm_(d_query0.T, seen[0])
        d_hidden[nd:].addmm_(d_kv.T, state_seen)
        d_token = d_token_part.T @ token_unit
        if not again:
            d_gate_up, d_down = _rows(gate_up).T @ _rows(mlp_unit), _rows(d_out).T @ _rows(middle)
        return (
            *(None,) * 6,
            *_unfold(
                Weights(*ctx.saved_tensors),
                ctx.settings,
                Folded(
                    d_state.T @ states,
                    d_token,
                    d_hidden,
                    _rows(d_r).T @ _rows(attended),
                    d_gate_up,
                    d_down,
                ),
            ),
        )


def _rows(x: Tensor) -> Tensor:
    """[K, Q, c] -> [K Q, c]."""
    return x.view(-1, x.shape[2])


def _fold(weights: Weights, settings: Settings, dtype: torch.dtype) -> Folded:
    """The weights as the products read them."""
    H, scale = len(weights.fc), 1 / math.sqrt(settings.head_dim)

    def stack(parts: tuple[Tensor, ...], columns: slice, norm: Tensor, scales: tuple[float, ...]) -> Tensor:
        out = torch.empty(sum(map(len, parts)), len(norm), dtype=dtype, device=norm.device)
        for rows, part, by in zip(torch.split(out, [len(p) for p in parts]), parts, scales, strict=True):
            rows.copy_(part[:, columns] * (norm * by))
        return out

    qkv, scales = (weights.q, weights.k, weights.v), (scale, 1.0, 1.0)
    return Folded(
        weights.fc.to(dtype),
        stack(qkv, slice(0, H), weights.token_norm, scales),
        stack(qkv, slice(H, None), weights.hidden_norm, scales),
        weights.o.to(dtype),
        stack((weights.gate, weights.up), slice(None), weights.mlp_norm, (1.0, 1.0)),
        weights.down.to(dtype),
    )


def _unfold(weights: Weights, settings: Settings, d: Folded) -> Weights:
    """Gradients of the weights from those of the folded ones, in the weights' own dtype."""
    scale = 1 / math.sqrt(settings.head_dim)
    norms = [torch.zeros_like(n) for n in (weights.token_norm, weights.hidden_norm, weights.mlp_norm)]

    def part(g: Tensor, weight: Tensor, which: int, norm: Tensor, by: float, out: Tensor) -> None:
        torch.mul(g, norm * by, out=out)
        norms[which] += torch.mul(weight, g).sum(0).mul_(by)

    grads = []
    H = len(weights.fc)
    sizes = [len(weights.q), len(weights.k), len(weights.v)]
    for weight, by, token, hidden in zip(
        (weights.q, weights.k, weights.v),
        (scale, 1.0, 1.0),
        torch.split(d.token, sizes),
        torch.split(d.hidden, sizes),
        strict=True,
    ):
        grads.append(torch.empty_like(weight))
        part(token, weight[:, :H], 0, weights.token_norm, by, grads[-1][:, :H])
        part(hidden, weight[:, H:], 1, weights.hidden_norm, by, grads[-1][:, H:])
    for weight, g in zip((weights.gate, weights.up), d.gate_up.chunk(2), strict=True):
        grads.append(torch.empty_like(weight))
        part(g, weight, 2, weights.mlp_norm, 1.0, grads[-1])
    q, k, v, gate, up = grads
    fc, o, down = (g.to(weights.fc.dtype) for g in (d.fc, d.o, d.down))
    return Weights(fc, q, k, v, o, gate, up, down, *norms)


def _unit(x: Tensor, eps: float, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x / rms(x) by row in x's dtype, statistics wide; and 1 / rms, [R, 1]."""
    exact = wide(x)
    inverse = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    out = torch.empty_like(x) if out is None else out
    return out.copy_(exact * inverse), inverse


def _unit_backward(
    grad: Tensor, unit: Tensor, inverse: Tensor, beside: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Gradient through x / rms(x): (grad - unit mean(grad unit)) / rms; `beside`, the residual's, is added to it."""
    grad, exact = wide(grad), wide(unit)
    along = torch.linalg.vecdot(grad, exact).div_(unit.shape[-1])[:, None]
    total = torch.addcmul(grad, exact, along, value=-1).mul_(inverse)
    if beside is not None:
        total += beside
    return total.to(unit.dtype) if out is None else out.copy_(total)


def _mlp_middle(unit: Tensor, w: Folded, keep: Tensor | None, gate_up: Tensor, middle: Tensor) -> None:
    """The MLP up to its last product: fills gate_up [R, 2 I] and silu(gate) up, dropped out, [R, I]."""
    torch.mm(unit, w.gate_up.T, out=gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(F.silu(gate), up, out=middle)
    if keep is not None:
        middle *= keep


def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> None:
    """gate_up [R, 2 I] becomes its own gradient, from that of silu(gate) up; overwrites grad too."""
    gate, up = gate_up.chunk(2, dim=-1)
    by_gate = grad * up
    torch.mul(grad, F.silu(gate), out=up)
    torch.ops.aten.silu_backward.grad_input(by_gate, gate, grad_input=gate)


def _to_heads(x: Tensor, d: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of llama, [R, heads d] -> [heads, R, d]; cos, sin: [R, d/2]."""
    a, b = x.view(len(x), x.shape[1] // d, d).transpose(0, 1).chunk(2, dim=-1)
    out = x.new_empty(x.shape[1] // d, len(x), d)
    left, right = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=right).addcmul_(a, sin)
    return out


def _from_heads(grad: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """The gradient of `_to_heads`, [heads, R, d] -> `out` [R, heads d], rows strided."""
    a, b = grad.chunk(2, dim=-1)
    left, right = out.view(len(out), len(grad), grad.shape[2]).transpose(0, 1).chunk(2, dim=-1)
    torch.mul(a, cos, out=left).addcmul_(b, sin)
    torch.mul(b, cos, out=right).addcmul_(a, sin, value=-1)


def _keep(like: Tensor, dropout: float) -> Tensor | None:
    """What dropout multiplies by, or None without."""
    return torch.empty_like(like).bernoulli_(1 - dropout).div_(1 - dropout) if dropout else None


def _drop(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x * keep
