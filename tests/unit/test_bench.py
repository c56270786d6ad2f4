"""`eyas bench` without an engine: sweeps, counters of vLLM and SGLang, a server over HTTP, figures and table."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from drafters import eagle3, make_verifier, write

from eyas.errors import EyasError
from eyas.evaluate import engines
from eyas.evaluate.engine_figures import by_task, figures, table
from eyas.evaluate.engines import BenchOptions, Prompt, bench, drafts_of, prompts_from, task_of
from eyas.evaluate.served import Server, read_metrics
from eyas.interrupt import interruptible

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.7e+09
"""


@pytest.mark.parametrize(("text", "numbers"), [("1..7", (1, 2, 3, 4, 5, 6, 7)), ("1,3,5", (1, 3, 5)), ("2", (2,))])
def test_sweep_names_numbers_of_drafts(text: str, numbers: tuple[int, ...]) -> None:
    assert drafts_of(text) == numbers


@pytest.mark.parametrize("text", ["", "7..1", "0..3", "a", "1..17"])
def test_bad_sweep_is_refused(text: str) -> None:
    with pytest.raises(EyasError, match="--sweep"):
        drafts_of(text)


def test_vllm_counters_are_read_by_position_and_over_engines() -> None:
    found = read_metrics(VLLM % (50, 100, 40, 20) + VLLM.replace('engine="0"', 'engine="1"') % (50, 100, 30, 10))
    assert found == {"drafts": 100, "drafted": 200, "accepted": [70, 30], "accept_length": None}


def test_sglang_gives_a_mean_accept_length() -> None:
    found = read_metrics('sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.25\n')
    assert found["accept_length"] == 2.25
    assert found["drafts"] == 0


def test_figures_count_the_verifiers_own_token_and_the_kept_drafts() -> None:
    run = {"tokens": [[1, 2, 3], [4]], "seconds": 2.0, "per_token": 0.5, "drafts": 50, "accepted": [40, 20]}
    found = figures(run)
    assert found["accept_length"] == pytest.approx(1 + 0.8 + 0.4)
    assert found["per_position"] == [0.8, 0.4]
    assert found["tokens_per_s"] == 2.0
    assert found["ms_per_token"] == 500


def test_tasks_are_named_by_ids_and_counted_by_verifications() -> None:
    assert [task_of(name) for name in ("math-101", "file.jsonl:7", "a1b2", "42")] == ["math", "file.jsonl", "", ""]
    # Behind each first token: 6 tokens in 3 verifications of math, 2 in 2 of code.
    run = {"tokens": [[1] * 4, [1] * 4, [1] * 3], "rounds": [1, 2, 2]}
    found = by_task(run, ["math", "math", "code"])
    assert found == {"code": {"prompts": 1, "accept_length": 1.0}, "math": {"prompts": 2, "accept_length": 2.0}}
    assert by_task(run, ["math"] * 3) == {}, "one task is no table"


