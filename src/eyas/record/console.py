"""How a run looks: plain lines in a file or a pipe, a live display on a terminal.

The plain lines are written straight to the descriptor, whole, one write each, by a thread: no buffer that shows a line
minutes later, no disk that stops the loop, no error at exit from a pipe that was closed. The display (rich) is drawn
twice a second by a thread and only where somebody looks at it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eyas.record.outlet import name_thread, write_all
from eyas.record.words import clock, phase_words, rate_words

if TYPE_CHECKING:
    from eyas.record.record import Record

Say = Callable[[str], None]
FORMATS = {"loss": ".4f", "lr": ".2e", "grad_norm": ".2f"}


def say(text: str) -> None:
    """A line on standard output, out at once even into a pipe."""
    try:
        fd = sys.stdout.fileno()
    except (AttributeError, ValueError):  # a notebook (io.UnsupportedOperation is a ValueError), or none at all
        print(text, flush=True)
        return
    sys.stdout.flush()
    write_all(fd, f"{text}\n".encode(errors="replace"))


class Prefixed:
    """Says lines with something in front of each: with it the recorder's side process marks its own lines too."""

    def __init__(self, prefix: str, say: Say) -> None:
        self.prefix, self.say = prefix, say

    def __call__(self, text: str) -> None:
        self.say("\n".join(f"{self.prefix}{line}" for line in text.splitlines() or [""]))


def on_terminal() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def step_line(step: int, total: int, figures: dict[str, Any], speed: dict[str, Any]) -> str:
    """One line for a step: `step 812/45,000 · epoch 1/10 · loss 2.0312 · ... · 3 h 20 min left`."""
    parts = [f"step {step:,}" + (f"/{total:,}" if total else "")]
    for name, value in figures.items():
        parts.append(f"{name.replace('_', ' ')} {figure(name, value)}")
    parts += [f"{speed['tokens_per_s']:,.0f} tokens/s"] if speed.get("tokens_per_s") is not None else []
    if speed.get("data_wait") is not None:
        parts.append(f"data wait {speed['data_wait']:.0%}")
    if speed.get("bytes_per_s") is not None:
        need = speed["bytes_needed_per_s"] if speed["data_wait"] >= 0.05 else 0.0
        parts.append(rate_words(speed["bytes_per_s"], need))
    if speed.get("gpu") is not None:
        parts.append(f"GPU {speed['gpu']:.0%}")
    elif speed.get("cpu") is not None:
        parts.append(f"CPU {speed['cpu']:.0%}")
    if speed.get("memory", 0) >= 1e8:
        parts.append(f"{speed['memory'] / 1e9:,.1f} GB")
    if speed.get("left") is not None:
        parts.append(f"{clock(speed['left'])} left")
    return " · ".join(parts)


def figure(name: str, value: Any) -> str:
    """A figure in words; a list's parts are separated by slashes."""
    if isinstance(value, (list, tuple)):
        return "/".join(figure("", v) for v in value)
    if isinstance(value, float):
        return format(value, FORMATS.get(name, ".3f"))
    return f"{value:,}" if isinstance(value, int) else str(value)


class Live:
    """The display on a terminal, below the lines that are said: a bar, the phase, the figures.

    Each has rows of its own, so that figures stand still while phases change, and no row breaks inside a figure.
    """

    def __init__(self, record: Record) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self.record = record
        self.console = Console()
        self.live = RichLive(console=self.console, auto_refresh=False, transient=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="eyas-live", daemon=True)

    def line(self, text: str) -> None:
        """A line above the display, broken between words; a command is left whole, for who copies it."""
        self.console.print(text, markup=False, highlight=False, soft_wrap="go on" in text)

    def start(self) -> None:
        self.live.start()
        self._thread.start()

    def stop(self) -> None:
        """Take the display away."""
        self._stop.set()
        self._thread.join(1)
        self.live.stop()

    def _work(self) -> None:
        name_thread()
        while not self._stop.wait(0.5):
            self.live.update(self.render(), refresh=True)
            self.record.spoken()

    def render(self) -> Any:
        """What is seen now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        b = self.record.beat_values()
        figures, speed = self.record.latest
        width = self.console.width
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(b["total"] or None, b["step"], width=max(8, min(40, width - 40)), pulse=not b["total"])
        done = f"{b['unit']} {b['step']:,}" + (f"/{b['total']:,}" if b["total"] else "")
        grid.add_row(bar, done, f"{clock(speed['left'])} left" if speed.get("left") is not None else "")
        facts = step_line(b["step"], b["total"], figures, {**speed, "left": None}).split(" · ")[1:]
        now = phase_words(b, time.monotonic(), speed.get("bytes_per_s") or 0.0)
        rows = [Text(row, no_wrap=True, overflow="ellipsis") for row in (now, *filled(facts, width))]
        return Group(grid, *rows)


def filled(parts: list[str], width: int) -> list[str]:
    """The parts in rows of at most `width` columns, broken between them."""
    rows: list[str] = []
    for part in parts:
        if rows and len(rows[-1]) + 3 + len(part) <= width:
            rows[-1] += f" · {part}"
        else:
            rows.append(part)
    return rows
