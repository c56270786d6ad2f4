"""`eyas bench`: what a drafter brings in the engine that serves it.

The same prompts go to the verifier alone and to the verifier with the drafter: all of them greedily and many at a time,
some of them one after the other (what one user feels), and all of them sampled. Accept length and acceptance by
position are the engine's own counters, speeds are wall time, and greedy outputs are compared token for token.

vLLM is started here, one process for each configuration (`vllm_job.py`), or servers that are up are asked
(`served.py`). Nothing else should run on the machine meanwhile: the ratio of two speeds is only as good as the worse.

A greedy engine whose outputs differ has not lost anything yet: batches of other shapes round differently, and near-ties
turn. `explain` shows for every first difference whether it is one, from the verifier's own logits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.chat import BadConversation, messages_of, prompt_ids
from eyas.conversations import find_files, read_records
from eyas.device import compute_dtype
from eyas.errors import EyasError
from eyas.evaluate.decode import near_tie
from eyas.evaluate.run import check_verifier, find_checkpoint, prompt_of, slashed, spread, verifier_of
from eyas.evaluate.served import Server
from eyas.files import write_json
from eyas.store.reader import open_source
from eyas.store.remote import staged
from eyas.train.batches import split_source
from eyas.verifier import Verifier

Say = Callable[[str], None]
JOB = Path(__file__).with_name("vllm_job.py")
TROUBLE = re.compile(r"\b\w*(Error|Exception)\b: .+")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure and where.

    prompts: conversations to take the prompts from; None: those that the run kept for validation.
    draft_tokens: the drafts a round to try; singles: prompts of the one-stream run; streams: sequences at a time.
    url, url_alone: servers with and without the drafter, instead of starting vLLM; url_alone may be left out.
    engine_python: a Python that has vLLM; None: this one. explain: show first differences to be near-ties.
    """

    verifier_path: str | None = None
    prompts: list[Path] = field(default_factory=list)
    count: int = 64
    max_new_tokens: int = 64
    draft_tokens: tuple[int, ...] = (3,)
    streams: int = 16
    singles: int = 8
    temperature: float = 1.0
    dtype: str = "auto"
    url: str | None = None
    url_alone: str | None = None
    engine_python: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    explain: bool = False
    trust_remote_code: bool = False


def bench(path: Path, options: BenchOptions, output: Path | None = None, say: Say = print) -> dict[str, Any]:
    """All figures of the checkpoint `path` (a run directory or a folder that the engine loads), as a table and JSON.

    Returns {engine, verifier, checkpoint, dtype, prompts, max_new_tokens, streams, singles, temperature, alone,
    drafted, best, best_streams}; `alone` and each of `drafted` hold the runs `greedy`, `one_stream` and `sampled`, each
    {tokens, seconds, tokens_per_s, ms_per_token, accept_length, per_position}. Raises EyasError.
    """
    folder, run = find_checkpoint(path)
    verifier_path = options.verifier_path or run.get("verifier_path")
    if not verifier_path:
        raise EyasError(f"{folder} lies in no run directory: name --verifier-path")
    verifier = verifier_of(run, options.verifier_path, options.trust_remote_code)
    check_verifier(folder, verifier)
    prompts = _prompts(options, run, verifier)
    dtype = str(compute_dtype(options.dtype, "cuda" if torch.cuda.is_available() else "cpu")).removeprefix("torch.")
    if output is None and run:
        output = Path(run["run_dir"]) / "bench.json"
    runs = make_runs(prompts, options)
    version, measured = "", dict[int, dict[str, Any]]()
    for k in (0, *options.draft_tokens):
        if options.url and k == 0 and not options.url_alone:
            continue
        label = f"{k} drafts a round" if k else "the verifier alone"
        say(f"bench: {label}")
        if options.url:
            measured[k] = _ask(options.url if k else str(options.url_alone), runs, options.streams, say)
            version = "a server"
        else:
            version, measured[k] = run_vllm(verifier, folder if k else None, k, runs, dtype, options, say)
        say(_line(k, measured[k]))
    result = _result(measured, version, verifier, folder, dtype, len(prompts), options)
    if options.explain and 0 in measured and not options.url:
        for entry in result["drafted"]:
            k = entry["draft_tokens"]
            entry["differences"] = differences(
                verifier, dtype, prompts, measured[k]["greedy"]["tokens"], measured[0]["greedy"]["tokens"]
            )
    say(table(result))
    if output is not None:
        write_json(output, result)
        say(f"figures: {output}")
    return result


