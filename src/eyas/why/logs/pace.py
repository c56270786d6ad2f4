"""Seconds per step, robustly: a median over recent windows, without the first step and without pauses.

A bar's clock has a resolution of one second, so short steps are gathered into windows of five seconds first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from eyas.why.logs.facts import Pace, Spikes
from eyas.why.logs.progress import GAP
from eyas.why.logs.sighting import Sighting

WINDOW_S = 5.0  # for clocks of whole seconds
RECENT = 30  # windows in the median
Source = Literal["printed", "elapsed", "stamps", "rate"]


@dataclass
class Tempo:
    pace: Pace | None = None
    steps_per_line: float | None = None
    line_interval: float | None = None
    spikes: Spikes | None = None


@dataclass(slots=True)
class _Point:
    step: int
    t: float | None
    printed: float | None
    epoch: float | None


def tempo(series: Sequence[Sighting]) -> Tempo:
    """Everything about time that the training lines say."""
    out = Tempo()
    if not series:
        return out
    bar = series[-1].bar
    source, segments = _segments(series, bar)
    gaps = [b.step - a.step for seg in segments for a, b in pairwise(seg)]
    out.steps_per_line = float(median(gaps[-200:])) if gaps else None
    whole = source == "elapsed" and all(p.t == int(p.t) for seg in segments for p in seg if p.t is not None)
    whole = whole or (source == "stamps" and all(p.t is not None and p.t == int(p.t) for seg in segments for p in seg))
    out.pace = _pace(segments, source, whole)
    if out.pace is None:
        out.pace = _single(series)
    if out.pace is not None:
        out.line_interval = _interval(segments, out, bar)
    out.spikes = _spikes(segments, source, whole, bar, out.pace)
    return out


def _segments(series: Sequence[Sighting], bar: bool) -> tuple[Source, list[list[_Point]]]:
    """Runs of growing steps on one clock; a fall of the step, a new epoch or unread bytes begin a new one."""
    printed = sum(s.step_s is not None for s in series) * 2 >= len(series) and not bar
    elapsed = sum(s.elapsed is not None for s in series) * 2 >= len(series)
    source: Source = "printed" if printed else "elapsed" if elapsed else "stamps"
    segments: list[list[_Point]] = []
    before: Sighting | None = None
    for s in series:
        if s.step is None:
            continue
        t = s.elapsed if elapsed else s.at
        point = _Point(s.step, t, s.step_s if not bar else None, s.epoch)
        new = (
            before is None
            or s.step < (before.step or 0)
            or (s.per_epoch and s.epoch != before.epoch)
            or s.number // GAP != before.number // GAP
            or (elapsed and s.elapsed is not None and before.elapsed is not None and s.elapsed < before.elapsed)
        )
        if new:
            segments.append([point])
        elif s.step > segments[-1][-1].step:
            segments[-1].append(point)
        before = s
    return source, segments


def _windows(segment: list[_Point], source: Source, whole: bool) -> list[float]:
    """Seconds per step of each window of a segment."""
    if source == "printed":
        return [p.printed for p in segment if p.printed is not None and p.printed > 0]
    points = [p for p in segment if p.t is not None]
    out: list[float] = []
    if not points:
        return out
    start = points[0]
    for p in points[1:]:
        took = (p.t or 0.0) - (start.t or 0.0)
        if took >= (WINDOW_S if whole else 1e-6):
            out.append(took / (p.step - start.step))
        if took < 0 or took >= (WINDOW_S if whole else 1e-6):
            start = p
    took = (points[-1].t or 0.0) - (points[0].t or 0.0)
    if not out and took > 0 and points[-1].step > points[0].step:
        out.append(took / (points[-1].step - points[0].step))
    return out


def _pace(segments: list[list[_Point]], source: Source, whole: bool) -> Pace | None:
    windows = [_windows(seg, source, whole) for seg in segments]
    first_step = None
    if segments and segments[0][0].step <= 1 and windows[0] and (len(windows[0]) > 1 or sum(map(len, windows)) > 1):
        first_step = windows[0].pop(0)
    flat = [w for ws in windows for w in ws]
    if not flat:
        return None
    recent = flat[-RECENT:]
    middle = median(recent)
    if middle <= 0:
        return None
    ordered = sorted(recent)
    spread = (ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]) / middle
    first_epoch = warm = None
    epochs = [(seg[0].epoch, ws) for seg, ws in zip(segments, windows, strict=True) if ws]
    if len(epochs) > 1 and (epochs[0][0] or 0) <= 1 and epochs[-1][0] != epochs[0][0]:
        first_epoch = median(epochs[0][1])
        warm = median([w for epoch, ws in epochs if epoch != epochs[0][0] for w in ws])
    return Pace(middle, source, len(recent), round(spread, 4), recent[-1], first_step, first_epoch, warm, max(recent))


def _single(series: Sequence[Sighting]) -> Pace | None:
    """One usable line only: its average since the start, the rate it prints, or what it says is left."""
    last = series[-1]
    if last.elapsed and last.step and last.bar:
        return Pace(last.elapsed / last.step, "rate", 1)
    if last.step_s:
        return Pace(last.step_s, "rate", 1)
    told = [(s.left, s.total - s.step) for s in series if s.left and s.total and s.step is not None and not s.per_epoch]
    told = [t for t in told if t[0] >= 10] or told  # near the end it is rounded to nothing
    return Pace(told[-1][0] / told[-1][1], "printed", 1) if told and told[-1][1] > 0 else None


def _interval(segments: list[list[_Point]], out: Tempo, bar: bool) -> float | None:
    """Seconds between two progress lines. The larger of typical and mean: eager alarms are worse than late ones."""
    assert out.pace is not None
    times = [[p.t for p in seg if p.t is not None] for seg in segments]
    gaps = [b - a for ts in times for a, b in pairwise(ts) if b >= a][-400:]
    steps = out.steps_per_line or (1.0 if bar else None)
    by_steps = out.pace.seconds_per_step * steps if steps else None
    if not gaps:
        return max(by_steps, 0.1) if by_steps is not None else None
    typical = max(median(gaps), sum(gaps) / len(gaps)) if bar else median(gaps)
    return max(typical, out.pace.seconds_per_step if bar else 0.0, by_steps if bar and by_steps else 0.0, 0.1)


def _spikes(segments: list[list[_Point]], source: Source, whole: bool, bar: bool, pace: Pace | None) -> Spikes | None:
    """A stall every N steps. Only where each step can be seen: a bar, or a line a step."""
    if pace is None or (not bar and sum(len(s) for s in segments) < 12):
        return None
    gaps: list[int] = []
    heights: list[float] = []
    calm: list[float] = []
    for seg in segments:
        at: list[int] = []
        if not bar and any(b.step - a.step != 1 for a, b in pairwise(seg)):
            continue
        usual = pace.seconds_per_step if source == "printed" or len(seg) < 4 else _usual(seg)
        for a, b in pairwise(seg):
            if source == "printed":
                took = b.printed
            else:
                took = b.t - a.t if a.t is not None and b.t is not None else None
            if took is None:
                continue
            if took > 3 * usual * (b.step - a.step) and took > (1.5 if whole else 0.0):
                at.append(b.step)
                heights.append(took)
            else:
                calm.append(took / (b.step - a.step))
        gaps += [b - a for a, b in pairwise(at)]
    if len(gaps) < 3:
        return None
    period, count = Counter(gaps).most_common(1)[0]
    if count < 0.7 * len(gaps) or not 2 <= period <= 256:
        return None
    base = max(median(calm) if calm else 0.0, 0.05)
    return Spikes(period, round(median(heights) / base, 1), count + 1)


def _usual(seg: list[_Point]) -> float:
    """Median time of a step within a segment; spikes hardly move it."""
    each = [(b.t - a.t) / (b.step - a.step) for a, b in pairwise(seg) if a.t is not None and b.t is not None]
    return median(each) if each else 0.0
