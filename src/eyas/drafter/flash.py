"""Attention of training-time test by flash kernels: the same as `drafter.attention`, for GPUs.

A document's queries stand from its first trained position on. Its causal attention is two calls, neither of which needs
a mask or a convention on where a rectangle's diagonal begins: all keys before that position, and the square behind it.
Both return their log-sum-exp, and so do the own keys of later steps, which are one score each:

    lse = logsumexp(prefix, square, own scores);  out = sum of each part's output times exp(its lse - lse)

A flash kernel's backward pass makes P = exp(S - lse) and D = rowsum(dO O) from what it is given. Given the merged
lse and output it therefore gives each part's exact share of the gradient: nothing is differentiated through the merge.
Positions between two answers that have no query get a query of zeros whose gradient is zero.

One call serves all documents of a pack (lengths, no padding). On a GPU it is torch's own flash kernel (16-bit numbers,
heads of up to 256); on a CPU torch's flash kernel, document by document, which serves the tests. Values narrower than
keys are padded with zeros. Grouped keys are repeated: T n d numbers, little beside what a step keeps.

The GPU path was written without a GPU at hand. So `refusal` compares it on the device with `drafter.attention`, once a
process and for the very sizes; where they differ or the kernel is missing the blocks are taken, and the run says so.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter import attention
from eyas.drafter.attention import Document, Inputs
from eyas.drafter.precision import wide

WIDEST = 256  # numbers of a head that the kernel takes
TOLERANCE = 0.02  # relative, of two orders of 16-bit rounding


class Part(NamedTuple):
    """One call: which rows of the spans ask which key rows. spans: (start, stop) by document; keys: the same."""

    spans: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    causal: bool


class Layout(NamedTuple):
    """The calls of a pack. A span is a document's rows from its first query on; S rows in all spans.

    length: S; where: [Q] row of each query in the spans.
    """

    parts: list[Part]
    length: int
    where: Tensor


def attend(x: Inputs, keep: bool = False) -> tuple[Tensor, list[Tensor]]:
    """`attention.attend` by the kernel that is right here."""
    return attend_flash(x) if fits(x) else attention.attend(x, keep)


def attend_backward(
    x: Inputs,
    kept: list[Tensor],
    grad: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    d_own_keys: list[Tensor],
    d_own_values: list[Tensor],
) -> Tensor:
    """`attention.attend_backward` by the kernel that `attend` took."""
    chosen = attend_flash_backward if fits(x) else attention.attend_backward
    return chosen(x, kept, grad, d_key, d_value, d_own_keys, d_own_values)


def attend_flash(x: Inputs) -> tuple[Tensor, list[Tensor]]:
    """As `attention.attend`; what is kept is the output [S, n, v] and the log-sum-exp [n, S] by row of the spans."""
    layout, group = _layout(x), len(x.query) // len(x.key)
    n, _, d = x.query.shape
    width = x.value.shape[2]
    query = _spread(x.query.transpose(0, 1), layout)  # [S, n, d]
    none = wide(query.new_empty(0))
    out, lse = none.new_zeros(layout.length, n, width), none.new_full((n, layout.length), -torch.inf)
    for part in layout.parts:
        keys, values = _taken(x.key, part.keys, group), F.pad(_taken(x.value, part.keys, group), (0, d - width))
        one, its = _forward(_rows(query, part.spans), keys, values, part)
        rows = _index(part.spans, query.device)
        total = torch.logaddexp(lse[:, rows], its)
        share = [(y - total).exp().T[..., None] for y in (lse[:, rows], its)]  # [s, n, 1]
        lse[:, rows] = total
        out[rows] = out[rows] * share[0] + one[..., :width] * share[1]

    causal, causal_lse = out[layout.where], lse[:, layout.where]  # [Q, n, v], [n, Q]
    own = _own_scores(x, group)  # [k, n, Q]
    total = torch.logsumexp(torch.cat([causal_lse[None], own]), dim=0)  # [n, Q]
    merged = causal * (causal_lse - total).exp().T[..., None]
    for score, value in zip(own, x.own_values, strict=True):
        merged += (score - total).exp().T[..., None] * value.repeat_interleave(group, dim=0).transpose(0, 1)
    out[layout.where], lse[:, layout.where] = merged, total
    kept = out.to(query.dtype)
    return kept[layout.where].transpose(0, 1).contiguous(), [kept, lse]


def attend_flash_backward(
    x: Inputs,
    kept: list[Tensor],
    grad: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    d_own_keys: list[Tensor],
    d_own_values: list[Tensor],
) -> Tensor:
    """As `attention.attend_backward`, with what `attend_flash` kept."""
    layout, group = _layout(x), len(x.query) // len(x.key)
    d, width = x.query.shape[2], x.value.shape[2]
    out, lse = kept
    query, spread = (_spread(y.transpose(0, 1), layout) for y in (x.query, grad))  # [S, n, d], [S, n, v]
    d_query = torch.zeros_like(query)
    for part in layout.parts:
        keys, values = _taken(x.key, part.keys, group), F.pad(_taken(x.value, part.keys, group), (0, d - width))
        one_q, one_k, one_v = _backward(
            F.pad(_rows(spread, part.spans), (0, d - width)),
            _rows(query, part.spans),
            keys,
            values,
            F.pad(_rows(out, part.spans), (0, d - width)),
            _cut(lse, part.spans),
            part,
        )
        d_query[_index(part.spans, query.device)] += one_q
        for into, gradient in ((d_key, one_k), (d_value, one_v[..., :width])):
            _give(into, gradient, part.keys)

    asked = d_query[layout.where].transpose(0, 1).contiguous()  # [n, Q, d]
    total, answer = lse[:, layout.where], out[layout.where].transpose(0, 1)  # [n, Q], [n, Q, v]
    along = (wide(grad) * wide(answer)).sum(-1)  # [n, Q]
    for i, score in enumerate(_own_scores(x, group)):
        key, value = (y.repeat_interleave(group, dim=0) for y in (x.own_keys[i], x.own_values[i]))
        weight = (score - total).exp()
        d_score = (weight * ((wide(grad) * wide(value)).sum(-1) - along)).to(grad.dtype)[..., None]
        asked += d_score * key
        for into, share in ((d_own_keys[i], d_score * x.query), (d_own_values[i], weight[..., None].to(grad) * grad)):
            into += share.view(len(into), group, *into.shape[1:]).sum(1)
    return asked


def fits(x: Inputs) -> bool:
    """Whether these inputs go through the GPU's flash kernel."""
    if not x.query.is_cuda:
        return False
    n, _, d = x.query.shape
    return not refusal(x.query.device, x.query.dtype, n, len(x.key), d, x.value.shape[2])


