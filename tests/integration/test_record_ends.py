"""How recorded runs end and what watches them, with real processes. What takes tens of seconds is in tests/faults."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded import end_all, gone, start, why

import eyas
from eyas.record import beat, events

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "run-directory.md"


@pytest.fixture(autouse=True)
def ended_at_the_end() -> Iterator[None]:
    yield
    end_all()


def test_a_run_in_order_leaves_its_story_and_nothing_else(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", steps=40)
    assert toy.ended() == 0
    lines = toy.lines()
    assert lines[0].startswith(f"toy (PID {toy.process.pid}) starts")
    assert lines[1].startswith("step 1/40 · loss 2.0000") and lines[-1].startswith("step 40/40")
    kept = beat.read(toy.folder / "beat")
    assert (kept["state"], kept["step"], kept["tokens"]) == ("ended", 40, 4000)
    assert not (toy.folder / "beat").is_symlink() and not list(Path("/dev/shm").glob(f"eyas-{toy.process.pid}-*"))
    (end,) = toy.events("end")
    assert end["how"] == "done" and end["step"] == 40 and 0.19 < end["seconds"]["forward"] < 10
    assert gone(kept["sidecar"])
    assert [line[20:] for line in (toy.folder / "log.txt").read_text().splitlines()] == lines
    answer = why(toy.folder)
    assert answer["verdict"] == "finished.ok" and "step 40/40, ended in order" in answer["sentence"]


def test_every_event_and_field_is_documented(tmp_path: Path) -> None:
    toy = start(
        tmp_path / "run",
        'rec.warn("w"); rec.compiled("loss", 1.0); rec.checkpoint(Path("c"), 1.0)\n'
        'rec.bad_loss(float("nan"), 1.0, 31, ["s"], True)\nrec.step(loss=90.0, samples=["s"])',
        steps=40,
    )  # fmt: skip
    assert toy.ended() == 0
    section = DOCUMENT.read_text().partition("## events.jsonl")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M))
    for raw in (toy.folder / "events.jsonl").read_text().splitlines():
        e = json.loads(raw)
        for field in e.keys() - {"time", "event", "rank", "by"}:
            assert f"`{field}`" in rows[e["event"]], (e["event"], field)


def test_sigkill_is_named_with_the_step_and_the_way_on(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "os.kill(os.getpid(), signal.SIGKILL)")
    toy.ended()
    how = f"toy (PID {toy.process.pid}) was killed by SIGKILL, at step 30/300 in backward"
    assert toy.says("the end:", 5) == f"the end: {how} · to go on: toy --resume"
    (end,) = toy.until(lambda: toy.events("end"))
    assert (end["how"], end["by"], end["status"], end["step"]) == ("vanished", "sidecar", 9, 30)
    toy.until(lambda: not (toy.folder / "beat").is_symlink(), 5)
    assert beat.read(toy.folder / "beat")["state"] == "failed"


def test_an_exit_below_python_is_named_with_its_code(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "os._exit(3)")
    toy.ended()
    assert "ended with exit code 3, at step 30/300 in backward" in toy.says("the end:", 5)


def test_a_fault_in_c_is_named_with_its_line(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "import ctypes\nctypes.string_at(0)")
    toy.ended()
    line = toy.says("the end:", 5)
    assert "was killed by SIGSEGV" in line and "Fatal Python error: Segmentation fault at " in line
    assert "Segmentation fault" in (toy.folder / "error.txt").read_text()


def test_an_exception_is_one_line_and_a_file(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", 'raise ValueError("shapes do not\\nfit")')
    assert toy.ended() == 1
    line = toy.says("failed", 5)
    assert line == (
        "step 30/300: failed in backward: ValueError: shapes do not · to go on: toy --resume · "
        f"traceback in {toy.folder / 'error.txt'}"
    )
    assert 'raise ValueError("shapes do not' in (toy.folder / "error.txt").read_text()
    (end,) = toy.events("end")
    assert end["how"] == "error" and "the end:" not in toy.text(), "the sidecar has nothing to add"


def test_the_sidecar_outlives_a_ctrl_c_and_ends_with_the_run(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)", interval=1.5)
    toy.says("step 30/300 · backward")
    sidecar = toy.sidecar()
    os.killpg(toy.process.pid, signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(sidecar, number)
    time.sleep(0.6)
    assert not gone(sidecar)
    toy.process.kill()
    toy.ended()
    died = time.monotonic()
    toy.until(lambda: gone(sidecar), 5)
    assert time.monotonic() - died < 2.5, "within a second, and some for a busy machine"


def test_a_sidecar_that_is_killed_is_missed(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "time.sleep(3)", steps=40)
    toy.until(lambda: toy.beat().get("step") == 30)
    os.kill(toy.sidecar(), signal.SIGKILL)
    assert "a silent run stays silent" in toy.says("warning: the recorder's side process is gone")
    assert toy.beat()["step"] == 30, "it is said while the step goes on"
    assert toy.ended() == 0
    assert not (toy.folder / "beat").is_symlink() and beat.read(toy.folder / "beat")["state"] == "ended"
    assert not list(Path("/dev/shm").glob(f"eyas-{toy.process.pid}-*"))


def test_a_stopped_process_is_called_stopped(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "os.kill(os.getpid(), signal.SIGSTOP)", interval=1.5)
    line = toy.says("is stopped")
    assert f"kill -CONT {toy.process.pid}" in line and line.startswith("step 30/300 · backward")
    answer = why(toy.process.pid)
    assert answer["verdict"] == "stuck.stopped"
    assert not answer["beat"]["agrees"] and "stopped" in answer["beat"]["differs"][0]
    os.kill(toy.process.pid, signal.SIGCONT)
    assert toy.ended() == 0


def test_a_log_on_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        toy = start(tmp_path / "run", steps=40, stdout=full)
    assert toy.ended() == 0
    said = [line[20:] for line in (toy.folder / "log.txt").read_text().splitlines()]
    assert any("standard output cannot be written (No space left on device)" in line for line in said)
    assert said[-1].startswith("step 40/40") or said[-2].startswith("step 40/40")


def test_a_reader_that_goes_away_stops_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    toy = start(tmp_path / "run", steps=40, stdout=write)
    os.close(write)
    os.close(read)
    assert toy.ended() == 0 and toy.events("end")[0]["how"] == "done"


def test_a_terminal_gets_a_live_display_and_the_log_its_lines(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    toy = start(tmp_path / "run", 'rec.warn("look")\ntime.sleep(1.2)', steps=40, stdout=theirs, env={"TERM": "xterm"})
    os.close(theirs)
    seen = b""
    try:
        while more := os.read(ours, 65536):
            seen += more
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert toy.ended() == 0
    text = seen.decode()
    assert "━" in text and "step 30/40" in text and "warning: look" in text and "left" in text
    assert "step 40/40 · loss" in text
    assert "\x1b" not in (toy.folder / "log.txt").read_text()
    assert any(line.startswith("step 1/40") for line in toy.lines()), "log.txt has the lines that a file would get"


def test_a_loop_of_other_people_needs_no_torch(tmp_path: Path) -> None:
    block = next(b for b in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S) if "record.run" in b)
    stand_in = (
        "class Tensor:\n"
        "    def backward(self): pass\n"
        "    def numel(self): return 64\n"
        "    def __float__(self): return 0.5\n"
        "def model(batch): return batch\n"
        "loader = [Tensor()] * 5\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{stand_in}{block}\nimport sys; assert 'torch' not in sys.modules"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(eyas.__file__).parents[1])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("step 1/5 · loss 0.5000")
    kept = beat.read(tmp_path / "runs/mine/beat")
    assert (kept["step"], kept["tokens"], kept["phases"]["backward"][0]) == (5, 320, 5)


def test_why_answers_from_the_beat_and_proc(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", steps=100_000)
    toy.says("step 1/")
    time.sleep(1.0)
    try:
        for target in (toy.process.pid, toy.folder, toy.folder / "log.txt"):
            answer = why(target)
            assert answer["verdict"] == "healthy.training" and answer["took_s"] < 1.0, answer["sentence"]
            assert answer["beat"]["agrees"] and answer["beat"]["pid"] == toy.process.pid
            told = answer["progress"]
            assert 1 < told["step"] < 100_000 and told["seconds_per_step"] > 0.004
            assert told["eta_s"] == pytest.approx(told["seconds_per_step"] * (100_000 - told["step"]), rel=0.1)
        os.kill(toy.process.pid, signal.SIGSTOP)
        answer = why(toy.folder)
        assert answer["verdict"] == "stuck.stopped" and answer["beat"]["differs"]
    finally:
        toy.process.kill()
        toy.ended()
    toy.says("the end:")
    toy.until(lambda: not (toy.folder / "beat").is_symlink(), 5)
    answer = why(toy.folder)
    assert answer["state"] == "failed" and answer["beat"]["state"] == "failed", answer["sentence"]


def test_a_beat_that_lies_is_found_out(tmp_path: Path) -> None:
    """The process is gone and another sits at its number, or nobody: the beat alone would say that it runs."""
    toy = start(tmp_path / "run", steps=100_000)
    toy.says("step 1/")
    os.kill(toy.sidecar(), signal.SIGKILL)
    toy.process.kill()
    toy.ended()
    answer = why(toy.folder)
    assert answer["state"] != "healthy" and "there is no PID" in answer["beat"]["differs"][0]


@pytest.mark.parametrize("how", ["stop", "skip"])
def test_a_step_without_a_number_is_said_with_its_samples(tmp_path: Path, how: str) -> None:
    body = f'text = rec.bad_loss(float("nan"), 2.0, 31, ["c7", "c9"], {how == "skip"})\n'
    body += 'if "skip" != ' + repr(how) + ": raise EyasError(text)"
    toy = start(tmp_path / "run", body, steps=40)
    assert toy.ended() == (0 if how == "skip" else 1)
    assert "the loss is nan at step 31: samples c7, c9" in toy.says("nan")
    assert toy.events("nan")[0]["samples"] == ["c7", "c9"]


def test_a_number_that_another_process_has_now_is_no_run(tmp_path: Path) -> None:
    """The run was killed with its sidecar, and its PID is this very process's."""
    toy = start(tmp_path / "run", steps=100_000)
    toy.says("step 1/")
    os.kill(toy.sidecar(), signal.SIGKILL)
    toy.process.kill()
    toy.ended()
    with (toy.folder / "beat").open("r+b") as file:
        file.seek(8 * beat.PID)
        file.write(os.getpid().to_bytes(8, sys.byteorder))
    assert beat.read(toy.folder / "beat")["state"] == "running"
    answer = why(toy.folder)
    assert answer["state"] != "healthy"
    assert f"there is no PID {os.getpid()} that started then" in answer["beat"]["differs"][0]
    assert answer["beat"]["agrees"] is False


