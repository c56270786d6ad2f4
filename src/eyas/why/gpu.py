"""GPU facts. Utilisation alone says little: a spinning collective shows 100 %. Power and clocks decide."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]
WORKING_POWER = 0.45  # share of the power limit above which a GPU certainly computes
SPINNING_POWER = 0.40  # with full utilisation and less than this, kernels wait instead of compute


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str = "GPU"
    util: float | None = None  # highest seen, 0..100
    util_low: float | None = None
    power: float | None = None  # watts: from the energy counter where there is one, else the highest reading
    limit: float | None = None
    clock: float | None = None  # SM clock against its maximum, 0..1
    temp: float | None = None
    mem: int | None = None
    mem_total: int | None = None
    pcie_kbs: float | None = None
    pcie_gen: tuple[int, int] | None = None  # now, at most
    reasons: frozenset[str] = field(default_factory=frozenset)
    lost: bool = False
    recovery: str | None = None
    ecc: int = 0

    @property
    def load(self) -> float | None:
        return self.power / self.limit if self.power is not None and self.limit else None

    @property
    def idle(self) -> bool:
        return self.util is not None and self.util < 5 and (self.load is None or self.load < WORKING_POWER)

    @property
    def working(self) -> bool | None:
        """True: computes for certain. False: certainly not. None: cannot tell (busy, but its power was not seen)."""
        if self.util is None and self.load is None:
            return None
        if self.load is not None and self.load >= WORKING_POWER:
            return True
        if self.util is not None and self.util < 5:
            return False
        if self.spinning:
            return False
        return True if self.load is not None and (self.util or 0) >= 20 else None

    @property
    def spinning(self) -> bool:
        busy = self.util is not None and self.util >= 90 and (self.util_low or 0) >= 80
        return busy and self.load is not None and self.load < SPINNING_POWER and not self.slowed

    @property
    def slowed(self) -> list[str]:
        """Reasons for low clocks that are a fault, not a policy."""
        return sorted(self.reasons & {"hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal"})

    @property
    def words(self) -> str:
        parts = []
        if self.util is not None:
            parts.append(f"{self.util:.0f} % busy")
        if self.power is not None:
            parts.append(f"{self.power:.0f} W" + (f" of {self.limit:.0f} W" if self.limit else ""))
        if self.mem is not None:
            parts.append(f"{self.mem / 1e9:.1f} GB held")
        return f"GPU {self.index}: " + (", ".join(parts) or "seen, no readings")


@dataclass(frozen=True)
class Stranger:
    """A process that is not ours on one of our GPUs."""

    gpu: int
    pid: int
    comm: str
    mem: int
    sm: float | None


@dataclass(frozen=True)
class GpuView:
    status: str = "absent"
    error: str | None = None
    mine: tuple[Gpu, ...] = ()
    exact: bool = False  # `mine` are the job's for certain, not just all that there are
    by_pid: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    mem_by_pid: Mapping[int, int] = field(default_factory=dict)
    strangers: tuple[Stranger, ...] = ()
    orphans: tuple[int, ...] = ()
    holders: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def of(self, pid: int) -> tuple[Gpu, ...]:
        return tuple(g for g in self.mine if g.index in self.by_pid.get(pid, ()))

    @property
    def working(self) -> bool | None:
        states = [g.working for g in self.mine]
        if any(state is True for state in states):
            return True
        return False if states and all(state is False for state in states) else None

    @property
    def idle(self) -> bool:
        return bool(self.mine) and all(g.idle for g in self.mine)

    @property
    def spinning(self) -> bool:
        return bool(self.mine) and any(g.spinning for g in self.mine) and not any(g.working for g in self.mine)

    @property
    def used(self) -> bool:
        return bool(self.mine) and self.exact

    @property
    def job_mem(self) -> int | None:
        return sum(self.mem_by_pid.values()) if self.mem_by_pid else None

    @property
    def words(self) -> str:
        if self.status != "ok":
            return f"GPU tool: {self.status}" + (f" ({self.error})" if self.error else "")
        shown = "; ".join(g.words for g in self.mine[:4])
        return shown + (f"; {len(self.mine) - 4} more" if len(self.mine) > 4 else "")


def read_gpus(snap: Json, members: Collection[int]) -> GpuView:
    raw = snap.get("gpu") or {}
    holders = {int(pid): tuple(names) for pid, names in (raw.get("holders") or {}).items()}
    mine_by_pid: dict[int, set[int]] = {}
    mem: dict[int, int] = {}
    strangers = []
    for entry in raw.get("processes") or []:
        pid, index = int(entry.get("pid") or 0), int(entry.get("gpu") or 0)
        if entry.get("member") or pid in members:
            mine_by_pid.setdefault(pid, set()).add(index)
            mem[pid] = mem.get(pid, 0) + int(entry.get("mem") or 0)
        elif entry.get("alive") is not False:
            strangers.append(
                Stranger(index, pid, str(entry.get("comm") or "?"), int(entry.get("mem") or 0), entry.get("sm_util"))
            )
    for pid, names in holders.items():
        if pid in members and pid not in mine_by_pid:
            indices = {int(n[11:]) for n in names if n.startswith("/dev/nvidia") and n[11:].isdigit()}
            if indices:
                mine_by_pid[pid] = indices
    wanted = {index for indices in mine_by_pid.values() for index in indices}
    gpus = [_gpu(g) for g in raw.get("gpus") or []]
    mine = [g for g in gpus if g.index in wanted] if wanted else gpus
    ours = {g.index for g in mine}
    return GpuView(
        status=str(raw.get("status") or "absent"),
        error=raw.get("error"),
        mine=tuple(mine),
        exact=bool(wanted),
        by_pid={pid: tuple(sorted(indices)) for pid, indices in mine_by_pid.items()},
        mem_by_pid=mem,
        strangers=tuple(s for s in strangers if s.gpu in ours) if wanted else (),
        orphans=tuple(int(p) for p in raw.get("orphans") or []),
        holders=holders,
    )


def _gpu(raw: Json) -> Gpu:
    looks = raw.get("samples") or []

    def values(key: str) -> list[float]:
        return [float(s[key]) for s in looks if s.get(key) is not None]

    def most(key: str) -> float | None:
        return max(values(key), default=None)

    utils, clock, top = values("util"), most("sm_mhz"), most("sm_max_mhz")
    pcie = [
        float(s.get("pcie_rx_kbs") or 0) + float(s.get("pcie_tx_kbs") or 0)
        for s in looks
        if s.get("pcie_rx_kbs") is not None
    ]
    gens = (most("pcie_gen"), most("pcie_gen_max"))
    mem, total = most("mem_used"), most("mem_total")
    return Gpu(
        index=int(raw.get("index") or 0),
        name=str(raw.get("name") or "GPU"),
        util=max(utils, default=None),
        util_low=min(utils, default=None),
        power=_energy_power(looks) or most("power_w"),
        limit=most("power_limit_w"),
        clock=clock / top if clock is not None and top else None,
        temp=most("temp"),
        mem=None if mem is None else int(mem),
        mem_total=None if total is None else int(total),
        pcie_kbs=max(pcie, default=None),
        pcie_gen=(int(gens[0]), int(gens[1])) if gens[0] is not None and gens[1] is not None else None,
        reasons=frozenset(r for s in looks for r in s.get("reasons") or ()),
        lost=bool(raw.get("lost")),
        recovery=raw.get("recovery") if str(raw.get("recovery") or "").lower() not in ("", "none") else None,
        ecc=int(raw.get("ecc_uncorrected") or 0),
    )


def _energy_power(looks: list[Json]) -> float | None:
    """Mean power between two readings of the energy counter: it sees what happens between the looks."""
    marks = [
        (float(s["t"]), float(s["energy_mj"]))
        for s in looks
        if s.get("energy_mj") is not None and s.get("t") is not None
    ]
    if len(marks) < 2 or marks[-1][0] - marks[0][0] < 0.5 or marks[-1][1] < marks[0][1]:
        return None
    return (marks[-1][1] - marks[0][1]) / 1000.0 / (marks[-1][0] - marks[0][0])
