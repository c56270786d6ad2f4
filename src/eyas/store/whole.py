"""Is a store all that it was to be? A capture that has not finished, and samples whose files have been cut since.

Neither stops anything: what is there is good. Each is one line, from the index and the sizes of the files alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from eyas.store.reader import Source, StoreSource

_CUT = re.compile(r"\S+ is (?:missing|truncated at byte \d+)|its tokens file is truncated")  # `torn_files`
_LINE = re.compile(r"journal-\w+\.jsonl line \d+")  # stands for a sample that nobody can name


def remarks(source: Source) -> list[str]:
    """What is missing of a store, in a line each; none of other tools' files, which do not say what there was."""
    if not isinstance(source, StoreSource):
        return []
    there = {*source.ids, *left_out(source)}
    return [*unfinished(source.path, len(there), source.manifest.samples), *_lost(source, len(there))]


def left_out(source: Source) -> list[str]:
    """Names of the samples that a store has and leaves out; a damaged line of a journal names none."""
    return [name for name, _ in source.skipped if not _LINE.fullmatch(name)]


def unfinished(path: Path, there: int, wanted: int) -> list[str]:
    """The line for a store with `there` of the samples that it was begun for; none where it is whole, or wanted is 0.

    A sample counts as there when a journal names it, whatever has become of its data.
    """
    if there >= wanted:
        return []
    return [
        f"{path} is unfinished: it has {there:,} of {wanted:,} samples: run the same eyas capture (or eyas store"
        " convert) again, which goes on where it stopped"
    ]


def cut(reason: str) -> bool:
    """Whether a sample is left out, for this reason, because its file is gone or has lost its end."""
    return _CUT.fullmatch(reason) is not None


def _lost(source: StoreSource, there: int) -> list[str]:
    reasons = [why for _, why in source.skipped if cut(why)]
    if not reasons:
        return []
    files = list(dict.fromkeys(reasons))
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return [
        f"{len(reasons):,} of {there:,} samples are lost: in {source.path}, {files[0]}{more}: restore the file from a"
        f" copy, or delete {source.path} and make it again"
    ]
