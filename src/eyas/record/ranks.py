"""The other ranks of a job, as the sidecar of rank 0 sees them: who is slow, who is waited for, who failed first.

All ranks make their steps together, so a rank in trouble shows as another one that waits. The beats of this host's
ranks tell which: the slow one spends its time in data, copying or forward, the others in waiting for it; and in a step
that does not end, the one that everybody waits for is the one that stands before the others in it, or that sleeps or
waits for a disk at the same place. What /proc shows of that one is the reason.

Ranks of other hosts are seen in events.jsonl alone, where the run directory is shared. Standard library only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

from eyas.record import beat, events
from eyas.record.limits import median
from eyas.record.look import Process, look, status_words, words
from eyas.record.words import phase_words, step_words
from eyas.why.waits import is_storage

FIND_SECONDS = 2.0  # between two looks for ranks that have come
WINDOW, STEPS, WINDOWS = 4.0, 2, 2  # a rank is slow in WINDOWS windows in a row of so many seconds and steps, at least
SLOW, SHARE = 1.5, 0.1  # times slower than the others, and so much of their time lost by it
OWN = ("waiting for data", "copying", "forward")  # what each rank does at its own speed
STEP = ("waiting for data", "copying", "waiting for ranks", "forward", "backward", "optimiser")  # in this order


class Ranks:
    """The ranks of one run directory on this host, `rank` left out of what is said of others."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.beats: dict[int, dict[str, Any]] = {}
        self._memory: dict[int, tuple[str, mmap.mmap]] = {}  # where each beat lies, and the record itself
        self._looks: dict[int, tuple[float, Process]] = {}
        self._before: tuple[float, dict[int, dict[str, Any]]] = (0.0, {})
        self._slow: list[tuple[int, str]] = []  # of the last windows
        self._said: tuple[int, str] | None = None

    def start(self) -> None:
        """Look for them in a thread: the run directory may lie on a disk that hangs."""

        def work() -> None:
            while True:
                with contextlib.suppress(OSError):
                    self.find()
                time.sleep(FIND_SECONDS)

        threading.Thread(target=work, daemon=True).start()

    def find(self) -> None:
        """Map the beats that have come. A mapped one stays readable when its rank has ended and its file is gone."""
        for link in self.folder.glob("beat*") if self.folder is not None else ():
            with contextlib.suppress(OSError, ValueError):
                place = os.readlink(link)  # noqa: PTH115 (of a run that is over there is no link)
                if place in (known for known, _ in self._memory.values()):
                    continue
                with open(place, "rb") as file:  # noqa: PTH123
                    memory = mmap.mmap(file.fileno(), beat.SIZE, prot=mmap.PROT_READ)
                self._memory[beat.read(memory)["rank"]] = place, memory

    def read(self) -> None:
        """Look at all of them; two looks a second cost as little as that."""
        with contextlib.suppress(ValueError):
            self.beats = {rank: beat.read(memory) for rank, (_, memory) in list(self._memory.items())}

    # -- who is slow ---------------------------------------------------------------------------------------------------

    def straggler(self, now: float) -> str:
        """One line when a rank keeps the others waiting by being slow; "" else. To be called at every look."""
        began, before = self._before
        if not before or any(b["step"] < before[r]["step"] for r, b in self.beats.items() if r in before):
            self._before = now, self.beats
            return ""
        steps = {r: b["step"] - before[r]["step"] for r, b in self.beats.items() if r in before}
        if now - began < WINDOW or len(steps) < 2 or min(steps.values()) < STEPS:
            if len(self.beats) > len(before):
                self._before = now, self.beats
            return ""
        self._before = now, self.beats
        self._slow = [*self._slow, self._slowest(before, steps, now - began)][-WINDOWS:]
        ranks = {rank for rank, _ in self._slow}
        rank, text = self._slow[-1]
        where = text.rpartition(": ")[2]
        if len(self._slow) < WINDOWS or len(ranks) > 1 or not text or self._said == (rank, where):
            return ""
        self._said = rank, where
        return text

    def _slowest(self, before: dict[int, dict[str, Any]], steps: dict[int, int], seconds: float) -> tuple[int, str]:
        """The slow rank of one window and the line about it; (-1, "") without one."""
        own = {r: {n: _spent(self.beats[r], before[r], n) / steps[r] for n in OWN} for r in steps}
        total = {r: sum(parts.values()) for r, parts in own.items()}
        slow = max(total, key=lambda r: total[r])
        usual = median(v for r, v in total.items() if r != slow)
        lost = (total[slow] - usual) * steps[slow]
        if usual <= 0 or total[slow] < SLOW * usual or lost < SHARE * seconds:
            return -1, ""
        others = {n: median(own[r][n] for r in own if r != slow) for n in OWN}
        where = max(OWN, key=lambda n: own[slow][n] - others[n])
        return slow, f"rank {slow} is {total[slow] / usual:.1f} times slower than the others: {where}"

    # -- who is waited for ---------------------------------------------------------------------------------------------

    def waited_for(self, now: float) -> str:
        """Whom this rank, which does not move, waits for, and what that one does; "" when nobody is behind.

        A clause: "waits for rank 3 (PID 4242), which is stopped (kill -CONT 4242 lets it go on)".
        """
        mine = self.beats.get(self.rank)
        if mine is None:
            return ""
        others = {r: self._state(r, b, now) for r, b in sorted(self.beats.items()) if r != self.rank}
        for rank, (lost, does) in others.items():
            if lost:
                who = f"rank {rank} (PID {self.beats[rank]['pid']})"
                return f"{who} {does}" if mine["phase"] in OWN else f"waits for {who}, which {does}"
        places = {r: (*_place(b), not _elsewhere(b["pid"])) for r, b in self.beats.items()}
        last = min(places, key=lambda r: places[r])
        if mine["phase"] in OWN or places[last] == places[self.rank]:
            return ""
        return f"rank {last} (PID {self.beats[last]['pid']}) is behind: {others[last][1]}"

    def glance(self, now: float) -> None:
        """A first look at their processes, that `waited_for` compares with."""
        for rank, b in self.beats.items():
            if rank != self.rank:
                self._looks[rank] = now, look(b["pid"])

    def _state(self, rank: int, b: dict[str, Any], now: float) -> tuple[bool, str]:
        """(whether it can do nothing any more, in words what it does)."""
        pid = b["pid"]
        if b["state"] == "failed":
            return True, status_words(None if b["exit"] < 0 else b["exit"]) if b["exit"] else "has failed"
        if b["state"] != "running":
            return True, f"has {b['state'].replace('interrupted', 'been interrupted')}"
        if _gone(b):
            return True, "is gone"
        seen = look(pid)
        if seen.stopped:
            return True, f"is stopped (kill -CONT {pid} lets it go on)"
        began, before = self._looks.get(rank, (now, seen))
        shown = words(pid, before, seen, now - began, now - b["python"]) if now > began else ""
        self._looks[rank] = now, seen
        return False, " · ".join(p for p in (step_words(b), phase_words(b, now, 0.0), shown) if p)

    # -- who failed first ----------------------------------------------------------------------------------------------

    def first_failure(self, mine: dict[str, Any]) -> str:
        """The rank that failed before this one, in a line; "" when none did, or none is known of.

        An end that only followed from another rank's (`follows`) is never the first.
        """
        first = None
        if self.folder is not None:
            with contextlib.suppress(OSError):
                first = events.first_failure(self.folder / "events.jsonl", mine["started_wall"])
        if first is None or first.get("rank") == self.rank:
            return ""
        return events.first_words(first)

    def someone_else(self) -> bool:
        """Whether a rank of this host has ended badly, or is gone, so that its last word will come."""
        return any(
            b["state"] == "failed" or (b["state"] == "running" and _gone(b))
            for r, b in self.beats.items()
            if r != self.rank
        )


def _gone(b: dict[str, Any]) -> bool:
    """Whether the process of a beat is no more; one whose end was not collected yet is none."""
    return beat.starttime(b["pid"]) != b["starttime"] or look(b["pid"]).state in "ZX"


def _spent(b: dict[str, Any], before: dict[str, Any], phase: str) -> float:
    """Seconds in a phase between two looks."""
    return float(b["phases"][phase][1] - before["phases"].get(phase, (0, 0.0, 0.0))[1])


def _place(b: dict[str, Any]) -> tuple[int, int]:
    """How far a rank is: its step, and where in the next one."""
    return b["step"], STEP.index(b["phase"]) if b["phase"] in STEP else -1


def _elsewhere(pid: int) -> bool:
    """Whether a main thread waits for something that no other rank is: a clock, a disk."""
    main = look(pid).threads.get(pid)
    return main is not None and main[1].blocked and (main[1].family == "sleep" or is_storage(main[1].family))
