"""Flight Recorder dumps: read as data or not at all, and compared across ranks."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.why import probe
from eyas.why.judge import facts_of, judge
from eyas.why.recorder import Finding, read_recorder

NOW = 1764425245.0


def entry(seq: int, op: str = "all_reduce", state: str = "completed", **more: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "step", "filename": "/home/kim/train.py", "line": 88},
        ],
        "record_id": seq,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1795974878341234321,
        "input_sizes": [[1000]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1000]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }


def dump(*entries: dict[str, Any], ranks: str = "[0, 1, 2, 3]", **more: Any) -> dict[str, Any]:
    done = [e["collective_seq_id"] for e in entries if e["state"] == "completed"]
    status = {"last_enqueued_collective": entries[-1]["collective_seq_id"], "last_started_collective": -1}
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": {**status, "last_completed_collective": max(done, default=-1)}},
        "entries": list(entries),
        **more,
    }


def compare(*dumps: dict[str, Any], age: float = 300.0, idle: float = 900.0) -> Finding | None:
    listed = [
        {"path": f"/tmp/nccl_trace_rank_{rank}", "rank": rank, "mtime": NOW - age, "kind": "flight_recorder",
         "flight": {**probe.flight_facts(probe.plain_pickle(pickle.dumps(d))), "status": "ok"}}
        for rank, d in enumerate(dumps)
    ]  # fmt: skip
    f = facts_of({"meta": {"started": NOW}, "nccl": {"dumps": listed}, "logs": [{"path": "x", "age_s": idle}]})
    found = read_recorder(f)
    assert found is not None
    return found.first


BEFORE = [entry(n) for n in range(50, 57)]


def test_the_rank_that_did_not_come_is_named_with_the_call_it_made_last() -> None:
    waits = dump(*BEFORE, entry(57, "_allgather_base", "started"))
    found = compare(waits, waits, dump(*BEFORE), waits)
    assert found is not None
    assert (found.kind, found.seq, found.odd) == ("behind", 57, (2,))
    assert found.words == (
        "rank 2 did not make _allgather_base no. 57 (at train.py:88 step) of group default_pg, in which ranks 0, 1, 3"
        " wait: the last call of rank 2 there was all_reduce no. 56 (at train.py:88 step)"
    )


def test_a_rank_in_another_call_is_the_odd_one() -> None:
    most = dump(*BEFORE, entry(57, "reduce_scatter_tensor", "started"))
    found = compare(most, dump(*BEFORE, entry(57, "all_reduce", "started")), most, most)
    assert found is not None
    assert (found.kind, found.seq, found.odd) == ("mismatch", 57, (1,))
    assert "ranks 0, 2, 3 in reduce_scatter_tensor no. 57" in found.words
    assert "rank 1 in all_reduce no. 57" in found.words


def test_another_size_of_the_same_call_is_a_mismatch_but_not_where_sizes_may_differ() -> None:
    def pair(op: str) -> Finding | None:
        most = dump(*BEFORE, entry(57, op, "started"))
        other = dump(*BEFORE, entry(57, op, "started", input_sizes=[[1001]]))
        return compare(most, most, most, other)

    found = pair("all_reduce")
    assert found is not None and (found.kind, found.odd) == ("sizes", (3,))
    assert "Float [[1001]]" in found.words
    found = pair("all_to_all")
    assert found is not None and found.kind == "same"


def test_two_against_two_blames_nobody() -> None:
    one, two = (dump(*BEFORE, entry(57, op, "started")) for op in ("all_reduce", "broadcast"))
    found = compare(one, one, two, two)
    assert found is not None and (found.kind, found.odd) == ("mismatch", ())


def test_a_rank_that_waits_in_another_group_is_followed_there() -> None:
    waits = dump(*BEFORE, entry(57, state="started"))
    away = dump(*BEFORE, entry(4, "broadcast", "started", process_group=("5", "tp"), pg_id=1))
    away["pg_config"]["5"] = {"name": "5", "desc": "tp", "ranks": "[1, 3]"}
    found = compare(waits, away, waits, waits)
    assert found is not None and (found.kind, found.odd, found.group) == ("behind", (1,), "default_pg")
    assert "rank 1 waits in broadcast no. 4 (at train.py:88 step) of group tp (5)" in found.words


def test_nothing_pending_is_no_finding_and_old_dumps_do_not_count() -> None:
    assert compare(*[dump(*BEFORE)] * 4) is None
    waits = dump(*BEFORE, entry(57, state="started"))
    assert compare(waits, dump(*BEFORE), age=300, idle=900) is not None
    assert compare(waits, dump(*BEFORE), age=300, idle=60) is None  # the log has moved since


def test_point_to_point_calls_and_coalesced_ones_are_not_compared() -> None:
    waits = dump(*BEFORE, entry(57, "a", "started"), entry(57, "b", "started"), entry(57, "send", is_p2p=True))
    other = dump(*BEFORE, entry(57, "b", "started"), entry(57, "a", "started"))
    found = compare(waits, other, waits, waits)
    assert found is not None and found.kind == "same"


class Boom:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/eyas-was-here",)


def write(path: Path, blob: bytes) -> dict[str, Any]:
    """The probe's answer on a dump with these bytes, from its child."""
    path.write_bytes(blob)
    dumps = probe.Dumps([str(path)[:-1]], time.time() - 60, os.getuid())
    listed, found = probe.collect("NCCL dumps", [0, 1], dumps.do, time.monotonic() + 10)
    assert [f["path"] for f in listed] == [str(path)]
    return dict(found)


