"""Hosts without a usable Python: a POSIX sh collector, and the snapshot made of what it prints.

It reads the safe files three times, then the command line, the descriptors and the tail of the log: enough to tell
alive from dead, stopped, waiting on a disk, a lock or a pipe. What it leaves out is said in `not_visible`.
"""

from __future__ import annotations

import base64
import re
import time
from typing import Any

from eyas.why import probe

# Variables nonce, kind and value are set in front of it. Sections: "@@NONCE name", then the bytes of a file.
SHELL_COLLECTOR = r"""
say() { printf '\n@@%s %s\n' "$nonce" "$1"; }
show() { if [ -r "$1" ]; then say "${2:-$1}"; cat "$1" 2>/dev/null; fi; }
pid=
case $kind in
pid) pid=$value ;;
name|search)
  for d in /proc/[0-9]*; do
    p=${d#/proc/}
    [ "$p" = "$$" ] && continue
    line=$(tr '\0' ' ' <"$d/cmdline" 2>/dev/null)
    case $kind:$line in
      search:*python*train*|search:*torchrun*) pid=$p; break ;;
      name:*eyas*why*) ;;
      name:*"$value"*) pid=$p; break ;;
    esac
  done ;;
esac
say begin; date +%s
say uname; uname -n; uname -r; uname -m
say ids; id -u; getconf CLK_TCK 2>/dev/null || echo 100; getconf PAGESIZE 2>/dev/null || echo 4096
show /proc/sys/kernel/random/boot_id
say pid; echo "$pid"
if [ -n "$pid" ] && [ -d "/proc/$pid" ]; then
  pids=$pid
  for c in $(cat /proc/$pid/task/*/children 2>/dev/null); do
    pids="$pids $c $(cat /proc/$c/task/$c/children 2>/dev/null)"
  done
  n=0
  for round in 0 1 2; do
    [ $round = 1 ] && sleep 1
    [ $round = 2 ] && sleep 2
    say "sample $round"; cat /proc/uptime
    for f in vmstat meminfo loadavg diskstats; do show /proc/$f "host $round $f"; done
    n=0
    for p in $pids; do
      n=$((n + 1)); [ $n -gt 40 ] && break
      for f in stat status wchan io syscall schedstat; do show /proc/$p/$f "proc $round $p $f"; done
      m=0
      for t in /proc/$p/task/*; do
        m=$((m + 1)); [ $m -gt 40 ] && break
        show "$t/stat" "task $round $p ${t##*/} stat"
        show "$t/wchan" "task $round $p ${t##*/} wchan"
        show "$t/syscall" "task $round $p ${t##*/} syscall"
      done
    done
  done
  for p in $pids; do
    say "fds $p"; ls -l /proc/$p/fd 2>/dev/null | head -300
    show /proc/$p/cgroup "cgroup $p"
  done
  say "fdinfo $pid"; for f in /proc/$pid/fdinfo/*; do echo "fd ${f##*/}"; head -3 "$f" 2>/dev/null; done
  for p in $pids; do say "cmdline $p"; tr '\0' '\n' <"/proc/$p/cmdline" 2>/dev/null | head -60; done
  log=$(readlink "/proc/$pid/fd/1" 2>/dev/null)
  case $log in
  /dev/*|"") log=$(readlink "/proc/$pid/fd/2" 2>/dev/null) ;;
  esac
  case $log in
  /dev/*|"") ;;
  /*) if [ -f "$log" ] && [ -r "$log" ]; then
      say log; echo "$log"; wc -c <"$log"; stat -c %Y "$log" 2>/dev/null || echo 0
      say logtail; tail -c 32768 "$log" | od -An -v -tx1
    fi ;;
  esac
fi
say end
"""

Sections = list[tuple[str, str]]


