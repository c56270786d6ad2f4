"""speculators' own drafter, one forward pass: run by the engine environment's python, which has no eyas.

    python speculators_run.py FOLDER INPUT OUTPUT     (OUTPUT and INPUT are safetensors; the log goes to stderr)

FOLDER: a drafter in speculators' form; its verifier is the one that its config.json names.
INPUT: input_ids [T], states [T, 3 H] in the dtype to compute in. OUTPUT: logits_k [T - 1, Vd] of each TTT step k of 3:
row p has read the state at p and token p + 1.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
STEPS = 3


def run(folder: str, input_file: str, output_file: str) -> None:
    """Load the drafter as speculators does, and keep what its head says at every step."""
    import speculators
    import torch
    from safetensors.torch import load_file, save_file
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    given = load_file(input_file)
    ids, states = given["input_ids"], given["states"]
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention compiles for minutes on a CPU
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=states.dtype).to(states.dtype).eval()
    said: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: said.append(out[0].float().contiguous()))
    T = len(ids) - 1
    with torch.no_grad():
        model(
            hidden_states=states[None, :-1],
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, T, dtype=torch.int64),
            position_ids=torch.arange(T)[None],
            ttt_steps=STEPS,
        )
    print(f"speculators {speculators.__version__}", file=sys.stderr)
    save_file({f"logits_{k}": logits for k, logits in enumerate(said)}, output_file)


if __name__ == "__main__":
    run(*sys.argv[1:])
