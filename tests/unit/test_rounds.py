"""Rounds of decoding, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.drafter.plan import make_plan
from eyas.evaluate.rounds import accept_length, beginnings


def test_greedy_rounds_step_over_what_was_kept() -> None:
    right = torch.tensor([[1.0, 1, 0, 1], [1, 0, 1, -1]])
    begins = torch.tensor([True, False, False, False])
    # At 0 both drafts are kept, the next round begins at 3 and keeps one: two rounds, three drafts.
    assert accept_length(right, begins) == pytest.approx(2.5)


def test_a_hard_stretch_counts_once_a_token_and_an_easy_one_once_a_round() -> None:
    right = torch.tensor([[1.0, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    begins = torch.tensor([True, False, False, False, False, False])
    # Round at 0 keeps three, the next begins at 4, then 5: tokens 4 + 1 + 1 in three rounds.
    assert accept_length(right, begins) == pytest.approx(2.0)


def test_chances_are_followed_to_every_outcome() -> None:
    chance = torch.tensor([[0.5, 0.25]])
    begins = torch.tensor([True, False])
    # Kept (1/2): the answer's next position is skipped. Not kept: a round at 1, which keeps 1/4.
    rounds, kept = 1 + 0.5, 0.5 + 0.5 * 0.25
    assert accept_length(chance, begins) == pytest.approx(1 + kept / rounds)


def test_every_answer_starts_its_own_rounds() -> None:
    two_turns = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], dtype=bool)
    one_turn = np.array([0, 1, 1, 1], dtype=bool)
    plan = make_plan([(np.arange(11), two_turns), (np.arange(4), one_turn)], 3)
    begins = beginnings(plan)
    # Behind the prompts' last tokens: p = 1 and 6 in the first document, p = 0 in the second.
    assert plan.key_position[plan.query_row[begins]].tolist() == [1, 6, 0]
    right = torch.full((3, len(begins)), -1.0)
    for k, rows in enumerate(plan.trained):
        right[k, rows] = 1.0
    # 2 + 3 + 2 drafts can be kept; the answers of three, four and three tokens take one round each.
    assert accept_length(right, begins) == pytest.approx(1 + 7 / 3)


def test_no_answer_is_one_token_a_round() -> None:
    assert accept_length(torch.full((3, 2), -1.0), torch.zeros(2, dtype=torch.bool)) == 1.0
