"""Head and tail of a log -> `LogFacts`. Bounded: 64 KiB of head, 256 KiB of tail, whatever the file's size."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

from eyas.why.logs import events, own, tables
from eyas.why.logs.facts import LogFacts, Phase
from eyas.why.logs.formats import FORMATS, generic
from eyas.why.logs.learned import counted as learned
from eyas.why.logs.normalise import Record, Text, normalise
from eyas.why.logs.pace import Tempo, tempo
from eyas.why.logs.progress import GAP, Progress, choose
from eyas.why.logs.sighting import Sighting

HEAD_BYTES = 64 * 1024
TAIL_BYTES = 256 * 1024
FIRST, LAST = 250, 1200  # records that are searched for progress
_GENERIC_HINTS = ("step", "iter", "epoch", "batch", "round", "update", "it ", "it:")


def read_path(path: str | os.PathLike[str], now: float | None = None) -> LogFacts:
    """Read a file here. Regular files only: a pipe or a device would block."""
    file = Path(path)
    with file.open("rb") as f:
        stat = os.fstat(f.fileno())
        head = f.read(min(HEAD_BYTES, stat.st_size))
        f.seek(max(0, stat.st_size - TAIL_BYTES))
        tail = f.read(TAIL_BYTES)
    return read(head, tail, size=stat.st_size, mtime=stat.st_mtime, now=time.time() if now is None else now)


def read(head: bytes, tail: bytes, *, size: int, mtime: float, now: float) -> LogFacts:
    """What a log says. `head` and `tail` may overlap or be the same bytes; `now` is on the clock of `mtime`."""
    head, tail, size = head[:HEAD_BYTES], tail[-TAIL_BYTES:], max(size, len(tail))
    gap = size > len(head) + len(tail)
    if not gap:  # all of the file was read: one text
        tail, head = head[: max(size - len(tail), 0)] + tail, b""
    elif head:
        cut = max(head.rfind(b"\n"), head.rfind(b"\r"))  # the last line of the head is torn
        head = head[: cut + 1] if cut > 0 else head
    text = normalise(tail, mtime)
    if gap and len(text.records) > 1:
        del text.records[0]  # torn
    early = normalise(head, mtime, keep="first", limit=FIRST) if head else Text()
    for record in text.records:
        record.number += GAP if head else 0
    early.offset = text.offset if early.offset is None else early.offset
    _to_unix(early)
    _to_unix(text)
    records = early.records + text.records
    everything = "\n".join(r.text for r in records)
    looked_at = _looked_at(records)
    sightings = _sightings(looked_at, everything)
    counted = {s.number for s in sightings if s.format != "generic" and not s.evaluation}
    words = [r for r in records if r.number not in counted and "%|" not in r.text]
    lower = "\n".join(r.text for r in words).lower()
    progress = choose(sightings, (r.text for r in words) if _banner_in(lower) else ())
    if not progress.series and (more := learned(looked_at)):
        sightings = sorted(sightings + more, key=lambda s: s.number)
        progress = choose(sightings, (r.text for r in words) if _banner_in(lower) else ())
    found = events.find(words, lower)
    facts = _file_facts(head, tail, text, records, size=size, mtime=mtime, now=now, gap=gap)
    facts = _with_progress(facts, progress, tempo(progress.series), sightings)
    ours, phase = own.phase(text.records)
    return _with_events(facts, progress, found, phase if ours else _phase(progress, words, lower), records)


def _to_unix(text: Text) -> None:
    """Record times to Unix time; where the clock cannot be tied they stay relative, good for differences only."""
    for record in text.records:
        if record.at is not None and text.offset and not record.utc:
            record.at += text.offset


def _looked_at(records: list[Record]) -> list[Record]:
    """The records searched for progress: the first few and the last many. Failures are looked for in all."""
    if len(records) <= FIRST + LAST:
        return records
    for record in records[-LAST:]:
        record.number += GAP
    for record in records[FIRST:-LAST]:
        record.number += GAP // 2
    return records[:FIRST] + records[-LAST:]


def _banner_in(lower: str) -> bool:
    return any(word in lower for word in ("total", "max", "epochs", "iters", "iterations"))


def _sightings(records: list[Record], everything: str) -> list[Sighting]:
    active = [f for f in FORMATS if any(h in everything for h in f[1])]
    found: list[Sighting] = []
    for record in records:
        text, seen = record.text, len(found)
        for name, hints, parse in active:
            if len(found) > seen and name not in ("json", "hf-trainer"):
                continue
            if any(h in text for h in hints) and (s := parse(text)) is not None:
                found.append(_placed(s, record))
        if len(found) == seen and any(h in text.lower() for h in _GENERIC_HINTS) and 'File "' not in text:
            s = generic(text)
            if s is not None:
                found.append(_placed(s, record))
    return found


def _placed(s: Sighting, record: Record) -> Sighting:
    s.number, s.rank, s.line = record.number, record.rank, record.raw
    s.at = record.at if s.at is None else s.at
    return s


def _file_facts(
    head: bytes, tail: bytes, text: Text, records: list[Record], *, size: int, mtime: float, now: float, gap: bool
) -> LogFacts:
    lines = text.newlines
    if gap:
        lines = round((head.count(b"\n") + text.newlines) * size / max(len(head) + len(tail), 1))
    stamped = next((r for r in reversed(text.records) if r.stamp is not None), None)
    ranks = sorted({r.rank for r in records if r.rank is not None})
    return LogFacts(
        size=size,
        mtime=mtime,
        read_at=now,
        idle_s=max(0.0, now - mtime),
        lines=lines,
        lines_exact=not gap,
        empty=not records,
        binary=text.binary,
        holes=text.holes,
        ends_with_newline=text.ends_with_newline,
        bar_lines=text.redraws,
        single_line_bar=text.redraws > 3 and text.newlines <= 1,
        first_line=records[0].raw[:400] if records else "",
        last_line=text.records[-1].raw[:800] if text.records else "",
        last_at=stamped.at if stamped is not None and text.offset is not None else None,
        last_stamp=stamped.stamp if stamped is not None else None,
        rank=ranks[0] if len(ranks) == 1 else None,
        ranks=tuple(ranks[:4096]),
        notes=("rich",) if text.rich else (),
    )


def _with_progress(facts: LogFacts, p: Progress, t: Tempo, sightings: list[Sighting]) -> LogFacts:
    training = [s for s in sightings if not s.evaluation and s.number <= p.number]
    loss = next((s.loss for s in reversed(training) if s.loss is not None), None)
    at_last = p.finished or (
        p.step is not None and not (p.series and p.series[-1].more) and p.total is not None and p.step >= p.total > 0
        and (not p.per_epoch or (p.epochs is not None and p.epoch is not None and p.epoch >= p.epochs))
    )  # fmt: skip
    share = [s.data_wait for s in training if s.data_wait is not None][-20:]
    last = next((s for s in reversed(sightings) if s.number == p.number), None)
    return replace(
        facts,
        format=p.format,
        formats=tuple(dict.fromkeys(([p.format] if p.format else []) + p.formats)),
        step=p.step,
        total=p.total,
        scope=None if p.step is None else "epoch" if p.per_epoch else "run",
        unit=p.unit,
        epoch=p.epoch,
        epochs=p.epochs,
        pace=t.pace,
        eta_s=_eta(p, t),
        steps_per_line=t.steps_per_line,
        line_interval_s=t.line_interval,
        progress_lines=len(p.series),
        at_last_step=at_last,
        loss=loss,
        bad_loss=loss is not None and not math.isfinite(loss),
        learning_rate=next((s.lr for s in reversed(training) if s.lr is not None), None),
        tokens_per_s=next((s.tokens_per_s for s in reversed(training) if s.tokens_per_s is not None), None),
        data_wait=round(sorted(share)[len(share) // 2], 4) if share else None,
        spikes=t.spikes,
        last_progress=last.line[:600] if last else None,
        status=p.series[-1].desc or None if p.series and p.series[-1].format == "eyas" else None,
    )


def _eta(p: Progress, t: Tempo) -> float | None:
    if p.format == "eyas":
        told = next((s.left for s in reversed(p.series) if s.left is not None), None)
        if told is not None:
            return told
    if p.step is None or p.total is None or t.pace is None:
        return p.series[-1].left if p.series and not p.per_epoch else None
    pace = t.pace.seconds_per_step
    left = max(0, p.total - p.step) * pace
    if not p.per_epoch:
        return round(left, 3)
    printed = p.series[-1].left
    if not p.series[-1].bar and printed is not None and p.format in ("mm", "meter", "detectron2"):
        return printed
    if p.epochs is None or p.epoch is None:
        return None
    return round(left + max(0.0, p.epochs - math.ceil(p.epoch)) * p.total * pace, 3)


def _with_events(
    facts: LogFacts, p: Progress, found: events.Events, phase: Phase | None, records: list[Record]
) -> LogFacts:
    errors = [replace(e, final=e.number >= p.number) for e in found.errors]
    barrier = found.barrier
    if barrier is not None:
        barrier = replace(barrier, final=found.barrier_number >= max(p.number, 0))
    after_end = [s for s in p.series if found.end is not None and s.number > found.end.number]
    ended = found.end is not None and not any(s.step is None or s.step != s.total for s in after_end)
    if found.end is not None and any(e.number > found.end.number and tables.DEATH.search(e.line) for e in errors):
        ended = False  # what its shell says last is a wait status: something still ran behind that line
    prompt, is_open = _prompt(facts, records, p)
    return replace(
        facts,
        error=events.explain(errors, found.failures),
        errors=tuple(sorted(errors, key=lambda e: e.number)[-64:]),
        rank_failures=tuple(found.failures[-256:]),
        collective=found.collective,
        barrier=barrier,
        world_size=found.world_size,
        ended=ended,
        ended_line=found.end.raw[:400] if ended and found.end is not None else None,
        phase=phase,
        prompt=prompt,
        prompt_open=is_open,
        trackers=tuple(found.trackers),
        notes=facts.notes + tuple(found.notes),
    )


def _phase(p: Progress, records: list[Record], everything: str) -> Phase | None:
    """The last announced phase; a line of training after it, or a word of its end, closes it."""
    active = [
        (phase, rule, closes) for phase, rule, closes in tables.PHASE_RULES if any(h in everything for h in rule.hints)
    ]
    last: Phase | None = None
    at = -1
    for record in records if active else ():
        lower = record.text[:600].lower()
        if "%|" in lower:
            continue
        for phase, rule, closes in active:
            if any(h in lower for h in rule.hints) and (rule.pattern is None or rule.pattern.search(record.text[:600])):
                if closes and (last is None or last.id != phase):
                    break
                line = record.raw[:300]
                last = Phase(phase, line, closes, at=record.at) if not closes else replace(last, closed=True)  # type: ignore[type-var]
                at = record.number
                break
    if p.phase_bar is not None and p.phase_bar[1].number >= at:
        phase, s = p.phase_bar
        done = s.step is not None and s.total is not None and s.step >= s.total
        last, at = Phase(phase, s.line[:300], done, s.step, s.total, s.at), s.number
    if last is not None and p.number > at and not last.closed:
        last = replace(last, closed=True)
    return last


def _prompt(facts: LogFacts, records: list[Record], p: Progress) -> tuple[str | None, bool]:
    for back, record in enumerate(reversed(records[-4:])):
        if record.number <= p.number:
            break
        text = record.text[-400:]
        if tables.PROMPT.search(text) and text.rstrip()[-1:] in "?:>])":
            return record.raw[-400:], back == 0 and not facts.ends_with_newline
    return None, False
