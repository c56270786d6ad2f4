"""Stuck outside the collectives: locks, dead workers, storage, terminals, pipes, signals, full disks, drivers.

Each rule needs its own mechanism in sight; silence alone is never enough, and any forward signal speaks against all of them.
"""

from __future__ import annotations

import re

from eyas.why.facts import Facts
from eyas.why.procs import Proc, Thread
from eyas.why.verdicts.base import Case, Look, Rule, frames, log_kinds, log_line, phase, span_words, stuck, trainers_wait
from eyas.why.verdicts.quiet import memory_runs_away
from eyas.why.verdicts.stuck_ranks import RANK_RULES

_REMOTE = ("nfs", "fuse", "lustre")


def _job_threads(f: Facts) -> list[tuple[Proc, Thread]]:
    return [(p, t) for p in f.trainers + f.live_workers for t in p.threads]


def _sleeping_lock(thread: Thread) -> bool:
    """Waits on a futex at every look, and nothing woke it in between."""
    return thread.always("futex") and thread.asleep and not any(w.timed for w in thread.waits)


def stopped(look: Look) -> Case | None:
    f = look.f
    held = [p for p in f.trainers if p.states and all(s in ("T", "t") for s in p.states)]
    key, group = f.cgroup_of(f.main) if f.main else (None, {})
    frozen = bool(group.get("frozen"))
    traced = [p for p in f.trainers if p.tracer]
    if not f.alive or not (held or frozen or (traced and f.still)):
        return None
    case = stuck(look, "stuck.stopped")
    one = (held or traced or f.trainers or [None])[0]
    case.who, case.pids = (one.label if one else None), [p.pid for p in held or traced]
    case.yes(held and held[0].state == "T", 7, f"{one.label if one else ''} is stopped (state T): a SIGSTOP, SIGTSTP or SIGTTIN", "/proc/PID/stat")
    case.yes(held and held[0].state == "t", 7, "it is stopped by a debugger (state t)", "/proc/PID/stat")
    case.yes(frozen, 8, f"its cgroup is frozen ({key})", "cgroup freezer")
    case.yes(traced, 2, f"PID {traced[0].tracer if traced else ''} traces it", "TracerPid")
    case.values.update(frozen=frozen, tracer=traced[0].tracer if traced else None, cgroup=key)
    asks = f.log is not None and f.log.prompt_open
    case.no(asks and held, 2, "the log ends in a question: it may have been stopped for reading the terminal from the background", "log")
    return case


def terminal_input(look: Look) -> Case | None:
    f = look.f
    readers = [(p, t) for p in f.procs.values() if not p.zombie for t in p.threads
               if p.kind not in ("shell", "sibling", "tee") and t.wait.family == "tty"]  # fmt: skip
    prompt = f.log.prompt if f.log and (f.log.prompt_open or not f.log.progress_lines) else None
    stdin = [(p, t) for p in f.trainers for t in p.threads if t.tid == p.pid and t.wait.fd == 0 and t.wait.family in ("pipe-read", "poll", "socket")]
    background = [p for p in f.procs.values() if p.states and all(s == "T" for s in p.states) and p.stdio.get(0, {}).get("kind") == "tty"]
    if not f.alive or not (readers or (prompt and f.still) or (stdin and trainers_wait(f))):
        return None
    case = stuck(look, "stuck.input")
    if readers:
        proc, thread = readers[0]
        case.who, case.pids = proc.label, [proc.pid]
        case.yes(True, 6, f"{proc.label} reads from a terminal and nobody types", "syscall, wchan", thread.wait.raw)
    case.yes(prompt, 3, "the log ends in a question", "log", prompt)
    case.yes(stdin and not readers, 3.5, "it reads its standard input", "syscall", stdin[0][1].wait.raw if stdin else None)
    case.yes(background and prompt, 4, "it was stopped as a background job that wants to read the terminal (SIGTTIN)", "/proc/PID/stat")
    case.no(prompt and not readers and not stdin and not background, 1, "no thread was seen reading a terminal", "syscall")
    return case


