"""A drafter in the engine that serves it: what eyas exports, vLLM loads, and accepts as often as eyas says.

vLLM lives in an environment of its own (EYAS_ENGINE_PYTHON, made by `make test-engines`) and is started as a program;
the two environments share nothing but files. The verifier is the demo's, SmolLM2-135M (or a folder named by
EYAS_TEST_VERIFIER); the drafter is trained here, on a sixth of the demo's conversations (or is a folder made by
`eyas export` and named by EYAS_TEST_DRAFTER).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
CONVERSATIONS = ROOT / "demo" / "conversations.jsonl"
TRAINED = slice(0, None, 8)  # 168 conversations of all kinds
HELD_OUT = slice(5, None, 112)  # 12 others
DRAFT_TOKENS = 3
MAX_TOKENS = 64
Note = Callable[[str], None]
# vLLM's loaders complain about weights in several wordings and go on.
WEIGHT_COMPLAINT = re.compile(
    r"(not initialized|uninitialized|randomly|not found in|unexpected|missing|ignor|skip).*(weight|param|tensor|key)"
    r"|(weight|param|tensor).*(not initialized|uninitialized|not loaded|not found|unexpected|missing|ignor|skip)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Served:
    """One engine run: RESULT of engine_run.py, and what the engine logged."""

    tokens: list[list[int]]
    drafts: int
    accepted: list[int]
    log: str
    about: str

    @property
    def per_position(self) -> list[float]:
        """Share of rounds that kept draft 1..K."""
        return [n / max(1, self.drafts) for n in self.accepted]

    @property
    def accept_length(self) -> float:
        """Tokens per round: the verifier's own, and the kept drafts."""
        return 1 + sum(self.per_position)


def serve(folder: Path, verifier: Path, drafter: Path | None, prompts: list[list[int]]) -> Served:
    """Start an engine on `prompts`; its files go to `folder`."""
    python = os.environ.get("EYAS_ENGINE_PYTHON")
    if not python:
        pytest.fail("EYAS_ENGINE_PYTHON names no python with vLLM: run `make test-engines`", pytrace=False)
    job = {
        "verifier": str(verifier),
        "drafter": None if drafter is None else str(drafter),
        "prompts": prompts,
        "max_tokens": MAX_TOKENS,
        "draft_tokens": DRAFT_TOKENS,
    }
    (folder / "job.json").write_text(json.dumps(job))
    # Neither the path nor the virtual environment of these tests may reach the engine.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    command = [python, str(Path(__file__).with_name("engine_run.py")), "job.json", "result.json"]
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    text = (folder / "log.txt").read_text(errors="replace")
    if done.returncode:
        pytest.fail(f"the engine ended with {done.returncode}:\n{text[-6000:]}", pytrace=False)
    result = json.loads((folder / "result.json").read_text())
    new, seconds = sum(map(len, result["tokens"])), result["seconds"]
    about = f"vLLM {result['version']}: loaded in {result['load_seconds']:.0f} s, {new} tokens in {seconds:.1f} s"
    return Served(result["tokens"], result["drafts"], result["accepted"], text, about)


@pytest.fixture(scope="session")
def verifier_dir() -> Path:
    """The demo's verifier."""
    if given := os.environ.get("EYAS_TEST_VERIFIER"):
        return Path(given)
    from eyas.demo import smollm2

    return Path(smollm2(ROOT / ".cache"))


@pytest.fixture(scope="session")
def verifier(verifier_dir: Path) -> Any:
    from eyas.verifier import Verifier

    return Verifier(verifier_dir)


@pytest.fixture(scope="session")
def drafter_dir(verifier: Any, tmp_path_factory: pytest.TempPathFactory, note: Note) -> Path:
    """An exported drafter: prepare, capture, vocab, train and export, each by its own function (about two minutes)."""
    if given := os.environ.get("EYAS_TEST_DRAFTER"):
        return Path(given)
    from eyas import vocab
    from eyas.capture.local import capture
    from eyas.config import load_config
    from eyas.export import export
    from eyas.prepare import prepare
    from eyas.train.loop import Run

    started = time.perf_counter()
    work = tmp_path_factory.mktemp("drafter")
    lines = CONVERSATIONS.read_text().splitlines()
    assert not set(range(len(lines))[TRAINED]) & set(range(len(lines))[HELD_OUT])
    (work / "conversations.jsonl").write_text("\n".join(lines[TRAINED]) + "\n")
    prepare(verifier, [work / "conversations.jsonl"], work / "prepared", max_seq_len=512, show=0)
    capture(verifier, work / "prepared", work / "store")
    vocab.build(work / "prepared", verifier, 4096, work / "vocab")
    flags: dict[str, Any] = {
        "verifier_path": str(verifier.config.path),
        "data_dir": work / "store",
        "vocab_mapping_dir": work / "vocab",
        "output_dir": work / "run",
        "epochs": 3,
        "batch_tokens": 512,
        "max_seq_len": 512,
        "ttt_steps": DRAFT_TOKENS,
    }
    Run(load_config(flags)).train()
    exported = export(work / "run", work / "exported")
    note(f"drafter made in {time.perf_counter() - started:.0f} s")
    return exported


