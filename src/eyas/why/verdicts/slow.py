"""Slow: it moves, but something other than the GPU sets the pace."""

from __future__ import annotations

import re

from eyas.why.chain import size
from eyas.why.facts import Facts
from eyas.why.verdicts.base import Case, Look, Rule, feeds_itself, frames, readers, reading_share, starved, tries
from eyas.why.verdicts.slow_host import HOST_RULES

_SMALL_FILE = 256 * 1024


def _hungry(look: Look, verdict: str) -> Case:
    """The common ground of all data waits: the trainer waits, the GPU idles, and the loader is at work."""
    f = look.f
    case = Case(verdict)
    level = starved(f)
    case.yes(
        level,
        3 * level,
        "the trainer waits and uses next to no CPU",
        "wchan, stat",
        f.main.critical.wait.raw if f.main else None,
    )
    case.yes(level and f.gpu.idle, 1, f.gpu.words, "nvml")
    case.no(f.gpu.working, 4, "the GPU computes: " + f.gpu.words, "nvml")
    busy = not level and any((p.critical.cpu or 0) > 0.5 and p.critical.wait.family == "run" for p in f.trainers)
    case.no(busy and f.live_workers, 4, "the trainer is busy itself", "wchan, stat")
    idle = f.live_workers and all(t.share("poll", "epoll", "pipe-read") >= 0.99 for _, t in readers(f))
    case.no(idle, 4, "the workers wait for the trainer", "wchan")
    case.yes(
        f.log and f.log.data_wait is not None and f.log.data_wait > 0.3,
        1.5,
        f"the log says that {100 * (f.log.data_wait or 0) if f.log else 0:.0f} % of the time goes to waiting for data",
        "log",
    )
    spikes = f.log.spikes if f.log else None
    case.yes(
        spikes,
        1.5,
        f"step times jump every {spikes.period if spikes else 0} steps, as with a starving loader of as many workers",
        "log",
    )
    moving = f.data.moves or (f.data.read_rate or 0) > 4096 or any((t.cpu or 0) > 0.05 for _, t in readers(f))
    case.no(len(f.samples) > 1 and not moving, 3, "nothing was read between the looks", "samples")
    return case


def _values(case: Case, f: Facts) -> Case:
    data = f.data
    case.values.update(
        files=data.files[:4],
        rate=data.rate,
        mount=data.mount.words if data.mount else None,
        workers=len(f.live_workers),
    )
    return case


def disk_cold(look: Look) -> Case | None:
    f, data = look.f, look.f.data
    waits = reading_share(f, "disk", "io", "uring")
    cold = data.cold
    on_disk = data.mount is not None and not data.mount.remote and not data.mount.memory
    if not f.alive or not (waits or (cold or 0) > 0.3 or (data.disk_rate or 0) > 1e6):
        return None
    case = _values(_hungry(look, "slow.data.disk-cold"), f)
    case.yes(waits, min(2.5, 3 * waits), "the readers were found waiting for the disk", "wchan")
    case.yes(
        cold is not None and cold >= 0.5,
        2,
        f"{100 * (cold or 0):.0f} % of the bytes read come from the device, not from memory",
        "/proc/PID/io",
    )
    case.yes(
        data.disk.get("busy", 0) > 0.6,
        1,
        f"the disk is busy {100 * min(1, data.disk.get('busy', 0)):.0f} % of the time",
        "diskstats",
    )
    case.yes(
        (f.pressure("io") or 0) > 10,
        0.75,
        f"tasks wait for I/O {f.pressure('io') or 0:.0f} % of the time",
        "pressure/io",
    )
    case.yes(
        data.cached is not None and data.cached < 0.5,
        0.75,
        f"{100 * (data.cached or 0):.0f} % of the open data is in the page cache",
        "cachestat",
    )
    case.yes(data.pos_rate > 0 or data.opened, 0.75, "offsets in the data files move", "fdinfo")
    case.yes(on_disk, 0.5, f"the data lies on {data.mount.words if data.mount else ''}", "mountinfo")
    case.no(
        data.mount is not None and data.mount.remote,
        5,
        f"the data lies on {data.mount.words if data.mount else ''}",
        "mountinfo",
    )
    case.no(data.mount is not None and data.mount.memory, 5, "the data lies in memory", "mountinfo")
    mean = data.mean_file
    tiny = mean is not None and mean < _SMALL_FILE
    case.no(
        tiny, 3, f"the files are small ({size(mean or 0)} on average): requests are the limit, not bytes", "datasets"
    )
    case.no(_thrown_out(f), 2.5, "those bytes were in memory before: the cgroup's limit threw them out", "cgroup")
    case.no(cold is not None and cold < 0.2, 3, "nearly all bytes come from memory", "/proc/PID/io")
    cpu = _reader_cpu(f)
    case.no(cpu > 0.8 and not waits, 2, "the readers are busy on the CPU", "stat")
    return case


