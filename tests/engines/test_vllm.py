"""A drafter in the engine that serves it: what eyas exports, vLLM loads, and accepts as often as eyas says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from enginelab import DRAFT_TOKENS, MAX_TOKENS, TEMPERATURE, USUAL, Engines, Note

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
def drafter(verifier: Any, drafter_dir: Path) -> tuple[Any, Any]:
    """The exported drafter as eyas loads it, and its vocabulary."""
    from eyas.drafter.checkpoint import load_checkpoint

    return load_checkpoint(drafter_dir, verifier.config, verifier.embedding())


def test_vllm_loads_the_export_as_it_is(served: Engines, drafter_dir: Path) -> None:
    assert "Eagle3" in json.loads((drafter_dir / "config.json").read_text())["architectures"][0]
    run = served(USUAL)
    assert run["greedy"]["drafts"] > 0, "the engine never asked the drafter"
    # The line that prints the engine's whole configuration has every word in it.
    lines = [line for line in run["log"].splitlines() if " with config: " not in line]
    complaints = [line for line in lines if WEIGHT_COMPLAINT.search(line)]
    assert not complaints, complaints


def test_the_same_weights_in_speculators_form_serve_alone(
    served: Engines, verifier: Any, drafter_dir: Path, tmp_path: Path, note: Note
) -> None:
    """`vllm serve FOLDER`, nothing else: verifier, method and number of drafts are the folder's own."""
    from eyas.evaluate.engines import make_runs
    from eyas.export import export

    folder = export(drafter_dir, tmp_path / "theirs", form="speculators", verifier_path=str(verifier.path))
    job = {"verifier": str(folder), "drafter": None, "draft_tokens": 0, "dtype": "float32", "max_model_len": 512}
    job |= {"streams": len(served.prompts), "runs": make_runs(served.prompts, served.options)[:1]}
    run, usual = served.host.run(job, print)["runs"]["greedy"], served(USUAL)["greedy"]
    assert len(run["accepted"]) == USUAL
    note(f"in speculators' form: accept length {accept_length(run):.3f}")
    assert accept_length(run) == pytest.approx(accept_length(usual), rel=0.01)
    assert run["tokens"] == served(0)["greedy"]["tokens"]


def test_greedy_output_is_the_verifiers_own(served: Engines, figures: dict[str, Any]) -> None:
    """In float32, token for token, for every prompt at every number of drafts."""
    alone = served(0)["greedy"]["tokens"]
    assert all(alone)
    different = {(k, i) for k in DRAFT_TOKENS for i, t in enumerate(served(k)["greedy"]["tokens"]) if t != alone[i]}
    figures["identical_fp32"] = len(alone) - len({i for _, i in different})
    figures["of"] = len(alone)
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
    served: Engines,
    verifier: Any,
    drafter: tuple[Any, Any],
    prompts: list[list[int]],
    tmp_path: Path,
    figures: dict[str, Any],
    note: Note,
) -> None:
    """Greedy, in float32: the engine's counters, eyas' own decoding, and eyas without decoding."""
    from eyas.evaluate import agreement

    engine = {k: accept_length(served(k)["greedy"]) for k in DRAFT_TOKENS}
    layers = verifier.config.capture_layers()
    decoded = agreement.decoded(verifier, *drafter, layers, prompts, DRAFT_TOKENS, MAX_TOKENS, len(prompts), note)
    answers = served(0)["greedy"]["tokens"]
    source = agreement.text_store(verifier, prompts, answers, tmp_path / "text", "fp32", print)
    simulated = {k: agreement.simulated(*drafter, verifier, source, k) for k in DRAFT_TOKENS}
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


def test_sampled_drafts_are_accepted_where_they_are_what_was_drawn(
    served: Engines,
    verifier: Any,
    drafter: tuple[Any, Any],
    tmp_path: Path,
    figures: dict[str, Any],
    note: Note,
) -> None:
    """At temperature 1 too the engine's counters are those of its text."""
    from eyas.evaluate import agreement

    run, prompts = served(USUAL)["sampled"], served(USUAL)["asked"]["sampled"]
    engine = accept_length(run)
    source = agreement.text_store(verifier, prompts, run["tokens"], tmp_path / "text", "fp32", print)
    counted = agreement.on_text(*drafter, source, USUAL)
    figures["accept_length_sampled"], figures["accept_length_sampled_on_text"] = engine, counted
    note(f"temperature {TEMPERATURE}: accept length {engine:.3f} by vLLM, {counted:.3f} counted on its text by eyas")
    assert counted == pytest.approx(engine, rel=0.03)
    kept = accept_length(served(USUAL)["greedy"]) - 1
    assert engine - 1 > 0.1 * kept, "a sampler that lost its temperature accepts next to nothing"


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
