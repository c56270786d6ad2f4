"""Small files that are there as a whole or not at all, and how sizes are said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from eyas.errors import EyasError


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` under another name, sync it, rename it: a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. Raises EyasError when the disk refuses."""
    try:
        write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())
    except OSError as e:
        raise EyasError(f"cannot write {path}: {e.strerror or e}") from None


def size_text(nbytes: float) -> str:
    """As `12.3 GB`, or `4.5 MB` where it is less than one."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
