"""Capture with the verifier in this process: prepared tokens -> a store of its states.

The decoder runs without its head. Hooks take only the four states that are kept: the auxiliary ones after layers
2, n // 2 and n - 3 (HF index), and the last one as it enters the final norm. Samples are sorted by length and batched
to a budget of tokens, padded on the right: a causal model's real rows cannot see what comes after them, so no
attention mask is needed and the fast causal attention stays in use.

The states prove themselves while they are made: at the first batch and about every tenth of the way, the head must
rank first, from the stored last state, what the verifier itself ranks first for that sample alone. All states must be
finite, and none zero, constant or equal to another layer's. A capture that goes on computes one stored sample anew.

Cost: one forward pass without the head, and about 1 % for the checks; memory is four states of one batch beside the
model. Writing takes under 1 % of the time on a CPU and is not overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from eyas.capture.common import (
    Progress,
    capture_layers,
    check_finite,
    check_output,
    check_prepared,
    check_shape_of,
    check_space,
    done_ids,
    manifest_of,
    near_ties,
)
from eyas.device import compute_dtype, pick_device
from eyas.errors import EyasError
from eyas.prepare import Prepared, read_prepared
from eyas.record.record import Record
from eyas.store import codecs, layout
from eyas.store.agreement import top1
from eyas.store.layout import Manifest
from eyas.store.logits import make_top_k
from eyas.store.reader import StoreSource
from eyas.store.writer import StoreWriter
from eyas.verifier import Verifier

CHECKS = 10  # self checks over the whole capture
CHECK_ROWS = 128  # positions of one sample that the verifier's own logits are computed for
MUST_AGREE = 0.98
CALIBRATION_SAMPLES = 64
MUST_BE_NEAR = 0.1  # relative, of a row; rounding, other batches and 8-bit codecs stay below half of it


def capture(
    verifier: Verifier,
    prepared_dir: Path,
    output_dir: Path,
    *,
    layers: tuple[int, int, int] | None = None,
    batch_tokens: int = 4096,
    codec: str = "bf16",
    last: str = "all",
    dtype: str = "auto",
    device: str = "auto",
    say: Callable[[str], None] = print,
    record: Record | None = None,
) -> dict[str, Any]:
    """Write the states of every prepared sample to the store `output_dir`; goes on where an earlier run stopped.

    layers: HF indices of the auxiliary states, ascending; default (2, n // 2, n - 3).
    batch_tokens: padded tokens in one forward pass (a longer sample is a batch of its own).
    codec, last: how the store keeps the states (codecs.py). For int8 some samples run twice: their states give the
    sizes of the channels.
    Returns {path, samples, tokens, captured_samples, captured_tokens, seconds, tokens_per_second, bytes, agreement}.
    Raises EyasError when the input is of another verifier, the store of another run, the disk too small or unwritable,
    or when the states do not prove themselves; what is recorded in the store by then stays good.
    """
    codecs.check_names(codec, last)
    prepared = read_prepared(Path(prepared_dir))
    output = Path(output_dir)
    check_prepared(prepared, Path(prepared_dir), verifier)
    check_output(output, Path(prepared_dir))
    kind = str(pick_device(device))
    number_type = compute_dtype(dtype, kind)
    manifest = replace(
        manifest_of(verifier, prepared, capture_layers(verifier, layers), _extractor(number_type)),
        codec=codec,
        last_rows=last,
        channels=_channels_there(output) if codec == "int8" else "",
    )
    done = done_ids(output, manifest)
    todo = [i for i in range(len(prepared.ids)) if prepared.ids[i] not in done]
    lengths = [len(ids) for ids in prepared.input_ids]
    check_space(output, [lengths[i] for i in todo], manifest, say)
    progress = Progress(say, len(lengths), lengths, todo)
    if done:
        say(f"capture: {len(prepared.ids) - len(todo):,} samples are in {output} already")
    agreements: list[float] = []
    record = record or Record(None)
    if todo:
        record.enter("reading verifier")
        say(f"capture: loading {verifier.config.name} ({str(number_type).removeprefix('torch.')}, {kind})")
        run = _Run(verifier, manifest, number_type, kind)
        if done:
            run.check_stored(StoreSource(output, verifier.config, verifier.fingerprint))
        keep = make_top_k(manifest.logits, verifier, "before", pick_device(device)) if manifest.logits else None
        progress.start()
        if codec == "int8" and not manifest.channels:
            manifest = replace(manifest, channels=_calibrate(run, prepared, todo, batch_tokens))
        with StoreWriter(output, manifest) as writer:
            record.open()
            record.begin(progress.all_samples, progress.samples, kind, progress.share)
            checked = -1
            for batch in _batches(prepared, todo, batch_tokens):
                record.enter("forward")
                states = run.states([prepared.input_ids[i] for i in batch])
                names = [prepared.ids[i] for i in batch]
                rows = [prepared.input_ids[i] for i in batch]
                for name, s in zip(names, states, strict=True):
                    check_finite(name, s, manifest.layers)
                if (tenth := CHECKS * progress.tokens // sum(lengths)) > checked:
                    checked = tenth
                    record.enter("validating")
                    agreements.append(run.check(names, rows, states))
                record.enter("saving")
                for i, s in zip(batch, states, strict=True):
                    kept = list(s) if keep is None else keep.instead(list(s), prepared.loss_mask[i])
                    writer.add(prepared.ids[i], prepared.input_ids[i], prepared.loss_mask[i], kept)
                progress.add(len(batch), sum(map(len, rows)), record)
            record.enter("finishing")
    size = sum(p.stat().st_size for p in output.iterdir() if p.is_file())
    agreement = min(agreements) if agreements else None
    if agreement is not None:
        say(f"capture: {size / 1e6:,.0f} MB; the head agrees with the verifier on {agreement:.1%} of checked positions")
    return {
        "path": str(output),
        "samples": len(prepared.ids),
        "tokens": sum(lengths),
        **progress.figures(),
        "bytes": size,
        "agreement": agreement,
    }


def goes_on(verifier: Verifier, prepared_dir: Path, output_dir: Path) -> bool:
    """Whether the store `output_dir` is of these very samples and undamaged, whole or begun: `capture` goes on."""
    if not (output_dir / layout.MANIFEST).exists():
        return False
    dtype = compute_dtype(device=pick_device())
    wanted = manifest_of(verifier, read_prepared(prepared_dir), capture_layers(verifier, None), _extractor(dtype))
    try:
        done_ids(output_dir, wanted)
    except EyasError:
        return False
    return True


def _extractor(dtype: torch.dtype) -> str:
    """What captures, as the manifest names it."""
    import transformers

    return f"transformers {transformers.__version__}, {str(dtype).removeprefix('torch.')}"


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
            check_shape_of(name, ids, s, self.manifest.layers)
        # The shortest sample of the batch has the most padding, so this also proves that padding changes nothing.
        i = min(range(len(rows)), key=lambda j: len(rows[j]))
        alone = torch.from_numpy(np.asarray(rows[i][:CHECK_ROWS], dtype=np.int64))[None]
        own = self.model(input_ids=alone.to(self.device), use_cache=False).logits[0].float().cpu()  # [T, V]
        named = top1(states[i][-1, :CHECK_ROWS], self.head, self.final_norm)
        share = float(near_ties(own, named).float().mean())
        if share <= MUST_AGREE:
            raise EyasError(
                f"capture stopped: on sample {names[i]} the head, fed with the captured last state (layer"
                f" {self.manifest.layers[-1]}), agrees with the verifier's own choice at only {share:.1%} of"
                f" {len(named)} positions: these states are not what the verifier computes; please report this model"
            )
        return share

    def check_stored(self, source: StoreSource) -> None:
        """EyasError where the verifier does not compute anew what a store that is to be gone on with holds."""
        i = int(np.argmin(np.abs(source.lengths - CHECK_ROWS)))
        rows = min(int(source.lengths[i]), CHECK_ROWS)
        own, there = self.states([source.tokens(i)[0][:rows]])[0], source.states(i, 0, rows)
        layers = self.manifest.state_layers
        for k, a, b in zip(layers, own[: len(layers)].float(), there.float(), strict=True):
            off = float(((a - b).norm(dim=1) / a.norm(dim=1)).nanmedian())  # rows that the store leaves out are NaN
            if off > MUST_BE_NEAR:
                raise EyasError(
                    f"{source.path} holds states of another verifier: layer {k} of sample {source.ids[i]} is {off:.0%}"
                    " off what this one computes: name the verifier it was captured from, or another folder"
                )


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


def _channels_there(output: Path) -> str:
    """The sizes of the channels that a capture into `output` has begun with, or "" before it has."""
    return Manifest.load(output).channels if (output / layout.MANIFEST).exists() else ""


def _calibrate(run: _Run, prepared: Prepared, todo: list[int], batch_tokens: int) -> str:
    """The sizes of the channels, from samples spread over what is to be captured."""
    some = todo[:: max(1, len(todo) // CALIBRATION_SAMPLES)]
    batches = _batches(prepared, some, batch_tokens)
    states = (s for batch in batches for s in run.states([prepared.input_ids[i] for i in batch]))
    layers, width = len(run.manifest.state_layers), run.manifest.hidden_size
    return codecs.said_channels(codecs.calibrate((s[:layers] for s in states), layers, width))


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
