"""Stuck in or around one process: stopped, waiting for input, a pipe, a lock, a dead worker, itself.

Each rule needs its own mechanism in sight; silence alone is never enough, and any forward signal speaks against all.
"""

from __future__ import annotations

import re

from eyas.why.facts import WAITING, Facts
from eyas.why.locks import Awaited, awaited, in_the_way, naps
from eyas.why.pipes import hands_out, no_writer, pipe_of, ring_of
from eyas.why.pools import drained, replaced
from eyas.why.procs import Proc, Thread
from eyas.why.verdicts.base import (
    Case,
    Look,
    Rule,
    forsaken,
    frames,
    gpu_unseen,
    job_threads,
    log_line,
    phase,
    span_words,
    stuck,
    trainers_wait,
)
from eyas.why.verdicts.stuck_host import HOST_RULES
from eyas.why.verdicts.stuck_ranks import RANK_RULES

_REMOTE = ("nfs", "fuse", "lustre")


def _sleeping_lock(thread: Thread) -> bool:
    """Waits on a futex at every look, and nothing woke it in between."""
    return thread.always("futex") and thread.asleep and not any(w.timed for w in thread.waits)


def _halted(proc: Proc) -> bool:
    return bool(proc.states) and all(s in ("T", "t") for s in proc.states)


def stopped(look: Look) -> Case | None:
    f = look.f
    held = [p for p in f.trainers if _halted(p)]
    if not held and all(
        p.critical.share(*WAITING, "child") >= 0.6 for p in f.trainers
    ):  # a worker, a child or what stands at the other end of its pipes
        kinds = ("fork", "spawned", "other", "shell", "feeder", "tee", "reader")
        held = [p for p in f.procs.values() if p.kind in kinds and _halted(p)]
    key, group = f.cgroup_of(f.main) if f.main else (None, {})
    frozen = bool(group.get("frozen"))
    traced = [p for p in f.trainers if p.tracer]
    if not f.alive or not (held or frozen or (traced and f.still)):
        return None
    case = stuck(look, "stuck.stopped")
    one = next(iter(held or traced or f.trainers), None)
    case.who, case.pids = (one.label if one else None), [p.pid for p in held or traced]
    case.yes(
        held and held[0].state == "T",
        7,
        f"{one.label if one else ''} is stopped (state T): a SIGSTOP, SIGTSTP or SIGTTIN",
        "/proc/PID/stat",
    )
    case.yes(held and held[0].state == "t", 7, "it is stopped by a debugger (state t)", "/proc/PID/stat")
    case.yes(frozen, 8, f"its cgroup is frozen ({key})", "cgroup freezer")
    case.yes(traced, 2, f"PID {traced[0].tracer if traced else ''} traces it", "TracerPid")
    if held and held[0] not in f.trainers:
        case.values["stop_words"] = f" (it waits for {held[0].label}, which is)"
    case.values.update(frozen=frozen, tracer=traced[0].tracer if traced else None, cgroup=key)
    asks = f.log is not None and f.log.prompt_open
    case.no(
        asks and held,
        2,
        "the log ends in a question: it may have been stopped for reading the terminal from the background",
        "log",
    )
    return case