# -- prompts and runs --------------------------------------------------------------------------------------------------


def _prompts(options: BenchOptions, run: dict[str, Any], verifier: Verifier) -> list[list[int]]:
    """Token ids of the prompts, spread evenly over what there is."""
    if options.prompts:
        found = list(_from_files(options.prompts, verifier))
    elif run:
        folder = staged(run["data_dir"], stage_dir=run.get("stage_dir"))
        source = open_source(folder, verifier.config, verifier.fingerprint)
        length = run.get("max_seq_len", 2048)
        _, held_out, _ = split_source(source, length, run.get("val_ratio", 0.1))
        found = [p for p in (prompt_of(*source.tokens(i), length) for i in held_out) if p]
    else:
        raise EyasError("this checkpoint lies in no run directory: name the prompts (--prompts conversations.jsonl)")
    room = verifier.config.max_position_embeddings - options.max_new_tokens - max(options.draft_tokens) - 1
    found = [p for p in found if len(p) <= room]
    if not found:
        raise EyasError("there are no prompts to bench with: name conversations with a user turn (--prompts)")
    return spread(found, options.count)


def _from_files(files: list[Path], verifier: Verifier) -> Sequence[list[int]]:
    """Every conversation up to its first answer."""
    found = []
    for file in find_files(files):
        for place, record in read_records(file):
            try:
                messages = messages_of(record)
                asked = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
                if asked is not None:
                    found.append(prompt_ids(verifier.tokenizer, messages[: asked + 1]))
            except (BadConversation, AttributeError) as error:
                raise EyasError(f"{place}: {error}: give conversations as eyas prepare takes them") from None
    return found


def drafts_of(sweep: str) -> tuple[int, ...]:
    """The numbers of drafts that `1..7` or `1,3,5` names. Raises EyasError."""
    first, dots, last = sweep.partition("..")
    try:
        numbers = range(int(first), int(last) + 1) if dots else [int(k) for k in sweep.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= k <= 16 for k in numbers):
        raise EyasError(f"--sweep {sweep}: name numbers of drafts from 1 to 16, as 1..7 or 1,3,5")
    return tuple(dict.fromkeys(numbers))


def make_runs(prompts: list[list[int]], options: BenchOptions) -> list[dict[str, Any]]:
    """The three runs of every configuration, as `vllm_job` takes them."""
    every = {"max_tokens": options.max_new_tokens, "temperature": 0.0, "alone": False}
    return [
        {**every, "name": "greedy", "prompts": prompts},
        {**every, "name": "one_stream", "prompts": spread(prompts, options.singles), "alone": True},
        {**every, "name": "sampled", "prompts": prompts, "temperature": options.temperature},
    ]


# -- engines -----------------------------------------------------------------------------------------------------------


