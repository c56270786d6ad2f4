"""Optimisers, learning rate, and the moving average of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from eyas.config import TrainConfig
from eyas.errors import EyasError


def make_optimisers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW of everything, or Muon of the layer's matrices and AdamW of the rest. Norms are not decayed.

    Muon (Jordan et al. 2024; torch's own) takes a matrix's momentum to the nearest orthogonal one; its step is scaled
    to the size of AdamW's, so that one learning rate serves both. The head stays with AdamW, as its authors advise.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    muon = [p for name, p in named if config.optimiser == "muon" and p.ndim > 1 and "lm_head" not in name]
    rest = [p for _, p in named if not any(p is m for m in muon)]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)]
    if muon:
        made.append(
            torch.optim.Muon(muon, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return made


def check_optimiser(config: TrainConfig, world: int) -> None:
    """Raises EyasError for what does not go together."""
    if config.optimiser == "muon" and config.parallel == "fsdp" and world > 1:
        raise EyasError("--optimiser muon needs whole matrices, --parallel fsdp splits them: use ddp, or adamw")


def learning_rate(done: int, total: int, config: TrainConfig, size: int = 1) -> float:
    """Learning rate of the step that takes packs done .. done + size of `total`.

    Linear warm-up, then the schedule, which ends at 0 after the last pack. It runs over packs and not over steps, so
    that it goes on where it was when another number of ranks makes steps larger or smaller.
    """
    warmup = math.ceil(config.warmup_ratio * total)
    if done < warmup:
        return config.lr * min(1.0, (done + size) / warmup)
    part = (done - warmup) / max(1, total - warmup)
    if config.scheduler == "cosine":
        return config.lr * (1 + math.cos(math.pi * part)) / 2
    if config.scheduler == "linear":
        return config.lr * (1 - part)
    return config.lr


class Average:
    """Exponential moving average of a model's parameters, beside them on their device and sharded as they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters: list[Tensor] = list(model.parameters())
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """After a step: average = decay * average + (1 - decay) * weights."""
        torch._foreach_lerp_(list(self.weights.values()), self._parameters, 1 - self.decay)


def optimiser_tensors(optimisers: list[torch.optim.Optimizer], model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the optimisers' state by name, as views that loading may write into.

    A fresh optimiser has no state until its first step: one is made with zero gradients and a rate of zero.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for optimiser in optimisers:
        if not optimiser.state:
            _begin(optimiser)
        for p, state in optimiser.state.items():
            for key, value in state.items():
                # safetensors cuts no slice out of a number without dimensions
                tensors[f"optimiser/{key}/{names[p]}"] = value.view(1) if value.ndim == 0 else value
    return tensors


def _begin(optimiser: torch.optim.Optimizer) -> None:
    kept = [(group, group["lr"]) for group in optimiser.param_groups]
    for group, _ in kept:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    for state in optimiser.state.values():
        if "step" in state:
            state["step"].zero_()
    for group, rate in kept:
        group["lr"] = rate
