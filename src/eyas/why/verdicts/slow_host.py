"""Slow, but not for the data: CPU quota, memory, GPU clocks or company, host code, one slow rank, transport."""

from __future__ import annotations

from eyas.why.verdicts.base import Case, Look, Rule, feeds_itself, frames, starved


def cpu_quota(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.main is None:
        return None
    key, group = f.cgroup_of(f.main)
    periods, throttled = f.cgroup_rate(key, "nr_periods"), f.cgroup_rate(key, "nr_throttled")
    share = throttled / periods if periods and throttled else 0.0
    lost = f.cgroup_rate(key, "throttled_s") or 0.0
    quota = (group.get("cpu") or {}).get("quota_cpus")
    ready = [t.runq for p in f.trainers + f.live_workers for t in p.threads if t.runq is not None and t.runq > 0.2]
    allowed = f.main.raw.get("cpus_allowed")
    pinned = allowed == 1 and (f.meta.get("cpus") or 1) > 1 and len(ready) >= 2
    if share < 0.1 and not pinned:
        return None
    case = Case("slow.cpu.quota", values={"quota": quota, "allowed": allowed})
    case.yes(
        share >= 0.1,
        4 if share > 0.5 else 3 if share > 0.25 else 1.5,
        f"the CPU quota{f' of {quota:g} CPUs' if quota else ''} stopped the job in {100 * share:.0f} % of the periods",
        "cpu.stat",
    )
    case.yes(lost > 0.5, 2, f"{lost:.1f} s of CPU time a second are withheld", "cpu.stat")
    case.yes(
        pinned,
        4,
        f"all its threads are pinned to one CPU, and {len(ready)} of them wait for it",
        "Cpus_allowed, schedstat",
    )
    case.yes(
        ready,
        1.5,
        f"threads are ready but wait for a CPU up to {100 * max(ready, default=0):.0f} % of the time",
        "schedstat",
    )
    case.no(f.gpu.working, 2, "the GPU computes: " + f.gpu.words, "nvml")
    return case


def memory(look: Look) -> Case | None:
    f = look.f
    swap = (f.host_rate("vmstat", "pswpin") or 0) + (f.host_rate("vmstat", "pswpout") or 0)
    key, group = f.cgroup_of(f.main) if f.main else (None, {})
    refault = max(f.host_rate("vmstat", "workingset_refault_file") or 0, f.cgroup_rate(key, "refault_file") or 0)
    refault += f.host_rate("vmstat", "workingset_refault_anon") or 0
    pressure = f.pressure("memory") or 0
    waits = any(t.ever("swap", "reclaim") for p in f.trainers + f.live_workers for t in p.threads)
    swapped = sum(p.swap for p in f.trainers + f.live_workers)
    evicted = [info for info in (f.snap.get("files") or {}).values() if (info.get("recently_evicted") or 0) > 1 << 20]
    if not f.alive or not (swap > 100 or refault > 500 or pressure > 5 or waits or evicted):
        return None
    case = Case("slow.memory", values={"swapped": swapped})
    case.yes(swap > 100, 4 if swap > 1000 else 3, f"{swap:.0f} pages a second go through swap", "/proc/vmstat")
    case.yes(
        refault > 500,
        2.5,
        f"{refault:.0f} pages a second are read again after having been thrown out",
        "workingset_refault",
    )
    case.yes(evicted, 1.5, "data just read is already thrown out of the page cache", "cachestat")
    case.yes(
        pressure > 5,
        2 if pressure > 15 else 1.5,
        f"tasks wait for memory {pressure:.0f} % of the time",
        "pressure/memory",
    )
    case.yes(waits, 2, "threads were found waiting for swap or for memory to be freed", "wchan")
    case.yes(swapped > 100e6, 1, f"{swapped / 1e9:.1f} GB of the job are in swap", "VmSwap")
    mem = group.get("memory") or {}
    near = mem.get("max") and mem.get("current") and mem["current"] > 0.95 * mem["max"]
    case.yes(near, 1, "the job's cgroup is at its memory limit", "memory.current")
    faults = sum(p.majflt or 0 for p in f.trainers + f.live_workers)
    own = near or waits or evicted or swapped or faults > 5 or (f.data.read_rate or 0) > 4096
    case.no(not own, 3, "but the job itself neither faults, swaps nor reads: others do", "stat, io")
    case.yes(faults > 50, 1, f"{faults:.0f} major page faults a second", "stat")
    free = (f.snap.get("host") or {}).get("mem") or {}
    plenty = free.get("available") and free.get("total") and free["available"] > 0.3 * free["total"] and not near
    case.no(plenty and swap < 100, 2.5, "there is free memory", "meminfo")
    case.no(f.gpu.working, 2, "the GPU computes: " + f.gpu.words, "nvml")
    return case


def gpu_throttled(look: Look) -> Case | None:
    f = look.f
    hot = [g for g in f.gpu.mine if g.slowed]
    slow = [
        g
        for g in f.gpu.mine
        if g.clock is not None and g.clock < 0.7 and (g.util or 0) > 50 and "sw_power_cap" not in g.reasons
    ]
    if not f.alive or not (hot or slow):
        return None
    case = Case("slow.gpu.throttled", who=f"GPU {(hot or slow)[0].index}")
    one = (hot or slow)[0]
    case.yes(hot, 4, f"GPU {one.index} lowers its clocks: {', '.join(one.slowed)}", "nvml")
    clocks = [g for g in hot + slow if g.clock is not None and g.clock < 0.75]
    case.yes(
        clocks, 2, f"its SM clock is at {100 * (clocks[0].clock or 0) if clocks else 0:.0f} % of the maximum", "nvml"
    )
    case.yes((one.temp or 0) >= 83, 1, f"it is {one.temp or 0:.0f} °C hot", "nvml")
    case.yes((one.util or 0) > 60, 1.5, f"it is {one.util or 0:.0f} % busy, so its clock sets the pace", "nvml")
    case.no((one.util or 0) < 20, 3.5, "the GPU has next to nothing to do", "nvml")
    return case


def gpu_shared(look: Look) -> Case | None:
    f = look.f
    others = [s for s in f.gpu.strangers if (s.sm or 0) >= 10 or (s.sm is None and s.mem > 1e9)]
    if not f.alive or not others:
        return None
    other = max(others, key=lambda s: (s.sm or 0, s.mem))
    case = Case("slow.gpu.shared", who=f"PID {other.pid} ({other.comm})", pids=[other.pid])
    case.yes(
        (other.sm or 0) >= 10,
        4,
        f"PID {other.pid} ({other.comm}) uses {other.sm or 0:.0f} % of GPU {other.gpu}",
        "nvml",
    )
    busy = any((g.util or 0) > 70 for g in f.gpu.mine if g.index == other.gpu)
    case.yes(busy, 1.5, "that GPU is busy", "nvml")
    case.yes(other.mem > 1e9, 1, f"it holds {other.mem / 1e9:.1f} GB of it", "nvml")
    case.no(not busy, 3, "the GPU is not busy: nobody takes anything away", "nvml")
    return case


def host_python(look: Look) -> Case | None:
    f = look.f
    if not f.alive or not f.gpu.mine or f.gpu.working or f.gpu.spinning:
        return None
    busy = [p for p in f.trainers if p.critical.ready > 0.8 and p.critical.share("run") >= 0.6]
    if not busy or len(busy) < len(f.trainers):
        return None
    case = Case("slow.host-python")
    low = all((g.util or 0) < 50 for g in f.gpu.mine)
    case.yes(True, 2, f"the main thread computes on the CPU ({100 * busy[0].critical.ready:.0f} % of the time)", "stat")
    case.yes(low, 1.5, f"the GPU has little to do: {f.gpu.words}", "nvml")
    idle = f.live_workers and all(
        t.critical.share("poll", "epoll", "pipe-read", "futex") >= 0.6 for t in f.live_workers
    )
    case.yes(idle, 2, "the loader workers wait for it", "wchan")
    case.yes(f.stepped and f.fresh, 1.5, "steps go on", "log")
    stack = frames(f)
    case.yes(stack, 1, "its innermost frame is Python code", "py-spy", stack[0] if stack else None)
    own = [r for p in f.trainers for r in p.readings if r.moved or r.fresh]
    case.no(own or feeds_itself(f), 2, "it reads data itself", "fd, io")
    case.no(not f.stepped, 2.5, "no step was made yet: this may be start-up or compilation", "log")
    case.no(not f.fresh and f.stepped and (f.overdue or 0) > 3, 1.5, "steps do not go on", "log")
    return case


def straggler(look: Look) -> Case | None:
    f, split = look.f, look.split
    if (
        not f.alive
        or split is None
        or not split.odd
        or split.odd_doing in ("dead", "stopped", "input", "lock", "gpu-driver")
    ):
        return None
    odd = split.odd
    case = Case("slow.straggler", who=split.odd_words, pids=[p.pid for p in odd])
    case.yes(
        True,
        2.5,
        f"{len(f.ranks) - len(odd)} other rank(s) are {split.rest_doing}, and {split.odd_words} sets their pace",
        "wchan, nvml",
        split.words,
    )
    busy = any((p.cpu or 0) > 0.2 or (p.io.get("rchar") or 0) > 65536 or p.critical.wait.state == "D" for p in odd)
    case.yes(busy, 2, "that rank is at work", "stat, io")
    slowed = [g for p in odd for g in f.gpu.of(p.pid) if g.slowed or (g.clock is not None and g.clock < 0.7)]
    case.yes(slowed, 2.5, f"its GPU {slowed[0].index if slowed else ''} runs at lower clocks", "nvml")
    case.yes(f.moved("log") and not f.heartbeat, 2, "steps go on", "log")
    case.yes(f.fresh and not f.moved("log") and f.stepped, 1, "the last step is recent", "log")
    case.no(
        split.by_stack and not busy, 3, "the ranks are in different collectives: that does not pass by itself", "py-spy"
    )
    late = (f.overdue or 0) > 20 or (f.idle or 0) > 600
    case.no(late and not f.forward, 4, "no step for too long", "log")
    case.no(not busy and not f.forward, 3, "that rank is not at work either", "samples")
    return case


def transport(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.main is None or not f.distributed:
        return None
    net = _fastest(f.samples, f.span, "net")
    ib = _fastest(f.samples, f.span, "ib")
    disabled = f.main.env("NCCL_IB_DISABLE") == "1" or "Socket" in (f.main.env("NCCL_NET") or "")
    told = f.log is not None and any(n in f.log.notes for n in ("nccl-socket", "net-socket", "no-ib"))
    has_ib = ib is not None
    tcp = net is not None and net > 50e6 and (not has_ib or (ib or 0) < 0.05 * net)
    if not (told or disabled or (tcp and has_ib)):
        return None
    case = Case("slow.transport")
    case.yes(told, 3.5, "NCCL says that it uses sockets", "log")
    case.yes(disabled, 2.5, "InfiniBand is switched off by the environment", "environ")
    case.yes(
        tcp,
        2.5,
        f"{(net or 0) / 1e6:.0f} MB/s go over the Ethernet" + (", next to nothing over InfiniBand" if has_ib else ""),
        "net/dev",
    )
    case.yes(f.gpu.spinning, 1, "the GPUs wait: " + f.gpu.words, "nvml")
    case.yes(f.moved("log"), 1, "steps go on", "log")
    case.no(starved(f) and f.live_workers, 2, "the trainers wait for data", "wchan")
    case.no(f.still and not tcp, 3, "nothing moves at all", "samples")
    return case


def _fastest(samples: list[object] | list[dict[str, object]] | object, span: float, key: str) -> float | None:
    """Bytes a second through the busiest interface."""
    looks = (
        [((s.get("host") or {}).get(key) or {}) for s in samples if isinstance(s, dict)]
        if isinstance(samples, list)
        else []
    )
    if len(looks) < 2 or span <= 0 or not looks[-1]:
        return None
    rates = []
    for name, last in looks[-1].items():
        first = looks[0].get(name)
        if first and name != "lo":
            rates.append(
                sum(float(last.get(k) or 0) - float(first.get(k) or 0) for k in ("rx_bytes", "tx_bytes")) / span
            )
    return max(rates, default=None)


HOST_RULES: list[Rule] = [cpu_quota, memory, gpu_throttled, gpu_shared, host_python, straggler, transport]
