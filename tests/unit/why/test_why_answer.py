"""The answer's schema against its documentation, and the claims on single rules."""

from __future__ import annotations

import base64
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from eyas.why import chain, ranks
from eyas.why.answer import EXIT, KEYS, STATES, exit_code, render, to_json
from eyas.why.judge import facts_of, judge
from eyas.why.redact import redact
from eyas.why.verdicts.words import VERDICTS, WORDS, state_of
from eyas.why.waits import classify, site_family

ROOT = Path(__file__).parents[3]
CORPUS = ROOT / "tests" / "faults" / "corpus"


def snapshot(case: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CORPUS / f"{case}.json").read_text("utf-8"))["snapshot"]
    return loaded


def test_every_key_and_every_verdict_is_documented() -> None:
    text = (ROOT / "docs" / "why.md").read_text("utf-8")
    answer = to_json(judge(snapshot("C00")))
    assert tuple(answer) == KEYS or set(answer) == set(KEYS)
    for key in KEYS:
        assert f"| `{key}` |" in text, key
    for verdict, words in WORDS.items():
        assert f"| `{verdict}` | {words.meaning} |" in text, verdict
    for state in STATES:
        assert f"`{state}`" in text
    for name in ("target", "progress", "data", "silence", "runner_up"):
        for key in answer[name]:
            assert f"`{key}`" in text, (name, key)
    assert answer["schema"] == "eyas.why/1"


def test_the_documented_example_is_what_the_tool_says() -> None:
    assert render(judge(snapshot("C00"))) in (ROOT / "docs" / "why.md").read_text("utf-8")


def test_exit_codes_follow_the_state() -> None:
    assert {state: exit_code(state) for state in STATES} == EXIT
    assert all(state_of(v) in STATES for v in VERDICTS)
    assert exit_code("nonsense") == 3


def test_founding_case_answers_the_four_questions() -> None:
    answer = to_json(judge(snapshot("C00")))
    assert [answer["questions"][q]["answer"] for q in ("finished", "crashed", "stalled", "only_quiet")] == [
        "no",
        "no",
        "no",
        "yes",
    ]
    assert answer["verdict"] == "slow.data.disk-cold" and "data_9142.pt" in answer["sentence"]
    assert answer["data"]["will_warm_up"] is False and answer["silence"]["reason"] == "rich-bar-on-file"


def test_wait_chain_reaches_the_device() -> None:
    links = judge(snapshot("C00")).chain
    assert [link["kind"] for link in links] == ["thread", "worker", "thread", "file", "mount"]
    assert "/data/hs/data_9142.pt at offset" in links[3]["words"] and "nvme1n1" in links[4]["words"]


def test_wait_chain_names_the_lock_holder_and_the_pipe_reader() -> None:
    assert "held by PID 3999" in judge(snapshot("C83")).chain[-1]["words"]
    assert any("reader is other 4100 (node)" in link["words"] for link in judge(snapshot("C88")).chain)


def test_the_odd_rank_is_named() -> None:
    assert "rank 2" in to_json(judge(snapshot("C51")))["sentence"]
    assert "rank 2" in to_json(judge(snapshot("C58")))["sentence"]
    split = ranks.split(facts_of(snapshot("C52")))
    assert split is not None and [p.rank for p in split.odd] == [0, 1, 2]
    assert "rank 5" in to_json(judge(snapshot("A10b")))["sentence"]


def test_any_forward_signal_clears_a_stuck_run() -> None:
    for case in ("D6", "C31", "C81", "C30", "C59"):
        snap = snapshot(case)
        size = snap["logs"][0]["size"]
        snap["logs"][0]["growth"] = [size - 200, size - 90, size]
        assert judge(snap).state != "stuck", case
    snap = snapshot("C31")
    for sample in snap["samples"]:
        sample["procs"]["4301"]["stat"]["utime"] += sample["t"] * 0.5
    assert judge(snap).state != "stuck"


