"""What eight bits, or a few logits, cost: the verifier's distribution from what is read back, against the true one.

Cost: two products with the verifier's whole head for each codec, over 1,024 positions; a second at V = 49,152.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.store import codecs
from eyas.store.layout import Manifest
from eyas.store.logits import Complete, TopK
from eyas.store.reader import Source, StoreSource
from eyas.verifier import Verifier

SAMPLES, ROWS = 64, 16  # of each
KEPT = (64, 128)  # logits that are tried in place of the last state


def costs(source: Source, original: Source | None, verifier: Verifier, faulty: set[str]) -> list[codecs.Cost]:
    """Of every codec, tried on bfloat16 states; or, against the original, of what this store holds."""
    manifest = source.manifest
    good = [i for i, name in enumerate(source.ids) if name not in faulty]
    if original is None and (manifest.codec != "bf16" or manifest.logits):
        return []
    if original is not None and original.manifest.logits:
        raise EyasError("what it is compared with keeps logits and no last states: name what that was made from")
    spread = [good[int(k)] for k in np.linspace(0, len(good) - 1, min(2 * SAMPLES, len(good)))] if good else []
    looked, others = list(dict.fromkeys(spread[::2])), list(dict.fromkeys(spread[1::2])) or spread
    there = {name: j for j, name in enumerate(original.ids)} if original is not None else {}
    before, after, kept = list[Tensor](), list[Tensor](), list[Tensor]()
    for i in looked:
        ids, mask = source.tokens(i)
        rows = torch.from_numpy(np.flatnonzero(mask[:-1] & mask[1:])[:ROWS])
        if not len(rows) or (original is not None and source.ids[i] not in there):
            continue
        own = source.states(i)[:, rows]
        if original is None:
            before.append(own)
            continue
        j = there[source.ids[i]]
        if not np.array_equal(original.tokens(j)[0], ids):
            raise EyasError(f"sample {source.ids[i]} has other tokens in what it is compared with: name its original")
        before.append(original.states(j)[:, rows])
        after.append(own)
        if isinstance(source, StoreSource) and manifest.logits:
            kept.append(source.logits(i)[torch.from_numpy(np.cumsum(mask) - 1)[rows]])
    if not before:
        return []
    true = torch.cat(before, dim=1)  # [L, P, Ht]
    look = _Look(manifest, verifier, true)
    if original is not None:
        size = sum(source.nbytes(i) for i in range(len(source.ids))) / int(source.lengths.sum())
        states = torch.cat(after, dim=1)
        if kept:
            return [look.at_logits(f"{manifest.codec}, {manifest.last_rows}", torch.cat(kept), states, size)]
        return [look.at_states(manifest.codec, states, size)]
    H, layers = manifest.hidden_size, len(manifest.layers)
    found = [look.at_states("bf16", true, codecs.bytes_per_token("bf16", H, layers))]
    channels = codecs.calibrate((source.states(i) for i in others), layers, H)
    for name in codecs.CODECS[1:]:
        by: list[Tensor | None] = list(channels) if name == "int8" else [None] * layers
        read_back = [codecs.decode(*codecs.encode(x, name, c), c) for x, c in zip(true, by, strict=True)]
        found.append(look.at_states(name, torch.stack(read_back), codecs.bytes_per_token(name, H, layers)))
    share = float(source.trained.sum() / source.lengths.sum())
    for k in KEPT:
        if k < verifier.config.vocab_size:
            name = f"logits:{k}"
            size = codecs.bytes_per_token("bf16", H, layers, name, share)
            found.append(look.at_logits(f"bf16, {name}", look.top(k).rows(true[-1]), true[:-1], size))
    return found


class _Look:
    """The true states [L, P, Ht] and the head they go into."""

    def __init__(self, manifest: Manifest, verifier: Verifier, true: Tensor) -> None:
        self.true = true
        self.norm = verifier.final_norm() if manifest.norm_side == "before" else None
        self.head = verifier.lm_head(dtype=torch.bfloat16)
        self.goal = self._into_head(true[-1])

    def _into_head(self, last: Tensor) -> Tensor:
        return last.float() if self.norm is None else self.norm(last.float())

    def top(self, k: int) -> TopK:
        return TopK(k, self.head.float(), self.norm)

    def at_states(self, name: str, states: Tensor, size: float) -> codecs.Cost:
        """Of states [L, P, Ht] in place of the true ones."""
        kl, same = codecs.compare(self.goal, self._into_head(states[-1]), self.head)
        return codecs.Cost(name, kl, same, self._error(states), size)

    def at_logits(self, name: str, words: Tensor, states: Tensor, size: float) -> codecs.Cost:
        """Of kept logits [P, 3 k] in place of the true last state, and states [L - 1, P, Ht] of the others."""
        V = len(self.head)
        kl, same = codecs.compare(self.goal, words, self.head, read=Complete(torch.arange(V), V))
        return codecs.Cost(name, kl, same, self._error(states), size)

    def _error(self, states: Tensor) -> float:
        true = self.true[: len(states)].float()
        return float(((states.float() - true).norm(dim=2) / true.norm(dim=2).clamp(min=1e-20)).mean())
