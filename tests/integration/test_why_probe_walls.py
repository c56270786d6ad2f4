"""Walls and traps: other users, other namespaces, mounts and tools that hang.

The probe comes back from each, and says what it missed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from minifuse import MiniFuse
from whylab import look, proc, running, wait_for

from eyas.why import probe, remote

NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
SLEEP = "ready()\nimport time\ntime.sleep(600)"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change users, mount and freeze")


def as_nobody(pid: int, *before: str) -> dict[str, object]:
    """The probe as an unprivileged user, on its standard input like on another host."""
    request = {"kind": "pid", "value": pid, "mode": "why", "times": [0, 0.2, 0.5], "hard_s": 20, "nonce": "n"}
    text = f"EYAS_REQUEST = {json.dumps(json.dumps(request))}\n" + Path(probe.__file__).read_text()
    command = [*before, *NOBODY, "/usr/bin/env", "python3", "-I", "-S", "-"]
    done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=60, cwd="/")
    found = remote.unframe(done.stdout, "n")
    assert found is not None, done.stderr.decode()[-500:]
    return found


def python_for_all() -> bool:
    """Whether an unprivileged user reaches this interpreter at all."""
    return subprocess.run([*NOBODY, "/usr/bin/env", "python3", "-c", ""], cwd="/", capture_output=True).returncode == 0


def test_an_unprivileged_user_sees_another_users_process_as_far_as_the_kernel_lets_it() -> None:
    assert python_for_all(), "python3 must be there for unprivileged users"
    with running(SLEEP) as p:
        snap = as_nobody(p.pid)
    target, entry = snap["target"], snap["processes"][str(p.pid)]  # type: ignore[index]
    assert (target["exists"], target["same_user"]) == (True, False)
    assert proc(snap, p.pid)["stat"]["state"] == "S"
    assert entry["cmdline"], "command lines are for all"
    assert entry["visible"] == {
        "io": False,
        "fd": False,
        "syscall": False,
        "wchan": False,
        "environ": False,
        "maps": False,
    }
    missed = snap["not_visible"]
    assert any(
        "open files" in m["what"] and "another user" in m["why"] and "CAP_SYS_PTRACE" in m["needs"] for m in missed
    )  # type: ignore[union-attr,index]
    assert snap["errors"] == []


def test_an_unprivileged_user_sees_all_of_its_own_process() -> None:
    code = "import time,sys; print('ready', flush=True); time.sleep(600)"
    p = subprocess.Popen([*NOBODY, "/usr/bin/env", "python3", "-c", code], stdout=subprocess.PIPE, cwd="/")
    try:
        assert p.stdout is not None
        p.stdout.readline()
        snap = as_nobody(p.pid)
    finally:
        p.kill()
        p.wait()
    entry = snap["processes"][str(p.pid)]  # type: ignore[index]
    assert snap["target"]["same_user"] is True  # type: ignore[index]
    assert (
        entry["visible"]["fd"] and entry["visible"]["io"] and entry["visible"]["environ"] and entry["visible"]["maps"]
    )
    assert proc(snap, p.pid)["wchan"] is not None


def test_a_host_that_hides_processes_says_so() -> None:
    hide = (
        "unshare",
        "-m",
        "--propagation",
        "private",
        "sh",
        "-c",
        'mount -t proc -o hidepid=2 proc /proc && exec "$@"',
        "sh",
    )
    with running(SLEEP) as p:
        snap = as_nobody(p.pid, *hide)
    assert snap["meta"]["hidepid"] is True  # type: ignore[index]
    assert snap["target"]["exists"] is False  # type: ignore[index]
    assert "hidden" in snap["target"]["note"]  # type: ignore[index]


def test_files_on_a_file_system_that_hangs_do_not_hang_the_probe(tmp_path: Path) -> None:
    mount = tmp_path / "mnt"
    code = "import os, sys\nf = os.open(sys.argv[1], os.O_RDONLY)\nready()\nwhile os.read(f, 65536): pass"
    with (
        MiniFuse(mount, {"data_1.pt": 1 << 30, "train.log": 100}, read_delay=0.02) as fs,
        running(code, str(mount / "data_1.pt")) as p,
    ):
        fs.hang()
        began = time.monotonic()
        snap = look(p.pid, log=str(mount / "train.log"))
        took = time.monotonic() - began
    assert took < 12
    seen = proc(snap, p.pid)
    assert seen["wchan"] == "request_wait_answer"
    assert seen["syscall"]["path"] == str(mount / "data_1.pt")
    (entry,) = [m for m in snap["mounts"].values() if m["mountpoint"] == str(mount)]
    assert (entry["fuse"], entry["timed_out"], entry["statvfs"]) == (True, True, None)
    assert any(t["path"] and t["path"].startswith(str(mount)) for t in snap["probes_timed_out"])
    assert len([t for t in snap["probes_timed_out"] if (t["path"] or "").startswith(str(mount))]) <= 8, (
        "a bad mount is learnt"
    )


def test_a_command_line_that_cannot_be_read_does_not_hang_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose memory map is locked under a dead mount blocks the readers of its cmdline, environ and maps: here the reads never return."""
    source = Path(probe.__file__).read_text()
    for name in ("cmdline", "environ", "maps"):
        call = f'slurp("/proc/%d/{name}" % pid'
        assert call in source
        source = source.replace(call, 'time.sleep(600 if pid == int(os.environ["BAD"]) else 0) or ' + call)
    with running(SLEEP) as p:
        monkeypatch.setenv("BAD", str(p.pid))
        request = {"kind": "pid", "value": p.pid, "mode": "why", "times": [0, 0.3, 0.8], "nonce": "n"}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-S", "-"],
            input=f"EYAS_REQUEST = {json.dumps(json.dumps(request))}\n{source}".encode(),
            capture_output=True,
            timeout=30,
        )
        assert time.monotonic() - began < 12
    snap = remote.unframe(done.stdout, "n")
    assert snap is not None, done.stderr.decode()[-500:]
    late = {(t["probe"], t["pid"]) for t in snap["probes_timed_out"]}
    assert {("cmdline", p.pid), ("identity", p.pid)} <= late
    assert proc(snap, p.pid)["stat"]["state"] == "S", "the safe reads are there"
    assert snap["processes"][str(p.pid)]["cmdline"] is None


