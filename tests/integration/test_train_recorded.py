"""`eyas train`, `capture` and `eval` under the recorder: what their run directories tell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded import why
from safetensors.torch import load_file

from conftest import Eyas, Tiny
from eyas.record import beat, events
from eyas.store.layout import Manifest
from eyas.store.reader import open_source
from eyas.store.writer import StoreWriter

pytestmark = pytest.mark.usefixtures("one_thread")


def train_words(tiny: Tiny, output: Path, store: Path | None = None) -> tuple[object, ...]:
    return (
        "train", "--verifier-path", tiny.verifier, "--data-dir", store or tiny.store, "--output-dir", output,
        "--vocab-mapping-dir", tiny.vocab, "--max-seq-len", 64, "--batch-tokens", 128, "--dtype", "fp32",
        "--num-workers", 2, "--epochs", 1,
    )  # fmt: skip


def test_a_run_tells_its_story_in_three_ways(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    run = tmp_path / "run"
    result = eyas(*train_words(tiny, run), "--epochs", 2)
    assert (result.code, result.err) == (0, [])
    assert result.out[0].startswith("eyas train (PID ") and str(run) in result.out[0]
    logged = [line[20:] for line in (run / "log.txt").read_text().splitlines()]
    assert logged == result.out
    steps = json.loads((run / "summary.json").read_text())["steps"]
    told = list(events.read(run / "events.jsonl"))
    assert [e["event"] for e in told if e["event"] != "step"] == [
        "start", "checkpoint", "validation", "checkpoint", "validation", "end",
    ]  # fmt: skip
    first = next(e for e in told if e["event"] == "step")
    assert first["step"] == 1 and len(first["accuracy"]) == 3 and first["bytes_per_s"] > 0
    kept = beat.read(run / "beat")
    assert (kept["state"], kept["step"], kept["total"]) == ("ended", steps, steps)
    times = {name: row[0] for name, row in kept["phases"].items()}
    for phase in ("copying", "forward", "backward", "optimiser", "logging"):
        assert times[phase] == steps, phase
    assert times["validating"] == 2 <= times["saving"] and steps <= times["waiting for data"] <= steps + 2
    assert kept["tokens"] == json.loads((run / "summary.json").read_text())["tokens"]
    answer = why(run)
    assert answer["verdict"] == "finished.lingering", "this very process is still there"
    assert answer["beat"]["step"] == answer["beat"]["total"] == steps and answer["took_s"] < 1


def test_capture_and_eval_are_recorded_too(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    result = eyas(
        "capture", "--verifier-path", tiny.verifier, "--prepared", tiny.prepared, "--output-dir", tmp_path / "store",
        "--dtype", "fp32",
    )  # fmt: skip
    assert (result.code, result.err) == (0, [])
    kept = beat.read(tmp_path / "store/record/beat")
    assert (kept["state"], kept["step"], kept["total"], kept["unit"]) == ("ended", 40, 40, "sample")
    assert len(open_source(tmp_path / "store").ids) == 40
    run = tmp_path / "run"
    assert eyas(*train_words(tiny, run)).code == 0
    assert eyas("eval", run, "--dtype", "fp32", "--max-new-tokens", 4).code == 0
    kept = beat.read(run / "eval/beat")
    assert (kept["state"], kept["unit"]) == ("ended", "prompt") and kept["step"] == kept["total"] > 0
    assert kept["phases"]["decoding"][0] == 1


def test_a_step_without_a_number_is_skipped_and_never_reaches_the_weights(
    tiny: Tiny, tmp_path: Path, eyas: Eyas
) -> None:
    source = open_source(tiny.store)
    with StoreWriter(tmp_path / "store", Manifest.load(tiny.store)) as store:
        for i, name in enumerate(source.ids):
            ids, mask = source.tokens(i)
            states = source.states(i)
            store.add(name, np.asarray(ids), np.asarray(mask), torch.full_like(states, torch.nan) if i == 5 else states)
    words = (*train_words(tiny, tmp_path / "run", tmp_path / "store"), "--val-ratio", 0)
    result = eyas(*words, "--on-nan", "skip")
    assert (result.code, result.err) == (0, [])
    (nan,) = [e for e in events.read(tmp_path / "run/events.jsonl") if e["event"] == "nan"]
    assert source.ids[5] in nan["samples"] and nan["skipped"] is True and nan["loss"] == "nan"
    line = next(line for line in result.out if line.startswith("warning: the loss is nan at step"))
    assert source.ids[5] in line and line.endswith("the step is skipped (--on-nan skip)")
    weights = load_file(tmp_path / "run/last/model.safetensors")
    assert all(t.isfinite().all() for t in weights.values() if t.is_floating_point())
    shutil.rmtree(tmp_path / "run")
    result = eyas(*words)
    assert result.code == 2 and f"at step {nan['step']}" in result.err[0] and source.ids[5] in result.err[0]
    assert "--on-nan skip" in result.err[0]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    if os.geteuid():
        pytest.skip("needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_checkpoint_on_a_full_disk_is_told_with_its_step_and_leaves_nothing_half(
    tiny: Tiny, disk: Path, eyas: Eyas
) -> None:
    result = eyas(*train_words(tiny, disk / "run"))
    assert result.code == 2 and len(result.err) == 1 and "No space left" in result.err[0]
    last = result.out[-1]
    assert last.startswith("step ") and "failed in saving" in last and "No space left" in last
    assert "to go on: " in last and "eyas train --" in last
    assert list((disk / "run/checkpoints").iterdir()) == []
    assert [e["how"] for e in events.read(disk / "run/events.jsonl") if e["event"] == "end"] == ["error"]
    assert beat.read(disk / "run/beat")["state"] == "failed"
