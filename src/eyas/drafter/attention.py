"""Attention of training-time test: causal over step-0 keys, plus each position's own keys of later steps.

At TTT step k the query at position p sees the step-0 keys of j <= p in its own document, and its own keys of steps
1..k (the "diagonal"). Written as causal attention that also returns its log-sum-exp, merged with the k diagonal
scores: O(k T) on top of one causal attention, and no [T, T k] mask.

Cost: scores are built for a bounded block of queries at a time (`BLOCK` elements), in the backward pass again from the
saved log-sum-exp; nothing of size [T, T] is kept. Short documents share a block while its scores are few (`SMALL`): a
masked score costs less than another launch. Queries may be any sorted subset of a document's positions, because only
trained positions need one (`drafter.plan`).

`dense_attention` says the same in the plainest way. It is the reference of the tests, not for use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.drafter.precision import wide

BLOCK = 1 << 24  # score elements at a time: 64 MiB in fp32
SMALL = 1 << 16  # score elements up to which documents share a block


class Document(NamedTuple):
    """One document of a pack: its rows among the keys, and its rows among the queries."""

    key_start: int
    key_stop: int
    query_start: int
    query_stop: int


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    rows: Tensor,
    documents: list[Document],
) -> Tensor:
    """Attention output [Q, n, d] of one TTT step.

    query: [Q, n, d], rotated to position p + k.
    key, value: [T, m, d], step 0, rotated to position j; n is a multiple of m (grouped queries).
    own_keys, own_values: for each step 1..k, [Q, m, d], the query positions' own, rotated to p + i.
    rows: [Q] int64, the row among the keys that query q stands at (it sees rows <= that, in its document), sorted.
    documents: cover all keys and queries, in order.
    """
    if own_keys:
        own_key, own_value = torch.stack(own_keys), torch.stack(own_values)  # [k, Q, m, d]
    else:
        own_key = own_value = query.new_zeros(0, query.shape[0], key.shape[1], key.shape[2])
    out: Tensor = _TTTAttention.apply(query, key, value, own_key, own_value, rows, documents)  # type: ignore[no-untyped-call]
    return out


class _TTTAttention(torch.autograd.Function):
    """Forward keeps output and log-sum-exp; backward rebuilds the probabilities from them.

    The softmax runs over causal and diagonal scores together, so with the merged output and the merged log-sum-exp
    the gradient of each part is the usual one of attention: dS = P * (dP - rowsum(dO * O)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        rows: Tensor,
        documents: list[Document],
    ) -> Tensor:
        n, m, d = query.shape[1], key.shape[1], key.shape[2]
        q = _grouped(query, m) * (1 / math.sqrt(d))  # [Q, m, g, d]
        first = _first_keys(documents, rows.device)
        out = torch.empty_like(q)
        lse = wide(q.new_empty(q.shape[:3]))  # [Q, m, g]
        for queries, keys in _blocks(documents, rows, n):
            score = _scores(q[queries], key[keys], first[queries], rows[queries], keys.start)  # [m, q g, t] fp32
            block_lse = torch.logsumexp(score, dim=-1, keepdim=True)
            weight = torch.exp(score - block_lse).to(value.dtype)
            out[queries] = _ungroup(weight @ value[keys].transpose(0, 1), q[queries])
            lse[queries] = _ungroup(block_lse, q[queries])[..., 0]
        if len(own_key):
            own = (wide(q) * wide(own_key[:, :, :, None])).sum(-1)  # [k, Q, m, g]
            merged = torch.logsumexp(torch.cat([lse[None], own]), dim=0)
            share = torch.exp(own - merged)[..., None].to(q.dtype)
            out = out * torch.exp(lse - merged)[..., None].to(q.dtype) + (share * own_value[:, :, :, None]).sum(0)
            lse = merged
        ctx.save_for_backward(query, key, value, own_key, own_value, out, lse, rows)
        ctx.documents = documents
        return out.reshape(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, out, lse, rows = ctx.saved_tensors
        n, m, d = query.shape[1], key.shape[1], key.shape[2]
        scale = 1 / math.sqrt(d)
        q, grad = _grouped(query, m) * scale, _grouped(grads[0], m)  # [Q, m, g, d]
        first = _first_keys(ctx.documents, rows.device)
        delta = (wide(grad) * wide(out)).sum(-1)  # [Q, m, g]
        d_query = torch.empty_like(q)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        for queries, keys in _blocks(ctx.documents, rows, n):
            score = _scores(q[queries], key[keys], first[queries], rows[queries], keys.start)
            weight = torch.exp(score - _group(lse[queries, ..., None]))  # [m, q g, t]
            block_grad = _group(grad[queries])  # [m, q g, d]
            d_value[keys] += (weight.to(value.dtype).transpose(1, 2) @ block_grad).transpose(0, 1)
            d_weight = wide(block_grad @ value[keys].permute(1, 2, 0))
            d_score = (weight * (d_weight - _group(delta[queries, ..., None]))).to(q.dtype)
            d_query[queries] = _ungroup(d_score @ key[keys].transpose(0, 1), q[queries])
            d_key[keys] += (d_score.transpose(1, 2) @ _group(q[queries])).transpose(0, 1)
        d_own_key = d_own_value = None
        if len(own_key):
            k_own = own_key[:, :, :, None]  # [k, Q, m, 1, d]
            weight = torch.exp((wide(q) * wide(k_own)).sum(-1) - lse)[..., None]  # [k, Q, m, g, 1]
            d_weight = (wide(grad) * wide(own_value[:, :, :, None])).sum(-1, keepdim=True)
            d_score = (weight * (d_weight - delta[..., None])).to(q.dtype)
            d_query += (d_score * k_own).sum(0)
            d_own_key = (d_score * q).sum(3)
            d_own_value = (weight.to(q.dtype) * grad).sum(3)
        return (d_query * scale).reshape(query.shape), d_key, d_value, d_own_key, d_own_value, None, None


def _grouped(x: Tensor, m: int) -> Tensor:
    """[Q, n, d] -> [Q, m, g, d]: the g query heads that share a key head."""
    return x.reshape(x.shape[0], m, x.shape[1] // m, x.shape[2])


def _group(x: Tensor) -> Tensor:
    """[q, m, g, e] -> [m, q g, e], so that one product per key head serves all its query heads."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3])


def _ungroup(x: Tensor, like: Tensor) -> Tensor:
    """[m, q g, e] -> [q, m, g, e]."""
    q, m, g = like.shape[:3]
    return x.reshape(m, q, g, -1).transpose(0, 1)


def _scores(q: Tensor, key: Tensor, first: Tensor, rows: Tensor, first_key: int) -> Tensor:
    """Masked wide scores [m, q g, t] of scaled queries [q, m, g, d] against keys [t, m, d]; first, rows: [q]."""
    score = wide(_group(q) @ key.permute(1, 2, 0))  # [m, q g, t]
    order = torch.arange(first_key, first_key + len(key), device=q.device)
    hidden = (order > rows[:, None]) | (order < first[:, None])  # [q, t]
    return (
        score.view(q.shape[1], *hidden.shape[:1], q.shape[2], -1)
        .masked_fill_(hidden[:, None], -math.inf)
        .view_as(score)
    )


def _first_keys(documents: list[Document], device: torch.device) -> Tensor:
    """[Q] int64: the first key row of each query's document."""
    starts = torch.tensor([d.key_start for d in documents], dtype=torch.int64)
    counts = torch.tensor([d.query_stop - d.query_start for d in documents], dtype=torch.int64)
    return starts.repeat_interleave(counts).to(device, non_blocking=True)


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


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    rows: Tensor,
    documents: list[Document],
) -> Tensor:
    """The same with one explicit mask over [step-0 keys, own keys of step 1, ...]; same arguments, any dtype."""
    Q, n, d = query.shape
    group = n // key.shape[1]
    keys = torch.cat([key, *own_keys]).repeat_interleave(group, dim=1)  # [T + k Q, n, d]
    values = torch.cat([value, *own_values]).repeat_interleave(group, dim=1)
    seen = torch.zeros(Q, len(keys), dtype=torch.bool)
    for doc in documents:
        for i in range(doc.query_start, doc.query_stop):
            seen[i, doc.key_start : int(rows[i]) + 1] = True
            for step in range(len(own_keys)):
                seen[i, len(key) + step * Q + i] = True
    score = torch.einsum("qnd,tnd->nqt", query, keys) / math.sqrt(d)
    weight = torch.softmax(score.masked_fill(~seen, -math.inf), dim=-1)
    return torch.einsum("nqt,tnd->qnd", weight, values)
