"""`eyas plan`: from data (or a token count), verifier, drafter and GPU to a plan, with this machine's speeds measured.

Cost: a few seconds, most of them reading a sample of the files; tens of seconds where real steps are taken on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.config import TrainConfig
from eyas.errors import EyasError
from eyas.plan.report import make_report
from eyas.plan.step import (
    GB,
    GPUS,
    LAYERS,
    OPTIMISER_BYTES,
    UTILISATION,
    Gpu,
    Plan,
    flops_per_token,
    gpu_memory,
    parameters,
)
from eyas.store.codecs import bytes_per_token, check_names

DRAFT_VOCAB = 32_000  # of a plan for a GPU, where nothing else is said


@dataclass(frozen=True)
class Asked:
    """What `eyas plan` was asked. gpu: a name out of GPUS, or None for this machine; tokens: instead of data."""

    config: TrainConfig
    tokens: int | None = None
    trained_share: float = 0.5
    gpu: str | None = None
    gpus: int = 1
    utilisation: float = UTILISATION
    disk_gb_s: float | None = None
    ram_gb: float | None = None
    codec: str = "bf16"
    last_rows: str = "all"
    draft_vocab: int | None = None
    output: Path | None = None
    steps: int = 10


def make_plan(asked: Asked, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The plan as a report: sizes, rates, terms, memory, the bottleneck and what to do. Raises EyasError."""
    from eyas.store import reader
    from eyas.store.remote import staged
    from eyas.train.batches import epoch_order, pack, split_source
    from eyas.train.setup import drafter_config
    from eyas.verifier import Verifier
    from eyas.vocab import load as load_vocab

    check_names(asked.codec, asked.last_rows)
    c = asked.config
    if asked.tokens is None:
        c = c.model_copy(update={"data_dir": staged(c.data_dir, say)})
        asked = replace(asked, config=c)
    verifier = Verifier(c.verifier_path, trust_remote_code=c.trust_remote_code)
    V = verifier.config.vocab_size
    if c.vocab_mapping_dir is not None:
        draft_vocab = load_vocab(c.vocab_mapping_dir, V, None, say).size
    else:  # real steps without a mapping are steps over the whole vocabulary
        draft_vocab = V if asked.gpu is None else min(asked.draft_vocab or DRAFT_VOCAB, V)
        if asked.gpu is None and asked.draft_vocab not in (None, V):
            raise EyasError(
                f"--draft-vocab {asked.draft_vocab} counts with --gpu alone: without one the steps are real ones, over"
                f" the tokens of --vocab-mapping-dir (eyas vocab makes one), or all {V:,}"
            )
    sizes = drafter_config(c, verifier.config, draft_vocab)
    batch_tokens = float(c.batch_tokens or c.max_seq_len)
    source = None
    codec, last_rows, share = asked.codec, asked.last_rows, asked.trained_share
    H = verifier.config.hidden_size
    if asked.tokens is None:
        source = reader.open_source(c.data_dir, verifier.config, None, say)
        lengths = np.minimum(source.lengths, c.max_seq_len)
        train, _, _ = split_source(source, c.max_seq_len, c.val_ratio)
        if not train:
            raise EyasError(f"{c.data_dir} holds no trainable tokens: check the loss masks (eyas prepare)")
        lengths = lengths[train]
        tokens, share = int(lengths.sum()), float(source.trained.sum() / source.lengths.sum())
        packs = pack(epoch_order(train, c.seed, 0), source.lengths, int(batch_tokens), c.max_seq_len)
        batch_tokens = tokens / len(packs)  # a pack is closed when the next sample does not fit
        per_token = sum(source.nbytes(i) for i in range(len(source.ids))) / int(source.lengths.sum())
        per_token *= int(reader.rows_read(source, c.max_seq_len)[train].sum()) / tokens  # of cut samples more is read
        codec, last_rows = source.manifest.codec, source.manifest.last_rows
        length = int(lengths.mean())
    else:
        tokens, length = asked.tokens, c.max_seq_len
        per_token = bytes_per_token(codec, H, LAYERS, last_rows, share)
    gpu = _named_gpu(asked.gpu)
    rates = _rates(asked, source, gpu, say)
    weights = sum(parameters(sizes).values())
    flops = flops_per_token(sizes, c.ttt_steps, share, length)
    measured = None
    if gpu is None:
        if source is None:
            raise EyasError("without data there are no steps to take here: name the GPU that will train (--gpu H100)")
        measured = _real_steps(asked, say)
        like = batch_tokens / measured["batch_tokens"]  # the few steps had shorter or longer packs than all have
        compute_s, cpu_s = like * measured["step_s"], like * measured["cpu_s"]
    else:
        compute_s = batch_tokens * flops / (gpu.flops * asked.utilisation) + OPTIMISER_BYTES * weights / gpu.bandwidth
        cpu_s = (
            batch_tokens * per_token / rates["memcpy"] + 0.1 * batch_tokens * per_token / GB
        )  # checksum, page rounding
    threads = max(1, c.num_workers if gpu else min(c.num_workers, len(os.sched_getaffinity(0))))
    index = 5.0 * tokens
    ring = (c.num_workers + 2) * batch_tokens * per_token
    plan = Plan(
        tokens, share, per_token, batch_tokens, asked.gpus, c.epochs, compute_s, cpu_s, threads,
        rates["disk"], rates["copy"], max(0.0, rates["ram"] - asked.gpus * ring - index), H, codec, last_rows,
    )  # fmt: skip
    memory = gpu_memory(sizes, c.ttt_steps, batch_tokens, share)
    report = make_report(plan, verifier.config.name, gpu, rates, memory, asked.output)
    return report | {
        "parameters": weights,
        "flops_per_token": flops,
        "utilisation": asked.utilisation if gpu else None,
        "real_steps": measured,
        "host_memory": {
            "free": rates["ram"],
            "needed": ring + index,
            "cache": plan.cache_bytes,
            "hit": round(plan.hit, 4),
        },
    }


