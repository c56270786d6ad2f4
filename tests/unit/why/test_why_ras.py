"""NCCL RAS: its text as facts, and a server that answers, is slow, or hangs."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.why import probe
from eyas.why.judge import judge
from eyas.why.ras import parse, read_ras

CORPUS = Path(__file__).parents[2] / "faults" / "corpus"
HEAD = """NCCL version 2.27.5 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {0}

"""
HEALTHY = HEAD.format("     OK")
BEHIND = (
    HEAD.format("MISMATCH")
    + """Errors
======

Warnings
========

#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  31 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 7 managed by process 4249 on node 10.0.0.1

"""
)
SEVERAL = (
    HEAD.format("MISMATCH")
    + """Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different status
  31 ranks have status RUNNING
  Rank 4 has status ABORT -- GPU 4 managed by process 99 on node 10.0.0.2
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
  Rank 31 has not launched any operations -- [process information not found]
"""
)
DEAD = (
    HEAD.format("INCOMPLETE")
    + """Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487990 on node 172.16.64.213 managing GPUs 6,7

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213

#0-0 (cf264af53edbe986) ERROR
  Asynchronous error on 1 rank
  Rank 3 reported Unhandled system error -- GPU 3 managed by process 77 on node 172.16.64.210
"""
)


def test_a_healthy_job_in_numbers() -> None:
    ras = parse(HEALTHY)
    assert (ras.version, ras.processes, ras.gpus) == ("2.27.5", 32, 32)
    assert ras.groups == [{"comms": 1, "ranks": 32, "status": "RUNNING", "errors": "OK"}]
    assert ras.mismatch is None and not (ras.dead_count or ras.missing_count or ras.errors)


def test_one_rank_behind_is_named_with_its_count_process_and_node() -> None:
    found = parse(BEHIND).mismatch
    assert found is not None
    assert found.counts == {64: 31, 60: 1} and found.spread == 4
    assert [(r.rank, r.count, r.pid, r.node) for r in found.odd] == [(7, 60, 4249, "10.0.0.1")]
    assert found.words == (
        "AllReduce operations of communicator #0-0 (78db921d1c117b4a): 31 ranks at 64, 1 rank at 60;"
        " rank 7 (process 4249 on 10.0.0.1) behind"
    )


def test_ranks_that_share_a_count_and_one_that_launched_nothing() -> None:
    ras = parse(SEVERAL)
    assert ras.timeouts == 2
    (found,) = ras.mismatches
    assert found.counts == {6650: 26, 6649: 6, 0: 1}
    assert [(r.rank, r.count) for r in found.named] == [(0, 6649), (2, 6649), (31, 0)]
    assert found.words.endswith("rank 31 apart")


def test_one_rank_ahead_is_not_called_behind() -> None:
    text = BEHIND.replace("31 ranks have launched up to operation 64", "31 ranks have launched up to operation 59")
    found = parse(text).mismatch
    assert found is not None and found.words.endswith("rank 7 (process 4249 on 10.0.0.1) ahead")


def test_dead_and_missing_processes_and_errors() -> None:
    ras = parse(DEAD)
    assert (ras.dead_count, ras.missing_count) == (1, 1)
    assert [(p.pid, p.gpus) for p in ras.dead] == [(3487990, "6,7")]
    assert [p.pid for p in ras.missing] == [3487984]
    assert [r.rank for r in ras.missing_ranks] == [21]
    assert ras.gone_words == "1 considered dead: process 3487990 on 172.16.64.213 (GPU 6,7)"
    assert any("Rank 3 reported Unhandled system error" in e for e in ras.errors)


@pytest.mark.parametrize("text", [HEALTHY, BEHIND, SEVERAL, DEAD])
def test_any_part_of_a_report_can_be_parsed(text: str) -> None:
    for end in range(0, len(text), 7):
        parse(text[:end])


def test_a_report_of_another_job_does_not_count() -> None:
    raw = {"status": "ok", "text": BEHIND}
    assert read_ras({"nccl": {"ras": raw}}) is not None
    assert read_ras({"nccl": {"ras": {**raw, "ours": False}}}) is None
    assert read_ras({"nccl": {"ras": {"status": "ok", "text": "HTTP/1.1 400 Bad Request"}}}) is None


def _collective() -> dict[str, Any]:
    entries = [json.loads(p.read_text("utf-8")) for p in sorted(CORPUS.glob("*.json"))]
    found = next(
        e["snapshot"] for e in entries if e["expect"] == ["stuck.collective"] and e["snapshot"]["job"]["ranks"]
    )
    return dict(copy.deepcopy(found))


def test_a_mismatch_is_evidence_for_the_judge_and_a_mere_word_is_not() -> None:
    snap = _collective()
    snap["nccl"]["ras"] = {"status": "ok", "text": BEHIND}
    said = [e.derived for c in judge(snap).cases for e in c.support if e.source == "NCCL RAS"]
    assert said == ["NCCL RAS: ranks out of step in " + (parse(BEHIND).mismatch or pytest.fail("none")).words]
    snap["nccl"]["ras"] = {"status": "ok", "text": HEALTHY + "0 ranks missing, none dead, no mismatch"}
    assert not [e for c in judge(snap).cases for e in c.support if e.source == "NCCL RAS"]


@contextlib.contextmanager
def server(answer: Any) -> Iterator[tuple[int, list[bytes]]]:
    """A TCP server that takes what is asked, then does as `answer(connection)` says."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)
    over = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                while b"STATUS\n" not in b"".join(heard):
                    heard.append(connection.recv(4096))
                answer(connection, over)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], heard
    finally:
        over.set()
        listener.close()
        thread.join(5)


def test_it_speaks_the_protocol_and_gets_the_report() -> None:
    def answer(connection: socket.socket, _over: threading.Event) -> None:
        for part in (b"SERVER PROTOCOL 2\n", b"OK\n", BEHIND[:400].encode(), BEHIND[400:].encode()):
            connection.sendall(part)
            time.sleep(0.02)

    with server(answer) as (port, heard):
        found = probe.ask_ras(port)
    assert b"".join(heard).splitlines() == [b"CLIENT PROTOCOL 2", b"TIMEOUT 1", b"VERBOSE STATUS"]
    assert found == {"port": port, "status": "ok", "text": BEHIND, "ours": None}


def test_one_that_never_answers_is_left_at_the_deadline() -> None:
    with server(lambda _c, over: over.wait(30)) as (port, _):
        began = time.monotonic()
        found = probe.ask_ras(port, 0.5)
        assert time.monotonic() - began < 1.5
    assert (found["status"], found["text"]) == ("timed_out", None)


def test_one_that_drips_is_left_too_and_what_came_is_kept() -> None:
    def drip(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"SERVER PROTOCOL 2\nOK\n" + HEALTHY.encode())
        while not over.wait(0.05):
            connection.sendall(b" ")

    with server(drip) as (port, _):
        began = time.monotonic()
        found = probe.ask_ras(port, 0.6)
        assert time.monotonic() - began < 1.6
    assert found["status"] == "timed_out"
    ras = read_ras({"nccl": {"ras": found}})
    assert ras is not None and ras.processes == 32 and not ras.whole


def test_one_that_pours_is_cut() -> None:
    def pour(connection: socket.socket, over: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                connection.sendall(b"x" * 65536)

    with server(pour) as (port, _):
        found = probe.ask_ras(port)
    assert 262144 <= len(found["text"]) < 300_000


def test_nobody_there_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert probe.ask_ras(port)["status"] == "refused"
