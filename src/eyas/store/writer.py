"""Append samples to a store so that a kill at any moment loses nothing that was recorded.

Order for every group of samples: states and tokens -> fdatasync -> journal lines -> fdatasync. Groups are cut at 64 MiB
or 2 s, because a sync costs milliseconds whatever it syncs: a kill loses at most the last group, and resume writes
it again at the same place. A shard is closed when its size or its reserved header would overflow:
header -> fsync -> rename -> fsync of the folder.

Cost: states go from the caller's memory to the kernel in one pwritev per sample, without a copy; xxh3 adds 0.03 s/GB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from eyas.errors import EyasError
from eyas.files import sync_folder
from eyas.store import codecs, layout, logits
from eyas.store.layout import Manifest, Part, Record
from eyas.store.remote import check_local

_BUFFERS_PER_CALL = 512  # the kernel takes 1,024
_ZEROS = bytes(layout.PAGE)


class Stored(NamedTuple):
    """A sample's states as `StoreWriter.encode` makes them: each layer's rows and width, the bytes of each part."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    parts: list[np.ndarray]


class StoreWriter:
    """Writes one writer's shards, journal and tokens file; goes on where an earlier run was stopped.

    writer: names this writer's files; letters, digits and _ only. Two processes need two names.
    shard_bytes, header_bytes: limits of a shard and room kept for its header.
    commit_bytes, commit_seconds: how much may be waiting for its journal line.
    Raises EyasError when the folder cannot be written, holds a store of something else, or has a writer of this name.

    As a context manager: a clean exit closes the store; an exception records what is written and leaves the shard
    open for a resume; if nothing was ever recorded, what was created is removed again.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        writer: str = "0",
        shard_bytes: int = 1 << 30,
        header_bytes: int = 1 << 20,
        commit_bytes: int = 64 << 20,
        commit_seconds: float = 2.0,
    ) -> None:
        check_local(path)
        if not re.fullmatch(r"\w+", writer, re.ASCII):
            raise ValueError(f"writer {writer!r}: letters, digits and _ only")
        if len(set(manifest.layers)) != len(manifest.layers):
            raise ValueError(f"layers {manifest.layers} name one layer twice")
        if layout.samples_in_header(header_bytes, layout.parts_count(manifest)) < 1:
            raise ValueError(f"a header of {header_bytes} bytes holds no sample of {len(manifest.layers)} layers")
        self.path, self.manifest, self.writer = Path(path), manifest, writer
        self._channels, self._dtype = codecs.channels_of(manifest), layout.STORED_AS[manifest.codec]
        self.shard_bytes, self.header_bytes = shard_bytes, layout.round_up(header_bytes)
        self.commit_bytes, self.commit_seconds = commit_bytes, commit_seconds
        self.done_ids: set[str] = set()  # what the journals say, of every writer of this store
        self._pending_ids: set[str] = set()
        self._fds = contextlib.ExitStack()
        self._pending: list[Record] = []  # written, not yet in the journal
        self._pending_bytes = 0
        self._journal_end = 0
        self._committed_at = time.monotonic()
        self._broken = False  # a sync failed: the kernel may have dropped pages, so nothing more is recorded
        self._shard: int | None = None  # file descriptor of the open shard
        self._shard_name, self._shard_records = "", list[Record]()
        self._shard_number, self._end, self._data_start = -1, 0, 0
        with self._disk():
            self._fresh_folder = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_manifest()
            try:
                self._journal = self._open(layout.journal_path(self.path, writer))
                self._lock()
                self._text = self._open(layout.tokens_path(self.path, writer))
                sync_folder(self.path)
                self._resume()
            except BaseException:
                self._fds.close()
                raise

    # Opening and resuming

    def _check_manifest(self) -> None:
        if not (self.path / layout.MANIFEST).exists():
            # Another writer may have begun between the two looks; its journal comes after its manifest.
            if layout.journals(self.path) and not (self.path / layout.MANIFEST).exists():
                raise EyasError(
                    f"{self.path} has journals but no {layout.MANIFEST}: restore it, or name another folder"
                )
            self.manifest.create(self.path)
        differences = Manifest.load(self.path).differences(self.manifest)
        if differences:
            raise EyasError(
                f"{self.path} holds states of another run ({'; '.join(differences)}): name another folder"
                " or delete that one"
            )

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._fds.callback(os.close, fd)
        return fd

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError(f"{self.path} is being written by another process: wait for it, or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):  # a file system without locks
                raise

    def _resume(self) -> None:
        """Cut journal, tokens and open shard back to what the journal says, and take over the open shard."""
        for journal in layout.journals(self.path):
            if layout.writer_of(journal) != self.writer:
                self.done_ids.update(r.id for r in layout.read_journal(journal).records)
        records, _, self._journal_end = layout.read_journal(layout.journal_path(self.path, self.writer))
        self.done_ids.update(r.id for r in records)
        self._next = max((r.n for r in records), default=-1) + 1
        self._text_end = max((r.text_end for r in records), default=0)
        if os.fstat(self._text).st_size < self._text_end:
            raise EyasError(
                f"{layout.tokens_path(self.path, self.writer)} is shorter than its journal says: restore it, or delete"
                " the store and capture again"
            )
        os.ftruncate(self._journal, self._journal_end)
        os.ftruncate(self._text, self._text_end)
        if not records:
            return
        self._shard_number = max(layout.shard_number(r.shard) for r in records)
        name = layout.shard_name(self.writer, self._shard_number)
        if (self.path / name).exists():
            return  # it was closed; the next sample begins another
        part = self.path / (name + layout.OPEN_SUFFIX)
        if not part.exists():
            raise EyasError(
                f"{self.path}: {name} is missing, though its journal names it: restore it, or delete the store and"
                " capture again"
            )
        self._shard_name, self._shard_records = name, [r for r in records if r.shard == name]
        self._end = max(r.end for r in self._shard_records)
        self._shard = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self._shard).st_size < self._end:
            raise EyasError(f"{part} is shorter than its journal says: restore it, or delete the store")
        os.ftruncate(self._shard, self._end)
        (length,) = struct.unpack("<Q", os.pread(self._shard, 8, 0))
        self._data_start = length + 8

    def _open_shard(self) -> int:
        self._shard_number += 1
        self._shard_name = layout.shard_name(self.writer, self._shard_number)
        part = self.path / (self._shard_name + layout.OPEN_SUFFIX)
        self._shard = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._shard_records = []
        self._end = self._data_start = self.header_bytes
        # The length of the header is there from the start, so that a resume need not know how much was reserved.
        write_all(self._shard, 0, [struct.pack("<Q", self.header_bytes - 8)])
        sync_folder(self.path)
        return self._shard

    # Writing

    def encode(self, loss_mask: Any, states: torch.Tensor | Sequence[torch.Tensor]) -> Stored:
        """A sample's states as they go to disk, for `add`; many threads may do this at once.

        Raises EyasError for states that the codec cannot hold.
        """
        parts: list[np.ndarray] = []
        manifest = self.manifest
        for j, (layer, k) in enumerate(zip(states, manifest.layers, strict=True)):
            last = k == manifest.layers[-1]
            if manifest.last_rows != "all" and last and len(layer) == len(loss_mask):
                layer = layer[torch.from_numpy(np.flatnonzero(loss_mask))]
            if manifest.logits and last:
                parts += [_bytes_of(t) for t in logits.split(layer.detach().cpu())]
            elif manifest.codec == "bf16":
                parts.append(_bytes_of(layer.detach().to("cpu", torch.bfloat16)))
            else:
                by = None if self._channels is None else self._channels[j]
                parts += [_bytes_of(t) for t in codecs.encode(layer.detach().cpu(), manifest.codec, by)]
        return Stored(tuple(len(layer) for layer in states), tuple(layer.shape[-1] for layer in states), parts)

    def add(
        self, id: str, input_ids: Any, loss_mask: Any, states: torch.Tensor | Sequence[torch.Tensor] | Stored
    ) -> None:
        """Append one sample. It is recorded ("done") at the next commit, at the latest when the writer is closed.

        input_ids: [T] integers, T >= 1; loss_mask: [T] booleans; states: [layers, T, Ht], or that many [T, Ht] (of the
        last layer the trained rows alone will do where the store keeps no others, and where it keeps logits the last
        layer is what logits.py makes of them), or what `encode` made of them.
        Raises EyasError when the disk refuses (the sample is then not in the store), ValueError on wrong shapes.
        """
        ids = np.ascontiguousarray(input_ids, dtype=np.int32)
        mask = np.ascontiguousarray(loss_mask, dtype=np.bool_).view(np.uint8)
        tokens, layers = len(ids), len(self.manifest.layers)
        lengths = states.rows if isinstance(states, Stored) else tuple(len(layer) for layer in states)
        widths = states.widths if isinstance(states, Stored) else tuple(layer.shape[-1] for layer in states)
        allowed = {tokens} if self.manifest.last_rows == "all" else {tokens, int(mask.sum())}
        wide = (self.manifest.hidden_size,) * (layers - 1) + (3 * self.manifest.logits or self.manifest.hidden_size,)
        right = lengths[:-1] == (tokens,) * (layers - 1) and lengths[-1] in allowed
        if tokens == 0 or mask.shape != ids.shape or not right or widths != wide:
            raise ValueError(f"sample {id}: ids {ids.shape}, mask {mask.shape}, states {lengths} of {widths}")
        if id in self.done_ids or id in self._pending_ids:
            raise ValueError(f"sample {id} is in the store already")
        stored = (states if isinstance(states, Stored) else self.encode(mask, states)).parts
        with self._disk():
            sizes = [layout.round_up(len(b)) for b in stored]
            shard = self._shard_for(sum(sizes))
            starts = [self._end + sum(sizes[:j]) for j in range(len(sizes))]
            parts = [Part(at, len(b), layout.digest(b.data)) for at, b in zip(starts, stored, strict=True)]
            gaps = [_ZEROS[: size - len(b)] for size, b in zip(sizes, stored, strict=True)]
            write_all(shard, self._end, [b for pair in zip(stored, gaps, strict=True) for b in pair])
            write_all(self._text, self._text_end, [ids, mask])
            text_xxh3 = layout.digest(ids.tobytes() + mask.tobytes())
            record = Record(
                self._next, id, self._shard_name, tokens, int(mask.sum()), self._dtype, tuple(parts), self._text_end,
                text_xxh3, layout.needs_tokens(mask),
            )  # fmt: skip
            self._pending.append(record)
            self._pending_ids.add(id)
            self._shard_records.append(record)
            self._pending_bytes += record.end - self._end
            self._next, self._end, self._text_end = self._next + 1, record.end, record.text_end
            waited = time.monotonic() - self._committed_at
            if self._pending_bytes >= self.commit_bytes or waited >= self.commit_seconds:
                self.commit()

    def _shard_for(self, nbytes: int) -> int:
        """The open shard, or a fresh one where a sample of `nbytes` would overflow its size or its header."""
        if self._shard is not None and self._shard_records:
            room = layout.samples_in_header(self._data_start, layout.parts_count(self.manifest))
            used = self._next - self._shard_records[0].n
            if used >= room or self._end + nbytes > self.shard_bytes:
                self._close_shard()
        return self._open_shard() if self._shard is None else self._shard

    def commit(self) -> None:
        """Make what is waiting durable and record it. Raises EyasError when the disk refuses."""
        if not self._pending or self._broken:
            return
        with self._disk():
            assert self._shard is not None
            if not (self.path / layout.MANIFEST).exists():  # a writer that began with this one, and failed, took it
                self.manifest.create(self.path)
            self._sync(self._shard)
            self._sync(self._text)
            lines = b"".join(r.line() for r in self._pending)
            try:
                write_all(self._journal, self._journal_end, [lines])
            except OSError:
                os.ftruncate(self._journal, self._journal_end)
                raise
            self._sync(self._journal)
        self._journal_end += len(lines)
        self.done_ids.update(r.id for r in self._pending)
        self._pending, self._pending_bytes = [], 0
        self._pending_ids.clear()
        self._committed_at = time.monotonic()

    def _sync(self, fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError:
            self._broken = True
            raise

    def _close_shard(self) -> None:
        self.commit()
        assert self._shard is not None
        if self._shard_records:
            entries = layout.header_entries(self._shard_records, self.manifest, self._data_start)
            header = layout.header_json(entries)
            length = self._data_start - 8
            if len(header) > length:
                raise ValueError(f"{self._shard_name}: a header of {len(header)} bytes does not fit in {length}")
            write_all(self._shard, 8, [header.ljust(length)])  # the length is there since the shard was opened
            os.ftruncate(self._shard, self._end)
            os.fsync(self._shard)
            part = self.path / (self._shard_name + layout.OPEN_SUFFIX)
            part.rename(self.path / self._shard_name)
            sync_folder(self.path)
        os.close(self._shard)
        self._shard = None

    def close(self) -> None:
        """Record what is waiting and close the open shard. Raises EyasError when the disk refuses."""
        with self._disk():
            if self._shard is not None:
                self._close_shard()
        self._fds.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(EyasError):
            self.commit()
        if self._shard is not None:
            os.close(self._shard)
            self._shard = None
        if self._journal_end == 0:
            self._remove_what_was_created()
        self._fds.close()

    def _remove_what_was_created(self) -> None:
        """After a failure before the first record: leave the folder as if nothing had been tried."""
        with contextlib.suppress(OSError):
            for stray in self.path.glob(f"shard-{self.writer}-*{layout.OPEN_SUFFIX}"):
                stray.unlink()
            layout.tokens_path(self.path, self.writer).unlink()
            layout.journal_path(self.path, self.writer).unlink()
            if not layout.journals(self.path):
                (self.path / layout.MANIFEST).unlink()
            if self._fresh_folder:
                self.path.rmdir()

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            do = "Make room" if full else "Make it writable"
            kept = " What is recorded there is whole." if self._journal_end else ""
            raise EyasError(
                f"{self.path} cannot be written: {error.strerror}.{kept} {do} or choose another folder, and"
                " run the same command again"
            ) from error


def _bytes_of(values: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, uint8: its own memory where it is contiguous."""
    flat: np.ndarray = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    return flat


def write_all(fd: int, offset: int, buffers: Sequence[Any]) -> None:
    """Write every byte of `buffers`, one after the other, from `offset` on. Raises OSError."""
    views = [v for v in (memoryview(b).cast("B") for b in buffers if len(b)) if len(v)]
    while views:
        written = os.pwritev(fd, views[:_BUFFERS_PER_CALL], offset)
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views and written:
            views[0] = views[0][written:]
