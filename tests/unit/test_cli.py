"""The command line: what every command refuses before it does anything, and that the docs know every option."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

from eyas.cli import app
from eyas.config import load_config
from eyas.errors import EyasError
from eyas.record import run as record
from eyas.store.remote import check_local, folder_of
from eyas.why.__main__ import main as why

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
    """The parameters of a command that are paths, or lists of them."""
    hints = get_type_hints(inspect.unwrap(command.callback))
    return [p for p in command.params if Path in (hints.get(p.name), *get_args(hints.get(p.name)))]


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
    with pytest.raises(
        EyasError, match=f"^{re.escape(url)}: eyas reads from object stores and writes to folders: name a"
    ):
        command.main(given, standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


def test_a_url_in_a_settings_file_is_refused_as_the_flag_is(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: s3://bucket/run\n")
    with pytest.raises(EyasError, match=r"^s3://bucket/run: eyas reads from object stores and writes to folders"):
        load_config({"verifier_path": "V", "data_dir": "D"}, file)


def test_a_recorder_and_a_stage_refuse_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EyasError, match=r"^s3://bucket/run: "):
        record("s3://bucket/run")
    with pytest.raises(EyasError, match=r"^gs://other: "):
        folder_of("s3://bucket/store", "gs://other")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["out", "/data/s3:/x", "a:/x", "exp:/x", "runs/a:b", ".cache"])
def test_a_folder_is_no_url(path: str) -> None:
    check_local(path)


# -- docs/commands.md --------------------------------------------------------------------------------------------------

DOCS = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def told(command: str) -> set[str]:
    """The options that the docs name where they treat a command, and where they treat all."""
    parts = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", DOCS, flags=re.MULTILINE)}
    return set(FLAG.findall(parts[f"eyas {command.split()[0]}"] + parts["What all commands share"]))


def options(name: str, command: Any, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options of a command; `why` and `ps` read their own words, by argparse."""
    if name in ("why", "ps"):
        with pytest.raises(SystemExit):
            why(["--help"] if name == "why" else ["ps", "--help"])
        return set(FLAG.findall(capsys.readouterr().out)) - {"--help"}
    named = [o for p in command.params if p.param_type_name == "option" for o in (*p.opts, *p.secondary_opts)]
    return {o for o in named if o.startswith("--")} - {"--help"}


@pytest.mark.parametrize("name", every_command())
def test_every_option_is_in_the_docs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = options(name, every_command()[name], capsys)
    assert found
    assert found - told(name) == set()


def test_the_docs_name_no_option_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    known = set().union(*(options(name, command, capsys) for name, command in every_command().items()))
    lines = [line for line in DOCS.splitlines() if "sglang.launch_server" not in line and "vllm serve" not in line]
    assert {flag for line in lines for flag in FLAG.findall(line)} - known <= {
        "--help",
        "--x",
    }  # the second stands for any
