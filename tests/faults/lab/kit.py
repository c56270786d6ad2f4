"""What a scenario needs: a directory, processes, cgroups and mounts that all end with it; and the question itself.

A program is copied as `train.py` into a directory with a neutral name: nothing that the tool can read tells the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PROGRAMS = HERE / "programs"
CGROUPS = Path("/sys/fs/cgroup")
LIBC = ctypes.CDLL(None, use_errno=True)
MNT_DETACH = 2
Json = dict[str, Any]


class Unable(Exception):
    """This machine cannot build the state (no root, no cgroup v1, no FUSE)."""


@dataclass
class Ask:
    """What to ask once the state is reached."""

    target: str
    env: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    user: int | None = None  # ask as this uid


@dataclass
class Answer:
    code: int
    wall: float
    json: Json
    stderr: str = ""

    @property
    def verdict(self) -> str:
        return str(self.json.get("verdict") or "none")

    @property
    def state(self) -> str:
        return str(self.json.get("state") or "none")

    @property
    def runner(self) -> str | None:
        return (self.json.get("runner_up") or {}).get("verdict")

    @property
    def took(self) -> float:
        return float(self.json.get("took_s") or self.wall)


class Lab:
    """One scenario's belongings. Everything goes when it closes, whatever happened."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex[:12]
        self.dir = Path(tempfile.mkdtemp(prefix="run-", dir=os.environ.get("EYAS_LAB_TMP")))
        self.dir.chmod(0o755)
        self.children: list[subprocess.Popen[bytes]] = []
        self.undo: list[Callable[[], object]] = []
        self.pty: int | None = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- processes
    def run(
        self,
        program: str,
        *args: object,
        log: str | None = "train.log",
        via: Iterable[str] = (),
        python: str = sys.executable,
        cwd: Path | None = None,
        append: bool = False,
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a program of the kit as `train.py`, its output in a log file. `via`: what stands before it."""
        where = cwd or self.dir
        script = where / "train.py"
        shutil.copy(PROGRAMS / f"{program}.py", script)
        begin = list(via) if via and "torch.distributed.run" in via else [*via, python]
        words = [*begin, "train.py", *map(str, args)]
        out: Any = None
        if log is not None:
            out = (where / log).open("ab" if append else "wb")
            more = {"stdout": out, "stderr": subprocess.STDOUT, **more}
        started = self.spawn(words, cwd=where, **more)
        if out is not None:
            out.close()
        return started

    def spawn(
        self,
        words: list[str],
        *,
        env: Mapping[str, str] | None = None,
        unbuffered: bool = True,
        cgroups: Iterable[Path] = (),
        uid: int | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        full = {
            **os.environ,
            "EYAS_LAB": self.token,
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        full.pop("PYTHONUNBUFFERED", None)
        full.pop("PYTEST_CURRENT_TEST", None)
        if unbuffered:
            full["PYTHONUNBUFFERED"] = "1"
        popen.setdefault("stdin", subprocess.DEVNULL)
        if uid is not None:
            popen.update(user=uid, group=uid, extra_groups=[])
        child = subprocess.Popen(words, env=full, start_new_session=True, **popen)
        self.children.append(child)
        for place in cgroups:
            (place / "cgroup.procs").write_text(str(child.pid))
        return child

    def on_terminal(self, program: str, *args: object, log: str | None = None) -> subprocess.Popen[bytes]:
        """A program with a terminal for its standard input."""
        mine, theirs = pty.openpty()
        self.undo.append(lambda: os.close(mine))
        out: Any = (self.dir / log).open("wb") if log else theirs
        child = self.run(program, *args, log=None, stdin=theirs, stdout=out, stderr=subprocess.STDOUT)
        os.close(theirs)
        if log:
            out.close()
        return child

    # ---- waiting
    def until(self, true: Callable[[], object], limit: float = 200.0, what: str = "its state") -> None:
        end = time.monotonic() + limit
        while not true():
            if time.monotonic() > end:
                tail = "; ".join(p.read_text(errors="replace")[-300:] for p in self.dir.glob("*.log"))
                raise TimeoutError(f"{what} was not reached in {limit:.0f} s; log: {tail}")
            time.sleep(0.1)

    def says(self, text: str, log: str = "train.log", limit: float = 200.0, settle: float = 0.0) -> None:
        """Wait until the log has this text; then a little longer."""
        path = self.dir / log
        self.until(lambda: path.exists() and text.encode() in path.read_bytes(), limit, repr(text))
        time.sleep(settle)

    def over(self, child: subprocess.Popen[bytes], limit: float = 200.0) -> None:
        """Wait until a child is a zombie or gone, without collecting it."""
        self.until(lambda: state_of(child.pid) in (None, "Z", "X"), limit, "its end")

    # ---- surroundings
    def cgroup(self, controller: str, **settings: object) -> Path:
        place = CGROUPS / controller / f"eyas-lab-{self.token}"
        if not (CGROUPS / controller / "cgroup.procs").exists() or os.geteuid() != 0:
            raise Unable(f"no writable cgroup v1 controller {controller}")
        place.mkdir(exist_ok=True)
        self.undo.append(lambda: _remove_cgroup(place))
        for name, value in settings.items():
            (place / name.replace("__", ".")).write_text(str(value))
        return place

    def tmpfs(self, name: str, size: str) -> Path:
        place = self.dir / name
        place.mkdir()
        need_root()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
        self.undo.append(lambda: umount(place))
        return place

    def image(self, name: str, size: str, fill: Callable[[Path], None]) -> tuple[Path, str]:
        """A fresh ext4 file system on a loop device, its contents cold; (mount point, major:minor)."""
        need_root()
        place, image = self.dir / name, self.dir / f"{name}.img"
        place.mkdir()
        subprocess.run(["truncate", "-s", size, str(image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-N", "20000", str(image)], check=True)
        found = subprocess.run(
            ["losetup", "-f", "--show", str(image)], check=True, capture_output=True, text=True
        ).stdout.strip()
        self.undo.append(lambda: subprocess.run(["losetup", "-d", found], check=False))
        subprocess.run(["mount", found, str(place)], check=True)
        self.undo.append(lambda: umount(place))
        fill(place)
        umount(place, lazy=False)
        os.posix_fadvise(fd := os.open(found, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        subprocess.run(["mount", found, str(place)], check=True)
        number = Path(found).stat().st_rdev
        return place, f"{os.major(number)}:{os.minor(number)}"

    def fuse(self, name: str, files: dict[str, int], read_delay: float = 0.0) -> Any:
        """A mounted FUSE file system whose server can be told to answer nothing any more: `.hang()`."""
        need_root()
        if not Path("/dev/fuse").exists():
            raise Unable("no /dev/fuse")
        found = importlib.util.spec_from_file_location("minifuse", ROOT / "tests" / "integration" / "minifuse.py")
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        fs = module.MiniFuse(self.dir / name, files, read_delay)
        fs.__enter__()
        self.undo.append(lambda: fs.__exit__(None, None, None))
        return fs

    def throttle(self, device: str, bytes_per_s: int | None = None, reads_per_s: int | None = None) -> Path:
        """A cgroup that may read only so much from a device (v1 blkio)."""
        group = self.cgroup("blkio")
        if bytes_per_s:
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {bytes_per_s}")
        if reads_per_s:
            (group / "blkio.throttle.read_iops_device").write_text(f"{device} {reads_per_s}")
        return group

    def disk(self) -> str:
        number = self.dir.stat().st_dev
        return f"{os.major(number)}:{os.minor(number)}"

    def smi(
        self,
        pid: int | None = None,
        hang: bool = False,
        broken: str | None = None,
        mem_mib: int = 16785,
        others: Json | None = None,
        **readings: object,
    ) -> dict[str, str]:
        """An `nvidia-smi` on the path that gives a recorded answer. Returns the environment for the question."""
        place = self.dir / "bin"
        place.mkdir(exist_ok=True)
        recorded = {
            "readings": readings,
            "apps": ({pid: mem_mib} if pid else {}) | (others or {}),
            "hang": hang,
            "broken": broken,
        }
        text = (PROGRAMS / "nvidia_smi.py").read_text().replace("RECORDED = {}", f"RECORDED = {recorded!r}")
        tool = place / "nvidia-smi"
        tool.write_text(f"#!{sys.executable} -IS\n" + text)
        tool.chmod(0o755)
        return {"PATH": f"{place}:{os.environ['PATH']}"}

    def sshd(self, path: str) -> dict[str, str]:
        """An ssh server for this host alone; `path`: the PATH of its sessions. Returns what eyas needs to use it."""
        need_root()
        server = shutil.which("sshd") or "/usr/sbin/sshd"
        if not Path(server).exists() or shutil.which("ssh-keygen") is None:
            raise Unable("no ssh server here")
        place = self.dir / "ssh"
        place.mkdir(mode=0o700)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True)
        shutil.copy(place / "user.pub", place / "authorized")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        Path("/run/sshd").mkdir(exist_ok=True)
        (place / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {place}/host\nAuthorizedKeysFile {place}/authorized\n"
            "StrictModes no\n"
            f"PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nPidFile none\nSetEnv PATH={path}\n"
        )
        (place / "config").write_text(
            f"Host localhost\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {place}/user\n  IdentitiesOnly yes\n"
            f"  StrictHostKeyChecking no\n  UserKnownHostsFile {place}/known\n  LogLevel ERROR\n"
        )
        config = str(place / "sshd_config")
        self.spawn([server, "-D", "-f", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        self.until(listens, 10, "the ssh server")
        return {"EYAS_SSH": f"ssh -F {place}/config"}

    # ---- the end
    def close(self) -> None:
        for freezer in CGROUPS.glob(f"freezer/eyas-lab-{self.token}/freezer.state"):
            with contextlib.suppress(OSError):
                freezer.write_text("THAWED")
        fuses = [u for u in self.undo if "fuse" in u.__qualname__]
        for end in fuses:  # a server that hangs holds processes that cannot be killed: it goes first
            _quietly(end)
        for _ in range(50):
            left = marked(self.token)
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for child in self.children:
                child.poll()
            if not left:
                break
            time.sleep(0.05)
        for child in self.children:
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    _quietly(stream.close)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
        for end in reversed([u for u in self.undo if u not in fuses]):
            _quietly(end)
        shutil.rmtree(self.dir, ignore_errors=True)


def ask(question: Ask, timeout: float = 10.0, keep: Path | None = None) -> Answer:
    """The real command, as a user would type it."""
    python, paths = (sys.executable, [str(ROOT / "src")]) if question.user is None else plain_python()
    words = [python, "-m", "eyas.why", question.target, "--json", "--timeout", str(timeout), *question.words]
    if keep is not None:
        words += ["--save", str(keep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **question.env}
    begun = time.monotonic()
    who: Json = {} if question.user is None else {"user": question.user, "group": question.user, "extra_groups": []}
    done = subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=timeout + 30, check=False, cwd="/", **who
    )
    wall = time.monotonic() - begun
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = {}
    return Answer(done.returncode, wall, found, done.stderr)


def plain_python() -> tuple[str, list[str]]:
    """An interpreter that any user may run, and the paths it needs (the one running now may lie in a private home)."""
    for python in (sys.executable, "/usr/bin/python3"):
        real = Path(python).resolve()
        if all(parent.stat().st_mode & 0o001 for parent in real.parents) and _version(python) == sys.version_info[:2]:
            return python, [str(ROOT / "src"), *(p for p in sys.path if p.endswith("site-packages"))]
    raise Unable("no Python of this version that another user may run")


def _version(python: str) -> tuple[int, int]:
    code = "import sys; print(*sys.version_info[:2])"
    out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return int(out[0]), int(out[1])


def need_root() -> None:
    if os.geteuid() != 0:
        raise Unable("needs root")


def umount(place: Path, lazy: bool = True) -> None:
    if LIBC.umount2(str(place).encode(), MNT_DETACH if lazy else 0) and not lazy:
        raise OSError(ctypes.get_errno(), f"umount {place}")


def state_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def marked(token: str) -> list[int]:
    """All live processes of a scenario, wherever they have got to."""
    wanted, found = f"EYAS_LAB={token}".encode(), []
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and state_of(int(place.name)) not in (None, "Z", "X"):
            with contextlib.suppress(OSError):
                if wanted in (place / "environ").read_bytes():
                    found.append(int(place.name))
    return found


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
    return []


def _remove_cgroup(place: Path) -> None:
    for _ in range(40):
        with contextlib.suppress(OSError):
            place.rmdir()
            return
        time.sleep(0.05)


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        print(f"lab: cleaning up: {error}", file=sys.stderr)


class Server:
    """A TCP server of our own: accepts, and then does what `handle` says (by default nothing at all, for ever)."""

    def __init__(self, lab: Lab, handle: Callable[[Any], None] | None = None) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.open: list[Any] = []
        self.handle = handle
        lab.undo.append(self.stop)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                self.open.append(connection)
                if self.handle:
                    threading.Thread(target=self.handle, args=(connection,), daemon=True).start()

    def stop(self) -> None:
        self.socket.close()
        for connection in self.open:
            connection.close()