def stub(tmp_path: Path, body: str) -> dict[str, str]:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + body)
    tool.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_gpu_tool_that_hangs_is_evidence_and_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", stub(tmp_path, "exec sleep 600\n")["PATH"])
    with running(SLEEP) as p:
        began = time.monotonic()
        snap = look(p.pid, times=(0.0, 1.0, 2.0))
        assert time.monotonic() - began < 12
    assert snap["gpu"]["status"] == "timed_out"
    assert snap["target"]["exists"]


def test_a_recorded_gpu_answer_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(SLEEP) as p:
        body = f"""case "$1" in
--query-gpu*) printf 'index, uuid, name, utilization.gpu [%%], memory.used [MiB], memory.total [MiB], power.draw [W]\\n0, GPU-1, H100, 0, 16785, 81559, 71.2\\n' ;;
--query-compute*) printf 'GPU-1, {p.pid}, 16770, python\\n' ;;
esac
"""
        monkeypatch.setenv("PATH", stub(tmp_path, body)["PATH"])
        snap = look(p.pid, times=(0.0, 0.5, 2.0))
        by_gpu = look(0, kind="gpu")
    gpu = snap["gpu"]
    assert (gpu["status"], gpu["tool"]) == ("ok", "nvidia-smi")
    assert [s["util"] for s in gpu["gpus"][0]["samples"]] == [0, 0]
    assert gpu["gpus"][0]["samples"][0]["mem_used"] == 16785 << 20
    (holder,) = gpu["processes"]
    assert (holder["pid"], holder["member"], holder["gpu"]) == (p.pid, True, 0)
    assert by_gpu["target"]["pid"] == p.pid


