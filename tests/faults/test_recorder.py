"""A recorded run in trouble: within fifteen seconds its log says what happened, and only the faulty part suffers.

Real faults in real processes: a file system that stops answering, locks, signals, cgroups, full disks, dead servers.
Root for FUSE, cgroups and mounts. The limits below are fifteen seconds and some for a busy machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from eyas.record import events

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "integration"))

from minifuse import MiniFuse  # noqa: E402
from recorded import Toy, end_all, gone, start, why  # noqa: E402

SOON = 20.0  # seconds: fifteen, and some for a busy machine
LIBC = ctypes.CDLL(None, use_errno=True)
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True)
def ended_at_the_end() -> Iterator[None]:
    yield
    end_all()


def fault(toy: Toy) -> float:
    """When the 31st step was reached, by this clock."""
    toy.until(lambda: toy.beat().get("step") == 30 and toy.beat()["phase"] != "forward")
    return time.monotonic()


@ROOT_ONLY
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs FUSE")
def test_a_reader_whose_disk_stops(tmp_path: Path) -> None:
    with MiniFuse(tmp_path / "mnt", {"data_9142.bin": 64 << 20}) as fs:
        loader = f"""
def next(self, i):
    from concurrent.futures import ThreadPoolExecutor
    from eyas.record.outlet import name_thread
    if i == 0:
        self.pool = ThreadPoolExecutor(1, "eyas-read", name_thread, ("eyas-read",))
        self.fd = os.open({str(tmp_path / "mnt" / "data_9142.bin")!r}, os.O_RDONLY)
    self.reading = ["data_9142.bin"]
    self.nbytes += len(self.pool.submit(os.pread, self.fd, 1 << 17, i << 17).result())
    time.sleep(0.05)
    return i"""
        toy = start(tmp_path / "run", steps=400, loader=loader)
        toy.until(lambda: toy.beat().get("step", 0) > 20)
        fs.hang()
        line = toy.says("waiting for data", SOON)
        assert "data_9142.bin" in line and "MB/s" in line
        assert "thread eyas-read is waiting for a FUSE daemon" in line, line
        judged = toy.says("eyas why:", SOON)
        assert "mnt" in judged or "FUSE" in judged or "file system" in judged, judged
    assert toy.ended(120) == 1, "the daemon ends, the read fails, and the run says so"
    assert "failed in waiting for data: OSError: [Errno 107] Transport endpoint" in toy.says("failed in")


def test_a_gil_that_is_held_for_20_s_in_c(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "import ctypes; ctypes.PyDLL(None).sleep(20)")
    line = toy.says("something holds the GIL", SOON)
    assert line.startswith("step 30/300 · backward") and "main thread at run.py:" in line
    begun = time.monotonic()
    toy.says("step 300/300", 40)
    assert time.monotonic() - begun > 5, "asking for the stacks did not cut the sleep short"
    assert toy.ended() == 0
    assert toy.events("why") == [] or toy.events("why")[0]["verdict"] != "healthy.training"


def test_two_threads_that_wait_for_each_other(tmp_path: Path) -> None:
    body = """
a, b, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
def other():
    with b:
        both.wait()
        with a:
            pass
threading.Thread(target=other, daemon=True).start()
with a:
    both.wait()
    with b:
        pass"""
    toy = start(tmp_path / "run", body)
    line = toy.says("step 30/300 · backward", SOON)
    assert "no CPU used; the main thread is waiting on a lock" in line and "main thread at run.py:" in line
    assert "is deadlocked" in toy.says("eyas why:", SOON)
    stacks = (toy.folder / "stacks.txt").read_text()
    assert "in other" in stacks and "Current thread" in stacks
    answer = why(toy.process.pid)
    assert answer["verdict"] == "stuck.deadlock" and not answer["beat"]["agrees"], answer["sentence"]


def test_a_process_that_is_stopped_and_goes_on(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "os.kill(os.getpid(), signal.SIGSTOP)")
    assert f"kill -CONT {toy.process.pid}" in toy.says("the process is stopped", SOON)
    os.kill(toy.process.pid, signal.SIGCONT)
    toy.says("step 300/300", 30)
    assert toy.ended() == 0 and not (toy.folder / "stacks.txt").exists()


@ROOT_ONLY
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory/cgroup.procs").exists(), reason="needs cgroup v1 memory")
def test_the_out_of_memory_killer(tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/eyas-recorder-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(96 << 20))
        via = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        toy = start(tmp_path / "run", "held = []\nwhile True: held.append(bytearray(os.urandom(1 << 20)))", via=via)
        toy.ended()
        line = toy.says("the end:", SOON)
        assert "was killed by SIGKILL by the kernel's out-of-memory killer" in line and "limit is 101 MB" in line, line
        assert "at step 30/300 in backward" in line and line.endswith("to go on: toy --resume")
        assert toy.until(lambda: toy.events("end"))[0]["oom"] is True
        toy.until(lambda: not (toy.folder / "beat").is_symlink(), 5)
        assert why(toy.folder)["verdict"] == "failed.oom-killed"
    finally:
        for _ in range(50):
            if not (group / "cgroup.procs").read_text().strip():
                break
            time.sleep(0.1)
        group.rmdir()


def test_sigkill(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "time.sleep(100)")
    fault(toy)
    sidecar = toy.sidecar()
    toy.process.kill()
    toy.ended()
    begun = time.monotonic()
    assert "was killed by SIGKILL, at step 30/300 in backward" in toy.says("the end:", SOON)
    toy.until(lambda: gone(sidecar), SOON)
    assert time.monotonic() - begun < 5


@ROOT_ONLY
def test_a_log_and_a_run_directory_whose_disk_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert LIBC.mount(b"none", str(disk).encode(), b"tmpfs", 0, b"size=1m") == 0
    try:
        log = (disk / "out.log").open("wb")
        toy = start(tmp_path / "run", "time.sleep(3)", steps=60, stdout=log, interval=1.5)
        toy.log = disk / "out.log"
        toy.says("step 1/60")
        (disk / "fill").write_bytes(b"")
        with pytest.raises(OSError, match="No space"), (disk / "fill").open("r+b", buffering=0) as fill:
            while True:
                fill.write(b"x" * 4096)
        fault(toy)
        time.sleep(2)
        (disk / "fill").unlink()
        assert toy.ended() == 0
        log.close()
        kept = (toy.folder / "log.txt").read_text()
        assert "step 60/60" in kept and "step 30/60 · backward" in kept, "log.txt lies elsewhere and has every line"
        assert "step 60/60" in toy.text(), "with room again the log goes on"
    finally:
        LIBC.umount2(str(disk).encode(), 2)


@ROOT_ONLY
def test_a_run_directory_whose_disk_fills_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert LIBC.mount(b"none", str(disk).encode(), b"tmpfs", 0, b"size=1m") == 0
    try:
        fill = f"""
