"""A training step in numbers: what it computes and what it reads, and how long that takes.

A step takes as long as the slowest of four things that go on at the same time:

    compute   FLOPs of the drafter at a stated utilisation of a GPU's published peak, plus the optimiser's memory
              traffic; or a few real steps, where this machine is the one that trains
    disk      bytes of a batch that are not in the page cache / what the disk under these files gives, measured
    copy      bytes of a batch / what host to device (or memory to memory, on a CPU) gives, measured
    cpu       seconds of the reading threads for a batch / their number, measured on batches that are in memory

`docs/plan.md` has the formulas and a worked plan for Kimi-K2.5. Everything is arithmetic on `Plan`, so that a remedy's
gain is the same arithmetic with one number changed. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.drafter.model import DrafterConfig

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
    H, n, heads, kv = c.hidden_size, c.num_heads, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = {"kv": 2 * 2 * H * kv, "qo": 2 * H * heads + heads * H, "norms": 4 * H}
    if c.mla is not None:
        q, latent, rope, v = c.mla.q_lora_rank, c.mla.kv_lora_rank, c.mla.qk_rope_head_dim, c.mla.v_head_dim
        attention = {
            "kv": 2 * H * (latent + rope) + latent * n * (c.mla.qk_nope_head_dim + v),
            "qo": 2 * H * q + q * heads + n * v * H,
            "norms": 4 * H + q + latent,
        }
    return {
        "fc": 3 * c.target_hidden_size * H,
        "mlp": 3 * H * c.intermediate_size,
        "lm_head": c.draft_vocab_size * H,
        **attention,
    }


def flops_per_token(c: DrafterConfig, ttt_steps: int, trained_share: float, length: int) -> float:
    """Floating point operations of training per token of data (docs/plan.md).

    A weight costs 2 FLOPs forward and 4 backward for every row it sees. Every token passes `fc` and the step-0 key and
    value; only trained ones pass the rest, once for each TTT step. The verifier's head is used once, forward.
    """
    p = parameters(c)
    rest = p["kv"] + p["qo"] + p["mlp"] + p["lm_head"]
    # q k and p v over half the document on average
    scores = (length / 2) * c.num_heads * (c.head_dim + (c.mla.v_head_dim if c.mla else c.head_dim))
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
