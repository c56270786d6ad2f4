"""Who belongs to a job beyond what names tell: ranks started by the program itself, helpers, and what feeds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eyas.why.procs import Proc

_TALKS = {"gloo", "nccl", "nccl-watchdog", "nccl-heartbeat"}
_NO_HELPER = (
    "resource_tracker",
    "tracker",
    "prober",
    "tee",
    "reader",
    "compiler",
    "compile_worker",
    "launcher",
    "rank",
)


def promoted(snap: Mapping[str, Any], procs: dict[int, Proc]) -> tuple[dict[int, Proc], list[int]]:
    """The processes, and the PIDs of ranks that a plain Python parent started (mp.spawn, subprocess.Popen).

    Children are ranks when their environment numbers them, or when they run communication threads and are connected
    with each other. Loader workers do neither.
    """
    job = snap.get("job") or {}
    main = procs.get(int(job.get("main") or 0))
    if main is None or job.get("ranks") or main.zombie:
        return procs, []
    children = [p for p in procs.values() if p.ppid == main.pid and p.kind in ("fork", "spawned", "other")]
    numbered = [p for p in children if (p.env("RANK") or "").isdigit() and p.env("RANK") != main.env("RANK")]
    if len({p.env("RANK") for p in numbered}) >= 2:
        found = {p.pid: int(p.env("RANK") or 0) for p in numbered}
    else:
        pids = {p.pid for p in children}
        pairs = {(s.get("pid"), s.get("peer_pid")) for s in snap.get("sockets") or []}
        joined = {a for a, b in pairs if a in pids and b in pids and a != b}
        talking = [p for p in children if any(t.role in _TALKS for t in p.threads)]
        if len(joined) < 2 or len(talking) < 2:
            return procs, []
        found = {p.pid: i for i, p in enumerate(sorted(talking, key=lambda p: p.pid))}
    return {
        pid: replace(p, kind="rank", rank=found[pid])
        if pid in found
        else replace(p, kind="launcher")
        if p is main
        else p
        for pid, p in procs.items()
    }, sorted(found, key=lambda pid: found[pid])


def company(procs: dict[int, Proc], trainers: list[Proc]) -> list[Proc]:
    """Descendants of the trainers that are no Python workers, and processes that feed their standard input."""
    ours = {p.pid for p in trainers}
    for _ in range(6):  # children of children
        ours |= {p.pid for p in procs.values() if p.ppid in ours}
    mine = {p.pid for p in trainers}
    return [
        p
        for p in procs.values()
        if p.pid not in mine
        and not (p.zombie or p.gone)
        and (p.kind == "feeder" or (p.pid in ours and p.kind in ("other", "shell") and p.kind not in _NO_HELPER))
    ]