def terminal_input(look: Look) -> Case | None:
    f = look.f
    readers = [
        (p, t)
        for p in f.procs.values()
        if not p.zombie
        for t in p.threads
        if p.kind not in ("shell", "sibling", "tee") and t.wait.family == "tty"
    ]
    prompt = f.log.prompt if f.log and (f.log.prompt_open or not f.log.progress_lines) else None
    stdin = [
        (p, t)
        for p in f.trainers + (f.helpers if any(x.critical.wait.family == "child" for x in f.trainers) else [])
        for t in p.threads
        if t.tid == p.pid and t.wait.fd == 0 and t.wait.family in ("pipe-read", "poll", "socket")
    ]
    fifo = [(p, p.critical) for p in f.trainers if p.critical.always("fifo")]
    waits = trainers_wait(f) or all(p.critical.wait.family == "child" for p in f.trainers)
    background = [
        p
        for p in f.procs.values()
        if p.states and all(s == "T" for s in p.states) and p.stdio.get(0, {}).get("kind") == "tty"
    ]
    if not f.alive or not (readers or fifo or (prompt and f.still) or (stdin and waits)):
        return None
    case = stuck(look, "stuck.input")
    if readers:
        proc, thread = readers[0]
        case.who, case.pids = proc.label, [proc.pid]
        case.yes(True, 6, f"{proc.label} reads from a terminal and nobody types", "syscall, wchan", thread.wait.raw)
    elif fifo:
        case.who, case.values["typist"] = "nobody has opened it", "the other end of a named pipe (FIFO)"
        case.yes(True, 6, "it opens a named pipe, and nobody opens the other end", "wchan", fifo[0][1].wait.raw)
    elif stdin:
        case.who, case.pids = stdin[0][0].label, [stdin[0][0].pid]
        case.values["typist"] = "its standard input"
    fed = f.feeders if stdin else []
    case.no(fed, 4, f"a program feeds it: {fed[0].label if fed else ''}", "fd")
    case.yes(prompt, 3, "the log ends in a question", "log", prompt)
    case.yes(
        stdin and not readers, 3.5, "it reads its standard input", "syscall", stdin[0][1].wait.raw if stdin else None
    )
    case.yes(
        background and prompt,
        4,
        "it was stopped as a background job that wants to read the terminal (SIGTTIN)",
        "/proc/PID/stat",
    )
    case.no(
        prompt and not readers and not stdin and not background, 1, "no thread was seen reading a terminal", "syscall"
    )
    return case


def stdout_pipe(look: Look) -> Case | None:
    f = look.f
    found = [
        (p, t)
        for p in f.procs.values()
        for t in p.threads
        if p.kind != "feeder" and t.share("pipe-write") >= 0.6 and not hands_out(f, p, t)
    ]
    if not f.alive or not found:
        return None
    proc, thread = next(((p, t) for p, t in found if t.wait.fd in (1, 2)), found[0])
    case = stuck(look, "stuck.stdout-pipe")
    case.who, case.pids = proc.label, [proc.pid]
    case.yes(True, 4.5, f"{proc.label} waits for room in a pipe", "wchan, syscall", thread.wait.raw)
    case.yes(
        thread.wait.fd in (1, 2),
        1.5,
        f"the pipe is its {'standard output' if thread.wait.fd == 1 else 'standard error'}",
        "syscall",
    )
    pipe = pipe_of(f, proc, thread.wait.fd if thread.wait.fd is not None else 1)
    queued = pipe.get("queued")
    case.yes(queued and queued >= 4096, 1, f"{queued} bytes wait in it unread", "FIONREAD")
    ends = [r.get("pid") for r in pipe.get("readers") or [] if r.get("pid") != proc.pid]
    case.yes(ends, 0.5, f"its reader, PID {ends[0] if ends else ''}, does not read", "fd")
    case.values["reader"] = ends[0] if ends else None
    return case


