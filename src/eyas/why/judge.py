"""Weigh the cases: the verdict, its grade, the runner-up, and the one observation that would separate them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.why import chain, ranks
from eyas.why.facts import Facts
from eyas.why.logs import reader
from eyas.why.logs.facts import LogFacts
from eyas.why.procs import log_bytes
from eyas.why.verdicts import RULES
from eyas.why.verdicts.base import Case, Look
from eyas.why.verdicts.words import WORDS, state_of

LEAST = 2.5  # below this nothing is claimed
LEAST_STUCK = 5.0  # "stuck" and "failed" are claimed only with more
DOUBT = 1.0  # a quiet or slow reading this close to a stuck one is preferred
SLOW, NEAR = 5.5, 1.5  # a slow reading this strong and this close to a healthy one says more than it

_NEIGHBOUR = {  # what a verdict is most easily confused with
    "finished.ok": "failed.signal",
    "healthy.training": "quiet.interval",
    "quiet.interval": "stuck.deadlock",
    "quiet.compiling": "stuck.livelock",
    "quiet.long-step": "stuck.collective",
    "quiet.evaluating": "quiet.interval",
    "quiet.checkpointing": "stuck.filesystem",
    "quiet.initialising": "quiet.compiling",
    "stuck.collective": "slow.straggler",
    "stuck.p2p": "stuck.collective",
    "stuck.rendezvous": "stuck.collective",
    "stuck.deadlock": "stuck.worker-dead",
    "stuck.fork-lock": "stuck.worker-dead",
    "stuck.worker-dead": "stuck.fork-lock",
    "stuck.filesystem": "slow.data.network",
    "stuck.lock-file": "quiet.compiling",
    "stuck.livelock": "slow.host-python",
    "stuck.stopped": "stuck.input",
    "slow.data.disk-cold": "quiet.interval",
    "slow.data.decode": "slow.data.few-workers",
}


@dataclass
class Judgement:
    verdict: str
    grade: str  # established, supported, hypothesis, unknown
    case: Case
    runner: Case | None
    separate: str
    facts: Facts
    split: ranks.Split | None = None
    chain: list[dict[str, Any]] = field(default_factory=list)
    also: list[Case] = field(default_factory=list)  # other findings that hold beside the verdict
    cases: list[Case] = field(default_factory=list)

    @property
    def state(self) -> str:
        return state_of(self.verdict)


def facts_of(snap: Mapping[str, Any], now: float | None = None) -> Facts:
    """The facts of a snapshot, its log read. `now` is on the clock of the host that was looked at."""
    facts = Facts(snap)
    if facts.log_entry:
        facts.log = read_log(facts.log_entry, now or facts.now)
    return facts


def read_log(entry: Mapping[str, Any], now: float) -> LogFacts | None:
    """Read the bytes of a log that the probe shipped; None when there are none to read."""
    if entry.get("size") is None or entry.get("mtime") is None or entry.get("kind", "file") not in ("file", "journal"):
        return None
    head, tail, _ = log_bytes(entry)
    return reader.read(head, tail, size=int(entry["size"]), mtime=float(entry["mtime"]), now=now)


def judge(snap: Mapping[str, Any], now: float | None = None) -> Judgement:
    """The whole way from a snapshot to a judgement."""
    f = facts_of(snap, now)
    split = ranks.split(f)
    look = Look(f, split)
    cases = sorted((c for c in (rule(look) for rule in RULES) if c is not None), key=lambda c: -c.score)
    best = _best(cases, f)
    others = [c for c in cases if c.verdict != best.verdict and c.score > 0]
    runner = others[0] if others else None
    also = [
        c
        for c in others
        if c.score >= 4 and c.family in ("quiet", "slow") and best.family in ("slow", "quiet", "healthy", "stuck")
    ][:2]
    return Judgement(
        best.verdict,
        _grade(best, runner),
        best,
        runner,
        _separate(best, runner),
        f,
        split,
        chain.build(f, split),
        also,
        cases,
    )


def _best(cases: list[Case], f: Facts) -> Case:
    claimed = [c for c in cases if c.score >= (LEAST_STUCK if c.family in ("stuck", "failed") and f.alive else LEAST)]
    if not claimed:
        return Case("unknown")
    best = claimed[0]
    if best.family == "stuck":
        for other in claimed[1:]:
            if other.family in ("quiet", "slow", "healthy") and best.score - other.score < DOUBT:
                return other
    if best.family in ("healthy", "quiet"):
        for other in claimed[1:]:
            if other.family == "slow" and other.score >= SLOW and best.score - other.score <= NEAR:
                return other
    return best


def _grade(best: Case, runner: Case | None) -> str:
    if best.verdict == "unknown":
        return "unknown"
    margin = best.score - (runner.score if runner else 0.0)
    sources = len({e.source for e in best.support})
    if best.score >= 8 and margin >= 2 and sources >= 2:
        return "established"
    if best.score >= 5 and margin >= 0.75:
        return "supported"
    return "hypothesis"


def _separate(best: Case, runner: Case | None) -> str:
    """The one observation that tells the verdict from the runner-up."""
    other = runner.verdict if runner else _NEIGHBOUR.get(best.verdict)
    if other is None:
        return WORDS[best.verdict].decides
    if best.verdict == "unknown":
        return f"for {other}: {WORDS[other].decides}"
    return (
        f"{WORDS[best.verdict].decides} (speaks for {best.verdict}); {WORDS[other].decides} (would speak for {other})"
    )
