"""What every drafter is made of: fp32 masters that are used in the dtype of their input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.drafter.precision import wide


class RMSNorm(nn.Module):
    """Root mean square norm; statistics in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] -> [.., size]."""
        return F.rms_norm(wide(x), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Linear(nn.Linear):
    """fp32 master weight without bias, used in the dtype of the input."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        return F.linear(x, self.weight.to(x.dtype))