@pytest.fixture(scope="session")
def prompts(verifier: Any) -> list[list[int]]:
    """Prompts that the drafter was not trained on, as an engine gets them."""
    from eyas.chat import messages_of, prompt_ids

    lines = CONVERSATIONS.read_text().splitlines()[HELD_OUT]
    found = [prompt_ids(verifier.tokenizer, messages_of(json.loads(line))[:1]) for line in lines]
    assert len(found) == 12
    return found


@pytest.fixture(scope="session")
def alone(verifier_dir: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory, note: Note) -> Served:
    served = serve(tmp_path_factory.mktemp("alone"), verifier_dir, None, prompts)
    note(f"without drafter · {served.about}")
    return served


@pytest.fixture(scope="session")
def drafted(
    verifier_dir: Path,
    drafter_dir: Path,
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
    note: Note,
) -> Served:
    served = serve(tmp_path_factory.mktemp("drafted"), verifier_dir, drafter_dir, prompts)
    note(f"with drafter · {served.about}")
    return served


@pytest.fixture(scope="session")
def decoded(verifier: Any, drafter_dir: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """What eyas itself says of the same drafter on the same prompts."""
    import torch

    from eyas.drafter.checkpoint import load_checkpoint
    from eyas.evaluate.run import EvalOptions, by_decoding

    drafter, vocabulary = load_checkpoint(drafter_dir, verifier.config, verifier.embedding())
    options = EvalOptions(draft_tokens=DRAFT_TOKENS, max_new_tokens=MAX_TOKENS, dtype="fp32")
    layers = verifier.config.capture_layers()
    cpu = torch.device("cpu")
    return by_decoding(drafter.eval(), vocabulary, verifier, layers, prompts, options, torch.float32, cpu)


def test_vllm_loads_the_export_as_it_is(drafted: Served, drafter_dir: Path) -> None:
    assert "Eagle3" in json.loads((drafter_dir / "config.json").read_text())["architectures"][0]
    assert drafted.drafts > 0, "the engine never asked the drafter"
    # The line that prints the engine's whole configuration has every word in it.
    lines = [line for line in drafted.log.splitlines() if " with config: " not in line]
    complaints = [line for line in lines if WEIGHT_COMPLAINT.search(line)]
    assert not complaints, complaints


def test_greedy_output_is_the_verifiers_own(alone: Served, drafted: Served) -> None:
    assert all(alone.tokens)
    different = [i for i, (a, b) in enumerate(zip(alone.tokens, drafted.tokens, strict=True)) if a != b]
    assert not different, f"prompts {different} came out differently with the drafter"


def test_vllm_accepts_drafts_at_every_position(drafted: Served) -> None:
    assert len(drafted.accepted) == DRAFT_TOKENS
    assert all(n > 0 for n in drafted.accepted), drafted.accepted


def test_vllm_accepts_as_often_as_eyas_says(drafted: Served, decoded: dict[str, Any], note: Note) -> None:
    from eyas.evaluate.run import slashed

    note(f"accept length {drafted.accept_length:.3f} by vLLM, {decoded['accept_length']:.3f} by eyas")
    note(
        f"drafts kept by position: {slashed(drafted.per_position)} by vLLM, {slashed(decoded['per_position'])} by eyas"
    )
    assert decoded["lossless"]
    assert drafted.accept_length == pytest.approx(decoded["accept_length"], rel=0.10)


def test_shuffled_head_accepts_clearly_less(
    verifier_dir: Path, drafter_dir: Path, prompts: list[list[int]], drafted: Served, tmp_path: Path, note: Note
) -> None:
    """The tests above can fail: the same checkpoint with the rows of lm_head in another order drafts nonsense."""
    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(drafter_dir, broken)
    tensors = load_file(broken / "model.safetensors")
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(0))]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    shuffled = serve(tmp_path, verifier_dir, broken, prompts)
    note(f"accept length with a shuffled head {shuffled.accept_length:.3f}")
    assert shuffled.accept_length - 1 < 0.25 * (drafted.accept_length - 1)
