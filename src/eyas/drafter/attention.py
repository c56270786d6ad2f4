"""Attention of training-time test: causal over step-0 keys, plus each position's own keys of later steps.

At TTT step k the query at position p sees the step-0 keys of j <= p in its own document, and its own keys of steps
1..k (the "diagonal"). The k diagonal scores stand as k further columns beside the causal ones, so that one softmax
serves both: O(k T) on top of one causal attention, and no [T, T k] mask.

Forward and backward are plain functions, because `drafter.ttt` writes its whole gradient out. The softmax and its
gradient are torch's fused kernels, which take and give the compute dtype and hold fp32 inside.

Cost: scores are built for a bounded block of queries at a time (`BLOCK` elements), in the backward pass again; nothing
of size [T, T] is kept. Short documents share a block while its scores are few (`SMALL`): a masked score costs less than
another launch. Queries may be any sorted subset of a document's positions, because only trained positions need one
(`drafter.plan`).

`dense_attention` says the same in the plainest way. It is the reference of the tests, not for use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 23  # score elements at a time: 16 MiB in bf16
SMALL = 1 << 16  # score elements up to which documents share a block


class Document(NamedTuple):
    """One document of a pack: its rows among the keys, and its rows among the queries."""

    key_start: int
    key_stop: int
    query_start: int
    query_stop: int


class Inputs(NamedTuple):
    """What one TTT step attends with, heads first; n is a multiple of m (grouped queries).

    query: [n, Q, d], rotated to position p + k and scaled by 1/sqrt(d).
    key, value: [m, T, d], step 0, rotated to position j.
    own_keys, own_values: for each step 1..k, [m, Q, d], the query positions' own, rotated to p + i.
    rows: [Q] int64, the row among the keys that query q stands at (it sees rows <= that, in its document), sorted.
    documents: cover all keys and queries, in order.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    own_keys: list[Tensor]
    own_values: list[Tensor]
    rows: Tensor
    documents: list[Document]


def attend(x: Inputs) -> Tensor:
    """Attention output [n, Q, d] of one TTT step."""
    q, own = _grouped(x), _own_scores(x)
    out = torch.empty_like(q)
    share = torch.empty_like(own)  # the weights of the own keys
    for queries, keys in _blocks(x.documents, x.rows, len(x.query)):
        weight = _weights(x, q, own, queries, keys)
        t = weight.shape[2] - len(x.own_keys)
        _rows(out, queries).copy_((weight[..., :t] @ x.value[:, keys]).view_as(_rows(out, queries)))
        _rows(share, queries).copy_(weight[..., t:].view_as(_rows(share, queries)))
    for i, value in enumerate(x.own_values):
        out.addcmul_(share[..., i, None], value[:, None])
    return out.view_as(x.query)


def attend_backward(
    x: Inputs, grad: Tensor, d_key: Tensor, d_value: Tensor, d_own_keys: list[Tensor], d_own_values: list[Tensor]
) -> Tensor:
    """The gradient by the query, [n, Q, d], from that by the output, [n, Q, d]; the others are added to d_*, in place.

    With P the weights: dS = P * (dP - rowsum(P dP)), over causal and own columns together.
    """
    q, own = _grouped(x), _own_scores(x)
    grad = grad.view_as(q)  # [m, g, Q, d]
    share, d_share, d_own = torch.empty_like(own), torch.empty_like(own), torch.empty_like(own)
    for i, value in enumerate(x.own_values):
        torch.sum(grad * value[:, None], dim=-1, out=d_share[..., i])
    d_query = torch.empty_like(q)
    for queries, keys in _blocks(x.documents, x.rows, len(x.query)):
        weight = _weights(x, q, own, queries, keys)  # [m, g q, t + k]
        t = weight.shape[2] - len(x.own_keys)
        block_q, block_grad = (_rows(y, queries).reshape(len(q), -1, q.shape[3]) for y in (q, grad))  # [m, g q, d]
        d_value[:, keys] += weight[..., :t].transpose(1, 2) @ block_grad
        d_weight = _beside(block_grad @ x.value[:, keys].transpose(1, 2), _rows(d_share, queries))
        d_score = torch._softmax_backward_data(d_weight, weight, -1, weight.dtype)
        _rows(d_query, queries).copy_((d_score[..., :t] @ x.key[:, keys]).view_as(_rows(d_query, queries)))
        d_key[:, keys] += d_score[..., :t].transpose(1, 2) @ block_q
        _rows(share, queries).copy_(weight[..., t:].view_as(_rows(share, queries)))
        _rows(d_own, queries).copy_(d_score[..., t:].view_as(_rows(d_own, queries)))
    for i, key in enumerate(x.own_keys):
        d_query.addcmul_(d_own[..., i, None], key[:, None])
        d_own_keys[i] += (d_own[..., i, None] * q).sum(1)
        d_own_values[i] += (share[..., i, None] * grad).sum(1)
    return d_query.view_as(x.query)


