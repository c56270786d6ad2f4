"""What eight bits cost: the verifier's distribution from states as a codec gives them back, against the true one.

Cost: two products with the verifier's whole head for each codec, over 1,024 positions; a second at V = 49,152.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.store import codecs
from eyas.store.reader import Source
from eyas.verifier import Verifier

SAMPLES, ROWS = 64, 16  # of each


def costs(source: Source, original: Source | None, verifier: Verifier, faulty: set[str]) -> list[codecs.Cost]:
    """Of every codec, tried on bfloat16 states; or, against the original, of what this store holds."""
    manifest = source.manifest
    good = [i for i, name in enumerate(source.ids) if name not in faulty]
    if original is None and manifest.codec != "bf16":
        return []
    spread = [good[int(k)] for k in np.linspace(0, len(good) - 1, min(2 * SAMPLES, len(good)))] if good else []
    looked, others = list(dict.fromkeys(spread[::2])), list(dict.fromkeys(spread[1::2])) or spread
    there = {name: j for j, name in enumerate(original.ids)} if original is not None else {}
    before, after = list[Tensor](), list[Tensor]()
    for i in looked:
        ids, mask = source.tokens(i)
        rows = torch.from_numpy(np.flatnonzero(mask[:-1] & mask[1:])[:ROWS])
        if not len(rows) or (original is not None and source.ids[i] not in there):
            continue
        own = source.states(i)[:, rows]
        if original is None:
            before.append(own)
        else:
            j = there[source.ids[i]]
            if not np.array_equal(original.tokens(j)[0], ids):
                raise EyasError(
                    f"sample {source.ids[i]} has other tokens in what it is compared with: name its original"
                )
            before.append(original.states(j)[:, rows])
            after.append(own)
    if not before:
        return []
    true = torch.cat(before, dim=1)  # [L, P, Ht]
    layers = len(manifest.layers)
    if original is not None:
        tried = {manifest.codec: torch.cat(after, dim=1)}
        sizes = {manifest.codec: sum(source.nbytes(i) for i in range(len(source.ids))) / int(source.lengths.sum())}
    else:
        channels = codecs.calibrate((source.states(i) for i in others), layers, manifest.hidden_size)
        tried, sizes = {"bf16": true}, {}
        for name in codecs.CODECS:
            sizes[name] = codecs.bytes_per_token(name, manifest.hidden_size, layers)
            if name != "bf16":
                by: list[Tensor | None] = list(channels) if name == "int8" else [None] * layers
                read_back = [codecs.decode(*codecs.encode(x, name, c), c) for x, c in zip(true, by, strict=True)]
                tried[name] = torch.stack(read_back)
    norm, head = verifier.final_norm(), verifier.lm_head(dtype=torch.bfloat16)

    def into_head(last: Tensor) -> Tensor:
        return norm(last.float()) if manifest.norm_side == "before" else last.float()

    found = []
    for name, states in tried.items():
        kl, same = codecs.compare(into_head(true[-1]), into_head(states[-1]), head)
        error = (states.float() - true.float()).norm(dim=2) / true.float().norm(dim=2).clamp(min=1e-20)
        found.append(codecs.Cost(name, kl, same, float(error.mean()), sizes[name]))
    return found
