"""Training runs in children of the test process, so that they can be killed, alone or as several ranks over gloo.

Forked and not started, because a new process would first import torch for seconds. Each child writes down every step
that it makes, to the last bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas.config import load_config
from eyas.errors import EyasError
from eyas.train.loop import Run

# One of everything that must survive: noise, dropout, decay, a moving average, a schedule.
SETTINGS = {
    "max_seq_len": 64, "batch_tokens": 300, "dtype": "fp32", "num_workers": 2, "epochs": 2, "lr": 2e-3,
    "warmup_ratio": 0.3, "weight_decay": 0.1, "noise_std": 0.3, "dropout": 0.1, "ema": 0.7, "keep": 3,
}  # fmt: skip


@dataclass
class Played:
    """How the children ended and what rank 0 printed."""

    codes: list[int | None]
    said: list[str]


def settings(tiny: Any, output: Path, **more: Any) -> dict[str, Any]:
    """As `load_config` takes them."""
    places = {"verifier_path": str(tiny.verifier), "data_dir": tiny.store, "vocab_mapping_dir": tiny.vocab}
    return {**places, "output_dir": output, **SETTINGS, **more}


def play(flags: dict[str, Any], ranks: int = 1, kill_at: int | None = None, wake: int = 0) -> Played:
    """Train in `ranks` children, to their end. kill_at: step before which each kills itself (kill -9), what it saves
    being saved; wake: a signal that rank 0 sends itself there instead."""
    said = Path(flags["output_dir"]).with_suffix(".said")
    said.unlink(missing_ok=True)
    children = start(flags, ranks, kill_at, wake)
    for child in children:
        child.join(120)
        if child.is_alive():
            child.kill()
    return Played([child.exitcode for child in children], said.read_text().splitlines() if said.exists() else [])


def start(flags: dict[str, Any], ranks: int = 1, kill_at: int | None = None, wake: int = 0) -> list[Any]:
    """The same, not waited for: the children's processes."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = Path(flags["output_dir"]).with_suffix(".said")
    children = [
        context.Process(target=_child, args=(flags, rank, ranks, port, kill_at, wake, said)) for rank in range(ranks)
    ]
    for child in children:
        child.start()
    return children


def _child(flags: dict[str, Any], rank: int, ranks: int, port: int, kill_at: int | None, wake: int, said: Path) -> None:
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    torch.set_num_threads(1)

    def say(text: str) -> None:
        with said.open("a") as file:
            file.write(text + "\n")

    try:
        run = Run(load_config(flags), say)
        trace = Path(flags["output_dir"]).with_suffix(f".{rank}.jsonl")
        step_of = run._step

        def step(epoch: int, indices: list[int], K: int, batches: Any) -> dict[str, Any] | None:
            if run.step == kill_at:
                if not wake:
                    run.states.finish()
                    os.kill(os.getpid(), signal.SIGKILL)
                elif rank == 0:
                    os.kill(os.getpid(), wake)
            before = run.step
            metrics = step_of(epoch, indices, K, batches)
            if metrics:
                mine = [run.source.ids[i] for index in indices for i in run.epochs[epoch][index]]
                exact = {name: _hex(value) for name, value in metrics.items()}
                with trace.open("a") as file:
                    file.write(json.dumps({"step": before, "samples": mine, **exact}) + "\n")
            return metrics

        run._step = step  # type: ignore[method-assign]
        run.train()
    except EyasError as e:
        say(f"eyas: {e}")
        sys.stdout.flush()
        os._exit(2)
    os._exit(0)


def _hex(value: Any) -> Any:
    return [v.hex() for v in value] if isinstance(value, list) else float(value).hex()


def trace(output: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Every step that this rank has made, in order, over all its processes."""
    return [json.loads(line) for line in output.with_suffix(f".{rank}.jsonl").read_text().splitlines()]


def tensors(output: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything in a saved state, from all its files; sharded tensors put together."""
    parts: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    from safetensors import safe_open

    for path in sorted((output / "state" / f"step-{step:06d}").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            where = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        for name, tensor in load_file(path).items():
            parts.setdefault(name, []).append((where[name]["saved_offsets"], tensor))
    return {name: torch.cat([t for _, t in sorted(p, key=lambda x: x[0])]) for name, p in parts.items()}


def state_json(output: Path, step: int) -> dict[str, Any]:
    """What a saved state says of the run, without times, places and sizes."""
    about: dict[str, Any] = json.loads((output / "state" / f"step-{step:06d}" / "state.json").read_text())
    return {k: v for k, v in about.items() if k not in ("seconds", "waited", "files", "identity")}


def steps(output: Path) -> list[int]:
    """Steps whose states are there."""
    return sorted(int(p.name.removeprefix("step-")) for p in (output / "state").glob("step-*"))
