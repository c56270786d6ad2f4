"""What does a Kimi-sized drafter's step take on this GPU: time, utilisation, memory, overlap of copies, kernels?

    make bench NAME=gpu                     # under 6 minutes on one H200; ARGS=--tiny runs it small, on a CPU too

The step is that of `eyas train` (its Objective, clipping and AdamW) for a drafter of Kimi-K2.5's sizes with random
weights: 2,048 tokens in two documents, the last 60 % of each trained, three TTT steps, bf16. Utilisation is the FLOPs
of the products that the step needs (`train.flops`) per second over the GPU's published dense peak, and over the fastest
product of squares measured here. Overlap: steps fed by the loader from a store on this machine's disk (page cache),
against the same step on a batch that lies there; what is left of the copy's own time. With `--recompute`'s and
MLA attention's step beside it, and speculators' where it can be imported. Writes bench/out/gpu.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train import flops

from eyas.config import load_config
from eyas.drafter.mla import MlaSizes
from eyas.drafter.model import Drafter, DrafterConfig, attention_refusal
from eyas.evaluate.offline import VerifierHead
from eyas.plan.step import GPUS
from eyas.store.layout import Manifest
from eyas.store.reader import StoreSource
from eyas.store.readpath import ReadPath
from eyas.store.writer import StoreWriter
from eyas.train.batches import Batch, Loader
from eyas.train.objective import Objective
from eyas.train.optim import make_optimisers

OUT = Path("bench/out/gpu.json")
KIMI = DrafterConfig(7168, 7168, 12288, 64, 64, 128, 163_840, 32_000, rms_norm_eps=1e-6)
KIMI_MLA = MlaSizes(1536, 512, 128, 64, 128)
TINY = DrafterConfig(64, 64, 96, 4, 4, 16, 1000, 200)
TINY_MLA = MlaSizes(24, 16, 8, 8, 16)
STEPS, DOCUMENTS, TRAINED = 3, 2, 0.6
LAYERS = (2, 30, 58, 61)


class Trainer:
    """The step of `eyas train` for a drafter of these sizes."""

    def __init__(self, c: DrafterConfig, device: torch.device, dtype: torch.dtype, recompute: bool = False) -> None:
        self.c, self.device = c, device
        with device:
            drafter = Drafter(c, torch.randn(c.vocab_size, c.hidden_size, dtype=dtype) * 0.1)
            for p in drafter.parameters():
                if p.ndim > 1:
                    torch.nn.init.normal_(p, std=0.02)
            ids = torch.arange(c.draft_vocab_size) * (c.vocab_size // c.draft_vocab_size)
            head = VerifierHead(lambda x: x, torch.randn(c.vocab_size, c.hidden_size, dtype=dtype) * 0.1, ids)
        drafter.midlayer.recompute = recompute
        config = load_config({"verifier_path": ".", "data_dir": ".", "output_dir": ".", "lr": 1e-4})
        self.objective = Objective(drafter, head, config, device, dtype)
        [self.optimiser] = make_optimisers(drafter, config)

    def step(self, batch: Batch) -> list[float]:
        """One optimiser step; seconds of the forward pass, the backward pass and the optimiser."""
        marks = [self.now()]
        counts = [float(len(rows)) for rows in batch.plan.trained]
        loss, _ = self.objective(batch, counts)
        marks.append(self.now())
        loss.backward()
        marks.append(self.now())
        torch.nn.utils.clip_grad_norm_(self.objective.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        float(loss.detach())  # as the loop reads its metrics, once a step
        marks.append(self.now())
        return seconds_between(marks)

    def now(self) -> Any:
        """A moment on the device, which is not waited for."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds_between(marks: list[Any]) -> list[float]:
    """Seconds from each moment to the next."""
    if isinstance(marks[0], float):
        return [b - a for a, b in pairwise(marks)]
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]


def matrix_peak(device: torch.device, n: int, seconds: float = 1.0) -> float:
    """FLOP/s of the fastest bf16 product of squares of n."""
    a, b, out = (torch.randn(n, n, device=device).bfloat16() for _ in range(3))
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        for _ in range(4):
            torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = max(best, 8 * n**3 / (time.perf_counter() - started))
    return best


def write_store(folder: Path, c: DrafterConfig, length: int, count: int) -> StoreSource:
    """A store of `count` samples of random states."""
    layers = LAYERS
    manifest = Manifest("random", "0", c.target_hidden_size, 61, c.vocab_size, layers, "after", created="")
    rng, mask = np.random.default_rng(0), np.arange(length) >= round(length * (1 - TRAINED))
    states = torch.randn(len(layers), length, c.target_hidden_size).bfloat16()
    with StoreWriter(folder, manifest) as store:
        for i in range(count):
            store.add(f"s{i}", rng.integers(0, c.vocab_size, length).astype(np.int32), mask, states)
    return StoreSource(folder)


