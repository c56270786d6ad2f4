"""Rules on the draft vocabulary: d2t (offsets: verifier id = j + d2t[j], ascending) and t2d (which tokens it holds).

A map that is off drafts other tokens than were meant. Nothing stops, nothing warns, and everything is rejected.
`targets` decides what the map must have meant, where the folder itself settles it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from eyas.check.likeness import favoured
from eyas.check.subject import NOTHING, Finding, Ints, Subject, titles
from eyas.drafter.folder import FLOATS

REMAKE = "export again with the map of the training run; a map cannot be guessed from the weights"


@lru_cache(maxsize=4)
def targets(s: Subject) -> Ints | None:
    """The verifier ids of the draft vocabulary that the folder itself settles, ascending; None where it does not.

    t2d settles it where its count fits; else d2t, as offsets or, where those cannot be, as absolute ids. Where two
    readings are left, the verifier's head decides if it is at hand.
    """
    marked = s.marked if s.marked is not None and len(s.marked) == s.Vd and s.names(s.marked) else None
    d2t = s.d2t if s.d2t is not None and len(s.d2t) == s.Vd else None
    if d2t is None:
        return marked
    rounded = s.folder.tensors["d2t"].dtype in FLOATS
    as_offsets, as_ids = np.arange(len(d2t)) + d2t, d2t
    for reading in (as_offsets, as_ids):
        if marked is not None and np.array_equal(reading, marked):
            return marked
    if marked is not None and rounded:
        return marked  # a rounded map says nothing against t2d
    if rounded and not _exact(s):
        return None
    readings = [r for r in (as_offsets, as_ids) if s.names(r)]
    if marked is not None:
        return favoured(s, [*readings, marked])
    if len(readings) == 2:
        return favoured(s, readings) if _like_ids(d2t) else as_offsets
    return readings[0] if readings else None


def _exact(s: Subject) -> bool:
    """Whether a map in floating numbers can have lost nothing: whole numbers below what its type counts by ones."""
    limit = {"F64": 2**53, "F32": 2**24, "F16": 2**11, "BF16": 2**8}[s.folder.tensors["d2t"].dtype]
    values = s.folder.floats("d2t")
    return bool((np.abs(values) < limit).all() and (values == np.rint(values)).all())


def _like_ids(d2t: Ints) -> bool:
    """Offsets repeat wherever neighbours are both in the vocabulary; ids never do. Sure from some tokens on."""
    return len(d2t) >= 16 and bool((np.diff(d2t) > 0).all())


def rules(s: Subject) -> Iterator[Finding]:
    """Everything that is wrong with the map."""
    has_map, small = "d2t" in s.folder.tensors, s.Vd is not None and s.V is not None and s.Vd < s.V
    if not has_map:
        if small:
            yield _no_map(s)
        return
    if s.d2t is None:
        stored = s.folder.tensors["d2t"]
        yield Finding(
            "map-unreadable",
            True,
            f"d2t is no list of whole numbers: {stored.dtype}, shape {list(stored.shape)}",
            f"engines stop, or {NOTHING}",
            "makes d2t of t2d" if small and targets(s) is not None else None,
            REMAKE,
        )
        return
    yield from _type(s)
    if not small:
        yield from _whole_vocabulary(s)
        return
    if len(s.d2t) != s.Vd:
        yield Finding(
            "map-length",
            True,
            f"d2t names {len(s.d2t):,} tokens, lm_head has {s.Vd:,} rows",
            "vLLM stops at loading; SGLang drafts wrong tokens or stops at the first draft",
            "makes d2t of t2d, which has as many" if targets(s) is not None else None,
            REMAKE,
        )
        return
    yield from _meaning(s)


def _no_map(s: Subject) -> Finding:
    return Finding(
        "map-missing",
        True,
        f"the draft vocabulary is {s.Vd:,} of {s.V:,} tokens, but there is no d2t",
        f"engines take draft id j for token j: {NOTHING}",
        "makes d2t of t2d" if targets(s) is not None else None,
        "take d2t from the training run; nobody can know which tokens the rows of the head are",
    )


def _type(s: Subject) -> Iterator[Finding]:
    dtype = s.folder.tensors["d2t"].dtype
    if dtype == "I64":
        return
    if dtype not in FLOATS:
        yield Finding(
            "map-dtype",
            False,
            f"d2t is of type {dtype}, not int64",
            "nothing: engines convert it",
            "writes it as int64",
        )
        return
    lossy = not _exact(s)
    sees = "SGLang stops: numbers of this type are no index; vLLM takes the rounded numbers"
    yield Finding(
        "map-dtype",
        True,
        f"d2t was cast to {dtype} with the weights" + (", which rounds its numbers" if lossy else ""),
        sees + (" and drafts wrong tokens where they are large: it accepts less, no warning" if lossy else ""),
        f"writes it as int64{', from t2d' if lossy else ''}" if targets(s) is not None or not lossy else None,
        "its numbers are rounded, and there is no t2d: take d2t from the training run",
    )


def _whole_vocabulary(s: Subject) -> Iterator[Finding]:
    assert s.d2t is not None
    same = len(s.d2t) == s.V and not s.d2t.any()
    as_ids = np.array_equal(s.d2t, np.arange(len(s.d2t)))
    stops = [x for x in s.loadings if not x.engine.map_of_all]
    sees = [f"{titles(stops)} stops at loading: it has no place for d2t then"] if stops else []
    if not same and len(stops) < len(s.loadings):
        sees.append(f"SGLang drafts other tokens than were meant: {NOTHING}")
    yield Finding(
        "map-of-all",
        not same or any(x.engine.current for x in stops),
        "the draft vocabulary is the whole one, and there is a d2t" + ("" if same else " that moves tokens"),
        "; ".join(sees) or "nothing: it maps every token to itself",
        "leaves d2t and t2d out" if same or as_ids else None,
        "find out which tokens the rows of lm_head are; a full vocabulary needs no map",
    )


def _meaning(s: Subject) -> Iterator[Finding]:
    d2t, settled = s.d2t, targets(s)
    assert d2t is not None and s.Vd is not None and s.V is not None
    rounded = s.folder.tensors["d2t"].dtype in FLOATS
    offsets = np.arange(len(d2t)) + d2t
    moved = settled is not None and not rounded and not np.array_equal(offsets, settled)
    absolute = settled is not None and moved and np.array_equal(d2t, settled)
    if absolute:
        yield _absolute(s, offsets, "writes offsets")
    elif settled is None and not rounded and s.marked is None and s.names(d2t) and _like_ids(d2t):
        yield _absolute(s, offsets, None)
    elif not s.names(offsets) and not (rounded and settled is not None):
        yield _no_tokens(s, offsets)
    if "t2d" not in s.folder.tensors or s.marked is None:
        yield Finding(
            "t2d-missing",
            False,
            "there is no t2d" if "t2d" not in s.folder.tensors else f"t2d is no list of yes and no for {s.V:,} tokens",
            "nothing in an engine; trainers that continue from it need t2d",
            "makes t2d of d2t" if settled is not None else None,
            "it can be made once d2t is right",
        )
    elif not np.array_equal(s.marked, offsets if settled is None else settled) or (moved and not absolute):
        yield _two_maps(s, offsets, settled is not None)
    elif s.shape("t2d", 0) != s.V:
        yield Finding(
            "t2d-length",
            False,
            f"t2d is for {s.shape('t2d', 0):,} tokens, vocab_size is {s.V:,}",
            "nothing in an engine; trainers that continue from it stop",
            "makes t2d of d2t",
        )


def _absolute(s: Subject, offsets: Ints, repair: str | None) -> Finding:
    sure = "" if repair else " by its look (no two are equal, as offsets of neighbours are)"
    return Finding(
        "map-absolute",
        True,
        f"d2t holds absolute token ids{sure}, engines add each to its own index",
        f"draft id {len(offsets) - 1} becomes token {offsets[-1]:,} of {s.V:,}: {NOTHING}, or an index out of range",
        repair,
        todo="name --verifier-path, whose head shows which reading is right",
    )


def _no_tokens(s: Subject, offsets: Ints) -> Finding:
    outside = np.flatnonzero((offsets < 0) | (offsets >= (s.V or 0)))
    if len(outside):
        i = int(outside[0])
        what = f"d2t[{i}] leads to token {offsets[i]:,}, outside the vocabulary of {s.V:,}"
    else:
        i = int(np.flatnonzero(np.diff(offsets) <= 0)[0])
        what = f"d2t leads to tokens {offsets[i]:,} and {offsets[i + 1]:,} at {i} and {i + 1}: they must ascend"
    return Finding(
        "map-range",
        True,
        what,
        f"an index out of range in the engine, or {NOTHING}",
        "makes d2t of t2d" if targets(s) is not None else None,
        REMAKE,
    )


def _two_maps(s: Subject, offsets: Ints, settled: bool) -> Finding:
    assert s.marked is not None
    common = len(np.intersect1d(offsets, s.marked))
    return Finding(
        "map-of-another",
        True,
        f"d2t and t2d are of two runs: they share {common:,} of {len(offsets):,} tokens",
        f"if d2t is not the one the head was trained with, engines draft wrong tokens: {NOTHING}",
        "keeps the one that the rows of lm_head agree with, and makes the other of it" if settled else None,
        "name --verifier-path, whose head shows which one the weights belong to; or take d2t from the training run",
    )
