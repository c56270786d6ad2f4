"""What is in a store, from its index alone: sizes, lengths, trained share. Nothing reads a state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eyas.store import layout
from eyas.store.foreign.source import FORMATS, ForeignSource
from eyas.store.reader import open_source
from eyas.store.remote import staged
from eyas.store.whole import remarks

BAR = 40  # characters of the longest bar


def info(path: Path, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Everything `eyas store info --json` prints. Raises EyasError when `path` holds no usable data."""
    path = staged(path, say)
    source = open_source(path)
    lengths, manifest = source.lengths, source.manifest
    tokens, trained = int(lengths.sum()), int(source.trained.sum())
    states = sum(source.nbytes(i) for i in range(len(source.ids)))
    foreign = source if isinstance(source, ForeignSource) else None
    files = foreign.files if foreign else [p for p in path.iterdir() if p.is_file()]
    edges = [0, *(1 << k for k in range(4, max(4, int(lengths.max()).bit_length()) + 1))]
    counts, _ = np.histogram(lengths, bins=edges)
    return {
        "path": str(path),
        "kind": manifest.extractor if foreign else "store",
        "files": len(files),
        "verifier": manifest.verifier,
        "hidden_size": manifest.hidden_size,
        "layers": list(manifest.layers),
        "layer_unit": manifest.layer_unit,
        "norm_side": manifest.norm_side,
        "dtype": ", ".join(foreign.dtypes) if foreign else manifest.dtype,
        "codec": None if foreign else manifest.codec,
        "last_rows": manifest.last_rows,
        "samples": len(source.ids),
        "tokens": tokens,
        "trained_tokens": trained,
        "trained_share": round(trained / tokens, 4),
        "never_trained": int((source.needs == 0).sum()),
        "state_bytes": states,
        "bytes_per_token": round(states / tokens, 1),
        "disk_bytes": sum(p.stat().st_size for p in files),
        "writers": [layout.writer_of(j) for j in layout.journals(path)],
        "shards": 0 if foreign else sum(p.name.startswith("shard-") for p in files),
        "open_shards": sum(p.name.endswith(layout.OPEN_SUFFIX) for p in files),
        "lengths": {
            "min": int(lengths.min()),
            **{f"p{q}": int(np.percentile(lengths, q)) for q in (50, 90, 99)},
            "max": int(lengths.max()),
            "mean": round(tokens / len(lengths), 1),
            "histogram": [[lo, hi, int(n)] for lo, hi, n in zip(edges[:-1], edges[1:], counts, strict=True) if n],
        },
        "wanted_samples": manifest.samples or None,
        "remarks": remarks(source),
        "skipped": [list(s) for s in source.skipped],
    }


def describe(told: dict[str, Any]) -> str:
    """`info` in words."""
    of, words = told["lengths"], _store_words if told["kind"] == "store" else _foreign_words
    lines = [
        *words(told),
        f"lengths: {of['min']:,} to {of['max']:,}, median {of['p50']:,}, mean {of['mean']:,}, 90 % up to {of['p90']:,}",
    ]
    most = max(n for _, _, n in of["histogram"])
    lines += [f"{lo:>9,} to {hi - 1:<9,} {n:>9,} {'#' * -(-n * BAR // most)}" for lo, hi, n in of["histogram"]]
    lines += told["remarks"]
    lines += [f"left out: {name} {why}" for name, why in told["skipped"][:5]]
    if len(told["skipped"]) > 5:
        lines.append(f"left out: {len(told['skipped']):,} samples in all")
    return "\n".join(lines)


def _store_words(told: dict[str, Any]) -> list[str]:
    k = layout.logits_of(told["last_rows"])
    last = f"of the last state, which is {told['norm_side']} the final norm, {told['last_rows']} rows"
    if k:
        last = f"in place of the last state the {k} likeliest tokens of each trained row"
    return [
        f"{told['path']}: {told['samples']:,} samples of {told['verifier']}, {told['tokens']:,} tokens, "
        f"{told['trained_share']:.1%} of them trained",
        f"{size(told['state_bytes'])} of states, {told['bytes_per_token']:,.0f} B a token: layers "
        f"{', '.join(map(str, told['layers']))} of width {told['hidden_size']} in {told['codec']}; {last}",
        f"{size(told['disk_bytes'])} on disk in {told['shards']:,} shards ({told['open_shards']} open) of "
        f"{len(told['writers'])} writers",
    ]


def _foreign_words(told: dict[str, Any]) -> list[str]:
    """Other tools' files say neither whose states they are nor, most of them, the side of the norm."""
    what = {kind.NAME: kind.WHAT for kind in FORMATS}[told["kind"]]
    side = f"{told['norm_side']} the final norm, as this tool writes it"
    if told["norm_side"] == "unknown":
        side = "before or after the final norm, which its verifier's head will tell"
    return [
        f"{told['path']}: {told['samples']:,} samples in {what}, {told['tokens']:,} tokens, "
        f"{told['trained_share']:.1%} of them trained",
        f"{size(told['state_bytes'])} of states, {told['bytes_per_token']:,.0f} B a token: four states of width "
        f"{told['hidden_size']} in {told['dtype']}; the last one is {side}",
        f"{size(told['disk_bytes'])} on disk in {told['files']:,} files",
    ]


def size(nbytes: float) -> str:
    """1.2 GB, 340.0 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:,.0f} B" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"