def repeat(trainer: Trainer, batch: Batch, steps: int) -> dict[str, Any]:
    """Medians over `steps` steps on one batch, and the peak of device memory."""
    cuda = trainer.device.type == "cuda"
    trainer.step(batch)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    parts = [trainer.step(batch) for _ in range(steps)]
    each = [statistics.median(p[i] for p in parts) for i in range(3)]
    return {
        "step_s": statistics.median(sum(p) for p in parts),
        **dict(zip(("forward_s", "backward_s", "optimiser_s"), each, strict=True)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def fed(trainer: Trainer, source: StoreSource, length: int, steps: int, step_s: float) -> dict[str, Any]:
    """Steps fed by the loader, past the first ones."""
    packs = [[(DOCUMENTS * i + j) % len(source.ids) for j in range(DOCUMENTS)] for i in range(steps + 4)]
    reads = ReadPath(source, cache_gb=1000, device=trainer.device)
    loader = Loader(reads, packs, STEPS, length, 4, device=trainer.device)
    marks = []
    for batch in loader:
        trainer.step(batch)
        marks.append(time.perf_counter())
    fed_s = (marks[-1] - marks[3]) / (len(marks) - 4)
    copy_s = None
    if trainer.device.type == "cuda":
        host = torch.empty(sum(source.nbytes(i) for i in packs[0]), dtype=torch.uint8).pin_memory()
        timed: list[float] = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            host.to(trainer.device, non_blocking=True)
            torch.cuda.synchronize()
            timed.append(time.perf_counter() - started)
        copy_s = statistics.median(timed)
    hidden = None if not copy_s else 1 - max(0.0, fed_s - step_s) / copy_s
    return {"fed_step_s": fed_s, "copy_s": copy_s, "copy_hidden": hidden, "waited_s": loader.waited / len(packs)}


def speculators(c: DrafterConfig, device: torch.device, length: int, steps: int) -> dict[str, Any]:
    """Its own step on as many tokens, where it can be imported."""
    if importlib.util.find_spec("speculators") is None:
        return {"left_out": "speculators is not installed beside eyas"}
    import train_speculators as other

    drafter = Drafter(c)
    mask = torch.zeros(DOCUMENTS, length, dtype=torch.bool)
    mask[:, round(length * (1 - TRAINED)) :] = True
    tensors: dict[str, Tensor] = {
        f"drafter.{name}": torch.randn(p.shape) * 0.02 for name, p in drafter.named_parameters()
    }
    tensors |= {
        "embedding": torch.randn(c.vocab_size, c.hidden_size) * 0.1,
        "verifier_head": torch.randn(c.draft_vocab_size, c.hidden_size) * 0.1,
        "input_ids": torch.randint(0, c.vocab_size, (DOCUMENTS, length)),
        "loss_mask": mask,
        "states": torch.randn(DOCUMENTS * length, 3 * c.hidden_size).bfloat16(),
        "last": torch.randn(DOCUMENTS * length, c.hidden_size).bfloat16(),
    }
    found: dict[str, Any] = {}
    for attention in other.ATTENTIONS:
        try:
            theirs = other.Trainer(
                tensors, "bf16", attention, heads=(c.num_heads, c.num_kv_heads, c.head_dim), device=device
            )
            theirs.step()
            found[attention] = statistics.median(theirs.step() for _ in range(steps))
            del theirs
        except Exception as e:  # whatever it does not run on
            found[attention] = " ".join(str(e).split())[:200]
    return found


def kernels(c: DrafterConfig, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What the step runs through here, and why."""
    reason = attention_refusal(c, device, dtype)
    return {
        "attention": f"blocks ({reason})" if reason else "flash, by log-sum-exp",
        "loss": "chunked products and passes of eyas (no fused kernel)",
        "optimiser": "torch's fused AdamW",
    }


def main() -> None:
    """Measure, print, write bench/out/gpu.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU where there is no GPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not given.tiny:
        raise SystemExit("no GPU here: --tiny runs it small")
    c, mla, length = (TINY, TINY_MLA, 64) if given.tiny else (KIMI, KIMI_MLA, 1024)
    steps, dtype = 3 if given.tiny else given.steps, torch.bfloat16
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    known = next((g for g in GPUS.values() if all(word in name for word in g.name.split())), None)
    peak = matrix_peak(device, 256 if given.tiny else 8192, 0.1 if given.tiny else 2.0)
    report: dict[str, Any] = {
        "device": name, "torch": torch.__version__, "sizes": asdict(c), "tokens": DOCUMENTS * length,
        "ttt_steps": STEPS, "published_peak": known and known.flops, "measured_peak": peak,
    }  # fmt: skip

    def utilisation(batch: Batch, sizes: DrafterConfig, step_s: float) -> dict[str, float | None]:
        done = flops(batch.plan, sizes, frozen=False) / step_s
        return {
            "tflop_per_s": done / 1e12,
            "of_published_peak": known and done / known.flops,
            "of_measured_peak": done / peak,
        }

    with tempfile.TemporaryDirectory() as folder:
        source = write_store(Path(folder) / "store", c, length, 8)
        reads = ReadPath(source, cache_gb=1000, device=device)
        batch = next(iter(Loader(reads, [[0, 1]], STEPS, length, 1, device=device)))
        variants: dict[str, Callable[[], Trainer]] = {
            "llama": lambda: Trainer(c, device, dtype),
            "llama, --recompute": lambda: Trainer(c, device, dtype, recompute=True),
            "mla": lambda: Trainer(replace(c, head_dim=mla.head_dim, num_kv_heads=c.num_heads, mla=mla), device, dtype),
        }
        for variant, make in variants.items():
            trainer = make()
            found = repeat(trainer, batch, steps)
            if trainer.c.mla is None:
                found |= utilisation(batch, c, found["step_s"])
            if variant == "llama":
                found |= fed(trainer, source, length, steps, found["step_s"])
            report[variant] = found | {"kernels": kernels(trainer.c, device, dtype)}
            print(variant, json.dumps(report[variant], indent=1), flush=True)
            del trainer
    report["speculators"] = speculators(c, device, length, 3)
    print("speculators", json.dumps(report["speculators"]))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
