"""Optimisers, learning rate, and the moving average of the weights."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from eyas.config import TrainConfig
from eyas.errors import EyasError


def make_optimisers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW of everything, or Muon of the layer's matrices and AdamW of the rest. Norms are not decayed.

    adamw8bit is torchao's: moments in 8 bits with a scale for each block of 256 (Dettmers et al. 2021), 2 bytes of
    state a parameter in place of 8. Raises EyasError where torchao is not installed.

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
    if config.optimiser == "adamw8bit":
        return [_eight_bit()(groups, lr=config.lr, betas=config.betas)]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)]
    if muon:
        made.append(
            torch.optim.Muon(muon, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return made


def _eight_bit() -> Any:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of kernels for other machines
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise EyasError(
            "--optimiser adamw8bit is torchao's, which is not installed: pip install 'eyas[8bit]'"
        ) from None
    return AdamW8bit


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of all that the optimiser changes; torchao keeps it as a tensor, which its kernel reads."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_optimiser(config: TrainConfig, world: int) -> None:
    """Raises EyasError for what does not go together."""
    if config.optimiser == "adamw8bit":
        _eight_bit()
        if config.parallel == "fsdp" and world > 1:
            raise EyasError("--optimiser adamw8bit is kept whole on each rank: use --parallel ddp, or adamw")
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

    A fresh optimiser has no state until its first step: one is made with zero gradients and a rate of zero. That of
    adamw8bit compiles its steps, one for each shape: seconds on a GPU, minutes on a CPU.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for optimiser in optimisers:
        if not optimiser.state:
            _begin(optimiser)
        for p, state in optimiser.state.items():
            for key, value in state.items():
                if hasattr(value, "codes"):  # torchao's 8-bit tensor: numbers and their scales
                    tensors[f"optimiser/{key}/{names[p]}/codes"] = value.codes
                    tensors[f"optimiser/{key}/{names[p]}/scale"] = value.scale
                    continue
                # safetensors cuts no slice out of a number without dimensions
                tensors[f"optimiser/{key}/{names[p]}"] = value.view(1) if value.ndim == 0 else value
    return tensors


def _begin(optimiser: torch.optim.Optimizer) -> None:
    rate = float(optimiser.param_groups[0]["lr"])  # of all groups
    set_rate(optimiser, 0.0)
    for group in optimiser.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    for state in optimiser.state.values():
        if "step" in state:
            state["step"].zero_()
    set_rate(optimiser, rate)
