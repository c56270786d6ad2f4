"""The drafter's loss against the verifier's distribution, forward and gradient in one pass.

Both distributions are over the draft vocabulary. p is the verifier's, q the drafter's:

    kl          sum p (log p - log q)         soft cross-entropy, 0 when equal
    reverse_kl  sum q (log q - log p)
    tv          sum |p - q| / 2               = 1 - acceptance rate of speculative sampling
    lk          -log sum min(p, q)            likelihood of acceptance

or a weighted sum of these, `kl+0.5*tv`. Beside it, weighted, may stand the distance of the drafter's output from the
verifier's last state (`state_loss`).

Rows come ordered by their target, so a chunk of targets meets all the rows of all TTT steps that are compared with it:
the verifier's distribution is made once, and gone when the chunk is. Gradients are written out by hand, so no logits
outlive their chunk either: memory is (K + 1) `CHUNK` rows of Vd logits in the compute dtype and a few blocks of `BLOCK`
fp32 numbers, whatever T and V are. The blocks are small enough for a core's cache, since all that happens between the
products is passes over them. Softmax and losses run in fp32, products in the dtype of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.drafter.precision import wide

CHUNK = 256  # targets whose logits exist at a time
BLOCK = 1 << 18  # fp32 numbers of the verifier's rows in one pass, 1 MiB; the drafter's are K times as many
DEVICE_BLOCK = 1 << 25  # the same on a GPU, where launches cost and no core's cache is to be hit: 128 MiB
GROUP = 64
SLICE = 1 << 14  # columns of the whole vocabulary at a time
TINY = 1e-30


DraftHead = Tensor | Callable[[Tensor], Tensor]  # lm_head rows of the draft vocabulary, or what stands for them


def draft_logits(last: Tensor, head: DraftHead) -> Tensor:
    """The verifier's logits [r, Vd] over the draft vocabulary, of its last states [r, Ht] or what is kept of them."""
    return last @ head.T if isinstance(head, Tensor) else head(last)


class Rows(NamedTuple):
    """Distributions of r rows, wide: logits and probabilities [r, Vd], log of the scale [r], first choice [r] int64.

    log p = logits - log_scale, which is formed only where a loss needs it: one exponential a number is what this costs.
    """

    logits: Tensor
    p: Tensor
    log_scale: Tensor
    choice: Tensor


def distribution(logits: Tensor) -> Rows:
    """From logits [r, Vd] of any dtype."""
    logits = wide(logits)
    p = torch.softmax(logits, dim=-1)
    choice = first_choice(logits)
    at = choice[:, None]
    return Rows(logits, p, (logits.gather(1, at) - p.gather(1, at).log_())[:, 0], choice)


