"""What is over is told from its own files: events.jsonl, else summary.json; and never from those of an earlier run."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.record import beat, events
from eyas.record.beat import Beat
from eyas.why import command
from eyas.why.answer import KEYS
from eyas.why.beat import find
from eyas.why.target import Target


@pytest.fixture(autouse=True)
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing works in these folders: the real probe, with one look instead of three seconds."""
    ask = command.remote.ask
    monkeypatch.setattr(command.remote, "ask", lambda request, *more: ask({**request, "quick": True}, *more))


def asked(place: Path | int, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = command.run_why(str(place), json_out=True)
    return code, json.loads(capsys.readouterr().out)


def write(place: Path, *lines: bytes) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "events.jsonl").write_bytes(b"".join(lines))
    (place / "log.txt").write_text("2026-01-01 10:00:00 step 5/100 · loss 2.0 · 9 s left\n")


START = events.line("start", name="eyas train", pid=1, total=100)
DONE = events.line("end", how="done", step=100, text=None)


def vanished(**more: Any) -> bytes:
    return events.line("end", how="vanished", step=5, text="the end: eyas train was killed", **more)


@pytest.mark.parametrize(
    ("lines", "verdict", "code"),
    [
        ((START, DONE), "finished.ok", 0),
        ((START, vanished(status=9, oom=True)), "failed.oom-killed", 2),
        ((START, vanished(status=15)), "failed.signal", 2),
        ((START, vanished(status=11)), "failed.native-crash", 2),
        (
            (START, events.line("end", how="error", step=5, text="step 5/100: failed in forward: x")),
            "failed.exception",
            2,
        ),
        ((START, events.line("end", how="interrupted", step=5, text="step 5/100: interrupted")), "failed.signal", 2),
        ((START, events.line("end", how="stopped", step=5, text="step 5/100: --max-minutes")), "finished.ok", 0),
        ((START, vanished(status=9), START, DONE), "finished.ok", 0),
    ],
)
def test_events_tell_how_a_run_ended(
    lines: tuple[bytes, ...], verdict: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", *lines)
    for place in (tmp_path / "a", tmp_path / "a" / "log.txt"):
        got, answer = asked(place, capsys)
        assert (got, answer["verdict"], answer["grade"]) == (code, verdict, "established")
        assert set(answer) == set(KEYS)


def test_a_run_that_was_begun_again_is_not_told_by_its_first_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", START, DONE, START)
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"steps": 100, "stopped": None, "seconds": 9.0}))
    assert not asked(tmp_path / "a", capsys)[1]["verdict"].startswith("finished")


def test_a_run_that_was_killed_together_with_its_sidecar_is_told_by_its_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a"
    about = {"name": "eyas train", "pid": 1 << 23, "total": 100, "resume": "eyas train --resume"}
    step = events.line("step", step=7)
    here = os.uname().nodename

    def told(host: str, silent: float) -> dict[str, Any]:
        write(run, events.line("start", host=host, **about), step)
        for name in ("events.jsonl", "log.txt"):
            os.utime(run / name, (time.time() - silent,) * 2)
        return asked(run, capsys)[1]

    answer = told(here, 20)
    assert (answer["verdict"], answer["grade"], answer["progress"]["step"]) == ("failed.signal", "supported", 7)
    whose = f"eyas train (PID {1 << 23}) has gone without a word, behind step 7"
    assert answer["sentence"].startswith(f"a: {whose}: it was killed together with the process")
    assert answer["sentence"].endswith(" · to go on: eyas train --resume")
    assert told(here, 3)["state"] == "unknown", "its next line may come"
    assert not told("elsewhere", 20)["sentence"].startswith("a: "), "its processes are not to be seen from here"
    assert told(here, time.clock_gettime(time.CLOCK_BOOTTIME) + 60)["verdict"] == "failed.host"
    alive = Beat(str(run), path=run / "beat")
    alive.slots[beat.STEP] = 9
    assert told(here, 20)["verdict"] != "failed.signal", "its beat moves: an other user's, perhaps"
    alive.slots[beat.PID], alive.slots[beat.PYTHON] = 1 << 23, time.monotonic_ns() - 20 * 10**9
    assert "without a word, at step 9 in starting: it was killed" in told(here, 20)["sentence"]


@pytest.mark.parametrize(
    ("stopped", "verdict"),
    [(None, "finished.ok"), ("time", "finished.ok"), ("patience", "finished.ok"), ("signal", "failed.signal")],
)
def test_summary_tells_where_there_are_no_events(
    stopped: str | None, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.yaml").write_text("config: {}\n")
    (run / "summary.json").write_text(json.dumps({"steps": 19, "stopped": stopped, "seconds": 61.0, "best": "step-19"}))
    os.utime(run / "run.yaml", (1e9, 1e9))
    answer = asked(run, capsys)[1]
    assert (answer["verdict"], answer["progress"]["step"]) == (verdict, 19)
    os.utime(run / "summary.json", (9e8, 9e8))  # begun again since
    assert asked(run, capsys)[1]["state"] == "unknown"


def test_a_store_is_told_by_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "store" / "record", events.line("start", name="eyas capture"), DONE)
    answer = asked(tmp_path / "store", capsys)[1]
    assert answer["verdict"] == "finished.ok" and answer["sentence"].startswith("store has finished: eyas capture")