def stdout_pipe(look: Look) -> Case | None:
    f = look.f
    found = [(p, t) for p in f.procs.values() for t in p.threads if t.share("pipe-write") >= 0.6]
    if not f.alive or not found:
        return None
    proc, thread = next(((p, t) for p, t in found if t.wait.fd in (1, 2)), found[0])
    case = stuck(look, "stuck.stdout-pipe")
    case.who, case.pids = proc.label, [proc.pid]
    case.yes(True, 4.5, f"{proc.label} waits for room in a pipe", "wchan, syscall", thread.wait.raw)
    case.yes(thread.wait.fd in (1, 2), 1.5, f"the pipe is its {'standard output' if thread.wait.fd == 1 else 'standard error'}", "syscall")
    inode = (proc.fds.get(thread.wait.fd if thread.wait.fd is not None else 1) or {}).get("inode")
    pipe = next((p for p in f.snap.get("pipes") or [] if inode is not None and p.get("inode") == inode), None)
    queued = (pipe or {}).get("queued")
    case.yes(queued and queued >= 4096, 1, f"{queued} bytes wait in it unread", "FIONREAD")
    ends = [r.get("pid") for r in (pipe or {}).get("readers") or [] if r.get("pid") != proc.pid]
    case.yes(ends, 0.5, f"its reader, PID {ends[0] if ends else ''}, does not read", "fd")
    case.values["reader"] = ends[0] if ends else None
    return case


def lock_file(look: Look) -> Case | None:
    f = look.f
    blocked = [(p, t) for p, t in _job_threads(f) if t.share("lock") >= 0.6]
    open_locks = [x for x in f.snap.get("lockfiles") or [] if x.get("pid") in {p.pid for p in f.trainers + f.live_workers}]
    lists = [c for c in f.snap.get("caches") or [] if c.get("locks")]
    napping = [p for p in f.trainers if p.main.share("sleep") >= 0.6 and (p.main.wakeups is None or p.main.wakeups >= 0.3) and (p.cpu or 0) < 0.3]
    waited = next((lk for lk in f.snap.get("locks") or [] if set(lk.get("waiters") or []) & f.members), None)
    if not f.alive or not (blocked or waited or (napping and (open_locks or lists))):
        return None
    case = stuck(look, "stuck.lock-file")
    case.yes(blocked, 5, "a thread waits for a file lock", "wchan", blocked[0][1].wait.raw if blocked else None)
    path = (waited or {}).get("path") or (open_locks[0].get("path") if open_locks else None) or (blocked[0][1].wait.path if blocked else None)
    if path is None and lists:
        path = f"{lists[0].get('path')}/{lists[0]['locks'][0]}"
    holder = (waited or {}).get("holder")
    case.yes(waited, 2, f"PID {holder} ({(waited or {}).get('holder_comm')}) holds it", "/proc/locks", path)
    case.yes(napping and (open_locks or lists), 4, f"it looks at a lock file again and again with naps between: {path}", "syscall, fd")
    beat = napping[0].main.wakeups if napping else None
    case.yes(napping and beat and beat > 2, 1, f"it wakes {beat or 0:.0f} times a second", "schedstat")
    compiling = phase(f, "compiling") or next((x for x in frames(f) if "file_baton" in x or "filelock" in x), None)
    case.yes(compiling, 1, "its last words or its stack speak of waiting for a lock", "log, py-spy", compiling)
    case.values.update(path=path, holder=holder)
    case.who = f"PID {holder} ({(waited or {}).get('holder_comm')})" if holder else path
    case.pids = [holder] if holder else []
    return case


def worker_dead(look: Look) -> Case | None:
    f = look.f
    dead = [w for w in f.workers if w.zombie or w.gone]
    died = [d for d in f.children_died if d.get("kind") in ("fork", "spawned")]
    told = log_line(f, "worker-died")
    waits = trainers_wait(f)
    idle = f.live_workers and all(t.share("poll", "pipe-read", "epoll", "sleep") >= 0.6 and (t.cpu or 0) < 0.02 for t in (w.critical for w in f.live_workers))
    pipe = any(p.critical.wait.family == "pipe-read" and p.critical.asleep for p in f.trainers)
    lost_item = waits and ((idle and pipe) or (idle and f.still and any(_sleeping_lock(p.critical) for p in f.trainers)))
    alone = not f.workers and waits and pipe and _no_writer(f)
    pinned = not f.workers and waits and any(t.role == "pin-memory" for _, t in _job_threads(f))
    if not f.alive or not (dead or died or told or lost_item or alone or pinned):
        return None
    case = stuck(look, "stuck.worker-dead")
    case.pids = [w.pid for w in dead] or [int(d["pid"]) for d in died]
    case.who = f"worker PID {case.pids[0]}" if case.pids else None
    case.yes(dead, 4, f"{len(dead)} of {len(f.workers)} workers are dead (zombie or gone)", "/proc/PID/stat")
    case.yes(died and not dead, 3, f"{len(died)} worker(s) died while we looked", "samples")
    case.yes(told, 2.5, "the log says that a worker died", "log", told)
    case.yes(waits, 1.5, "the trainer waits on the queue", "wchan", f.main.critical.wait.raw if f.main else None)
    case.yes(idle and waits, 1.5, "every live worker idles: nobody makes the batch the trainer waits for", "wchan")
    case.yes(alone, 3.5, "the pipe it reads from has no writer other than itself", "fd")
    case.yes(lost_item and not dead and not died, 1, "the item it waits for is nobody's work any more", "wchan")
    case.yes(pinned, 2.5, "there is a pin-memory thread, but not one worker is left", "children, task/*/comm")
    case.no(not waits, 3, "the trainer does not wait", "wchan")
    case.no(f.log and (f.log.ended or f.log.at_last_step), 3, "training has ended", "log")
    return case


