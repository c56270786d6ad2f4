"""The command line: what every command refuses before it does anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import typer

from eyas.cli import app
from eyas.config import load_config
from eyas.errors import EyasError
from eyas.record import run as record
from eyas.store.remote import check_local, folder_of

# What is only read. A path that is not named here is written to.
READ = {
    "data", "data_dir", "prepared", "vocab_mapping_dir", "config", "init_from", "checkpoint", "prompts", "folder",
    "folders", "against", "conversations",
}  # fmt: skip


def every_command() -> dict[str, Any]:
    """The click command of each command of eyas, by its words."""
    root = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found.update({f"{name} {n}": c for n, c in inner.items()} if inner else {name: command})
    return found


def paths(command: Any) -> list[Any]:
    return [p for p in command.params if isinstance(p.type, click.Path) or "Path" in type(p.type).__name__]


WRITTEN = [(name, p.name) for name, c in every_command().items() for p in paths(c) if p.name not in READ]


def test_the_commands_that_write_are_found() -> None:
    expected = {
        ("prepare", "output_dir"), ("capture", "output_dir"), ("vocab", "output_dir"), ("train", "output_dir"),
        ("train", "stage_dir"), ("eval", "output"), ("bench", "output"), ("export", "output_dir"), ("check", "fix"),
        ("import", "output_dir"), ("store merge", "output_dir"), ("store convert", "output_dir"), ("demo", "run_dir"),
    }  # fmt: skip
    assert expected <= set(WRITTEN)


@pytest.mark.parametrize(("name", "option"), WRITTEN)
@pytest.mark.parametrize("url", ["s3://bucket/out", "gs://bucket/out", "https://host/out"])
def test_a_url_to_write_to_is_refused(
    name: str, option: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = every_command()[name]
    chosen = next(p for p in command.params if p.name == option)
    given = [chosen.opts[0], url] if chosen.param_type_name == "option" else ["data", url]
    with pytest.raises(EyasError, match=f"^{url}: eyas reads from object stores and writes to folders: name a folder"):
        command.main(given, standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_a_url_in_a_settings_file_is_refused_as_the_flag_is(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: s3://bucket/run\n")
    with pytest.raises(EyasError, match="^s3://bucket/run: eyas reads from object stores and writes to folders"):
        load_config({"verifier_path": "V", "data_dir": "D"}, file)


def test_a_recorder_and_a_stage_refuse_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EyasError, match="^s3://bucket/run: "):
        record("s3://bucket/run")
    with pytest.raises(EyasError, match="^gs://other: "):
        folder_of("s3://bucket/store", "gs://other")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["out", "/data/s3:/x", "a:/x", "runs/a:b", ".cache"])
def test_a_folder_is_no_url(path: str) -> None:
    check_local(path)