def test_a_demo_is_finished_when_its_summary_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = tmp_path / "demo"
    write(demo / "train", START, DONE)
    assert asked(demo, capsys)[1]["state"] == "unknown"  # training is over; of eval and export nothing is known
    (demo / "summary.json").write_text(json.dumps({"stages": [{"name": "train"}] * 7, "seconds": 691.8}))
    code, answer = asked(demo, capsys)
    assert (code, answer["verdict"]) == (0, "finished.ok")
    assert answer["sentence"] == "demo has finished: all 7 stages of eyas demo in 692 s."


def test_a_demo_whose_training_was_killed_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "demo" / "train", START, vanished(status=15))
    assert asked(tmp_path / "demo", capsys)[1]["verdict"] == "failed.signal"


def test_a_log_that_ends_in_makes_word_of_a_signal_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "demo.log"
    log.write_text(
        "[5/7 train] step 1,702/1,702 · epoch 4/4 · loss 5.5220 · 0 s left\n"
        "[5/7 train] done: 1,702 steps in 1,236 s · best checkpoint runs/demo/train/best\n"
        "[6/7 eval] decoded 16/32 prompts · accept length 1.736 so far\n"
        "make: *** [Makefile:43: demo] Terminated\n"
    )
    code, answer = asked(log, capsys)
    assert (code, answer["verdict"], answer["questions"]["crashed"]["answer"]) == (2, "failed.signal", "yes")
    assert (answer["progress"]["step"], answer["progress"]["unit"]) == (16, "prompt")
    assert answer["sentence"] == "demo.log was ended by SIGTERM."


def test_the_beat_of_the_part_that_runs_is_meant(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    done = beat.Beat(str(tmp_path), 0, 1, 100, tmp_path / "beat", "step")
    target = Target(str(tmp_path), "run_dir", str(tmp_path))
    done.slots[beat.STATE] = beat.ENDED
    assert find(target) == str(tmp_path / "beat")
    running = beat.Beat(str(tmp_path / "eval"), 0, 1, 32, tmp_path / "eval" / "beat", "prompt")
    assert find(target) == str(tmp_path / "eval" / "beat")
    running.slots[beat.STATE] = beat.ENDED
    assert find(target) == str(tmp_path / "beat")


def gone() -> int:
    """The PID of a process that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_a_dead_pid_is_told_by_the_record_near_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pid, host = gone(), os.uname().nodename
    assert command.run_why(str(pid)) == 64
    assert capsys.readouterr().err == (
        f"eyas: no process {pid} here; see eyas ps; if it was a run of eyas, name its folder: eyas why DIR\n"
    )
    other = events.line("start", name="eyas train", pid=pid + 1, host=host)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")  # hides nothing beside it
    write(tmp_path / "runs" / "b", other, DONE)
    write(tmp_path / "runs" / "c", events.line("start", name="eyas train", pid=pid, host="elsewhere"), DONE)
    assert command.run_why(str(pid)) == 64
    capsys.readouterr()
    write(
        tmp_path / "runs" / "a",
        events.line("start", name="eyas train", pid=pid, host=host),
        vanished(status=9, oom=True),
    )
    assert command.run_why(str(pid)) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"PID {pid} is gone; it was the eyas run in runs/a. a: the end: eyas train was killed"
    write(tmp_path / "runs" / "d", events.line("start", name="eyas train", pid=pid, host=host), DONE)
    code, told = asked(pid, capsys)  # a PID is given again: the later one is meant
    assert (code, told["verdict"]) == (0, "finished.ok") and "the eyas run in runs/d. " in told["sentence"]


def test_a_dead_pid_is_told_by_the_beat_that_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run, path = tmp_path / "run", beat.SHM / f"test-{os.getpid()}.beat"
    made = Beat(str(run), path=path)
    pid = gone()
    left = path.with_name(f"eyas-{pid}-1-0.beat")
    try:
        made.slots[beat.PID] = pid
        path.rename(left)
        assert command.run_why(str(pid)) == 64  # the folder is gone, too
        capsys.readouterr()
        write(run, events.line("start", name="eyas train", pid=pid, host=os.uname().nodename), vanished(status=9))
        code, told = asked(pid, capsys)
        assert (code, told["verdict"]) == (2, "failed.signal")
        assert told["sentence"].startswith(f"PID {pid} is gone; it was the eyas run in {run}. ")
        (run / "events.jsonl").unlink()
        assert command.run_why(str(pid)) == 64
        assert capsys.readouterr().err == f"eyas: PID {pid} is gone; it was the eyas run in {run}: see {run}/log.txt\n"
    finally:
        left.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
