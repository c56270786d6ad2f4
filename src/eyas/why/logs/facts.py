"""What a log says, as plain data: the contract between the log reader and the judge.

Everything here is JSON-able (`to_dict`, `from_dict`). `None` means "the log does not say", never "no". Times are
seconds; `at` is a Unix time where the log's clock could be tied to the file's mtime, else None.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ErrorKind = Literal[
    "exception",  # a Python traceback; `exception` and `message` say which
    "child-exception",  # a traceback of a child process (multiprocessing "Process X:") or a DataLoader worker
    "thread-exception",  # "Exception in thread ...": the process may live on
    "interrupted",  # KeyboardInterrupt
    "gpu-oom",
    "gpu-error",  # illegal access, device assert, ECC, Xid, cuBLAS/cuDNN failures
    "host-oom",  # Killed, oom_kill, MemoryError, Cannot allocate memory
    "killed",  # a bare "Killed": SIGKILL, most often the OOM killer
    "signal",  # SIGTERM, SIGHUP, SIGINT ... named in the log
    "time-limit",
    "preempted",
    "cancelled",
    "node-failure",
    "native-crash",  # segmentation fault, abort, core dumped
    "worker-died",  # a DataLoader worker exited or was killed
    "shm-full",  # bus error, insufficient shared memory
    "disk-full",  # ENOSPC, quota
    "collective-timeout",  # NCCL watchdog, gloo time-out, heartbeat monitor
    "rendezvous",  # store or rendezvous time-out, connection refused by the master
    "peer-lost",  # connection closed / reset by peer
    "rank-failed",  # torchrun, srun or DeepSpeed launcher say that a rank ended badly
]
ERROR_KINDS: tuple[str, ...] = get_args(ErrorKind)

PhaseId = Literal[
    "evaluating", "checkpointing", "compiling", "downloading", "tokenising", "loading-model", "loading-data",
    "initialising", "rendezvous", "uploading", "training", "generating",
]  # fmt: skip
PHASES: tuple[str, ...] = get_args(PhaseId)


@dataclass(frozen=True)
class LogError:
    """One failure that the log reports. `final`: no training progress was logged after it."""

    kind: ErrorKind
    line: str  # the line that says it: the exception line, "Killed", the watchdog's sentence
    final: bool = True
    rank: int | None = None
    exitcode: int | None = None  # negative for a signal
    signal: int | None = None
    exception: str | None = None  # class name, e.g. "RuntimeError" or "torch.OutOfMemoryError"
    message: str | None = None
    where: str | None = None  # innermost frame: "train.py:212 in step"
    pid: int | None = None
    host: str | None = None
    number: int = 0  # record number inside the text that was read; later is larger


@dataclass(frozen=True)
class RankFailure:
    """A row of torchrun's failure table, or srun's / DeepSpeed's sentence about a rank."""

    rank: int | None
    exitcode: int | None
    local_rank: int | None = None
    pid: int | None = None
    host: str | None = None
    signal: int | None = None
    root: bool = False  # "Root Cause (first observed failure)"
    line: str = ""


@dataclass(frozen=True)
class Collective:
    """What the NCCL watchdog or gloo said. `missing`: ranks of the job that did not report; the first suspects."""

    line: str
    op: str | None = None
    seq: int | None = None
    timeout_s: float | None = None
    ran_s: float | None = None
    reporting: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    world_size: int | None = None
    last_completed: dict[str, int] = field(default_factory=dict)  # rank -> last completed sequence number


@dataclass(frozen=True)
class Barrier:
    """Waiting for ranks that have not come: a store barrier or a rendezvous."""

    line: str
    joined: int | None = None
    world_size: int | None = None
    timeout_s: float | None = None
    final: bool = True  # nothing but such lines since


