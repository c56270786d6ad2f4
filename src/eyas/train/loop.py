"""The training loop: from settings to checkpoints.

Reads top to bottom: what is there is opened and checked against each other, then epochs of steps, each epoch followed
by validation and a checkpoint. The best checkpoint is the one with the longest simulated accept length on the
validation split: with longer training the loss goes on falling while the accept length falls too.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from torch import Tensor

import eyas
from eyas.config import TrainConfig
from eyas.device import compute_dtype, pick_device
from eyas.drafter.checkpoint import config_json, save_checkpoint
from eyas.drafter.loss import head_loss, state_loss, verifier_side
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.drafter.start import start_from_verifier, start_random
from eyas.errors import EyasError
from eyas.evaluate.offline import OfflineFigures, VerifierHead, evaluate
from eyas.files import write_json, write_whole
from eyas.record.record import Record
from eyas.store.reader import Source, open_source
from eyas.store.readpath import ReadPath
from eyas.train.batches import Batch, Loader, epoch_order, pack, split_source
from eyas.train.optim import learning_rate, make_optimiser
from eyas.verifier import Verifier, VerifierConfig
from eyas.vocab import DraftVocab
from eyas.vocab import load as load_vocab

Say = Callable[[str], None]


class Run:
    """Everything one training run holds. `Run(config)` opens and checks; `train()` goes."""

    def __init__(self, config: TrainConfig, say: Say = print, record: Record | None = None) -> None:
        self.config, self.say = config, say
        self.record = record or Record(None, say=say)
        self.record.enter("reading verifier")
        torch.manual_seed(config.seed)  # of noise and dropout
        self.device = pick_device(config.device)
        self.dtype = compute_dtype(config.dtype, self.device)
        self.verifier = Verifier(config.verifier_path, trust_remote_code=config.trust_remote_code)
        self.record.enter("indexing")
        self.source = open_source(config.data_dir, self.verifier.config, self.verifier.fingerprint, say)
        # Filling the cache costs more than reading past it, and one epoch never comes back to it.
        cache_gb = 0 if config.epochs == 1 and config.cache_gb == "auto" else config.cache_gb
        self.reads = ReadPath(self.source, cache_gb=cache_gb, device=self.device, say=say)
        self.vocab = self._vocab()
        self.train_samples, self.val_samples = self._split()
        self.record.enter("reading verifier")
        self.head = verifier_head(self.verifier, self.source, self.vocab, self.device, self.dtype)
        self.drafter = self._drafter().to(self.device)
        self.layers = aux_layers(self.source, self.verifier)
        config_json(self.drafter.config, self.verifier.config, self.layers, "float32")  # refuses before any work
        self.optimiser = make_optimiser(self.drafter, config)
        self.noise = torch.Generator(self.device).manual_seed(config.seed)
        self.batch_tokens = config.batch_tokens or config.max_seq_len
        self.epochs = [self._packs(epoch) for epoch in range(config.epochs)]
        self.total = sum(map(len, self.epochs))
        self.step = 0
        self.best: tuple[float, Path] | None = None
        self.validations: list[dict[str, Any]] = []

    def _vocab(self) -> DraftVocab:
        V = self.verifier.config.vocab_size
        if self.config.vocab_mapping_dir is None:
            return DraftVocab(np.zeros(V, dtype=np.int64), np.ones(V, dtype=bool))
        return load_vocab(self.config.vocab_mapping_dir, V, self.verifier.fingerprint, self.say)

    def _split(self) -> tuple[list[int], list[int]]:
        for name, reason in self.source.skipped[:5]:
            self.say(f"skipped {name}: {reason}")
        if len(self.source.skipped) > 5:
            self.say(f"skipped {len(self.source.skipped):,} samples in all")
        K = self.config.max_seq_len
        train, val, unusable = split_source(self.source, K, self.config.val_ratio)
        if unusable:
            self.say(f"left out {unusable:,} samples with no trained position in their first {K:,} tokens")
        if not train:
            raise EyasError(f"{self.config.data_dir} holds no trainable tokens: check the loss masks (eyas prepare)")
        long = int((self.source.lengths[train + val] > K).sum())
        if long:
            self.say(f"{long:,} samples are longer than {K:,} tokens and are cut there (--max-seq-len)")
        return train, val

    def _drafter(self) -> Drafter:
        c, v = self.config, self.verifier.config
        drafter = Drafter(drafter_config(c, v, self.vocab.size), self.verifier.embedding(self.dtype))
        start_random(drafter, c.seed)
        if c.init == "verifier":
            targets = torch.from_numpy(self.vocab.targets)
            taken = start_from_verifier(drafter, self.verifier, targets, aux_layers(self.source, self.verifier)[2])
            self.say(f"starts from the verifier's {', '.join(taken) or 'nothing: the sizes differ'}")
        drafter.lm_head.weight.requires_grad_(not c.freeze_head)
        drafter.midlayer.dropout = drafter.midlayer.mlp.dropout = c.dropout
        return drafter

    def _packs(self, epoch: int) -> list[list[int]]:
        order = epoch_order(self.train_samples, self.config.seed, epoch)
        return pack(order, self.source.lengths, self.batch_tokens, self.config.max_seq_len)

    def train(self) -> dict[str, Any]:
        """Train all epochs; returns what summary.json holds."""
        c = self.config
        record = self.record
        save_run(c, self.source, self.verifier)
        record.open()
        tokens = int(np.minimum(self.source.lengths[self.train_samples], c.max_seq_len).sum())
        self.say(
            f"{len(self.train_samples):,} samples train ({tokens:,} tokens), {len(self.val_samples):,} validate · "
            f"{self.total:,} steps in {c.epochs} epochs · "
            f"{sum(p.numel() for p in self.drafter.parameters()) / 1e6:.1f} M parameters · "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        )
        started, self.tokens = time.monotonic(), 0
        metrics: dict[str, Any] = {}
        waited = 0.0
        record.begin(self.total, self.step, str(self.device))
        for epoch, packs in enumerate(self.epochs):
            steps = 1 if epoch < c.ttt_warmup_epochs else c.ttt_steps
            loader = Loader(self.reads, packs, steps, c.max_seq_len, c.num_workers, device=self.device)
            for batch in record.data(loader, self.source.ids.__getitem__, "copying"):
                metrics = self._step(batch)
                self.step += 1
                self.tokens += batch.tokens
                record.step(
                    step=self.step, tokens=batch.tokens, samples=self._names(batch), epoch=f"{epoch + 1}/{c.epochs}",
                    **metrics,
                )  # fmt: skip
            waited += loader.waited
            self._validate_and_save(epoch)
        seconds = time.monotonic() - started
        summary = {
            "steps": self.step,
            "epochs": c.epochs,
            "seconds": round(seconds, 2),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / seconds, 1),
            "data_wait_share": round(waited / seconds, 4),
            "final_loss": metrics["loss"],
            "validations": self.validations,
            "best": str(self.best[1].name) if self.best else None,
            "skipped": [list(s) for s in self.source.skipped],
        }
        write_json(c.output_dir / "summary.json", summary)
        self.say(f"done: {self.step:,} steps in {seconds:,.0f} s · best checkpoint {c.output_dir / 'best'}")
        return summary

    def _step(self, batch: Batch) -> dict[str, Any]:
        """One optimiser step. Returns loss, accuracy per TTT step, gradient norm and learning rate."""
        rate = learning_rate(self.step, self.total, self.config)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        enter = self.record.enter
        loss, correct, counts = self.loss(batch, noise=True)
        enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        enter("optimiser")
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.max_grad_norm)
        value = float(loss.detach())
        if math.isfinite(value) and math.isfinite(float(norm)):
            self.optimiser.step()
        else:  # one such step would end up in every weight
            skip = self.config.on_nan == "skip"
            text = self.record.bad_loss(value, float(norm), self.step + 1, self._names(batch)(), skip)
            if not skip:
                raise EyasError(f"{text}; lower --lr, check the data, or leave such steps out with --on-nan skip")
        self.optimiser.zero_grad(set_to_none=True)
        enter("logging")
        accuracy = [int(c) / n if n else 0.0 for c, n in zip(correct, counts, strict=True)]
        return {"loss": value, "accuracy": accuracy, "lr": rate, "grad_norm": float(norm)}

    def loss(self, batch: Batch, noise: bool) -> tuple[Tensor, list[Tensor], list[int]]:
        """Weighted loss of one pack; correct and trained positions per TTT step."""
        plan = batch.plan.to(self.device)
        states = batch.states.to(self.device, self.dtype)
        self.record.enter("forward")
        if noise and self.config.noise_std > 0:
            # Uniform of this width, scaled down with length: the recipe of the first EAGLE code.
            width = self.config.noise_std * 512 / max(1, len(states))
            uniform = torch.rand(states.shape, generator=self.noise, device=self.device, dtype=states.dtype)
            states = states + (uniform - 0.5) * width
        last = self.head.norm(batch.last.to(self.device)).to(self.dtype)
        side = verifier_side(last, self.draft_head)
        head = self.drafter.lm_head.weight.to(self.dtype)
        total = torch.zeros((), device=self.device)
        correct, counts = [], []
        weights = [self.config.step_weight_decay**k for k in range(plan.steps)]
        for k, out in enumerate(self.drafter(plan, states)):
            hidden = self.drafter.norm(out.index_select(0, plan.trained[k]))
            value, right = head_loss(hidden, head, side, plan.target[k], self.config.loss)
            if self.config.state_weight:
                value = value + self.config.state_weight * state_loss(hidden, last, plan.target[k])
            total = total + value * (weights[k] / sum(weights) / max(1, len(hidden)))
            correct.append(right)
            counts.append(len(hidden))
        return total, correct, counts

    @cached_property
    def draft_head(self) -> Tensor:
        """The verifier's lm_head rows of the draft vocabulary, [Vd, Ht]."""
        return self.head.draft_head()

    def _names(self, batch: Batch) -> Callable[[], list[str]]:
        """The ids of a batch's samples, looked up when they are needed."""
        return lambda: [self.source.ids[i] for i in batch.samples]

    def _validate_and_save(self, epoch: int) -> None:
        self.record.enter("validating")
        figures = self.validate()
        folder = self.config.output_dir / "checkpoints" / f"step-{self.step:06d}"
        value = figures.to_dict() if figures else None
        self.record.enter("saving")
        begun = time.monotonic()
        save_checkpoint(
            folder,
            self.drafter,
            self.vocab,
            self.verifier.config,
            self.layers,
            more={
                "eyas.json": {
                    "verifier": {"name": self.verifier.config.name, "fingerprint": self.verifier.fingerprint},
                    "step": self.step,
                    "epoch": epoch + 1,
                    "validation": value,
                }
            },
        )
        link(self.config.output_dir / "last", folder)
        score = figures.accept_length if figures else float(self.step)
        if self.best is None or score > self.best[0]:
            self.best = (score, folder)
            link(self.config.output_dir / "best", folder)
        self.record.checkpoint(folder, time.monotonic() - begun)
        if figures:
            self.validations.append({"step": self.step, "epoch": epoch + 1, **figures.to_dict()})
            accuracy = "/".join(f"{a:.3f}" for a in figures.accuracy)
            self.record.validation(
                figures.to_dict(),
                f"validation after epoch {epoch + 1}: loss {figures.loss:.4f} · accuracy {accuracy} · "
                f"accept length {figures.accept_length:.3f} (greedy {figures.accept_length_greedy:.3f})",
            )

    def validate(self) -> OfflineFigures | None:
        """Figures on the validation split; None without one."""
        packs = pack(self.val_samples, self.source.lengths, self.batch_tokens, self.config.max_seq_len)
        c = self.config
        loader = Loader(self.reads, packs, c.ttt_steps, c.max_seq_len, c.num_workers, device=self.device)
        self.drafter.eval()
        batches = self.record.follow(loader, len(packs))
        figures = evaluate(self.drafter, self.head, batches, self.config.ttt_steps, self.dtype)
        self.drafter.train()
        return figures


