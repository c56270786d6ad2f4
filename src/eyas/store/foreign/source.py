"""Other tools' states as a `Source`: read in place, row by row, and checked against the verifier.

The files rarely say whose states they are. So width and token ids must fit the verifier, and its head must understand
the last state (agreement.py), which also tells the side of the final norm. Files that are broken, of another shape or
without a trained token are left out and named; they never stop a run, and nothing stands in their place.

Cost: opening is one `stat` a file and the index; `extents` is arithmetic; reading is what reads.py costs, except for
gzip (`.ckpt.gz`), which is decompressed from its beginning for every read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from eyas.errors import EyasError
from eyas.store.foreign import deepspec, founding, specforge, speculators
from eyas.store.foreign.index import DTYPES, STATES, Index, open_index
from eyas.store.foreign.torchzip import ITEMSIZE, Stream, Unreadable
from eyas.store.layout import Manifest, quarantined
from eyas.store.reads import Extent, Files, decode, read_tensors
from eyas.verifier import Verifier, VerifierConfig

FORMATS: tuple[ModuleType, ...] = (deepspec, speculators, founding, specforge)
_SAMPLES, _POSITIONS = 16, 512  # looked at to find the norm's side


def find_format(folder: Path) -> tuple[ModuleType, list[Path]] | None:
    """The format of the files in `folder`, and the files; None where it holds none that eyas knows.

    Raises EyasError when the folder cannot be listed, a format's own index is damaged, or there are files of two
    formats: nobody knows which are meant.
    """
    found = [(kind, files) for kind in FORMATS if (files := kind.files(folder))]
    if len(found) > 1:
        held = [_held(kind, files) for kind, files in found]
        raise EyasError(f"{folder} holds {' and '.join(held)}: name a folder that holds one of them alone")
    return found[0] if found else None


def beside_a_store(folder: Path) -> str:
    """What a store's folder holds of other tools' samples, in words; "" where it holds none."""
    found = []
    for kind in FORMATS:
        with contextlib.suppress(EyasError):  # a damaged index, of what nobody will read
            if files := kind.files(folder):
                found.append(_held(kind, files))
    return " and ".join(found)


def _held(kind: ModuleType, files: list[Path]) -> str:
    return f"{kind.WHAT} ({len(files):,} files, {files[-1].name})"


class ForeignSource:
    """A folder of another tool's files as a `Source` (reader.py); ids are the file names, or sample-N.

    kind, files: from `find_format`.
    verifier: checks the data and finds `manifest.norm_side`; without one the layers are 0..3 in unit "position", and
        the side is what that tool is known to write, or "unknown".
    say: told about a long index build.
    Raises EyasError when no file is usable or when the states are not of this verifier.
    """

    def __init__(
        self,
        path: Path,
        kind: ModuleType,
        files: list[Path],
        verifier: VerifierConfig | None = None,
        *,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.path, self.kind, self.files = path, str(kind.NAME), files
        index = open_index(path, self.kind, files, lambda: kind.jobs(path, files), say)
        self.skipped: list[tuple[str, str]] = list(index.broken)
        self._index = index
        width = verifier.hidden_size if verifier is not None else _most_common(index.widths)
        why = _unusable(index, width, verifier)
        listed = quarantined(path)
        if listed:
            why |= {i: f"is in quarantine ({listed[name]})" for i, name in enumerate(index.names) if name in listed}
        self.skipped += [(index.names[i], reason) for i, reason in sorted(why.items())]
        keep = [i for i in range(len(index.names)) if i not in why]
        if not keep:
            name, reason = self.skipped[-1] if self.skipped else ("", "it has none")
            raise EyasError(f"{path}: none of {len(self.skipped)} {kind.WHAT} can be used; {name}: {reason}")
        self._at = keep  # sample -> row of the index
        self.ids = [index.names[i] for i in keep]
        self.lengths = index.lengths[keep]
        self.trained = index.trained[keep]
        self._dtypes = [DTYPES[code] for code in index.dtypes[keep].tolist()]
        self.needs = index.needs[keep]
        self._files = Files(say)
        self._paths = [os.fspath(path / name) for name in index.files]
        self.manifest = self._describe(kind, width, verifier)

    @property
    def dtypes(self) -> list[str]:
        """The types that the states are stored in, as a rule one."""
        return sorted(set(self._dtypes))

    def _describe(self, kind: ModuleType, width: int, verifier: VerifierConfig | None) -> Manifest:
        side = "after" if kind in (specforge, deepspec) else "before" if kind is speculators else "unknown"
        positions = tuple(range(STATES))
        if verifier is None:
            return Manifest("unknown", "", width, 0, 0, positions, side, layer_unit="position", extractor=self.kind)
        n = verifier.num_layers
        aux = deepspec.manifest(self.path).layers if kind is deepspec else verifier.capture_layers()
        layers = (*aux, n)
        # Where a small model's rule names a layer twice, the position has to do as its name.
        unit = "hf" if len(set(layers)) == STATES else "position"
        layers = layers if unit == "hf" else positions

        def manifest(side: str) -> Manifest:
            return Manifest(
                verifier.name, "", width, n, verifier.vocab_size, layers, side, layer_unit=unit, extractor=self.kind
            )

        self.manifest = manifest(side)
        return manifest(self._norm_side(Verifier(verifier.path), verifier.name) or side)

    def _norm_side(self, verifier: Verifier, name: str) -> str:
        """The side that the verifier's head proves, or "" where nothing is trained. Raises EyasError."""
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
            return ""
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
        start = int(self._index.starts[self._at[i]])
        rows = slice(start, start + int(self.lengths[i]))
        return self._index.ids[rows], self._index.mask[rows].view(np.bool_)

    def extents(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> list[Extent] | None:
        """Where rows [start, stop) lie, one extent a layer; None inside gzip. No file is opened."""
        row = self._at[i]
        if self._index.gzipped[row]:
            return None
        return self._extents(i, start, stop, layers)

    def _extents(self, i: int, start: int, stop: int | None, layers: Sequence[int] | None) -> list[Extent]:
        row, length, name = self._at[i], int(self.lengths[i]), self.ids[i]
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"rows {start}..{stop} of sample {name}, which has {length}")
        path, dtype = self._paths[int(self._index.file[row])], self._dtypes[i]
        width = self.manifest.hidden_size * ITEMSIZE[dtype]
        rows = stop - start
        scales = int(self._index.scales[row])
        scaled = None
        if scales >= 0:
            scaled = Extent(name, path, scales + 4 * start, 4 * rows, -1, "float32", 4, 4)
        offsets, strides = self._index.offsets[row].tolist(), self._index.strides[row].tolist()
        found = []
        for k in self.manifest.layers if layers is None else layers:
            j = self.manifest.layers.index(k)
            nbytes = (rows - 1) * strides[j] + width if rows else 0
            found.append(
                Extent(name, path, offsets[j] + start * strides[j], nbytes, k, dtype, width, strides[j], scales=scaled)
            )
        return found

    def states(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Rows [start, stop): [layers, rows, Ht] bfloat16. There is no checksum to verify. Raises EyasError."""
        extents = self._extents(i, start, stop, layers)
        if not extents[0].nbytes:
            return torch.empty((len(extents), 0, self.manifest.hidden_size), dtype=torch.bfloat16)
        if not self._index.gzipped[self._at[i]]:
            return torch.stack(read_tensors(self._files, extents))
        path = extents[0].path
        try:
            return torch.stack(_from_gzip(path, extents))
        except (OSError, Unreadable) as error:  # the file was whole when indexed, so whatever this is has to be seen
            why = getattr(error, "strerror", None) or error
            raise EyasError(f"{path}: sample {self.ids[i]} {why}: restore it") from None

    def nbytes(self, i: int) -> int:
        """Bytes of states that the whole sample has on disk."""
        return STATES * int(self.lengths[i]) * self.manifest.hidden_size * ITEMSIZE[self._dtypes[i]]


def _from_gzip(path: str, extents: list[Extent]) -> list[torch.Tensor]:
    """What `read_tensors` gives, where the high bits of an offset are the storage's key (specforge.py)."""
    wanted = {str(e.offset >> 40) for e in extents}
    storages: dict[str, torch.Tensor] = {}
    with Stream(Path(path)) as stream:
        for key, nbytes in stream.storages():
            if key in wanted:
                storages[key] = torch.frombuffer(bytearray(stream.take(nbytes)), dtype=torch.uint8)
            if len(storages) == len(wanted):
                break
    if len(storages) < len(wanted):
        raise Unreadable("cannot be read (its states are not there)")
    low = (1 << 40) - 1
    return [decode(storages[str(e.offset >> 40)], [e._replace(offset=0)], [e.offset & low])[0] for e in extents]


def _unusable(index: Index, width: int, verifier: VerifierConfig | None) -> dict[int, str]:
    """Samples of the index that are left out, and why."""
    why = {int(i): "has no trained token" for i in np.flatnonzero(index.trained == 0)}
    if verifier is not None and len(index.starts):
        largest, smallest = (f.reduceat(index.ids, index.starts) for f in (np.maximum, np.minimum))
        for i in np.flatnonzero((largest >= verifier.vocab_size) | (smallest < 0)).tolist():
            bad = smallest[i] if smallest[i] < 0 else largest[i]
            why[i] = f"token id {bad} is outside the {verifier.vocab_size:,} of {verifier.name}"
    whose = f"{verifier.name} has hidden size" if verifier is not None else "most of the others have"
    for i in np.flatnonzero(index.widths != width).tolist():
        why[i] = f"states are {index.widths[i]} wide, but {whose} {width}"
    return why


def _most_common(values: npt.NDArray[np.int64]) -> int:
    return int(np.bincount(values).argmax()) if len(values) else 0
