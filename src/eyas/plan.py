"""What a run will need and how fast it will go, before it starts: bytes, disk, step time, memory, and what binds.

A step takes as long as the slowest of four things that go on at the same time:

    compute   FLOPs of the drafter at a stated utilisation of a GPU's published peak, plus the optimiser's memory
              traffic; or a few real steps, where this machine is the one that trains
    disk      bytes of a batch that are not in the page cache / what the disk under these files gives, measured
    copy      bytes of a batch / what host to device (or memory to memory, on a CPU) gives, measured
    cpu       seconds of the reading threads for a batch / their number, measured on batches that are in memory

`docs/plan.md` has the formulas and a worked plan for Kimi-K2.5. Everything is arithmetic on `Plan`, so that a remedy's
gain is the same arithmetic with one number changed.

Cost: a few seconds, most of them reading a sample of the files; tens of seconds where real steps are taken on a CPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.config import TrainConfig
from eyas.drafter.model import DrafterConfig
from eyas.errors import EyasError
from eyas.store.codecs import bytes_per_token

LAYERS = 4
GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """Published figures: dense bf16 FLOP/s, fp32 accumulation; bytes of memory; bytes/s of it and from the host."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    host: float


def _gpu(name: str, tflops: float, gb: float, tb_s: float, pcie_gb_s: float) -> Gpu:
    return Gpu(name, tflops * 1e12, gb * GB, tb_s * 1e12, pcie_gb_s * GB)


# NVIDIA's and AMD's data sheets; from the host, what a PCIe 4 or 5 x16 slot gives in practice.
GPUS = {
    g.name: g
    for g in (
        _gpu("A100-80GB", 312, 80, 2.04, 24),
        _gpu("L40S", 362, 48, 0.864, 24),
        _gpu("RTX 4090", 165.2, 24, 1.008, 24),
        _gpu("RTX 5090", 209.5, 32, 1.792, 48),
        _gpu("RTX PRO 6000", 503.8, 96, 1.792, 48),
        _gpu("H100", 989, 80, 3.35, 48),
        _gpu("H200", 989, 141, 4.8, 48),
        _gpu("B200", 2250, 180, 7.7, 48),
        _gpu("MI300X", 1307, 192, 5.3, 48),
    )
}
UTILISATION = 0.5
OPTIMISER_BYTES = 34  # of traffic per parameter and step: master, gradient, two moments, read and written, and the cast


@dataclass(frozen=True)
class Plan:
    """A training run in numbers. Seconds, bytes, and shares of 1; a step is one batch of `batch_tokens` on one GPU.

    cpu_s: seconds of one reading thread for a batch, whose number is `threads`. disk_bytes_s None: not measured.
    """

    tokens: int  # of one epoch, after cutting to max_seq_len
    trained_share: float
    bytes_per_token: float
    batch_tokens: float
    gpus: int
    epochs: int
    compute_s: float
    cpu_s: float
    threads: int
    disk_bytes_s: float | None
    copy_bytes_s: float
    cache_bytes: float  # memory that is left for the page cache
    hidden_size: int
    codec: str = "bf16"
    last_rows: str = "all"

    @property
    def data_bytes(self) -> float:
        return self.tokens * self.bytes_per_token

    @property
    def hit(self) -> float:
        """The share of the data that the page cache holds from the second epoch on."""
        return min(1.0, self.cache_bytes / self.data_bytes) if self.data_bytes else 1.0

    @property
    def step_bytes(self) -> float:
        return self.batch_tokens * self.bytes_per_token

    def terms(self, hit: float | None = None) -> dict[str, float]:
        """Seconds of a step that each part takes, by name."""
        cold = 1 - (self.hit if hit is None else hit)
        terms = {
            "compute": self.compute_s,
            "copy": self.step_bytes / self.copy_bytes_s,
            "cpu": self.cpu_s / max(self.threads, 1),
        }
        if self.disk_bytes_s:
            # One disk serves all the GPUs of the machine.
            terms["disk"] = self.gpus * self.step_bytes * cold / self.disk_bytes_s
        return terms

    def step_s(self, hit: float | None = None) -> float:
        return max(self.terms(hit).values())

    def bound_by(self, hit: float | None = None) -> str:
        terms = self.terms(hit)
        return max(terms, key=lambda name: terms[name])

    def busy(self, hit: float | None = None) -> float:
        """The share of a step in which the GPU computes."""
        return self.compute_s / self.step_s(hit)

    @property
    def steps(self) -> int:
        """Of one epoch."""
        return max(1, round(self.tokens / self.batch_tokens / self.gpus))

    def hours(self) -> tuple[float, float]:
        """Of the first epoch, for which nothing is cached, and of all epochs."""
        first = self.steps * self.step_s(0.0) / 3600
        return first, first + (self.epochs - 1) * self.steps * self.step_s() / 3600

    @property
    def disk_needed(self) -> float:
        """Bytes a second that keep the GPUs busy."""
        return self.gpus * self.step_bytes / self.compute_s


