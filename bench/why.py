"""What `eyas why` costs: CPU of a snapshot, wall time of an answer, and whether the target notices.

    python bench/why.py                  all three, as JSON on standard output
    python bench/why.py --seconds 20     longer runs for the comparison of step times

The target is one process of 200 threads and 200 descriptors whose main thread does a fixed piece of work per step. Its
step times are compared with and without a loop of questions; the sampling alone is measured inside the probe.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from eyas.why import remote

TARGET = """
import os, sys, threading, time
event = threading.Event()
for _ in range(int(sys.argv[2]) - 1):
    threading.Thread(target=event.wait, daemon=True).start()
held = [os.open(sys.argv[1], os.O_RDONLY) for _ in range(int(sys.argv[3]))]
print("ready", flush=True)
while True:
    began = time.perf_counter()
    total = 0
    for i in range(50_000):
        total += i * i
    os.write(2, b"%.6f\\n" % (time.perf_counter() - began))
"""


class Target:
    """A busy process whose step times go to a file."""

    def __init__(self, place: Path, threads: int = 200, fds: int = 200) -> None:
        data = place / "data.bin"
        data.write_bytes(b"x" * 4096)
        self.times = place / "steps"
        with self.times.open("wb") as steps:
            words = [sys.executable, "-c", TARGET, str(data), str(threads), str(fds)]
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=steps)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def steps(self, seconds: float) -> list[float]:
        """The step times of the coming seconds."""
        start = self.times.stat().st_size
        time.sleep(seconds)
        with self.times.open("rb") as steps:
            steps.seek(start)
            return [float(line) for line in steps.read().splitlines()[1:-1]]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def snapshot(pid: int, **request: Any) -> dict[str, Any]:
    return remote.ask({"kind": "pid", "value": pid, "mode": "why", "asked": str(pid), **request}, 30.0)


def cost(pid: int, repeats: int) -> dict[str, Any]:
    """CPU of the samples and of the whole probe, and its wall time."""
    samples: list[float] = []
    whole: list[float] = []
    walls: list[float] = []
    threads = fds = 0
    for _ in range(repeats):
        began = time.monotonic()
        snap = snapshot(pid)
        walls.append(time.monotonic() - began)
        samples += snap["meta"]["sample_cpu_s"]
        whole.append(snap["meta"]["cpu_s"])
        look = snap["samples"][0]["procs"][str(pid)]
        threads, fds = len(look["threads"]), len(look["fds"])
    return {
        "threads": threads,
        "fds": fds,
        "sample_cpu_ms": {"median": round(1e3 * statistics.median(samples), 1), "max": round(1e3 * max(samples), 1)},
        "probe_cpu_ms": round(1e3 * statistics.median(whole), 1),
        "probe_wall_s": {"median": round(statistics.median(walls), 2), "max": round(max(walls), 2)},
    }


def answer(pid: int, repeats: int) -> dict[str, Any]:
    """Wall time of the command, from the shell's point of view."""
    walls = []
    for _ in range(repeats):
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "eyas.why", str(pid)], stdout=subprocess.DEVNULL, check=False)
        walls.append(time.monotonic() - began)
    return {"median_s": round(statistics.median(walls), 2), "max_s": round(max(walls), 2)}


def watch_tracer(pid: int, seconds: float, seen: set[str]) -> None:
    """Who traces the target, ten times a second."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        status = Path(f"/proc/{pid}/status").read_text()
        seen.add(next(line.split()[1] for line in status.splitlines() if line.startswith("TracerPid")))
        time.sleep(0.1)


def disturbance(target: Target, seconds: float) -> dict[str, Any]:
    """Step times without, with, without a loop of questions; the traced flag is watched meanwhile."""
    before = target.steps(seconds)
    code = (
        "import sys; from eyas.why import remote\nwhile 1: remote.ask({'kind': 'pid', 'value': int(sys.argv[1])}, 30)"
    )
    asking = subprocess.Popen([sys.executable, "-c", code, str(target.process.pid)], start_new_session=True)
    tracers: set[str] = set()
    watcher = threading.Thread(target=watch_tracer, args=(target.process.pid, seconds, tracers))
    watcher.start()
    during = target.steps(seconds)
    watcher.join()
    os.killpg(asking.pid, 9)
    asking.wait()
    after = target.steps(seconds)
    quiet = statistics.median(before + after)
    noise = abs(statistics.median(before) - statistics.median(after)) / quiet
    return {
        "step_ms_alone": round(1e3 * quiet, 3),
        "step_ms_asked": round(1e3 * statistics.median(during), 3),
        "ratio": round(statistics.median(during) / quiet, 4),
        "noise": round(noise, 4),
        "steps": [len(before), len(during), len(after)],
        "traced_by": sorted(tracers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        target = Target(Path(place))
        try:
            found = {
                "cost": cost(target.process.pid, given.repeats),
                "answer": answer(target.process.pid, given.repeats),
            }
            found["disturbance"] = disturbance(target, given.seconds)
        finally:
            target.close()
    found["host"] = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": sys.version.split()[0]}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
