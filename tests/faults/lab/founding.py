"""The case that `eyas why` was started from, rebuilt: a first epoch over ~100 MB files that are not in memory."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from lab.kit import Ask, Lab

REAL, SIZE = 16, 100 << 20  # files that exist and are read; bytes of each
RATE = 40 << 20  # what the disk gives


def start(lab: Lab, files: int = 1200, uid: int | None = None, python: str = sys.executable, paths: str = "") -> Ask:
    """`files` in all: sixteen real ones that the loader reads in turn, the rest sparse: larger than memory."""
    import torch

    data = lab.dir / "hidden_states"
    data.mkdir()
    for i in range(files):
        path = data / f"data_{9140 + i}.pt"
        if i == 0:
            torch.save({"hidden_states": torch.randint(0, 1 << 15, (SIZE // 4096, 2048), dtype=torch.int16)}, path)
        elif i < REAL:
            shutil.copy(data / "data_9140.pt", path)
        if i < REAL:
            with path.open("rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            with path.open("wb") as f:
                f.truncate(SIZE)
    if uid is not None:
        for path in (lab.dir, data):
            os.chown(path, uid, uid)
    env = {"PYTHONPATH": paths, "HOME": str(lab.dir)} if paths else {}
    group = lab.throttle(lab.disk(), bytes_per_s=RATE)
    child = lab.run("founding", data, files, cgroups=[group], uid=uid, python=python, env=env)
    lab.says("[11:51:48]", limit=120)
    lab.until(lambda: _reading(child.pid), 60, "four workers that read")
    time.sleep(15)
    return Ask(str(child.pid), env=lab.smi(child.pid))


def _reading(pid: int) -> bool:
    from lab.kit import children_of

    workers = children_of(pid)
    return len(workers) >= 4 and all(
        any(str(p.readlink()).endswith(".pt") for p in Path(f"/proc/{w}/fd").iterdir()) for w in workers[:4]
    )
