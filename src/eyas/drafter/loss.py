"""The drafter's loss against the verifier's distribution, forward and gradient in one pass.

Both distributions are over the draft vocabulary. p is the verifier's, q the drafter's:

    kl          sum p (log p - log q)         soft cross-entropy, 0 when equal
    reverse_kl  sum q (log q - log p)
    tv          sum |p - q| / 2               = 1 - acceptance rate of speculative sampling
    lk          -log sum min(p, q)            likelihood of acceptance

Beside it, weighted, may stand the distance of the drafter's output from the verifier's last state (`state_loss`).

Gradients are written out by hand, so that a chunk of rows is projected, compared and differentiated while its logits
are in cache: no [M, Vd] tensor outlives its chunk. The verifier's probabilities are made once for all TTT steps.
Softmax and losses run in fp32, products in the dtype of the inputs.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from eyas.drafter.precision import wide

Kind = Literal["kl", "reverse_kl", "tv", "lk"]
CHUNK = 512  # rows of logits at a time
TINY = 1e-30


class VerifierSide(NamedTuple):
    """What R rows are compared with: p [R, Vd] in the compute dtype, its entropy [R] in nats, its argmax [R] int64."""

    p: Tensor
    entropy: Tensor
    choice: Tensor


@torch.no_grad()
def verifier_side(hidden: Tensor, head: Tensor) -> VerifierSide:
    """The verifier's distribution over the draft vocabulary, once for all TTT steps.

    hidden: [R, Ht], last states after the final norm; head: [Vd, Ht], the lm_head rows of the draft vocabulary.
    """
    choice = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    p = torch.empty(len(hidden), len(head), dtype=hidden.dtype, device=hidden.device)
    entropy = wide(hidden.new_empty(len(hidden)))
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, start + CHUNK)
        log_p = torch.log_softmax(wide(hidden[rows] @ head.T), dim=-1)
        choice[rows] = log_p.argmax(-1)
        exact = log_p.exp()
        entropy[rows] = -torch.linalg.vecdot(exact, log_p)
        p[rows] = exact
    return VerifierSide(p, entropy, choice)


def head_loss(
    hidden: Tensor, head: Tensor, verifier: VerifierSide, target: Tensor, kind: Kind = "kl"
) -> tuple[Tensor, Tensor]:
    """Summed loss of M rows, and how many agree with the verifier.

    hidden: [M, H], the drafter's output after its norm; head: [Vd, H]; verifier: its side, of R rows;
    target: [M] int64, which of those R each row is compared with.
    Returns (loss: scalar, differentiable in hidden and head; correct: scalar int64, rows whose argmax is p's).
    """
    loss, correct = _HeadLoss.apply(hidden, head, *verifier, target, kind)  # type: ignore[no-untyped-call]
    return loss, correct


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        p: Tensor,
        entropy: Tensor,
        choice: Tensor,
        target: Tensor,
        kind: Kind,
    ) -> tuple[Tensor, Tensor]:
        loss = wide(hidden.new_zeros(()))
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        wanted = any(ctx.needs_input_grad[:2])
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = wide(hidden[rows] @ head.T)  # [c, Vd]
            at = target[rows]
            goal = wide(p.index_select(0, at))
            correct += (logits.argmax(-1) == choice[at]).sum()
            value, d_logits = row_loss(goal, logits, entropy[at], kind)
            loss += value.sum()
            if d_hidden is not None:
                d_logits = d_logits.to(hidden.dtype)
                torch.mm(d_logits, head, out=d_hidden[rows])
                if d_head is not None:
                    d_head.addmm_(d_logits.T, hidden[rows])
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        scale = grads[0]
        return (
            None if d_hidden is None else d_hidden * scale.to(d_hidden.dtype),
            None if d_head is None else d_head * scale.to(d_head.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def state_loss(hidden: Tensor, last: Tensor, target: Tensor) -> Tensor:
    """Summed relative squared distance |d - t|^2 / |t|^2 of M drafter outputs d from the verifier's last states t.

    hidden: [M, H], after the drafter's norm; last: [R, H], after the verifier's; target: [M] int64, rows of last.
    A state says more than the distribution that the head makes of it, which helps where data is scarce: the feature
    regression of the first EAGLE (paper: "Rethinking Feature Uncertainty"), here beside the loss on distributions.
    """
    goal = wide(last.index_select(0, target))
    away = (wide(hidden) - goal).square().sum(-1)
    return (away / goal.square().sum(-1).clamp_min(TINY)).sum()


def row_loss(p: Tensor, logits: Tensor, entropy: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Loss of each row and its gradient by the logits.

    p, logits: [c, Vd] fp32; entropy: [c] of p. Returns ([c], [c, Vd]). Overwrites logits.
    """
    if kind == "kl":
        # sum p (log p - log q), with log q = logits - scale and sum p = 1; one exponential serves value and gradient
        cross = torch.linalg.vecdot(p, logits)
        top = logits.amax(-1, keepdim=True)
        q = logits.sub_(top).exp_()
        total = q.sum(-1, keepdim=True)
        value = (top + total.log())[:, 0] - cross - entropy
        return value, q.div_(total).sub_(p)
    log_q = torch.log_softmax(logits, dim=-1)
    q = log_q.exp()
    if kind == "reverse_kl":
        ratio = log_q - p.clamp_min(TINY).log()
        value = (q * ratio).sum(-1)
        return value, q * (ratio - value[:, None])
    if kind == "tv":
        sign = torch.sign(q - p)
        return (q - p).abs().sum(-1) / 2, q * (sign - (q * sign).sum(-1, keepdim=True)) / 2
    if kind == "lk":
        below = (q < p).to(q.dtype)
        accepted = torch.minimum(p, q).sum(-1, keepdim=True).clamp_min(TINY)
        return -accepted[:, 0].log(), -q * (below - (q * below).sum(-1, keepdim=True)) / accepted
    raise ValueError(f"unknown loss {kind!r}")
