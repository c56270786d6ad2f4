"""What a run needs to go on as if nothing had happened, and how it reaches the disk whole.

    state/step-000500/
      shard-0000N-*.safetensors   weights, optimiser, moving average; a file a rank, by torch.distributed.checkpoint
      state.json                  where the run is, what it has measured, what it is (identity), sizes of the files

A state is written under a hidden name, synced and renamed, in the background: training goes on as soon as the tensors
are copied to host memory. What has its name is whole, and the sizes in state.json say so once more. Any number of ranks
reads what any other number wrote. There is no generator's state in it: order, noise and dropout follow from the seed
and the place in the run (`objective.pack_seed`). Costs 12 bytes a parameter with AdamW, 16 with a moving average.

Resuming asks for the same run: the same verifier, data, vocabulary and settings, told by content and not by path.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from eyas.config import TrainConfig
from eyas.errors import EyasError
from eyas.files import refusal, sync_folder, write_whole
from eyas.store.reader import Source
from eyas.train.parallel import Ranks
from eyas.verifier import Verifier
from eyas.vocab import DraftVocab

FORMAT = 1
STATE = "state.json"
NAME = re.compile(r"step-(\d+)")
# Settings that a resumed run may change: where things lie, how they are read, spread and kept, and when to stop. The
# paths' contents are compared instead, and the dtype as it was resolved.
FREE = {
    "verifier_path", "data_dir", "vocab_mapping_dir", "output_dir", "init_from", "num_workers", "device", "dtype",
    "parallel", "recompute", "save_every", "keep", "max_minutes", "patience", "trust_remote_code", "cache_gb",
    "tensorboard", "wandb", "trackio", "metrics_port", "notify", "on_nan", "stage_dir",
}  # fmt: skip


@dataclass
class Progress:
    """Where a run is. position: packs done of this epoch; packs: of all epochs; seconds: by all its processes."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    packs: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last step
    validations: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, str] | None = None  # score, and the checkpoint's name


def identity(
    config: TrainConfig,
    verifier: Verifier,
    source: Source,
    vocab: DraftVocab,
    dtype: torch.dtype,
    shapes: dict[str, list[int]],
    data: str,
) -> dict[str, Any]:
    """What must be the same for a run to go on, as plain values.

    shapes: of the drafter's parameters, by name; data: `Samples.digest` of those that the run was begun with.
    """
    settings = {name: value for name, value in config.resolved().items() if name not in FREE}
    manifest = source.manifest
    return {
        "verifier": verifier.fingerprint,
        "data": data,
        "layers": [*manifest.layers, manifest.norm_side],
        # Rows that are left out where nothing is trained are read by nobody; all else makes other numbers.
        "codec": manifest.codec + (f", logits:{manifest.logits}" if manifest.logits else ""),
        "vocabulary": xxhash.xxh3_64_hexdigest(vocab.t2d.tobytes()),
        "drafter's sizes": xxhash.xxh3_64_hexdigest(
            json.dumps(shapes).encode()
        ),  # of --init-from, which may be another
        "compute dtype": str(dtype).removeprefix("torch."),
        **{"--" + name.replace("_", "-"): value for name, value in settings.items()},
    }


def check_identity(folder: Path, was: dict[str, Any], now: dict[str, Any], same_world: bool) -> None:
    """Raises EyasError that names all that differs. Another number of ranks may come with another accumulation.

    A setting that the run's eyas did not know yet was at its default.
    """
    defaults = {"--" + name.replace("_", "-"): field.default for name, field in TrainConfig.model_fields.items()}
    defaults |= {"codec": "bf16", "drafter's sizes": now.get("drafter's sizes")}
    was = {**{name: value for name, value in defaults.items() if name in now}, **was}
    differs = []
    for name in sorted({*was, *now}):
        if was.get(name) == now.get(name) or (name == "--grad-accumulation" and not same_world):
            continue
        plain = name.startswith("--") or name in ("codec", "compute dtype")
        told = f" (was {was.get(name)}, is {now.get(name)})" if plain else ""
        differs.append(name + told)
    if differs:
        do = "name a new --output-dir"
        if "data" in differs:  # one that begins anew may start from what this one has learnt
            do = (
                "samples came or went since, and a run goes on without none but those in quarantine: restore them, or"
                f" {do}, and --init-from {folder} to start from its best"
            )
        raise EyasError(f"--resume: the run in {folder} has other {', '.join(differs)}: {do}")


