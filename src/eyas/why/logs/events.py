"""Failures, ends, phases and questions in a log's records."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from eyas.why.logs import tables
from eyas.why.logs.facts import Barrier, Collective, ErrorKind, LogError, RankFailure
from eyas.why.logs.normalise import Record

_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]{0,120})(?:: ?(.{0,2000}))?$", re.S)
_FRAME = re.compile(r'^\s{1,8}File "([^"]{1,300})", line (\d{1,7})(?:, in (\S{1,120}))?')
_TRACEBACK = "Traceback (most recent call last)"
_EXITCODE = re.compile(
    r"exit ?code:? {0,10}:? ?=? ?(-?\d{1,3})|exits with return code = (-?\d{1,3})|^g?make.{1,300}\] error (\d{1,3})$",
    re.I,
)
_RANK = re.compile(r"\brank[ :\]#=]{0,10}:? ?(\d{1,5})\b|\btask (\d{1,5})\b", re.I)
_PID = re.compile(r"\bpid(?:\(s\))?:? ?=?(\d{2,9})|\bprocess (\d{2,9})\b", re.I)
_SIGNAL = re.compile(r"\b(SIG(?:HUP|INT|ILL|ABRT|BUS|KILL|USR[12]|SEGV|PIPE|TERM))\b|\bsignal:? (\d{1,2})\b", re.I)
_SRUN = re.compile(r"srun: error: (\S{1,80}): tasks? (\d{1,5})[^:]{0,80}: (.{1,80})")
_ROW = re.compile(r"^\s{0,4}(time|host|rank|exitcode|error_file|traceback)\s{0,6}: (.{0,400})")
_WORK = re.compile(r"SeqNum=(\d{1,15}), OpType=(\w{1,60})")
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d{1,12})")
_RAN = re.compile(r"ran for (\d{1,12}) milli")
_COMPLETED = re.compile(r"last completed (?:NCCL )?work:? ?(\d{1,15})", re.I)
_BARRIER = re.compile(
    r"world_size=(\d{1,6}), (?:worker_count|num_workers_joined)=(\d{1,6})"
    r"(?:.{0,40}timeout=(?:(\d{1,4}):(\d\d):(\d\d)))?"
)
_CLIENTS = re.compile(r"(\d{1,6})/(\d{1,6}) clients joined")
_WORLD = re.compile(r"world[_ ]size[\"' :=]{1,4}(\d{1,6})", re.I)


@dataclass
class Events:
    errors: list[LogError] = field(default_factory=list)
    failures: list[RankFailure] = field(default_factory=list)
    collective: Collective | None = None
    barrier: Barrier | None = None
    barrier_number: int = -1
    end: Record | None = None
    notes: list[str] = field(default_factory=list)
    trackers: list[str] = field(default_factory=list)
    world_size: int | None = None


@dataclass
class _Trace:
    """A traceback that is being read; one for each rank."""

    rank: int | None
    kind: ErrorKind = "exception"
    where: str | None = None
    ignored: bool = False
    boxed: bool = False  # drawn by rich: the exception line follows the box


def find(records: list[Record], everything: str) -> Events:
    """`everything`: the records' text, in lower case."""
    out = Events()
    rules = [r for r in tables.ERRORS if any(h in everything for h in r.hints)]
    ends = [r for r in tables.ENDS if any(h in everything for h in r.hints)]
    out.notes = [r.kind for r in tables.NOTES if _anywhere(r, everything)]
    out.trackers = [r.kind for r in tables.TRACKERS if _anywhere(r, everything)]
    for m in _WORLD.finditer(everything):
        out.world_size = max(out.world_size or 0, int(m.group(1))) or None
    if "traceback (most" in everything:
        inside = _tracebacks(records, out)
    else:
        inside = set()
    if "exitcode" in everything or "srun: error" in everything or "return code = " in everything:
        _failure_table(records, out)
    if "seqnum=" in everything or "last completed" in everything:
        _watchdog(records, out)
    if "store" in everything or "clients joined" in everything:
        _barriers(records, out)
    if rules or ends:
        for record in records:
            lower = record.text.lower()
            if ends and any(_fits(r, lower, record.text) for r in ends):
                out.end = record
            if record.number not in inside and (rule := next((r for r in rules if _fits(r, lower, record.text)), None)):
                out.errors.append(_error(rule.kind, record))
    return out


