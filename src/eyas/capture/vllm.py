"""Capture with vLLM as the engine: prepared samples, or answers that it writes itself, into a store in one pass.

The engine runs in this process and writes the store from its worker (`vllm_connector.py`); this file asks for what is
missing, follows, records, and at the end checks that everything is there and proves itself. Samples go in one by one,
as others finish, so that the engine's batch stays full; the longest come first.

With `Answers` the engine answers anew: what a prepared sample does not train on (the prompt, and the user's later
turns) stays, token for token, and every answer is the verifier's own, from the turns before it. The states of prompt
and answers come from the very passes that wrote them. Of several answers only the last request is stored: it holds all.

Cost: the generation itself, and one copy of the states (bench/RESULTS.md). Prefix caching is off: the states of a
prefix that is not computed would be another request's. Chunked prefill is allowed: the states wait in the cache.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from eyas.capture import vllm_served
from eyas.capture.common import (
    Progress,
    arrived,
    capture_layers,
    check_output,
    check_prepared,
    check_shape_of,
    check_space,
    done_ids,
    manifest_of,
    near_ties,
)
from eyas.device import compute_dtype
from eyas.errors import EyasError
from eyas.prepare import Prepared, read_prepared
from eyas.record.record import Record
from eyas.store.layout import Manifest
from eyas.store.reader import StoreSource
from eyas.verifier import Verifier, first_line

STARTING, SERVING = "starting the engine", "generating"  # phases
PROVEN = 64  # samples whose stored last state must name the token that the engine chose
MUST_AGREE = 0.95
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: it ends when we end, and its errors are ours
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB, where there is no GPU
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Answers:
    """How the engine answers; temperature 0 is greedy."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Conversation:
    """One sample on its way through the engine.

    pieces: the untrained tokens before each answer; ends: the token that ended each answer as it was prepared.
    tokens, trained: what there is so far, and [first, past the last) of the answers in it. chosen: the engine's token
    behind a prepared sample.
    """

    name: str
    pieces: list[npt.NDArray[np.int32]]
    ends: list[int]
    tokens: list[int] = field(default_factory=list)
    trained: list[tuple[int, int]] = field(default_factory=list)
    turn: int = 0
    chosen: int = -1


