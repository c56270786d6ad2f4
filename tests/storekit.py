"""What the tests of the store share: samples that can be told from each other, and processes that are killed."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.store.layout import Manifest
from eyas.store.reader import StoreSource
from eyas.store.writer import StoreWriter

H = 24
LAYERS = (2, 4, 5, 8)
MANIFEST = Manifest("tiny", "f00d", H, 8, 100, LAYERS, "before", created="2000-01-01")
SMALL = {"shard_bytes": 70_000, "commit_bytes": 40_000, "header_bytes": 4096}  # several shards, several commits
LENGTHS = (5, 1, 200, 9, 86, 3, 400, 2, 7)


@functools.cache  # a forked child must not compute: torch's threads do not survive the fork
def sample(i: int, tokens: int | None = None) -> tuple[str, np.ndarray, np.ndarray, torch.Tensor]:
    tokens = LENGTHS[i % len(LENGTHS)] if tokens is None else tokens
    rng = np.random.default_rng(i)
    states = torch.from_numpy(rng.standard_normal((len(LAYERS), tokens, H), dtype=np.float32)).to(torch.bfloat16)
    return f"s{i}", rng.integers(0, 100, tokens).astype(np.int32), np.arange(tokens) >= tokens // 2, states


def write(path: Path, count: int = len(LENGTHS), writer: str = "0", **limits: Any) -> None:
    """Whatever of samples 0..count is not there yet."""
    with StoreWriter(path, MANIFEST, writer=writer, **(limits or SMALL)) as store:
        for i in range(count):
            one = sample(i)
            if one[0] not in store.done_ids:
                store.add(*one)


def assert_right(source: StoreSource | Any) -> None:
    """Every sample that the source offers is what was written under its id."""
    for i, name in enumerate(source.ids):
        _, ids, mask, states = sample(int(name[1:]))
        assert source.lengths[i] == len(ids)
        assert source.trained[i] == mask.sum()
        found_ids, found_mask = source.tokens(i)
        np.testing.assert_array_equal(found_ids, ids)
        np.testing.assert_array_equal(found_mask, mask)
        assert torch.equal(source.states(i), states)


def files(path: Path) -> dict[str, bytes]:
    """Name -> bytes; a kill may leave the manifest's temporary file (hidden), which nothing ever reads."""
    return {p.name: p.read_bytes() for p in path.iterdir() if not p.name.startswith(".")}


def flip(path: Path, byte: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        (value,) = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


# Kills. The child is a fork that dies by its own SIGKILL at a chosen system call: before it, or half-way through it.

CALLS = ("pwritev", "fdatasync", "fsync", "ftruncate", "rename", "replace", "link", "unlink")


def run_to_death(work: Callable[[], None], at: int, *, torn: bool, power_cut: bool) -> bool:
    """Fork, do `work`, die at system call number `at`; True if the child died of it, False if it finished before."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    try:
        _arm(at, torn, power_cut)
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def _arm(at: int, torn: bool, power_cut: bool) -> None:
    real = {name: getattr(os, name) for name in CALLS}
    count = -1
    unsynced: list[tuple[int, int, bytes, int]] = []  # fd, offset, what was there, how much was written

    def die() -> None:
        if power_cut:  # what no sync had covered never reached the disk: the size did, the content did not
            for fd, offset, old, length in reversed(unsynced):
                real["pwritev"](fd, [old.ljust(length, b"\0")], offset)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal count
            count += 1
            if name == "pwritev":
                fd, buffers, offset = args
                data = b"".join(bytes(b) for b in buffers)
                if count == at and torn:
                    data = data[: len(data) // 2]
                unsynced.append((fd, offset, os.pread(fd, len(data), offset), len(data)))
                if count == at and torn:
                    real["pwritev"](fd, [data], offset)
            if count == at:
                die()
            if name in ("fdatasync", "fsync"):
                unsynced[:] = [w for w in unsynced if w[0] != args[0]]
            return real[name](*args)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
