"""DeepSpec's target cache: `manifest.json` (version 2), `samples.idx`, `shard-NNNNN.bin`.

samples.idx holds 56 bytes a sample: number, shard, tokens, and the first byte in the shard of input_ids int32 [T],
attention_mask uint8 [T], loss_mask uint8 [T], target_hidden_states [T, L H] (the layers side by side) and
target_last_hidden_states [T, H] (behind the final norm). States are bf16, or fp8 e4m3 or e5m2 without scales. Layer id
k of its manifest is the output of layer k counted from 0, that is HF index k + 1.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eyas.errors import EyasError
from eyas.store.foreign.index import STATES, Found, Job, tokens_of
from eyas.store.foreign.torchzip import ITEMSIZE, Unreadable

NAME = "deepspec"
WHAT = "a DeepSpec target cache"
_RECORD = struct.Struct("<QIIQQQQQ")
_VERSION = 2
_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class _Cache(NamedTuple):
    layers: tuple[int, ...]  # HF indices of the auxiliary states
    hidden_size: int
    dtype: str
    shards: list[str]
    verifier: str


def files(folder: Path) -> list[Path]:
    """Manifest, index and shards; empty where it is another format. Raises EyasError for one that is damaged."""
    if not (folder / "samples.idx").exists() or not (folder / "manifest.json").exists():
        return []
    shards = [folder / name for name in manifest(folder).shards]
    for shard in shards:
        if not shard.exists():
            raise EyasError(f"{shard} is missing, though manifest.json names it: restore it")
    return [folder / "manifest.json", folder / "samples.idx", *shards]


def manifest(folder: Path) -> _Cache:
    """What manifest.json says. Raises EyasError."""
    path = folder / "manifest.json"
    try:
        said = json.loads(path.read_bytes())
        if said["version"] != _VERSION:
            raise EyasError(
                f"{path} is of version {said['version']}; eyas reads version {_VERSION} of DeepSpec's caches"
            )
        shards = sorted(said["shards"], key=lambda shard: int(shard["shard_id"]))
        cache = _Cache(
            tuple(int(k) + 1 for k in said["target_layer_ids"]),
            int(said["hidden_size"]),
            str(said["hidden_dtype"]),
            [str(shard["file_name"]) for shard in shards],
            str(said.get("target_model_name_or_path") or "unknown"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EyasError(f"{path} cannot be read ({error!r}): restore it") from None
    if cache.dtype not in _DTYPES or (said["token_dtype"], said["mask_dtype"]) != ("int32", "uint8"):
        raise EyasError(f"{path}: states of {cache.dtype} with ids of {said['token_dtype']} are not read by eyas")
    if len(cache.layers) != STATES - 1:
        raise EyasError(f"{path} holds {len(cache.layers)} auxiliary layers; EAGLE-3 takes {STATES - 1}: capture those")
    if any(Path(name).name != name for name in cache.shards):
        raise EyasError(f"{path} names shards outside its folder: it is not DeepSpec's")
    return cache


def jobs(folder: Path, found: list[Path]) -> tuple[list[Job], Any]:
    """One sample for every record of samples.idx."""
    cache = manifest(folder)
    data = (folder / "samples.idx").read_bytes()
    if len(data) % _RECORD.size:
        raise EyasError(f"{folder / 'samples.idx'} is cut off within a record: restore it")
    sizes = {path.name: path.stat().st_size for path in found[2:]}
    todo = [Job(f"sample-{n}", record) for n, record in enumerate(_RECORD.iter_unpack(data))]
    return todo, lambda record: look(record, folder, cache, sizes)


def look(record: tuple[int, ...], folder: Path, cache: _Cache, sizes: dict[str, int]) -> Found:
    """One sample. Raises Unreadable, OSError."""
    _, shard, tokens, ids_at, _, mask_at, states_at, last_at = record
    if shard >= len(cache.shards):
        raise Unreadable(f"is said to be in shard {shard}, of {len(cache.shards)}")
    name, itemsize = cache.shards[shard], ITEMSIZE[cache.dtype]
    row = cache.hidden_size * itemsize
    ends = (ids_at + 4 * tokens, mask_at + tokens, states_at + 3 * row * tokens, last_at + row * tokens)
    if max(ends) > sizes[name]:
        raise Unreadable(f"reaches past the end of {name} (byte {sizes[name]}): the shard is truncated")
    fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        ids = np.frombuffer(os.pread(fd, 4 * tokens, ids_at), dtype="<i4")
        mask = np.frombuffer(os.pread(fd, tokens, mask_at), dtype=np.uint8)
    finally:
        os.close(fd)
    flat = tokens_of(ids, mask)
    offsets = (*(states_at + j * row for j in range(3)), last_at)
    return Found(name, *flat, cache.hidden_size, cache.dtype, offsets, (3 * row, 3 * row, 3 * row, row))
