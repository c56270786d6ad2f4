"""Why a log says nothing. The log alone cannot tell: it takes what the process looks like as well."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from eyas.why.logs.facts import LogFacts

StdoutKind = Literal["file", "pipe", "tty", "null", "deleted", "socket", "closed", "unknown"]
Reason = Literal[
    "not-silent",
    "interval-not-due",
    "block-buffered",
    "rich-bar-on-file",
    "other-rank",
    "elsewhere-tracker",
    "deleted-or-rotated",
    "never-logged",
    "single-line-bar",
    "waiting",  # nothing in the log explains it, but the run waits or is slow: no step, no line
    "unknown",
]
FRESH_S = 15.0  # a log younger than this is not silent; tqdm itself may wait 10 s
LATE = 3.0  # so many usual intervals may pass before a line is late: evaluation, checkpoints
BUFFER = 8192  # CPython's buffer of a stdout that is not a terminal


@dataclass(frozen=True)
class ProcessFacts:
    """What the probe saw of the writer. None: could not be seen."""

    stdout: StdoutKind = "unknown"
    stderr: StdoutKind = "unknown"
    unbuffered: bool | None = None  # python -u or PYTHONUNBUFFERED
    python: bool = True
    uses_rich: bool | None = None  # rich, tqdm.rich or Lightning's rich bar in cmdline, maps or log
    rank: int | None = None
    world_size: int | None = None
    log_growth: int | None = None  # bytes the log grew between the first and last sample
    idle_s: float | None = None  # since the last write; None: the log's own mtime decides
    age_s: float | None = None  # of the process
    progressing: bool | None = None  # anything else of it moves: CPU, data, GPU
    other_outputs: tuple[str, ...] = ()  # files that did grow: tfevents, wandb, checkpoints, other logs
    log_is_stdout: bool | None = None  # the file that was read is fd 1 or 2 of the process

    @property
    def on_terminal(self) -> bool:
        return self.stdout == "tty"


@dataclass(frozen=True)
class Silence:
    """`expected_in_s`: when the next line should come; negative when it is overdue; None when unknown."""

    reason: Reason
    sentence: str
    evidence: tuple[str, ...] = ()
    expected_in_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"evidence": list(self.evidence)}


def why_silent(log: LogFacts | None, process: ProcessFacts) -> Silence:
    """The most likely reason, with what it rests on. Ordered by how firmly each can be known."""
    idle = process.idle_s if process.idle_s is not None else log.idle_s if log is not None else None
    due = _due_in(log, idle)
    for rule in (_lost, _not_silent, _never, _interval, _bar_elsewhere, _other_rank, _buffered, _tracker, _one_line):
        found = rule(log, process, idle, due)
        if found is not None:
            return found
    evidence = [f"last line {duration(idle)} ago"] if idle is not None else []
    if log is not None and log.line_interval_s is not None:
        evidence.append(f"usually one every {duration(log.line_interval_s)}")
    late = " The next line is overdue." if due is not None and due < 0 else ""
    return Silence("unknown", f"Nothing about the log explains its silence.{late}", tuple(evidence), due)


def _due_in(log: LogFacts | None, idle: float | None) -> float | None:
    if log is None or log.line_interval_s is None or idle is None or log.ended:
        return None
    return round(log.line_interval_s - idle, 3)


def _lost(log: LogFacts | None, p: ProcessFacts, _idle: float | None, _due: float | None) -> Silence | None:
    if p.stdout == "deleted":
        sentence = (
            "The process writes to a log file that was deleted or replaced: its lines no longer reach this path, "
            "but can be read through /proc/PID/fd/1."
        )
        return Silence("deleted-or-rotated", sentence, ("stdout is a deleted file",))
    if p.stdout in ("null", "closed") and (log is None or log.empty) and p.stderr in ("null", "closed", "unknown"):
        where = "goes to /dev/null" if p.stdout == "null" else "is closed"
        return Silence("never-logged", f"The process's output {where}: there is no log.", (f"stdout {where}",))
    if log is not None and log.holes and not p.log_growth:
        sentence = "The log was truncated under its writer (rotation by copy): it begins with a hole."
        return Silence("deleted-or-rotated", sentence, ("NUL bytes in the log",))
    return None


def _not_silent(log: LogFacts | None, p: ProcessFacts, idle: float | None, due: float | None) -> Silence | None:
    if p.log_growth:
        sentence = f"The log is being written: {p.log_growth} bytes while we looked."
        return Silence("not-silent", sentence, (f"grew by {p.log_growth} bytes",), due)
    if log is not None and not log.empty and idle is not None and idle < FRESH_S:
        sentence = f"The last line is {duration(idle)} old."
        return Silence("not-silent", sentence, (f"written {duration(idle)} ago",), due)
    return None


def _never(log: LogFacts | None, p: ProcessFacts, idle: float | None, _due: float | None) -> Silence | None:
    if log is not None and not log.empty:
        return None
    if log is None and p.on_terminal:
        sentence = "The output goes to a terminal, not to a file: there is no log to read."
        return Silence("never-logged", sentence, ("stdout is a tty",))
    if log is None:
        return Silence("never-logged", "No log file was found for this process.", (f"stdout is {p.stdout}",))
    if _may_buffer(p):
        sentence = (
            f"The log is empty, and Python buffers what it prints: nothing is written before {BUFFER} bytes "
            "have gathered."
        )
        return Silence("block-buffered", sentence, ("0 bytes", f"stdout is a {p.stdout}", _unbuffered(p)))
    sentence = "The log is empty: the program has printed nothing yet."
    return Silence("never-logged", sentence, (f"0 bytes, {duration(idle)} old",))


def _interval(log: LogFacts | None, _p: ProcessFacts, idle: float | None, due: float | None) -> Silence | None:
    if log is None or log.line_interval_s is None or idle is None or due is None:
        return None
    usual = duration(log.line_interval_s)
    evidence = [f"one line every {usual}", f"last line {duration(idle)} ago"]
    if log.steps_per_line and log.steps_per_line > 1:
        evidence.append(f"one line every {log.steps_per_line:g} steps")
    if due > 0:
        return Silence("interval-not-due", f"The next line is due in {duration(due)}.", tuple(evidence), due)
    if idle < LATE * log.line_interval_s:
        sentence = f"The next line is due about now: one comes every {usual}, the last came {duration(idle)} ago."
        return Silence("interval-not-due", sentence, tuple(evidence), due)
    return None


def _bar_elsewhere(log: LogFacts | None, p: ProcessFacts, _idle: float | None, due: float | None) -> Silence | None:
    seen = p.uses_rich if p.uses_rich is not None else log is not None and "rich" in log.notes
    if not seen or p.on_terminal or log is None or log.ended or (log.progress_lines > 2 and log.format != "tqdm.rich"):
        return None
    sentence = (
        "The program shows its progress with a rich bar, and rich draws bars only on a terminal: a file gets "
        "it once, at the end."
    )
    return Silence("rich-bar-on-file", sentence, ("rich in use", f"stdout is a {p.stdout}"), due)


def _other_rank(log: LogFacts | None, p: ProcessFacts, _idle: float | None, _due: float | None) -> Silence | None:
    if log is None or log.progress_lines:
        return None
    rank = p.rank if p.rank is not None else log.rank
    world = p.world_size or log.world_size or 1
    if not rank or world < 2:
        return None
    others = "rank 0" if rank == world - 1 else f"rank 0 (Megatron: rank {world - 1})"
    sentence = f"This is rank {rank} of {world}; trainers log progress on one rank only: see the log of {others}."
    return Silence("other-rank", sentence, (f"rank {rank}", "no progress line in this log"))


def _may_buffer(p: ProcessFacts) -> bool:
    return p.python and p.unbuffered is not True and p.stdout in ("file", "pipe", "socket", "deleted")


def _unbuffered(p: ProcessFacts) -> str:
    return "no -u and no PYTHONUNBUFFERED" if p.unbuffered is False else "whether -u is set could not be seen"


def _buffered(log: LogFacts | None, p: ProcessFacts, idle: float | None, due: float | None) -> Silence | None:
    if log is None or not _may_buffer(p) or p.progressing is False or log.bar_lines or log.ended or log.prompt_open:
        return None
    evidence = [f"stdout is a {p.stdout}", _unbuffered(p)]
    blocks = round(log.size / BUFFER)
    edge = blocks > 0 and abs(log.size - blocks * BUFFER) <= 32 * blocks  # each block ends at a line's end
    torn = not log.ends_with_newline and log.size % 4096 == 0
    if edge and blocks <= 16:
        evidence.append(f"the file ends at {log.size} bytes, near {blocks} buffer(s) of {BUFFER}")
    unexplained = (
        p.unbuffered is False and not p.other_outputs and (log.progress_lines == 0 or (due is not None and due < 0))
    )
    if not ((edge and blocks <= 16) or torn or unexplained):
        return None
    if log.lines > 0 and log.line_interval_s is not None and idle is not None:
        due = round(BUFFER / max(log.size / log.lines, 1.0) * log.line_interval_s - idle, 3)
    sentence = (
        f"Python keeps what it prints in a buffer of {BUFFER} bytes when the output is not a terminal: lines come "
        "in blocks."
    )
    return Silence("block-buffered", sentence, (*evidence, f"last write {duration(idle)} ago"), due)


def _tracker(log: LogFacts | None, p: ProcessFacts, _idle: float | None, due: float | None) -> Silence | None:
    if not p.other_outputs:
        return None
    sentence = f"Progress is being written elsewhere: {', '.join(p.other_outputs[:3])}."
    evidence = [f"growing: {path}" for path in p.other_outputs[:5]] + list(log.trackers if log else ())
    return Silence("elsewhere-tracker", sentence, tuple(evidence), due)


def _one_line(log: LogFacts | None, p: ProcessFacts, idle: float | None, due: float | None) -> Silence | None:
    if log is None or not log.single_line_bar or p.progressing is False or (due is not None and due < 0):
        return None
    sentence = "The whole log is one line that a progress bar redraws: `tail -f` and `grep` show nothing new."
    evidence = (f"{log.bar_lines} redraws, {log.lines} newlines", f"last redraw {duration(idle)} ago")
    return Silence("single-line-bar", sentence, evidence, due)


def duration(seconds: float | None) -> str:
    """'8 s', '3 min', '2.8 h'."""
    if seconds is None:
        return "?"
    seconds = abs(seconds)
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"
