"""The recorder's cost: µs a step, step time with and without, the sidecar's CPU and memory, the longest silence.

    make bench NAME=record                 all of it; needs the demo's verifier, and root for the slow disk
    make bench NAME=record ARGS=--gap-only

Writes bench/out/record.json:
    us_per_step         what a step costs in the trainer: six phases and `step`, over the bare loop; CPU time, median
    step_time_ratio     steps of about 10 ms of matrix products with a recorder over those without, in turns; medians
    sidecar_core_share  CPU seconds of the sidecar over seconds
    sidecar_mb          its resident memory
    max_log_gap_s       longest time without a line in the log, from the start of `eyas train` to step 20, on .pt files
                        that are not in memory, on a disk that gives 1 MB/s (first_line_s: until the first line)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import eyas
from eyas.record import beat
from eyas.record.record import Record

ROOT = Path(__file__).resolve().parents[1]
RATE = 1 << 20  # bytes a second of the slow disk
FILES, TOKENS = 24, 600
BLOCKS, STEPS = 9, 20_000


def us_per_step(folder: Path) -> float:
    """Microseconds of CPU: a loop that only records, less the same loop without."""

    def data() -> Any:
        yield from range(STEPS)

    def bare() -> float:
        begun = time.thread_time()
        for _ in data():
            pass
        return time.thread_time() - begun

    def recorded(rec: Record) -> float:
        enter = rec.enter
        begun = time.thread_time()
        for _ in rec.data(data(), then="copying"):
            enter("forward")
            enter("backward")
            enter("optimiser")
            enter("logging")
            rec.step(loss=2.0, tokens=512, epoch="1/1", accuracy=[0.5, 0.4, 0.3], lr=1e-3, grad_norm=1.0)
        return time.thread_time() - begun

    with Record(folder, "bench", say=lambda _text: None, make=True) as rec:
        rec.begin(0)
        return statistics.median((recorded(rec) - bare()) / STEPS * 1e6 for _ in range(BLOCKS))


def ratio_and_sidecar(folder: Path) -> dict[str, float]:
    """Blocks of 50 steps of about 10 ms, with and without a recorder in turns; and what the sidecar takes meanwhile."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(640, 640)
    repeat = 1

    def work() -> None:
        x = a
        for _ in range(repeat):
            x = torch.tanh(x @ a)

    begun = time.perf_counter()
    for _ in range(20):
        work()
    repeat = max(1, round(0.010 / ((time.perf_counter() - begun) / 20)))
    times: dict[bool, list[float]] = {True: [], False: []}
    with Record(folder, "bench", say=lambda _text: None, make=True) as rec:
        rec.begin(0)
        time.sleep(1)
        pid = rec.beat_values()["sidecar"]
        before, begun = cpu_seconds(pid), time.perf_counter()
        for block in range(60):
            with_it = block % 2 == 0
            if with_it:
                for _ in rec.data(range(50)):
                    start = time.perf_counter()
                    rec.enter("forward")
                    work()
                    rec.enter("backward")
                    rec.enter("optimiser")
                    rec.step(loss=2.0, tokens=512)
                    times[True].append(time.perf_counter() - start)
            else:
                for _ in range(50):
                    start = time.perf_counter()
                    work()
                    times[False].append(time.perf_counter() - start)
        seconds = time.perf_counter() - begun
        used = cpu_seconds(pid) - before
        status = Path(f"/proc/{pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "step_ms": round(statistics.median(times[False]) * 1e3, 3),
        "step_time_ratio": round(statistics.median(times[True]) / statistics.median(times[False]), 4),
        "sidecar_core_share": round(used / seconds, 5),
        "sidecar_mb": round(resident / 1024, 1),
    }


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, exact where the kernel counts run time."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def founding(folder: Path, cache: Path) -> dict[str, float]:
    """`eyas train` on cold .pt files on a slow disk, its log in a file: the longest silence up to step 20."""
    from eyas.demo import smollm2

    verifier = smollm2(cache)
    make_files(verifier, folder / "D")
    log = folder / "train.log"
    group = throttled(folder)
    words = [
        sys.executable, "-m", "eyas", "train", "--verifier-path", verifier, "--data-dir", folder / "D",
        "--vocab-mapping-dir", folder / "M", "--output-dir", folder / "O", "--epochs", 1, "--max-seq-len", TOKENS,
        "--ttt-steps", 1, "--num-workers", 4, "--val-ratio", 0.05,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(Path(eyas.__file__).parents[1])}
    # The program is in memory, as on a machine that is used; the data are not.
    warm = "import eyas.cli, eyas.config, eyas.train.loop, eyas.record.sidecar"
    subprocess.run([sys.executable, "-c", warm], env=env, check=True)
    join = ["sh", "-c", f'{"" if group is None else f"echo $$ > {group}/cgroup.procs; "}exec "$@"', "sh"]
    try:
        with log.open("wb") as out:
            begun = time.monotonic()
            process = subprocess.Popen(
                [*join, *map(str, words)], stdout=out, stderr=out, env=env,
            )  # fmt: skip
            stamps, seen, longest = [begun], 0, ""
            while True:
                ended = process.poll() is not None
                lines = log.read_text().splitlines()
                if len(lines) > seen:
                    now = time.monotonic()
                    if now - stamps[-1] > max((b - a for a, b in pairwise(stamps)), default=0):
                        longest = lines[seen]
                    stamps.append(now)
                    for line in lines[seen:]:
                        print(f"  {now - begun:6.1f} s  {line}", flush=True)
                    seen = len(lines)
                if ended or any(line.startswith("step 20/") for line in lines) or step_of(folder / "O") >= 20:
                    break
                time.sleep(0.05)
            stamps.append(time.monotonic())
            if ended and process.returncode:
                raise SystemExit(f"eyas train failed:\n{log.read_text()}")
            process.terminate()
            process.wait(30)
    finally:
        if group is not None:
            time.sleep(0.5)
            group.rmdir()
    gaps = [b - a for a, b in pairwise(stamps)]
    print(f"longest gap {max(gaps):.1f} s, before: {longest}")
    return {
        "max_log_gap_s": round(max(gaps), 2),
        "first_line_s": round(gaps[0], 2),
        "lines": seen,
        "seconds": round(stamps[-1] - begun, 1),
        "throttled": group is not None,
    }


