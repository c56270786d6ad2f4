"""The snapshot of a host on which nothing happens; snapshots.py fills it in."""

from __future__ import annotations

from typing import Any

from snapshot_threads import NOW, TIMES, Json


def blank(asked: str, cpus: int, mem: int, **meta: Any) -> Json:
    d: Json = {
        "schema": "eyas.snapshot/1",
        "meta": {
            "host": "gpu7",
            "kernel": "6.8.0",
            "arch": "x86_64",
            "cpus": cpus,
            "page_size": 4096,
            "python": "3.11",
            "boot_id": "b",
            "uptime_s": 900000.0,
            "boot_time": NOW - 900000,
            "uid": 1000,
            "user": "kim",
            "root": False,
            "caps": [],
            "yama": 1,
            "hidepid": False,
            "container": False,
            "started": NOW,
            "took_s": 3.2,
            "cpu_s": 0.02,
            "sample_times": list(TIMES),
            "via": "local",
            "reduced": False,
            "clock_offset_s": 0.0,
            "redacted": False,
            **meta,
        },
        "target": {
            "asked": asked,
            "kind": "pid",
            "host": None,
            "pid": 4242,
            "exists": True,
            "zombie": False,
            "exit_code": None,
            "how": "given",
            "alternatives": [],
            "same_user": True,
            "kernel_thread": False,
            "ours": True,
            "name": "train.py",
            "ended": None,
            "note": None,
        },
        "job": {
            "main": 4242,
            "launcher": None,
            "launcher_nproc": None,
            "world_size": None,
            "members": [],
            "ranks": [],
            "kinds": {},
            "edges": [],
            "by": "children",
        },
        "processes": {},
        "died": [],
        "mounts": {},
        "files": {},
        "datasets": [],
        "logs": [],
        "outputs": [],
        "caches": [],
        "sockets": [],
        "listening": [],
        "locks": [],
        "lockfiles": [],
        "pipes": [],
        "cgroups": {},
        "gpu": {"status": "absent", "gpus": [], "processes": []},
        "host": {
            "pressure": {k: {"some": {"avg10": 0.0}, "full": {"avg10": 0.0}} for k in ("cpu", "memory", "io")},
            "mem": {"total": mem, "available": int(mem * 0.7), "free": int(mem * 0.2), "cached": int(mem * 0.45)},
            "load": [4.0, 4.0, 4.0],
        },
        "kernel_log": {"readable": False, "lines": []},
        "nccl": {"ras": {"status": "absent"}, "dumps": []},
        "slurm": {"job": None, "tools": False, "state": None, "text": {}},
        "stacks": {},
        "deep": {},
        "not_visible": [],
        "probes_timed_out": [],
        "errors": [],
    }
    d["samples"] = [
        {
            "t": t,
            "wall": NOW + t,
            "procs": {},
            "logs": {},
            "outputs": {},
            "caches": {},
            "host": {"vmstat": {"oom_kill": 0}, "disks": {}, "cgroups": {}, "net": {}, "ib": {}},
        }
        for t in TIMES
    ]
    return d