def lock_file(look: Look) -> Case | None:
    f = look.f
    blocked = [(p, t) for p, t in job_threads(f) if t.share("lock") >= 0.6]
    waiters = f.trainers + f.live_workers
    ours = {p.pid for p in waiters}
    held = {lock.get("path") for lock in f.snap.get("locks") or [] if lock.get("holder") in ours}
    open_locks = [x for x in f.snap.get("lockfiles") or [] if x.get("open") and x.get("pid") in ours]
    open_locks = [x for x in open_locks if x.get("path") not in held]
    napping = [p for p in f.trainers if naps(p)]
    found = next((a for p in waiters if (a := awaited(f, p)) is not None), None)
    found = found or next((a for p in napping if (a := in_the_way(f, p)) is not None), None)
    if not f.alive or not (blocked or found or (napping and open_locks)):
        return None
    case = stuck(look, "stuck.lock-file")
    case.yes(blocked, 5, "a thread waits for a file lock", "wchan", blocked[0][1].wait.raw if blocked else None)
    path = found.path if found else None
    path = path or (open_locks[0].get("path") if open_locks else None) or (blocked[0][1].wait.path if blocked else None)
    if found is not None:
        _evidence(case, f, found)
    case.yes(
        napping and open_locks and not found,
        4,
        f"it naps again and again with a lock file open: {path}",
        "syscall, fd",
    )
    beat = napping[0].main.wakeups if napping else None
    case.yes(napping and beat and beat > 2, 1, f"it wakes {beat or 0:.0f} times a second", "schedstat")
    compiling = phase(f, "compiling") or next((x for x in frames(f) if "file_baton" in x or "filelock" in x), None)
    case.yes(compiling, 1, "its last words or its stack speak of waiting for a lock", "log, py-spy", compiling)
    holder = found.holder if found else None
    case.values.update(path=path, holder=holder.pid if holder else None)
    case.who = holder.words if holder else path
    if holder is None:
        case.values["holder_words"] = "nobody any more" if found and found.forsaken else "a process that was not seen"
    case.pids = [holder.pid] if holder else []
    return case


def _evidence(case: Case, f: Facts, found: Awaited) -> None:
    """What speaks for and against waiting for this lock."""
    file, holder = found.file, found.holder
    if found.how == "polled" and file is not None:
        times = f"{file.rate or 0:.0f} times a second"
        case.yes(True, 5, f"it tries {found.path} {times}, with naps between", "inotify, schedstat")
        case.no(
            holder is None and file.searched,
            3,
            "no other process holds a lock on it: the next try should succeed",
            "fdinfo",
        )
    if found.how == "exists" and file is not None:
        case.yes(True, 3, f"it naps, and {found.path} exists, whose existence is a lock", "stat, wchan")
        case.no((file.age or 1e9) < 60, 2, f"the lock file is only {span_words(file.age)} old", "stat")
        case.no(f.stepped, 1, "steps were made: building and downloading come before them", "log")
    case.yes(found.forsaken, 2, f"it was {found.words}", "fd, stat")
    case.yes(holder, 2, f"it is {found.words}", "/proc/locks, fdinfo", holder.lock if holder else None)
    top = (f.snap.get("host") or {}).get("top") or []
    busy = next((t for t in top if holder is not None and t.get("pid") == holder.pid), None)
    case.no(
        busy,
        1,
        f"the holder is at work ({100 * float((busy or {}).get('cpu_share') or 0):.0f} % CPU) and may let go",
        "/proc/PID/stat",
    )