def drafter_config(c: TrainConfig, v: VerifierConfig, draft_vocab: int) -> DrafterConfig:
    """The drafter's sizes: the verifier's, but for what the settings name. Raises EyasError for impossible ones."""
    heads, kv_heads, head_dim = c.num_heads or v.num_heads, c.num_kv_heads or v.num_kv_heads, c.head_dim or v.head_dim
    if heads % kv_heads:
        raise EyasError(f"{heads} heads cannot share {kv_heads} key/value heads: set --num-heads and --num-kv-heads")
    if head_dim % 2:
        raise EyasError(f"a head size of {head_dim} is odd, which rotary positions do not allow: set --head-dim")
    return DrafterConfig(
        hidden_size=v.hidden_size,
        target_hidden_size=v.hidden_size,
        intermediate_size=c.intermediate_size or v.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=v.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=v.rms_norm_eps,
        rope_theta=v.rope_theta,
        rope_scaling=v.rope_scaling,
        max_position_embeddings=v.max_position_embeddings,
    )


def aux_layers(source: Source, verifier: Verifier) -> tuple[int, ...]:
    """HF indices of the three states that the drafter reads; files that do not say hold the usual ones."""
    manifest = source.manifest
    return tuple(manifest.layers[:3]) if manifest.layer_unit == "hf" else verifier.config.capture_layers()


