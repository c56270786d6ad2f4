"""Are these states fit to be trained on? Every sample is read once and looked at; faults are named, and shut out.

    unreadable   a checksum that does not match, a file that ends early or is gone
    not finite   NaN or infinite values
    zero         a layer, or a row of one, that is all zero
    constant     a layer that is the same at every position; repeated: a row equal to the one before, of another token
    equal        two layers of a sample that are the same
    duplicate    states equal to those of a sample with other tokens
    shifted      rows that belong to the tokens beside theirs. Without a verifier: the first row depends on the first
                 token alone, so it must be that of the other samples that begin with the token. With one: its head
                 names the token after next (or the current one) more often than the next
    logits       kept logits that are no falling log-probabilities of tokens of the vocabulary
    agreement    with a verifier: a sample whose last states its head does not understand, where it does the others

Agreement looks at a spread of samples, because the head's product costs more than reading; all else looks at all.
With a verifier, bfloat16 states also show what each codec would cost (codecs.py).

Cost: reading at the disk's speed with checksums, and about 1 CPU s/GB of looking, spread over the threads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.files import write_json
from eyas.store import layout, logits
from eyas.store.agreement import PLAUSIBLE, top1
from eyas.store.costs import costs
from eyas.store.reader import Source, StoreSource, open_source
from eyas.store.remote import staged
from eyas.store.scan import Progress, scan
from eyas.store.whole import remarks
from eyas.verifier import FinalNorm, Verifier

SKETCH = 16  # random directions that stand for a row of states
ROW_DIFFERS = 0.25  # of its size; the same row out of other batches differs by a hundredth
AGREEMENT_SAMPLES = 256  # looked at through the head
AGREEMENT_ROWS = 64  # of each
EVERY = "*"  # stands for all samples in a finding
LEAVE_OUT = ", or leave such samples out: "  # how a reader's words about a sample go on (reads.py)
FEW = 16  # positions below which a sample's agreement says nothing


class Finding(NamedTuple):
    """A fault of one sample: which test found it, and what it saw."""

    sample: str
    test: str
    detail: str


@dataclass
class _Look:
    """What one sample showed. token: its first; sketch: [SKETCH] of row 0 of the first layer; digest: of the last."""

    findings: list[Finding]
    token: int = -1
    sketch: npt.NDArray[np.float32] | None = None
    digest: str = ""


def check(
    path: Path,
    verifier: Verifier | None = None,
    *,
    quarantine: bool = False,
    against: Path | None = None,
    threads: int = 4,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Look at every sample of a store or of another tool's files; returns the report (docs/store.md).

    quarantine: write `quarantine.json` beside the data, so that the faulty samples are left out from now on.
    against: what the store was converted from: tells what the conversion cost, which needs a verifier.
    `report["ok"]` says whether nothing was found. Raises EyasError when there is nothing to look at.
    """
    path, against = staged(path, say), None if against is None else staged(against, say)
    fingerprint = verifier.fingerprint if verifier is not None else None
    source = open_source(path, verifier.config if verifier is not None else None, fingerprint, say)
    started = time.monotonic()
    looks = _look_at_all(source, threads, say)
    findings = [f for look in looks for f in look.findings]
    findings += _first_rows(source, looks)
    copies, again = _copies(source, looks)
    findings += copies
    report: dict[str, Any] = {
        "path": str(path),
        "kind": "store" if isinstance(source, StoreSource) else source.manifest.extractor,
        "samples": len(source.ids),
        "tokens": int(source.lengths.sum()),
        "trained": int(source.trained.sum()),
        "bytes": sum(source.nbytes(i) for i in range(len(source.ids))),
        "checksums": "xxh3-64 of every part" if isinstance(source, StoreSource) else "these files have none",
        "seconds": round(time.monotonic() - started, 3),
        "same_tokens_twice": again,
    }
    if verifier is not None:
        faulty = {f.sample for f in findings}
        agreement, more = _agreement(source, verifier, faulty)
        report["agreement"] = agreement
        findings += more
        original = None if against is None else open_source(against, verifier.config, fingerprint, say)
        report["codecs"] = [c._asdict() for c in costs(source, original, verifier, {f.sample for f in findings})]
    elif against is not None:
        raise EyasError("--against compares through the verifier's head: name it (--verifier-path)")
    if quarantine:  # what the reader advises is being done
        findings = [f._replace(detail=f.detail.partition(LEAVE_OUT)[0]) for f in findings]
    report["remarks"] = remarks(source)
    report["skipped"] = [list(s) for s in source.skipped]
    report["findings"] = [f._asdict() for f in findings]
    report["ok"] = not findings and not source.skipped
    report["quarantine"] = _quarantine(path, findings) if quarantine and findings else None
    for line in lines(report):
        say(line)
    return report


