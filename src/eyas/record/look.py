"""What /proc shows of the trainer while it says nothing, and how it ended when it is gone. Standard library only.

Nothing here touches a file of the run: /proc, the cgroup's counters and the kernel log answer at once, whatever a disk
does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
from dataclasses import dataclass, field
from pathlib import Path

from eyas.why.waits import Wait, classify, is_storage

TICK = os.sysconf("SC_CLK_TCK")
_EXIT, _GET_INFO = 8, 0xC000FF0B  # PIDFD_INFO_EXIT; PIDFD_GET_INFO without its size: linux/pidfd.h
_ZOMBIE = "ZX"


@dataclass
class Process:
    """One look at a process and its threads."""

    state: str = "gone"  # of the main thread
    cpu: float = 0.0  # seconds so far
    threads: dict[int, tuple[str, Wait]] = field(default_factory=dict)  # tid -> (name, where it waits)

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def look(pid: int) -> Process:
    """The process and where each of its threads waits (at most 64 are read)."""
    seen = Process()
    try:
        _, fields = _stat(f"/proc/{pid}/stat")
        seen.state, seen.cpu = fields[0], (int(fields[11]) + int(fields[12])) / TICK
        tids = sorted(int(t) for t in os.listdir(f"/proc/{pid}/task"))[:64]  # noqa: PTH208
    except (OSError, ValueError, IndexError):
        return seen
    for tid in tids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            name, fields = _stat(f"/proc/{pid}/task/{tid}/stat")
            site = _text(f"/proc/{pid}/task/{tid}/wchan")
            seen.threads[tid] = (name, classify(fields[0], site if site not in ("", "0") else None, None))
    return seen


def words(pid: int, before: Process, now: Process, seconds: float, python_idle: float) -> str:
    """What two looks `seconds` apart show, in one clause; "" when nothing stands out.

    python_idle: seconds since a thread of the trainer last ran Python code (it does so every second).
    """
    if now.stopped:
        return f"the process is stopped (kill -CONT {pid} lets it go on)"
    main = now.threads.get(pid)
    if main is None:
        return ""
    busy = (now.cpu - before.cpu) / max(seconds, 1e-3)
    storage = [(name, w) for name, w in now.threads.values() if is_storage(w.family) and w.blocked]
    if main[1].family in ("frozen", "vfork"):
        return main[1].words
    if storage:
        name, wait = next(((n, w) for n, w in storage if w is main[1]), storage[0])
        who = "the main thread" if wait is main[1] else f"thread {name}"
        more = f" and {len(storage) - 1} more" if len(storage) > 1 else ""
        return f"{who}{more} is {wait.words}" if not more else f"{who}{more} are {wait.words}"
    if python_idle > 4 and main[1].family == "run" and busy < 0.5:
        starved = f"the main thread waits for a CPU, of which it got {busy:.0%}"
        return f"no Python code has run for {python_idle:.0f} s; {starved}"
    if python_idle > 4:
        where = "on the CPU" if main[1].family == "run" else main[1].words
        return f"no Python code has run for {python_idle:.0f} s: something holds the GIL; the main thread is {where}"
    if busy >= 0.05 or main[1].family == "run":
        return f"{busy:.0%} CPU" + (", waiting for a CPU" if busy < 0.05 else "")
    return f"no CPU used; the main thread is {main[1].words}"


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for this signal: without one the signal would end it."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", _text(f"/proc/{pid}/status"), re.M)
    return bool(found and number > 0 and int(found.group(1), 16) >> (number - 1) & 1)


def read_bytes(pid: int) -> int:
    """Bytes the process has read so far (rchar), 0 when it cannot be seen."""
    found = re.search(r"^rchar: (\d+)", _text(f"/proc/{pid}/io"), re.M)
    return int(found.group(1)) if found else 0


# -- the end -----------------------------------------------------------------------------------------------------------


def exit_status(pid: int, pidfd: int) -> int | None:
    """The wait status of a process that has ended, or None when nobody can tell any more.

    The kernel keeps it for the holder of a pidfd (6.15 and newer); before, it is read off the zombie if its parent has
    not collected it yet.
    """
    with contextlib.suppress(OSError):
        for size in (72, 64):  # struct pidfd_info grew; byte 60 is exit_code in both
            buffer = bytearray(struct.pack("Q", _EXIT) + bytes(size - 8))
            with contextlib.suppress(OSError):
                fcntl.ioctl(pidfd, _GET_INFO | size << 16, buffer, True)
                if struct.unpack_from("Q", buffer)[0] & _EXIT:
                    return int(struct.unpack_from("i", buffer, 60)[0])
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, fields = _stat(f"/proc/{pid}/stat")
        if fields[0] in _ZOMBIE:
            return int(fields[49])
    return None


def status_words(status: int | None) -> str:
    """A wait status in words: "was killed by SIGKILL", "ended with exit code 3"."""
    if status is None:
        return "is gone without a word: killed by SIGKILL, most likely (its exit code cannot be seen any more)"
    if status & 0x7F:
        number = status & 0x7F
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
        return f"was killed by signal {number}"
    return f"ended with exit code {status >> 8}"


@dataclass(frozen=True)
class OomCounters:
    """How often the kernel has killed for want of memory: in the trainer's cgroup, and on the whole host."""

    cgroup: int | None
    limit: int | None  # bytes
    host: int | None


