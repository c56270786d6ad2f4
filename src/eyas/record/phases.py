"""Where the time of a run goes: which phase it is in, how often it was in each, and for how long.

A switch from one phase to the next reads the clock once and makes a few stores into the beat (0.4 µs). On a GPU the
host's phases say when work was handed over, not when it was done; `GpuClock` puts a pair of events around each step
and asks later whether they have passed. Nothing here waits for the device.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from types import TracebackType
from typing import Any

from eyas.record.beat import FIXED_PHASES, GPU_BUSY, PHASE, PHASES, SEQ, TABLE, Beat

_NOW = struct.Struct("@qqqqq")  # PHASE, SINCE, MOVED, PART, PARTS
_ROW = struct.Struct("@qqq")
_NOW_AT = 8 * PHASE
_IN_FLIGHT = 512  # pairs of events that wait for their step's end, at most


class Phases:
    """The clock of phases over a beat. One thread switches; everybody may read.

    switch(number): from now on the run is in this phase. A closure, since it is called six times a step: names of an
    object would be looked up in it again and again.
    """

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self.numbers = {name: i for i, name in enumerate(FIXED_PHASES)}
        self.spent = [0] * PHASES  # ns, the phase that goes on now not counted
        self._scopes: dict[str, Scope] = {}
        self.switch, self.state = _switch(beat, self.spent)

    @property
    def now(self) -> int:
        """The number of the phase that goes on."""
        return self.state()[0]

    def number(self, name: str) -> int:
        """The number of a phase, a new one for a new name. ValueError for the 25th."""
        found = self.numbers.get(name)
        if found is None:
            found = self.numbers[name] = self._beat.name(name)
        return found

    def enter(self, name: str) -> None:
        """From now on the run is in this phase, until the next call."""
        number = self.numbers.get(name)
        self.switch(self.number(name) if number is None else number)

    def scope(self, name: str) -> Scope:
        """A block in a phase; behind it the phase before goes on."""
        found = self._scopes.get(name)
        if found is None:
            found = self._scopes[name] = Scope(self, self.number(name))
        return found

    def seconds(self, name: str) -> float:
        """Seconds spent in a phase so far, what goes on now included."""
        number = self.numbers.get(name)
        if number is None:
            return 0.0
        now, since = self.state()
        return (self.spent[number] + (monotonic_ns() - since if number == now else 0)) / 1e9


def _switch(beat: Beat, spent: list[int]) -> tuple[Callable[[int], None], Callable[[], tuple[int, int]]]:
    """The function that switches, and one that tells (phase, since when)."""
    slots, memory, clock = beat.slots, beat.memory, monotonic_ns
    pack_now, pack_row = _NOW.pack_into, _ROW.pack_into
    rows = [8 * (TABLE + 3 * i) for i in range(PHASES)]
    times = [0] * PHASES
    now, since, seq = 0, clock(), 0

    def switch(number: int) -> None:
        nonlocal now, since, seq
        at = clock()
        last = at - since
        times[now] = count = times[now] + 1
        spent[now] = whole = spent[now] + last
        slots[SEQ] = seq + 1
        pack_now(memory, _NOW_AT, number, at, at, 0, 0)
        pack_row(memory, rows[now], count, whole, last)
        seq += 2
        slots[SEQ] = seq
        now, since = number, at

    return switch, lambda: (now, since)


class Scope:
    """`with phases.scope("forward"):`; one object per name, used again and again, also inside itself."""

    __slots__ = ("_before", "_number", "_phases")

    def __init__(self, phases: Phases, number: int) -> None:
        self._phases, self._number, self._before = phases, number, list[int]()

    def __enter__(self) -> None:
        self._before.append(self._phases.now)
        self._phases.switch(self._number)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        before = self._before.pop()
        if kind is None:  # where it failed stays in the beat
            self._phases.switch(before)


class GpuClock:
    """Device time of the steps, by CUDA events that are looked at later; `busy` is seconds so far.

    `mark()` at the end of each step: two event records on the current stream (a microsecond each, no synchronisation).
    """

    def __init__(self, torch: Any, beat: Beat) -> None:
        self._event, self._slots = torch.cuda.Event, beat.slots
        self._free: list[Any] = []
        self._pairs: deque[tuple[Any, Any]] = deque()
        self._start: Any = None
        self.busy = 0.0

    def begin(self) -> None:
        """The device's work of a step begins here."""
        self._start = self._take()
        self._start.record()

    def end(self) -> None:
        """It ends here. What has passed since is added up."""
        if self._start is None:
            return
        stop = self._take()
        stop.record()
        self._pairs.append((self._start, stop))
        self._start = None
        while self._pairs and (len(self._pairs) > _IN_FLIGHT or self._pairs[0][1].query()):
            start, stop = self._pairs.popleft()
            if stop.query():
                self.busy += start.elapsed_time(stop) / 1e3
                self._free += (start, stop)
        self._slots[GPU_BUSY] = int(self.busy * 1e9)

    def _take(self) -> Any:
        return self._free.pop() if self._free else self._event(enable_timing=True)


class LateValues:
    """Scalars from the device, read when they have arrived: a copy into pinned memory and an event for each."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._last: float | None = None

    def put(self, value: Any) -> float | None:
        """Send one off; returns the newest that has arrived, None before the first."""
        pinned = self._torch.empty((), dtype=self._torch.float32, pin_memory=True)
        pinned.copy_(value.detach(), non_blocking=True)
        event = self._torch.cuda.Event()
        event.record()
        self._under_way.append((pinned, event))
        while self._under_way and self._under_way[0][1].query():
            self._last = float(self._under_way.popleft()[0])
        return self._last
