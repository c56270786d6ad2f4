"""The same runs against a server that is up already: vLLM, SGLang, anything with OpenAI's completions.

Prompts go as token ids, answers come streamed, so that the time of the first token is told from the time of the others.
What a server counts of its drafts is read at its /metrics before and after: vLLM's counters by position; SGLang's mean
accept length (`--enable-metrics`). A server that shows neither is timed only.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from eyas.api import Api, in_background
from eyas.errors import EyasError

T = TypeVar("T")
SAY_SECONDS = 5.0
SAMPLE = re.compile(r"^([\w:]+)(\{[^}]*\})?\s+(\S+)")


class Server(Api):
    """A server that counts."""

    def generate(self, run: dict[str, Any], streams: int, say: Callable[[str], None]) -> dict[str, Any]:
        """One run (as `vllm_job` takes it) with `streams` requests at a time; returns what `vllm_job` does.

        `texts` stands in place of `tokens`, `counts` is how many tokens each answer has.
        """
        before = self.counters()
        prompts = run["prompts"]
        started = said = time.monotonic()
        done: list[tuple[str, int, float]] = []
        for answer in _in_order(lambda i: self._answer(run, i), len(prompts), 1 if run["alone"] else streams):
            done.append(answer)
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                say(f"{run['name']}: {len(done)}/{len(prompts)} prompts")
        seconds = time.monotonic() - started
        after = self.counters()
        gaps = sum(max(0, n - 1) for _, n, _ in done)
        return {
            "texts": [text for text, _, _ in done],
            "counts": [n for _, n, _ in done],
            "seconds": seconds,
            "per_token": sum(s for _, _, s in done) / max(1, gaps),
            "drafts": after["drafts"] - before["drafts"],
            "drafted": after["drafted"] - before["drafted"],
            "accepted": [a - b for a, b in zip(after["accepted"], before["accepted"] or [0] * 99, strict=False)],
            "accept_length": after["accept_length"],
        }

    def counters(self) -> dict[str, Any]:
        """What the server counts of its drafts; zero and empty where it does not say."""
        try:
            with self.open("/metrics", timeout=30) as reply:
                text = reply.read().decode(errors="replace")
        except (OSError, ValueError, http.client.HTTPException):
            text = ""
        return read_metrics(text)

    def _answer(self, run: dict[str, Any], i: int) -> tuple[str, int, float]:
        """(text, tokens, seconds from the first token to the last) of prompt i."""
        body = {
            "model": self.model,
            "prompt": run["prompts"][i],
            "max_tokens": run["max_tokens"],
            "temperature": run["temperature"],
            "seed": i,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, count, first, last = "", 0, 0.0, 0.0
        try:
            with self.open("/v1/completions", body) as reply:
                for line in reply:
                    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                        continue
                    part = json.loads(line[5:])
                    if not isinstance(part, dict) or "error" in part:
                        raise ValueError(f"it streamed {' '.join(line[5:].decode(errors='replace').split())[:300]}")
                    if said := "".join(c.get("text") or "" for c in part.get("choices") or []):
                        last = time.monotonic()
                        first = first or last
                        text += said
                    count = ((part.get("usage") or {}).get("completion_tokens")) or count
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self.refused(error) from None
        if not count and not text:
            raise EyasError(f"{self.root} answered prompt {i + 1} with no token: does it stream completions?")
        return text, count, last - first


def _in_order(work: Callable[[int], T], count: int, streams: int) -> Iterator[T]:
    """work(0), work(1), ... of `count`, so many at a time. Raises what one of them raises."""
    asked: list[Future[T]] = []
    running: set[Future[T]] = set()
    for i in range(count):
        while len(asked) <= i or not asked[i].done():
            while len(asked) < count and len(running) < streams:
                asked.append(in_background(work, len(asked)))
                running.add(asked[-1])
            _, running = wait(running, return_when=FIRST_COMPLETED)
        yield asked[i].result()


def read_metrics(text: str) -> dict[str, Any]:
    """drafts, drafted, accepted (by position) and accept_length out of a Prometheus page of vLLM or SGLang."""
    found: dict[str, Any] = {"drafts": 0, "drafted": 0, "accepted": [], "accept_length": None}
    positions: dict[int, int] = {}
    lengths: list[float] = []
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if not sample:
            continue
        name, labels = sample[1].removesuffix("_total"), sample[2] or ""
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if name == "vllm:spec_decode_num_drafts":
            found["drafts"] += int(value)
        elif name == "vllm:spec_decode_num_draft_tokens":
            found["drafted"] += int(value)
        elif name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            at = re.search(r'position="(\d+)"', labels)
            if at:
                positions[int(at[1])] = positions.get(int(at[1]), 0) + int(value)
        elif name in ("sglang:spec_accept_length", "sglang:avg_spec_accept_length") and value > 0:
            lengths.append(value)
    found["accepted"] = [positions[k] for k in sorted(positions)]
    found["accept_length"] = sum(lengths) / len(lengths) if lengths else None
    return found
