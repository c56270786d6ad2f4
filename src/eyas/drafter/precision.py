"""The precision that statistics and softmaxes run in."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 where it is that already (the tests' reference)."""
    return x if x.dtype == torch.float64 else x.float()
