"""Threads, written as they look: "S futex_do_wait futex", "D folio_wait_bit_common read 37", "R"."""

from __future__ import annotations

from typing import Any

NOW = 1764425245.0
TIMES = (0.0, 1.0, 3.0)
GB = 10**9
Json = dict[str, Any]


def thread(
    looks: str | list[str],
    comm: str = "python",
    cpu: float = 0.0,
    wakeups: float = 0.0,
    waits: float = 0.0,
    **more: Any,
) -> Json:
    """One thread. `more`: uaddr, timeout, paths as {fd: (path, kind)}."""
    return {
        "looks": [looks] * 3 if isinstance(looks, str) else looks,
        "comm": comm,
        "cpu": cpu,
        "wakeups": wakeups,
        "waits": waits,
        **more,
    }


IDLE_POOL = "S futex_do_wait futex"
PIN = "S poll_schedule_timeout poll"  # the pin-memory thread polls its queue


def usual_threads(cuda: bool = True) -> list[Json]:
    """What any torch trainer has beside its main thread."""
    threads = [
        thread(IDLE_POOL, "pt_autograd_0", uaddr=0x7F10),
        thread(IDLE_POOL, "python", uaddr=0x7F20),
        thread(IDLE_POOL, "python", uaddr=0x7F30),
    ]
    if cuda:
        threads.append(thread("S poll_schedule_timeout poll", "cuda-EvtHandlr", timeout=False))
    return threads


def look(t: Json, i: int, at: float) -> Json:
    """One look at one thread: "STATE [wchan [call [fd]]]"."""
    words = t["looks"][i].split()
    call: Json | None = {"nr": -1, "name": "running"} if words[0] == "R" else None
    if len(words) > 2:
        call = {"nr": 1, "name": words[2], "args": []}
        if len(words) > 3:
            fd = int(words[3])
            path, kind = (t.get("paths") or {}).get(fd, (None, None))
            call.update(fd=fd, path=path, kind=kind)
        if words[2] == "futex":
            call.update(uaddr=t["uaddr"], op="wait")
        if "timeout" in t:
            call["timeout"] = t["timeout"]
        if "pid" in t:
            call["pid"] = t["pid"]
    return {
        "comm": t["comm"],
        "state": words[0],
        "utime": 50 + t["cpu"] * 0.9 * at,
        "stime": 5 + t["cpu"] * 0.1 * at,
        "cpu": 1,
        "majflt": 0,
        "wchan": words[1] if len(words) > 1 else None,
        "syscall": call,
        "run_s": 55 + t["cpu"] * at,
        "wait_s": 1 + t["waits"] * at,
        "slices": int(1000 + t["wakeups"] * at),
    }


def open_file(fd: Json, i: int) -> Json:
    """{"path","kind","pos": [3 positions] or a number, "at": samples that show it}"""
    pos = fd.get("pos")
    return {
        **{k: v for k, v in fd.items() if k not in ("pos", "at")},
        "pos": pos[i] if isinstance(pos, list) else pos,
        "kind": fd.get("kind", "file"),
        "access": fd.get("access", "r"),
    }


def main_stack(pid: int, frames: tuple[str, ...]) -> Json:
    """Frames of a main thread, innermost first, each "func file:line"."""
    places = [(func, *place.rsplit(":", 1)) for func, place in (f.rsplit(" ", 1) for f in frames)]
    listed = [{"func": func, "file": file, "line": int(line)} for func, file, line in places]
    return {"tid": pid, "name": "MainThread", "active": True, "owns_gil": False, "frames": listed}
