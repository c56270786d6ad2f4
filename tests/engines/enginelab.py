"""What the engine tests are about, and the engines they start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONVERSATIONS = ROOT / "demo" / "conversations.jsonl"
TRAINED = slice(0, None, 8)  # 168 conversations of all kinds
HELD_OUT = slice(5, 1285, 20)  # 64 others
MAX_TOKENS = 32
DRAFT_TOKENS = (1, 2, 3, 4, 5)
USUAL = 3
TEMPERATURE = 1.0
Note = Callable[[str], None]


class Engines:
    """vLLM in each configuration, started when it is first asked for; one program serves them all."""

    def __init__(
        self, host: Any, verifier: Any, drafter: Path, prompts: list[list[int]], python: str, note: Note
    ) -> None:
        from eyas.evaluate.engines import BenchOptions

        self.host, self.verifier, self.drafter, self.prompts, self.note = host, verifier, drafter, prompts, note
        self.options = BenchOptions(
            max_new_tokens=MAX_TOKENS,
            streams=len(prompts),
            singles=4,
            draft_tokens=DRAFT_TOKENS,
            temperature=TEMPERATURE,
            engine_python=python,
        )
        self.served: dict[Any, dict[str, Any]] = {}

    def __call__(self, draft_tokens: int, dtype: str = "float32", drafter: Path | None = None) -> dict[str, Any]:
        """Run name -> what the engine counted; `log` is its log. draft_tokens 0: the verifier alone.

        Greedy runs everywhere; one stream in bfloat16; a sampled run with the usual number of drafts in float32.
        """
        from eyas.evaluate.engines import make_runs, run_vllm

        key = draft_tokens, dtype, drafter
        if key not in self.served:
            greedy, one_stream, sampled = make_runs(self.prompts, self.options)
            runs = [greedy]
            if dtype == "bfloat16":
                runs.append(one_stream)
            elif draft_tokens == USUAL and drafter is None:
                runs.append(sampled)
            folder = (drafter or self.drafter) if draft_tokens else None
            started = time.perf_counter()
            found = run_vllm(self.host, self.verifier, folder, draft_tokens, runs, dtype, self.options, print)
            self.served[key] = found["runs"] | {"log": found["log"], "asked": {r["name"]: r["prompts"] for r in runs}}
            done = found["runs"]["greedy"]
            self.note(
                f"vLLM {found['version']}, {draft_tokens} drafts, {dtype}: {sum(map(len, done['tokens']))} tokens in"
                f" {done['seconds']:.1f} s, {time.perf_counter() - started:.0f} s with the start"
            )
        return self.served[key]
