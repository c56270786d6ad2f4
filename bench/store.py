"""How near is the read path to the disk and to the memory, and how long would a GPU wait for it?

    make bench-store                       # or: make bench NAME=store ARGS="--gb 3 --only cold warm"

Makes its own data (samples of 2,048 tokens x 4 states x 7,168 in bf16, 117 MB each, as a store and as the founding
story's .pt files), then:

cold   the read path with checksums against raw O_DIRECT reads of another file, by turns of a fraction of a second
pages  cold once more with buffers of 4 KiB pages in place of huge ones: what the ring's choice brings on this machine
warm   the same out of the page cache against memcpy between warm buffers, both with as many threads
torch  torch.load in a DataLoader with 4 workers, cold and warm, beside the same samples through the read path
speculators  its own dataset, collate function and DataLoader with 4 workers over the same samples in its own files
       (bench/store_speculators.py, in the engines' environment: EYAS_ENGINE_PYTHON), by turns with the Loader
plan   bench/plan.py: its worst error over four set-ups
wait   training simulated by steps that sleep 170 and 87 ms: what share of the time the loader lets them wait
first  seconds from opening a store of 100,000 samples to its first batch, the index being there

Cold means dropped from the page cache. Disks of virtual machines change their speed by the minute, so everything is
measured against its yardstick in the same second or two, and medians are told. Writes bench/out/store.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from eyas.store.layout import Manifest
from eyas.store.reader import StoreSource, open_source
from eyas.store.readpath import ReadPath
from eyas.store.ring import Ring
from eyas.store.writer import StoreWriter
from eyas.train.batches import Loader, epoch_order, pack, split_source

T, H, STATES = 2048, 7168, 4
SAMPLE = T * H * STATES * 2
THREADS = 4
CORES = len(os.sched_getaffinity(0))
RAW_CALL = 32 << 20
READERS = 6  # two more than read raw, as the Loader has them: while a thread hashes what it has read, another one reads
PER_TURN = {"reads": 12, "loader": 32}  # samples of one turn; filling and draining a loader takes a few of them
STEPS = (0.170, 0.087)
PARTS = ["cold", "pages", "warm", "torch", "speculators", "plan", "wait", "first"]
MANIFEST = Manifest("bench", "", H, 61, 163_840, (2, 30, 58, 61), "before")


# -- data --------------------------------------------------------------------------------------------------------------


def make_data(folder: Path, count: int) -> None:
    """`count` samples as a store and as .pt files, and a file of the same size to read raw."""
    if (folder / "done").exists() and (folder / "done").read_text() == str(count):
        return
    print(f"making {3 * count * SAMPLE / 1e9:.1f} GB of data in {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    mask = np.arange(T) >= T // 4
    (folder / "pt").mkdir(exist_ok=True)
    with StoreWriter(folder / "store", MANIFEST) as store, (folder / "raw").open("wb") as raw:
        for i in range(count):
            bits = rng.integers(0, 1 << 14, (STATES, T, H), dtype=np.int16)  # finite, small
            states, ids = torch.from_numpy(bits).view(torch.bfloat16), rng.integers(0, 163_840, T, dtype=np.int32)
            if f"s{i}" not in store.done_ids:
                store.add(f"s{i}", ids, mask, states)
            one = {"input_ids": torch.from_numpy(ids).long(), "loss_mask": torch.from_numpy(mask).long()}
            torch.save({**one, "hidden_states": list(states)}, folder / "pt" / f"data_{i}.pt")
            raw.write(bits.data)
    os.sync()
    (folder / "done").write_text(str(count))


def drop(*folders: Path) -> None:
    """Drop the files of the folders from the page cache."""
    for folder in folders:
        for path in [folder] if folder.is_file() else [p for p in folder.iterdir() if p.is_file()]:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cpu_seconds() -> float:
    """Of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Raw:
    """Plain O_DIRECT reads of one file by THREADS threads, RAW_CALL bytes each, into buffers that are used again."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.size = path.stat().st_size // RAW_CALL * RAW_CALL
        self.at = 0
        ring = Ring()
        self.buffers = [ring.lease(RAW_CALL) for _ in range(THREADS)]

    def read(self, pool: ThreadPoolExecutor, nbytes: int) -> float:
        """Bytes per second of reading about nbytes from where the last turn ended."""
        calls = [(self.at + k * RAW_CALL) % self.size for k in range(-(-nbytes // RAW_CALL))]
        self.at = (calls[-1] + RAW_CALL) % self.size

        def some(thread: int) -> int:
            return sum(os.preadv(self.fd, [self.buffers[thread].data], at) for at in calls[thread::THREADS])

        started = time.perf_counter()
        got = sum(pool.map(some, range(THREADS)))
        return got / (time.perf_counter() - started)


# -- cold --------------------------------------------------------------------------------------------------------------


def bench_paired(source: Any, raw: Raw, turns: int, through: str) -> dict[str, float]:
    """The read path against raw reads, by turns. through: "reads" (into the ring) or "loader" (batches on the CPU)."""
    path = ReadPath(source)
    order = epoch_order(list(range(len(source.ids))), 0, 0)
    ratios, rates, raws, cpu = [], [], [], []
    count = PER_TURN[through]
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda i: path.load([i], [T]), (order * 2)[: 2 * READERS]))  # the buffers' first touch
        for turn in range(turns):
            some = [order[(turn * count + k) % len(order)] for k in range(count)]
            first = raw.read(pool, count * SAMPLE) if turn % 2 else 0.0
            before, started = cpu_seconds(), time.perf_counter()
            if through == "reads":
                nbytes = sum(pool.map(lambda i: path.load([i], [T]).nbytes, some))
            else:
                nbytes = sum(b.nbytes for b in Loader(path, [[i] for i in some], 3, T, THREADS))
            seconds, used = time.perf_counter() - started, cpu_seconds() - before
            first = first or raw.read(pool, count * SAMPLE)
            rates.append(nbytes / seconds)
            raws.append(first)
            ratios.append(rates[-1] / first)
            cpu.append(used / nbytes * 1e9)
    return {
        "vs_raw": statistics.median(ratios),
        "gb_per_s": statistics.median(rates) / 1e9,
        "raw_gb_per_s": statistics.median(raws) / 1e9,
        "cpu_s_per_gb": statistics.median(cpu),
    }


# -- warm --------------------------------------------------------------------------------------------------------------


def bench_warm(source: StoreSource, turns: int) -> dict[str, float]:
    """Out of the page cache against memcpy of as many bytes by as many threads (one a core), by turns."""
    path = ReadPath(source, cache_gb=1e6)
    samples = list(range(min(8, len(source.ids))))
    ring = Ring()
    pairs = [(ring.lease(SAMPLE), ring.lease(SAMPLE)) for _ in range(CORES)]
    ratios, rates, copies, cpu = [], [], [], []
    with ThreadPoolExecutor(CORES) as pool:
        for a, b in pairs:
            a[:], b[:] = 1, 2
        drop(source.path)
        list(pool.map(lambda i: path.load([i], [T]).nbytes, samples))  # the cache as this path fills it
        for _ in range(turns):
            started = time.perf_counter()
            list(pool.map(lambda pair: [np.copyto(*pair) for _ in range(len(samples) // CORES)], pairs))
            copies.append(len(samples) // CORES * CORES * SAMPLE / (time.perf_counter() - started))
            before, started = cpu_seconds(), time.perf_counter()
            nbytes = sum(pool.map(lambda i: path.load([i], [T]).nbytes, samples))
            rates.append(nbytes / (time.perf_counter() - started))
            cpu.append((cpu_seconds() - before) / nbytes * 1e9)
            ratios.append(rates[-1] / copies[-1])
    return {
        "vs_memcpy": statistics.median(ratios),
        "gb_per_s": statistics.median(rates) / 1e9,
        "memcpy_gb_per_s": statistics.median(copies) / 1e9,
        "cpu_s_per_gb": statistics.median(cpu),
    }


# -- the founding set-up -----------------------------------------------------------------------------------------------


class PtFiles(Dataset[dict[str, Any]]):
    """data_*.pt by torch.load, as the founding run had it."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("data_*.pt"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(self.files[i], weights_only=True)
        return loaded


