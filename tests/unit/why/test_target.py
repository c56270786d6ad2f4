"""The words a user may name a process with."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.why.target import UsageError, parse


@pytest.mark.parametrize(
    ("word", "kind", "value", "host"),
    [
        ("4242", "pid", 4242, None),
        ("train.py", "name", "train.py", None),
        ("gpu7:4242", "pid", 4242, "gpu7"),
        ("me@gpu7.cluster.org:train.py", "name", "train.py", "me@gpu7.cluster.org"),
        ("gpu7:", "search", None, "gpu7"),
        ("gpu7:@gpu1", "gpu", 1, "gpu7"),
        ("gpu7:/data/run/train.log", "path", "/data/run/train.log", "gpu7"),
        ("gpu7:slurm:77", "slurm", "77", "gpu7"),
        ("[::1]:12", "pid", 12, "[::1]"),
        ("@gpu0", "gpu", 0, None),
        ("slurm:123_4", "slurm", "123_4", None),
        ("", "search", None, None),
        (None, "search", None, None),
    ],
)
def test_a_target_is_understood(word: str | None, kind: str, value: object, host: str | None) -> None:
    found = parse(word)
    assert (found.kind, found.value, found.host) == (kind, value, host)


@pytest.mark.parametrize(
    "word",
    [
        "-oProxyCommand=x:1",
        "host;rm:1",
        "ho st:1",
        "me@-oX:1",
        "a`b`:1",
        "$(x):1",
        "@gpuX",
        "slurm:",
        "slurm:-x",
        "99999999999",
        "/no/such/file",
        "no/such/file",
    ],
)
def test_words_that_name_nothing_are_refused(word: str) -> None:
    with pytest.raises(UsageError):
        parse(word)


def test_a_file_is_a_log_and_a_directory_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.log").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    assert (parse("train.log").kind, parse("train.log").value) == ("log", str((tmp_path / "train.log").resolve()))
    assert parse(str(tmp_path / "link")).value == str((tmp_path / "real").resolve()), "the name the kernel will show"
    assert parse(".").kind == "run_dir"


def test_a_number_is_a_pid_even_where_a_file_has_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "77").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert parse("77").kind == "pid"
