"""The probe on real processes: what it sees of each state, and that it always comes back."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from whylab import look, proc, running, wait_for

from eyas.why import remote
from eyas.why.ps import render_ps

SLEEP = "ready()\nimport time\ntime.sleep(600)"


def test_a_sleeper_is_seen_with_its_call_and_its_log(tmp_path: Path) -> None:
    with (tmp_path / "train.log").open("wb") as log:
        log.write(b"hello\n")
        log.flush()
        with running(SLEEP, stdout=log) as p:
            snap = look(p.pid)
    seen = proc(snap, p.pid)
    assert seen["stat"]["state"] == "S"
    assert seen["syscall"]["name"] in ("clock_nanosleep", "select", "pselect6")
    assert seen["syscall"]["timeout"] is True
    assert len(snap["samples"]) == 3
    assert snap["logs"][0]["path"] == str(tmp_path / "train.log")
    assert base64.b64decode(snap["logs"][0]["tail"]["b64"]) == b"hello\n"
    assert snap["errors"] == [] and snap["probes_timed_out"] == []


def test_a_process_in_uninterruptible_sleep_is_seen_and_waited_for_by_nobody() -> None:
    code = "import ctypes\nl = ctypes.CDLL(None)\nready()\nif l.vfork() == 0:\n    l.sleep(20)\n    l._exit(0)"
    with running(code) as p:
        child = next((int(c) for c in Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split()), None)
        began = time.monotonic()
        snap = look(p.pid)
        assert time.monotonic() - began < 10
        assert [s["procs"][str(p.pid)]["stat"]["state"] for s in snap["samples"]] == ["D", "D", "D"]
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_process_is_seen_as_stopped_and_stays_as_it_was() -> None:
    with running(SLEEP) as p:
        os.kill(p.pid, signal.SIGSTOP)
        wait_for(lambda: Path(f"/proc/{p.pid}/stat").read_text().split()[2] == "T")
        assert proc(look(p.pid), p.pid)["stat"]["state"] == "T"
        assert Path(f"/proc/{p.pid}/stat").read_text().split()[2] == "T"


def test_a_lock_taken_twice_is_an_endless_futex_wait_without_wake_ups() -> None:
    with running("import threading\nl = threading.Lock()\nl.acquire()\nready()\nl.acquire()") as p:
        snap = look(p.pid)
    call = proc(snap, p.pid)["syscall"]
    assert (call["name"], call["timeout"]) == ("futex", False)
    first, last = proc(snap, p.pid, 0), proc(snap, p.pid)
    assert first["syscall"]["uaddr"] == call["uaddr"]
    assert first["sched"]["slices"] == last["sched"]["slices"]


def test_a_write_into_a_full_pipe_names_the_pipe_and_its_reader() -> None:
    code = "ready()\nimport os\nwhile True: os.write(1, b'x' * 65536)"
    with running(code, stdout=subprocess.PIPE) as p:
        wait_for(lambda: "pipe_write" in Path(f"/proc/{p.pid}/wchan").read_text())
        snap = look(p.pid)
    call = proc(snap, p.pid)["syscall"]
    assert (call["name"], call["fd"], call["kind"]) == ("write", 1, "pipe")
    assert snap["logs"][0]["kind"] == "pipe"
    assert snap["logs"][0]["to"]["pid"] == os.getpid()


def test_a_lock_file_leads_to_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    code = f"import fcntl\nf = open({str(path)!r}, 'w')\n%s\nfcntl.flock(f, fcntl.LOCK_EX)\n%s\nimport time\ntime.sleep(600)"
    with running(code % ("", "ready()")) as holder, running(code % ("ready()", "")) as waiter:
        wait_for(lambda: "lock" in Path(f"/proc/{waiter.pid}/wchan").read_text())
        snap = look(waiter.pid)
    (lock,) = [entry for entry in snap["locks"] if waiter.pid in entry["waiters"]]
    assert (lock["holder"], lock["path"]) == (holder.pid, str(path))
    assert proc(snap, waiter.pid)["syscall"]["path"] == str(path)


def test_the_log_behind_a_tee_is_found_from_the_trainer(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    tee = subprocess.Popen(["tee", str(log)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with running("print('step 1', flush=True)\nready()\nimport time\ntime.sleep(600)", stdout=tee.stdin) as p:
        assert tee.stdin is not None
        tee.stdin.close()
        wait_for(lambda: log.exists() and log.stat().st_size > 0)
        snap = look(p.pid)
        back = look(str(log), kind="log")
    tee.wait()
    assert (snap["logs"][0]["path"], snap["logs"][0]["how"], snap["logs"][0]["via"]) == (str(log), "tee", tee.pid)
    assert snap["job"]["kinds"][str(tee.pid)] == "tee"
    assert {"from": p.pid, "to": tee.pid} in [{"from": e["from"], "to": e["to"]} for e in snap["job"]["edges"]]
    assert back["target"]["pid"] == p.pid, "the log names the trainer, not the tee"


def test_a_deleted_log_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "gone.log"
    with path.open("wb") as log, running("print('step 7', flush=True)\n" + SLEEP, stdout=log) as p:
        path.unlink()
        path.write_text("another")
        snap = look(p.pid)
    entry = snap["logs"][0]
    assert entry["deleted"] is True
    assert base64.b64decode(entry["tail"]["b64"]) == b"step 7\n"


def test_a_rotated_log_is_said_to_be_rotated(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as log, running("print('old', flush=True)\n" + SLEEP, stdout=log) as p:
        path.rename(tmp_path / "a.log.1")
        path.write_text("new")
        snap = look(p.pid, log=str(path))
    by_path = {entry["path"]: entry for entry in snap["logs"]}
    assert base64.b64decode(by_path[str(tmp_path / "a.log.1")]["tail"]["b64"]) == b"old\n"


@pytest.mark.parametrize(("ending", "status"), [("os._exit(3)", 3 << 8), ("os.kill(os.getpid(), 9)", 9)])
def test_a_zombie_tells_how_it_died(ending: str, status: int) -> None:
    with running(f"ready()\nimport time\ntime.sleep(0.1)\n{ending}") as p:
        wait_for(lambda: Path(f"/proc/{p.pid}/stat").read_text().split()[2] == "Z")
        snap = look(p.pid)
    assert snap["target"]["zombie"] is True
    assert snap["target"]["exit_code"] == status
    assert snap["target"]["ended"]["by"] == "zombie"


def test_a_dead_pid_still_gives_a_snapshot_with_the_log_given(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("Traceback\nValueError: no\n")
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    snap = look(done.pid, log=str(log))
    assert snap["target"]["exists"] is False
    assert "no process" in snap["target"]["note"]
    assert b"ValueError" in base64.b64decode(snap["logs"][0]["tail"]["b64"])
    assert snap["host"]["mem"]["total"] > 0
    assert "oom_kill" in snap["samples"][-1]["host"]["vmstat"]


def test_a_target_that_dies_in_the_middle_is_reported_as_such() -> None:
    with running("ready()\nimport time\ntime.sleep(3)") as p:
        snap = look(p.pid, times=(0.0, 0.1, 5.0))
    states = [s["procs"].get(str(p.pid), {}).get("stat", {}).get("state") for s in snap["samples"]]
    assert states[0] == "S"
    assert states[-1] == "Z", "our own child: a zombie until collected"
    assert snap["target"]["ended"] is not None


def test_workers_that_die_and_compilers_that_are_born_in_the_middle_are_listed() -> None:
    code = """
        import os, signal, subprocess, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        ready()
        time.sleep(3)
        subprocess.Popen(["sleep", "30"])
        time.sleep(600)
    """
    with running(code) as p:
        snap = look(p.pid, times=(0.0, 0.1, 5.0))
        born = [int(pid) for pid, seen in snap["samples"][-1]["procs"].items() if seen["stat"]["comm"] == "sleep"]
        for pid in born:
            os.kill(pid, signal.SIGKILL)
    (died,) = snap["died"]
    assert (died["kind"], died["last_state"]) == ("fork", "S")
    assert len(born) == 1
    assert born[0] in snap["job"]["members"]


def test_a_worker_named_by_its_pid_leads_to_its_job() -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nready()\ntime.sleep(600)"
    with running(code) as p:
        child = int(Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text())
        snap = look(child)
        os.kill(child, signal.SIGKILL)
    assert (snap["target"]["pid"], snap["job"]["main"]) == (child, p.pid)
    assert snap["job"]["kinds"][str(child)] == "fork"


def test_the_ranks_of_a_launcher_are_one_job(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "for r in range(3):\n"
        "    subprocess.Popen([sys.executable, 'train.py'], env={**os.environ, 'RANK': str(r), 'LOCAL_RANK': str(r), 'WORLD_SIZE': '3', 'HF_TOKEN': 'hf_secretsecret'})\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    p = subprocess.Popen(
        [sys.executable, str(script), "--nproc_per_node=3", "train.py"],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    try:
        children = Path(f"/proc/{p.pid}/task/{p.pid}/children")
        wait_for(
            lambda: (
                len(children.read_text().split()) == 3
                and all(b"train" in Path(f"/proc/{c}/cmdline").read_bytes() for c in children.read_text().split())
            )
        )
        ranks = sorted(int(c) for c in children.read_text().split())
        whole, one = look(p.pid), look(ranks[1])
    finally:
        os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    for snap in (whole, one):
        assert snap["job"]["launcher"] == p.pid
        assert [(r["pid"], r["rank"], r["by"]) for r in snap["job"]["ranks"]] == [
            (pid, i, "env") for i, pid in enumerate(ranks)
        ]
        assert (snap["job"]["world_size"], snap["job"]["launcher_nproc"]) == (3, 3)
    assert "hf_secretsecret" not in str(whole), "secrets are not on the list of names"


def test_a_name_and_a_directory_and_nothing_find_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "train_tiny_thing.py").write_text("import time\nf = open('metrics.jsonl', 'w')\ntime.sleep(600)\n")
    p = subprocess.Popen([sys.executable, "train_tiny_thing.py"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists())
        assert look("train_tiny_thing.py", kind="name")["target"]["pid"] == p.pid
        assert look("train_tiny_thing", kind="name")["target"]["pid"] == p.pid
        assert look(str(tmp_path), kind="run_dir")["target"]["pid"] == p.pid
        found = look("", kind="search")["target"]
        assert p.pid in [found["pid"], *(other["pid"] for other in found["alternatives"])]
    finally:
        p.kill()
        p.wait()


def test_five_hundred_threads_are_read_in_time() -> None:
    code = "import threading, time\ne = threading.Event()\nfor _ in range(500):\n    threading.Thread(target=e.wait, daemon=True).start()\nready()\ntime.sleep(600)"
    with running(code) as p:
        began = time.monotonic()
        snap = look(p.pid)
        assert time.monotonic() - began < 10
    seen = proc(snap, p.pid)
    assert len(seen["threads"]) + seen["threads_left_out"] == 501
    assert len(seen["threads"]) >= 200
    assert (
        len({t["syscall"]["uaddr"] for t in seen["threads"].values() if (t["syscall"] or {}).get("name") == "futex"})
        > 100
    )


def test_five_thousand_descriptors_are_bounded_and_in_time(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"x" * 8192)
    code = "import os, sys, resource, time\nresource.setrlimit(resource.RLIMIT_NOFILE, (6000, 6000))\nfor _ in range(5000): os.open(sys.argv[1], os.O_RDONLY)\nready()\ntime.sleep(600)"
    with running(code, str(tmp_path / "data.bin")) as p:
        began = time.monotonic()
        snap = look(p.pid)
        assert time.monotonic() - began < 10
    entry = snap["processes"][str(p.pid)]
    assert entry["fd_count"] >= 5000
    assert entry["fds_left_out"] > 0
    assert len(proc(snap, p.pid, 0)["fds"]) + entry["fds_left_out"] == entry["fd_count"]
    assert str(tmp_path / "data.bin") in snap["files"]


def test_a_data_file_shows_position_and_cache_share(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"data_{i}.pt").write_bytes(os.urandom(1 << 20))
    code = "import os, sys\nf = os.open(sys.argv[1], os.O_RDONLY)\nos.read(f, 300000)\nready()\nimport time\ntime.sleep(600)"
    with running(code, str(tmp_path / "data_3.pt")) as p:
        snap = look(p.pid)
    held = next(f for f in proc(snap, p.pid)["fds"].values() if f["path"].endswith("data_3.pt"))
    assert held["pos"] == 300000
    entry = snap["files"][str(tmp_path / "data_3.pt")]
    assert entry["size"] == 1 << 20
    assert 0.0 <= entry["cached"] <= 1.0
    (dataset,) = [d for d in snap["datasets"] if d["ext"] == ".pt"]
    assert (dataset["dir"], dataset["files"], dataset["bytes"], dataset["exact"]) == (str(tmp_path), 6, 6 << 20, True)
    mount = snap["mounts"][str(entry["mnt"])]
    assert "data" in mount["used_by"]
    assert mount["statvfs"]["size"] > 0


@pytest.mark.parametrize(
    "body",
    [b"\r".join(b"%d%%" % i for i in range(100)), bytes(range(256)) * 4096, b""],
    ids=["carriage returns", "binary", "empty"],
)
def test_any_bytes_of_a_log_are_carried_as_they_are(body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(body)
    with path.open("ab") as log, running(SLEEP, stdout=log) as p:
        entry = look(p.pid)["logs"][0]
    assert base64.b64decode(entry["tail"]["b64"]) == body[-(256 << 10) :]
    assert entry["size"] == len(body)


def test_a_log_of_ten_gigabytes_is_read_at_both_ends_only(tmp_path: Path) -> None:
    path = tmp_path / "huge.log"
    with path.open("wb") as log:
        log.write(b"begin\n")
        log.truncate(10 << 30)
        log.seek(10 << 30)
        log.write(b"end\n")
    began = time.monotonic()
    with path.open("ab") as log, running(SLEEP, stdout=log) as p:
        entry = look(p.pid)["logs"][0]
    assert time.monotonic() - began < 10
    assert entry["size"] == (10 << 30) + 4
    assert base64.b64decode(entry["head"]["b64"]).startswith(b"begin\n")
    assert base64.b64decode(entry["tail"]["b64"]).endswith(b"end\n")
    assert len(base64.b64decode(entry["head"]["b64"])) == 64 << 10


def test_the_two_ends_of_sockets_are_put_together() -> None:
    code = """
        import os, socket, time
        a, b = socket.socketpair()
        server = socket.socket()
        server.bind(("127.0.0.1", 0))
        server.listen()
        if os.fork() == 0:
            a.close()
            client = socket.create_connection(server.getsockname())
            server.close()
            client.recv(1)
        b.close()
        peer, _ = server.accept()
        ready()
        a.recv(1)
    """
    with running(code) as p:
        child = int(Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text())
        snap = look(p.pid)
        os.kill(child, signal.SIGKILL)
    ends = {(s["proto"], s["pid"], s["peer_pid"]) for s in snap["sockets"]}
    assert {("unix", p.pid, child), ("tcp", p.pid, child), ("tcp", child, p.pid)} <= ends
    call = proc(snap, p.pid)["syscall"]
    assert (call["name"], call["kind"]) == ("recvfrom", "socket")
    assert {s["state"] for s in snap["sockets"] if s["proto"] == "tcp"} == {"ESTABLISHED"}


def test_ps_puts_the_stopped_trainer_before_the_busy_one(tmp_path: Path) -> None:
    (tmp_path / "train_a.py").write_text("import sys\nopen(sys.argv[1], 'w').close()\nwhile True: pass\n")
    words = [sys.executable, "train_a.py"]
    busy = subprocess.Popen(["nice", "-n", "19", *words, "busy"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    stopped = subprocess.Popen([*words, "stopped"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "busy").exists() and (tmp_path / "stopped").exists())
        os.kill(stopped.pid, signal.SIGSTOP)
        listing = remote.ask({"mode": "ps", "kind": "search", "times": [0.0, 1.0]}, 60.0)
    finally:
        for p in (busy, stopped):
            p.kill()
            p.wait()
    order = [row["pid"] for row in listing["rows"]]
    assert order.index(stopped.pid) < order.index(busy.pid)
    row = listing["rows"][order.index(stopped.pid)]
    assert (row["state"], "stopped" in row["why"]) == ("T", True)
    assert str(stopped.pid) in render_ps(listing, 200)


def test_a_run_that_asks_about_itself_is_seen() -> None:
    code = (
        "import json, os, subprocess, sys\n"
        "command = [sys.executable, '-m', 'eyas.why', str(os.getpid()), '--json', '--timeout', '30']\n"
        "print(subprocess.run(command, capture_output=True, text=True).stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert json.loads(done.stdout)["chain"], "the asker's own ancestor is the target, not part of the asking"
