"""A drafter's folder as it lies there: config.json and the tensors' names, types and shapes, without a judgement.

Whoever wrote it: eyas, SpecForge, the EAGLE reference, TorchSpec, ModelOpt (one level of config, `midlayer.*` or
`layers.0.*`), or speculators (nested config). safetensors in one file or several, or pytorch_model.bin, which is read
as plain data (weights_only) and never executed.

Opening one reads config.json and the headers of the safetensors files: milliseconds, and no torch. Values are read
when asked for, tensor by tensor, out of the page cache.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eyas.drafter.conventions import canonical
from eyas.errors import EyasError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
# safetensors' names of types -> numpy's; bfloat16, which numpy lacks, as its 16 bits.
NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
}
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64")
MOST_HEADER = 100 << 20
POINTER = b"version https://git-lfs"  # how the few words begin that Git LFS leaves in place of a file


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its name there, its type in safetensors' words, its shape, and where its bytes begin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int = 0
    value: Any = field(default=None, repr=False, compare=False)  # of a pickle, which torch has already opened


class DrafterFolder:
    """config.json and the tensors of `path`. Raises EyasError, in one line, where they are missing or broken.

    tensors: by the contract's name (`canonical`); the name in the file is in `Stored`. twice: names in the file that
    mean a tensor that is there already.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = _read_config(path)
        self.pickled = False
        self.files = _weight_files(path)
        self.tensors: dict[str, Stored] = {}
        self.twice: list[str] = []
        for file in self.files:
            for stored in self._headers(file):
                name = canonical(stored.name)
                if name in self.tensors:
                    self.twice.append(stored.name)
                else:
                    self.tensors[name] = stored

    def _headers(self, file: Path) -> list[Stored]:
        if file.suffix == ".safetensors":
            return _safetensors(file)
        self.pickled = True
        return _pickle(file)

    @property
    def speculators(self) -> bool:
        """Whether config.json is speculators' nested one."""
        return "speculators_model_type" in self.raw

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json on one level: the layer's own settings, and over them what stands at the top."""
        if not self.speculators:
            return self.raw
        layer = self.raw.get("transformer_layer_config")
        own = {k: v for k, v in self.raw.items() if k not in ("transformer_layer_config", "speculators_config")}
        return {**(layer if isinstance(layer, dict) else {}), **own}

    @property
    def kind(self) -> str:
        """The kind of drafter that the tensors are: "mla", "qwen3" or "llama" (`conventions.ATTENTION`)."""
        attention = {n.split(".")[2] for n in self.tensors if n.startswith("midlayer.self_attn.")}
        if attention & {"q_a_proj", "kv_a_proj_with_mqa"}:
            return "mla"
        return "qwen3" if attention & {"q_norm", "k_norm"} else "llama"

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, by the contract's name; None where there is none."""
        return self.tensors[name].shape if name in self.tensors else None

    def array(self, name: str) -> npt.NDArray[Any]:
        """The values as they are stored, bfloat16 as uint16; of safetensors a view into the file."""
        stored = self.tensors[name]
        if stored.value is not None:
            import torch

            bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
            value = stored.value.detach().contiguous()
            return np.asarray(value.view(bits.get(value.dtype, value.dtype)).numpy())
        if not np.prod(stored.shape):
            return np.empty(stored.shape, NUMPY[stored.dtype])
        try:
            flat = np.memmap(stored.file, NUMPY[stored.dtype], "r", stored.offset, stored.shape)
        except (OSError, ValueError) as e:
            raise EyasError(f"{stored.file} cannot be read: {e}") from None
        return flat

    def floats(self, name: str, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """The values as float32, all or the rows named."""
        values = self.array(name)
        if rows is not None:
            values = values[rows]
        if self.tensors[name].dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def tensor(self, name: str) -> Tensor:
        """The values as a torch tensor of their own type, in memory of its own."""
        import torch

        value = torch.from_numpy(np.array(self.array(name)))
        return value.view(torch.bfloat16) if self.tensors[name].dtype == "BF16" else value


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise EyasError(f"{path} is no folder: name one that holds a drafter's {CONFIG} and weights")
    try:
        config = json.loads((path / CONFIG).read_text("utf-8"))
    except FileNotFoundError:
        raise EyasError(f"{path} is no drafter checkpoint: {CONFIG} is missing") from None
    except (OSError, ValueError, RecursionError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else " ".join(str(e).split())
        raise EyasError(f"{path} cannot be read: {CONFIG}: {reason}") from None
    if not isinstance(config, dict):
        raise EyasError(f"{path}: {CONFIG} is no JSON object")
    return config


def _weight_files(path: Path) -> list[Path]:
    """The files that hold the weights, safetensors before pickles, as engines choose them."""
    for single in (WEIGHTS, PICKLE):
        index = path / f"{single}.index.json"
        if (path / single).exists():
            return [path / single]
        if index.exists():
            try:
                names = sorted({Path(n).as_posix() for n in json.loads(index.read_bytes())["weight_map"].values()})
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise EyasError(f"{path} cannot be read: {index.name} is no index of weights") from None
            if missing := [n for n in names if not (path / n).exists()]:
                raise EyasError(f"{path} is no whole checkpoint: {missing[0]}, which {index.name} names, is missing")
            return [path / n for n in names]
        found = sorted(path.glob(f"*{Path(single).suffix}"))
        if found := [f for f in found if not f.name.startswith(("optimizer", "training_args", "scheduler"))]:
            return found
    raise EyasError(f"{path} is no drafter checkpoint: {WEIGHTS} is missing")


def _safetensors(file: Path) -> list[Stored]:
    """The header of a safetensors file: 8 bytes of length, JSON of that length, then the values."""
    try:
        with file.open("rb") as f:
            start = f.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else MOST_HEADER + 1
            text = f.read(length) if length <= MOST_HEADER else b""
        header = json.loads(text)
        header.pop("__metadata__", None)
        found = [
            Stored(name, str(about["dtype"]), _shape(about["shape"]), file, 8 + length + about["data_offsets"][0])
            for name, about in header.items()
        ]
        ends = [8 + length + about["data_offsets"][1] for about in header.values()]
    except OSError as e:
        raise EyasError(f"{file.parent} cannot be read: {file.name}: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        reason = (
            "is what Git LFS leaves in place of the file: git lfs pull"
            if (start + text).startswith(POINTER) or start == POINTER[:8]
            else "is no whole safetensors file"
        )
        raise EyasError(f"{file.parent} cannot be read: {file.name} {reason}") from None
    if unknown := [s for s in found if s.dtype not in NUMPY]:
        raise EyasError(f"{file.parent} cannot be read: {unknown[0].name} is of the unknown type {unknown[0].dtype}")
    at = 8 + length  # the values lie one behind the other, each as long as its shape says
    for stored, end in sorted(zip(found, ends, strict=True), key=lambda pair: (pair[0].offset, pair[1])):
        size = math.prod(stored.shape) * np.dtype(NUMPY[stored.dtype]).itemsize
        if stored.offset != at or end != at + size:
            raise EyasError(
                f"{file.parent} cannot be read: {file.name} says of {stored.name} another place than its shape and type"
            )
        at = end
    if file.stat().st_size != at:
        raise EyasError(f"{file.parent} cannot be read: {file.name} is cut short, or longer than its header says")
    return found


def _shape(sides: list[Any]) -> tuple[int, ...]:
    """A shape of a header. Raises ValueError for what is none."""
    if not isinstance(sides, list) or not all(type(n) is int and n >= 0 for n in sides):
        raise ValueError("no shape")
    return tuple(sides)


def _pickle(file: Path) -> list[Stored]:
    """The tensors of a file made by torch.save, read as data: a pickle that names code is refused."""
    import torch

    names = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }
    try:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of before torch 1.6 is no zip, and cannot be mapped
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as e:  # torch.load raises RuntimeError, UnpicklingError, EOFError, ... for a broken file
        # torch's own words advise to execute what the file holds (weights_only=False): they are not passed on.
        code = re.search(r"GLOBAL ([\w.]+)", str(e))
        reason = (
            f"it names code ({code[1]}), which eyas does not execute"
            if code
            else f"{type(e).__name__}, it is no whole file of tensors"
        )
        raise EyasError(f"{file.parent} cannot be read: {file.name}: {reason}") from None
    for inner in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(inner), dict):
            found = found[inner]
    if not isinstance(found, dict) or not all(isinstance(n, str) for n in found):
        raise EyasError(f"{file.parent} cannot be read: {file.name} holds no tensors by name")
    tensors = {n: t for n, t in found.items() if isinstance(t, torch.Tensor)}
    if odd := [n for n, t in tensors.items() if t.layout != torch.strided or t.is_meta]:
        raise EyasError(f"{file.parent} cannot be read: {odd[0]} is sparse, or holds no numbers")
    if unknown := [n for n, t in tensors.items() if t.dtype not in names]:
        raise EyasError(f"{file.parent} cannot be read: {unknown[0]} is of the type {tensors[unknown[0]].dtype}")
    return [Stored(n, names[t.dtype], tuple(t.shape), file, value=t) for n, t in tensors.items()]
