"""What capture costs in vLLM: the same generation with and without, two engines side by side that take turns.

    PYTHONPATH=src .venv-engines/bin/python bench/vllm_capture.py --verifier DIR --prompts FILE.jsonl

Run by the Python that has vLLM. Both engines stay loaded and one of them works at a time, so that what else the machine
does falls on both; the overhead is the median over the turns of (time with capture / time without - 1).
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def prompts_of(verifier: Any, file: Path, count: int) -> list[list[int]]:
    from eyas.chat import messages_of, prompt_ids

    lines = file.read_text().splitlines()
    lines = lines[:: max(1, len(lines) // count)][:count]
    return [prompt_ids(verifier.tokenizer, messages_of(json.loads(line))[:1]) for line in lines]


def plain(verifier: Any, prompts: list[list[int]], new_tokens: int) -> Any:
    """A vLLM without capture; returns what generates once."""
    for name, value in CAPTURE.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import EngineArgs, LLMEngine, SamplingParams

    longest = max(map(len, prompts)) + new_tokens + 1
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(verifier.path), dtype="bfloat16", max_model_len=longest, max_num_seqs=len(prompts),
            enforce_eager=True, enable_prefix_caching=False, use_tqdm_on_load=False,
        )
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)

    def once(turn: int) -> None:
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{turn}-{i}", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            engine.step()

    return once


def capturing(verifier: Any, prompts: list[list[int]], new_tokens: int) -> Any:
    """The same with the connector; every turn writes its samples to the store."""
    import numpy as np
    import torch

    from eyas.capture.common import capture_layers, manifest_of
    from eyas.prepare import Prepared

    store = Path(tempfile.mkdtemp(prefix="eyas-overhead-"))
    atexit.register(shutil.rmtree, store, ignore_errors=True)
    manifest = manifest_of(verifier, Prepared({}, [], [], []), capture_layers(verifier, None), "vllm, bfloat16")
    manifest.create(store)
    longest = max(map(len, prompts)) + new_tokens + 1
    engine = CAPTURE._engine(verifier, manifest, store, torch.bfloat16, longest, len(prompts), {}).engine
    from vllm import SamplingParams

    def once(turn: int) -> None:
        for i, prompt in enumerate(prompts):
            params = CAPTURE.request_params(f"{turn}-{i}", prompt, [], True)
            extra = {"kv_transfer_params": params}
            how = SamplingParams(
                temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, extra_args=extra
            )
            engine.add_request(f"{turn}-{i}", {"prompt_token_ids": np.asarray(prompt).tolist()}, how)
        while engine.has_unfinished_requests():
            engine.step()
        CAPTURE._drain(engine)

    return once


def child(kind: str, verifier_dir: str, file: str, count: int, new_tokens: int) -> None:
    """Generates once for every line on standard input and answers with the seconds."""
    from eyas.verifier import Verifier

    verifier = Verifier(verifier_dir)
    once = (plain if kind == "plain" else capturing)(verifier, prompts_of(verifier, Path(file), count), new_tokens)
    print("@ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        once(int(line))
        print(f"@{time.perf_counter() - started}", flush=True)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("@"):
            return line[1:].strip()
    raise SystemExit("an engine ended: run it alone with --child to see why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", choices=("plain", "capture"))
    a = parser.parse_args()
    if a.child:
        child(a.child, a.verifier, a.prompts, a.count, a.new_tokens)
        return
    engines = {}
    for kind in ("plain", "capture"):
        command = [sys.executable, __file__, "--child", kind, "--verifier", a.verifier, "--prompts", a.prompts]
        command += ["--new-tokens", str(a.new_tokens), "--count", str(a.count)]
        # The one that waits must not spin on the cores of the one that works: see `engine_environment`.
        engines[kind] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=engine_environment(sys.executable),
        )  # fmt: skip
        answer(engines[kind])
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    for turn in range(a.turns + 1):
        for kind in list(engines)[:: 1 if turn % 2 else -1]:
            print(turn, file=engines[kind].stdin, flush=True)
            took = float(answer(engines[kind]))
            if turn:  # the first one warms up
                seconds[kind].append(took)
    for process in engines.values():
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()
    ratios = [c / p - 1 for c, p in zip(seconds["capture"], seconds["plain"], strict=True)]
    result = {"overhead": statistics.median(ratios), "each": ratios, **seconds}
    print(
        f"{a.turns} turns: {statistics.median(seconds['plain']):.2f} s without, "
        f"{statistics.median(seconds['capture']):.2f} s with capture; overhead {result['overhead']:+.1%} "
        f"({min(ratios):+.1%} to {max(ratios):+.1%})"
    )
    if a.output:
        a.output.write_text(json.dumps(result))


if __name__ == "__main__":
    from eyas.capture import vllm as CAPTURE
    from eyas.evaluate.hosted import engine_environment

    main()
