"""How much memory there is to use, and which samples the page cache shall keep.

A training run reads each sample once an epoch. Then no policy finds more in a cache than its share of the data, and
the kernel's own (the least recently used goes) finds far less: half the data gives 15 %. So a fixed subset, chosen by
a hash of the ids, is read through the page cache, everything else around it: the subset stays, and every epoch finds
exactly its share. The hash spreads it over any order, so the order of an epoch does not depend on the cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import xxhash

from eyas.store.reader import Source

AHEAD_SHARE, AHEAD_MOST = 1 / 8, 4 << 30  # of what is available, for batches that are read ahead
CACHE_SHARE = 0.7  # of what is available, for `--cache-gb auto`: the run's own memory is still to come
_LOOKED_AT = 64  # samples whose bytes per token stand for all
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that this process can still use: the machine's, or what its control groups leave. Reclaimable counts."""
    return max(0, min([psutil.virtual_memory().available, *(_left(*files) for files in _groups())]))


def _groups() -> list[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of each control group that limits this process's memory, v1 and v2."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, limit, usage = _CGROUP, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / name.lstrip("/")
        for group in [folder, *folder.parents]:  # inside a container the named folder may be out of sight
            if not group.is_relative_to(root):
                break
            found.append((group, limit, usage))
    return found


def _left(folder: Path, limit: str, usage: str) -> int:
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    if most == "max":
        return 1 << 62
    cached = sum(int(stat.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
    return int(most) - used + cached


def ahead_bytes() -> int:
    """Memory for batches that are read ahead: an eighth of what is available, 4 GiB at most."""
    return int(min(available_memory() * AHEAD_SHARE, AHEAD_MOST))


def cache_bytes(cache_gb: float | str) -> int:
    """Bytes of page cache that a run may count on: what was asked for, or, "auto", most of what is available."""
    if cache_gb == "auto":
        return int(available_memory() * CACHE_SHARE)
    return int(float(cache_gb) * 1e9)


def kept_samples(source: Source, budget: int) -> npt.NDArray[np.bool_]:
    """[N] which samples the page cache keeps: as many as `budget` bytes hold, the same for every run on this data.

    Sizes are lengths times the bytes per token of a few samples: asking for all would cost a second per 400,000.
    """
    kept = np.zeros(len(source.ids), dtype=np.bool_)
    if budget <= 0:
        return kept
    some = np.unique(np.linspace(0, len(kept) - 1, _LOOKED_AT).astype(np.int64))
    sizes = source.lengths * (sum(source.nbytes(int(i)) for i in some) / source.lengths[some].sum())
    if sizes.sum() <= budget:
        return ~kept
    order = np.argsort(
        np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in source.ids], dtype=np.uint64), kind="stable"
    )
    kept[order] = np.cumsum(sizes[order]) <= budget
    return kept
