"""`eyas bench`: what a drafter brings in the engine that serves it.

The same prompts go to the verifier alone and to the verifier with the drafter: all of them greedily and many at a time,
some of them one after the other (what one user feels), and all of them sampled. Accept length and acceptance by
position are the engine's own counters, speeds are wall time, and greedy outputs are compared token for token.

vLLM is started here, an engine for each configuration (`hosted.py`, `vllm_job.py`), or servers that are up are asked
(`served.py`). Nothing else should run on the machine meanwhile: the ratio of two speeds is only as good as the worse.

A greedy engine whose outputs differ has not lost anything yet: batches of other shapes round differently, and near-ties
turn. `explain` shows for every first difference whether it is one, from the verifier's own logits. `agree` holds the
engine's counters against eyas's own accept lengths (`agreement.py`).

A sweep takes minutes for each number of drafts. After each, the file of figures holds what was measured so far, whole.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.chat import BadConversation, messages_of, prompt_ids
from eyas.conversations import find_files, read_records
from eyas.device import compute_dtype
from eyas.drafter.checkpoint import checkpoint_layers, load_checkpoint
from eyas.errors import EyasError
from eyas.evaluate import agreement
from eyas.evaluate.decode import near_tie
from eyas.evaluate.engine_figures import by_task, figures, line, table, told
from eyas.evaluate.hosted import Host
from eyas.evaluate.run import check_verifier, find_checkpoint, never_trained, prompt_of, spread, verifier_of
from eyas.evaluate.served import Server
from eyas.files import check_figures, check_writable, write_json
from eyas.interrupt import MEASURED
from eyas.store.reader import open_source
from eyas.store.remote import staged
from eyas.train.batches import split_source
from eyas.verifier import Verifier

Say = Callable[[str], None]
NUMBERED = re.compile(r"(.+?)[-_./:]\d+$")  # `math-101`: a sample of the task math


@dataclass(frozen=True)
class BenchOptions:
    """What to measure and where.

    prompts: conversations to take the prompts from; None: those that the run kept for validation.
    draft_tokens: the drafts a round to try; singles: prompts of the one-stream run; streams: sequences at a time.
    url, url_alone: servers with and without the drafter, instead of starting vLLM; url_alone may be left out.
    engine_python: a Python that has vLLM; None: this one. speculative: more of vLLM's speculative_config.
    explain: show first differences to be near-ties. agree: hold the engine's counters against eyas's own figures.
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
    speculative: dict[str, Any] = field(default_factory=dict)
    explain: bool = False
    agree: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, and the task that its id names, or ""."""

    ids: list[int]
    task: str = ""


def bench(path: Path, options: BenchOptions, output: Path | None = None, say: Say = print) -> dict[str, Any]:
    """All figures of the checkpoint `path` (a run directory or a folder that the engine loads), as a table and JSON.

    Returns {complete, engine, mended, verifier, checkpoint, dtype, prompts, max_new_tokens, streams, singles,
    temperature, alone, drafted, best, best_streams, agreement}; `alone` and each of `drafted` hold the runs `greedy`,
    `one_stream` and `sampled`, each {tokens, seconds, tokens_per_s, ms_per_token, accept_length, per_position}.
    complete: false in the file until all is measured; stopped before that, the table of what was measured is said.
    Raises EyasError; where `agree` finds the counters apart, after writing the figures.
    """
    folder, run = find_checkpoint(path)
    verifier_path = options.verifier_path or run.get("verifier_path")
    if not verifier_path:
        raise EyasError(f"{folder} lies in no run directory: name --verifier-path")
    if options.url and (options.agree or options.explain):
        raise EyasError("--agree and --explain need the tokens of an engine that is started here: leave out --url")
    verifier = verifier_of(run, options.verifier_path, options.trust_remote_code)
    check_verifier(folder, verifier)
    asked = _prompts(options, run, verifier)
    prompts = [p.ids for p in asked]
    dtype = str(compute_dtype(options.dtype, "cuda" if torch.cuda.is_available() else "cpu")).removeprefix("torch.")
    if output is None and run:
        output = Path(run["run_dir"]) / "bench.json"
    if output is not None:  # said now, not when the work is done
        if output.is_dir():
            raise EyasError(f"{output} is a folder: name a file for the figures (--output)")
        check_figures(output)
        check_writable(output.absolute().parent, f"the figures {output}")
    runs = make_runs(prompts, options)
    about: dict[str, Any] = {"engine": "a server", "mended": False}
    measured, result = dict[int, dict[str, Any]](), dict[str, Any]()
    kept: Path | None = None  # the file, where it holds what `result` does
    try:
        with ExitStack() as ends:
            host = None if options.url else ends.enter_context(Host(options.engine_python))
            for k in sorted({0, *options.draft_tokens}):
                if options.url and k == 0 and not options.url_alone:
                    continue
                say(f"bench: {f'{k} drafts a round' if k else 'the verifier alone'}")
                if host is None:
                    measured[k] = _ask(options.url if k else options.url_alone, runs, options.streams, say)
                else:
                    found = run_vllm(host, verifier, folder if k else None, k, runs, dtype, options, say)
                    about = {"engine": f"vLLM {found['version']}", "mended": found["mended"]}
                    measured[k] = found["runs"]
                say(line(k, measured[k]))
                result = {"complete": False} | _result(measured, verifier, folder, dtype, asked, options) | about
                kept = None
                _keep(output, result)
                kept = output
        if options.explain:
            for entry in result["drafted"]:
                k = entry["draft_tokens"]
                entry["differences"] = differences(
                    verifier, dtype, prompts, measured[k]["greedy"]["tokens"], measured[0]["greedy"]["tokens"]
                )
        if options.agree:
            result["agreement"] = agreeing(verifier, folder, prompts, measured, options, say)
        _keep(output, result | {"complete": True})
    except (KeyboardInterrupt, Exception) as error:  # whatever it is, minutes of measuring are not lost with it
        if not result:
            raise
        _show(result, kept, say)
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(MEASURED.format(f" and in {kept}" if kept else "")) from None
        raise
    result["complete"] = True
    _show(result, output, say)
    if far := [r for r in result.get("agreement", []) if r["apart"] > agreement.WITHIN]:
        said = f"decodes {far[0]['decoded']:.3f} and simulates {far[0]['simulated']:.3f}: run eyas check on it"
        raise EyasError(
            f"the engine accepts {far[0]['engine']:.3f} tokens a verification at {far[0]['draft_tokens']} drafts, eyas"
            f" {said}"
        )
    return result


def _keep(output: Path | None, result: dict[str, Any]) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, result)


def _show(result: dict[str, Any], output: Path | None, say: Say) -> None:
    for text in (table(result), *told(result)):
        say(text)
    if output is not None:
        say(f"figures: {output}" if result["complete"] else f"figures so far: {output}")


# -- prompts and runs --------------------------------------------------------------------------------------------------


def _prompts(options: BenchOptions, run: dict[str, Any], verifier: Verifier) -> list[Prompt]:
    """The prompts, spread evenly over what there is."""
    if options.prompts:
        found = list(prompts_from(options.prompts, verifier))
    elif run:
        folder = staged(run["data_dir"], stage_dir=run.get("stage_dir"))
        source = open_source(folder, verifier.config, verifier.fingerprint)
        length = run.get("max_seq_len", 2048)
        _, held_out, _ = split_source(source, length, run.get("val_ratio", 0.1))
        held_out = never_trained(held_out, source, run)
        found = [Prompt(prompt_of(*source.tokens(i), length), task_of(source.ids[i])) for i in held_out]
    else:
        raise EyasError("this checkpoint lies in no run directory: name the prompts (--prompts conversations.jsonl)")
    room = verifier.config.max_position_embeddings - options.max_new_tokens - max(options.draft_tokens) - 1
    found = [p for p in found if 0 < len(p.ids) <= room]
    if not found:
        raise EyasError("there are no prompts to bench with: name conversations with a user turn (--prompts)")
    return spread(found, options.count)


def prompts_from(files: list[Path], verifier: Verifier) -> Sequence[Prompt]:
    """Every conversation up to its first answer."""
    found = []
    for file in find_files(files):
        for place, record in read_records(file):
            if isinstance(record, ValueError):
                raise EyasError(f"{place}: {record}: give conversations as eyas prepare takes them")
            try:
                messages = messages_of(record)
                asked = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
                if asked is not None:
                    said = record.get("task") or record.get("kind") or task_of(str(record.get("id", "")))
                    found.append(Prompt(prompt_ids(verifier.tokenizer, messages[: asked + 1]), str(said)))
            except (BadConversation, AttributeError) as error:
                raise EyasError(f"{place}: {error}: give conversations as eyas prepare takes them") from None
    return found


def task_of(name: str) -> str:
    """The task that a sample's id names: `math` of `math-101`, `` of an id without a number behind it."""
    numbered = NUMBERED.match(name)
    return numbered[1] if numbered else ""


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
    """The runs of every configuration, as `vllm_job` takes them: without `sampled` where the temperature is 0.

    Half of the prompts are sampled: enough for an accept length, and a sweep is to end in minutes.
    """
    sampled = spread(prompts, -(-len(prompts) // 2))
    every = {"max_tokens": options.max_new_tokens, "temperature": 0.0, "alone": False}
    runs = [
        {**every, "name": "greedy", "prompts": prompts},
        {**every, "name": "one_stream", "prompts": spread(prompts, options.singles), "alone": True},
        {**every, "name": "sampled", "prompts": sampled, "temperature": options.temperature},
    ]
    return runs if options.temperature else runs[:2]


# -- engines -----------------------------------------------------------------------------------------------------------


def run_vllm(
    host: Host,
    verifier: Verifier,
    drafter: Path | None,
    draft_tokens: int,
    runs: list[dict[str, Any]],
    dtype: str,
    options: BenchOptions,
    say: Say,
) -> dict[str, Any]:
    """Start vLLM with or without a drafter and do `runs`: what `vllm_job` gives, and its `log`."""
    longest = max(len(p) + run["max_tokens"] for run in runs for p in run["prompts"])
    job = {
        "verifier": str(verifier.path.absolute()),
        "drafter": None if drafter is None else str(drafter.absolute()),
        "draft_tokens": draft_tokens,
        "dtype": dtype,
        "streams": options.streams,
        "max_model_len": min(longest + draft_tokens + 1, verifier.config.max_position_embeddings),
        "engine_args": options.engine_args | ({"trust_remote_code": True} if options.trust_remote_code else {}),
        "speculative": options.speculative,
        "runs": runs,
    }
    return host.run(job, say)


def _ask(url: str | None, runs: list[dict[str, Any]], streams: int, say: Say) -> dict[str, Any]:
    server = Server(str(url), os.environ.get("OPENAI_API_KEY", ""))
    server.generate({**runs[0], "name": "warm-up", "prompts": runs[0]["prompts"][:1], "max_tokens": 8}, 1, say)
    return {run["name"]: server.generate(run, streams, say) for run in runs}


# -- figures -----------------------------------------------------------------------------------------------------------


def _result(
    measured: dict[int, dict[str, Any]],
    verifier: Verifier,
    folder: Path,
    dtype: str,
    prompts: list[Prompt],
    options: BenchOptions,
) -> dict[str, Any]:
    count = len(prompts)
    names = ("greedy", "one_stream", "sampled")[: 3 if options.temperature else 2]
    alone = {n: figures(measured[0][n]) for n in names} if 0 in measured else None
    drafted = []
    for k in (k for k in options.draft_tokens if k in measured):
        entry: dict[str, Any] = {"draft_tokens": k} | {n: figures(measured[k][n]) for n in names}
        entry["tasks"] = by_task(measured[k]["greedy"], [p.task for p in prompts])
        if alone is not None:
            key = "texts" if options.url else "tokens"
            pairs = zip(measured[k]["greedy"][key], measured[0]["greedy"][key], strict=True)
            entry["identical"] = sum(a == b for a, b in pairs)
            entry["speedup"] = {n: entry[n]["tokens_per_s"] / alone[n]["tokens_per_s"] for n in names}
        drafted.append(entry)

    def best(name: str) -> int | None:
        fastest = max(drafted, key=lambda e: e[name]["tokens_per_s"], default=None)
        return None if fastest is None else int(fastest["draft_tokens"])

    return {
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


def agreeing(
    verifier: Verifier,
    folder: Path,
    prompts: list[list[int]],
    measured: dict[int, dict[str, Any]],
    options: BenchOptions,
    say: Say,
) -> list[dict[str, Any]]:
    """The engine's greedy accept length beside eyas's own, for every number of drafts.

    Each {draft_tokens, engine, decoded, simulated, apart}; apart: the larger relative distance of the two.
    """
    drafter, vocab = load_checkpoint(folder, verifier.config, verifier.embedding())
    layers = checkpoint_layers(folder, verifier.config)
    ks = options.draft_tokens
    ours = agreement.decoded(
        verifier, drafter, vocab, layers, prompts, ks, options.max_new_tokens, options.streams, say
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="eyas-bench-") as work:
        alone = measured[0]["greedy"]["tokens"]
        source = agreement.text_store(verifier, prompts, alone, Path(work), "fp32", lambda _: None)
        for k in ks:
            engine = float(figures(measured[k]["greedy"])["accept_length"] or 1.0)
            both = ours[k].accept_length, agreement.simulated(drafter, vocab, verifier, source, k)
            off = max(agreement.apart(engine, x) for x in both)
            rows.append({"draft_tokens": k, "engine": engine, "decoded": both[0], "simulated": both[1], "apart": off})
    return rows


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
