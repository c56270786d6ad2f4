"""`eyas eval`: a drafter's figures on the validation split, and by real decoding of its prompts.

The samples are those the run kept for validation: no step has seen them. Each one's prompt (its tokens up to the first
trained one) is decoded greedily with the drafter and by the verifier alone.

Lossless is checked, not assumed. In float32 the two outputs must be equal token for token. Batches of other shapes
round differently, so a prompt that differs is decoded again alone before it counts. In bfloat16 rounding is coarse
enough to turn near-ties; every first difference must then be shown to be one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import yaml

from eyas.config import found_again
from eyas.device import compute_dtype, pick_device
from eyas.drafter.checkpoint import checkpoint_layers, load_checkpoint
from eyas.drafter.model import Drafter
from eyas.errors import EyasError
from eyas.evaluate.decode import Decoded, EagleDraft, decode, near_tie
from eyas.evaluate.offline import OfflineFigures, evaluate
from eyas.files import check_figures, check_writable, write_json
from eyas.record.record import Record
from eyas.regenerate import end_token_ids
from eyas.store.reader import Source, open_source
from eyas.store.remote import staged, url_of
from eyas.train.batches import Loader, pack, split_source
from eyas.train.rundir import START
from eyas.train.samples import kept_samples
from eyas.train.setup import aux_layers, verifier_head
from eyas.verifier import Verifier
from eyas.vocab import DraftVocab

Say = Callable[[str], None]
T = TypeVar("T")
TIMED = 4  # prompts whose single-stream speed is measured with and without the drafter
SAY_SECONDS = 5.0  # between two lines of a batch that is being decoded


@dataclass(frozen=True)
class EvalOptions:
    """What to evaluate and how. None: as in the run that made the checkpoint.

    dtype: of all figures; stream_dtype: of the speed of one stream alone, None for dtype. float32 proves that nothing
    is lost, token for token; speed is asked of the type that a server would use.
    """

    verifier_path: str | None = None
    data_dir: Path | None = None
    val_ratio: float | None = None
    max_seq_len: int | None = None
    draft_tokens: int = 3
    prompts: int = 64
    max_new_tokens: int = 64
    batch_size: int = 16
    dtype: str = "auto"
    stream_dtype: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False


def find_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint folder that `path` (a run directory or a checkpoint) means, and its run's settings if any."""
    folder = path / "best" if (path / "best").exists() else path
    folder = Path(os.path.realpath(folder))
    if not (folder / "config.json").exists():
        raise EyasError(f"{path} is neither a run directory with a best checkpoint nor a checkpoint folder")
    for parent in (folder, *list(folder.parents)[:2]):
        if (parent / "run.yaml").exists():
            try:
                about = yaml.safe_load((parent / "run.yaml").read_text())
                return folder, {**found_again(about), "run_dir": str(parent)}
            except OSError as e:
                raise EyasError(f"{parent / 'run.yaml'} cannot be read: {e.strerror}") from None
            except (ValueError, TypeError, KeyError, yaml.YAMLError):
                raise EyasError(f"{parent / 'run.yaml'} cannot be read: it is not what eyas train wrote") from None
    return folder, {}


def verifier_of(run: dict[str, Any], given: str | None, trust_remote_code: bool) -> Verifier:
    """The verifier that was named, or else the run's; EyasError says which of the two is not there."""
    try:
        return Verifier(given or run["verifier_path"], trust_remote_code=trust_remote_code)
    except EyasError as e:
        if given:
            raise
        raise EyasError(f"{e} (named by {Path(run['run_dir']) / 'run.yaml'}: --verifier-path names another)") from None