class Engine(BaseHTTPRequestHandler):
    """A server that answers every prompt with its own token ids as words, and counts drafts as vLLM would."""

    asked = 0

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(json.dumps({"data": [{"id": "m"}]}))
        else:
            self._send(VLLM % (10 * Engine.asked, 20 * Engine.asked, 8 * Engine.asked, 4 * Engine.asked))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(body["prompt"]) > 3:
            self._send('{"message": "too long"}', 400)
            return
        Engine.asked += 1
        parts = [{"choices": [{"text": f"{t} "}]} for t in body["prompt"]]
        parts.append({"choices": [], "usage": {"completion_tokens": len(body["prompt"])}})
        self._send("".join(f"data: {json.dumps(p)}\n\n" for p in parts) + "data: [DONE]\n\n")

    def _send(self, text: str, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Engine.asked = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_in_order_and_its_counters_are_of_this_run(url: str) -> None:
    server = Server(url)
    run = {"name": "greedy", "prompts": [[5], [6, 7], [8, 9, 1]], "max_tokens": 8, "temperature": 0.0, "alone": False}
    server.generate(run, 2, print)
    found = server.generate(run, 2, print)
    assert found["texts"] == ["5 ", "6 7 ", "8 9 1 "]
    assert found["counts"] == [1, 2, 3]
    assert (found["drafts"], found["accepted"]) == (30, [24, 12])
    assert figures(found)["accept_length"] == pytest.approx(2.2)


@pytest.fixture
def sweep(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, BenchOptions]:
    """A drafter's folder, and options that ask the server for 1, 2 and 3 drafts after the verifier alone."""
    verifier = make_verifier(tmp_path / "verifier")
    monkeypatch.setattr(engines, "_prompts", lambda *_asked: [Prompt([5]), Prompt([6, 7]), Prompt([8, 9, 1])])
    options = BenchOptions(verifier_path=str(verifier), draft_tokens=(1, 2, 3), url=url, url_alone=url)
    return write(tmp_path / "drafter", *eagle3(verifier)), options


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_keeps_what_it_measured_and_says_it(
    sweep: tuple[Path, BenchOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    lines: list[str] = []
    seen: list[list[int]] = []  # the numbers of drafts in the file as each configuration begins
    figures_file = tmp_path / "later" / "bench.json"

    def say(text: str) -> None:
        lines.append(text)
        if text.startswith("bench: ") and text.endswith("a round"):
            found = json.loads(figures_file.read_text())
            assert not found["complete"] and found["alone"]["greedy"]["tokens"] == 6
            seen.append([e["draft_tokens"] for e in found["drafted"]])
        if text == "bench: 3 drafts a round":
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as ended, interruptible():
        bench(*sweep, figures_file, say)
    assert ended.value.code == 128 + number
    assert seen == [[], [1], [1, 2]]
    kept = json.loads(figures_file.read_text())
    assert not kept["complete"] and [e["draft_tokens"] for e in kept["drafted"]] == [1, 2]
    assert kept["drafted"][1]["greedy"]["accept_length"] == pytest.approx(2.2) and kept["drafted"][1]["identical"] == 3
    rows = [line.split()[0] for line in lines[-2].splitlines()[2:5]]
    assert rows == ["none", "1", "2"] and lines[-1] == f"figures so far: {figures_file}"
    said = f"what was measured stands above and in {figures_file}: the same command measures everything again"
    assert said in capsys.readouterr().err
    assert [p.name for p in figures_file.parent.iterdir()] == ["bench.json"], "nothing half-written"

    bench(*sweep, figures_file, lines.append)
    whole = json.loads(figures_file.read_text())
    assert whole["complete"] and [e["draft_tokens"] for e in whole["drafted"]] == [1, 2, 3]
    assert lines[-1] == f"figures: {figures_file}"


def test_a_sweep_whose_server_goes_away_keeps_what_it_measured(
    sweep: tuple[Path, BenchOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = [], engines._ask

    def ask(*given: Any) -> Any:
        asked.append(given)
        if len(asked) == 2:
            raise EyasError("the server went away")
        return real(*given)

    monkeypatch.setattr(engines, "_ask", ask)
    lines: list[str] = []
    with pytest.raises(EyasError, match="went away"):
        bench(*sweep, tmp_path / "bench.json", lines.append)
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert not kept["complete"] and kept["drafted"] == [] and kept["best"] is None
    assert lines[-2].splitlines()[-1].split()[0] == "none"


def test_a_sweep_that_is_stopped_waits_for_no_request_and_claims_no_figures(
    sweep: tuple[Path, BenchOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held, answered = threading.Event(), threading.Event()
    whole = Server._answer

    def answer(self: Server, run: dict[str, Any], i: int) -> tuple[str, int, float]:
        if run["name"] == "greedy":
            os.kill(os.getpid(), signal.SIGINT)
            held.wait(30)  # a request under way, which nobody may wait for
            answered.set()
        return whole(self, run, i)

    monkeypatch.setattr(Server, "_answer", answer)
    with pytest.raises(SystemExit), interruptible():
        bench(*sweep, tmp_path / "bench.json", lambda _line: None)
    assert not answered.is_set()
    held.set()
    assert "nothing is kept of it" in capsys.readouterr().err and not (tmp_path / "bench.json").exists()


def test_whatever_ends_a_sweep_its_table_is_said_and_no_file_that_was_not_written(
    sweep: tuple[Path, BenchOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _value: Any) -> None:
        raise EyasError("cannot write bench.json: No space left on device")

    folder, options = sweep
    lines: list[str] = []
    with monkeypatch.context() as patch, pytest.raises(EyasError, match="No space left"):
        patch.setattr(engines, "write_json", full)
        bench(folder, options, tmp_path / "bench.json", lines.append)
    assert lines[-1].splitlines()[2].split()[0] == "none" and not any("figures" in line for line in lines)

    real = engines._ask

    def broken(url: str | None, *given: Any) -> Any:
        if any(line == "bench: 1 drafts a round" for line in lines):
            raise IndexError("of a model's code")
        return real(url, *given)

    lines.clear()
    monkeypatch.setattr(engines, "_ask", broken)
    with pytest.raises(IndexError):
        bench(folder, options, tmp_path / "bench.json", lines.append)
    assert lines[-2].splitlines()[2].split()[0] == "none"
    assert lines[-1] == f"figures so far: {tmp_path / 'bench.json'}"


def test_a_server_that_refuses_is_quoted(url: str) -> None:
    run = {"name": "greedy", "prompts": [[1, 2, 3, 4]], "max_tokens": 8, "temperature": 0.0, "alone": True}
    with pytest.raises(EyasError, match=r"refused a prompt \(400\).*too long"):
        Server(url).generate(run, 1, print)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(EyasError, match="is the server up"):
        Server("http://127.0.0.1:9/v1")


def test_table_names_the_best_number_of_drafts() -> None:
    def entry(pace: float, length: float | None) -> dict[str, Any]:
        run = {"tokens_per_s": pace, "ms_per_token": 1000 / pace, "accept_length": length}
        return {"greedy": run, "one_stream": run, "sampled": run}

    drafted = [
        {"draft_tokens": k, "identical": 8, "speedup": dict.fromkeys(("greedy", "one_stream", "sampled"), p / 30)}
        | entry(p, 1.5)
        for k, p in ((1, 36.0), (2, 45.0))
    ]
    text = table(
        {
            "engine": "vLLM 0.32.0",
            "verifier": "v",
            "dtype": "bfloat16",
            "prompts": 8,
            "max_new_tokens": 64,
            "streams": 4,
            "alone": entry(30.0, None),
            "drafted": drafted,
            "best": 2,
            "best_streams": 1,
        }
    )
    assert "best for one stream: 2 drafts a round; for 4: 1" in text
    assert "8 of 8" in text
    assert "1.50" in text.splitlines()[-2], "45 tokens/s for 30"


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("vllm:spec_decode_num_drafts_total 12\nvllm:spec_decode_num_drafts_total NaN\n", 12),
        ("vllm:spec_decode_num_drafts_total twelve\n", 0),
        ("<html>no metrics here</html>", 0),
    ],
)
def test_a_metrics_page_of_nonsense_counts_nothing(page: str, found: int) -> None:
    assert read_metrics(page)["drafts"] == found


class Nonsense(BaseHTTPRequestHandler):
    """A server that names a model and streams `said`."""

    said = b""

    def do_GET(self) -> None:
        self.reply(b'{"data": [{"id": "m"}]}' if self.path.endswith("models") else b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(self.said)

    def reply(self, text: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_words: object) -> None:
        pass


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b'data: {"error": {"message": "out of pages"}}\n\n', "out of pages"),
        (b"data: [1]\n\n", r"streamed \[1\]"),
        (b"data: {no json\n\n", "gave no answer"),
        (b"<html>hello</html>\n", "prompt 1 with no token"),
    ],
)
def test_a_server_that_answers_nonsense_is_no_fast_server(said: bytes, words: str) -> None:
    handler = type("Handler", (Nonsense,), {"said": said})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run = {"name": "greedy", "prompts": [[1, 2]], "max_tokens": 4, "temperature": 0.0, "alone": True}
        try:
            with pytest.raises(EyasError, match=words):
                Server(f"http://127.0.0.1:{server.server_port}/v1").generate(run, 1, lambda _: None)
        finally:
            server.shutdown()


def test_a_line_of_prompts_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("{no json\n")
    with pytest.raises(EyasError, match=r"p\.jsonl:1: .*(JSON|property name)"):
        prompts_from([tmp_path / "p.jsonl"], None)  # type: ignore[arg-type]  # no prompt gets as far as the tokenizer
