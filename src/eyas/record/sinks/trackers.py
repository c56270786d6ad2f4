"""Weights & Biases and trackio, which share an interface: init, log, finish."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml

from eyas.record.sinks.scalars import scalars


class Tracker:
    """A run of the project, named like the run directory, with run.yaml as its configuration.

    Offline, login and server are the tracker's own business: WANDB_MODE=offline, WANDB_BASE_URL, TRACKIO_DIR, ...
    """

    def __init__(self, module: str, project: str, folder: Path) -> None:
        self.name = module
        self.module: Any = importlib.import_module(module)
        try:
            about = yaml.safe_load((folder / "run.yaml").read_text())
        except (OSError, yaml.YAMLError):
            about = {}
        more: dict[str, Any] = {"dir": str(folder)} if module == "wandb" else {}
        self.run = self.module.init(project=project, name=folder.resolve().name, config=about or {}, **more)

    def event(self, e: dict[str, Any]) -> None:
        if found := scalars(e):
            self.module.log(found, step=e.get("step", 0))

    def close(self) -> None:
        self.module.finish()
