"""Scenarios from a judgement on programs that the lab did not know (docs/accuracy-unseen.md); once called wrong."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

from lab.healthy import add
from lab.kit import Ask, Lab, children_of
from lab.scenes import SILENT, scene

Start = Callable[[Lab], Ask]


def after(mode: str, says: str, settle: float = SILENT, *args: str) -> Start:
    def start(lab: Lab) -> Ask:
        child = lab.run("outside", mode, *args)
        lab.says(says, settle=settle)
        return Ask(str(child.pid))

    start.__name__ = f"outside_{mode.replace('-', '_')}"
    return start


for verdict, mode in (
    ("stuck.stopped", "worker"),
    ("stuck.worker-dead", "thread"),
    ("stuck.deadlock", "ring"),
    ("stuck.input", "fifo"),
):
    scene(verdict)(after(mode, "step 19 ", 20.0))
scene("failed.exception")(after("threads-left", "shape mismatch", 32.0))
scene("slow.data.remote-service")(after("retries", "retry 3 ", 3.0))
scene("slow.data.remote-service")(after("fetches", "step 19 ", 20.0))
scene("stuck.worker-dead")(after("pool-killed", "step 19 ", 40.0))
scene("stuck.collective")(after("spawn-odd", "24/20000", SILENT, "29633"))


@scene("failed.exception")
def outside_exit_code(lab: Lab) -> Ask:
    child = lab.run("outside", "code")
    lab.over(child)
    return Ask(str(child.pid))


@scene("stuck.input")
def outside_child_asks(lab: Lab) -> Ask:
    read, write = os.pipe()
    lab.undo.append(lambda: os.close(write))
    child = lab.run("outside", "asks", stdin=read)
    os.close(read)
    lab.says("step 19 ", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.disk-full")
def outside_disk_unsaid(lab: Lab) -> Ask:
    lab.tmpfs("out", "8m")
    child = lab.run("outside", "disk")
    lab.says("step 19 ", settle=SILENT)
    return Ask(str(child.pid))


def _tee(lab: Lab) -> Ask:
    child = lab.run("outside", "episodes", via=["sh", "-c", '"$0" "$@" 2>&1 | tee copy.txt'])
    lab.says("Episode 6 ", settle=1.0)
    return Ask(str(child.pid))


def _fed(lab: Lab) -> Ask:
    feed = lab.run("outside", "feed", log=None, stdout=subprocess.PIPE)
    child = lab.run("outside", "lines", stdin=feed.stdout)
    assert feed.stdout is not None
    feed.stdout.close()
    lab.says("batch 0 ", settle=2.0)
    return Ask(str(child.pid))


def _lost(lab: Lab) -> Ask:
    child = lab.run("outside", "lost", log=None, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    child.stdout.close()
    time.sleep(SILENT)
    return Ask(str(child.pid))


def _worker(lab: Lab) -> Ask:
    """A rank that the program itself started, asked for by its own PID."""
    child = lab.run("outside", "spawn", "29637")
    lab.says("5/20000", settle=1.0)
    return Ask(str(max(children_of(child.pid))))


add("outside_pool_prepares", after("pool", "documents", 12.0), alone=True)
add("outside_evaluates_unsaid", after("evaluates", "step 29 ", 70.0), alone=True)
add("outside_child_computes", after("child", "step 19 "), alone=True)
add("outside_own_launcher", after("spawn", "5/20000", 1.0, "29635"))
add("outside_rank_of_own_launcher", _worker)
add("outside_tee", _tee)
add("outside_stdin_fed", _fed)
add("outside_output_unread", _lost)
add("outside_serves_nobody", after("serves", "listening", 40.0))
