"""A counter that no format knows: the same sentence again and again, one number in it growing, others changing.

`Episode 120 reward 13.2`, `s=40 l=0.31`, `Train: 12/500 cost=2.1`. A program that prints such lines makes progress,
whatever it calls a step. A heart-beat is told apart by having nothing but a clock or a counter in it, or by its words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise

from eyas.why.logs.normalise import Record
from eyas.why.logs.sighting import Sighting, metrics, pairs

LEAST = 3  # lines of one shape
_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d{1,15}(?:\.\d{0,15})?(?:[eE][+-]?\d{1,3})?|nan|inf)(?![\w]|\.\d)", re.I)
_TOTAL = re.compile(r"\s?(?:/|of)\s?$")
# Sentences that count something else than the work, or say that it does not go on.
_OTHER = re.compile(
    r"heart.?beat|alive|still|wait|uptime|elapsed|idle|poll|memory|\bmem\b|\brss\b|watchdog|ping|retry|retries|retrying|attempt"
    r"|error|warn|fail|refused|time.?out|sleep|next run"
    r"|load|download|upload|shard|fetch|extract|unpack|tokeni[sz]|cach|sav|checkpoint|eval|valid|test|compil|install",
    re.I,
)


def counted(records: list[Record]) -> list[Sighting]:
    """The sightings of the most frequent sentence that counts; empty where there is none."""
    shapes: dict[str, list[tuple[Record, list[re.Match[str]]]]] = defaultdict(list)
    for record in records:
        text = record.text[:300]
        numbers = list(_NUMBER.finditer(text))[:24]
        if numbers and "%|" not in text and 'File "' not in text:
            shapes[_NUMBER.sub("#", text)].append((record, numbers))
    best: list[Sighting] = []
    for shape, lines in shapes.items():
        if len(lines) < LEAST or len(lines) <= len(best) or _OTHER.search(shape):
            continue
        column = _counter([[m.group() for m in numbers] for _, numbers in lines])
        if column is not None:
            best = [_sighting(record, numbers, column) for record, numbers in lines]
    return best


def _counter(rows: list[list[str]]) -> int | None:
    """The column that counts: whole, always growing, not alone: another varies as measurements do, or is a total."""
    columns = list(zip(*rows, strict=True))
    found = None
    for i, column in enumerate(columns):
        if not all(value.isdigit() for value in column):
            continue
        steps = [int(b) - int(a) for a, b in pairwise(column)]
        if min(steps) > 0 and steps.count(max(set(steps), key=steps.count)) >= 0.6 * len(steps):
            found = i
            break
    if found is None:
        return None
    measures = any(
        len(set(column)) > 1 or column[0].lower() == "nan"
        for i, column in enumerate(columns)
        if i != found and any("." in value or "e" in value.lower() or value.lower() == "nan" for value in column)
    )
    after = columns[found + 1] if found + 1 < len(columns) else ()
    total = bool(after) and len(set(after)) == 1 and after[0].isdigit() and int(after[0]) >= int(columns[found][-1])
    return found if measures or total else None


def _sighting(record: Record, numbers: list[re.Match[str]], column: int) -> Sighting:
    text, here = record.text[:300], numbers[column]
    after = numbers[column + 1] if column + 1 < len(numbers) else None
    of = after is not None and _TOTAL.match(text[here.end() : after.start()]) and after.group().isdigit()
    s = Sighting("generic", int(here.group()), int(after.group()) if of and after is not None else None)
    s.desc, s.number, s.rank, s.at, s.line = "learned", record.number, record.rank, record.at, record.raw
    return metrics(s, {key.lower(): value for key, value in pairs(text).items()})
