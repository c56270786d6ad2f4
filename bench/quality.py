"""Is a drafter that eyas trains as good as one that speculators 0.9.0 trains, from the same states in the same steps?

    python bench/quality.py runs/demo --verifier .cache/SmolLM2-135M-Instruct [--only equal]

Both sides get the demo's store, its split, its draft vocabulary and the same packs in the same order. speculators
trains with its own Trainer, model, collate and loss (`quality_speculators.py`, in the engines' environment; its Trainer
is only told that its device is a CPU). `eyas eval` decodes with every drafter, on the same held-out prompts, greedily,
3 drafts a round: accept length.

equal    eyas starts from the very weights that speculators starts from, and trains what it trains (the head frozen):
         packs of 2,048, KL, AdamW at 1e-3, cosine
best     eyas as the demo trains (`runs/demo/train` is taken as it is); speculators for as many epochs of the same packs
         of 512, with what served it best of `--settings`

Adds accept_length {eyas, speculators, eyas_best, speculators_best} to bench/out/train.json, and writes every run to
bench/out/quality.json, which a second call goes on from.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from eyas.config import TrainConfig
from eyas.demo import EVAL, MAX_SEQ_LEN, TRAIN
from eyas.evaluate.run import EvalOptions, evaluate_checkpoint
from eyas.importing import import_drafter
from eyas.store.reader import open_source
from eyas.train.batches import epoch_order, pack, split_source
from eyas.train.loop import Run
from eyas.verifier import Verifier
from eyas.vocab import load as load_vocab

EQUAL = {"lr": 1e-3, "epochs": 2, "batch_tokens": 2048, "weight_decay": 0.01, "decay": 1.0}
BEST = {"epochs": TRAIN["epochs"], "batch_tokens": TRAIN["batch_tokens"], "weight_decay": TRAIN["weight_decay"]}
SETTINGS = {
    "lr 1e-3": {**BEST, "lr": 1e-3, "decay": 1.0},
    "lr 2e-3, decay 0.8": {**BEST, "lr": 2e-3, "decay": 0.8},
}


def write_data(demo: Path, verifier: Verifier, folder: Path) -> None:
    """The store's samples as one plain file for the other side, with the draft vocabulary."""
    if (folder / "data.safetensors").exists():
        return
    source = open_source(demo / "store", verifier.config, verifier.fingerprint)
    vocab = load_vocab(demo / "vocab")
    data = {"d2t": torch.from_numpy(vocab.d2t), "t2d": torch.from_numpy(vocab.t2d)}
    for i in range(len(source.ids)):
        ids, mask = source.tokens(i)
        states = source.states(i)
        data |= {
            f"ids_{i}": torch.from_numpy(np.asarray(ids)).long(),
            f"mask_{i}": torch.from_numpy(np.asarray(mask)).clone(),
            f"states_{i}": torch.cat(list(states[:3]), dim=-1),
            f"last_{i}": states[3].contiguous(),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(data, folder / "data.tmp")
    (folder / "data.tmp").rename(folder / "data.safetensors")


def packs_of(demo: Path, verifier: Verifier, settings: dict[str, Any]) -> list[list[list[int]]]:
    """Each epoch's packs, as `eyas train` makes them."""
    source = open_source(demo / "store", verifier.config, verifier.fingerprint)
    train, _, _ = split_source(source, MAX_SEQ_LEN, TRAIN["val_ratio"])
    return [
        pack(epoch_order(train, 0, epoch), source.lengths, settings["batch_tokens"], MAX_SEQ_LEN)
        for epoch in range(settings["epochs"])
    ]


def train_theirs(python: str, demo: Path, verifier: Verifier, settings: dict[str, Any], folder: Path) -> float:
    """speculators' run; returns its seconds. Leaves `start` and `end`, drafters in its own form."""
    folder.mkdir(parents=True, exist_ok=True)
    packs = packs_of(demo, verifier, settings)
    (folder / "job.json").write_text(json.dumps({**settings, "packs": packs, "verifier": str(verifier.path)}))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    command = [python, str(Path(__file__).with_name("quality_speculators.py")), str(folder)]
    started = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, env=env, stdout=log, stderr=log, check=True)
    return time.monotonic() - started


