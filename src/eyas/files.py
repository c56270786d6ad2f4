"""Small files that are there as a whole or not at all, whether a folder will take them, and how sizes are said."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from eyas.errors import EyasError


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` under another name, sync it, rename it: a crash leaves the old file or the new one.

    A link's target is written, and what is no file (a pipe, /dev/stdout) is written into.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        target = Path(os.path.realpath(path))
        if not target.is_file() or path.absolute().parts[1:2] in (("dev",), ("proc",)):
            path.write_bytes(data)
            return
        path = target
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


def refusal(e: BaseException) -> str:
    """Why a disk refuses, and what to do. The libraries below tell some errors in words alone."""
    text = " ".join(str(e).split()) or type(e).__name__
    number = getattr(e, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "quota" in text:
        return "No space left: free some, or name another folder"
    return f"{getattr(e, 'strerror', None) or text}: name another folder, or change this one's permissions"


MADE = {  # what a folder holds, by the file of it that tells
    "prepared.parquet": "prepared samples",
    "manifest.json": "a store",
    "run.yaml": "a training run",
    "config.json": "a model or a drafter",
    "vocab.json": "a draft vocabulary",
}


INNER = ("start", "state", "checkpoints", "record")  # folders that a run or a store keeps for itself


def check_unused(folder: Path, mine: str, what: str = "") -> None:
    """EyasError where another command, or another tool, has written `folder`; mine: the name in MADE that may be there.

    A folder that a run or a store keeps for itself is theirs. what: how the line names it; default the folder's name.
    """
    try:
        for inner in (folder, *folder.parents):
            for name in ("run.yaml", "manifest.json") if inner.name in INNER else ():
                if (inner.parent / name).is_file():
                    raise EyasError(f"{what or folder} is part of {MADE[name]} ({inner.parent}): name another folder")
        for name, holds in MADE.items():
            if name != mine and (folder / name).is_file():
                raise EyasError(f"{what or folder} holds {holds} ({name}): name another folder")
        if found := next(folder.glob("data_*.pt"), None):
            raise EyasError(f"{what or folder} holds another tool's samples ({found.name}, ...): name another folder")
    except OSError as e:  # a folder that nobody may look into, a name that is too long
        raise EyasError(f"{what or folder} cannot be written: {refusal(e)}") from None


def same_place(a: Path, b: Path) -> bool:
    """Whether two names are of one place, links followed; a link that leads back to itself is only itself."""
    return os.path.realpath(a) == os.path.realpath(b)


def check_figures(path: Path) -> None:
    """EyasError where `path`, to which figures are to be written, is a file of another kind or no place at all."""
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as e:  # a link that leads back to itself, a name that is too long
        raise EyasError(f"--output {path} cannot be written: {refusal(e)}") from None
    if path.is_file() and path.stat().st_size:
        try:
            other = path.name in MADE or not isinstance(json.loads(path.read_bytes()), dict)
        except (OSError, ValueError):
            other = True
        if other:
            raise EyasError(f"--output {path} holds something else than figures: name another file")


def check_writable(folder: Path, what: str) -> None:
    """EyasError in the name of `what` where `folder`, there or to be made, takes no file. Leaves nothing behind."""
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.exists():
                path.mkdir()
                made.append(path)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as e:
        raise EyasError(f"{what} cannot be written: {e.strerror or e}") from None
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir()


def size_text(nbytes: float) -> str:
    """As `12.3 GB`, or `4.5 MB` where it is less than one."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder, or a file, durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
