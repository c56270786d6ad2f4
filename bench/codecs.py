"""What does storing states in eight bits cost a drafter? One epoch on each codec, measured on the states as captured.

    python bench/codecs.py runs/demo --verifier .cache/SmolLM2-135M-Instruct [--codec int8 --last trained]

The demo's store is converted to the codec, a drafter is trained on it for one epoch (three TTT steps, the demo's
settings otherwise), and its figures are taken on the held-out samples of the original store: accept length at
temperature 1 and greedy, by rounds. Nothing is decoded. One run each: differences under 0.01 are noise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from eyas.config import TrainConfig
from eyas.evaluate.offline import evaluate
from eyas.store.check import check
from eyas.store.convert import convert
from eyas.store.reader import open_source
from eyas.train.batches import Loader, pack, split_source
from eyas.train.loop import Run
from eyas.verifier import Verifier

SETTINGS: dict[str, Any] = {
    "lr": 0.002, "weight_decay": 0.05, "max_seq_len": 512, "batch_tokens": 512, "val_ratio": 0.08, "num_workers": 2,
    "step_weight_decay": 0.8, "state_weight": 16.0, "num_kv_heads": 9, "epochs": 1,
}  # fmt: skip


def measure(demo: Path, verifier_path: str, codec: str, last: str, folder: Path) -> dict[str, Any]:
    """Convert, look, train, evaluate; the figures as one row."""
    verifier = Verifier(verifier_path)
    data, row = demo / "store", {"codec": codec, "last": last}
    if (codec, last) != ("bf16", "all"):
        data = folder / "store"
        done = convert(demo / "store", data, verifier, codec=codec, last=last)
        report = check(data, verifier, against=demo / "store", say=lambda _line: None)
        cost = report["codecs"][0]
        row |= {"convert_s": done["seconds"], "kl": cost["kl"], "top1": cost["top1"], "error": cost["error"]}
    source = open_source(demo / "store", verifier.config, verifier.fingerprint)
    stored = open_source(data)
    size = sum(stored.nbytes(i) for i in range(len(stored.ids)))
    config = TrainConfig(
        verifier_path=verifier_path,
        data_dir=data,
        vocab_mapping_dir=demo / "vocab",
        output_dir=folder / "run",
        **SETTINGS,
    )
    run = Run(config)
    run.train()
    _, val, _ = split_source(source, config.max_seq_len, config.val_ratio)
    packs = pack(val, source.lengths, 512, config.max_seq_len)
    run.drafter.eval()
    figures = evaluate(run.drafter, run.head, Loader(source, packs, 3, config.max_seq_len, 2), 3, run.dtype)
    assert figures is not None
    return row | {
        "bytes_per_token": round(size / int(stored.lengths.sum()), 1),
        "accept_length": figures.accept_length,
        "accept_length_greedy": figures.accept_length_greedy,
        "accuracy": figures.accuracy,
        "loss": figures.loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demo", type=Path)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--codec", action="append")
    parser.add_argument("--last", default="all")
    asked = parser.parse_args()
    out = Path("bench/out/codecs.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(out.read_text()) if out.exists() else []
    for codec in asked.codec or ("bf16", "fp8", "int8"):
        folder = Path(tempfile.mkdtemp(prefix="codecs-"))
        try:
            rows.append(measure(asked.demo, asked.verifier, codec, asked.last, folder))
        finally:
            shutil.rmtree(folder)
        out.write_text(json.dumps(rows, indent=1))
        print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
