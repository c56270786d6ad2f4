"""Real decoding: the drafter drafts, the verifier verifies, and both are counted.

Greedy and lossless: a draft is kept while it is the verifier's own first choice, so the output is what the verifier
writes alone. Prompts are decoded in batches. Rows accept different numbers of drafts, so nothing is cut from the
caches at once: rejected positions are masked out, every row has its own positions, and when a third of the verifier's
cache is holes it is closed up. That needs full attention in the verifier, which is checked.

Alignment (the contract): the verifier has seen x[0..n-1], its states g[0..n-1] are known and so is x[n]. The drafter
reads the pairs (x[p+1], g[p]) up to p = n - 1 and drafts x[n+1]; each further draft reads the last draft and the
drafter's own output.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.errors import EyasError

HOLES = 1.5  # cached positions for one that counts, from which on a cache is closed up


@dataclass
class Decoded:
    """What came out.

    tokens: per prompt the new token ids, the end token included, at most the limit asked for
    rounds: verifications of rows that were not yet done; accepted[k]: how many of them kept draft k
    seconds: wall time, prefill included; new_tokens: how many tokens came out
    """

    tokens: list[list[int]]
    rounds: int = 0
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def new_tokens(self) -> int:
        """Tokens that came out, of all prompts."""
        return sum(map(len, self.tokens))

    @property
    def per_position(self) -> list[float]:
        """Share of verifications that kept draft 1..K."""
        return [n / max(self.rounds, 1) for n in self.accepted]

    @property
    def accept_length(self) -> float:
        """Tokens per verification: the verifier's own one, and the drafts that were kept."""
        return 1 + sum(self.per_position)


class Draft(Protocol):
    """What drafts. The calls follow the verifier; all rows of the batch go in step."""

    def read(self, tokens: Tensor, states: Tensor, position: Tensor, valid: Tensor) -> None:
        """Take in pairs: tokens [B, q] x[p+1], states [B, q, 3 Ht] g[p], position [B, q] p, valid [B, q] bool."""

    def propose(self, count: int) -> Tensor:
        """The next `count` drafts behind what was read, [B, count] verifier ids."""


class EagleDraft:
    """An EAGLE-3 drafter with its key/value cache."""

    def __init__(self, drafter: Drafter, targets: Tensor, dtype: torch.dtype) -> None:
        """targets: [Vd] verifier id of each draft id, on the drafter's device."""
        self.drafter, self.targets, self.dtype = drafter, targets, dtype
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.valid: Tensor | None = None
        self.hidden = self.position = torch.empty(0)

    def read(self, tokens: Tensor, states: Tensor, position: Tensor, valid: Tensor) -> None:
        """See Draft."""
        out = self._layer(tokens, self.drafter.fc(states.to(self.dtype)), position, valid)
        last = (torch.arange(valid.shape[1], device=valid.device) * valid).argmax(1)  # last valid pair of each row
        rows = torch.arange(len(last), device=valid.device)
        self.hidden, self.position = out[rows, last], position[rows, last]

    def propose(self, count: int) -> Tensor:
        """See Draft. The drafts' own keys leave the cache again: what is kept is read anew, with true states."""
        kept = self.keys, self.values, self.valid
        hidden, position = self.hidden, self.position
        drafts: list[Tensor] = []
        for step in range(count):
            if step:
                position = position + 1
                everywhere = torch.ones_like(position, dtype=torch.bool)[:, None]
                hidden = self._layer(drafts[-1][:, None], hidden[:, None], position[:, None], everywhere)[:, 0]
            logits = self.drafter.lm_head(self.drafter.norm(hidden))
            drafts.append(self.targets[logits.argmax(-1)])
        self.keys, self.values, self.valid = kept
        return torch.stack(drafts, dim=1)

    def _layer(self, tokens: Tensor, hidden: Tensor, position: Tensor, valid: Tensor) -> Tensor:
        """One pass over [B, q] new positions against the cache and themselves: [B, q, H]."""
        B, q = tokens.shape
        d, layer, attention = self.drafter, self.drafter.midlayer, self.drafter.midlayer.self_attn
        flat = hidden.reshape(B * q, -1)
        mixed = layer.mix(d.embed(tokens.reshape(-1), self.dtype), flat)
        cos, sin = d.rotary(position.reshape(-1), self.dtype)
        query, key, value = (x.view(B, q, *x.shape[1:]) for x in attention.project(mixed, cos, sin))  # [B, q, heads, d]
        past = 0
        if self.keys is not None and self.values is not None and self.valid is not None:
            past = self.keys.shape[1]
            key, value = torch.cat([self.keys, key], 1), torch.cat([self.values, value], 1)
            valid = torch.cat([self.valid, valid], 1)
        self.keys, self.values, self.valid = key, value, valid
        order = torch.arange(past + q, device=tokens.device)
        seen = (order <= past + torch.arange(q, device=tokens.device)[:, None]) & valid[:, None]  # [B, q, past + q]
        # A padded query sees nothing; let it see itself, so that no row is 0/0. Nobody reads its output.
        seen |= order == past + torch.arange(q, device=tokens.device)[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=seen[:, None],
            scale=attention.scale,
            enable_gqa=True,
        )  # [B, n, q, d]
        return layer.finish(flat, out.transpose(1, 2).flatten(0, 1)).view(B, q, -1)