def check_verifier(folder: Path, verifier: Verifier) -> None:
    """EyasError where the checkpoint says that it was trained for another verifier than this one."""
    try:
        told = json.loads((folder / "eyas.json").read_text())["verifier"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # other tools' checkpoints do not say
    if told["fingerprint"] != verifier.fingerprint:
        raise EyasError(f"{folder} was trained for {told['name']}, not for {verifier.config.name} at {verifier.path}")


def evaluate_checkpoint(
    path: Path, options: EvalOptions, output: Path | None = None, say: Say = print, record: Record | None = None
) -> dict[str, Any]:
    """All figures of a checkpoint, written to `output` (default: eval.json in its run directory) and returned.

    Raises EyasError when the decoding is not lossless, after writing the figures.
    """
    record = record or Record(None)
    record.enter("reading verifier")
    folder, run = find_checkpoint(path)
    verifier_path = options.verifier_path or run.get("verifier_path")
    data_dir = options.data_dir or run.get("data_dir")
    if not verifier_path or not data_dir:
        raise EyasError(f"{folder} lies in no run directory: name --verifier-path and --data-dir")
    if options.data_dir is None and url_of(data_dir) is None and not Path(data_dir).exists():
        raise EyasError(
            f"the run's data are not at {data_dir}, which {Path(run['run_dir']) / 'run.yaml'} names: name --data-dir"
            " (a relative path there is of the folder that the run was started in)"
        )
    if output is None and run:
        output = Path(run["run_dir"]) / "eval.json"
    if output is not None:  # before minutes of work
        if output.is_dir():
            raise EyasError(f"--output {output} is a folder: name a file")
        check_figures(output)
        check_writable(output.parent, str(output))
    max_seq_len = options.max_seq_len or run.get("max_seq_len", 2048)
    val_ratio = run.get("val_ratio", 0.1) if options.val_ratio is None else options.val_ratio
    device = pick_device(options.device)
    dtype = compute_dtype(options.dtype, device)
    if options.stream_dtype:
        compute_dtype(options.stream_dtype, device)  # refuses a name that is no dtype before any work
    verifier = verifier_of(run, options.verifier_path, options.trust_remote_code)
    check_verifier(folder, verifier)
    record.enter("indexing")
    source = open_source(staged(data_dir, say, run.get("stage_dir")), verifier.config, verifier.fingerprint, say)
    record.enter("reading verifier")
    drafter, vocab = load_checkpoint(folder, verifier.config, verifier.embedding())
    layers = aux_layers(source, verifier)
    if layers != checkpoint_layers(folder, verifier.config):
        raise EyasError(f"{folder} reads other layers than {list(layers)}, which {data_dir} holds: name its own data")
    drafter.to(device).eval()
    _, val, _ = split_source(source, max_seq_len, val_ratio)
    if options.data_dir is None and options.val_ratio is None:
        val = never_trained(val, source, run)
    if not val:
        raise EyasError(f"{data_dir} keeps no samples for validation: use --val-ratio, or a larger store")

    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise EyasError(f"cannot write {output}: {e.strerror}") from None
        record.open()
    figures = offline(drafter, vocab, verifier, source, val, max_seq_len, options.draft_tokens, dtype, record)
    result: dict[str, Any] = {"checkpoint": folder.name, "val": figures.to_dict() if figures else None}
    if figures:
        say(offline_line(figures))
    found = [(source.ids[i], prompt_of(*source.tokens(i), max_seq_len)) for i in val]
    found = spread([(name, prompt) for name, prompt in found if prompt], options.prompts)
    if not found:
        raise EyasError(f"no validation sample of {data_dir} begins with a prompt: there is nothing to decode from")
    names, prompts = [name for name, _ in found], [prompt for _, prompt in found]
    result["decode"] = by_decoding(drafter, vocab, verifier, layers, prompts, options, dtype, device, say, record)
    result["decode"]["prompt_ids"] = names
    if output is not None:
        write_json(output, result)
    if not result["decode"]["lossless"]:
        bad = next(d for d in result["decode"]["differences"] if not d["explained"])
        raise EyasError(
            f"decoding is not lossless: {names[bad['prompt']]} differs from the verifier's own output at new token "
            f"{bad['at']} ({bad['drafted']} for {bad['alone']}); this is a fault of eyas or of the model's code"
        )
    return result


def never_trained(samples: list[int], source: Source, run: dict[str, Any]) -> list[int]:
    """Those of `samples` that the run has not trained. Where samples of its data came since, or are in quarantine, the
    split of what is there now differs from the run's at its edge."""
    kept = kept_samples(Path(run["run_dir"]) / START) if run else None
    trained = {kept.ids[i] for i in kept.train} if kept else set()
    return [i for i in samples if source.ids[i] not in trained]


def offline(
    drafter: Drafter,
    vocab: DraftVocab,
    verifier: Verifier,
    source: Source,
    samples: list[int],
    max_seq_len: int,
    steps: int,
    dtype: torch.dtype,
    record: Record,
) -> OfflineFigures | None:
    """Figures of `samples` from their captured states."""
    record.enter("validating")
    device = drafter.embedding.device
    head = verifier_head(verifier, source, vocab, device, dtype)
    packs = pack(samples, source.lengths, max_seq_len, max_seq_len)
    batches = record.follow(Loader(source, packs, steps, max_seq_len, 2), len(packs))
    return evaluate(drafter, head, batches, steps, dtype)


def spread(items: list[T], count: int) -> list[T]:
    """At most `count` of the items, evenly over their order: data often lies sorted by kind."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def prompt_of(ids: np.ndarray, loss_mask: np.ndarray, max_seq_len: int) -> list[int]:
    """The tokens before the first trained one; empty when there are none, or too many."""
    first = int(np.argmax(loss_mask))
    return ids[:first].tolist() if 0 < first < max_seq_len else []


def decoder(
    model: Any,
    drafter: Drafter,
    vocab: DraftVocab,
    verifier: Verifier,
    layers: tuple[int, ...],
    options: EvalOptions,
    dtype: torch.dtype,
) -> Callable[..., Decoded]:
    """Decodes a batch of prompts (token ids), with the drafter where the second argument says so; told: see decode."""
    targets = torch.from_numpy(vocab.targets).to(model.device)
    ends = set(end_token_ids(model, verifier.tokenizer))

    def run(batch: list[list[int]], drafted: bool, told: Callable[[Decoded], None] | None = None) -> Decoded:
        return decode(
            model,
            layers,
            batch,
            draft=EagleDraft(drafter, targets, dtype) if drafted else None,
            draft_tokens=options.draft_tokens,
            max_new_tokens=options.max_new_tokens,
            end_tokens=ends,
            told=told,
        )

    return run


def by_decoding(
    drafter: Drafter,
    vocab: DraftVocab,
    verifier: Verifier,
    layers: tuple[int, ...],
    prompts: list[list[int]],
    options: EvalOptions,
    dtype: torch.dtype,
    device: torch.device,
    say: Say = print,
    record: Record | None = None,
) -> dict[str, Any]:
    """Decode `prompts` with and without the drafter, compare, count, and time one stream."""
    record = record or Record(None)
    record.enter("reading verifier")
    model = verifier.load_model(dtype, device)
    run = decoder(model, drafter.for_inference(dtype), vocab, verifier, layers, options, dtype)

    # Prompts of like length share a batch; the order of the results is the order of the prompts.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[tuple[list[int], list[int]]] = [([], [])] * len(prompts)
    counted = Decoded([], accepted=[0] * options.draft_tokens)
    spoken = Spoken(say, record)
    record.enter("decoding")
    record.begin(len(prompts))
    for start in range(0, len(order), options.batch_size):
        rows = order[start : start + options.batch_size]
        batch = [prompts[i] for i in rows]
        done = min(start + options.batch_size, len(order))
        where, most = f"prompts {start + 1} to {done} of {len(order)}", len(batch) * options.max_new_tokens
        drafted = run(batch, True, spoken.about(f"{where}, with the drafter", most))
        alone = run(batch, False, spoken.about(f"{where}, the verifier alone", most))
        counted.rounds += drafted.rounds
        counted.accepted = [a + b for a, b in zip(counted.accepted, drafted.accepted, strict=True)]
        counted.tokens += drafted.tokens
        for i, a, b in zip(rows, drafted.tokens, alone.tokens, strict=True):
            outputs[i] = (a, b)
        record.count(done, counted.new_tokens)
        spoken.now(f"decoded {done}/{len(order)} prompts · accept length {counted.accept_length:.3f} so far")

    differences = []
    exact_model: Any = model if dtype == torch.float32 else None
    record.enter("comparing")
    for i, (a, b) in enumerate(outputs):
        if a != b and dtype == torch.float32:
            again = spoken.about(f"prompt {i + 1} of {len(outputs)} differs, again alone", options.max_new_tokens)
            a, b = (run([prompts[i]], drafted_too, again).tokens[0] for drafted_too in (True, False))
        if a == b:
            continue
        at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        explained, gap, limit = False, None, None
        if dtype != torch.float32 and at < min(len(a), len(b)):
            exact_model = exact_model or verifier.load_model(torch.float32, device)
            spoken.soon(f"prompt {i + 1} of {len(outputs)} differs: is it a near-tie?")
            explained, gap, limit = near_tie(model, exact_model, prompts[i] + a[:at], a[at], b[at])
        differences.append(
            {
                "prompt": i,
                "at": at,
                "drafted": a[at] if at < len(a) else None,
                "alone": b[at] if at < len(b) else None,
                "explained": explained,
                "gap": gap,
                "limit": limit,
            }
        )

    stream_dtype = compute_dtype(options.stream_dtype, device) if options.stream_dtype else dtype
    if stream_dtype != dtype:
        del model, exact_model
        record.enter("reading verifier")
        model = verifier.load_model(stream_dtype, device)
        run = decoder(model, drafter.for_inference(stream_dtype), vocab, verifier, layers, options, stream_dtype)
    speed = {True: 0.0, False: 0.0}
    record.enter("one stream")
    for drafted_too in speed:
        each, timed = [], spread(prompts, TIMED)
        how = "with the drafter" if drafted_too else "the verifier alone"
        for n, prompt in enumerate(timed, start=1):
            where = f"one stream, prompt {n} of {len(timed)}, {how}"
            each.append(run([prompt], drafted_too, spoken.about(where, options.max_new_tokens)))
        speed[drafted_too] = sum(d.new_tokens for d in each) / max(sum(d.seconds for d in each), 1e-9)
    result = {
        "accept_length": counted.accept_length,
        "per_position": counted.per_position,
        "lossless": all(d["explained"] for d in differences),
        "identical": len(prompts) - len(differences),
        "differences": differences,
        "prompts": len(prompts),
        "tokens": counted.new_tokens,
        "rounds": counted.rounds,
        "draft_tokens": options.draft_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "stream_dtype": str(stream_dtype).removeprefix("torch."),
        "tokens_per_s": speed[True],
        "tokens_per_s_alone": speed[False],
        "speedup": speed[True] / speed[False] if speed[False] else 0.0,
    }
    say(decode_line(result))
    return result


class Spoken:
    """Says where the decoding stands when nothing has been said for SAY_SECONDS, and keeps the record's beat going."""

    def __init__(self, say: Say, record: Record) -> None:
        self._say, self._record, self._at = say, record, time.monotonic()

    def now(self, text: str) -> None:
        """Say this."""
        self._at = time.monotonic()
        self._say(text)

    def soon(self, text: str) -> None:
        """Say this if it is time."""
        if time.monotonic() - self._at >= SAY_SECONDS:
            self.now(text)

    def about(self, where: str, most: int) -> Callable[[Decoded], None]:
        """For `decode`: what is decoded, and how many tokens may come out at most."""

        def told(so_far: Decoded) -> None:
            self._record.progress(so_far.new_tokens, most)
            self.soon(f"decoding {where} · {so_far.new_tokens:,} of at most {most:,} tokens")

        return told


def offline_line(f: OfflineFigures) -> str:
    """The offline figures in one line."""
    return (
        f"validation ({f.samples} samples, {f.positions:,} positions): accuracy {slashed(f.accuracy)} conditional, "
        f"{slashed(f.accuracy_joint)} joint · acceptance {slashed(f.acceptance)} · "
        f"accept length {f.accept_length:.3f} at temperature 1, "
        f"{f.accept_length_greedy:.3f} greedy (simulated)"
    )


def decode_line(r: dict[str, Any]) -> str:
    """The decoding figures in one line."""
    ties = r["prompts"] - r["identical"]
    rest = f", {ties} with a near-tie that {r['dtype']} turned" if ties else ""
    same = f"lossless ({r['identical']} of {r['prompts']} identical{rest})" if r["lossless"] else "NOT lossless"
    return (
        f"decoding ({r['prompts']} prompts, {r['tokens']:,} tokens, {r['draft_tokens']} drafts a round, {r['dtype']}): "
        f"accept length {r['accept_length']:.3f} counted · kept {slashed(r['per_position'])} · {same} · "
        f"one stream {r['tokens_per_s']:.1f} tokens/s, {r['tokens_per_s_alone']:.1f} alone ({r['speedup']:.2f} times)"
    )


def slashed(values: list[float]) -> str:
    """0.512/0.331/0.204."""
    return "/".join(f"{v:.3f}" for v in values)
