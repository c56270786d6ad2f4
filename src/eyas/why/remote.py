"""Run the probe, here or on another host, and bring its snapshot back before the deadline.

Here: this interpreter, with the probe as a compiled module. There: the system's own ssh (so that its configuration,
jump hosts, agents and keys are used), with the probe's text piped to an interpreter. The command line sent is a
constant; the question travels as JSON inside the text. Without an interpreter of 3.6 or newer a POSIX sh collector
gives a reduced snapshot. Nothing is written on either host but ssh's control socket here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.why import probe
from eyas.why.shell import SHELL_COLLECTOR, parse_shell
from eyas.why.target import check_host

LARGEST = 64 << 20  # bytes of answer that are taken
CONNECT_S = 6

# Constant: no part of it comes from the user. The first line of the input names a process whose interpreter may serve.
REMOTE = (
    'exec /bin/sh -c \'IFS= read -r pid; own=/nonexistent; case "$(readlink "/proc/$pid/exe" 2>/dev/null)" in '
    '*python*|*pypy*) own="/proc/$pid/exe";; esac; '
    'for p in python3 /usr/libexec/platform-python "$own" /opt/conda/bin/python3 python; do '
    'if "$p" -I -S -c "import sys; sys.exit(sys.version_info < (3, 6))" </dev/null >/dev/null 2>&1; '
    'then exec "$p" -I -S -; fi; done; '
    "echo @@eyas-no-python'"
)
REMOTE_SH = "exec /bin/sh -s"


class HostUnreachable(EyasError):
    """ssh could not get there (exit code 69)."""


class DeadlinePassed(EyasError):
    """No answer in the time given (exit code 124)."""


class ProbeFailed(EyasError):
    """The probe ran and gave no snapshot (exit code 3)."""


def sampling_times(timeout: float) -> list[float]:
    """0, 1 and 3 s, closer together when the time given is short."""
    span = min(3.0, max(0.3, timeout - 1.9))
    return [0.0, round(span / 3, 3), round(span, 3)]


def ask(request: dict[str, Any], timeout: float, host: str | None = None) -> dict[str, Any]:
    """The probe's answer to `request`; raises when there is none."""
    nonce = secrets.token_hex(8)
    request = {**request, "nonce": nonce}
    request.setdefault("times", sampling_times(timeout))
    extra = 3.0 if request.get("stacks") else 0.0
    extra += 10.0 if request.get("deep") else 0.0
    request.setdefault("soft_s", max(1.0, min(request["times"][-1] + 1.6, timeout - 0.4)))
    request.setdefault("hard_s", max(1.0, timeout - max(1.5, timeout / 4)))
    if host is None:
        return _run_here(request, nonce, timeout + extra)
    return _run_there(request, nonce, timeout + extra, check_host(host))


def _payload(request: dict[str, Any]) -> str:
    """The probe's text with the question in front, as a JSON text in a Python string."""
    source = resources.files("eyas.why").joinpath("probe.py").read_text("utf-8")
    return f"EYAS_REQUEST = {json.dumps(json.dumps(request))}\n" + source


def _run_here(request: dict[str, Any], nonce: str, timeout: float) -> dict[str, Any]:
    loader = (
        "import sys, json; sys.dont_write_bytecode = True\n"
        "from importlib.machinery import SourceFileLoader as L; import importlib.util as u\n"
        "s = u.spec_from_loader('eyas_probe', L('eyas_probe', sys.argv[1]))\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "m.main(json.loads(sys.stdin.read()))\n"
    )
    command = [sys.executable, "-I", "-S", "-c", loader, str(Path(probe.__file__).resolve())]
    status, out, err = _communicate(command, json.dumps(request).encode(), timeout)
    answer = unframe(out, nonce)
    if answer is None:
        raise ProbeFailed(f"the probe gave no answer (exit {status}): {_last_line(err)}")
    return answer


