"""What is said of a disk that refuses, and whether a folder takes files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.files import check_figures, check_unused, check_writable, refusal, same_place, write_json, write_whole


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "No space left: free some, or name another folder"),
        (RuntimeError("write: No space left on device"), "No space left: free some, or name another folder"),
        (
            PermissionError(errno.EACCES, "Permission denied", "ro/.e.29956"),
            "Permission denied: name another folder, or change this one's permissions",
        ),
    ],
)
def test_only_a_full_disk_is_told_to_be_made_room_on(error: Exception, words: str) -> None:
    assert refusal(error) == words


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "--output-dir a/b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EyasError, match=r"^--output-dir x cannot be written: Not a directory$"):
        check_writable(tmp_path / "file" / "b", "--output-dir x")
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


def test_a_link_stays_one_and_what_is_no_file_is_written_into(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"said")
    assert os.read(reader, 10) == b"said" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_a_folder_that_cannot_be_looked_into_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300)
    with pytest.raises(EyasError) as raised:
        check_unused(folder, "run.yaml")
    assert str(raised.value).startswith(f"{folder} cannot be written: File name too long: name another folder")


def test_a_link_that_leads_back_to_itself_is_refused_in_one_line(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert same_place(loop, loop) and not same_place(loop, tmp_path)
    with pytest.raises(EyasError, match=r"--output .*loop cannot be written: Too many levels of symbolic links"):
        check_figures(loop)
    with pytest.raises(EyasError, match=r"cannot write .*loop: Too many levels of symbolic links"):
        write_json(loop, {})


@pytest.mark.parametrize("inside", ["start", "checkpoints", "state/step-000010", "record"])
def test_what_a_run_or_a_store_keeps_for_itself_takes_nobody_elses_files(tmp_path: Path, inside: str) -> None:
    for name, what in (("run.yaml", "a training run"), ("manifest.json", "a store")):
        (tmp_path / what).mkdir()
        (tmp_path / what / name).write_text("{}")
        with pytest.raises(EyasError, match=f"is part of {what} "):
            check_unused(tmp_path / what / inside, "vocab.json")
    (tmp_path / "mine").mkdir()
    check_unused(tmp_path / "mine" / inside, "vocab.json")
