"""Drafters between eyas and speculators: what one writes the other loads, and both say the same.

speculators lives in the engine environment (EYAS_ENGINE_PYTHON, made by `make test-engines`) and is started as a
program. The verifier is the tiny one; the drafter's weights are random, of the size that training leaves.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.export import export

STEPS = 3
T, VD = 40, 96


@pytest.fixture(scope="module")
def checkpoint(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of the tiny verifier's in a checkpoint folder of ours, fp32."""
    from eyas.drafter.checkpoint import save_checkpoint
    from eyas.drafter.model import Drafter, DrafterConfig
    from eyas.drafter.start import start_random
    from eyas.verifier import Verifier
    from eyas.vocab import choose

    verifier = Verifier(tiny_verifier)
    about = verifier.config
    config = DrafterConfig(
        *(about.hidden_size, about.hidden_size, 96, 4, 2, 16, about.vocab_size, VD),
        about.rms_norm_eps,
        about.rope_theta,
        about.rope_scaling,
        about.max_position_embeddings,
    )
    drafter = Drafter(config, verifier.embedding())
    start_random(drafter, 0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(p * 5 if p.ndim > 1 else torch.rand(p.shape, generator=g) + 0.5)
    counts = np.random.default_rng(0).integers(1, 1000, about.vocab_size)
    folder = tmp_path_factory.mktemp("ours") / "checkpoint"
    save_checkpoint(folder, drafter, choose(counts, VD), about, about.capture_layers())
    return folder


def by_eyas(folder: Path, verifier_dir: Path, ids: Tensor, states: Tensor) -> list[Tensor]:
    """Logits [T - 2 - k, Vd] of each TTT step k, by eyas."""
    from eyas.drafter.checkpoint import load_checkpoint
    from eyas.drafter.plan import make_plan
    from eyas.verifier import Verifier

    verifier = Verifier(verifier_dir)
    drafter, _ = load_checkpoint(folder, verifier.config, verifier.embedding())
    plan = make_plan([(ids.numpy(), np.ones(len(ids), dtype=bool))], STEPS)
    with torch.no_grad():
        outputs = drafter.eval()(plan, states[plan.key_row])
        return [drafter.lm_head(drafter.norm(out)).float()[: len(ids) - 2 - k] for k, out in enumerate(outputs)]


def speculators(*arguments: object) -> None:
    """Run speculators_run.py with these arguments."""
    python = os.environ.get("EYAS_ENGINE_PYTHON")
    if not python:
        pytest.fail("EYAS_ENGINE_PYTHON names no python with speculators: run `make test-engines`", pytrace=False)
    # Neither the path nor the virtual environment of these tests may reach it.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    command = [python, str(Path(__file__).with_name("speculators_run.py")), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def question(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Path, Tensor, Tensor]:
    """Random tokens and states, in a file for speculators_run.py, and as tensors."""
    g = torch.Generator().manual_seed(2)
    ids, states = torch.randint(0, 400, (T,), generator=g), torch.randn(T, 3 * 64, generator=g).to(dtype)
    save_file({"input_ids": ids, "states": states}, folder / "input.safetensors")
    return folder / "input.safetensors", ids, states


def training_data(source: Any, vocab: Any, samples: Iterable[int], file: Path) -> None:
    """Samples of a store, and the draft vocabulary, as speculators_run.py trains on them."""
    data = {"d2t": torch.from_numpy(vocab.d2t), "t2d": torch.from_numpy(vocab.t2d)}
    for n, i in enumerate(samples):
        (ids, mask), states = source.tokens(i), source.states(i)  # [4, T, Ht]
        data |= {
            f"ids_{n}": torch.from_numpy(ids.astype(np.int64)),
            f"states_{n}": torch.cat(list(states[:3]), dim=-1),
            f"last_{n}": states[3].clone(),
            f"mask_{n}": torch.from_numpy(mask.copy()),
        }
    save_file(data, file)


def apart(theirs: Tensor, ours: Tensor) -> float:
    """The relative distance of two sets of logits."""
    return float((theirs[: len(ours)] - ours).norm() / ours.norm())


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_speculators_own_drafter_says_what_eyas_says(
    checkpoint: Path, tiny_verifier: Path, tmp_path: Path, dtype: str, limit: float, note: Any
) -> None:
    exported = export(
        checkpoint, tmp_path / "exported", form="speculators", verifier_path=str(tiny_verifier), dtype=dtype
    )
    file, ids, states = question(tmp_path, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    speculators("say", exported, file, tmp_path / "output.safetensors")
    theirs, ours = load_file(tmp_path / "output.safetensors"), by_eyas(exported, tiny_verifier, ids, states)
    assert len(theirs) == STEPS
    for k, logits in enumerate(ours):
        off = apart(theirs[f"logits_{k}"], logits)
        note(f"speculators' logits, {dtype}, TTT step {k}: {off:.1e} from eyas', relative")
        assert off < limit
        assert float(logits.std()) > 0.1, "logits that say nothing would agree with anything"


def test_another_norm_flag_is_another_function(checkpoint: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    """The test above can fail: with norm_before_residual the same weights say something else."""
    exported = export(checkpoint, tmp_path / "e", form="speculators", verifier_path=str(tiny_verifier), dtype="fp32")
    config = json.loads((exported / "config.json").read_text())
    assert config["norm_before_residual"] is False  # said, not left to a default that readers do not share
    (exported / "config.json").write_text(json.dumps({**config, "norm_before_residual": True}))
    file, ids, states = question(tmp_path)
    speculators("say", exported, file, tmp_path / "output.safetensors")
    ours = by_eyas(checkpoint, tiny_verifier, ids, states)
    assert apart(load_file(tmp_path / "output.safetensors")["logits_0"], ours[0]) > 0.05


def test_a_drafter_that_speculators_trained_on_our_store_is_checked_imported_and_evaluated(
    tiny_verifier: Path, tmp_path: Path
) -> None:
    from eyas.capture.local import capture
    from eyas.check.run import check
    from eyas.evaluate.agreement import write_prepared
    from eyas.evaluate.run import EvalOptions, evaluate_checkpoint
    from eyas.importing import import_drafter
    from eyas.store.reader import StoreSource
    from eyas.verifier import Verifier
    from eyas.vocab import choose

    rng = np.random.default_rng(3)
    verifier = Verifier(tiny_verifier)
    samples = [(rng.integers(3, 400, T).astype(np.int32), 5) for _ in range(12)]
    write_prepared(tmp_path / "prepared", verifier, samples)
    capture(verifier, tmp_path / "prepared", tmp_path / "store", dtype="fp32")
    vocab = choose(rng.integers(1, 1000, 400), VD)
    training_data(StoreSource(tmp_path / "store"), vocab, range(8), tmp_path / "data.safetensors")
    speculators("train", tiny_verifier, tmp_path / "data.safetensors", tmp_path / "theirs", 80)

    lines: list[str] = []
    code = check(tmp_path / "theirs", verifier_path=str(tiny_verifier), as_json=True, say=lines.append)
    found = json.loads("\n".join(lines))
    assert code == 1 and not any(f["broken"] for f in found["findings"]), found["findings"]
    assert found["written_by"] == "speculators 0.9.0"

    import_drafter(tmp_path / "theirs", str(tiny_verifier), tmp_path / "ours")
    file, ids, states = question(tmp_path)
    speculators("say", tmp_path / "theirs", file, tmp_path / "output.safetensors")
    theirs = load_file(tmp_path / "output.safetensors")
    for k, logits in enumerate(by_eyas(tmp_path / "ours", tiny_verifier, ids, states)):
        assert apart(theirs[f"logits_{k}"], logits) < 1e-5

    options = EvalOptions(str(tiny_verifier), tmp_path / "store", val_ratio=0.3, max_new_tokens=12, dtype="fp32")
    figures = evaluate_checkpoint(tmp_path / "ours", options, tmp_path / "eval.json")
    assert figures["val"]["samples"] == 4
    assert figures["decode"]["lossless"] and figures["decode"]["accept_length"] >= 1