def _fits(rule: tables.Rule, lower: str, text: str) -> bool:
    return any(h in lower for h in rule.hints) and (
        rule.pattern is None or rule.pattern.search(text[:1500]) is not None
    )


def _anywhere(rule: tables.Rule, everything: str) -> bool:
    if not any(h in everything for h in rule.hints):
        return False
    return rule.pattern is None or rule.pattern.search(everything) is not None


def _error(kind: str, record: Record) -> LogError:
    text = record.text
    code, rank = _EXITCODE.search(text), _RANK.search(text)
    exitcode = int(next(g for g in code.groups() if g)) if code else None
    signal = _signal(text)
    if signal is None and exitcode is not None and exitcode < 0:
        signal = -exitcode
    return LogError(
        kind=kind,  # type: ignore[arg-type]
        line=text[:600],
        rank=record.rank if record.rank is not None else int(rank.group(1) or rank.group(2)) if rank else None,
        exitcode=exitcode,
        signal=signal if kind not in ("gpu-oom", "disk-full") else None,
        pid=_pid(text),
        host=record.host,
        number=record.number,
    )


def _pid(text: str) -> int | None:
    m = _PID.search(text)
    return int(m.group(1) or m.group(2)) if m else None


def _signal(text: str) -> int | None:
    if m := _SIGNAL.search(text):
        return tables.SIGNALS.get(m.group(1).upper()) if m.group(1) else int(m.group(2))
    lower = text.lower()
    return next((n for word, n in tables.SIGNAL_WORDS.items() if word in lower), None)


def _tracebacks(records: list[Record], out: Events) -> set[int]:
    """Adds one error a traceback; returns the numbers of the records that belong to one."""
    inside: set[int] = set()
    open_traces: dict[int | None, _Trace] = {}
    before: dict[int | None, str] = {}
    for record in records:
        text, rank = record.text, record.rank
        if _TRACEBACK in text:
            trace = _Trace(rank, boxed="─" in text, ignored="Exception ignored" in before.get(rank, ""))
            lead = before.get(rank, "")
            if lead.startswith("Exception in thread"):
                trace.kind = "thread-exception"
            elif re.match(r"Process \S{1,80}:$", lead):
                trace.kind = "child-exception"
            open_traces[rank] = trace
            inside.add(record.number)
        elif (open_trace := open_traces.get(rank)) is not None:
            inside.add(record.number)
            if m := _FRAME.match(text):
                open_trace.where = f"{m.group(1).rsplit('/', 1)[-1]}:{m.group(2)}" + (
                    f" in {m.group(3)}" if m.group(3) else ""
                )
            elif not text[:1].isspace() and text[:1] not in "│╭╰+|":
                del open_traces[rank]
                if (m := _EXCEPTION.match(text)) and not open_trace.ignored:
                    out.errors.append(_exception(m, open_trace, record))
        before[rank] = text
    return inside


def _exception(m: re.Match[str], trace: _Trace, record: Record) -> LogError:
    text = record.text
    rule = next((r for r in tables.EXCEPTION_TEXT if _fits(r, text.lower(), text)), None)
    kind: ErrorKind = trace.kind
    if rule is not None and trace.kind == "exception":
        kind = rule.kind  # type: ignore[assignment]
    if "in DataLoader worker process" in text:
        kind = "exception"
    base = _error(kind, record)
    return replace(
        base,
        exception=m.group(1),
        message=(m.group(2) or "")[:600] or None,
        where=trace.where,
        signal=_signal(text) if kind in ("signal", "worker-died") else None,
    )


