"""Log lines as the trainers print them, made up from what is known of their formats."""

from __future__ import annotations

import time

from eyas.why.logs.facts import LogFacts
from eyas.why.logs.reader import HEAD_BYTES, TAIL_BYTES, read

NOW = 1_760_000_000.0


def said(log: str | bytes, *, idle: float = 5.0, size: int | None = None) -> LogFacts:
    """What the reader makes of a log that was last written `idle` seconds ago."""
    data = log.encode() if isinstance(log, str) else log
    return read(data[:HEAD_BYTES], data[-TAIL_BYTES:], size=size or len(data), mtime=NOW - idle, now=NOW)


def clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def bar(step: int, total: int, elapsed: float, desc: str = "", post: str = "", unit: str = "it") -> str:
    """One redraw of a tqdm bar, without its carriage return."""
    share = step / total
    rate = step / elapsed if elapsed else 0.0
    speed = f"?{unit}/s" if not rate else f"{rate:5.2f}{unit}/s" if rate >= 1 else f"{1 / rate:5.2f}s/{unit}"
    left = "?" if not step else clock(elapsed / step * (total - step))
    blocks = "█" * int(10 * share)
    head = f"{desc}: " if desc else ""
    return f"{head}{int(100 * share):3d}%|{blocks:<10}| {step}/{total} [{clock(elapsed)}<{left}, {speed}{post}]"


def redraws(total: int, upto: int, seconds: float, *, desc: str = "", start: int = 0, post: str = "") -> str:
    return "".join("\r" + bar(i, total, i * seconds, desc, post) for i in range(start, upto + 1))


def stamp(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A UTC time stamp: `at` seconds before NOW are negative."""
    return time.strftime(form, time.gmtime(NOW + at))
