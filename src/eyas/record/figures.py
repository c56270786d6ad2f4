"""How fast a run goes: tokens/s, bytes/s, the shares of waiting, of each phase and of the GPU, memory, time left."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.record.record import Record

OF_LATE = 64  # looks, a second apart or a step where that takes longer, that the pace is taken from
BESIDE = ("compiling", "validating", "saving", "finishing")  # phases between steps, and in none


class Pace:
    """Seconds that a step takes of late, and how long the rest of a run takes at that pace.

    Steps differ over a run: the first ones warm up, an epoch of TTT step 0 alone is cheap. So the pace is of the last
    `OF_LATE` looks, and the rest is counted in work (`share`, where the loop tells it) and not in steps. Validations
    and checkpoints are taken to come on as they came: by the step, or by the work where that leaves less of it (of
    units whose largest come first). Who reads the beat is told these same figures.

    step, share: where the loop begins, and of the work (0..1, None where steps cost the same); ns: when.
    """

    def __init__(self, record: Record, ns: int, step: int, share: float | None) -> None:
        self.record, self._begun, self._first = record, ns, (step, share)
        self._beside = self._beside_now()
        self._looks: deque[tuple[float, int, float | None]] = deque([(0.0, step, share)], maxlen=OF_LATE + 1)

    def _beside_now(self) -> float:
        return sum(self.record.phases.seconds(name) for name in BESIDE)

    def look(self, ns: int, step: int, share: float | None) -> None:
        """So far it is now."""
        inside = (ns - self._begun) / 1e9 - (self._beside_now() - self._beside)
        self._looks.append((inside, step, share))

    @property
    def seconds(self) -> float | None:
        """Seconds a step; None before the first."""
        (t0, n0, _), (t1, n1, _) = self._looks[0], self._looks[-1]
        return (t1 - t0) / (n1 - n0) if n1 > n0 else None

    def left(self, total: int) -> float | None:
        """Seconds until step `total`, counted from the last look; None where that is not known."""
        (t0, n0, share0), (t1, n1, share1), (n, share) = self._looks[0], self._looks[-1], self._first
        if 0 < total < n1:  # a loop that goes on behind the end that it told of
            return None
        beside = self._beside_now() - self._beside
        by_step = (total - n1) / (n1 - n) if total and n1 > n else 0.0
        if share0 is not None and share1 is not None and share1 > share0:
            by_work = (1 - share1) / (share1 - (share or 0.0))
            return (t1 - t0) / (share1 - share0) * (1 - share1) + beside * min(by_step, by_work)
        if not total or n1 <= n0:
            return None
        return (t1 - t0) / (n1 - n0) * (total - n1) + beside * by_step


class Meter:
    """Speed since it was last asked."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._last = self._now()
        self._spent = self._spent_now()

    def _now(self) -> tuple[float, int, int, float, float, float]:
        r = self.record
        gpu = r.gpu.busy if r.gpu is not None else 0.0
        return time.monotonic(), r.tokens, r.nbytes, r.phases.seconds("waiting for data"), gpu, time.process_time()

    def _spent_now(self) -> list[int]:
        """ns in each phase so far, what goes on now included."""
        phases, spent = self.record.phases, list(self.record.phases.spent)
        now, since = phases.state()
        spent[now] += time.monotonic_ns() - since
        return spent

    def take(self) -> dict[str, Any]:
        """The figures as a dict; starts anew."""
        now, last = self._now(), self._last
        self._last = now
        spent, before = self._spent_now(), self._spent
        self._spent = spent
        seconds, tokens, nbytes, waited, gpu, cpu = (b - a for a, b in zip(last, now, strict=True))
        seconds = max(seconds, 1e-9)
        busy = max(seconds - waited, 1e-9)
        return {
            "tokens_per_s": round(tokens / seconds, 1) if now[1] else None,
            "data_wait": round(min(1.0, waited / seconds), 4),
            "bytes_per_s": round(nbytes / seconds) if now[2] else None,
            "bytes_needed_per_s": round(nbytes / busy) if now[2] else None,
            "cpu": round(cpu / seconds, 3),
            "phases": {
                name: round((spent[i] - before[i]) / 1e9 / seconds, 4)
                for name, i in self.record.phases.numbers.items()
                if spent[i] > before[i]
            },
            "gpu": round(min(1.0, gpu / seconds), 4) if self.record.gpu is not None else None,
        }


def resident() -> int:
    """Bytes of memory this process holds."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
