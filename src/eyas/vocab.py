"""The draft vocabulary: which Vd of the verifier's V tokens the drafter can say, as `d2t` and `t2d`.

A drafter's head costs as much as its vocabulary is large, and a few thousand tokens make up nearly all of what a
verifier says: taken are the tokens trained on most often. Draft ids keep the verifier's order, so that
verifier id = draft id + d2t[draft id] with strictly increasing targets, as engines expect.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eyas.errors import EyasError
from eyas.files import check_unused, write_whole
from eyas.prepare import Prepared, read_prepared
from eyas.verifier import Verifier, first_line

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class TokenSource(Protocol):
    """The part of a store's reader that is needed here."""

    ids: list[str]

    def tokens(self, i: int, /) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids [T] and loss mask [T] of sample i."""
        ...


@dataclass(frozen=True)
class DraftVocab:
    """d2t: int64 [Vd], verifier id minus draft id. t2d: bool [V], whether a verifier token is in the vocabulary.

    covered: the share of trained tokens that it covers, where that is known.
    """

    d2t: Ints
    t2d: Bools
    verifier: str = ""
    fingerprint: str = ""
    covered: float | None = None

    @property
    def size(self) -> int:
        """Vd."""
        return len(self.d2t)

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.t2d)

    @property
    def targets(self) -> Ints:
        """Verifier id of each draft id, int64 [Vd], strictly increasing."""
        return np.arange(self.size) + self.d2t

    def coverage(self, counts: Ints) -> float:
        """The share of the tokens counted in `counts` [V] that the vocabulary holds; 0 of none."""
        return float(counts[self.t2d].sum() / max(counts.sum(), 1))

    def save(self, folder: Path) -> None:
        """Write d2t.npy, t2d.npy and vocab.json into `folder`; EyasError where that cannot be done."""
        about = {
            "verifier": self.verifier,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "size": self.size,
            "coverage": self.covered,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, array in (("d2t.npy", self.d2t), ("t2d.npy", self.t2d)):
                data = io.BytesIO()
                np.save(data, array, allow_pickle=False)
                write_whole(folder / name, data.getvalue())
            write_whole(folder / "vocab.json", json.dumps(about, indent=1).encode())
        except OSError as error:
            raise EyasError(f"cannot write the vocabulary to {folder}: {error.strerror or error}") from None


def choose(trained: Ints, size: int, others: Ints | None = None) -> DraftVocab:
    """The `size` tokens with the highest count in `trained` [V]; of equal ones the lower id.

    When fewer tokens than that were trained on, the rest is filled up with the most frequent of `others` [V] (the
    counts in prompts), then with the lowest ids. A size of V or more is the whole vocabulary.
    Raises EyasError for a size below 1.
    """
    if size < 1:
        raise EyasError(f"a draft vocabulary of {size} tokens: ask for one at least")
    v = len(trained)
    second = np.zeros_like(trained) if others is None else np.where(trained > 0, 0, others)
    order = np.lexsort((np.arange(v), -second, -trained))
    targets = np.sort(order[:size])
    t2d = np.zeros(v, bool)
    t2d[targets] = True
    return DraftVocab((targets - np.arange(len(targets))).astype(np.int64), t2d)


def count_tokens(source: Prepared | TokenSource, vocab_size: int) -> tuple[Ints, Ints]:
    """How often each token is trained on, and how often it is there otherwise: two int64 [V].

    Raises EyasError where a token lies outside the vocabulary.
    """
    trained, others = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for i, (ids, mask) in enumerate(_all_tokens(source)):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
            raise EyasError(
                f"sample {source.ids[i]} holds token {wrong}, the verifier knows {vocab_size:,}: "
                "was it made with another verifier?"
            )
        trained += np.bincount(ids[mask], minlength=vocab_size)
        others += np.bincount(ids[~mask], minlength=vocab_size)
    return trained, others


def _all_tokens(source: Prepared | TokenSource) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]:
    if isinstance(source, Prepared):
        yield from zip(source.input_ids, source.loss_mask, strict=True)
    else:
        yield from (source.tokens(i) for i in range(len(source.ids)))


def build(
    source: Prepared | TokenSource | Path,
    verifier: Verifier,
    size: int,
    output_dir: Path,
    say: Callable[[str], None] = print,
) -> DraftVocab:
    """Choose the vocabulary from `source` (prepared conversations or a store) and save it in `output_dir`.

    Raises EyasError when the source was made with another verifier, holds no trained token, or cannot be read.
    """
    check_unused(output_dir, "vocab.json")
    if isinstance(source, Path):
        from eyas.store.remote import staged

        source = _open(staged(source, say), verifier, say)
    if isinstance(source, Prepared) and source.manifest["verifier"]["fingerprint"] != verifier.fingerprint:
        raise EyasError(
            f"these conversations were prepared for {source.manifest['verifier']['name']}, not for "
            f"{verifier.config.name} at {verifier.path}: prepare them again"
        )
    trained, others = count_tokens(source, verifier.config.vocab_size)
    if not trained.any():
        raise EyasError("no trained tokens to choose a vocabulary from: check the loss masks with `eyas prepare`")
    chosen = choose(trained, size, others)
    share = chosen.coverage(trained)
    vocab = DraftVocab(chosen.d2t, chosen.t2d, verifier.config.name, verifier.fingerprint, share)
    vocab.save(output_dir)
    distinct = int((trained > 0).sum())
    say(
        f"draft vocabulary of {vocab.size:,} of {vocab.vocab_size:,} tokens covers {share:.2%} of "
        f"{int(trained.sum()):,} trained tokens ({distinct:,} distinct)"
    )
    if distinct < vocab.size < vocab.vocab_size:
        say(f"only {distinct:,} tokens were trained on: the other {vocab.size - distinct:,} fill it up")
    return vocab


def _open(path: Path, verifier: Verifier, say: Callable[[str], None]) -> Prepared | TokenSource:
    if (path / "prepare.json").exists():
        if (path / "manifest.json").exists():
            say(f"{path} holds prepared samples and states: the vocabulary is chosen from the prepared samples")
        return read_prepared(path)
    if path.is_file():
        raise EyasError(
            f"{path} is a file, and a folder that eyas prepare or eyas capture made is wanted: eyas prepare --data"
            f" {path} makes one of conversations"
        )
    from eyas.store.reader import open_source

    source: TokenSource = open_source(path, verifier.config, verifier.fingerprint, say)
    return source


def load(
    folder: Path,
    vocab_size: int | None = None,
    fingerprint: str | None = None,
    say: Callable[[str], None] = print,
) -> DraftVocab:
    """The vocabulary in `folder`: d2t and t2d, each as .npy or .pt, and vocab.json if it is there.

    vocab_size, fingerprint: the verifier's, to be checked where given.
    A d2t of absolute ids is told by t2d, converted, and said.
    Raises EyasError: a file is missing or unreadable, a shape is wrong, d2t is not increasing or leaves the
    vocabulary, d2t and t2d disagree, the vocabulary is another verifier's.
    """
    d2t, t2d = _read(folder, "d2t"), _read(folder, "t2d")
    if d2t.ndim != 1 or t2d.ndim != 1 or d2t.dtype.kind not in "iu" or not len(d2t):
        raise EyasError(
            f"{folder}: d2t must be whole numbers [Vd] and t2d booleans [V], "
            f"found {d2t.dtype} {list(d2t.shape)} and {t2d.dtype} {list(t2d.shape)}"
        )
    if t2d.dtype.kind not in "biu" or not np.isin(t2d, (0, 1)).all():
        raise EyasError(f"{folder}: t2d must be booleans [V], found {t2d.dtype} other than 0 and 1")
    d2t, t2d = d2t.astype(np.int64), t2d.astype(bool)
    if vocab_size is not None and len(t2d) != vocab_size:
        raise EyasError(f"{folder}: t2d is for {len(t2d):,} tokens, the verifier has {vocab_size:,}: make it again")
    marked = np.flatnonzero(t2d)
    targets = np.arange(len(d2t)) + d2t
    if not np.array_equal(targets, marked):
        if not np.array_equal(d2t, marked):
            raise EyasError(f"{folder}: {_what_is_wrong(d2t, targets, marked, len(t2d))}")
        say(f"{folder}: d2t holds absolute ids, as t2d confirms: read as such (offsets are the usual form)")
        d2t = d2t - np.arange(len(d2t))
    about = _about(folder / "vocab.json")
    if fingerprint and about.get("fingerprint") and about["fingerprint"] != fingerprint:
        raise EyasError(f"{folder} is the vocabulary of another verifier ({about.get('verifier')}): make it again")
    return DraftVocab(d2t, t2d, about.get("verifier", ""), about.get("fingerprint", ""), about.get("coverage"))


def _what_is_wrong(d2t: Ints, targets: Ints, marked: Ints, v: int) -> str:
    """In words, why d2t (whose offsets lead to `targets`) does not name the tokens `marked` by t2d."""
    if _names_tokens(targets, v):
        return f"d2t and t2d disagree (d2t names {len(targets):,} tokens, t2d marks {len(marked):,}): from two runs?"
    if _names_tokens(d2t, v):
        return "d2t seems to hold absolute ids, but t2d marks other tokens: from two runs?"
    outside = np.flatnonzero((targets < 0) | (targets >= v))
    if len(outside):
        i = int(outside[0])
        return f"d2t[{i}] = {d2t[i]} leads to token {targets[i]}, outside the vocabulary of {v:,}"
    i = int(np.flatnonzero(np.diff(targets) <= 0)[0])
    return f"d2t leads to tokens {targets[i]} and {targets[i + 1]} at {i} and {i + 1}: they must increase"


def _names_tokens(ids: Ints, v: int) -> bool:
    return bool((ids >= 0).all() and (ids < v).all() and (np.diff(ids) > 0).all())


def _read(folder: Path, name: str) -> npt.NDArray[Any]:
    """`name`.npy or `name`.pt as an array; nothing in either is executed."""
    npy, pt = folder / f"{name}.npy", folder / f"{name}.pt"
    try:
        if npy.exists():
            return np.asarray(np.load(npy, allow_pickle=False))
        if pt.exists():
            import torch

            found = torch.load(pt, map_location="cpu", weights_only=True)
            return np.asarray(found.numpy() if isinstance(found, torch.Tensor) else found)
    except Exception as error:  # torch.load raises RuntimeError, UnpicklingError, EOFError, ... for a broken file
        raise EyasError(f"{npy if npy.exists() else pt} cannot be read ({first_line(error)}): make it again") from None
    raise EyasError(f"no {name}.npy or {name}.pt in {folder}: make the vocabulary with `eyas vocab`")


def _about(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}  # other tools' vocabularies have none
    return found if isinstance(found, dict) else {}
