"""What a training step minimises: the drafter's loss on one pack, as a module whose parameters are the drafter's.

A module, because DDP and FSDP2 need one whose forward pass touches every parameter once, whatever the pack holds. The
loss of a step is a mean over its trained positions, so that every pack is divided by the counts of all packs of the
step: packs of several ranks, or of several backward passes, add up to the gradient of one large pack.

Noise and dropout are seeded by the pack's place in the run, not by what was drawn before. So a run that goes on after a
kill, on any number of ranks, draws what it would have drawn, and no generator's state has to be saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from eyas.config import TrainConfig, parse_loss
from eyas.drafter.loss import DraftHead, head_loss, state_loss
from eyas.drafter.model import Drafter
from eyas.errors import EyasError
from eyas.evaluate.kept import KeptHead
from eyas.evaluate.offline import VerifierHead
from eyas.train.batches import Batch


class Objective(nn.Module):
    """Loss of packs. `verifier` and the drafter are on `device`; states are computed with in `dtype`."""

    def __init__(
        self,
        drafter: Drafter,
        verifier: VerifierHead | KeptHead,
        config: TrainConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if config.state_weight and isinstance(verifier, KeptHead):
            raise EyasError(f"{config.data_dir} keeps logits and no last states: --state-weight 0, or its original")
        self.drafter, self.verifier = drafter, verifier
        self.config, self.device, self.dtype = config, device, dtype
        self.noise, self.kinds = torch.Generator(device), parse_loss(config.loss)

    @cached_property
    def draft_head(self) -> DraftHead:
        """The verifier's lm_head rows of the draft vocabulary, [Vd, Ht], or what makes its logits of what is kept."""
        return self.verifier.draft_head()

    @cached_property
    def known(self) -> Tensor:
        """[V] bool, which tokens the draft vocabulary holds."""
        known = torch.zeros(self.verifier.vocab_size, dtype=torch.bool, device=self.device)
        known[self.verifier.draft_ids] = True
        return known

    def _says_first(self, last: Tensor) -> Tensor:
        """[R] bool, at which target rows the verifier's first choice is in the draft vocabulary."""
        return self.known[self.verifier.first_choice(last)]

    @torch.no_grad()
    def check_outside(self, batches: Iterable[Batch]) -> None:
        """EyasError where `--outside drop` would leave nothing: no position of these packs is kept.

        Stops at the first position that is; costs one product with the verifier's whole head as a rule.
        """
        looked = 0
        for batch in batches:
            target = batch.plan.to(self.device).loss_target
            last = self.verifier.targets(batch.last.to(self.device), self.dtype)
            if bool(self._says_first(last)[target].any()):
                return
            looked += len(target)
        raise EyasError(
            f"--outside drop leaves nothing to train: at none of {looked:,} positions is the verifier's first choice in"
            f" the draft vocabulary of {len(self.verifier.draft_ids):,} tokens: make the vocabulary from these data"
            " (eyas vocab), or --outside keep"
        )

    def forward(self, batch: Batch | None, counts: list[float], seed: int | None = None) -> tuple[Tensor, Tensor]:
        """The pack's share of a step's loss, and its correct first choices per TTT step, int64 [K].

        counts: [K], positions that the whole step trains, those that `--outside drop` leaves out included, which so
        count as zeros; seed: of noise and dropout, None for neither's noise.
        Without a batch the loss is a zero that depends on every parameter: a rank with nothing to train still joins.
        """
        if batch is None:
            zero = sum(((p * 0).sum() for p in self.drafter.parameters() if p.requires_grad), torch.zeros(()))
            return zero, torch.zeros(len(counts), dtype=torch.int64, device=self.device)
        plan = batch.plan.to(self.device)
        states = batch.states.to(self.device, self.dtype)
        if seed is not None:
            torch.manual_seed(seed)  # dropout
            states = self._noisy(states, seed)
        last = self.verifier.targets(batch.last.to(self.device), self.dtype)
        rows, step, target = plan.loss_row, plan.loss_step, plan.loss_target  # [M] each
        if self.config.outside == "drop":
            known = self._says_first(last)[target]
            rows, step, target = rows[known], step[known], target[known]
        decay = self.config.step_weight_decay ** torch.arange(plan.steps, device=self.device)
        share = decay / decay.sum() / torch.tensor(counts, device=self.device).clamp_min(1)  # [K]
        weight = share.float()[step]
        hidden = self.drafter.normed(self.drafter(plan, states), rows)  # [M, H]
        head = self.drafter.lm_head.weight
        total, right = head_loss(hidden, head, last, self.draft_head, target, weight, self.kinds)
        if self.config.state_weight:
            total = total + self.config.state_weight * torch.dot(state_loss(hidden, last, target), weight)
        return total, torch.bincount(step[right], minlength=plan.steps)

    def _noisy(self, states: Tensor, seed: int) -> Tensor:
        """Uniform noise of this width, scaled down with length: the recipe of the first EAGLE code."""
        if self.config.noise_std == 0:
            return states
        self.noise.manual_seed(seed)
        width = self.config.noise_std * 512 / max(1, len(states))
        uniform = torch.rand(states.shape, generator=self.noise, device=self.device, dtype=states.dtype)
        return states + (uniform - 0.5) * width


def pack_seed(seed: int, epoch: int, pack: int) -> int:
    """The seed of one pack's noise and dropout: of the run's seed, the epoch and the pack's place in it."""
    return int(np.random.SeedSequence((seed, epoch, pack)).generate_state(1, np.uint64)[0] >> 1)
