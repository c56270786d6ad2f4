"""TensorBoard files in the run directory: `tensorboard --logdir runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from eyas.record.sinks.scalars import scalars


class TensorBoard:
    """Scalars by step into RUN_DIR/tensorboard, on disk within seconds."""

    def __init__(self, folder: Path) -> None:
        self.writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=5)

    def event(self, e: dict[str, Any]) -> None:
        for name, value in scalars(e).items():
            self.writer.add_scalar(name, value, e.get("step", 0), walltime=e["time"])
        if e.get("event") in ("stall", "warning", "end"):
            self.writer.add_text(str(e["event"]), str(e.get("text") or e.get("phase")), e.get("step", 0), e["time"])

    def close(self) -> None:
        self.writer.close()