def network(look: Look) -> Case | None:
    f, data = look.f, look.f.data
    waits = reading_share(f, "nfs", "fuse", "lustre")
    remote = data.mount is not None and data.mount.remote
    if not f.alive or not (remote or waits):
        return None
    case = _values(_hungry(look, "slow.data.network"), f)
    case.yes(waits, min(3.0, 1.5 + 2 * waits), "the readers were found waiting for a file server", "wchan")
    case.yes(remote, 3, f"the data lies on {data.mount.words if data.mount else ''}", "mountinfo")
    reading = reading_share(f, "read", "disk", "io", "metadata")
    case.yes(remote and not waits and reading, 1.5, "the readers are in file calls", "syscall")
    case.yes(
        data.moves or (data.read_rate or 0) > 4096,
        1,
        f"bytes come, at {size(max(data.rate, data.read_rate or 0))}/s",
        "/proc/PID/io",
    )
    case.no(_reader_cpu(f) > 0.8 and not waits, 3, "the readers are busy on the CPU", "stat")
    case.no(
        data.cached is not None and data.cached > 0.95, 1.5, "the open data is in the page cache already", "cachestat"
    )
    return case


def decode(look: Look) -> Case | None:
    f, data = look.f, look.f.data
    cpu = _reader_cpu(f)
    if not f.alive or not f.live_workers or cpu < 0.3:
        return None
    case = _values(_hungry(look, "slow.data.decode"), f)
    case.yes(
        cpu >= 0.5, 3 if cpu >= 0.7 else 2, f"the workers compute: {100 * cpu:.0f} % of a CPU each on average", "stat"
    )
    case.yes(
        (data.cold is None or data.cold < 0.3) and not reading_share(f, "disk", "io", "nfs", "fuse"),
        1,
        "the disk is not what they wait for",
        "wchan, io",
    )
    case.yes(len(f.live_workers) >= 3, 0.75, f"{len(f.live_workers)} workers share the work", "children")
    case.no(
        reading_share(f, "disk", "io", "nfs", "fuse", "lustre", "swap") > 0.3,
        2.5,
        "the workers wait for storage",
        "wchan",
    )
    case.no(len(f.live_workers) <= 1, 1.5, "there is only one worker", "children")
    case.no(f.newborn, 1.5, "the workers were started after the last line: they may do something else", "children, log")
    case.no(_prepares(f), 4, "no step was made and no GPU is held: the workers may prepare the data", "log, nvml")
    case.no(_throttled(f) > 0.25, 2, "the CPU quota holds them back", "cpu.stat")
    case.values["cpu"] = cpu
    return case


