"""Accept length as serving counts it: by verifications, not by positions.

A round begins behind the last token that was decoded, drafts K tokens, keeps j of them, and the next round begins j + 1
tokens further on. So an easy stretch, where drafts are kept, holds few rounds, and a hard one a round at every token:
the mean over positions flatters the drafter, the mean over rounds is what an engine's counters show. On text that the
verifier itself wrote greedily, the greedy figure is exact: it is what decoding that text would count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafter.plan import Plan


def beginnings(plan: Plan) -> Tensor:
    """[Q] bool: the query positions where an answer begins, which is where its first round does."""
    trained = torch.zeros(len(plan.query_row), dtype=torch.bool, device=plan.query_row.device)
    trained[plan.trained[0]] = True
    follows = torch.zeros_like(trained)
    follows[1:] = trained[:-1] & (plan.query_row[1:] == plan.query_row[:-1] + 1)
    for document in plan.documents:
        follows[document.query_start : document.query_start + 1] = False
    return trained & ~follows


def accept_length(chance: Tensor, begins: Tensor) -> float:
    """Expected tokens per verification, 1 + drafts kept in a round; arguments as of `count_rounds`."""
    rounds, kept = count_rounds(chance, begins)
    return 1 + kept / rounds if rounds else 1.0


def count_rounds(chance: Tensor, begins: Tensor) -> tuple[float, float]:
    """Expected rounds, and drafts kept in them.

    chance: [K, Q], the chance that draft k of a round at this position is kept if the ones before it were (0 or 1 for
        greedy decoding), negative where the answer has ended; positions of an answer stand side by side.
    begins: [Q] bool, from `beginnings`. Cost: one pass in Python, about 1 s for a million positions.
    """
    K = len(chance)
    rounds = kept = 0.0
    ahead = [0.0] * (K + 1)  # how many rounds are expected to begin at this position and the next K
    inside = chance[0] >= 0
    for drafts, begin in zip(chance[:, inside].T.tolist(), begins[inside].tolist(), strict=True):
        here = 1.0 if begin else ahead[0]
        ahead = [0.0] * (K + 1) if begin else [*ahead[1:], 0.0]
        rounds += here
        count = 0
        for p in drafts:
            if p < 0:
                break
            ahead[count] += here * (1 - p)
            here *= p
            kept += here
            count += 1
        ahead[count] += here
    return rounds, kept
