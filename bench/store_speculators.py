"""The other side of `bench/store.py`: speculators' own dataset, collate function and DataLoader, as its trainer sets
them up. Started by it, in the engines' environment; it is told what to do in lines, so that both can go by turns.

    python bench/store_speculators.py FOLDER COUNT FEW    # FOLDER/pt/data_N.pt are there; FOLDER/speculators is made

`cold` on its input: an epoch over all COUNT samples; `warm`: one over the first FEW. Each is answered by a line of
JSON: bytes of states, seconds from the first `next` on, seconds of CPU of this process and its workers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import datasets
import psutil
import torch
from safetensors.torch import save_file
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import _limit_worker_threads, _setup_dataloader

WORKERS, PREFETCH = 4, 4  # its own default is 12 workers, for larger machines


def make_data(folder: Path, count: int) -> tuple[Path, int, int]:
    """The samples of the .pt files as its data generation stores them; (folder, tokens of a sample, Ht)."""
    out = folder / "speculators"
    first = torch.load(folder / "pt" / "data_0.pt", weights_only=True, mmap=True)
    T, H = first["hidden_states"][0].shape
    if not (out / "done").exists() or (out / "done").read_text() != str(count):
        (out / "hidden_states").mkdir(parents=True, exist_ok=True)
        rows: dict[str, list[object]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
        for i in range(count):
            one = torch.load(folder / "pt" / f"data_{i}.pt", weights_only=True)
            states = torch.stack(one["hidden_states"], dim=1)  # [T, 4, Ht]
            path = out / "hidden_states" / f"hs_{i}.safetensors"
            save_file({"hidden_states": states, "token_ids": one["input_ids"]}, path)
            rows["input_ids"].append(one["input_ids"].tolist())
            rows["loss_mask"].append(one["loss_mask"].tolist())
            rows["seq_len"].append(T)
        datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(out)
        os.sync()
        (out / "done").write_text(str(count))
    return out, T, H


def cpu_seconds() -> float:
    """Of this process and its living children."""
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (me, *me.children(recursive=True)))


def main() -> None:
    folder, count, few = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _limit_worker_threads()
    out, T, H = make_data(folder, count)
    loaders = {}
    for name, samples in (("cold", count), ("warm", few)):
        share = min(1.0, (samples + 0.5) / count)
        data = ArrowDataset(max_len=T, datapath=out, on_missing="raise", train_ratio=share)
        assert len(data) == samples, (len(data), samples)
        loaders[name] = _setup_dataloader(data, T, H, num_workers=WORKERS, prefetch_factor=PREFETCH)
    print("ready", flush=True)
    for line in sys.stdin:
        before, started, nbytes = cpu_seconds(), time.perf_counter(), 0
        for batch in loaders[line.strip()]:
            nbytes += sum(batch[key].nbytes for key in ("hidden_states", "verifier_last_hidden_states"))
        seconds = time.perf_counter() - started
        print(json.dumps({"bytes": nbytes, "seconds": seconds, "cpu_s": cpu_seconds() - before}), flush=True)


if __name__ == "__main__":
    main()
