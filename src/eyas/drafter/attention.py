"""Attention of training-time test: causal over step-0 keys, plus each position's own keys of later steps.

At TTT step k the query at position p sees the step-0 keys of j <= p in its own document, and its own keys of steps
1..k (the "diagonal"). The k diagonal scores stand as k further columns beside the causal ones, so that one softmax
serves both: O(k T) on top of one causal attention, and no [T, T k] mask.

Forward and backward are plain functions, because `drafter.ttt` writes its whole gradient out. The softmax and its
gradient are torch's fused kernels, which take and give the compute dtype and hold fp32 inside.

Cost: scores are built for a bounded block of queries at a time (`BLOCK` elements). The weights of all blocks are kept
for the backward pass while they are few (`KEEP`); beyond that they are made again, and nothing of size [T, T] is kept.
Short documents share a block while its scores are few (`SMALL`): a masked score costs less than another launch. Queries
may be any sorted subset of a document's positions, because only trained positions need one (`drafter.plan`).

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
KEEP = 1 << 23  # score elements of one step up to which the weights are kept


class Document(NamedTuple):
    """One document of a pack: its rows among the keys and among the queries, and the key row of its first query."""

    key_start: int
    key_stop: int
    query_start: int
    query_stop: int
    first_query: int


class Block(NamedTuple):
    """Queries of one document, or of several small ones, and the keys that some of them see."""

    queries: slice
    keys: slice
    documents: list[Document]


class Inputs(NamedTuple):
    """What one TTT step attends with, heads first; n is a multiple of m (grouped queries).

    query: [n, Q, d], rotated to position p + k and scaled by 1/sqrt(d).
    key, value: [m, T, d], step 0, rotated to position j. Values may have another width than keys, all of them the same.
    own_keys, own_values: for each step 1..k, [m, Q, d], the query positions' own, rotated to p + i.
    rows: [Q] int64, the row among the keys that query q stands at (it sees rows <= that, in its document), sorted.
    blocks: all queries, from `make_blocks`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    own_keys: list[Tensor]
    own_values: list[Tensor]
    rows: Tensor
    blocks: list[Block]


def make_blocks(documents: list[Document], rows: Tensor, heads: int) -> list[Block]:
    """The blocks of a pack, the same for all its steps."""
    shared: list[list[Document]] = []  # documents that share blocks
    for doc in documents:
        if doc.query_start == doc.query_stop:
            continue
        if shared:
            first = shared[-1][0]
            if heads * (doc.query_stop - first.query_start) * (doc.key_stop - first.key_start) <= SMALL:
                shared[-1].append(doc)
                continue
        shared.append([doc])
    return [block for docs in shared for block in _split(docs, rows, heads)]