def lines(report: dict[str, Any]) -> list[str]:
    """The report in words."""
    rate = report["bytes"] / max(report["seconds"], 1e-9) / 1e9
    out = [
        f"{report['samples']:,} samples · {report['tokens']:,} tokens,"
        f" {report['trained'] / max(report['tokens'], 1):.0%} trained · {report['bytes'] / 1e9:,.2f} GB read at"
        f" {rate:.2f} GB/s · checksums: {report['checksums']}"
    ]
    if "agreement" in report:
        a = report["agreement"]
        out.append(
            f"the verifier's head names the next trained token at {a['share']:.1%} of {a['positions']:,} positions"
            f" (states from {a['norm_side']} the norm; one row earlier {a['earlier']:.1%}, later {a['later']:.1%})"
        )
    out += [
        f"as {cost['codec']}: KL {cost['kl']:.2e} nats, {cost['top1']:.2%} of first choices kept, states off by"
        f" {cost['error']:.2%}, {cost['bytes_per_token']:,.0f} bytes a token"
        for cost in report.get("codecs", ())
    ]
    if report["same_tokens_twice"]:
        out.append(f"{report['same_tokens_twice']:,} samples have the tokens and states of another one")
    out += report["remarks"]
    out += [f"left out {name}: {reason}" for name, reason in report["skipped"][:10]]
    counts = Counter(f["test"] for f in report["findings"])
    for test, count in counts.most_common():
        shown = [f for f in report["findings"] if f["test"] == test][:5]
        out += [f"{test}: {f['sample']}: {f['detail']}" for f in shown]
        if count > len(shown):
            out.append(f"{test}: {count:,} samples in all")
    if report["quarantine"]:
        out.append(f"{report['quarantine']} names them: they are left out from now on")
    faulty, skipped = len({f["sample"] for f in report["findings"]}), len(report["skipped"])
    out.append("nothing wrong was found" if report["ok"] else f"{faulty:,} samples are faulty, {skipped:,} unusable")
    return out


def _quarantine(path: Path, findings: list[Finding]) -> str:
    """Add the findings to the folder's quarantine list; returns its path. Raises EyasError."""
    listed = layout.quarantined(path)
    for f in findings:
        if f.sample == EVERY:
            raise EyasError(f"{path}: {f.detail}: there is no sample to shut out")
        listed.setdefault(f.sample, f"{f.test}: {f.detail}")
    write_json(path / layout.QUARANTINE, listed)
    return str(path / layout.QUARANTINE)


# -- every sample ----------------------------------------------------------------------------------------------------


def _look_at_all(source: Source, threads: int, say: Callable[[str], None]) -> list[_Look]:
    directions = torch.randn(source.manifest.hidden_size, SKETCH, generator=torch.Generator().manual_seed(0))
    looks: list[_Look] = []
    progress = Progress("check", source, range(len(source.ids)), say)

    def work(i: int, layers: Sequence[Tensor]) -> _Look:
        return _look(source, i, layers, directions)

    for i, look in scan(source, range(len(source.ids)), work, threads):
        if isinstance(look, EyasError):
            look = _Look([Finding(source.ids[i], "unreadable", str(look))])
        looks.append(look)
        progress.add(i)
    return looks


