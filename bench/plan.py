"""Does `eyas plan`'s arithmetic say how long a step takes? Four set-ups, real reads, a simulated step.

    python bench/plan.py [--gb 2] [--folder DIR]

A store of random states is written; the step is a sleep, as a GPU would be to this process; all else is the real
read path. The rates come from where `eyas plan` takes them: the disk measured under the same conditions, CPU seconds of
a reading thread measured on a few batches. `throttled` and `int8` run in a blkio control group with a limit (root,
control groups v1); without it they are left out and said to be. `cached` is the second epoch of a store that fits the
cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.plan import measure
from eyas.plan.step import Plan
from eyas.store.convert import convert
from eyas.store.layout import Manifest
from eyas.store.reader import Source, open_source
from eyas.store.readpath import ReadPath
from eyas.store.writer import StoreWriter
from eyas.train.batches import Loader, load_batch

TOKENS, WIDTH, THREADS, LIMIT = 2048, 2048, 4, 300_000_000
GROUP = Path("/sys/fs/cgroup/blkio/eyas-bench-plan")


def write_store(folder: Path, gb: float) -> None:
    """Samples of 2,048 tokens, 33.5 MB of random states each."""
    manifest = Manifest("bench", "", WIDTH, 8, 50_000, (2, 4, 5, 8), "before")
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(4, TOKENS, WIDTH, generator=rng).to(torch.bfloat16)
    mask = np.arange(TOKENS) > TOKENS // 2
    with StoreWriter(folder, manifest) as writer:
        for i in range(round(gb * 1e9 / states.nbytes)):
            writer.add(f"s{i}", np.random.default_rng(i).integers(0, 50_000, TOKENS), mask, states.roll(i, dims=1))


@contextlib.contextmanager
def throttled(folder: Path, limit: int | None) -> Iterator[None]:
    """Reads of this process from the folder's disk at `limit` bytes/s. Raises OSError where that cannot be set."""
    if limit is None:
        yield
        return
    device = folder.stat().st_dev
    disk = (Path("/sys/dev/block") / f"{os.major(device)}:{os.minor(device)}").resolve()
    disk = disk if (disk / "queue").exists() else disk.parent
    GROUP.mkdir(exist_ok=True)
    try:
        (GROUP / "blkio.throttle.read_bps_device").write_text(f"{(disk / 'dev').read_text().strip()} {limit}")
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
        GROUP.rmdir()


def predict(source: Source, folder: Path, step_s: float, cached: bool) -> Plan:
    """The plan of one epoch over `source` with a step of `step_s`."""
    rate = measure.disk_rate(sorted(folder.glob("*.safetensors")), seconds=2.0)
    assert rate is not None
    reads = ReadPath(source, cache_gb="auto")
    cpu = []
    for i in range(6):
        before = time.thread_time()
        load_batch(reads, [i], 3, TOKENS)
        cpu.append(time.thread_time() - before)
    size = source.nbytes(0) / TOKENS
    tokens = int(source.lengths.sum())
    return Plan(
        tokens, 0.5, size, TOKENS, 1, 2, step_s, statistics.median(cpu), THREADS, rate.bytes_per_s,
        measure.memcpy_rate(64 << 20), tokens * size if cached else 0.0, WIDTH,
    )  # fmt: skip


def run(source: Source, step_s: float, cached: bool) -> tuple[float, float]:
    """(seconds a step, share of it computing) of the loop over all samples, after a tenth of it."""
    reads = ReadPath(source, cache_gb="auto" if cached else 0)
    if cached:
        for i in range(len(source.ids)):
            reads.load([i], [TOKENS])
    packs = [[i] for i in range(len(source.ids))]
    ends = []
    for _ in Loader(reads, packs, 3, TOKENS, THREADS):
        time.sleep(step_s)
        ends.append(time.perf_counter())
    steady = ends[len(ends) // 10 :]
    took = (steady[-1] - steady[0]) / (len(steady) - 1)
    return took, step_s / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="plan-", dir=asked.folder))
    rows: list[dict[str, Any]] = []
    try:
        write_store(top / "bf16", asked.gb)
        convert(top / "bf16", top / "int8", codec="int8", say=lambda _line: None)
        for name, codec, step_s, cached, limit in (
            ("fast", "bf16", 0.06, False, None),
            ("throttled", "bf16", 0.06, False, LIMIT),
            ("cached", "bf16", 0.02, True, None),
            ("int8", "int8", 0.02, False, LIMIT),
        ):
            folder = top / codec
            for shard in folder.glob("*.safetensors"):
                fd = os.open(shard, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
            source = open_source(folder)
            try:
                with throttled(top, limit):
                    plan = predict(source, folder, step_s, cached)
                    took, busy = run(source, step_s, cached)
            except OSError as error:
                print(f"{name}: left out, the disk cannot be throttled here ({error})")
                continue
            plan = replace(plan, codec=codec)
            error = plan.step_s() / took - 1
            rows.append(
                {
                    "name": name, "bound_by": plan.bound_by(), "predicted_s": plan.step_s(), "measured_s": took,
                    "error": error, "predicted_busy": plan.busy(), "measured_busy": busy, "terms": plan.terms(),
                }
            )  # fmt: skip
            print(
                f"{name}: bound by {plan.bound_by()}, step {1000 * plan.step_s():.1f} ms predicted,"
                f" {1000 * took:.1f} measured ({error:+.1%}); busy {plan.busy():.0%}, {busy:.0%}"
            )
    finally:
        shutil.rmtree(top)
    out = Path("bench/out/plan.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"set_ups": rows, "worst_error": max(abs(r["error"]) for r in rows)}, indent=1))


if __name__ == "__main__":
    main()
