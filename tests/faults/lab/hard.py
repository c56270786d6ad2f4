"""Targets that hurt: the deadline must hold and the answer must come. Each returns the question."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lab.kit import Ask, Lab
from lab.scenes import SILENT

HARD: dict[str, Callable[[Lab], Ask]] = {}


def hard(start: Callable[[Lab], Ask]) -> Callable[[Lab], Ask]:
    HARD[start.__name__] = start
    return start


def _loop(lab: Lab) -> Ask:
    child = lab.run("loop", "--work", "duty", "--step", "0.3")
    lab.says("step 5 ")
    return Ask(str(child.pid))


@hard
def smi_hangs(lab: Lab) -> Ask:
    return replace(_loop(lab), env=lab.smi(hang=True))


@hard
def log_on_hung_fuse(lab: Lab) -> Ask:
    """Its data lie on a mount that answers nothing any more, and so does its working directory."""
    fs = lab.fuse("mnt", {"data.pt": 1 << 30})
    child = lab.run("stuck", "read", lab.dir / "mnt" / "data.pt")
    lab.says("step 25/", settle=0.5)
    fs.hang()
    time.sleep(SILENT)
    return Ask(str(child.pid))


@hard
def named_path_hangs(lab: Lab) -> Ask:
    """The log that the user names lies on a mount that hangs."""
    fs = lab.fuse("mnt", {"train.log": 1 << 20})
    fs.hang()
    return Ask(str(lab.dir / "mnt" / "train.log"))


@hard
def uninterruptible(lab: Lab) -> Ask:
    """State D: its parent half of a vfork."""
    child = lab.run("stuck", "vfork")
    lab.says("step 25/", settle=2)
    return Ask(str(child.pid))


@hard
def stopped(lab: Lab) -> Ask:
    ask = _loop(lab)
    os.kill(int(ask.target), signal.SIGSTOP)
    return ask


@hard
def threads_500(lab: Lab) -> Ask:
    child = lab.run("many", 500, 20)
    lab.says("step 3 ")
    return Ask(str(child.pid))


@hard
def files_5000(lab: Lab) -> Ask:
    child = lab.run("many", 4, 5000, via=["sh", "-c", 'ulimit -n 8192; exec "$0" "$@"'])
    lab.says("step 3 ")
    return Ask(str(child.pid))


@hard
def dies_in_the_middle(lab: Lab) -> Ask:
    ask = _loop(lab)
    child = lab.children[-1]

    def later() -> None:
        time.sleep(1.5)
        child.kill()
        child.wait()

    threading.Thread(target=later, daemon=True).start()
    return ask


@hard
def log_10_gb(lab: Lab) -> Ask:
    """A sparse log of 10 GB that goes on growing."""
    with (lab.dir / "train.log").open("wb") as f:
        f.truncate(10 << 30)
    child = lab.run("loop", "--work", "duty", "--step", "0.3", append=True)
    time.sleep(5)
    return Ask(str(child.pid))


@hard
def log_carriage_returns(lab: Lab) -> Ask:
    child = lab.run("loop", "--style", "tqdm", "--step", "0.05")
    lab.until(lambda: (lab.dir / "train.log").stat().st_size > 3000)
    return Ask(str(child.pid))


@hard
def log_one_line(lab: Lab) -> Ask:
    """50 MB of dots without one line end."""
    (lab.dir / "train.log").write_bytes(b"." * (50 << 20))
    child = lab.run("loop", "--style", "dots", "--step", "0.1", append=True)
    time.sleep(3)
    return Ask(str(child.pid))


@hard
def log_rubbish(lab: Lab) -> Ask:
    (lab.dir / "train.log").write_bytes(os.urandom(4 << 20))
    child = lab.run("loop", "--style", "dots", "--step", "0.1", append=True)
    time.sleep(3)
    return Ask(str(child.pid))


@hard
def rubbish_file(lab: Lab) -> Ask:
    (lab.dir / "core.bin").write_bytes(os.urandom(1 << 20))
    return Ask(str(lab.dir / "core.bin"))