def train_ours(demo: Path, verifier: Verifier, settings: dict[str, Any], start: Path, folder: Path) -> float:
    """eyas' run from the weights in `start`; returns its seconds."""
    config = TrainConfig(
        verifier_path=str(verifier.path), data_dir=demo / "store", output_dir=folder, init_from=start, freeze_head=True,
        lr=settings["lr"], epochs=settings["epochs"], batch_tokens=settings["batch_tokens"], max_seq_len=MAX_SEQ_LEN,
        weight_decay=settings["weight_decay"], step_weight_decay=settings["decay"], betas=(0.9, 0.999),
        warmup_ratio=0.05, val_ratio=TRAIN["val_ratio"], num_workers=2,
    )  # fmt: skip
    started = time.monotonic()
    Run(config).train()
    return time.monotonic() - started


def accept_length(checkpoint: Path, demo: Path, verifier: Verifier, prompts: int) -> dict[str, Any]:
    """By decoding of so many held-out prompts, and beside it the simulated one of all."""
    options = EvalOptions(
        verifier_path=str(verifier.path), data_dir=demo / "store", val_ratio=TRAIN["val_ratio"],
        max_seq_len=MAX_SEQ_LEN, **{**EVAL, "stream_dtype": None, "prompts": prompts},
    )  # fmt: skip
    found = evaluate_checkpoint(checkpoint, options, checkpoint.parent / f"{checkpoint.name}-eval.json")
    return {
        "accept_length": found["decode"]["accept_length"],
        "prompts": prompts,
        "simulated": found["val"]["accept_length"],
        "greedy": found["val"]["accept_length_greedy"],
        "accuracy": found["val"]["accuracy"],
    }


def main() -> None:
    """Train what is not there yet, decode, print and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("demo", type=Path)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--folder", type=Path, default=Path("bench/out/quality"))
    parser.add_argument("--only", nargs="*", default=["equal", *SETTINGS])
    parser.add_argument(
        "--prompts", type=int, default=EVAL["prompts"], help="to decode; all are decoded anew for another"
    )
    parser.add_argument("--engine-python", default=os.environ.get("EYAS_ENGINE_PYTHON", ".venv-engines/bin/python"))
    given = parser.parse_args()
    verifier = Verifier(given.verifier)
    write_data(given.demo, verifier, given.folder)
    out = Path("bench/out/quality.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}

    def keep(name: str, checkpoint: Path, train: Callable[[], float] | None = None) -> None:
        row = rows.get(name, {})
        if train is not None and not checkpoint.exists():
            row["train_seconds"] = train()
        if row.get("prompts") != given.prompts:
            row |= accept_length(checkpoint.resolve(), given.demo, verifier, given.prompts)
        rows[name] = row
        out.write_text(json.dumps(rows, indent=1))
        print(name, json.dumps(row), flush=True)

    for name in given.only:
        settings = EQUAL if name == "equal" else SETTINGS[name]
        folder = given.folder / name.replace(" ", "-").replace(",", "")

        def theirs(settings: dict[str, Any] = settings, folder: Path = folder) -> float:
            seconds = train_theirs(given.engine_python, given.demo, verifier, settings, folder)
            for which in ("start", "end"):
                import_drafter(folder / which, str(verifier.path), folder / f"{which}-imported")
            return seconds

        def ours(settings: dict[str, Any] = settings, folder: Path = folder) -> float:
            return train_ours(given.demo, verifier, settings, folder / "start-imported", folder / "eyas")

        keep(f"speculators, {name}", folder / "end-imported", theirs)
        if name == "equal":
            keep("eyas, equal", folder / "eyas" / "best", ours)
    keep("eyas, the demo", given.demo / "train" / "best")
    lengths = {name: row["accept_length"] for name, row in rows.items()}
    best = [length for name, length in lengths.items() if name.startswith("speculators")]
    result = {
        "eyas": lengths.get("eyas, equal"),
        "speculators": lengths.get("speculators, equal"),
        "eyas_best": max(length for name, length in lengths.items() if name.startswith("eyas")),
        "speculators_best": max(best, default=None),
    }
    kept_in = Path("bench/out/train.json")
    kept = json.loads(kept_in.read_text()) if kept_in.exists() else {}
    kept_in.write_text(json.dumps({**kept, "accept_length": result}, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
