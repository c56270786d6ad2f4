"""Rounds on a text, counted as decoding would count them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.evaluate import agreement
from eyas.verifier import Verifier
from eyas.vocab import choose

V = 400


class Even:
    """In a drafter's place: its first choice is the text's next token where that is even, and another one elsewhere."""

    def __call__(self, plan: Any, _states: torch.Tensor) -> torch.Tensor:
        said = torch.zeros(plan.steps, len(plan.query_row), V)
        for k in range(plan.steps):
            following = plan.next_token[plan.target[k]]
            choice = torch.where(following % 2 == 0, following, following - 1)
            said[k, plan.trained[k], choice] = 1.0
        return said

    def eval(self) -> Even:
        return self

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def counted(prompt: int, ids: list[int], K: int) -> tuple[int, int]:
    """(rounds, kept drafts), with the text's tokens taken one round after the other."""
    rounds = kept = 0
    at = prompt  # the token that came out of the prompt's pass; a round drafts what follows it
    while at + 1 < len(ids):
        rounds += 1
        right = 0
        while right < K and at + 1 + right < len(ids) and ids[at + 1 + right] % 2 == 0:
            right += 1
        kept += right
        at += right + 1
    return rounds, kept


@pytest.mark.parametrize("K", [1, 3])
def test_drafts_are_kept_where_they_are_the_texts_next_token(tiny_verifier: Path, tmp_path: Path, K: int) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, V, n).tolist() for n in (3, 5, 4)]
    answers = [rng.integers(3, V, n).tolist() for n in (20, 9, 30)]
    verifier = Verifier(tiny_verifier)
    source = agreement.text_store(verifier, prompts, answers, tmp_path, "fp32", lambda _: None)
    vocab = choose(np.ones(V, np.int64), V)
    found = agreement.on_text(Even(), vocab, source, K)  # type: ignore[arg-type]
    each = [counted(len(p), p + a, K) for p, a in zip(prompts, answers, strict=True)]
    rounds, kept = (sum(numbers) for numbers in zip(*each, strict=True))
    assert kept > 5
    assert found == pytest.approx(1 + kept / rounds)