def _failure_table(records: list[Record], out: Events) -> None:
    """torchrun's table of failed ranks; srun's and DeepSpeed's sentences."""
    root = False
    row: dict[str, str] = {}

    def close() -> None:
        if "exitcode" not in row:
            return
        code = re.match(r"\s*(-?\d{1,3})", row["exitcode"])
        rank, local = (
            re.match(r"\d{1,6}", row.get("rank", "")),
            re.search(r"local_rank: (\d{1,6})", row.get("rank", "")),
        )
        exitcode = int(code.group(1)) if code else None
        failure = RankFailure(
            rank=int(rank.group()) if rank else None,
            exitcode=exitcode,
            local_rank=int(local.group(1)) if local else None,
            pid=_pid(row["exitcode"]),
            host=row.get("host"),
            signal=-exitcode if exitcode is not None and exitcode < 0 else None,
            root=root,
            line=f"rank {row.get('rank', '?')} exitcode {row['exitcode']}",
        )
        out.failures.append(failure)

    for record in records:
        text = record.text
        if (m := _ROW.match(text)) and (row or m.group(1) == "time"):
            row[m.group(1)] = m.group(2).strip()
            if m.group(1) == "exitcode":
                close()
                _failed(out, record)
            continue
        row = {}
        if text.startswith("Root Cause"):
            root = True
        elif text.startswith("Failures:"):
            root = False
        elif m := _SRUN.search(text):
            code = _EXITCODE.search(m.group(3))
            signal = _signal(m.group(3))
            exitcode = int(code.group(1)) if code and code.group(1) else -signal if signal else None
            out.failures.append(RankFailure(int(m.group(2)), exitcode, host=m.group(1), signal=signal, line=text[:300]))
            _failed(out, record)
        elif ("failed (exitcode" in text or "exits with return code" in text) and (code := _EXITCODE.search(text)):
            exitcode = int(next(g for g in code.groups() if g))
            local = re.search(r"local_rank: (\d{1,6})", text)
            signal = -exitcode if exitcode < 0 else None
            rank_of = int(local.group(1)) if local else None
            out.failures.append(RankFailure(None, exitcode, rank_of, _pid(text), signal=signal, line=text[:300]))
            _failed(out, record)


_SIGNAL_KINDS: dict[int, ErrorKind] = {
    1: "signal", 2: "interrupted", 4: "native-crash", 6: "native-crash", 7: "native-crash", 9: "killed",
    11: "native-crash", 15: "signal",
}  # fmt: skip


def _failed(out: Events, record: Record) -> None:
    f = out.failures[-1]
    signal = f.signal or (f.exitcode - 128 if f.exitcode is not None and 128 < f.exitcode < 160 else None)
    kind = _SIGNAL_KINDS.get(signal or 0, "rank-failed")
    rank = f.rank if f.rank is not None else f.local_rank
    out.errors.append(
        LogError(
            kind, f.line, rank=rank, exitcode=f.exitcode, signal=signal, pid=f.pid, host=f.host, number=record.number
        )
    )


def _watchdog(records: list[Record], out: Events) -> None:
    reporting: dict[int, tuple[int, str]] = {}
    completed: dict[str, int] = {}
    line, timeout, ran = "", None, None
    for record in records:
        text = record.text
        if (m := _COMPLETED.search(text)) and record.rank is not None:
            completed[str(record.rank)] = int(m.group(1))
        if m := _WORK.search(text):
            line = line or text[:600]
            timeout = _TIMEOUT.search(text) or timeout
            ran = _RAN.search(text) or ran
            reporting.setdefault(record.rank if record.rank is not None else -1, (int(m.group(1)), m.group(2)))
    if not reporting:
        return
    ranks = tuple(sorted(r for r in reporting if r >= 0))
    world = out.world_size
    heard = {r.rank for r in records if r.rank is not None}  # of one rank alone, the others' silence says nothing
    everyone = set(range(world)) if world and world <= 65536 and len(heard) > 1 else heard
    seq, op = next(iter(reporting.values()))
    out.collective = Collective(
        line, op, seq, float(timeout.group(1)) / 1000 if timeout else None, float(ran.group(1)) / 1000 if ran else None,
        ranks, tuple(sorted(everyone - set(ranks)))[:1024], world, completed,
    )  # fmt: skip


def _barriers(records: list[Record], out: Events) -> None:
    for record in records:
        if m := _BARRIER.search(record.text):
            limit = int(m.group(3)) * 3600 + int(m.group(4)) * 60 + int(m.group(5)) if m.group(3) else None
            out.barrier = Barrier(record.text[:600], int(m.group(2)), int(m.group(1)), limit)
            out.world_size = max(out.world_size or 0, int(m.group(1)))
        elif m := _CLIENTS.search(record.text):
            out.barrier = Barrier(record.text[:600], int(m.group(1)), int(m.group(2)))
        else:
            continue
        out.barrier_number = record.number


def explain(errors: list[LogError], failures: list[RankFailure]) -> LogError | None:
    """The error that explains the end best: final, near the root, the first one; the launcher's root rank first."""
    if not errors:
        return None
    root = next((f.rank for f in failures if f.root and f.rank is not None), None)
    return min(
        errors,
        key=lambda e: (not e.final, tables.DEPTH[e.kind], e.rank is None or root is None or e.rank != root, e.number),
    )
