"""A pool of worker processes with nothing left to do, and whether one of its workers was replaced on the way."""

from __future__ import annotations

from eyas.why.facts import Facts
from eyas.why.procs import Proc, Thread

_SOON = 5.0  # seconds within which two things happened together


def _waits(thread: Thread) -> bool:
    """Asleep until another thread or process gives it something."""
    return thread.asleep and thread.always("futex", "pipe-read", "poll") and not any(w.timed for w in thread.waits)


def drained(f: Facts) -> bool:
    """The owner waits, its pool's threads wait for results, and every worker waits for a task: nothing is in flight.

    One idle worker holds the queue's lock and reads its pipe, the others wait for that lock.
    """
    if len(f.trainers) != 1 or not f.live_workers:
        return False
    owner = f.trainers[0]
    asleep = owner.main.always("futex") and _waits(owner.main)
    handlers = [t for t in owner.threads if t is not owner.main]
    listens = any(t.always("pipe-read") for t in handlers) and all(t.asleep for t in handlers)
    patient = all(t.always("futex", "pipe-read", "poll") for t in handlers)
    idle = [w.main for w in f.live_workers]
    return asleep and listens and patient and all(_waits(t) for t in idle) and any(t.always("pipe-read") for t in idle)


def replaced(f: Facts) -> Proc | None:
    """A worker much younger than its siblings, with no line in the log since it came: another one died before it."""
    ages = sorted((w.age, w.pid) for w in f.live_workers if w.age is not None)
    if len(ages) < 2 or len(ages) < len(f.live_workers):
        return None
    young, old = ages[0][0], ages[-1][0]
    silent = f.idle is None or f.idle + _SOON >= young
    return f.procs[ages[0][1]] if old - young > max(2.0, 0.03 * old) and silent else None