def _no_writer(f: Facts) -> bool:
    for proc in f.trainers:
        wait = proc.critical.wait
        inode = (proc.fds.get(wait.fd if wait.fd is not None else -1) or {}).get("inode")
        pipe = next((p for p in f.snap.get("pipes") or [] if inode is not None and p.get("inode") == inode), None)
        if pipe is not None and all(w.get("pid") == proc.pid for w in pipe.get("writers") or []):
            return True
    return False


def fork_lock(look: Look) -> Case | None:
    f = look.f
    frozen = [w for w in f.live_workers if _sleeping_lock(w.critical)]
    others = [w for w in f.live_workers if w not in frozen]
    if not f.alive or not frozen or any(not w.critical.asleep for w in others) or len(frozen) * 2 < len(f.live_workers):
        return None
    case = stuck(look, "stuck.fork-lock")
    case.pids, case.who = [w.pid for w in frozen], f"{len(frozen)} workers (first PID {frozen[0].pid})"
    case.yes(not others, 4, f"all {len(frozen)} workers sleep on a lock without a time-out and never wake", "wchan, schedstat", frozen[0].critical.wait.raw)
    case.yes(others, 2, f"{len(frozen)} of {len(f.live_workers)} workers sleep on a lock and never wake", "wchan, schedstat")
    same = len(frozen) > 1 and len({w.critical.wait.uaddr for w in frozen}) == 1 and frozen[0].critical.wait.uaddr
    case.yes(same, 1.5, "all at the same address: one lock, copied while held", "syscall")
    forked = all(w.kind == "fork" for w in frozen)
    case.yes(forked, 1, "they are forks of the trainer: a lock held by another thread at the fork stays locked for ever", "children")
    case.yes(f.log is not None and "tokenizers-fork" in f.log.notes, 2, "the log warns of a fork after parallelism was used", "log")
    stack = next((x for w in frozen for x in f.stack_frames(w)[:3]), None)
    case.yes(stack, 0.5, "all in " + (stack or ""), "py-spy")
    case.yes(trainers_wait(f), 1.5, "the trainer waits for them", "wchan")
    risky = {"gomp", "cv2", "tokenizers", "h5py", "mkl"} & (f.main.libs if f.main else set())
    case.yes(risky, 0.5, f"libraries that do not survive a fork are loaded: {', '.join(sorted(risky))}", "maps")
    case.no(any(w.readings and any(r.moved for r in w.readings) for w in f.live_workers), 4, "workers read data", "fdinfo")
    case.no(any(w.critical.wait.family == "pipe-read" for w in others), 4, "one worker holds the queue's lock and waits for work: an idle pool", "wchan")
    return case


