"""Who else hears of a run: each listener with its real package, offline; one that fails takes nothing with it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sqlite3
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from recorded import end_all, start

from eyas.record.sinks import __main__ as sinks
from eyas.record.sinks.scalars import scalars

BODY = 'rec.validation({"loss": 1.5, "accept_length": 1.3}, "validation")'


@pytest.fixture(autouse=True)
def ended_at_the_end() -> Iterator[None]:
    yield
    end_all()


def test_figures_have_the_names_that_trackers_show() -> None:
    e = {"event": "step", "time": 1.0, "rank": 0, "step": 3, "loss": 2.5, "accuracy": [0.5, 0.25], "epoch": "1/2"}
    assert scalars(e) == {"train/loss": 2.5, "train/accuracy/0": 0.5, "train/accuracy/1": 0.25}
    assert scalars({"event": "validation", "accept_length": 1.3}) == {"validation/accept_length": 1.3}
    assert scalars({"event": "warning", "step": 3}) == {}


def test_tensorboard_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    toy = start(tmp_path / "run", BODY, steps=40, sinks=["tensorboard"])
    assert toy.ended() == 0

    def written() -> dict[str, float]:
        found: dict[str, float] = {}
        for path in (toy.folder / "tensorboard").glob("events*"):
            raw, at = path.read_bytes(), 0
            while at + 12 <= len(raw):
                size = int.from_bytes(raw[at : at + 8], "little")
                event = Event.FromString(raw[at + 12 : at + 12 + size])
                found.update({v.tag: v.simple_value for v in event.summary.value if v.HasField("simple_value")})
                at += 16 + size
        return found

    # The last step's loss: files are flushed after the run's end, some figures before others.
    found = toy.until(lambda: written() if written().get("train/loss") == pytest.approx(2.0 - 0.039) else {})
    assert found["validation/loss"] == 1.5


def test_prometheus_is_answered_also_while_the_run_is_stopped(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    toy = start(tmp_path / "run", steps=100_000, sinks=[f"prometheus={port}"])

    def fetched() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    try:
        assert 'eyas_steps{rank="0"} 100000.0' in toy.until(fetched)
        os.kill(toy.process.pid, signal.SIGSTOP)
        stopped = fetched()
        assert (
            'eyas_read_bytes_total{rank="0"}' in stopped and 'eyas_phase_seconds{phase="forward",rank="0"}' in stopped
        )
    finally:
        toy.process.kill()
        toy.ended()


def test_a_message_is_sent_at_a_bad_step_and_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("apprise")
    heard: list[Any] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"notify=json://127.0.0.1:{server.server_port}/hook"
    toy = start(tmp_path / "run", "os.kill(os.getpid(), 9)", sinks=[url])
    toy.ended()
    toy.until(lambda: heard)
    server.shutdown()
    assert heard[-1]["title"] == "eyas: run has failed"
    assert "was killed by SIGKILL, at step 30/300" in heard[-1]["message"]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", BODY, steps=40, sinks=["wandb=toys"], env={"WANDB_MODE": "offline"})
    assert toy.ended() == 0
    toy.until(lambda: [p for p in toy.folder.glob("wandb/offline-run-*/*.wandb") if b"accept_length" in p.read_bytes()])
    assert toy.events("warning") == []


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio(tmp_path: Path) -> None:
    toy = start(tmp_path / "run", BODY, steps=40, sinks=["trackio=toys"], env={"TRACKIO_DIR": str(tmp_path / "t")})
    assert toy.ended() == 0

    def logged() -> bool:
        for path in (tmp_path / "t").rglob("*.db"):
            with sqlite3.connect(path) as database:
                rows = database.execute("select metrics from metrics").fetchall()
            if any("accept_length" in str(row) for row in rows):
                return True
        return False

    toy.until(logged, 60)
    assert toy.events("warning") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "raise ImportError('no such thing')",
            "wandb needs a package that is not installed (pip install 'eyas[wandb]')",
        ),
        ("def init(**_): raise SystemExit('no')", "wandb failed: SystemExit: no"),
    ],
)
def test_a_tracker_that_fails_is_told_of_once_and_stops_nothing(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "wandb.py").write_text(text)
    import eyas

    paths = f"{tmp_path}:{Path(eyas.__file__).parents[1]}"
    toy = start(tmp_path / "run", steps=300, sinks=["wandb=toys"], env={"PYTHONPATH": paths})
    assert toy.ended() == 0
    (line,) = [line for line in toy.lines() if "wandb" in line]
    assert line.startswith(f"warning: {said}") and line.endswith("; the run goes on without it")
    assert toy.events("end")[0]["how"] == "done"


def test_a_sink_that_was_slow_and_then_fails_is_told_of_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    goes_on = threading.Event()

    class Sink:
        def event(self, _e: dict[str, Any]) -> None:
            goes_on.wait(10)
            raise ConnectionError("gone")

    monkeypatch.setattr(sinks, "make", lambda _spec, _folder: Sink())
    monkeypatch.setattr(sinks, "SLOW", 0.0)
    feed = sinks.Feed("notify=json://host", tmp_path, said.append)
    feed.put({"event": "end"})
    while not said:
        feed.check()
    goes_on.set()
    feed.thread.join(10)
    assert said == [
        "notify has not answered for 0 s; the run does not wait for it",
        "notify failed: ConnectionError: gone; the run goes on without it",
    ]
