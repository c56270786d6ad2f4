"""Read states: the index from the journals, the rows of a sample by one preadv straight into the tensor.

Nothing opens a shard to learn what is there, so a source is ready in the time that its journals take to parse. A store
may be read while its writer goes on: what its journal says is there, is there. Parts that are read whole are verified;
a mismatch is read once more from the disk, and then stops the run with the sample's name. No mmap: a truncated file is
an error with a name, not a SIGBUS, and network file systems read ahead.

Cost: one allocation and one system call per sample, and xxh3 (0.03 s/GB). Every method may be called by many threads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from eyas.errors import EyasError
from eyas.store import layout
from eyas.store.layout import Manifest, Record
from eyas.verifier import VerifierConfig

_OPEN_SHARDS = 256  # file descriptors kept; the usual limit of a process is 1,024
_SINK = bytearray(layout.PAGE)  # where the padding between two parts is read to; its content means nothing


class Source(Protocol):
    """Samples of states, wherever they lie. Everything but `states` and `tokens` is known without opening a file.

    skipped: (name, reason) of the samples that are left out because they are broken or train nothing.
    """

    manifest: Manifest
    ids: list[str]
    lengths: npt.NDArray[np.int64]  # [N] tokens
    trained: npt.NDArray[np.int64]  # [N] trained tokens
    skipped: list[tuple[str, str]]

    def tokens(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """input_ids [T] and loss mask [T] of sample i."""

    def states(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Rows [start, stop) of sample i: [layers, rows, Ht] bfloat16; layers are ids out of `manifest.layers`."""

    def nbytes(self, i: int) -> int:
        """Bytes of states that the whole sample has on disk."""


