"""Capture with the verifier in this process: prepared tokens -> a store of its states.

The decoder runs without its head. Hooks take only the four states that are kept: the auxiliary ones after layers
2, n // 2 and n - 3 (HF index), and the last one as it enters the final norm. Samples are sorted by length and batched
to a budget of tokens, padded on the right: a causal model's real rows cannot see what comes after them, so no
attention mask is needed and the fast causal attention stays in use.

The states prove themselves while they are made: at the first batch and about every tenth of the way, the head must
rank first, from the stored last state, what the verifier itself ranks first for that sample alone. All states must be
finite, and none zero, constant or equal to another layer's.

Cost: one forward pass without the head, and about 1 % for the checks; memory is four states of one batch beside the
model. Writing takes under 1 % of the time on a CPU and is not overlapped.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn

from eyas import __version__
from eyas.device import compute_dtype, pick_device
from eyas.errors import EyasError
from eyas.prepare import Prepared, read_prepared
from eyas.record.record import Record
from eyas.store import layout
from eyas.store.agreement import top1
from eyas.store.layout import Manifest
from eyas.store.writer import StoreWriter
from eyas.verifier import Verifier

SAY_SECONDS = 2.0
CHECKS = 10  # self checks over the whole capture
CHECK_ROWS = 128  # positions of one sample that the verifier's own logits are computed for
MUST_AGREE = 0.98
NEAR_TIE = 0.01  # of the spread of a row's logits: bfloat16 storage may swap tokens that are this close


def capture(
    verifier: Verifier,
    prepared_dir: Path,
    output_dir: Path,
    *,
    layers: tuple[int, int, int] | None = None,
    batch_tokens: int = 4096,
    dtype: str = "auto",
    device: str = "auto",
    say: Callable[[str], None] = print,
    record: Record | None = None,
) -> dict[str, Any]:
    """Write the states of every prepared sample to the store `output_dir`; goes on where an earlier run stopped.

    layers: HF indices of the auxiliary states, ascending; default (2, n // 2, n - 3).
    batch_tokens: padded tokens in one forward pass (a longer sample is a batch of its own).
    Returns {path, samples, tokens, captured_samples, captured_tokens, seconds, tokens_per_second, bytes, agreement}.
    Raises EyasError when the input is of another verifier, the store of another run, the disk too small or unwritable,
    or when the states do not prove themselves; what is recorded in the store by then stays good.
    """
    prepared = read_prepared(Path(prepared_dir))
    output = Path(output_dir)
    _check_prepared(prepared, Path(prepared_dir), verifier)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    number_type = compute_dtype(dtype, kind)
    manifest = _manifest(verifier, prepared, _layers(verifier, layers), number_type)
    done = _done(output, manifest)
    todo = [i for i in range(len(prepared.ids)) if prepared.ids[i] not in done]
    _check_space(output, [len(prepared.input_ids[i]) for i in todo], manifest)
    progress = _Progress(say, [len(ids) for ids in prepared.input_ids], todo)
    if done:
        say(f"capture: {len(prepared.ids) - len(todo):,} samples are in {output} already")
    agreements: list[float] = []
    record = record or Record(None)
    if todo:
        record.enter("reading verifier")
        say(f"capture: loading {verifier.config.name} ({str(number_type).removeprefix('torch.')}, {kind})")
        run = _Run(verifier, manifest, number_type, kind)
        progress.start()
        with StoreWriter(output, manifest) as writer:
            record.open()
            record.begin(progress.all_samples, progress.samples, kind)
            checked = -1
            for batch in _batches(prepared, todo, batch_tokens):
                record.enter("forward")
                states = run.states([prepared.input_ids[i] for i in batch])
                names = [prepared.ids[i] for i in batch]
                rows = [prepared.input_ids[i] for i in batch]
                for name, s in zip(names, states, strict=True):
                    _check_finite(name, s, manifest.layers)
                if (tenth := CHECKS * progress.tokens // progress.all_tokens) > checked:
                    checked = tenth
                    record.enter("validating")
                    agreements.append(run.check(names, rows, states))
                record.enter("saving")
                for i, s in zip(batch, states, strict=True):
                    writer.add(prepared.ids[i], prepared.input_ids[i], prepared.loss_mask[i], s)
                progress.add(len(batch), sum(map(len, rows)))
                record.count(progress.samples, progress.tokens)
            record.enter("finishing")
    size = sum(p.stat().st_size for p in output.iterdir() if p.is_file())
    agreement = min(agreements) if agreements else None
    if agreement is not None:
        say(f"capture: {size / 1e6:,.0f} MB; the head agrees with the verifier on {agreement:.1%} of checked positions")
    return {
        "path": str(output),
        "samples": len(prepared.ids),
        "tokens": progress.all_tokens,
        **progress.figures(),
        "bytes": size,
        "agreement": agreement,
    }


def goes_on(verifier: Verifier, prepared_dir: Path, output_dir: Path) -> bool:
    """Whether the store `output_dir` is of these very samples, whole or begun: `capture` would go on with it."""
    if not (output_dir / layout.MANIFEST).exists():
        return False
    dtype = compute_dtype(device=pick_device())
    wanted = _manifest(verifier, read_prepared(prepared_dir), _layers(verifier, None), dtype)
    try:
        return not Manifest.load(output_dir).differences(wanted)
    except EyasError:
        return False


class _Run:
    """The loaded verifier with its hooks."""

    def __init__(self, verifier: Verifier, manifest: Manifest, dtype: torch.dtype, device: str) -> None:
        self.model = verifier.load_model(dtype, device)
        self.device, self.manifest = device, manifest
        self.decoder, self.layers, self.norm = _decoder(self.model, verifier.config.num_layers)
        self.final_norm = verifier.final_norm()
        self.head = verifier.lm_head()  # [V, Ht] float32: what the trainer will use

    @torch.inference_mode()
    def states(self, samples: list[npt.NDArray[np.int32]]) -> list[Tensor]:
        """The states [layers, T, Ht] bfloat16 of every sample, run as one padded batch."""
        width = max(map(len, samples))
        ids = torch.zeros((len(samples), width), dtype=torch.int64)
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample)] = torch.from_numpy(np.asarray(sample, dtype=np.int64))
        with self._kept() as kept:
            self.decoder(input_ids=ids.to(self.device), use_cache=False)
        batch = torch.stack([kept[k].cpu() for k in self.manifest.layers])  # [layers, B, width, Ht]
        return [batch[:, b, : len(sample)] for b, sample in enumerate(samples)]

    @contextmanager
    def _kept(self) -> Iterator[dict[int, Tensor]]:
        """HF index -> state [B, T, Ht] bfloat16, filled by hooks during a forward pass."""
        kept: dict[int, Tensor] = {}

        def after(k: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_module: nn.Module, _input: Any, output: Any) -> None:
                kept[k] = (output[0] if isinstance(output, tuple) else output).to(torch.bfloat16)

            return hook

        def before_norm(_module: nn.Module, inputs: Any) -> None:
            kept[self.manifest.layers[-1]] = inputs[0].to(torch.bfloat16)

        with ExitStack() as hooks:
            for k in self.manifest.layers[:-1]:
                hooks.callback(self.layers[k - 1].register_forward_hook(after(k)).remove)
            hooks.callback(self.norm.register_forward_pre_hook(before_norm).remove)
            yield kept

    @torch.inference_mode()
    def check(self, names: list[str], rows: list[npt.NDArray[np.int32]], states: list[Tensor]) -> float:
        """The self check on one batch; returns the agreement (0..1). Raises EyasError naming layer and sample."""
        for name, ids, s in zip(names, rows, states, strict=True):
            _check_shape_of(name, ids, s, self.manifest.layers)
        # The shortest sample of the batch has the most padding, so this also proves that padding changes nothing.
        i = min(range(len(rows)), key=lambda j: len(rows[j]))
        alone = torch.from_numpy(np.asarray(rows[i][:CHECK_ROWS], dtype=np.int64))[None]
        own = self.model(input_ids=alone.to(self.device), use_cache=False).logits[0].float().cpu()  # [T, V]
        named = top1(states[i][-1, :CHECK_ROWS], self.head, self.final_norm)
        behind = own.max(dim=1).values - own.gather(1, named[:, None])[:, 0]
        share = float((behind <= NEAR_TIE * (own.max(dim=1).values - own.mean(dim=1))).float().mean())
        if share <= MUST_AGREE:
            raise EyasError(
                f"capture stopped: on sample {names[i]} the head, fed with the captured last state (layer"
                f" {self.manifest.layers[-1]}), agrees with the verifier's own choice at only {share:.1%} of"
                f" {len(named)} positions: these states are not what the verifier computes; please report this model"
            )
        return share


def _decoder(model: Any, num_layers: int) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The module that holds the decoder layers, the layers, and the final norm. Raises EyasError."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        text = hasattr(module, "embed_tokens")  # and not the vision tower of a multimodal model
        if text and isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
            for name in ("norm", "final_layernorm", "final_norm"):
                norm = getattr(module, name, None)
                if isinstance(norm, nn.Module):
                    return module, layers, norm
    raise EyasError(
        f"{type(model).__name__} has no module with {num_layers} `layers` and a final `norm`: eyas cannot capture from"
        " it in this process"
    )


def _layers(verifier: Verifier, asked: tuple[int, int, int] | None) -> tuple[int, ...]:
    n = verifier.config.num_layers
    layers = (*(asked or verifier.config.capture_layers()), n)
    if len(layers) != 4 or not all(0 < a < b for a, b in pairwise(layers)):
        raise EyasError(
            f"layers {list(layers[:-1])} of a verifier with {n} layers: name three different ones, ascending, from 1"
            f" to {n - 1} (--layers 1,2,3)"
        )
    return layers


def _manifest(verifier: Verifier, prepared: Prepared, layers: tuple[int, ...], dtype: torch.dtype) -> Manifest:
    import transformers

    config = verifier.config
    digest = xxhash.xxh3_64()
    for name, ids, mask in zip(prepared.ids, prepared.input_ids, prepared.loss_mask, strict=True):
        digest.update(name.encode() + b"\0")
        digest.update(np.asarray(ids, dtype=np.int32).tobytes())
        digest.update(np.asarray(mask, dtype=np.bool_).tobytes())
    folder = verifier.config.path
    return Manifest(
        verifier=config.name,
        fingerprint=verifier.fingerprint,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        layers=layers,
        norm_side="before",
        template_hash=str(prepared.manifest.get("template_hash", "")),
        extractor=f"eyas {__version__}, transformers {transformers.__version__}, {str(dtype).removeprefix('torch.')}",
        revision=folder.name if folder.parent.name == "snapshots" else "",
        source=digest.hexdigest(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _check_prepared(prepared: Prepared, folder: Path, verifier: Verifier) -> None:
    if not prepared.ids:
        raise EyasError(f"{folder} holds no samples: run eyas prepare again")
    if len(set(prepared.ids)) != len(prepared.ids):
        raise EyasError(f"{folder} holds two samples of one id: give every conversation its own")
    whose = prepared.manifest.get("verifier", {})
    if whose.get("fingerprint") not in (None, "", verifier.fingerprint):
        raise EyasError(
            f"{folder} was prepared for {whose.get('name')}, not for {verifier.config.name}: run eyas prepare again"
        )
    for name, ids in zip(prepared.ids, prepared.input_ids, strict=True):
        if len(ids) == 0 or int(np.min(ids)) < 0 or int(np.max(ids)) >= verifier.config.vocab_size:
            raise EyasError(
                f"{folder}: sample {name} has no tokens, or ids outside the {verifier.config.vocab_size:,} of"
                f" {verifier.config.name}: run eyas prepare again"
            )


def _done(output: Path, manifest: Manifest) -> set[str]:
    """Ids that the store holds already, before anything is loaded or written. Raises EyasError for another store."""
    if not (output / layout.MANIFEST).exists():
        return set()
    if differences := Manifest.load(output).differences(manifest):
        raise EyasError(
            f"{output} holds states of another capture ({'; '.join(differences)}): name another folder, or delete it"
        )
    return {r.id for journal in layout.journals(output) for r in layout.read_journal(journal).records}


def _check_space(output: Path, lengths: list[int], manifest: Manifest) -> None:
    needed = sum(layout.sample_bytes(t, len(manifest.layers), manifest.hidden_size) for t in lengths)
    needed += (1 << 20) * (needed // (1 << 30) + 1) if needed else 0  # the shards' headers
    there = next(p for p in (output, *output.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise EyasError(
            f"{output}: the states of {sum(lengths):,} tokens need {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are"
            " free there: make room, name another folder, or prepare less"
        )


def _batches(prepared: Prepared, todo: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Sample numbers, the longest first (if memory does not suffice, that shows at once), cut to the budget."""
    batch: list[int] = []
    for i in sorted(todo, key=lambda i: -len(prepared.input_ids[i])):
        if batch and (len(batch) + 1) * len(prepared.input_ids[batch[0]]) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _check_finite(name: str, states: Tensor, layers: tuple[int, ...]) -> None:
    if not torch.isfinite(states).all():
        bad = next(k for k, s in zip(layers, states, strict=True) if not torch.isfinite(s).all())
        raise EyasError(
            f"capture stopped: sample {name} has NaN or infinite states at layer {bad}: the verifier overflows in this"
            " dtype (try --dtype fp32), or its weights are damaged"
        )


def _check_shape_of(name: str, ids: npt.NDArray[np.int32], states: Tensor, layers: tuple[int, ...]) -> None:
    """No layer [T, Ht] may be all zero, the same at every position, or the same as the layer before."""
    varied = len(set(np.asarray(ids).tolist())) > 1
    for j, k in enumerate(layers):
        if not states[j].any():
            fault = f"layer {k} is all zero"
        elif varied and bool((states[j] == states[j, :1]).all()):
            fault = f"layer {k} is the same at every position"
        elif j and torch.equal(states[j], states[j - 1]):
            fault = f"layers {layers[j - 1]} and {k} are equal"
        else:
            continue
        raise EyasError(f"capture stopped: in sample {name}, {fault}: the verifier's weights may be damaged")


class _Progress:
    """Says where the capture stands, at most every SAY_SECONDS."""

    def __init__(self, say: Callable[[str], None], lengths: list[int], todo: list[int]) -> None:
        self.say = say
        self.all_samples, self.all_tokens = len(lengths), sum(lengths)
        self.samples = self.all_samples - len(todo)
        self.tokens = self.all_tokens - sum(lengths[i] for i in todo)
        self.new_samples = self.new_tokens = 0
        self.started = self.said = time.monotonic()

    def start(self) -> None:
        self.started = self.said = time.monotonic()
        self.say(self._line())

    def add(self, samples: int, tokens: int) -> None:
        self.samples, self.tokens = self.samples + samples, self.tokens + tokens
        self.new_samples, self.new_tokens = self.new_samples + samples, self.new_tokens + tokens
        if time.monotonic() - self.said >= SAY_SECONDS or self.samples == self.all_samples:
            self.said = time.monotonic()
            self.say(self._line())

    def _line(self) -> str:
        line = f"capture {self.samples:,}/{self.all_samples:,} samples · {self.tokens:,}/{self.all_tokens:,} tokens"
        if self.new_tokens:
            pace = self.new_tokens / (time.monotonic() - self.started)
            line += f" · {pace:,.0f} tokens/s · {(self.all_tokens - self.tokens) / pace:,.0f} s left"
        return line

    def figures(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.started if self.new_tokens else 0.0
        return {
            "captured_samples": self.new_samples,
            "captured_tokens": self.new_tokens,
            "seconds": seconds,
            "tokens_per_second": self.new_tokens / seconds if seconds else 0.0,
        }
