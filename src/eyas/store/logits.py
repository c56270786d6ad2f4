"""The verifier's k likeliest tokens in place of its last state (`--last logits:64`): 6 k bytes a row, not 2 Ht.

A row holds the k largest log-probabilities over the whole vocabulary, the likeliest first: token ids and log p. What
they leave of the mass is known (1 - sum p) and is spread evenly over all other tokens: each gets
(1 - sum p) / (V - k). Cutting it off instead would make log p infinite, where a loss needs it, and a verifier surer
than it is. Only rows of trained tokens are kept; the loss reads no other.

On its way through the read path such a row is 3 k words of 16 bits: k int32 ids, then k float16 log p. It bears
bfloat16's name there, because states do, and nobody computes with it before `unpack`.

Cost of making it: one product with the whole head a row, in float32 (SmolLM2, V = 49,152: 0.06 GFLOP; Kimi-K2.5, 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.verifier import Verifier

ROWS = 128  # whose logits over the whole vocabulary exist at a time
LEAST_MASS = 1e-6  # that is left for other tokens: float16 rounds a sum of p to 1 or more


class TopK(NamedTuple):
    """How to make rows: head [V, Ht] float32 on some device; norm: before it, or None for states from behind it."""

    k: int
    head: Tensor
    norm: Callable[[Tensor], Tensor] | None

    def rows(self, last: Tensor) -> Tensor:
        """Words [R, 3 k] of the verifier's last states [R, Ht], on the CPU. Raises EyasError for NaN or infinity."""
        found = [torch.empty((0, 3 * self.k), dtype=torch.bfloat16)]
        for start in range(0, len(last), ROWS):
            states = last[start : start + ROWS].float()
            states = states if self.norm is None else self.norm(states)
            logits = states.to(self.head.device) @ self.head.T
            values, ids = logits.topk(self.k, dim=1)
            log_p = values - logits.logsumexp(1, keepdim=True)
            if not torch.isfinite(log_p).all():
                raise EyasError("last states that are NaN or infinite have no logits")
            found.append(pack(ids.to("cpu", torch.int32), log_p.to("cpu", torch.float16)))
        return torch.cat(found)

    def instead(self, layers: Sequence[Tensor], loss_mask: npt.NDArray[np.bool_]) -> list[Tensor]:
        """A sample's layers with the last one, [T, Ht] or of the trained rows alone, made into words [trained, 3 k]."""
        last = layers[-1]
        if len(last) == len(loss_mask):
            last = last[torch.from_numpy(np.flatnonzero(loss_mask))]
        return [*layers[:-1], self.rows(last)]


def make_top_k(k: int, verifier: Verifier, norm_side: str, device: torch.device) -> TopK:
    """For last states on this side of the verifier's norm. Raises EyasError for k that the vocabulary does not have."""
    if k >= verifier.config.vocab_size:
        raise EyasError(f"--last logits:{k}: {verifier.config.name} has {verifier.config.vocab_size:,} tokens")
    head = verifier.lm_head(dtype=torch.float32).to(device)
    return TopK(k, head, verifier.final_norm() if norm_side == "before" else None)


def pack(ids: Tensor, log_p: Tensor) -> Tensor:
    """Words [R, 3 k] of ids [R, k] int32 and log p [R, k] float16."""
    return torch.cat([ids.view(torch.int16), log_p.view(torch.int16)], dim=1).view(torch.bfloat16)


def split(words: Tensor) -> tuple[Tensor, Tensor]:
    """ids [R, k] int32 and log p [R, k] float16 of words [R, 3 k]."""
    bits, k = words.view(torch.int16), words.shape[1] // 3
    return bits[:, : 2 * k].contiguous().view(torch.int32), bits[:, 2 * k :].contiguous().view(torch.float16)


@dataclass(frozen=True)
class Complete:
    """Log-probabilities [R, width] float32 of some tokens from words [R, 3 k], the tail spread evenly over the others.

    column: [V] int64, where in the result each token is, `width` for those that are not.
    """

    column: Tensor
    width: int

    def __call__(self, words: Tensor) -> Tensor:
        ids, log_p = split(words)
        values = log_p.float()
        left = (1 - values.exp().sum(1, keepdim=True)).clamp_min(LEAST_MASS) / (len(self.column) - ids.shape[1])
        out = left.log().expand(-1, self.width + 1).contiguous()  # the last column takes the tokens that have none
        return out.scatter_(1, self.column[ids.long()], values)[:, : self.width].contiguous()


def first_choice(words: Tensor) -> Tensor:
    """The likeliest token of each row, [R] int64."""
    return split(words)[0][:, 0].long()


def faults(words: Tensor, layer: int, vocab_size: int) -> list[tuple[str, str]]:
    """(test, detail) of what is wrong with a sample's kept logits."""
    ids, log_p = split(words)
    values = log_p.float()
    if not torch.isfinite(values).all():
        return [("not finite", f"logits of layer {layer}")]
    if int(ids.amin()) < 0 or int(ids.amax()) >= vocab_size:
        return [("logits", f"layer {layer} names tokens outside the vocabulary of {vocab_size:,}")]
    if (values.diff(dim=1) > 0).any() or (values > 0).any() or (values.exp().sum(1) > 1.01).any():
        return [("logits", f"layer {layer}: no falling log-probabilities")]
    return []
