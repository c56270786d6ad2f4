"""The verifier's side where a store keeps its k likeliest tokens in place of its last state (`store/logits.py`).

Stands where `offline.VerifierHead` does: what a batch brings as `last` are the kept rows, and the verifier's
distribution over the draft vocabulary is what they say of its tokens, the rest of the mass spread evenly over all
tokens that were not kept. The verifier's head is not needed, nor its product: k numbers a row are put in their places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.store import logits

ROWS = 256  # whose draft distribution exists at a time


@dataclass
class KeptHead:
    """draft_ids: [Vd] int64, verifier ids of the draft vocabulary, ascending; vocab_size: V."""

    draft_ids: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        width = len(self.draft_ids)
        self.column = torch.full((self.vocab_size,), width, dtype=torch.int64, device=self.draft_ids.device)
        self.column[self.draft_ids] = torch.arange(width, device=self.draft_ids.device)

    def targets(self, last: Tensor, _dtype: torch.dtype) -> Tensor:
        """What `draft_head` and the others take of a batch's rows: the rows as they are, [R, 3 k]."""
        return last

    def draft_head(self) -> logits.Complete:
        """Makes log p [R, Vd] of rows [R, 3 k]."""
        return logits.Complete(self.column, len(self.draft_ids))

    def first_choice(self, targets: Tensor) -> Tensor:
        """The verifier's own first choice, [R] int64."""
        return logits.first_choice(targets)

    def over_all(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """First choices [R], and log of the share of the verifier's mass that the draft vocabulary has, [R] float32."""
        share = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        complete = self.draft_head()
        for start in range(0, len(targets), ROWS):
            share[start : start + ROWS] = complete(targets[start : start + ROWS]).logsumexp(-1)
        return self.first_choice(targets), share