def first_choice(logits: Tensor) -> Tensor:
    """argmax of each row, [r]: the best group of GROUP, then the best in it (torch's own argmax is not vectorised)."""
    r, width = logits.shape
    if width % GROUP or width == GROUP:
        return logits.argmax(-1)
    groups = logits.view(r, width // GROUP, GROUP)
    best = groups.amax(-1).argmax(-1)  # [r]
    inside = groups.gather(1, best[:, None, None].expand(-1, 1, GROUP))[:, 0].argmax(-1)
    return best * GROUP + inside


def greedy_choice(last: Tensor, head: Tensor) -> Tensor:
    """argmax of last @ head^T by row, [R] int64, from CHUNK by SLICE logits at a time. last: [R, Ht]; head: [V, Ht]."""
    choice = torch.empty(len(last), dtype=torch.int64, device=last.device)
    for start in range(0, len(last), CHUNK):
        rows = last[start : start + CHUNK]
        best = wide(rows.new_full((len(rows),), -torch.inf))
        for first in range(0, len(head), SLICE):
            logits = wide(rows @ head[first : first + SLICE].T)
            at = first_choice(logits)
            value = logits.gather(1, at[:, None])[:, 0]
            here = choice[start : start + CHUNK]
            torch.where(value > best, at + first, here, out=here)
            best = torch.maximum(best, value)
    return choice


def head_loss(
    hidden: Tensor,
    head: Tensor,
    last: Tensor,
    verifier_head: DraftHead,
    target: Tensor,
    weight: Tensor,
    kinds: dict[str, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted loss of M rows, and which agree with the verifier's first choice.

    hidden: [M, H], the drafter's outputs after its norm; head: [Vd, H], of any dtype; last: [R, Ht], the verifier's
    states after its final norm; verifier_head: [Vd, Ht], its lm_head rows of the draft vocabulary, or what makes logits
    [r, Vd] of rows of `last` that are no states (evaluate/kept.py); target: [M] int64, which of the R each row is
    compared with, ascending; weight: [M] fp32; kinds: a weight for each loss, {"kl": 1}.
    Returns (loss: scalar, differentiable in hidden and head; correct: [M] bool).
    """
    loss, correct = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, last, verifier_head, target, weight, kinds or {"kl": 1.0}
    )
    return loss, correct


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        last: Tensor,
        verifier_head: DraftHead,
        target: Tensor,
        weight: Tensor,
        kinds: dict[str, float],
    ) -> tuple[Tensor, Tensor]:
        dtype, Vd = hidden.dtype, len(head)
        cast_head = head.to(dtype)
        value = torch.empty_like(weight, dtype=wide(hidden[:0]).dtype)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        wanted = ctx.needs_input_grad[0]
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_head = torch.zeros_like(cast_head) if ctx.needs_input_grad[1] else None
        weighted = hidden * weight[:, None].to(dtype) if d_head is not None else hidden
        step = max(1, min(CHUNK, (BLOCK if hidden.is_cpu else DEVICE_BLOCK) // Vd))  # targets of one block
        edges = torch.arange(0, len(last) + step, step, device=target.device)
        starts = torch.searchsorted(target, edges).tolist()  # first row of each block of targets
        per_chunk = CHUNK // step
        for chunk in range(0, len(edges) - 1, per_chunk):
            blocks = range(chunk, min(chunk + per_chunk, len(edges) - 1))
            rows = slice(starts[blocks.start], starts[blocks.stop])
            verifier_logits = draft_logits(last[blocks.start * step : blocks.stop * step], verifier_head)
            logits = hidden[rows] @ cast_head.T  # [c, Vd]
            for block in blocks:
                here = slice(starts[block], starts[block + 1])
                if here.start == here.stop:
                    continue
                inside = logits[here.start - rows.start : here.stop - rows.start]
                first = (block - chunk) * step
                verifier, drafter = distribution(verifier_logits[first : first + step]), distribution(inside)
                at = target[here] - block * step
                torch.eq(drafter.choice, verifier.choice[at], out=correct[here])
                value[here], d_logits = row_loss(verifier, at, drafter, kinds)
                inside.copy_(d_logits)
            if d_hidden is not None:
                torch.mm(logits, cast_head, out=d_hidden[rows])
            if d_head is not None:
                d_head.addmm_(logits.T, weighted[rows])
        if d_hidden is not None:
            d_hidden *= weight[:, None].to(dtype)
        ctx.save_for_backward(d_hidden, d_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(correct)
        return torch.dot(value, weight.to(value.dtype)), correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        scale = grads[0]
        return (
            None if d_hidden is None else d_hidden * scale.to(d_hidden.dtype),
            None if d_head is None else d_head.to(ctx.head_dtype).mul_(scale),
            *(None,) * 5,
        )


def state_loss(hidden: Tensor, last: Tensor, target: Tensor) -> Tensor:
    """Relative squared distance |d - t|^2 / |t|^2, [M], of drafter outputs d from the verifier's last states t.

    hidden: [M, H], after the drafter's norm; last: [R, H], after the verifier's; target: [M] int64, rows of last.
    A state says more than the distribution that the head makes of it, which helps where data is scarce: the feature
    regression of the first EAGLE (paper: "Rethinking Feature Uncertainty"), here beside the loss on distributions.
    """
    goal = wide(last.index_select(0, target))
    away = (wide(hidden) - goal).square().sum(-1)
    return away / goal.square().sum(-1).clamp_min(TINY)


def row_loss(verifier: Rows, at: Tensor, drafter: Rows, kinds: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Weighted sum of losses of each row, and its gradient by the logits.

    verifier: r rows; at: [c] int64, which of them each of the drafter's c rows is compared with; the drafter's
    probabilities are overwritten. Returns ([c], [c, Vd]).
    """
    value, gradient = torch.zeros_like(drafter.log_scale), None
    for i, (kind, weight) in enumerate(kinds.items()):
        last = i == len(kinds) - 1
        one, d_one = _LOSSES[kind](verifier, at, drafter if last else drafter._replace(p=drafter.p.clone()))
        value += one * weight
        d_one = d_one if weight == 1 else d_one.mul_(weight)
        gradient = d_one if gradient is None else gradient.add_(d_one)
    assert gradient is not None
    return value, gradient


def _kl(verifier: Rows, at: Tensor, drafter: Rows) -> tuple[Tensor, Tensor]:
    # sum p (log p - log q) = p . (v - z) - (scale of v - scale of z)
    entropy = verifier.log_scale - torch.linalg.vecdot(verifier.p, verifier.logits)
    p = verifier.p.index_select(0, at)
    value = drafter.log_scale - torch.linalg.vecdot(p, drafter.logits) - entropy[at]
    return value, drafter.p.sub_(p)


def _reverse_kl(verifier: Rows, at: Tensor, drafter: Rows) -> tuple[Tensor, Tensor]:
    q = drafter.p
    ratio = drafter.logits - drafter.log_scale[:, None]
    ratio -= (verifier.logits - verifier.log_scale[:, None]).index_select(0, at)
    value = torch.linalg.vecdot(q, ratio)
    return value, q.mul_(ratio - value[:, None])


def _tv(verifier: Rows, at: Tensor, drafter: Rows) -> tuple[Tensor, Tensor]:
    q = drafter.p
    away = q - verifier.p.index_select(0, at)
    sign = away.sign()
    return away.abs_().sum(-1) / 2, q.mul_(sign - torch.linalg.vecdot(q, sign)[:, None]).div_(2)


def _lk(verifier: Rows, at: Tensor, drafter: Rows) -> tuple[Tensor, Tensor]:
    p, q = verifier.p.index_select(0, at), drafter.p
    below = (q < p).to(q.dtype)
    accepted = torch.minimum(p, q).sum(-1, keepdim=True).clamp_min(TINY)
    return -accepted[:, 0].log(), q.mul_(torch.linalg.vecdot(q, below)[:, None] - below).div_(accepted)


_LOSSES = {"kl": _kl, "reverse_kl": _reverse_kl, "tv": _tv, "lk": _lk}