def run_vllm(
    verifier: Verifier,
    drafter: Path | None,
    draft_tokens: int,
    runs: list[dict[str, Any]],
    dtype: str,
    options: BenchOptions,
    say: Say,
) -> tuple[str, dict[str, Any]]:
    """Start vLLM with or without a drafter and do `runs`: (its version, run name -> what `vllm_job` counted)."""
    python = options.engine_python or sys.executable
    longest = max(len(p) + run["max_tokens"] for run in runs for p in run["prompts"])
    job = {
        "verifier": str(verifier.path.absolute()),
        "drafter": None if drafter is None else str(drafter.absolute()),
        "draft_tokens": draft_tokens,
        "dtype": dtype,
        "streams": options.streams,
        "max_model_len": min(longest + draft_tokens + 1, verifier.config.max_position_embeddings),
        "engine_args": options.engine_args | ({"trust_remote_code": True} if options.trust_remote_code else {}),
        "runs": runs,
    }
    work = Path(tempfile.mkdtemp(prefix="eyas-bench-"))
    (work / "job.json").write_text(json.dumps(job))
    command = [python, str(JOB), str(work / "job.json"), str(work / "result.json")]
    log: list[str] = []
    try:
        process = subprocess.Popen(
            command,
            env=engine_environment(python),
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise EyasError(f"{python} cannot be started ({error.strerror}): name a Python that has vLLM") from None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@eyas "):
                say(line.removeprefix("@eyas ").rstrip())
            else:
                log.append(line)
    finally:
        if process.poll() is None:
            process.kill()
        code = process.wait()
    (work / "vllm.log").write_text("".join(log))
    if code or not (work / "result.json").exists():
        if any("No module named 'vllm'" in line for line in log):
            shutil.rmtree(work)
            raise EyasError(f"{python} has no vLLM: name a Python that has (--engine-python), or servers (--url)")
        said = next((m[0] for line in reversed(log) if (m := TROUBLE.search(line))), f"it ended with code {code}")
        raise EyasError(f"vLLM failed: {said[:300]} (its log: {work / 'vllm.log'})")
    result = json.loads((work / "result.json").read_text())
    result["runs"]["log"] = "".join(log)
    shutil.rmtree(work)
    return f"vLLM {result['version']}", result["runs"]


def engine_environment(python: str) -> dict[str, str]:
    """What a vLLM in another Python starts with: none of this environment's paths, and the OpenMP that it asks for.

    Without Intel's OpenMP preloaded vLLM warns that drafting on a CPU is slow; its packages for CPUs bring the library.
    """
    env = dict(os.environ)
    if Path(python).absolute() != Path(sys.executable).absolute():
        env = {k: v for k, v in env.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    openmp = Path(python).absolute().parents[1] / "lib" / "libiomp5.so"
    if openmp.exists() and not torch.cuda.is_available():
        env.setdefault("LD_PRELOAD", str(openmp))
    return env


def _ask(url: str, runs: list[dict[str, Any]], streams: int, say: Say) -> dict[str, Any]:
    server = Server(url, os.environ.get("OPENAI_API_KEY", ""))
    server.generate({**runs[0], "name": "warm-up", "prompts": runs[0]["prompts"][:1], "max_tokens": 8}, 1, say)
    return {run["name"]: server.generate(run, streams, say) for run in runs}


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Of one run: {tokens, seconds, tokens_per_s, ms_per_token, accept_length (None if uncounted), per_position}."""
    count = sum(run["counts"]) if "counts" in run else sum(map(len, run["tokens"]))
    kept = [n / run["drafts"] for n in run["accepted"]] if run["drafts"] else []
    return {
        "tokens": count,
        "seconds": run["seconds"],
        "tokens_per_s": count / max(run["seconds"], 1e-9),
        "ms_per_token": 1000 * run["per_token"],
        "accept_length": 1 + sum(kept) if kept else run.get("accept_length"),
        "per_position": kept,
    }


def _result(
    measured: dict[int, dict[str, Any]],
    version: str,
    verifier: Verifier,
    folder: Path,
    dtype: str,
    count: int,
    options: BenchOptions,
) -> dict[str, Any]:
    names = ("greedy", "one_stream", "sampled")
    alone = {n: figures(measured[0][n]) for n in names} if 0 in measured else None
    drafted = []
    for k in options.draft_tokens:
        entry: dict[str, Any] = {"draft_tokens": k} | {n: figures(measured[k][n]) for n in names}
        if alone is not None:
            key = "texts" if options.url else "tokens"
            pairs = zip(measured[k]["greedy"][key], measured[0]["greedy"][key], strict=True)
            entry["identical"] = sum(a == b for a, b in pairs)
            entry["speedup"] = {n: entry[n]["tokens_per_s"] / alone[n]["tokens_per_s"] for n in names}
        drafted.append(entry)

    def best(name: str) -> int:
        return int(max(drafted, key=lambda e: e[name]["tokens_per_s"])["draft_tokens"])

    return {
        "engine": version,
        "verifier": verifier.config.name,
        "checkpoint": folder.name,
        "dtype": dtype,
        "prompts": count,
        "max_new_tokens": options.max_new_tokens,
        "streams": options.streams,
        "singles": min(options.singles, count),
        "temperature": options.temperature,
        "alone": alone,
        "drafted": drafted,
        "best": best("one_stream"),
        "best_streams": best("greedy"),
    }


def differences(
    verifier: Verifier, dtype: str, prompts: list[list[int]], drafted: list[list[int]], alone: list[list[int]]
) -> list[dict[str, Any]]:
    """Per prompt whose greedy outputs differ: {prompt, at, drafted, alone, explained, gap, limit}.

    explained: the verifier's own float32 logits of the two tokens lie closer than rounding to `dtype` moves them
    (`near_tie`); in float32, closer than float32 sums in another order move them.
    """
    found: list[dict[str, Any]] = []
    models: tuple[Any, Any] | None = None
    for i, (a, b) in enumerate(zip(drafted, alone, strict=True)):
        if a == b:
            continue
        at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        entry: dict[str, Any] = {"prompt": i, "at": at, "drafted": None, "alone": None, "explained": False}
        if at < min(len(a), len(b)):
            if models is None:
                rounded = verifier.load_model(torch.bfloat16 if dtype == "float32" else getattr(torch, dtype))
                models = rounded, verifier.load_model(torch.float32)
            explained, gap, limit = near_tie(*models, prompts[i] + a[:at], a[at], b[at])
            if dtype == "float32":
                limit /= 2**16  # the mantissas differ by 16 bits
                explained = gap <= limit
            entry |= {"drafted": a[at], "alone": b[at], "explained": explained, "gap": gap, "limit": limit}
        found.append(entry)
    return found


def _line(k: int, runs: dict[str, Any]) -> str:
    one, many = figures(runs["one_stream"]), figures(runs["greedy"])
    line = f"bench: one stream {one['tokens_per_s']:.1f} tokens/s, all at once {many['tokens_per_s']:.1f} tokens/s"
    if many["accept_length"]:
        line += f" · accept length {many['accept_length']:.3f}"
        line += f" · kept {slashed(many['per_position'])}" if many["per_position"] else ""
    return line if k else line + " (alone)"


def table(r: dict[str, Any]) -> str:
    """The result as plain text: a line for the verifier alone, and one for each number of drafts."""
    head = [
        "drafts",
        "accept length",
        "sampled",
        "one stream",
        "times",
        "ms/token",
        f"{r['streams']} streams",
        "times",
        "identical",
    ]
    rows = [head]
    for entry in [*([{"draft_tokens": 0} | r["alone"]] if r["alone"] else []), *r["drafted"]]:
        k, speedup = entry["draft_tokens"], entry.get("speedup")
        rows.append(
            [
                str(k) if k else "none",
                *(
                    f"{entry[n]['accept_length']:.3f}" if entry[n]["accept_length"] else "-"
                    for n in ("greedy", "sampled")
                ),
                f"{entry['one_stream']['tokens_per_s']:.1f}",
                f"{speedup['one_stream']:.2f}" if speedup else "-",
                f"{entry['one_stream']['ms_per_token']:.1f}",
                f"{entry['greedy']['tokens_per_s']:.1f}",
                f"{speedup['greedy']:.2f}" if speedup else "-",
                f"{entry['identical']} of {r['prompts']}" if "identical" in entry else "-",
            ]
        )
    widths = [max(len(row[j]) for row in rows) for j in range(len(head))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    said = f"best for one stream: {r['best']} drafts a round; for {r['streams']}: {r['best_streams']}"
    top = f"{r['engine']} · {r['verifier']} · {r['dtype']}"
    top += f" · {r['prompts']} prompts, up to {r['max_new_tokens']} new tokens"
    return "\n".join([top, *lines, *([said] if len(r["drafted"]) > 1 else [])])
