"""Pipes between the processes of a job: who is at the other end, and what that means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.why.facts import Facts
from eyas.why.procs import Proc, Thread


def pipe_of(f: Facts, proc: Proc, fd: int | None) -> Mapping[str, Any]:
    """The pipe behind a descriptor; empty where it was not seen."""
    inode = (proc.fds.get(fd if fd is not None else -1) or proc.stdio.get(fd if fd is not None else -1) or {}).get(
        "inode"
    )
    known: list[Mapping[str, Any]] = f.snap.get("pipes") or []
    return next((p for p in known if inode is not None and p.get("inode") == inode), {})


def _ends(pipe: Mapping[str, Any], side: str, but: int) -> set[int]:
    return {int(end.get("pid") or 0) for end in pipe.get(side) or []} - {but}


def hands_out(f: Facts, proc: Proc, thread: Thread) -> bool:
    """A thread that fills the task queue of the process's own workers: it is meant to wait there."""
    if thread.wait.fd in (1, 2) or thread is proc.main:
        return False
    ends = _ends(pipe_of(f, proc, thread.wait.fd), "readers", proc.pid)
    return bool(ends) and ends <= {w.pid for w in f.workers}


def no_writer(f: Facts) -> bool:
    """A trainer reads a pipe that nobody but itself can write to."""
    pipes = [(p, pipe_of(f, p, p.critical.wait.fd)) for p in f.trainers]
    return any(pipe and not _ends(pipe, "writers", p.pid) for p, pipe in pipes)


def unread(f: Facts) -> bool:
    """Standard output is a pipe that nobody reads any more: what it prints is lost."""
    if f.main is None or f.main.stdio.get(1, {}).get("kind") != "pipe":
        return False
    pipe = pipe_of(f, f.main, 1)
    return bool(pipe) and not pipe.get("readers")


def ring_of(f: Facts) -> Proc | None:
    """A process that the trainer reads from over a pipe, and which itself reads a pipe that only the trainer writes."""

    def writers(proc: Proc) -> set[int]:
        return _ends(pipe_of(f, proc, proc.critical.wait.fd), "writers", proc.pid)

    def waits(proc: Proc) -> bool:
        return proc.critical.always("pipe-read") and proc.critical.asleep

    for one in f.trainers:
        others = [f.procs[p] for p in writers(one) if p in f.procs] if waits(one) else []
        found = next((p for p in others if waits(p) and writers(p) == {one.pid}), None)
        if found is not None:
            return found
    return None
