"""What every way of capturing shares: what is to be done, whose states they are, where they go, and that they are sane.

The verifier runs here (`local.py`) or in an engine (`vllm.py`); the store, its manifest and the refusals are the same.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from eyas import __version__
from eyas.errors import EyasError
from eyas.files import check_unused, same_place, size_text
from eyas.prepare import Prepared
from eyas.record.record import Record
from eyas.store import layout
from eyas.store.index import Index, load_index
from eyas.store.layout import Manifest
from eyas.store.reader import torn_files
from eyas.verifier import Verifier

SAY_SECONDS = 2.0
NEAR_TIE = 0.01  # of the spread of a row's logits: bfloat16 storage may swap tokens that are this close


def capture_layers(verifier: Verifier, asked: tuple[int, int, int] | None) -> tuple[int, ...]:
    """HF indices of the four states, the last one included. Raises EyasError for layers that the verifier lacks."""
    n = verifier.config.num_layers
    if n < 4:
        raise EyasError(
            f"{verifier.config.name} has {n} layers: a drafter reads three states below the last one, so eyas needs a"
            " verifier with 4 layers or more"
        )
    layers = (*(asked or verifier.config.capture_layers()), n)
    if len(layers) != 4 or not all(0 < a < b for a, b in pairwise(layers)):
        raise EyasError(
            f"layers {list(layers[:-1])} of a verifier with {n} layers: name three different ones, ascending, from 1"
            f" to {n - 1} (--layers 1,2,3)"
        )
    return layers


def manifest_of(
    verifier: Verifier, prepared: Prepared, layers: tuple[int, ...], extractor: str, settings: str = ""
) -> Manifest:
    """The manifest of a store of these samples.

    extractor: engine, version and dtype; settings: of answers that the capture writes itself, part of the source.
    """
    config = verifier.config
    digest = xxhash.xxh3_64()
    for name, ids, mask in zip(prepared.ids, prepared.input_ids, prepared.loss_mask, strict=True):
        digest.update(name.encode() + b"\0")
        digest.update(np.asarray(ids, dtype=np.int32).tobytes())
        digest.update(np.asarray(mask, dtype=np.bool_).tobytes())
    digest.update(settings.encode())
    folder = verifier.config.path
    return Manifest(
        verifier=config.name,
        fingerprint=verifier.fingerprint,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        layers=layers,
        norm_side="before",
        template_hash=str(prepared.manifest.get("template_hash", "")),
        extractor=f"eyas {__version__}, {extractor}",
        revision=folder.name if folder.parent.name == "snapshots" else "",
        source=digest.hexdigest(),
        samples=len(prepared.ids),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def check_prepared(prepared: Prepared, folder: Path, verifier: Verifier) -> None:
    """EyasError for samples that are none, not of this verifier, or not told apart."""
    if not prepared.ids:
        raise EyasError(f"{folder} holds no samples: run eyas prepare again")
    if len(set(prepared.ids)) != len(prepared.ids):
        raise EyasError(f"{folder} holds two samples of one id: give every conversation its own")
    whose = prepared.manifest.get("verifier", {})
    if whose.get("fingerprint") not in (None, "", verifier.fingerprint):
        other = whose.get("name") if whose.get("name") != verifier.config.name else f"another {verifier.config.name}"
        raise EyasError(
            f"{folder} was prepared for {other}, not for {verifier.config.name} at {verifier.path} (other weights):"
            " run eyas prepare again"
        )
    for name, ids in zip(prepared.ids, prepared.input_ids, strict=True):
        if len(ids) == 0 or int(np.min(ids)) < 0 or int(np.max(ids)) >= verifier.config.vocab_size:
            raise EyasError(
                f"{folder}: sample {name} has no tokens, or ids outside the {verifier.config.vocab_size:,} of"
                f" {verifier.config.name}: run eyas prepare again"
            )


def done_ids(output: Path, manifest: Manifest) -> set[str]:
    """Ids that the store holds already, before anything is loaded or written.

    Raises EyasError for another store, and for one whose journal names what its files do not hold.
    """
    if not (output / layout.MANIFEST).exists():
        return set()
    if differences := Manifest.load(output).differences(manifest):
        raise EyasError(
            f"{output} holds states of another capture ({'; '.join(differences)}): name another folder, or delete it"
        )
    index, torn = _recorded(output, manifest)
    if torn:
        i, why = min(torn.items())
        raise EyasError(
            f"{output} is damaged: {why}, though its journal names it for {len(torn):,} of {len(index.ids):,} samples"
            f" ({index.ids[i]}, ...): restore the file, or delete the store and capture again"
        )
    return set(index.ids)


def arrived(output: Path, manifest: Manifest) -> set[str]:
    """Ids of the samples that the store holds by now; a file that is behind its journal (on NFS) is not there yet."""
    index, torn = _recorded(output, manifest)
    return set(index.ids) - {index.ids[i] for i in torn}


def _recorded(output: Path, manifest: Manifest) -> tuple[Index, dict[int, str]]:
    """What the journals say is there, and which of it the files do not hold, and why."""
    index = load_index(output, layout.parts_count(manifest), layout.STORED_AS[manifest.codec])
    return index, torn_files(output, index)


def check_output(output: Path, prepared_dir: Path) -> None:
    """EyasError where the store cannot be made, before anything costly: among others' files, or no right to."""
    if same_place(output, prepared_dir):
        raise EyasError(f"{output} holds prepared samples: name another folder for the store")
    check_unused(output, layout.MANIFEST)
    there = next(p for p in (output, *output.absolute().parents) if p.exists())
    if not there.is_dir():
        raise EyasError(f"{output} cannot be written: Not a directory: {there}; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        why = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
        raise EyasError(f"{output} cannot be written: {os.strerror(why)}: {there}; name another folder")


def check_space(output: Path, lengths: list[int], manifest: Manifest, say: Callable[[str], None]) -> None:
    """Say what samples of these lengths take on the disk; EyasError where it has no room."""
    needed = sum(layout.sample_bytes(t, manifest) for t in lengths)
    needed += (1 << 20) * (needed // (1 << 30) + 1) if needed else 0  # the shards' headers
    there = next(p for p in (output, *output.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if lengths:
        say(f"capture: {sum(lengths):,} tokens take {size_text(needed)} of the {size_text(free)} free in {there}")
    if needed > free:
        raise EyasError(
            f"{output}: the states of {sum(lengths):,} tokens need {size_text(needed)}, and {size_text(free)} are"
            " free there: make room, name another folder, or prepare less"
        )


def near_ties(logits: Tensor, named: Tensor) -> Tensor:
    """[P] bool: whether the tokens `named` [P] are the first choice of logits [P, V], or as good as it."""
    best = logits.max(dim=1).values
    behind = best - logits.gather(1, named[:, None])[:, 0]
    return behind <= NEAR_TIE * (best - logits.mean(dim=1))


def check_finite(name: str, states: Tensor, layers: tuple[int, ...]) -> None:
    """EyasError where a state [layers, T, Ht] is NaN or infinite."""
    if not torch.isfinite(states).all():
        bad = next(k for k, s in zip(layers, states, strict=True) if not torch.isfinite(s).all())
        raise EyasError(
            f"capture stopped: sample {name} has NaN or infinite states at layer {bad}: the verifier overflows in this"
            " dtype (try --dtype fp32), or its weights are damaged"
        )


def check_shape_of(name: str, ids: npt.NDArray[np.int32], states: Tensor, layers: tuple[int, ...]) -> None:
    """No layer [T, Ht] may be all zero, the same at every position, or the same as the layer before."""
    varied = len(set(np.asarray(ids).tolist())) > 1
    for j, k in enumerate(layers):
        if not states[j].any():
            fault = f"layer {k} is all zero"
        elif varied and bool((states[j] == states[j, :1]).all()):
            fault = f"layer {k} is the same at every position"
        elif j and torch.equal(states[j], states[j - 1]):
            fault = f"layers {layers[j - 1]} and {k} are equal"
        else:
            continue
        raise EyasError(f"capture stopped: in sample {name}, {fault}: the verifier's weights may be damaged")


class Progress:
    """Says where the capture stands, at most every SAY_SECONDS.

    lengths: tokens of every sample, None where the answers are still to be written; todo: which are not in the store.
    """

    def __init__(self, say: Callable[[str], None], samples: int, lengths: list[int] | None, todo: list[int]) -> None:
        self.say = say
        self.all_samples, self.samples = samples, samples - len(todo)
        self.all_tokens = sum(lengths) if lengths is not None else None
        self.tokens = sum(lengths) - sum(lengths[i] for i in todo) if lengths is not None else 0
        self.new_samples = self.new_tokens = 0
        self.started = self.said = time.monotonic()

    @property
    def share(self) -> float:
        """Of all that is to be captured, how much is there (0..1)."""
        return self.samples / self.all_samples if self.all_tokens is None else self.tokens / self.all_tokens

    def start(self) -> None:
        """Say the first line; the clock runs from here."""
        self.started = self.said = time.monotonic()
        self.say(self._line())

    def add(self, samples: int, tokens: int, record: Record) -> None:
        """So many more are written: the record is told, and a line says it when it is time."""
        self.samples, self.tokens = self.samples + samples, self.tokens + tokens
        self.new_samples, self.new_tokens = self.new_samples + samples, self.new_tokens + tokens
        record.count(self.samples, self.tokens, self.share)
        if time.monotonic() - self.said >= SAY_SECONDS or self.samples == self.all_samples:
            self.said = time.monotonic()
            self.say(self._line(record.left))

    def _line(self, left: float | None = None) -> str:
        line = f"capture {self.samples:,}/{self.all_samples:,} samples · {self.tokens:,}"
        line += " tokens" if self.all_tokens is None else f"/{self.all_tokens:,} tokens"
        if self.new_tokens:
            line += f" · {self.new_tokens / (time.monotonic() - self.started):,.0f} tokens/s"
        return line + (f" · {left:,.0f} s left" if left is not None else "")

    def figures(self) -> dict[str, Any]:
        """What this run did and how fast."""
        seconds = time.monotonic() - self.started if self.new_tokens else 0.0
        return {
            "captured_samples": self.new_samples,
            "captured_tokens": self.new_tokens,
            "seconds": seconds,
            "tokens_per_second": self.new_tokens / seconds if seconds else 0.0,
        }
