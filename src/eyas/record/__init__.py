"""The recorder: what a run says of itself. `run` is all that other people's loops need.

Nothing here imports torch, and nothing is imported before it is used: the sidecar and `eyas why` come through here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eyas.record.record import Record


def run(
    folder: Path | str, *, total_steps: int = 0, name: str | None = None, resume: str = "", sinks: Sequence[str] = ()
) -> Record:
    """Record a training loop into `folder`, which is made.

        with eyas.record.run("runs/mine", total_steps=1000) as rec:
            for batch in rec.data(loader):
                with rec.phase("forward"):
                    loss = model(batch)
                with rec.phase("backward"):
                    loss.backward()
                rec.step(loss=loss, tokens=batch.numel())

    total_steps: 0 if not known. resume: the command that goes on after an end, for the last line.
    sinks: who else hears of it: "tensorboard", "wandb=PROJECT", "trackio=PROJECT", "prometheus=PORT", "notify=URL".
    """
    from eyas.record.record import Record

    return Record(Path(folder), name or Path(folder).name, total=total_steps, resume=resume, sinks=sinks, make=True)