def split_sections(text: str, nonce: str) -> Sections:
    parts = re.split(r"(?:^|\n)@@" + re.escape(nonce) + r" ([^\n]*)\n", text)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def parse_shell(text: str, nonce: str, request: dict[str, Any]) -> dict[str, Any] | None:
    """The sh collector's output as a reduced snapshot; None when it did not even begin."""
    sections = split_sections(text, nonce)
    found = dict(sections)
    if "begin" not in found:
        return None
    uname = (found.get("uname", "") + "\n\n\n").splitlines()
    ids = [int(v) for v in found.get("ids", "").split() if v.isdigit()] + [0] * 3
    started = float(found["begin"].split()[0]) if found["begin"].split() else time.time()
    names = probe.syscall_names(uname[2].strip())
    samples, processes, kinds = _samples(sections, names, started, ids[1] or 100)
    pid = int(found["pid"]) if found.get("pid", "").strip().isdigit() else None
    main = str(pid)
    looks = [s["procs"][main] for s in samples if main in s["procs"]]
    alive = bool(looks)
    for key, entry in processes.items():
        lines = [line for line in found.get(f"cmdline {key}", "").splitlines() if line]
        entry["cmdline"] = probe.masked_args(lines) or None
        entry["kind"] = kinds[key] = "main" if key == main else _kind(entry, processes.get(str(entry["ppid"])))
        _add_fds(found, key, samples)
    logs = _log(found, pid, started)
    kernel, boot = uname[1].strip(), (found.get("/proc/sys/kernel/random/boot_id") or "").strip()
    uptime = next((float(b.split()[0]) for n, b in sections if n.startswith("sample") and b.split()), 0.0)
    zombie = alive and looks[-1]["stat"]["state"] in "ZX"
    return {
        "schema": probe.SCHEMA,
        "meta": {
            "host": uname[0].strip(),
            "kernel": kernel,
            "arch": uname[2].strip(),
            "cpus": None,
            "page_size": ids[2],
            "python": None,
            "boot_id": boot or None,
            "uptime_s": uptime,
            "boot_time": started - uptime,
            "uid": ids[0],
            "user": None,
            "root": ids[0] == 0,
            "caps": [],
            "yama": None,
            "hidepid": None,
            "container": None,
            "pid_ns": None,
            "started": started,
            "took_s": None,
            "cpu_s": None,
            "sample_cpu_s": [],
            "sample_times": [s["t"] for s in samples],
            "via": "sh",
            "reduced": True,
            "clock_offset_s": 0.0,
            "redacted": False,
        },
        "target": {
            "asked": request.get("asked"),
            "kind": request.get("kind"),
            "host": request.get("host"),
            "pid": pid,
            "starttime": looks[0]["stat"]["starttime"] if looks else None,
            "exists": alive,
            "zombie": zombie,
            "exit_code": looks[-1]["stat"]["exit_code"] if zombie else None,
            "how": "asked for" if pid else None,
            "alternatives": [],
            "same_user": looks[0]["status"].get("uids", [None])[0] == ids[0] if looks else None,
            "kernel_thread": False,
            "ours": None,
            "log": None,
            "run_dir": None,
            "name": None,
            "ended": None
            if alive and not zombie
            else {
                "by": "zombie" if zombie else "pid gone",
                "last_output": None,
                "log_age_s": None,
                "oom_since": None,
                "core_files": [],
            },
            "note": None if pid else "no such process found by the shell collector",
        },
        "job": {
            "main": pid if alive else None,
            "launcher": None,
            "launcher_nproc": None,
            "world_size": None,
            "members": [int(p) for p in processes],
            "left_out": 0,
            "ranks": [],
            "kinds": kinds,
            "edges": [],
            "by": "children",
        },
        "processes": processes,
        "samples": samples,
        "died": [],
        "mounts": {},
        "files": {},
        "datasets": [],
        "logs": logs,
        "outputs": [],
        "caches": [],
        "sockets": [],
        "listening": [],
        "locks": [],
        "lockfiles": [],
        "pipes": [],
        "cgroups": {},
        "gpu": {
            "status": "hidden",
            "tool": None,
            "error": None,
            "driver": None,
            "cuda": None,
            "gpus": [],
            "processes": [],
            "holders": {},
            "orphans": [],
        },
        "host": {"mem": samples[-1]["host"]["mem"], "load": samples[-1]["host"]["load"]} if samples else {},
        "kernel_log": {"readable": False, "lines": []},
        "nccl": {"ras": None, "dumps": []},
        "slurm": None,
        "stacks": {},
        "deep": {},
        "not_visible": [
            {
                "what": "GPU, cgroups, sockets, page cache, mounts, locks",
                "why": "no Python 3.6 or newer on that host",
                "needs": "a python3 on the PATH of the ssh session",
                "command": None,
            }
        ],
        "probes_timed_out": [],
        "errors": [] if "end" in found else ["the shell collector did not reach its end"],
    }


