"""The index of other tools' files: what every sample is and where its rows lie, built once and kept.

Lengths, tokens, masks, and for each state the file, the first byte and the distance between two rows; so planning,
packing and reading never open a file to learn anything. Built by threads from headers, pickles and token records alone
(no states are read), kept as `.eyas-index.safetensors` beside the data, or under ~/.cache/eyas where the folder cannot
be written. A file of another size or time of change makes a new one.

Cost: about 0.4 ms of CPU a file to build, on every core from MANY files on (processes.py), 5 bytes per token and 100
per sample to keep, one `stat` a file to see that nothing changed. No torch is imported.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.errors import EyasError
from eyas.files import write_whole
from eyas.store.foreign.processes import NO_ANSWER, Looking, try_look
from eyas.store.foreign.torchzip import Unreadable
from eyas.store.kept import pack, unpack
from eyas.store.layout import needs_tokens

KEPT_NAME = ".eyas-index.safetensors"
FORMAT = 2
STATES = 4  # three auxiliary states and the last one
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
SAY_SECONDS = 2.0
_THREADS, _TOGETHER = 8, 32  # files that a thread looks at before it says so
MANY = 2000  # files that pay for starting processes

Say = Callable[[str], None]


class Found(NamedTuple):
    """One sample, as a format's `look` finds it.

    file: relative to the folder; width: Ht; dtype: one of DTYPES.
    offsets, strides: of each of the four states, the first byte of row 0 and the bytes from one row to the next.
    scales: first byte of float32 [T], one scale per row, or -1. gzipped: offsets count in the decompressed stream, or
    are storage keys there (torchzip.Stream).
    """

    file: str
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    width: int
    dtype: str
    offsets: tuple[int, ...]
    strides: tuple[int, ...]
    scales: int = -1
    gzipped: bool = False


class Job(NamedTuple):
    """A sample to be looked at: its name, and whatever the format's `look` needs to know."""

    name: str
    what: Any


@dataclass
class Index:
    """What the files hold. names: the usable samples; broken: (name, reason); N samples, L = STATES."""

    names: list[str]
    files: list[str]
    broken: list[tuple[str, str]]
    lengths: npt.NDArray[np.int64]  # [N]
    widths: npt.NDArray[np.int64]  # [N]
    dtypes: npt.NDArray[np.uint8]  # [N] into DTYPES
    file: npt.NDArray[np.int64]  # [N] into files
    offsets: npt.NDArray[np.int64]  # [N, L]
    strides: npt.NDArray[np.int64]  # [N, L]
    scales: npt.NDArray[np.int64]  # [N]
    gzipped: npt.NDArray[np.uint8]  # [N]
    needs: npt.NDArray[np.int64]  # [N] tokens that it takes to train anything (layout.needs_tokens)
    ids: npt.NDArray[np.int32]  # of all samples, one after the other
    mask: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64] = None  # type: ignore[assignment]
    trained: npt.NDArray[np.int64] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.starts = np.cumsum(self.lengths) - self.lengths
        sums = np.concatenate([[0], np.cumsum(self.mask, dtype=np.int64)])
        self.trained = sums[self.starts + self.lengths] - sums[self.starts]


_ARRAYS = tuple(f.name for f in fields(Index) if f.name not in ("names", "files", "broken", "starts", "trained"))


def open_index(
    folder: Path,
    kind: str,
    files: Sequence[Path],
    jobs: Callable[[], tuple[list[Job], Callable[[Any], Found]]],
    say: Say | None,
) -> Index:
    """The kept index where it fits the files, or a new one, kept if anything can be written.

    kind: the format's name; files: everything that the index depends on; jobs: asked for only if it must be built.
    """
    key = _key(folder, kind, files)
    place = xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"
    places = (folder / KEPT_NAME, cache / f"index-{place}.safetensors")
    for place_ in places:
        kept = _kept(place_, key)
        if kept is not None:
            return kept
    if say is not None and len(files) > 1000:
        say(f"index: looking at {len(files):,} files in {folder} (once)")
    todo, look = jobs()
    index = _build(todo, look, say)
    if any(why.startswith(NO_ANSWER) for _, why in index.broken):  # a permission or a disk: not to be remembered
        return index
    for place_ in places:
        try:
            place_.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place_, _bytes(index, key))
            break
        except OSError:
            continue  # an index that cannot be kept costs time, no more
    return index


def _key(folder: Path, kind: str, files: Sequence[Path]) -> str:
    def size_and_time(path: Path) -> tuple[int, int]:
        try:
            s = path.stat()
        except OSError:  # a link to nothing, or gone since the folder was listed: `look` says what it is
            return -1, 0
        return s.st_size, s.st_mtime_ns

    def stat(paths: Sequence[Path]) -> list[tuple[int, int]]:
        return [size_and_time(path) for path in paths]

    with ThreadPoolExecutor(_THREADS) as pool:  # a network file system answers many at once
        stats = [
            s
            for some in pool.map(stat, (files[k : k + _TOGETHER] for k in range(0, len(files), _TOGETHER)))
            for s in some
        ]
    top = len(os.fspath(folder))
    said = [f"{FORMAT} {kind}", *(f"{os.fspath(p)[top:]} {s}" for p, s in zip(files, stats, strict=True))]
    return xxhash.xxh3_128_hexdigest("\0".join(said).encode(errors="surrogateescape"))


