"""Other tools' files, written as those tools write them: what their sources say they do, field by field.

A sample is what the fixture `on_policy` gives: {input_ids, loss_mask, before, after}, four states of one width each.
"""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

Samples = list[dict[str, Any]]


def founding(folder: Path, samples: Samples) -> None:
    """{input_ids, loss_mask, hidden_states: four tensors} by torch.save."""
    for i, s in enumerate(samples):
        states = [h.to(torch.bfloat16) for h in s["before"]]
        content = {"input_ids": s["input_ids"], "loss_mask": s["loss_mask"], "hidden_states": states}
        torch.save(content, folder / f"data_{i}.pt")


def specforge(folder: Path, samples: Samples, zipped: bool = False) -> None:
    """scripts/prepare_hidden_states.py: the auxiliary states side by side, the last one behind the norm."""
    for i, s in enumerate(samples):
        states = [h.to(torch.bfloat16) for h in s["after"]]
        content = {
            "input_ids": s["input_ids"].view(-1),
            "loss_mask": s["loss_mask"].view(-1),
            "hidden_state": states[3].clone().unsqueeze(0),
            "aux_hidden_state": torch.cat(states[:3], dim=-1).clone().unsqueeze(0),
        }
        rows = folder / f"rows_{i // 5 * 5}-{i // 5 * 5 + 5}"
        rows.mkdir(exist_ok=True)
        if zipped:
            with gzip.open(rows / f"data_{i}.ckpt.gz", "wb", compresslevel=1) as file:
                torch.save(content, file)
        else:
            torch.save(content, rows / f"data_{i}.ckpt")


def speculators(folder: Path, samples: Samples, fp8: bool = False) -> None:
    """An arrow dataset as `datasets` saves it, and one file a row as vLLM's connector writes it."""
    half = len(samples) // 2
    names = [f"data-{n:05d}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (samples[:half], samples[half:]), strict=True):
        table = pa.table(
            {
                "input_ids": pa.array([s["input_ids"].tolist() for s in part], pa.list_(pa.int64())),
                "loss_mask": pa.array([s["loss_mask"].tolist() for s in part], pa.list_(pa.int64())),
                "seq_len": pa.array([len(s["input_ids"]) for s in part], pa.int64()),
            }
        )
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=4)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f00d", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "hidden_states").mkdir()
    for i, s in enumerate(samples):
        states = torch.stack([h.to(torch.bfloat16) for h in s["before"]], dim=1)  # [T, 4, H]
        content = {"hidden_states": states, "token_ids": s["input_ids"].to(torch.int64)}
        if fp8:
            scale = (states.float().abs().amax(dim=(1, 2), keepdim=True) / 448).clamp(min=1e-12)
            content["hidden_states"] = (states.float() / scale).to(torch.float8_e4m3fn)
            content["hidden_states_scales"] = scale
        save_file(content, folder / "hidden_states" / f"hs_{i}.safetensors")


def deepspec(folder: Path, samples: Samples, dtype: str = "bfloat16") -> None:
    """scripts/data/prepare_target_cache.py: two shards, one record of 56 bytes a sample."""
    records, half = b"", len(samples) // 2
    for shard, part in enumerate((samples[:half], samples[half:])):
        with (folder / f"shard-{shard:05d}.bin").open("wb") as file:
            for s in part:
                states = [h.to(getattr(torch, dtype)) for h in s["after"]]
                ids, mask = s["input_ids"].numpy().astype("<i4"), s["loss_mask"].numpy().astype(np.uint8)
                aux, last = torch.cat(states[:3], dim=-1), states[3]
                offsets = []
                for data in (
                    ids.tobytes(),
                    np.ones_like(mask).tobytes(),
                    mask.tobytes(),
                    aux.view(torch.uint8).numpy().tobytes(),
                    last.view(torch.uint8).numpy().tobytes(),
                ):
                    offsets.append(file.tell())
                    file.write(data)
                records += struct.pack("<QIIQQQQQ", len(records) // 56, shard, len(ids), *offsets)
    (folder / "samples.idx").write_bytes(records)
    shards = [{"shard_id": n, "file_name": f"shard-{n:05d}.bin"} for n in range(2)]
    manifest = {
        "version": 2,
        "num_samples": len(samples),
        "num_shards": 2,
        "target_layer_ids": [1, 3, 4],
        "hidden_dtype": dtype,
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": samples[0]["before"][0].shape[1],
        "shards": shards,
        "target_model_name_or_path": "tiny",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


WRITERS = {
    "founding": founding,
    "specforge": specforge,
    "specforge-gz": lambda folder, samples: specforge(folder, samples, zipped=True),
    "speculators": speculators,
    "speculators-fp8": lambda folder, samples: speculators(folder, samples, fp8=True),
    "deepspec": deepspec,
    "deepspec-fp8": lambda folder, samples: deepspec(folder, samples, "float8_e4m3fn"),
    "deepspec-e5m2": lambda folder, samples: deepspec(folder, samples, "float8_e5m2"),
}


def write(kind: str, folder: Path, samples: Samples) -> Path:
    """`samples` as files of `kind` in `folder`."""
    folder.mkdir(exist_ok=True)
    WRITERS[kind](folder, samples)
    return folder


def expected(kind: str, sample: dict[str, Any]) -> torch.Tensor:
    """[4, T, H] bfloat16: what a reader must give."""
    after = kind.startswith(("specforge", "deepspec"))
    states = torch.stack([h.to(torch.bfloat16) for h in sample["after" if after else "before"]])
    if kind == "speculators-fp8":
        scale = (states.float().abs().amax(dim=(0, 2), keepdim=True) / 448).clamp(min=1e-12)
        states = ((states.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)
    if kind == "deepspec-fp8":
        states = torch.stack(list(sample["after"])).to(torch.float8_e4m3fn).to(torch.bfloat16)
    if kind == "deepspec-e5m2":
        states = torch.stack(list(sample["after"])).to(torch.float8_e5m2).to(torch.bfloat16)
    return states
