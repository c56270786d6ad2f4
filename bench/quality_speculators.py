"""The other side of `bench/quality.py`: a run by speculators' own Trainer. Started by it, in the engines' environment.

    python quality_speculators.py FOLDER       # job.json there, data.safetensors one folder up

Its Trainer asks for a GPU by number; it is told "cpu" instead, and that is all that is changed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors import safe_open
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from speculators.train import trainer as spec
from speculators.train.data import CollateFn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig

TTT_STEPS = 3


class Samples(Dataset[dict[str, Any]]):
    """The store's samples by number, as its own datasets give them."""

    def __init__(self, file: Path) -> None:
        self.file = safe_open(str(file), "pt")

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids, mask, states, last = (self.file.get_tensor(f"{name}_{i}") for name in ("ids", "mask", "states", "last"))
        return {
            "input_ids": ids,
            "hidden_states": states,
            "verifier_last_hidden_states": last,
            "loss_mask": mask,
            "lengths": torch.tensor([len(ids)]),
            "position_ids": torch.arange(len(ids)),
        }


class Packs:
    """The epochs' packs; its Trainer sets the epoch."""

    def __init__(self, epochs: list[list[list[int]]]) -> None:
        self.epochs, self.epoch = epochs, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.epochs[self.epoch])

    def __len__(self) -> int:
        return len(self.epochs[self.epoch])


def main() -> None:
    """Train, and leave the drafter before and after."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    data = folder.parent / "data.safetensors"
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = AutoConfig.from_pretrained(job["verifier"])
    config.num_hidden_layers = 1
    H = config.hidden_size
    with safe_open(str(data), "pt") as file:
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    torch.manual_seed(0)
    model = Eagle3DraftModel.from_training_args(
        config,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=len(d2t),
        norm_before_residual=False,  # what the engines' llama class and eyas compute
        ttt_steps=TTT_STEPS,
        verifier_name_or_path=job["verifier"],
        draft_attn_impl="sdpa",  # the fastest that has a gradient on a CPU
    )
    model.save_pretrained(folder / "start")
    collate = CollateFn(job["batch_tokens"], H, 3, torch.bfloat16, shift_batch)
    loader = DataLoader(Samples(data), batch_sampler=Packs(job["packs"]), collate_fn=collate)
    spec.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None  # its timer's, for which there is nothing to wait for
    told = {"ttt_steps": TTT_STEPS, "ttt_step_loss_decay": job["decay"]}
    told["loss_config"] = resolve_loss_config("kl_div", "eager")  # the fused one needs Triton
    steps = sum(map(len, job["packs"]))
    trainer = spec.Trainer(
        model,
        spec.TrainerConfig(
            lr=job["lr"],
            num_epochs=job["epochs"],
            save_path=str(folder / "checkpoints"),
            train_call_kwargs=told,
            weight_decay=job["weight_decay"],
            scheduler_type="cosine",
            scheduler_warmup_ratio=0.05,
            max_steps=steps,
            log_freq=20,
            checkpoint_freq=10**6,
        ),
        loader,
    )
    trainer.device_type = "cpu"
    trainer.run_training()
    model.save_pretrained(folder / "end")


if __name__ == "__main__":
    main()
