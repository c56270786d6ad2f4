"""What one progress line says, and how numbers, clocks and keys are read from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eyas.why.logs import tables


@dataclass(slots=True)
class Sighting:
    """One line's report. `bar`: a progress bar, which may be of anything; else a record of training metrics."""

    format: str
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    elapsed: float | None = None  # the line's own clock
    left: float | None = None  # ETA as printed
    step_s: float | None = None  # seconds per step as printed
    loss: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    data_wait: float | None = None
    desc: str = ""
    bar: bool = False
    unit: str = "step"
    per_epoch: bool = False  # step and total count within the epoch
    evaluation: bool = False
    more: bool = False  # other work follows the last one: a stage of several
    # filled by the reader
    number: int = 0
    rank: int | None = None
    at: float | None = None
    line: str = ""


_NUM = r"-?\d[\d,]{0,20}(?:\.\d{0,12})?(?:[eE][+-]?\d{1,3})?"
_PAIR = re.compile(
    r"(?<![\w./@-])['\"]?([A-Za-z_][\w./@-]{0,60}(?: \([\w%/]{1,4}\)|\([\w%]{1,3}\))?)"
    r"['\"]?\s{0,3}(?:[:=]|\s)\s{0,8}['\"]?\*?"
    r"(" + _NUM + r"|nan|-?inf)(?:\s?(ms|s|%)(?![\w/]))?(?![\w/:]|\.\d)",
    re.I,
)


def num(text: str | None) -> float | None:
    """'1,000', '1.2k', '8.1E-02', 'nan'; None for anything else."""
    if not text:
        return None
    text = text.strip().replace(",", "")
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "K": 1e3}.get(text[-1:], 1.0)
    try:
        return float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        return None


def whole(text: str | None) -> int | None:
    value = num(text)
    return int(value) if value is not None and abs(value) < 1e15 else None


def clock(text: str | None) -> float | None:
    """'1:02:03', '00:12', '2 days, 1:00:00', '12.5s', '3m02s' -> seconds."""
    if not text or "?" in text or "-" in text:
        return None
    days = 0.0
    if m := re.match(r"\s*(\d{1,6}) days?,? ?", text):
        days, text = float(m.group(1)) * 86400, text[m.end() :]
    parts = text.strip().split(":")
    try:
        if len(parts) > 1:
            return days + sum(float(p) * 60.0**i for i, p in enumerate(reversed(parts)))
    except ValueError:
        return None
    found = re.findall(r"(\d{1,9}(?:\.\d{0,6})?)\s?([dhms])", text)
    return days + sum(float(n) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[u] for n, u in found) if found else None


def pairs(text: str) -> dict[str, float]:
    """Every `key: value`, `key=value` or `key value` of a line; `... (ms)` units are kept as `key` plus `_ms`."""
    out: dict[str, float] = {}
    for m in _PAIR.finditer(text):
        value = num(m.group(2))
        if value is not None:
            key = m.group(1)
            out.setdefault(f"{key}_ms" if m.group(3) == "ms" else key, value)
    return out


def first(values: dict[str, Any], keys: Iterable[str]) -> float | None:
    for key in keys:
        value = values.get(key)
        if isinstance(value, bool) or value is None:
            continue
        number = num(value) if isinstance(value, str) else float(value) if isinstance(value, int | float) else None
        if number is not None:
            return number
    return None


def _kinds() -> dict[str, tuple[str, int]]:
    """key -> (what it gives, how much it is preferred)."""
    groups: dict[str, Iterable[str]] = {
        "loss": tables.LOSS_KEYS, "lr": tables.RATE_KEYS, "tokens": tables.TOKENS_KEYS, "ms": tables.STEP_MS_KEYS,
        "s": tables.STEP_SECONDS_KEYS, "share": tables.DATA_SHARE_KEYS, "percent": tables.DATA_PERCENT_KEYS,
        "data_ms": tables.DATA_MS_KEYS, "data_s": tables.DATA_SECONDS_KEYS,
    }  # fmt: skip
    return {key: (kind, i) for kind, keys in groups.items() for i, key in enumerate(keys)}


_KINDS = _kinds()


def metrics(s: Sighting, values: dict[str, Any]) -> Sighting:
    """Fill loss, rates, step time and data wait from a record's keys, whoever wrote it."""
    best: dict[str, tuple[int, str]] = {}
    for key in values:
        if (kind := _KINDS.get(key)) is not None and (kind[0] not in best or kind[1] < best[kind[0]][0]):
            best[kind[0]] = (kind[1], key)
    got = {kind: first(values, (key,)) for kind, (_, key) in best.items()}
    s.loss = got.get("loss") if s.loss is None else s.loss
    s.lr = got.get("lr") if s.lr is None else s.lr
    s.tokens_per_s = got.get("tokens") if s.tokens_per_s is None else s.tokens_per_s
    if s.step_s is None:
        ms = got.get("ms")
        s.step_s = ms / 1000 if ms is not None else got.get("s")
    if s.data_wait is None:
        share, percent, ms, seconds = got.get("share"), got.get("percent"), got.get("data_ms"), got.get("data_s")
        if share is None and percent is not None:
            share = percent / 100
        if share is None and s.step_s and (ms is not None or seconds is not None):
            share = (ms / 1000 if ms is not None else seconds or 0.0) / s.step_s
        s.data_wait = min(max(share, 0.0), 1.0) if share is not None else None
    return s
