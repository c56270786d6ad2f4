"""The whole path through the command line, on a tiny random verifier."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import eyas as package
from conftest import Eyas, Tiny
from eyas.config import load_config
from eyas.train.batches import load_batch
from eyas.train.loop import Run
from eyas.train.optim import learning_rate

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = ("--max-seq-len", 64, "--batch-tokens", 128, "--dtype", "fp32", "--num-workers", 2)
STATUS = re.compile(
    r"step 1/(?P<total>[\d,]+) · epoch 1/\d+ · loss \d+\.\d+ · accuracy \d\.\d+/\d\.\d+/\d\.\d+ · lr \d\.\d+e-\d+ · "
    r"grad norm [\d.]+ · [\d,]+ tokens/s · data wait \d+% · [\d,.]+ MB/s( of the [\d,]+ needed)? · .* left"
)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`eyas ARGUMENTS` in a process of its own, with nothing on its path but this package."""
    return subprocess.run(
        [sys.executable, "-m", "eyas.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(package.__file__).parents[1])},
    )


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "last" / "model.safetensors")


def equal(a: Path, b: Path) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def train(eyas: Eyas, tiny: Tiny, output: Path, *more: object) -> list[str]:
    result = eyas(
        "train", "--verifier-path", tiny.verifier, "--data-dir", tiny.store, "--vocab-mapping-dir", tiny.vocab,
        "--output-dir", output, *SIZES, *more,
    )  # fmt: skip
    assert (result.code, result.err) == (0, [])
    return result.out


# -- the whole path ----------------------------------------------------------------------------------------------------