def oom_counters(places: list[tuple[Path, bool]]) -> OomCounters:
    """The counters now; take them at the start and at the end. places: of `memory_cgroups`."""
    kills, limit = None, None
    for place, v2 in places:
        text = _text(str(place / ("memory.events" if v2 else "memory.oom_control")))
        found = re.search(r"^oom_kill (\d+)", text, re.M)
        if found:
            kills = int(found.group(1))
            cap = _text(str(place / ("memory.max" if v2 else "memory.limit_in_bytes"))).strip()
            limit = int(cap) if cap.isdigit() and int(cap) < 1 << 60 else None
            break
    host = re.search(r"^oom_kill (\d+)", _text("/proc/vmstat"), re.M)
    return OomCounters(kills, limit, int(host.group(1)) if host else None)


def oom_words(pid: int, before: OomCounters, after: OomCounters) -> str:
    """The evidence that the out-of-memory killer did it; "" without any."""
    line = next((line for line in _kernel_log() if re.search(rf"[Kk]illed process {pid}\b", line)), "")
    limit = f", whose limit is {after.limit / 1e6:,.0f} MB" if after.limit else ""
    if before.cgroup is not None and after.cgroup is not None and after.cgroup > before.cgroup:
        return f"by the kernel's out-of-memory killer: its cgroup{limit}, counts {after.cgroup - before.cgroup} kill(s)"
    if line:
        return f"by the kernel's out-of-memory killer ({line.strip()[:160]})"
    if before.host is not None and after.host is not None and after.host > before.host:
        return "while the kernel's out-of-memory killer was at work on this host (oom_kill in /proc/vmstat rose)"
    return ""


def memory_cgroups(pid: int) -> list[tuple[Path, bool]]:
    """Where the process's memory is counted: (folder, whether it is cgroup v2)."""
    places = []
    for line in _text(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            places.append((Path("/sys/fs/cgroup/memory") / path.lstrip("/"), False))
        elif not controllers:
            places.append((Path("/sys/fs/cgroup") / path.lstrip("/"), True))
    return places


def _kernel_log() -> list[str]:
    """The last lines of the kernel log, newest first; none without the right to read it."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while len(lines) < 5000:
                try:
                    raw = os.read(fd, 8192)
                except BrokenPipeError:  # lines were overwritten meanwhile
                    continue
                lines.append(raw.decode(errors="replace").partition(";")[2])
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return lines[::-1]


def _stat(path: str) -> tuple[str, list[str]]:
    head, _, rest = _text(path).rpartition(")")
    return head.partition("(")[2], rest.split()


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(65536).decode(errors="replace")
    except OSError:
        return ""
