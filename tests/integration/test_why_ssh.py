"""`eyas why host:PID` through a real sshd on this machine, with its own keys and configuration."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whylab import running, wait_for

from eyas.why import command, remote
from eyas.why.target import parse

SLEEP = "ready()\nimport time\ntime.sleep(600)"
TOOLS = (
    "cat",
    "tr",
    "od",
    "tail",
    "head",
    "ls",
    "sleep",
    "date",
    "uname",
    "id",
    "getconf",
    "readlink",
    "wc",
    "stat",
    "sh",
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Sshd:
    """A server of our own: keys, configuration and log in one directory."""

    def __init__(self, place: Path, *lines: str) -> None:
        self.place, self.port = place, free_port()
        place.mkdir(mode=0o700)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True)
        shutil.copy(place / "user.pub", place / "authorized")
        server = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {place}/host",
            f"AuthorizedKeysFile {place}/authorized",
            "StrictModes no",
            "UsePAM no",
            f"PidFile {place}/pid",
            "PermitRootLogin yes",
            "Subsystem sftp internal-sftp",
            *lines,
        ]
        client = [
            "Host testhost",
            "  HostName 127.0.0.1",
            f"  Port {self.port}",
            f"  IdentityFile {place}/user",
            "  IdentitiesOnly yes",
            "  StrictHostKeyChecking no",
            f"  UserKnownHostsFile {place}/known",
        ]
        (place / "sshd_config").write_text("\n".join(server) + "\n")
        (place / "ssh_config").write_text("\n".join(client) + "\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        with (place / "sshd.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["/usr/sbin/sshd", "-D", "-e", "-f", str(place / "sshd_config")], stderr=log, stdin=subprocess.DEVNULL
            )
        wait_for(self.up)

    def up(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.place}/ssh_config"

    def close(self) -> None:
        subprocess.run(
            [*remote.ssh_command("testhost")[:-2], "-O", "exit", "testhost"],
            capture_output=True,
            env={**os.environ, "EYAS_SSH": self.ssh},
            check=False,
        )
        self.process.kill()
        self.process.wait()


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if not os.environ.get("CI") and not Path("/usr/sbin/sshd").exists():
        pytest.skip("no sshd here: install openssh-server to run this")
    started: list[Sshd] = []

    def start(*lines: str) -> Sshd:
        server = Sshd(tmp_path / f"sshd{len(started)}", *lines)
        started.append(server)
        monkeypatch.setenv("EYAS_SSH", server.ssh)
        return server

    yield start
    for server in started:
        monkeypatch.setenv("EYAS_SSH", server.ssh)
        server.close()


def few_tools(place: Path) -> str:
    """A PATH with the common tools and no Python."""
    place.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (place / tool).symlink_to(found)
    return str(place)


def test_a_process_of_another_host_is_seen_like_one_here(sshd: Any, tmp_path: Path) -> None:
    sshd()
    with (tmp_path / "train.log").open("wb") as log, running("print('step 3', flush=True)\n" + SLEEP, stdout=log) as p:
        began = time.monotonic()
        snap = command.look(parse(f"testhost:{p.pid}"), 20.0)
        took = time.monotonic() - began
        second = command.look(parse("testhost:" + str(tmp_path / "train.log")), 20.0)
    assert took < (8 if os.getloadavg()[0] <= 2 * (os.cpu_count() or 1) else 60), (
        "within 8 s on a host that is not swamped"
    )
    assert (snap["meta"]["via"], snap["target"]["host"], snap["target"]["pid"]) == ("ssh", "testhost", p.pid)
    assert base64.b64decode(snap["logs"][0]["tail"]["b64"]) == b"step 3\n"
    assert abs(snap["meta"]["clock_offset_s"]) < 3, "the same clock"
    assert second["target"]["pid"] == p.pid, "a log file is resolved over there"


def test_noise_of_a_login_shell_is_not_taken_for_the_answer(sshd: Any, tmp_path: Path) -> None:
    noisy = tmp_path / "noisy"
    noisy.write_text(
        'echo "@@eyas x 2"; echo "{}"; echo WELCOME; echo careful >&2; eval "$SSH_ORIGINAL_COMMAND"; echo bye\n'
    )
    sshd(f"ForceCommand /bin/sh {noisy}")
    with running(SLEEP) as p:
        snap = command.look(parse(f"testhost:{p.pid}"), 20.0)
    assert snap["target"]["pid"] == p.pid


def test_without_a_python_on_the_path_the_targets_own_serves(sshd: Any, tmp_path: Path) -> None:
    sshd(f"SetEnv PATH={few_tools(tmp_path / 'bin')}")
    with running(SLEEP) as p:
        snap = command.look(parse(f"testhost:{p.pid}"), 20.0)
    assert snap["meta"]["reduced"] is False
    assert snap["meta"]["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert snap["target"]["pid"] == p.pid


def test_without_any_python_the_shell_collector_gives_a_reduced_snapshot(sshd: Any, tmp_path: Path) -> None:
    sshd(f"SetEnv PATH={few_tools(tmp_path / 'bin')}")
    log = tmp_path / "sleep.log"
    with log.open("wb") as out:
        p = subprocess.Popen(["sh", "-c", "echo step 9; sleep 600; true"], stdout=out)
        try:
            wait_for(lambda: log.stat().st_size > 0)
            snap = command.look(parse(f"testhost:{p.pid}"), 20.0)
        finally:
            subprocess.run(["pkill", "-P", str(p.pid)], check=False)
            p.kill()
            p.wait()
    assert (snap["meta"]["via"], snap["meta"]["reduced"]) == ("sh", True)
    assert len(snap["samples"]) == 3
    seen = snap["samples"][-1]["procs"][str(p.pid)]
    assert (seen["stat"]["state"], seen["syscall"]["name"]) == ("S", "wait4")
    assert seen["fds"]["1"]["path"] == str(log)
    assert snap["processes"][str(p.pid)]["cmdline"][:2] == ["sh", "-c"]
    assert len(snap["job"]["members"]) == 2, "with its child"
    assert base64.b64decode(snap["logs"][0]["tail"]["b64"]) == b"step 9\n"
    assert snap["not_visible"]


def test_the_other_host_keeps_no_trace(sshd: Any) -> None:
    sshd()
    home = Path.home()
    before = {path.name for path in home.iterdir()} | {
        path.name for path in Path("/tmp").iterdir() if path.name.startswith("eyas")
    }
    with running(SLEEP) as p:
        command.look(parse(f"testhost:{p.pid}"), 20.0)
    after = {path.name for path in home.iterdir()} | {
        path.name for path in Path("/tmp").iterdir() if path.name.startswith("eyas")
    }
    assert after - before <= {f"eyas-{os.getuid()}"}, "but our own end's control socket"
    place = Path(remote.control_path() or "/").parent
    assert place.stat().st_mode & 0o077 == 0


def test_a_host_that_refuses_is_unreachable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EYAS_SSH", f"ssh -F /dev/null -p {free_port()}")
    assert command.run_why("127.0.0.1:77") == 69
    said = capsys.readouterr().err
    assert said.startswith("eyas: 127.0.0.1 cannot be reached by ssh: ")
    assert said.count("\n") == 1


def test_a_host_that_never_answers_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        monkeypatch.setenv("EYAS_SSH", f"ssh -F /dev/null -p {silent.getsockname()[1]}")
        began = time.monotonic()
        assert command.run_why("127.0.0.1:77", timeout=2.0) == 124
        assert time.monotonic() - began < 6


def test_a_connection_that_breaks_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(5)

        def slam() -> None:
            connection, _ = server.accept()
            connection.close()

        threading.Thread(target=slam, daemon=True).start()
        monkeypatch.setenv("EYAS_SSH", f"ssh -F /dev/null -p {server.getsockname()[1]}")
        assert command.run_why("127.0.0.1:77") == 69


def test_a_wrong_key_is_a_host_that_cannot_be_reached(sshd: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = sshd()
    (server.place / "authorized").write_text("")
    assert command.run_why("testhost:1") == 69
    assert "Permission denied" in capsys.readouterr().err


def test_an_option_in_the_place_of_a_host_starts_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert command.run_why(f"-oProxyCommand=touch {mark}:77") == 64
    assert command.run_ps(f"-oProxyCommand=touch {mark}") == 64
    assert not mark.exists()


def test_ps_lists_the_processes_of_another_host(sshd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sshd()
    (tmp_path / "train_far.py").write_text("import time\nopen('up', 'w').close()\ntime.sleep(600)\n")
    p = subprocess.Popen([sys.executable, "train_far.py"], cwd=tmp_path)
    try:
        wait_for((tmp_path / "up").exists)
        assert command.run_ps("testhost") == 0
    finally:
        p.kill()
        p.wait()
    assert any(str(p.pid) in line and "train_far.py" in line for line in capsys.readouterr().out.splitlines())
