"""`eyas import`: somebody's EAGLE-3 drafter as a checkpoint folder of ours, to evaluate it or to train it further.

The weights are theirs to the last bit (as fp32 masters), and so is the draft vocabulary: its order is that of the
head's rows. What eyas cannot compute (norm_before_residual, norms on queries, biases) is refused here, not after hours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from eyas.drafter.checkpoint import checkpoint_layers, load_checkpoint, save_checkpoint
from eyas.errors import EyasError
from eyas.evaluate.run import check_verifier
from eyas.verifier import Verifier


def import_drafter(
    folder: Path,
    verifier_path: str,
    output_dir: Path,
    *,
    layers: tuple[int, ...] | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the drafter in `folder` (any trainer's) to `output_dir` in our form; returns that.

    layers: HF indices it was trained on, over what its config.json says. Its own embedding is kept only where it is
    not the verifier's. Raises EyasError, in one line, where eyas cannot use it.
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise EyasError(f"{output_dir} is there already: name a new folder")
    verifier = Verifier(verifier_path, trust_remote_code=trust_remote_code)
    about = verifier.config
    check_verifier(folder, verifier)
    embedding = verifier.embedding()
    drafter, vocab = load_checkpoint(folder, about, embedding)
    chosen = layers or checkpoint_layers(folder, about)
    if len(set(chosen)) != 3 or min(chosen) < 0 or max(chosen) > about.num_layers:
        raise EyasError(
            f"{folder} reads layers {', '.join(map(str, chosen))} of {about.num_layers}: name three with --layers"
        )
    own = drafter.embedding
    if own.shape[1] != drafter.config.hidden_size:
        raise EyasError(
            f"{folder} has no embedding of its own width {drafter.config.hidden_size:,}, "
            f"and {about.name}'s has {own.shape[1]:,}"
        )
    same = own.shape == embedding.shape and bool(torch.allclose(own, embedding, rtol=1e-2, atol=1e-6))
    save_checkpoint(
        output_dir,
        drafter,
        vocab,
        about,
        chosen,
        with_embedding=not same,
        more={
            "eyas.json": {
                "verifier": {"name": about.name, "fingerprint": verifier.fingerprint},
                "step": 0,
                "epoch": 0,
                "validation": None,
            }
        },
    )
    count = sum(p.numel() for p in drafter.parameters())
    say(
        f"imported {folder} to {output_dir}: {count / 1e6:.1f} M parameters, a vocabulary of {vocab.size:,} of "
        f"{vocab.vocab_size:,}, layers {', '.join(map(str, chosen))}"
        + ("" if same else "; its embedding is its own, which SGLang would replace by the verifier's")
    )
    say(f"measure it:\n  eyas eval {output_dir} --verifier-path {verifier_path} --data-dir STORE")
    return output_dir