def parameters(c: DrafterConfig) -> dict[str, int]:
    """The drafter's trainable weights by part."""
    H, heads, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "fc": 3 * c.target_hidden_size * H,
        "kv": 2 * 2 * H * kv,
        "qo": 2 * H * heads + heads * H,
        "mlp": 3 * H * c.intermediate_size,
        "lm_head": c.draft_vocab_size * H,
        "norms": 4 * H,
    }


def flops_per_token(c: DrafterConfig, ttt_steps: int, trained_share: float, length: int) -> float:
    """Floating point operations of training per token of data (docs/plan.md).

    A weight costs 2 FLOPs forward and 4 backward for every row it sees. Every token passes `fc` and the step-0 key and
    value; only trained ones pass the rest, once for each TTT step. The verifier's head is used once, forward.
    """
    p = parameters(c)
    rest = p["kv"] + p["qo"] + p["mlp"] + p["lm_head"]
    scores = 2 * (length / 2) * c.num_heads * c.head_dim  # q k and p v over half the document on average
    trained = ttt_steps * 6 * (rest + scores) - 6 * p["kv"] + 2 * p["lm_head"]
    return 6 * (p["fc"] + p["kv"]) + trained_share * trained


def gpu_memory(c: DrafterConfig, ttt_steps: int, rows: float, trained_share: float) -> dict[str, float]:
    """Bytes on the device: masters, gradients and moments; the verifier's embedding and head; one batch at work."""
    weights = sum(parameters(c).values())
    wide = 2 * c.hidden_size + c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size
    return {
        "weights and optimiser": 16.0 * weights + 2.0 * weights,
        "verifier's embedding and head": 2.0 * 2 * c.vocab_size * c.target_hidden_size,
        "batches": 2 * rows * LAYERS * 2.0 * c.target_hidden_size,
        "activations": rows * trained_share * ttt_steps * 2.0 * (wide + 6 * c.hidden_size),
        "draft distribution": rows * trained_share * 4.0 * c.draft_vocab_size,
    }


# -- remedies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """Something that can be done, the hours that all epochs then take, and how many times as fast that is."""

    what: str
    hours: float
    gain: float


def bottleneck(plan: Plan) -> str:
    """The term that binds where most of the time goes: in the first epoch, or in the later ones."""
    first, whole = plan.hours()
    return plan.bound_by(0.0) if first >= whole - first else plan.bound_by()