def test_every_command_from_conversations_to_an_exported_drafter(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    v = ("--verifier-path", tiny.verifier)
    prepared, store, vocab, run, drafter = (tmp_path / n for n in ("p", "s", "m", "run", "drafter"))
    for arguments in (
        ("prepare", *v, "--data", tiny.conversations, "--output-dir", prepared, "--max-seq-len", 128),
        ("capture", *v, "--prepared", prepared, "--output-dir", store, "--dtype", "fp32"),
        ("vocab", *v, "--data", prepared, "--output-dir", vocab, "--size", 96),
        ("train", *v, "--data-dir", store, "--vocab-mapping-dir", vocab, "--output-dir", run, "--epochs", 2, *SIZES),
        ("eval", run, "--dtype", "fp32", "--max-new-tokens", 12),
        ("export", run, "--output-dir", drafter),
    ):
        result = eyas(*arguments)
        assert result.code == 0, result.err
        assert result.out

    summary = json.loads((run / "summary.json").read_text())
    assert summary["epochs"] == 2 and len(summary["validations"]) == 2 and summary["skipped"] == []
    steps = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert steps == [f"step-{summary['steps'] // 2:06d}", f"step-{summary['steps']:06d}"]
    assert (run / "last").resolve().name == steps[-1]
    assert (run / "best").resolve().name == summary["best"]
    best = max(summary["validations"], key=lambda v: v["accept_length"])
    assert summary["best"] == f"step-{best['step']:06d}"

    figures = json.loads((run / "eval.json").read_text())
    assert figures["checkpoint"] == summary["best"]
    assert figures["decode"]["lossless"] and figures["decode"]["identical"] == figures["decode"]["prompts"] == 4
    assert figures["val"]["accept_length"] == pytest.approx(best["accept_length"], abs=1e-4)

    exported = load_file(drafter / "model.safetensors")
    trained = load_file(run / "best" / "model.safetensors")
    assert exported.keys() == trained.keys() and exported["d2t"].tolist() == trained["d2t"].tolist()
    assert all(torch.equal(exported[n], t.to(exported[n].dtype)) for n, t in trained.items())
    assert exported["lm_head.weight"].dtype == torch.bfloat16 and exported["lm_head.weight"].shape == (96, 64)
    card = (drafter / "README.md").read_text()
    assert f"**{figures['decode']['accept_length']:.2f}**" in card
    said = "\n".join(result.out)
    for text in (card, said):
        assert f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {drafter}" in text
        assert f'"method": "eagle3", "model": "{drafter}", "num_speculative_tokens": 3' in text


@pytest.mark.parametrize("mapping", ["M", "M-pt"])
def test_the_founding_command_line_works_as_it_stands(tiny: Tiny, founding: Path, tmp_path: Path, mapping: str) -> None:
    result = command(
        "train", "--verifier-path", tiny.verifier, "--data-dir", founding / "D", "--vocab-mapping-dir",
        founding / mapping, "--output-dir", tmp_path / "O", "--epochs", "5", "--lr", "3e-5", "--max-seq-len", "2048",
        "--ttt-steps", "3", "--noise-std", "0.05", "--val-ratio", "0.1", "--scheduler", "cosine", "--warmup-ratio",
        "0.01", "--num-workers", "4",
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    first = next(line for line in result.stdout.splitlines() if line.startswith("step "))
    assert STATUS.fullmatch(first), first
    summary = json.loads((tmp_path / "O" / "summary.json").read_text())
    assert summary["epochs"] == 5 and len(summary["validations"]) == 5
    run = yaml.safe_load((tmp_path / "O" / "run.yaml").read_text())
    assert run["config"]["lr"] == 3e-5 and run["config"]["noise_std"] == 0.05
    assert run["data"]["norm_side"] == "after" and run["data"]["samples"] == 24
    t2d = np.load(founding / "M" / "t2d.npy")
    assert weights(tmp_path / "O")["t2d"].tolist() == t2d.tolist()


# -- the run -----------------------------------------------------------------------------------------------------------


def test_the_status_line_is_there_at_the_first_and_the_last_step(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    out = train(eyas, tiny, tmp_path / "run", "--epochs", 3)
    steps = [line for line in out if line.startswith("step ")]
    match = STATUS.fullmatch(steps[0])
    assert match and steps[-1].startswith(f"step {match['total']}/{match['total']} ")
    assert sum(line.startswith("validation after epoch") for line in out) == 3


def test_a_saved_run_gives_the_same_drafter_again(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    settings = ("--epochs", 2, "--noise-std", 0.3, "--lr", 2e-3, "--seed", 5, "--step-weight-decay", 0.8)
    train(eyas, tiny, tmp_path / "a", *settings)
    result = eyas("train", "--config", tmp_path / "a" / "run.yaml", "--output-dir", tmp_path / "b")
    assert (result.code, result.err) == (0, [])
    a, b = (yaml.safe_load((tmp_path / d / "run.yaml").read_text()) for d in "ab")
    assert {**a["config"], "output_dir": ""} == {**b["config"], "output_dir": ""}
    assert equal(tmp_path / "a", tmp_path / "b")
    others = {"c": ("--seed", 6), "d": ("--noise-std", 0), "e": ("--step-weight-decay", 1), "f": ("--state-weight", 4)}
    others |= {"g": ("--outside", "drop"), "h": ("--loss", "kl+0.5*tv")}
    for name, change in others.items():  # the file gives way to a flag, and what is changed matters
        result = eyas("train", "--config", tmp_path / "a" / "run.yaml", "--output-dir", tmp_path / name, *change)
        assert result.code == 0
        assert not equal(tmp_path / "a", tmp_path / name)


def test_the_number_of_reading_threads_changes_nothing(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    for threads in (0, 5):
        train(eyas, tiny, tmp_path / str(threads), "--epochs", 1, "--num-workers", threads)
    assert equal(tmp_path / "0", tmp_path / "5")


def test_a_whole_vocabulary_and_no_validation_are_possible(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    result = eyas(
        "train", "--verifier-path", tiny.verifier, "--data-dir", tiny.store, "--output-dir", tmp_path / "run",
        "--val-ratio", 0, "--epochs", 2, *SIZES,
    )  # fmt: skip
    assert (result.code, result.err) == (0, [])
    assert weights(tmp_path / "run")["lm_head.weight"].shape == (400, 64)
    assert (tmp_path / "run" / "best").resolve() == (tmp_path / "run" / "last").resolve()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["validations"] == []


def test_no_sample_is_both_trained_on_and_validated(tiny: Tiny, tmp_path: Path) -> None:
    run = Run(config(tiny, tmp_path, epochs=3), say=lambda _text: None)
    assert len(run.train_samples) + len(run.val_samples) == 40
    for packs in run.epochs:
        seen = [i for samples in packs for i in samples]
        assert sorted(seen) == run.train_samples
        assert not set(seen) & set(run.val_samples)


def test_the_learning_rate_warms_up_and_ends_at_nothing(tiny: Tiny, tmp_path: Path) -> None:
    c = config(tiny, tmp_path, lr=1.0, warmup_ratio=0.1)
    rates = [learning_rate(step, 100, c) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.5)
    assert all(a > b for a, b in pairwise(rates[10:])) and 0 < rates[-1] < 0.001
    linear = [
        learning_rate(step, 100, config(tiny, tmp_path, lr=1.0, warmup_ratio=0, scheduler="linear")) for step in (0, 50)
    ]
    assert linear == pytest.approx([1.0, 0.5])
    constant = config(tiny, tmp_path, lr=1.0, warmup_ratio=0, scheduler="constant")
    assert learning_rate(99, 100, constant) == 1.0


def config(tiny: Tiny, output: Path, **settings: Any) -> Any:
    return load_config(
        {
            "verifier_path": str(tiny.verifier),
            "data_dir": tiny.store,
            "vocab_mapping_dir": tiny.vocab,
            "output_dir": output / "run",
            "max_seq_len": 64,
            "batch_tokens": 128,
            "dtype": "fp32",
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("loss", "steps", "left"), [("kl", 250, 0.02), ("reverse_kl", 100, 0.3), ("tv", 100, 0.5), ("lk", 100, 0.5)]
)
def test_one_fixed_batch_is_learnt_by_heart_with_every_loss(
    tiny: Tiny, tmp_path: Path, loss: str, steps: int, left: float
) -> None:
    run = Run(config(tiny, tmp_path, init="random", lr=5e-3, warmup_ratio=0.02, loss=loss), lambda _text: None)
    batch = load_batch(run.source, run.train_samples[:2], 3, 64)
    run.epochs, run.packs = [[run.train_samples[:2]]], steps
    first = run._step(0, [0], 3, iter([batch]))
    for run.at.packs in range(1, steps):
        last = run._step(0, [0], 3, iter([batch]))
    assert first and last and last["loss"] < left * first["loss"], (first, last)
    assert min(last["accuracy"]) > 0.4 > 0.1 > max(first["accuracy"]), (first, last)


def test_an_exported_drafter_takes_the_place_of_an_older_export_and_of_nothing_else(
    tiny: Tiny, tmp_path: Path, eyas: Eyas
) -> None:
    train(eyas, tiny, tmp_path / "run", "--epochs", 1)
    for _ in range(2):
        assert eyas("export", tmp_path / "run", "--output-dir", tmp_path / "drafter").code == 0
    assert sorted(p.name for p in (tmp_path / "drafter").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    shutil.copytree(tiny.verifier, tmp_path / "verifier")
    (tmp_path / "file").write_text("mine")
    for taken in ("verifier", "file", "run", "run/best"):
        result = eyas("export", tmp_path / "run", "--output-dir", tmp_path / taken)
        assert (result.code, len(result.err)) == (2, 1)
        assert ("is a file" if taken == "file" else "holds other files") in result.err[0]
    assert sorted(p.name for p in (tmp_path / "verifier").iterdir()) == sorted(p.name for p in tiny.verifier.iterdir())