def _kind(entry: dict[str, Any], parent: dict[str, Any] | None) -> str:
    line = " ".join(entry["cmdline"] or [])
    if "multiprocessing.spawn" in line or "multiprocessing.forkserver" in line:
        return "spawned"
    if "resource_tracker" in line:
        return "resource_tracker"
    return "fork" if parent is not None and parent.get("comm") == entry["comm"] else "other"


def _rescale(stat: dict[str, Any], tick: int) -> dict[str, Any]:
    """Times in the ticks of that host, where they differ from ours."""
    factor = probe.TICK / tick
    for key in ("utime", "stime", "cutime", "cstime", "starttime"):
        stat[key] *= factor
    return stat


def _samples(
    sections: Sections, names: dict[int, str], started: float, tick: int
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, str]]:
    samples: list[dict[str, Any]] = []
    processes: dict[str, dict[str, Any]] = {}
    first = 0.0
    for name, body in sections:
        words = name.split()
        if words[:1] == ["sample"] and body.split():
            up = float(body.split()[0])
            first = first or up
            samples.append(
                {
                    "t": round(up - first, 2),
                    "wall": started + up - first,
                    "cpu_s": 0.0,
                    "procs": {},
                    "logs": {},
                    "outputs": {},
                    "caches": {},
                    "host": {
                        "vmstat": {},
                        "disks": {},
                        "pressure": {},
                        "load": None,
                        "mem": {},
                        "net": {},
                        "cgroups": {},
                    },
                }
            )
        elif not samples or len(words) < 3:
            continue
        elif words[0] == "host":
            _host(samples[-1]["host"], words[2], body)
        elif words[0] == "proc" and len(words) == 4:
            _proc(samples[-1]["procs"], processes, words[2], words[3], body, names, tick, samples[-1]["t"])
        elif words[0] == "task" and len(words) == 5 and words[2] in samples[-1]["procs"]:
            _task(samples[-1]["procs"][words[2]], words[3], words[4], body, names, tick)
    return samples, processes, {}


def _host(host: dict[str, Any], what: str, body: str) -> None:
    if what == "vmstat":
        host["vmstat"] = probe.pairs(body, probe.VMSTAT)
    elif what == "meminfo":
        host["mem"] = probe.parse_meminfo(body)
    elif what == "loadavg":
        host["load"] = [float(v) for v in body.split()[:3]]
    elif what == "diskstats":
        host["disks"] = probe.parse_diskstats(body)


def _proc(
    procs: dict[str, Any],
    processes: dict[str, Any],
    pid: str,
    what: str,
    body: str,
    names: dict[int, str],
    tick: int,
    now: float,
) -> None:
    if what == "stat":
        seen = probe.parse_stat(body.encode())
        if seen is None:
            return
        stat = _rescale(seen, tick)
        if stat["state"] not in "ZX":
            stat["exit_code"] = None
        procs[pid] = {
            "t": now,
            "stat": stat,
            "status": {},
            "io": None,
            "sched": None,
            "wchan": None,
            "syscall": None,
            "threads": {},
            "threads_left_out": 0,
            "fds": {},
            "denied": [],
        }
        processes.setdefault(
            pid,
            {
                "comm": stat["comm"],
                "ppid": stat["ppid"],
                "kind": "other",
                "starttime": stat["starttime"],
                "cmdline": None,
                "environ": None,
                "libs": None,
                "memory": {"rss": stat["rss"]},
                "training": {"score": 0, "why": []},
            },
        )
        return
    look = procs.get(pid)
    if look is None:
        return
    if what == "status":
        look["status"] = probe.parse_status(body.encode())
        processes[pid]["uid"] = look["status"].get("uids", [None])[0]
    elif what == "wchan":
        look["wchan"] = body.strip() if body.strip() not in ("", "0") else None
    elif what == "io":
        look["io"] = probe.pairs(body) or None
    elif what == "syscall":
        look["syscall"] = probe.parse_syscall(body.encode(), names)
    elif what == "schedstat" and len(body.split()) == 3:
        run, wait, slices = body.split()
        look["sched"] = {"run_s": int(run) / 1e9, "wait_s": int(wait) / 1e9, "slices": int(slices)}


