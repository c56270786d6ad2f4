"""The wait chain: from the main thread to what it waits for in the end.

main thread -> pipe, queue or lock -> worker -> system call and descriptor -> file and offset -> mount -> device; or to
the holder of a lock, a child, a peer rank, a TCP port. Every link is a dict with `words` and, for the doubtful, `raw`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from eyas.why.facts import Facts
from eyas.why.locks import Awaited, awaited, in_the_way, naps
from eyas.why.procs import Proc, Thread
from eyas.why.ranks import Split, doing
from eyas.why.recorder import read_recorder
from eyas.why.storage import mount_of
from eyas.why.waits import Wait, is_storage

Link = dict[str, Any]
_MANY = 6  # links at most after the first


def size(n: float | None) -> str:
    """Bytes for people."""
    if n is None:
        return "?"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= scale:
            return f"{n / scale:.1f} {unit}" if n < 100 * scale else f"{n / scale:.0f} {unit}"
    return f"{n:.0f} B"


def build(f: Facts, ranks: Split | None) -> list[Link]:
    """The chain of the process that the run hangs on."""
    if f.main is None or not f.alive:
        return []
    start = f.main
    links = [
        _thread_link(start, start.critical, "main thread of" if start.critical is start.main else "busiest thread of")
    ]
    seen = {start.pid}
    if (
        ranks is not None
        and ranks.odd
        and start not in ranks.odd
        and doing(f, start) in ("waiting", "spinning", "computing")
    ):
        links.append(
            _link(
                "rank",
                f"waits with {len(f.ranks) - len(ranks.odd)} rank(s) for {ranks.odd_words}",
                pid=ranks.odd[0].pid,
            )
        )
        start = ranks.odd[0]
        seen.add(start.pid)
        links.append(_thread_link(start, start.critical, "main thread of"))
    recorded = read_recorder(f)
    if recorded is not None and recorded.first is not None:
        links.append(_link("collective", recorded.first.words, source="Flight Recorder"))
    links += _follow(f, start, start.critical, seen, depth=0)
    return links[: _MANY + 2]


def _link(
    kind: str,
    words: str,
    *,
    pid: int | None = None,
    tid: int | None = None,
    raw: str | None = None,
    source: str | None = None,
) -> Link:
    return {"kind": kind, "words": words, "pid": pid, "tid": tid, "raw": raw, "source": source}


def _thread_link(proc: Proc, thread: Thread, who: str) -> Link:
    wait = thread.wait
    cpu = "" if thread.cpu is None else f", {100 * thread.cpu:.0f} % CPU"
    return _link(
        "thread",
        f"{who} {proc.label} is {wait.words}{cpu}",
        pid=proc.pid,
        tid=thread.tid,
        raw=wait.raw,
        source=f"/proc/{proc.pid}/task/{thread.tid}/{{stat,wchan,syscall}}",
    )


def _follow(f: Facts, proc: Proc, thread: Thread, seen: set[int], depth: int) -> list[Link]:
    wait = thread.wait
    if depth > 4:
        return []
    lock = awaited(f, proc)
    if lock is not None and (wait.family in ("run", "lock") or thread is proc.main):
        return _to_lock(f, lock, seen, depth)
    if wait.family == "run":
        return _from_running(f, proc)
    if wait.family in ("pipe-read", "pipe-write", "poll", "epoll", "futex", "hidden", "sleep", "event"):
        via_pipe = _over_pipe(f, proc, wait, seen, depth)
        if via_pipe:
            return via_pipe
        if wait.family == "pipe-write":
            return []
        beyond = _to_workers(f, proc, seen, depth) or _inside(f, proc, wait)
        obstacle = in_the_way(f, proc) if not beyond and naps(proc) else None
        return _to_lock(f, obstacle, seen, depth) if obstacle else beyond
    if wait.family == "child":
        return _to_child(f, proc, wait, seen, depth)
    if wait.family == "lock":
        return [_link("lock", f"a file lock on {wait.path or 'a file'}; the holder was not seen", raw=wait.raw)]
    if wait.family in ("socket", "connect", "accept"):
        return _to_peer(f, proc, wait)
    if is_storage(wait.family):
        return _to_file(f, proc, wait)
    if wait.family == "gpu":
        return [_link("device", "the GPU driver" + (f": {wait.path}" if wait.path else ""), raw=wait.wchan)]
    return []


def _from_running(f: Facts, proc: Proc) -> list[Link]:
    frames = f.stack_frames(proc)
    if frames:
        return [_link("code", "in " + " <- ".join(frames[:3]), pid=proc.pid, source="py-spy")]
    compilers = [p for p in f.of_kind("compile_worker", "compiler") if (p.cpu or 0) > 0.05]
    if compilers:
        return [_link("child", f"compiler {compilers[0].label} works beside it", pid=compilers[0].pid)]
    moving = [r for r in proc.readings if r.moved or r.fresh]
    if moving:
        return _file_links(f, moving[0].path, moving[0].pos)
    return []


def _over_pipe(f: Facts, proc: Proc, wait: Wait, seen: set[int], depth: int) -> list[Link]:
    """Blocked on one end of a pipe: go to the other end, if it is one process that we see."""
    if wait.kind not in ("pipe", "fifo") or wait.fd is None:
        return []
    inode = _inode(proc, wait)
    pipe: Any = next((p for p in f.snap.get("pipes") or [] if inode is not None and p.get("inode") == inode), None)
    if pipe is None:
        return []
    writes = wait.family == "pipe-write"
    ends = pipe.get("readers" if writes else "writers") or []
    others = [int(e["pid"]) for e in ends if e.get("pid") not in (proc.pid, None)]
    queued = f", {pipe['queued']} bytes queued" if pipe.get("queued") is not None else ""
    side = "reader" if writes else "writer"
    if not others:
        return [_link("pipe", f"pipe:[{inode}] has no other {side}{queued}", raw=f"fd {wait.fd}")]
    live = [f.procs[p] for p in others if p in f.procs and p not in seen]
    if not live:
        known = ", ".join(f"PID {p}" for p in others[:3])
        return [_link("pipe", f"pipe:[{inode}] whose {side} is {known}{queued}", raw=f"fd {wait.fd}", pid=others[0])]
    links = [
        _link("pipe", f"pipe:[{inode}] whose {side} is {_crowd(live)}{queued}", raw=f"fd {wait.fd}", pid=live[0].pid)
    ]
    if not writes and any(p.kind in ("fork", "spawned") for p in live):
        return links + _to_workers(f, proc, seen, depth)
    seen.add(live[0].pid)
    return [
        *links,
        _thread_link(live[0], live[0].critical, "main thread of"),
        *_follow(f, live[0], live[0].critical, seen, depth + 1),
    ]


def _inode(proc: Proc, wait: Wait) -> int | None:
    found = re.search(r"pipe:\[(\d+)\]", wait.path or "")
    if found:
        return int(found.group(1))
    fd = proc.fds.get(wait.fd if wait.fd is not None else -1) or {}
    inode = fd.get("inode")
    return int(inode) if inode is not None else None


def _to_workers(f: Facts, proc: Proc, seen: set[int], depth: int) -> list[Link]:
    """Loader workers, grouped by what they do; the chain goes on with the group that does the work."""
    workers = f.workers_of(proc)
    if not workers:
        return []
    dead = [w for w in workers if w.zombie or w.gone]
    live = [w for w in workers if w not in dead]
    if dead:
        return [
            _link(
                "worker",
                f"{len(dead)} of {len(workers)} workers dead: {_crowd(dead)}",
                pid=dead[0].pid,
                raw=f"state {dead[0].state}",
            )
        ]
    groups = Counter(_work(w) for w in live)
    words = ", ".join(f"{count} {what}" for what, count in groups.most_common())
    busy = [w for w in live if _work(w) not in ("idle (waiting for work)", "waiting on a lock")]
    link = _link("worker", f"{len(live)} loader worker(s): {words}", pid=(busy or live)[0].pid)
    if not busy:
        return [link]
    chosen = max(busy, key=lambda w: (is_storage(w.critical.wait.family), len(w.readings), w.cpu or 0.0))
    seen.add(chosen.pid)
    thread = chosen.critical
    stored = thread.ever("disk", "nfs", "fuse", "lustre", "swap", "metadata", "read")
    links = [link, _thread_link(chosen, thread, "worker")]
    if stored is not None or (chosen.readings and thread.wait.family == "run"):
        return links + _to_file(f, chosen, stored or thread.wait)
    return links + _follow(f, chosen, thread, seen, depth + 1)


def _work(worker: Proc) -> str:
    family = worker.critical.wait.family
    stored = worker.critical.ever("disk", "nfs", "fuse", "lustre", "swap")
    if stored is not None:
        return "in file reads"
    if family == "run" or (worker.cpu or 0) > 0.3:
        return "busy on a CPU"
    if family == "futex":
        return "waiting on a lock"
    if family in ("poll", "pipe-read", "epoll"):
        return "idle (waiting for work)"
    return worker.critical.wait.words


def _inside(f: Facts, proc: Proc, wait: Wait) -> list[Link]:
    """No other process in sight: look for the thread of this process that does something."""
    if wait.family == "futex" and wait.uaddr is not None:
        same = [t for t in proc.threads if t.wait.uaddr == wait.uaddr and t.tid != proc.critical.tid]
        if same:
            return [
                _link(
                    "lock",
                    f"the lock at {wait.uaddr:#x} is awaited by {len(same) + 1} threads",
                    raw=wait.raw,
                    pid=proc.pid,
                )
            ]
    busy = [
        t for t in proc.threads if t.tid != proc.critical.tid and ((t.cpu or 0) > 0.05 or is_storage(t.wait.family))
    ]
    if busy:
        chosen = max(busy, key=lambda t: (is_storage(t.wait.family), t.cpu or 0))
        links = [_thread_link(proc, chosen, f"thread {chosen.comm} ({chosen.role}) of")]
        return links + (_to_file(f, proc, chosen.wait) if is_storage(chosen.wait.family) else [])
    net = [t for t in proc.threads if t.wait.family in ("socket", "connect")]
    return _to_peer(f, proc, net[0].wait) if net else []


def _to_child(f: Facts, proc: Proc, wait: Wait, seen: set[int], depth: int) -> list[Link]:
    children = [
        p
        for p in f.procs.values()
        if p.ppid == proc.pid and p.pid not in seen and p.kind not in ("resource_tracker", "tracker")
    ]
    wanted = [p for p in children if p.pid == wait.pid] or sorted(children, key=lambda p: -(p.cpu or 0.0))
    if not wanted:
        return [_link("child", "a child process that was not seen", pid=wait.pid)]
    child = wanted[0]
    seen.add(child.pid)
    return [
        _thread_link(child, child.critical, f"child ({child.kind})"),
        *_follow(f, child, child.critical, seen, depth + 1),
    ]


def _to_lock(f: Facts, lock: Awaited, seen: set[int], depth: int) -> list[Link]:
    holder = lock.holder
    link = _link(
        "lock",
        f"lock {lock.path or 'on a file that was not seen'}, {lock.words}",
        pid=holder.pid if holder else None,
        raw=holder.lock or holder.cmd[:120] or None if holder else None,
        source={"blocked": "/proc/locks", "polled": "inotify, fdinfo", "exists": "stat, fd"}[lock.how],
    )
    next_one = f.procs.get(holder.pid) if holder is not None and holder.member else None
    if next_one is None or next_one.pid in seen:
        return [link]
    seen.add(next_one.pid)
    return [
        link,
        _thread_link(next_one, next_one.critical, "main thread of"),
        *_follow(f, next_one, next_one.critical, seen, depth + 1),
    ]


def _to_peer(f: Facts, proc: Proc, wait: Wait) -> list[Link]:
    sockets = [
        s for s in f.snap.get("sockets") or [] if s.get("pid") == proc.pid and str(s.get("proto", "")).startswith("tcp")
    ]
    chosen = next((s for s in sockets if wait.fd is not None and s.get("fd") == wait.fd), None)
    chosen = chosen or next((s for s in sockets if s.get("state") in ("SYN_SENT", "ESTABLISHED")), None)
    if chosen is None:
        return []
    peer = f.procs.get(int(chosen["peer_pid"])) if chosen.get("peer_pid") else None
    whom = f", that is {peer.label}" if peer else f", PID {chosen['peer_pid']}" if chosen.get("peer_pid") else ""
    return [
        _link(
            "tcp",
            f"TCP {chosen.get('peer')}:{chosen.get('pport')} ({chosen.get('state')}){whom}",
            pid=chosen.get("peer_pid"),
            source="/proc/net/tcp",
        )
    ]


def _to_file(f: Facts, proc: Proc, wait: Wait) -> list[Link]:
    path = wait.path if wait.kind in ("file", "dir", "shm", None) else None
    reading = next((r for r in proc.readings if r.path == path), None) or next(
        (r for r in proc.readings if r.moved or r.fresh), None
    )
    reading = reading or next(iter(proc.readings), None)
    path = path or (reading.path if reading else None)
    if path is None:
        return [_link("file", f"{wait.words}; the file was not seen", raw=wait.raw)]
    return _file_links(f, path, reading.pos if reading and reading.path == path else None)


def _file_links(f: Facts, path: str, pos: int | None) -> list[Link]:
    info = (f.snap.get("files") or {}).get(path) or {}
    at = f" at offset {size(pos)}" if pos is not None else ""
    whole = f" of {size(info.get('size'))}" if info.get("size") and pos is not None else ""
    cached = f", {100 * float(info['cached']):.0f} % of it in the page cache" if info.get("cached") is not None else ""
    links = [_link("file", f"{path}{at}{whole}{cached}", source="fdinfo")]
    mount = f.mounts.get(str(info.get("mnt"))) or mount_of(path, f.mounts)
    if mount is not None:
        data = f.data if f.data.mount is mount else None
        disk = data.disk if data else {}
        busy = (
            f", busy {100 * min(1.0, disk['busy']):.0f} % of the time, {disk['await_ms']:.1f} ms a read"
            if "await_ms" in disk and "busy" in disk
            else ""
        )
        rate = f", {size(data.rate)}/s for this job" if data and data.rate else ""
        links.append(_link("mount", f"{mount.words}{rate}{busy}", source="mountinfo, diskstats"))
    return links


def _crowd(procs: list[Proc]) -> str:
    names = ", ".join(str(p.pid) for p in procs[:4]) + (f" and {len(procs) - 4} more" if len(procs) > 4 else "")
    return f"{procs[0].kind} {names} ({procs[0].comm})"