def test_a_line_that_is_not_due_yet_clears_a_deadlock() -> None:
    snap = snapshot("D6")
    now = snap["meta"]["started"] + 3
    text = "".join(f"2025-11-29 {13 + i // 60:02d}:{i % 60:02d}:00 INFO step {i}/500 loss 1.0\n" for i in range(60))
    snap["logs"][0].update(
        mtime=now - 40,
        age_s=40,
        size=len(text),
        growth=[len(text)] * 3,
        tail={"offset": 0, "b64": base64.b64encode(text.encode()).decode()},
    )
    assert judge(snap).state != "stuck"


def test_a_process_that_is_no_training_is_named_and_answered() -> None:
    snap = snapshot("D6")
    snap["target"].update(ours=False, name="sshd")
    snap["processes"]["4242"].update(cmdline=["sshd:", "kim@pts/0"], comm="sshd", libs=[])
    snap["logs"] = []
    answer = to_json(judge(snap))
    assert answer["state"] != "stuck" and "not a training process" in answer["sentence"]


def test_empty_and_torn_snapshots_are_answered() -> None:
    assert to_json(judge({}))["state"] == "unknown"
    rng = random.Random(3)

    def tear(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: tear(v) for k, v in value.items() if rng.random() > 0.05}
        if isinstance(value, list):
            return [tear(v) for v in value if rng.random() > 0.05]
        return None if rng.random() < 0.05 else value

    for path in sorted(CORPUS.glob("*.json")):
        entry = json.loads(path.read_text("utf-8"))
        torn = tear(copy.deepcopy(entry["snapshot"]))
        torn["job"] = entry["snapshot"]["job"]  # which ranks there are is read as a whole or not at all
        found = judge(torn)
        assert render(found)
        if entry["healthy"]:
            assert found.state not in ("stuck", "failed"), (entry["case"], found.verdict)


@pytest.mark.parametrize(
    ("wchan", "family"),
    [
        ("futex_do_wait", "futex"), ("futex_wait_queue_me", "futex"),
        ("anon_pipe_read", "pipe-read"), ("pipe_write", "pipe-write"),
        ("poll_schedule_timeout.constprop.0", "poll"), ("do_epoll_wait", "epoll"),
        ("ep_poll", "epoll"), ("hrtimer_nanosleep", "sleep"),
        ("inet_csk_accept", "accept"), ("do_wait", "child"),
        ("locks_lock_inode_wait", "lock"), ("wait_for_partner", "fifo"),
        ("do_signal_stop", "stop"), ("folio_wait_bit_common", "disk"),
        ("rpc_wait_bit_killable", "nfs"), ("request_wait_answer", "fuse"),
        ("balance_dirty_pages", "writeback"), ("do_swap_page", "swap"),
        ("uvm_ioctl", "gpu"), ("kernel_clone", "vfork"),
        ("0", None), (None, None),
    ],
)  # fmt: skip
def test_wait_sites_of_several_kernels(wchan: str | None, family: str | None) -> None:
    assert site_family(wchan) == family


def test_what_the_descriptor_is_decides_a_read() -> None:
    assert classify("S", "wait_woken", {"name": "read", "fd": 0, "path": "/dev/pts/3", "kind": "tty"}).family == "tty"
    assert classify("S", "wait_woken", {"name": "recvfrom", "fd": 4, "kind": "socket"}).family == "socket"
    assert classify("S", None, None).family == "hidden"
    assert classify("D", None, None).family == "io"


def test_redaction_removes_tokens_and_keeps_lengths() -> None:
    snap = snapshot("C00")
    line = b"login as kim@example.org with hf_abcdefghijklmnop1234 from 10.1.2.33\n"
    snap["logs"][0].update(size=len(line), tail={"offset": 0, "b64": base64.b64encode(line).decode()})
    snap["processes"]["4242"]["cmdline"] = ["python", "train.py", "--api-key=sk-verysecretvalue99"]
    hidden = redact(snap)
    tail = base64.b64decode(hidden["logs"][0]["tail"]["b64"])
    assert len(tail) == len(line) and b"hf_" not in tail and b"kim" not in tail and b"10.1.2.33" not in tail
    assert "verysecret" not in json.dumps(hidden) and hidden["meta"]["redacted"] is True


def test_sizes_read_well() -> None:
    assert [chain.size(n) for n in (None, 5, 212e6, 1.5e9)] == ["?", "5 B", "212 MB", "1.5 GB"]
