"""What does each choice of the demo's recipe bring? Same data, same optimiser steps, one thing changed at a time.

    make demo                                   # makes the store that this reads
    make bench NAME=ablation ARGS="--epochs 1"  # every variant; or ARGS="base random-start"

Each variant trains on the demo's store with the demo's settings but for the ones named, and is validated on the same
held-out samples. One epoch orders the variants; it does not reach the demo's figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from eyas.config import load_config
from eyas.demo import MAX_SEQ_LEN, TRAIN
from eyas.train.loop import Run

BASE = {**TRAIN, "ttt_warmup_epochs": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "random-start": {"init": "random"},
    "frozen-head": {"freeze_head": True},
    "verifier-kv-heads": {"num_kv_heads": None},
    "large-batch": {"batch_tokens": 2048},
    "small-batch": {"batch_tokens": 256},
    "lr-1e-3": {"lr": 1e-3},
    "lr-3e-3": {"lr": 3e-3},
    "equal-steps": {"step_weight_decay": 1.0},
    "dropout": {"dropout": 0.1},
    "loss-lk": {"loss": "lk"},
    "no-states": {"state_weight": 0.0},
    "states-4": {"state_weight": 4.0},
}


def main() -> None:
    """Train the variants and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variants", nargs="*", default=list(VARIANTS), metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="where `eyas demo` ran")
    parser.add_argument("--epochs", type=int, default=1)
    given = parser.parse_args()
    rows = []
    for name in given.variants:
        shutil.rmtree(Path("runs/ablation") / name, ignore_errors=True)  # an earlier one
        config = load_config(
            {
                "verifier_path": ".cache/SmolLM2-135M-Instruct",
                "data_dir": given.demo / "store",
                "vocab_mapping_dir": given.demo / "vocab",
                "output_dir": Path("runs/ablation") / name,
                "max_seq_len": MAX_SEQ_LEN,
                **BASE,
                **VARIANTS[name],
                "epochs": given.epochs,
            }
        )
        summary = Run(config, say=lambda _: None).train()
        rows.append({"variant": name, "seconds": summary["seconds"], **summary["validations"][-1]})
        print(line(rows[-1]), flush=True)
    out = Path("bench/out/ablation.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1))


def line(r: dict[str, Any]) -> str:
    """One variant in one line."""
    accuracy = " ".join(f"{a:.3f}" for a in r["accuracy"])
    return (
        f"{r['variant']:<18} loss {r['loss']:.3f} · accuracy {accuracy} · accept length {r['accept_length']:.3f} "
        f"(greedy {r['accept_length_greedy']:.3f}) · {r['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