def worker_dead(look: Look) -> Case | None:
    f = look.f
    dead = [w for w in f.workers if w.zombie or w.gone]
    died = [d for d in f.children_died if d.get("kind") in ("fork", "spawned")]
    told = log_line(f, "worker-died")
    waits = trainers_wait(f)
    idle = f.live_workers and all(
        t.share("poll", "pipe-read", "epoll", "sleep") >= 0.6 and (t.cpu or 0) < 0.02
        for t in (w.critical for w in f.live_workers)
    )
    pipe = any(p.critical.wait.family == "pipe-read" and p.critical.asleep for p in f.trainers)
    lost_item = waits and (
        (idle and pipe) or (idle and f.still and any(_sleeping_lock(p.critical) for p in f.trainers))
    )
    empty = f.still and drained(f)
    young = replaced(f) if empty else None
    thrown = log_line(f, "thread-exception") if waits and f.still else None
    alone = not f.workers and waits and pipe and no_writer(f)
    pinned = not f.workers and waits and any(t.role == "pin-memory" for _, t in job_threads(f))
    if not f.alive or not (dead or died or told or lost_item or empty or alone or pinned or thrown):
        return None
    case = stuck(look, "stuck.worker-dead")
    case.pids = [w.pid for w in dead] or [int(d["pid"]) for d in died]
    case.who = f"worker PID {case.pids[0]}" if case.pids else f"a thread of it died: {thrown[:120]}" if thrown else None
    case.yes(thrown, 5.5, "a thread of it ended with an exception, and the main thread waits", "log", thrown)
    case.yes(dead, 4, f"{len(dead)} of {len(f.workers)} workers are dead (zombie or gone)", "/proc/PID/stat")
    case.yes(died and not dead, 3, f"{len(died)} worker(s) died while we looked", "samples")
    case.yes(told, 2.5, "the log says that a worker died", "log", told)
    case.yes(waits, 1.5, "the trainer waits on the queue", "wchan", f.main.critical.wait.raw if f.main else None)
    case.yes(idle and waits, 1.5, "every live worker idles: nobody makes the batch the trainer waits for", "wchan")
    case.yes(
        empty,
        2.5 if young or f.stepped else 1,
        "every worker of its pool waits for a task, and it waits for a result",
        "wchan, schedstat",
    )
    case.yes(
        young,
        2.5,
        f"{young.label if young else ''} is much younger than its siblings: it replaced one that died",
        "/proc/PID/stat",
    )
    case.yes(alone, 3.5, "the pipe it reads from has no writer other than itself", "fd")
    case.yes(lost_item and not dead and not died, 1, "the item it waits for is nobody's work any more", "wchan")
    case.yes(pinned, 2.5, "there is a pin-memory thread, but not one worker is left", "children, task/*/comm")
    case.no(not waits, 3, "the trainer does not wait", "wchan")
    case.no(f.log and (f.log.ended or f.log.at_last_step), 3, "training has ended", "log")
    case.no(forsaken(f), 3, "it is itself a worker whose parent is gone", "/proc/PID/stat")
    return case


def fork_lock(look: Look) -> Case | None:
    f = look.f
    frozen = [w for w in f.live_workers if _sleeping_lock(w.critical)]
    others = [w for w in f.live_workers if w not in frozen]
    if not f.alive or not frozen or any(not w.critical.asleep for w in others) or len(frozen) * 2 < len(f.live_workers):
        return None
    case = stuck(look, "stuck.fork-lock")
    case.pids, case.who = [w.pid for w in frozen], f"{len(frozen)} workers (first PID {frozen[0].pid})"
    case.yes(
        not others,
        4,
        f"all {len(frozen)} workers sleep on a lock without a time-out and never wake",
        "wchan, schedstat",
        frozen[0].critical.wait.raw,
    )
    case.yes(
        others, 2, f"{len(frozen)} of {len(f.live_workers)} workers sleep on a lock and never wake", "wchan, schedstat"
    )
    same = len(frozen) > 1 and len({w.critical.wait.uaddr for w in frozen}) == 1 and frozen[0].critical.wait.uaddr
    case.yes(same, 1.5, "all at the same address: one lock, copied while held", "syscall")
    forked = all(w.kind == "fork" for w in frozen)
    case.yes(
        forked,
        1,
        "they are forks of the trainer: a lock held by another thread at the fork stays locked for ever",
        "children",
    )
    case.yes(
        f.log is not None and "tokenizers-fork" in f.log.notes,
        2,
        "the log warns of a fork after parallelism was used",
        "log",
    )
    stack = next((x for w in frozen for x in f.stack_frames(w)[:3]), None)
    case.yes(stack, 0.5, "all in " + (stack or ""), "py-spy")
    case.yes(trainers_wait(f), 1.5, "the trainer waits for them", "wchan")
    risky = {"gomp", "cv2", "tokenizers", "h5py", "mkl"} & (f.main.libs if f.main else set())
    case.yes(risky, 0.5, f"libraries that do not survive a fork are loaded: {', '.join(sorted(risky))}", "maps")
    case.no(
        any(w.readings and any(r.moved for r in w.readings) for w in f.live_workers), 4, "workers read data", "fdinfo"
    )
    case.no(
        any(w.critical.wait.family == "pipe-read" for w in others),
        4,
        "one worker holds the queue's lock and waits for work: an idle pool",
        "wchan",
    )
    return case


