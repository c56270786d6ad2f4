"""The words of the log: where a run stands, what it does, how fast. Standard library only."""

from __future__ import annotations

from typing import Any


def step_words(b: dict[str, Any]) -> str:
    """`step 812/45,000`; `step 812` without a total; `before the first step`. Other work counts in other units."""
    if not b["step"]:
        return f"before the first {b['unit']}"
    return f"{b['unit']} {b['step']:,}" + (f"/{b['total']:,}" if b["total"] else "")


def phase_words(b: dict[str, Any], now: float, rate: float, need: float = 0.0) -> str:
    """`waiting for data 14 s · data_9142.pt · 0 ready · 212.0 MB/s of the 720 needed`; `validating 34 s · 12/40`.

    rate, need: bytes a second that are read, and that would be if the run never waited.
    """
    parts = [f"{b['phase']} {now - b['since']:.0f} s"]
    if b["parts"] or b["part"]:
        parts.append(f"{b['part']:,}/{b['parts']:,}" if b["parts"] else f"{b['part']:,} done")
    if b["phase"] == "waiting for data":
        if b["file"]:
            parts.append(b["file"])
        if b["queue"] >= 0:
            parts.append(f"{b['queue']} ready")
    reads = b["phase"] in ("waiting for data", "starting", "reading verifier", "indexing", "validating")
    if reads and (rate >= 1e4 or b["phase"] == "waiting for data"):
        parts.append(rate_words(rate, need if b["phase"] == "waiting for data" else 0.0))
    return " · ".join(parts)


def rate_words(rate: float, need: float) -> str:
    """`212.0 MB/s of the 720 needed`; without the second part when the need is met or not known."""
    return f"{rate / 1e6:,.1f} MB/s" + (f" of the {need / 1e6:,.0f} needed" if need > rate and need >= 1e6 else "")


def seconds_words(seconds: float) -> str:
    """42 ms, 3.1 s, 7 min, 3 h 20 min."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    return clock(seconds)


def clock(seconds: float) -> str:
    """42 s, 7 min, 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
