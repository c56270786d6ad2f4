"""What the user named: a PID, a process name, host:PID, @gpu0, a log file, a run directory, slurm:JOB, or nothing.

Only the words are read here. Whether there is such a process is found out by the probe, on the host where it would run.
A path is touched in a disposable child with a deadline, since it may lie on a mount that hangs.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError
from eyas.why import probe

HOST = re.compile(r"^(?P<user>[A-Za-z0-9_.+-]+@)?(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(%\w+)?\])$")
LOCAL = ("localhost-process", "here")  # host words that mean: no ssh


class UsageError(EyasError):
    """The words given do not name a target (exit code 64)."""


@dataclass(frozen=True)
class Target:
    asked: str | None
    kind: str  # pid, name, gpu, log, run_dir, path (decided by the probe), slurm, search
    value: int | str | None = None
    host: str | None = None

    def request(self) -> dict[str, object]:
        """The part of a probe request that names the target."""
        return {"asked": self.asked, "kind": self.kind, "value": self.value, "host": self.host}


def check_host(host: str) -> str:
    """A host name that ssh cannot take for an option."""
    if host.startswith("-") or "@-" in host or not HOST.match(host):
        raise UsageError(f"{host!r} is no host name; write host:PID, user@host:NAME, or ./{host} for a file")
    return host


def parse(text: str | None) -> Target:
    """The target in the user's words."""
    word = (text or "").strip()
    if not word:
        return Target(text, "search")
    if word.startswith("-"):
        raise UsageError(
            f"{word!r} is no target; give a PID, a name, host:PID, @gpu0, a log file, a run directory or slurm:JOB"
        )
    here = _here(word)
    if here is not None:
        return Target(text, *here)
    host, colon, rest = _split_host(word)
    if colon and host not in ("slurm", ""):
        host = check_host(host)
        kind, value = _there(rest)
        return Target(text, kind, value, host)
    kind, value = _there(word)
    if kind == "path":
        raise UsageError(f"there is no {word}; give a log file or run directory that exists, or a PID")
    return Target(text, kind, value)


def _split_host(word: str) -> tuple[str, str, str]:
    """`host:rest`, with IPv6 addresses in brackets."""
    if "@[" in word or word.startswith("["):
        head, closing, tail = word.partition("]")
        return head + closing, tail[:1], tail[1:]
    return word.partition(":")


def _there(word: str) -> tuple[str, int | str | None]:
    """A target on its own host, without looking at anything."""
    if not word:
        return "search", None
    if re.fullmatch(r"\d+", word):
        if not 0 < int(word) < 1 << 31:
            raise UsageError(f"{word} is no PID")
        return "pid", int(word)
    gpu = re.fullmatch(r"@gpu:?(\d+)", word)
    if gpu:
        return "gpu", int(gpu.group(1))
    if word.startswith("@"):
        raise UsageError(f"{word!r} is no GPU; write @gpu0")
    job = re.fullmatch(r"slurm:([\w.\[\]-]+)", word)
    if job and not job.group(1).startswith("-"):
        return "slurm", job.group(1)
    if word.startswith("slurm:"):
        raise UsageError(f"{word!r} names no job; write slurm:12345")
    if "/" in word or word.startswith("~"):
        return "path", word
    return "name", word


def _here(word: str) -> tuple[str, int | str | None] | None:
    """A file or directory of this host by that name, if there is one; a bare number is always a PID."""
    if re.fullmatch(r"\d+", word) or word.startswith("@") or re.match(r"slurm:", word):
        return None
    path = str(Path(os.path.expanduser(word)).absolute())  # noqa: PTH111 (a word, not yet a path)
    found = probe.collect("target", [path], _look, time.monotonic() + 2.0, each=1.5)[0]
    if found is None:
        if probe.Courier.timed_out:
            probe.Courier.timed_out.clear()
            return "path", path  # the mount hangs: the probe will say so
        return None
    kind, real = found
    return kind, real


def _look(path: str) -> tuple[str, str] | None:
    place = Path(path)
    real = os.path.realpath(path)
    if place.is_dir():
        return "run_dir", real
    return ("log", real) if place.exists() else None
