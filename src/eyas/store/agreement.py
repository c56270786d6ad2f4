"""Does a head understand these states? The proof that states are of this verifier, and on which side of its norm.

Last states that went through the right norm and head name the next token of on-policy text about 60-90 % of the time,
of other people's text 30-60 %; states of another model nearly never. The norm's side shows twice: the wrong side
names fewer tokens, and what left an RMS norm has, divided by the norm's weight, a root mean square of one.

Cost: one product [P, Ht] x [Ht, V], in pieces of the head; 512 positions suffice (a tenth of a second at V = 49,152).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eyas.verifier import FinalNorm

HEAD_ROWS = 16384  # rows of the head in float32 at a time
PLAUSIBLE = 0.10  # of the next tokens named; below, no verifier has ever been the right one
CLEAR = 0.02  # a smaller difference between the two sides decides nothing


def top1(states: Tensor, head: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """argmax over the vocabulary of head(norm(states)), in float32.

    states: [P, Ht]; head: [V, Ht], any floating dtype; returns [P] int64.
    """
    h = states.float() if norm is None else norm(states.float())
    best = torch.full((len(h),), -torch.inf)
    token = torch.zeros(len(h), dtype=torch.int64)
    for start in range(0, len(head), HEAD_ROWS):
        value, index = (h @ head[start : start + HEAD_ROWS].float().T).max(dim=1)
        token = torch.where(value > best, index + start, token)
        best = torch.maximum(value, best)
    return token


def agreement(states: Tensor, targets: Tensor, head: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> float:
    """The share (0..1) of positions at which head(norm(states)) ranks the target first.

    states: [P, Ht]; targets: [P] token ids; head: [V, Ht]. 0.0 for no positions.
    """
    if len(targets) == 0:
        return 0.0
    return float((top1(states, head, norm) == targets.to(torch.int64)).float().mean())


def is_normed(states: Tensor, norm: FinalNorm) -> bool:
    """Whether states [P, Ht] are what `norm` puts out: divided by its weight, every row has a root mean square of 1."""
    weight = norm.weight + 1 if norm.adds_one else norm.weight
    used = weight.abs() > 1e-3  # a weight of nothing leaves nothing to divide
    rms = (states.float()[:, used] / weight[used]).square().mean(dim=1).sqrt()
    return bool(((rms - 1).abs() < 0.03).float().mean() > 0.9)


def norm_side(states: Tensor, targets: Tensor, head: Tensor, norm: FinalNorm) -> tuple[str | None, float]:
    """("before" or "after" the final norm, agreement there); the side is None where neither is plausible.

    states: [P, Ht] last states; targets: [P] the token after each.
    """
    before, after = agreement(states, targets, head, norm), agreement(states, targets, head)
    best = max(before, after)
    chance = 1 / len(head)
    if best < PLAUSIBLE or best < 5 * chance:
        return None, best
    if abs(before - after) > CLEAR * best and abs(before - after) * len(targets) >= 4:
        side = "before" if before > after else "after"
    else:  # a norm with nearly equal weights changes no ranking
        side = "after" if is_normed(states, norm) else "before"
    return side, before if side == "before" else after
