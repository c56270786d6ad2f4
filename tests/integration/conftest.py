"""A tiny random verifier taken through the first stages once, and the command line called in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

QUESTIONS = ("capital", "dog", "function", "time", "number", "fox", "Paris", "Python", "sum", "help")


@dataclass
class Result:
    """How a command ended: its exit code, and its lines on standard output and standard error."""

    code: int
    out: list[str]
    err: list[str]


Eyas = Callable[..., Result]


@pytest.fixture
def eyas(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Eyas:
    """`eyas ARGUMENTS`, through the entry point of the command; what is printed is caught below Python too."""

    def call(*arguments: object) -> Result:
        from eyas.cli import main

        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["eyas", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        out, err = capfd.readouterr()
        return Result(code, out.splitlines(), err.splitlines())

    return call


@dataclass
class Tiny:
    """The tiny verifier's folder, and what the stages made of its answers."""

    verifier: Path
    conversations: Path
    prepared: Path
    store: Path
    vocab: Path


@pytest.fixture(scope="session")
def tiny(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """40 conversations, prepared, captured, and their vocabulary of 96 tokens. Read it, never write to it."""
    from eyas.capture.local import capture
    from eyas.prepare import prepare
    from eyas.verifier import Verifier
    from eyas.vocab import build

    folder = tmp_path_factory.mktemp("tiny")
    made = Tiny(tiny_verifier, *(folder / n for n in ("conversations.jsonl", "prepared", "store", "vocab")))
    write_conversations(made.conversations, 40)
    verifier = Verifier(tiny_verifier)
    prepare(verifier, [made.conversations], made.prepared, max_seq_len=128, show=0, say=lambda _text: None)
    capture(verifier, made.prepared, made.store, dtype="fp32", say=lambda _text: None)
    build(made.prepared, verifier, 96, made.vocab, say=lambda _text: None)
    return made


def write_conversations(path: Path, count: int) -> None:
    """`count` different conversations of one question and one answer, 20 to 60 tokens each."""
    with path.open("w") as file:
        for i in range(count):
            word, other = QUESTIONS[i % 10], QUESTIONS[(i * 7 + i // 10) % 10]
            answer = f"The {word} of {other} number {i} is the {other} that jumps over the lazy {word}. " * (1 + i % 2)
            messages = [
                {"role": "user", "content": f"What is the {word} {i}?"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"id": f"c{i}", "messages": messages}) + "\n")


@pytest.fixture(scope="session")
def founding(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 files data_*.pt of the tiny verifier's own greedy text, and d2t/t2d as .npy (M) and as .pt (M-pt) beside."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("founding")
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()
    (folder / "D").mkdir()
    trained: set[int] = set()
    prompts = torch.randint(3, 400, (24, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        text = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False, eos_token_id=[-1],
            pad_token_id=0,
        )  # fmt: skip
        for i, ids in enumerate(text):
            ids = ids[: 20 + i]
            states = model(ids[None], output_hidden_states=True).hidden_states
            mask = torch.arange(len(ids)) >= 6
            trained.update(ids[6:].tolist())
            hidden = [states[k][0].to(torch.bfloat16) for k in (2, 4, 5, 8)]  # the last one is behind the norm
            torch.save({"input_ids": ids, "loss_mask": mask.long(), "hidden_states": hidden}, folder / f"D/data_{i}.pt")
    targets = np.array(sorted(trained | set(range(3))))
    t2d = np.isin(np.arange(400), targets)
    for name, array in (("d2t", targets - np.arange(len(targets))), ("t2d", t2d)):
        (folder / "M").mkdir(exist_ok=True)
        (folder / "M-pt").mkdir(exist_ok=True)
        np.save(folder / "M" / f"{name}.npy", array)
        torch.save(torch.from_numpy(array), folder / "M-pt" / f"{name}.pt")
    return folder