def step_of(run: Path) -> int:
    """The step that the beat tells; 0 without one."""
    try:
        return int(beat.read(run / "beat")["step"])
    except (OSError, ValueError):
        return 0


def make_files(verifier_path: Path, folder: Path) -> None:
    """FILES files data_*.pt (six different ones) of the verifier's own states, dropped from memory; and M."""
    import torch
    from transformers import AutoTokenizer

    from eyas.verifier import Verifier
    from eyas.vocab import build

    folder.mkdir()
    verifier = Verifier(verifier_path)
    model = verifier.load_model(torch.float32, "cpu")
    layers = (*verifier.config.capture_layers(), verifier.config.num_layers)
    text = (ROOT / "README.md").read_text() * 4
    tokens = torch.tensor(AutoTokenizer.from_pretrained(verifier_path)(text)["input_ids"])
    with torch.inference_mode():
        for i in range(FILES):
            if i >= 6:
                shutil.copy(folder / f"data_{i % 6}.pt", folder / f"data_{i}.pt")
                continue
            ids = tokens[i * TOKENS : (i + 1) * TOKENS].clone()
            states = model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
            hidden = [states[k][0].to(torch.bfloat16).clone() for k in layers]
            mask = (torch.arange(TOKENS) >= 50).long()
            torch.save({"input_ids": ids, "loss_mask": mask, "hidden_states": hidden}, folder / f"data_{i}.pt")
    build(folder, verifier, 4096, folder.parent / "M", lambda _text: None)
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def throttled(folder: Path) -> Path | None:
    """A cgroup (v1) that may read RATE bytes a second from the folder's disk; None where there is none."""
    root = Path("/sys/fs/cgroup/blkio")
    if os.geteuid() or not (root / "blkio.throttle.read_bps_device").exists():
        print("no slow disk: needs root and cgroup v1")
        return None
    number = folder.stat().st_dev
    group = root / f"eyas-bench-{os.getpid()}"
    group.mkdir()
    (group / "blkio.throttle.read_bps_device").write_text(f"{os.major(number)}:{os.minor(number)} {RATE}")
    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap-only", action="store_true")
    parser.add_argument("--no-gap", action="store_true")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="where the demo's verifier is kept")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/out/record.json")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not given.gap_only:
            found["us_per_step"] = round(us_per_step(folder / "a"), 2)
            found.update(ratio_and_sidecar(folder / "b"))
        if not given.no_gap:
            found.update(founding(folder, given.cache))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
