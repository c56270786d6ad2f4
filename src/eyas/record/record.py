"""One run's recorder: what the loop calls, and what it starts.

`Record` puts the pieces together: the beat and its phases, the lines, events.jsonl, the sidecar and the sinks. A step
costs about 4 µs: the clock, the stores into the beat, and one comparison that decides whether a line is due. Lines and
events are written by threads (outlet.py), so a full or hanging disk costs nothing but the lines.

When a line is due: at the first step and the last, and when the next step would be later than ten seconds after the
last line. In between the sidecar speaks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic_ns, time_ns
from types import TracebackType
from typing import Any, Self, TypeVar

from eyas.errors import EyasError
from eyas.record import beat as layout
from eyas.record import events, sidecar
from eyas.record.beat import Beat
from eyas.record.console import Live, Say, on_terminal, step_line
from eyas.record.console import say as to_stdout
from eyas.record.outlet import Outlet, name_thread, stamped
from eyas.record.phases import GpuClock, LateValues, Phases, Scope
from eyas.record.words import step_words

T = TypeVar("T")
INTERVAL = 10.0  # seconds between two lines, at most
EVENT_EVERY = 1.0  # seconds between two step events, at least
SINKS_WAIT = 3.0  # seconds that trackers get at the end before the command goes on without them
SPIKE_AFTER = 20  # steps before a loss can be called exploding
DUMP_SIGNAL = signal.SIGRTMIN + 7  # nobody's: not the C library's, not glibc's, not a scheduler's
_NOW, _STEP, _TOKENS, _BYTES, _LOSS = layout.NOW, layout.STEP, layout.TOKENS, layout.BYTES, layout.LOSS
_MOVED = struct.Struct("@qqq")  # MOVED, PART, PARTS
_COMPUTING = layout.FIXED_PHASES.index("computing")
_WAITING = layout.FIXED_PHASES.index("waiting for data")


class Record:
    """The recorder of one run; a context manager.

    folder: the run directory, made by `open`; None keeps everything in memory and says lines only (tests, notebooks).
    total: steps in all, 0 if not known. say: where lines go; None is standard output. resume: the command that goes on.
    make: make the run directory at once, and not when the caller has checked what it was given. unit: what is counted.
    """

    def __init__(
        self,
        folder: Path | None,
        name: str = "run",
        *,
        total: int = 0,
        say: Say | None = None,
        resume: str = "",
        rank: int | None = None,
        interval: float = INTERVAL,
        limits: dict[str, float] | None = None,
        sinks: Sequence[str] = (),
        make: bool = False,
        unit: str = "step",
    ) -> None:
        self.folder, self.name, self.resume, self.interval = folder, name, resume, interval
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.total, self.steps, self.tokens, self.nbytes = total, 0, 0, 0
        self.latest: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._own_say, self._limits, self._sinks, self._make = say, limits or {}, list(sinks), make
        path = (layout.shm_path(self.rank) or _other_place(self.rank)) if folder is not None else None
        self.beat = Beat(str(folder.absolute()) if folder else name, self.rank, self.world, total, path, unit)
        self.unit = unit
        self.phases = Phases(self.beat)
        self.enter = self.phases.enter
        self._q, self._floats, self._memory = self.beat.slots, self.beat.floats, self.beat.memory
        self._spoke = self._stepped = self._first = self._check = monotonic_ns()
        self._line_ns, self._event_ns = int(interval * 1e9), int(EVENT_EVERY * 1e9)
        self._gpu: GpuClock | None = None
        self._late: LateValues | None = None
        self._torch: Any = None
        self._line_meter, self._event_meter = Meter(self), Meter(self)
        self._mean = self._spread = 0.0  # of the loss, of late
        self._far, self._weight = math.inf, 1.0  # a loss that far above its mean explodes; weight of a new one
        self._warned = -1
        self._begin_step = 0
        self.share: float | None = None  # of the run's work that is done, where the loop says so
        self._begin_share: float | None = 0.0
        self._loader: Any = None
        self._name_of: Any = None
        self._live: Live | None = None
        self._out: Outlet | None = None
        self._log: Outlet | None = None
        self._events: Outlet | None = None
        self._sidecar: subprocess.Popen[bytes] | None = None
        self._sink_process: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._early: list[tuple[str, Any]] = []
        self._stacks_fd: int | None = None
        self._fatal_fd: int | None = None
        self._entered = False
        self._ended = False
        self._stopped = ""

    # -- the life of a run ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start what watches. Call it before anything heavy is imported: the first line then stands at once."""
        self._entered = True
        if self.folder is None:
            return self
        self._fault_handlers()
        if self.rank == 0 and self._own_say is None and on_terminal():
            self._live = Live(self)
        speak = self._own_say or (self._live.line if self._live else to_stdout)
        self._out = Outlet("standard output", lambda data: speak(data.decode().rstrip("\n")), self._failed)
        self._start_sidecar()
        threading.Thread(target=self._pulse, name="eyas-pulse", daemon=True).start()
        if self.rank == 0:
            self.line(f"{self.name} (PID {os.getpid()}) starts · {self.folder} · eyas why {os.getpid()} tells more")
        if self._live:
            self._live.start()
        if self._make:
            self.open()
        return self

    def open(self) -> None:
        """Make the run directory and write into it from now on; what was said before is written first.

        Raises EyasError when the directory cannot be made.
        """
        if self.folder is None or self._log is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise EyasError(f"cannot make the run directory {self.folder}: {e.strerror}") from None
        self._link()
        self._log = Outlet("log.txt", events.Appender(self.folder / "log.txt"), self._failed)
        self._events = Outlet("events.jsonl", events.Appender(self.folder / "events.jsonl"), self._failed)
        self.event(
            "start", schema=events.SCHEMA, name=self.name, pid=os.getpid(), host=os.uname().nodename, total=self.total,
            world=self.world, resume=self.resume,
        )  # fmt: skip
        early, self._early = self._early, []
        for text, fields in early:
            if fields is None:
                self._log.put(stamped(text))
            else:
                self._events.put(events.line(text, self.rank, **fields))
        self._q[layout.RUN_OPEN] = 1
        if self._sinks and self.rank == 0:
            self._start_sinks()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        """Say how it ended, and stop what watches. An exception goes on to the caller."""
        if kind is None and self._stopped:
            self.end("stopped", layout.INTERRUPTED, self._end_line(self._stopped), said=True)
        elif kind is None:
            self.enter("finishing")
            self.end("done", layout.ENDED)
        elif kind is not None and issubclass(kind, KeyboardInterrupt):
            self.end("interrupted", layout.INTERRUPTED, self._end_line("interrupted"))
        elif isinstance(e, SystemExit):
            code = e.code
            self.end("exit", layout.ENDED if not code else layout.FAILED, "" if not code else f"exit code {code}")
        else:
            assert e is not None
            self._error(e)

    def _error(self, e: BaseException) -> None:
        """One line with the cause; the traceback in error.txt."""
        cause = " ".join(str(e).split()) if isinstance(e, EyasError) else f"{type(e).__name__}: {_first_line(e)}"
        where = ""
        if not isinstance(e, EyasError):
            where = self._write_error("".join(traceback.format_exception(e)))
            if where:
                e.add_note(f"eyas: {where}")
        text = self._end_line(f"failed in {self.doing}: {cause}") + (f" · {where}" if where else "")
        self.end("error", layout.FAILED, text, said=isinstance(e, EyasError) and not self.steps)

    def _end_line(self, how: str) -> str:
        at = step_words({"step": self.steps, "total": self.total, "unit": self.unit})
        return f"{at}: {how}" + (f" · to go on: {self.resume}" if self.resume and self.steps else "")

    def _write_error(self, text: str) -> str:
        if self.folder is None or self._log is None:
            return ""
        name = "error.txt" if self.rank == 0 else f"error.{self.rank}.txt"
        path = self.folder / name

        def write(data: bytes) -> None:
            path.write_bytes(data)

        keep = Outlet(name, write)
        keep.put(text.encode(errors="replace"))
        keep.close(1.0)
        return f"traceback in {path}"

    def end(self, how: str, state: int, text: str = "", said: bool = False) -> None:
        """The last event and the last line; then the sidecar is let go. A second call does nothing.

        said: the line needs not be on standard output, because the command line will say it.
        """
        if self._ended:
            return
        self._ended = True
        spent = {name: round(self.phases.seconds(name), 3) for name in self.phases.numbers}
        self.event(
            "end",
            how=how,
            step=self.steps,
            tokens=self.tokens,
            phase=self.doing,
            text=text or None,
            resume=self.resume,
            seconds={name: s for name, s in spent.items() if s},
            gpu_busy=round(self._gpu.busy, 3) if self._gpu else None,
        )
        if self._live:
            self._live.stop()
        if text and said:
            if self._log is not None:
                self._log.put(stamped(text))
        elif text and self._entered and self.folder is not None:
            self.line(text, matters=True)
        self._stop.set()
        until = time.monotonic() + 2.0
        for outlet in (self._out, self._log, self._events):
            if outlet is not None:
                outlet.close(max(0.0, until - time.monotonic()))
        self._q[layout.STATE] = state
        self._let_go()

    def _let_go(self) -> None:
        if self._sidecar is not None:
            with contextlib.suppress(OSError):
                assert self._sidecar.stdin is not None
                self._sidecar.stdin.write(b".")
                self._sidecar.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sidecar.wait(2.0)
        self.beat.unlink()
        if self._sink_process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sink_process.wait(SINKS_WAIT)
        self._q[layout.DUMP_SIGNAL] = 0
        if self._stacks_fd is not None:
            faulthandler.unregister(DUMP_SIGNAL)
            os.close(self._stacks_fd)
        if self._fatal_fd is not None:
            faulthandler.disable()
            os.close(self._fatal_fd)

    # -- what the loop calls -------------------------------------------------------------------------------------------

    @property
    def doing(self) -> str:
        """The phase that goes on now."""
        return next(name for name, i in self.phases.numbers.items() if i == self.phases.now)

    def phase(self, name: str) -> Scope:
        """`with record.phase("forward"):`; any name, 24 different ones in all. `enter(name)` stays until the next."""
        return self.phases.scope(name)

    def data(self, loader: Iterable[T], name_of: Any = None, then: str = "computing") -> Generator[T]:
        """The batches of a loader; waiting for one is the phase "waiting for data", and `then` the one behind it.

        A loader may have `nbytes` (read so far), `ready` (batches that wait to be taken) and `reading` (what the batch
        waited for consists of; name_of turns one of them into a name): they are shown while it is waited for.
        """
        self._loader, self._name_of = loader, name_of
        counts, base = hasattr(loader, "nbytes"), self.nbytes
        switch, batches, after = self.phases.switch, iter(loader), self.phases.number(then)
        try:
            while True:
                switch(_WAITING)
                try:
                    batch = next(batches)
                except StopIteration:
                    switch(_COMPUTING)
                    return
                if counts:
                    self.nbytes = base + loader.nbytes  # type: ignore[attr-defined]
                switch(after)
                yield batch
                del batch  # its memory is the next one's
        finally:
            self._loader = None
            if hasattr(batches, "close"):
                batches.close()

    def follow(self, parts: Iterable[T], total: int = 0) -> Iterator[T]:
        """The parts of a long phase (validating, indexing); each one counts as progress."""
        self.progress(0, total)
        for done, part in enumerate(parts, start=1):
            yield part
            self.progress(done, total)

    def progress(self, done: int, total: int = 0) -> None:
        """So much of this phase is done: it lives."""
        _MOVED.pack_into(self._memory, 8 * layout.MOVED, monotonic_ns(), done, total)

    def step(
        self,
        loss: Any = None,
        *,
        step: int | None = None,
        tokens: int = 0,
        samples: Any = None,
        done: float | None = None,
        **figures: Any,
    ) -> None:
        """One optimiser step is done. Further figures are shown in the line and written into the event.

        loss: a float; a tensor on a GPU is read when it has arrived, without waiting for it.
        samples: ids of the step's samples, or a function that returns them; named when the loss explodes.
        done: share of the whole run's work (0..1), for the time that is left, where steps do not cost the same.
        """
        now = monotonic_ns()
        self.steps = n = self.steps + 1 if step is None else step
        self.tokens = tokens = self.tokens + tokens
        self.share = done
        if loss is not None and type(loss) is not float:
            loss = self._read_late(loss)
        q = self._q
        q[_NOW], q[_STEP], q[_TOKENS], q[_BYTES] = now, n, tokens, self.nbytes
        if loss is not None:
            self._floats[_LOSS] = loss
            mean = self._mean
            off = loss - mean
            if off > self._far or off != off or off - off != 0.0:  # far above what it has been of late, or no number
                self._exploding(loss, n, samples)
            if off - off == 0.0:
                self._mean = mean + off * self._weight
                self._spread += 0.05 * (abs(off) - self._spread)
        if self._gpu is not None:
            self._gpu.end()
            self._gpu.begin()
        if now >= self._check or n == self._begin_step + 1 or n == self.total:
            self._look(now, n, loss, figures)
        self._stepped = now

    def _look(self, now: int, n: int, loss: Any, figures: dict[str, Any]) -> None:
        """Once a second, and at the first and the last step: write the event, and the line if it is due."""
        self._check = now + self._event_ns
        first = n == self._begin_step + 1
        if self._sidecar is not None and self._sidecar.poll() is not None:
            self._sidecar = None
            self.warn("the recorder's side process is gone: a silent run stays silent from now on")
        if loss is not None:
            done = n - self._begin_step
            self._weight = 0.02 if done >= 50 else 1 / max(done, 1)
            if done >= SPIKE_AFTER:
                self._far = 2 * abs(self._mean) + 10 * self._spread
        self._step_event(n, loss, figures)
        pace = max(now - self._stepped, 2 * self._event_ns)  # until the next chance to speak, and some
        if now + pace - self._spoke > self._line_ns or first or n == self.total:
            self._step_line(n, loss, figures)

    def count(self, done: int, tokens: int = 0) -> None:
        """So many of the units are done, with so many tokens in all: for work that says its own lines."""
        self.steps, self.tokens = done, tokens
        now, q = monotonic_ns(), self._q
        q[_NOW], q[_STEP], q[_TOKENS], q[_BYTES] = now, done, tokens, self.nbytes
        self.progress(0)
        if now >= self._check or done == self.total:
            self._check = now + self._event_ns
            self._step_event(done, None, {})

    def begin(self, total: int, step: int = 0, device: str = "", done: float = 0.0) -> None:
        """The loop begins: steps in all, how many of them an earlier run has done, and what share of the work."""
        self.total, self.steps, self._begin_step = total, step, step
        self.share, self._begin_share = done, done
        q = self._q
        q[layout.TOTAL], q[layout.STEP], q[layout.FIRST_STEP] = total, step, step
        self._stepped = self._first = monotonic_ns()
        self._line_meter, self._event_meter = Meter(self), Meter(self)
        if device.startswith("cuda"):
            import torch

            self._torch = torch
            self._gpu, self._late = GpuClock(torch, self.beat), LateValues(torch)
            self._gpu.begin()
        if step:
            self.event("resume", step=step)

    def stopped(self, why: str) -> None:
        """The loop ends before its last step, in order, and has said so: a signal, a time limit."""
        self._stopped = why

    def compiled(self, what: str, seconds: float) -> None:
        """Something was compiled, in this many seconds."""
        self.event("compile", what=what, seconds=round(seconds, 3), step=self.steps)

    def bad_loss(self, loss: float, norm: float, step: int, samples: Sequence[str], skipped: bool) -> str:
        """A loss or gradient norm that is no number: said at once, with the samples of its batch; returns the line."""
        names = ", ".join(samples[:5]) + (f" and {len(samples) - 5} more" if len(samples) > 5 else "")
        what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        text = f"the {what} at step {step:,}: samples {names}"
        self._warned = step
        self.event("nan", step=step, loss=loss, grad_norm=norm, samples=list(samples), skipped=skipped)
        if skipped:
            self.line(f"warning: {text}; the step is skipped (--on-nan skip)", matters=True)
        return text

    def validation(self, figures: dict[str, Any], text: str) -> None:
        """A validation's figures, and the line that tells them."""
        self.event("validation", step=self.steps, **figures)
        self.line(text)

    def checkpoint(self, path: Path, seconds: float) -> None:
        self.event("checkpoint", step=self.steps, path=str(path), seconds=round(seconds, 3))

    def warn(self, text: str) -> None:
        """A line that begins with "warning:", and an event."""
        self.event("warning", step=self.steps, text=text)
        self.line(f"warning: {text}", matters=True)

    def event(self, kind: str, **fields: Any) -> None:
        """One line of events.jsonl."""
        if self._events is not None:
            self._events.put(events.line(kind, self.rank, **fields))
        elif self.folder is not None:
            self._early.append((kind, fields))

    def line(self, text: str, matters: bool = False) -> None:
        """Say a line now, in the log and in log.txt. Other ranks than the first say only what matters."""
        if self.rank:
            if not matters:
                return
            text = f"rank {self.rank}: {text}"
        self.spoken()
        if self._out is None:
            (self._own_say or to_stdout)(text)
            return
        self._out.put(text.encode(errors="replace"))
        if self._log is not None:
            self._log.put(stamped(text))
        else:
            self._early.append((text, None))

    def spoken(self) -> None:
        """What is seen of the run is new: nobody else needs to speak for ten seconds."""
        self._spoke = self._q[layout.SPOKE] = monotonic_ns()

    def beat_values(self) -> dict[str, Any]:
        """The beat as plain values."""
        return layout.read(self.beat.memory)

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _read_late(self, loss: Any) -> float | None:
        if self._late is not None and getattr(loss, "is_cuda", False):
            return self._late.put(loss)
        return float(loss)

    def _exploding(self, loss: float, step: int, samples: Any) -> None:
        if self._warned >= 0 and step - self._warned < 50:
            return
        self._warned = step
        names = list(samples() if callable(samples) else samples or [])
        shown = f": samples {', '.join(map(str, names[:5]))}" + (" ..." if len(names) > 5 else "") if names else ""
        kind = "explodes" if math.isfinite(loss) else "is no number"
        text = f"the loss {kind}: {loss:.4g} at step {step:,}, {self._mean:.4g} of late{shown}"
        self.event("loss", step=step, loss=loss, of_late=self._mean, samples=names)
        self.line(f"warning: {text}", matters=True)

    def _speed(self, meter: Meter) -> dict[str, Any]:
        speed = meter.take()
        steps, seconds = self.steps - self._begin_step, (monotonic_ns() - self._first) / 1e9
        if self.share is not None and self._begin_share is not None and self.share > self._begin_share:
            speed["left"] = seconds / (self.share - self._begin_share) * (1 - self.share)
        elif self.total and steps:
            speed["left"] = seconds / steps * (self.total - self.steps)
        if self._torch is not None:
            speed["memory"] = self._torch.cuda.memory_reserved()
        else:
            speed["memory"] = _resident()
        return speed

    def _step_event(self, n: int, loss: Any, figures: dict[str, Any]) -> None:
        given = figures if loss is None else {"loss": loss, **figures}
        speed = self._speed(self._event_meter)
        self.latest = (given, speed)
        if self.folder is not None:
            self.event("step", step=n, **given, **{k: v for k, v in speed.items() if v is not None})

    def _step_line(self, n: int, loss: Any, figures: dict[str, Any]) -> None:
        given: dict[str, Any] = figures if loss is None else {"loss": loss, **figures}
        order: dict[str, Any] = {k: given[k] for k in ("epoch", "loss") if k in given}
        text = step_line(n, self.total, {**order, **given}, self._speed(self._line_meter))
        if self.rank == 0 and (self._live is None or n == self.total):
            self.line(text)
        else:
            self.spoken()
            if self._log is not None and self.rank == 0:
                self._log.put(stamped(text))

    def _pulse(self) -> None:
        """Once a second: a sign that Python code can run, and what the loader is at."""
        name_thread()
        while not self._stop.wait(1.0):
            self._q[layout.PYTHON], self._q[layout.WALL] = monotonic_ns(), time_ns()
            loader = self._loader
            with contextlib.suppress(Exception):  # a loader of other people may answer anything
                self._q[layout.QUEUE] = int(getattr(loader, "ready", -1))
                reading = getattr(loader, "reading", None) or []
                names = [str(self._name_of(i) if self._name_of else i) for i in list(reading)[:1]]
                self.beat.text(layout.FILE, names[0] if names else "")

    def _failed(self, text: str) -> None:
        """An outlet's disk refuses: tell the others."""
        self.event("warning", text=text)
        if self._log is None:
            self._early.append((f"warning: {text}", None))
        for outlet in (self._out, self._log):
            if outlet is not None and not text.startswith(outlet.name):
                outlet.put(stamped(f"warning: {text}") if outlet is self._log else f"warning: {text}".encode())

    def _fault_handlers(self) -> None:
        """Stacks on a signal, and on a fault, into memory that the sidecar shares: no disk is in the way."""
        self._stacks_fd = os.memfd_create("eyas-stacks")
        faulthandler.register(DUMP_SIGNAL, file=self._stacks_fd, all_threads=True)
        self._q[layout.DUMP_SIGNAL] = DUMP_SIGNAL
        if not faulthandler.is_enabled():
            self._fatal_fd = os.memfd_create("eyas-fault")
            faulthandler.enable(file=self._fatal_fd, all_threads=True)

    def _start_sidecar(self) -> None:
        pidfd = os.pidfd_open(os.getpid())  # passed on: a run that dies at once still tells of what
        given = {
            "pid": os.getpid(),
            "beat": str(self.beat.path),
            "folder": str(self.folder),
            "name": self.name,
            "rank": self.rank,
            "world": self.world,
            "interval": self.interval,
            "limits": self._limits,
            "resume": self.resume,
            "prefix": "",
            "stacks_fd": self._stacks_fd,
            "fatal_fd": self._fatal_fd,
            "pidfd": pidfd,
        }
        fds = [fd for fd in (self._stacks_fd, self._fatal_fd, pidfd) if fd is not None]
        try:
            self._sidecar = subprocess.Popen(
                [sys.executable, "-I", "-S", sidecar.__file__, json.dumps(given)],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as e:
            self.line(f"warning: the recorder's side process did not start ({e}): a silent run stays silent")
        finally:
            os.close(pidfd)

    def _start_sinks(self) -> None:
        """The trackers' process: it follows events.jsonl, so nothing it does can slow the run."""
        assert self.folder is not None
        try:
            with (self.folder / "sinks.log").open("ab") as log:
                self._sink_process = subprocess.Popen(
                    [sys.executable, "-m", "eyas.record.sinks", str(self.folder), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            assert self._sink_process.stdin is not None
            self._sink_process.stdin.write(json.dumps(self._sinks).encode())  # not in argv: addresses hold tokens
            self._sink_process.stdin.close()
        except OSError as e:
            self.warn(f"trackers did not start: {e}")

    def _link(self) -> None:
        """`beat` in the run directory points at the record, in place of an earlier run's."""
        assert self.folder is not None and self.beat.path is not None
        name = self.folder / sidecar.beat_name(self.rank)
        side = name.with_name(f".{name.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            side.unlink(missing_ok=True)
            side.symlink_to(self.beat.path)
            side.replace(name)


class Meter:
    """Speed since it was last asked: tokens/s, bytes/s, the shares of waiting and of the GPU."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._last = self._now()
        self._spent = list(record.phases.spent)

    def _now(self) -> tuple[float, int, int, float, float, float]:
        r = self.record
        gpu = r._gpu.busy if r._gpu is not None else 0.0
        return time.monotonic(), r.tokens, r.nbytes, r.phases.seconds("waiting for data"), gpu, time.process_time()

    def take(self) -> dict[str, Any]:
        """The figures as a dict; starts anew."""
        now, last = self._now(), self._last
        self._last = now
        spent, before = list(self.record.phases.spent), self._spent
        self._spent = spent
        seconds, tokens, nbytes, waited, gpu, cpu = (b - a for a, b in zip(last, now, strict=True))
        seconds = max(seconds, 1e-9)
        busy = max(seconds - waited, 1e-9)
        return {
            "tokens_per_s": round(tokens / seconds, 1) if now[1] else None,
            "data_wait": round(min(1.0, waited / seconds), 4),
            "bytes_per_s": round(nbytes / seconds) if now[2] else None,
            "bytes_needed_per_s": round(nbytes / busy) if now[2] else None,
            "cpu": round(cpu / seconds, 3),
            "phases": {
                name: round((spent[i] - before[i]) / 1e9 / seconds, 4)
                for name, i in self.record.phases.numbers.items()
                if spent[i] != before[i]
            },
            "gpu": round(min(1.0, gpu / seconds), 4) if self.record._gpu is not None else None,
        }


def _other_place(rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"eyas-{os.getpid()}-{monotonic_ns():x}-{rank}.beat"


def _first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return lines[0][:300] if lines else "no message"


def _resident() -> int:
    """Bytes of memory this process holds."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
