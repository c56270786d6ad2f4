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
import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
if __name__ == "__main__":
    sys.path.insert(0, ROOT)

from eyas.record import beat, events  # noqa: E402
from eyas.record.look import (  # noqa: E402
    Process,
    catches,
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
from eyas.record.words import phase_words, seconds_words, step_words  # noqa: E402

LEAST = 60.0  # a phase shorter than this is no stall
OWN_LIMITS = {"starting": 300.0, "reading verifier": 600.0, "indexing": 600.0, "compiling": 1800.0, "saving": 600.0}
TIMES_MEDIAN, TIMES_UNUSUAL = 5.0, 20.0
JUDGE_SECONDS = 8.0
AGAIN = 60.0  # seconds between two judgements
LOOKS = 0.5


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
        self.spoke = 0.0
        self.last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=64))  # seconds of a phase, of late
        self.times: dict[str, int] = {}
        self.before: tuple[float, Process] | None = None
        self.rate = 0.0  # bytes a second, of late
        self._rates: deque[tuple[float, int]] = deque(maxlen=20)
        self.judge: tuple[subprocess.Popen[bytes], Any, float] | None = None
        self.judged: dict[str, float] = {}  # phase instance -> when
        self.stalled = ""  # the phase instance whose stall has been said
        self.stack_at = 0
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

    def say(self, text: str) -> None:
        """One line in the log, now."""
        self.spoke = time.monotonic()
        self.slots[beat.SPOKE] = int(self.spoke * 1e9)
        self.out.put(f"{self.given['prefix']}{text}\n".encode(errors="replace"))
        if self.log is not None:
            self.log.put(stamped(text))

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
        for name, (times, _, last) in b["phases"].items():
            if times != self.times.get(name, 0):
                self.times[name] = times
                self.last[name].append(last)
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
        if (silent >= self.interval - 2 * LOOKS and self.given["rank"] == 0) or self.odd(b, still):
            self.speak(b, now, still)
        if self.ranks is not None and (line := self.ranks.straggler(now)):
            self.say(line)
            self.event("straggler", text=line)

    def odd(self, b: dict[str, Any], still: float) -> bool:
        """Whether another rank than the first has a reason to speak: its phase has passed the limit, once."""
        return self.given["rank"] != 0 and still > self.limit(b["phase"]) and self.stalled != instance(b)

    def limit(self, phase: str) -> float:
        """Seconds after which a phase is a stall."""
        least = self.given["limits"].get(phase, OWN_LIMITS.get(phase, self.given["limits"].get("", LEAST)))
        return float(max(least, TIMES_MEDIAN * self.median(phase)))

    def median(self, phase: str) -> float:
        return median(self.last[phase])

    def unusual(self, b: dict[str, Any], still: float) -> bool:
        """A phase that was entered often and took nowhere near as long."""
        times, spent, last = b["phases"].get(b["phase"], (0, 0.0, 0.0))
        usual = max(last, spent / max(times, 1), self.median(b["phase"]))
        return times >= 3 and still >= self.interval - 3 * LOOKS and still > TIMES_UNUSUAL * usual

    def speak(self, b: dict[str, Any], now: float, still: float) -> None:
        """A line for a trainer that has not said one, and more when its phase is a stall."""
        seen = look(self.pid)
        shown = ""
        if self.before is not None:
            shown = words(self.pid, self.before[1], seen, now - self.before[0], now - b["python"])
        self.before = (now, seen)
        stall, unusual = still > self.limit(b["phase"]), self.unusual(b, still)
        top = ""
        if (stall or unusual) and not seen.stopped:
            top = self.stacks(b)
        where = f"rank {b['rank']}: " if self.given["world"] > 1 else ""
        parts = [where + step_words(b), phase_words(b, now, self.rate, need(b)), shown, top]
        self.say(" · ".join(p for p in parts if p))
        if stall and self.stalled != instance(b):
            self.stalled = instance(b)
            usual = f", usually {seconds_words(self.median(b['phase']))}" if self.last[b["phase"]] else ""
            stacks = f"; stacks in {self.folder / 'stacks.txt'}" if top and self.folder and self.log else ""
            self.say(f"stall: {b['phase']} for {still:.0f} s{usual}{stacks}")
            self.event("stall", step=b["step"], phase=b["phase"], seconds=round(still, 1), file=b["file"], top=top)
        if (stall or unusual) and not seen.stopped:
            self.ask_judge(b, now)

    # -- stacks and judgement ------------------------------------------------------------------------------------------

    def stacks(self, b: dict[str, Any]) -> str:
        """Have the trainer write down its stacks; returns the main thread's innermost line."""
        fd, number = self.given["stacks_fd"], b["dump_signal"]
        if fd is None or not catches(self.pid, number):
            return ""
        start = os.fstat(fd).st_size
        if not send(self.pid, listener(self.pid, look(self.pid)), number):
            return ""
        text = b""
        for _ in range(20):
            time.sleep(0.05)
            size = os.fstat(fd).st_size
            if size > start and size == start + len(text):
                break
            text = os.pread(fd, size - start, start)
        if not text:
            return "no stacks: no thread of it can run"
        if self.folder is not None and self.log is not None:
            head = f"-- {time.strftime('%Y-%m-%d %H:%M:%S')} step {b['step']} {b['phase']}\n".encode()
            keep = Outlet("stacks.txt", events.Appender(self.folder / "stacks.txt"))
            keep.put(head + text.rstrip(b"\n") + b"\n")
            keep.close(0)
        return "main thread at " + top_line(text.decode(errors="replace").strip().split("\n\n")[-1])

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
        text += f" · to go on: {self.given['resume']}" if self.given["resume"] else ""
        self.slots[beat.STATE], self.slots[beat.EXIT] = beat.FAILED, -1 if status is None else status
        self.say(text)
        self.event(
            "end", how="vanished", status=status, oom=bool(oom), step=b["step"], phase=b["phase"], text=text,
            resume=self.given["resume"],
        )  # fmt: skip
        if self.ranks is not None:
            self.say_first_failure(self.ranks, b)

    def say_first_failure(self, ranks: Ranks, b: dict[str, Any]) -> None:
        """The rank that failed before this one, if the run directory's disk tells in time."""
        found: list[str] = []
        asking = threading.Thread(target=lambda: found.append(ranks.first_failure(b)), daemon=True)
        asking.start()
        asking.join(1.0)
        if found and found[0]:
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
        blocks = raw.strip().split("\n\n")
        current = next((block for block in blocks if "Current thread" in block), blocks[-1])
        return f"{raw.strip().splitlines()[0]} at {top_line(current)}"

    def close(self) -> None:
        """Leave the last beat in the run directory, and wait a moment for what is being written."""
        if self.judge is not None:
            self.judge[0].kill()
        for outlet in (self.out, self.log, self.events):
            if outlet is not None:
                outlet.close(0.8)
        keep = Outlet("beat", lambda _data: self.keep_beat())
        keep.put(b"")
        keep.close(0.3)

    def keep_beat(self) -> None:
        """A plain copy in place of the link, if the link is still this run's."""
        place = Path(self.given["beat"])
        link = self.folder / beat_name(self.given["rank"]) if self.folder is not None else None
        with contextlib.suppress(OSError):
            if link is not None and link.is_symlink() and os.readlink(link) == str(place):  # noqa: PTH115
                side = link.with_name(f".{link.name}")
                try:
                    side.write_bytes(bytes(self.memory[: beat.SIZE]))
                    side.replace(link)
                except OSError:  # a full disk: no half record, and no link that leads nowhere
                    side.unlink(missing_ok=True)
                    link.unlink()
        with contextlib.suppress(OSError):
            place.unlink()