def open_source(
    path: Path | str,
    verifier: VerifierConfig | None = None,
    fingerprint: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Source:
    """The store or the folder of `data_*.pt` files at `path`.

    Raises EyasError when nothing usable lies there, or when it is not of this verifier.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise EyasError(
            f"{folder} is not a folder: name a store (eyas capture writes one) or a folder of data_*.pt files"
        )
    if (folder / layout.MANIFEST).exists() or layout.journals(folder):
        return StoreSource(folder, verifier, fingerprint)
    from eyas.store.foreign import FoundingSource, founding_files

    if founding_files(folder):
        return FoundingSource(folder, verifier, say=say)
    raise EyasError(f"{folder} holds neither a store ({layout.MANIFEST}) nor data_*.pt files: name another folder")


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

    def __init__(self, path: Path, verifier: VerifierConfig | None = None, fingerprint: str | None = None) -> None:
        self.path = path
        self.manifest = Manifest.load(path)
        check_verifier(path, self.manifest, verifier, fingerprint)
        self.skipped: list[tuple[str, str]] = []
        self._records: list[Record] = []
        self._writers: list[str] = []
        self._load_index()
        self.ids = [r.id for r in self._records]
        self.lengths = np.array([r.tokens for r in self._records], dtype=np.int64)
        self.trained = np.array([r.trained for r in self._records], dtype=np.int64)
        if not self.ids:
            why = f": {self.skipped[0][0]} {self.skipped[0][1]}" if self.skipped else ""
            raise EyasError(f"store {path} holds no usable sample ({len(self.skipped)} left out{why}): capture first")
        self._file = functools.lru_cache(_OPEN_SHARDS)(self._open)

    def _load_index(self) -> None:
        seen: set[str] = set()
        for journal in layout.journals(self.path):
            writer = layout.writer_of(journal)
            records, broken, _ = layout.read_journal(journal)
            self.skipped += broken
            sizes: dict[str, int] = {}
            text_size = _size(layout.tokens_path(self.path, writer))
            for record in records:
                if record.shard not in sizes:
                    sizes[record.shard] = self._shard_size(record.shard)
                reason = self._fault(record, sizes[record.shard], text_size, seen)
                if reason:
                    self.skipped.append((record.id, reason))
                    continue
                seen.add(record.id)
                self._records.append(record)
                self._writers.append(writer)

    def _fault(self, record: Record, shard_size: int, text_size: int, seen: set[str]) -> str:
        """Why a sample is left out, or ""."""
        if record.id in seen:
            return "is in the store twice"
        if record.trained == 0:
            return "has no trained token"
        if record.dtype != "bfloat16" or len(record.parts) != len(self.manifest.layers):
            return f"has {len(record.parts)} parts of {record.dtype}, which the manifest does not announce"
        if shard_size < 0:
            return f"{record.shard} is missing"
        last = record.parts[-1]
        if shard_size < last.offset + last.nbytes:
            return f"{record.shard} is truncated at byte {shard_size}"
        if text_size < record.text_end:
            return "its tokens file is truncated"
        return ""

    def _shard_size(self, name: str) -> int:
        # The writer may close the shard between two looks.
        for candidate in (name, name + layout.OPEN_SUFFIX, name):
            size = _size(self.path / candidate)
            if size >= 0:
                return size
        return -1

    def _open(self, name: str) -> _File:
        for candidate in (name, name + layout.OPEN_SUFFIX, name):
            try:
                return _File(self.path / candidate)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise EyasError(f"{self.path / candidate} cannot be read: {error.strerror}") from None
        raise EyasError(f"{self.path / name} is missing: restore it, or capture into another folder")

    def tokens(self, i: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        record = self._records[i]
        name = layout.tokens_path(self.path, self._writers[i]).name
        raw = np.empty(record.tokens * layout.BYTES_PER_TOKEN, dtype=np.uint8)
        self._read(record, name, record.text_offset, [raw], [(raw, record.text_xxh3, record.text_offset)])
        ids, mask = raw[: record.tokens * 4], raw[record.tokens * 4 :]
        return ids.view(np.int32), mask.view(np.bool_)

    def states(
        self, i: int, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        record = self._records[i]
        stop = record.tokens if stop is None else stop
        if not 0 <= start <= stop <= record.tokens:
            raise IndexError(f"rows {start}..{stop} of sample {record.id}, which has {record.tokens}")
        chosen = [self.manifest.layers.index(k) for k in (self.manifest.layers if layers is None else layers)]
        out = torch.empty((len(chosen), stop - start, self.manifest.hidden_size), dtype=torch.bfloat16)
        if start == stop:
            return out
        rows: npt.NDArray[np.uint8] = out.view(torch.uint8).numpy().reshape(len(chosen), -1)
        row_bytes = self.manifest.hidden_size * 2
        whole = stop - start == record.tokens
        buffers: list[Any] = []
        checks: list[tuple[npt.NDArray[np.uint8], str, int]] = []
        first = end = -1
        for j, part in enumerate(record.parts[k] for k in chosen):
            offset = part.offset + start * row_bytes
            if buffers and not 0 <= offset - end < layout.PAGE:  # not a neighbour: another call
                self._read(record, record.shard, first, buffers, checks)
                buffers, checks = [], []
            if not buffers:
                first = offset
            elif offset > end:
                buffers.append(memoryview(_SINK)[: offset - end])
            buffers.append(rows[j])
            end = offset + rows[j].nbytes
            if whole:
                checks.append((rows[j], part.xxh3, part.offset))
        self._read(record, record.shard, first, buffers, checks)
        return out

    def _read(
        self,
        record: Record,
        name: str,
        offset: int,
        buffers: list[Any],
        checks: list[tuple[npt.NDArray[np.uint8], str, int]],
    ) -> None:
        """Fill `buffers` from `offset` on and verify (bytes, xxh3, offset); a mismatch is read once more."""
        file = self._file(name)
        for attempt in (1, 2):
            try:
                complete = read_into(file.fd, offset, buffers)
            except OSError as error:
                raise EyasError(
                    f"{self.path / name}: sample {record.id} at byte {offset} cannot be read: {error.strerror}"
                ) from None
            if not complete:
                raise EyasError(f"{self.path / name} ends before sample {record.id} (byte {offset}) does: restore it")
            wrong = [at for data, xxh3, at in checks if xxhash.xxh3_64_hexdigest(data.data) != xxh3]
            if not wrong:
                return
            if attempt == 1:  # the page cache may hold the bad copy: ask the disk
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        raise EyasError(
            f"{self.path / name}: sample {record.id} at byte {wrong[0]} does not match its checksum (read twice):"
            " restore the file, or capture again"
        )

    def nbytes(self, i: int) -> int:
        return sum(part.nbytes for part in self._records[i].parts)


class _File:
    """A file descriptor that closes when the last thread that reads from it lets go."""

    def __init__(self, path: Path) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def read_into(fd: int, offset: int, buffers: Sequence[Any]) -> bool:
    """Fill every buffer from `offset` on, in as few calls as the kernel allows; False where the file ends before."""
    views = [memoryview(b).cast("B") for b in buffers]
    while views:
        got = os.preadv(fd, views, offset)
        if got == 0:
            return False
        offset += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if views and got:
            views[0] = views[0][got:]
    return True
