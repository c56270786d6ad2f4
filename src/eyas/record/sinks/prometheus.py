"""What the beat says, for Prometheus to fetch: it answers also while the trainer hangs, and then shows for how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from eyas.record import beat


class Prometheus:
    """An HTTP endpoint on `port`, /metrics; every rank of this host is in it."""

    def __init__(self, port: int, folder: Path) -> None:
        self.folder = folder
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type, no-untyped-call, unused-ignore]
        self.server, self.thread = start_http_server(port, registry=registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the library for each request."""
        beats = []
        for path in sorted(self.folder.glob("beat*")):
            with contextlib.suppress(OSError, ValueError):
                beats.append(beat.read(path))
        now = time.monotonic()
        for name, about, key in (
            ("eyas_step", "Optimiser steps done", "step"),
            ("eyas_steps", "Optimiser steps in all", "total"),
            ("eyas_loss", "Loss of the last step", "loss"),
            ("eyas_queue", "Batches read and not yet taken", "queue"),
        ):
            gauge = GaugeMetricFamily(name, about, labels=["rank"])
            for b in beats:
                gauge.add_metric([str(b["rank"])], b[key])
            yield gauge
        current = GaugeMetricFamily("eyas_phase_seconds", "How long the phase of now lasts", labels=["rank", "phase"])
        spent = CounterMetricFamily("eyas_phase_seconds_sum", "Seconds in each phase", labels=["rank", "phase"])
        tokens = CounterMetricFamily("eyas_tokens", "Tokens trained on", labels=["rank"])
        nbytes = CounterMetricFamily("eyas_read_bytes", "Bytes of data read", labels=["rank"])
        for b in beats:
            rank = str(b["rank"])
            current.add_metric([rank, b["phase"]], max(0.0, now - max(b["since"], b["moved"])))
            tokens.add_metric([rank], b["tokens"])
            nbytes.add_metric([rank], b["bytes"])
            for phase, (_, seconds, _) in b["phases"].items():
                spent.add_metric([rank, phase], seconds)
        yield from (current, spent, tokens, nbytes)

    def event(self, e: dict[str, Any]) -> None:
        """Nothing: the beat says it all."""

    def close(self) -> None:
        self.server.shutdown()
