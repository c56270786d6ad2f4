"""How fast is the training step, against speculators 0.9.0 on the same batch, and against the matrix peak?

    make bench-train

Both train the same drafter (SmolLM2-135M's sizes, random weights) on the same packed batch: 4 documents of 512 tokens,
the last 60 % of each trained, draft vocabulary 8,192, 3 TTT steps, head frozen, since speculators freezes it. eyas
takes the step of `eyas train`; speculators its own Eagle3DraftModel and loss under its trainer's autocast, clipping and
AdamW, with whichever of its attentions is fastest here, in its own interpreter (`train_speculators.py`). The two take
turns in one run; tokens/s are of the packed tokens, medians. `--rounds` says how many turns.

Their losses are compared where the definitions are the same: its mask is set to eyas's and its sum over steps divided
by their number. Gradients: largest norm of the difference of a parameter's gradient over its norm, after one pass from
the same weights. In fp32 that is rounding; in bf16 it is what two orders of rounding differ by, so each is also
compared with the fp32 gradient.

`fraction_of_matrix_peak` is the FLOPs of the products that the step needs (`flops`: untrained positions left out, each
token's projection once) per second, over the fastest bf16 product of squares in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as `eyas` does, before torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.config import load_config
from eyas.drafter.loss import head_loss
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.drafter.plan import Plan, make_plan
from eyas.drafter.start import start_random
from eyas.train.optim import make_optimisers

OUT = Path("bench/out/train.json")
DOCUMENTS, LENGTH, ANSWER, STEPS = 4, 512, 307, 3
SIZES = DrafterConfig(576, 576, 1536, 9, 3, 64, vocab_size=49152, draft_vocab_size=8192)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_batch(
    c: DrafterConfig = SIZES, documents: int = DOCUMENTS, length: int = LENGTH, answer: int = ANSWER
) -> dict[str, Tensor]:
    """Random weights, a verifier's head, and one packed batch."""
    torch.manual_seed(0)
    H, N = c.hidden_size, documents * length
    drafter = Drafter(c)
    start_random(drafter, 0)
    mask = torch.zeros(documents, length, dtype=torch.bool)
    mask[:, length - answer :] = True
    return {
        **{f"drafter.{name}": p.detach() for name, p in drafter.named_parameters()},
        "embedding": torch.randn(c.vocab_size, H) * 0.1,
        "verifier_head": torch.randn(c.draft_vocab_size, H) * 0.1,
        "input_ids": torch.randint(0, c.vocab_size, (documents, length)),
        "loss_mask": mask,
        "states": torch.randn(N, 3 * H).bfloat16(),
        "last": torch.randn(N, H).bfloat16(),
    }


class Trainer:
    """The step of `eyas train` on one batch."""

    def __init__(
        self, batch: dict[str, Tensor], dtype: str, c: DrafterConfig = SIZES, steps: int = STEPS, frozen: bool = True
    ) -> None:
        self.dtype = DTYPES[dtype]
        self.drafter = Drafter(c, batch["embedding"].to(self.dtype))
        self.drafter.load_state_dict(
            {k.removeprefix("drafter."): v for k, v in batch.items() if k.startswith("drafter.")}
        )
        self.drafter.lm_head.weight.requires_grad_(not frozen)
        self.verifier_head = batch["verifier_head"].to(self.dtype)
        pairs = zip(batch["input_ids"].numpy().astype(np.int32), batch["loss_mask"].numpy(), strict=True)
        self.plan = make_plan(list(pairs), steps)
        self.states, self.last = batch["states"][self.plan.key_row], batch["last"][self.plan.target_row]
        counts = torch.tensor([len(rows) for rows in self.plan.trained])
        self.weight = (1 / (counts * steps))[self.plan.loss_step]
        config = {"verifier_path": ".", "data_dir": ".", "output_dir": ".", "lr": 1e-4}
        [self.optimiser] = make_optimisers(self.drafter, load_config(config))

    def loss(self) -> Tensor:
        """Mean of the steps' mean KL, with its graph."""
        plan, c = self.plan, self.drafter.config
        last = F.rms_norm(self.last.float(), (c.hidden_size,), eps=c.rms_norm_eps).to(self.dtype)
        hidden = self.drafter.normed(self.drafter(plan, self.states.to(self.dtype)), plan.loss_row)
        loss, _ = head_loss(
            hidden, self.drafter.lm_head.weight, last, self.verifier_head, plan.loss_target, self.weight
        )
        return loss

    def step(self) -> float:
        """One optimiser step; returns its seconds."""
        started = time.perf_counter()
        self.loss().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def gradients(self) -> dict[str, Tensor]:
        """Loss and gradients of one pass, and nothing changed."""
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        found = {name: p.grad for name, p in self.drafter.named_parameters() if p.grad is not None}
        self.optimiser.zero_grad(set_to_none=True)
        return {"loss": loss.detach()[None], **found}


def flops(plan: Plan, c: DrafterConfig, frozen: bool) -> float:
    """FLOPs of the products of one step that the maths needs: forward, and backward by weights and by inputs."""
    H, Ht, Vd = c.hidden_size, c.target_hidden_size, c.draft_vocab_size
    nd, md = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    K, Q, T, E = plan.steps, len(plan.query_row), len(plan.key_row), len(plan.token)
    M, R = len(plan.loss_row), len(plan.target_row)
    seen = sum(int(plan.key_position[plan.query_row].sum()) + Q * (1 + k) for k in range(K))  # query and key pairs
    by_state = T * 2 * md + Q * nd + (K - 1) * Q * (nd + 2 * md)
    products = (
        2 * T * 3 * Ht * H  # fc: the states need no gradient
        + 2 * (T * 2 * md + (E - T + Q) * (nd + 2 * md)) * H  # q, k, v of the tokens: nor do these
        + 3 * by_state * H
        + 3 * K * Q * (nd * H + 3 * H * c.intermediate_size)
        + 6 * seen * nd  # two products forward, four backward
        + (2 if frozen else 3) * M * H * Vd
        + R * Ht * Vd
    )
    return 2.0 * products


