"""How do the step's time and memory grow with tokens, document length, TTT steps and vocabularies?

    make bench NAME=growth                  # every group of rows; or ARGS="T K", which leaves the others' as they are

One thing is changed at a time from `bench/train.py`'s batch with a trained head: 2,048 tokens in documents of 512, 60 %
trained, 3 steps, draft vocabulary 8,192, V 49,152. Each row runs in a process of its own: seconds are the best of three
steps after one, memory is the peak above what weights, gradients, optimiser and batch take before the first step. Where
the maths is linear, seconds and bytes over the changed size should not rise; it is not in one long document's scores.
Writes bench/out/growth.json, and draws all that is in it to bench/growth.svg.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from train import ANSWER, LENGTH, SIZES, Trainer, flops, make_batch

from eyas.drafter.loss import greedy_choice

OUT, PLOT = Path("bench/out/growth.json"), Path("bench/growth.svg")
ROWS: dict[str, list[dict[str, Any]]] = {
    "T": [{"documents": n} for n in (1, 2, 4, 8, 16, 32)],
    "one-document": [{"documents": 1, "length": n, "answer": n * ANSWER // LENGTH} for n in (512, 2048, 8192, 16384)],
    "K": [{"steps": k} for k in (1, 2, 3, 5, 7)],
    "Vd": [{"draft_vocab": n} for n in (4096, 8192, 16384, 32768, 65536)],
    "V": [{"vocab": n} for n in (49152, 163840)],
    "V-outside-drop": [{"vocab": n, "outside": True} for n in (49152, 163840)],
    "recompute": [{"documents": n, "recompute": True} for n in (4, 16, 32)],
}
# What each group changes: the axis, and the size of a row.
AXES: dict[str, tuple[str, str]] = {
    "T": ("tokens of a pack, documents of 512", "tokens"),
    "one-document": ("tokens of one document", "tokens"),
    "K": ("TTT steps K", "steps"),
    "Vd": ("draft vocabulary Vd", "draft_vocab"),
    "V": ("vocabulary V", "vocab"),
    "V-outside-drop": ("vocabulary V, --outside drop", "vocab"),
    "recompute": ("tokens of a pack, --recompute", "tokens"),
}


def measure(
    documents: int = 4,
    length: int = LENGTH,
    answer: int = ANSWER,
    steps: int = 3,
    draft_vocab: int = SIZES.draft_vocab_size,
    vocab: int = SIZES.vocab_size,
    outside: bool = False,
    recompute: bool = False,
) -> dict[str, float]:
    """One row, in this process."""
    c = replace(SIZES, vocab_size=vocab, draft_vocab_size=draft_vocab, max_position_embeddings=max(4096, length))
    trainer = Trainer(make_batch(c, documents, length, answer), "bf16", c, steps, frozen=False)
    trainer.drafter.midlayer.recompute = recompute
    head = trainer.drafter.embedding  # for --outside drop: any [V, H] costs the same
    for p in trainer.drafter.parameters():
        p.grad = torch.zeros_like(p)
    trainer.optimiser.step()  # its state, before memory is looked at
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak()
    seconds = []
    for _ in range(4):
        took = trainer.step()
        if outside:
            started = time.perf_counter()
            greedy_choice(trainer.last, head)
            took += time.perf_counter() - started
        seconds.append(took)
    tokens = documents * length
    return {
        "tokens": tokens,
        "seconds": min(seconds[1:]),
        "tokens_per_s": tokens / min(seconds[1:]),
        "mib": (peak() - before) / 1024,
        "gflop_per_s": flops(trainer.plan, c, frozen=False) / min(seconds[1:]) / 1e9,
    }


def peak() -> int:
    """KiB of this process in memory at most, since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def draw(results: list[dict[str, Any]]) -> None:
    """Seconds and memory of a step over the size that each group changes, both axes logarithmic, to bench/growth.svg.

    The dotted line is what is proportional to the size, through the first row.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    groups = [what for what in AXES if sum(r["what"] == what for r in results) > 1]
    figure, axes = pyplot.subplots(2, len(groups), figsize=(3 * len(groups), 5), squeeze=False)
    for column, what in enumerate(groups):
        label, size = AXES[what]
        rows = sorted((r for r in results if r["what"] == what), key=lambda r: r[size])
        x = [r[size] for r in rows]
        for line, (quantity, unit) in enumerate((("seconds", "s a step"), ("mib", "MiB"))):
            at, y = axes[line][column], [r[quantity] for r in rows]
            at.loglog(x, y, "o-", markersize=4)
            at.loglog(x, [y[0] * n / x[0] for n in x], ":", color="grey")
            at.set_ylabel(unit if column == 0 else "")
            at.set_xlabel(label if line else "", fontsize=8)
            at.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    """Measure the rows named, print a table, write bench/out/growth.json, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=list(ROWS), metavar="WHAT", help=", ".join(ROWS))
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measure(**given.one)))
        return
    results = json.loads(OUT.read_text()) if OUT.exists() else []
    for what in given.what:
        results = [r for r in results if r["what"] != what]
        print(f"\n{what}\n{'':<44}{'tokens/s':>10}{'GFLOP/s':>10}{'MiB':>8}")
        for row in ROWS[what]:
            command = [sys.executable, __file__, "--one", json.dumps(row)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            results.append({"what": what, **row, **found})
            name = ", ".join(f"{k} {v:,}" for k, v in row.items())
            print(
                f"{name:<44}{found['tokens_per_s']:>10,.0f}{found['gflop_per_s']:>10,.0f}{found['mib']:>8,.0f}",
                flush=True,
            )
            OUT.parent.mkdir(parents=True, exist_ok=True)
            OUT.write_text(json.dumps(results, indent=1))  # after every row: some take minutes
    draw(results)


if __name__ == "__main__":
    main()
