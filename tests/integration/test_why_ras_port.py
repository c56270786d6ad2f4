"""The RAS port of a real target: whose it is, and that nobody waits for it for ever."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from whylab import look, running

from eyas.why.ras import read_ras

REPORT = "NCCL version 2.27.5 compiled with CUDA 12.9\n\nErrors\n======\n\nWarnings\n========\n"
ANSWERS = f"""
import socket, threading, time
s = socket.create_server(("127.0.0.1", int(os.environ["NCCL_RAS_ADDR"].split(":")[1])))
def serve():
    while True:
        c, _ = s.accept()
        c.recv(4096)
        c.sendall(b"SERVER PROTOCOL 2\\nOK\\n" + {REPORT.encode()!r})
        c.close()
threading.Thread(target=serve, daemon=True).start()
ready()
time.sleep(600)
"""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_report_from_the_target_itself_is_its_own(port: int) -> None:
    with running(ANSWERS, env={**os.environ, "NCCL_RAS_ADDR": f"localhost:{port}"}) as p:
        snap = look(p.pid)
    assert snap["nccl"]["ras"] == {"port": port, "status": "ok", "text": REPORT, "ours": True}
    assert read_ras(snap) is not None


def test_another_jobs_port_that_hangs_costs_no_more_than_the_deadline(port: int) -> None:
    env = {**os.environ, "NCCL_RAS_ADDR": f"localhost:{port}"}
    with socket.create_server(("127.0.0.1", port)) as hung:
        held: list[socket.socket] = []
        threading.Thread(target=lambda: held.append(hung.accept()[0]), daemon=True).start()
        with running("ready()\nimport time\ntime.sleep(600)", env=env) as p:
            began = time.monotonic()
            snap = look(p.pid)
            assert time.monotonic() - began < 15  # 4 s on a free machine
    assert held
    assert snap["nccl"]["ras"]["status"] == "timed_out" and snap["nccl"]["ras"]["ours"] is False
    assert snap["probes_timed_out"] == [] and snap["errors"] == []
    assert len(snap["samples"]) == 3
    assert read_ras(snap) is None
