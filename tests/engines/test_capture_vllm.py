"""Capture through vLLM: the states of this process, prompts and answers in one pass, and nothing lost by a kill."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from enginelab import CONVERSATIONS, MAX_TOKENS, ROOT, TRAINED, Note

CAPTURE = """
import json, sys
from pathlib import Path
from eyas.capture.vllm import Answers, capture
from eyas.verifier import Verifier
job = json.loads(sys.argv[1])
answers = Answers(**job["answers"]) if job["answers"] else None
made = capture(Verifier(job["verifier"]), Path(job["prepared"]), Path(job["store"]), dtype="bf16", answers=answers,
               in_flight=job["in_flight"], engine_args=job["engine_args"])
Path(job["result"]).write_text(json.dumps(made))
"""


class Capture:
    """`eyas.capture.vllm.capture` in the engine's Python."""

    def __init__(self, start: Callable[..., Any], verifier: Any, work: Path) -> None:
        self.start, self.verifier, self.work = start, verifier, work

    def begin(
        self, prepared: Path, store: Path, answers: dict[str, Any] | None, in_flight: int, **engine_args: Any
    ) -> Any:
        """The running process; its lines go to log.txt."""
        job = {
            "verifier": str(self.verifier.path.absolute()),
            "prepared": str(prepared),
            "store": str(store),
            "answers": answers,
            "in_flight": in_flight,
            "engine_args": engine_args,
            "result": str(self.work / "result.json"),
        }
        return self.start(["-c", CAPTURE, json.dumps(job)], self.work / "log.txt")

    def __call__(self, *args: Any, **engine_args: Any) -> dict[str, Any]:
        """What `capture` returned, once it is done."""
        process = self.begin(*args, **engine_args)
        if process.wait():
            pytest.fail(f"capture ended with {process.returncode}:\n{self.log()[-4000:]}", pytrace=False)
        found: dict[str, Any] = json.loads((self.work / "result.json").read_text())
        return found

    def log(self) -> str:
        return (self.work / "log.txt").read_text(errors="replace")


@pytest.fixture
def capture_there(eyas_there: Callable[..., Any], verifier: Any, tmp_path: Path) -> Capture:
    return Capture(eyas_there, verifier, tmp_path)


