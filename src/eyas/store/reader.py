"""What is there: a source of samples, known without opening a data file, and where the rows of each lie.

A store may be read while its writer goes on: what its journal says is there, is there. A checksum is of a whole part.
Where at least VERIFY_SHARE of a part is wanted from its beginning (a sample that `--max-seq-len` cuts), all of it is
read and verified; the beginning of a longer one is read alone and not verified. A mismatch is read once more from the
disk, and then stops the run with the sample's name. No mmap: a truncated file is an error with a name, not a SIGBUS,
and network file systems read ahead.

That costs a third more bytes of a cut sample at most. Of lengths as chats have them (lognormal, median 1,500, sigma
0.8) cut at their 75th or 90th percentile it costs 2.5 or 1.6 %, and 76 or 89 % of the bytes wanted are verified, where
59 or 77 % are of samples that fit; from a half on it would cost 11 or 6 %, of every sample 31 or 13 %.

Training reads through `extents` (readpath.py); `states` is for a look at a few samples. Every method may be called by
many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from eyas.errors import EyasError
from eyas.store import codecs, layout
from eyas.store.index import Index, load_index
from eyas.store.layout import Manifest, Record
from eyas.store.reads import Extent, Files, read_bytes, read_tensors
from eyas.store.remote import fetch_again, staged
from eyas.verifier import VerifierConfig

VERIFY_SHARE = 0.75  # of a part: from so much on all of it is read


class Source(Protocol):
    """Samples of states, wherever they lie. Everything but `states` and `tokens` is known without opening a file.

    needs: [N] how many of its first tokens a sample needs to train anything (`layout.needs_tokens`).
    skipped: (name, reason) of the samples that are left out because they are broken or train nothing.
    """

    manifest: Manifest
    ids: list[str]
    lengths: npt.NDArray[np.int64]  # [N] tokens
    trained: npt.NDArray[np.int64]  # [N] trained tokens
    needs: npt.NDArray[np.int64]
    skipped: list[tuple[str, str]]

    def tokens(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """input_ids [T] and loss mask [T] of sample i."""

    def states(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Rows [start, stop) of sample i: [layers, rows, Ht] bfloat16; layers: ids out of `manifest.state_layers`."""

    def extents(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> list[Extent] | None:
        """Where the rows that `states` would give lie, one extent per layer; None where only `states` can read them."""

    def nbytes(self, i: int) -> int:
        """Bytes of states that the whole sample has on disk."""


def open_source(
    path: Path | str,
    verifier: VerifierConfig | None = None,
    fingerprint: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Source:
    """The store or the folder of `data_*.pt` files at `path`, which may be in an object store (remote.py).

    say: also told of what lies beside a store and is not read.
    Raises EyasError when nothing usable lies there, or two kinds of data, or when it is not of this verifier.
    """
    folder = staged(path, say)
    if not folder.is_dir():
        raise EyasError(
            f"{folder} is not a folder: name a store (eyas capture writes one) or a folder of data_*.pt files"
        )
    from eyas.store.foreign.source import ForeignSource, beside_a_store, find_format

    has_journals = bool(layout.journals(folder))
    foreign = None if has_journals else find_format(folder)
    if foreign is not None:
        return ForeignSource(folder, *foreign, verifier, say=say)
    if has_journals or (folder / layout.MANIFEST).exists():
        if say is not None and (others := beside_a_store(folder)):
            say(f"{folder} is read as the store that it is; {others} beside it are not read")
        return StoreSource(folder, verifier, fingerprint, say)
    if (folder / "prepared.parquet").exists():
        raise EyasError(
            f"{folder} holds prepared samples, without states: name the store that eyas capture makes of them"
        )
    raise EyasError(
        f"{folder} holds neither a store ({layout.MANIFEST}) nor data_*.pt files nor another tool's that eyas reads:"
        " name another folder"
    )


def rows_read(source: Source, most: int) -> npt.NDArray[np.int64]:
    """[N] rows that come off the disk where the first `most` of each sample are wanted."""
    cut = np.minimum(source.lengths, most)
    if not isinstance(source, StoreSource):
        return cut
    return np.where(_read_whole(cut, source.lengths), source.lengths, cut)


def _read_whole(wanted: Any, there: Any) -> Any:
    """Whether all of a part is read, and so verified, where its first `wanted` rows (or bytes) are."""
    return wanted >= VERIFY_SHARE * there


def unverified(source: Source, samples: Sequence[int], most: int) -> int:
    """Of how many of these samples of a store the first `most` rows are read without a checksum that covers them.

    Where the last layer has the trained rows alone, `extents` goes by these for that layer, which nobody counts here.
    """
    return int((rows_read(source, most) < source.lengths)[samples].sum()) if isinstance(source, StoreSource) else 0


def check_verifier(path: Path, manifest: Manifest, verifier: VerifierConfig | None, fingerprint: str | None) -> None:
    """Raises EyasError unless states of `manifest` can be those of this verifier."""
    reasons = []
    if verifier is not None:
        if manifest.hidden_size != verifier.hidden_size:
            reasons.append(f"hidden size {manifest.hidden_size}, not {verifier.hidden_size}")
        if manifest.vocab_size != verifier.vocab_size:
            reasons.append(f"vocabulary of {manifest.vocab_size:,}, not {verifier.vocab_size:,}")
        if manifest.num_layers != verifier.num_layers:
            reasons.append(f"{manifest.num_layers} layers, not {verifier.num_layers}")
    if fingerprint and manifest.fingerprint and manifest.fingerprint != fingerprint:
        reasons.append(f"fingerprint {manifest.fingerprint}, not {fingerprint}")
    if reasons:
        wanted = verifier.name if verifier is not None else "this verifier"
        raise EyasError(
            f"store {path} was captured from {manifest.verifier}, not from {wanted} ({'; '.join(reasons)}):"
            " name the verifier it was captured from, or capture again"
        )


class StoreSource:
    """A store as a `Source`. Raises EyasError when it is unreadable, empty or of another verifier."""

    def __init__(
        self,
        path: Path,
        verifier: VerifierConfig | None = None,
        fingerprint: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self.manifest = _manifest(path, say)
        check_verifier(path, self.manifest, verifier, fingerprint)
        self._files = Files(say)
        channels = codecs.channels_of(self.manifest)
        self._channels = None if channels is None else list(channels)  # the same tensors every time
        self._stored = layout.STORED_AS[self.manifest.codec]
        self._all_planes = layout.planes(self.manifest)
        self._planes = {  # layer -> which of them are its
            k: [p for p, plane in enumerate(self._all_planes) if plane.layer == k] for k in self.manifest.layers
        }
        index = _index(path, layout.parts_count(self.manifest), self._stored, say)
        self.skipped = list(index.broken)
        faults = _faults(path, index)
        self.skipped += [(index.ids[i], why) for i, why in sorted(faults.items())]
        if faults:
            index = index.select(np.setdiff1d(np.arange(len(index.ids)), list(faults)))
        self._index = index
        self._shard_paths = [str(path / name) for name in index.shards]
        self._text_paths = [str(layout.tokens_path(path, writer)) for writer in index.writers]
        self.ids, self.lengths, self.trained, self.needs = index.ids, index.tokens, index.trained, index.needs
        if not self.ids:
            why = f": {self.skipped[0][0]} {self.skipped[0][1]}" if self.skipped else ""
            do = "restore its files, or delete it and capture again" if self.skipped else "capture first"
            raise EyasError(f"store {path} holds no usable sample ({len(self.skipped)} left out{why}): {do}")
        for i in np.flatnonzero(self.needs == layout.UNKNOWN).tolist():
            self.needs[i] = layout.needs_tokens(self.tokens(i)[1])

    @property
    def records(self) -> list[Record]:
        """Every sample as its journal has it."""
        return [self._index.record(i)._replace(dtype=self._stored) for i in range(len(self.ids))]

    def tokens(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        index, T = self._index, int(self.lengths[i])
        raw = read_bytes(
            self._files,
            Extent(
                sample=self.ids[i],
                path=self._text_paths[index.writer[i]],
                offset=int(index.text_offset[i]),
                nbytes=T * layout.BYTES_PER_TOKEN,
                layer=-1,
                dtype="uint8",
                row_bytes=layout.BYTES_PER_TOKEN,
                stride=layout.BYTES_PER_TOKEN,
                xxh3=f"{int(index.text_xxh3[i]):016x}",
            ),
        )
        return raw[: T * 4].copy().view(np.int32), raw[T * 4 :].view(np.bool_)  # the copy is aligned

    def extents(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> list[Extent]:
        index, T = self._index, int(self.lengths[i])
        stop = T if stop is None else stop
        if not 0 <= start <= stop <= T:
            raise IndexError(f"rows {start}..{stop} of sample {self.ids[i]}, which has {T}")
        path, name = self._shard_paths[index.shard[i]], self.ids[i]
        offsets, nbytes, digests = index.offset[i].tolist(), index.nbytes[i].tolist(), index.xxh3[i].tolist()
        found = []
        for layer in self.manifest.layers if layers is None else layers:
            first, rows = start, stop - start
            if self.last_rows != "all" and layer == self.manifest.layers[-1]:
                mask = self.tokens(i)[1]
                first, rows = int(mask[:start].sum()), int(mask[start:stop].sum())
            parts = []
            for p in self._planes[layer]:
                plane = self._all_planes[p]
                size, wanted = plane.row_bytes, rows * plane.row_bytes
                verified = not first and _read_whole(wanted, nbytes[p])
                xxh3, behind = (f"{digests[p]:016x}", nbytes[p] - wanted) if verified else (None, 0)
                at = offsets[p] + first * size
                parts.append(Extent(name, path, at, wanted, layer, plane.dtype, size, size, xxh3, behind=behind))
            if len(parts) == 2:  # scales, or log p
                j = self.manifest.layers.index(layer)
                by = None if self._channels is None or parts[0].dtype != "int8" else self._channels[j]
                parts[0] = parts[0]._replace(scales=parts[1], channels=by)
            found.append(parts[0])
        return found

    @property
    def last_rows(self) -> str:
        return self.manifest.last_rows

    def states(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """As of every source; rows that the store does not keep are NaN. Kept logits are no states (`logits`)."""
        stop = int(self.lengths[i]) if stop is None else stop
        layers = self.manifest.state_layers if layers is None else layers
        read = read_tensors(self._files, self.extents(i, start, stop, layers))
        for k, rows in enumerate(read):
            if len(rows) < stop - start:
                at = torch.from_numpy(np.flatnonzero(self.tokens(i)[1][start:stop]))
                read[k] = torch.full((stop - start, rows.shape[1]), torch.nan, dtype=rows.dtype)
                read[k][at] = rows
        return torch.stack(read)

    def logits(self, i: int) -> torch.Tensor:
        """Kept logits of sample i's trained tokens, as the words of logits.py, [trained, 3 k]."""
        return read_tensors(self._files, self.extents(i, layers=self.manifest.layers[-1:]))[0]

    def nbytes(self, i: int) -> int:
        return int(self._index.nbytes[i].sum())


def _manifest(path: Path, say: Callable[[str], None] | None) -> Manifest:
    """The manifest; a damaged one that was staged is fetched once more."""
    try:
        return Manifest.load(path)
    except EyasError:
        if not fetch_again(path / layout.MANIFEST, say):
            raise
        return Manifest.load(path)


def _index(path: Path, parts: int, dtype: str, say: Callable[[str], None] | None) -> Index:
    """The index; staged journals with damaged lines are fetched once more."""
    index = load_index(path, parts, dtype)
    damaged = {where.partition(" line ")[0] for where, why in index.broken if why == layout.WRONG_LINE}
    fetched = [fetch_again(path / name, say) for name in sorted(damaged)]
    if any(fetched):
        index = load_index(path, parts, dtype)
    return index


def torn_files(path: Path, index: Index) -> dict[int, str]:
    """Samples of the index whose shard or tokens file is not there, or too short for them, and which it is."""
    shard = np.array([_size(str(path / name)) for name in index.shards], dtype=np.int64)
    text = np.array([_size(str(layout.tokens_path(path, w))) for w in index.writers], dtype=np.int64)
    have = shard[index.shard] if len(shard) else index.shard
    wrong: dict[int, str] = {}
    short = have < (index.offset + index.nbytes).max(axis=1, initial=0)
    for i in np.flatnonzero(short).tolist():
        name = index.shards[index.shard[i]]
        wrong[i] = f"{name} is missing" if have[i] < 0 else f"{name} is truncated at byte {have[i]}"
    if len(text):
        short = text[index.writer] < index.text_offset + index.tokens * layout.BYTES_PER_TOKEN
        for i in np.flatnonzero(short).tolist():
            wrong.setdefault(i, "its tokens file is truncated")
    return wrong


def _faults(path: Path, index: Index) -> dict[int, str]:
    """Samples that are left out, and why."""
    wrong = {int(i): "has no trained token" for i in np.flatnonzero(index.trained == 0)}
    wrong = torn_files(path, index) | wrong
    listed = layout.quarantined(path)
    if listed:
        wrong |= {i: f"is in quarantine ({listed[name]})" for i, name in enumerate(index.ids) if name in listed}
    seen: set[str] = set()
    for i in np.flatnonzero(index.again).tolist():
        if index.ids[i] in seen:
            wrong[i] = "is in the store twice"
        elif i not in wrong:
            seen.add(index.ids[i])
    return wrong


def _size(path: str) -> int:
    """Bytes of a file, -1 where it is not there. A writer may close a shard between two looks."""
    for candidate in (path, path + layout.OPEN_SUFFIX, path):
        try:
            return Path(candidate).stat().st_size
        except OSError:
            continue
    return -1