@cache
def refusal(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int, width: int) -> str:
    """Why the flash kernel is not taken on this device for these sizes; "" where it is. Compared once a process."""
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        return f"it takes 16-bit numbers, not {str(dtype).removeprefix('torch.')}"
    if d > WIDEST or d % 8 or width > d:
        return f"it takes heads of up to {WIDEST} numbers, a multiple of 8: these have {d}"
    try:
        away = _difference(device, dtype, heads, kv_heads, d, width)
    except (RuntimeError, TypeError, AttributeError) as e:  # no such kernel, or another call
        return " ".join(str(e).split())[:200]
    return "" if away < TOLERANCE else f"it is {away:.3f} away from the plain blocks"


def _difference(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int, width: int) -> float:
    """Largest relative difference of output and gradients from `drafter.attention`, on two small documents."""
    documents = [Document(0, 70, 0, 30, 30), Document(70, 110, 30, 60, 70)]
    rows = torch.tensor([*range(30, 50), *range(60, 70), *range(70, 85), *range(95, 110)], device=device)
    g = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    x = Inputs(
        make(heads, 60, d) * d**-0.5, make(kv_heads, 110, d), make(kv_heads, 110, width), [make(kv_heads, 60, d)],
        [make(kv_heads, 60, width)], rows, attention.make_blocks(documents, rows, heads),
    )  # fmt: skip
    grad = make(heads, 60, width)
    found: list[list[Tensor]] = []
    for forward, backward in (
        (attention.attend, attention.attend_backward),
        (attend_flash, attend_flash_backward),
    ):
        out, kept = forward(x)
        d_key, d_value = (torch.zeros_like(y).mT.contiguous() for y in (x.key, x.value))
        own = [torch.zeros_like(x.own_keys[0]), torch.zeros_like(x.own_values[0])]
        d_query = backward(x, kept, grad, d_key, d_value, own[:1], own[1:])
        found.append([y.double() for y in (out, d_query, d_key, d_value, *own)])
    return max(float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True))


def _layout(x: Inputs) -> Layout:
    """The calls that serve the documents of x. Its numbers are known on the host: nothing waits for the device."""
    documents = list(dict.fromkeys(doc for block in x.blocks for doc in block.documents))
    spans, shift, at = [], [], 0
    for doc in documents:
        spans.append((at, at + doc.key_stop - doc.first_query))
        shift.append(at - doc.first_query)
        at = spans[-1][1]
    counts = torch.tensor([doc.query_stop - doc.query_start for doc in documents], dtype=torch.int64)
    by_query = torch.repeat_interleave(torch.tensor(shift, dtype=torch.int64), counts).to(x.rows.device)
    led = [i for i, doc in enumerate(documents) if doc.first_query > doc.key_start]
    parts = [Part(spans, [(doc.first_query, doc.key_stop) for doc in documents], True)]
    if led:
        before = [(documents[i].key_start, documents[i].first_query) for i in led]
        parts.append(Part([spans[i] for i in led], before, False))
    return Layout(parts if documents else [], at, x.rows + by_query)


