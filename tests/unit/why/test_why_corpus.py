"""The judge against the snapshot corpus: public cases, taxonomy classes, and healthy runs that look suspicious."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.why.answer import render, to_json
from eyas.why.judge import judge
from eyas.why.redact import redact

CORPUS = Path(__file__).parents[2] / "faults" / "corpus"
ENTRIES: list[dict[str, Any]] = [json.loads(p.read_text("utf-8")) for p in sorted(CORPUS.glob("*.json"))]
HARMLESS = ("healthy", "quiet", "slow", "finished")


def named(entry: dict[str, Any]) -> str:
    return f"{entry['case']}: {entry['title']}"


def test_corpus_is_there() -> None:
    assert len(ENTRIES) >= 130
    assert sum(e["healthy"] for e in ENTRIES) >= 25


@pytest.mark.parametrize("entry", ENTRIES, ids=named)
def test_verdict_or_runner_up_is_right(entry: dict[str, Any]) -> None:
    found = judge(entry["snapshot"])
    named_verdicts = {found.verdict, found.runner.verdict if found.runner else None}
    assert named_verdicts & set(entry["expect"]), [(c.verdict, c.score) for c in found.cases[:4]]


def test_nine_of_ten_verdicts_are_right() -> None:
    right = sum(judge(e["snapshot"]).verdict in e["expect"] for e in ENTRIES)
    assert right >= 0.95 * len(ENTRIES)


def _threads(snap: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for sample in snap["samples"]:
        for proc in sample["procs"].values():
            yield proc
            yield from proc["threads"].values()


def as_seen(snap: dict[str, Any]) -> dict[str, Any]:
    return snap


def without_system_calls(snap: dict[str, Any]) -> dict[str, Any]:
    for thread in _threads(snap):
        thread["syscall"] = None
    return snap


def by_another_user(snap: dict[str, Any]) -> dict[str, Any]:
    for thread in _threads(snap):
        thread.update(syscall=None, wchan=None)
    for sample in snap["samples"]:
        for proc in sample["procs"].values():
            proc.update(io=None, fds={})
    for proc in snap["processes"].values():
        proc.update(environ=None, libs=[], stdin=None, stdout=None, stderr=None)
    return snap


def without_gpu_tool(snap: dict[str, Any]) -> dict[str, Any]:
    return {**snap, "gpu": {"status": "absent", "gpus": [], "processes": []}}


def without_power(snap: dict[str, Any]) -> dict[str, Any]:
    for gpu in snap["gpu"].get("gpus", []):
        for sample in gpu["samples"]:
            sample["power_w"] = None
    return snap


def without_log(snap: dict[str, Any]) -> dict[str, Any]:
    return {**snap, "logs": []}


def without_threads(snap: dict[str, Any]) -> dict[str, Any]:
    for sample in snap["samples"]:
        for proc in sample["procs"].values():
            proc["threads"] = {}
    return snap


def with_one_look(snap: dict[str, Any]) -> dict[str, Any]:
    return {**snap, "samples": snap["samples"][:1]}


@pytest.mark.parametrize(
    "seen",
    [as_seen, without_system_calls, by_another_user, without_gpu_tool,
     without_power, without_log, without_threads, with_one_look],
)  # fmt: skip
def test_no_harmless_run_is_called_stuck_or_failed(seen: Any) -> None:
    for entry in ENTRIES:
        if entry["healthy"] or all(v.split(".")[0] in HARMLESS for v in entry["expect"]):
            found = judge(seen(copy.deepcopy(entry["snapshot"])))
            assert found.state not in ("stuck", "failed"), (entry["case"], found.verdict, found.case.support)


def test_nothing_is_stuck_from_one_look() -> None:
    for entry in ENTRIES:
        assert judge(with_one_look(copy.deepcopy(entry["snapshot"]))).state != "stuck", entry["case"]


def test_redacted_snapshots_give_the_same_verdict_and_hide_names() -> None:
    for entry in ENTRIES:
        hidden = redact(entry["snapshot"])
        assert judge(hidden).verdict == judge(entry["snapshot"]).verdict, entry["case"]
        assert "kim" not in json.dumps(hidden) and "gpu7" not in json.dumps(hidden["meta"])


def test_every_answer_can_be_written_and_read() -> None:
    for entry in ENTRIES:
        found = judge(entry["snapshot"])
        answer = json.loads(json.dumps(to_json(found), allow_nan=False))
        text = render(found)
        assert text.splitlines()[0] == answer["sentence"]
        assert "{" not in answer["sentence"] and not any("{" in line for line in answer["next"] + answer["do_not"])
        if answer["state"] == "stuck":
            assert answer["next"] and answer["do_not"]
        assert set(answer["questions"]) == {"finished", "crashed", "stalled", "only_quiet"}
