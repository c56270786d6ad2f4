"""An index of many files is built by processes: what it holds does not depend on them, nor on their living."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_files import write

from eyas.store.foreign import founding, index, processes
from eyas.store.foreign.torchzip import Unreadable


@pytest.fixture
def folder(tmp_path: Path, on_policy: list[Any]) -> Path:
    """12 good files and two that are not."""
    made = write("founding", tmp_path / "d", on_policy)
    (made / "data_20.pt").write_bytes(b"")
    (made / "data_21.pt").write_bytes(b"no zip")
    return made


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, many: int) -> index.Index:
    monkeypatch.setattr(index, "MANY", many)
    monkeypatch.setattr(index, "_TOGETHER", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    return index._build(*founding.jobs(folder, founding.files(folder)), None)


def same(a: index.Index, b: index.Index) -> bool:
    return (a.names, a.files, a.broken) == (b.names, b.files, b.broken) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in index._ARRAYS
    )


def test_processes_find_what_threads_find(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*args: Any, **more: Any) -> Any:
        started.append(real(*args, **more))
        return started[-1]

    threads = build(folder, monkeypatch, 10**9)
    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    found = build(folder, monkeypatch, 1)
    assert same(found, threads)
    assert [name for name, _ in found.broken] == ["data_20.pt", "data_21.pt"]
    assert 1 <= len(started) <= 3
    assert all(child.poll() is not None for child in started)  # none is left


def test_a_killed_process_costs_nothing_but_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = build(folder, monkeypatch, 10**9)
    real = subprocess.Popen
    killed: list[int] = []

    def popen(*args: Any, **more: Any) -> Any:
        child = real(*args, **more)
        if len(killed) < 2:  # of three: one dies at once, one when it has been asked
            killed.append(child.pid)
            child.send_signal(signal.SIGKILL if len(killed) == 1 else signal.SIGTERM)
        return child

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    assert same(build(folder, monkeypatch, 1), threads)
    assert killed


def test_no_process_can_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = build(folder, monkeypatch, 10**9)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert same(build(folder, monkeypatch, 1), threads)


def test_an_interrupt_ends_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*args: Any, **more: Any) -> Any:
        started.append(real(*args, **more))
        return started[-1]

    def interrupted(*_args: Any, **_more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    monkeypatch.setattr(index, "_index_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(folder, monkeypatch, 1)
    assert started
    assert all(child.poll() is not None for child in started)


def test_the_processes_import_no_torch() -> None:
    program = "import sys, eyas.store.foreign.processes, eyas.store.foreign.founding, eyas.store.foreign.specforge"
    heavy = "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'pyarrow')))"
    subprocess.run([sys.executable, "-c", f"{program}\n{heavy}"], check=True)


def test_a_reason_is_a_sentence_and_another_error_is_not_hidden() -> None:
    def look(what: str) -> str:
        raise {"bad": Unreadable("is bad"), "gone": FileNotFoundError(2, "No such file")}.get(what, KeyError(what))

    assert processes.try_look(look, "bad") == "is bad"
    assert processes.try_look(look, "gone") == "cannot be read (No such file)"
    with pytest.raises(KeyError):
        processes.try_look(look, "else")