def capture(
    verifier: Verifier,
    prepared_dir: Path,
    output_dir: Path,
    *,
    layers: tuple[int, int, int] | None = None,
    dtype: str = "auto",
    answers: Answers | None = None,
    in_flight: int = 64,
    engine_args: dict[str, Any] | None = None,
    url: str | None = None,
    say: Callable[[str], None] = print,
    record: Record | None = None,
) -> dict[str, Any]:
    """Write the states of every prepared sample to the store `output_dir`; goes on where an earlier run stopped.

    layers: HF indices of the auxiliary states, ascending; default (2, n // 2, n - 3).
    answers: answer anew in the same pass; None captures the samples as they are.
    in_flight: sequences in the engine at a time. engine_args: more arguments of vLLM's engine, by their Python names.
    url: a server with our connector (`vllm_served.py`), in place of an engine in this process.
    Returns {path, samples, tokens, captured_samples, captured_tokens, seconds, tokens_per_second, bytes, agreement}.
    Raises EyasError when vLLM is not installed or stops, and as `local.capture` does.
    """
    if url is None:
        check_vllm()
    prepared = read_prepared(Path(prepared_dir))
    output = Path(output_dir)
    check_prepared(prepared, Path(prepared_dir), verifier)
    check_output(output, Path(prepared_dir))
    number_type = compute_dtype(dtype, "cuda" if torch.cuda.is_available() else "cpu")
    extractor = _extractor(number_type) if url is None else f"vllm server, {str(number_type).removeprefix('torch.')}"
    manifest = manifest_of(
        verifier, prepared, capture_layers(verifier, layers), extractor, repr(answers) if answers else ""
    )
    done = done_ids(output, manifest)
    every = [_conversation(prepared, i, answers is not None) for i in range(len(prepared.ids))]
    fitting = [c for c in every if c and _longest(c, answers) <= verifier.config.max_position_embeddings]
    if len(fitting) < len(every):
        left_out = len(every) - len(fitting)
        say(f"capture: {left_out:,} samples are left out: without a prompt, or too long for the verifier")
    manifest = replace(manifest, samples=len(fitting))
    todo = sorted((c for c in fitting if c.name not in done), key=lambda c: -_longest(c, answers))
    check_space(output, [_longest(c, answers) for c in todo], manifest, say)
    if done:
        say(f"capture: {len(fitting) - len(todo):,} samples are in {output} already")
    lengths = None if answers else [_longest(c, answers) for c in fitting]
    numbers = {c.name: i for i, c in enumerate(fitting)}
    progress = Progress(say, len(fitting), lengths, [numbers[c.name] for c in todo])
    agreement = None
    record = record or Record(None)
    if todo:
        try:
            output.mkdir(parents=True, exist_ok=True)
            if not (output / "manifest.json").exists():
                manifest.create(output)
        except OSError as error:
            raise EyasError(f"{output} cannot be written: {error.strerror}") from error
        longest = max(_longest(c, answers) for c in todo) + 1
        checked = todo[:: max(1, len(todo) // PROVEN)][:PROVEN]
        kept = {c.name for c in checked}
        record.open()
        record.enter(STARTING)
        with _started(url, verifier, manifest, output, number_type, longest, in_flight, engine_args, say) as engine:
            progress.start()
            record.begin(progress.all_samples, progress.samples, done=progress.share)
            record.enter(SERVING)
            sampling = _sampling if url is None else _fields
            for conversation in _serve(engine, todo, answers, in_flight, record, sampling):
                progress.add(1, len(conversation.tokens), record)
                if conversation.name not in kept:
                    conversation.tokens = []  # the store has them
            record.enter("saving")
        wanted = {c.name for c in todo}
        if url is not None:
            vllm_served.await_store(output, manifest, wanted, say)
        if missing := wanted - arrived(output, manifest):
            where = "vLLM's lines above say why" if url is None else "the server's log says why"
            raise EyasError(
                f"{len(missing):,} samples ({min(missing)}, ...) did not reach {output}: {where}."
                " What is recorded there is whole: run the same command again"
            )
        record.enter("validating")
        source = StoreSource(output, verifier.config, verifier.fingerprint)
        agreement = _prove(verifier, source, checked, answers)
        say(f"capture: the head agrees with the engine's choices on {agreement:.1%} of checked positions")
        record.enter("finishing")
    return {
        "path": str(output),
        "samples": len(fitting),
        "tokens": progress.tokens,
        **progress.figures(),
        "bytes": sum(p.stat().st_size for p in output.iterdir()),
        "agreement": agreement,
    }


def check_vllm() -> None:
    """EyasError where this Python has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise EyasError(
            f"{sys.executable} has no vLLM: install eyas beside it (pip install eyas in vLLM's environment, or"
            " pip install vllm here) and run this command with that Python"
        )


def _extractor(dtype: torch.dtype) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return f"vllm {version(name)}, {str(dtype).removeprefix('torch.')}"
        except PackageNotFoundError:
            continue
    return f"vllm, {str(dtype).removeprefix('torch.')}"


def request_params(sample: str, prompt: list[int], trained: list[tuple[int, int]], answer: bool) -> dict[str, Any]:
    """The kv_transfer_params of a request whose states the connector stores.

    sample: its id in the store; prompt: token ids; trained: [first, past the last) of the prompt's trained tokens;
    answer: whether the generated tokens belong to the sample, as trained ones; else only the prompt is stored.
    """
    digest = xxhash.xxh3_64_hexdigest(np.asarray(prompt, np.int32).tobytes())
    return {"eyas": {"id": sample, "prompt": digest, "trained": [list(s) for s in trained], "answer": answer}}


# -- samples -----------------------------------------------------------------------------------------------------------


def _conversation(prepared: Prepared, i: int, answer: bool) -> Conversation | None:
    """Sample i, whole, or cut at its answers; None where it has to be answered and begins without a prompt."""
    ids, mask = prepared.input_ids[i], prepared.loss_mask[i]
    runs = _runs(mask)
    trained = [(a, b) for a, b, on in runs if on]
    if not answer:
        return Conversation(prepared.ids[i], [ids], [], trained=trained)
    if not trained or trained[0][0] == 0:
        return None
    starts = [0, *(b for _, b in trained[:-1])]
    pieces = [ids[a:b] for a, (b, _) in zip(starts, trained, strict=True)]
    return Conversation(prepared.ids[i], pieces, [int(ids[b - 1]) for _, b in trained])


def _runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    """(first, past the last, value) of every run of equal values."""
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(a, b, bool(mask[a])) for a, b in pairwise(cuts)]


def _longest(c: Conversation, answers: Answers | None) -> int:
    """Tokens that a sample may come to have."""
    return sum(map(len, c.pieces)) + (len(c.pieces) * (answers.max_new_tokens + 1) if answers else 0)


# -- the engine --------------------------------------------------------------------------------------------------------


def _started(
    url: str | None,
    verifier: Verifier,
    manifest: Manifest,
    output: Path,
    dtype: torch.dtype,
    longest: int,
    in_flight: int,
    more: dict[str, Any] | None,
    say: Callable[[str], None],
) -> Any:
    """An engine in this process, or the server at `url`; a context. EyasError says how to start a missing server."""
    name = str(dtype).removeprefix("torch.")
    if url is None:
        say(f"capture: starting vLLM on {verifier.config.name} ({name})")
        return _engine(verifier, manifest, output, dtype, longest, in_flight, more or {})
    try:
        return vllm_served.ServedEngine(url, os.environ.get("OPENAI_API_KEY", ""))
    except EyasError as error:
        longest = min(longest, verifier.config.max_position_embeddings)
        command = vllm_served.serve_command(verifier, manifest, output, name, longest, in_flight)
        raise EyasError(f"{error} Start it, where eyas is installed, and run this command again:\n{command}") from None


class _engine:
    """vLLM in this process, as a context; leaving it closes the store."""

    def __init__(
        self,
        verifier: Verifier,
        manifest: Manifest,
        output: Path,
        dtype: torch.dtype,
        longest: int,
        in_flight: int,
        more: dict[str, Any],
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        cpu = not torch.cuda.is_available()
        settings: dict[str, Any] = {
            "model": str(verifier.path),
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": min(longest, verifier.config.max_position_embeddings),
            "max_num_seqs": in_flight,
            "use_tqdm_on_load": False,
            "enforce_eager": cpu,  # a compiler pays off in long runs on a GPU
            **({"scheduler_cls": "eyas.capture.vllm_connector.OneTokenScheduler"} if cpu else {}),
            **more,
            "enable_prefix_caching": False,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(manifest.layers)}},
            },
            "kv_transfer_config": {
                "kv_connector": "StoreConnector",
                "kv_connector_module_path": "eyas.capture.vllm_connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"store": str(output.absolute())},
            },
        }
        from vllm import EngineArgs, LLMEngine

        try:
            self.engine: Any = LLMEngine.from_engine_args(EngineArgs(**settings))
        except EyasError:
            raise
        except Exception as error:  # of the engine's own kinds, by model, device and setting
            raise EyasError(f"vLLM does not start: {first_line(error)}") from error

    def __enter__(self) -> Any:
        return self.engine

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self.engine.engine_core.shutdown()
        if isinstance(error, Exception) and not isinstance(error, EyasError):
            raise EyasError(
                f"vLLM stopped: {first_line(error)}. What is recorded in the store is whole: run the same command again"
            ) from error


def _serve(
    engine: Any,
    todo: list[Conversation],
    answers: Answers | None,
    in_flight: int,
    record: Record,
    sampling: Callable[[Conversation, Answers | None], Any] | None = None,
) -> Iterator[Conversation]:
    """Ask for every conversation, turn by turn; yields those that are stored or on their way to the disk.

    Each step of the engine counts as progress: a token for each request that runs. sampling: what goes with a request,
    in the engine's form.
    """
    made = 0
    sampling = sampling or _sampling
    waiting, running = iter(todo), dict[str, Conversation]()
    number = 0

    def ask(c: Conversation) -> None:
        nonlocal number
        number += 1
        running[str(number)] = c
        c.tokens = c.tokens + c.pieces[c.turn].tolist()
        engine.add_request(str(number), {"prompt_token_ids": c.tokens}, sampling(c, answers))

    while True:
        while len(running) < 2 * in_flight and (c := next(waiting, None)) is not None:
            ask(c)
        if not running:
            _drain(engine)
            return
        outputs = engine.step()
        made += len(outputs)
        record.progress(made)
        for output in outputs:
            if not output.finished:
                continue
            c = running.pop(output.request_id)
            told = output.kv_transfer_params or {}
            if "eyas_error" in told:
                raise EyasError(f"capture stopped: {told['eyas_error']}")
            new = list(output.outputs[0].token_ids)
            if answers is None:
                c.chosen = new[0]
            else:
                c.trained.append((len(c.tokens), len(c.tokens) + len(new)))
                c.tokens = c.tokens + new
                c.turn += 1
                if c.turn < len(c.pieces):
                    if new[-1] != c.ends[c.turn - 1]:  # cut at max_new_tokens: the template still wants its end
                        c.tokens = [*c.tokens, c.ends[c.turn - 1]]
                    ask(c)
                    continue
            if told.get("eyas_stored") != c.name:
                raise EyasError(
                    f"capture stopped: the engine did not keep sample {c.name} ({output.outputs[0].finish_reason})"
                )
            yield c


def _drain(engine: Any) -> None:
    """Let the scheduler hand the last requests to the worker; an engine in a process of its own does that by itself."""
    core = getattr(engine.engine_core, "engine_core", None)
    while core is not None and core.scheduler.has_requests():
        engine.step()


def _sampling(c: Conversation, answers: Answers | None) -> Any:
    """vLLM's parameters of the next request of a conversation, and what the connector is to do with it."""
    from vllm import SamplingParams

    how, stored = _next(c, answers)
    return SamplingParams(**how, detokenize=False, extra_args={"kv_transfer_params": stored})


def _fields(c: Conversation, answers: Answers | None) -> dict[str, Any]:
    """The same for a server."""
    return vllm_served.request_fields(*_next(c, answers))


def _next(c: Conversation, answers: Answers | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """How the next request of a conversation is sampled, and its kv_transfer_params."""
    last = c.turn == len(c.pieces) - 1
    stored = request_params(c.name, c.tokens, c.trained, answers is not None) if last else {}
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
    if answers is not None:
        # By name and turn: the same answer whichever samples are in the batch or in the store already.
        seed = xxhash.xxh3_64_intdigest(f"{answers.seed} {c.turn} {c.name}".encode()) >> 1
        how = {"temperature": answers.temperature, "max_tokens": answers.max_new_tokens}
        if answers.temperature:
            how |= {"top_p": answers.top_p, "seed": seed}
    return how, stored


# -- the proof ---------------------------------------------------------------------------------------------------------


def _prove(verifier: Verifier, source: StoreSource, checked: list[Conversation], answers: Answers | None) -> float:
    """The share (0..1) of checked positions where head(norm(stored last state)) names the engine's choice.

    Of greedy answers every token is a choice, of a prepared sample the one token that was generated behind it. Sampled
    answers are no first choices: a tenth of them must be.
    Raises EyasError when that is too few, or when states are all zero, constant or equal.
    """
    head, norm = verifier.lm_head(), verifier.final_norm()
    number = {name: i for i, name in enumerate(source.ids)}
    agree: list[torch.Tensor] = []
    for c in checked:
        i = number[c.name]
        ids, _ = source.tokens(i)
        if not np.array_equal(ids, np.asarray(c.tokens, np.int32)):
            raise EyasError(
                f"capture stopped: sample {c.name} was stored with other tokens than the engine gave: report this"
            )
        states = source.states(i)
        check_shape_of(c.name, ids, states, source.manifest.layers)
        if answers is None:
            rows, chosen = states[-1, -1:], torch.tensor([c.chosen])
        else:
            first, stop = c.trained[-1]
            rows, chosen = states[-1, first - 1 : stop - 1], torch.tensor(c.tokens[first:stop])
        agree.append(near_ties(norm(rows.float()) @ head.T, chosen))
    share = float(torch.cat(agree).float().mean())
    needed = MUST_AGREE if answers is None or not answers.temperature else 0.1
    if share < needed:
        raise EyasError(
            f"capture stopped: the head, fed with the captured last states, names the engine's choice at only"
            f" {share:.1%} of {len(torch.cat(agree))} positions: these states are not what the verifier computes;"
            " please report this model and the version of vLLM"
        )
    return share