def deadlock(look: Look) -> Case | None:
    f = look.f
    if not f.alive or f.main is None or not f.trainers:
        return None
    locked = [p for p in f.trainers if _sleeping_lock(p.critical)]
    stack = frames(f)
    profiler = next((x for x in stack if re.search("cupti|kineto", x)), None)
    ring = ring_of(f)
    if not locked and not ring and not (profiler and trainers_wait(f)):
        return None
    case = stuck(look, "stuck.deadlock")
    one = (locked or f.trainers)[0]
    case.who, case.pids = one.label, [one.pid]
    awake = [
        t
        for t in one.threads
        if (not t.asleep or t.wait.timed)
        and t.role not in ("nccl-watchdog", "nccl-heartbeat", "runtime", "tracker", "cuda")
    ]
    seen = all(t.wakeups is not None for t in one.threads)
    case.yes(
        locked and not awake,
        3.5 if seen else 2,
        f"none of its {len(one.threads)} threads ran or woke at all",
        "stat, schedstat",
    )
    case.yes(
        locked and awake, 0.5, "its main thread sleeps on a lock and never wakes", "schedstat", one.critical.wait.raw
    )
    case.yes(locked, 1.5, "the main thread waits on a lock without a time-out", "syscall, wchan", one.critical.wait.raw)
    spots = [t.wait.uaddr for t in one.threads if t.wait.family == "futex" and t.wait.uaddr]
    shared = len([u for u in spots if u == one.critical.wait.uaddr]) > 1
    case.yes(shared, 2, "several threads wait for the same lock", "syscall")
    case.yes(len(spots) > 1 and not shared, 0.5, "several threads wait for locks", "syscall")
    case.yes(
        stack and re.search(r"acquire|lock|__enter__|join|wait", stack[0]),
        1.5,
        "its innermost frame is " + (stack[0] if stack else ""),
        "py-spy",
    )
    case.yes(profiler, 2.5, "it is inside the profiler library", "py-spy", profiler)
    if ring:
        case.who, case.values["lock_words"] = ring.label, f"it and {ring.label} wait for each other over two pipes"
        case.yes(True, 6, f"it waits for {ring.label} over a pipe, and that one for it", "syscall, fd")
    ended = f.log is not None and f.log.error is not None and f.log.error.final and f.log.error.kind == "exception"
    case.no(ended, 5, "the log ends in an exception: the main thread is over, other threads are left", "log")
    case.yes(f.gpu.used and f.gpu.idle, 1, f.gpu.words, "nvml")
    waiting = [
        t
        for t in one.threads
        if t.wait.family in ("socket", "connect", "accept", "tty", "lock", "child", *_REMOTE) and t.role != "tracker"
    ]
    case.no(waiting, 1.5, f"a thread waits for something outside: {waiting[0].wait.words if waiting else ''}", "wchan")
    case.no(f.workers, 3.5, "there are loader workers: it may wait for them", "children")
    case.no(gpu_unseen(f), 2.5, "the GPU could be at work and cannot be seen", "nvml")
    case.no(f.distributed, 2.5, "it is one of several ranks: it may wait for them", "job")
    case.no(
        f.training is False, 3, "it does not look like a training process: it may be idle by design", "cmdline, maps"
    )
    case.no(f.log and (f.log.ended or f.log.at_last_step), 3, "training has ended", "log")
    return case


RULES: list[Rule] = [
    stopped,
    terminal_input,
    stdout_pipe,
    lock_file,
    worker_dead,
    fork_lock,
    deadlock,
    *HOST_RULES,
    *RANK_RULES,
]
