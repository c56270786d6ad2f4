"""Which number type to compute in.

bfloat16 halves memory and is the verifier's own type, but on a CPU without bfloat16 instructions it is emulated and
several times slower than float32, so `auto` asks the hardware.
"""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.errors import EyasError

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def parse_dtype(name: str) -> torch.dtype:
    """`bf16`, `fp16`, `fp32` (or torch's long names, with or without `torch.`) as a torch dtype; else EyasError."""
    try:
        return DTYPES[name.removeprefix("torch.")]
    except KeyError:
        raise EyasError(f"unknown dtype {name!r}: use auto, bf16, fp16 or fp32") from None


def compute_dtype(asked: str = "auto", device: str | torch.device = "cpu") -> torch.dtype:
    """The dtype to compute in on `device`: `asked`, or bfloat16 where the hardware computes it and float32 elsewhere.

    Raises EyasError for a name that is no dtype.
    """
    if asked != "auto":
        return parse_dtype(asked)
    kind = torch.device(device).type
    if kind == "cpu":
        fast = cpu_has_bf16()
    else:
        fast = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16 or AMX); False where that cannot be told."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def pick_device(asked: str = "auto") -> torch.device:
    """The device to compute on: `asked`, or the first GPU, or the CPU. Raises EyasError for one that is not there."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise EyasError(f"--device {asked}: {str(e).splitlines()[0]}") from None
    return device
