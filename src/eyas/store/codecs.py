"""Eight bits instead of sixteen for a state, and how much of the verifier's distribution that costs.

    bf16   as it is
    fp8    float8 e4m3 times one float32 scale a row (a row is one layer's state of one token)
    int8   the same with int8, after every channel was divided by its own size over the data set: a few channels of a
           transformer's states are a hundred times larger than the rest, and would use up the eight bits of every row

A channel's size is its root mean square over calibration samples, as a multiple of the median one's (`Calibration`).
Cost of reading on a CPU: int8 about 0.5 s/GB, fp8 2; on a GPU nothing that shows.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.store.layout import Manifest, logits_of

CODECS = ("bf16", "fp8", "int8")
LAST_ROWS = ("all", "trained")  # or logits:k (logits.py)
MOST_LOGITS = 1024
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_SMALLEST_SCALE = 1e-20  # of a row of zeros
CALIBRATION_TOKENS = 32_768


class Encoded(NamedTuple):
    """One layer of a sample as it is stored: data [T, Ht] of the codec's dtype, scales [T] float32."""

    data: Tensor
    scales: Tensor


def encode(states: Tensor, codec: str, channels: Tensor | None = None) -> Encoded:
    """States [T, Ht] in "fp8" or "int8". channels: [Ht] float32, for int8. Raises EyasError for NaN or infinity."""
    values = states.float()
    if channels is not None:
        values = values / channels
    largest = values.abs().amax(dim=1)
    if not torch.isfinite(largest).all():
        raise EyasError(f"states that are NaN or infinite cannot be stored as {codec}")
    scales = (largest / _LARGEST[codec]).clamp(min=_SMALLEST_SCALE)
    values = values / scales[:, None]
    if codec == "int8":
        return Encoded(values.round_().to(torch.int8), scales)
    return Encoded(values.to(torch.float8_e4m3fn), scales)


def decode(data: Tensor, scales: Tensor, channels: Tensor | None = None) -> Tensor:
    """[T, Ht] bfloat16 of what was stored, on the device where it lies. channels: as it was encoded with."""
    values = data.float().mul_(scales[:, None])
    if channels is not None:
        values.mul_(channels)
    return values.to(torch.bfloat16)


def bytes_per_token(
    codec: str, hidden_size: int, layers: int, last_rows: str = "all", trained_share: float = 1.0
) -> float:
    """Bytes of states that a token takes on average, without the padding of its sample."""
    row = 2.0 * hidden_size if codec == "bf16" else hidden_size + 4.0
    if last_rows == "all":
        return layers * row
    k = logits_of(last_rows)
    return (layers - 1) * row + trained_share * (6.0 * k if k else row)


class Calibration:
    """The channels' sizes, from samples that are put in one by one.

    layers, hidden_size: L and Ht.
    """

    def __init__(self, layers: int, hidden_size: int) -> None:
        self._squares = torch.zeros(layers, hidden_size, dtype=torch.float64)
        self.tokens = 0

    def add(self, states: Tensor) -> None:
        """Count a sample's states [L, T, Ht]; what is not finite is left out."""
        values = states.float()
        rows = torch.isfinite(values).all(dim=2).all(dim=0)
        if rows.any():
            # The first token of a sequence is often a hundred times larger than all others, in every channel alike.
            values = values[:, rows] / values[:, rows].square().mean(dim=2, keepdim=True).sqrt().clamp(min=1e-20)
            self._squares += values.double().square().sum(dim=1)
            self.tokens += int(rows.sum())

    def channels(self) -> Tensor:
        """[L, Ht] float32, one in the median. Raises EyasError when nothing was counted."""
        if not self.tokens:
            raise EyasError("int8 needs states to find its scales from, and there are none")
        rms = (self._squares / self.tokens).sqrt()
        middle = rms.median(dim=1, keepdim=True).values.clamp(min=1e-20)
        return (rms / middle).clamp(min=1e-3).float()


def calibrate(samples: Iterable[Tensor], layers: int, hidden_size: int, tokens: int = CALIBRATION_TOKENS) -> Tensor:
    """`Calibration.channels` of samples [L, T, Ht], until `tokens` tokens were seen."""
    calibration = Calibration(layers, hidden_size)
    for states in samples:
        calibration.add(states)
        if calibration.tokens >= tokens:
            break
    return calibration.channels()


def check_names(codec: str, last: str) -> None:
    """Raises EyasError unless both name something."""
    if codec not in CODECS:
        raise EyasError(f"--codec {codec}: use one of {', '.join(CODECS)}")
    if last not in LAST_ROWS and not 1 <= logits_of(last) <= MOST_LOGITS:
        raise EyasError(f"--last {last}: use all, trained, or logits:64 (1 to {MOST_LOGITS} of them)")


def said_channels(channels: Tensor) -> str:
    """Channels [L, Ht] as a manifest holds them."""
    return base64.b64encode(channels.float().contiguous().numpy().astype("<f4").tobytes()).decode()


def channels_of(manifest: Manifest) -> Tensor | None:
    """[state layers, Ht] float32 that a store's int8 values are to be multiplied by, or None for another codec.

    Raises EyasError where they are missing or of another size.
    """
    if manifest.codec not in CODECS or (manifest.last_rows not in LAST_ROWS and not manifest.logits):
        raise EyasError(f"a store of codec {manifest.codec!r} with {manifest.last_rows!r} last rows: update eyas")
    if manifest.codec != "int8":
        return None
    values = np.frombuffer(base64.b64decode(manifest.channels), dtype="<f4")
    shape = (len(manifest.state_layers), manifest.hidden_size)
    if len(values) != shape[0] * shape[1] or not (np.isfinite(values).all() and (values > 0).all()):
        raise EyasError(
            "a store in int8 needs the sizes of its channels, and its manifest does not hold them: convert again"
        )
    return torch.from_numpy(values.astype(np.float32)).view(shape)


class Cost(NamedTuple):
    """What a codec costs: KL(verifier, as read back) in nats, share of first choices kept, mean distance of a row from
    the true one as a share of its length, bytes a token."""

    codec: str
    kl: float
    top1: float
    error: float
    bytes_per_token: float


def compare(
    before: Tensor, after: Tensor, head: Tensor, rows: int = 128, read: Callable[[Tensor], Tensor] | None = None
) -> tuple[float, float]:
    """(mean KL in nats, share of equal first choices) of the distributions of two sets of head inputs.

    before, after: [P, Ht] last states behind the final norm; head: [V, Ht]. In float32, `rows` positions at a time.
    read: makes logits [., V] of rows of `after`, where it is no states.
    """
    kl = same = 0.0
    weight = head.float()
    for start in range(0, len(before), rows):
        a = torch.log_softmax(before[start : start + rows].float() @ weight.T, dim=-1)
        there = after[start : start + rows]
        b = torch.log_softmax(there.float() @ weight.T if read is None else read(there), dim=-1)
        kl += float((a.exp() * (a - b)).sum())
        same += float((a.argmax(-1) == b.argmax(-1)).sum())
    return kl / max(len(before), 1), same / max(len(before), 1)
