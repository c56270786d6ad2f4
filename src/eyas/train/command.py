"""`eyas train`: the recorder first, then everything heavy.

The first line stands before torch is imported, which takes seconds from a cold disk; from then on no more than ten
seconds pass without one.
"""

from __future__ import annotations

import os
from typing import Any

from eyas.config import TrainConfig
from eyas.record.console import Say
from eyas.record.record import Record
from eyas.train.stop import resume_command


def train(config: TrainConfig, say: Say | None = None) -> dict[str, Any]:
    """Train as `config` says; returns what summary.json holds. say: None is standard output."""
    with recorder(config, say) as record:
        from eyas.train.loop import Run

        return Run(config, record.line, record).train()


def recorder(config: TrainConfig, say: Say | None = None) -> Record:
    """The recorder of a training run; it begins with its `with` block."""
    together = "LOCAL_RANK" in os.environ  # as `Ranks.join` has it
    return Record(
        config.output_dir,
        "eyas train",
        say=say,
        resume=resume_command(config.output_dir),
        sinks=config.sinks(),
        rank=None if together else 0,
        world=None if together else 1,
    )
