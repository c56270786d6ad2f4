"""SpecForge's offline files: `rows_A-B/data_N.ckpt`, by torch.save, or the same inside gzip as `.ckpt.gz`.

Each: {input_ids [T], loss_mask [T], hidden_state [1, T, H]: the last state, as SGLang gives it behind the final norm,
aux_hidden_state [1, T, 3 H]: the three auxiliary states side by side}. Layers by default 1, n // 2 - 1 and n - 4 in
SGLang's unit, that is 2, n // 2 and n - 3 as HF indices.

Cost: a `.ckpt` is read in place. Of a `.ckpt.gz` the index needs the beginning only, but every read of states
decompresses the file (8 s of one core per GB): convert it first (`eyas store convert`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eyas.store.foreign.founding import read_tokens
from eyas.store.foreign.index import DTYPES, Found, Job, listed, natural, tokens_of
from eyas.store.foreign.torchzip import ITEMSIZE, Saved, Stream, Unreadable, open_saved

NAME = "specforge"
WHAT = "SpecForge's data_*.ckpt[.gz]"


def files(folder: Path) -> list[Path]:
    """The `.ckpt` and `.ckpt.gz` files in the folder and in its `rows_*`; empty where it is another format."""
    patterns = ("data_*.ckpt", "data_*.ckpt.gz", "rows_*/data_*.ckpt", "rows_*/data_*.ckpt.gz")
    return sorted((path for pattern in patterns for path in listed(folder, pattern)), key=natural)


def jobs(folder: Path, found: list[Path]) -> tuple[list[Job], Any]:
    """One sample a file."""
    return [Job(str(path.relative_to(folder)), path) for path in found], partial(look, folder=folder)


def look(path: Path, folder: Path) -> Found:
    """One file. Raises Unreadable, OSError."""
    if path.suffix == ".gz":
        return _look_gz(path, folder)
    saved = _dictionary(open_saved(path))
    ids, mask = read_tokens(path, saved["input_ids"], saved["loss_mask"])
    width, aux, last = _states(saved, len(ids))
    itemsize = ITEMSIZE[last.dtype]
    return Found(
        str(path.relative_to(folder)),
        ids,
        mask,
        width,
        last.dtype,
        (*(aux.offset + j * width * itemsize for j in range(3)), last.offset),
        (*(aux.rows()[2],) * 3, last.rows()[2]),
    )


def _dictionary(saved: Any) -> dict[str, Any]:
    if not isinstance(saved, dict):
        raise Unreadable("is not a dictionary")
    for name in ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"):
        if not isinstance(saved.get(name), Saved):
            more = " (captured without --enable-aux-hidden-states, or for another method)" if "hidden" in name else ""
            raise Unreadable(f"has no tensor {name!r}{more}")
    return saved


def _states(saved: dict[str, Any], tokens: int) -> tuple[int, Saved, Saved]:
    """(Ht, the auxiliary states, the last one), whose shapes fit."""
    aux, last = saved["aux_hidden_state"], saved["hidden_state"]
    (rows, width, _), (aux_rows, aux_width, _) = last.rows(), aux.rows()
    if rows != tokens or aux_rows != tokens:
        raise Unreadable(f"its states have shapes {list(aux.shape)} and {list(last.shape)} for {tokens} tokens")
    if aux_width != 3 * width:
        raise Unreadable(f"aux_hidden_state is {aux_width} wide, not three times {width}")
    if aux.dtype != last.dtype or last.dtype not in DTYPES[:3]:
        raise Unreadable(f"its states are {aux.dtype} and {last.dtype}, not both bf16, fp16 or fp32")
    return width, aux, last


def _look_gz(path: Path, folder: Path) -> Found:
    taken: dict[str, bytes] = {}
    with Stream(path) as stream:
        for key, nbytes in stream.storages():
            saved = _dictionary(stream.tree)
            small = {saved[name].key: name for name in ("input_ids", "loss_mask")}
            if key in small:
                taken[small[key]] = stream.take(nbytes)
            if len(taken) == len(small):
                break  # the states come behind them and are not decompressed
        if not stream.is_whole():
            raise Unreadable("cannot be read (it is truncated)")
    if len(taken) < 2:
        raise Unreadable("cannot be read (its token ids or loss mask are not there)")
    ids, mask = tokens_of(*(_array(taken[name], saved[name]) for name in ("input_ids", "loss_mask")))
    width, aux, last = _states(saved, len(ids))
    start, itemsize = aux.start * ITEMSIZE[aux.dtype], ITEMSIZE[last.dtype]
    if aux.key == last.key or not aux.key.isdigit() or not last.key.isdigit():
        raise Unreadable("its states share one storage, which cannot be read inside gzip: unpack it (gunzip)")
    # The stream has no offsets: each state is named by its storage's key, in the high bits.
    at_aux, at_last = int(aux.key) << 40, int(last.key) << 40
    return Found(
        str(path.relative_to(folder)),
        ids,
        mask,
        width,
        last.dtype,
        (*(at_aux + start + j * width * itemsize for j in range(3)), at_last + last.start * itemsize),
        (*(aux.rows()[2],) * 3, last.rows()[2]),
        gzipped=True,
    )


def _array(data: bytes, tensor: Saved) -> np.ndarray[Any, Any]:
    if tensor.dtype not in np.sctypeDict or not tensor.contiguous:
        raise Unreadable("its input_ids or loss_mask are of an unusual kind: save them as plain whole numbers")
    return np.frombuffer(data, dtype=tensor.dtype)[tensor.start : tensor.start + tensor.numel]
