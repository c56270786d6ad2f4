"""What an idle process waits for, in words, where no verdict fits: idle by design and idle by mistake look the same."""

from __future__ import annotations

from eyas.why.facts import Facts, span_words
from eyas.why.procs import Proc


def idle_words(f: Facts) -> str | None:
    """What follows "NAME (PID n) ..": it sleeps, serves, naps, or waits for a child; None when it does none of them."""
    main = f.main
    if main is None or not f.alive or f.forward or len(f.samples) < 2:
        return None
    return _waits(f, main, 0)


def _waits(f: Facts, proc: Proc, depth: int) -> str | None:
    thread = proc.main
    if (proc.cpu or 0.0) > 0.05 or any(t.wait.family == "run" for t in proc.threads):
        return None
    if thread.always("sleep"):
        if thread.asleep:
            return f"is asleep in a timer of its own, kept by nobody: it did not wake in {f.span:.0f} s{_since(f)}"
        return f"naps again and again, as one that polls for something{_since(f)}"
    ports = sorted({int(x["port"]) for x in f.snap.get("listening") or [] if x.get("pid") == proc.pid})
    if thread.always("accept", "epoll", "poll") and thread.asleep:
        if ports:
            clients = [s for s in f.snap.get("sockets") or [] if s.get("lport") in ports]
            held = f" ({len(clients)} connected, none of them says anything)" if clients else ""
            return f"waits for connections on port {', '.join(map(str, ports[:4]))}{held}{_since(f)}"
        return f"waits for an event, and none came in {f.span:.0f} s{_since(f)}"
    if thread.always("signal"):
        return f"waits for a signal{_since(f)}"
    if thread.always("child") and depth < 3:
        wanted = [
            p for p in f.procs.values() if p.ppid == proc.pid and not p.zombie and thread.wait.pid in (None, p.pid)
        ]
        inner = _waits(f, wanted[0], depth + 1) if len(wanted) == 1 else None
        return f"waits for its child PID {wanted[0].pid} ({wanted[0].comm}), which {inner}" if inner else None
    return None


def _since(f: Facts) -> str:
    return f", and its log is silent for {span_words(f.idle)}" if f.idle is not None and f.idle >= 5 else ""
