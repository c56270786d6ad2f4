"""Bytes of a log -> records: one printed line each, without colours, redraws, wraps and prefixes.

Linear in the input and bounded: at most `MAX_RECORDS` records of at most `MAX_CHARS` characters are kept.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date

MAX_RECORDS = 4000
MAX_CHARS = 6000

_CURSOR = re.compile(r"\x1b\[[\d;]{0,12}[ABEFGHJKfsu]|\x08+")  # moves: what follows is a new line of its own
_ESCAPE = re.compile(
    r"\x1b\[[0-?]{0,48}[ -/]{0,4}[@-~]|\x1b[\]P_^X][^\x07\x1b\n\r]{0,4096}(?:\x07|\x1b\\|)|\x1b[ -/]{0,2}[0-~]"
    r"|\x9b[\d;]{0,24}[@-~]"
)
_CONTROL = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127])
_TEXT_BYTES = bytes([9, 10, 13, 27, 8, *range(32, 256)])

_LEVEL = r"(?:DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL|TRACE|SUCCESS)"
# Who speaks: rank, launcher label, container runtime. Comes before anything the program itself prints.
_SPEAKER = re.compile(
    r"\s{0,2}(?:\[rank ?(?P<rank>\d{1,5})\]:? ?"
    r"|\[(?:[A-Za-z_-]{2,24})(?P<role>\d{1,4})\]: ?"
    r"|\((?:[\w.:<>/ -]{1,80} )?pid=(?P<pid>\d{1,9})(?:, ip=[\w.:]{1,60})?\) ?"
    r"|(?P<runtime>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)) (?:std(?:out|err) [FP] )?)"
)
_LABEL = re.compile(r"\s{0,4}(\d{1,5}): ")  # srun -l
_HOST = re.compile(r"([A-Za-z][\w-]{0,40}[\d.-][\w.-]{0,60}|localhost): ")  # pdsh, DeepSpeed
_RICH = re.compile(r"(?:\[(?:\d\d/\d\d/\d\d )?\d\d:\d\d:\d\d\] | {11}| {20})" + _LEVEL + r" +")
_RICH_CONTINUED = re.compile(r" {29}(?=\S)| {20}(?=\S)")
_RICH_SOURCE = re.compile(r"\s{1,200}[\w./<>-]{1,80}\.py:\d{1,6}$")
_PREFIX = re.compile(
    r"\s{0,3}(?:"
    r"(?P<iso>\[?(?P<date>\d{4}[-/]\d\d[-/]\d\d)[T ](?P<isotime>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?\]?[:,]?)"
    r"|(?P<us>\[?(?P<usdate>\d\d/\d\d(?:/\d\d)?) (?P<ustime>\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)\]?)"
    r"|(?P<clock>\[?(?P<time>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?:\]|(?=\s)))"
    r"|(?P<glog>\[?[IWEFD](?P<glogdate>\d{4}) (?P<glogtime>\d\d:\d\d:\d\d(?:\.\d{1,9})?) +(?:\d{1,9} )?"
    r"[\w./-]{1,120}:\d{1,6}\])"
    r"|(?P<syslog>(?P<sysdate>[A-Z][a-z]{2} [ \d]\d) (?P<systime>\d\d:\d\d:\d\d) [\w.-]{1,80} "
    r"[\w./-]{1,80}(?:\[\d{1,9}\])?:)"
    r"|(?P<drank>\[(?:RANK:|Rank |rank:)(?P<inrank>\d{1,5})\]:?)"
    r"|(?P<pgrank>\[PG [^\]]{0,120}Rank (?P<inpg>\d{1,5})\])"
    r"|(?P<level>\[" + _LEVEL + r"(?:\|[^\]]{1,100})?\]|" + _LEVEL + r"(?::[\w.]{1,80}:|:|(?=\s)))"
    r"|(?P<column>\[PID:\d{1,9}\]|\[[\w./-]{1,80}\.(?:py|cpp|cc|cu):\d{1,6}(?::\w{1,60})?\]|\([\w.]{1,60}:\d{1,6}\)"
    r"|>>(?= )|[-|](?= )(?: {1,8}(?!" + _LEVEL + r"\b)[\w.<>:]{1,80}\s{0,12}[-|](?= ))?)"
    r"|(?P<tag>\[[A-Za-z][\w.-]{1,60}(?::\d{1,6})?\](?= (?:\d{4}-|" + _LEVEL + r")))"
    r") ?"
)
_NAME = re.compile(r"\[[A-Za-z_][\w.]{1,80}(?:[.:]\w{1,60})*:\d{1,6}\] ?")  # [axolotl.train.train:123], after a stamp
_BAR_END = re.compile(r"\[[\d:]{4,12}<[^\]\[]{1,300}\]|\d/\d{1,12} \[[\d:]{4,12}<[^\]]{1,300}\]\]?")
_MONTHS = {
    m: i for i, m in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1)
}


@dataclass(slots=True)
class Record:
    """One printed line. `text` has no prefixes; its own indentation is kept."""

    number: int
    text: str
    raw: str
    rank: int | None = None
    host: str | None = None
    stamp: str | None = None
    at: float | None = None  # seconds on the log's own clock; see `Text.clock`
    utc: bool = False
    redraw: bool = False


@dataclass(slots=True)
class Text:
    records: list[Record] = field(default_factory=list)
    newlines: int = 0
    redraws: int = 0
    holes: bool = False
    binary: bool = False
    rich: bool = False  # RichHandler printed it
    ends_with_newline: bool = True
    offset: float | None = None  # add to a record's `at` to get Unix time; None: the clock cannot be tied


def normalise(data: bytes, mtime: float, *, keep: str = "last", limit: int = MAX_RECORDS) -> Text:
    """Records of `data`; of too many, the `keep` ("first" or "last") ones."""
    out = Text(newlines=data.count(b"\n"), ends_with_newline=data[-1:] in (b"", b"\n"))
    out.holes = b"\0" * 16 in data
    data = data.replace(b"\0", b"") if out.holes else data
    text = data.decode("utf-8", "replace")
    if len(data) > 32:
        out.binary = (len(data.translate(None, _TEXT_BYTES)) + text.count("\ufffd")) > 0.1 * len(data)
    text = _ESCAPE.sub("", _CURSOR.sub("\r", text) if "\x1b" in text or "\x08" in text else text)
    lines = _lines(text.replace("\r\n", "\n"), out, keep, limit)
    labels, hosts = _labelled(lines)
    clock = _Clock(mtime)
    rich: dict[int | None, Record] = {}  # the record that a wrapped continuation belongs to, by rank
    for raw, redraw in lines:
        record = Record(len(out.records), raw, raw, redraw=redraw)
        _speaker(record, clock, labels, hosts)
        open_record = rich.get(record.rank)
        if open_record is not None and (m := _RICH_CONTINUED.match(record.text)) and not _RICH.match(record.text):
            if len(open_record.text) < MAX_CHARS:
                open_record.text += " " + record.text[m.end() :].rstrip()
            continue
        if _RICH.match(record.text):
            record.text = _RICH_SOURCE.sub("", record.text.strip())
            rich[record.rank] = record
            out.rich = True
        elif open_record is not None:
            del rich[record.rank]
        _prefixes(record, clock)
        out.records.append(record)
    out.offset = clock.offset([r for r in out.records if r.at is not None])
    return out


def _lines(text: str, out: Text, keep: str, limit: int) -> list[tuple[str, bool]]:
    """(line, redrawn) pairs. A bar that something was printed behind is cut off from it."""
    lines: list[tuple[str, bool]] = []
    for physical in text.split("\n"):
        if "\r" not in physical:
            if physical and not physical.isspace():
                lines.append((physical, False))
            continue
        parts = [p for p in physical.split("\r") if p and not p.isspace()]
        out.redraws += physical.count("\r")
        last = len(parts) - 1
        lines.extend((p, i < last) for i, p in enumerate(parts))
    lines = lines[-limit:] if keep == "last" else lines[:limit]
    whole: list[tuple[str, bool]] = []
    for line, redraw in lines:
        clipped = line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 2000] + " … " + line[-1990:]
        clipped = clipped.translate(_CONTROL).rstrip() if not clipped.isprintable() else clipped.rstrip()
        if "%|" in clipped and (m := _BAR_END.search(clipped)) and len(clipped) - m.end() > 3:
            whole.append((clipped[: m.end()], True))
            clipped = clipped[m.end() :].strip()
        if clipped:
            whole.append((clipped, redraw))
    return whole


def _labelled(lines: list[tuple[str, bool]]) -> tuple[bool, frozenset[str]]:
    """Do most lines begin with `srun -l` task numbers? With host names?"""
    sample = lines[-400:]
    need = max(2, len(sample) // 2)
    labels = sum(1 for line, _ in sample if _LABEL.match(line)) >= need
    names = Counter(m.group(1) for line, _ in sample if (m := _HOST.match(line)))
    hosts = frozenset(names) if sum(names.values()) >= need and len(names) <= 512 else frozenset()
    return labels, hosts


def _speaker(record: Record, clock: _Clock, labels: bool, hosts: frozenset[str]) -> None:
    text = record.text
    for _ in range(4):
        if labels and record.rank is None and (m := _LABEL.match(text)):
            record.rank = int(m.group(1))
        elif hosts and record.host is None and (m := _HOST.match(text)) and m.group(1) in hosts:
            record.host = m.group(1)
        elif text[:1] in "[( 0123456789" and (m := _SPEAKER.match(text)):
            rank = m.group("rank") or m.group("role")
            if rank is not None:
                record.rank = int(rank)
            elif stamp := m.group("runtime"):
                record.stamp, record.at, record.utc = stamp, clock.iso(stamp[:10], stamp[11:]), True
        else:
            break
        if m.end() >= len(text):
            break
        text = text[m.end() :]
    record.text = text


def _prefixes(record: Record, clock: _Clock) -> None:
    text, stamped = record.text, False
    for _ in range(8):
        if text[:1].islower():
            break
        m = _PREFIX.match(text)
        if m is None:
            m = _NAME.match(text) if stamped else None
            if m is None:
                break
        elif (kind := m.lastgroup) in ("iso", "us", "clock", "glog", "syslog"):
            stamped = True
            _stamp(record, clock, m, kind or "")
        elif kind in ("drank", "pgrank"):
            record.rank = record.rank if record.rank is not None else int(m.group("inrank") or m.group("inpg"))
        elif kind == "column" and not stamped and m.group(0)[:1] in "-|>(":
            break
        elif kind in ("level", "tag"):
            stamped = True
        rest = text[m.end() :]
        if not rest or rest.isspace():
            break
        text = rest.lstrip() if m.lastgroup == "level" else rest
    record.text = text


def _stamp(record: Record, clock: _Clock, m: re.Match[str], kind: str) -> None:
    if record.stamp is not None:
        return
    record.stamp = m.group(kind).strip("[] ,:")
    if kind == "iso":
        record.utc = m.group("zone") is not None
        record.at = clock.iso(m.group("date"), m.group("isotime") + (m.group("zone") or ""))
    elif kind == "us":
        month, day, *year = m.group("usdate").split("/")
        record.at = clock.at(clock.year if not year else 2000 + int(year[0]), int(month), int(day), m.group("ustime"))
    elif kind == "glog":
        day = m.group("glogdate")
        record.at = clock.at(clock.year, int(day[:2]), int(day[2:]), m.group("glogtime"))
    elif kind == "syslog":
        month, day = m.group("sysdate").split()
        record.at = clock.at(clock.year, _MONTHS.get(month, 0), int(day), m.group("systime"))
    else:
        record.at = clock.of_day(m.group("time"))


class _Clock:
    """Time stamps -> seconds. Naive stamps keep the log's own zone; `offset` ties them to the file's mtime."""

    def __init__(self, mtime: float) -> None:
        self.mtime = mtime
        self.year = time.gmtime(min(max(mtime, 0.0), 4e9)).tm_year
        self._days: dict[tuple[int, int, int], float | None] = {}
        self._previous = 0.0
        self._wraps = 0

    def at(self, year: int, month: int, day: int, clock: str) -> float | None:
        key = (year, month, day)
        if key not in self._days:
            try:
                self._days[key] = (date(year, month, day).toordinal() - 719163) * 86400.0
            except ValueError:
                self._days[key] = None
        start = self._days[key]
        return None if start is None else start + _of_day(clock)

    def iso(self, day: str, clock: str) -> float | None:
        zone = 0.0
        if clock.endswith("Z"):
            clock = clock[:-1]
        elif len(clock) > 8 and (i := max(clock.rfind("+"), clock.rfind("-"))) > 0:
            digits = clock[i + 1 :].replace(":", "")
            zone = (int(digits[:2]) * 3600 + int(digits[2:] or 0) * 60) * (1 if clock[i] == "+" else -1)
            clock = clock[:i]
        at = self.at(int(day[:4]), int(day[5:7]), int(day[8:10]), clock)
        return None if at is None else at - zone

    def of_day(self, clock: str) -> float:
        seconds = _of_day(clock)
        if seconds < self._previous - 43200:
            self._wraps += 1
        self._previous = seconds
        return seconds + 86400.0 * self._wraps

    def offset(self, stamped: list[Record]) -> float | None:
        if not stamped or stamped[-1].at is None:
            return None
        last = stamped[-1]
        assert last.at is not None
        if last.utc:
            return 0.0
        gap = self.mtime - last.at
        zone = round(gap / 900) * 900.0  # zones are multiples of a quarter of an hour
        day_only = last.at < 40 * 86400
        if abs(gap - zone) > 60 or (not day_only and abs(zone) > 14 * 3600):
            return None
        return zone


def _of_day(clock: str) -> float:
    return int(clock[:2]) * 3600 + int(clock[3:5]) * 60 + float(clock[6:].replace(",", "."))
