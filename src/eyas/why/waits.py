"""Where a thread waits: kernel wait sites and system calls, put into a few families.

Kernels rename their wait sites, so names are matched by family and the raw name stays in the evidence. A wait site that
was not seen (another user's process, or a running thread) is `hidden` or `run`, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SITES: list[tuple[str, str]] = [  # first match wins
    (r"do_signal_stop|ptrace_stop|do_freezer_trap", "stop"),
    (r"refrigerator|freezer", "frozen"),
    (r"^kernel_clone|wait_for_vfork|_do_fork|^do_fork|vfork", "vfork"),
    (r"nvidia|^nv_|uvm|os_acquire|^rm_|amdgpu|kfd", "gpu"),
    (r"rpc_|nfs|cifs|smb|ceph|^wait_on_commit", "nfs"),
    (r"request_wait_answer|fuse", "fuse"),
    (r"ptlrpc|cl_sync_io|lustre|^osc_|^ll_|gpfs|mmfs|beegfs", "lustre"),
    (r"locks_lock|flock_lock|posix_lock|fcntl_setlk", "lock"),
    (r"futex", "futex"),
    (r"anon_pipe_read|pipe_read|pipe_wait_readable", "pipe-read"),
    (r"anon_pipe_write|pipe_write|pipe_wait_writable", "pipe-write"),
    (r"^pipe_wait$", "pipe"),
    (r"wait_for_partner|fifo_open", "fifo"),
    (r"ep_poll|do_epoll_wait", "epoll"),
    (r"poll_schedule|do_sys_poll|do_select|do_poll", "poll"),
    (r"nanosleep|hrtimer_sleep", "sleep"),
    (r"n_tty_read|tty_", "tty"),
    (r"inet_csk_accept|unix_accept", "accept"),
    (r"inet_stream_connect|inet_wait_for_connect|unix_stream_connect|unix_wait_for_peer", "connect"),
    (r"sk_wait_data|tcp_|unix_stream|unix_dgram|skb_wait|__skb_wait|sk_stream_wait|inet_recv", "socket"),
    (r"do_wait|do_wait4|kernel_wait|wait_consider", "child"),
    (r"do_swap_page|swap_|__lock_page_or_retry|read_swap|zswap", "swap"),
    (r"balance_dirty|writeback|jbd2|fsync|log_wait|xlog|xfs_log|btrfs_(commit|wait)|wait_on_buffer_write", "writeback"),
    (
        r"folio_wait|wait_on_page|io_schedule|blkdev|wait_on_buffer|bio_|dio_|iomap|ext4|xfs|btrfs|zfs|cv_wait|zio|dm_",
        "disk",
    ),
    (r"mmap_lock|rwsem_down|down_read|down_write|__access_remote", "rwsem"),
    (r"io_cqring|io_uring", "uring"),
    (r"sigtimedwait|sigsuspend|do_sigtimedwait|^sys_pause|^pause", "signal"),
    (r"mem_cgroup|try_charge|reclaim|shrink|throttle_direct", "reclaim"),
    (r"inotify|signalfd|eventfd", "event"),
]
_SITE_RES = [(re.compile(pattern), family) for pattern, family in _SITES]

_BY_CALL = {
    "futex": "futex",
    "futex_waitv": "futex",
    "nanosleep": "sleep",
    "clock_nanosleep": "sleep",
    "poll": "poll",
    "ppoll": "poll",
    "select": "poll",
    "pselect6": "poll",
    "epoll_wait": "epoll",
    "epoll_pwait": "epoll",
    "epoll_pwait2": "epoll",
    "wait4": "child",
    "waitid": "child",
    "flock": "lock",
    "recvfrom": "socket",
    "recvmsg": "socket",
    "recvmmsg": "socket",
    "sendto": "socket",
    "sendmsg": "socket",
    "accept": "accept",
    "accept4": "accept",
    "connect": "connect",
    "fsync": "writeback",
    "fdatasync": "writeback",
    "msync": "writeback",
    "sync": "writeback",
    "syncfs": "writeback",
    "io_uring_enter": "uring",
    "pause": "signal",
    "io_getevents": "disk",
    "rt_sigtimedwait": "signal",
    "rt_sigsuspend": "signal",
}
_READS = {"read", "pread64", "readv", "preadv", "preadv2", "sendfile", "copy_file_range"}
_WRITES = {"write", "pwrite64", "writev", "pwritev", "pwritev2"}
_METADATA = {
    "open",
    "openat",
    "openat2",
    "stat",
    "lstat",
    "newfstatat",
    "fstat",
    "statx",
    "access",
    "faccessat",
    "faccessat2",
    "getdents64",
    "getdents",
    "readlink",
    "readlinkat",
    "statfs",
    "fstatfs",
    "unlink",
    "unlinkat",
    "rename",
    "mkdir",
}
_FD_FAMILY = {
    "pipe": "pipe-read",
    "fifo": "pipe-read",
    "socket": "socket",
    "tty": "tty",
    "eventfd": "event",
    "nvidia": "gpu",
}
_D_IO = {"disk", "writeback", "nfs", "fuse", "lustre", "swap"}

WORDS = {
    "run": "running on a CPU",
    "futex": "waiting on a lock or condition in its process",
    "pipe-read": "waiting for bytes on a pipe",
    "pipe-write": "waiting for room in a pipe",
    "pipe": "waiting on a pipe",
    "fifo": "waiting for the other end of a FIFO",
    "poll": "polling descriptors",
    "epoll": "waiting for events",
    "sleep": "sleeping by the clock",
    "tty": "waiting for input from a terminal",
    "accept": "waiting for a connection",
    "connect": "waiting for a connection to be answered",
    "socket": "waiting on a socket",
    "child": "waiting for a child process to end",
    "lock": "waiting for a file lock",
    "disk": "waiting for the disk",
    "writeback": "waiting for data to be written out",
    "nfs": "waiting for a network file server",
    "fuse": "waiting for a FUSE daemon",
    "lustre": "waiting for a parallel file system",
    "gpu": "waiting inside the GPU driver",
    "swap": "waiting for memory to come back from swap",
    "uring": "waiting for io_uring completions",
    "stop": "stopped",
    "frozen": "frozen by its cgroup",
    "vfork": "waiting for a vforked child",
    "rwsem": "waiting for a kernel lock (often mmap_lock)",
    "signal": "waiting for a signal",
    "reclaim": "waiting for memory to be freed",
    "event": "waiting for an event",
    "metadata": "waiting for a file-system metadata call",
    "read": "reading a file",
    "write": "writing a file",
    "zombie": "dead, not yet collected by its parent",
    "hidden": "asleep, wait site hidden",
    "io": "in uninterruptible sleep",
}


@dataclass(frozen=True)
class Wait:
    """One look at one thread: its family, the raw names, and what the system call points at."""

    family: str
    state: str
    wchan: str | None = None
    call: str | None = None
    fd: int | None = None
    path: str | None = None
    kind: str | None = None
    uaddr: int | None = None
    timed: bool | None = None  # the wait can end by itself
    pid: int | None = None

    @property
    def blocked(self) -> bool:
        return self.state in ("S", "D", "T", "t", "I")

    @property
    def words(self) -> str:
        return WORDS.get(self.family, self.family)

    @property
    def raw(self) -> str:
        parts = [self.state]
        if self.wchan:
            parts.append(self.wchan)
        if self.call and self.call != "running":
            where = f"fd {self.fd}" if self.fd is not None else ""
            where += f" -> {self.path}" if self.path else ""
            parts.append(f"{self.call}({where})")
        return " ".join(parts)


def site_family(wchan: str | None) -> str | None:
    """The family of a kernel wait site, or None when it is not known."""
    if not wchan or wchan == "0":
        return None
    for pattern, family in _SITE_RES:
        if pattern.search(wchan):
            return family
    return None


def classify(state: str, wchan: str | None, syscall: Mapping[str, Any] | None) -> Wait:
    """Put one observation of a thread into a family."""
    call = (syscall or {}).get("name")
    path, kind, fd = ((syscall or {}).get(key) for key in ("path", "kind", "fd"))
    family = site_family(wchan)
    if state in ("Z", "X"):
        family = "zombie"
    elif state in ("T", "t"):
        family = "stop"
    elif state == "R":
        family = "run"
    elif family is None or wchan == "wait_woken":
        family = _from_call(call, kind, path, wchan) or family
    elif family == "disk" and call in _METADATA:
        family = "metadata"
    elif family == "pipe":
        family = "pipe-write" if call in _WRITES else "pipe-read"
    if family is None:
        family = "io" if state == "D" else "hidden"
    timed = (syscall or {}).get("timeout")
    if family == "sleep":
        timed = True
    return Wait(
        family, state, wchan, call, fd, path, kind, (syscall or {}).get("uaddr"), timed, (syscall or {}).get("pid")
    )


def _from_call(call: str | None, kind: str | None, path: str | None, wchan: str | None) -> str | None:
    """No known wait site: the system call and what its descriptor is decide."""
    if call is None or call == "running":
        return "socket" if wchan == "wait_woken" else None
    if call in _BY_CALL:
        return _BY_CALL[call]
    if call in _METADATA:
        return "metadata"
    if call == "ioctl":
        return "gpu" if kind == "nvidia" or (path or "").startswith("/dev/nvidia") else None
    if call in _READS:
        if kind == "tty" or (path or "").startswith(("/dev/pts", "/dev/tty")):
            return "tty"
        return _FD_FAMILY.get(kind or "", "read")
    if call in _WRITES:
        return {"pipe": "pipe-write", "fifo": "pipe-write", "socket": "socket", "tty": "tty"}.get(kind or "", "write")
    return None


def is_storage(family: str) -> bool:
    """Waiting for bytes of a file, whichever kind of storage lies below."""
    return family in _D_IO or family in ("metadata", "read", "write", "uring", "io")