def _task(look: dict[str, Any], tid: str, what: str, body: str, names: dict[int, str], tick: int) -> None:
    if what == "stat":
        seen = probe.parse_stat(body.encode())
        if seen is not None:
            stat = _rescale(seen, tick)
            look["threads"][tid] = {
                "comm": stat["comm"],
                "state": stat["state"],
                "utime": stat["utime"],
                "stime": stat["stime"],
                "cpu": stat["processor"],
                "majflt": stat["majflt"],
                "wchan": None,
                "syscall": None,
            }
    elif tid in look["threads"]:
        if what == "wchan":
            look["threads"][tid]["wchan"] = body.strip() if body.strip() not in ("", "0") else None
        elif what == "syscall":
            look["threads"][tid]["syscall"] = probe.parse_syscall(body.encode(), names)


def _add_fds(found: dict[str, str], pid: str, samples: list[dict[str, Any]]) -> None:
    """Descriptors from `ls -l` and, for the main process, positions from fdinfo; read after the last sample."""
    if not samples or pid not in samples[-1]["procs"]:
        return
    fds: dict[str, Any] = {}
    for line in found.get(f"fds {pid}", "").splitlines():
        match = re.search(r"^l([r-])([w-])\S*.*\s(\d+) -> (.*)$", line)
        if not match:
            continue
        target, deleted = match.group(4), match.group(4).endswith(" (deleted)")
        entry: dict[str, Any] = {"path": target.removesuffix(" (deleted)"), "kind": probe.link_kind(target)}
        entry["access"] = match.group(1).replace("-", "") + match.group(2).replace("-", "") or "r"
        if deleted:
            entry["deleted"] = True
        if entry["kind"] in ("pipe", "socket"):
            entry["inode"] = probe.bracket(target)
        fds[match.group(3)] = entry
    for block in re.split(r"(?:^|\n)fd ", found.get(f"fdinfo {pid}", ""))[1:]:
        number, _, rest = block.partition("\n")
        pos = re.search(r"pos:\s*(\d+)", rest)
        if pos and number in fds:
            fds[number]["pos"] = int(pos.group(1))
    samples[-1]["procs"][pid]["fds"] = fds
    for sample in samples:
        for thread in [sample["procs"].get(pid, {}), *sample["procs"].get(pid, {}).get("threads", {}).values()]:
            call = thread.get("syscall")
            if call and str(call.get("fd")) in fds:
                call["path"], call["kind"] = fds[str(call["fd"])]["path"], fds[str(call["fd"])]["kind"]


def _log(found: dict[str, str], pid: int | None, started: float) -> list[dict[str, Any]]:
    lines = found.get("log", "").splitlines()
    if len(lines) < 3:
        return []
    raw = bytes.fromhex("".join(found.get("logtail", "").split()))
    size, mtime = int(lines[1]), float(lines[2])
    return [
        {
            "path": lines[0],
            "how": "fd1",
            "pid": pid,
            "fd": 1,
            "kind": "file",
            "size": size,
            "mtime": mtime or None,
            "age_s": started + 3 - mtime if mtime else None,
            "deleted": False,
            "rotated": False,
            "append": None,
            "head": None,
            "tail": {"offset": max(0, size - len(raw)), "b64": base64.b64encode(raw).decode()},
            "growth": [size],
            "via": None,
            "mnt": None,
            "error": None,
        }
    ]
