"""Capture through vLLM, the part without an engine: how samples are cut at their answers, and what requests carry."""

from __future__ import annotations

import importlib.util
import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xxhash

from eyas.capture.vllm import Answers, Conversation, _conversation, _longest, _runs, check_vllm, request_params
from eyas.errors import EyasError
from eyas.prepare import Prepared
from eyas.record.record import Record


def prepared(mask: list[int]) -> Prepared:
    ids = np.arange(100, 100 + len(mask), dtype=np.int32)
    return Prepared({}, ["a"], [ids], [np.array(mask, bool)])


def cut(mask: list[int]) -> Conversation | None:
    return _conversation(prepared(mask), 0, answer=True)


def test_runs_of_a_mask() -> None:
    assert _runs(np.array([0, 0, 1, 1, 0], bool)) == [(0, 2, False), (2, 4, True), (4, 5, False)]
    assert _runs(np.array([1], bool)) == [(0, 1, True)]


def test_a_sample_as_it_is_keeps_all_its_tokens_and_trained_parts() -> None:
    c = _conversation(prepared([0, 0, 1, 1, 0, 1]), 0, answer=False)
    assert c is not None
    assert c.pieces[0].tolist() == [100, 101, 102, 103, 104, 105]
    assert c.trained == [(2, 4), (5, 6)]
    assert _longest(c, None) == 6


def test_a_sample_to_be_answered_is_cut_at_its_answers() -> None:
    c = cut([0, 0, 1, 1, 0, 0, 1, 0])  # what follows the last answer is asked by nobody
    assert c is not None
    assert [p.tolist() for p in c.pieces] == [[100, 101], [104, 105]]
    assert c.ends == [103, 106]
    assert _longest(c, Answers(max_new_tokens=10)) == 4 + 2 * 11


@pytest.mark.parametrize("mask", [[1, 1, 0, 1], [0, 0]])
def test_a_sample_without_a_prompt_or_without_an_answer_cannot_be_answered(mask: list[int]) -> None:
    assert cut(mask) is None


def test_a_request_carries_the_hash_of_its_tokens() -> None:
    sent = request_params("a", [1, 2, 3], [(1, 2)], answer=True)["eyas"]
    digest = xxhash.xxh3_64_hexdigest(np.array([1, 2, 3], "<i4").tobytes())
    assert sent == {"id": "a", "prompt": digest, "trained": [[1, 2]], "answer": True}