def _look(source: Source, i: int, layers: Sequence[Tensor], directions: Tensor) -> _Look:
    name = source.ids[i]
    try:
        ids, mask = source.tokens(i)
    except EyasError as error:
        return _Look([Finding(name, "unreadable", str(error))])
    manifest = source.manifest
    kinds = faults(layers[: len(manifest.state_layers)], ids, manifest.state_layers, np.flatnonzero(mask))
    if manifest.logits:
        kinds += logits.faults(layers[-1], manifest.layers[-1], manifest.vocab_size)
    found = [Finding(name, *f) for f in kinds]
    sketch = (layers[0][0].float() @ directions).numpy()
    return _Look(found, int(ids[0]), sketch, layout.digest(_bits(layers[-1]).data))


def _bits(layer: Tensor) -> npt.NDArray[np.uint16]:
    """[T, Ht] bfloat16 as the numbers that its bits are."""
    return layer.contiguous().view(torch.int16).numpy().view(np.uint16)


def faults(
    layers: Sequence[Tensor],
    ids: npt.NDArray[np.int32],
    names: Sequence[int],
    kept: npt.NDArray[np.int64] | None = None,
) -> list[tuple[str, str]]:
    """(test, detail) of what is wrong with one sample by itself.

    layers: [T, Ht] bfloat16 each; ids: [T]; names: the layers'; kept: the rows that a layer of fewer rows has.
    """
    found: list[tuple[str, str]] = []
    before: npt.NDArray[np.uint16] | None = None
    largest_before = np.empty(0, np.uint16)
    every = ids
    for j, (k, layer) in enumerate(zip(names, layers, strict=True)):
        bits = _bits(layer)
        ids = every if kept is None or len(bits) == len(every) else every[kept]
        # Without its sign, a bfloat16 is the larger the larger its bits are; from 0x7F80 on it is infinite or NaN.
        largest = (bits & 0x7FFF).max(axis=1)
        bad, zero = np.flatnonzero(largest >= 0x7F80), np.flatnonzero(largest == 0)
        if len(bad):
            found.append(("not finite", f"layer {k} at {len(bad)} of {len(ids)} positions, the first at {bad[0]}"))
            continue
        if len(zero) == len(ids):
            found.append(("zero", f"layer {k} is all zero"))
        elif len(zero):
            found.append(("zero", f"layer {k} is zero at {len(zero)} positions, the first at {zero[0]}"))
        # Rows that are equal have equal largest values, which few others have: only those are compared.
        maybe = np.flatnonzero((largest[1:] == largest[:-1]) & (largest[1:] > 0) & (ids[1:] != ids[:-1])) + 1
        same = [t for t in maybe.tolist() if np.array_equal(bits[t], bits[t - 1])]
        if same and len(same) == int((ids[1:] != ids[:-1]).sum()):
            found.append(("constant", f"layer {k} is the same at every position"))
        elif same:
            found.append(("repeated", f"layer {k}: {len(same)} rows equal the one before, the first at {same[0]}"))
        may_be_equal = len(zero) < len(ids) and np.array_equal(largest, largest_before)
        if may_be_equal and before is not None and np.array_equal(bits, before):
            found.append(("equal", f"layers {names[j - 1]} and {k} are the same"))
        before, largest_before = bits, largest
    return found


# -- samples among each other ----------------------------------------------------------------------------------------


def _first_rows(source: Source, looks: list[_Look]) -> list[Finding]:
    """Samples whose row 0 is not that of the others that begin with the same token."""
    groups: dict[int, list[int]] = {}
    for i, look in enumerate(looks):
        if look.sketch is not None and np.isfinite(look.sketch).all():
            groups.setdefault(look.token, []).append(i)
    found = []
    for token, members in groups.items():
        if len(members) < 3:
            continue
        sketches = np.stack([s for s in (looks[i].sketch for i in members) if s is not None])
        usual = np.median(sketches, axis=0)
        far = np.linalg.norm(sketches - usual, axis=1) / max(float(np.linalg.norm(usual)), 1e-9)
        wrong = far > ROW_DIFFERS
        if wrong.mean() >= 0.5:  # no usual row: the first states depend on more than the token (a sliding cut, images)
            continue
        found += [
            Finding(source.ids[i], "shifted", f"its first row is not that of token {token} (off by {distance:.0%})")
            for i, distance, bad in zip(members, far, wrong, strict=True)
            if bad
        ]
    return found


