"""speculators' own drafter: run by the engine environment's python, which has speculators and not eyas.

    python speculators_run.py say FOLDER INPUT OUTPUT
    python speculators_run.py train VERIFIER INPUT FOLDER STEPS

INPUT and OUTPUT are safetensors, FOLDER a drafter in speculators' form; the log goes to stderr.
say: INPUT is input_ids [T], states [T, 3 H] in the dtype to compute in; OUTPUT is logits_k [T - 1, Vd] of each TTT step
k of 3: row p has read the state at p and token p + 1.
train: a drafter of llama's kind for the verifier, from nothing, with speculators' own model, shift and loss, norm flags
off; INPUT is d2t, t2d and, for each sample i, ids_i [T], states_i [T, 3 H], last_i [T, H] before the norm, mask_i [T].
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TTT_STEPS = 3


def say(folder: str, input_file: str, output_file: str) -> None:
    """Load the drafter as speculators does, and keep what its head says at every step."""
    import torch
    from safetensors.torch import load_file, save_file
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    given = load_file(input_file)
    ids, states = given["input_ids"], given["states"]
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention compiles for minutes on a CPU
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=states.dtype).to(states.dtype).eval()
    said: list[Any] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: said.append(out[0].float().contiguous()))
    T = len(ids) - 1
    with torch.no_grad():
        model(
            hidden_states=states[None, :-1],
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, T, dtype=torch.int64),
            position_ids=torch.arange(T)[None],
            ttt_steps=TTT_STEPS,
        )
    save_file({f"logits_{k}": logits for k, logits in enumerate(said)}, output_file)


def train(verifier: str, input_file: str, folder: str, steps: str) -> None:
    """One sample a step, AdamW at 1e-3."""
    import torch
    from safetensors.torch import load_file
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
    from transformers import AutoConfig

    given = load_file(input_file)
    config = AutoConfig.from_pretrained(verifier)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    model = Eagle3DraftModel.from_training_args(
        config,
        t2d=given["t2d"],
        d2t=given["d2t"],
        draft_vocab_size=len(given["d2t"]),
        norm_before_residual=False,
        ttt_steps=TTT_STEPS,
        verifier_name_or_path=verifier,
        draft_attn_impl="eager",
    )
    weights = [p for p in model.parameters() if p.requires_grad]
    loss_config = resolve_loss_config("kl_div", "eager")  # the fused one needs a GPU
    optimiser = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0)
    count = sum(name.startswith("ids_") for name in given)
    for step in range(int(steps)):
        ids, states, last, mask = (given[f"{n}_{step % count}"] for n in ("ids", "states", "last", "mask"))
        batch = {"input_ids": ids, "hidden_states": states.float(), "verifier_last_hidden_states": last.float()}
        batch |= {"loss_mask": mask, "lengths": torch.tensor([len(ids)]), "position_ids": torch.arange(len(ids))}
        batch = {name: value[None] for name, value in shift_batch(batch).items() if name != "lengths"}
        documents = torch.zeros_like(batch["input_ids"])
        _, loss, _ = model(**batch, document_ids=documents, ttt_steps=TTT_STEPS, loss_config=loss_config)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        if step % 20 == 0 or step == int(steps) - 1:
            print(f"step {step} loss {float(loss):.3f}", file=sys.stderr, flush=True)
    model.save_pretrained(folder)


if __name__ == "__main__":
    {"say": say, "train": train}[sys.argv[1]](*sys.argv[2:])