@dataclass(frozen=True)
class Phase:
    """The last phase the log announced. `closed`: it also announced the end of it, or training went on."""

    id: PhaseId
    line: str
    closed: bool = False
    step: int | None = None  # its own bar, if it has one: evaluation 12/90, shards 3/30
    total: int | None = None
    at: float | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds per step. Robust median over recent windows, the first step left out."""

    seconds_per_step: float
    source: Literal["printed", "elapsed", "stamps", "rate"]  # the log's own figure, a bar's clock, time stamps
    windows: int = 0  # how many windows the median is over
    spread: float | None = None  # (p90 - p10) / median of the windows
    latest: float | None = None  # the last window alone
    first_step: float | None = None  # duration of the first step or window (compilation, cold caches)
    first_epoch: float | None = None  # median in the first epoch, when there are several
    warm: float | None = None  # median in the later epochs
    slowest: float | None = None  # the slowest step or window seen in the tail


@dataclass(frozen=True)
class Spikes:
    """Step times that jump every `period` steps: with period = num_workers the data loader starves."""

    period: int
    ratio: float  # spike / median
    count: int


@dataclass(frozen=True)
class LogFacts:
    """Everything the reader found. See the module's head for what None means."""

    # the file
    size: int
    mtime: float
    read_at: float  # the `now` that was given
    idle_s: float  # now - mtime, never negative
    lines: int  # newline count; estimated from the density when only head and tail were read
    lines_exact: bool = True
    empty: bool = False
    binary: bool = False  # not text
    holes: bool = False  # NUL bytes: the file was truncated under the writer (copytruncate)
    ends_with_newline: bool = True
    bar_lines: int = 0  # `\r` redraws in the tail
    single_line_bar: bool = False  # the tail is one physical line that a bar redraws
    # what it is
    format: str | None = None  # "tqdm", "hf-trainer", "megatron", ... None: nothing known was found
    formats: tuple[str, ...] = ()  # all that were seen, the main one first
    first_line: str = ""
    last_line: str = ""  # last non-empty line, prefixes kept, escape codes removed
    last_at: float | None = None  # its time stamp as Unix time
    last_stamp: str | None = None  # as written
    rank: int | None = None  # the rank this log speaks for, if every prefixed line says the same one
    ranks: tuple[int, ...] = ()  # ranks seen in prefixes
    world_size: int | None = None
    # progress
    step: int | None = None
    total: int | None = None
    scope: Literal["run", "epoch"] | None = None  # what `step`/`total` count
    unit: str = "step"  # "step", "epoch", "sample", "round", "prompt", "conversation"
    epoch: float | None = None
    epochs: float | None = None
    pace: Pace | None = None
    eta_s: float | None = None  # counted from the last line; subtract idle_s for "from now"
    steps_per_line: float | None = None
    line_interval_s: float | None = None  # how long between progress lines normally; None: cannot tell
    progress_lines: int = 0
    at_last_step: bool = False  # step = total, in the last epoch where epochs are known
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    data_wait: float | None = None  # share of step time spent waiting for data, 0..1, if the log gives it
    bad_loss: bool = False  # the last loss is NaN or infinite
    spikes: Spikes | None = None
    last_progress: str | None = None  # the last progress line
    # events
    error: LogError | None = None  # the one that explains the end best: root rank first, cause before consequence
    errors: tuple[LogError, ...] = ()
    rank_failures: tuple[RankFailure, ...] = ()
    collective: Collective | None = None
    barrier: Barrier | None = None
    ended: bool = False  # an end-of-training line, with no training progress after it
    ended_line: str | None = None
    phase: Phase | None = None
    prompt: str | None = None  # the log ends in a question
    prompt_open: bool = False  # ... and the cursor still stands behind it (no newline)
    status: str | None = None  # an eyas run's own words on what it waits for
    trackers: tuple[str, ...] = ()  # "wandb", "tensorboard", ... named in the log
    notes: tuple[str, ...] = ()  # "tokenizers-fork", "few-workers", "block-buffered-hint", ...

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON: infinities and NaN become strings."""
        plain = _plain(dataclasses.asdict(self))
        assert isinstance(plain, dict)
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LogFacts:
        """The inverse of `to_dict`; unknown keys are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        kept = {key: value for key, value in data.items() if key in known}
        for key in ("loss", "learning_rate", "eta_s", "line_interval_s", "tokens_per_s", "epoch"):
            if isinstance(kept.get(key), str):  # "nan", "inf"
                kept[key] = float(kept[key])
        for key, kind in _ONE.items():
            if kept.get(key) is not None:
                kept[key] = _build(kind, kept[key])
        for key, kind in _MANY.items():
            kept[key] = tuple(_build(kind, item) for item in kept.get(key, ()))
        for key in ("formats", "ranks", "trackers", "notes"):
            kept[key] = tuple(kept.get(key, ()))
        return cls(**kept)


_ONE: dict[str, type] = {
    "error": LogError, "collective": Collective, "barrier": Barrier, "phase": Phase, "pace": Pace, "spikes": Spikes,
}  # fmt: skip
_MANY: dict[str, type] = {"errors": LogError, "rank_failures": RankFailure}


def _build(kind: type, data: dict[str, Any]) -> Any:
    known = {f.name for f in dataclasses.fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known})


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
