"""Exit codes, and the one line a user gets for bad input."""

from __future__ import annotations

import json
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
    assert "--save" in capsys.readouterr().err


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


def test_fail_on_decides_which_states_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snap = snapshot()
    snap["meta"]["hidepid"] = False  # type: ignore[index]
    monkeypatch.setattr(command.remote, "ask", lambda *_, **__: json.loads(json.dumps(snap)))
    plain = command.run_why("5", json_out=True)
    state = json.loads(capsys.readouterr().out)["state"]
    assert plain == command.EXIT[state]
    assert command.run_why("5", fail_on=state) >= 1
    other = next(s for s in command.EXIT if s != state)
    assert command.run_why("5", fail_on=other) == 0