try:
    with open({str(disk / "fill")!r}, "wb", buffering=0) as fill:
        while True: fill.write(b"x" * 4096)
except OSError: pass
for _ in range(200): rec.warn("into a full disk")
time.sleep(1)
os.unlink({str(disk / "fill")!r})"""
        with (tmp_path / "out.log").open("wb") as log:
            toy = start(disk / "run", fill, steps=60, stdout=log)
        toy.log = tmp_path / "out.log"
        assert toy.ended() == 0
        text = toy.text()
        for name in ("log.txt", "events.jsonl"):
            line = f"warning: {name} cannot be written (No space left on device); the run goes on without it"
            assert text.count(line) == 1, text
        assert "step 60/60" in text
        assert "lines before this could not be written here" in (disk / "run/log.txt").read_text()
        kept = [e["event"] for e in events.read(disk / "run/events.jsonl")]
        assert kept[0] == "start" and kept[-1] == "end", "with room again the events go on"
    finally:
        LIBC.umount2(str(disk).encode(), 2)


def test_a_listener_whose_server_accepts_and_never_answers(tmp_path: Path) -> None:
    pytest.importorskip("apprise")
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            with pytest.raises(OSError):
                while True:
                    held.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        port = server.getsockname()[1]
        url = f"notify=json://127.0.0.1:{port}/?rto=100&cto=100"  # apprise gives up after 4 s by itself
        toy = start(tmp_path / "run", 'rec.bad_loss(float("nan"), 1.0, 31, ["c7"], True)', steps=3000, sinks=[url])
        line = toy.says("notify has not answered for 10 s; the run does not wait for it", SOON + 10)
        assert line.startswith("warning: ")
        toy.says("step 3,000/3,000", 120)
        assert toy.ended() == 0 and held
        times = [e["time"] for e in toy.events("step")]
        assert max(b - a for a, b in pairwise(times)) < 3, "it never slowed"
        server.shutdown(socket.SHUT_RDWR)


def test_a_rank_that_dies_first_is_named(tmp_path: Path) -> None:
    """Two ranks in one run directory, as torchrun starts them; when rank 1 is killed, torchrun ends rank 0."""
    both = {"WORLD_SIZE": "2"}
    one = start(tmp_path / "run", "time.sleep(100)", env={**both, "RANK": "1"})
    (tmp_path / "run.log").rename(tmp_path / "rank1.log")
    one.log = tmp_path / "rank1.log"
    zero = start(tmp_path / "run", "time.sleep(100)", env={**both, "RANK": "0"})
    fault(zero)
    one.until(lambda: (one.folder / "beat.1").exists())
    time.sleep(1)
    one.process.kill()
    one.ended()
    assert one.says("rank 1: the end:", SOON).endswith("to go on: toy --resume")
    zero.process.terminate()
    zero.ended()
    assert "was killed by SIGTERM" in zero.says("rank 0: the end:", SOON)
    assert zero.says("rank 1 failed first", SOON).startswith("rank 1 failed first: the end: toy (PID")


def test_from_the_start_to_step_20_no_gap_of_more_than_10_s(tmp_path: Path) -> None:
    """The founding conditions: cold throttled files, a slow first step, the log in a file. See bench/record.py."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "record.py"), "--gap-only", "--output", str(tmp_path / "record.json")],
        check=True, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["max_log_gap_s"] <= 10.0, done.stdout
    assert found["first_line_s"] <= 2.0, done.stdout
    said = [line.partition(" s  ")[2] for line in done.stdout.splitlines() if " s  " in line]
    steps = [line for line in said if line.startswith("step ") and " · epoch " in line]
    silent = [line for line in said if "before the first step · " in line or "waiting for data " in line]
    assert steps and all("data wait " in line and "MB/s" in line for line in steps), "a step says how much it waits"
    named = ("waiting for the disk", "MB/s", "% CPU")
    assert all(any(what in line for what in named) for line in silent), "a silence says what for"
