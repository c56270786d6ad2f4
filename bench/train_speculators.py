"""The other side of `bench/train.py`: speculators' own training step. Started by it, in the engines' environment."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig

STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ATTENTIONS = ("sdpa", "eager", "simple_flex_attention")
HEADS = (9, 3, 64)  # of queries, of keys and values, and their size


def build(batch: dict[str, torch.Tensor], attention: str, heads: tuple[int, int, int] = HEADS) -> Eagle3DraftModel:
    """Its model with the batch's weights."""
    V, H = batch["embedding"].shape
    inner = len(batch["drafter.midlayer.mlp.gate_proj.weight"])
    layer = LlamaConfig(
        hidden_size=H, intermediate_size=inner, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=heads[2], vocab_size=V, num_hidden_layers=1,
        rms_norm_eps=1e-5, max_position_embeddings=4096, rope_theta=10_000.0,
        attention_bias=False, mlp_bias=False, attn_implementation=attention,
    )  # fmt: skip
    Vd = len(batch["verifier_head"])
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=Vd, norm_before_residual=False)
    )
    weights = {
        name.removeprefix("drafter.").replace("midlayer.", "layers.0."): value
        for name, value in batch.items()
        if name.startswith("drafter.")
    }
    weights |= {
        "embed_tokens.weight": batch["embedding"],
        "verifier_lm_head.weight": batch["verifier_head"],
        "verifier_norm.weight": torch.ones(H),
    }
    missing = set(model.load_state_dict(weights, strict=False).missing_keys) - {"t2d", "d2t"}
    assert not missing, missing
    for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
        getattr(model, name).weight.requires_grad_(False)
    return model.train()


def arguments(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """The batch as its data pipeline shifts it (x[1:], g[:-1], y[1:] of each document), with eyas's mask."""
    ids, mask = batch["input_ids"], batch["loss_mask"]
    B, L = ids.shape
    H = batch["last"].shape[1]
    trained = mask[:, 1:].clone()  # trained where both the token it reads and the one it predicts are the answer's
    trained[:, :-1] &= mask[:, 2:]
    trained[:, -1] = False
    return {
        "input_ids": ids[:, 1:].reshape(1, -1),
        "hidden_states": batch["states"].view(B, L, 3 * H)[:, :-1].reshape(1, -1, 3 * H).to(dtype),
        "verifier_last_hidden_states": batch["last"].view(B, L, H)[:, 1:].reshape(1, -1, H).to(dtype),
        "loss_mask": trained.reshape(1, -1),
        "document_ids": torch.arange(B).repeat_interleave(L - 1)[None],
        "position_ids": torch.arange(L - 1).repeat(B)[None],
        "ttt_steps": STEPS,
        "ttt_step_loss_decay": 1.0,
        "loss_config": resolve_loss_config("kl_div", "eager"),  # the fused one needs Triton
    }


class Trainer:
    """Its trainer's step (`Trainer.train_epoch`), without its logging."""

    def __init__(
        self,
        batch: dict[str, torch.Tensor],
        dtype: str,
        attention: str,
        heads: tuple[int, int, int] = HEADS,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dtype, self.device = DTYPES[dtype], torch.device(device)
        self.model = build(batch, attention, heads).to(self.device)
        given = arguments(batch, self.dtype)
        self.batch = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        self.optimiser = torch.optim.AdamW(self.model.named_parameters(), lr=1e-4, weight_decay=0.0)

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.model(**self.batch)[1]

    def step(self) -> float:
        started = time.perf_counter()
        loss = self.loss()
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        float(loss)
        return time.perf_counter() - started

    def gradients(self) -> dict[str, torch.Tensor]:
        self.optimiser.zero_grad()
        loss = self.loss()
        (loss / STEPS).backward()
        found = {
            name.replace("layers.0.", "midlayer."): p.grad.contiguous()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        return {"loss": (loss.detach() / STEPS).reshape(1), **found}


def fastest(batch: dict[str, torch.Tensor]) -> str:
    """The attention whose best of three steps takes least; those that cannot run here are said and left out."""
    seconds = {}
    for attention in ATTENTIONS:
        try:
            trainer = Trainer(batch, "bf16", attention)
            trainer.step()
            seconds[attention] = min(trainer.step() for _ in range(3))
        except Exception as e:
            print(f"speculators with {attention}: {str(e).splitlines()[0][:200]}", file=sys.stderr)
    print(f"speculators' seconds a step by attention: {seconds}", file=sys.stderr)
    return min(seconds, key=lambda name: seconds[name])


def main() -> None:
    """Answer commands."""
    imported = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    batch = load_file(sys.argv[1])
    if len(sys.argv) == 2:
        # In a process of its own, so that what the slower ones take is not in this one's peak memory.
        found = os.popen(f"{sys.executable} {__file__} {sys.argv[1]} choose").read()
        attention = found.split()[-1]
    else:
        print(fastest(batch))
        return
    trainers: dict[str, Trainer] = {}
    for line in sys.stdin:
        command, *given = line.split()
        answer: Any = None
        if command == "memory":
            answer = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, "imported": imported}
        elif command == "attention":
            answer = attention
        elif command == "steps":
            if given[0] not in trainers:
                trainers[given[0]] = Trainer(batch, given[0], attention)
            answer = [trainers[given[0]].step() for _ in range(int(given[2]))]
        else:
            save_file(Trainer(batch, given[0], attention).gradients(), given[2])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
