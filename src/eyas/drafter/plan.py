"""Which positions a TTT batch computes, and from what: the alignment of the whole project, in one place.

For a document with token ids x and loss mask l, step k at position p takes the token x[p+1+k], is compared with the
verifier's distribution y[p+1+k] (which predicts x[p+2+k]) and is trained where l[p+1+k] and l[p+2+k]. So the first
trained position of step 0 is the one serving drafts first from: the last token of the prompt.

With one layer, the output at p is read only by p's own later steps and p's own loss. So only positions that some step
trains on get queries, outputs and later steps; the positions before them give step-0 keys and values; what lies
behind the last trained position of a document is not touched at all. Exact, and it saves the prompts' share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.attention import Document


@dataclass
class Plan:
    """Index tensors of one pack. N packed rows; T key rows; Q query rows; M_k trained rows, M = sum M_k; R target rows.

    key_row: [T] packed row of each position that needs a step-0 key and value (reads g there)
    key_position: [T] RoPE position p
    query_row: [Q] key row of each position that is computed
    token: [E] the different tokens that go in anywhere: x[p+1] of the T key rows, then what later steps see behind them
    token_row: [K, Q] which of those goes in at step k. The token that p sees at step k is the one p+1 sees at step k-1.
    documents: rows of each document among keys and queries
    trained: K tensors [M_k], query rows trained at step k
    target: K tensors [M_k], which of the target rows each is compared with
    loss_row, loss_step, loss_target: [M] the same for all steps together, ordered by target: row of the K Q outputs,
        step, and target row
    target_row: [R] packed rows whose verifier distribution is needed, once for all steps (reads the last state there)
    next_token: [R] token id x[i+1] that follows target row i
    """

    key_row: Tensor
    key_position: Tensor
    query_row: Tensor
    token: Tensor
    token_row: Tensor
    documents: list[Document]
    trained: list[Tensor]
    target: list[Tensor]
    loss_row: Tensor
    loss_step: Tensor
    loss_target: Tensor
    target_row: Tensor
    next_token: Tensor

    def to(self, device: torch.device | str) -> Plan:
        """The same plan with its tensors on `device`."""
        moved: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=True)
            elif value and isinstance(value[0], Tensor):
                moved[name] = [t.to(device, non_blocking=True) for t in value]
        return replace(self, **moved)

    @property
    def steps(self) -> int:
        """Number of TTT steps K."""
        return len(self.trained)

    @property
    def key_token(self) -> Tensor:
        """[T] token id x[p+1] that goes in at step 0."""
        return self.token[: len(self.key_row)]

    @property
    def tokens(self) -> Tensor:
        """[K, Q] token ids x[p+1+k]."""
        return self.token[self.token_row]


def trained_mask(loss_mask: np.ndarray, step: int) -> np.ndarray:
    """m_k: where TTT step `step` is trained. loss_mask: bool [T] of one document. Returns bool [T]."""
    T = len(loss_mask)
    mask = np.zeros(T, dtype=bool)
    stop = T - 2 - step
    if stop > 0:
        mask[:stop] = loss_mask[1 + step : T - 1] & loss_mask[2 + step :]
    return mask


def count_trained(loss_mask: np.ndarray) -> int:
    """Positions trained at step 0 in one document; 0 means that there is nothing to learn from it."""
    return int(trained_mask(loss_mask, 0).sum())


def make_plan(documents: list[tuple[np.ndarray, np.ndarray]], steps: int) -> Plan:
    """Plan for documents packed one behind the other.

    documents: (input_ids int [T], loss_mask bool [T]) each; steps: K >= 1.
    """
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("key", "token", "behind", "pos", "query", "target", "next")
    }
    token_row: list[list[np.ndarray]] = [[] for _ in range(steps)]
    trained: list[list[np.ndarray]] = [[] for _ in range(steps)]
    target: list[list[np.ndarray]] = [[] for _ in range(steps)]
    masks_of = [np.stack([trained_mask(loss_mask, k) for k in range(steps)]) for _, loss_mask in documents]  # [K, T]
    key_counts = [int(np.flatnonzero(m.any(axis=0))[-1]) + 1 if m.any() else 0 for m in masks_of]
    rows: list[Document] = []
    first = keys = queries = targets = 0
    behind = sum(key_counts)  # rows of the tokens behind the documents' keys come after those of all keys
    for (ids, _), masks, key_count in zip(documents, masks_of, key_counts, strict=True):
        query = np.flatnonzero(masks.any(axis=0))
        T = len(ids)
        is_target = np.zeros(T, dtype=bool)
        for k in range(steps):
            is_target[np.flatnonzero(masks[k]) + 1 + k] = True
        target_of = np.cumsum(is_target) - 1 + targets
        columns["key"].append(np.arange(first, first + key_count))
        columns["token"].append(ids[1 : key_count + 1])
        columns["pos"].append(np.arange(key_count))
        columns["query"].append(query + keys)
        columns["target"].append(np.flatnonzero(is_target) + first)
        columns["next"].append(ids[np.flatnonzero(is_target) + 1])
        if key_count:
            # Where a later step reaches past the document no loss reads the result: any token will do.
            columns["behind"].append(ids[np.minimum(np.arange(key_count + 1, key_count + steps), T - 1)])
        for k in range(steps):
            at = query + k
            token_row[k].append(np.where(at < key_count, at + keys, at - key_count + behind))
            here = masks[k][query]
            trained[k].append(np.flatnonzero(here) + queries)
            target[k].append(target_of[query[here] + 1 + k])
        begins = keys + (int(query[0]) if len(query) else 0)
        rows.append(Document(keys, keys + key_count, queries, queries + len(query), begins))
        first, keys, queries = first + T, keys + key_count, queries + len(query)
        behind += steps - 1 if key_count else 0
        targets += int(is_target.sum())

    def long(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(0, dtype=torch.int64)

    trained_rows, target_rows = [long(t) for t in trained], [long(t) for t in target]
    loss_target, order = torch.sort(torch.cat(target_rows), stable=True)
    step = torch.repeat_interleave(torch.arange(steps), torch.tensor([len(t) for t in trained_rows]))
    return Plan(
        key_row=long(columns["key"]),
        key_position=long(columns["pos"]),
        query_row=long(columns["query"]),
        token=long(columns["token"] + columns["behind"]),
        token_row=torch.stack([long(t) for t in token_row]),
        documents=rows,
        trained=trained_rows,
        target=target_rows,
        loss_row=(torch.cat(trained_rows) + step * queries)[order],
        loss_step=step[order],
        loss_target=loss_target,
        target_row=long(columns["target"]),
        next_token=long(columns["next"]),
    )
