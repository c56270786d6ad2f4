"""Rules that need the verifier: sizes, the embedding, and whether the rows of the head are the tokens they claim."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eyas.check.engines import EMBEDDING
from eyas.check.likeness import head_tokens, order_in, sample
from eyas.check.maps import targets
from eyas.check.settings import rope_settings
from eyas.check.subject import LITTLE, NOTHING, Finding, Ints, Subject, titles
from eyas.drafter.folder import FLOATS


def rules(s: Subject) -> Iterator[Finding]:
    """Everything that shows only beside the verifier."""
    if s.verifier is None:
        return
    about = s.verifier.config
    if s.V is not None and about.vocab_size != s.V:
        yield Finding(
            "vocab-size",
            True,
            f"a drafter for {s.V:,} tokens, {about.name} has {about.vocab_size:,}",
            f"engines stop, or {NOTHING}",
            None,
            "it is another verifier's drafter",
        )
        return
    if s.Ht is not None and s.Ht != about.hidden_size:
        yield Finding(
            "hidden-size",
            True,
            f"it reads states of {s.Ht:,} numbers, {about.name} has {about.hidden_size:,}",
            "engines stop at the first draft with a shape mismatch",
            None,
            "it is another verifier's drafter, or target_hidden_size is wrong",
        )
        return
    yield from positions(s)
    yield from embedding(s)
    yield from head(s)


def positions(s: Subject) -> Iterator[Finding]:
    """max_position_embeddings, which bounds RoPE's table in an engine."""
    assert s.verifier is not None
    own, verifier = s.whole("max_position_embeddings"), s.verifier.config.max_position_embeddings
    if own == verifier:
        return
    _, _, scaling = rope_settings(s.config)
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type")
    bound = kind in ("dynamic", "longrope")  # their frequencies depend on it
    short = own is not None and own < verifier
    sees = (
        f"beyond {own:,} tokens SGLang reads past RoPE's table (wrong drafts or a crash) and vLLM stops drafting"
        if short
        else "longer tables than anybody reads; some engines take it for the length they serve"
        if own
        else "engines take transformers' default, 2,048: beyond it drafts are wrong or a crash"
    )
    yield Finding(
        "max-positions",
        short or own is None,
        f"max_position_embeddings is {own if own is None else f'{own:,}'}, the verifier's is {verifier:,}",
        sees,
        None if bound else "sets it to the verifier's: RoPE itself does not depend on it",
        f"with {kind} RoPE the number is part of the function: keep what it was trained with",
    )


def embedding(s: Subject) -> Iterator[Finding]:
    """embed_tokens beside the verifier's."""
    assert s.verifier is not None
    stored = s.folder.tensors.get(EMBEDDING)
    about = s.verifier.config
    if about.hidden_size != s.H:
        if stored is None:
            yield Finding(
                "embedding-missing",
                True,
                f"no embed_tokens, and the verifier's has {about.hidden_size:,} columns for {s.H}",
                f"engines leave it random: {NOTHING}",
                None,
                "export with the embedding that it was trained with",
            )
        return
    if stored is None or stored.shape != (about.vocab_size, about.hidden_size) or stored.dtype not in FLOATS:
        return
    import torch

    rows = np.linspace(0, about.vocab_size - 1, 256).astype(np.int64)
    own, theirs = s.folder.floats(EMBEDDING, rows), s.verifier.embedding(rows=torch.from_numpy(rows)).numpy()
    off = float(np.linalg.norm(own - theirs) / max(float(np.linalg.norm(theirs)), 1e-30))
    if off <= 0.01:
        return
    replaced = [x for x in s.loadings if not x.engine.own_embedding]
    yield Finding(
        "embedding-differs",
        bool([x for x in replaced if x.engine.current]),
        f"embed_tokens is not the verifier's (rows differ by {off:.0%})",
        f"{titles(replaced)} puts the verifier's in its place: {LITTLE}"
        if replaced
        else "nothing, if it was trained with it: the engine uses it",
        None,
        "if it was trained with the verifier's, leave embed_tokens out; if with its own, only vLLM serves it",
    )


def head(s: Subject) -> Iterator[Finding]:
    """Rows of lm_head beside the verifier's rows of the tokens that the map gives them."""
    stored = s.folder.tensors.get("lm_head.weight")
    assert s.verifier is not None
    if stored is None or stored.dtype not in FLOATS or stored.shape != (s.Vd, s.verifier.config.hidden_size):
        return
    rows, seen = sample(s)
    if seen.clear.mean() < 0.5:
        return
    meant = mapped(s)
    if meant is None:
        return
    agree = float((meant[rows] == seen.token)[seen.clear].mean())
    if agree >= 0.9:
        return
    shown = rows_of_head(s, meant)
    repair: str | None
    if shown is not None and np.array_equal(np.sort(shown), meant):
        what = f"the rows of lm_head are in another order than the map says ({1 - agree:.0%} of them are other tokens)"
        repair = "puts the rows in the order of their tokens, as the verifier's head shows it"
    elif shown is not None:
        what = "the rows of lm_head are other tokens than the map says: it is of another data set"
        repair = "makes d2t and t2d of the tokens that the rows are most like in the verifier's head"
    else:
        what = f"{1 - agree:.0%} of the rows of lm_head are most like other tokens of the verifier than the map says"
        repair = None
    yield Finding(
        "head-rows",
        True,
        what,
        f"engines draft other tokens than the head means: {NOTHING}",
        repair,
        "not every row is clear enough (or there are too many): take map and head from one training run",
    )


def rows_of_head(s: Subject, meant: Ints) -> Ints | None:
    """The verifier id of each row of the head: a permutation of the map's, or else tokens of the whole vocabulary."""
    order = order_in(s, tuple(meant.tolist()))
    return head_tokens(s) if order is None else order


def mapped(s: Subject) -> Ints | None:
    """The verifier id of each row of the head by the map that engines would read, repaired where that needs no head."""
    if s.Vd == s.V:
        return np.arange(s.Vd or 0)
    settled = targets(s)
    if settled is not None:
        return settled
    if s.d2t is None or len(s.d2t) != s.Vd:
        return None
    offsets = np.arange(len(s.d2t)) + s.d2t
    return offsets if s.names(offsets) else None
