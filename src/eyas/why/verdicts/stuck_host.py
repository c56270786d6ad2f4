"""Stuck on the host: storage that does not answer, a lost GPU, full disks, left-overs, endless loops and downloads."""

from __future__ import annotations

import re

from eyas.why.verdicts.base import (
    Case,
    Look,
    Rule,
    forsaken,
    job_threads,
    log_kinds,
    log_line,
    may_compute,
    phase,
    span_words,
    stuck,
    trainers_wait,
)
from eyas.why.verdicts.phases import memory_runs_away

_REMOTE = ("nfs", "fuse", "lustre")
HABIT = 8  # progress lines


def filesystem(look: Look) -> Case | None:
    f = look.f
    _key, group = f.cgroup_of(f.main) if f.main else (None, {})
    hung = [
        (p, t)
        for p, t in job_threads(f)
        if t.always("nfs", "fuse", "lustre", "disk", "io", "metadata", "writeback", "rwsem")
        and (t.wait.state == "D" or t.wait.family in _REMOTE)
        and (t.wakeups or 0) < 1
        and (t.cpu or 0) < 0.01
    ]
    mounts = [m for m in f.mounts.values() if m.timed_out]
    probes = [
        p
        for p in f.snap.get("probes_timed_out") or []
        if p.get("path") or re.search(r"stat|mount|ls|open|maps|cmdline", str(p.get("probe")))
    ]
    probes = [p for p in probes if "nvidia" not in str(p.get("probe"))]
    if not f.alive or group.get("frozen") or not (hung or mounts or (probes and f.main and f.main.state == "D")):
        return None
    case = stuck(look, "stuck.filesystem")
    remote = any(t.wait.family in _REMOTE for _, t in hung)
    path = next((t.wait.path for _, t in hung if t.wait.path), None) or (mounts[0].mountpoint if mounts else None)
    case.yes(
        hung,
        4,
        f"{len(hung)} thread(s) wait in the file system and never wake",
        "wchan, schedstat",
        hung[0][1].wait.raw if hung else None,
    )
    case.yes(remote, 1.5, "the file server or FUSE daemon does not answer", "wchan")
    case.yes(mounts, 3.5, f"our own look at {mounts[0].mountpoint if mounts else ''} did not come back", "statvfs")
    case.yes(
        probes and not mounts,
        3,
        f"our own probe did not come back: {probes[0].get('probe') if probes else ''}",
        "probe",
        str(probes[0].get("wchan")) if probes else None,
    )
    local = bool(hung) and not remote and not mounts and (f.idle or 0) < 120
    case.no(
        local, 2.5, "it is a local device: a request may take seconds behind others or a limit on its rate", "mountinfo"
    )
    since = (f.idle or 0.0) + 60
    said = [x for x in f.kernel_lines("nfs", "hung_task", "io_error") if (x.get("age_s") or 0.0) <= since]
    case.yes(said, 1.5, "the kernel log speaks of it", "kernel log", said[0].get("text") if said else None)
    case.no(not hung and not trainers_wait(f), 3, "no thread of the job waits there", "wchan")
    case.values["path"] = path
    case.who = path
    return case


def gpu_lost(look: Look) -> Case | None:
    f = look.f
    driver = [(p, t) for p, t in job_threads(f) if t.always("gpu") and t.wait.state == "D"]
    lost = [g for g in f.gpu.mine if g.lost]
    since = f.idle + 120 if f.idle is not None else (f.main.age if f.main and f.main.age is not None else 0.0)
    xid = [line for line in f.kernel_lines("xid", "nvrm") if line.get("age_s", 1e12) <= since]
    text = f.gpu.error or ""
    bad_text = re.search(
        r"unknown error|gpu is lost|determine the device handle|no devices were found|gpu_is_lost|driver/library",
        text,
        re.I,
    )
    timed_out = f.gpu.status == "timed_out" or any(
        "nvidia" in str(p.get("probe")) or "nvml" in str(p.get("probe")) for p in f.snap.get("probes_timed_out") or []
    )
    recovery = [g for g in f.gpu.mine if g.recovery]
    told = log_line(f, "gpu-error")
    if not f.alive or not (driver or lost or xid or bad_text or timed_out or recovery):
        return None
    case = stuck(look, "stuck.gpu-lost")
    case.yes(
        driver,
        4,
        f"{len(driver)} thread(s) hang inside the GPU driver",
        "wchan",
        driver[0][1].wait.raw if driver else None,
    )
    case.yes(lost, 5, f"GPU {lost[0].index if lost else ''} is lost", "nvml")
    case.yes(bad_text, 4.5, "the GPU tool reports: " + text[:120], "nvidia-smi", text)
    case.yes(
        timed_out, 3.5 if driver or xid or trainers_wait(f) else 3.0, "the GPU probe itself did not come back", "nvml"
    )
    only = timed_out and not (driver or lost or xid or bad_text or recovery)
    case.no(only and f.moved("main-cpu"), 3, "the main thread runs: it does not wait for the driver", "stat")
    load, cpus = ((f.snap.get("host") or {}).get("load") or [0])[0], f.meta.get("cpus") or 1
    case.no(
        only and load > 2 * cpus,
        1.5,
        f"the host is overloaded ({load:.0f} on {cpus} CPUs): its tool may be slow",
        "loadavg",
    )
    case.yes(xid, 3.5, "the kernel log has a GPU fault", "kernel log", xid[0].get("text") if xid else None)
    case.yes(
        recovery,
        2,
        f"GPU {recovery[0].index if recovery else ''} asks for recovery: {recovery[0].recovery if recovery else ''}",
        "nvml",
    )
    case.yes(told, 2, "the log ends in a GPU error", "log", told)
    case.who = f"GPU {lost[0].index}" if lost else "the GPU driver on this host"
    return case