def test_two_runs_in_one_directory_are_told_of_each_other(tmp_path: Path) -> None:
    one = start(tmp_path / "run", steps=100_000)
    one.says("step 1/")
    (tmp_path / "run.log").rename(tmp_path / "one.log")
    two = start(tmp_path / "run", steps=40)
    assert two.ended() == 0
    assert f"PID {one.process.pid} records into {tmp_path / 'run'} too" in two.says("warning: ")
    assert one.process.poll() is None, "and the first one goes on"


def test_a_log_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", '(Path(rec.folder) / "log.txt").unlink()\nrec.warn("still here")', steps=40)
    assert toy.ended() == 0
    kept = [line[20:] for line in (toy.folder / "log.txt").read_text().splitlines()]
    assert kept[0] == "warning: still here" and kept[-1].startswith("step 40/40")


def test_without_a_home_and_an_environment(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", steps=40, via=["env", "-i", f"PYTHONPATH={Path(eyas.__file__).parents[1]}"])
    assert toy.ended() == 0 and toy.lines()[-1].startswith("step 40/40")
    assert beat.read(toy.folder / "beat")["state"] == "ended"


def test_a_long_compilation_is_called_one_and_no_stall(tmp_path: Path) -> None:
    body = 'with rec.phase("compiling"):\n    while True: pass'
    toy = start(tmp_path / "run", body, steps=40, interval=1.0, limits={"": 1.0})
    toy.says("step 30/40 · compiling 2 s")
    assert toy.events("stall") == [], "its limit is half an hour"
    answer = why(toy.process.pid)
    assert (answer["verdict"], answer["beat"]["phase"]) == ("quiet.compiling", "compiling"), answer["sentence"]


@pytest.mark.parametrize("leaves", ["sys.exit(3)", "raise ValueError('of the child')"])
def test_a_forked_child_that_leaves_the_block_does_not_end_the_run(tmp_path: Path, leaves: str) -> None:
    toy = start(tmp_path / "run", f"if os.fork() == 0:\n    {leaves}\nos.wait()\ntime.sleep(1.5)", steps=60)
    assert toy.ended() == 0
    (end,) = toy.events("end")
    assert (end["how"], end["step"]) == ("done", 60)
    assert toy.events("warning") == [] and not (toy.folder / "error.txt").exists()
    assert beat.read(toy.folder / "beat")["state"] == "ended"


def test_no_way_on_is_told_before_there_is_a_run_directory(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from eyas.record.record import Record\n"
        "with Record(Path(sys.argv[1]), 'toy', resume='toy --resume') as rec:\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    said = process.communicate(timeout=30)[0].splitlines()  # until the side process too has ended
    how = f"toy (PID {process.pid}) was killed by SIGKILL, at before the first step in starting"
    assert said[-1] == f"the end: {how}" and not (tmp_path / "run").exists()


def test_a_closed_standard_output_takes_no_file_of_the_run(tmp_path: Path) -> None:
    program = (
        "import os, sys, time, eyas.record\n"
        "with eyas.record.run(sys.argv[1], total_steps=2) as rec:\n"
        "    time.sleep(0.5)\n"
        "    side = f'/proc/{rec._sidecar.pid}/fd/1'\n"
        "    print(os.readlink('/proc/self/fd/1'), os.readlink(side), file=sys.stderr)\n"
        "    rec.step(loss=1.0)\n"
    )
    shell = f'exec {sys.executable} -c "$1" "$2" >&-'
    done = subprocess.run(["sh", "-c", shell, "sh", program, tmp_path / "run"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stderr.split() == ["/dev/null", "/dev/null"]
    assert "step 1/2" in (tmp_path / "run" / "log.txt").read_text()


def test_of_a_job_the_rank_that_failed_first_is_told(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", "os.kill(os.getpid(), signal.SIGKILL)", env={"RANK": "0", "WORLD_SIZE": "2"})
    toy.ended()
    toy.until(lambda: not (toy.folder / "beat").is_symlink(), 10)
    (mine,) = toy.events("end")
    text = "rank 1: the end: toy (PID 7) was killed by SIGKILL by the kernel's out-of-memory killer"
    first = events.line("end", 1, how="vanished", status=9, oom=True, step=29, text=text)
    first = first.replace(b'"time": ', b'"time": %f, "was": ' % (mine["time"] - 0.01))
    with (toy.folder / "events.jsonl").open("ab") as file:
        file.write(first)
    for _ in range(2):  # from the beat, and from the files of a copy without one
        answer = why(toy.folder)
        assert answer["verdict"] == "failed.oom-killed"
        assert text.removeprefix("rank 1: ") in answer["sentence"] and "rank 1 failed first" in answer["sentence"]
        (toy.folder / "beat").unlink(missing_ok=True)


def test_a_run_in_a_pid_namespace_of_its_own_is_known_from_outside(tmp_path: Path) -> None:
    inside = ["unshare", "-pf", "--mount-proc"]
    if subprocess.run([*inside, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no PID namespaces here")
    program = "import sys, time, eyas.record\nwith eyas.record.run(sys.argv[1]) as rec:\n    " + (
        "for i in range(3000):\n        rec.step(loss=1.0); time.sleep(0.01)\n"
    )
    process = subprocess.Popen([*inside, "--kill-child", sys.executable, "-c", program, tmp_path / "run"])
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "run" / "beat").exists() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.3)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        answer = why(tmp_path / "run")
        assert answer["verdict"] == "healthy.training" and answer["beat"]["agrees"], answer["beat"]
        assert beat.read(tmp_path / "run" / "beat")["pid"] == 1 and answer["target"]["pid"] == int(child)
    finally:
        process.kill()
        process.wait()
