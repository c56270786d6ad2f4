"""A store's index as arrays: from the journals, or from a copy that is kept beside them.

Parsing a journal costs 20 µs a sample, which is seconds where there are 100,000 and more. So the arrays of a large
store are kept in `.index.safetensors` in its folder (in ~/.cache/eyas where that cannot be written). The copy names
the length and the xxh3-64 of every journal, and its own: it is used only where all of them match, so a flipped bit in
a journal is found just as without it. Nothing but speed is lost with it; delete it at any time.

Cost: about 170 bytes per sample of four layers, in memory and on disk; 0.1 s to load 100,000 samples.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.errors import EyasError
from eyas.files import write_whole
from eyas.store import layout
from eyas.store.kept import pack, unpack
from eyas.store.layout import Part, Record

KEPT = ".index.safetensors"
KEEP_FROM = 4096  # samples; a smaller store is parsed in less time than anybody notices
_FORMAT = 1
_NUMBERS = ("n", "tokens", "trained", "needs", "text_offset")

Ints = npt.NDArray[np.int64]


@dataclass
class Index:
    """N samples of L layers, in the order of the journals, and the journal lines that are no samples.

    again: [N] bool, whether the id occurs more than once; shard, writer: [N] indices into `shards` and `writers`;
    offset, nbytes: [N, L]; xxh3: [N, L] uint64; the others are [N], as in `Record`.
    """

    ids: list[str]
    shards: list[str]
    writers: list[str]
    broken: list[tuple[str, str]]
    n: Ints
    tokens: Ints
    trained: Ints
    needs: Ints
    text_offset: Ints
    text_xxh3: npt.NDArray[np.uint64]
    shard: Ints
    writer: Ints
    again: npt.NDArray[np.bool_]
    offset: Ints
    nbytes: Ints
    xxh3: npt.NDArray[np.uint64]

    def record(self, i: int) -> Record:
        """Sample i as its journal has it."""
        parts = zip(self.offset[i].tolist(), self.nbytes[i].tolist(), self.xxh3[i].tolist(), strict=True)
        return Record(
            int(self.n[i]),
            self.ids[i],
            self.shards[self.shard[i]],
            int(self.tokens[i]),
            int(self.trained[i]),
            "bfloat16",
            tuple(Part(offset, nbytes, f"{digest:016x}") for offset, nbytes, digest in parts),
            int(self.text_offset[i]),
            f"{int(self.text_xxh3[i]):016x}",
            int(self.needs[i]),
        )

    def select(self, keep: Ints) -> Index:
        """The samples `keep`, in that order."""
        arrays = {name: array[keep] for name, array in self.arrays().items()}
        return Index([self.ids[i] for i in keep.tolist()], self.shards, self.writers, self.broken, **arrays)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def load_index(folder: Path, layers: int, dtype: str = "bfloat16") -> Index:
    """The index of a store whose manifest announces `layers` parts of `dtype`.

    Raises EyasError when a journal cannot be read.
    """
    journals = layout.journals(folder)
    contents: list[bytes] = []
    for path in journals:
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise EyasError(f"{path} cannot be read: {error.strerror}") from None
    said = [[p.name, len(c), xxhash.xxh3_64_hexdigest(c)] for p, c in zip(journals, contents, strict=True)]
    key = json.dumps([_FORMAT, layers, dtype, *said])
    for place in _places(folder):
        index = _kept(place, key)
        if index is not None:
            return index
    index = _build(journals, contents, layers, dtype)
    if len(index.ids) >= KEEP_FROM:
        _keep(folder, index, key)
    return index


def _build(journals: list[Path], contents: list[bytes], layers: int, dtype: str) -> Index:
    records: list[Record] = []
    broken: list[tuple[str, str]] = []
    writers: list[str] = []
    writer: list[int] = []
    for number, (path, content) in enumerate(zip(journals, contents, strict=True)):
        journal = layout.parse_journal(path.name, content)
        broken += journal.broken
        writers.append(layout.writer_of(path))
        for r in journal.records:
            if r.dtype != dtype or len(r.parts) != layers:
                broken.append((r.id, f"has {len(r.parts)} parts of {r.dtype}, which the manifest does not announce"))
            else:
                records.append(r)
                writer.append(number)
    shards = {name: i for i, name in enumerate(dict.fromkeys(r.shard for r in records))}
    parts = np.array([p[:2] for r in records for p in r.parts], dtype=np.int64).reshape(len(records), layers, 2)
    digests = np.array([int(p.xxh3, 16) for r in records for p in r.parts], dtype=np.uint64)
    count = Counter(r.id for r in records)
    numbers = {name: np.array([getattr(r, name) for r in records], dtype=np.int64) for name in _NUMBERS}
    return Index(
        ids=[r.id for r in records],
        shards=list(shards),
        writers=writers,
        broken=broken,
        text_xxh3=np.array([int(r.text_xxh3, 16) for r in records], dtype=np.uint64),
        shard=np.array([shards[r.shard] for r in records], dtype=np.int64),
        writer=np.array(writer, dtype=np.int64),
        again=np.array([count[r.id] > 1 for r in records], dtype=np.bool_),
        offset=parts[:, :, 0].copy(),
        nbytes=parts[:, :, 1].copy(),
        xxh3=digests.reshape(len(records), layers),
        **numbers,
    )


def _places(folder: Path) -> tuple[Path, Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"
    return folder / KEPT, cache / f"store-{xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))}.safetensors"


def _keep(folder: Path, index: Index, key: str) -> None:
    names = json.dumps([index.ids, index.shards, index.writers, index.broken])
    data = pack(index.arrays(), {"names": names}, key)
    for place in _places(folder):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, data)
            return
        except OSError:
            continue  # a copy that cannot be kept costs time, no more


def _kept(place: Path, key: str) -> Index | None:
    found = unpack(place, key)
    if found is None:
        return None
    arrays, said = found
    try:
        ids, shards, writers, broken = json.loads(said["names"])
        return Index(ids, shards, writers, [(name, why) for name, why in broken], **arrays)
    except (KeyError, ValueError, TypeError):  # an earlier layout
        return None