def _grouped(x: Inputs) -> Tensor:
    """[n, Q, d] -> [m, g, Q, d]: the g query heads that share a key head."""
    n, Q, d = x.query.shape
    return x.query.view(len(x.key), n // len(x.key), Q, d)


def _rows(y: Tensor, queries: slice) -> Tensor:
    """The rows of a block: [m, g, Q, e] -> [m, g, q, e], a view."""
    return y[:, :, queries]


def _own_scores(x: Inputs) -> Tensor:
    """Scores of every query with its own keys, [m, g, Q, k]."""
    q = _grouped(x)
    own = q.new_empty(*q.shape[:3], len(x.own_keys))
    for i, key in enumerate(x.own_keys):
        torch.sum(q * key[:, None], dim=-1, out=own[..., i])
    return own


def _beside(causal: Tensor, own: Tensor) -> Tensor:
    """[m, g q, t] and [m, g, q, k] -> [m, g q, t + k]."""
    return torch.cat([causal, own.reshape(*causal.shape[:2], -1)], dim=-1) if own.shape[-1] else causal


def _weights(x: Inputs, q: Tensor, own: Tensor, queries: slice, keys: slice) -> Tensor:
    """Attention weights of a block, [m, g q, t + k], zero where a key is hidden."""
    m, g, _, d = q.shape
    block = _rows(q, queries).reshape(m, -1, d)
    score = _beside(block @ x.key[:, keys].transpose(1, 2), _rows(own, queries))
    causal = score[..., : keys.stop - keys.start].view(m, g, -1, keys.stop - keys.start)
    at, first = x.rows[queries], _first_keys(x.documents, queries)
    order = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = (order > at[:, None]) | (order < first.to(q.device, non_blocking=True)[:, None])  # [q, t]
    causal += q.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    return torch.softmax(score, dim=-1)


def _first_keys(documents: list[Document], queries: slice) -> Tensor:
    """[q] int64: the first key row of the document of each query of a block."""
    parts = [
        (d.key_start, min(d.query_stop, queries.stop) - max(d.query_start, queries.start))
        for d in documents
        if d.query_start < queries.stop and d.query_stop > queries.start
    ]
    starts, counts = torch.tensor(parts, dtype=torch.int64).T
    return starts.repeat_interleave(counts)


def _blocks(documents: list[Document], rows: Tensor, heads: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that some of its queries see."""
    waiting: Document | None = None  # documents that share a block so far, as one
    for doc in documents:
        if doc.query_start == doc.query_stop:
            continue
        if waiting is not None:
            both = Document(waiting.key_start, doc.key_stop, waiting.query_start, doc.query_stop)
            if heads * (both.query_stop - both.query_start) * (both.key_stop - both.key_start) <= SMALL:
                waiting = both
                continue
            yield from _split(waiting, rows, heads)
        waiting = doc
    if waiting is not None:
        yield from _split(waiting, rows, heads)


def _split(doc: Document, rows: Tensor, heads: int) -> Iterator[tuple[slice, slice]]:
    """The queries of a document, or of several small ones, in blocks of at most BLOCK scores."""
    step = max(1, BLOCK // (heads * (doc.key_stop - doc.key_start)))
    for start in range(doc.query_start, doc.query_stop, step):
        stop = min(start + step, doc.query_stop)
        # Later keys are hidden from the whole block. Most documents are one block; only where there are several is the
        # exact bound, a read from the device, asked for.
        last = doc.key_stop if step >= doc.query_stop - doc.query_start else int(rows[stop - 1]) + 1
        yield slice(start, stop), slice(doc.key_start, last)


def dense_attention(x: Inputs) -> Tensor:
    """The same with one explicit mask over [step-0 keys, own keys of step 1, ...], any dtype."""
    group = len(x.query) // len(x.key)
    T, Q = x.key.shape[1], x.query.shape[1]
    keys = torch.cat([x.key, *x.own_keys], dim=1).repeat_interleave(group, dim=0)  # [n, T + k Q, d]
    values = torch.cat([x.value, *x.own_values], dim=1).repeat_interleave(group, dim=0)
    seen = torch.zeros(Q, keys.shape[1], dtype=torch.bool)
    for doc in x.documents:
        for i in range(doc.query_start, doc.query_stop):
            seen[i, doc.key_start : int(x.rows[i]) + 1] = True
            for step in range(len(x.own_keys)):
                seen[i, T + step * Q + i] = True
    score = torch.einsum("nqd,ntd->nqt", x.query, keys)
    return torch.softmax(score.masked_fill(~seen, -math.inf), dim=-1) @ values