class VerifierRows:
    """The verifier over a batch of rows whose caches have holes: runs new tokens, returns choices and states."""

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        """layers: HF indices of the states a drafter reads."""
        from transformers import DynamicCache

        self.model, self.layers = model, layers
        named = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"  # renamed during transformers 5
        self.cache = DynamicCache(config=model.config.get_text_config())
        self.mask = torch.empty(0)

    def run(self, tokens: Tensor, position: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, position, valid: [B, q]. Returns (logits [B, q, V], states [B, q, 3 Ht])."""
        self.mask = torch.cat([self.mask, valid.long()], 1) if len(self.mask) else valid.long()
        out = self.model(
            input_ids=tokens,
            attention_mask=self.mask,
            position_ids=position,
            **{self.cache_name: self.cache},
            use_cache=True,
            output_hidden_states=True,
        )
        return out.logits, torch.cat([out.hidden_states[k] for k in self.layers], dim=-1)

    def keep(self, valid: Tensor) -> None:
        """Say which of the last q positions count, [B, q]: the others are masked from now on."""
        self.mask[:, -valid.shape[1] :] = valid.long()
        if self.mask.shape[1] > HOLES * int(self.mask.sum(1).max()):
            self._close_holes()

    def _close_holes(self) -> None:
        """Move every row's positions that count to the front of the cache, and drop what lies behind the longest."""
        counts = self.mask.sum(1)
        width = int(counts.max())
        order = self.mask.argsort(dim=1, descending=True, stable=True)[:, :width]  # [B, width]
        for layer in self.cache.layers:
            index = order[:, None, :, None].to(layer.keys.device)
            layer.keys = layer.keys.gather(2, index.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
            layer.values = layer.values.gather(2, index.expand(-1, layer.values.shape[1], -1, layer.values.shape[3]))
        self.mask = (torch.arange(width, device=counts.device) < counts[:, None]).long()


def check_full_attention(config: Any, tokens: int) -> None:
    """EyasError where the verifier has a sliding window that `tokens` cached positions would leave."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    used = any("sliding" in k for k in kinds) if kinds else bool(getattr(config, "use_sliding_window", True))
    if window and used and tokens > window:
        raise EyasError(
            f"decoding here needs full attention, and this verifier has a window of {window:,} tokens "
            f"(up to {tokens:,} would be cached): ask for fewer new tokens"
        )


@torch.inference_mode()
def decode(
    model: Any,
    layers: tuple[int, ...],
    prompts: list[list[int]],
    *,
    draft: Draft | None,
    draft_tokens: int,
    max_new_tokens: int,
    end_tokens: set[int],
    told: Callable[[Decoded], None] | None = None,
) -> Decoded:
    """Greedy decoding of one batch of prompts (token ids), with a drafter or without.

    model: a transformers causal LM; layers: HF indices of the drafter's states; draft: fresh, or None for the verifier
    alone; told: called before every round with what there is so far. Raises EyasError for a verifier whose attention
    window is too small for the batch.
    """
    started = time.perf_counter()
    device = next(model.parameters()).device
    K = draft_tokens if draft is not None else 0
    B, width = len(prompts), max(map(len, prompts))
    check_full_attention(model.config, width + (K + 1) * max_new_tokens)
    tokens = torch.zeros(B, width, dtype=torch.int64)
    valid = torch.zeros(B, width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        valid[row, width - len(prompt) :] = True
    tokens, valid = tokens.to(device), valid.to(device)
    position = (valid.long().cumsum(1) - 1).clamp_min(0)
    rows = VerifierRows(model, layers)
    logits, states = rows.run(tokens, position, valid)
    following = logits[:, -1].argmax(-1)  # x[n] of each row
    if draft is not None:
        draft.read(torch.cat([tokens[:, 1:], following[:, None]], 1), states, position, valid)
    result = Decoded(tokens=[[t] for t in following.tolist()], accepted=[0] * K)
    done = [t[0] in end_tokens or max_new_tokens == 1 for t in result.tokens]
    position = position[:, -1:] + 1  # [B, 1], where x[n] stands
    order = torch.arange(K + 1, device=device)
    while not all(done):
        if told is not None:
            told(result)
        drafts = draft.propose(K) if draft is not None else following.new_empty(B, 0)
        fed = torch.cat([following[:, None], drafts], 1)  # [B, K + 1]
        at = position + order
        logits, states = rows.run(fed, at, torch.ones_like(fed, dtype=torch.bool))
        choice = logits.argmax(-1)  # [B, K + 1]
        kept = (drafts == choice[:, :K]).long().cumprod(1).sum(1)  # [B] drafts kept
        valid = order <= kept[:, None]
        rows.keep(valid)
        if draft is not None:
            draft.read(choice, states, at, valid)
        following = choice.gather(1, kept[:, None])[:, 0]
        position = position + kept[:, None] + 1
        for row, (new, count) in enumerate(zip(choice.tolist(), kept.tolist(), strict=True)):
            if not done[row]:
                done[row] = _take(result, row, new[: count + 1], max_new_tokens, end_tokens)
    result.seconds = time.perf_counter() - started
    return result


def _take(result: Decoded, row: int, new: list[int], limit: int, end_tokens: set[int]) -> bool:
    """Append one verification's tokens to a row and count it; True when the row is done."""
    stop = next((i for i, t in enumerate(new) if t in end_tokens), None)
    kept = len(new) - 1  # the last token of a round is the verifier's own
    if stop is not None:
        new, kept = new[: stop + 1], min(kept, stop + 1)
    result.rounds += 1
    for k in range(kept):
        result.accepted[k] += 1
    line = result.tokens[row]
    line.extend(new)
    del line[limit:]
    return stop is not None or len(line) >= limit


def near_tie(model: Any, exact_model: Any, prefix: list[int], a: int, b: int) -> tuple[bool, float, float]:
    """Whether the verifier can hardly tell tokens a and b apart behind `prefix`.

    model: the verifier in the dtype that decoded; exact_model: the same in float32. The two differ by rounding alone,
    which tells how much a logit moves with it: the choice between a and b lies within rounding when their exact
    logits are closer than twice the largest difference at this position.
    Returns (is one, gap of the exact logits, the limit it was held against).
    """
    ids = torch.tensor([prefix])
    with torch.inference_mode():
        rounded = model(input_ids=ids.to(model.device)).logits[0, -1].float().cpu()
        exact = exact_model(input_ids=ids.to(exact_model.device)).logits[0, -1].float().cpu()
    gap = abs(float(exact[a] - exact[b]))
    limit = 2 * float((rounded - exact).abs().max())
    best = float(exact.max())
    return gap <= limit and best - min(float(exact[a]), float(exact[b])) <= limit and not math.isnan(gap), gap, limit