def verifier_head(
    verifier: Verifier, source: Source, vocab: DraftVocab, device: torch.device, dtype: torch.dtype
) -> VerifierHead:
    """The verifier's norm and head as needed for the last states of `source`."""
    norm = verifier.final_norm()
    if source.manifest.norm_side not in ("before", "after"):
        raise EyasError(
            "the data does not show which side of the final norm its last states are on: no trained tokens?"
        )
    return VerifierHead(
        norm=(lambda x: norm(x.float())) if source.manifest.norm_side == "before" else (lambda x: x),
        head=verifier.lm_head(dtype=dtype).to(device),
        draft_ids=torch.from_numpy(vocab.targets).to(device),
    )


def save_run(config: TrainConfig, source: Source, verifier: Verifier) -> None:
    """Make the run directory and write run.yaml: the settings, and what they met."""
    about = {
        "config": config.resolved(),
        "eyas": eyas.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "verifier": {"name": verifier.config.name, "fingerprint": verifier.fingerprint},
        "data": {
            "samples": len(source.ids),
            "layers": list(source.manifest.layers),
            "norm_side": source.manifest.norm_side,
        },
    }
    try:
        (config.output_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_whole(config.output_dir / "run.yaml", yaml.safe_dump(about, sort_keys=False).encode())
    except OSError as e:
        raise EyasError(f"--output-dir {config.output_dir}: {e.strerror}") from None


def link(name: Path, folder: Path) -> None:
    """Point the symbolic link `name` at `folder`, atomically. Raises EyasError when the disk refuses."""
    side = name.with_name(f".{name.name}")
    try:
        side.unlink(missing_ok=True)
        side.symlink_to(os.path.relpath(folder, name.parent))
        side.replace(name)
    except OSError as e:
        side.unlink(missing_ok=True)
        raise EyasError(f"cannot write {name}: {e.strerror}") from None
