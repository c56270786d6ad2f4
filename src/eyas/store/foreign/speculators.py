"""What speculators 0.9 prepares and vLLM writes for it: an arrow dataset, and `hidden_states/hs_N.safetensors`.

The dataset (`state.json`, `data-*.arrow`, columns input_ids and loss_mask) holds row N of the tokens; `hs_N` holds
{token_ids [T], hidden_states [T, 4, H]: states after 2, n // 2, n - 3 and n layers, the last before the final norm}, in
bf16, fp16 or fp32, or in fp8 e4m3 with hidden_states_scales [T, 1, 1] float32, one for all four states of a token.

A file whose token_ids are not its row's is left out by name. `speculators`, `datasets` and vLLM are not needed.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.errors import EyasError
from eyas.store.foreign.index import STATES, Found, Job, listed, tokens_of
from eyas.store.foreign.torchzip import Unreadable

NAME = "speculators"
WHAT = "a speculators data set (arrow, hs_*.safetensors)"
_DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4), "F8_E4M3": ("float8_e4m3fn", 1)}
_HEADER_BYTES = 1 << 20


def files(folder: Path) -> list[Path]:
    """The arrow files and the hs_*.safetensors in `hidden_states` or beside them; empty: another format."""
    state = folder / "state.json"
    if not state.exists():
        return []
    patterns = ("hidden_states/hs_*.safetensors", "hidden_states/*/hs_*.safetensors", "hs_*.safetensors")
    states = [path for pattern in patterns for path in listed(folder, pattern)]
    return [state, *listed(folder, "*.arrow"), *states] if states else []


def jobs(folder: Path, found: list[Path]) -> tuple[list[Job], Any]:
    """One sample for every row that has a file. Raises EyasError where the dataset cannot be read."""
    rows = _Rows(folder)
    todo = [Job(str(path.relative_to(folder)), path) for path in found if path.suffix == ".safetensors"]
    return todo, lambda path: look(path, folder, rows)


class _Rows:
    """The columns input_ids and loss_mask of a dataset that `datasets` saved, by row."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        try:
            names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
            tables = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
            table = pa.concat_tables(tables)
            columns = [table.column(name).combine_chunks() for name in ("input_ids", "loss_mask")]
            self._ids, self._mask = (c.chunk(0) if isinstance(c, pa.ChunkedArray) else c for c in columns)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise EyasError(f"{folder}: its arrow dataset cannot be read ({str(error).splitlines()[0]})") from None

    def __len__(self) -> int:
        return len(self._ids)

    def row(self, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(input_ids, loss_mask) of row n."""
        ids, mask = (c[n].values.to_numpy(zero_copy_only=False) for c in (self._ids, self._mask))
        return ids, mask


def look(path: Path, folder: Path, rows: _Rows) -> Found:
    """One file. Raises Unreadable, OSError."""
    number = path.stem.removeprefix("hs_")
    if not number.isdigit() or int(number) >= len(rows):
        raise Unreadable(f"belongs to no row of the dataset, which has {len(rows)}")
    ids, mask = tokens_of(*rows.row(int(number)))
    with path.open("rb", buffering=0) as file:
        header, start, size = _header(file)
        tokens = _entry(header, "token_ids", start, size)
        states = _entry(header, "hidden_states", start, size)
        if tokens[0] not in ("I64", "I32"):
            raise Unreadable(f"token_ids are {tokens[0]}, not whole numbers")
        theirs = np.empty(int(np.prod(tokens[1])), dtype="<i8" if tokens[0] == "I64" else "<i4")
        file.seek(tokens[2])
        file.readinto(theirs.view(np.uint8).data)
    if not np.array_equal(theirs, ids):
        raise Unreadable(f"holds states of other tokens than row {number} of the dataset")
    kind, shape, offset = states
    if kind not in _DTYPES:
        raise Unreadable(f"hidden_states are {kind}, which eyas does not read")
    if len(shape) != 3 or shape[0] != len(ids) or shape[2] == 0:
        raise Unreadable(f"hidden_states have shape {shape} for {len(ids)} tokens")
    if shape[1] != STATES:
        raise Unreadable(f"hidden_states hold {shape[1]} layers, not {STATES}")
    dtype, itemsize = _DTYPES[kind]
    scales = -1
    if dtype == "float8_e4m3fn":
        kind, scaled, scales = _entry(header, "hidden_states_scales", start, size)
        if kind != "F32" or int(np.prod(scaled)) != len(ids):
            raise Unreadable(f"hidden_states_scales are {kind} {scaled}, not one float32 a token")
    row = shape[2] * itemsize
    offsets = tuple(offset + j * row for j in range(STATES))
    return Found(str(path.relative_to(folder)), ids, mask, shape[2], dtype, offsets, (STATES * row,) * STATES, scales)


def _header(file: Any) -> tuple[dict[str, Any], int, int]:
    """(the header, the file's first byte of data, the file's size)."""
    size = file.seek(0, 2)
    file.seek(0)
    first = file.read(8)
    if len(first) < 8:
        raise Unreadable("is empty" if size == 0 else "cannot be read (it is truncated)")
    (length,) = struct.unpack("<Q", first)
    if length > _HEADER_BYTES:
        raise Unreadable("cannot be read (no safetensors header)")
    try:
        header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError
    except ValueError:
        raise Unreadable("cannot be read (its safetensors header is damaged)") from None
    return header, 8 + length, size


def _entry(header: dict[str, Any], name: str, start: int, size: int) -> tuple[str, list[int], int]:
    """(dtype, shape, first byte in the file) of a tensor."""
    try:
        entry = header[name]
        kind, shape, (begin, end) = str(entry["dtype"]), [int(n) for n in entry["shape"]], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise Unreadable(f"has no {name!r}") from None
    itemsize = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}.get(kind, 0)
    if (
        not 0 <= begin <= end
        or start + end > size
        or int(np.prod(shape)) * itemsize != (end - begin if itemsize else 0)
    ):
        raise Unreadable(f"cannot be read (truncated, or its header is wrong about {name})")
    return kind, shape, start + begin
