"""How fast a run goes: tokens/s, bytes/s, the shares of waiting, of each phase and of the GPU, memory."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.record.record import Record


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
