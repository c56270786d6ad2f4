"""`eyas ps`: the training processes of a host, the most suspicious first."""

from __future__ import annotations

from typing import Any


def duration(seconds: float | None) -> str:
    """3 s, 4 min, 2 h 05, 3 d 04 h."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172800:
        return f"{whole // 3600} h {whole % 3600 // 60:02d}"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def gpu_words(gpus: list[dict[str, Any]]) -> str:
    """`0: 17.6 GB 0 %`, the first two GPUs and how many more."""
    parts = []
    for gpu in gpus[:2]:
        memory = f" {gpu['mem'] / 1e9:.1f} GB" if gpu.get("mem") else ""
        busy = f" {gpu['util']} %" if gpu.get("util") is not None else ""
        parts.append(f"{gpu.get('index')}:{memory}{busy}")
    if len(gpus) > 2:
        parts.append(f"+{len(gpus) - 2}")
    return ", ".join(parts) or "-"


def render_ps(listing: dict[str, Any], width: int = 120) -> str:
    """A table for people; the JSON form is the listing itself."""
    rows = listing["rows"]
    if not rows:
        return f"no training process found on {listing['meta']['host']}"
    head = ("PID", "USER", "AGE", "STATE", "CPU", "GPU", "LOG AGE", "LOOKS", "COMMAND")
    table = [head]
    for row in rows:
        ranks = f" ({row['ranks']} ranks)" if row["ranks"] > 1 else ""
        table.append(
            (
                str(row["pid"]),
                str(row["user"] or row["uid"]),
                duration(row["age_s"]),
                row["state"],
                f"{row['cpu']:.1f}",
                gpu_words(row["gpu"]),
                duration((row["log"] or {}).get("age_s")),
                "; ".join(row["why"]) or "fine",
                row["cmd"] + ranks,
            )
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(head) - 1)]
    lines = []
    for line in table:
        cells = [cell.ljust(size) for cell, size in zip(line[:-1], widths, strict=True)]
        text = "  ".join([*cells, line[-1]])
        lines.append(text if len(text) <= width else text[: width - 1] + "…")
    most = rows[0]
    if most["suspicion"] >= 30:
        lines.append(f"\nask: eyas why {most['pid']}")
    return "\n".join(lines)