def torch_loader(folder: Path, order: list[int]) -> Any:
    """A DataLoader with 4 workers, one file a batch."""
    return DataLoader(PtFiles(folder), batch_size=None, sampler=order, num_workers=4, prefetch_factor=2)


def bench_torch(folder: Path, source: StoreSource, rounds: int) -> dict[str, float]:
    """An epoch of torch.load in workers and one of the Loader, by turns, cold and warm."""
    order = list(range(len(source.ids)))
    found: dict[str, list[float]] = {}

    def timed(name: str, batches: Callable[[], Iterator[int]]) -> None:
        before, started = cpu_seconds(), time.perf_counter()
        nbytes = sum(batches())
        found.setdefault(f"{name}_gb_per_s", []).append(nbytes / (time.perf_counter() - started) / 1e9)
        found.setdefault(f"{name}_cpu_s_per_gb", []).append((cpu_seconds() - before) / nbytes * 1e9)

    def theirs(some: list[int]) -> Iterator[int]:
        return (sum(s.numel() * 2 for s in batch["hidden_states"]) for batch in torch_loader(folder / "pt", some))

    cold, warm = ReadPath(source), ReadPath(source, cache_gb=1e6)
    few = order[:8]
    for path, some in ((cold, order), (warm, few * 3)):  # the buffers' first touch, as many as it comes to use
        list(Loader(path, [[i] for i in some], 3, T, THREADS))
    for _ in range(rounds):
        drop(folder / "pt", folder / "store")
        timed("torch_cold", lambda: theirs(order))
        timed("eyas_cold", lambda: (b.nbytes for b in Loader(cold, [[i] for i in order], 3, T, THREADS)))
        list(theirs(few))
        timed("torch_warm", lambda: theirs(few))
        list(Loader(warm, [[i] for i in few], 3, T, THREADS))
        timed("eyas_warm", lambda: (b.nbytes for b in Loader(warm, [[i] for i in few * 3], 3, T, THREADS)))
    return {name: statistics.median(values) for name, values in found.items()}


