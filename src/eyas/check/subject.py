"""What is judged: a drafter's folder, the engines it is for, and the verifier if it is at hand. And what is found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.check.engines import Loading, load
from eyas.drafter.conventions import ENGINES, Engine
from eyas.drafter.folder import FLOATS, INTEGERS, DrafterFolder

if TYPE_CHECKING:
    from eyas.verifier import Verifier

Ints = npt.NDArray[np.int64]
NOTHING = "accept length 1.00, no warning"
LITTLE = "accept length near 1, no warning"


@dataclass(frozen=True)
class Finding:
    """A fault or a remark.

    key: its short name, the row in docs/check.md. broken: a release of today's engines is hurt by it; else a remark.
    what: the fact. sees: what the user of an engine would see. repair: what `--fix` does about it, None where that
    would be guessing; then todo says what to do.
    """

    key: str
    broken: bool
    what: str
    sees: str
    repair: str | None = None
    todo: str = ""


class Subject:
    """A folder to judge. num_layers, family: the verifier's, None where no verifier is named. trained_layers: the HF
    indices it was trained on, where somebody knows."""

    def __init__(
        self,
        folder: DrafterFolder,
        engines: tuple[Engine, ...],
        verifier: Verifier | None = None,
        trained_layers: tuple[int, ...] | None = None,
    ) -> None:
        self.folder = folder
        self.verifier = verifier
        self.kind = folder.kind
        self.config = folder.config
        about = verifier.config if verifier else None
        self.num_layers = about.num_layers if about else None
        self.family = about.model_type if about else None
        self.trained_layers = trained_layers
        self.default_layers: tuple[int, ...] | None = about.capture_layers() if about else None
        self.loadings: list[Loading] = [load(folder, e, self.num_layers, self.family) for e in engines]

    def whole(self, key: str) -> int | None:
        """A whole number of config.json."""
        value = self.config.get(key)
        return value if type(value) is int else None

    def shape(self, name: str, axis: int) -> int | None:
        """One side of a tensor, None where it is not there or has no such side."""
        shape = self.folder.shape(name)
        return shape[axis] if shape is not None and len(shape) > axis else None

    @cached_property
    def H(self) -> int | None:
        """The drafter's hidden size, by its tensors first."""
        return self.shape("norm.weight", 0) or self.shape("lm_head.weight", 1) or self.whole("hidden_size")

    @cached_property
    def Ht(self) -> int | None:
        """The verifier's hidden size, as the drafter believes it."""
        return self.whole("target_hidden_size") or self.whole("hidden_size")

    @cached_property
    def V(self) -> int | None:
        """The verifier's vocabulary, as the drafter believes it."""
        return self.whole("vocab_size") or self.shape("t2d", 0) or self.shape("embed_tokens.weight", 0)

    @cached_property
    def Vd(self) -> int | None:
        """The draft vocabulary, by the head first."""
        return self.shape("lm_head.weight", 0) or self.shape("d2t", 0) or self.whole("draft_vocab_size") or self.V

    @cached_property
    def d2t(self) -> Ints | None:
        """The stored map as whole numbers, whatever its type; None where there is none."""
        return self._map("d2t")

    @cached_property
    def marked(self) -> Ints | None:
        """The verifier ids that t2d marks, ascending; None where there is no t2d of yes and no."""
        values = self._map("t2d")
        return None if values is None or not np.isin(values, (0, 1)).all() else np.flatnonzero(values)

    def _map(self, name: str) -> Ints | None:
        stored = self.folder.tensors.get(name)
        if stored is None or len(stored.shape) != 1 or not stored.shape[0]:
            return None
        if stored.dtype in FLOATS:
            values = self.folder.floats(name)
            if not (np.abs(values) < 2**53).all():  # NaN, too
                return None
            return np.rint(values).astype(np.int64)
        if stored.dtype in (*INTEGERS, "BOOL"):
            return self.folder.array(name).astype(np.int64)
        return None

    def names(self, ids: Ints) -> bool:
        """Whether `ids` [Vd] are a draft vocabulary: ascending tokens of the verifier's."""
        return self.V is not None and bool((ids >= 0).all() and (ids < self.V).all() and (np.diff(ids) > 0).all())


def titles(loadings: list[Loading]) -> str:
    """SGLang and vLLM 0.32 (V2 runner): the releases of an engine only where not all are meant."""
    parts = []
    for name in dict.fromkeys(x.engine.name for x in loadings):
        versions = [x.engine.versions for x in loadings if x.engine.name == name]
        every = len(versions) == sum(e.name == name for e in ENGINES)
        parts.append(name if every else f"{name} {', '.join(versions)}")
    return " and ".join(parts)


def listed(names: Any, most: int = 3) -> str:
    """a, b, c and 9 more."""
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
