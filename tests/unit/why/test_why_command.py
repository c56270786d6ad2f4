"""Exit codes, and the one line a user gets for bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eyas.why import command, remote
from eyas.why.__main__ import main


def test_bad_words_are_usage_errors_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run_why("-oX:1") == 64
    assert command.run_why("/no/such/log") == 64
    assert command.run_why("77", fail_on="sleepy") == 64
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("eyas: ") for line in lines)


def test_unknown_options_exit_64(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--no-such-option"])
    assert left.value.code == 64
    assert "no-such-option" in capsys.readouterr().err


def test_a_file_that_is_no_snapshot_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text('{"schema": "other"}')
    (tmp_path / "y.json").write_text("not json")
    assert command.run_why(replay=str(tmp_path / "x.json")) == 64
    assert command.run_why(replay=str(tmp_path / "y.json")) == 64
    assert command.run_why(replay=str(tmp_path / "none.json")) == 64
    said = capsys.readouterr().err
    assert said.count("\n") == 3 and said.count("--save NEW_FILE") == 3
    assert "--save /" not in said  # a hint that would overwrite the user's file


def test_the_worked_example_is_replayed_from_its_case_of_the_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[3]
    named = re.findall(r"eyas why --replay (tests/\S+\.json)", (root / "docs" / "why.md").read_text("utf-8"))
    assert named == ["tests/faults/corpus/C00.json"]
    assert command.run_why(replay=str(root / named[0])) == 1
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "slow.data.disk-cold"


def snapshot(**target: object) -> dict[str, object]:
    return {
        "schema": "eyas.snapshot/1",
        "meta": {"hidepid": True, "root": False, "uid": 1000, "user": "ann", "started": 1.0, "took_s": 1.0},
        "target": {"exists": False, "kind": "pid", "pid": 5, **target},
        "logs": [],
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (remote.HostUnreachable("no"), 69),
        (remote.DeadlinePassed("late"), 124),
        (command.NoPermission("wall"), 77),
        (remote.ProbeFailed("odd"), 3),
        (command.UsageError("what"), 64),
    ],
)
def test_every_fault_has_its_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(command.remote, "ask", fail)
    assert command.run_why("77") == code
    assert command.run_ps() == code
    assert capsys.readouterr().err.count("\n") == 2


def test_a_process_hidden_from_this_user_is_a_permission_matter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.remote, "ask", lambda *_, **__: snapshot())
    assert command.run_why("5") == 77
    assert "sudo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "more", "said"),
    [
        ({"kind": "pid", "asked": "5"}, {},
         "no process 5 here; see eyas ps; if it was a run of eyas, name its folder: eyas why DIR"),
        ({"kind": "pid", "asked": "gpu7:5", "host": "gpu7"}, {}, "no process 5 on gpu7; see eyas ps gpu7"),
        ({"kind": "name", "asked": "trainer", "pid": None}, {},
         "no process named trainer here, and no file or directory of that name; see eyas ps"),
        ({"kind": "gpu", "asked": "@gpu0", "pid": None}, {"gpu": {"status": "absent"}},
         "no GPU is to be seen here; see eyas ps"),
        ({"kind": "gpu", "asked": "@gpu0", "pid": None, "note": "no visible process uses GPU 0"},
         {"gpu": {"status": "ok"}}, "no visible process uses GPU 0; see eyas ps"),
        ({"kind": "slurm", "asked": "slurm:1", "pid": None}, {"slurm": None},
         "no process of Slurm's job 1 here, and Slurm says nothing of it; see eyas ps"),
        ({"kind": "search", "asked": None, "pid": None}, {}, "no training process here; see eyas ps"),
    ],
)  # fmt: skip
def test_a_target_that_is_not_there_is_one_line(
    target: dict[str, object], more: dict[str, object], said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    snap = {**snapshot(**target), **more}
    snap["meta"]["hidepid"] = False  # type: ignore[index]
    monkeypatch.setattr(command.remote, "ask", lambda *_, **__: snap)
    assert command.run_why("5") == 64
    assert capsys.readouterr() == ("", f"eyas: {said}\n")


def test_what_a_vanished_process_left_behind_is_still_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = {"kind": "oom", "text": "Out of memory: Killed process 5 (python)", "age_s": 9.0}
    for more, code in (
        ({"kernel_log": {"readable": True, "lines": [killed]}}, 2),
        ({"slurm": {"state": "COMPLETED"}, "target": {"exists": False, "kind": "slurm", "asked": "slurm:7"}}, 0),
        ({"gpu": {"status": "timeout"}, "target": {"exists": False, "kind": "gpu", "asked": "@gpu0"}}, 3),
    ):
        snap = {**snapshot(), **more}
        snap["meta"]["hidepid"] = False  # type: ignore[index]
        monkeypatch.setattr(command.remote, "ask", lambda *_, snap=snap, **__: snap)
        assert command.run_why("5", json_out=True) == code
        assert capsys.readouterr().err == ""


def test_fail_on_decides_which_states_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snap = snapshot()
    snap["meta"]["hidepid"] = False  # type: ignore[index]
    snap["logs"] = [{"path": "/x/log", "kind": "file", "how": "given", "size": 0, "mtime": 1.0}]
    monkeypatch.setattr(command.remote, "ask", lambda *_, **__: json.loads(json.dumps(snap)))
    plain = command.run_why("5", json_out=True)
    state = json.loads(capsys.readouterr().out)["state"]
    assert plain == command.EXIT[state]
    assert command.run_why("5", fail_on=state) >= 1
    other = next(s for s in command.EXIT if s != state)
    assert command.run_why("5", fail_on=other) == 0
