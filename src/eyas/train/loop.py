"""The training loop: from settings to checkpoints.

Reads top to bottom: what is there is opened and checked against each other, then epochs of steps, each epoch followed
by validation and a checkpoint. The best checkpoint is the one with the longest simulated accept length on the
validation split: with longer training the loss goes on falling while the accept length falls too.

A step takes packs from the epoch's order, one or several (`--grad-accumulation`) for each rank. Between two steps a run
can be stopped by anything and goes on with `--resume` as if nothing had been (`state.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.config import TrainConfig
from eyas.device import compute_dtype
from eyas.drafter.checkpoint import config_json, save_checkpoint
from eyas.drafter.model import Drafter, attention_refusal
from eyas.errors import EyasError
from eyas.evaluate.offline import OfflineFigures, evaluate
from eyas.files import check_writable, write_json
from eyas.record.record import Record
from eyas.store.layout import QUARANTINE, quarantined
from eyas.store.reader import open_source
from eyas.store.readpath import ReadPath
from eyas.store.remote import staged
from eyas.train.batches import Batch, Loader, epoch_order, pack
from eyas.train.objective import Objective, pack_seed
from eyas.train.optim import Average, check_optimiser, learning_rate, make_optimisers, optimiser_tensors, set_rate
from eyas.train.parallel import Ranks, held_back, other_ranks_gone, spread, whole
from eyas.train.rundir import START, keep_start, link, open_run, refuse_another_run, save_run
from eyas.train.samples import Samples, kept_samples
from eyas.train.setup import aux_layers, training_samples, verifier_head
from eyas.train.start import make_drafter
from eyas.train.state import Progress, States, about_state, check_identity, identity, progress, prune
from eyas.train.stop import Stop, resume_command
from eyas.verifier import Verifier

Say = Callable[[str], None]
WARMUP_COST = 0.4  # of an epoch that trains step 0 alone, of one with all steps (bench/RESULTS.md)
LOOK_AT = 256  # packs, spread over the first epoch, that show whether `--outside drop` leaves anything


class Run:
    """Everything one training run holds. `Run(config)` opens and checks; `train()` goes.

    ended: why it stopped before its last step: "signal", "time", "patience"; None where it did not.
    """

    @other_ranks_gone()
    def __init__(self, config: TrainConfig, say: Say = print, record: Record | None = None) -> None:
        self.record = record or Record(None, say=say)
        self.config, self.ranks = config, Ranks.join(config.device)
        self.say: Say = say if self.ranks.first else lambda _text: None
        refuse_another_run(config)
        if self.ranks.first:  # before the verifier is read
            check_writable(config.output_dir, f"--output-dir {config.output_dir}")
        check_optimiser(config, self.ranks.world)
        torch.manual_seed(config.seed)
        self.device = self.ranks.device
        self.dtype = compute_dtype(config.dtype, self.device)
        self.record.enter("reading verifier")
        self.verifier = Verifier(config.verifier_path, trust_remote_code=config.trust_remote_code)
        self.record.enter("indexing")
        with self.ranks.one_by_one():  # an index that is built is built by one
            folder = staged(config.data_dir, self.say, config.stage_dir)
            self.source = open_source(folder, self.verifier.config, self.verifier.fingerprint, self.say)
        # Filling the cache costs more than reading past it, and one epoch never comes back to it.
        cache_gb = 0 if config.epochs == 1 and config.cache_gb == "auto" else config.cache_gb
        self.reads = ReadPath(self.source, cache_gb=cache_gb, device=self.device, say=self.say)
        self.states = States(config.output_dir, self.ranks, config.keep)
        self.found = self.states.newest(self.say) if config.resume else None
        begun = self.found is not None
        self.samples, self.now = self._samples(folder)
        self.train_samples, self.val_samples = (
            [i for i in self.now[which].tolist() if i >= 0] for which in (self.samples.train, self.samples.validate)
        )
        self.record.enter("reading verifier")
        self.drafter, self.vocab = make_drafter(config, self.verifier, self.source, self.dtype, self.say, begun)
        self.drafter.to(self.device)
        self.head = verifier_head(self.verifier, self.source, self.vocab, self.device, self.dtype)
        self.layers = aux_layers(self.source, self.verifier)
        config_json(self.drafter.config, self.verifier.config, self.layers, "float32")  # refuses before any work
        self.parameters = sum(p.numel() for p in self.drafter.parameters())
        self.objective = Objective(self.drafter, self.head, config, self.device, self.dtype)
        self.batch_tokens = config.batch_tokens or config.max_seq_len
        self.epochs = [self._packs(epoch) for epoch in range(config.epochs)]
        if config.outside == "drop" and not begun:  # a run that goes on has trained something
            packs = self.epochs[0][:: math.ceil(len(self.epochs[0]) / LOOK_AT)]
            self.objective.check_outside(Loader(self.reads, packs, 1, config.max_seq_len, 0))
        self.model = spread(self.objective, config.parallel, self.ranks)
        if self.ranks.world > 1:
            # DDP lays its buckets out anew after its first backward pass. That shall be over before the first step, or
            # a run that goes on would add its gradients up in another order than the run that it goes on with.
            self.model(None, [1.0])[0].backward()
            self.drafter.zero_grad(set_to_none=True)
        self.optimisers = make_optimisers(self.drafter, config)
        self.average = Average(self.drafter, config.ema) if config.ema else None
        self.packs = sum(map(len, self.epochs))
        alone = config.ttt_warmup_epochs if config.ttt_steps > 1 else 0  # epochs of step 0 alone
        self.costs = [WARMUP_COST if epoch < alone else 1.0 for epoch in range(config.epochs)]
        self.work = sum(cost * len(packs) for cost, packs in zip(self.costs, self.epochs, strict=True))
        self.per_step = config.grad_accumulation * self.ranks.world
        self.total = sum(math.ceil(_filled(packs) / self.per_step) for packs in self.epochs)
        shapes = {name: list(p.shape) for name, p in self.drafter.named_parameters()}  # whole, though FSDP2 shards them
        data = self.samples.digest
        self.identity = identity(config, self.verifier, self.source, self.vocab, self.dtype, shapes, data)
        self.at = Progress()
        self.ended: str | None = None
        self.stop = Stop()
        self.began, self.seconds_before, self.steps_before = time.monotonic(), 0.0, 0
        self._copy: Drafter | None = None

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.at.step

    def _samples(self, folder: Path) -> tuple[Samples, np.ndarray]:
        """The samples that the run was begun with, and where each is in the source: -1 where it is shut out since."""
        train, val = training_samples(self.config, self.source, self.say)
        here = Samples(self.source.ids, self.source.lengths, self.source.trained, train, val)
        was = kept_samples(self.config.output_dir / START) if self.found is not None else None
        if self.found is None or was is None or was.digest == here.digest:
            return here, np.arange(len(here.ids))
        now = was.now(self.source, quarantined(folder)) if was.digest == self.found[1]["identity"]["data"] else None
        if now is None:
            return here, np.arange(len(here.ids))  # which `check_identity` refuses
        if not (now[was.train] >= 0).any():
            raise EyasError(
                f"all samples that the run in {self.config.output_dir} trains are in quarantine since: let some in"
                f" again ({folder / QUARANTINE})"
            )
        self.say(
            f"warning: {int((now < 0).sum()):,} of the run's {len(was.ids):,} samples are in quarantine since: it goes"
            " on without them, every other one once an epoch as before, and from here on not bit for bit as it would"
        )
        return was, now

    def _packs(self, epoch: int) -> list[list[int]]:
        """The epoch's packs, as of all samples that the run was begun with: one whose samples are all shut out since is
        empty, and keeps its place."""
        begun, cut = self.samples, self.config.max_seq_len
        packs = pack(epoch_order(begun.train, self.config.seed, epoch), begun.lengths, self.batch_tokens, cut)
        return [[i for i in self.now[samples].tolist() if i >= 0] for samples in packs]

    # -- the run -------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train all epochs, or what is left of them; returns what summary.json holds."""
        self._train()
        return self._conclude()

    @other_ranks_gone()
    def _train(self) -> None:
        c = self.config
        with self.states, self.stop:
            if self.ranks.first:
                open_run(c.output_dir, self.states)
            self.ranks.wait()
            self._compile()
            self._go_on()
            if self.ranks.first:
                save_run(c, self.source, self.verifier)
                keep_start(c.output_dir, self.drafter.config, self.vocab, self.samples, anew=self.step == 0)
            self.record.open()
            self._introduce()
            self.began, self.seconds_before, self.steps_before = time.monotonic(), self.at.seconds, self.step
            self.record.begin(self.total, self.step, str(self.device), self._share_done())
            while self.at.epoch < c.epochs and self.ended is None:
                if self.at.position == 0 and self._patience_over():
                    self.ended = "patience"
                    break
                self._epoch(self.at.epoch)
                self._after_epoch()
            self.record.enter("saving")
            self.states.finish()

    def _compile(self) -> None:
        """Have the 8-bit optimiser compile its steps, before the run's time begins."""
        if self.config.optimiser == "adamw8bit":
            self.say("compiling the 8-bit optimiser, once for each shape: seconds on a GPU, minutes on a CPU")
            begun = time.monotonic()
            optimiser_tensors(self.optimisers, self.drafter)
            self.say(f"compiled in {time.monotonic() - begun:,.0f} s")

    def _go_on(self) -> None:
        """With --resume, be where the newest whole state is."""
        if not self.config.resume:
            return
        if self.found is None:
            self.say("no state is saved yet: starts at the beginning")
            return
        folder, about = self.found
        check_identity(self.config.output_dir, about["identity"], self.identity, about["ranks"] == self.ranks.world)
        at = self.at = progress(about)
        self.states.load(folder, self._tensors())
        left = [_filled(packs[at.position if e == 0 else 0 :]) for e, packs in enumerate(self.epochs[at.epoch :])]
        self.total = at.step + sum(math.ceil(packs / self.per_step) for packs in left)
        self.say(f"goes on from {folder}: {at.step:,} steps are done")
        before = about["ranks"] * about["grad_accumulation"]
        if before != self.per_step:
            self.say(
                f"a step takes {self.per_step} packs now, before {before}: --grad-accumulation can make up for ranks"
            )

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name, as views that loading writes into."""
        tensors = {f"weights/{name}": p.detach() for name, p in self.drafter.named_parameters()}
        tensors.update(optimiser_tensors(self.optimisers, self.drafter))
        if self.average:
            tensors.update({f"average/{name}": t for name, t in self.average.weights.items()})
        return tensors

    def _save_state(self) -> None:
        """Save where the run is, in the background; when that is there, older checkpoints go."""
        c, at = self.config, self.at
        at.seconds = self.seconds_before + time.monotonic() - self.began
        best = at.best[1] if at.best else None
        about = about_state(at, self.ranks, c.grad_accumulation, self.identity)
        self.states.save(self._tensors(), about, lambda: prune(c.output_dir / "checkpoints", c.keep, best))

    def _introduce(self) -> None:
        c = self.config
        tokens = int(np.minimum(self.source.lengths[self.train_samples], c.max_seq_len).sum())
        ranks = f" · {self.ranks.world} ranks ({c.parallel})" if self.ranks.world > 1 else ""
        self.say(
            f"{len(self.train_samples):,} samples train ({tokens:,} tokens), {len(self.val_samples):,} validate · "
            f"{self.total:,} steps in {c.epochs} epochs · {self.parameters / 1e6:.1f} M parameters · "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}{ranks}"
        )
        if self.device.type == "cuda" and (reason := attention_refusal(self.drafter.config, self.device, self.dtype)):
            self.say(f"attention in plain blocks, slower: the flash kernel is not taken, for {reason}")

    def _conclude(self) -> dict[str, Any]:
        """Write summary.json and say how it ended."""
        at, c = self.at, self.config
        summary = {
            "steps": at.step,
            "epochs": at.epoch,
            "stopped": self.ended,
            "seconds": round(at.seconds, 2),
            "tokens": at.tokens,
            "tokens_per_s": round(at.tokens / max(at.seconds, 1e-9), 1),
            "data_wait_share": round(at.waited / max(at.seconds, 1e-9), 4),
            "final_loss": at.metrics.get("loss"),
            "validations": at.validations,
            "best": at.best[1] if at.best else None,
            "skipped": [list(s) for s in self.source.skipped],
        }
        if self.ranks.first:
            write_json(c.output_dir / "summary.json", summary)
        if self.ended in ("signal", "time"):
            self.record.stopped({"signal": "stopped by a signal, and saved", "time": "--max-minutes"}[self.ended])
        if self.ended == "signal":
            self.say(
                f"stopped after step {at.step:,}/{self.total:,}, and saved · go on with: {resume_command(c.output_dir)}"
            )
        else:
            why = {"time": " (--max-minutes)", "patience": " (--patience)"}.get(self.ended or "", "")
            best = f"best checkpoint {c.output_dir / 'best'}" if at.best else "no checkpoint yet"
            self.say(f"done{why}: {at.step:,} steps in {at.seconds:,.0f} s · {best}")
            if self.ended == "time":
                self.say(f"go on with: {resume_command(c.output_dir)}")
        self.ranks.leave()
        return summary

    def _epoch(self, epoch: int) -> None:
        """The steps of an epoch that are left; returns at its end, or where the run is told to stop."""
        c, at, packs = self.config, self.at, self.epochs[epoch]
        K = 1 if epoch < c.ttt_warmup_epochs else c.ttt_steps
        left = [i for i in range(at.position, len(packs)) if packs[i]]
        steps = [left[i : i + self.per_step] for i in range(0, len(left), self.per_step)]
        ends = [*(step[0] for step in steps[1:]), len(packs)]  # the position behind each
        mine = [packs[i] for step in steps for i in step[self.ranks.rank :: self.ranks.world]]
        loader = Loader(
            self.reads, mine, K, c.max_seq_len, c.num_workers, device=self.device, group=c.grad_accumulation
        )
        batches = self.record.data(loader, self.source.ids.__getitem__, "copying")
        waited = at.waited
        for step, end in zip(steps, ends, strict=False):
            metrics = self._step(epoch, step, K, batches)
            if metrics is None:
                break
            at.step, at.position, at.packs = at.step + 1, end, at.packs + end - at.position
            tokens = sum(int(np.minimum(self.source.lengths[packs[i]], c.max_seq_len).sum()) for i in step)
            at.tokens, at.metrics, at.waited = at.tokens + tokens, metrics, waited + loader.waited
            self.record.step(
                step=at.step, tokens=tokens, samples=self._names(epoch, step), done=self._share_done(),
                epoch=f"{epoch + 1}/{c.epochs}", **metrics,
            )  # fmt: skip
            self.states.look()
            if c.save_every and at.step % c.save_every == 0 and at.position < len(packs):
                self.record.enter("saving")
                self._save_state()
        batches.close()
        if not steps:
            at.position, at.packs = len(packs), at.packs + len(packs) - at.position

    def _names(self, epoch: int, indices: list[int]) -> Callable[[], list[str]]:
        """The ids of the samples in these packs, looked up when they are needed."""
        return lambda: [self.source.ids[i] for index in indices for i in self.epochs[epoch][index]]

    def _share_done(self) -> float:
        """Of the whole run's work: an epoch of step 0 alone costs less than one of all steps."""
        at, cost = self.at, self.costs
        begun = cost[at.epoch] * at.position if at.position else 0.0
        done = sum(cost[e] * len(self.epochs[e]) for e in range(at.epoch))
        return (done + begun) / self.work

    def _step(self, epoch: int, indices: list[int], K: int, batches: Iterator[Batch]) -> dict[str, Any] | None:
        """One optimiser step over the packs `indices` of the epoch, of which every rank takes each W-th.

        Returns loss, accuracy per TTT step, gradient norm and learning rate, over all ranks; None where a rank was told
        to stop, and nothing was done.
        """
        c, ranks, enter = self.config, self.ranks, self.record.enter
        mine = indices[ranks.rank :: ranks.world]
        batch = next(batches) if mine else None  # the first of a step knows what all of this rank's train
        if ranks.world > 1:
            enter("waiting for ranks")
        told = [float(self.stop.asked is not None), float(self._time_over())]
        *counts, signal, late = ranks.sum([*map(float, batch.trained if batch else [0] * K), *told])
        if signal or late:
            self.ended = "signal" if signal else "time"
            return None
        rate = learning_rate(self.at.packs, self.packs, c, len(indices))
        sums = torch.zeros(1 + K, dtype=torch.float64, device=self.device)
        rounds = math.ceil(len(indices) / ranks.world)  # the same on every rank, whatever there is for it
        for n in range(rounds):
            if n:
                batch = next(batches) if n < len(mine) else None
            enter("forward")
            seed = pack_seed(c.seed, epoch, mine[n]) if batch else None
            with held_back(self.model, n < rounds - 1):
                loss, correct = self.model(batch, counts, seed)
                enter("backward")
                (loss * ranks.world).backward()  # gradients are means over ranks
            sums += torch.cat([loss.detach()[None].double(), correct.double()])
        enter("optimiser")
        clipped = whole(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), c.max_grad_norm))
        # The one place where a step waits for the device: a step that is no number must not reach the weights.
        loss_sum, *correct_sums, norm = torch.cat([ranks.add(sums), clipped[None].double()]).tolist()
        if math.isfinite(loss_sum) and math.isfinite(norm):
            self._update(rate)
        else:  # one such step would end up in every weight
            self._without(loss_sum, norm, self._names(epoch, indices)())
        enter("logging")
        accuracy = [right / n if n else 0.0 for right, n in zip(correct_sums, counts, strict=True)]
        return {"loss": loss_sum, "accuracy": accuracy, "lr": rate, "grad_norm": norm}

    def _without(self, loss: float, norm: float, names: list[str]) -> None:
        """A step whose loss or gradient is no number, the same on every rank: left out, or EyasError."""
        skip = self.config.on_nan == "skip"
        text = self.record.bad_loss(loss, norm, self.step + 1, names, skip) if self.ranks.first or not skip else ""
        if not skip:
            raise EyasError(f"{text}; lower --lr, check the data, or leave such steps out with --on-nan skip")
        self.drafter.zero_grad(set_to_none=True)

    def _update(self, rate: float) -> None:
        """Step with the gradients that are there."""
        for optimiser in self.optimisers:
            set_rate(optimiser, rate)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if self.average:
            self.average.update()

    def _time_over(self) -> bool:
        limit = self.config.max_minutes
        return limit is not None and time.monotonic() - self.began > limit * 60

    # -- after an epoch ------------------------------------------------------------------------------------------------

    def _after_epoch(self) -> None:
        """Validate, keep the drafter, save the state. A signal leaves all but the state for later."""
        at = self.at
        if at.position and self.ended != "signal":
            self.record.enter("validating")
            drafter = self.shown()
            figures = self.validate(drafter)
            if self.ranks.any(self.stop.asked is not None):
                self.ended = "signal"  # on resuming, the epoch has no step left and is validated again
            else:
                self._keep(drafter, figures)
                if at.position == len(self.epochs[at.epoch]):
                    at.epoch, at.position = at.epoch + 1, 0
        self.record.enter("saving")
        self._save_state()

    def validate(self, drafter: Drafter) -> OfflineFigures | None:
        """Figures on the validation split, of which every rank takes each W-th pack; None without one."""
        c, ranks = self.config, self.ranks
        packs = pack(self.val_samples, self.source.lengths, self.batch_tokens, c.max_seq_len)
        mine = packs[ranks.rank :: ranks.world]
        loader = Loader(self.reads, mine, c.ttt_steps, c.max_seq_len, c.num_workers, device=self.device)
        drafter.eval()
        batches = self.record.follow(self._until_told(loader), len(mine))
        figures = evaluate(drafter, self.head, batches, c.ttt_steps, self.dtype, ranks.add)
        drafter.train()
        return figures

    def _until_told(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        for batch in loader:
            if self.stop.asked is not None:
                return
            yield batch

    @torch.no_grad()
    def shown(self) -> Drafter:
        """The drafter that is validated and exported: whole, on this device, its weights averaged with --ema."""
        if self.average is None and not (self.ranks.world > 1 and self.config.parallel == "fsdp"):
            return self.drafter
        if self._copy is None:
            self._copy = Drafter(self.drafter.config, self.drafter.embedding).to(self.device).requires_grad_(False)
        weights = self.average.weights if self.average else dict(self.drafter.named_parameters())
        for name, p in self._copy.named_parameters():
            p.copy_(whole(weights[name]))
        return self._copy

    def _keep(self, drafter: Drafter, figures: OfflineFigures | None) -> None:
        """Write the drafter's checkpoint, move the links, and say what was found."""
        at, run = self.at, self.config.output_dir
        name = f"step-{at.step:06d}"
        done = at.epoch + 1
        if self.ranks.first:
            self.record.enter("saving")
            begun = time.monotonic()
            about = {
                "verifier": {"name": self.verifier.config.name, "fingerprint": self.verifier.fingerprint},
                "step": at.step,
                "epoch": done,
                "validation": figures.to_dict() if figures else None,
            }
            folder = run / "checkpoints" / name
            save_checkpoint(folder, drafter, self.vocab, self.verifier.config, self.layers, more={"eyas.json": about})
            link(run / "last", folder)
            self.record.checkpoint(folder, time.monotonic() - begun)
        # A length and the number of a step tell nothing of each other: what was measured stays before what was not.
        if not at.validations or (figures is not None and at.best is not None and figures.accept_length > at.best[0]):
            at.best = (figures.accept_length if figures else float(at.step), name)
            if self.ranks.first:
                link(run / "best", run / "checkpoints" / name)
        if figures:
            at.validations.append({"step": at.step, "epoch": done, **figures.to_dict()})
            accuracy = "/".join(f"{a:.3f}" for a in figures.accuracy)
            when = "after" if at.position == len(self.epochs[at.epoch]) else "in"
            text = (
                f"validation {when} epoch {done}: loss {figures.loss:.4f} · accuracy {accuracy} · "
                f"accept length {figures.accept_length:.3f} (greedy {figures.accept_length_greedy:.3f})"
            )
            if self.ranks.first:
                self.record.validation(figures.to_dict(), text)
        elif self.samples.validate:
            why = f"no position of its {len(self.val_samples):,} samples trains all TTT steps"
            why = why if self.val_samples else "all its samples are in quarantine"
            stays = (
                "last checkpoint that was validated stays the best" if at.validations else "last checkpoint is the best"
            )
            self.say(f"no validation after epoch {done}: {why}; so the {stays}, and --patience ends nothing")

    def _patience_over(self) -> bool:
        """Whether the last `patience` validations brought no longer accept length than one before them."""
        lengths = [v["accept_length"] for v in self.at.validations]
        n = self.config.patience
        return n is not None and len(lengths) > n and max(lengths[-n:]) <= max(lengths[:-n])


def _filled(packs: list[list[int]]) -> int:
    """How many of the packs hold a sample."""
    return sum(map(bool, packs))