@pytest.mark.parametrize(
    ("blob", "status", "says"),
    [
        (pickle.dumps(Boom(), 2), "refused", "posix.system"),
        (pickle.dumps({"entries": [Boom()]}), "refused", "posix.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "refused", "builtins.eval"),
        (b"(ibuiltins\nexec\n.", "refused", "builtins.exec"),
        (pickle.dumps({"entries": [], "x": {1, 2}}, 2), "refused", "__builtin__.set"),
        (b"Pname\n.", "refused", "outside"),
        (b"\x80\x02K\x01K\x02R.", "damaged", ""),  # a call of a number
        (b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.", "damaged", ""),  # a string of 4 EiB
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "damaged", "memory"),  # a memo of 2^31 places
        (b"{" + b"[" * 100_000, "damaged", ""),
        (b"rubbish", "damaged", ""),
        (pickle.dumps([1]), "damaged", "no Flight Recorder dump"),
        (pickle.dumps(dump(entry(1)))[:-40], "damaged", ""),
    ],
)
def test_what_is_not_plain_data_is_refused_or_called_damaged(
    tmp_path: Path, blob: bytes, status: str, says: str
) -> None:
    found = write(tmp_path / "trace_0", blob)
    assert found["status"] == status and says in found["error"], found
    assert "groups" not in found
    assert not Path("/tmp/eyas-was-here").exists()


def test_a_dump_of_somebody_else_a_link_and_a_giant_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps(dump(entry(1))))
    dumps = probe.Dumps([str(tmp_path / "trace_")], time.time() - 60, os.getuid())
    file = probe.nccl_dumps(dumps.patterns)[0]
    assert dumps.read(file)["status"] == "ok"
    assert dumps.read({**file, "uid": os.getuid() + 7})["status"] == "refused"
    assert dumps.read({**file, "size": probe.MAX_DUMP + 1})["status"] == "too_big"
    (tmp_path / "trace_1").symlink_to(path)
    assert [f["rank"] for f in probe.nccl_dumps(dumps.patterns)] == [0]
    assert dumps.read({**file, "path": str(tmp_path / "trace_1")})["status"] == "error"


def test_a_list_that_holds_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = probe.flight_facts({"entries": [entry(1, input_sizes=loop, frames=loop, profiling_name=loop), loop]})
    assert json.dumps(found)
    assert found["groups"][0]["calls"][0]["op"] is None


def test_a_full_buffer_of_2000_calls_is_read_in_a_moment() -> None:
    blob = pickle.dumps(dump(*[entry(n) for n in range(2000)], entry(2000, state="scheduled")))
    began = time.process_time()
    found = probe.flight_facts(probe.plain_pickle(blob))
    assert time.process_time() - began < 0.5
    calls = found["groups"][0]["calls"]
    assert (calls[0]["seq"], calls[-1]["seq"], calls[-1]["done"], calls[-2]["done"]) == (1977, 2000, False, True)


def test_the_pickles_of_torch_hold_no_names_of_code() -> None:
    """What `plain_pickle` allows is what such dumps are made of."""
    blob = pickle.dumps(dump(entry(1)), 2)
    assert not {o.name for o, _, _ in pickletools.genops(io.BytesIO(blob))} & {"GLOBAL", "STACK_GLOBAL", "REDUCE"}


def test_the_recorder_decides_between_ranks_that_all_wait() -> None:
    """Four ranks that look alike from outside; only the dumps tell which one did not come."""
    corpus = Path(__file__).parents[2] / "faults" / "corpus"
    snaps = [json.loads(p.read_text("utf-8")) for p in sorted(corpus.glob("*.json"))]
    snap = next(
        s["snapshot"]
        for s in snaps
        if "stuck.collective" in s["expect"] and len(s["snapshot"]["job"]["ranks"]) >= 4 and not s["snapshot"]["stacks"]
    )
    ranks = [r["rank"] for r in snap["job"]["ranks"]]
    mtime = snap["meta"]["started"] - 5
    waits, late = dump(*BEFORE, entry(57, state="started"), ranks=str(ranks)), dump(*BEFORE, ranks=str(ranks))
    snap["nccl"]["dumps"] = [
        {"path": f"/tmp/nccl_trace_rank_{r}", "rank": r, "mtime": mtime, "kind": "flight_recorder",
         "flight": {**probe.flight_facts(late if r == ranks[1] else waits), "status": "ok"}}
        for r in ranks
    ]  # fmt: skip
    found = judge(snap)
    assert found.verdict == "stuck.collective"
    assert any(
        "Flight Recorder" in e.source and f"rank {ranks[1]} did not make all_reduce no. 57" in e.derived
        for e in found.case.support
    )
    assert any(link["kind"] == "collective" for link in found.chain)