class Ranks:
    """The beats of the other ranks of this host, in the same run directory."""

    EVERY, SLOW = 30.0, 1.5

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank, self.next = folder, rank, 0.0
        self.beats: dict[int, dict[str, Any]] = {}
        self.before: dict[int, dict[str, Any]] = {}
        self.said: tuple[int, str] | None = None

    def start(self) -> None:
        """Read them in a thread: the run directory may lie on a disk that hangs."""

        def work() -> None:
            while True:
                self.beats = self.read()
                time.sleep(self.EVERY / 3)

        threading.Thread(target=work, daemon=True).start()

    def read(self) -> dict[int, dict[str, Any]]:
        found = {}
        for path in self.folder.glob("beat*") if self.folder is not None else ():
            with contextlib.suppress(OSError, ValueError):
                b = beat.read(path)
                found[b["rank"]] = b
        return found

    def straggler(self, now: float) -> str:
        """One line when a rank spends far more time in a phase of its own than the others; "" else.

        All ranks make their steps together, so what differs is where they spend them: the slow one in data, copying or
        forward, the others in backward, where they wait for it.
        """
        if now < self.next:
            return ""
        self.next = now + self.EVERY
        ranks, before = self.beats, self.before
        self.before = ranks
        if len(ranks) < 2 or not before:
            return ""
        own: dict[int, dict[str, float]] = {}
        for r, b in ranks.items():
            if r not in before or b["step"] <= before[r]["step"]:
                continue
            steps = b["step"] - before[r]["step"]
            own[r] = {
                name: (b["phases"][name][1] - before[r]["phases"].get(name, (0, 0.0, 0.0))[1]) / steps
                for name in ("waiting for data", "copying", "forward")
            }
        if len(own) < 2:
            return ""
        total = {r: sum(parts.values()) for r, parts in own.items()}
        slow = max(total, key=lambda r: total[r])
        usual = median(v for r, v in total.items() if r != slow)
        if usual <= 0 or total[slow] < self.SLOW * usual:
            return ""
        others = {n: median(own[r][n] for r in own if r != slow) for n in own[slow]}
        where = max(own[slow], key=lambda n: own[slow][n] - others[n])
        if self.said == (slow, where):
            return ""
        self.said = (slow, where)
        return f"rank {slow} is {total[slow] / usual:.1f} times slower than the others: {where}"

    def first_failure(self, mine: dict[str, Any]) -> str:
        """The rank that failed before this one, in a line; "" when none did."""
        failed = []
        if self.folder is not None:
            with contextlib.suppress(OSError):
                failed = [e for e in events.read(self.folder / "events.jsonl") if e.get("event") == "end"]
        failed = [
            e for e in failed if e.get("time", 0) >= mine["started_wall"] and e.get("how") in ("error", "vanished")
        ]
        first = min(failed, key=lambda e: e["time"], default=None)
        if first is None or first.get("rank") == self.rank:
            return ""
        return f"rank {first['rank']} failed first: {first.get('text')}"


