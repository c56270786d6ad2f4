"""`eyas export --format speculators` in speculators' own code: it loads there, and says what eyas says.

speculators lives in the engine environment (EYAS_ENGINE_PYTHON, made by `make test-engines`) and is started as a
program. The verifier is the tiny one; the drafter's weights are random, of the size that training leaves.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_speculators_own_drafter_says_what_eyas_says(
    checkpoint: Path, tiny_verifier: Path, tmp_path: Path, dtype: str, limit: float, note: Any
) -> None:
    from eyas.export import export

    python = os.environ.get("EYAS_ENGINE_PYTHON")
    if not python:
        pytest.fail("EYAS_ENGINE_PYTHON names no python with speculators: run `make test-engines`", pytrace=False)
    folder = export(
        checkpoint, tmp_path / "exported", form="speculators", verifier_path=str(tiny_verifier), dtype=dtype
    )
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 400, (T,), generator=g)
    states = torch.randn(T, 3 * 64, generator=g).to(torch_dtype)
    save_file({"input_ids": ids, "states": states}, tmp_path / "input.safetensors")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    files = [str(tmp_path / n) for n in ("input.safetensors", "output.safetensors")]
    program = str(Path(__file__).with_name("speculators_run.py"))
    done = subprocess.run([python, program, str(folder), *files], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs, ours = load_file(files[1]), by_eyas(folder, tiny_verifier, ids, states)
    assert len(theirs) == STEPS
    for k, logits in enumerate(ours):
        other = theirs[f"logits_{k}"][: len(logits)]
        off = float((other - logits).norm() / logits.norm())
        note(f"speculators' logits, {dtype}, TTT step {k}: {off:.1e} from eyas', relative")
        assert off < limit
        assert float(logits.std()) > 0.1, "logits that say nothing would agree with anything"


def test_another_norm_flag_is_another_function(checkpoint: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    """The test above can fail: with norm_before_residual the same weights say something else."""
    import json

    from eyas.export import export

    folder = export(
        checkpoint, tmp_path / "exported", form="speculators", verifier_path=str(tiny_verifier), dtype="fp32"
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["norm_before_residual"] is False  # said, not left to a default that readers do not share
    (folder / "config.json").write_text(json.dumps({**config, "norm_before_residual": True}))
    g = torch.Generator().manual_seed(2)
    ids, states = torch.randint(0, 400, (T,), generator=g), torch.randn(T, 3 * 64, generator=g)
    save_file({"input_ids": ids, "states": states}, tmp_path / "input.safetensors")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    files = [str(tmp_path / n) for n in ("input.safetensors", "output.safetensors")]
    program = str(Path(__file__).with_name("speculators_run.py"))
    python = os.environ["EYAS_ENGINE_PYTHON"]
    done = subprocess.run([python, program, str(folder), *files], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ours = by_eyas(checkpoint, tiny_verifier, ids, states)[0]
    theirs = load_file(files[1])["logits_0"][: len(ours)]
    assert float((theirs - ours).norm() / ours.norm()) > 0.05
