"""Ctrl-C and SIGTERM to every command that takes long: one line on what is kept and how to go on, 130 or 143."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Eyas, Tiny
from eyas.config import load_config
from eyas.store.layout import journals, read_journal
from eyas.train.loop import Run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of one epoch. Read it, never write to it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = {
        "verifier_path": str(tiny.verifier), "data_dir": tiny.store, "vocab_mapping_dir": tiny.vocab,
        "output_dir": folder, "max_seq_len": 64, "epochs": 1, "dtype": "fp32",
    }  # fmt: skip
    Run(load_config(settings), lambda _text: None).train()
    return folder


def interrupt_in(
    monkeypatch: pytest.MonkeyPatch, where: str, number: signal.Signals = signal.SIGINT, call: int = 1
) -> None:
    """Have this very process signalled in the middle of the function's `call`-th call."""
    module, name = where.rsplit(".", 1)
    owner = pkgutil.resolve_name(module)
    real: Callable[..., Any] = getattr(owner, name)
    calls = []

    def signalled(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*args, **named)

    monkeypatch.setattr(owner, name, signalled)


NOTHING = "nothing is kept of it: run the same command again"
GOES_ON = "what is recorded in {out} is kept, and the same command goes on there"
CASES = {  # the function that is interrupted, in which of its calls, and what the line says
    "prepare": ("eyas.prepare._write_parquet", 1, NOTHING),
    "regenerate": (
        "eyas.regenerate._answer", 2,
        "the whole batches in {out}/conversations.jsonl are kept, and the same command goes on there",
    ),
    "capture": ("eyas.capture.local._Run.states", 3, GOES_ON),
    "vocab": ("eyas.vocab.write_whole", 1, NOTHING),
    "train": (
        "eyas.train.loop.make_drafter", 1,
        "the same command with --resume goes on from the newest state in {out}, or starts where there is none",
    ),
    "eval": ("eyas.evaluate.run.decode", 1, NOTHING),
    "export": ("eyas.drafter.checkpoint.save_file", 1, NOTHING),
    "merge": ("eyas.store.merge._merge_writer", 1, GOES_ON),
    "check": ("eyas.store.check.scan", 1, NOTHING),
    "convert": ("eyas.store.writer.StoreWriter.add", 3, GOES_ON),
}  # fmt: skip


def arguments(name: str, tiny: Tiny, run: Path, out: Path) -> list[object]:
    v = ["--verifier-path", tiny.verifier]
    prepare = ["prepare", *v, "--data", tiny.conversations, "--output-dir", out, "--show", 0]
    return {
        "prepare": prepare,
        "regenerate": [*prepare, "--regenerate", "--batch-size", 4, "--max-new-tokens", 4, "--dtype", "fp32"],
        "capture": ["capture", *v, "--prepared", tiny.prepared, "--output-dir", out, "--dtype", "fp32",
                    "--batch-tokens", 200],
        "vocab": ["vocab", *v, "--data", tiny.prepared, "--output-dir", out],
        "train": ["train", *v, "--data-dir", tiny.store, "--output-dir", out, "--epochs", 1, "--dtype", "fp32"],
        "eval": ["eval", run, "--output", out / "eval.json", "--dtype", "fp32", "--prompts", 2],
        "export": ["export", run, "--output-dir", out],
        "merge": ["store", "merge", tiny.store, "--output-dir", out],
        "check": ["store", "check", tiny.store],
        "convert": ["store", "convert", tiny.store, out, "--codec", "fp8"],
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ctrl_c_is_one_line_on_what_is_kept(
    tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    where, call, kept = CASES[name]
    out = tmp_path / "out"
    interrupt_in(monkeypatch, where, call=call)
    result = eyas(*arguments(name, tiny, run, out))
    assert (result.code, result.err) == (130, [f"eyas: interrupted: {kept.format(out=out)}"])
    assert "Traceback" not in "\n".join(result.out)
    if name in ("prepare", "vocab", "export"):  # nothing half-written, here or beside
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("name", ["capture", "regenerate", "eval", "convert"])
def test_sigterm_says_the_same_and_the_same_command_goes_on(
    tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, name: str
) -> None:
    where, call, kept = CASES[name]
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_in(patch, where, signal.SIGTERM, call)
        result = eyas(*arguments(name, tiny, run, out))
    assert (result.code, result.err) == (143, [f"eyas: ended by SIGTERM: {kept.format(out=out)}"])
    if name == "regenerate":
        assert len((out / "conversations.jsonl").read_text().splitlines()) == 4
    if name in ("capture", "convert"):
        stored = sum(len(read_journal(j).records) for j in journals(out))
        assert 0 < stored < 40
    result = eyas(*arguments(name, tiny, run, out))
    assert (result.code, result.err) == (0, [])
    if name in ("capture", "convert"):
        assert sum(len(read_journal(j).records) for j in journals(out)) == 40
    if name == "capture":
        assert any(line == f"capture: {stored} samples are in {out} already" for line in result.out)
        ready = f"capture: the store is {out} · next: eyas vocab --data {out}, then eyas train --data-dir {out}"
        assert result.out[-1] == ready
    if name == "eval":
        assert json.loads((out / "eval.json").read_text())["decode"]["lossless"]


def test_an_interrupted_export_leaves_the_one_before(
    run: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert eyas("export", run, "--output-dir", tmp_path / "out").code == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    interrupt_in(monkeypatch, "eyas.drafter.checkpoint.sync_folder", signal.SIGTERM)
    assert eyas("export", run, "--output-dir", tmp_path / "out", "--dtype", "fp32").code == 143
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(tmp_path / "out")
