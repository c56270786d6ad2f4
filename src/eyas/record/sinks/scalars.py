"""An event's numbers under the names that trackers show."""

from __future__ import annotations

from typing import Any

SKIPPED = {"time", "rank", "step", "left", "memory", "positions", "samples"}
PREFIX = {"step": "train", "validation": "validation"}


def scalars(e: dict[str, Any]) -> dict[str, float]:
    """`train/loss`, `train/accuracy/0`, `validation/accept_length`, ...; empty for events that hold no figures."""
    prefix = PREFIX.get(str(e.get("event")))
    found: dict[str, float] = {}
    if prefix is None:
        return found
    for name, value in e.items():
        if name in SKIPPED:
            continue
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"{prefix}/{name}"] = float(value)
        elif isinstance(value, (list, dict)):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            found.update({f"{prefix}/{name}/{k}": float(v) for k, v in parts if isinstance(v, (int, float))})
    return found
