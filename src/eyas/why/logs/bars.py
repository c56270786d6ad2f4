"""Progress bars: tqdm, tqdm.rich, Lightning's and ultralytics' drawings of the same."""

from __future__ import annotations

import re

from eyas.why.logs.sighting import Sighting, clock, metrics, num, pairs, whole

_TQDM = re.compile(
    r"(\d{1,3})%\|[^|]{0,400}\|\s{0,3}([\d.,]{1,16}[kMGTP]?)/([\d.,?]{1,16}[kMGTP]?) \[([\d:]{4,12})<"
    r"((?:\d{1,5} days?, )?[\d:?]{1,12})(?:,\s{0,4}(\?|[\d.]{1,12}(?:e[+-]?\d{1,3})?[kMGTP]?) ?([^\s,\]]{1,24}))?"
)
_TQDM_OPEN = re.compile(
    r"(?:^|: ?|\s)(\d{1,15}(?:\.\d{1,3})?[kMG]?) ?([A-Za-z]{1,16}) \[([\d:]{4,12}), ?"
    r"(\?|[\d.]{1,12}[kMG]?) ?([^\s,\]]{1,24})"
)
_RICH = re.compile(
    r"(\d{1,3})%\s{1,2}[━╸╺─ ]{1,400}\s{0,2}([\d.,]{1,16}[kMG]?)/([\d.,?]{1,16}[kMG]?)\s{1,2}"
    r"\[\s?([\d:]{4,12})\s?<\s?([\d:?-]{1,12})"
    r"\s?,\s{0,2}([\d.?]{1,12})\s{0,2}([^\s\]]{1,24})"
)
_LIGHTNING_RICH = re.compile(
    r"[━╸╺─]{2,400}\s{1,4}(\d{1,12})/(\d{1,12})\s{1,4}(\d{1,4}:\d\d:\d\d)\s{1,2}•\s{1,2}([\d:-]{4,12})(?:\s{1,4}([\d.]{1,12})it/s)?"
)
_ULTRA = re.compile(
    r"(\d{1,3})% [━╸╺─]{1,200} (\d{1,12})/(\d{1,12}) ([\d.]{1,12}) ?(it/s|s/it) "
    r"([\d:.hms]{2,12})(?:<([\d:.hms]{2,12}))?"
)
_DESC_EPOCH = re.compile(r"\bepochs?[ :#_\[(]{0,3}(\d{1,7})(?:\s?(?:/|of)\s?(\d{1,7}))?", re.I)
_DESC_FRACTION = re.compile(r"^\s{0,8}(\d{1,6})/(\d{1,6})\s")


def _bar(s: Sighting, desc: str, rate: str | None, unit: str | None, tail: str) -> Sighting:
    s.bar, s.desc = True, desc.strip().rstrip(":|- ").strip()[-120:]
    value = num(rate)
    if value and unit and "/" in unit:
        head, _, per = unit.partition("/")
        s.step_s = 1 / value if per == "s" else value if head == "s" else None
        s.unit = (per if head == "s" else head) or "it"
    if (m := _DESC_EPOCH.search(s.desc)) or (m := _DESC_FRACTION.match(desc)):
        s.epoch, s.epochs, s.per_epoch = num(m.group(1)), num(m.group(2)), True
    step_s = s.step_s
    if tail and "=" in tail:
        metrics(s, pairs(tail[:600]))
        s.step_s = step_s
    return s


def tqdm(text: str) -> Sighting | None:
    m = _TQDM.search(text)
    if m is None:
        return None
    s = Sighting("tqdm", whole(m.group(2)), whole(m.group(3)), elapsed=clock(m.group(4)), left=clock(m.group(5)))
    return _bar(s, text[max(0, m.start() - 160) : m.start()], m.group(6), m.group(7), text[m.end() :])


def tqdm_open(text: str) -> Sighting | None:
    """A bar without a total: `desc: 10it [00:12, 1.2s/it]`."""
    m = _TQDM_OPEN.search(text)
    if m is None or ("/" not in m.group(5) and "?" not in m.group(4)):
        return None
    s = Sighting("tqdm", whole(m.group(1)), elapsed=clock(m.group(3)))
    return _bar(s, text[max(0, m.start() - 160) : m.start()], m.group(4), m.group(5), text[m.end() :])


def rich_bar(text: str) -> Sighting | None:
    if m := _RICH.search(text):
        s = Sighting(
            "tqdm.rich", whole(m.group(2)), whole(m.group(3)), elapsed=clock(m.group(4)), left=clock(m.group(5))
        )
        return _bar(s, text[max(0, m.start() - 160) : m.start()], m.group(6), m.group(7), "")
    if m := _LIGHTNING_RICH.search(text):
        s = Sighting(
            "lightning", whole(m.group(1)), whole(m.group(2)), elapsed=clock(m.group(3)), left=clock(m.group(4))
        )
        return _bar(s, text[max(0, m.start() - 160) : m.start()], m.group(5), "it/s", text[m.end() :])
    if m := _ULTRA.search(text):
        s = Sighting(
            "ultralytics", whole(m.group(2)), whole(m.group(3)), elapsed=clock(m.group(6)), left=clock(m.group(7))
        )
        return _bar(s, text[max(0, m.start() - 160) : m.start()], m.group(4), m.group(5), "")
    return None
