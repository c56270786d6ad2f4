"""A store made of any source: other tools' files, or a store in another codec.

Samples are read ahead by a few threads (scan.py) and appended by one writer in the source's order, so a conversion
that was stopped goes on and ends in the same bytes. Reading verifies what has checksums; a sample that cannot be read
is left out, named and counted, and nothing stands in its place.

Cost: what reading and writing cost (`StoreWriter`); memory is `threads` + 1 groups of 64 MB.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from eyas import __version__
from eyas.device import pick_device
from eyas.errors import EyasError
from eyas.files import check_unused, same_place, size_text
from eyas.store import codecs, layout
from eyas.store.layout import Manifest
from eyas.store.logits import TopK, make_top_k
from eyas.store.reader import Source, StoreSource, open_source
from eyas.store.remote import staged
from eyas.store.scan import Progress, scan
from eyas.store.whole import left_out
from eyas.store.writer import Stored, StoreWriter
from eyas.verifier import Verifier


def convert(
    source_path: Path,
    output: Path,
    verifier: Verifier | None = None,
    *,
    codec: str = "bf16",
    last: str = "all",
    threads: int = 4,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write every usable sample of `source_path` to the store `output`; goes on where an earlier run stopped.

    verifier: whose states they are; needed for other tools' files, which do not say.
    codec, last: of the new store (codecs.py). Of int8, the channels' sizes come from the source's first samples.
    device: where the verifier's head makes logits (`--last logits:k`, which needs the verifier).
    Returns {path, source, samples, converted, tokens, bytes, seconds, skipped: [[sample, why], ...]}.
    Raises EyasError when the source is not of this verifier, the output holds something else, or the disk is too small.
    """
    codecs.check_names(codec, last)
    source_path = staged(source_path, say)
    if same_place(output, source_path):
        raise EyasError(f"{output} is the source: name another folder for the store")
    check_unused(output, layout.MANIFEST)
    fingerprint = verifier.fingerprint if verifier is not None else None
    source = open_source(source_path, verifier.config if verifier is not None else None, fingerprint, say)
    manifest = _in_codec(_manifest(source, source_path, verifier), source, output, codec, last)
    keep = None
    if manifest.logits and not source.manifest.logits:
        if verifier is None:
            raise EyasError(f"--last {last} takes the verifier's head: name the verifier (--verifier-path)")
        keep = make_top_k(manifest.logits, verifier, manifest.norm_side, pick_device(device))
    started = time.monotonic()
    with StoreWriter(output, manifest) as writer:
        manifest.recount(output)  # the source may be without samples in quarantine since
        todo = [i for i in range(len(source.ids)) if source.ids[i] not in writer.done_ids]
        _check_space(output, [int(source.lengths[i]) for i in todo], manifest)
        if len(todo) < len(source.ids):
            say(f"convert: {len(source.ids) - len(todo):,} samples are in {output} already")
        lost = _copy(source, todo, writer, keep, threads, say)
    skipped = [*source.skipped, *lost]
    for name, reason in skipped[:5]:
        say(f"left out {name}: {reason}")
    converted = len(todo) - len(lost)
    tokens = int(source.lengths.sum())
    size = sum(p.stat().st_size for p in output.iterdir())
    say(
        f"converted {converted:,} samples; {output} holds {len(source.ids) - len(lost):,} of"
        f" {len(source.ids) + len(source.skipped):,} ({size / 1e9:,.2f} GB, {len(skipped):,} left out)"
    )
    return {
        "path": str(output),
        "source": str(source_path),
        "samples": len(source.ids) - len(lost),
        "converted": converted,
        "tokens": tokens,
        "bytes": size,
        "seconds": round(time.monotonic() - started, 3),
        "skipped": [list(s) for s in skipped],
    }


def _manifest(source: Source, path: Path, verifier: Verifier | None) -> Manifest:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    if isinstance(source, StoreSource):
        wanted = source.manifest.samples  # what the source leaves out does not make this one unfinished
        return replace(source.manifest, samples=max(0, wanted - len(left_out(source))), created=created)
    if verifier is None:
        raise EyasError(f"{path} does not say whose states it holds: name the verifier (--verifier-path)")
    found = source.manifest
    if found.norm_side == "unknown":
        raise EyasError(
            f"{path}: the side of the final norm cannot be found, because no sample has a token that is trained on"
        )
    digest = xxhash.xxh3_64()
    for i, name in enumerate(source.ids):
        ids, mask = source.tokens(i)
        digest.update(name.encode() + b"\0")
        digest.update(ids.tobytes())
        digest.update(mask.tobytes())
    return replace(
        found,
        fingerprint=verifier.fingerprint,
        extractor=f"{found.extractor}, converted by eyas {__version__}",
        source=digest.hexdigest(),
        samples=len(source.ids),
        created=created,
    )


def _in_codec(manifest: Manifest, source: Source, output: Path, codec: str, last: str) -> Manifest:
    """The manifest of the new store. Raises EyasError for a codec that the source cannot give."""
    if manifest.logits and last != manifest.last_rows:
        raise EyasError(f"the source keeps logits and no last states: --last {manifest.last_rows}, or its original")
    if manifest.last_rows == "trained" and last == "all":
        raise EyasError(
            f"{source.manifest.verifier}'s last states of untrained tokens are not in the source: --last trained"
        )
    if manifest.codec not in ("bf16", codec):
        raise EyasError(f"the source is in {manifest.codec} already: convert what it was made from")
    changed = replace(manifest, codec=codec, last_rows=last)
    if codec != "int8" or changed.channels:
        return changed
    if (output / layout.MANIFEST).exists():  # go on with the sizes that were found when it was begun
        begun = Manifest.load(output)
        if begun.codec != codec:
            raise EyasError(f"{output} is a store in {begun.codec}, not in {codec}: name another folder")
        return replace(changed, channels=begun.channels)
    layers = changed.state_layers
    sizes = codecs.calibrate(_readable(source, layers), len(layers), manifest.hidden_size)
    return replace(changed, channels=codecs.said_channels(sizes))


def _readable(source: Source, layers: Sequence[int]) -> Iterator[Tensor]:
    """The states of the samples that can be read; the others are named when they are to be copied."""
    for i in range(len(source.ids)):
        with contextlib.suppress(EyasError):
            yield source.states(i, layers=layers)


def _copy(
    source: Source, todo: list[int], writer: StoreWriter, keep: TopK | None, threads: int, say: Callable[[str], None]
) -> list[tuple[str, str]]:
    """Append the samples `todo`; returns (sample, why) of those that could not be read."""
    lost: list[tuple[str, str]] = []
    progress = Progress("convert", source, todo, say)

    def encode(i: int, layers: Sequence[Tensor]) -> Stored | EyasError:
        try:
            mask = source.tokens(i)[1]
            return writer.encode(mask, layers if keep is None else keep.instead(layers, mask))
        except EyasError as error:
            return error

    for i, stored in scan(source, todo, encode, threads):
        if isinstance(stored, EyasError):
            lost.append((source.ids[i], str(stored)))
        else:
            writer.add(source.ids[i], *source.tokens(i), stored)
        progress.add(i)
    return lost


def _check_space(output: Path, lengths: list[int], manifest: Manifest) -> None:
    needed = sum(layout.sample_bytes(t, manifest) for t in lengths)
    free = shutil.disk_usage(output).free
    if needed > free:
        raise EyasError(
            f"{output}: {sum(lengths):,} tokens need {size_text(needed)}, and {size_text(free)} are free there:"
            " make room or name another folder"
        )
