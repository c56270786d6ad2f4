"""The founding case, live: a GPU at 0 % with 17.6 GB held, four workers, cold files, a log at its preamble."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from lab import founding
from lab.kit import Answer, Ask, Lab, Unable, ask, plain_python

NOBODY = 65534


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Lab, Ask]]:
    with Lab() as lab:
        try:
            yield lab, founding.start(lab)
        except Unable as reason:
            pytest.skip(str(reason))


def check(answer: Answer, visible: bool = True) -> None:
    found = answer.json
    assert found["state"] == "slow", (found["verdict"], found["sentence"])
    assert found["verdict"] == "slow.data.disk-cold"
    said = {key: q["answer"] for key, q in found["questions"].items()}
    assert said["finished"] == said["crashed"] == said["stalled"] == "no"
    assert "alive" in found["questions"]["crashed"]["evidence"]
    text = str(found)
    if not visible:
        return
    data = found["data"]
    assert all("data_91" in path and path.endswith(".pt") for path in data["files"]) and data["files"]
    assert "4 worker" in text
    assert 1e6 < max(data["read_bytes_per_s"], data["offset_bytes_per_s"]) < 3 * founding.RATE
    assert data["cached"] is not None and data["cached"] < 0.9
    assert data["will_warm_up"] is False  # 1,200 files of 100 MB
    assert data["full_pass_s"] > 600  # time for the epoch at this rate
    silence = found["silence"]
    assert silence["reason"] not in ("unknown", None) and silence["sentence"], silence
    assert any("data_91" in link["words"] for link in found["chain"])


def test_the_answer_names_the_disk(started: tuple[Lab, Ask]) -> None:
    answer = ask(started[1])
    check(answer)
    assert answer.code == 1
    assert answer.took < 5 if os.getloadavg()[0] < 3 else answer.took < 10


def test_the_gpu_is_in_the_evidence(started: tuple[Lab, Ask]) -> None:
    evidence = str(ask(started[1]).json["evidence"])
    assert "0 % busy" in evidence and "17.6 GB" in evidence


def test_the_same_over_ssh(started: tuple[Lab, Ask]) -> None:
    lab, question = started
    try:
        env = lab.sshd(question.env["PATH"])
    except Unable as reason:
        pytest.skip(str(reason))
    answer = ask(Ask(f"localhost:{question.target}", env), timeout=20)
    assert answer.json, answer.stderr
    check(answer)
    assert answer.wall < 8 if os.getloadavg()[0] < 3 else answer.wall < 20


def test_seen_by_another_user(started: tuple[Lab, Ask]) -> None:
    """Somebody else's process, without privileges: less is seen, and it is said what."""
    try:
        plain_python()
    except Unable as reason:
        pytest.skip(str(reason))
    question = Ask(started[1].target, started[1].env, user=NOBODY)
    answer = ask(question)
    assert answer.state not in ("stuck", "failed"), answer.json["sentence"]
    assert answer.json["not_visible"]


def test_the_owner_without_privileges() -> None:
    try:
        python, paths = plain_python()
        with Lab() as lab:
            question = founding.start(lab, files=40, uid=NOBODY, python=python, paths=os.pathsep.join(paths))
            answer = ask(Ask(question.target, question.env, user=NOBODY))
    except Unable as reason:
        pytest.skip(str(reason))
    found = answer.json
    assert found["verdict"] == "slow.data.disk-cold", found["sentence"]
    assert found["data"]["will_warm_up"] is True  # 4 GB
    assert found["data"]["files"]
