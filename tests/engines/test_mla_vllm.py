"""The MLA drafter in vLLM: what it computes in training is what vLLM computes, number for number and token for token.

Its verifier is a tiny one of DeepSeek's kind (`deepseek.py`), on which transformers and vLLM agree in float32: only
then can accept lengths be held against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepseek
import numpy as np
import pytest
import torch
from enginelab import USUAL, Note
from torch import Tensor

PROMPTS, NEW = 16, 40


class Lab:
    """Verifier, drafter and prompts, and vLLM's runs over them: alone, and with the drafter, whose calls are kept."""

    def __init__(self, work: Path, host: Any) -> None:
        from eyas.verifier import Verifier

        self.work, self.host = work, host
        self.model = deepseek.make_verifier(work / "verifier")
        self.verifier = Verifier(work / "verifier")
        deepseek.make_drafter(self.model, self.verifier, work / "drafter")
        # Of all lengths, and none that the drafter was trained on.
        self.prompts = [ids[: 18 - i].tolist() for i, ids in enumerate(deepseek.texts(self.model, PROMPTS, 7))]
        self.alone = self.serve(0)
        self.drafted = self.serve(USUAL, record=str(work / "calls.pt"))
        self.calls: list[dict[str, Tensor]] = torch.load(work / "calls.pt", weights_only=True)

    def serve(self, drafts: int, **more: Any) -> dict[str, Any]:
        run = {"name": "greedy", "prompts": self.prompts, "max_tokens": NEW, "temperature": 0.0, "alone": False}
        job = {
            "verifier": str(self.work / "verifier"),
            "drafter": str(self.work / "drafter") if drafts else None,
            "draft_tokens": drafts,
            "dtype": "float32",
            "streams": PROMPTS,
            "max_model_len": 128,
            # The reference kernels, which compute in float32, on machines with others too.
            "engine_args": {"skip_tokenizer_init": True, "attention_config": {"backend": "CPU_MLA"}},
            "runs": [run],
        }
        found: dict[str, Any] = self.host.run(job | more, print)["runs"]["greedy"]
        return found


@pytest.fixture(scope="module")
def lab(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    from eyas.evaluate import hosted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted, "JOB", Path(__file__).with_name("mla_run.py"))
        with hosted.Host(engine_python) as host:
            yield Lab(tmp_path_factory.mktemp("mla"), host)


def apart(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest number of b."""
    return float((a - b).abs().max() / b.abs().max())


def test_vllms_module_computes_what_training_computes(lab: Lab, note: Note) -> None:
    """fc, the layer over a prompt, and the steps behind it: relative 1e-5 in float32."""
    from eyas.drafter.checkpoint import load_checkpoint
    from eyas.drafter.model import Drafter
    from eyas.drafter.plan import make_plan

    prompt, following = lab.prompts[0], lab.drafted["tokens"][0][0]
    n = len(prompt)
    read = torch.tensor([*prompt[1:], following])
    at = next(i for i, c in enumerate(lab.calls) if "out" in c and torch.equal(c["input_ids"][:n].long(), read) and i)
    first, steps = lab.calls[at], lab.calls[at + 1 : at + USUAL]
    assert first["positions"][:n].tolist() == list(range(n))
    assert [s["positions"][0].item() for s in steps] == [n, n + 1], "each draft stands one position further"
    states = lab.calls[at - 1]["states"][:n]

    drafter, vocab = load_checkpoint(lab.work / "drafter", lab.verifier.config, lab.verifier.embedding())
    drafter.eval()
    drafts = [int(s["input_ids"][0]) for s in steps]
    # One more pair and a token behind the drafts, so that the prompt's last position is trained at every step.
    ids = np.array([*prompt, following, *drafts, 0, 0], np.int32)
    plan = make_plan([(ids, np.ones(len(ids), bool))], USUAL)
    padded = torch.cat([states, torch.zeros(len(ids) - n, states.shape[1])])
    with torch.no_grad():
        combined = drafter.fc(states)
        outputs = drafter(plan, padded[plan.key_row])
        assert plan.query_row[:n].tolist() == list(range(n))
        pairs = {"fc": (lab.calls[at - 1]["combined"][:n], combined), "step 0": (first["out"][:n], outputs[0, :n])}
        for k, step in enumerate(steps, 1):
            pairs[f"step {k}"] = step["out"][0], outputs[k, n - 1]
            logits = drafter.lm_head(drafter.norm(outputs[k, n - 1]))
            pairs[f"logits {k}"] = drafter.lm_head(step["normed"][0]), logits
        before = [outputs[k, n - 1] for k in range(USUAL - 1)]
        chosen = [int(vocab.targets[drafter.lm_head(drafter.norm(x)).argmax()]) for x in before]
    assert drafts == chosen, "vLLM drafts what eyas drafts"
    far = {name: apart(theirs, ours) for name, (theirs, ours) in pairs.items()}
    note(f"MLA drafter in vLLM and in training: largest relative difference {max(far.values()):.1e} (float32)")
    assert max(far.values()) < 1e-5, far

    plain = Drafter(replace(drafter.config, rope_scaling=None), drafter.embedding).eval()
    plain.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        assert apart(first["out"][:n], plain(plan, padded[plan.key_row])[0, :n]) > 1e-2, "the comparison could not fail"


def test_the_verifier_is_the_same_in_transformers_and_vllm(lab: Lab) -> None:
    for prompt, tokens in zip(lab.prompts, lab.alone["tokens"], strict=True):
        ids = torch.tensor([prompt + tokens])
        with torch.inference_mode():
            logits = lab.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


def test_greedy_output_with_the_mla_drafter_is_the_verifiers_own(lab: Lab) -> None:
    assert lab.drafted["drafts"] > 0 and lab.drafted["tokens"] == lab.alone["tokens"]


def test_vllm_accepts_an_mla_drafter_as_often_as_eyas_decodes(lab: Lab, figures: dict[str, Any], note: Note) -> None:
    from eyas.drafter.checkpoint import load_checkpoint
    from eyas.evaluate.decode import EagleDraft, decode
    from eyas.evaluate.engines import figures as counted

    engine = counted(lab.drafted)
    drafter, vocab = load_checkpoint(lab.work / "drafter", lab.verifier.config, lab.verifier.embedding())
    draft = EagleDraft(drafter.for_inference(torch.float32), torch.from_numpy(vocab.targets), torch.float32)
    layers = lab.verifier.config.capture_layers()
    ours = decode(
        lab.model, layers, lab.prompts, draft=draft, draft_tokens=USUAL, max_new_tokens=NEW, end_tokens={deepseek.END}
    )
    figures["accept_length_mla"] = {"engine": engine["accept_length"], "eval": ours.accept_length}
    lengths = f"{engine['accept_length']:.3f} by vLLM, {ours.accept_length:.3f} by eyas"
    note(f"MLA drafter, {USUAL} drafts: accept length {lengths}")
    assert ours.tokens == lab.drafted["tokens"]
    assert engine["accept_length"] > 1.5, "a drafter that is never accepted proves nothing"
    assert ours.accept_length == pytest.approx(engine["accept_length"], rel=0.01)
