"""One vLLM engine, one job: run by the engine environment's python, which has vLLM and not eyas.

    python engine_run.py JOB RESULT     (two JSON files; the log goes to stdout and stderr)

JOB: verifier (folder), drafter (folder or null), prompts (lists of token ids), max_tokens, draft_tokens.
RESULT: version, tokens (new token ids per prompt), drafts (how many times the drafter was asked), drafted (tokens),
accepted (kept drafts per position), load_seconds, seconds.

Greedy, float32, eager: what is compared token for token must not depend on a compiler's choice of kernels.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # all in this process: half the start, nothing to orphan
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Serve the job's prompts once and read the engine's own counters."""
    import vllm

    drafted = job["drafter"] is not None
    speculative = {"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": job["draft_tokens"]}
    started = time.perf_counter()
    llm = vllm.LLM(
        model=job["verifier"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=len(job["prompts"]),
        seed=0,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculative if drafted else None,
    )
    loaded = time.perf_counter()
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    done = time.perf_counter()
    counters = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num_")}

    def count(name: str) -> int:
        found: Any = counters.get(f"vllm:spec_decode_num_{name}")
        return int(found.value) if found else 0

    positions: Any = counters.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return {
        "version": vllm.__version__,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "drafts": count("drafts"),
        "drafted": count("draft_tokens"),
        "accepted": list(positions.values) if positions else [],
        "load_seconds": loaded - started,
        "seconds": done - loaded,
    }


if __name__ == "__main__":  # vLLM may start processes that import this file again
    _, job_file, result_file = sys.argv
    result = run(json.loads(Path(job_file).read_text()))
    Path(result_file).write_text(json.dumps(result))