def matrix_peak(seconds: float = 1.0) -> float:
    """FLOP/s of the fastest bf16 product of squares."""
    best = 0.0
    for n in (1024, 2048):
        a, b, out = (torch.randn(n, n).bfloat16() for _ in range(3))
        until = time.perf_counter() + seconds / 2
        while time.perf_counter() < until:
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            best = max(best, 2 * n**3 / (time.perf_counter() - started))
    return best


def worker(batch: dict[str, Tensor], imported: int) -> None:
    """Answers the parent's commands, one JSON a line, as `train_speculators.py` does."""
    trainers: dict[tuple[str, bool], Trainer] = {}
    for line in sys.stdin:
        command, *given = line.split()
        answer: Any = None
        if command == "memory":
            answer = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, "imported": imported}
        elif command == "peak":
            answer = matrix_peak()
        elif command == "flops":
            answer = flops(trainers["bf16", True].plan, SIZES, frozen=given[0] == "frozen")
        else:
            dtype, head, last = given
            if command == "gradients":
                save_file(Trainer(batch, dtype).gradients(), last)
            else:
                key = dtype, head == "frozen"
                if key not in trainers:
                    trainers[key] = Trainer(batch, dtype, frozen=key[1])
                answer = [trainers[key].step() for _ in range(int(last))]
        print(json.dumps(answer), flush=True)


class Child:
    """A worker in another process."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: object) -> Any:
        """One command and its answer."""
        assert self.process.stdin and self.process.stdout
        print(*words, file=self.process.stdin, flush=True)
        while line := self.process.stdout.readline():
            if line.startswith(("{", "[", "null", '"')) or line[:1].isdigit():
                return json.loads(line)
        raise SystemExit(f"{self.process.args} ended: see above")

    def close(self) -> None:
        """End it."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference of the loss and of any gradient, by norms."""
    if a.keys() != b.keys():
        raise SystemExit(f"gradients of other parameters: {sorted(a.keys() ^ b.keys())}")
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


def main() -> None:
    """Run both, print a table, write bench/out/train.json."""
    imported = resident()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine-python", default=os.environ.get("EYAS_ENGINE_PYTHON", ".venv-engines/bin/python"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(load_file(given.worker), imported)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_file(make_batch(), path / "batch")
        ours = Child(sys.executable, __file__, "--worker", str(path / "batch"))
        theirs = Child(given.engine_python, str(Path(__file__).with_name("train_speculators.py")), str(path / "batch"))
        children = {"eyas": ours, "speculators": theirs}
        for child in children.values():  # warm
            child.ask("steps", "bf16", "frozen", 1)
        seconds: dict[str, list[float]] = {name: [] for name in children}
        peak = 0.0
        for _ in range(given.rounds):
            peak = max(peak, ours.ask("peak"))
            seconds["eyas"] += ours.ask("steps", "bf16", "frozen", 3)
            seconds["speculators"] += theirs.ask("steps", "bf16", "frozen", 1)
        memory = {name: child.ask("memory") for name, child in children.items()}
        attention = theirs.ask("attention")
        trained_head = statistics.median(ours.ask("steps", "bf16", "trained", 7)[1:])
        needed, needed_trained = (ours.ask("flops", head) for head in ("frozen", "trained"))
        found = {}
        for dtype in DTYPES:
            for name, child in children.items():
                child.ask("gradients", dtype, "frozen", path / "found")
                found[name, dtype] = load_file(path / "found")
        for child in children.values():
            child.close()
    N = DOCUMENTS * LENGTH
    step = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "tokens_per_s": {name: round(N / s, 1) for name, s in step.items()},
        "speedup_vs_speculators": round(step["speculators"] / step["eyas"], 3),
        "peak_memory": {name: m["peak"] for name, m in memory.items()},
        "peak_memory_ratio": round(memory["eyas"]["peak"] / memory["speculators"]["peak"], 3),
        "peak_memory_ratio_without_imports": round(
            (memory["eyas"]["peak"] - memory["eyas"]["imported"])
            / (memory["speculators"]["peak"] - memory["speculators"]["imported"]),
            3,
        ),
        "matrix_peak_gflops": round(peak / 1e9, 1),
        "mflop_per_token": round(needed / N / 1e6, 1),
        "fraction_of_matrix_peak": round(needed / step["eyas"] / peak, 3),
        "trained_head": {
            "tokens_per_s": round(N / trained_head, 1),
            "fraction_of_matrix_peak": round(needed_trained / trained_head / peak, 3),
        },
        "max_rel_diff_fp32": difference(found["eyas", "fp32"], found["speculators", "fp32"]),
        "max_rel_diff_bf16": difference(found["eyas", "bf16"], found["speculators", "bf16"]),
        "bf16_against_fp32": {n: difference(found[n, "bf16"], found["speculators", "fp32"]) for n in children},
        "loss": {f"{name} {dtype}": float(g["loss"]) for (name, dtype), g in found.items()},
        "speculators_attention": attention,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(OUT.read_text()) if OUT.exists() else {}
    OUT.write_text(json.dumps({**kept, **result}, indent=1))
    for name, value in result.items():
        print(f"{name:<36} {value}")


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
