"""NCCL's own report on a job (RAS, since NCCL 2.24), read from its text.

The report has sections: a job summary, one line per group of like communicators, errors (processes that are dead or did
not answer, communicators with errors) and warnings (ranks whose counts of launched operations differ). A count that
differs while a job runs is normal; it says something only of a job that does not move.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PROCESS = re.compile(r"Process (\d+) on node (\S+) managing GPUs? (\S+)")
_RANK = re.compile(r"^Rank (\d+)(?: has launched up to operation (\d+)| has not launched any operations)?(.*)$")
_MANY = re.compile(r"^(\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)")
_WHERE = re.compile(r"managed by process (\d+) on node (\S+)")
_GROUP = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s+(\S+)\s+(\d+)\s+(\d+)\s+([A-Z]+)\s+([A-Z+|,]+)\s*$")


@dataclass(frozen=True)
class RasProcess:
    pid: int
    node: str
    gpus: str

    @property
    def words(self) -> str:
        return f"process {self.pid} on {self.node} (GPU {self.gpus})"


@dataclass(frozen=True)
class RasRank:
    """A rank of a communicator, which need not be the job's number for it."""

    rank: int
    count: int | None
    pid: int | None
    node: str | None

    @property
    def words(self) -> str:
        return f"rank {self.rank}" + (f" (process {self.pid} on {self.node})" if self.pid is not None else "")


@dataclass
class Mismatch:
    comm: str
    what: str  # "collective", "AllReduce", .. operation counts
    counts: dict[int, int] = field(default_factory=dict)  # operations launched -> number of ranks
    named: list[RasRank] = field(default_factory=list)

    @property
    def spread(self) -> int:
        return max(self.counts, default=0) - min(self.counts, default=0)

    @property
    def odd(self) -> list[RasRank]:
        """The ranks apart from most, where they are named."""
        usual = max(self.counts, key=lambda c: self.counts[c], default=None)
        return [r for r in self.named if r.count != usual]

    @property
    def words(self) -> str:
        parts = [f"{n} rank{'s' if n > 1 else ''} at {count}" for count, n in sorted(self.counts.items(), reverse=True)]
        names = ", ".join(r.words for r in self.odd[:4])
        low, apart = min(self.counts, default=0), {r.count for r in self.odd}
        side = " behind" if apart == {low} else " ahead" if apart and low not in apart else " apart"
        return f"{self.what} operations of communicator {self.comm}: {', '.join(parts)}" + (
            f"; {names}{side}" if names else ""
        )


@dataclass
class Ras:
    version: str | None = None
    processes: int | None = None
    gpus: int | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)  # of communicators: ranks, status, errors
    dead_count: int = 0
    missing_count: int = 0  # processes that did not answer
    dead: list[RasProcess] = field(default_factory=list)
    missing: list[RasProcess] = field(default_factory=list)
    missing_ranks: list[RasRank] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # what ranks reported
    timeouts: int = 0
    whole: bool = True  # the report came to its end

    @property
    def mismatch(self) -> Mismatch | None:
        """The widest difference."""
        return max(self.mismatches, key=lambda m: (bool(m.odd), m.spread), default=None)

    @property
    def gone_words(self) -> str:
        lost = [p.words for p in self.dead] or [p.words for p in self.missing]
        lost = lost or [r.words for r in self.missing_ranks]
        count = self.dead_count or self.missing_count or len(self.missing_ranks)
        how = "considered dead" if self.dead_count else "without an answer"
        return f"{count} {how}" + (f": {', '.join(lost[:4])}" if lost else "")


def read_ras(snap: Mapping[str, Any]) -> Ras | None:
    """The report of the target's own job; None when there is none, or the port is another job's."""
    raw = (snap.get("nccl") or {}).get("ras") or {}
    text = str(raw.get("text") or "")
    if raw.get("ours") is False or "NCCL version" not in text[:4096]:
        return None
    found = parse(text)
    found.whole = raw.get("status") == "ok"
    return found


def parse(text: str) -> Ras:
    out = Ras()
    version = re.search(r"NCCL version (\S+)", text)
    out.version = version.group(1) if version else None
    section, comm, kind = "", "", ""
    mismatch: Mismatch | None = None
    count: int | None = None
    for line in text.splitlines():
        body = line.strip()
        head = re.match(r"(Job summary|Communicators|Errors|Warnings)\b", line)
        title = re.match(r"(?:(#\d+-\d+) \((\w+)\) )?([A-Z]{4,})$", body)
        if head:
            section, comm, kind, mismatch = head.group(1), "", "", None
        elif section == "Job summary" and re.fullmatch(r"[\d\s-]+", body) and body:
            fields = body.split()
            out.processes, out.gpus = (int(fields[-2]), int(fields[-1])) if len(fields) >= 5 else (None, None)
        elif section == "Communicators" and (row := _GROUP.match(line)):
            values = row.groups()
            out.groups.append(
                {"comms": int(values[1]), "ranks": int(values[4]), "status": values[6], "errors": values[7]}
            )
        elif section in ("Errors", "Warnings") and title:
            comm = f"{title.group(1)} ({title.group(2)})" if title.group(1) else ""
            kind, mismatch, count = title.group(3), None, None
        elif kind == "MISMATCH":
            found = re.match(r"Communicator ranks have different (\S+)(?: operation counts)?", body)
            if found:
                mismatch = Mismatch(comm, found.group(1)) if "operation" in body else None
                out.mismatches += [mismatch] if mismatch else []
                count = None
            elif mismatch is not None:
                count = _count(mismatch, body, count)
        elif kind in ("DEAD", "INCOMPLETE"):
            _lost(out, kind, bool(comm), body)
        elif kind == "ERROR" and body:
            out.errors.append(f"communicator {comm}: {body}"[:200])
        elif kind == "TIMEOUT" and (number := re.search(r"(\d+) communication timeout", body)):
            out.timeouts = int(number.group(1))
    return out


def _count(mismatch: Mismatch, body: str, count: int | None) -> int | None:
    """One line on how far ranks got; the count that the ranks named next share."""
    many, one = _MANY.match(body), _RANK.match(body)
    if many:
        count = int(many.group(2) or 0)
        mismatch.counts[count] = mismatch.counts.get(count, 0) + int(many.group(1))
    elif one:
        alone = "launched" in body.partition(" -- ")[0]
        own = int(one.group(2) or 0) if alone else count
        if alone and own is not None:
            mismatch.counts[own] = mismatch.counts.get(own, 0) + 1
        where = _WHERE.search(body)
        mismatch.named.append(
            RasRank(int(one.group(1)), own, int(where.group(1)) if where else None, where.group(2) if where else None)
        )
    return count


def _lost(out: Ras, kind: str, of_comm: bool, body: str) -> None:
    process, one, number = _PROCESS.search(body), _RANK.match(body), re.search(r"(\d+) job process", body)
    if number and kind == "DEAD":
        out.dead_count = int(number.group(1))
    elif number and not of_comm:
        out.missing_count = int(number.group(1))
    elif process:
        found = RasProcess(int(process.group(1)), process.group(2), process.group(3))
        (out.dead if kind == "DEAD" else out.missing).append(found)
    elif one and of_comm:
        where = _WHERE.search(body)
        out.missing_ranks.append(
            RasRank(int(one.group(1)), None, int(where.group(1)) if where else None, where.group(2) if where else None)
        )
