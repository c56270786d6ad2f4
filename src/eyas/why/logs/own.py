"""Lines that eyas prints itself: how far a stage is, and what its recorder says in place of a silent loop.

`step 812/1,702 · loss 6.55 · ... · 7 min left` (train), `capture 442/1,341 samples · ... · 837 s left`,
`decoded 16/32 prompts · ...` (eval), `sample 442/1,341 · forward 20 s` (the recorder); in `eyas demo` with the stage in
front: `[3/7 capture] ...`. Only the last stage counts: its number falls behind that of the one before.
"""

from __future__ import annotations

import re

from eyas.why.logs.facts import Phase, PhaseId
from eyas.why.logs.normalise import Record
from eyas.why.logs.sighting import Sighting, clock, num, whole

HINTS = ("step ", "sample", "prompt", "conversations")
_N = r"([\d,]{1,15})"
_STAGE = r"(?:\[(?P<stage>\d{1,2})/(?P<stages>\d{1,2}) (?P<name>[a-z]{1,20})\] )?(?:rank \d{1,5}: )?"
_LINE = re.compile(
    rf"^{_STAGE}(?:(step|sample|prompt) {_N}/{_N}"
    rf"|(?:capture|decoded|regenerate|index|convert|check) {_N}/{_N} (sample|prompt|conversation)s)"
    r"(?: · (.{0,400}))?$"
)
_DOING = re.compile(
    rf"^{_STAGE}(?:\w{{1,32}} [\d,/]{{1,32}}|before the first \w{{1,32}})"
    rf" · ([\w ]{{1,24}}?)(?: for)? \d{{1,6}} s(?: · |$)"
)
_LEFT = re.compile(r"(?:^|· )((?:[\d,]{1,9} (?:h|min|s) ?){1,2})left$")
_LOSS = re.compile(r"\bloss ([\d.]{1,14}|nan|inf)")
_PACE = re.compile(r"\b([\d.]{1,14}) ?(ms|s)(?:/step| a step| per step)")
_TOKENS = re.compile(r"\b([\d,]{1,12}) tokens/s")
_WAIT = re.compile(r"\bdata wait (\d{1,3})%")
_ASIDE = re.compile(r"(?:stall|eyas why): ")  # the recorder's, about the line before
PHASES: dict[str, PhaseId | None] = {
    "starting": "initialising",
    "reading verifier": "loading-model",
    "indexing": "loading-data",
    "compiling": "compiling",
    "validating": "evaluating",
    "decoding": "evaluating",
    "saving": "checkpointing",
}


def progress(text: str) -> Sighting | None:
    """What a line of a stage says."""
    m = _LINE.match(text)
    if m is None:
        return None
    unit, done, of, done2, of2, unit2, rest = m.groups()[3:]
    rest, unit = rest or "", unit or unit2
    if unit != "step" and not rest:
        return None  # anybody's "sample 3/10"
    s = Sighting("eyas", whole(done or done2), whole(of or of2), desc=rest, unit=unit)
    s.more = unit == "prompt" or (m["stage"] is not None and m["stage"] != m["stages"])
    loss, pace, tokens = _LOSS.search(rest), _PACE.search(rest), _TOKENS.search(rest)
    s.loss = num(loss.group(1)) if loss else None
    seconds = num(pace.group(1)) if pace else None
    s.step_s = seconds / 1000 if seconds is not None and pace and pace.group(2) == "ms" else seconds
    s.tokens_per_s = num(tokens.group(1)) if tokens else None
    wait, left = _WAIT.search(rest), _LEFT.search(rest)
    s.data_wait = min(int(wait.group(1)) / 100, 1.0) if wait else None
    s.left = clock(left.group(1).replace(",", "")) if left else None
    return s


def last_stage(series: list[Sighting]) -> list[Sighting]:
    """The sightings of the stage that the newest one belongs to."""
    key = (series[-1].unit, series[-1].total)
    begin = next((i + 1 for i in range(len(series) - 1, -1, -1) if (series[i].unit, series[i].total) != key), 0)
    return series[begin:]


def phase(records: list[Record]) -> tuple[bool, Phase | None]:
    """(whether the log's last line is eyas' own, the phase in which it says that the run is)."""
    last = next((r for r in reversed(records) if not _ASIDE.match(r.text)), None)
    if last is None:
        return False, None
    if m := _DOING.match(last.text):
        found = PHASES.get(m.group(4))
        return True, Phase(found, last.raw[:300], at=last.at) if found else None
    stage = re.match(_STAGE, last.text)
    if stage is not None and stage["name"] == "eval":
        return True, Phase("evaluating", last.raw[:300], at=last.at)
    return bool(_LINE.match(last.text)) or (stage is not None and stage["name"] is not None), None
