"""Many folders into one store: what several hosts captured, each into a folder of its own.

The states are not copied where both folders are on one file system: a closed shard never changes, so the merged store
gets a second name for it (a hard link). Only tokens (5 bytes each) and journals are written anew, under writer names
made of the folder's name and a hash of what its journal says. A journal is written last and whole. So a merge that was
stopped is run again and does what is missing; a merge run twice does nothing; merging again after a folder has grown
adds what is new. The folders merged from stay as they are, but for shards that a stopped writer left open: those are
closed first. Elsewhere, shards are copied, and every checksum is verified on the copy.

Cost: nothing per byte of states with links; a read, a write and a verifying read with copies.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from eyas.errors import EyasError
from eyas.files import check_unused, same_place, sync_folder, write_whole
from eyas.store import layout
from eyas.store.layout import Manifest, Record
from eyas.store.reads import Extent, Files, read_bytes
from eyas.store.remote import check_local
from eyas.store.whole import unfinished
from eyas.store.writer import StoreWriter


@dataclass
class Merged:
    """What a merge did.

    samples: in the merged store; added: by this run; duplicates: ids that were there already, and differing: those of
    them with other states; linked, copied: bytes of shards; damaged: (name, why) of what was left out.
    """

    samples: int = 0
    added: int = 0
    duplicates: int = 0
    differing: int = 0
    linked: int = 0
    copied: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


def merge(folders: Sequence[Path], output: Path, say: Callable[[str], None] = print) -> Merged:
    """Merge the stores `folders` into the store `output`, which may exist.

    The first of two samples of one id is kept. Raises EyasError when a folder is no store, when the stores are not of
    one kind, when a writer is at work in a folder, or when the disk refuses.
    """
    for path in (output, *folders):
        check_local(path)
    if any(same_place(output, folder) for folder in folders):
        raise EyasError(f"{output} cannot be merged into itself: name another folder for the merged store")
    check_unused(output, layout.MANIFEST)
    manifest = _common_manifest(folders, output)
    done = Merged()
    try:
        output.mkdir(parents=True, exist_ok=True)
        manifest.create(output)
        seen = {r.id: _digest(r) for j in layout.journals(output) for r in layout.read_journal(j).records}
        parts: list[tuple[Path, Manifest, set[str]]] = []
        for folder in folders:
            before, named = done.added, set[str]()
            for journal in layout.journals(folder):
                named |= _merge_writer(folder, layout.writer_of(journal), output, seen, done)
            say(f"{folder}: {done.added - before:,} samples added")
            parts.append((folder, Manifest.load(folder), named))
        for folder, begun, named in parts:
            together = set[str]().union(*(names for _, m, names in parts if m.source == begun.source))
            if manifest.source == begun.source:
                together |= seen.keys()  # earlier ones brought
            if len(together) < begun.samples:  # folders of one capture may make it whole together
                for remark in unfinished(folder, len(named), begun.samples):
                    say(f"warning: {remark}; then merge again")
    except OSError as error:
        raise EyasError(
            f"{output} cannot be written: {error.strerror}. What is recorded there is whole: make room, and run the"
            " same command again"
        ) from error
    done.samples = len(seen)
    return done


def _common_manifest(folders: Sequence[Path], output: Path) -> Manifest:
    manifests = [(f, Manifest.load(f)) for f in folders]
    if (output / layout.MANIFEST).exists():
        manifests.insert(0, (output, Manifest.load(output)))
    first_folder, first = manifests[0]
    for folder, other in manifests[1:]:
        differences = replace(other, source="").differences(replace(first, source=""))
        if differences:
            raise EyasError(f"{folder} cannot be merged with {first_folder}: {'; '.join(differences)}")
    captured = sorted({m.source for _, m in manifests})
    if first_folder == output or len(captured) == 1:
        return first
    return replace(first, samples=0, source=xxhash.xxh3_64_hexdigest("".join(captured).encode()))


def _digest(record: Record) -> tuple[str, ...]:
    return (record.text_xxh3, *(part.xxh3 for part in record.parts))


def _merge_writer(folder: Path, writer: str, output: Path, seen: dict[str, tuple[str, ...]], done: Merged) -> set[str]:
    """Bring one writer's samples over: shards and tokens, then its journal; returns the ids of all that it has."""
    if any(folder.glob(f"shard-{writer}-*{layout.OPEN_SUFFIX}")):
        StoreWriter(folder, Manifest.load(folder), writer=writer).close()
    path = layout.journal_path(folder, writer)
    records, broken, _ = layout.read_journal(path)
    named = {r.id for r in records}
    records, left_out = _usable(folder, writer, records)
    done.damaged += [*broken, *left_out]
    lines = b"".join(r.line() for r in records)
    name = f"{re.sub(r'[^A-Za-z0-9]+', '_', folder.resolve().name)}_{writer}_{xxhash.xxh3_64_hexdigest(lines)}"
    if layout.journal_path(output, name).exists():
        return named  # an earlier run has brought it, as a whole
    fresh: list[Record] = []
    for r in records:
        if r.id not in seen:
            seen[r.id] = _digest(r)
            fresh.append(r)
        else:
            done.duplicates += 1
            done.differing += seen[r.id] != _digest(r)
    if not fresh:
        return named
    _copy(layout.tokens_path(folder, writer), layout.tokens_path(output, name))
    renamed = {}
    for shard in dict.fromkeys(r.shard for r in fresh):
        renamed[shard] = layout.shard_name(name, layout.shard_number(shard))
        samples = [r for r in fresh if r.shard == shard]
        for r, why in _bring(folder / shard, output / renamed[shard], samples, done):
            done.damaged.append((r.id, why))
            fresh.remove(r)
            del seen[r.id]
    sync_folder(output)
    written = b"".join(r._replace(shard=renamed[r.shard]).line() for r in fresh)
    write_whole(layout.journal_path(output, name), written)
    sync_folder(output)
    done.added += len(fresh)
    return named


