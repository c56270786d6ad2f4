"""vLLM engines, one after the other: a program for a Python that has vLLM, and needs nothing of eyas there.

    python vllm_job.py       (each line of standard input: [JOB, RESULT], the paths of two JSON files)

vLLM is imported once, which is half of an engine's start on a CPU; every job then runs in a forked child, so that one
engine leaves nothing behind for the next. `@end CODE` on standard output ends a job.

JOB: verifier (folder), drafter (folder or null), draft_tokens, dtype, streams (sequences at a time), max_model_len,
engine_args (more of the engine's arguments), speculative (more of its speculative_config), runs: a list of {name,
prompts (token ids), max_tokens, temperature, alone (one prompt after the other)}.
RESULT: version, mended (whether `mend` had to), load_seconds, runs: name -> {tokens (new ids per prompt), rounds
(verifications per prompt), seconds, per_token (mean seconds between two tokens of a prompt), drafts (verifications with
a draft), drafted (tokens), accepted (kept drafts by position)}.

Lines that begin with `@eyas ` on standard output are for people; everything else is vLLM's log. The counters are the
engine's own (`vllm:spec_decode_*`), as its /metrics has them. Eager on a CPU: what is compared token for token must not
depend on a compiler's choice of kernels.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # all in this process: half the start, nothing to orphan
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
SAY_SECONDS = 5.0
COUNTERS = "vllm:spec_decode_num_"


def say(text: str) -> None:
    print(f"@eyas {text}", flush=True)


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, do all runs, return RESULT."""
    import torch
    import vllm

    started = time.perf_counter()
    cpu = not torch.cuda.is_available()
    speculative = {
        "method": "eagle3",
        "model": job["drafter"],
        "num_speculative_tokens": job["draft_tokens"],
        **job.get("speculative", {}),
    }
    settings = {
        "model": job["verifier"],
        "dtype": job["dtype"],
        "enforce_eager": cpu,
        "max_model_len": job["max_model_len"],
        "max_num_seqs": job["streams"],
        "seed": 0,
        "disable_log_stats": False,  # the counters are among them
        "enable_prefix_caching": False,  # every run computes its prompts
        "speculative_config": speculative if job["drafter"] else None,
        **job.get("engine_args", {}),
    }
    llm = vllm.LLM(**settings)
    mended = cpu and bool(job["drafter"]) and mend()
    loaded = time.perf_counter() - started
    warm = {
        "name": "warm-up",
        "prompts": job["runs"][0]["prompts"][:1],
        "max_tokens": 8,
        "temperature": 0,
        "alone": True,
    }
    generate(llm, warm)
    return {
        "version": vllm.__version__,
        "mended": mended,
        "load_seconds": loaded,
        "runs": {run["name"]: generate(llm, run) for run in job["runs"]},
    }


def mend() -> bool:
    """Repair how vLLM's build for CPUs hands temperature, top-p and top-k to drafted positions; whether it had to.

    `expand_batch_to_tokens` of the rejection sampler spreads a request's setting over its drafts. Without Triton it
    ends in `cpu_triton_utils._expand_kernel_impl`, which writes into an int64 copy of the result and drops the copy:
    for the float32 temperature and top-p, and the int32 top-k, the sampler reads memory that nobody wrote. Seen in
    vLLM 0.32; greedy decoding is not concerned. To be called when the engine's worker is there: it chooses the kernels.
    """
    try:
        import torch
        from vllm.v1.sample import rejection_sampler

        spread = rejection_sampler.expand_batch_to_tokens
        asked, counts = torch.tensor([0.5, 2.0]), torch.tensor([2, 3], dtype=torch.int32)
        if spread(asked, counts, 3).tolist() == [0.5, 0.5, 2.0]:
            return False
    except (ImportError, AttributeError, TypeError):
        return False  # another release, whose sampler is built otherwise

    def spread_right(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        first = torch.cat([cu_num_tokens.new_zeros(1), cu_num_tokens[:-1]])
        return x.repeat_interleave((cu_num_tokens - first).long(), output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = spread_right
    return True


def generate(llm: Any, run: dict[str, Any]) -> dict[str, Any]:
    """One run of prompts, with the counters' increase over it."""
    from vllm import SamplingParams

    before = counters(llm)
    engine, done, said = llm.llm_engine, {}, time.monotonic()
    prompts = run["prompts"]
    rounds = [-1] * len(prompts)  # the pass over the prompt gives a token and verifies nothing
    started = time.perf_counter()
    waiting = list(range(len(prompts)))
    while waiting or engine.has_unfinished_requests():
        while waiting and not (run["alone"] and engine.has_unfinished_requests()):
            i = waiting.pop(0)
            how = SamplingParams(
                temperature=run["temperature"],
                max_tokens=run["max_tokens"],
                seed=i if run["temperature"] else None,
                detokenize=False,
            )
            engine.add_request(f"{run['name']}-{i}", {"prompt_token_ids": prompts[i]}, how)
        for output in engine.step():
            i = int(output.request_id.rpartition("-")[2])
            rounds[i] += 1
            if output.finished:
                done[i] = output
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            say(f"{run['name']}: {len(done)}/{len(prompts)} prompts")
    seconds = time.perf_counter() - started
    after = counters(llm)
    tokens = [list(done[i].outputs[0].token_ids) for i in range(len(prompts))]
    gaps = [
        (m.last_token_ts - m.first_token_ts, len(t) - 1) for m, t in ((done[i].metrics, tokens[i]) for i in done) if m
    ]
    return {
        "tokens": tokens,
        "rounds": rounds,
        "seconds": seconds,
        "per_token": sum(g for g, _ in gaps) / max(1, sum(n for _, n in gaps)),
        "drafts": after["drafts"] - before["drafts"],
        "drafted": after["draft_tokens"] - before["draft_tokens"],
        "accepted": [a - b for a, b in zip(after["positions"], before["positions"] or [0] * 99, strict=False)],
    }


def counters(llm: Any) -> dict[str, Any]:
    """The engine's counters of speculative decoding; zero and empty without a drafter."""
    found: dict[str, Any] = {m.name.removeprefix(COUNTERS): m for m in llm.get_metrics() if m.name.startswith(COUNTERS)}
    positions = found.get("accepted_tokens_per_pos")
    return {
        "drafts": int(found["drafts"].value) if "drafts" in found else 0,
        "draft_tokens": int(found["draft_tokens"].value) if "draft_tokens" in found else 0,
        "positions": list(positions.values) if positions else [],
    }


def main() -> None:
    """Do the jobs of standard input; a child that is forked for one returns from here and ends."""
    import vllm  # noqa: F401  # what follows is imported by name: vLLM itself is lazy
    from vllm import LLM  # noqa: F401
    from vllm.v1.engine import llm_engine  # noqa: F401

    print("@ready", flush=True)
    for line in sys.stdin:
        job_file, result_file = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                Path(result_file).write_text(json.dumps(serve(json.loads(Path(job_file).read_text()))))
            except Exception:  # its last line is what the user is told
                traceback.print_exc()
                sys.exit(1)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"@end {code}", flush=True)


if __name__ == "__main__":  # vLLM may start processes that import this file again
    main()
