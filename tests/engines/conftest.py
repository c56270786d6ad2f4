"""What the engine tests share: the engine's Python, the verifier, a drafter, held-out prompts; and what they measured.

vLLM lives in an environment of its own (EYAS_ENGINE_PYTHON, made by `make test-engines`) and is started as a program.
The verifier is the demo's, SmolLM2-135M (or a folder named by EYAS_TEST_VERIFIER); the drafter is trained here, on an
eighth of the demo's conversations (or is a folder made by `eyas export` and named by EYAS_TEST_DRAFTER; then
EYAS_TEST_PROMPTS may name conversations that it was not trained on).

Figures are shown below the results and written to bench/out/engines.json, whether the tests passed or not.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from enginelab import CONVERSATIONS, HELD_OUT, ROOT, TRAINED, USUAL, Engines, Note

_noted: list[str] = []
_figures: dict[str, Any] = {}


@pytest.fixture(scope="session")
def note() -> Note:
    """Call it with a line to be shown below the tests' results."""
    return _noted.append


@pytest.fixture(scope="session")
def figures() -> dict[str, Any]:
    """What goes to bench/out/engines.json."""
    return _figures


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _noted:
        terminalreporter.section("measured")
        for line in _noted:
            terminalreporter.write_line(line)
    if _figures:
        out = ROOT / "bench" / "out" / "engines.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(_figures, indent=1) + "\n")
        terminalreporter.write_line(f"figures: {out.relative_to(ROOT)}")


@pytest.fixture(scope="session")
def engine_python() -> str:
    """A Python that has vLLM."""
    python = os.environ.get("EYAS_ENGINE_PYTHON")
    if not python:
        pytest.fail("EYAS_ENGINE_PYTHON names no python with vLLM: run `make test-engines`", pytrace=False)
    return str(Path(python).absolute())


@pytest.fixture(scope="session")
def eyas_there(engine_python: str) -> Callable[..., subprocess.Popen[str]]:
    """Start a program in the engine's Python with eyas importable; its output goes to `log`."""

    from eyas.evaluate.hosted import engine_environment

    def start(arguments: list[str], log: Path, new_session: bool = False) -> subprocess.Popen[str]:
        env = engine_environment(engine_python) | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
        command = [engine_python, *arguments]
        with log.open("w") as file:
            return subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=new_session,
            )

    return start


@pytest.fixture(scope="session")
def verifier() -> Any:
    """The demo's verifier."""
    from eyas.demo import smollm2
    from eyas.verifier import Verifier

    return Verifier(os.environ.get("EYAS_TEST_VERIFIER") or smollm2(ROOT / ".cache"))


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
        "ttt_steps": USUAL,
    }
    Run(load_config(flags)).train()
    exported = export(work / "run", work / "exported")
    note(f"drafter made in {time.perf_counter() - started:.0f} s")
    return exported


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that the drafter was not trained on, as a file."""
    if given := os.environ.get("EYAS_TEST_PROMPTS"):
        return Path(given)
    path = tmp_path_factory.mktemp("held-out") / "conversations.jsonl"
    found = [json.loads(line) for line in CONVERSATIONS.read_text().splitlines()[HELD_OUT]]
    path.write_text("".join(json.dumps({**c, "messages": c["messages"][:2]}) + "\n" for c in found))  # one answer each
    return path


@pytest.fixture(scope="session")
def prompts(verifier: Any, held_out: Path) -> list[list[int]]:
    """Their prompts as token ids, as an engine gets them."""
    from eyas.chat import messages_of, prompt_ids

    lines = held_out.read_text().splitlines()
    return [prompt_ids(verifier.tokenizer, messages_of(json.loads(line))[:1]) for line in lines]


@pytest.fixture(scope="session")
def served(
    verifier: Any, drafter_dir: Path, prompts: list[list[int]], engine_python: str, note: Note
) -> Iterator[Engines]:
    from eyas.evaluate.hosted import Host

    with Host(engine_python) as host:
        yield Engines(host, verifier, drafter_dir, prompts, engine_python, note)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(1800))