def _copies(source: Source, looks: list[_Look]) -> tuple[list[Finding], int]:
    """Samples with the states of an earlier one: (those with other tokens, how many have the same tokens)."""
    first: dict[str, int] = {}
    found, again = [], 0
    for i, look in enumerate(looks):
        if not look.digest:
            continue
        j = first.setdefault(look.digest, i)
        if j != i:
            if np.array_equal(source.tokens(i)[0], source.tokens(j)[0]):
                again += 1
            else:
                found.append(
                    Finding(source.ids[i], "duplicate", f"has the states of {source.ids[j]}, but other tokens")
                )
    return found, again


# -- through the verifier's head -------------------------------------------------------------------------------------


def _agreement(source: Source, verifier: Verifier, faulty: set[str]) -> tuple[dict[str, Any], list[Finding]]:
    """How often the head names the next trained token, over all and for each looked-at sample."""
    spread = np.linspace(0, len(source.ids) - 1, min(AGREEMENT_SAMPLES, len(source.ids))).astype(int)
    chosen = [int(i) for i in dict.fromkeys(spread.tolist()) if source.ids[i] not in faulty]
    head, norm = verifier.lm_head(dtype=torch.bfloat16), verifier.final_norm()
    side = source.manifest.norm_side
    rights: dict[int, npt.NDArray[np.bool_]] = {}
    totals, positions = np.zeros(3), 0
    for i in chosen:
        right = _right(source, i, head, norm if side == "before" else None)
        if right is not None:
            rights[i] = right
            totals += right.sum(axis=1)
            positions += right.shape[1]
    earlier, share, later = (totals / max(positions, 1)).tolist()
    found: list[Finding] = []
    if positions >= FEW and max(share, earlier, later) < PLAUSIBLE:
        detail = f"the head names the next trained token at only {share:.1%}: states of another verifier, or damaged"
        return _figures(share, earlier, later, positions, side), [Finding(EVERY, "agreement", detail)]
    if positions and max(earlier, later) > 2 * share + 0.02:
        by = -1 if earlier > later else 1
        best = max(earlier, later)
        detail = f"the head names the token {1 + by} ahead at {best:.1%}, the next one at only {share:.1%}"
        return _figures(share, earlier, later, positions, side), [
            Finding(source.ids[i], "shifted", detail) for i in rights
        ]
    for i, right in rights.items():
        own = right.mean(axis=1)
        if right.shape[1] < FEW:
            continue
        if max(own[0], own[2]) > 2 * own[1] + 0.1:
            found.append(Finding(source.ids[i], "shifted", f"the head names the next token at only {own[1]:.0%}"))
        elif own[1] < 0.1 * share and share > 0.2:
            detail = (
                f"the head names the next token at {own[1]:.0%} of {right.shape[1]} positions, elsewhere at {share:.0%}"
            )
            found.append(Finding(source.ids[i], "agreement", detail))
    return _figures(share, earlier, later, positions, side), found


def _figures(share: float, earlier: float, later: float, positions: int, side: str) -> dict[str, Any]:
    figures = {"share": share, "earlier": earlier, "later": later}
    return {**{k: round(v, 5) for k, v in figures.items()}, "positions": positions, "norm_side": side}


def _right(source: Source, i: int, head: Tensor, norm: FinalNorm | None) -> npt.NDArray[np.bool_] | None:
    """[3, P]: whether the head, at positions whose next token is trained, names token p, p + 1, p + 2."""
    ids, mask = source.tokens(i)
    at = np.flatnonzero(mask[:-2] & mask[1:-1])[:AGREEMENT_ROWS]
    if not len(at):
        return None
    if source.manifest.logits:
        assert isinstance(source, StoreSource)
        rows = torch.from_numpy(np.cumsum(mask)[at] - 1)
        named = logits.first_choice(source.logits(i)[rows]).numpy()
    else:
        last = source.states(i, int(at[0]), int(at[-1]) + 1, layers=source.manifest.layers[-1:])[0]
        named = top1(last[torch.from_numpy(at - at[0])], head, norm).numpy()
    return np.stack([named == ids[at + k] for k in range(3)])
