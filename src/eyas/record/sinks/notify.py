"""A message somewhere (ntfy, Slack, mail, a webhook, a hundred more) when a run stalls, goes wrong, or ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apprise

TOLD = {"stall": "stalls", "nan": "has a loss that is no number", "end": "has ended"}


class Notify:
    """url: as apprise has them (ntfy://topic, json://host:port/path, mailto://...). Raises ValueError for no such."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.apprise = apprise.Apprise()
        if not self.apprise.add(url):
            raise ValueError("--notify: no address that apprise understands")

    def event(self, e: dict[str, Any]) -> None:
        told = TOLD.get(str(e.get("event")))
        if told is None:
            return
        if e["event"] == "end" and e.get("how") not in ("done", "stopped"):
            told = "has failed"
        facts = {k: v for k, v in e.items() if k not in ("time", "event", "seconds", "samples") and v not in (None, "")}
        body = str(e.get("text") or "\n".join(f"{k}: {v}" for k, v in facts.items()))
        if not self.apprise.notify(title=f"eyas: {self.folder.resolve().name} {told}", body=body):
            raise ConnectionError("the message could not be delivered")

    def close(self) -> None:
        """Nothing is open."""
