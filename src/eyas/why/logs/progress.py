"""From single lines to the run: which of the bars and records is the training, and where it stands."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from eyas.why.logs import own, tables
from eyas.why.logs.facts import PhaseId
from eyas.why.logs.formats import RANK
from eyas.why.logs.sighting import Sighting, num

GAP = 1_000_000  # record numbers jump to the next multiple where lines between were not read
_TOTAL = re.compile(
    r"total (?:optimi[sz]ation |training |train |num(?:ber of)? )?(?:steps|iterations)\b[ :=]{1,4}([\d,]{1,15})"
    r"|\b(?:max_steps|train_iters|max_iters|total_steps|num_iterations)[\"']?[ :=]{1,4}([\d,]{1,15})",
    re.I,
)
_EPOCHS = re.compile(
    r"\b(?:num[_ ]?epochs|max[_ ]?epochs|num_train_epochs"
    r"|total[_ ]epochs)[\"']?[ :=]{1,4}([\d.]{1,9})",
    re.I,
)
_UNITS = ("sample", "prompt", "conversation")
_EPOCHISH = re.compile(r"\bepochs?\b", re.I)
_INNERISH = re.compile(r"\b(?:train\w{0,3}|iter\w{0,6}|steps?|batch\w{0,2}|epochs?)\b", re.I)


@dataclass
class Progress:
    """`series`: the sightings of the training itself, in order; all others are told apart by `others`."""

    series: list[Sighting] = field(default_factory=list)
    format: str | None = None
    formats: list[str] = field(default_factory=list)
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    per_epoch: bool = False
    unit: str = "step"
    number: int = -1  # record of the last training line
    phase_bar: tuple[PhaseId, Sighting] | None = None
    finished: bool = False  # an outer bar of epochs is full


def bar_phase(s: Sighting) -> PhaseId | None:
    """What a bar that is not the training counts; None for a bar that may be the training."""
    if re.match(r"[kMG]?i?B(?:/s)?$", s.unit):
        return "downloading"
    return next((phase for phase, pattern in tables.BAR_PHASES if pattern.search(s.desc)), None) if s.desc else None


def choose(sightings: list[Sighting], texts: Iterable[str]) -> Progress:
    """The training among everything that counts. `texts`: lines that may hold a banner with the totals."""
    out = Progress()
    banner_total, banner_epochs = _banner(texts)
    sightings = _one_rank(sightings)
    training: list[Sighting] = []
    for s in sightings:
        phase = bar_phase(s) if s.bar else ("evaluating" if s.evaluation else None)
        if phase is None:
            training.append(s)
        elif s.bar:
            out.phase_bar = (phase, s)
    training = _trusted_generic(training)
    counts = Counter(s.format for s in training)
    bars = [s for s in training if s.bar and s.step is not None]
    records = [s for s in training if not s.bar and s.step is not None and s.unit != "epoch"]
    main = _main_records(records)
    if main and not _only_counts(main, bars):
        main = own.last_stage(main) if main[-1].format == "eyas" else main
        out.series, out.per_epoch = main, main[-1].per_epoch
    elif bars:
        _main_bar(bars, banner_total, out)
    elif epochs := [s for s in training if s.unit == "epoch" and s.epoch is not None]:
        out.series = [replace(s, step=int(s.epoch or 0), total=int(s.epochs) if s.epochs else None) for s in epochs]
        out.unit = "epoch"
    if not out.series and (dicts := [s for s in training if s.epoch is not None]):
        out.series = _from_epochs(dicts, banner_total, banner_epochs)
    if out.series:
        last = out.series[-1]
        out.step, out.total = last.step, last.total
        out.unit = out.unit if out.unit == "epoch" else last.unit if last.unit in _UNITS else "step"
        out.epoch = last.epoch if out.epoch is None else out.epoch
        out.epochs = last.epochs if out.epochs is None else out.epochs
        if out.total is None and not out.per_epoch and banner_total and banner_total >= (out.step or 0):
            out.total = banner_total
    for s in training:
        if (s.epoch is not None and out.epoch is None) or (s.unit == "epoch" and out.unit != "epoch"):
            out.epoch, out.epochs = s.epoch, s.epochs or out.epochs
    if out.unit != "epoch":
        carried = [s for s in training if s.format in ("hf-trainer", "axolotl") and s.epoch is not None]
        out.epoch = carried[-1].epoch if carried else out.epoch
    out.epochs = out.epochs or banner_epochs
    known = [name for name in counts if name != "generic" or len(counts) == 1]
    out.formats = sorted(known, key=lambda name: RANK.get(name, 50))
    out.format = _format_name(out, training)
    out.number = max((s.number for s in training if s.step is not None or s.epoch is not None), default=-1)
    return out


def _format_name(out: Progress, training: list[Sighting]) -> str | None:
    dicts = [s.format for s in training if s.format in ("axolotl", "hf-trainer")]
    if dicts and (not out.series or out.series[-1].bar or out.series[-1].format in dicts):
        return dicts[-1]
    if not out.series:
        return out.formats[0] if out.formats else None
    last = out.series[-1]
    if last.bar and re.match(r"training(?: epoch \d+)?$", last.desc, re.I) and last.unit == "step":
        return "specforge"
    return last.format


def _banner(texts: Iterable[str]) -> tuple[int | None, float | None]:
    total: int | None = None
    epochs: float | None = None
    for text in texts:
        if total is None and (m := _TOTAL.search(text[:2000])):
            value = num(m.group(1) or m.group(2))
            total = int(value) if value and value > 1 else None
        if epochs is None and (m := _EPOCHS.search(text[:2000])):
            epochs = num(m.group(1)) or None
    return total, epochs


def _one_rank(sightings: list[Sighting]) -> list[Sighting]:
    """Several ranks print the same bar: follow the one that says most, of equals the lowest."""
    counts = Counter(s.rank for s in sightings)
    if len(counts) < 2:
        return sightings
    best = max(counts, key=lambda rank: (counts[rank], -(rank if rank is not None else -1)))
    return [s for s in sightings if s.rank == best]


def _trusted_generic(training: list[Sighting]) -> list[Sighting]:
    """Plain `step N` sentences count only if they recur and grow, or say of how many."""
    known = any(s.format != "generic" and (s.step is not None or s.epoch is not None) for s in training)
    groups: dict[str, list[Sighting]] = defaultdict(list)
    for s in training:
        if s.format == "generic":
            groups[s.desc].append(s)
    trusted: set[int] = set()
    for desc, group in groups.items():
        values = [(s.epoch if s.unit == "epoch" else s.step) or 0 for s in group]
        grows = len(set(values)) > 1 and sum(b >= a for a, b in pairwise(values)) >= 0.7 * (len(values) - 1)
        counted = any((s.epochs if s.unit == "epoch" else s.total) for s in group)
        if (grows or counted) and (desc == "epoch" or not known):
            trusted.update(id(s) for s in group)
    kept = [s for s in training if s.format != "generic" or id(s) in trusted]
    if known:
        return kept
    best = max((g for d, g in groups.items() if d != "epoch" and id(g[0]) in trusted), key=len, default=[])
    keep = {id(s) for s in best}
    return [s for s in kept if s.format != "generic" or s.unit == "epoch" or id(s) in keep]


def _main_records(records: list[Sighting]) -> list[Sighting]:
    if not records:
        return []
    by_format: dict[str, list[Sighting]] = defaultdict(list)
    for s in records:
        by_format[s.format].append(s)
    oldest, newest = records[0].number, records[-1].number
    middle = (oldest + newest) / 2 if newest // GAP == oldest // GAP else newest // GAP * GAP
    live = {name: group for name, group in by_format.items() if group[-1].number >= middle} or by_format
    return live[min(live, key=lambda name: (RANK.get(name, 50), -len(live[name])))]


def _only_counts(records: list[Sighting], bars: list[Sighting]) -> bool:
    """Records without any clock beside a bar that counts the same steps: the bar says more."""
    if not bars or any(s.step_s is not None or s.at is not None or s.elapsed is not None for s in records):
        return False
    return abs((bars[-1].step or 0) - (records[-1].step or 0)) <= max(2, 0.1 * (bars[-1].total or 0))


def _key(s: Sighting) -> tuple[str, str, int | None]:
    return s.format, re.sub(r"[\d.]{1,20}", "#", s.desc), s.total


def _main_bar(bars: list[Sighting], banner: int | None, out: Progress) -> None:
    groups: dict[tuple[str, str, int | None], list[Sighting]] = defaultdict(list)
    for s in bars:
        groups[_key(s)].append(s)
    outer_key = max(
        groups,
        key=lambda k: (banner is not None and k[2] == banner, _epochs(groups[k]), _longest(groups[k]), len(groups[k])),
    )
    outer = groups.pop(outer_key)
    inner = max((g for g in groups.values() if _nested(outer, g)), key=_longest, default=None)
    series = inner or outer
    for group in groups.values():
        if (
            group is not inner
            and group[-1].number > outer[0].number
            and group[-1].number > (out.phase_bar[1].number if out.phase_bar else -1)
        ):
            out.phase_bar = ("evaluating", group[-1])
    out.series, out.per_epoch = series, series[-1].per_epoch
    if inner is not None:
        done = outer[-1].step or 0
        out.per_epoch, out.epochs = True, float(outer[-1].total) if outer[-1].total else None
        out.epoch = float(min(done + 1, outer[-1].total or done + 1))
        out.finished = outer[-1].total is not None and done >= outer[-1].total
    elif _epochs(outer):
        out.unit = "epoch"


def _epochs(group: list[Sighting]) -> bool:
    """A bar that counts epochs: called so, without the number of one."""
    last = group[-1]
    return (bool(_EPOCHISH.search(last.desc)) and not last.per_epoch) or last.unit.lower().startswith("epoch")


def _longest(group: list[Sighting]) -> float:
    return max((s.elapsed or 0.0 for s in group), default=0.0)


def _nested(outer: list[Sighting], inner: list[Sighting]) -> bool:
    """Is `inner` the bar of batches under `outer`, a bar of epochs? Else it is an evaluation between steps."""
    last = outer[-1]
    if not last.total or (inner[-1].number < outer[0].number and last.step):
        return False
    if _epochs(outer):
        return True
    if inner[-1].desc and inner[-1].desc != last.desc and _INNERISH.search(inner[-1].desc) and not last.desc:
        return True
    if last.per_epoch or (last.desc and not inner[-1].desc):
        return False
    runs = 1 + sum((b.step or 0) < (a.step or 0) for a, b in pairwise(inner))
    moved = (last.step or 0) - (outer[0].step or 0)
    if not last.step:
        return True
    if moved > 2:
        return runs >= 0.7 * moved
    whole_run = [s.elapsed / s.step * s.total for s in inner if s.elapsed and s.step and s.total]
    return bool(whole_run and last.elapsed) and 0.3 < whole_run[-1] / ((last.elapsed or 1.0) / last.step) < 1.2


def _from_epochs(dicts: list[Sighting], total: int | None, epochs: float | None) -> list[Sighting]:
    """HF records without a bar: the step follows from the epoch when the banner told the totals."""
    if not total or not epochs:
        return []
    return [replace(s, step=round((s.epoch or 0.0) / epochs * total), total=total, bar=False) for s in dicts]
