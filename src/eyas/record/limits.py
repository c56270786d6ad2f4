"""When a phase has lasted too long, from how long it lasted before. Standard library only: the sidecar's."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

LEAST = 60.0  # a phase shorter than this is no stall
OWN_LIMITS = {
    "starting": 300.0,
    "reading verifier": 600.0,
    "indexing": 600.0,
    "compiling": 1800.0,
    "starting the engine": 1800.0,
    "saving": 600.0,
}
TIMES_MEDIAN, TIMES_UNUSUAL = 5.0, 20.0
OFTEN = 3  # times that a phase was over before anything can be unusual


class Limits:
    """What is usual for each phase. given: seconds by phase that go over OWN_LIMITS, "" for all others."""

    def __init__(self, given: dict[str, float]) -> None:
        self.given = given
        self._last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=64))  # seconds, of late
        self._times: dict[str, int] = {}

    def learn(self, b: dict[str, Any]) -> None:
        """Take in a look at the beat."""
        for name, (times, _, last) in b["phases"].items():
            if times != self._times.get(name, 0):
                self._times[name] = times
                self._last[name].append(last)

    def of(self, phase: str) -> float:
        """Seconds after which a phase is a stall."""
        least = self.given.get(phase, OWN_LIMITS.get(phase, self.given.get("", LEAST)))
        return float(max(least, TIMES_MEDIAN * self.usual(phase)))

    def usual(self, phase: str) -> float:
        """Seconds that it lasts, in the middle; 0 when it was never seen to end."""
        return median(self._last[phase])

    def unusual(self, b: dict[str, Any], still: float, least: float) -> bool:
        """Whether it was entered often, took nowhere near as long, and is `still` for `least` seconds at least."""
        times, spent, last = b["phases"].get(b["phase"], (0, 0.0, 0.0))
        usual = max(last, spent / max(times, 1), self.usual(b["phase"]))
        return times >= OFTEN and still >= least and still > TIMES_UNUSUAL * usual


def median(values: Iterable[float]) -> float:
    """The middle one; 0 of none. (The statistics module would cost 3 MB.)"""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
