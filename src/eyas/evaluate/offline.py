"""How good a drafter is on captured states: accuracy, acceptance and accept length per draft position.

Teacher-forced, on positions that step k trains on (the contract's mask). At position p and step k, c_k says whether
the drafter's first choice is the verifier's over the full vocabulary, and a_k = sum min(p, q) over the full vocabulary
is the chance that speculative sampling at temperature 1 accepts the draft.

    joint_k         share of positions where c_0..c_k all hold
    conditional_k   share of those with c_0..c_{k-1} where c_k holds too = joint_k / joint_{k-1}
    acceptance_k    mean of a_k
    accept_length          expected tokens per round at temperature 1, from the a_k (`evaluate.rounds`)
    accept_length_greedy   the same for greedy decoding, from the c_k

Joint and conditional figures use positions that all K steps train. They are means over positions, as other trainers
give them; the lengths are means over rounds, as engines count them. 1 + sum_k joint_k, the usual figure, is larger.

Cost: one pass of the drafter and one product with the verifier's whole head, in chunks of `CHUNK` rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.loss import DraftHead, distribution, draft_logits, greedy_choice, row_loss
from eyas.drafter.model import Drafter
from eyas.drafter.plan import Plan
from eyas.errors import EyasError
from eyas.evaluate.kept import KeptHead
from eyas.evaluate.rounds import beginnings, count_rounds
from eyas.train.batches import Batch

CHUNK = 256  # rows of full-vocabulary logits at a time


@dataclass
class OfflineFigures:
    """Figures per draft position (lists of K), and over all of them."""

    loss: float
    accuracy: list[float]
    accuracy_joint: list[float]
    acceptance: list[float]
    accept_length: float
    accept_length_greedy: float
    positions: int
    samples: int

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass
class VerifierHead:
    """What is needed to say what the verifier would: its final norm and lm_head on the device.

    norm: callable [.., Ht] -> [.., Ht], the identity where the states are from behind it; head: [V, Ht];
    draft_ids: [Vd] int64, verifier ids of the draft vocabulary, ascending.
    """

    norm: Any
    head: Tensor
    draft_ids: Tensor

    @property
    def vocab_size(self) -> int:
        return len(self.head)

    def targets(self, last: Tensor, dtype: torch.dtype) -> Tensor:
        """A batch's last states as the head takes them, [R, Ht]."""
        normed: Tensor = self.norm(last)
        return normed.to(dtype)

    def draft_head(self) -> Tensor:
        """[Vd, Ht], the rows of the draft vocabulary."""
        return self.head if len(self.draft_ids) == len(self.head) else self.head[self.draft_ids]

    def first_choice(self, targets: Tensor) -> Tensor:
        """The verifier's own first choice, [R] int64."""
        return greedy_choice(targets, self.head)

    def over_all(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """First choices [R], and log of the share of the verifier's mass that the draft vocabulary has, [R] float32."""
        choice = torch.empty(len(targets), dtype=torch.int64, device=targets.device)
        share = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        for start in range(0, len(targets), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = (targets[rows] @ self.head.T).float()
            choice[rows] = logits.argmax(-1)
            share[rows] = torch.logsumexp(logits[:, self.draft_ids], -1) - torch.logsumexp(logits, -1)
        return choice, share


@torch.inference_mode()
def evaluate(
    drafter: Drafter,
    verifier: VerifierHead | KeptHead,
    batches: Iterable[Batch],
    steps: int,
    dtype: torch.dtype,
    add: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> OfflineFigures | None:
    """Figures of `drafter` over `batches`; None when they hold no position that all steps train on.

    add: for batches that are shared out to several ranks, adds a vector of sums up over them.
    Raises EyasError, on every rank, where outputs or states are no numbers.
    """
    device = verifier.draft_ids.device
    right: list[list[Tensor]] = [[] for _ in range(steps)]  # per step, 0/1 per query, -1 where not trained
    accept: list[list[Tensor]] = [[] for _ in range(steps)]
    begins: list[Tensor] = []
    losses, samples = [], 0
    draft_head = verifier.draft_head()
    head = drafter.lm_head.weight.to(dtype)
    for batch in batches:
        plan = batch.plan.to(device)
        last = verifier.targets(batch.last.to(device), dtype)
        samples += len(batch.samples)
        begins.append(beginnings(plan))
        outputs = drafter(plan, batch.states.to(device, dtype))
        first_choice, log_share = verifier.over_all(last)
        for k, out in enumerate(outputs):
            hidden, goal = drafter.norm(out[plan.trained[k]]), last[plan.target[k]]
            at = plan.target[k]
            c, a, kl = _compare(hidden, head, goal, draft_head, first_choice[at], log_share[at], verifier.draft_ids)
            if k == 0 and len(hidden):
                losses.append((float(kl.sum()), len(hidden)))
            right[k].append(_scatter(c, plan, k))
            accept[k].append(_scatter(a, plan, k))
    sums = _sums(right, accept, begins, losses, samples)
    return _figures(add(torch.tensor(sums, dtype=torch.float64, device=device)).tolist(), steps)


def _compare(
    hidden: Tensor,
    head: Tensor,
    last: Tensor,
    draft_head: DraftHead,
    choice: Tensor,
    log_share: Tensor,
    draft_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of drafter rows [M, H] against the verifier's [M, Ht]: whether first choices agree, sum min(p, q) over the full
    vocabulary, and the KL over the draft vocabulary, each [M]."""
    agree, accepted, kl = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, start + CHUNK)
        p, q = distribution(draft_logits(last[rows], draft_head)), distribution(hidden[rows] @ head.T)
        agree[rows] = (draft_ids[q.choice] == choice[rows]).float()
        # p over the draft vocabulary sums to 1; the full distribution gives it only its share of the mass.
        accepted[rows] = torch.minimum(p.p * log_share[rows, None].exp(), q.p).sum(-1)
        kl[rows], _ = row_loss(p, torch.arange(len(q.p), device=q.p.device), q, {"kl": 1.0})
    return agree, accepted, kl


def _scatter(values: Tensor, plan: Plan, step: int) -> Tensor:
    """[M_k] -> [Q], -1 at queries that this step does not train."""
    out = torch.full((len(plan.query_row),), -1.0, device=values.device)
    out[plan.trained[step]] = values
    return out


def _sums(
    right: list[list[Tensor]],
    accept: list[list[Tensor]],
    begins: list[Tensor],
    losses: list[tuple[float, int]],
    samples: int,
) -> list[float]:
    """Per-query values, -1 where a step does not train, as what the figures are quotients of; see `_figures`."""
    K = len(right)
    if not begins:
        return [0.0] * (8 + 3 * K)
    c = torch.stack([torch.cat(step) for step in right]).double()  # [K, all queries]
    a = torch.stack([torch.cat(step) for step in accept]).double()
    first = torch.cat(begins)
    every = (c >= 0).all(0)  # trained at all K steps
    return [
        sum(value for value, _ in losses),
        float(sum(n for _, n in losses)),
        float(samples),
        float(every.sum()),
        *count_rounds(a, first),
        *count_rounds(c, first),
        *c[:, every].cumprod(0).sum(1).tolist(),
        *(float(a[k][c[k] >= 0].sum()) for k in range(K)),
        *(float((c[k] >= 0).sum()) for k in range(K)),
    ]


def _figures(sums: list[float], K: int) -> OfflineFigures | None:
    """The figures from the sums over all ranks. Raises EyasError where outputs or states are no numbers."""
    loss, counted, samples, positions, rounds, kept, rounds_greedy, kept_greedy = sums[:8]
    if not positions:
        return None
    right, accepted, trained = sums[8 : 8 + K], sums[8 + K : 8 + 2 * K], sums[8 + 2 * K :]
    if not math.isfinite(sum(accepted)):
        raise EyasError(
            "NaN or infinity in what is validated: train with a lower --lr, or look at the data by store check"
        )
    joint = [r / positions for r in right]
    before = [1.0, *joint[:-1]]
    return OfflineFigures(
        loss=loss / counted,
        accuracy=[j / b if b else 0.0 for j, b in zip(joint, before, strict=True)],
        accuracy_joint=joint,
        acceptance=[a / n for a, n in zip(accepted, trained, strict=True)],
        accept_length=1 + kept / rounds,
        accept_length_greedy=1 + kept_greedy / rounds_greedy,
        positions=int(positions),
        samples=int(samples),
    )