def deadlock(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.main is None or not f.trainers:
        return None
    locked = [p for p in f.trainers if _sleeping_lock(p.critical)]
    stack = frames(f)
    profiler = next((x for x in stack if re.search("cupti|kineto", x)), None)
    if not locked and not (profiler and trainers_wait(f)):
        return None
    case = stuck(look, "stuck.deadlock")
    one = (locked or f.trainers)[0]
    case.who, case.pids = one.label, [one.pid]
    awake = [t for t in one.threads if not t.asleep and t.role not in ("nccl-watchdog", "nccl-heartbeat", "runtime", "tracker", "cuda")]
    seen = all(t.wakeups is not None for t in one.threads)
    case.yes(locked and not awake, 3.5 if seen else 2, f"none of its {len(one.threads)} threads ran or woke at all", "stat, schedstat")
    case.yes(locked and awake, 0.5, "its main thread sleeps on a lock and never wakes", "schedstat", one.critical.wait.raw)
    case.yes(locked, 1.5, "the main thread waits on a lock without a time-out", "syscall, wchan", one.critical.wait.raw)
    spots = [t.wait.uaddr for t in one.threads if t.wait.family == "futex" and t.wait.uaddr]
    shared = len(spots) > 1 and spots.count(one.critical.wait.uaddr) > 1
    case.yes(shared, 2, "several threads wait for the same lock", "syscall")
    case.yes(len(spots) > 1 and not shared, 0.5, "several threads wait for locks", "syscall")
    case.yes(stack and re.search(r"acquire|lock|__enter__|join|wait", stack[0]), 1.5, "its innermost frame is " + (stack[0] if stack else ""), "py-spy")
    case.yes(profiler, 2.5, "it is inside the profiler library", "py-spy", profiler)
    case.yes(f.gpu.used and f.gpu.idle, 1, f.gpu.words, "nvml")
    waiting = [t for t in one.threads if t.wait.family in ("socket", "connect", "accept", "tty", "lock", "child", *_REMOTE) and t.role != "tracker"]
    case.no(waiting, 1.5, f"a thread waits for something outside: {waiting[0].wait.words if waiting else ''}", "wchan")
    case.no(f.workers, 3.5, "there are loader workers: it may wait for them", "children")
    blind = "cuda" in one.libs and not f.gpu.mine
    case.no(blind, 2, "the GPU could be at work and cannot be seen", "nvml")
    case.no(f.distributed, 2.5, "it is one of several ranks: it may wait for them", "job")
    case.no(f.training is False, 3, "it does not look like a training process: it may be idle by design", "cmdline, maps")
    case.no(f.log and (f.log.ended or f.log.at_last_step), 3, "training has ended", "log")
    return case


def filesystem(look: Look) -> Case | None:
    f = look.f
    key, group = f.cgroup_of(f.main) if f.main else (None, {})
    hung = [(p, t) for p, t in _job_threads(f) if t.always("nfs", "fuse", "lustre", "disk", "io", "metadata", "writeback", "rwsem")
            and (t.wait.state == "D" or t.wait.family in _REMOTE) and (t.wakeups or 0) < 1 and (t.cpu or 0) < 0.01]  # fmt: skip
    mounts = [m for m in f.mounts.values() if m.timed_out]
    probes = [p for p in f.snap.get("probes_timed_out") or [] if p.get("path") or re.search(r"stat|mount|ls|open|maps|cmdline", str(p.get("probe")))]
    probes = [p for p in probes if "nvidia" not in str(p.get("probe"))]
    if not f.alive or group.get("frozen") or not (hung or mounts or (probes and f.main and f.main.state == "D")):
        return None
    case = stuck(look, "stuck.filesystem")
    remote = any(t.wait.family in _REMOTE for _, t in hung)
    path = next((t.wait.path for _, t in hung if t.wait.path), None) or (mounts[0].mountpoint if mounts else None)
    case.yes(hung, 4, f"{len(hung)} thread(s) wait in the file system and never wake", "wchan, schedstat", hung[0][1].wait.raw if hung else None)
    case.yes(remote, 1.5, "the file server or FUSE daemon does not answer", "wchan")
    case.yes(mounts, 3.5, f"our own look at {mounts[0].mountpoint if mounts else ''} did not come back", "statvfs")
    case.yes(probes and not mounts, 3, f"our own probe did not come back: {probes[0].get('probe') if probes else ''}", "probe", str(probes[0].get("wchan")) if probes else None)
    said = f.kernel_lines("nfs", "hung_task", "io_error")
    case.yes(said, 1.5, "the kernel log speaks of it", "kernel log", said[0].get("text") if said else None)
    case.no(not hung and not trainers_wait(f), 3, "no thread of the job waits there", "wchan")
    case.values["path"] = path
    case.who = path
    return case


def gpu_lost(look: Look) -> Case | None:
    f = look.f
    driver = [(p, t) for p, t in _job_threads(f) if t.always("gpu") and t.wait.state == "D"]
    lost = [g for g in f.gpu.mine if g.lost]
    xid = f.kernel_lines("xid", "nvrm")
    text = f.gpu.error or ""
    bad_text = re.search(r"unknown error|gpu is lost|determine the device handle|no devices were found|gpu_is_lost|driver/library", text, re.I)
    timed_out = f.gpu.status == "timed_out" or any("nvidia" in str(p.get("probe")) or "nvml" in str(p.get("probe")) for p in f.snap.get("probes_timed_out") or [])
    recovery = [g for g in f.gpu.mine if g.recovery]
    told = log_line(f, "gpu-error")
    if not f.alive or not (driver or lost or xid or bad_text or timed_out or recovery):
        return None
    case = stuck(look, "stuck.gpu-lost")
    case.yes(driver, 4, f"{len(driver)} thread(s) hang inside the GPU driver", "wchan", driver[0][1].wait.raw if driver else None)
    case.yes(lost, 5, f"GPU {lost[0].index if lost else ''} is lost", "nvml")
    case.yes(bad_text, 4.5, "the GPU tool reports: " + text[:120], "nvidia-smi", text)
    case.yes(timed_out, 3.5, "the GPU probe itself did not come back", "nvml")
    case.yes(xid, 3.5, "the kernel log has a GPU fault", "kernel log", xid[0].get("text") if xid else None)
    case.yes(recovery, 2, f"GPU {recovery[0].index if recovery else ''} asks for recovery: {recovery[0].recovery if recovery else ''}", "nvml")
    case.yes(told, 2, "the log ends in a GPU error", "log", told)
    case.who = f"GPU {lost[0].index}" if lost else "the GPU driver on this host"
    return case


def disk_full(look: Look) -> Case | None:
    f = look.f
    full = [m for m in f.mounts_for("log", "output", "tmp", "cwd") if m.full and m.mountpoint != "/dev/shm" and not (m.fstype in ("squashfs", "iso9660", "erofs"))]
    told = log_line(f, "disk-full")
    if not f.alive or not (full or told):
        return None
    case = stuck(look, "stuck.disk-full")
    inodes = bool(full) and full[0].inodes_free == 0
    case.yes(full, 4, f"{full[0].words if full else ''} has no {'inodes' if inodes else 'space'} left; used for {', '.join(full[0].used_by) if full else ''}", "statvfs")
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
    case.yes(share is not None and share > 0.97, 4, f"/dev/shm ({(size or 0) / 1e9:.1f} GB) is full", "statvfs /dev/shm")
    case.yes(share is not None and 0.85 < share <= 0.97, 1.5, f"/dev/shm ({(size or 0) / 1e9:.1f} GB) is {100 * (share or 0):.0f} % full", "statvfs /dev/shm")
    case.yes(told, 3.5, "the log says that shared memory ran out", "log", told)
    case.yes(trainers_wait(f), 1.5, "the trainer waits", "wchan")
    case.yes(f.workers and (share or 0) > 0.85, 1, "its workers hand over batches through shared memory", "children")
    return case


def orphans(look: Look) -> Case | None:
    f = look.f
    zombie = f.main is not None and f.main.zombie
    left = [p for p in f.procs.values() if p.ppid == 1 and p.kind in ("fork", "spawned", "rank", "main", "sibling", "other")
            and not p.zombie and p.pid != (f.main.pid if f.main and not zombie else None) and p.kind in ("fork", "spawned", "rank")]  # fmt: skip
    self_orphan = f.main is not None and f.main.ppid == 1 and re.search(r"multiprocessing|spawn_main|forkserver|--multiprocessing-fork", f.main.cmd) is not None
    holders = [p for p in f.gpu.orphans]
    held = zombie and f.main is not None and f.gpu.mem_by_pid.get(f.main.pid)
    if not (left or holders or held or self_orphan):
        return None
    over = not f.alive or zombie or self_orphan
    case = Case("stuck.orphans", pids=[p.pid for p in left] or holders)
    case.who = f"PID {case.pids[0]}" if case.pids else None
    case.no(len(f.samples) < 2, 20, "there is only one look", "samples")
    case.yes(left and over, 5, f"the main process is over, but {len(left)} of its workers live on with parent 1", "/proc/PID/stat")
    case.yes(holders, 4, f"{len(holders)} process(es) without a parent hold a GPU: PID {', '.join(map(str, holders[:4]))}", "nvml, /proc/PID/fd")
    case.yes(zombie and held, 4, "the process is defunct, and the GPU still books memory to it", "nvml")
    case.yes(self_orphan, 5, "it is a worker whose parent is gone", "/proc/PID/stat")
    case.no(not over and not holders, 4, "the main process lives", "/proc")
    case.no(not over and holders and f.forward, 5, "the job itself works", "samples")
    return case


def livelock(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.main is None:
        return None
    spins = [p for p in f.trainers if p.critical.share("run") >= 0.6 and (p.critical.cpu or 0) > 0.8]
    runaway = memory_runs_away(f)
    if not spins or (look.split is not None and f.gpu.spinning):
        return None
    case = stuck(look, "stuck.livelock")
    one = spins[0]
    case.who, case.pids = one.label, [one.pid]
    late = f.overdue
    case.yes(True, 1, f"its main thread uses {100 * (one.critical.cpu or 0):.0f} % of a CPU all the time", "stat")
    calls = one.io.get("syscr", 0.0) + one.io.get("syscw", 0.0)
    case.yes(one.io and calls < 1 and (one.minflt is not None and one.minflt < 1), 1.5, "it makes no system call for data and touches no new memory", "io, stat")
    others = [t for t in one.threads if t.tid != one.critical.tid and (t.cpu or 0) > 0.05]
    case.yes(not others and len(one.threads) > 1, 0.5, "no other thread of it works", "stat")
    case.yes(late is not None and late >= 20 and (f.idle or 0) >= 10, min(4.0, 1 + (late or 0) / 25), f"its log is {late or 0:.0f} intervals late", "log")
    case.yes(runaway, 3, f"its memory grows by {(one.rss_slope or 0) / 1e6:.0f} MB/s and will hit the limit soon", "stat")
    case.yes((f.idle or 0) > 3600 and late is None, 0.5, f"the log has been silent for {span_words(f.idle)}", "log")
    case.no(f.fresh and not f.heartbeat, 4, "the log is fresh", "log")
    case.no((late is None or late < 20) and not runaway, 3.5, "nothing says that a step should have come by now", "log")
    case.no(f.of_kind("compiler") or phase(f, "compiling"), 2 if not runaway else 0.5, "it may be compiling", "children, log")
    case.no(phase(f, "evaluating", "checkpointing", "tokenising", "initialising", "loading-model", "generating"), 2.5, "the log announced a phase that may take long", "log")
    case.no(f.gpu.working, 6, "the GPU computes", "nvml")
    case.no("cuda" in one.libs and not f.gpu.mine, 1.5, "the GPU could be at work and cannot be seen", "nvml")
    return case


def download(look: Look) -> Case | None:
    f = look.f
    line = phase(f, "downloading")
    partial = [(c, x) for c in f.snap.get("caches") or [] for x in c.get("incomplete") or []]
    retries = len(re.findall(r"(?i)retry|retrying|timed? ?out|connection (?:reset|error|aborted)|temporary failure", f.log_tail[-4000:]))
    if not f.alive or not (line or partial or retries >= 3) or f.stepped:
        return None
    case = stuck(look, "stuck.download")
    case.yes(line, 2, "the log announced a download that has not ended", "log", line)
    case.yes(partial, 3, f"{partial[0][1].get('name') if partial else ''} is incomplete and does not grow", "caches")
    case.yes(retries >= 2, 2.5, f"the log speaks of retries {retries} times", "log", f.log.last_line if f.log else None)
    net = any(t.wait.family in ("socket", "connect") or t.wait.kind == "socket" for _, t in _job_threads(f)) or any(
        s.get("state") == "SYN_SENT" for s in f.snap.get("sockets") or []
    )
    case.yes(net, 1, "it waits on a network connection", "wchan, net/tcp")
    case.yes(trainers_wait(f), 0.5, "its main thread waits", "wchan")
    case.no(not partial and not retries, 1.5, "neither a partial file nor a retry was seen", "caches, log")
    case.no(f.distributed and log_kinds(f) & {"rendezvous"}, 3, "the ranks have not met", "log")
    return case


RULES: list[Rule] = [
    stopped, terminal_input, stdout_pipe, lock_file, worker_dead, fork_lock, deadlock, filesystem, gpu_lost, disk_full,
    shm_full, orphans, livelock, download, *RANK_RULES,
]  # fmt: skip