def few_workers(look: Look) -> Case | None:
    f = look.f
    if not f.alive or not f.trainers:
        return None
    main = f.trainers[0]
    cpus = int(main.raw.get("cpus_allowed") or f.meta.get("cpus") or 0)
    count = len(f.live_workers)
    own = [r for p in f.trainers for r in p.readings if r.moved or r.fresh]
    warned = f.log is not None and "few-workers" in f.log.notes
    gpu_idles = (
        bool(f.gpu.mine) and (f.gpu.idle or all((g.util or 0) < 40 for g in f.gpu.mine)) and f.gpu.working is not True
    )
    fed = bool(own) or feeds_itself(f) or main.critical.ever("disk", "nfs", "read") is not None
    itself = count == 0 and fed and gpu_idles
    frame = next((x for x in frames(f) if re.search(r"fetch|collate|__getitem__", x)), None)
    small = 0 < count <= 2 and _reader_cpu(f) > 0.5
    if not (itself or warned or small or (frame and count == 0)) or count >= max(3, cpus):
        return None
    case = _values(_hungry(look, "slow.data.few-workers"), f)
    case.yes(
        itself,
        4,
        "there are no loader workers: the training process fetches the data itself while the GPU idles",
        "children, fd",
    )
    case.yes(frame and count == 0, 3, "the main thread is in the data set's code", "py-spy", frame)
    case.no(small and _prepares(f), 4, "no step was made and no GPU is held: the workers may prepare the data", "log")
    case.yes(warned, 3, "the log warns of too few workers", "log")
    case.yes(small and starved(f), 2.5 if count == 1 else 2, f"{count} worker(s) are always busy", "children, stat")
    case.yes(count < cpus / 4, 1, f"{count} worker(s) with {cpus} CPUs to use", "children, cpus_allowed")
    case.yes(count == 1 and cpus > 1, 1, "one worker can use one CPU only", "children")
    case.no(
        f.data.cold is not None and f.data.cold > 0.5 and reading_share(f, "disk") > 0.5 and count > 0,
        2,
        "the workers wait for the disk",
        "wchan",
    )
    case.values["cpus"] = cpus
    return case


def small_files(look: Look) -> Case | None:
    f, data = look.f, look.f.data
    mean = data.mean_file
    opens = data.opened / f.span if f.span else 0.0
    meta = reading_share(f, "metadata")
    per_call = (data.read_rate or 0) / data.calls if data.calls else None
    tiny = mean is not None and mean < _SMALL_FILE
    many = (data.dataset.get("files") or 0) > 5000
    churn = data.opened >= 3 and data.opened >= 0.6 * len({r.path for r in data.readings})
    if not f.alive or not (meta or tiny) or not (meta or churn or (data.calls or 0) > 200):
        return None
    case = _values(_hungry(look, "slow.data.small-files"), f)
    case.yes(tiny, 3, f"the files are small: {size(mean)} on average", "datasets")
    case.yes(meta, 3, "the readers were found opening or listing files", "syscall")
    case.yes(many, 1, f"there are {data.dataset.get('files')} of them", "datasets")
    case.yes(churn or opens > 10, 1.5, "every look found other files open", "fd")
    case.yes(
        per_call is not None and per_call < 64 * 1024 and (data.calls or 0) > 200,
        1,
        f"{data.calls or 0:.0f} read calls a second of {size(per_call)} each",
        "/proc/PID/io",
    )
    case.no(mean is not None and mean > 4e6, 5, f"the files are large: {size(mean)} on average", "datasets")
    case.no(_reader_cpu(f) > 0.85 and not meta, 1.5, "the readers are busy on the CPU", "stat")
    return case


def remote_service(look: Look) -> Case | None:
    f = look.f
    waiting = [(p, t) for p, t in readers(f) if t.share("socket", "connect", "poll", "epoll") >= 0.6]
    asked = [p for p in f.helpers if p.critical.share("socket", "connect") >= 0.6] if _for_children(f) else []
    waiting += [(p, p.critical) for p in asked]
    socks = _service_sockets(f, {p.pid for p, _ in waiting})
    in_call = [t for _, t in waiting if t.wait.family in ("socket", "connect") or t.wait.kind == "socket"]
    loops = [t for _, t in waiting if t.wait.family == "epoll"] if f.stepped and not f.live_workers else []
    in_call = in_call or loops  # an event loop waits for all its connections at once
    if not f.alive or not socks or not in_call:
        return None
    case = Case("slow.data.remote-service")
    one = socks[0]
    peer = f"{one.get('peer')}:{one.get('pport')}"
    case.yes(
        True,
        3,
        f"{len(in_call)} reader thread(s) wait for an answer from {peer}",
        "syscall, net/tcp",
        in_call[0].wait.raw,
    )
    case.yes(
        starved(f), 2, "the trainer waits for them" if f.live_workers else "the trainer itself waits for it", "wchan"
    )
    case.yes(asked, 2, f"the trainer waits for {asked[0].label if asked else ''}, which does", "wchan, children")
    case.yes(f.live_workers and len(in_call) == len(f.live_workers), 1.5, "every worker does", "wchan")
    quiet = all(not s.get("rx_queue") for s in socks)
    case.yes(
        quiet and one.get("state") == "ESTABLISHED",
        0.75,
        "the connections are up and empty: the other side has not answered",
        "net/tcp",
    )
    case.yes(one.get("state") == "SYN_SENT", 1, "the other side does not even accept the connection", "net/tcp")
    case.yes(not f.moved("data"), 0.5, "no file data is read", "/proc/PID/io")
    case.no(f.gpu.working, 4, "the GPU computes: " + f.gpu.words, "nvml")
    case.no(f.distributed and not f.live_workers, 3, "it is one of several ranks: the socket may be theirs", "job")
    case.no(f.data.mount is not None and f.data.mount.remote and f.moved("data"), 1, "file data moves", "io")
    case.values["peer"] = peer
    return case


