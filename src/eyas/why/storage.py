"""Data evidence by file: which files, how fast, from the disk or from memory, and whether it will warm up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from eyas.why.procs import Proc, Reading

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Mount:
    id: str
    mountpoint: str = "?"
    fstype: str = "?"
    source: str = "?"
    device: str | None = None
    network: bool = False
    fuse: bool = False
    free: int | None = None
    size: int | None = None
    inodes_free: int | None = None
    inodes: int | None = None
    timed_out: bool = False
    used_by: tuple[str, ...] = ()

    @property
    def remote(self) -> bool:
        return self.network or self.fuse

    @property
    def memory(self) -> bool:
        return self.fstype in ("tmpfs", "ramfs", "hugetlbfs")

    @property
    def full(self) -> bool:
        """No room for another block of any size that matters, or no inode left."""
        blocks = self.free is not None and bool(self.size) and self.free < 1 << 20
        return blocks or (self.inodes_free == 0 and bool(self.inodes))

    @property
    def words(self) -> str:
        return f"{self.mountpoint} ({self.fstype}, {self.device or self.source})"


@dataclass(frozen=True)
class DataView:
    readings: tuple[Reading, ...] = ()
    mount: Mount | None = None  # the mount of most open data files
    disk_rate: float | None = None  # read_bytes a second, all members
    read_rate: float | None = None  # rchar a second
    calls: float | None = None  # read calls a second
    pos_rate: float = 0.0  # bytes a second by file offsets
    opened: int = 0  # data files opened between the samples
    cached: float | None = None  # share of the open data files in the page cache, by size
    dataset: Json = field(default_factory=dict)
    memory: int | None = None  # memory that the page cache could use
    disk: Json = field(default_factory=dict)  # rates of the device below

    @property
    def files(self) -> list[str]:
        """Data files being read, those that moved first."""
        ordered = sorted(self.readings, key=lambda r: (not r.fresh, -(r.moved or 0)))
        return list(dict.fromkeys(r.path for r in ordered))

    @property
    def moves(self) -> bool:
        return bool(self.opened) or self.pos_rate > 0 or (self.disk_rate or 0) > 0

    @property
    def cold(self) -> float | None:
        """Share of the bytes read that came from the device and not from memory."""
        if self.disk_rate is None or not self.read_rate or self.read_rate < 4096:
            return None
        return min(1.0, self.disk_rate / self.read_rate)

    @property
    def rate(self) -> float:
        return max(self.disk_rate or 0.0, self.pos_rate)

    @property
    def speed(self) -> float:
        """Bytes a second that the readers got, from wherever: the one figure that answers give."""
        return max(self.rate, self.read_rate or 0.0)

    @property
    def total(self) -> int | None:
        return self.dataset.get("bytes")

    @property
    def mean_file(self) -> float | None:
        files, total = self.dataset.get("files"), self.dataset.get("bytes")
        if files and total and files > 1:
            return float(total) / float(files)
        sizes = [r.size for r in self.readings if r.size]
        return sum(sizes) / len(sizes) if sizes else None

    @property
    def warms(self) -> bool | None:
        """Whether the whole data set fits into memory that the page cache may take. None: not known."""
        if self.total is None or self.memory is None:
            return None
        return self.total <= self.memory * 0.95

    @property
    def full_pass_s(self) -> float | None:
        return self.total / self.speed if self.total and self.speed > 1e4 else None


def read_mounts(snap: Json) -> dict[str, Mount]:
    mounts = {}
    for key, raw in (snap.get("mounts") or {}).items():
        stat = raw.get("statvfs") or {}
        mounts[str(key)] = Mount(
            id=str(key),
            mountpoint=str(raw.get("mountpoint") or "?"),
            fstype=str(raw.get("fstype") or "?"),
            source=str(raw.get("source") or "?"),
            device=raw.get("device"),
            network=bool(raw.get("network")),
            fuse=bool(raw.get("fuse")),
            free=stat.get("avail"),
            size=stat.get("size"),
            inodes_free=stat.get("ffree"),
            inodes=stat.get("files"),
            timed_out=bool(raw.get("timed_out")),
            used_by=tuple(raw.get("used_by") or ()),
        )
    return mounts


def mount_of(path: str, mounts: Mapping[str, Mount]) -> Mount | None:
    """The mount that holds a path, by the longest mount point."""
    fits = [m for m in mounts.values() if path == m.mountpoint or path.startswith(m.mountpoint.rstrip("/") + "/")]
    return max(fits, key=lambda m: len(m.mountpoint), default=None)


def read_data(snap: Json, readers: Iterable[Proc], mounts: Mapping[str, Mount], span: float) -> DataView:
    readers = list(readers)
    readings = tuple(r for p in readers for r in p.readings)
    files = snap.get("files") or {}
    known = [(files[p].get("cached"), files[p].get("size") or 1) for p in {r.path for r in readings} if p in files]
    weighed = [(float(c), int(s)) for c, s in known if c is not None]
    votes: dict[str, int] = {}
    for r in readings:
        mount = mounts.get(str(r.mnt)) or mount_of(r.path, mounts)
        if mount is not None:
            votes[mount.id] = votes.get(mount.id, 0) + 1
    datasets = snap.get("datasets") or []
    held = {str(PurePosixPath(r.path).parent) for r in readings}
    near = [d for d in datasets if d.get("dir") in held] or datasets
    dataset: Json = max(near, key=lambda d: d.get("bytes") or 0, default={})
    where = mounts.get(max(votes, key=lambda k: votes[k])) if votes else mounts.get(str(dataset.get("mnt")))
    return DataView(
        readings=readings,
        mount=where,
        disk_rate=_sum(p.io.get("read_bytes") for p in readers),
        read_rate=_sum(p.io.get("rchar") for p in readers),
        calls=_sum(p.io.get("syscr") for p in readers),
        pos_rate=sum(max(0, r.moved or 0) for r in readings) / span if span > 0 else 0.0,
        opened=sum(r.fresh for r in readings),
        cached=sum(c * s for c, s in weighed) / sum(s for _, s in weighed) if weighed else None,
        dataset=dataset,
        memory=_cache_room(snap),
        disk=_disk(snap, where.device if where else None),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    seen = [v for v in values if v is not None]
    return sum(seen) if seen else None


def _cache_room(snap: Json) -> int | None:
    """Memory that file pages may fill: what is available now, within the cgroup's limit."""
    memory = (snap.get("host") or {}).get("mem") or {}
    room: int | None = memory.get("available")
    for cgroup in (snap.get("cgroups") or {}).values():
        group = cgroup.get("memory") or {}
        limit, current = group.get("max"), group.get("current")
        if limit and current is not None:
            own = int(limit) - int(current) + int((group.get("stat") or {}).get("file") or 0)
            room = own if room is None else min(room, own)
    return room


def _disk(snap: Json, device: str | None) -> dict[str, float]:
    """Rates of one block device between the first and the last sample."""
    samples = snap.get("samples") or []
    if device is None or len(samples) < 2:
        return {}
    looks = [
        (s.get("t") or 0.0, ((s.get("host") or {}).get("disks") or {}).get(device)) for s in (samples[0], samples[-1])
    ]
    (t0, a), (t1, b) = looks
    if not a or not b or t1 <= t0:
        return {}
    rates = {key: (float(b[key]) - float(a[key])) / (t1 - t0) for key in a if key != "in_flight" and key in b}
    rates["in_flight"] = float(b.get("in_flight") or 0)
    reads = rates.get("reads") or 0.0
    if reads > 0:
        rates["await_ms"] = (rates.get("read_ms") or 0.0) / reads
    rates["busy"] = (rates.get("busy_ms") or 0.0) / 1000.0
    return rates
