"""Which token a row of the drafter's head is, by the verifier's head.

A drafter learns to say the verifier's tokens in nearly the verifier's space, and most start from its head: row j is
more like the verifier's row of its own token than like any other. Where that is clear it proves or refutes a map;
where it is not (a head trained from nothing) nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from eyas.check.subject import Ints, Subject
from eyas.drafter.folder import FLOATS

SAMPLE = 64  # rows of the head that are compared with the verifier's whole head
CLEAR, MARGIN = 0.5, 0.1  # cosine of the best match, and its distance to the second
CHUNK = 8192
MOST = 2e14  # operations that are spent on all rows: minutes on a server's CPUs, a full vocabulary of 150,000 is beyond


@dataclass(frozen=True)
class Likeness:
    """Verifier ids [R] that rows of the head are most like, and whether the match is clear, bool [R]."""

    token: Ints
    clear: npt.NDArray[np.bool_]


@lru_cache(maxsize=4)
def sample(s: Subject) -> tuple[Ints, Likeness]:
    """Some rows of the head, spread over it, and what they are like."""
    rows = np.unique(np.linspace(0, (s.shape("lm_head.weight", 0) or 1) - 1, SAMPLE).astype(np.int64))
    return rows, likeness(s, rows)


def comparable(s: Subject) -> bool:
    """Whether there is a verifier, and a head of its width."""
    stored = s.folder.tensors.get("lm_head.weight")
    return (
        s.verifier is not None
        and stored is not None
        and stored.dtype in FLOATS
        and len(stored.shape) == 2
        and stored.shape[1] == s.verifier.config.hidden_size
        and s.verifier.config.vocab_size == s.V
    )


def favoured(s: Subject, candidates: list[Ints]) -> Ints | None:
    """The one of several maps (verifier ids [Vd]) that the head agrees with; None where it favours none alone."""
    if not comparable(s):
        return None
    rows, seen = sample(s)
    if seen.clear.mean() < 0.5:
        return None
    agree = [float((c[rows] == seen.token)[seen.clear].mean()) for c in candidates]
    order = np.argsort(agree)[::-1]
    alone = len(order) == 1 or agree[order[1]] < 0.5
    return candidates[order[0]] if agree[order[0]] >= 0.9 and alone else None


@lru_cache(maxsize=4)
def head_tokens(s: Subject) -> Ints | None:
    """The verifier id of every row of the head by likeness, ascending; None where that is not sure for all.

    Nine rows in ten must be clear and ascend, as a head's rows do; the others must be clear among the tokens between
    their neighbours. None too where it would take more than `MOST` operations.
    """
    if not comparable(s) or 2.0 * (s.Vd or 0) * (s.V or 0) * (s.H or 0) > MOST:
        return None
    seen = likeness(s, np.arange(s.Vd or 0))
    clear = np.flatnonzero(seen.clear)
    if len(clear) < 0.9 * len(seen.token) or (np.diff(seen.token[clear]) <= 0).any():
        return None
    token = seen.token.copy()
    for row in np.flatnonzero(~seen.clear):
        at = int(np.searchsorted(clear, row))
        low = int(seen.token[clear[at - 1]]) + 1 if at else 0
        high = int(seen.token[clear[at]]) if at < len(clear) else s.V or 0
        if low >= high:
            return None
        between = likeness(s, np.array([row]), np.arange(low, high))
        if not between.clear[0]:
            return None  # two tokens with nearly one row: taking either would be guessing
        token[row] = between.token[0]
    return token if bool((np.diff(token) > 0).all()) else None


@lru_cache(maxsize=4)
def order_in(s: Subject, tokens: tuple[int, ...]) -> Ints | None:
    """Which of `tokens` [Vd], the known vocabulary, each row of the head is; None unless each is one row's best.

    That the best matches of all rows are a permutation does not happen by chance.
    """
    if not comparable(s) or len(tokens) != s.Vd or 2.0 * len(tokens) ** 2 * (s.H or 0) > MOST:
        return None
    ids = np.array(tokens)
    seen = likeness(s, np.arange(len(ids)), ids)
    return seen.token if np.array_equal(np.sort(seen.token), np.sort(ids)) else None


def likeness(s: Subject, rows: Ints, tokens: Ints | None = None) -> Likeness:
    """Which of `tokens` (all of the verifier's) `rows` of the head are most like, by the cosine.

    Costs 2 R V H operations and a reading of the verifier's head, in pieces.
    """
    import torch

    assert s.verifier is not None
    chosen = torch.arange(s.verifier.config.vocab_size) if tokens is None else torch.from_numpy(tokens)
    own = torch.nn.functional.normalize(torch.from_numpy(s.folder.floats("lm_head.weight", rows)), dim=1)
    best = torch.full((len(rows), 2), -2.0)
    token = torch.zeros(len(rows), dtype=torch.int64)
    for start in range(0, len(chosen), CHUNK):
        ids = chosen[start : start + CHUNK]
        theirs = torch.nn.functional.normalize(s.verifier.lm_head(ids), dim=1)
        for part in range(0, len(rows), CHUNK):
            here = slice(part, part + CHUNK)
            cosine = own[here] @ theirs.T  # [R, C]
            top, where = cosine.topk(min(2, cosine.shape[1]), dim=1)
            token[here] = torch.where(top[:, 0] > best[here, 0], ids[where[:, 0]], token[here])
            best[here] = torch.cat([best[here], top], dim=1).topk(2, dim=1).values
    clear = (best[:, 0] > CLEAR) & (best[:, 0] - best[:, 1] > MARGIN)
    return Likeness(token.numpy(), clear.numpy())
