"""Other tools' states, read in place. So far the founding story's: a folder of `data_*.pt`.

Each file: {input_ids [T] or [1, T], loss_mask of the same shape, hidden_states: four tensors [T, H] or [1, T, H] in
bf16, fp16 or fp32}. The files do not say whose states they are, so that is found out: width and token ids must fit the
verifier, and its head must understand the last state (agreement.py), which also tells the side of the final norm.

Nothing but `torch.load(weights_only=True, mmap=True)` touches a file: no pickle runs, and no states are read to build
the index. That index (lengths, tokens, masks) is built once by a few threads and kept as `.eyas-index.safetensors`
beside the data, or under ~/.cache/eyas where the folder is read-only. A changed file makes a new one.
Cost: about 1 ms per file for the index, 5 bytes per token to keep it; `states` costs one copy.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from eyas.errors import EyasError
from eyas.files import write_whole
from eyas.store.layout import Manifest, needs_tokens
from eyas.store.reads import Extent
from eyas.verifier import Verifier, VerifierConfig, first_line

INDEX = ".eyas-index.safetensors"
INDEX_FORMAT = 1
STATES = 4  # three auxiliary states and the last one
_THREADS = 8
_SAMPLES, _POSITIONS = 16, 512  # looked at to find the norm's side
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def founding_files(folder: Path) -> list[Path]:
    """The folder's `data_*.pt` files in the order of their numbers. Raises EyasError when it cannot be listed."""
    try:
        found = list(folder.glob("data_*.pt"))
    except OSError as error:
        raise EyasError(f"{folder} cannot be listed: {error.strerror}") from None
    return sorted(found, key=lambda p: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", p.name)])


class FoundingSource:
    """A folder of `data_*.pt` files as a `Source` (reader.py); ids are the file names.

    verifier: checks the data and finds `manifest.norm_side`; without one the side is "unknown" and the layers are
        0..3 in unit "position".
    say: told about a long index build.
    Raises EyasError when no file is usable or when the states are not of this verifier.
    """

    def __init__(
        self, path: Path, verifier: VerifierConfig | None = None, *, say: Callable[[str], None] | None = None
    ) -> None:
        self.path = path
        index = _index(path, founding_files(path), say)
        self.skipped: list[tuple[str, str]] = list(index.broken)
        self._text = index
        width = verifier.hidden_size if verifier is not None else _most_common(index.widths)
        keep = []
        for i, name in enumerate(index.names):
            reason = _unusable(index, i, width, verifier)
            if reason:
                self.skipped.append((name, reason))
            else:
                keep.append(i)
        if not keep:
            name, reason = self.skipped[-1] if self.skipped else ("", "it has none")
            raise EyasError(f"{path}: none of {len(self.skipped)} data_*.pt files can be used; {name}: {reason}")
        self._at = keep  # sample -> row of the index
        self.ids = [index.names[i] for i in keep]
        self.lengths = index.lengths[keep]
        self.trained = index.trained[keep]
        self._itemsizes = index.itemsizes[keep]
        self.needs = np.array([needs_tokens(self.tokens(i)[1]) for i in range(len(keep))], dtype=np.int64)
        self.manifest = self._describe(width, verifier)

    def _describe(self, width: int, verifier: VerifierConfig | None) -> Manifest:
        if verifier is None:
            layers = tuple(range(STATES))
            return Manifest("unknown", "", width, 0, 0, layers, "unknown", layer_unit="position", extractor="founding")
        n = verifier.num_layers
        layers = (*verifier.capture_layers(), n)
        # Where a small model's rule names a layer twice, the position has to do as its name.
        unit = "hf" if len(set(layers)) == STATES else "position"
        layers = layers if unit == "hf" else tuple(range(STATES))
        self.manifest = Manifest(verifier.name, "", width, n, verifier.vocab_size, layers, "unknown", layer_unit=unit)
        side = self._norm_side(Verifier(verifier.path), verifier.name)
        return Manifest(
            verifier.name, "", width, n, verifier.vocab_size, layers, side, layer_unit=unit, extractor="founding"
        )

    def _norm_side(self, verifier: Verifier, name: str) -> str:
        from eyas.store.agreement import norm_side

        rows: list[torch.Tensor] = []
        targets: list[npt.NDArray[np.int32]] = []
        spread = np.linspace(0, len(self.ids) - 1, min(_SAMPLES, len(self.ids))).astype(int)
        for i in dict.fromkeys(int(s) for s in spread):
            ids, mask = self.tokens(i)
            at = np.flatnonzero(mask[1:])[: _POSITIONS // len(spread) + 1]  # positions whose next token is trained
            if len(at):
                last = self.states(i, int(at[0]), int(at[-1]) + 1, layers=self.manifest.layers[-1:])[0]
                rows.append(last[torch.from_numpy(at - at[0])])
                targets.append(ids[at + 1])
        if not rows:
            return "unknown"
        wanted = torch.from_numpy(np.concatenate(targets)).long()
        side, share = norm_side(torch.cat(rows), wanted, verifier.lm_head(dtype=torch.bfloat16), verifier.final_norm())
        if side is None:
            raise EyasError(
                f"{self.path} does not hold states of {name}: its head names the next trained token at only"
                f" {share:.1%} of {len(wanted)} positions (before or after the norm): name the verifier they are from"
            )
        return side

    def tokens(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """input_ids [T] and loss mask [T], from the index."""
        start = int(self._text.starts[self._at[i]])
        rows = slice(start, start + int(self.lengths[i]))
        return self._text.ids[rows], self._text.mask[rows].view(np.bool_)

    def states(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Rows [start, stop): [layers, rows, Ht] bfloat16. There is no checksum to verify. Raises EyasError."""
        length = int(self.lengths[i])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"rows {start}..{stop} of sample {self.ids[i]}, which has {length}")
        chosen = [self.manifest.layers.index(k) for k in (self.manifest.layers if layers is None else layers)]
        out = torch.empty((len(chosen), stop - start, self.manifest.hidden_size), dtype=torch.bfloat16)
        try:
            states = _load(self.path / self.ids[i])["hidden_states"]
            for j, k in enumerate(chosen):
                out[j] = states[k].reshape(length, -1)[start:stop]
        except Exception as error:  # the file was whole when indexed, so whatever this is has to be seen
            raise EyasError(f"{self.path / self.ids[i]} cannot be read any more: {first_line(error)}") from None
        return out

    def extents(
        self,
        i: int,  # noqa: ARG002
        start: int = 0,  # noqa: ARG002
        stop: int | None = None,  # noqa: ARG002
        layers: Sequence[int] | None = None,  # noqa: ARG002
    ) -> list[Extent] | None:
        return None

    def nbytes(self, i: int) -> int:
        return STATES * int(self.lengths[i]) * self.manifest.hidden_size * int(self._itemsizes[i])


@dataclass
class _Index:
    """What the files hold. names: the usable ones; broken: (name, reason)."""

    names: list[str]
    broken: list[tuple[str, str]]
    lengths: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    itemsizes: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]  # of all samples, one after the other
    mask: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64] = None  # type: ignore[assignment]
    trained: npt.NDArray[np.int64] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.starts = np.cumsum(self.lengths) - self.lengths
        sums = np.concatenate([[0], np.cumsum(self.mask, dtype=np.int64)])
        self.trained = sums[self.starts + self.lengths] - sums[self.starts]


def _unusable(index: _Index, i: int, width: int, verifier: VerifierConfig | None) -> str:
    if index.widths[i] != width:
        whose = f"{verifier.name} has hidden size" if verifier is not None else "most of the others have"
        return f"states are {index.widths[i]} wide, but {whose} {width}"
    start = int(index.starts[i])
    ids = index.ids[start : start + int(index.lengths[i])]
    if verifier is not None and (int(ids.max()) >= verifier.vocab_size or int(ids.min()) < 0):
        return f"token id {ids.max()} is outside the {verifier.vocab_size:,} of {verifier.name}"
    return "" if index.trained[i] else "has no trained token"


def _most_common(values: npt.NDArray[np.int64]) -> int:
    return int(np.bincount(values).argmax()) if len(values) else 0


def _index(folder: Path, files: list[Path], say: Callable[[str], None] | None) -> _Index:
    """The kept index where it fits the files, or a new one, kept if anything can be written."""
    stats = [p.stat() for p in files]
    key = json.dumps([INDEX_FORMAT, *([p.name, s.st_size, s.st_mtime_ns] for p, s in zip(files, stats, strict=True))])
    place = xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"
    for kept in (folder / INDEX, cache / f"index-{place}.safetensors"):
        index = _kept_index(kept, key)
        if index is not None:
            return index
    index = _build_index(files, say)
    for kept in (folder / INDEX, cache / f"index-{place}.safetensors"):
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, _index_bytes(index, key))
            break
        except OSError:
            continue  # a cache that cannot be kept costs time, no more
    return index


def _arrays(index: _Index) -> dict[str, npt.NDArray[Any]]:
    names = ("lengths", "widths", "itemsizes", "ids", "mask")
    return {name: getattr(index, name) for name in names}


def _index_bytes(index: _Index, key: str) -> bytes:
    from safetensors.numpy import save

    arrays = _arrays(index)
    said = {"key": key, "names": json.dumps(index.names), "broken": json.dumps(index.broken)}
    return bytes(save(arrays, metadata={**said, "check": _check(arrays, said)}))


def _check(arrays: dict[str, npt.NDArray[Any]], said: dict[str, str]) -> str:
    digest = xxhash.xxh3_64(json.dumps(said, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _kept_index(path: Path, key: str) -> _Index | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            said = dict(file.metadata() or {})
            if said.get("key") != key:
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if said.pop("check") != _check(arrays, said):
            return None
        return _Index(json.loads(said["names"]), [(n, r) for n, r in json.loads(said["broken"])], **arrays)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None


def _build_index(files: list[Path], say: Callable[[str], None] | None) -> _Index:
    names, broken, said = [], [], time.monotonic()
    sizes, ids, masks = list[tuple[int, int, int]](), list[npt.NDArray[np.int32]](), list[npt.NDArray[np.uint8]]()
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, (file, found) in enumerate(zip(files, pool.map(_look, files), strict=True), start=1):
            if isinstance(found, str):
                broken.append((file.name, found))
            else:
                names.append(file.name)
                sizes.append(found[0])
                ids.append(found[1])
                masks.append(found[2])
            if say is not None and time.monotonic() - said > 2:
                said = time.monotonic()
                say(f"index {number:,}/{len(files):,} files · {len(broken):,} left out")
    table = np.array(sizes, dtype=np.int64).reshape(-1, 3)
    return _Index(
        names,
        broken,
        lengths=table[:, 0].copy(),
        widths=table[:, 1].copy(),
        itemsizes=table[:, 2].copy(),
        ids=np.concatenate([np.empty(0, np.int32), *ids]),
        mask=np.concatenate([np.empty(0, np.uint8), *masks]),
    )


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return loaded


def _look(path: Path) -> tuple[tuple[int, int, int], npt.NDArray[np.int32], npt.NDArray[np.uint8]] | str:
    """((tokens, width, bytes per value), ids [T], mask [T]) of one file, or why it cannot be used."""
    if path.stat().st_size == 0:
        return "is empty"
    try:
        data = _load(path)
    except Exception as error:  # torch raises whatever the damaged bytes lead it to
        return f"cannot be read ({first_line(error)})"
    try:
        ids, mask, states = data["input_ids"], data["loss_mask"], data["hidden_states"]
    except (KeyError, TypeError) as error:
        return f"has no {error}" if isinstance(error, KeyError) else "is not a dictionary"
    if not all(isinstance(t, torch.Tensor) for t in (ids, mask)) or not isinstance(states, (list, tuple)):
        return "input_ids and loss_mask must be tensors, hidden_states a list"
    tokens = ids.numel()
    if tokens == 0:
        return "has no tokens"
    if mask.numel() != tokens:
        return f"loss_mask has {mask.numel()} values for {tokens} tokens"
    if len(states) != STATES or not all(isinstance(s, torch.Tensor) and s.dtype in _DTYPES for s in states):
        return f"hidden_states must be {STATES} tensors of bf16, fp16 or fp32"
    if any(s.numel() == 0 or s.dim() not in (2, 3) or s.numel() != tokens * s.shape[-1] for s in states):
        return f"hidden_states have shapes {[list(s.shape) for s in states]} for {tokens} tokens"
    if len({s.shape[-1] for s in states}) != 1:
        return f"hidden_states have different widths {[s.shape[-1] for s in states]}"
    width = states[0].shape[-1]
    flat: npt.NDArray[np.int32] = ids.reshape(-1).to(torch.int32).numpy().copy()
    trained: npt.NDArray[np.uint8] = (mask.reshape(-1) != 0).to(torch.uint8).numpy().copy()
    return (tokens, width, states[0].element_size()), flat, trained