def _for_children(f: Facts) -> bool:
    """Every trainer's main thread waits for a child to end."""
    return bool(f.trainers) and all(p.main.always("child") for p in f.trainers)


def _prepares(f: Facts) -> bool:
    """Nothing says that training has begun: a pool of processes may be at work on the data before the first step."""
    begun = f.log is not None and f.log.phase is not None and f.log.phase.id == "training"
    return not (f.stepped or begun or f.gpu.mine)


def retrying(look: Look) -> Case | None:
    """The log says that requests to a service fail and are made again; between them the trainer naps."""
    f = look.f
    lines = tries(f)
    if not f.alive or len(lines) < 2 or not f.stepped or _service_sockets(f, {p.pid for p in f.trainers}):
        return None
    where = re.search(r"https?://([\w.:-]+)|\b([\w.-]+:\d{2,5})\b", " ".join(lines[-3:]))
    case = Case("slow.data.remote-service")
    case.yes(True, 3.5, f"the log tells of {len(lines)} failed tries since the last step", "log", lines[-1])
    napping = any(p.critical.ever("sleep", "socket", "connect") for p in f.trainers)
    case.yes(napping, 2, "the trainer waits between the tries", "wchan")
    case.no(f.forward, 3, "work moves: " + "; ".join(s.text for s in f.forward[:2]), "samples")
    case.no(f.gpu.working, 4, "the GPU computes: " + f.gpu.words, "nvml")
    case.values["peer"] = (where.group(1) or where.group(2)) if where else "an address that the log does not name"
    return case


def _service_sockets(f: Facts, pids: set[int]) -> list[dict[str, object]]:
    """TCP connections of these processes to something that is neither a rank nor the rendezvous."""
    ports = {f.main.env("MASTER_PORT")} if f.main and f.main.env("MASTER_PORT") else set()
    ranks = {p.pid for p in f.ranks}
    return [
        dict(s)
        for s in f.snap.get("sockets") or []
        if s.get("pid") in pids
        and str(s.get("proto", "")).startswith("tcp")
        and s.get("state") in ("ESTABLISHED", "SYN_SENT", "CLOSE_WAIT")
        and str(s.get("pport")) not in ports
        and str(s.get("lport")) not in ports
        and s.get("peer_pid") not in ranks
        and s.get("peer_pid") != s.get("pid")
    ]


def _reader_cpu(f: Facts) -> float:
    """Share of a CPU that a reader uses or waits for."""
    cpus = [max(p.cpu, p.critical.ready) for p in f.live_workers if p.cpu is not None]
    cpus = cpus or [t.ready for _, t in readers(f) if t.cpu is not None]
    return sum(cpus) / len(cpus) if cpus else 0.0


def _thrown_out(f: Facts) -> bool:
    """The job's cgroup is at its memory limit and reads again what it had."""
    key, group = f.cgroup_of(f.main) if f.main else (None, {})
    mem = group.get("memory") or {}
    full = mem.get("max") and mem.get("current") and mem["current"] > 0.95 * mem["max"]
    return bool(full) and (f.cgroup_rate(key, "refault_file") or 0) > 500


def _throttled(f: Facts) -> float:
    key, _ = f.cgroup_of(f.main) if f.main else (None, {})
    periods, throttled = f.cgroup_rate(key, "nr_periods"), f.cgroup_rate(key, "nr_throttled")
    return throttled / periods if periods and throttled else 0.0


RULES: list[Rule] = [disk_cold, network, decode, few_workers, small_files, remote_service, retrying, *HOST_RULES]