def disk_full(look: Look) -> Case | None:
    f = look.f
    full = [
        m
        for m in f.mounts_for("log", "output", "tmp", "cwd")
        if m.full and m.mountpoint != "/dev/shm" and m.fstype not in ("squashfs", "iso9660", "erofs")
    ]
    told = log_line(f, "disk-full")
    if not f.alive or not (full or told):
        return None
    case = stuck(look, "stuck.disk-full")
    inodes = bool(full) and full[0].inodes_free == 0
    case.yes(
        full,
        4 if set(full[0].used_by if full else ()) & {"log", "output"} else 2,
        f"{full[0].words if full else ''} has no {'inodes' if inodes else 'space'} left; used for"
        f" {', '.join(full[0].used_by) if full else ''}",
        "statvfs",
    )
    case.yes(told, 4, "the log says that no space is left", "log", told)
    case.yes(trainers_wait(f), 1, "the trainer waits", "wchan")
    case.no(not full and told, 1, "no full mount was seen now", "statvfs")
    case.who = full[0].mountpoint if full else None
    case.values["path"] = full[0].mountpoint if full else None
    return case


def shm_full(look: Look) -> Case | None:
    f = look.f
    shm = (f.snap.get("host") or {}).get("shm") or {}
    size, free = shm.get("size"), shm.get("free")
    share = 1 - free / size if size and free is not None else None
    told = log_line(f, "shm-full")
    if not f.alive or not ((share is not None and share > 0.85) or told):
        return None
    case = stuck(look, "stuck.shm-full")
    case.yes(
        share is not None and share > 0.97, 4, f"/dev/shm ({(size or 0) / 1e9:.1f} GB) is full", "statvfs /dev/shm"
    )
    case.yes(
        share is not None and 0.85 < share <= 0.97,
        1.5,
        f"/dev/shm ({(size or 0) / 1e9:.1f} GB) is {100 * (share or 0):.0f} % full",
        "statvfs /dev/shm",
    )
    case.yes(told, 3.5, "the log says that shared memory ran out", "log", told)
    case.yes(trainers_wait(f), 1.5, "the trainer waits", "wchan")
    case.yes(f.workers and (share or 0) > 0.85, 1, "its workers hand over batches through shared memory", "children")
    return case


def orphans(look: Look) -> Case | None:
    f = look.f
    zombie = f.main is not None and f.main.zombie
    left = [
        p
        for p in f.procs.values()
        if p.ppid == 1
        and p.kind in ("fork", "spawned", "rank", "main", "sibling", "other")
        and not p.zombie
        and p.pid != (f.main.pid if f.main and not zombie else None)
        and p.kind in ("fork", "spawned", "rank")
    ]
    named = f.main is not None and re.search(
        r"multiprocessing|spawn_main|forkserver|--multiprocessing-fork", f.main.cmd
    )
    self_orphan = f.main is not None and f.main.ppid == 1 and (bool(named) or forsaken(f))
    holders = list(f.gpu.orphans)
    held = zombie and f.main is not None and f.gpu.mem_by_pid.get(f.main.pid)
    if not (left or holders or held or self_orphan):
        return None
    over = not f.alive or zombie or self_orphan
    case = Case("stuck.orphans", pids=[p.pid for p in left] or holders)
    case.who = f"PID {case.pids[0]}" if case.pids else None
    case.no(len(f.samples) < 2, 20, "there is only one look", "samples")
    case.yes(
        left and over,
        5,
        f"the main process is over, but {len(left)} of its workers live on with parent 1",
        "/proc/PID/stat",
    )
    case.yes(
        holders,
        4,
        f"{len(holders)} process(es) without a parent hold a GPU: PID {', '.join(map(str, holders[:4]))}",
        "nvml, /proc/PID/fd",
    )
    case.yes(zombie and held, 4, "the process is defunct, and the GPU still books memory to it", "nvml")
    case.yes(self_orphan, 5, "it is a worker whose parent is gone", "/proc/PID/stat")
    case.yes(self_orphan and trainers_wait(f), 2.5, "it waits for work that nobody gives out any more", "wchan")
    case.yes(self_orphan and f.main and f.gpu.mem_by_pid.get(f.main.pid), 1, "it still holds GPU memory", "nvml")
    case.no(not over and not holders, 4, "the main process lives", "/proc")
    case.no(not over and holders and f.forward, 5, "the job itself works", "samples")
    return case


