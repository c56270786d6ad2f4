"""A small process beside the trainer that speaks when the trainer cannot.

It reads the beat twice a second. When no line has been said for ten seconds it says one: the phase, since when, the
file, the rate, and what /proc shows. When a phase lasts far longer than it usually does, it has the trainer write down
all its stacks (a signal handler in C that needs no GIL), asks the judgement of `eyas why`, and says its sentence. When
the trainer is gone without having said so, it writes the last word: by what signal or exit code, the evidence of an
out-of-memory kill, the last step, and the command that goes on.

It never ends the trainer: the only signal it sends is the one for the stacks, and only when the trainer has a handler
for it. It ends within a second of the trainer, ignores what Ctrl-C and schedulers send to the whole job, and depends on
nothing but the standard library: 12 MB, 0.1 % of a core. Everything that can block (the log, the run directory) is
written by threads of its own.

    python -I -S sidecar.py '{"pid": 4242, "beat": "/dev/shm/...", ...}'     (started by record.py)
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
if __name__ == "__main__":
    sys.path.insert(0, ROOT)

from eyas.record import beat, events  # noqa: E402
from eyas.record.limits import Limits  # noqa: E402
from eyas.record.look import (  # noqa: E402
    Process,
    exit_status,
    look,
    memory_cgroups,
    oom_counters,
    oom_words,
    read_bytes,
    status_words,
    words,
)
from eyas.record.outlet import Outlet, stamped, write_all  # noqa: E402
from eyas.record.ranks import Ranks  # noqa: E402
from eyas.record.stacks import NONE, dump, fault, main_thread  # noqa: E402
from eyas.record.words import phase_words, seconds_words, step_words  # noqa: E402

JUDGE_SECONDS = 8.0
AGAIN = 60.0  # seconds between two judgements
LOOKS = 0.5
OTHERS = 3.0  # seconds that the last word of another rank may come behind the end of this one


class Sidecar:
    """The watching of one trainer. `now` is monotonic time in seconds, as in the beat."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.pid: int = given["pid"]
        self.interval: float = given["interval"]
        self.folder = Path(given["folder"]) if given["folder"] else None
        with open(given["beat"], "r+b") as file:  # noqa: PTH123
            self.memory = mmap.mmap(file.fileno(), beat.SIZE)
        self.slots = memoryview(self.memory).cast("q")
        self.slots[beat.SIDECAR] = os.getpid()
        self.out = Outlet("standard output", lambda data: write_all(1, data))
        self.log: Outlet | None = None
        self.events: Outlet | None = None
        self.early: list[bytes] = []  # lines said before there is a log.txt
        self.spoke = 0.0
        self.limits = Limits(given["limits"])
        self.before: tuple[float, Process] | None = None
        self.rate = 0.0  # bytes a second, of late
        self._rates: deque[tuple[float, int]] = deque(maxlen=20)
        self.judge: tuple[subprocess.Popen[bytes], Any, float] | None = None
        self.judged: dict[str, float] = {}  # phase instance -> when
        self.stalled = ""  # the phase instance whose stall has been said
        self.places = memory_cgroups(self.pid)
        self.oom = oom_counters(self.places)
        self.ranks = Ranks(self.folder, given["rank"]) if given["rank"] == 0 and given["world"] > 1 else None
        if self.ranks is not None:
            self.ranks.start()

    # -- saying --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The run directory's files, once it is there: the trainer makes it, or refuses to."""
        if self.log is None and self.folder is not None and self.slots[beat.RUN_OPEN]:
            self.log = Outlet("log.txt", events.Appender(self.folder / "log.txt"))
            self.events = Outlet("events.jsonl", events.Appender(self.folder / "events.jsonl"))
            while self.early:
                self.log.put(self.early.pop(0))

    def say(self, text: str) -> None:
        """One line in the log, now."""
        self.spoke = time.monotonic()
        self.slots[beat.SPOKE] = int(self.spoke * 1e9)
        self.out.put(f"{self.given['prefix']}{text}\n".encode(errors="replace"))
        put = self.log.put if self.log is not None else self.early.append
        put(stamped(text))

    def event(self, kind: str, **fields: Any) -> None:
        if self.events is not None:
            self.events.put(events.line(kind, self.given["rank"], by="sidecar", **fields))

    # -- the loop ------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Until the trainer has said that it is over, or is gone."""
        pidfd: int = self.given["pidfd"]
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.register(0, select.POLLIN | select.POLLHUP)
        while True:
            ready = dict(poller.poll(LOOKS * 1000))
            if self.slots[beat.STATE] != beat.RUNNING:
                return
            if pidfd in ready:
                self.last_word(pidfd)
                return
            if 0 in ready and not os.read(0, 64):  # its end of the pipe is closed: it is over, or going
                poller.unregister(0)
            self.open()
            self.look_once(beat.read(self.memory), time.monotonic())

    def look_once(self, b: dict[str, Any], now: float) -> None:
        """One look at the beat: learn, and speak if nobody has."""
        self.limits.learn(b)
        self._rates.append((now, max(b["bytes"], read_bytes(self.pid))))
        (t0, n0), (t1, n1) = self._rates[0], self._rates[-1]
        self.rate = (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0
        self.hear_judge()
        silent = now - max(b["spoke"], self.spoke)
        still = now - max(b["since"], b["moved"])
        if silent < self.interval - 3 * LOOKS and still < self.interval - 3 * LOOKS:
            self.before = None
        elif self.before is None:
            self.before = (now, look(self.pid))
            if self.ranks is not None:
                self.ranks.glance(now)
        if (silent >= self.interval - 2 * LOOKS and self.given["rank"] == 0) or self.odd(b, still):
            self.speak(b, now, still)
        if self.ranks is not None:
            self.ranks.read()
            if line := self.ranks.straggler(now):
                self.say(line)
                self.event("straggler", text=line)

    def odd(self, b: dict[str, Any], still: float) -> bool:
        """Whether another rank than the first has a reason to speak: its phase has passed the limit, once."""
        return self.given["rank"] != 0 and still > self.limits.of(b["phase"]) and self.stalled != instance(b)

    def speak(self, b: dict[str, Any], now: float, still: float) -> None:
        """A line for a trainer that has not said one, and more when its phase is a stall."""
        seen = look(self.pid)
        shown = ""
        if self.before is not None:
            shown = words(self.pid, self.before[1], seen, now - self.before[0], now - b["python"])
        self.before = (now, seen)
        stall = still > self.limits.of(b["phase"])
        unusual = self.limits.unusual(b, still, self.interval - 3 * LOOKS)
        top = ""
        if (stall or unusual) and not seen.stopped:
            top = self.stacks(b)
        where = f"rank {b['rank']}: " if self.given["world"] > 1 else ""
        other = self.ranks.waited_for(now) if self.ranks is not None and still >= self.interval / 3 else ""
        parts = [where + step_words(b), phase_words(b, now, self.rate, need(b)), shown, top, other]
        self.say(" · ".join(p for p in parts if p))
        if stall and self.stalled != instance(b):
            self.stalled = instance(b)
            usual = f", usually {seconds_words(u)}" if (u := self.limits.usual(b["phase"])) else ""
            stacks = f"; stacks in {self.folder / 'stacks.txt'}" if top and self.folder and self.log else ""
            self.say(f"stall: {b['phase']} for {still:.0f} s{usual}{stacks}")
            self.event("stall", step=b["step"], phase=b["phase"], seconds=round(still, 1), file=b["file"], top=top)
        if (stall or unusual) and not seen.stopped:
            self.ask_judge(b, now)

    # -- stacks and judgement ------------------------------------------------------------------------------------------

    def stacks(self, b: dict[str, Any]) -> str:
        """Have the trainer write down its stacks; returns the main thread's innermost line."""
        text = dump(self.pid, b["dump_signal"], self.given["stacks_fd"])
        if not text:
            return NONE if text == "" else ""
        if self.folder is not None and self.log is not None:
            head = f"-- {time.strftime('%Y-%m-%d %H:%M:%S')} step {b['step']} {b['phase']}\n"
            keep = Outlet("stacks.txt", events.Appender(self.folder / "stacks.txt"))
            keep.put(f"{head}{text}\n".encode(errors="replace"))
            keep.close(0)
        return "main thread at " + main_thread(text)

    def ask_judge(self, b: dict[str, Any], now: float) -> None:
        """Start the judgement of `eyas why` in a process of its own, at most once a minute."""
        if self.judge is not None or now - max(self.judged.values(), default=-AGAIN) < AGAIN:
            return
        self.judged[instance(b)] = now
        out = open(os.memfd_create("eyas-why"), "w+b")  # noqa: SIM115, PTH123
        code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from eyas.why.__main__ import main; sys.exit(main())"
        question = [str(self.pid), "--json", "--look", "--timeout", str(JUDGE_SECONDS)]
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code, ROOT, *question],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.judge = (process, out, now)

    def hear_judge(self) -> None:
        """Say the sentence when it is there."""
        if self.judge is None:
            return
        process, out, begun = self.judge
        if process.poll() is None:
            if time.monotonic() - begun > 2 * JUDGE_SECONDS:
                process.kill()
            return
        self.judge = None
        out.seek(0)
        try:
            found = json.load(out)
        except ValueError:
            return
        finally:
            out.close()
        if found["state"] != "unknown":
            self.say(f"eyas why: {found['sentence']}  [{found['verdict']}, {found['grade']}]")
        self.event("why", verdict=found["verdict"], grade=found["grade"], sentence=found["sentence"])

    # -- the end -------------------------------------------------------------------------------------------------------

    def last_word(self, pidfd: int) -> None:
        """The trainer is gone and has not said so."""
        self.open()
        b = beat.read(self.memory)
        status = None
        for _ in range(6):
            status = exit_status(self.pid, pidfd)
            if status is not None:
                break
            time.sleep(0.05)
        oom = oom_words(self.pid, self.oom, oom_counters(self.places)) if status is None or status & 0x7F == 9 else ""
        how = " ".join(p for p in (status_words(status), oom) if p)
        fatal = self.fatal()
        text = f"the end: {self.given['name']} (PID {self.pid}) {how}, at {step_words(b)} in {b['phase']}"
        text += f"; {fatal}" if fatal else ""
        if self.given["world"] > 1:
            text = f"rank {b['rank']}: {text}"
        if self.given["resume"] and self.slots[beat.RUN_OPEN]:  # before, there is nothing that could go on
            text += f" · to go on: {self.given['resume']}"
        self.slots[beat.STATE], self.slots[beat.EXIT] = beat.FAILED, -1 if status is None else status
        self.say(text)
        self.event(
            "end", how="vanished", status=status, oom=bool(oom), step=b["step"], phase=b["phase"], text=text,
            resume=self.given["resume"],
        )  # fmt: skip

    def others(self) -> None:
        """When rank 0 has failed: say which rank failed before it, as soon as that one's last word is there."""
        if self.ranks is None or beat.STATES[self.slots[beat.STATE]] != "failed":
            return
        ranks, b, until, found = self.ranks, beat.read(self.memory), time.monotonic() + OTHERS, [""]

        def ask() -> None:  # the run directory's disk may hang
            while not (first := ranks.first_failure(b)) and time.monotonic() < until:
                time.sleep(0.1)
                ranks.read()
                if not ranks.someone_else() and time.monotonic() > until - OTHERS / 2:
                    break
            found[0] = first

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(OTHERS)
        if found[0]:
            self.say(found[0])

    def fatal(self) -> str:
        """What the fault handler wrote when the process died of a fault: its first line and the innermost frame."""
        fd = self.given["fatal_fd"]
        raw = os.pread(fd, 1 << 20, 0).decode(errors="replace") if fd is not None else ""
        if not raw.strip():
            return ""
        if self.folder is not None and self.log is not None:
            keep = Outlet("error.txt", events.Appender(self.folder / "error.txt"))
            keep.put(raw.encode(errors="replace"))
            keep.close(0.3)
        return fault(raw)

    def close(self) -> None:
        """Leave the last beat in the run directory, and wait a moment for what is being written."""
        if self.judge is not None:
            self.judge[0].kill()
        for outlet in (self.out, self.log, self.events):
            if outlet is not None:
                outlet.close(0.8)
        place, rank = Path(self.given["beat"]), self.given["rank"]
        keep = Outlet("beat", lambda _data: beat.keep(self.folder, rank, place, self.memory))
        keep.put(b"")
        keep.close(0.3)


def instance(b: dict[str, Any]) -> str:
    """One stay in a phase."""
    return f"{b['phase']}@{max(b['since'], b['moved']):.3f}"


def need(b: dict[str, Any]) -> float:
    """Bytes a second that the run would read if it never waited for them; 0 when that is not known."""
    wait, start = (b["phases"].get(name, (0, 0.0, 0.0))[1] for name in ("waiting for data", "starting"))
    busy = sum(row[1] for row in b["phases"].values()) - wait - start
    return float(b["bytes"] / busy) if busy > 1 else 0.0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    sidecar = Sidecar(json.loads(sys.argv[1]))
    try:
        sidecar.watch()
        sidecar.others()
    except Exception as e:
        sidecar.say(f"the recorder's side process failed ({type(e).__name__}: {e}): a silent run stays silent now")
    sidecar.close()
    os._exit(0)  # whatever still hangs in a write


if __name__ == "__main__":
    main()