def _named_gpu(name: str | None) -> Gpu | None:
    if name is None:
        return None
    plain = {k.lower().replace(" ", "").replace("-", ""): g for k, g in GPUS.items()}
    wanted = name.lower().replace(" ", "").replace("-", "")
    found = [g for k, g in plain.items() if k == wanted] or [g for k, g in plain.items() if k.startswith(wanted)]
    if len(found) != 1:
        raise EyasError(f"--gpu {name}: name one of {', '.join(GPUS)}")
    return found[0]


def _rates(asked: Asked, source: Any, gpu: Gpu | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Bytes a second of disk (None: nothing to measure), memory and device; bytes of free memory and disk."""
    from eyas.device import pick_device
    from eyas.plan import measure
    from eyas.store.memory import available_memory

    memcpy = measure.memcpy_rate()
    disk, how = None, "nothing to measure"
    if asked.disk_gb_s is not None:
        disk, how = asked.disk_gb_s * GB, "as told"
    elif source is not None:
        say("plan: reading a sample of the files past the page cache")
        rate = measure.disk_rate(_data_files(Path(asked.config.data_dir)))
        if rate is not None:
            disk, how = rate.bytes_per_s, "measured, direct" if rate.direct else "measured, through the page cache"
        else:
            how = "under 32 MB: too little to measure"
    if gpu is not None:
        copy, copied = gpu.host, "the slot's"
    elif (device := pick_device(asked.config.device)).type == "cuda":
        copy, copied = measure.device_copy_rate(str(device)), "measured, host to device"
    else:
        copy, copied = memcpy, "measured, memory to memory"
    ram = asked.ram_gb * GB if asked.ram_gb is not None else float(available_memory())
    return {"disk": disk, "disk_how": how, "memcpy": memcpy, "copy": copy, "copy_how": copied, "ram": ram}


def _data_files(folder: Path) -> list[Path]:
    """The large files of a data folder."""
    found = []
    for top, _, names in os.walk(folder):
        for name in names:
            path = Path(top) / name
            if not name.startswith(".") and path.suffix not in (".json", ".jsonl"):
                found.append(path)
    return sorted(found)


def _real_steps(asked: Asked, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds of a training step and of a reading thread for its batch, from a few real ones on this machine."""
    import statistics
    import tempfile
    import time

    from eyas.train.batches import load_batch
    from eyas.train.loop import Run

    c = asked.config
    with tempfile.TemporaryDirectory() as nowhere:  # the run keeps nothing
        run = Run(c.model_copy(update={"output_dir": Path(nowhere)}), lambda _line: None)
    packs = run.epochs[0][: asked.steps + 2]
    say(f"plan: taking {len(packs)} real steps on {run.device}")
    steps, reads, tokens = [], [], []
    for number, pack in enumerate(packs):
        before = time.thread_time()
        batch = load_batch(run.reads, pack, c.ttt_steps, c.max_seq_len)
        reads.append(time.thread_time() - before)
        before = time.perf_counter()
        run._step(0, [number], c.ttt_steps, iter([batch]))  # its metrics wait for the device
        steps.append(time.perf_counter() - before)
        tokens.append(batch.tokens)
    warm = slice(2, None) if len(steps) > 4 else slice(0, None)  # the first steps build what later ones reuse
    mean = float(np.mean(tokens[warm]))
    return {"step_s": statistics.fmean(steps[warm]), "cpu_s": statistics.fmean(reads[warm]), "batch_tokens": mean}
