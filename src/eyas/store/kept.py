"""Arrays and a few words in one safetensors file, believed only where its key and its own checksum match.

The key says of what the arrays were made; whoever keeps them makes them anew when the key has changed. Nothing but
speed is lost with such a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Arrays = dict[str, npt.NDArray[Any]]


def pack(arrays: Mapping[str, npt.NDArray[Any]], words: Mapping[str, str], key: str) -> bytes:
    """The file's bytes."""
    from safetensors.numpy import save

    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    said = {**words, "key": key}
    return bytes(save(whole, metadata={**said, "check": _check(whole, said)}))


def unpack(path: Path, key: str) -> tuple[Arrays, dict[str, str]] | None:
    """The arrays and the words; None where there is no such file, it has another key, or it does not match itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            said = dict(file.metadata() or {})
            if said.get("key") != key:
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return (arrays, said) if said.pop("check") == _check(arrays, said) else None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None


def _check(arrays: Arrays, said: dict[str, str]) -> str:
    digest = xxhash.xxh3_64(json.dumps(said, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
