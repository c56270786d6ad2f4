"""A small program that trains nothing under a recorder, in a process of its own, and what its log says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import eyas
from eyas.record import beat, events

LOOP = """
import os, signal, sys, threading, time
from pathlib import Path
from eyas.record.record import Record
from eyas.errors import EyasError

{before}

class Numbers:
    nbytes, ready, reading = 0, 0, []
    def __iter__(self):
        for i in range({steps}):
            yield self.next(i)
    def next(self, i):
        self.nbytes += 1000
        return i
{loader}

with Record(Path({folder!r}), "toy", total={steps}, resume="toy --resume", make=True, **{settings!r}) as rec:
    rec.begin({steps})
    for i in rec.data(Numbers(), lambda n: n):
        with rec.phase("forward"):
            time.sleep(0.005)
        with rec.phase("backward"):
            if i == 30:
                pass
{at_30}
        rec.step(loss=2.0 - 0.001 * i, tokens=100)
"""


SOURCE = Path(eyas.__file__).parents[1]
STARTED: list[subprocess.Popen[bytes]] = []


@dataclass
class Toy:
    """A started program. `log` is its standard output; `lines` those of log.txt."""

    folder: Path
    process: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)

    def until(self, what: Callable[[], object], limit: float = 30.0) -> Any:
        """Wait for something; a clear failure if it does not come."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.05)
        raise AssertionError(f"it did not come; the log says:\n{self.text()}")

    def says(self, words: str, limit: float = 30.0) -> str:
        """The first line that holds these words, waited for."""
        found: str = self.until(lambda: next((line for line in self.lines() if words in line), ""), limit)
        return found

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def lines(self) -> list[str]:
        """Standard output if it is a file, else log.txt without its times."""
        if self.log.is_file():
            return self.log.read_text(errors="replace").splitlines()
        path = self.folder / "log.txt"
        return [line[20:] for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [e for e in events.read(path) if e["event"] == kind] if path.exists() else []

    def sidecar(self) -> int:
        """The PID of its sidecar, waited for."""
        pid: int = self.until(lambda: self.beat().get("sidecar"))
        assert pid > 1
        return pid

    def beat(self) -> dict[str, Any]:
        """The beat, empty before there is one."""
        try:
            return beat.read(self.folder / "beat")
        except (OSError, ValueError):
            return {}

    def ended(self, limit: float = 30.0) -> int:
        return self.process.wait(limit)


def start(
    folder: Path,
    at_30: str = "",
    *,
    steps: int = 300,
    before: str = "",
    loader: str = "",
    stdout: Any = None,
    env: dict[str, str] | None = None,
    via: list[str] | None = None,
    **settings: Any,
) -> Toy:
    """Start the loop; `at_30` is what goes wrong, inside phase `backward` of the 31st step."""
    indented = "\n".join(" " * 16 + line for line in at_30.strip("\n").splitlines())
    program = LOOP.format(
        folder=str(folder), steps=steps, settings=settings, at_30=indented, before=before,
        loader="\n".join("    " + line for line in loader.strip("\n").splitlines()),
    )  # fmt: skip
    script = folder.with_name(f"{folder.name}.py")
    script.write_text(program)
    log = folder.with_name(f"{folder.name}.log")
    out = log.open("wb") if stdout is None else stdout
    process = subprocess.Popen(
        [*(via or []), sys.executable, str(script)],
        stdout=out,
        stderr=out,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}", **(env or {})},
        start_new_session=True,
    )
    if stdout is None:
        out.close()
    STARTED.append(process)
    return Toy(folder, process, log)


def end_all() -> None:
    """End what was started and still runs, stopped ones too."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
        process.wait(10)


def gone(pid: int) -> bool:
    """Whether a process is no more (a zombie is none)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in "ZX"


def why(target: object, *words: str) -> dict[str, Any]:
    """The answer of `eyas why --json`."""
    done = subprocess.run(
        [sys.executable, "-m", "eyas.why", str(target), "--json", *words],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
