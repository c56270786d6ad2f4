"""What the unit tests of other tools' files share: a few answers of the tiny verifier, with its states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.verifier import Verifier

COUNT = 12


@pytest.fixture(scope="session")
def on_policy(tiny_verifier: Path) -> list[dict[str, Any]]:
    """What the verifier says to random prompts: {input_ids, loss_mask, before, after (the four states, float32)}."""
    model = Verifier(tiny_verifier).load_model(torch.float32)
    kept: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _m, args: kept.append(args[0]))
    samples, rng = [], torch.Generator().manual_seed(0)
    for i in range(COUNT):
        prompt = torch.randint(3, 300, (1, 5 + i), generator=rng)
        with torch.inference_mode():
            ids = model.generate(prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
            kept.clear()
            states = model(ids, output_hidden_states=True).hidden_states
        aux = [states[k][0].clone() for k in (2, 4, 5)]
        mask = torch.arange(ids.shape[1]) >= prompt.shape[1]
        sample = {"input_ids": ids[0].clone(), "loss_mask": mask.long()}
        samples.append({**sample, "before": [*aux, kept[0][0].clone()], "after": [*aux, states[-1][0].clone()]})
    return samples