def livelock(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.main is None:
        return None
    spins = [p for p in f.trainers if p.critical.share("run") >= 0.6 and p.critical.ready > 0.8]
    runaway = memory_runs_away(f)
    if not spins or (look.split is not None and f.gpu.spinning):
        return None
    case = stuck(look, "stuck.livelock")
    one = spins[0]
    case.who, case.pids = one.label, [one.pid]
    # The first lines of a run come from steps that are unlike the rest: so few of them are no habit to be late by.
    late = f.overdue if f.log is not None and f.log.progress_lines >= HABIT else None
    if late is not None and one.critical.cpu is not None:
        late *= one.critical.cpu / max(one.critical.ready, 0.01)  # a crowd on the CPUs makes any loop late
    case.yes(True, 1, f"its main thread wants a CPU {100 * one.critical.ready:.0f} % of the time", "stat")
    calls = one.io.get("syscr", 0.0) + one.io.get("syscw", 0.0)
    case.yes(
        one.io and calls < 1 and (one.minflt is not None and one.minflt < 1),
        1.5,
        "it makes no system call for data and touches no new memory",
        "io, stat",
    )
    others = [t for t in one.threads if t.tid != one.critical.tid and (t.cpu or 0) > 0.05]
    case.yes(not others and len(one.threads) > 1, 0.5, "no other thread of it works", "stat")
    case.yes(
        late is not None and late >= 20 and (f.idle or 0) >= 10,
        min(4.0, 1 + (late or 0) / 25),
        f"its log is {late or 0:.0f} intervals late",
        "log",
    )
    case.yes(
        runaway, 3, f"its memory grows by {(one.rss_slope or 0) / 1e6:.0f} MB/s and will hit the limit soon", "stat"
    )
    case.yes((f.idle or 0) > 3600 and late is None, 0.5, f"the log has been silent for {span_words(f.idle)}", "log")
    case.no(f.fresh and not f.heartbeat, 4, "the log is fresh", "log")
    case.no((f.idle or 0) < 60 and not runaway, 2, "the log has been silent for less than a minute", "log")
    case.no(may_compute(f) and not runaway, 5, "an evaluation on the CPU looks the same for minutes", "maps")
    works = calls >= 1 or (one.minflt or 0) >= 1
    case.no(works and not runaway, 3.5, "it still asks the system for things: new memory, files", "io, stat")
    case.no((late is None or late < 20) and not runaway, 3.5, "nothing says that a step should have come by now", "log")
    case.no(
        f.of_kind("compiler") or phase(f, "compiling"),
        2 if not runaway else 0.5,
        "it may be compiling",
        "children, log",
    )
    case.no(
        phase(f, "evaluating", "checkpointing", "tokenising", "initialising", "loading-model", "generating"),
        2.5,
        "the log announced a phase that may take long",
        "log",
    )
    case.no(f.gpu.working, 6, "the GPU computes", "nvml")
    case.no("cuda" in one.libs and not f.gpu.mine, 1.5, "the GPU could be at work and cannot be seen", "nvml")
    case.no(f.distributed, 3, "it is one of several ranks: it may spin in a collective", "job")
    return case


def download(look: Look) -> Case | None:
    f = look.f
    line = phase(f, "downloading")
    partial = [(c, x) for c in f.snap.get("caches") or [] for x in c.get("incomplete") or []]
    retries = len(
        re.findall(
            r"(?i)retry|retrying|timed? ?out|connection (?:reset|error|aborted)|temporary failure", f.log_tail[-4000:]
        )
    )
    if not f.alive or not (line or partial or retries >= 3) or f.stepped:
        return None
    case = stuck(look, "stuck.download")
    case.yes(line, 2, "the log announced a download that has not ended", "log", line)
    case.yes(partial, 3, f"{partial[0][1].get('name') if partial else ''} is incomplete and does not grow", "caches")
    case.yes(retries >= 2, 2.5, f"the log speaks of retries {retries} times", "log", f.log.last_line if f.log else None)
    net = any(t.wait.family in ("socket", "connect") or t.wait.kind == "socket" for _, t in job_threads(f)) or any(
        s.get("state") == "SYN_SENT" for s in f.snap.get("sockets") or []
    )
    case.yes(net, 1, "it waits on a network connection", "wchan, net/tcp")
    case.yes(trainers_wait(f), 0.5, "its main thread waits", "wchan")
    case.no(not partial and not retries, 1.5, "neither a partial file nor a retry was seen", "caches, log")
    case.no(f.distributed and log_kinds(f) & {"rendezvous"}, 3, "the ranks have not met", "log")
    return case


HOST_RULES: list[Rule] = [filesystem, gpu_lost, disk_full, shm_full, orphans, livelock, download]