def instance(b: dict[str, Any]) -> str:
    """One stay in a phase."""
    return f"{b['phase']}@{max(b['since'], b['moved']):.3f}"


def need(b: dict[str, Any]) -> float:
    """Bytes a second that the run would read if it never waited for them; 0 when that is not known."""
    wait, start = (b["phases"].get(name, (0, 0.0, 0.0))[1] for name in ("waiting for data", "starting"))
    busy = sum(row[1] for row in b["phases"].values()) - wait - start
    return float(b["bytes"] / busy) if busy > 1 else 0.0


def median(values: Iterable[float]) -> float:
    """The middle one; 0 of none. (The statistics module would cost 3 MB.)"""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def beat_name(rank: int) -> str:
    """The beat's name in the run directory."""
    return "beat" if rank == 0 else f"beat.{rank}"


def listener(pid: int, seen: Process) -> int:
    """The thread that is asked for the stacks.

    One that runs, since it then stands still while the frames are read; else one of the recorder's own, so that no
    system call of the program is interrupted.
    """
    own = [tid for tid, (name, _) in seen.threads.items() if name == "eyas-record"]
    running = [tid for tid, (name, wait) in seen.threads.items() if name != "eyas-record" and wait.family == "run"]
    return pid if pid in running else (running or own or [pid])[0]


def send(pid: int, tid: int, number: int) -> bool:
    """A signal to one thread; whether it went out."""
    try:
        return bool(ctypes.CDLL(None).tgkill(pid, tid, number) == 0)
    except AttributeError:  # a C library without it
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            return True
    return False


def top_line(block: str) -> str:
    """The innermost frame of one thread of a dump of faulthandler, and who called it if that is Python's own library:
    `threading.py:331 in wait, from train.py:88 in step`."""
    frames = []
    for line in block.splitlines():
        if line.strip().startswith("File "):
            path, _, rest = line.strip().removeprefix('File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            frames.append((path, f"{os.path.basename(path)}:{number} in {function}"))  # noqa: PTH119
    if not frames:
        return "no Python frame"
    outside = next((words for path, words in frames if "/lib/python3" not in path or "-packages/" in path), "")
    first = frames[0][1]
    return first if outside in ("", first) else f"{first}, from {outside}"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    sidecar = Sidecar(json.loads(sys.argv[1]))
    try:
        sidecar.watch()
    except Exception as e:
        sidecar.say(f"the recorder's side process failed ({type(e).__name__}: {e}): a silent run stays silent now")
    sidecar.close()
    os._exit(0)  # whatever still hangs in a write


if __name__ == "__main__":
    main()