def _split(docs: list[Document], rows: Tensor, heads: int) -> Iterator[Block]:
    """The queries of a document, or of several small ones, in blocks of at most BLOCK scores."""
    first, last = docs[0], docs[-1]
    step = max(1, BLOCK // (heads * (last.key_stop - first.key_start)))
    for start in range(first.query_start, last.query_stop, step):
        stop = min(start + step, last.query_stop)
        # Later keys are hidden from the whole block. Most documents are one block; only where there are several is the
        # exact bound, a read from the device, asked for.
        end = last.key_stop if step >= last.query_stop - first.query_start else int(rows[stop - 1]) + 1
        yield Block(slice(start, stop), slice(first.key_start, end), docs)


def attend(x: Inputs, keep: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Attention output [n, Q, d] of one TTT step; and the weights of the blocks where they are worth keeping."""
    q, own = _grouped(x), _own_scores(x)
    out = q.new_empty(*q.shape[:3], x.value.shape[2])
    share = torch.empty_like(own)  # the weights of the own keys
    keep = keep and _scores(x) <= KEEP
    kept = []
    for block in x.blocks:
        weight = _weights(x, q, own, block)  # [m, g q, t + k]
        t = block.keys.stop - block.keys.start
        _put(out, block, weight[..., :t] @ x.value[:, block.keys])
        _put(share, block, weight[..., t:])
        if keep:
            kept.append(weight)
    for i, value in enumerate(x.own_values):
        out.addcmul_(share[..., i, None], value[:, None])
    return out.flatten(0, 1), kept


def attend_backward(
    x: Inputs,
    kept: list[Tensor],
    grad: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    d_own_keys: list[Tensor],
    d_own_values: list[Tensor],
) -> Tensor:
    """The gradient by the query, [n, Q, d], from that by the output, [n, Q, d]; the others are added in place.

    d_key, d_value: [m, d, T], transposed; d_own_keys, d_own_values: for each step, [m, Q, d].
    With P the weights: dS = P * (dP - rowsum(P dP)), over causal and own columns together.
    """
    q, own = _grouped(x), _own_scores(x)
    grad = grad.view(*q.shape[:3], x.value.shape[2])  # [m, g, Q, d]
    share, d_share, d_own = torch.empty_like(own), torch.empty_like(own), torch.empty_like(own)
    for i, value in enumerate(x.own_values):
        torch.sum(grad * value[:, None], dim=-1, out=d_share[..., i])
    d_query = torch.empty_like(q)
    for i, block in enumerate(x.blocks):
        weight = kept[i] if kept else _weights(x, q, own, block)  # [m, g q, t + k]
        t = block.keys.stop - block.keys.start
        block_q, block_grad = _rows(q, block), _rows(grad, block)  # [m, g q, d]
        d_weight = _products(block_grad, x.value[:, block.keys], _rows(d_share, block))
        d_score = torch._softmax_backward_data(d_weight, weight, -1, weight.dtype)
        # Rows of `weight` are strided: as the right factor they are read in place, as the left one, transposed, copied.
        d_value[..., block.keys] += block_grad.transpose(1, 2) @ weight[..., :t]
        d_key[..., block.keys] += block_q.transpose(1, 2) @ d_score[..., :t]
        _put(d_query, block, d_score[..., :t] @ x.key[:, block.keys])
        _put(share, block, weight[..., t:])
        _put(d_own, block, d_score[..., t:])
    for i, key in enumerate(x.own_keys):
        d_query.addcmul_(d_own[..., i, None], key[:, None])
        d_own_keys[i] += (d_own[..., i, None] * q).sum(1)
        d_own_values[i] += (share[..., i, None] * grad).sum(1)
    return d_query.view_as(x.query)


def _grouped(x: Inputs) -> Tensor:
    """[n, Q, d] -> [m, g, Q, d]: the g query heads that share a key head."""
    n, Q, d = x.query.shape
    return x.query.view(len(x.key), n // len(x.key), Q, d)


def _rows(y: Tensor, block: Block) -> Tensor:
    """The rows of a block, [m, g, Q, e] -> [m, g q, e]."""
    rows = y[:, :, block.queries]
    return rows.reshape(len(y), y.shape[1] * rows.shape[2], y.shape[3])


def _put(y: Tensor, block: Block, values: Tensor) -> None:
    """Write the rows of a block: values [m, g q, e] into y [m, g, Q, e]."""
    if y.shape[3]:
        rows = y[:, :, block.queries]
        rows.copy_(values.view(rows.shape))


def _scores(x: Inputs) -> int:
    """How many scores all blocks have."""
    per_head: int = sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in x.blocks)
    return len(x.query) * per_head


def _own_scores(x: Inputs) -> Tensor:
    """Scores of every query with its own keys, [m, g, Q, k]."""
    q = _grouped(x)
    own = q.new_empty(*q.shape[:3], len(x.own_keys))
    for i, key in enumerate(x.own_keys):
        torch.sum(q * key[:, None], dim=-1, out=own[..., i])
    return own


def _products(left: Tensor, right: Tensor, own: Tensor) -> Tensor:
    """left @ right^T, [m, g q, t], and `own` [m, g q, k] behind it: [m, g q, t + k]."""
    t = right.shape[1]
    out = left.new_empty(*left.shape[:2], t + own.shape[2])
    torch.bmm(left, right.transpose(1, 2), out=out[..., :t])
    out[..., t:] = own
    return out


def _weights(x: Inputs, q: Tensor, own: Tensor, block: Block) -> Tensor:
    """Attention weights of a block, [m, g q, t + k], zero where a key is hidden."""
    keys, rows = block.keys, x.rows[block.queries]
    score = _products(_rows(q, block), x.key[:, keys], _rows(own, block))
    order = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = order > rows[:, None]  # [q, t]
    for doc in block.documents[1:]:
        hidden |= (order < doc.key_start) & (rows >= doc.key_start)[:, None]
    mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    score[..., : len(order)].view(*q.shape[:2], *hidden.shape).add_(mask)
    return torch.softmax(score, dim=-1)


def dense_attention(x: Inputs, documents: list[Document]) -> Tensor:
    """The same with one explicit mask over [step-0 keys, own keys of step 1, ...], any dtype."""
    group = len(x.query) // len(x.key)
    T, Q = x.key.shape[1], x.query.shape[1]
    keys = torch.cat([x.key, *x.own_keys], dim=1).repeat_interleave(group, dim=0)  # [n, T + k Q, d]
    values = torch.cat([x.value, *x.own_values], dim=1).repeat_interleave(group, dim=0)
    seen = torch.zeros(Q, keys.shape[1], dtype=torch.bool)
    for doc in documents:
        for i in range(doc.query_start, doc.query_stop):
            seen[i, doc.key_start : int(x.rows[i]) + 1] = True
            for step in range(len(x.own_keys)):
                seen[i, T + step * Q + i] = True
    score = torch.einsum("qnd,tnd->nqt", x.query.transpose(0, 1), keys.transpose(0, 1))
    return torch.softmax(score.masked_fill(~seen, -math.inf), dim=-1) @ values