def test_without_vllm_one_line_says_which_python(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(EyasError, match="has no vLLM: install eyas"):
        check_vllm()


def test_an_answer_cut_short_gets_its_end_before_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of this test answers two tokens a turn and never ends an answer."""
    import eyas.capture.vllm as module

    class Engine:
        engine_core = None  # it has no scheduler in this process

        def __init__(self) -> None:
            self.asked: list[tuple[str, list[int], Any]] = []
            self.open: list[tuple[str, Any]] = []

        def add_request(self, name: str, prompt: dict[str, Any], sampling: Any) -> None:
            self.asked.append((name, list(prompt["prompt_token_ids"]), sampling))
            self.open.append((name, sampling))

        def step(self) -> list[Any]:
            name, sampling = self.open.pop(0)
            stored = {"eyas_stored": sampling["eyas"]["id"]} if sampling else None
            return [Output(name, stored)]

    class Output:
        finished = True

        def __init__(self, name: str, stored: Any) -> None:
            self.request_id, self.kv_transfer_params = name, stored
            self.outputs = [type("Text", (), {"token_ids": [7, 8], "finish_reason": "length"})()]

    def sampling(c: Conversation, _answers: Any) -> Any:
        last = c.turn == len(c.pieces) - 1
        return request_params(c.name, c.tokens, c.trained, True) if last else {}

    monkeypatch.setattr(module, "_sampling", sampling)
    c, engine = cut([0, 0, 1, 1, 0, 0, 1]), Engine()
    assert c is not None
    (stored,) = module._serve(engine, [c], Answers(max_new_tokens=2), 4, Record(None))
    assert [tokens for _, tokens, _ in engine.asked] == [[100, 101], [100, 101, 7, 8, 103, 104, 105]]
    assert stored.tokens == [100, 101, 7, 8, 103, 104, 105, 7, 8]
    assert stored.trained == [(2, 4), (7, 9)]
    assert engine.asked[1][2]["eyas"]["trained"] == [[2, 4]]


def test_a_sample_that_the_engine_did_not_keep_stops_the_capture() -> None:
    import eyas.capture.vllm as module

    class Engine:
        def add_request(self, *_args: Any) -> None: ...

        def step(self) -> list[Any]:
            text = type("Text", (), {"token_ids": [7], "finish_reason": "stop"})()
            told = {"eyas_error": "the engine was given other tokens"}
            return [
                type("Out", (), {"finished": True, "request_id": "1", "kv_transfer_params": told, "outputs": [text]})
            ]

    c = _conversation(prepared([0, 1]), 0, answer=False)
    assert c is not None
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EyasError, match="other tokens"):
        patch.setattr(module, "_sampling", lambda *_: {})
        list(module._serve(Engine(), [c], None, 4, Record(None)))


def test_the_store_of_one_engine_is_not_gone_on_with_by_another(tmp_path: Path) -> None:
    """Different engines round differently; a store is of one of them."""
    from eyas.capture.common import done_ids
    from eyas.store.layout import Manifest

    ours = Manifest("v", "f", 8, 4, 100, (1, 2, 3, 4), "before", extractor="eyas 1, transformers 5, bfloat16")
    ours.create(tmp_path)
    with pytest.raises(EyasError, match="extractor"):
        done_ids(tmp_path, Manifest(**{**ours.__dict__, "extractor": "eyas 1, vllm 0.32.0, bfloat16"}))


class Served(BaseHTTPRequestHandler):
    """A vLLM with the connector: answers 7 and 8 to everything."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._send({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Served.asked.append(body)
        wanted = body.get("kv_transfer_params")
        self._send(
            {
                "choices": [{"token_ids": [7, 8], "finish_reason": "length"}],
                "kv_transfer_params": {"eyas_stored": wanted["eyas"]["id"]} if wanted else None,
            }
        )

    def _send(self, said: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_args: Any) -> None:
        pass


def test_a_server_is_asked_turn_by_turn_and_for_nothing_that_it_could_choose_itself() -> None:
    import eyas.capture.vllm as module
    from eyas.capture.vllm_served import ServedEngine

    Served.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    c = cut([0, 0, 1, 1, 0, 0, 1])
    assert c is not None
    answers = Answers(max_new_tokens=2, temperature=0.5, top_p=0.9)
    try:
        with ServedEngine(f"http://127.0.0.1:{server.server_port}/v1", "") as engine:
            (stored,) = module._serve(engine, [c], answers, 2, Record(None), module._fields)
    finally:
        server.shutdown()
        server.server_close()
    first, second = Served.asked
    assert first["prompt"] == [100, 101] and "kv_transfer_params" not in first
    assert second["prompt"] == [100, 101, 7, 8, 103, 104, 105]
    assert second["kv_transfer_params"]["eyas"]["trained"] == [[2, 4]]
    assert {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "max_tokens": 2}.items() <= first.items()
    assert first["seed"] != second["seed"]
    assert stored.trained == [(2, 4), (7, 9)]


def test_what_a_server_has_answered_and_not_yet_recorded_is_waited_for(tmp_path: Path, monkeypatch: Any) -> None:
    """Its writer records a little later: until then the store is empty, and later half full; neither is an error."""
    from eyas.capture import vllm_served
    from eyas.capture.common import arrived
    from eyas.store.layout import Manifest
    from eyas.store.writer import StoreWriter

    manifest = Manifest("v", "f", 8, 4, 100, (1, 2, 3, 4), "before")
    manifest.create(tmp_path)
    said: list[str] = []
    naps: list[float] = []
    writer = StoreWriter(tmp_path, manifest)

    def server_goes_on(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) in (2, 3):
            states = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
            writer.add("ab"[len(naps) - 2], np.array([1, 2], np.int32), np.array([False, True]), states)
            writer.commit()

    monkeypatch.setattr(vllm_served.time, "sleep", server_goes_on)
    with writer:
        vllm_served.await_store(tmp_path, manifest, {"a", "b"}, said.append)
    assert arrived(tmp_path, manifest) == {"a", "b"}
    on_their_way = "samples are on their way to"
    assert [line.split(on_their_way)[0] for line in said] == [f"capture: {n} " for n in (2, 2, 1)]


def test_what_never_arrives_is_not_waited_for_forever(tmp_path: Path, monkeypatch: Any) -> None:
    from eyas.capture import vllm_served
    from eyas.capture.common import arrived
    from eyas.store.layout import Manifest

    manifest = Manifest("v", "f", 8, 4, 100, (1, 2, 3, 4), "before")
    manifest.create(tmp_path)
    monkeypatch.setattr(vllm_served, "SETTLED", 0.0)
    vllm_served.await_store(tmp_path, manifest, {"a"}, lambda _line: None)
    assert arrived(tmp_path, manifest) == set()


def test_the_command_that_starts_a_server_names_store_and_layers(tiny_verifier: Path, tmp_path: Path) -> None:
    from eyas.capture.vllm_served import serve_command
    from eyas.store.layout import Manifest
    from eyas.verifier import Verifier

    manifest = Manifest("v", "f", 8, 8, 100, (2, 4, 5, 8), "before")
    words = shlex.split(serve_command(Verifier(tiny_verifier), manifest, tmp_path / "a store", "bfloat16", 600, 8))
    after = dict(pairwise(words))
    assert json.loads(after["--kv-transfer-config"])["kv_connector_extra_config"] == {
        "store": str(tmp_path / "a store")
    }
    layers = json.loads(after["--speculative-config"])["draft_model_config"]["hf_config"]
    assert layers == {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}
    assert after["--model"] == str(tiny_verifier)
    assert "--no-enable-prefix-caching" in words
