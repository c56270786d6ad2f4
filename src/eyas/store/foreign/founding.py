"""The founding story's files: a folder of `data_*.pt`, written by torch.save.

Each: {input_ids [T] or [1, T], loss_mask of the same shape, hidden_states: four tensors [T, H] or [1, T, H] in bf16,
fp16 or fp32}. The files do not say whose states they are nor which; by custom those after 2, n // 2, n - 3 and n
layers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.store.foreign.index import DTYPES, STATES, Found, Job, listed, tokens_of
from eyas.store.foreign.torchzip import Saved, Unreadable, open_saved

NAME = "founding"
WHAT = "data_*.pt files"


def files(folder: Path) -> list[Path]:
    """The folder's files of this format, in the order of their numbers; empty where it is another format."""
    return listed(folder, "data_*.pt")


def jobs(folder: Path, found: list[Path]) -> tuple[list[Job], Any]:
    """One sample a file."""
    return [Job(path.name, path) for path in found], partial(look, folder=folder)


def look(path: Path, folder: Path) -> Found:
    """One file. Raises Unreadable, OSError."""
    saved = open_saved(path)
    if not isinstance(saved, dict):
        raise Unreadable("is not a dictionary")
    for name in ("input_ids", "loss_mask", "hidden_states"):
        if name not in saved:
            raise Unreadable(f"has no {name!r}")
    states = saved["hidden_states"]
    if isinstance(states, Saved) and len(states.shape) > 1 and states.shape[0] == STATES:
        states = [one_of(states, i) for i in range(STATES)]  # one tensor [4, T, H] or [4, 1, T, H]
    if not isinstance(states, (list, tuple)) or not all(isinstance(s, Saved) for s in states):
        raise Unreadable("input_ids and loss_mask must be tensors, hidden_states a list of them")
    ids, mask = read_tokens(path, saved["input_ids"], saved["loss_mask"])
    if len(states) != STATES or any(s.dtype not in DTYPES[:3] for s in states):
        raise Unreadable(f"hidden_states must be {STATES} tensors of bf16, fp16 or fp32")
    rows = [s.rows() for s in states]
    if any(r[0] != len(ids) for r in rows):
        raise Unreadable(f"hidden_states have shapes {[list(s.shape) for s in states]} for {len(ids)} tokens")
    kinds = [(r[1], s.dtype) for r, s in zip(rows, states, strict=True)]
    if len(set(kinds)) != 1:
        raise Unreadable(f"hidden_states have different widths or types {kinds}")
    return Found(
        str(path.relative_to(folder)),
        ids,
        mask,
        rows[0][1],
        states[0].dtype,
        tuple(s.offset for s in states),
        tuple(r[2] for r in rows),
    )


def one_of(stacked: Saved, i: int) -> Saved:
    """Element i along the first dimension of a located tensor."""
    from eyas.store.foreign.torchzip import ITEMSIZE

    shift = i * stacked.stride[0] * ITEMSIZE[stacked.dtype]
    return stacked._replace(shape=stacked.shape[1:], stride=stacked.stride[1:], offset=stacked.offset + shift)


def read_tokens(path: Path, ids: Any, mask: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """The two small tensors of a torch file, from their places in it."""
    if not isinstance(ids, Saved) or not isinstance(mask, Saved):
        raise Unreadable("input_ids and loss_mask must be tensors, hidden_states a list of them")
    with path.open("rb", buffering=0) as file:
        return tokens_of(*(_read(file, tensor) for tensor in (ids, mask)))


def _read(file: Any, tensor: Saved) -> npt.NDArray[Any]:
    if tensor.dtype not in np.sctypeDict or not tensor.contiguous:
        raise Unreadable("its input_ids or loss_mask are of an unusual kind: save them as plain whole numbers")
    values = np.empty(tensor.numel, dtype=tensor.dtype)
    file.seek(tensor.offset)
    if file.readinto(values.view(np.uint8)) != values.nbytes:
        raise Unreadable("cannot be read (it is truncated)")
    return values