def relative_error(a: Any, b: Any) -> float:
    """Of states [T, Ht]."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def compare(store: Path, verifier: Any, work: Path) -> tuple[float, float, int]:
    """(error of the auxiliary states, of the last one after the norm, rows) against capture in this process."""
    from eyas.capture.local import capture
    from eyas.evaluate.agreement import write_prepared
    from eyas.store.reader import StoreSource

    there = StoreSource(store)
    samples = [there.tokens(i) for i in range(len(there.ids))]
    write_prepared(work / "again", verifier, [(ids, int(np.argmax(mask))) for ids, mask in samples])
    capture(verifier, work / "again", work / "again-store", dtype="bf16")
    here = StoreSource(work / "again-store")
    number = {name: i for i, name in enumerate(here.ids)}
    assert there.manifest.layers == here.manifest.layers
    assert there.manifest.norm_side == here.manifest.norm_side == "before"
    assert there.manifest.fingerprint == here.manifest.fingerprint
    norm, aux, last, rows = verifier.final_norm(), 0.0, 0.0, 0
    for i in range(len(there.ids)):
        stop = int(there.lengths[i]) - 1  # the last generated token has no state of its own
        a, b = there.states(i)[:, :stop], here.states(number[f"sample-{i}"])[:, :stop]
        aux = max(aux, *(relative_error(a[k], b[k]) for k in range(3)))
        last = max(last, relative_error(norm(a[3].float()), norm(b[3].float())))
        rows += stop
    return aux, last, rows


def test_answers_and_their_states_come_from_one_pass(
    capture_there: Capture,
    verifier: Any,
    held_out: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    figures: dict[str, Any],
    note: Note,
) -> None:
    from eyas.prepare import prepare
    from eyas.store.reader import StoreSource

    prepare(verifier, [held_out], tmp_path / "prepared", max_seq_len=512, show=0)
    answers = {"max_new_tokens": MAX_TOKENS}
    capture_there(tmp_path / "prepared", tmp_path / "store", answers, len(prompts))
    source = StoreSource(tmp_path / "store", verifier.config, verifier.fingerprint)
    assert len(source.ids) == len(prompts)
    asked = sorted(map(tuple, prompts))
    got = sorted(tuple(ids[: int(np.argmax(mask))].tolist()) for ids, mask in map(source.tokens, range(len(prompts))))
    assert got == asked, "the prompts in the store are those that were asked"
    for i in range(len(prompts)):
        ids, mask = source.tokens(i)
        assert mask[int(np.argmax(mask)) :].all(), "all of the answer is trained"
        assert source.states(i).shape == (4, len(ids), verifier.config.hidden_size)

    aux, last, rows = compare(tmp_path / "store", verifier, tmp_path)
    figures["capture_rel_error"] = aux
    figures["capture_rel_error_last"] = last
    note(f"captured {rows} rows: auxiliary states within {aux:.2%} of this process, the last within {last:.2%}")
    assert aux < 0.01
    assert last < 0.05


def test_what_capture_costs(
    eyas_there: Callable[..., Any], verifier: Any, held_out: Path, tmp_path: Path, figures: dict[str, Any], note: Note
) -> None:
    """Two engines that take turns, so that what else the machine does falls on both. Measured, not held to a limit."""
    arguments = [str(ROOT / "bench" / "vllm_capture.py"), "--verifier", str(verifier.path.absolute())]
    arguments += ["--prompts", str(held_out), "--new-tokens", "48", "--turns", "5"]
    process = eyas_there([*arguments, "--output", str(tmp_path / "overhead.json")], tmp_path / "log.txt")
    assert process.wait() == 0, (tmp_path / "log.txt").read_text()[-2000:]
    found = json.loads((tmp_path / "overhead.json").read_text())
    assert len(found["capture"]) == len(found["plain"]) == 5
    figures["capture_overhead"] = found["overhead"]
    note((tmp_path / "log.txt").read_text().splitlines()[-1])


def test_a_kill_loses_nothing_and_the_rerun_completes(
    capture_there: Capture, verifier: Any, tmp_path: Path, note: Note
) -> None:
    from eyas.prepare import prepare
    from eyas.store.reader import StoreSource

    lines = CONVERSATIONS.read_text().splitlines()[TRAINED][:120]
    (tmp_path / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    prepare(verifier, [tmp_path / "conversations.jsonl"], tmp_path / "prepared", max_seq_len=512, show=0)
    store = tmp_path / "store"
    # Prompts in pieces of 128 tokens: the states of chunks must come together in the cache.
    settings: dict[str, Any] = {"max_num_batched_tokens": 128}
    process = capture_there.begin(tmp_path / "prepared", store, None, 2, **settings)
    journal = store / "journal-vllm0.jsonl"
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") >= 3):
        time.sleep(0.05)
    assert process.poll() is None, f"it was over before it could be killed:\n{capture_there.log()[-2000:]}"
    process.kill()
    process.wait()
    before = StoreSource(store, verifier.config, verifier.fingerprint)
    assert 3 <= len(before.ids) < len(lines)
    for i in range(len(before.ids)):
        before.states(i)  # raises where a checksum is wrong

    made = capture_there(tmp_path / "prepared", store, None, 2, **settings)
    after = StoreSource(store, verifier.config, verifier.fingerprint)
    assert made["samples"] == len(after.ids) == len(lines)
    assert made["captured_samples"] == len(lines) - len(before.ids)
    assert not after.skipped
    aux, last, _ = compare(store, verifier, tmp_path)
    note(f"killed after {len(before.ids)} of {len(lines)} samples, completed; within {aux:.2%} and {last:.2%}")
    assert aux < 0.01
    assert last < 0.05


def test_a_server_that_somebody_started_writes_the_store(
    eyas_there: Callable[..., Any], verifier: Any, held_out: Path, tmp_path: Path, note: Note
) -> None:
    """eyas says how to start it; then the client, which has no vLLM, asks over HTTP and finds the states."""
    from eyas.capture.vllm import Answers, capture
    from eyas.errors import EyasError
    from eyas.prepare import prepare
    from eyas.store.reader import StoreSource

    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in held_out.read_text().splitlines()[:8]))
    prepare(verifier, [few], tmp_path / "prepared", max_seq_len=512, show=0)
    store, url = tmp_path / "store", f"http://127.0.0.1:{free_port()}/v1"
    how: dict[str, Any] = {"dtype": "bf16", "answers": Answers(16), "in_flight": 8, "url": url}
    with pytest.raises(EyasError, match="is the server up") as raised:
        capture(verifier, tmp_path / "prepared", store, **how)
    said, _, command = str(raised.value).partition("\n")
    assert said.endswith("run this command again:")
    program, *arguments = shlex.split(command)
    assert program == "python"
    arguments += ["--port", url.rpartition(":")[2].removesuffix("/v1"), "--host", "127.0.0.1"]
    server = eyas_there(arguments, tmp_path / "log.txt", new_session=True)
    started = time.monotonic()
    try:
        while server.poll() is None and not answers_at(url) and time.monotonic() - started < 300:
            time.sleep(0.5)
        assert server.poll() is None, (tmp_path / "log.txt").read_text()[-4000:]
        took = time.monotonic() - started
        made = capture(verifier, tmp_path / "prepared", store, **how)
        again = capture(verifier, tmp_path / "prepared", store, **how)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    source = StoreSource(store, verifier.config, verifier.fingerprint)
    assert made["samples"] == len(source.ids) == 8
    assert again["captured_samples"] == 0
    aux, last, rows = compare(store, verifier, tmp_path)
    note(f"a server ({took:.0f} s to start) wrote {rows} rows, within {aux:.2%} and {last:.2%}")
    assert aux < 0.01
    assert last < 0.05


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def answers_at(url: str) -> bool:
    """Whether a server is up."""
    from eyas.api import Api
    from eyas.errors import EyasError

    try:
        return bool(Api(url).model)
    except EyasError:
        return False
