"""A drafter in the engine that serves it: what eyas exports, vLLM loads, and accepts as often as eyas says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from enginelab import DRAFT_TOKENS, MAX_TOKENS, USUAL, Engines, Note, write_prepared

# vLLM's loaders complain about weights in several wordings and go on.
WEIGHT_COMPLAINT = re.compile(
    r"(not initialized|uninitialized|randomly|not found in|unexpected|missing|ignor|skip).*(weight|param|tensor|key)"
    r"|(weight|param|tensor).*(not initialized|uninitialized|not loaded|not found|unexpected|missing|ignor|skip)",
    re.IGNORECASE,
)


def accept_length(run: dict[str, Any]) -> float:
    from eyas.evaluate.engines import figures

    return float(figures(run)["accept_length"])


@pytest.fixture(scope="session")
def decoded(verifier: Any, drafter_dir: Path, prompts: list[list[int]]) -> dict[int, Any]:
    """eyas's own decoding of the same prompts, by the number of drafts, in float32."""
    import torch

    from eyas.drafter.checkpoint import load_checkpoint
    from eyas.evaluate.run import EvalOptions, decoder

    drafter, vocabulary = load_checkpoint(drafter_dir, verifier.config, verifier.embedding())
    model = verifier.load_model(torch.float32)
    layers = verifier.config.capture_layers()
    found = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are small: on a busy machine two threads wait for each other at every one
    for k in DRAFT_TOKENS:
        options = EvalOptions(draft_tokens=k, max_new_tokens=MAX_TOKENS, dtype="fp32")
        run = decoder(model, drafter.eval(), vocabulary, verifier, layers, options, torch.float32)
        found[k] = run(prompts, True)
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="session")
def simulated(
    verifier: Any,
    drafter_dir: Path,
    prompts: list[list[int]],
    served: Engines,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, float]:
    """eyas's accept length without decoding: from the states of what the engine wrote alone, captured here."""
    import numpy as np
    import torch

    from eyas.capture.local import capture
    from eyas.drafter.checkpoint import load_checkpoint
    from eyas.evaluate.run import offline
    from eyas.record.record import Record
    from eyas.store.reader import open_source

    work = tmp_path_factory.mktemp("simulated")
    answers = served(0)["greedy"]["tokens"]
    samples = [(np.array(p + a, np.int32), len(p)) for p, a in zip(prompts, answers, strict=True)]
    write_prepared(work / "prepared", verifier, samples)
    capture(verifier, work / "prepared", work / "store", dtype="fp32")
    source = open_source(work / "store", verifier.config, verifier.fingerprint)
    drafter, vocabulary = load_checkpoint(drafter_dir, verifier.config, verifier.embedding())
    everything, longest = list(range(len(source.ids))), int(source.lengths.max())
    found = {}
    for k in DRAFT_TOKENS:
        figures = offline(
            drafter.eval(), vocabulary, verifier, source, everything, longest, k, torch.float32, Record(None)
        )
        assert figures is not None
        found[k] = figures.accept_length_greedy
    return found


def test_vllm_loads_the_export_as_it_is(served: Engines, drafter_dir: Path) -> None:
    assert "Eagle3" in json.loads((drafter_dir / "config.json").read_text())["architectures"][0]
    run = served(USUAL)
    assert run["greedy"]["drafts"] > 0, "the engine never asked the drafter"
    # The line that prints the engine's whole configuration has every word in it.
    lines = [line for line in run["log"].splitlines() if " with config: " not in line]
    complaints = [line for line in lines if WEIGHT_COMPLAINT.search(line)]
    assert not complaints, complaints


def test_greedy_output_is_the_verifiers_own(served: Engines, figures: dict[str, Any]) -> None:
    alone = served(0)["greedy"]["tokens"]
    assert all(alone)
    different = {(k, i) for k in DRAFT_TOKENS for i, t in enumerate(served(k)["greedy"]["tokens"]) if t != alone[i]}
    figures["identical_fp32"] = len(DRAFT_TOKENS) * len(alone) - len(different)
    figures["of"] = len(DRAFT_TOKENS) * len(alone)
    assert not different, f"(drafts, prompt) {sorted(different)} came out differently with the drafter"


def test_bfloat16_differs_at_near_ties_only(
    served: Engines, verifier: Any, prompts: list[list[int]], figures: dict[str, Any], note: Note
) -> None:
    from eyas.evaluate.engines import differences

    drafted, alone = (served(k, "bfloat16")["greedy"]["tokens"] for k in (USUAL, 0))
    found = differences(verifier, "bfloat16", prompts, drafted, alone)
    unexplained = [d for d in found if not d["explained"]]
    figures["unexplained_bf16"] = len(unexplained)
    figures["identical_bf16"] = len(prompts) - len(found)
    note(f"bfloat16: {len(prompts) - len(found)} of {len(prompts)} identical, {len(unexplained)} not explained")
    assert not unexplained, unexplained


def test_vllm_accepts_as_often_as_eyas_decodes_and_simulates(
    served: Engines, decoded: dict[int, Any], simulated: dict[int, float], figures: dict[str, Any], note: Note
) -> None:
    engine = {k: accept_length(served(k)["greedy"]) for k in DRAFT_TOKENS}
    figures["accept_length_engine"] = list(engine.values())
    figures["accept_length_eval"] = [decoded[k].accept_length for k in DRAFT_TOKENS]
    figures["accept_length_simulated"] = list(simulated.values())
    for k in DRAFT_TOKENS:
        note(
            f"{k} drafts: accept length {engine[k]:.3f} by vLLM, {decoded[k].accept_length:.3f} decoded and"
            f" {simulated[k]:.3f} simulated by eyas"
        )
    assert {k: decoded[k].accept_length for k in DRAFT_TOKENS} == pytest.approx(engine, rel=0.03)
    assert simulated == pytest.approx(engine, rel=0.03)


def test_drafts_are_accepted_at_every_position_and_save_rounds(
    served: Engines, figures: dict[str, Any], note: Note
) -> None:
    run = served(USUAL)["greedy"]
    assert len(run["accepted"]) == USUAL
    assert all(n > 0 for n in run["accepted"]), run["accepted"]
    one = {k: served(k, "bfloat16")["one_stream"] for k in (USUAL, 0)}
    speed = {k: sum(map(len, r["tokens"])) / r["seconds"] for k, r in one.items()}
    figures["speedup_one_stream"] = speed[USUAL] / speed[0]
    note(f"one stream in bfloat16: {speed[0]:.1f} tokens/s alone, {speed[USUAL]:.1f} with {USUAL} drafts a round")


def test_shuffled_head_accepts_clearly_less(served: Engines, drafter_dir: Path, tmp_path: Path, note: Note) -> None:
    """The tests above can fail: the same checkpoint with the rows of lm_head in another order drafts nonsense."""
    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(drafter_dir, broken)
    tensors = load_file(broken / "model.safetensors")
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(0))]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    shuffled = accept_length(served(USUAL, drafter=broken)["greedy"])
    note(f"accept length with a shuffled head {shuffled:.3f}")
    assert shuffled - 1 < 0.25 * (accept_length(served(USUAL)["greedy"]) - 1)
