"""What the engine tests are about, the engines they start, and prepared samples of given tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
CONVERSATIONS = ROOT / "demo" / "conversations.jsonl"
TRAINED = slice(0, None, 8)  # 168 conversations of all kinds
HELD_OUT = slice(5, None, 112)  # 12 others
MAX_TOKENS = 64
DRAFT_TOKENS = (1, 2, 3, 4, 5)
USUAL = 3
Note = Callable[[str], None]


class Engines:
    """vLLM in each configuration, started when it is first asked for."""

    def __init__(self, verifier: Any, drafter: Path, prompts: list[list[int]], python: str, note: Note) -> None:
        from eyas.evaluate.engines import BenchOptions

        self.verifier, self.drafter, self.prompts, self.note = verifier, drafter, prompts, note
        self.options = BenchOptions(
            max_new_tokens=MAX_TOKENS, streams=len(prompts), singles=4, draft_tokens=DRAFT_TOKENS, engine_python=python
        )
        self.served: dict[Any, dict[str, Any]] = {}

    def __call__(self, draft_tokens: int, dtype: str = "float32", drafter: Path | None = None) -> dict[str, Any]:
        """Run name -> what the engine counted; `log` is its log. draft_tokens 0: the verifier alone."""
        from eyas.evaluate.engines import make_runs, run_vllm

        key = draft_tokens, dtype, drafter
        if key not in self.served:
            runs = make_runs(self.prompts, self.options)
            runs = runs[:2] if dtype == "bfloat16" else runs[:1]
            folder = (drafter or self.drafter) if draft_tokens else None
            started = time.perf_counter()
            version, found = run_vllm(self.verifier, folder, draft_tokens, runs, dtype, self.options, print)
            self.served[key] = found
            greedy = found["greedy"]
            self.note(
                f"{version}, {draft_tokens} drafts, {dtype}: {sum(map(len, greedy['tokens']))} tokens in"
                f" {greedy['seconds']:.1f} s, {time.perf_counter() - started:.0f} s with the start"
            )
        return self.served[key]


def write_prepared(folder: Path, verifier: Any, samples: list[tuple[npt.NDArray[np.int32], int]]) -> None:
    """samples: (token ids of prompt and answer, tokens of the prompt); all of the answer is trained."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    masks = [(np.arange(len(ids)) >= prompt).tolist() for ids, prompt in samples]
    columns = {
        "id": pa.array([f"sample-{i}" for i in range(len(samples))]),
        "input_ids": pa.array([ids.tolist() for ids, _ in samples], pa.list_(pa.int32())),
        "loss_mask": pa.array(masks, pa.list_(pa.bool_())),
    }
    pq.write_table(pa.table(columns), folder / "prepared.parquet")
    about = {
        "format": 1,
        "verifier": {"name": verifier.config.name, "fingerprint": verifier.fingerprint},
        "template_hash": verifier.template_hash,
        "kept": len(samples),
        "tokens": sum(len(ids) for ids, _ in samples),
    }
    (folder / "prepare.json").write_text(json.dumps(about))
