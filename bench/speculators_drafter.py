"""A drafter that speculators trains on a run's store: imported, checked and evaluated by eyas, and where it stands.

    python bench/speculators_drafter.py --run runs/demo/train --engine-python .venv-engines/bin/python

It starts from random weights and sees few steps, so its figures say that the way is open, not which trainer is better.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engines"))

from test_speculators import training_data  # noqa: E402

from eyas.check.run import check  # noqa: E402
from eyas.drafter.checkpoint import load_checkpoint  # noqa: E402
from eyas.evaluate.hosted import engine_environment  # noqa: E402
from eyas.evaluate.run import EvalOptions, evaluate_checkpoint, find_checkpoint, verifier_of  # noqa: E402
from eyas.importing import import_drafter  # noqa: E402
from eyas.store.reader import open_source  # noqa: E402
from eyas.train.batches import split_source  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=16)
    a = parser.parse_args()
    folder, run = find_checkpoint(a.run)
    verifier = verifier_of(run, None, False)
    source = open_source(Path(run["data_dir"]), verifier.config, verifier.fingerprint)
    train, _, _ = split_source(source, run["max_seq_len"], run["val_ratio"])
    _, vocab = load_checkpoint(folder, verifier.config, verifier.embedding())
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        training_data(source, vocab, train[: a.samples], work / "data.safetensors")
        command = [a.engine_python, str(ROOT / "tests/engines/speculators_run.py"), "train"]
        command += [str(verifier.path.absolute()), str(work / "data.safetensors"), str(work / "theirs"), str(a.steps)]
        started = time.perf_counter()
        subprocess.run(command, env=engine_environment(a.engine_python), check=True)
        print(f"trained by speculators in {time.perf_counter() - started:.0f} s")
        print(f"eyas check: exit code {check(work / 'theirs', verifier_path=str(verifier.path))}")
        import_drafter(work / "theirs", str(verifier.path), work / "ours")
        options = EvalOptions(
            str(verifier.path), Path(run["data_dir"]), run["val_ratio"], run["max_seq_len"], prompts=a.prompts,
            max_new_tokens=32, dtype="fp32",
        )  # fmt: skip
        evaluate_checkpoint(work / "ours", options, work / "eval.json")


if __name__ == "__main__":
    main()
