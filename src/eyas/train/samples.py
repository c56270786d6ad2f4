"""The samples that a run was begun with, so that it goes on in its order when some are in quarantine since.

Split, order and packs of a run follow from its list of samples. The list is kept in the run directory
(`start/samples.json`, 40 bytes a sample); a run that goes on without some of them makes the packs that it would have
made and leaves those samples out of them, so that each of the others still trains once an epoch.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.files import write_whole
from eyas.store.reader import Source

NAME = "samples.json"


@dataclass
class Samples:
    """lengths, trained: [N] tokens, and trained ones, of each sample; train, validate: indices of those that do."""

    ids: list[str]
    lengths: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]
    train: list[int]
    validate: list[int]

    @property
    def digest(self) -> str:
        """What tells these data from others: xxh3-64 of the samples' names, their tokens and their trained tokens."""
        hashed = xxhash.xxh3_64()
        hashed.update("\n".join(self.ids).encode())
        hashed.update(self.lengths.tobytes())
        hashed.update(self.trained.tobytes())
        return hashed.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the list into `folder`, whole. Raises OSError."""
        values = {
            "ids": self.ids, "lengths": self.lengths.tolist(), "trained": self.trained.tolist(), "train": self.train,
            "validate": self.validate,
        }  # fmt: skip
        write_whole(folder / NAME, json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode())

    def now(self, source: Source, shut_out: Collection[str]) -> npt.NDArray[np.int64] | None:
        """[N] where in `source` each sample is, -1 for one that is shut out; None where the two differ in more."""
        at = {name: i for i, name in enumerate(source.ids)}
        found = np.array([at.get(name, -1) for name in self.ids], dtype=np.int64)
        gone = {self.ids[i] for i in np.flatnonzero(found < 0).tolist()}
        there = found >= 0
        same = np.array_equal(source.lengths[found[there]], self.lengths[there]) and np.array_equal(
            source.trained[found[there]], self.trained[there]
        )
        return found if same and gone <= set(shut_out) and int(there.sum()) == len(source.ids) else None


def kept_samples(folder: Path) -> Samples | None:
    """What `Samples.save` wrote into `folder`; None where there is no such list, or a damaged one."""
    try:
        v = json.loads((folder / NAME).read_bytes())
        lengths, trained = np.array(v["lengths"], dtype=np.int64), np.array(v["trained"], dtype=np.int64)
        samples = Samples(v["ids"], lengths, trained, v["train"], v["validate"])
        of_these = all(0 <= i < len(samples.ids) for i in (*samples.train, *samples.validate))
        return samples if of_these and samples.digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