def _build(jobs: list[Job], look: Callable[[Any], Found], say: Say | None) -> Index:
    names, broken, found = list[str](), list[tuple[str, str]](), list[Found]()
    said = started = time.monotonic()

    def tell(number: int) -> None:
        nonlocal said
        now = time.monotonic()
        if say is not None and now - said >= SAY_SECONDS:
            said = now
            pace = number / (now - started)
            left = f" · {(len(jobs) - number) / pace:,.0f} s left" if number else ""
            say(f"index {number:,}/{len(jobs):,} samples · {pace:,.0f} a second · {len(broken):,} left out{left}")

    looking = Looking(look) if len(jobs) >= MANY and isinstance(look, functools.partial) else None
    looking = looking if looking is not None and looking.count > 1 else None

    def look_at(some: list[Job]) -> list[Found | str]:
        if looking is not None:
            return looking([job.what for job in some])
        return [try_look(look, job.what) for job in some]

    with ThreadPoolExecutor(_THREADS if looking is None else looking.count) as pool:
        groups = [jobs[k : k + _TOGETHER] for k in range(0, len(jobs), _TOGETHER)]
        waiting = [pool.submit(look_at, group) for group in groups]
        try:
            for group, future in zip(groups, waiting, strict=True):
                while True:
                    try:
                        results = future.result(timeout=SAY_SECONDS)
                        break
                    except TimeoutError:
                        tell(len(names) + len(broken))  # a disk that does not answer is told, too
                for job, result in zip(group, results, strict=True):
                    if isinstance(result, str):
                        broken.append((job.name, result))
                    else:
                        names.append(job.name)
                        found.append(result)
                tell(len(names) + len(broken))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            if looking is not None:
                looking.close()
    return _index_of(names, broken, found)


def _index_of(names: list[str], broken: list[tuple[str, str]], found: list[Found]) -> Index:
    files = list(dict.fromkeys(f.file for f in found))
    number = {name: i for i, name in enumerate(files)}

    def column(values: list[Any], dtype: Any, width: int | None = None) -> npt.NDArray[Any]:
        return np.array(values, dtype=dtype).reshape((-1,) if width is None else (-1, width))

    return Index(
        names,
        files,
        broken,
        lengths=column([len(f.ids) for f in found], np.int64),
        widths=column([f.width for f in found], np.int64),
        dtypes=column([DTYPES.index(f.dtype) for f in found], np.uint8),
        file=column([number[f.file] for f in found], np.int64),
        offsets=column([f.offsets for f in found], np.int64, STATES),
        strides=column([f.strides for f in found], np.int64, STATES),
        scales=column([f.scales for f in found], np.int64),
        gzipped=column([f.gzipped for f in found], np.uint8),
        needs=column([needs_tokens(f.mask) for f in found], np.int64),
        ids=np.concatenate([np.empty(0, np.int32), *(f.ids for f in found)]),
        mask=np.concatenate([np.empty(0, np.uint8), *(f.mask for f in found)]),
    )


# -- kept on disk ----------------------------------------------------------------------------------------------------


def _bytes(index: Index, key: str) -> bytes:
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    return pack(arrays, {name: json.dumps(getattr(index, name)) for name in ("names", "files", "broken")}, key)


def _kept(path: Path, key: str) -> Index | None:
    found = unpack(path, key)
    if found is None:
        return None
    arrays, said = found
    try:
        names, files, broken = (json.loads(said[name]) for name in ("names", "files", "broken"))
        return Index(names, files, [(n, r) for n, r in broken], **arrays)
    except (KeyError, ValueError, TypeError):  # an earlier layout
        return None


# -- what every format's `look` asks ---------------------------------------------------------------------------------


def tokens_of(ids: npt.NDArray[Any], mask: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """input_ids and loss mask as the index keeps them. Raises Unreadable where they do not fit each other."""
    ids, mask = ids.reshape(-1), mask.reshape(-1)
    if len(ids) == 0:
        raise Unreadable("has no tokens")
    if len(mask) != len(ids):
        raise Unreadable(f"loss_mask has {len(mask)} values for {len(ids)} tokens")
    if ids.dtype.kind not in "iu" or int(ids.max()) >= 2**31 or int(ids.min()) < -(2**31):
        raise Unreadable("input_ids are not token ids")
    return ids.astype(np.int32), (mask != 0).astype(np.uint8)


def natural(path: Path) -> list[Any]:
    """A sort key that puts data_2 before data_10."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", os.fspath(path))]


def listed(folder: Path, pattern: str) -> list[Path]:
    """The files of `folder` whose path in it matches, in natural order; `*` stays within a name. Raises EyasError."""
    first, _, rest = pattern.partition("/")
    matches = re.compile(fnmatch.translate(first)).match
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if matches(entry.name)]
    except (NotADirectoryError, FileNotFoundError):
        return []
    except OSError as error:
        raise EyasError(f"{folder} cannot be listed: {error.strerror}") from None
    found = [folder / name for name in names]
    if rest:
        return [path for each in sorted(found, key=natural) for path in listed(each, rest)]
    return sorted(found, key=natural)
