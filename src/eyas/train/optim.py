"""Optimiser and learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from eyas.config import TrainConfig


def make_optimiser(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Learning rate of step 0..total-1: linear warm-up, then the schedule, which ends at 0 after the last step."""
    warmup = math.ceil(config.warmup_ratio * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    if config.scheduler == "cosine":
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    if config.scheduler == "linear":
        return config.lr * (1 - done)
    return config.lr