def test_a_process_in_another_mount_namespace_is_reached_through_its_root(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    script = f"mount -t tmpfs none {inner} && exec {sys.executable} -c \"import sys,time; f=open('{inner}/run.log','w'); f.write('inside'); f.flush(); print('ready', flush=True); time.sleep(600)\""
    p = subprocess.Popen(["unshare", "-m", "--propagation", "private", "sh", "-c", script], stdout=subprocess.PIPE)
    try:
        assert p.stdout is not None
        assert p.stdout.readline() == b"ready\n"
        snap = look(p.pid)
    finally:
        p.kill()
        p.wait()
    assert snap["processes"][str(p.pid)]["ns"]["same_mnt"] is False
    entry = next(e for e in snap["logs"] if e["path"] == f"{inner}/run.log")
    assert base64.b64decode(entry["tail"]["b64"]) == b"inside"


def test_pids_of_a_container_are_mapped() -> None:
    p = subprocess.Popen(
        ["unshare", "-p", "-f", "--kill-child", "sh", "-c", "echo ready; sleep 600; true"], stdout=subprocess.PIPE
    )
    try:
        assert p.stdout is not None
        p.stdout.readline()
        (inner,) = Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split()
        snap = look(int(inner))
    finally:
        p.kill()
        p.wait()
    assert snap["processes"][inner]["ns"]["pid"] == [int(inner), 1]


def freezer() -> Path | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup ") and "freezer" in right.split()[2].split(","):
            return Path(left.split()[4])
        if right.startswith("cgroup2 ") and (Path(left.split()[4]) / "cgroup.subtree_control").exists():
            found = Path(left.split()[4])
    return found if "found" in locals() else None


def test_a_frozen_cgroup_is_seen_as_frozen() -> None:
    base = freezer()
    assert base is not None
    group = base / f"eyas-test-{os.getpid()}"
    group.mkdir()
    control, on, off = (
        ("freezer.state", "FROZEN", "THAWED") if (group / "freezer.state").exists() else ("cgroup.freeze", "1", "0")
    )
    try:
        with running(SLEEP) as p:
            (group / "cgroup.procs").write_text(str(p.pid))
            (group / control).write_text(on)
            try:
                time.sleep(0.2)
                snap = look(p.pid)
            finally:
                (group / control).write_text(off)
            time.sleep(0.1)
            thawed = look(p.pid)
        assert snap["cgroups"][snap["processes"][str(p.pid)]["cgroup"]]["frozen"] is True
        assert thawed["cgroups"][thawed["processes"][str(p.pid)]["cgroup"]]["frozen"] is False
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()


def test_the_probe_writes_nothing_traces_nobody_and_signals_only_its_own_children(tmp_path: Path) -> None:
    if not os.environ.get("CI") and not shutil.which("strace"):
        pytest.skip("strace is not installed")
    calls = tmp_path / "calls"
    request = {"kind": "pid", "value": 0, "mode": "why", "times": [0, 0.2, 0.5], "nonce": "n"}
    with running(SLEEP) as p:
        request["value"] = p.pid
        command = [
            "strace",
            "-f",
            "-qq",
            "-o",
            str(calls),
            "-e",
            "trace=ptrace,kill,tkill,tgkill,pidfd_send_signal,process_vm_readv,process_vm_writev,/open.*,creat,/mkdir.*,/unlink.*,/rename.*,/link.*,"
            "/symlink.*,/chmod.*,/fchmod.*,/chown.*,/utim.*,truncate,setpriority,sched_setaffinity",
            sys.executable,
            "-I",
            "-S",
            probe.__file__,
            json.dumps(request),
        ]
        done = subprocess.run(command, capture_output=True, timeout=60, cwd=tmp_path)
    assert b"@@eyas-end n" in done.stdout
    lines = calls.read_text().splitlines()
    ours = {line.split()[0] for line in lines}
    assert len(lines) > 200, "strace saw the probe at work"
    for line in lines:
        call = line.split(None, 1)[1].lstrip()
        if call.startswith(
            (
                "ptrace",
                "process_vm",
                "creat",
                "mkdir",
                "unlink",
                "rename",
                "link",
                "symlink",
                "chmod",
                "fchmod",
                "chown",
                "utim",
                "truncate",
                "setp",
                "sched_set",
            )
        ):
            pytest.fail(line)
        if call.startswith(("kill", "tkill", "tgkill", "pidfd_send")):
            assert call.split("(")[1].split(",")[0].lstrip("-") in ours, line
        if call.startswith("open") and (
            "O_WRONLY" in call or "O_RDWR" in call or "O_CREAT" in call or "O_TRUNC" in call
        ):
            assert '"/dev/null"' in call, line


def test_the_target_is_neither_traced_nor_stopped_afterwards() -> None:
    with running(SLEEP) as p:
        look(p.pid)
        status = Path(f"/proc/{p.pid}/status").read_text()
    assert "TracerPid:\t0" in status
    assert "State:\tS" in status
