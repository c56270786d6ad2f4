"""What do eight bits, or a few logits, cost a drafter? One epoch on each, measured on the states as captured.

    python bench/codecs.py runs/demo --verifier .cache/SmolLM2-135M-Instruct [int8,trained bf16,logits:64 ...]

The demo's store is converted to the codec, a drafter is trained on it for one epoch (three TTT steps, the demo's
settings otherwise), and its figures are taken on the held-out samples of the original store: accept length at
temperature 1 and greedy, by rounds. Nothing is decoded. One run each: differences under 0.01 are noise. Kept logits
have no states to be targets (`--state-weight`), so they stand beside bf16 without them (bf16,all,0). `--share 0.25`
trains on a quarter of the samples; the held-out ones are the same.
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
from eyas.store.layout import QUARANTINE
from eyas.store.reader import open_source
from eyas.train.batches import Loader, pack, split_source
from eyas.train.loop import Run
from eyas.train.setup import verifier_head
from eyas.verifier import Verifier

RUNS = ["bf16", "fp8", "int8", "int8,trained", "bf16,all,0", "bf16,logits:64", "bf16,logits:128"]
SETTINGS: dict[str, Any] = {
    "lr": 0.002, "weight_decay": 0.05, "max_seq_len": 512, "batch_tokens": 512, "val_ratio": 0.08, "num_workers": 2,
    "step_weight_decay": 0.8, "state_weight": 16.0, "num_kv_heads": 9, "epochs": 1,
}  # fmt: skip


def subset(store: Path, folder: Path, verifier: Verifier, share: float) -> tuple[Path, float]:
    """The store with a share of its training samples and all held-out ones, and what share of that is held out."""
    source = open_source(store, verifier.config, verifier.fingerprint)
    train, val, _ = split_source(source, SETTINGS["max_seq_len"], SETTINGS["val_ratio"])
    kept = train[:: round(1 / share)]
    folder.mkdir()
    for path in store.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    left_out = {source.ids[i]: "not in this share" for i in set(range(len(source.ids))) - set(kept) - set(val)}
    (folder / QUARANTINE).write_text(json.dumps(left_out))
    return folder, len(val) / (len(val) + len(kept))


def measure(demo: Path, verifier_path: str, run_: str, share: float, folder: Path) -> dict[str, Any]:
    """Convert, look, train, evaluate; the figures as one row. run_: codec, rows of the last state, state weight."""
    codec, last, weight = (*run_.split(","), *["all", ""][run_.count(",") :])[:3]
    settings = dict(SETTINGS)
    if weight or last.startswith("logits"):
        settings["state_weight"] = float(weight or 0)
    verifier = Verifier(verifier_path)
    row = {"codec": codec, "last": last, "state_weight": settings["state_weight"], "share": share}
    data = original = demo / "store"
    if share < 1:
        data, settings["val_ratio"] = subset(original, folder / "part", verifier, share)
        original = data
    if (codec, last) != ("bf16", "all"):
        data = folder / "store"
        done = convert(original, data, verifier, codec=codec, last=last)
        report = check(data, verifier, against=original, say=lambda _line: None)
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
        **settings,
    )
    run = Run(config)
    run.train()
    _, val, _ = split_source(source, config.max_seq_len, SETTINGS["val_ratio"])
    assert {source.ids[i] for i in val} == {stored.ids[i] for i in run.val_samples}
    packs = pack(val, source.lengths, 512, config.max_seq_len)
    run.drafter.eval()
    head = verifier_head(run.verifier, source, run.vocab, run.device, run.dtype)
    figures = evaluate(run.drafter, head, Loader(source, packs, 3, config.max_seq_len, 2), 3, run.dtype)
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
    parser.add_argument("runs", nargs="*", default=RUNS, help="codec[,rows of the last state[,state weight]]")
    parser.add_argument("--share", type=float, default=1.0, help="of the training samples")
    asked = parser.parse_intermixed_args()
    out = Path("bench/out/codecs.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    for run in asked.runs:
        folder = Path(tempfile.mkdtemp(prefix="codecs-"))
        try:
            row = measure(asked.demo, asked.verifier, run, asked.share, folder)
        finally:
            shutil.rmtree(folder)
        rows = json.loads(out.read_text()) if out.exists() else []
        out.write_text(json.dumps([*rows, row], indent=1))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
