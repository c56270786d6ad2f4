"""The run directory: made ours, never written over, and told what the run is (docs/run-directory.md)."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

import eyas
from eyas.config import TrainConfig, found_again
from eyas.drafter.mla import MlaSizes
from eyas.drafter.model import DrafterConfig
from eyas.errors import EyasError
from eyas.files import check_unused, write_json, write_whole
from eyas.store.reader import Source
from eyas.train.samples import Samples, kept_samples
from eyas.train.state import States
from eyas.train.stop import resume_command
from eyas.verifier import Verifier
from eyas.vocab import DraftVocab
from eyas.vocab import load as load_vocab

START = "start"  # in a run directory: the sizes and the draft vocabulary of its drafter, and its samples


def refuse_another_run(config: TrainConfig) -> None:
    """Raises EyasError where the run directory holds a run that is not to be gone on with, or is no run's."""
    check_unused(config.output_dir, "run.yaml", f"--output-dir {config.output_dir}")
    if (config.output_dir / "run.yaml").exists() and not config.resume:
        raise EyasError(
            f"--output-dir {config.output_dir} holds a run: go on with it by --resume, or name a new folder"
        )


def open_run(output_dir: Path, states: States) -> None:
    """Make the run directory, and make it ours."""
    try:
        (output_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        states.lock()
    except OSError as e:
        raise EyasError(f"--output-dir {output_dir}: {e.strerror}") from None


def save_run(config: TrainConfig, source: Source, verifier: Verifier) -> None:
    """Write run.yaml (the settings, and what they met) and the command that goes on."""
    path = config.output_dir / "run.yaml"
    try:
        before = yaml.safe_load(path.read_text()) if path.exists() else {}
        about = about_run(config, source, verifier, before if isinstance(before, dict) else {})
        write_whole(path, yaml.safe_dump(about, sort_keys=False).encode())
        write_whole(path.with_name("resume.txt"), f"{resume_command(config.output_dir)}\n".encode())
    except OSError as e:
        raise EyasError(f"--output-dir {config.output_dir}: {e.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise EyasError(f"{path} is not what eyas train wrote: name a new --output-dir") from None


def keep_start(run: Path, drafter: DrafterConfig, vocab: DraftVocab, samples: Samples, anew: bool) -> None:
    """Keep the drafter's sizes and vocabulary, so that the run goes on when what they were taken from is gone, and the
    list of its samples, so that it goes on when some are shut out.

    anew: the run starts at its beginning, whatever an earlier start has left here.
    """
    if anew:
        (run / START / "drafter.json").unlink(missing_ok=True)
    if not (run / START / "drafter.json").exists():
        vocab.save(run / START)
        _keep_samples(run, samples)
        write_json(run / START / "drafter.json", drafter.to_dict())  # the last file: with it the folder is whole
    elif kept_samples(run / START) is None:  # begun by an eyas that kept no list, or it is damaged
        _keep_samples(run, samples)


def _keep_samples(run: Path, samples: Samples) -> None:
    try:
        samples.save(run / START)
    except OSError as e:
        raise EyasError(f"--output-dir {run}: {e.strerror or e}") from None


def kept_start(run: Path) -> tuple[DrafterConfig, DraftVocab] | None:
    """What `keep_start` kept; None where there is nothing of the kind."""
    try:
        sizes = json.loads((run / START / "drafter.json").read_bytes())
        mla = MlaSizes(**sizes["mla"]) if sizes["mla"] else None
        return DrafterConfig(**{**sizes, "mla": mla}), load_vocab(run / START)
    except (OSError, ValueError, KeyError, TypeError, EyasError):
        return None


def begun_with(run: Path) -> dict[str, Any]:
    """The settings in run.yaml, with its folders as they are found from here; none where it cannot be read."""
    try:
        return found_again(yaml.safe_load((run / "run.yaml").read_text()))
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return {}


def about_run(config: TrainConfig, source: Source, verifier: Verifier, before: dict[str, Any]) -> dict[str, Any]:
    """What run.yaml says. before: what it said when the run was started or resumed last."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about: dict[str, Any] = {
        "config": config.resolved(),
        "eyas": eyas.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "folder": str(Path.cwd()),
        "started": before.get("started", now),
        "verifier": {"name": verifier.config.name, "fingerprint": verifier.fingerprint},
        "data": {
            "samples": len(source.ids),
            "layers": list(source.manifest.layers),
            "norm_side": source.manifest.norm_side,
        },
    }
    if before:
        about["resumed"] = [*before.get("resumed", []), now]
    return about


def link(name: Path, folder: Path) -> None:
    """Point the symbolic link `name` at `folder`, atomically. Raises EyasError when the disk refuses."""
    side = name.with_name(f".{name.name}")
    try:
        side.unlink(missing_ok=True)
        side.symlink_to(os.path.relpath(folder, name.parent))
        side.replace(name)
    except OSError as e:
        side.unlink(missing_ok=True)
        raise EyasError(f"cannot write {name}: {e.strerror}") from None