def control_path() -> str | None:
    """A private place for ssh's control sockets, short enough for a socket name."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if not base or len(base) > 40:
            continue
        place = Path(base) / f"eyas-{os.getuid()}"
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, exist_ok=True)
            seen = place.lstat()
            if seen.st_uid == os.getuid() and not seen.st_mode & 0o077 and place.is_dir() and not place.is_symlink():
                return str(place / "%C")
    return None


def ssh_command(host: str) -> list[str]:
    """The ssh command line up to the remote command. EYAS_SSH names another ssh and its options, blank by blank."""
    command = [
        *(os.environ.get("EYAS_SSH", "ssh").split()),
        "-T",
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={CONNECT_S}",
    ]
    path = control_path()
    if path is not None:
        command += ["-o", "ControlMaster=auto", "-o", f"ControlPath={path}", "-o", "ControlPersist=60"]
    return [*command, "--", host]


def _run_there(request: dict[str, Any], nonce: str, timeout: float, host: str) -> dict[str, Any]:
    began, wall = time.monotonic(), time.time()
    pid = request.get("value") if request.get("kind") == "pid" else None
    text = f"{pid if isinstance(pid, int) else 'self'}\n{_payload(request)}".encode()
    status, out, err = _communicate([*ssh_command(host), REMOTE], text, timeout)
    if status == 255:
        raise HostUnreachable(f"{host} cannot be reached by ssh: {_last_line(err)}")
    via = "ssh"
    if b"@@eyas-no-python" in out and unframe(out, nonce) is None:
        via = "sh"
        left = max(1.0, timeout - (time.monotonic() - began))
        head = shell_header(request, nonce)
        status, out, err = _communicate([*ssh_command(host), REMOTE_SH], (head + SHELL_COLLECTOR).encode(), left)
        if status == 255:
            raise HostUnreachable(f"{host} cannot be reached by ssh: {_last_line(err)}")
        answer = parse_shell(out.decode("utf-8", "replace"), nonce, request)
    else:
        answer = unframe(out, nonce)
    if answer is None:
        raise ProbeFailed(f"the probe on {host} gave no answer (exit {status}): {_last_line(err) or _last_line(out)}")
    meta = answer["meta"]
    meta["via"] = via
    if "target" in answer:
        answer["target"]["host"] = host
    # The host's clock against ours, at best to the half of the way there and back.
    meta["clock_offset_s"] = round(meta["started"] + (meta.get("took_s") or 0.0) / 2 - (wall + time.time()) / 2, 2)
    return answer


def shell_header(request: dict[str, Any], nonce: str) -> str:
    """Variables for the sh collector; only checked words, in single quotes."""
    kind, value = str(request.get("kind")), str(request.get("value") or "")
    if "'" in value or "\\" in value or "\n" in value:
        value, kind = "", "search"
    return f"nonce='{nonce}'\nkind='{kind}'\nvalue='{value}'\n"


def _communicate(command: list[str], text: bytes, timeout: float) -> tuple[int, bytes, bytes]:
    """Run, feed, collect; the whole group is ended at the deadline.

    Errors go to a file: a lasting ssh master keeps its stderr open.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                close_fds=True,
            )
        except FileNotFoundError as error:
            raise HostUnreachable(f"{command[0]} is not installed here; install the OpenSSH client") from error
        try:
            out, _ = process.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired as late:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=0.3)
            raise DeadlinePassed(f"no answer within {timeout:.0f} s; give more time with --timeout") from late
        errors.seek(0)
        return process.returncode, out[:LARGEST], errors.read(1 << 20)


def unframe(blob: bytes, nonce: str) -> dict[str, Any] | None:
    """The JSON between the marks, if it is all there."""
    mark = b"\n@@eyas " + nonce.encode() + b" "
    start = blob.find(mark)
    if start < 0:
        return None
    head, _, rest = blob[start + len(mark) :].partition(b"\n")
    try:
        size = int(head)
        if len(rest) < size:
            return None
        found = json.loads(rest[:size])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _last_line(blob: bytes) -> str:
    lines = [line.strip() for line in blob.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
