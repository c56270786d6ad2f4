"""One run's recorder: what the loop calls, and what it starts.

`Record` puts the pieces together: the beat and its phases, the lines, events.jsonl, the sidecar and the sinks. A step
costs about 4 µs: the clock, the stores into the beat, and one comparison that decides whether a line is due. Lines and
events are written by threads (outlet.py), so a full or hanging disk costs nothing but the lines.

When a line is due: at the first step and the last, and when the next step would be later than ten seconds after the
last line. In between the sidecar speaks.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic_ns, time_ns
from types import TracebackType
from typing import Any, Self, TypeVar

from eyas.errors import EyasError, OtherRankGone
from eyas.record import beat as layout
from eyas.record.beat import Beat
from eyas.record.beside import Stacks, link, runs_there, start_sidecar, start_sinks
from eyas.record.console import Live, Say, on_terminal, step_line
from eyas.record.console import say as to_stdout
from eyas.record.figures import Meter, Pace, resident
from eyas.record.outlet import Outlet, hold_standard_descriptors, name_thread
from eyas.record.phases import GpuClock, LateValues, Phases, Scope
from eyas.record.voice import Voice
from eyas.record.words import step_words
from eyas.store.remote import check_local

T = TypeVar("T")
INTERVAL = 10.0  # seconds between two lines, at most
EVENT_EVERY = 1.0  # seconds between two step events, at least
SINKS_WAIT = 3.0  # seconds that trackers get at the end before the command goes on without them
SPIKE_AFTER = 20  # steps before a loss can be called exploding
_NOW, _STEP, _TOKENS, _BYTES, _LOSS = layout.NOW, layout.STEP, layout.TOKENS, layout.BYTES, layout.LOSS
_MOVED = struct.Struct("@qqq")  # MOVED, PART, PARTS
_COMPUTING = layout.FIXED_PHASES.index("computing")
_WAITING = layout.FIXED_PHASES.index("waiting for data")
_STARTING = layout.FIXED_PHASES.index("starting")


class Record:
    """The recorder of one run; a context manager.

    folder: the run directory, made by `open`; None keeps everything in memory and says lines only (tests, notebooks).
    total: steps in all, 0 if not known. say: where lines go; None is standard output. resume: the command that goes on.
    make: make the run directory at once, and not when the caller has checked what it was given. unit: what is counted.
    rank, world: None for what the launcher says (RANK, WORLD_SIZE). Raises EyasError for a folder that is a URL.
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
        world: int | None = None,
        interval: float = INTERVAL,
        limits: dict[str, float] | None = None,
        sinks: Sequence[str] = (),
        make: bool = False,
        unit: str = "step",
    ) -> None:
        if folder is not None:
            check_local(folder)
        self.folder, self.name, self.resume, self.interval = folder, name, resume, interval
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
        self.total, self.steps, self.tokens, self.nbytes = total, 0, 0, 0
        self.latest: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._own_say, self._limits, self._sinks, self._make = say, limits or {}, list(sinks), make
        if folder is not None:
            hold_standard_descriptors()
        path = (layout.shm_path(self.rank) or _other_place(self.rank)) if folder is not None else None
        self.beat = Beat(str(folder.absolute()) if folder else name, self.rank, self.world, total, path, unit)
        self.unit = unit
        self.phases = Phases(self.beat)
        self.enter = self.phases.enter
        self._q, self._floats, self._memory = self.beat.slots, self.beat.floats, self.beat.memory
        self._spoke = self._stepped = self._check = monotonic_ns()
        self._line_ns, self._event_ns = int(interval * 1e9), int(EVENT_EVERY * 1e9)
        self.gpu: GpuClock | None = None
        self._late: LateValues | None = None
        self._torch: Any = None
        self._line_meter, self._event_meter = Meter(self), Meter(self)
        self._mean = self._spread = 0.0  # of the loss, of late
        self._far, self._weight = math.inf, 1.0  # a loss that far above its mean explodes; weight of a new one
        self._warned = -1
        self._begin_step = 0
        self.share: float | None = None  # of the run's work that is done, where the loop says so
        self._pace = Pace(self, self._spoke, 0, 0.0)
        self._loader: Any = None
        self._name_of: Any = None
        self._live: Live | None = None
        self._voice: Voice | None = None
        self._sidecar: subprocess.Popen[bytes] | None = None
        self._sink_process: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._stacks: Stacks | None = None
        self._pid = os.getpid()
        self._bare = True  # a loop that tells of steps alone, and not what it waits for
        self._ended = False
        self._stopped = ""

    # -- the life of a run ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start what watches. Call it before anything heavy is imported: the first line then stands at once.

        Raises EyasError when it has recorded a run already.
        """
        if self._ended:
            raise EyasError(f"the recorder of {self.folder or self.name} has ended: make a new one for another run")
        if self.folder is None:
            return self
        if self.rank == 0 and self._own_say is None and on_terminal():
            self._live = Live(self)
        speak = self._own_say or (self._live.line if self._live else to_stdout)
        self._voice = Voice(self.rank, speak)
        self._start_sidecar()
        threading.Thread(target=self._pulse, name="eyas-pulse", daemon=True).start()
        if self.rank == 0:
            self.line(f"{self.name} (PID {os.getpid()}) starts · {self.folder} · eyas why {os.getpid()} tells more")
        if self._live:
            self._live.start()
        if self._make:
            try:
                self.open()
            except EyasError as e:  # who goes on without a record is watched no more
                self._error(e)
                raise
        return self

    def open(self) -> None:
        """Make the run directory and write into it from now on; what was said before is written first.

        Raises EyasError when the directory cannot be made.
        """
        if self.folder is None or self._voice is None or self._voice.kept:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise EyasError(f"cannot make the run directory {self.folder}: {e.strerror}") from None
        assert self.beat.path is not None
        other = runs_there(self.folder, self.rank)
        with contextlib.suppress(OSError):
            link(self.folder, self.rank, self.beat.path)
        self._voice.open(
            self.folder, name=self.name, pid=os.getpid(), host=os.uname().nodename, total=self.total, world=self.world,
            resume=self.resume,
        )  # fmt: skip
        self._q[layout.RUN_OPEN] = 1
        if other:
            self.warn(
                f"PID {other} records into {self.folder} too: their lines and events mix, and `beat` is this one's"
            )
        if self._sinks and self.rank == 0:
            try:
                self._sink_process = start_sinks(self.folder, self._sinks)
            except OSError as e:
                self.warn(f"trackers did not start: {e}")

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        """Say how it ended, and stop what watches. An exception goes on to the caller."""
        if os.getpid() != self._pid:  # a child that was forked in the block leaves it: the run is its parent's
            return
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
        said = isinstance(e, EyasError) and not self.steps
        self.end("error", layout.FAILED, text, said, follows=isinstance(e, OtherRankGone))

    def _end_line(self, how: str) -> str:
        at = step_words({"step": self.steps, "total": self.total, "unit": self.unit})
        return f"{at}: {how}" + (f" · to go on: {self.resume}" if self.resume and self.steps else "")

    def _write_error(self, text: str) -> str:
        if self.folder is None or self._voice is None or not self._voice.kept:
            return ""
        name = "error.txt" if self.rank == 0 else f"error.{self.rank}.txt"
        path = self.folder / name

        def write(data: bytes) -> None:
            path.write_bytes(data)

        keep = Outlet(name, write)
        keep.put(text.encode(errors="replace"))
        keep.close(1.0)
        return f"traceback in {path}"

    def end(self, how: str, state: int, text: str = "", said: bool = False, follows: bool = False) -> None:
        """The last event and the last line; then the sidecar is let go. A second call does nothing.

        said: the line needs not be on standard output, because the command line will say it. follows: from the end of
        another rank.
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
            gpu_busy=round(self.gpu.busy, 3) if self.gpu else None,
            **({"follows": True} if follows else {}),
        )
        if self._live and self._voice is not None:
            self._voice.shown(1.0)  # a line that is still being said would bring the display back
            self._live.stop()
        if self._voice is not None:
            if text and said:
                self._voice.keep(text)
            elif text:
                self.line(text, matters=True)
            self._voice.close(2.0)
        self._stop.set()
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
        if self.beat.path is not None and (
            self._sidecar is None or self._sidecar.returncode
        ):  # who would do it is gone
            folder, place, memory = self.folder, self.beat.path, self._memory
            last = Outlet("beat", lambda _data: layout.keep(folder, self.rank, place, memory))
            last.put(b"")
            last.close(1.0)
        self.beat.unlink()
        if self._sink_process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sink_process.wait(SINKS_WAIT)
        if self._stacks is not None:
            self._stacks.close()

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
        self._loader, self._name_of, self._bare = loader, name_of, False
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
        if self.gpu is not None:
            self.gpu.end()
            self.gpu.begin()
        if self._bare and self.phases.now in (_STARTING, _COMPUTING):
            self.phases.switch(_COMPUTING)  # anew with each step, so that one that hangs is longer than the others
        if now >= self._check or n == self._begin_step + 1 or n == self.total:
            self._look(now, n, loss, figures)
        self._stepped = now

    def _look(self, now: int, n: int, loss: Any, figures: dict[str, Any]) -> None:
        """Once a second, and at the first and the last step: write the event, and the line if it is due."""
        self._check = now + self._event_ns
        first = n == self._begin_step + 1
        if loss is not None:
            done = n - self._begin_step
            self._weight = 0.02 if done >= 50 else 1 / max(done, 1)
            if done >= SPIKE_AFTER:
                self._far = 2 * abs(self._mean) + 10 * self._spread
        self._look_at_pace(now)
        self._step_event(n, loss, figures)
        pace = max(now - self._stepped, 2 * self._event_ns)  # until the next chance to speak, and some
        if now + pace - self._spoke > self._line_ns or first or n == self.total:
            self._step_line(n, loss, figures)

    def count(self, done: int, tokens: int = 0, share: float | None = None) -> None:
        """So many of the units are done, with so many tokens in all: for work that says its own lines.

        share: of the whole work (0..1), for the time that is left, where units do not cost the same.
        """
        self.steps, self.tokens, self.share = done, tokens, share
        now, q = monotonic_ns(), self._q
        q[_NOW], q[_STEP], q[_TOKENS], q[_BYTES] = now, done, tokens, self.nbytes
        self.progress(0)
        if now >= self._check or done == self.total:
            self._check = now + self._event_ns
            self._look_at_pace(now)
            self._step_event(done, None, {})

    def begin(self, total: int, step: int = 0, device: str = "", done: float = 0.0) -> None:
        """The loop begins: steps in all, how many of them an earlier run has done, and what share of the work."""
        self.total, self.steps, self._begin_step = total, step, step
        self.share = done
        q = self._q
        q[layout.TOTAL], q[layout.STEP], q[layout.FIRST_STEP] = total, step, step
        self._stepped = monotonic_ns()
        self._pace = Pace(self, self._stepped, step, done)
        self._line_meter, self._event_meter = Meter(self), Meter(self)
        if device.startswith("cuda"):
            import torch

            self._torch = torch
            self.gpu, self._late = GpuClock(torch, self.beat), LateValues(torch)
            self.gpu.begin()
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

    def event(self, kind: str, /, **fields: Any) -> None:
        """One line of events.jsonl. A field called `time`, `event` or `rank` gets an underscore behind its name."""
        if self._voice is not None:
            self._voice.event(kind, **fields)

    def line(self, text: str, matters: bool = False) -> None:
        """Say a line now, in the log and in log.txt. Other ranks than the first say only what matters."""
        if self.rank:
            if not matters:
                return
            text = f"rank {self.rank}: {text}"
        self.spoken()
        if self._voice is not None:
            self._voice.line(text)
        else:
            (self._own_say or to_stdout)(text)

    def spoken(self) -> None:
        """What is seen of the run is new: nobody else needs to speak for ten seconds."""
        self._spoke = self._q[layout.SPOKE] = monotonic_ns()

    @property
    def left(self) -> float | None:
        """Seconds until the last step, as of the last look; None where that is not known."""
        return self._pace.left(self.total)

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
        if self.left is not None:
            speed["left"] = self.left
        if self._torch is not None:
            speed["memory"] = self._torch.cuda.memory_reserved()
        else:
            speed["memory"] = resident()
        return speed

    def _look_at_pace(self, now: int) -> None:
        """Take in how far the run is, and have the beat say what its own lines say: the pace of late, the time left."""
        self._pace.look(now, self.steps, self.share)
        seconds, left = self._pace.seconds, self.left
        self._q[layout.PACE] = round(1e9 * seconds) if seconds else 0
        self._q[layout.LEFT] = round(1e9 * left) if left is not None else -1

    def _step_event(self, n: int, loss: Any, figures: dict[str, Any]) -> None:
        given = figures if loss is None else {"loss": loss, **figures}
        speed = self._speed(self._event_meter)
        self.latest = (given, speed)
        if self._voice is not None:
            measured = {k: v for k, v in speed.items() if v is not None}
            self.event(
                "step", **{**measured, **given, "step": n}
            )  # who calls a figure like one of ours knows it better

    def _step_line(self, n: int, loss: Any, figures: dict[str, Any]) -> None:
        given: dict[str, Any] = figures if loss is None else {"loss": loss, **figures}
        order: dict[str, Any] = {k: given[k] for k in ("epoch", "loss") if k in given}
        text = step_line(n, self.total, {**order, **given}, self._speed(self._line_meter))
        if self.rank == 0 and (self._live is None or n == self.total):
            self.line(text)
        else:
            self.spoken()
            if self._voice is not None and self.rank == 0:
                self._voice.keep(text)

    def _pulse(self) -> None:
        """Once a second: a sign that Python code can run, what the loader is at, and whether the sidecar lives."""
        name_thread()
        while not self._stop.wait(1.0):
            self._q[layout.PYTHON], self._q[layout.WALL] = monotonic_ns(), time_ns()
            if self._sidecar is not None and self._sidecar.poll() is not None and not self._ended:
                self._sidecar = None
                self.warn("the recorder's side process is gone: a silent run stays silent from now on")
            loader = self._loader
            with contextlib.suppress(Exception):  # a loader of other people may answer anything
                self._q[layout.QUEUE] = int(getattr(loader, "ready", -1))
                reading = getattr(loader, "reading", None) or []
                names = [str(self._name_of(i) if self._name_of else i) for i in list(reading)[:1]]
                self.beat.text(layout.FILE, names[0] if names else "")

    def _start_sidecar(self) -> None:
        self._stacks = Stacks(self._q)
        given = {
            "beat": str(self.beat.path),
            "folder": str(self.folder),
            "name": self.name,
            "rank": self.rank,
            "world": self.world,
            "interval": self.interval,
            "limits": self._limits,
            "resume": self.resume,
            "prefix": getattr(self._own_say, "prefix", ""),
        }
        try:
            self._sidecar = start_sidecar(given, self._stacks)
        except OSError as e:
            self.line(f"warning: the recorder's side process did not start ({e}): a silent run stays silent")


def _other_place(rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"eyas-{os.getpid()}-{monotonic_ns():x}-{rank}.beat"


def _first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return lines[0][:300] if lines else "no message"