def _spread(y: Tensor, layout: Layout) -> Tensor:
    """Rows of queries [Q, n, e] -> rows of spans [S, n, e], zeros where none is."""
    out = y.new_zeros(layout.length, *y.shape[1:])
    out[layout.where] = y
    return out


def _index(spans: list[tuple[int, int]], device: torch.device) -> Tensor | slice:
    """Which rows these are."""
    if all(a[1] == b[0] for a, b in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return torch.cat([torch.arange(*span) for span in spans]).to(device)


def _rows(y: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Rows of y [S, n, e], one span behind the other."""
    return y[_index(spans, y.device)].contiguous()


def _cut(y: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Columns of y [n, S], one span behind the other."""
    return y[:, _index(spans, y.device)].contiguous()


def _taken(y: Tensor, ranges: list[tuple[int, int]], group: int) -> Tensor:
    """Keys or values [m, T, e] of these ranges, [t, n, e]."""
    parts = torch.cat([y[:, start:stop] for start, stop in ranges], dim=1).repeat_interleave(group, dim=0)
    return parts.transpose(0, 1).contiguous()


def _give(into: Tensor, gradient: Tensor, ranges: list[tuple[int, int]]) -> None:
    """Add the gradient [t, n, e] of what `_taken` took to `into` [m, e, T]."""
    m = len(into)
    t, n, e = gradient.shape
    summed = gradient.view(t, m, n // m, e).sum(2).permute(1, 2, 0)  # [m, e, t]
    for (start, stop), piece in zip(ranges, torch.split(summed, [b - a for a, b in ranges], dim=2), strict=True):
        into[..., start:stop] += piece


def _own_scores(x: Inputs, group: int) -> Tensor:
    """Scores of every query with its own keys, [k, n, Q], wide."""
    own = [(wide(x.query) * wide(key.repeat_interleave(group, dim=0))).sum(-1) for key in x.own_keys]
    return torch.stack(own) if own else wide(x.query.new_empty(0, *x.query.shape[:2]))


# -- the kernels -------------------------------------------------------------------------------------------------------


def _forward(query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """Output [s, n, d] and log-sum-exp [n, s] of rows that ask rows, document by document."""
    if query.is_cuda:
        ends, key_ends, longest, longest_key = _lengths(part, query.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, ends, key_ends, longest, longest_key, 0.0, part.causal, False, scale=1.0
        )
        return out, lse
    inputs = (_documents(query, part.spans), _documents(key, part.keys), _documents(value, part.keys))
    found = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*each, 0.0, part.causal, scale=1.0)
        for each in zip(*inputs, strict=True)
    ]
    return torch.cat([out[0].transpose(0, 1) for out, _ in found]), torch.cat([lse[0] for _, lse in found], dim=1)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of these rows and keys in the gradients, as `_forward` lays them out; out, lse: of all parts."""
    if query.is_cuda:
        ends, key_ends, longest, longest_key = _lengths(part, query.device)
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that is not there
        none = torch.empty(0, device=query.device)
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, ends, key_ends, longest, longest_key, 0.0, part.causal, state, none,
            scale=1.0,
        )  # fmt: skip
        return d_query, d_key, d_value
    inputs = (
        *(_documents(y, part.spans) for y in (grad, query)),
        *(_documents(y, part.keys) for y in (key, value)),
        _documents(out, part.spans),
        [row[None] for row in torch.split(lse, [b - a for a, b in part.spans], dim=1)],
    )
    found = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*each, 0.0, part.causal, scale=1.0)
        for each in zip(*inputs, strict=True)
    ]
    d_query, d_key, d_value = (torch.cat([y[0].transpose(0, 1) for y in ys]) for ys in zip(*found, strict=True))
    return d_query, d_key, d_value


def _documents(y: Tensor, ranges: list[tuple[int, int]]) -> list[Tensor]:
    """Rows [s, n, e] by document, as torch's kernel for CPUs takes them, [1, n, rows, e]."""
    return [rows.transpose(0, 1)[None] for rows in torch.split(y, [b - a for a, b in ranges])]


def _lengths(part: Part, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Where each document ends among rows and keys, int32 with a leading 0, and the longest of each."""
    lengths = [[b - a for a, b in ranges] for ranges in (part.spans, part.keys)]
    ends = [F.pad(torch.tensor(n).cumsum(0), (1, 0)).to(device, torch.int32) for n in lengths]
    return ends[0], ends[1], max(lengths[0]), max(lengths[1])