def bench_speculators(folder: Path, source: StoreSource, rounds: int, python: str) -> dict[str, float]:
    """An epoch of speculators' loader and one of the Loader, by turns, cold and warm. Its workers stay alive."""
    order, few = list(range(len(source.ids))), list(range(8))
    command = [
        python,
        str(Path(__file__).with_name("store_speculators.py")),
        str(folder),
        str(len(order)),
        str(len(few)),
    ]
    found: dict[str, list[float]] = {}
    paths = {"cold": ReadPath(source), "warm": ReadPath(source, cache_gb=1e6)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as theirs:
        assert theirs.stdin is not None and theirs.stdout is not None

        def ask(kind: str) -> dict[str, float]:
            print(kind, file=theirs.stdin, flush=True)
            told: dict[str, float] = json.loads(theirs.stdout.readline())  # type: ignore[union-attr]
            return told

        def own(kind: str, samples: list[int]) -> dict[str, float]:
            before, started = cpu_seconds(), time.perf_counter()
            nbytes = sum(b.nbytes for b in Loader(paths[kind], [[i] for i in samples], 3, T, THREADS))
            return {"bytes": nbytes, "seconds": time.perf_counter() - started, "cpu_s": cpu_seconds() - before}

        while theirs.stdout.readline().strip() != "ready":
            assert theirs.poll() is None, "speculators' side has ended"
        for kind, samples in (("cold", order), ("warm", few)):
            ask(kind)  # its workers start, and what they read is in the cache
            own(kind, order if kind == "cold" else few * 3)  # the buffers' first touch
            for _ in range(rounds):
                for name in ("speculators", "eyas"):
                    if kind == "cold":
                        drop(folder / "speculators" / "hidden_states", folder / "store")
                    told = ask(kind) if name == "speculators" else own(kind, samples * (3 if kind == "warm" else 1))
                    found.setdefault(f"{name}_{kind}_gb_per_s", []).append(told["bytes"] / told["seconds"] / 1e9)
                    found.setdefault(f"{name}_{kind}_cpu_s_per_gb", []).append(told["cpu_s"] / told["bytes"] * 1e9)
        theirs.stdin.close()
    middle = {name: statistics.median(values) for name, values in found.items()}
    theirs_alone = {name: value for name, value in middle.items() if name.startswith("speculators")}
    for kind in ("cold", "warm"):
        both = zip(found[f"eyas_{kind}_gb_per_s"], found[f"speculators_{kind}_gb_per_s"], strict=True)
        theirs_alone[f"vs_speculators_{kind}"] = statistics.median(ours / its for ours, its in both)
    return theirs_alone


def bench_plan(folder: Path, gb: float) -> dict[str, float]:
    """bench/plan.py in a process of its own; the largest error of a step time that it predicted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("plan.py")), "--gb", str(gb), "--folder", str(folder)]
    subprocess.run(command, check=True)
    told = json.loads(Path("bench/out/plan.json").read_text())
    return {"plan_worst_error": told["worst_error"], "plan_set_ups": len(told["set_ups"])}


# -- waiting -----------------------------------------------------------------------------------------------------------


def bench_wait(folder: Path, source: StoreSource, raw: Raw, rounds: int) -> dict[str, float]:
    """Share of the time that steps of fixed length wait, cold; the disk's own rate before and after each."""
    found: dict[str, float] = {}
    order = epoch_order(list(range(len(source.ids))), 0, 1)
    with ThreadPoolExecutor(THREADS) as pool:
        for step in STEPS:
            name = f"{round(step * 1000)}ms"
            shares, theirs, margins = [], [], []
            path = ReadPath(source)
            list(Loader(path, [[i] for i in order[:8]], 3, T, THREADS))
            for _ in range(rounds):
                before = raw.read(pool, 8 * SAMPLE)
                loader = Loader(path, [[i] for i in order], 3, T, THREADS)
                shares.append(waiting(iter(loader), step))
                margins.append((before + raw.read(pool, 8 * SAMPLE)) / 2 / (SAMPLE / step))
                drop(folder / "pt")
                theirs.append(waiting(iter(torch_loader(folder / "pt", order)), step))
            found[f"wait_share_{name}"] = statistics.median(shares)
            found[f"torch_wait_share_{name}"] = statistics.median(theirs)
            found[f"raw_over_demand_{name}"] = statistics.median(margins)
    return found


def waiting(batches: Iterator[Any], step: float) -> float:
    """The share of the time, from the first batch on, that `next` takes where every step sleeps for `step` seconds."""
    next(batches)
    started, slept = time.perf_counter(), 0.0
    while True:
        before = time.perf_counter()
        time.sleep(step)
        slept += time.perf_counter() - before
        if next(batches, None) is None:
            break
    return 1 - slept / (time.perf_counter() - started)


# -- the first batch ---------------------------------------------------------------------------------------------------


def make_many(folder: Path, count: int) -> None:
    """A store of `count` samples of 16 tokens and small states."""
    if (folder / "done").exists():
        return
    print(f"making a store of {count:,} samples in {folder}", flush=True)
    manifest = Manifest("bench", "", 64, 61, 163_840, (2, 30, 58, 61), "before")
    states, ids, mask = torch.randn(4, 16, 64), np.arange(16), np.arange(16) >= 4
    with StoreWriter(folder, manifest, commit_seconds=1e9) as store:
        for i in range(count):
            if f"s{i}" not in store.done_ids:
                store.add(f"s{i}", ids, mask, states)
    (folder / "done").write_text("")


def first_batch(folder: Path) -> None:
    """In a process of its own: print the seconds from opening the store to the first batch, and those of CPU."""
    started, before = time.perf_counter(), time.process_time()
    source = open_source(folder)
    train, _, _ = split_source(source, T, 0.1)
    packs = pack(epoch_order(train, 0, 0), source.lengths, T, T)
    batches = iter(Loader(ReadPath(source, cache_gb="auto"), packs, 3, T, THREADS))
    next(batches)
    print(time.perf_counter() - started, time.process_time() - before)
    batches.close()  # type: ignore[attr-defined]


def bench_first(folder: Path, count: int, rounds: int) -> dict[str, float]:
    """Seconds to the first batch, with the index kept, and once without it."""
    make_many(folder, count)
    kept = folder / ".index.safetensors"

    def once() -> list[float]:
        drop(folder)
        command = [sys.executable, __file__, "--first", str(folder)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [float(word) for word in told.split()]

    kept.unlink(missing_ok=True)
    without = once()[0]
    seconds, cpu = zip(*[once() for _ in range(rounds)], strict=True)
    return {
        "first_batch_s": statistics.median(seconds),
        "first_batch_cpu_s": statistics.median(cpu),
        "first_batch_without_index_s": without,
    }


def main() -> None:
    """Run what was asked for, print it, and write bench/out/store.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("bench/out/store-data"), help="where the data is made")
    parser.add_argument("--gb", type=float, default=3.0, help="of states, three times on the disk")
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=100_000, help="of the store whose first batch is timed")
    parser.add_argument("--only", nargs="*", default=PARTS)
    parser.add_argument("--first", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.first:
        first_batch(given.first)
        return
    out = Path("bench/out/store.json")
    told: dict[str, float] = json.loads(out.read_text()) if out.exists() else {}
    if set(given.only) & {"cold", "pages", "warm", "torch", "speculators", "wait"}:
        make_data(given.data, max(8, round(given.gb * 1e9 / SAMPLE)))
        source = open_source(given.data / "store")
        assert isinstance(source, StoreSource)
        raw = Raw(given.data / "raw")
    if "cold" in given.only:
        cold = bench_paired(source, raw, given.turns, "reads")
        told.update(cold_vs_raw=cold["vs_raw"], cold_cpu_s_per_gb=cold["cpu_s_per_gb"])
        told.update(cold_gb_per_s=cold["gb_per_s"], raw_gb_per_s=cold["raw_gb_per_s"])
        loader = bench_paired(source, raw, max(3, given.turns // 4), "loader")
        told.update(cpu_batches_vs_raw=loader["vs_raw"], cpu_batches_cpu_s_per_gb=loader["cpu_s_per_gb"])
        founding = open_source(given.data / "pt")
        if founding.extents(0) is not None:
            told["pt_in_place_vs_raw"] = bench_paired(founding, raw, given.turns, "reads")["vs_raw"]
    if "pages" in given.only:
        huge, mmap.MADV_HUGEPAGE = mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE  # type: ignore[misc]
        small = bench_paired(source, raw, given.turns, "reads")
        mmap.MADV_HUGEPAGE = huge  # type: ignore[misc]
        told.update(small_pages_vs_raw=small["vs_raw"], small_pages_cpu_s_per_gb=small["cpu_s_per_gb"])
    if "warm" in given.only:
        warm = bench_warm(source, given.turns)
        told.update(warm_vs_memcpy=warm["vs_memcpy"], warm_gb_per_s=warm["gb_per_s"])
        told.update(memcpy_gb_per_s=warm["memcpy_gb_per_s"], warm_cpu_s_per_gb=warm["cpu_s_per_gb"])
    if "torch" in given.only:
        torch_figures = bench_torch(given.data, source, given.rounds)
        told.update(torch_figures)
        for kind in ("cold", "warm"):
            told[f"vs_torch_loader_{kind}"] = (
                torch_figures[f"eyas_{kind}_gb_per_s"] / torch_figures[f"torch_{kind}_gb_per_s"]
            )
    if "speculators" in given.only:
        python = os.environ.get("EYAS_ENGINE_PYTHON", ".venv-engines/bin/python")
        if Path(python).exists():
            told.update(bench_speculators(given.data, source, given.rounds, python))
        else:
            print(f"speculators is left out: {python} is not there (make bench-store makes it)")
    if "plan" in given.only:
        told.update(bench_plan(given.data, given.gb))
    if "wait" in given.only:
        told.update(bench_wait(given.data, source, raw, given.rounds))
    if "first" in given.only:
        told.update(bench_first(given.data / "many", given.samples, given.rounds))
    told["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(told, indent=1) + "\n")
    for name, value in told.items():
        print(f"{name:<28} {value:.3f}")


if __name__ == "__main__":
    main()