class States:
    """The states of one run directory, as a context manager: rank 0 holds a lock on the directory inside."""

    def __init__(self, run: Path, ranks: Ranks, keep: int) -> None:
        self.run, self.folder, self.ranks, self.keep = run, run / "state", ranks, keep
        self._lock: int | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="eyas-state")
        self._pending: Future[None] | None = None
        # This is how one process without torchrun saves; and the torch that says so must not alarm anybody.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def lock(self) -> None:
        """Make the directory this process's own. Raises EyasError when another one trains into it."""
        if not self.ranks.first:
            return
        self._lock = os.open(self.run, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError(
                f"{self.run}: another process trains into it: wait for it, or name another folder"
            ) from None
        except OSError:
            return  # a file system without locks
        for left in self.folder.glob(".*"):  # what a killed process has left half-written or half-deleted
            shutil.rmtree(left, ignore_errors=True)

    def newest(self, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole state and what its state.json says; None where there is none."""
        for folder in reversed(by_step(self.folder)):
            try:
                about = json.loads((folder / STATE).read_text())
                wrong = [n for n, size in about["files"].items() if (folder / n).stat().st_size != size]
                if about["format"] != FORMAT:
                    raise EyasError(f"{folder} has format {about['format']}, this eyas reads {FORMAT}")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
                wrong = [" ".join(str(e).split()) or type(e).__name__]
            if not wrong:
                return folder, about
            say(f"{folder} is not whole ({wrong[0]}): the state before it is taken")
        return None

    def load(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors` in place from a state. Raises EyasError when it does not hold them."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            load(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(folder)),
                process_group=self.ranks.saving,
                no_dist=self.ranks.world == 1,
            )
        except (Exception, CheckpointException) as e:  # which is no Exception, and wraps what went wrong on any rank
            raise EyasError(f"{folder} cannot be read: {_reason(e)}; remove it to go on from the one before") from None

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any], after: Callable[[], None]) -> None:
        """Write a state; about: with `step`. Returns when the tensors are copied, `finish` when it is there.

        after: called on rank 0 when the state has its name. Every rank must come.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.finish()
        side = self.folder / f".step-{about['step']:06d}"
        if self.ranks.first:
            try:
                shutil.rmtree(side, ignore_errors=True)
                side.mkdir(parents=True)
            except OSError as e:
                raise EyasError(f"cannot write {side}: {e.strerror}") from None
        self.ranks.wait()
        writing: Any = async_save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(side), save_distributed=True),
            process_group=self.ranks.saving,
            no_dist=self.ranks.world == 1,
        )
        self._pending = self._writer.submit(self._complete, writing, side, about, after)

    def _complete(self, writing: Any, side: Path, about: dict[str, Any], after: Callable[[], None]) -> None:
        """In the background: wait for every rank's files, then give the state its name."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            writing.result()
            if not self.ranks.first:
                return
            files = {p.name: p.stat().st_size for p in side.iterdir()}
            text = json.dumps({"format": FORMAT, **about, "files": files}, indent=1, ensure_ascii=False) + "\n"
            write_whole(side / STATE, text.encode())
            sync_folder(side)
            folder = side.with_name(side.name[1:])
            if folder.exists():
                _remove(folder)
            side.rename(folder)
            sync_folder(self.folder)
            for old in by_step(self.folder)[: -self.keep]:
                _remove(old)
            after()
        except (Exception, CheckpointException) as e:
            if self.ranks.first:
                shutil.rmtree(side, ignore_errors=True)
            raise EyasError(f"cannot write the checkpoint {side}: {refusal(_cause(e))}") from None

    def look(self) -> None:
        """Raises EyasError when the state that was being written could not be; waits for nothing."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the state that is being written. Raises EyasError when it could not be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> States:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        """Wait, and let the directory go. What stops a run is told before what became of the state in writing."""
        try:
            self.finish()
        except EyasError:
            if kind is None:
                raise
        finally:
            self._writer.shutdown()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


def about_state(at: Progress, ranks: Ranks, accumulation: int, identity: dict[str, Any]) -> dict[str, Any]:
    """What state.json holds, but for the files."""
    return {
        **asdict(at),
        "ranks": ranks.world,
        "grad_accumulation": accumulation,
        "torch": str(torch.__version__),
        "identity": identity,
    }


def progress(about: dict[str, Any]) -> Progress:
    """Where the run was, from its state.json."""
    at = Progress(**{name: about[name] for name in Progress.__dataclass_fields__})
    at.best = (at.best[0], at.best[1]) if at.best else None
    return at


def by_step(folder: Path) -> list[Path]:
    """The folders step-N in `folder`, in order."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := NAME.fullmatch(p.name))]
    return [p for _, p in sorted(found)]


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Delete all checkpoints but the last `keep` and the best."""
    for old in by_step(folder)[:-keep]:
        if old.name != best:
            _remove(old)


def _remove(folder: Path) -> None:
    """Delete a folder that is whole up to its last moment under its name."""
    hidden = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _reason(e: BaseException) -> str:
    """What torch's checkpoint raises, in one line."""
    cause = _cause(e)
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return " ".join(text.split()) or type(cause).__name__


def _cause(e: BaseException) -> BaseException:
    """The first cause of what torch's checkpoint raises."""
    failures = getattr(e, "failures", None)  # CheckpointException: rank -> (exception, traceback)
    return next(iter(failures.values()))[0] if failures else e