def _usable(folder: Path, writer: str, records: list[Record]) -> tuple[list[Record], list[tuple[str, str]]]:
    """The samples that whoever opens `folder` would find, and of the others why: a good copy elsewhere shall win."""
    listed = layout.quarantined(folder)
    have = {name: _size(folder / name) for name in {r.shard for r in records}}
    text = _size(layout.tokens_path(folder, writer))
    good: list[Record] = []
    bad: list[tuple[str, str]] = []
    for r in records:
        if r.id in listed:
            bad.append((r.id, f"is in quarantine ({listed[r.id]})"))
        elif have[r.shard] < max(p.offset + p.nbytes for p in r.parts):
            size = have[r.shard]
            bad.append((r.id, f"{r.shard} is " + ("missing" if size < 0 else f"truncated at byte {size}")))
        elif text < r.text_end:
            bad.append((r.id, "its tokens file is truncated"))
        else:
            good.append(r)
    return good, bad


def _size(path: Path) -> int:
    """Bytes of a file, -1 where there is none."""
    return path.stat().st_size if path.is_file() else -1


def _bring(source: Path, target: Path, records: list[Record], done: Merged) -> list[tuple[Record, str]]:
    """Give a shard its name in the merged store; returns the samples that did not come over whole, and why."""
    size = source.stat().st_size
    try:
        os.link(source, target)
        done.linked += size
        return []
    except FileExistsError:
        if target.samefile(source):
            return []
        target.unlink()  # of a merge that was stopped: the journal that would name it is not there
        return _bring(source, target, records, done)
    except OSError as error:
        if error.errno not in layout.NO_LINKS:
            raise
    _copy(source, target)
    done.copied += size
    files, wrong = Files(), []
    for r in records:
        try:
            for p in r.parts:
                read_bytes(files, Extent(r.id, str(target), p.offset, p.nbytes, 0, "uint8", p.nbytes, p.nbytes, p.xxh3))
        except EyasError as error:
            wrong.append((r, str(error)))
    return wrong


def _copy(source: Path, target: Path) -> None:
    """Copy a file under another name, sync it, rename it."""
    side = target.with_name(f".{target.name}.copy")
    try:
        shutil.copyfile(source, side)
        with side.open("rb+") as file:
            os.fsync(file.fileno())
        side.replace(target)
    finally:
        side.unlink(missing_ok=True)
