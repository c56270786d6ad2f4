"""Ctrl-C, SIGTERM, SIGUSR1 to a command: one line that says what is kept and how to go on, exit code 130, 143, 138.

The first signal is raised as an exception, so that stores are closed and temporary files removed on the way out; a
second one ends the process at once, and one that follows within two seconds is the same one. `eyas train` saves when it
is told to stop (train/stop.py); here is only what comes before its first step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from eyas.train.stop import AT_ONCE, SIGNALS

NOTHING = "nothing is kept of it: run the same command again"
GOES_ON = "what is recorded in {} is kept, and the same command goes on there"
MEASURED = "what was measured stands above{}: the same command measures everything again"
ANSWERS = "the whole batches in {} are kept, and the same command goes on there"
RESUME = "the same command with --resume goes on from the newest state in {}, or starts where there is none"


@contextmanager
def interruptible(
    kept: str = NOTHING, where: Path | str | None = None, signals: Sequence[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """A command's block. kept: what is left of it and how to go on, one line; its `{}` becomes `where`.

    When one of `signals` comes, the block sees KeyboardInterrupt; then the line goes to standard error and SystemExit
    is raised with 128 + the signal's number. A block that knows better what is left of it raises KeyboardInterrupt
    anew, with the line.
    """
    asked: list[tuple[int, float]] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not asked:
            asked.append((number, now))
            raise KeyboardInterrupt
        if now - asked[0][1] > AT_ONCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    main = threading.current_thread() is threading.main_thread()
    before = {s: signal.signal(s, hear) for s in signals} if main else {}
    interrupted, said = False, kept.format(where)
    try:
        yield
    except KeyboardInterrupt as e:
        interrupted, said = True, str(e) or said
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted:
        last = asked[0][0] if asked else int(signal.SIGINT)
        how = "interrupted" if last == signal.SIGINT else f"ended by {signal.Signals(last).name}"
        print(f"eyas: {how}: {said}", file=sys.stderr, flush=True)
        sys.exit(128 + last)
