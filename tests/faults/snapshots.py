"""A small kit to write snapshots by hand: say what a process did, get the JSON the probe would have printed.

Threads are written as they look (snapshot_threads.py). Three looks at 0, 1 and 3 s;
counters follow from rates. The schema is docs/why-snapshot.md.
"""

from __future__ import annotations

import base64
from typing import Any

from snapshot_blank import blank
from snapshot_threads import GB, IDLE_POOL, NOW, PIN, TIMES, Json, look, main_stack, open_file, thread, usual_threads

__all__ = ["GB", "IDLE_POOL", "NOW", "PIN", "Snap", "thread"]


class Snap:
    def __init__(self, asked: str = "4242", cpus: int = 32, mem: int = 256 * GB, **meta: Any) -> None:
        self.d: Json = blank(asked, cpus, mem, **meta)
        self.mount("21", "/", "ext4", "nvme0n1", used_by=["cwd", "tmp"])

    # ---- processes
    def proc(
        self,
        pid: int,
        kind: str,
        threads: list[Json],
        *,
        comm: str = "python",
        ppid: int = 1,
        age: float = 7200.0,
        cmd: str | None = None,
        io: Json | None = None,
        state: str | None = None,
        rss: int = 4 * GB,
        rss_slope: float = 0.0,
        libs: str = "torch numpy",
        env: Json | None = None,
        fds: Json | None = None,
        majflt: float = 0.0,
        minflt: float = 50.0,
        swap: int = 0,
        tracer: int = 0,
        unbuffered: bool = True,
        cgroup: str | None = None,
        rank: int | None = None,
        stdout: Json | None = None,
        until: int = 3,
        cpus_allowed: int | None = None,
    ) -> None:
        cmdline = (cmd or "python train.py").split()
        out = stdout or {"path": "/home/kim/run/train.log", "kind": "file"}
        self.d["processes"][str(pid)] = {
            "comm": comm,
            "ppid": ppid,
            "kind": kind,
            "uid": 1000,
            "user": "kim",
            "starttime": 1.0,
            "age_s": age,
            "cmdline": cmdline,
            "cwd": "/home/kim/run",
            "visible": dict.fromkeys(("io", "fd", "syscall", "wchan", "environ", "maps"), True),
            "environ": env or {},
            "python": (
                {"unbuffered_flag": False, "unbuffered_env": unbuffered, "script": "train.py", "module": None}
                if comm.startswith(("python", "pt_"))
                else {}
            ),
            "libs": libs.split(),
            "memory": {"rss": rss, "swap": swap},
            "stdin": {"path": "/dev/null", "kind": "null"},
            "stdout": out,
            "stderr": out,
            "cgroup": cgroup,
            "cpus_allowed": cpus_allowed or self.d["meta"]["cpus"],
            "training": {"score": 90, "why": []},
        }
        self.d["job"]["members"].append(pid)
        self.d["job"]["kinds"][str(pid)] = kind
        if rank is not None:
            self.d["job"]["ranks"].append({"pid": pid, "rank": rank, "local_rank": rank, "by": "env"})
        for n, t in enumerate(threads):
            t.setdefault("uaddr", 0x50000000 + pid * 4096 + n * 64)
        total = sum(t["cpu"] for t in threads)
        for i, t in enumerate(TIMES[:until]):
            main = look(threads[0], i, t)
            self.d["samples"][i]["procs"][str(pid)] = {
                "stat": {
                    "state": state or main["state"],
                    "ppid": ppid,
                    "utime": 100 + total * 0.9 * t,
                    "stime": 10 + total * 0.1 * t,
                    "majflt": 10 + majflt * t,
                    "minflt": 1000 + minflt * t,
                    "threads": len(threads),
                    "rss": rss + rss_slope * t,
                },
                "status": {
                    "State": state or main["state"],
                    "VmRSS": rss,
                    "VmSwap": swap,
                    "TracerPid": tracer,
                    "voluntary": 100 + threads[0]["wakeups"] * t,
                },
                "io": {
                    k: 10**9 + float((io or {}).get(k, 0)) * t
                    for k in ("rchar", "wchar", "syscr", "syscw", "read_bytes", "write_bytes")
                },
                "sched": {"run_s": main["run_s"], "wait_s": main["wait_s"], "slices": main["slices"]},
                "wchan": main["wchan"],
                "syscall": main["syscall"],
                "threads": {
                    str(pid + n * 1000 if n else pid): {**look(x, i, t), "comm": comm if not n else x["comm"]}
                    for n, x in enumerate(threads)
                },
                "fds": {n: open_file(fd, i) for n, fd in (fds or {}).items() if i in fd.get("at", (0, 1, 2))},
            }

    def trainer(
        self,
        looks: str | list[str],
        cpu: float = 0.0,
        wakeups: float = 0.0,
        extra: list[Json] | None = None,
        *,
        cuda: bool = True,
        main: Json | None = None,
        **more: Any,
    ) -> None:
        """The main process of the target with the usual threads."""
        more.setdefault("libs", "torch numpy" + (" cuda" if cuda else ""))
        pid = more.pop("pid", 4242)
        self.proc(
            pid,
            more.pop("kind", "main"),
            [thread(looks, cpu=cpu, wakeups=wakeups, **(main or {})), *usual_threads(cuda), *(extra or [])],
            **more,
        )

    def workers(
        self,
        count: int,
        looks: Any,
        cpu: float = 0.0,
        wakeups: float = 0.0,
        first: int = 4301,
        parent: int = 4242,
        uaddr: int | None = None,
        waits: float = 0.0,
        **more: Any,
    ) -> None:
        """Loader workers. `looks` and `fds` may be functions of the worker's number."""
        fds, state = more.pop("fds", None), more.pop("state", None)
        for n in range(count):
            seen = looks(n) if callable(looks) else looks
            held = fds(n) if callable(fds) else fds
            self.proc(
                first + n,
                more.get("kind", "fork"),
                [thread(seen, cpu=cpu, wakeups=wakeups, waits=waits, **({"uaddr": uaddr} if uaddr else {}))],
                ppid=parent,
                fds=held,
                state=state,
                **{k: v for k, v in more.items() if k != "kind"},
            )

    # ---- the rest
    def log(self, text: str, age: float, growth: int = 0, path: str = "/home/kim/run/train.log", **more: Any) -> None:
        data = text.encode()
        size = more.pop("size", len(data))
        mtime = NOW + TIMES[-1] - age
        self.d["logs"].append(
            {
                "path": path,
                "how": "fd1",
                "pid": 4242,
                "fd": 1,
                "kind": "file",
                "size": size,
                "mtime": mtime,
                "age_s": age,
                "deleted": False,
                "rotated": False,
                "append": True,
                "head": None,
                "tail": {"offset": max(0, size - len(data)), "b64": base64.b64encode(data).decode()},
                "growth": [size - growth, size - growth // 2, size],
                "via": None,
                "mnt": "21",
                "error": None,
                **more,
            }
        )

    def mount(
        self, key: str, point: str, fstype: str, device: str | None = None, free: int = 10**12, **more: Any
    ) -> None:
        size = more.pop("size", 4 * 10**12)
        self.d["mounts"][key] = {
            "mountpoint": point,
            "fstype": fstype,
            "source": more.pop("source", f"/dev/{device}" if device else "server:/export"),
            "dev": "0:1",
            "device": device,
            "network": fstype in ("nfs4", "nfs", "lustre", "ceph", "cifs"),
            "fuse": fstype.startswith("fuse"),
            "ro": False,
            "used_by": more.pop("used_by", ["data"]),
            "statvfs": {
                "size": size,
                "free": free,
                "avail": free,
                "files": 10**8,
                "ffree": more.pop("ffree", 9 * 10**7),
            },
            "timed_out": False,
            **more,
        }

    def disk(self, device: str, read_rate: float, busy: float, await_ms: float = 8.0) -> None:
        reads = read_rate / 131072
        self.counter(
            f"disks/{device}",
            reads=reads,
            read_bytes=read_rate,
            read_ms=reads * await_ms,
            busy_ms=1000 * busy,
            queue_ms=10,
        )
        for sample in self.d["samples"]:
            sample["host"]["disks"][device]["in_flight"] = 4 if busy > 0.5 else 0

    def data_file(
        self, path: str, size: int, mnt: str = "21", cached: float | None = None, role: str = "data", **more: Any
    ) -> None:
        self.d["files"][path] = {
            "pids": [],
            "fds": [],
            "size": size,
            "mtime": NOW - 86400,
            "mnt": mnt,
            "cached": cached,
            "cached_by": "cachestat",
            "role": role,
            **more,
        }

    def gpu(
        self,
        util: float | list[float],
        power: float,
        limit: float = 700.0,
        mem: int = 30 * GB,
        pids: list[int] | None = None,
        index: int = 0,
        name: str = "NVIDIA H100 80GB HBM3",
        sm: float = 0.95,
        reasons: list[str] | None = None,
        total: int = 80 * GB,
        pcie: float = 500_000,
        temp: float = 60,
        **more: Any,
    ) -> None:
        utils = util if isinstance(util, list) else [util, util]
        gpu = self.d["gpu"]
        gpu.update(status="ok", tool="nvml", error=None, driver="570", cuda="12.8")
        gpu["gpus"].append(
            {
                "index": index,
                "uuid": f"GPU-{index}",
                "name": name,
                "bus": "0",
                "samples": [
                    {
                        "t": t,
                        "util": u,
                        "mem_util": u / 2,
                        "mem_used": mem,
                        "mem_total": total,
                        "power_w": power,
                        "power_limit_w": limit,
                        "sm_mhz": 1980 * sm,
                        "sm_max_mhz": 1980,
                        "temp": temp,
                        "pstate": "P0",
                        "reasons": reasons or [],
                        "pcie_rx_kbs": pcie,
                        "pcie_tx_kbs": pcie / 10,
                    }
                    for t, u in zip((0.2, 2.2), utils, strict=True)
                ],
                "ecc_uncorrected": 0,
                "recovery": None,
                "lost": False,
                "mig": False,
                **more,
            }
        )
        for pid in pids or [4242]:
            gpu["processes"].append(
                {
                    "gpu": index,
                    "pid": pid,
                    "mem": mem,
                    "sm_util": util if isinstance(util, float | int) else None,
                    "comm": "python",
                    "member": True,
                    "alive": True,
                }
            )

    def counter(self, where: str, **rates: float) -> None:
        """Counters below samples[i].host, e.g. counter("vmstat", pswpin=2000)."""
        for s in self.d["samples"]:
            node = s["host"]
            for key in where.split("/"):
                node = node.setdefault(key, {})
            node.update({k: 1000 + v * s["t"] for k, v in rates.items()})

    def socket(self, pid: int, fd: int, peer: str, pport: int, state: str = "ESTABLISHED", **more: Any) -> None:
        self.d["sockets"].append(
            {
                "inode": 70000 + fd,
                "pid": pid,
                "fd": fd,
                "proto": "tcp",
                "state": state,
                "local": "10.0.0.7",
                "lport": 40000 + fd,
                "peer": peer,
                "pport": pport,
                "tx_queue": 0,
                "rx_queue": 0,
                "retrans": 0,
                "peer_pid": None,
                **more,
            }
        )

    def stack(self, pid: int, *frames: str) -> None:
        """Frames innermost first, each "func file:line"."""
        self.d["stacks"][str(pid)] = {"status": "ok", "threads": [main_stack(pid, frames)]}

    def output(
        self, path: str, size: int, growth: int = 0, kind: str = "checkpoint", age: float = 0.0, **more: Any
    ) -> None:
        self.d["outputs"].append(
            {
                "path": path,
                "size": size,
                "mtime": NOW - age,
                "age_s": age,
                "growth": [size - growth, size - growth // 2, size],
                "open_by": 4242,
                "tmp": False,
                "kind": kind,
                **more,
            }
        )

    def cache(self, name: str, growth: int = 0, age: float = 1.0, **more: Any) -> None:
        self.d["caches"].append(
            {
                "name": name,
                "path": f"/home/kim/.cache/{name}",
                "entries": 200 + growth,
                "mtime": NOW - age,
                "age_s": age,
                "newest": "x",
                "growth": [200, 200 + growth // 2, 200 + growth],
                "locks": [],
                "incomplete": [],
                **more,
            }
        )

    def ended(self, exit_code: int | None = None, zombie: bool = False, **ended: Any) -> None:
        """The process is gone (or a zombie)."""
        self.d["target"].update(
            exists=zombie,
            zombie=zombie,
            exit_code=exit_code,
            ended={"by": "zombie" if zombie else "pid gone", "oom_since": None, "core_files": [], **ended},
        )
        if not zombie:
            self.d["processes"].clear()
            self.d["job"]["main"] = None
            for s in self.d["samples"]:
                s["procs"].clear()