def remedies(plan: Plan) -> list[Remedy]:
    """What would make the run shorter, in the order of what it costs to do; only what gains 2 % or more."""
    now = plan.hours()[1]
    found: list[Remedy] = []

    def offer(what: str, changed: Plan) -> None:
        hours = changed.hours()[1]
        if hours < now / 1.02:
            found.append(Remedy(what, hours, now / hours))

    bounds = {plan.bound_by(0.0), plan.bound_by()}
    if "cpu" in bounds:
        offer(f"more reading threads (--num-workers {2 * plan.threads})", replace(plan, threads=2 * plan.threads))
    if bounds & {"disk", "copy"}:
        if plan.last_rows == "all":
            share = (LAYERS - 1 + plan.trained_share) / LAYERS
            offer(
                "keep the last state of trained tokens only (eyas store convert --last trained)",
                replace(plan, bytes_per_token=plan.bytes_per_token * share, last_rows="trained"),
            )
        if plan.codec == "bf16":
            halved = plan.bytes_per_token * bytes_per_token("int8", plan.hidden_size, 1) / (2 * plan.hidden_size)
            offer("8-bit states (eyas store convert --codec int8)", replace(plan, bytes_per_token=halved, codec="int8"))
    if "disk" in bounds and plan.disk_bytes_s:
        missing = plan.data_bytes - plan.cache_bytes
        if missing > 0:
            offer(f"{missing / GB:,.0f} GB more memory for the page cache", replace(plan, cache_bytes=plan.data_bytes))
        times = max(2, -(-plan.disk_needed // plan.disk_bytes_s))
        offer(
            f"a copy on disks that give {plan.disk_bytes_s * times / GB:,.1f} GB/s ({times:.0f} such as this one)",
            replace(plan, disk_bytes_s=plan.disk_bytes_s * times),
        )
    if "compute" in bounds:
        offer(f"{2 * plan.gpus} GPUs instead of {plan.gpus}", replace(plan, gpus=2 * plan.gpus))
    return found


def cheapest(found: list[Remedy]) -> Remedy | None:
    """The first remedy that brings at least nine tenths of what the best one does."""
    if not found:
        return None
    best = min(r.hours for r in found)
    return next(r for r in found if r.hours <= best / 0.9)


# -- from data, verifier and machine ---------------------------------------------------------------------------------


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
    draft_vocab: int = 32_000
    output: Path | None = None
    steps: int = 10


def make_plan(asked: Asked, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The plan as a report: sizes, rates, terms, memory, the bottleneck and what to do. Raises EyasError."""
    from eyas.store import reader
    from eyas.train.batches import epoch_order, pack, split_source
    from eyas.train.loop import drafter_config
    from eyas.verifier import Verifier
    from eyas.vocab import load as load_vocab

    c = asked.config
    verifier = Verifier(c.verifier_path, trust_remote_code=c.trust_remote_code)
    V = verifier.config.vocab_size
    if c.vocab_mapping_dir is not None:
        draft_vocab = load_vocab(c.vocab_mapping_dir, V, None, say).size
    else:  # real steps without a mapping are steps over the whole vocabulary
        draft_vocab = V if asked.gpu is None else min(asked.draft_vocab, V)
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
        codec, last_rows = source.manifest.codec, source.manifest.last_rows
        length = int(lengths.mean())
    else:
        tokens, length = asked.tokens, c.max_seq_len
        per_token = bytes_per_token(codec, H, LAYERS)
        if last_rows == "trained":
            per_token *= (LAYERS - 1 + share) / LAYERS
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
    index = 5.0 * tokens
    ring = (c.num_workers + 2) * batch_tokens * per_token
    plan = Plan(
        tokens, share, per_token, batch_tokens, asked.gpus, c.epochs, compute_s, cpu_s, max(1, c.num_workers),
        rates["disk"], rates["copy"], max(0.0, rates["ram"] - asked.gpus * ring - index), H, codec, last_rows,
    )  # fmt: skip
    memory = gpu_memory(sizes, c.ttt_steps, batch_tokens, share)
    return _report(asked, plan, verifier.config.name, sizes, flops, memory, gpu, rates, measured, ring + index)


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
    from eyas import measure
    from eyas.device import pick_device
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
    import time

    from eyas.train.batches import load_batch
    from eyas.train.loop import Run

    c = asked.config
    run = Run(c, lambda _line: None)
    packs = run.epochs[0][: asked.steps + 2]
    say(f"plan: taking {len(packs)} real steps on {run.device}")
    steps, reads, tokens = [], [], []
    for pack in packs:
        before = time.thread_time()
        batch = load_batch(run.reads, pack, c.ttt_steps, c.max_seq_len)
        reads.append(time.thread_time() - before)
        before = time.perf_counter()
        run._step(batch)  # its metrics wait for the device
        steps.append(time.perf_counter() - before)
        tokens.append(batch.tokens)
    warm = slice(2, None) if len(steps) > 4 else slice(0, None)  # the first steps build what later ones reuse
    mean = float(np.mean(tokens[warm]))
    return {"step_s": statistics.fmean(steps[warm]), "cpu_s": statistics.fmean(reads[warm]), "batch_tokens": mean}


# -- the report ------------------------------------------------------------------------------------------------------


def _report(
    asked: Asked, plan: Plan, verifier: str, sizes: DrafterConfig, flops: float, memory: dict[str, float],
    gpu: Gpu | None, rates: dict[str, Any], measured: dict[str, float] | None, host_bytes: float,
) -> dict[str, Any]:  # fmt: skip
    first, whole = plan.hours()
    found = remedies(plan)
    best = cheapest(found)
    need = sum(memory.values())
    report: dict[str, Any] = {
        "verifier": verifier,
        "gpu": gpu.name if gpu else "this machine",
        "gpus": plan.gpus,
        "tokens": plan.tokens,
        "trained_share": round(plan.trained_share, 4),
        "bytes_per_token": round(plan.bytes_per_token, 1),
        "data_bytes": round(plan.data_bytes),
        "parameters": sum(parameters(sizes).values()),
        "flops_per_token": flops,
        "utilisation": asked.utilisation if gpu else None,
        "batch_tokens": plan.batch_tokens,
        "steps_per_epoch": plan.steps,
        "rates": {k: v for k, v in rates.items() if k != "ram"},
        "real_steps": measured,
        "host_memory": {
            "free": rates["ram"],
            "needed": host_bytes,
            "cache": plan.cache_bytes,
            "hit": round(plan.hit, 4),
        },
        "gpu_memory": {**{k: round(v) for k, v in memory.items()}, "sum": round(need)},
        "gpu_fits": None if gpu is None else need < 0.92 * gpu.memory,
        "first_epoch": _phase(plan, 0.0),
        "later_epochs": _phase(plan, plan.hit),
        "disk_needed_bytes_s": plan.disk_needed,
        "hours": {"first_epoch": first, "all_epochs": whole, "epochs": plan.epochs},
        "bottleneck": bottleneck(plan),
        "remedies": [asdict(r) for r in found],
        "cheapest": asdict(best) if best else None,
        "warnings": [],
    }
    where = asked.output
    if where is not None:
        free = float(shutil.disk_usage(next(p for p in (where, *where.absolute().parents) if p.exists())).free)
        report["free_bytes"] = free
        if plan.data_bytes > free:
            report["warnings"].append(
                f"a capture into {where} needs {plan.data_bytes / GB:,.1f} GB, and {free / GB:,.1f} GB are free there"
            )
    if report["gpu_fits"] is False and gpu is not None:
        report["warnings"].append(
            f"{need / GB:,.0f} GB will not fit the {gpu.memory / GB:,.0f} GB of a {gpu.name}: fewer --batch-tokens"
        )
    if plan.disk_bytes_s is None:
        report["warnings"].append(
            f"the disk is not measured: {plan.disk_needed / GB:,.2f} GB/s keep the GPU busy (--disk-gb-s)"
        )
    return report


def _phase(plan: Plan, hit: float) -> dict[str, Any]:
    return {
        "terms": plan.terms(hit),
        "step_s": plan.step_s(hit),
        "busy": plan.busy(hit),
        "bound_by": plan.bound_by(hit),
    }


def lines(r: dict[str, Any]) -> list[str]:
    """The report in words."""
    rates, memory, host = r["rates"], r["gpu_memory"], r["host_memory"]
    disk = f"{rates['disk'] / GB:.2f} GB/s" if rates["disk"] else "unknown"
    compute = f"at {r['utilisation']:.0%} of its peak" if r["utilisation"] else "from real steps"
    out = [
        f"data: {r['tokens']:,} tokens ({r['trained_share']:.0%} trained) x {r['bytes_per_token']:,.0f} bytes"
        f" = {r['data_bytes'] / GB:,.1f} GB"
        + (f"; {r['free_bytes'] / GB:,.1f} GB are free" if "free_bytes" in r else ""),
        f"drafter: {r['parameters'] / 1e6:,.1f} M parameters, {r['flops_per_token'] / 1e9:,.2f} GFLOP a token",
        f"speeds: disk {disk} ({rates['disk_how']}) · memory {rates['memcpy'] / GB:.1f} GB/s"
        f" · to the device {rates['copy'] / GB:.1f} GB/s ({rates['copy_how']})",
        f"memory: {host['needed'] / GB:,.1f} GB of host memory, {host['cache'] / GB:,.1f} GB left for the page cache"
        f" ({host['hit']:.0%} of the data) · {memory['sum'] / GB:,.1f} GB on the device",
    ]
    for name, title in (("first_epoch", "first epoch"), ("later_epochs", "later epochs")):
        phase = r[name]
        terms = " · ".join(f"{k} {1000 * v:,.1f}" for k, v in sorted(phase["terms"].items(), key=lambda kv: -kv[1]))
        out.append(
            f"{title}: a step of {r['batch_tokens']:,.0f} tokens takes {1000 * phase['step_s']:,.1f} ms"
            f" ({terms} ms, compute {compute}) · GPU busy {phase['busy']:.0%} · bound by {phase['bound_by']}"
        )
    hours = r["hours"]
    out.append(
        f"time: {r['steps_per_epoch']:,} steps an epoch on {r['gpus']} x {r['gpu']} · first epoch"
        f" {_long(hours['first_epoch'])}, all {hours['epochs']} {_long(hours['all_epochs'])}"
    )
    best = r["cheapest"]
    if best:
        out.append(f"bottleneck: {r['bottleneck']}. Cheapest remedy: {best['what']}: {best['gain']:.2f} times as fast")
        out += [f"or: {o['what']}: {o['gain']:.2f} times as fast" for o in r["remedies"] if o != best]
    else:
        out.append(f"bottleneck: {r['bottleneck']}. Nothing on the data side would make it faster")
    return out + [f"warning: {w}" for w in r["warnings"]]


def _long(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min" if hours > 1 / 60 else f"{3600 * hours:,.0f} s"
