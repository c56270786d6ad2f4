"""Look at one training job from outside and print what is there: one JSON object, described in docs/why-snapshot.md.

This file runs alone (standard library, Python >= 3.6), here or piped to an interpreter on another host. It decides
nothing about the job; it only looks, and it must never hang, never disturb and never write: no ptrace, no signal to
anybody but its own children, no file created. The rules that keep the promise:

- Cheap and safe reads (stat, status, wchan, syscall, schedstat, io, fd links) are sampled three times, in one child.
- Everything that can block for ever (cmdline, environ, maps, any touch of a file system, NVML) runs in a `Courier`: a
  forked child that sends results one by one. An item that stays silent past its deadline is recorded, its child
  abandoned, the rest goes on.
- All reads are bounded. A budget of time and counts stands over every loop that depends on the size of the host.

Sections: reads · couriers · syscalls · processes · sampling · who is the target · identity · files · logs and outputs ·
network and locks · cgroups · GPU · host · slurm and NCCL · stacks · ps · main.
"""

import base64
import errno
import gc
import json
import marshal
import os
import re
import select
import signal
import socket
import stat as stat_mod
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would cost more than a sample
    from typing import Any

SCHEMA = "eyas.snapshot/1"
PS_SCHEMA = "eyas.ps/1"
TICK = float(os.sysconf("SC_CLK_TCK"))
PAGE = os.sysconf("SC_PAGE_SIZE")
HEAD_BYTES, TAIL_BYTES = 64 << 10, 256 << 10
MAX_MEMBERS, MAX_THREADS, MAX_THREADS_EACH, MAX_FDS_EACH = 256, 2000, 512, 2000
SAMPLE_BUDGET_S = 0.35  # threads beyond it are left out of a sample
CHEAP_CALL_S = 0.5      # deadline of one item in a courier, unless said otherwise

# ---------------------------------------------------------------------------------------------------------------- reads


def slurp(path: "str | int", limit: int = 65536) -> bytes:
    """At most `limit` bytes of a file: procfs hands out a page or so per read."""
    fd = path if isinstance(path, int) else os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = os.read(fd, limit)
        if limit <= 8192 or not data or len(data) >= limit:  # the common case: a small file in one read
            return data
        parts = [data]
        have = len(data)
        while have < limit:
            more = os.read(fd, limit - have)
            if not more:
                break
            parts.append(more)
            have += len(more)
        return b"".join(parts)
    finally:
        os.close(fd)


def text(path: str, limit: int = 65536) -> "str | None":
    """The text of a file, or None when it cannot be read."""
    try:
        return slurp(path, limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def number(path: str) -> "int | None":
    """A file that holds one number ("max" counts as none)."""
    value = text(path, 256)
    try:
        return int(value.split()[0]) if value else None
    except (ValueError, IndexError):
        return None


def pairs(blob: "str | None", wanted: "tuple | None" = None) -> dict:
    """`name value` lines as a dict of integers."""
    found = {}
    for line in (blob or "").splitlines():
        parts = line.replace(":", " ").split()
        if len(parts) >= 2 and (wanted is None or parts[0] in wanted):
            try:
                found[parts[0]] = int(parts[1])
            except ValueError:
                pass
    return found


def readlink(path: str) -> "str | None":
    try:
        return os.readlink(path)
    except OSError:
        return None


def pids_now() -> "list[int]":
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def why_not(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


# ------------------------------------------------------------------------------------------------------------- couriers


class Courier(object):
    """Runs `fn(item)` for each item in a forked child and collects the answers; an item may hang, and nobody waits.

    Before each item the child sends "begin i", afterwards its result. When an item is silent for `each` seconds the
    child is killed and abandoned (a child in D state stays), the item goes to `timed_out`, and a fresh child takes up
    the rest, without the items for which `skip` now says yes. Answers are kept in `out[item index]`.
    """

    live = []       # type: list[Courier]
    timed_out = []  # type: list[dict]
    starved = []    # type: list[str]
    hard = 0.0      # the time beyond which nobody waits, whatever the load

    def __init__(self, name, items, fn, each=CHEAP_CALL_S, blame=None, skip=None, before=None, restarts=3):
        # type: (str, list, object, float, object, object, object, int) -> None
        self.name, self.items, self.each, self.restarts = name, items, each, restarts
        self.fn, self.blame, self.skip, self.before = fn, blame, skip, before  # type: Any, Any, Any, Any
        self.out = {}  # type: dict
        self.errors = {}  # type: dict
        self.current, self.since = -1, time.monotonic()
        self.buffer = bytearray()
        self.pid, self.fd, self.done = 0, -1, not items
        self.cpu_s = 0.0
        if items:
            self._fork(0)
            Courier.live.append(self)

    def _fork(self, start: int) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                os.close(reader)
                self._child(start, writer)
            except BaseException:
                code = 1
            finally:
                os._exit(code)
        os.close(writer)
        os.set_blocking(reader, False)
        self.pid, self.fd, self.buffer = pid, reader, bytearray()
        self.current, self.since = -1, time.monotonic()

    def _child(self, start: int, writer: int) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # an abandoned child must not keep the caller's pipes open
            os.dup2(null, fd)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def send(message: tuple) -> None:
            body = marshal.dumps(message)
            data = memoryview(struct.pack("<I", len(body)) + body)
            while data:
                data = data[os.write(writer, data):]

        for index in range(start, len(self.items)):
            item = self.items[index]
            if self.skip and self.skip(item):
                continue
            if self.before:
                self.before(item)
            send(("b", index, None))
            try:
                answer = ("r", index, self.fn(item))
            except Exception as error:
                answer = ("e", index, "%s: %s" % (type(error).__name__, error))
            send(answer)
        used = os.times()
        send(("c", 0, used[0] + used[1] + used[2] + used[3]))

    def _take(self) -> None:
        """Read what has arrived."""
        while True:
            try:
                data = os.read(self.fd, 1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._close()
                return
            self.buffer += data
            while len(self.buffer) >= 4:
                size = struct.unpack_from("<I", self.buffer)[0]
                if len(self.buffer) < 4 + size:
                    break
                kind, index, value = marshal.loads(self.buffer[4:4 + size])
                del self.buffer[:4 + size]
                if kind == "b":
                    self.current, self.since = index, time.monotonic()
                elif kind == "c":
                    self.cpu_s += value
                else:
                    (self.out if kind == "r" else self.errors)[index] = value
                    self.current = -1

    def _close(self) -> None:
        os.close(self.fd)
        self.done = True
        Courier.live.remove(self)
        self._reap()

    def _reap(self) -> None:
        for _ in range(5):
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return
            except OSError:
                return
            time.sleep(0.0005)

    def stalled(self) -> bool:
        """Past its deadline, and not just for want of a CPU: a runnable child on a loaded host gets more time (until
        all are dismissed).
        """
        self._take()
        if self.done or self.current < 0 or time.monotonic() - self.since <= self.each:
            return False
        seen = stat_of(self.pid)
        if seen and seen["state"] == "R":
            self.since = time.monotonic()
            return False
        return True

    def expire(self, give_up: bool) -> None:
        """Leave the child where it is and note where that was."""
        self._take()
        if self.done:
            return
        seen = stat_of(self.pid)
        if self.current >= 0 and seen and seen["state"] == "R":
            Courier.starved.append(self.name)  # it wanted a CPU and got none: no sign of anything but load
        elif self.current >= 0:
            item = self.items[self.current]
            entry = {"probe": self.name, "pid": None, "path": None, "after_s": round(time.monotonic() - self.since, 2),
                     "state": seen["state"] if seen else None, "wchan": wchan_of(self.pid)}  # type: dict
            entry.update(self.blame(item) if self.blame else {})
            Courier.timed_out.append(entry)
        following = self.current + 1
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except OSError:
                pass
        os.close(self.fd)
        self._reap()
        if give_up or self.current < 0 or self.restarts <= 0 or following >= len(self.items):
            self.done = True
            Courier.live.remove(self)
        else:
            self.restarts -= 1
            self._fork(following)

    def value(self, index: int = 0, default=None):  # type: ignore[no-untyped-def]
        return self.out.get(index, default)

    @staticmethod
    def pump(until: float, wanted: "list | None" = None, ready=None) -> None:  # type: ignore[no-untyped-def]
        """Move all couriers on until the wanted ones (default: all) are done, `ready()` says so, or the time has come.
        """
        while True:
            now = time.monotonic()
            for courier in list(Courier.live):
                if courier.current >= 0 and now - courier.since > courier.each and courier.stalled():
                    courier.expire(False)
            if now >= until or (ready() if ready else all(c.done for c in (wanted if wanted is not None
                else Courier.live))):
                return
            poller = select.poll()
            for courier in Courier.live:
                poller.register(courier.fd, select.POLLIN | select.POLLHUP)
            due = [c.since + c.each for c in Courier.live if c.current >= 0]
            wait = max(0.001, min([until] + due) - now)
            arrived = {fd for fd, _ in poller.poll(min(wait, 1.0) * 1000 + 1)}
            for courier in list(Courier.live):
                if courier.fd in arrived:
                    courier._take()

    @staticmethod
    def wait(until: float, wanted: "list", ready: "Any" = None) -> None:
        """As `pump`, with more time for children that could run and are not let: on a loaded host, up to `hard`."""
        Courier.pump(until, wanted, ready)
        while time.monotonic() < Courier.hard and not (ready() if ready else all(c.done for c in wanted)):
            states = [stat_of(c.pid) for c in wanted if not c.done]
            if not any(seen and seen["state"] == "R" for seen in states):
                return
            Courier.pump(min(Courier.hard, time.monotonic() + 0.1), wanted, ready)

    @staticmethod
    def dismiss() -> None:
        for courier in list(Courier.live):
            courier.expire(True)


class Errands(Courier):
    """A courier for different small questions, each with its name: (name, function, argument, what to blame)."""

    def __init__(self, name: str, errands: list, each: float = 0.7):
        Courier.__init__(self, name, errands, lambda e: e[1](e[2]), each=each, restarts=5,
                         blame=lambda e: dict(e[3] if len(e) > 3 else {}, probe=e[0]))

    def get(self, name: str, default=None):  # type: ignore[no-untyped-def]
        for index, errand in enumerate(self.items):
            if errand[0] == name:
                return self.out.get(index, default)
        return default


def collect(name: str, items: list, fn: "Any", until: float, **more: "Any") -> list:
    """A courier that is waited for; answers in the order of the items (None where there is none)."""
    courier = Courier(name, items, fn, **more)
    Courier.wait(until, [courier])
    if not courier.done:
        courier.expire(True)
    return [courier.out.get(index) for index in range(len(items))]


# ------------------------------------------------------------------------------------------------------------- syscalls

_X86 = (
    "read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask "
    "rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise "
    "shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept "
    "sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt "
    "getsockopt clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv "
    "msgctl fcntl flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat "
    "link unlink symlink readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo "
    "times ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid "
    "setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget "
    "capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib "
    "personality ustat statfs fstatfs sysfs getpriority setpriority sched_setparam sched_getparam "
    "sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval "
    "mlock munlock mlockall munlockall vhangup modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit "
    "chroot sync acct settimeofday mount umount2 swapon swapoff reboot sethostname setdomainname iopl ioperm "
    "create_module init_module delete_module get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg "
    "afs_syscall tuxcall security gettid readahead setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr "
    "listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity "
    "sched_getaffinity set_thread_area io_setup io_destroy io_getevents io_submit io_cancel get_thread_area "
    "lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old remap_file_pages getdents64 set_tid_address "
    "restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete "
    "clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes "
    "vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify "
    "mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init "
    "inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat newfstatat "
    "unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll unshare set_robust_list "
    "get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create "
    "eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 "
    "inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark "
    "prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv "
    "process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create "
    "kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect "
    "pkey_alloc pkey_free statx io_pgetevents rseq "
)
_ARM64 = (
    "io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr "
    "fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie "
    "eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch "
    "ioctl ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount "
    "pivot_root nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod "
    "fchmodat fchownat fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev "
    "pread64 pwrite64 preadv pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat "
    "fstat sync fsync fdatasync sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct "
    "capget capset personality exit exit_group waitid set_tid_address unshare futex set_robust_list "
    "get_robust_list nanosleep getitimer setitimer kexec_load init_module delete_module timer_create "
    "timer_gettime timer_getoverrun timer_settime timer_delete clock_settime clock_gettime clock_getres "
    "clock_nanosleep syslog ptrace sched_setparam sched_setscheduler sched_getscheduler sched_getparam "
    "sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max sched_get_priority_min "
    "sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend rt_sigaction "
    "rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority reboot "
    "setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid "
    "getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit getrusage "
    "umask prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid "
    "sysinfo mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd "
    "semget semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect "
    "getsockname getpeername sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap "
    "mremap add_key request_key keyctl clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock "
    "mlockall munlockall mincore madvise remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages "
    "move_pages rt_tgsigqueueinfo perf_event_open accept4 recvmmsg arch_specific_syscall - - - - - - - - - - - - "
    "- - - wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs "
    "setns sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 "
    "seccomp getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 "
    "pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load "
)
_COMMON_424 = (
    "pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig "
    "fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 "
    "mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret "
    "process_mrelease futex_waitv set_mempolicy_home_node "
)
_COMMON_424 += (
    "cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue statmount listmount lsm_get_self_attr "
    "lsm_set_self_attr lsm_list_modules mseal"
)

FD_CALLS = frozenset((
    "read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 ioctl fsync fdatasync flock fcntl "
    "recvfrom sendto "
    "recvmsg sendmsg recvmmsg sendmmsg accept accept4 connect epoll_wait epoll_pwait epoll_pwait2 getdents "
    "getdents64 fstat lseek "
    "ftruncate fallocate sendfile splice sync_file_range io_uring_enter shutdown syncfs close copy_file_range "
    "fadvise64 readahead"
).split())
FUTEX_OPS = {0: "wait", 6: "lock_pi", 9: "wait_bitset", 11: "wait_requeue_pi", 13: "lock_pi"}


def syscall_names(arch: str) -> dict:
    """Number -> name for this architecture; empty where no table is shipped (numbers are kept)."""
    if arch in ("x86_64", "amd64"):
        low = _X86
    elif arch in ("aarch64", "arm64"):
        low = _ARM64
    else:
        return {}
    table = {i: name for i, name in enumerate(low.split()) if name != "-"}
    table.update({424 + i: name for i, name in enumerate(_COMMON_424.split())})
    return table


NAMES = syscall_names(os.uname().machine)


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def parse_syscall(blob: bytes, names: "dict | None" = None) -> "dict | None":
    """`/proc/PID/syscall`: the call a thread sits in, and what its arguments say without touching its memory."""
    parts = blob.split()
    if not parts:
        return None
    if parts[0] == b"running":
        return {"nr": None, "name": "running"}
    nr = int(parts[0])
    if nr < 0:  # blocked outside a system call: a page fault
        return {"nr": nr, "name": "none"}
    name = (NAMES if names is None else names).get(nr, "syscall_%d" % nr)
    args = [int(p, 16) for p in parts[1:7]]
    call = {"nr": nr, "name": name, "args": args}
    if name == "futex":
        call["uaddr"] = args[0]
        call["op"] = FUTEX_OPS.get(args[1] & 0x7F, args[1] & 0x7F)
        call["timeout"] = args[3] != 0
    elif name in FD_CALLS:
        call["fd"] = _int32(args[0])
        if name.startswith("epoll_"):
            call["timeout"] = args[3] != 0 if name == "epoll_pwait2" else _int32(args[3]) >= 0
    elif name == "poll":
        call["timeout"] = _int32(args[2]) >= 0
    elif name in ("ppoll", "rt_sigtimedwait"):
        call["timeout"] = args[2] != 0
    elif name in ("select", "pselect6", "io_getevents"):
        call["timeout"] = args[4] != 0
    elif name in ("nanosleep", "clock_nanosleep"):
        call["timeout"] = True
    elif name == "wait4":
        call["pid"], call["timeout"] = _int32(args[0]), False
    elif name == "waitid":
        call["pid"], call["timeout"] = (_int32(args[1]) if args[0] in (1, 3) else -1), False
    elif name == "restart_syscall":  # what a stop and a continue leave of a timed call
        call["timeout"] = True
    return call


# ------------------------------------------------------------------------------------------------------------ processes

STATUS_KEYS = ("VmRSS", "VmSwap", "VmHWM", "RssAnon", "RssFile", "RssShmem")


def parse_stat(blob: bytes) -> "dict | None":
    """`/proc/PID/stat`; the name may hold blanks and brackets, so it ends at the last `)`."""
    end = blob.rfind(b")")
    if end < 0:
        return None
    f = blob[end + 2:].split()
    if len(f) < 37:
        return None
    return {
        "comm": blob[blob.index(b"(") + 1:end].decode("utf-8", "replace"), "state": f[0].decode(), "ppid": int(f[1]),
        "pgrp": int(f[2]),
        "session": int(f[3]), "tty": int(f[4]), "tpgid": int(f[5]), "flags": int(f[6]), "minflt": int(f[7]),
        "majflt": int(f[9]),
        "utime": int(f[11]) / TICK, "stime": int(f[12]) / TICK, "cutime": int(f[13]) / TICK,
        "cstime": int(f[14]) / TICK,
        "nice": int(f[16]), "threads": int(f[17]), "starttime": int(f[19]) / TICK, "vsize": int(f[20]),
        "rss": int(f[21]) * PAGE,
        "processor": int(f[36]), "blkio_s": int(f[39]) / TICK if len(f) > 39 else None,
        "exit_code": int(f[49]) if len(f) > 49 else None}


def stat_of(pid: int) -> "dict | None":
    try:
        return parse_stat(slurp("/proc/%d/stat" % pid, 2048))
    except OSError:
        return None


def wchan_of(pid: int, tid: "int | None" = None) -> "str | None":
    """The kernel function a thread sleeps in; "0" means running *or* hidden, so it is no answer."""
    try:
        name = slurp("/proc/%d/wchan" % pid if tid is None else "/proc/%d/task/%d/wchan" % (pid, tid),
                     128).decode("utf-8", "replace")
    except OSError:
        return None
    return name if name and name != "0" else None


def parse_status(blob: bytes) -> dict:
    found = {}  # type: dict
    for line in blob.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(":")
        value = value.strip()
        if key in STATUS_KEYS:
            found[key] = int(value.split()[0]) * 1024
        elif key in ("TracerPid", "Threads"):
            found[key] = int(value)
        elif key in ("State", "SigQ", "Cpus_allowed_list"):
            found[key] = value
        elif key == "voluntary_ctxt_switches":
            found["voluntary"] = int(value)
        elif key == "nonvoluntary_ctxt_switches":
            found["nonvoluntary"] = int(value)
        elif key == "Uid":
            found["uids"] = [int(v) for v in value.split()]
        elif key == "NSpid":
            found["nspid"] = [int(v) for v in value.split()]
    return found


def schedstat(path: str) -> "tuple | None":
    try:
        run, wait, slices = slurp(path, 128).split()
        return int(run) / 1e9, int(wait) / 1e9, int(slices)
    except (OSError, ValueError):
        return None


def link_kind(target: str) -> str:
    """What a descriptor is, from the text of its link alone."""
    if target.startswith("/"):
        if target.startswith("/dev/"):
            for prefix, kind in (("/dev/pts/", "tty"), ("/dev/tty", "tty"), ("/dev/console", "tty"),
                                 ("/dev/shm/", "shm"),
                                 ("/dev/nvidia", "nvidia"), ("/dev/null", "null"), ("/dev/zero", "null"),
                                 ("/dev/infiniband", "char"),
                                 ("/dev/fuse", "char"), ("/dev/urandom", "char"), ("/dev/random", "char"),
                                 ("/dev/kfd", "char"),
                                 ("/dev/dri", "char")):
                if target.startswith(prefix):
                    return kind
        return "memfd" if target.startswith("/memfd:") else "file"
    head = target.partition(":")[0]
    if head in ("pipe", "socket"):
        return head
    if head == "anon_inode":
        name = target.partition(":")[2].strip("[]")
        return name if name in ("eventfd", "eventpoll", "timerfd", "inotify", "signalfd", "io_uring") else "anon"
    return "anon"


def bracket(target: str) -> "int | None":
    """The inode in `pipe:[123]`."""
    inside = target.partition("[")[2].rstrip("]")
    return int(inside) if inside.isdigit() else None


def fd_info(pid: int, fd: int) -> dict:
    info = {}
    try:
        for line in slurp("/proc/%d/fdinfo/%d" % (pid, fd), 4096).split(b"\n")[:5]:
            key, _, value = line.partition(b":\t")
            if key == b"pos":
                info["pos"] = int(value)
            elif key == b"flags":
                info["flags"] = int(value, 8)
            elif key == b"mnt_id":
                info["mnt"] = int(value)
            elif key == b"ino":
                info["ino"] = int(value)
    except (OSError, ValueError):
        pass
    return info


O_DIRECTORY = getattr(os, "O_DIRECTORY", 0o200000)


def written(held: dict) -> bool:
    """Whether a descriptor is open for writing, as far as is known."""
    return (held.get("access") or "r") != "r"


def is_library(path: str) -> bool:
    return ".so" in path[-16:] or path.endswith((".py", ".pyc", ".pyi")) or path.startswith(("/usr/lib/", "/lib/",
        "/proc/", "/sys/"))


def read_fds(pid: int, full: bool, only: "set | None" = None, limit: int = MAX_FDS_EACH) -> "tuple[dict, int, int]":
    """Open descriptors: (N -> facts, how many there are, how many were left out). `only`: the numbers worth a second
    look.
    """
    names = [int(n) for n in os.listdir("/proc/%d/fd" % pid)]
    names.sort()
    total, chosen = len(names), names
    if only is not None and total > 300:
        known = {n for n in names if n in only}
        chosen = sorted(known)[:128] + [n for n in names if n not in known][-128:]
    elif total > limit:
        chosen = names[:limit // 2] + names[-(limit - limit // 2):]
    found, infos = {}, 0
    base = "/proc/%d/fd/" % pid
    for n in chosen:
        try:
            target = os.readlink(base + str(n))
        except OSError:
            continue
        kind = link_kind(target)
        if not full and kind not in ("file", "shm"):
            continue
        entry = {"path": target, "kind": kind}  # type: dict
        if kind in ("file", "shm", "memfd"):
            if target.endswith(" (deleted)"):
                entry["path"], entry["deleted"] = target[:-10], True
            if infos < 160 and (full or not is_library(target)):
                infos += 1
                entry.update(fd_info(pid, n))
                flags = entry.get("flags")
                if flags is not None:
                    entry["access"] = ("r", "w", "rw", "rw")[flags & 3]
                    if flags & os.O_APPEND:
                        entry["append"] = True
                    if flags & O_DIRECTORY:
                        entry["kind"] = "dir"
        elif kind in ("pipe", "socket"):
            entry["inode"] = bracket(target)
        if full and kind == "pipe":
            try:
                mode = os.lstat(base + str(n)).st_mode
                entry["access"] = ("w" if not mode & 0o400 else "rw" if mode & 0o200 else "r")
            except OSError:
                pass
        found[str(n)] = entry
    return found, total, total - len(chosen)


# ------------------------------------------------------------------------------------------------------------- sampling


class Sampler(object):
    """One look at one process (`look`) and at the host (`host`); remembers what it may not read, so that it asks once.
    """

    def __init__(self, want_fds: bool = True):
        self.denied = {}  # type: dict
        self.files = {}   # type: dict
        self.threads_left = {}  # type: dict
        self.began = {}  # type: dict
        self.want_fds = want_fds

    def look(self, index: int, pid: int) -> "dict | None":
        base = "/proc/%d/" % pid
        now = time.monotonic()
        began = self.began.setdefault(index, now)
        try:
            seen = parse_stat(slurp(base + "stat", 2048))
            status = parse_status(slurp(base + "status", 8192))
        except OSError:
            return None
        if seen is None:
            return None
        denied = self.denied.setdefault(pid, set())
        out = {"t": now, "stat": seen, "status": status, "io": None, "sched": None, "wchan": None, "syscall": None,
               "threads": {},
               "threads_left_out": 0, "fds": {}}  # type: dict
        if "io" not in denied:
            try:
                out["io"] = pairs(slurp(base + "io", 1024).decode())
            except OSError as error:
                self._deny(pid, "io", error)
        if seen["state"] in "ZX":
            return out
        room = min(MAX_THREADS_EACH, self.threads_left.setdefault(index, MAX_THREADS))
        if now - began > SAMPLE_BUDGET_S:
            room = 1
        self._threads(pid, room, out)
        main = out["threads"].get(str(pid))
        if main:
            out["wchan"], out["syscall"] = main["wchan"], main["syscall"]
            if "slices" in main:
                out["sched"] = {"run_s": main["run_s"], "wait_s": main["wait_s"], "slices": main["slices"]}
        self.threads_left[index] -= len(out["threads"])
        if self.want_fds and "fd" not in denied:
            try:
                first = pid not in self.files
                out["fds"], out["fd_count"], out["fds_left_out"] = read_fds(pid, first, None if first
                                                                            else self.files[pid])
                self.files.setdefault(pid, set()).update(int(n) for n, f in out["fds"].items() if f["kind"] in ("file",
                    "shm"))
            except OSError as error:
                self._deny(pid, "fd", error)
        return out

    def _deny(self, pid: int, what: str, error: OSError) -> None:
        if error.errno in (errno.EPERM, errno.EACCES):
            self.denied[pid].add(what)

    def _threads(self, pid: int, room: int, out: dict) -> None:
        base = "/proc/%d/task/" % pid
        denied = self.denied[pid]
        try:
            tids = os.listdir(base)
        except OSError:
            return
        if len(tids) > room:
            tids.sort(key=int)
            out["threads_left_out"] = len(tids) - room
            tids = tids[:room]
        threads, paths = out["threads"], {}  # type: dict, dict
        for tid in tids:
            here = base + tid
            try:
                blob = slurp(here + "/stat", 1024)
                end = blob.rindex(b")")
                f = blob[end + 2:end + 400].split()
                state = f[0].decode()
                thread = {"comm": blob[blob.index(b"(") + 1:end].decode("utf-8", "replace"), "state": state,
                          "utime": int(f[11]) / TICK,
                          "stime": int(f[12]) / TICK, "cpu": int(f[36]), "majflt": int(f[9]), "wchan": None,
                          "syscall": None}  # type: dict
                threads[tid] = thread
                times = schedstat(here + "/schedstat")
                if times:
                    thread["run_s"], thread["wait_s"], thread["slices"] = times
                if state == "R" or state == "Z":
                    if state == "R":
                        thread["syscall"] = {"nr": None, "name": "running"}
                    continue
                if "wchan" not in denied:
                    name = slurp(here + "/wchan", 128)
                    if name and name != b"0":
                        thread["wchan"] = name.decode("utf-8", "replace")
                if "syscall" not in denied:
                    try:
                        call = parse_syscall(slurp(here + "/syscall", 512))
                    except OSError as error:
                        self._deny(pid, "syscall", error)
                        continue
                    thread["syscall"] = call
                    fd = call.get("fd") if call else None
                    if call and fd is not None and fd >= 0 and len(paths) < 64 and "fd" not in denied:
                        if fd not in paths:
                            paths[fd] = readlink("/proc/%d/fd/%d" % (pid, fd))
                        if paths[fd]:
                            call["path"], call["kind"] = paths[fd], link_kind(paths[fd])
            except (OSError, ValueError, IndexError):
                continue

    def host(self, index: int, known: "set[int]", members: "set[int]", keys: dict) -> dict:
        """Counters of the host and the cgroups, and processes born in the job since the last sample."""
        born = {}  # type: dict
        for pid in pids_now():
            if pid in known:
                continue
            seen = stat_of(pid)
            if seen and seen["ppid"] in members and len(born) < 64:
                known.add(pid)
                members.add(pid)
                look = self.look(index, pid)
                if look:
                    born[str(pid)] = look
        return {"born": born, "host": host_counters(keys)}


VMSTAT = ("oom_kill", "pswpin", "pswpout", "pgmajfault", "workingset_refault_file", "workingset_refault_anon",
          "workingset_refault", "pgpgin",
          "pgpgout", "allocstall_normal", "allocstall_movable", "nr_dirty", "nr_writeback", "pgscan_direct",
          "pgsteal_kswapd")


def host_counters(keys: dict) -> dict:
    """What moves on the host: paging, disks, pressure, load, memory, network, and the cgroups given."""
    out = {"vmstat": pairs(text("/proc/vmstat"), VMSTAT), "disks": parse_diskstats(text("/proc/diskstats", 262144)),
           "pressure": {}, "load": None,
           "mem": parse_meminfo(text("/proc/meminfo")), "net": {}, "cgroups": {}}  # type: dict
    for name in ("cpu", "memory", "io"):
        pressure = parse_pressure(text("/proc/pressure/" + name))
        if pressure:
            out["pressure"][name] = {kind: values["total_us"] for kind, values in pressure.items()}
    load = (text("/proc/loadavg") or "").split()
    if len(load) >= 3:
        out["load"] = [float(v) for v in load[:3]]
    for line in (text("/proc/net/dev") or "").splitlines()[2:]:
        name, _, rest = line.partition(":")
        f = rest.split()
        if len(f) >= 9:
            out["net"][name.strip()] = {"rx_bytes": int(f[0]), "tx_bytes": int(f[8])}
    for key, where in keys.items():
        out["cgroups"][key] = cgroup_counters(where)
    return out


def parse_diskstats(blob: "str | None") -> dict:
    """Block devices that were ever used: counts, bytes, milliseconds."""
    found = {}
    for line in (blob or "").splitlines():
        f = line.split()
        if len(f) < 14 or f[2].startswith(("loop", "ram", "zram")) or (f[3] == "0" and f[7] == "0"):
            continue
        found[f[2]] = {"reads": int(f[3]), "read_bytes": int(f[5]) * 512, "read_ms": int(f[6]), "writes": int(f[7]),
                       "write_bytes": int(f[9]) * 512, "write_ms": int(f[10]), "in_flight": int(f[11]),
                       "busy_ms": int(f[12]), "queue_ms": int(f[13])}
    return found


def parse_meminfo(blob: "str | None") -> dict:
    wanted = {"MemTotal": "total", "MemAvailable": "available", "MemFree": "free", "Cached": "cached", "Dirty": "dirty",
              "Writeback": "writeback",
              "SwapTotal": "swap_total", "SwapFree": "swap_free", "Shmem": "shmem"}
    return {wanted[k]: v * 1024 for k, v in pairs(blob, tuple(wanted)).items()}


def parse_pressure(blob: "str | None") -> "dict | None":
    found = {}
    for line in (blob or "").splitlines():
        parts = line.split()
        if not parts or parts[0] not in ("some", "full"):
            continue
        values = dict(p.split("=") for p in parts[1:])
        found[parts[0]] = {"avg10": float(values["avg10"]), "avg60": float(values["avg60"]),
                           "avg300": float(values["avg300"]),
                           "total_us": int(values["total"])}
    return found or None


# ---------------------------------------------------------------------------------------------------- who is the target

LAUNCHER = re.compile(r"(^|/)(torchrun|torchelastic|accelerate|deepspeed|horovodrun|composer|mpirun|"
                      r"mpiexec(\.hydra)?|orterun|prterun|prted|orted|"
                      r"hydra_pmi_proxy|srun|slurmstepd)$|torch\.distributed\.(run|launch)|"
                      r"accelerate\.commands\.launch|deepspeed\.launcher")
WRAPPER = re.compile(r"(^|/)-?(ba|da|z|k|tc|c|fi)?sh$|(^|/)(uv|uvx|conda|mamba|micromamba|poetry|pdm|pipenv|hatch|"
                     r"rye|pixi|sudo|nohup|env|time|timeout|nice|"
                     r"chrt|ionice|taskset|numactl|stdbuf|setsid|script|tini|dumb-init|docker-init|catatonit|"
                     r"singularity|apptainer|enroot|"
                     r"strace|screen|tmux(: server)?|make|xargs|parallel|unshare|setpriv|su|runuser|firejail|bwrap)$")
COMPILER = re.compile(r"^(ptxas|cicc|nvcc|fatbinary|nvlink|ninja|cc1|cc1plus|cudafe\+\+|as|ld|lld|collect2|gcc|g\+\+|"
                      r"cc|c\+\+|clang|clang\+\+|triton\S*|"
                      r"x86_64-linux-gn\S*|aarch64-linux-g\S*|mlir\S*|hipcc)(-[\d.]+)?$")
TRACKER = re.compile(r"wandb-core|wandb[-_]service|wandb-xpu|gpu_stats|wandb\.sdk|mlflow|tensorboard|trackio|comet|"
                     r"neptune|aim(hub)?\b|clearml|eyas[/.]record[/.](sidecar|sinks)")
PROBER = re.compile(r"^(nvidia-smi|nvtop|gpustat|py-spy|strace|htop|top|dcgm\S*|nvitop)$")
TRAIN = re.compile(r"(^|[/ ._-])(pre|post)?(train|trainer|training|finetune|fine[-_]tune|finetuning|pretrain|sft|dpo|"
                   r"grpo|ppo|rlhf|distill|lora|learn|fit)"
                   r"([/ ._-]|$)|torchrun|torch\.distributed|accelerate|deepspeed|lightning|axolotl|llamafactory|"
                   r"megatron|nanogpt|nanochat|speculators|"
                   r"specforge|run_(clm|mlm|glue|qa|ner|seq2seq)|trl\b|eyas\b.*\btrain", re.I)
SECRET = re.compile(r"(api[_-]?key|access[_-]?key|secret|passw|credential|auth(?!or)|(^|[^a-z])token$|_token\b|(^|"
                    r"[_-])key$)", re.I)
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|AKIA[A-Z0-9]{8,}|"
                          r"xox[abp]-[\w-]+|"
                          r"glpat-[\w-]+|ey[JK][A-Za-z0-9_-]{20,}\.[\w.-]+)|(?<=://)[^/@\s]+(?=@)|\b[0-9a-f]{40}\b")


def masked(value: str) -> str:
    return SECRET_VALUE.sub("***", value)


def masked_args(args: "list[str]") -> "list[str]":
    """A command line without the values of options whose name sounds secret."""
    out, hide = [], False
    for arg in args:
        name, equals, _ = arg.partition("=")
        if hide and not arg.startswith("-"):
            out.append("***")
        elif equals and SECRET.search(name) and len(name) < 60:
            out.append(name + "=***")
        else:
            out.append(masked(arg))
        hide = not equals and arg.startswith("--") and bool(SECRET.search(arg))
    return out


def read_cmdline(pid: int) -> "list[str]":
    blob = slurp("/proc/%d/cmdline" % pid, 8192)
    if not blob:
        return []
    args = blob.rstrip(b"\0").split(b"\0") if b"\0" in blob else blob.split()
    return masked_args([a.decode("utf-8", "replace")[:1000] for a in args[:200]])


def is_python(args: "list[str]", comm: str) -> bool:
    return bool(re.match(r"(python|pypy)[\d.]*$|pt_main_thread", os.path.basename(args[0]) if args
                         else comm)) or comm.startswith(("python", "pt_main_thread"))


def python_entry(args: "list[str]") -> "tuple[str | None, str | None, bool]":
    """(script, module, -u given) of a Python command line; console scripts count as scripts."""
    unbuffered, index = False, 1
    while index < len(args):
        arg = args[index]
        if arg == "-m" and index + 1 < len(args):
            return None, args[index + 1], unbuffered
        if arg == "-c":
            return None, None, unbuffered
        if arg in ("-X", "-W", "--check-hash-based-pycs"):
            index += 2
            continue
        if not arg.startswith("-") or arg == "-":
            return arg, None, unbuffered
        if not arg.startswith("--"):
            flags = arg[1:]
            unbuffered = unbuffered or "u" in flags.split("X")[0].split("W")[0]
            if flags.endswith("m") and index + 1 < len(args):
                return None, args[index + 1], unbuffered
            if flags.startswith("m") and len(flags) > 1:
                return None, flags[1:], unbuffered
            if "c" in flags.split("X")[0].split("W")[0]:
                return None, None, unbuffered
        index += 1
    return None, None, unbuffered


class Table(object):
    """The process table of this host at the start, and command lines as far as they were asked for."""

    def __init__(self) -> None:
        self.rows = {}  # type: dict
        self.cmd = {}   # type: dict
        self.children = {}  # type: dict
        self.me = set()  # type: set
        for pid in pids_now():
            seen = stat_of(pid)
            if seen:
                self.rows[pid] = seen
                self.children.setdefault(seen["ppid"], []).append(pid)
        pid = os.getpid()
        while pid > 1 and pid in self.rows and len(self.me) < 64:
            self.me.add(pid)
            pid = self.rows[pid]["ppid"]

    def uid(self, pid: int) -> "int | None":
        row = self.rows.get(pid)
        if row is not None and "uid" not in row:
            try:
                row["uid"] = os.stat("/proc/%d" % pid).st_uid
            except OSError:
                row["uid"] = None
        return row["uid"] if row else None

    def kernel(self, pid: int) -> bool:
        return bool(self.rows[pid]["flags"] & 0x200000) or self.rows[pid]["vsize"] == 0 and self.rows[pid]["ppid"] == 2

    def read_commands(self, pids: "list[int]", until: float, each: float = 0.3) -> None:
        todo = [p for p in pids if p in self.rows and p not in self.cmd and self.rows[p]["state"] not in "ZX"
                and not self.kernel(p)]
        if not todo:
            return
        for pid, args in zip(todo, collect("cmdline", todo, read_cmdline, until, each=each,
                                           blame=lambda p: {"pid": p, "path": "/proc/%d/cmdline" % p})):
            self.cmd[pid] = args

    def args(self, pid: int) -> "list[str]":
        return self.cmd.get(pid) or []

    def line(self, pid: int) -> str:
        return " ".join(self.args(pid))[:400] or (self.rows[pid]["comm"] if pid in self.rows else "")

    def descendants(self, pid: int) -> "list[int]":
        found, stack, seen = [], list(self.children.get(pid, ())), {pid}
        while stack:
            child = stack.pop(0)
            if child in seen:
                continue
            seen.add(child)
            found.append(child)
            stack.extend(self.children.get(child, ()))
        return found

    def ancestors(self, pid: int) -> "list[int]":
        found = []  # type: list
        while pid in self.rows and self.rows[pid]["ppid"] > 0 and len(found) < 40:
            pid = self.rows[pid]["ppid"]
            found.append(pid)
        return found

    def launcher(self, pid: int) -> bool:
        args = self.args(pid)
        if self.rows[pid]["comm"] == "slurmstepd":
            return True
        words = args[:1] + [a for a in args[1:4] if not a.startswith("-")]
        return bool(args) and (any(LAUNCHER.search(w) for w in words[:2]) or " -m torch.distributed.run" in " "
                               + " ".join(args[:4]))

    def wrapper(self, pid: int) -> bool:
        args = self.args(pid)
        return bool(WRAPPER.search(args[0] if args else self.rows[pid]["comm"]))

    def python(self, pid: int) -> bool:
        return is_python(self.args(pid), self.rows[pid]["comm"])

    def kind(self, pid: int) -> str:
        """What a process is to its job, from its name and command line."""
        row, args = self.rows[pid], self.args(pid)
        line = " ".join(args)
        comm = row["comm"]
        if COMPILER.match(comm) or (args and COMPILER.match(os.path.basename(args[0]))):
            return "compiler"
        if "compile_worker" in line:
            return "compile_worker"
        if "multiprocessing.resource_tracker" in line or "multiprocessing.semaphore_tracker" in line:
            return "resource_tracker"
        if comm == "tee" or (args and os.path.basename(args[0]) == "tee"):
            return "tee"
        if PROBER.match(comm):
            return "prober"
        if TRACKER.search(comm) or TRACKER.search(" ".join(args[:6])):
            return "tracker"
        if self.launcher(pid):
            return "launcher"
        if "multiprocessing.spawn" in line or "--multiprocessing-fork" in line or "multiprocessing.forkserver" in line:
            return "spawned"
        parent = row["ppid"]
        if parent in self.rows and parent > 1 and self.python(pid):
            if args and self.args(parent) == args:
                return "fork"
            if not args and row["state"] in "ZX" and self.python(parent):
                return "fork"  # a dead worker has no command line any more
            if self.args(parent) and "multiprocessing.forkserver" in " ".join(self.args(parent)):
                return "spawned"
        if self.wrapper(pid):
            return "shell"
        return "other"

    def score(self, pid: int) -> "tuple[int, list[str]]":
        """How much a process looks like a trainer, without touching its memory (maps are added for the few that
        matter).
        """
        line, points, why = self.line(pid), 0, []
        kind = self.kind(pid)
        if kind in ("compiler", "compile_worker", "resource_tracker", "tee", "prober", "tracker", "shell"):
            return 0, []
        if self.python(pid):
            points, why = 20, ["python"]
        script, module, _ = python_entry(self.args(pid))
        name = script or module or line
        if points and TRAIN.search(os.path.basename(name) + " " + line[:300]):
            points += 35
            why.append("named like a trainer")
        if kind == "launcher" and self.rows[pid]["comm"] not in ("srun", "slurmstepd"):
            points += 30
            why.append("launcher")
        if points and self.rows[pid]["threads"] > 8:
            points += 5
        if points and self.rows[pid]["rss"] > 300 << 20:
            points += 10
            why.append("resident memory %.1f GB" % (self.rows[pid]["rss"] / 1e9))
        if points and re.search(r"jupyter|ipykernel|language[_-]server|pylsp|vllm\.entrypoints|sglang\.launch_server|"
                                r"uvicorn|gunicorn|\bserve\b|http\.server|"
                                r"unattended|networkd|fail2ban|/usr/(sbin|lib|share)/|\bpytest\b|\bpip3? install|"
                                r"/pip3?\b|\bmypy\b|\bruff\b", line):
            points -= 40
        if points and re.search(r"\beyas\b.*\b(why|ps)\b", line):
            points = 0
        return max(0, min(points, 100)), why


def brief(table: Table, pid: int, why: "list[str]", score: int) -> dict:
    return {"pid": pid, "cmd": table.line(pid), "why": ", ".join(why), "score": score}


def topmost(table: Table, pids: "list[int]") -> "list[int]":
    """Of matches that descend from one another, the highest ones."""
    chosen = set(pids)
    return [p for p in pids if not chosen.intersection(table.ancestors(p))]


def find_by_name(table: Table, name: str) -> "list[tuple[int, int]]":
    """Processes of that name, best first: by comm, script, module or a part of the command line."""
    found = []
    for pid in table.rows:
        if pid in table.me or table.kernel(pid):
            continue
        args, comm, rank = table.args(pid), table.rows[pid]["comm"], 0
        if re.search(r"\beyas\b.*\bwhy\b", table.line(pid)):
            continue
        script, module, _ = python_entry(args)
        base = os.path.basename(script or module or (args[0] if args else ""))
        if name in (base, os.path.splitext(base)[0], script, module):
            rank = 60
        elif comm == name or (args and os.path.basename(args[0]) == name):
            rank = 50
        elif name in " ".join(args):
            rank = 20
        if rank:
            if table.wrapper(pid):
                rank -= 15
            if table.rows[pid]["state"] in "ZX":
                rank -= 10
            found.append((pid, rank + table.score(pid)[0]))
    keep = set(topmost(table, [p for p, _ in found]))
    return sorted(((p, s) for p, s in found if p in keep), key=lambda x: (-x[1], -table.rows[x[0]]["starttime"]))


def file_holders(table: Table, path: str, below: bool, until: float) -> "list[dict]":
    """Processes that hold this file open (or any file below this directory), or work in it."""
    path = os.path.abspath(path)

    def look(pid: int) -> "dict | None":
        hit = None  # type: dict | None
        base = "/proc/%d/fd/" % pid
        try:
            names = os.listdir(base)[:4000]
        except OSError:
            names = []
        for name in names:
            target = readlink(base + name)
            if not target or not target.startswith("/"):
                continue
            clean = target[:-10] if target.endswith(" (deleted)") else target
            if clean == path or (below and clean.startswith(path + "/")):
                try:
                    writes = bool(os.lstat(base + name).st_mode & 0o200)
                except OSError:
                    writes = False
                if hit is None or writes:
                    hit = {"pid": pid, "fd": int(name), "writes": writes, "path": clean, "cwd": False}
                if writes:
                    break
        if hit is None and below and readlink("/proc/%d/cwd" % pid) == path:
            hit = {"pid": pid, "fd": None, "writes": False, "path": path, "cwd": True}
        return hit

    pids = [p for p in table.rows if p not in table.me and not table.kernel(p) and table.rows[p]["state"] not in "ZX"]
    return [hit for hit in collect("open files", pids, look, until, each=0.5, blame=lambda p: {"pid": p}) if hit]


def open_paths(pid: int) -> "set[str]":
    """The targets of a process's descriptors."""
    base = "/proc/%d/fd/" % pid
    try:
        return {target for target in (readlink(base + name) for name in os.listdir(base)[:2000]) if target}
    except OSError:
        return set()


def pipe_peers(pids: "list[int]", until: float) -> dict:
    """inode -> [(pid, fd, can read, can write)] for the pipes these processes hold."""

    def look(pid: int) -> "list[tuple]":
        out = []
        base = "/proc/%d/fd/" % pid
        try:
            names = os.listdir(base)[:1500]
        except OSError:
            return []
        for name in names:
            target = readlink(base + name)
            if target and target.startswith("pipe:"):
                try:
                    mode = os.lstat(base + name).st_mode
                except OSError:
                    continue
                out.append((bracket(target), int(name), bool(mode & 0o400), bool(mode & 0o200)))
        return out

    found = {}  # type: dict
    for pid, ends in zip(pids, collect("pipes", pids, look, until, blame=lambda p: {"pid": p})):
        for inode, fd, reads, writes in ends or ():
            found.setdefault(inode, []).append((pid, fd, reads, writes))
    return found


RANK_NAMES = (("RANK", "LOCAL_RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                                     "OMPI_COMM_WORLD_SIZE"),
              ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))


class Job(object):
    """Which processes are one run: the main one, its launcher, ranks and helpers."""

    def __init__(self, table: Table, target: int, until: float):
        self.table, self.until, self.by = table, until, "children"
        self.launcher, self.main = None, target  # type: int | None, int
        self._find_main(target)
        ours = self.launcher in table.rows and table.rows[self.launcher]["comm"] != "slurmstepd"
        top = self.launcher if ours else self.main
        members = [p for p in ([self.launcher] if self.launcher else []) + [self.main, target] if p in table.rows]
        for root in (self.launcher, top, self.main, target):
            if root in table.rows and (root == self.main or root != 1):
                members += table.descendants(root or 0)
        members = [p for i, p in enumerate(members) if p not in members[:i] and p not in table.me
                   and not (p in table.rows and table.kernel(p))]
        table.read_commands(members, until)
        order = {"main": 0, "rank": 0, "launcher": 1, "fork": 2, "spawned": 2}  # type: dict
        self.kinds = {p: table.kind(p) for p in members}
        if self.main in self.kinds and self.kinds[self.main] != "launcher":
            self.kinds[self.main] = "main"
        self.rank_pids = self._rank_pids()
        for pid in self.rank_pids:
            if pid != self.main:
                self.kinds[pid] = "rank"
        members.sort(key=lambda p: (p != self.main, p != target, order.get(self.kinds[p], 3),
                                    table.rows[p]["starttime"]))
        self.left_out = max(0, len(members) - MAX_MEMBERS)
        self.members = members[:MAX_MEMBERS]

    def _find_main(self, target: int) -> None:
        table = self.table
        if target in table.me:  # a run that asks about itself: only what is below it is the asker
            table.me = table.me.intersection(table.descendants(target))
        table.read_commands([target] + table.ancestors(target) + table.descendants(target)[:2000], self.until)
        pid = target
        if table.launcher(pid) or (table.wrapper(pid) and not table.python(pid)):
            self.main = self._below(pid)
            pid = self.main
        for _ in range(8):  # a worker, compiler or tracker was named: its job is meant
            kind = table.kind(pid)
            parent = table.rows[pid]["ppid"]
            if kind in ("fork", "spawned", "resource_tracker", "compile_worker", "compiler", "tracker",
                        "prober") and parent > 1 and parent in table.rows \
                    and (table.python(parent) or table.kind(parent) in ("fork", "spawned", "compiler", "compile_worker",
                                                                        "shell")):
                if table.launcher(parent):
                    break
                pid = parent
            else:
                break
        self.main = pid
        above = pid
        for _ in range(3):  # the launcher may stand behind a shell or two
            above = table.rows[above]["ppid"] if above in table.rows else 0
            if above <= 1 or above not in table.rows:
                break
            if table.launcher(above):
                self.launcher, self.by = above, "launcher"
                break
            if not table.wrapper(above):
                break
        if table.launcher(target) and self.launcher is None:
            self.launcher, self.by = target, "launcher"
        if self.launcher is not None and table.kind(target) == "launcher":
            self.main = self._below(self.launcher)

    def _below(self, pid: int) -> int:
        """The trainer under a shell or launcher: the highest descendant that looks most like one."""
        table, best, best_score = self.table, pid, -1
        for child in table.descendants(pid)[:500]:
            if child in table.me:
                continue
            score = table.score(child)[0]
            if table.launcher(child):
                self.launcher, self.by = child, "launcher"
                continue
            if score > best_score and score > 0:
                best, best_score = child, score
        if best_score < 0:
            plain = [c for c in table.children.get(pid, ()) if c not in table.me and table.kind(c) not in ("tee",
                "tracker", "prober")]
            return plain[0] if len(plain) == 1 and not table.launcher(pid) else pid
        return best

    def _rank_pids(self) -> "list[int]":
        if self.launcher is None or self.launcher not in self.table.rows:
            return []
        table, found = self.table, []
        stack = list(table.children.get(self.launcher, ()))
        for pid in stack:
            if len(stack) > 4000:
                break
            if table.kind(pid) in ("shell", "launcher"):
                stack.extend(table.children.get(pid, ()))
            elif (table.python(pid) or pid == self.main) and self.kinds.get(pid) not in ("resource_tracker", "tracker",
                "compile_worker"):
                found.append(pid)
        return found

    def ranks(self, environs: dict) -> "tuple[list[dict], int | None]":
        found, world = [], None
        for order, pid in enumerate(sorted(self.rank_pids)):
            env = environs.get(pid) or {}
            entry = {"pid": pid, "rank": None, "local_rank": None, "by": "order"}
            for rank, local, size in RANK_NAMES:
                if env.get(rank, "").isdigit():
                    entry.update(rank=int(env[rank]), by="env", local_rank=int(env[local]) if env.get(local,
                        "").isdigit() else None)
                    world = int(env[size]) if env.get(size, "").isdigit() else world
                    break
            else:
                entry["local_rank"] = order
                match = re.search(r"--local[_-]rank[= ](\d+)", self.table.line(pid))
                if match:
                    entry.update(local_rank=int(match.group(1)), by="cmdline")
            found.append(entry)
        if not found and self.main is not None:
            env = environs.get(self.main) or {}
            for rank, local, size in RANK_NAMES[:3]:
                if env.get(rank, "").isdigit() and env.get(size, "").isdigit():
                    world = int(env[size])
                    found.append({"pid": self.main, "rank": int(env[rank]), "local_rank": int(env[local])
                                  if env.get(local, "").isdigit() else None,
                                  "by": "env"})
                    break
        return found, world

    def nproc(self) -> "int | None":
        line = self.table.line(self.launcher or 0)
        match = re.search(r"(?:--nproc[-_]per[-_]node|--num[-_]processes|--num[-_]gpus|--ntasks|(?<!\S)-np|"
                          r"(?<!\S)-n)[= ]+(\d+)", line)
        return int(match.group(1)) if match else None


def training_candidates(table: Table, until: float, minimum: int = 30) -> "list[tuple[int, int, list[str]]]":
    """(pid, score, why) of the trainings on this host, one a job, the likeliest first; looks into maps and at GPU
    holders.
    """
    table.read_commands([p for p in table.rows if p not in table.me], until)
    me = os.getuid()
    mapped = [p for p in table.rows if p not in table.me and not table.kernel(p) and table.rows[p]["state"] not in "ZX"
              and table.kind(p) not in ("tee", "shell", "prober")
              and (table.python(p) or table.rows[p]["rss"] > 200 << 20) and (me == 0 or table.uid(p) == me)]
    mapped.sort(key=lambda p: -table.rows[p]["rss"])
    mapped = mapped[:150]
    libs = dict(zip(mapped, collect("maps", mapped, libraries, until, each=0.4, blame=lambda p: {"pid": p,
        "path": "/proc/%d/maps" % p})))
    found = []
    for pid in table.rows:
        if pid in table.me or table.kernel(pid):
            continue
        score, why = table.score(pid)
        seen = libs.get(pid) or {}
        names = [n for n in ("torch", "jax", "tensorflow", "mxnet", "paddle") if n in seen.get("libs", ())]
        if names and table.kind(pid) not in ("resource_tracker", "compile_worker", "tracker") and not (score == 0
            and "eyas" in table.line(pid)):
            score += 45
            why = why + [names[0] + " in its maps"]
        if seen.get("gpus"):
            score += 30
            why = why + ["holds " + seen["gpus"][0]]
        if score >= minimum:
            found.append((pid, min(score, 100), why))
    jobs = {}  # type: dict
    pids = {p: (s, w) for p, s, w in found}
    for pid, score, why in found:
        top = pid
        for above in table.ancestors(pid):
            if above in pids and not (table.wrapper(above) and not table.launcher(above)):
                top = above
        if top not in jobs or score > jobs[top][0]:
            jobs[top] = (score, why)
    return sorted(((p, s, w) for p, (s, w) in jobs.items()), key=lambda x: (-x[1], -table.rows[x[0]]["starttime"]))


# ------------------------------------------------------------------------------------------------------------- identity

LIBS = (("torch", r"/libtorch|/torch/lib/"), ("cuda", r"/libcuda\.so"), ("cudnn", r"/libcudnn"), ("nccl", r"/libnccl"),
        ("jax", r"/jaxlib/|xla_extension"),
        ("tensorflow", r"/libtensorflow|/tensorflow/python/"), ("triton", r"/triton/_C/|libtriton"),
        ("ptxjit", r"libnvidia-ptxjitcompiler"),
        ("mkl", r"/libmkl"), ("gomp", r"/libgomp"), ("iomp", r"/libiomp"), ("numpy", r"/numpy/"),
        ("cv2", r"/cv2/|/libopencv"), ("h5py", r"/h5py/"),
        ("pyarrow", r"/pyarrow/|/libarrow"), ("tokenizers", r"/tokenizers/"), ("rich", r"/rich/"), ("mpi", r"/libmpi"),
        ("uring", r"io_uring|/liburing"),
        ("rocm", r"/libamdhip|/libhsa-runtime"), ("mxnet", r"/libmxnet"), ("paddle", r"/libpaddle"),
        ("cupti", r"/libcupti"), ("fuse", r"/libfuse"),
        ("grpc", r"/grpc/"), ("wandb", r"/wandb/"))
LIBS_RE = [(name, re.compile(pattern)) for name, pattern in LIBS]
ENV_EXACT = frozenset((
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES "
    "HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUDA_CACHE_PATH CUDA_DEVICE_ORDER "
    "CUDA_CACHE_DISABLE CUDA_MODULE_LOADING PYTHONUNBUFFERED "
    "PYTHONFAULTHANDLER TOKENIZERS_PARALLELISM HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE "
    "HF_HUB_ENABLE_HF_TRANSFER HF_DATASETS_OFFLINE "
    "TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY WANDB_MODE WANDB_DIR WANDB_SILENT WANDB_DISABLED "
    "WANDB_PROJECT TMPDIR HOME USER LOGNAME "
    "XDG_CACHE_HOME TERM COLUMNS PWD OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS KMP_AFFINITY KMP_BLOCKTIME "
    "GOMP_CPU_AFFINITY TQDM_DISABLE "
    "SLURM_JOB_ID SLURM_JOBID SLURM_PROCID SLURM_LOCALID SLURM_NTASKS SLURM_NODEID SLURM_NNODES SLURM_JOB_NODELIST "
    "SLURM_STEP_ID SLURM_JOB_NAME "
    "SLURM_RESTART_COUNT SLURM_ARRAY_TASK_ID SLURM_JOB_PARTITION SLURM_CPUS_PER_TASK SLURM_MEM_PER_NODE "
    "SLURM_JOB_END_TIME SLURM_SUBMIT_DIR "
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE MPI_LOCALRANKID "
    "KUBERNETES_SERVICE_HOST "
    "LD_PRELOAD JOB_COMPLETION_INDEX PBS_JOBID LSB_JOBID").split())
ENV_PREFIX = ("NCCL_", "TORCH_", "TORCHELASTIC_", "TORCHDYNAMO", "TORCHINDUCTOR", "TRITON_", "XLA_", "JAX_", "TF_",
              "PYTORCH_", "GLOO_", "DEEPSPEED_", "ACCELERATE_",
              "FI_", "UCX_", "RDMAV_", "EYAS_", "RAY_")


def libraries(pid: int) -> dict:
    """Which known libraries a process has mapped, its big mapped data files, and the GPU device files it holds."""
    libs, mapped, paths = [], {}, set()  # type: list, dict, set
    blob = slurp("/proc/%d/maps" % pid, 4 << 20).decode("utf-8", "replace")
    for line in blob.splitlines():
        at = line.find("/")
        if at < 0:
            continue
        path = line[at:]
        paths.add(path)
        if not is_library(path) and not path.startswith(("/dev/", "/memfd", "/SYSV", "/usr/",
                                                         "/anon_hugepage")) and " (deleted)" not in path:
            start, _, end = line.split(" ", 1)[0].partition("-")
            mapped[path] = mapped.get(path, 0) + int(end, 16) - int(start, 16)
    joined = "\n".join(paths)
    for name, pattern in LIBS_RE:
        if pattern.search(joined):
            libs.append(name)
    big = sorted(((size, path) for path, size in mapped.items() if size > 1 << 20), reverse=True)[:24]
    gpus = set()
    try:
        for name in os.listdir("/proc/%d/fd" % pid)[:3000]:
            target = readlink("/proc/%d/fd/%s" % (pid, name)) or ""
            if re.match(r"/dev/(nvidia\d+|kfd)$", target):
                gpus.add(target)
    except OSError:
        pass
    return {"libs": libs, "mapped": [[path, size] for size, path in big], "gpus": sorted(gpus)}


def read_environ(pid: int) -> dict:
    found = {}
    for entry in slurp("/proc/%d/environ" % pid, 256 << 10).split(b"\0"):
        name, _, value = entry.decode("utf-8", "replace").partition("=")
        if (name in ENV_EXACT or name.startswith(ENV_PREFIX)) and not (SECRET.search(name)):
            found[name] = masked(value[:300])
    return found


def identify(job: tuple) -> dict:
    """Everything about one process that is read once; the argument says which of the costly parts are wanted."""
    pid, want_maps = job
    base = "/proc/%d/" % pid
    out = {"exe": readlink(base + "exe"), "cwd": readlink(base + "cwd"), "environ": None, "maps": None}  # type: dict
    out["ns_mnt"] = readlink(base + "ns/mnt")
    root = readlink(base + "root")
    out["root"] = root
    limits = {}  # type: dict
    for line in (text(base + "limits", 4096) or "").splitlines():
        for label, key in (("Max open files", "nofile"), ("Max core file size", "core"), ("Max address space", "as"),
                           ("Max locked memory", "memlock")):
            if line.startswith(label):
                value = line[26:].split()[0]
                limits[key] = int(value) if value.isdigit() else None
    out["limits"] = limits
    out["oom_score"], out["oom_score_adj"] = number(base + "oom_score"), number(base + "oom_score_adj")
    out["cgroup"] = text(base + "cgroup", 8192)
    try:
        out["environ"] = read_environ(pid)
    except OSError as error:
        out["environ_error"] = why_not(error)
    if want_maps:
        try:
            out["maps"] = libraries(pid)
        except OSError as error:
            out["maps_error"] = why_not(error)
    return out


def cpu_count(spec: "str | None") -> "int | None":
    total = 0
    for part in (spec or "").strip().split(","):
        low, _, high = part.partition("-")
        if not low.isdigit():
            return None
        total += int(high or low) - int(low) + 1
    return total or None


# ---------------------------------------------------------------------------------------------------------------- files

NETWORK_FS = re.compile(r"^(nfs\d?|cifs|smb\w*|lustre|ceph|gpfs|beegfs|glusterfs|afs|9p|pvfs2|orangefs|wekafs|ocfs2|"
                        r"gfs2|virtiofs|vastnfs|daos|fuse\b.*)$")
OUTPUT_DIR = re.compile(r"(checkpoint|ckpt|output|outputs|runs?|results?|exp(eriment)?s?|lightning_logs|wandb|mlruns|"
                        r"models?|saved?|snapshots?|tb|tensorboard|logs?)", re.I)
CHECKPOINT = re.compile(r"(checkpoint|ckpt|\.pt$|\.pth$|\.bin$|\.safetensors|\.distcp|optim|epoch[=_-]?\d|"
                        r"step[=_-]?\d|\.h5$|\.keras$|\.npz$|\.orbax|\.msgpack$|"
                        r"trainer_state|rng_state|\.zarr)", re.I)
TEMPORARY = re.compile(r"(\.tmp|\.temp|\.part|\.incomplete|\.partial|^tmp|/tmp[-_.]?|\.orbax-checkpoint-tmp|~$|"
                       r"\.lock$)", re.I)
LOG_NAME = re.compile(r"(\.log(\.\d+)?$|\.out$|\.err$|nohup|std(out|err)|\blog[s_.-]|train.*\.txt$|slurm-\d+|"
                      r"events\.jsonl$|console|output\.txt$)", re.I)
METRICS = re.compile(r"(metrics|history|scalars|progress|results|stats|loss)[\w.-]*\.(jsonl?|csv|tsv)$|tfevents|"
                     r"\.wandb$", re.I)


def parse_mountinfo(blob: str) -> dict:
    found = {}  # type: dict
    for line in blob.splitlines():
        left, _, right = line.partition(" - ")
        f, g = left.split(), right.split()
        if len(f) < 6 or len(g) < 2:
            continue
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m.group(1), 8)), f[4])
        fstype = g[0]
        found[int(f[0])] = {"mountpoint": point, "fstype": fstype, "source": g[1], "dev": f[2], "device": None,
                            "root": f[3],
                            "network": bool(NETWORK_FS.match(fstype)), "fuse": fstype.startswith("fuse"),
                            "ro": "ro" in f[5].split(","),
                            "used_by": [], "statvfs": None, "timed_out": False, "options": (g[2] if len(g) > 2
                                else "")[:200]}
    return found


def mountinfo_of(pid: int) -> "str | None":
    return text("/proc/%d/mountinfo" % pid, 2 << 20)


def device_names() -> dict:
    return {f[0] + ":" + f[1]: f[2] for f in (line.split() for line in (text("/proc/diskstats", 262144)
        or "").splitlines()) if len(f) > 2}


def mount_of(mounts: dict, path: str) -> "int | None":
    """The mount a path lies on, by its name alone: touching it could block."""
    best, length = None, -1
    for key, mount in mounts.items():
        point = mount["mountpoint"].rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= length:
            best, length = key, len(point)
    return best


class Reach(object):
    """How a path of the target is touched from here: through its root when it lives in another mount namespace; never
    on a mount that hung.
    """

    def __init__(self, pid: "int | None", same_mnt: bool, mounts: dict):
        self.pid, self.same, self.mounts, self.bad = pid, same_mnt, mounts, set()  # type: ignore[var-annotated]

    def __call__(self, path: str) -> str:
        return path if self.same or self.pid is None or not path.startswith("/") else "/proc/%d/root%s" % (self.pid,
            path)

    def blocked(self, path: "str | None") -> bool:
        """True for paths on mounts where something already timed out."""
        if not path or not path.startswith("/"):
            return False
        self.update()
        return mount_of(self.mounts, path) in self.bad

    def update(self) -> None:
        for entry in Courier.timed_out:
            path = entry.get("path")
            if path and path.startswith("/") and not path.startswith("/proc/"):
                self.bad.add(mount_of(self.mounts, path))


_libc = []  # type: list


def libc():  # type: ignore[no-untyped-def]
    if not _libc:
        import ctypes

        _libc.append(ctypes.CDLL(None, use_errno=True))
    return _libc[0]


def cached_share(fd: int, size: int) -> "dict | None":
    """How much of a file is in the page cache, without reading it: cachestat, else mincore (own files), else RWF_NOWAIT
    on a few offsets.
    """
    import ctypes

    if size <= 0:
        return None
    pages = (size + PAGE - 1) // PAGE
    ask = (ctypes.c_uint64 * 2)(0, size)
    got = (ctypes.c_uint64 * 5)()
    if libc().syscall(ctypes.c_long(451), ctypes.c_uint(fd), ctypes.byref(ask), ctypes.byref(got),
                      ctypes.c_uint(0)) == 0:
        return {"cached": round(min(1.0, got[0] / pages), 4), "cached_by": "cachestat", "dirty": got[1] * PAGE,
                "writeback": got[2] * PAGE,
                "evicted": got[3] * PAGE, "recently_evicted": got[4] * PAGE}
    owner = os.fstat(fd).st_uid
    if owner == os.geteuid() or os.geteuid() == 0:
        span = min(size, 1 << 32)
        vector = (ctypes.c_ubyte * ((span + PAGE - 1) // PAGE))()
        libc().mmap.restype = ctypes.c_void_p
        # PROT_READ, MAP_SHARED
        start = libc().mmap(None, ctypes.c_size_t(span), 1, 1, ctypes.c_int(fd), ctypes.c_long(0))
        if start and start != ctypes.c_void_p(-1).value:
            bad = libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(span), vector)
            libc().munmap(ctypes.c_void_p(start), ctypes.c_size_t(span))
            if not bad:
                return {"cached": round(sum(v & 1 for v in bytearray(vector)) / float(len(vector)), 4),
                        "cached_by": "mincore"}
    if hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT"):
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # on our own descriptor: no read-ahead behind the question
        hits, asked, one = 0, 0, bytearray(1)
        for i in range(64):
            try:
                os.preadv(fd, [one], (size - 1) * i // 63, os.RWF_NOWAIT)
                hits += 1
            except BlockingIOError:
                pass
            except OSError:
                return None
            asked += 1
        return {"cached": round(hits / float(asked), 3), "cached_by": "nowait"}
    return None


def open_quiet(path: str) -> int:
    """Open for reading without touching the access time where we may, and without blocking on FIFOs."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        return os.open(path, flags)


def inspect_file(path: str) -> dict:
    """Size, times and page-cache share of one regular file."""
    seen = os.stat(path)
    out = {"size": seen.st_size, "mtime": seen.st_mtime, "kind": "file", "ino": seen.st_ino}
    if not stat_mod.S_ISREG(seen.st_mode):
        kinds = {stat_mod.S_IFDIR: "dir", stat_mod.S_IFIFO: "fifo", stat_mod.S_IFCHR: "char", stat_mod.S_IFBLK: "block"}
        out["kind"] = kinds.get(stat_mod.S_IFMT(seen.st_mode), "other")
        return out
    try:
        fd = open_quiet(path)
    except OSError as error:
        out["cache_error"] = why_not(error)
        return out
    try:
        share = cached_share(fd, seen.st_size)
        if share:
            out.update(share)
    finally:
        os.close(fd)
    return out


def survey_dir(job: tuple) -> dict:
    """How many files of this extension lie beside an open data file, how big they are together, and how much of some is
    cached.
    """
    path, ext, open_names = job
    began, names, dirs = time.monotonic(), [], 0
    exact = True
    with os.scandir(path) as entries:
        for count, entry in enumerate(entries):
            if os.path.splitext(entry.name)[1] == ext:
                names.append(entry.name)
            elif "." not in entry.name and len(names) < 50 and dirs < 10000 and entry.is_dir(follow_symlinks=False):
                dirs += 1
            if count > 60000 or time.monotonic() - began > 0.5:
                exact = False
                break
    out = {"files": len(names), "bytes": 0, "exact": exact, "dirs": dirs, "cached": None}
    if not names:
        return out
    names.sort()
    picks = names if len(names) <= 200 else [names[i * len(names) // 200] for i in range(200)]
    total, done = 0, 0
    for name in picks:
        try:
            total += os.stat(os.path.join(path, name)).st_size
            done += 1
        except OSError:
            pass
        if time.monotonic() - began > 0.9:
            break
    if done:
        out["bytes"] = int(total * len(names) / float(done))
        out["exact"] = exact and done == len(names)
    others = [n for n in picks if n not in open_names]
    shares = []
    for i in range(min(12, len(others))):
        try:
            share = inspect_file(os.path.join(path, others[i * len(others) // min(12, len(others))])).get("cached")
        except OSError:
            share = None
        if share is not None:
            shares.append(share)
        if time.monotonic() - began > 1.2:
            break
    if shares:
        out["cached"] = round(sum(shares) / len(shares), 4)
        out["checked"] = len(shares)
    return out


def statvfs_of(path: str) -> dict:
    got = os.statvfs(path)
    return {"size": got.f_blocks * got.f_frsize, "free": got.f_bfree * got.f_frsize,
            "avail": got.f_bavail * got.f_frsize, "files": got.f_files,
            "ffree": got.f_ffree}


def shm_use(path: str) -> dict:
    got = statvfs_of(path)
    return {"size": got["size"], "free": got["free"], "used": got["size"] - got["free"],
            "entries": len(os.listdir(path)), "by_job": None}


# ----------------------------------------------------------------------------------------------------- logs and outputs


def read_log(job: tuple) -> dict:
    """Head and tail of a log as raw bytes; the log reader on the judging side makes sense of them."""
    path, name, head, tail = job
    fd = open_quiet(path)
    try:
        seen = os.fstat(fd)
        out = {"size": seen.st_size, "mtime": seen.st_mtime, "ino": seen.st_ino, "head": None, "tail": None}  # type: dict
        if not stat_mod.S_ISREG(seen.st_mode):
            return out
        start = max(0, seen.st_size - tail)
        out["tail"] = {"offset": start, "b64": base64.b64encode(pread_all(fd, tail, start)).decode()}
        if start > 0:
            out["head"] = {"offset": 0, "b64": base64.b64encode(pread_all(fd, min(head, start), 0)).decode()}
        try:
            now = os.stat(name)
            out["rotated"] = (now.st_ino, now.st_dev) != (seen.st_ino, seen.st_dev)
        except OSError:
            out["rotated"] = False
        return out
    finally:
        os.close(fd)


def pread_all(fd: int, size: int, offset: int) -> bytes:
    parts = []
    while size > 0:
        data = os.pread(fd, size, offset)
        if not data:
            break
        parts.append(data)
        size -= len(data)
        offset += len(data)
    return b"".join(parts)


def recent_outputs(job: tuple) -> "list[dict]":
    """Files of the last hour (or since `since`) in directories named like a place for results, newest first."""
    root, since = job
    began, found, stack, seen = time.monotonic(), [], [(root, 0)], 0
    while stack and seen < 4000 and time.monotonic() - began < 0.6:
        path, depth = stack.pop(0)
        try:
            entries = os.scandir(path)
        except OSError:
            continue
        with entries:
            for entry in entries:
                seen += 1
                if seen > 4000:
                    break
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if depth < 4 and (depth > 0
                                          or OUTPUT_DIR.search(entry.name)) and not entry.name.startswith((".git",
                                              "node_modules", "__pycache__", ".venv")):
                            stack.append((entry.path, depth + 1))
                    elif entry.is_file(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        if info.st_mtime >= since and (depth > 0 or CHECKPOINT.search(entry.name)
                                                       or LOG_NAME.search(entry.name)
                                                       or METRICS.search(entry.name)):
                            found.append({"path": entry.path, "size": info.st_size, "mtime": info.st_mtime,
                                          "ino": info.st_ino})
                except OSError:
                    continue
    found.sort(key=lambda f: -f["mtime"])
    return found[:40]


def output_kind(path: str) -> str:
    name = path.lower()
    if "tfevents" in name:
        return "tfevents"
    if "/wandb/" in name or name.endswith(".wandb"):
        return "wandb"
    if CHECKPOINT.search(path):
        return "checkpoint"
    if name.endswith((".jsonl", ".csv", "metrics.json")):
        return "metrics"
    return "log" if LOG_NAME.search(os.path.basename(path)) else "other"


def find_path(word: str) -> "tuple[str, str] | None":
    """What a path names: ("log" or "run_dir", its real name)."""
    real = os.path.realpath(os.path.expanduser(word))
    if os.path.isdir(real):
        return "run_dir", real
    return ("log", real) if os.path.exists(real) else None


def log_entry(path: "str | None", how: str, pid: "int | None" = None, fd: "int | None" = None, kind: str = "file",
              **more: object) -> dict:
    """An entry of `logs`, before anything is known of its bytes."""
    entry = {"path": path, "how": how, "pid": pid, "fd": fd, "kind": kind, "size": None, "mtime": None, "age_s": None,
             "deleted": False, "rotated": False, "append": None,
             "head": None, "tail": None, "growth": [], "via": None, "mnt": None, "error": None}  # type: dict
    entry.update(more)
    return entry


def newest_logs(job: tuple) -> "list[str]":
    """Files named like logs in a directory, newest first."""
    path, since = job
    found = []
    with os.scandir(path) as entries:
        for count, entry in enumerate(entries):
            if count > 3000:
                break
            try:
                if LOG_NAME.search(entry.name) and entry.is_file(follow_symlinks=False):
                    mtime = entry.stat(follow_symlinks=False).st_mtime
                    if mtime >= since:
                        found.append((mtime, entry.path))
            except OSError:
                continue
    return [p for _, p in sorted(found, reverse=True)[:4]]


CACHES = (("inductor", "TORCHINDUCTOR_CACHE_DIR", "{tmp}/torchinductor_{user}"), ("triton", "TRITON_CACHE_DIR",
    "{home}/.triton/cache"),
          ("cuda", "CUDA_CACHE_PATH", "{home}/.nv/ComputeCache"), ("torch_extensions", "TORCH_EXTENSIONS_DIR",
                                                                   "{xdg}/torch_extensions"),
          ("hf_hub", "HF_HUB_CACHE", "{hf}/hub"), ("hf_datasets", "HF_DATASETS_CACHE", "{hf}/datasets"),
          ("jax", "JAX_COMPILATION_CACHE_DIR", ""))


def cache_dirs(env: dict, home: "str | None", user: "str | None") -> "list[tuple[str, str]]":
    home = env.get("HOME") or home or "/nonexistent"
    xdg = env.get("XDG_CACHE_HOME") or home + "/.cache"
    values = {"tmp": env.get("TMPDIR") or "/tmp", "user": re.sub(r"[\\/:*?\"<>|]", "_", env.get("USER")
        or env.get("LOGNAME") or user or "?"), "home": home, "xdg": xdg,
              "hf": env.get("HF_HOME") or xdg + "/huggingface"}
    return [(name, env.get(variable) or default.format(**values)) for name, variable, default in CACHES
            if env.get(variable) or default]


def survey_cache(path: str) -> dict:
    """Entries two levels deep, the newest name, locks and unfinished downloads; bounded."""
    count, newest, newest_name, locks, unfinished, stack = 0, 0.0, None, [], [], [(path, 0)]
    began = time.monotonic()
    while stack and count < 4000 and time.monotonic() - began < 0.3:
        here, depth = stack.pop(0)
        try:
            entries = os.scandir(here)
        except OSError:
            if depth == 0:
                raise
            continue
        with entries:
            for entry in entries:
                count += 1
                try:
                    info = entry.stat(follow_symlinks=False)
                    if info.st_mtime > newest:
                        newest, newest_name = info.st_mtime, entry.path[len(path) + 1:]
                    if entry.name == "lock" or entry.name.endswith(".lock"):
                        locks.append(entry.path[len(path) + 1:])
                    elif entry.name.endswith(".incomplete"):
                        unfinished.append({"name": entry.path[len(path) + 1:], "size": info.st_size,
                                           "mtime": info.st_mtime})
                    if depth < 2 and entry.is_dir(follow_symlinks=False):
                        stack.append((entry.path, depth + 1))
                except OSError:
                    continue
                if count >= 4000:
                    break
    return {"entries": count, "mtime": newest, "newest": newest_name, "locks": locks[:20],
            "incomplete": unfinished[:20]}


# ---------------------------------------------------------------------------------------------------- network and locks

TCP_STATES = {1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2", 6: "TIME_WAIT",
              7: "CLOSE", 8: "CLOSE_WAIT", 9: "LAST_ACK",
              10: "LISTEN", 11: "CLOSING"}
KNOWN_PORTS = (28028, 29400, 29500)


def address(blob: str) -> "tuple[str, int]":
    host, _, port = blob.partition(":")
    raw = bytes.fromhex(host)
    words = b"".join(raw[i:i + 4][::-1] for i in range(0, len(raw), 4)) if sys.byteorder == "little" else raw
    if len(words) == 4:
        return socket.inet_ntop(socket.AF_INET, words), int(port, 16)
    if words[:12] == b"\0" * 10 + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, words[12:]), int(port, 16)
    return socket.inet_ntop(socket.AF_INET6, words), int(port, 16)


def parse_tcp(blob: str, proto: str, wanted: "set[int] | None" = None, ports: tuple = ()) -> "list[dict]":
    found = []
    for line in blob.splitlines()[1:]:
        f = line.split()
        if len(f) < 10:
            continue
        inode, state = int(f[9]), TCP_STATES.get(int(f[3], 16), f[3])
        if wanted is not None and inode not in wanted and not (state == "LISTEN" and int(f[1].rsplit(":", 1)[1],
            16) in ports):
            continue
        local, lport = address(f[1])
        peer, pport = address(f[2])
        tx, _, rx = f[4].partition(":")
        found.append({"inode": inode, "proto": proto, "state": state, "local": local, "lport": lport, "peer": peer,
                      "pport": pport, "tx_queue": int(tx, 16),
                      "rx_queue": int(rx, 16), "retrans": int(f[6], 16), "timer": int(f[5].split(":")[0], 16),
                      "uid": int(f[7])})
    return found


def tcp_table(pid: int, wanted: "set[int]", ports: tuple) -> "list[dict]":
    found = []
    for proto in ("tcp", "tcp6"):
        blob = text("/proc/%d/net/%s" % (pid, proto), 4 << 20)
        if blob:
            found += parse_tcp(blob, proto, wanted, ports)
    return found


def unix_peers(pid: int, wanted: "set[int]") -> "list[dict]":
    found = []
    for line in (text("/proc/%d/net/unix" % pid, 1 << 20) or "").splitlines()[1:]:
        f = line.split()
        if len(f) >= 7 and int(f[6]) in wanted:
            found.append({"inode": int(f[6]), "proto": "unix", "state": {"01": "UNCONNECTED", "02": "CONNECTING",
                "03": "ESTABLISHED"}.get(f[5], f[5]),
                          "path": f[7] if len(f) > 7 else None, "peer_inode": None})
    try:
        links = unix_links() if found else {}
    except OSError:
        links = {}
    for entry in found:
        entry["peer_inode"] = links.get(entry["inode"])
    return found


def unix_links() -> dict:
    """inode -> inode at the other end of every connected unix socket here, from the kernel's socket diagnosis."""
    found = {}  # type: dict
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:  # NETLINK_SOCK_DIAG
        link.settimeout(0.3)
        ask = struct.pack("<BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 4, 0xFFFFFFFF, 0xFFFFFFFF)  # show the peer
        link.send(struct.pack("<IHHII", 16 + len(ask), 20, 0x301, 1, 0) + ask)
        for _ in range(200):
            blob, at = link.recv(1 << 16), 0
            while at + 16 <= len(blob):
                size, kind = struct.unpack_from("<IH", blob, at)
                if kind in (2, 3) or size < 16:  # an error, or the end
                    return found
                inode = struct.unpack_from("<I", blob, at + 20)[0]
                attribute = at + 32
                while attribute + 8 <= at + size:
                    length, name = struct.unpack_from("<HH", blob, attribute)
                    if name == 2 and length >= 8:
                        found[inode] = struct.unpack_from("<I", blob, attribute + 4)[0]
                    attribute += max(4, (length + 3) & ~3)
                at += (size + 3) & ~3
    return found


def parse_locks(blob: str) -> "list[dict]":
    """`/proc/locks`: holders with their waiters (`->` lines)."""
    found = {}  # type: dict
    for line in blob.splitlines():
        f = line.split()
        if len(f) < 6:
            continue
        number_, rest = f[0], f[1:]
        waits = rest[0] == "->"
        rest = rest[1:] if waits else rest
        try:
            dev, ino = rest[4].rsplit(":", 1)
            entry = {"id": number_.rstrip(":"), "type": rest[0], "mode": rest[2], "holder": int(rest[3]), "dev": dev,
                     "ino": int(ino), "path": None, "waiters": []}
        except (IndexError, ValueError):
            continue
        if waits and number_ in found:
            found[number_]["waiters"].append(entry["holder"])
        elif not waits:
            found[number_] = entry
    return list(found.values())


def is_hex_dev(major: str, minor: str, dev: str) -> bool:
    """Whether the device of a line in /proc/locks (hexadecimal) is this one of mountinfo (decimal)."""
    try:
        return "%d:%d" % (int(major, 16), int(minor, 16)) == dev
    except ValueError:
        return False


LOCK_NAME = re.compile(r"(\.lock|\.lck|/lock)$")
NAPS = re.compile(r"nanosleep|hrtimer")
SELECTS = re.compile(r"poll_schedule|do_select")
LOCK_WAITS = re.compile(r"locks_lock|flock_lock|posix_lock|fcntl_setlk")


def may_nap(pid: int, look: dict) -> bool:
    """Whether a process may be one that tries a lock, sleeps a little and tries again, or waits in flock or fcntl."""
    main = look["threads"].get(str(pid)) or {}
    site, call = main.get("wchan") or "", (main.get("syscall") or {}).get("name")
    return bool(main.get("state") == "R" or NAPS.search(site)  # time.sleep was a select before Python 3.11
                or (SELECTS.search(site) and call in (None, "select", "pselect6"))
                or any(LOCK_WAITS.search(t.get("wchan") or "") for t in look["threads"].values()))


def lock_of(pid: int, fd: str) -> "str | None":
    """The lock that a descriptor holds, by its `lock:` line: "FLOCK WRITE"."""
    try:
        for line in slurp("/proc/%d/fdinfo/%s" % (pid, fd), 4096).decode("utf-8", "replace").splitlines():
            if line.startswith("lock:"):
                f = line.split()
                return "%s %s" % (f[2], f[4]) if len(f) > 4 else "lock"
    except OSError:
        pass
    return None


def lock_owner(path: str, size: int) -> "dict | None":
    """Who made a lock file, where it says so itself: a number, then perhaps a host name, each on its line."""
    if not 0 < size <= 256:
        return None
    lines = slurp(path, 256).decode("utf-8", "replace").split("\n")
    if not re.match(r"\s*\d{1,7}\s*$", lines[0]):
        return None
    pid, host = int(lines[0]), lines[1].strip() if len(lines) > 1 else ""
    here = not host or host == os.uname().nodename
    return {"pid": pid, "host": host or None, "alive": os.path.exists("/proc/%d" % pid) if here else None}


class Turns(object):
    """The waking turns of a main thread, from one nap to the next, and the files that were opened in each.

    A turn is counted by the nap that ends it (a voluntary switch), not by its slices of a CPU: whoever is driven off
    the CPU in the middle of a turn, by us for example when his opening wakes us, gets a second slice, in which he
    opens nothing.
    """

    def __init__(self, pid: int):
        self.base, self.awake = "/proc/%d/task/%d/" % (pid, pid), False
        self.slices, self.naps = self._slices(), self._naps()
        self.first, self.opened = self.naps, {}  # type: int, dict

    def look(self, marks: "set[int]") -> None:
        slices = self._slices()
        if slices == self.slices and not self.awake:
            return
        naps, begun = self._naps(), self.naps
        self.awake = naps == begun  # ran, and has not gone to sleep again
        for turn in range(begun, max(naps, begun + 1)):
            self.opened.setdefault(turn, set()).update(marks)
        self.slices, self.naps = slices, naps

    def wakes(self) -> int:
        """Turns seen from their beginning to their end."""
        return sum(self.first <= turn < self.naps for turn in self.opened)

    def matched(self, mark: "int | None") -> int:
        return sum(mark in marks for turn, marks in self.opened.items() if self.first <= turn < self.naps)

    def _slices(self) -> int:
        times = schedstat(self.base + "schedstat")
        return times[2] if times else 0

    def _naps(self) -> int:
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text(self.base + "status", 8192) or "", re.M)
        return int(found.group(1)) if found else 0


class LockHunt(object):
    """Which lock file do these processes wait for, and who has it? For locks that are tried again and again with naps
    between: such a file is closed while its waiter sleeps, so no look at descriptors shows it.

    Candidates are the files that others hold locked, and lock files in the places given. inotify tells when one of them
    is opened; a process that wakes just when it is opened, every time, is the one that opens it.
    """

    def __init__(self, looks: dict, order: "list[int]", seeds: "list[str]", reach: Reach):
        self.looks, self.nappers, self.reach = looks, order[:8], reach
        self.found = {}  # type: dict
        for path in seeds:
            self.found[path] = {"seed": True}

    def idle(self) -> bool:
        """Leave out those that use a CPU; whether nobody is left."""
        for pid in self.nappers:
            times, look = schedstat("/proc/%d/task/%d/schedstat" % (pid, pid)), self.looks[pid]
            before = (look["threads"].get(str(pid)) or {}).get("run_s")
            if times is None or (before is not None and times[0] - before > 0.4 * (time.monotonic() - look["t"])):
                self.nappers = [p for p in self.nappers if p != pid]
        return not self.nappers

    def do(self, item: tuple) -> "list[dict] | None":
        what, argument = item
        if what == "held" and self.idle():
            self.nappers = []
        if not self.nappers:
            return None
        if what == "held":
            self._held()
        elif what == "dir":
            with os.scandir(self.reach(argument)) as entries:
                for count, entry in enumerate(entries):
                    if count > 3000:
                        break
                    if LOCK_NAME.search(entry.path):
                        self.found.setdefault(os.path.join(argument, entry.name), {})
        elif what == "cache":
            for name in survey_cache(self.reach(argument))["locks"]:
                self.found.setdefault(os.path.join(argument, name), {})
        elif what == "watch":
            return self._watch(argument)
        elif what == "openers":
            return self._openers(argument)
        return None

    def _held(self) -> None:
        holders = {lock["holder"] for lock in parse_locks(text("/proc/locks", 1 << 20) or "")}
        asked = 0
        for pid in sorted(p for p in holders if p > 0)[:96]:
            base = "/proc/%d/fd/" % pid
            try:
                names = os.listdir(base)[:1500]
            except OSError:
                continue
            for name in names:
                path = readlink(base + name) or ""
                if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/")) and asked < 4000:
                    asked += 1
                    if not is_library(path) and lock_of(pid, name):
                        self.found.setdefault(path, {})["held"] = True

    def _watch(self, seconds: float) -> "list[dict]":
        order = sorted(self.found, key=lambda p: (not self.found[p].get("seed"), not self.found[p].get("held"),
                                                  not LOCK_NAME.search(p), p))
        watch = libc().inotify_init1(0o2000000 | 0o4000)  # IN_CLOEXEC | IN_NONBLOCK
        marks, seen = {}, []  # type: dict, list
        for path in order[:64]:
            entry = self.found[path]
            try:
                info = os.stat(self.reach(path))
                if not stat_mod.S_ISREG(info.st_mode):
                    continue
                entry.update(path=path, size=info.st_size, age_s=round(time.time() - info.st_mtime, 1),
                             dev=info.st_dev, ino=info.st_ino, opens=0, matched={}, owner=None)
                entry["owner"] = lock_owner(self.reach(path), info.st_size)
            except OSError:
                if "path" not in entry:
                    continue
            seen.append(entry)
            mark = libc().inotify_add_watch(watch, os.fsencode(self.reach(path)), 0x20) if watch >= 0 else -1  # IN_OPEN
            if mark >= 0:
                marks[mark] = entry
        turns_of = {p: Turns(p) for p in self.nappers}
        began, turns, busy = time.monotonic(), 0, 0
        poller = select.poll()
        if watch >= 0:
            poller.register(watch, select.POLLIN)
        while marks and time.monotonic() - began < seconds:
            poller.poll(4)
            opened = set()
            try:
                blob = os.read(watch, 65536)
            except OSError:
                blob = b""
            at = 0
            while at + 16 <= len(blob):
                mark, _mask, _cookie, length = struct.unpack_from("<iIII", blob, at)
                at += 16 + length
                if mark in marks:
                    marks[mark]["opens"] += 1
                    opened.add(mark)
            turns, busy = turns + 1, busy + bool(opened)
            for turn in turns_of.values():
                turn.look(opened)
        if watch >= 0:
            os.close(watch)
        span = round(time.monotonic() - began, 3)
        mark_of = {id(entry): mark for mark, entry in marks.items()}
        wakes = {pid: turn.wakes() for pid, turn in turns_of.items()}
        for entry in seen:
            entry.update(watch_s=span, busy=round(busy / float(turns or 1), 3), wakes=wakes,
                         matched={pid: turn.matched(mark_of.get(id(entry))) for pid, turn in turns_of.items()})
        return [dict(entry) for entry in seen]

    def _openers(self, budget: float) -> "list[dict]":
        """Processes that have a candidate open, whatever they call it; the last answer counts those not looked into."""
        wanted = {path: entry for path, entry in self.found.items() if "ino" in entry}
        names = {os.path.basename(path) for path in wanted}
        found, denied, until = [], 0, time.monotonic() + budget
        for pid in pids_now():
            if time.monotonic() > until:
                denied += 1
                continue
            base = "/proc/%d/fd/" % pid
            try:
                fds = os.listdir(base)[:3000]
            except OSError as error:
                denied += error.errno in (errno.EACCES, errno.EPERM)
                continue
            for fd in fds:
                link = readlink(base + fd) or ""
                if not link.startswith("/") or os.path.basename(link) not in names:
                    continue
                path = link if link in wanted else None  # type: str | None
                if path is None:  # the same file under another name: another mount namespace, or a second mount
                    try:
                        info = os.stat(base + fd)
                    except OSError:
                        continue
                    path = next((p for p, e in wanted.items() if (e["dev"], e["ino"]) == (info.st_dev, info.st_ino)),
                                None)
                if path is not None:
                    found.append({"path": path, "pid": pid, "fd": int(fd), "lock": lock_of(pid, fd)})
        return found[:64] + [{"denied": denied}]


# -------------------------------------------------------------------------------------------------------------- cgroups


def cgroup_mounts() -> dict:
    """Controller (or "2") -> where its hierarchy is mounted here."""
    found = {}  # type: dict
    for line in (text("/proc/self/mountinfo", 1 << 20) or "").splitlines():
        left, _, right = line.partition(" - ")
        f, g = left.split(), right.split()
        if len(f) > 4 and g and g[0] == "cgroup2":
            found.setdefault("2", (f[4], f[3]))
        elif len(f) > 4 and g and g[0] == "cgroup":
            for name in g[2].split(","):
                found.setdefault(name, (f[4], f[3]))
    return found


def cgroup_places(blob: str, mounts: dict) -> dict:
    """Controller -> (directory, mount point) for a process, from its /proc/PID/cgroup."""
    places = {}
    for line in blob.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        names = ["2"] if parts[1] == "" else parts[1].split(",")
        for name in names:
            if name in mounts:
                point, root = mounts[name]
                path = parts[2]
                if root != "/" and path.startswith(root):
                    path = path[len(root):]
                path = "" if path.startswith("/..") else path.rstrip("/")
                places[name] = (point + path, point)
    return places


def up(place: "tuple | None"):  # type: ignore[no-untyped-def]
    """The directory of a cgroup and those above it."""
    if place:
        path, stop = place
        for _ in range(12):
            yield path
            if path == stop or len(path) <= len(stop):
                return
            path = os.path.dirname(path)


def tightest(place: "tuple | None", name: str) -> "int | None":
    found = [number(path + "/" + name) for path in up(place)]
    limits = [v for v in found if v is not None and v < 1 << 60]
    return min(limits) if limits else None


MEMORY_STAT = ("anon", "file", "shmem", "file_dirty", "file_writeback", "workingset_refault_file",
               "workingset_refault_anon", "pgmajfault", "rss", "cache", "total_rss",
               "total_cache", "total_pgmajfault", "total_shmem", "total_dirty", "total_workingset_refault_file",
               "total_writeback")


def v1_memory_stat(stat: dict) -> dict:
    """v1 names in v2's words."""
    renames = (("total_rss", "anon"), ("total_cache", "file"), ("total_shmem", "shmem"), ("total_dirty", "file_dirty"),
               ("total_writeback", "file_writeback"),
               ("total_pgmajfault", "pgmajfault"), ("total_workingset_refault_file", "workingset_refault_file"))
    return {new: stat[old] for old, new in renames if old in stat}


def frozen_state(places: dict) -> "bool | None":
    if "freezer" in places:
        for path in up(places["freezer"]):
            state = (text(path + "/freezer.state", 64) or "").strip()
            if state in ("FROZEN", "FREEZING"):
                return True
            if state == "THAWED" and number(path + "/freezer.parent_freezing") == 0:
                return False
    for path in up(places.get("2")):
        events = pairs(text(path + "/cgroup.events", 256))
        if "frozen" in events:
            return bool(events["frozen"])
    return None if "freezer" not in places else False


def cgroup_counters(places: dict) -> dict:
    """What moves in a cgroup; cheap enough for every sample."""
    out = {"nr_periods": None, "nr_throttled": None, "throttled_s": None, "usage_s": None, "current": None,
           "oom_kill": None, "refault_file": None,
           "frozen": frozen_state(places)}  # type: dict
    if "cpu" in places:
        for path in up(places["cpu"]):  # the limit may stand above
            cpu = pairs(text(path + "/cpu.stat", 1024))
            if cpu.get("nr_periods") or path == places["cpu"][1]:
                out.update(nr_periods=cpu.get("nr_periods"), nr_throttled=cpu.get("nr_throttled"),
                           throttled_s=cpu.get("throttled_time", 0) / 1e9)
                break
        usage = number(places["cpuacct"][0] + "/cpuacct.usage") if "cpuacct" in places else None
        out["usage_s"] = usage / 1e9 if usage is not None else None
    elif "2" in places:
        for path in up(places["2"]):
            cpu = pairs(text(path + "/cpu.stat", 2048))
            if out["usage_s"] is None and "usage_usec" in cpu:
                out["usage_s"] = cpu["usage_usec"] / 1e6
            if cpu.get("nr_periods"):
                out.update(nr_periods=cpu["nr_periods"], nr_throttled=cpu.get("nr_throttled"),
                           throttled_s=cpu.get("throttled_usec", 0) / 1e6)
                break
    if "memory" in places:
        path = places["memory"][0]
        out["current"] = number(path + "/memory.usage_in_bytes")
        out["oom_kill"] = pairs(text(path + "/memory.oom_control", 256)).get("oom_kill")
        out["refault_file"] = pairs(text(path + "/memory.stat", 8192), ("total_workingset_refault_file",
            )).get("total_workingset_refault_file")
    elif "2" in places:
        path = places["2"][0]
        out["current"] = number(path + "/memory.current")
        out["oom_kill"] = pairs(text(path + "/memory.events", 512)).get("oom_kill")
        out["refault_file"] = pairs(text(path + "/memory.stat", 8192), ("workingset_refault_file",
            )).get("workingset_refault_file")
    return out


def cgroup_facts(places: dict) -> dict:
    """Limits, events and state of one cgroup, in the same words for v1 and v2."""
    counters = cgroup_counters(places)
    v1 = "memory" in places or "cpu" in places
    out = {"version": 1 if v1 else 2, "path": {name: place[0] for name, place in places.items()}, "pids": [],
           "frozen": counters["frozen"], "io": None}
    memory = {"current": counters["current"], "max": None, "high": None, "swap_current": None, "peak": None,
              "events": {}, "stat": {}}
    if "memory" in places:
        path = places["memory"][0]
        control = pairs(text(path + "/memory.oom_control", 256))
        memory.update(max=tightest(places["memory"], "memory.limit_in_bytes"),
                      peak=number(path + "/memory.max_usage_in_bytes"),
                      stat=v1_memory_stat(pairs(text(path + "/memory.stat", 8192), MEMORY_STAT)))
        memory["events"] = {"oom_kill": control.get("oom_kill"), "max": number(path + "/memory.failcnt"),
                            "under_oom": control.get("under_oom")}
        both = number(path + "/memory.memsw.usage_in_bytes")
        if both is not None and counters["current"] is not None:
            memory["swap_current"] = max(0, both - counters["current"])
    elif "2" in places:
        path = places["2"][0]
        memory.update(max=tightest(places["2"], "memory.max"), high=tightest(places["2"], "memory.high"),
                      peak=number(path + "/memory.peak"),
                      swap_current=number(path + "/memory.swap.current"), events=pairs(text(path + "/memory.events",
                          512)),
                      stat=pairs(text(path + "/memory.stat", 16384), MEMORY_STAT))
    out["memory"] = memory
    quota = None
    if "cpu" in places:
        for path in up(places["cpu"]):
            limit, period = number(path + "/cpu.cfs_quota_us"), number(path + "/cpu.cfs_period_us")
            if limit and limit > 0 and period:
                quota = min(quota or 1e9, limit / float(period))
    else:
        for path in up(places.get("2")):
            parts = (text(path + "/cpu.max", 64) or "").split()
            if len(parts) == 2 and parts[0] != "max":
                quota = min(quota or 1e9, int(parts[0]) / float(parts[1]))
    cpuset = None
    for name, file in (("cpuset", "cpuset.effective_cpus"), ("cpuset", "cpuset.cpus"), ("2", "cpuset.cpus.effective")):
        if cpuset is None and name in places:
            cpuset = (text(places[name][0] + "/" + file, 1024) or "").strip() or None
    out["cpu"] = {"quota_cpus": quota, "nr_periods": counters["nr_periods"], "nr_throttled": counters["nr_throttled"],
                  "throttled_s": counters["throttled_s"],
                  "usage_s": counters["usage_s"], "cpuset": cpuset}
    place = (places.get("pids") or places.get("2") or (None,))[0]
    out["pids_limit"] = {"current": number(place + "/pids.current"), "max": tightest(places.get("pids")
        or places.get("2"), "pids.max")} if place else None
    pressure = {}
    if "2" in places:
        for name in ("cpu", "memory", "io"):
            found = parse_pressure(text(places["2"][0] + "/" + name + ".pressure"))
            if found:
                pressure[name] = found
        io = text(places["2"][0] + "/io.max", 1024)
        out["io"] = {"max": io.strip()} if io and io.strip() else None
    if "blkio" in places:
        limits = {}
        for name in ("throttle.read_bps_device", "throttle.write_bps_device", "throttle.read_iops_device"):
            for path in up(places["blkio"]):
                value = (text(path + "/blkio." + name, 1024) or "").strip()
                if value:
                    limits[name.replace("throttle.", "")] = value
                    break
        out["io"] = limits or out["io"]
    out["pressure"] = pressure
    return out


# ------------------------------------------------------------------------------------------------------------------ GPU

REASONS = ((1, "idle"), (2, "app_clocks"), (4, "sw_power_cap"), (8, "hw_slowdown"), (0x10, "sync_boost"),
           (0x20, "sw_thermal"), (0x40, "hw_thermal"),
           (0x80, "hw_power_brake"), (0x100, "display"))
SMI_FIELDS = (("index", "index"), ("uuid", "uuid"), ("name", "name"), ("pci.bus_id", "bus"), ("driver_version",
    "driver"), ("utilization.gpu", "util"),
              ("utilization.memory", "mem_util"), ("memory.used", "mem_used"), ("memory.total", "mem_total"),
              ("power.draw", "power_w"),
              ("enforced.power.limit", "power_limit_w"), ("clocks.sm", "sm_mhz"), ("clocks.max.sm", "sm_max_mhz"),
              ("clocks.mem", "mem_mhz"),
              ("clocks.max.mem", "mem_max_mhz"), ("temperature.gpu", "temp"), ("pstate", "pstate"),
              ("clocks_throttle_reasons.active", "reasons"),
              ("pcie.link.gen.current", "pcie_gen"), ("pcie.link.gen.max", "pcie_gen_max"), ("pcie.link.width.current",
                  "pcie_width"),
              ("pcie.link.width.max", "pcie_width_max"), ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected"),
              ("mig.mode.current", "mig"))
SMI_ALIASES = dict(SMI_FIELDS)
SMI_ALIASES.update({"clocks.current.sm": "sm_mhz", "clocks.current.memory": "mem_mhz",
                    "clocks.max.memory": "mem_max_mhz", "power.limit": "power_limit_w",
                    "clocks_event_reasons.active": "reasons", "power.draw.instant": "power_w",
                    "power.draw.average": "power_w",
                    "ecc.errors.uncorrected.aggregate.total": "ecc_aggregate", "gpu_recovery_action": "recovery"})
SAMPLE_KEYS = ("util", "mem_util", "mem_used", "mem_total", "power_w", "power_limit_w", "sm_mhz", "sm_max_mhz",
               "mem_mhz", "mem_max_mhz", "temp", "pstate", "reasons",
               "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max", "pcie_rx_kbs", "pcie_tx_kbs", "energy_mj")


def reason_names(mask: int) -> "list[str]":
    return [name for bit, name in REASONS if mask & bit]


def run_tool(argv: "list[str]", limit: int = 1 << 20) -> "tuple[int, str]":
    """Run a tool in its own process below a courier (which holds the deadline); exit status and combined output."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.environ["LC_ALL"] = "C"
            os.execvp(argv[0], argv)
        except OSError:
            os._exit(127)
    os.close(writer)
    parts, have = [], 0
    while have < limit:
        data = os.read(reader, 65536)
        if not data:
            break
        parts.append(data)
        have += len(data)
    os.close(reader)
    status = os.waitpid(pid, 0)[1]
    return (status >> 8 if status & 127 == 0 else 128 + (status & 127)), b"".join(parts).decode("utf-8", "replace")


def quantity(value: str) -> "float | int | None":
    match = re.match(r"\s*(-?\d+(?:\.\d+)?)", value)
    if not match:
        return None
    number_ = float(match.group(1))
    return int(number_) if number_ == int(number_) and "." not in match.group(1) else number_


def parse_smi(blob: str) -> "list[dict]":
    """`nvidia-smi --query-gpu=.. --format=csv`, by its header line, with or without units."""
    lines = [line for line in blob.splitlines() if line.strip()]
    while lines and not re.match(r"\s*(index|uuid|name|pci|timestamp|utilization|memory)\b", lines[0]):
        lines.pop(0)
    if not lines:
        return []
    header = [h.split("[")[0].strip() for h in lines[0].split(",")]
    units = [h.partition("[")[2].rstrip("] ") for h in lines[0].split(",")]
    found = []
    for line in lines[1:]:
        values = [v.strip() for v in line.split(",")]
        if len(values) != len(header):
            continue
        row = {}  # type: dict
        for name, unit, value in zip(header, units, values):
            key = SMI_ALIASES.get(name)
            if key is None or value.startswith(("[N/A", "[Not", "N/A", "[Unknown", "[GPU")):
                if key == "util" and "lost" in value.lower():
                    row["lost"] = True
                continue
            if key == "reasons":
                row[key] = reason_names(int(value, 16)) if value.startswith("0x") else []
            elif key in ("uuid", "name", "bus", "driver", "pstate", "recovery"):
                row[key] = value
            elif key == "mig":
                row[key] = value.lower() == "enabled"
            else:
                amount = quantity(value)
                if amount is not None and key in ("mem_used", "mem_total"):
                    amount = int(amount * (1 << 30 if "GiB" in unit + value else 1 << 20))
                row[key] = amount
        found.append(row)
    return found


def ask_smi(_: object = None) -> dict:
    """One answer of nvidia-smi: its GPUs and the processes on them."""
    fields = [name for name, _key in SMI_FIELDS]
    status, blob = 0, ""
    for _try in range(5):
        status, blob = run_tool(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,nounits"])
        bad = re.search(r'Field "([^"]+)" is not a valid field', blob)
        if not bad or bad.group(1) not in fields:
            break
        index = fields.index(bad.group(1))
        swap = {"enforced.power.limit": "power.limit",
                "clocks_throttle_reasons.active": "clocks_event_reasons.active"}.get(bad.group(1))
        fields[index:index + 1] = [swap] if swap else []
    if status == 127 and not blob.strip():
        return {"status": "absent"}
    rows = parse_smi(blob)
    out = {"status": "ok" if rows else "error", "error": None if rows else blob.strip()[:600] or "exit %d" % status,
           "rows": rows, "apps": []}  # type: dict
    if not rows:
        return out
    if re.search(r"Unable to determine the device handle|GPU is lost|Unknown Error", blob):
        out["error"] = blob.strip()[-600:]
    status, blob = run_tool(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name",
                             "--format=csv,noheader,nounits"])
    for line in blob.splitlines():
        f = [v.strip() for v in line.split(",")]
        if len(f) >= 3 and f[1].isdigit():
            amount = quantity(f[2])
            out["apps"].append({"uuid": f[0], "pid": int(f[1]), "mem": int(amount * (1 << 20)) if amount is not None
                                else None,
                                "comm": f[3] if len(f) > 3 else None})
    return out


class Nvml(object):
    """The few NVML calls we need, straight from the driver's library (a courier's child only: any of them may hang)."""

    def __init__(self) -> None:
        import ctypes

        self.c = ctypes  # type: Any
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        code = self.lib.nvmlInit_v2()
        if code:
            raise RuntimeError("nvmlInit: " + self.say(code))
        self.driver = self.word(lambda b, n: self.lib.nvmlSystemGetDriverVersion(b, n), 96)
        version = ctypes.c_int()
        self.cuda = None  # type: str | None
        if self.lib.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)) == 0:
            self.cuda = "%d.%d" % (version.value // 1000, version.value % 1000 // 10)

    def do(self, name: str, *args):  # type: ignore[no-untyped-def]
        """Call by name; a driver too old to know the function answers "not found"."""
        call = getattr(self.lib, name, None)
        return call(*args) if call is not None else 13

    def say(self, code: int) -> str:
        self.lib.nvmlErrorString.restype = self.c.c_char_p
        return (self.lib.nvmlErrorString(code) or b"error %d" % code).decode("utf-8", "replace")

    def word(self, call, size: int) -> "str | None":  # type: ignore[no-untyped-def]
        buffer = self.c.create_string_buffer(size)
        return buffer.value.decode("utf-8", "replace") if call(buffer, size) == 0 else None

    def uint(self, name: str, handle, *before, big: bool = False) -> "int | None":  # type: ignore[no-untyped-def]
        value = self.c.c_ulonglong() if big else self.c.c_uint()
        call = getattr(self.lib, name, None)
        return value.value if call is not None and call(handle, *(list(before) + [self.c.byref(value)])) == 0 else None

    def read(self, fixed: bool) -> dict:
        c, lib = self.c, self.lib
        count = c.c_uint()
        self.do("nvmlDeviceGetCount_v2", c.byref(count))
        out = {"status": "ok", "rows": [], "apps": [], "error": None}  # type: dict

        class Memory(c.Structure):  # type: ignore[name-defined,misc]
            _fields_ = [("total", c.c_ulonglong), ("free", c.c_ulonglong), ("used", c.c_ulonglong)]

        class Rates(c.Structure):  # type: ignore[name-defined,misc]
            _fields_ = [("gpu", c.c_uint), ("memory", c.c_uint)]

        class Info(c.Structure):  # type: ignore[name-defined,misc]
            _fields_ = [("pid", c.c_uint), ("mem", c.c_ulonglong), ("gi", c.c_uint), ("ci", c.c_uint)]

        class Use(c.Structure):  # type: ignore[name-defined,misc]
            _fields_ = [("pid", c.c_uint), ("when", c.c_ulonglong), ("sm", c.c_uint), ("mem", c.c_uint),
                        ("enc", c.c_uint), ("dec", c.c_uint)]

        for index in range(count.value):
            handle = c.c_void_p()
            code = self.do("nvmlDeviceGetHandleByIndex_v2", c.c_uint(index), c.byref(handle))
            if code:
                out["rows"].append({"index": index, "lost": code == 15, "error": self.say(code)})
                out["error"] = "GPU %d: %s" % (index, self.say(code))
                continue
            row = {"index": index, "uuid": self.word(lambda b, n, h=handle: self.do("nvmlDeviceGetUUID", h, b, n), 96),
                   "name": self.word(lambda b, n, h=handle: self.do("nvmlDeviceGetName", h, b, n), 96),
                   "driver": self.driver}  # type: dict
            rates, memory = Rates(), Memory()
            code = self.do("nvmlDeviceGetUtilizationRates", handle, c.byref(rates))
            if code == 0:
                row["util"], row["mem_util"] = rates.gpu, rates.memory
            elif code == 15:
                row["lost"] = True
            if self.do("nvmlDeviceGetMemoryInfo", handle, c.byref(memory)) == 0:
                row["mem_used"], row["mem_total"] = memory.used, memory.total
            for key, name in (("power_w", "nvmlDeviceGetPowerUsage"), ("power_limit_w",
                                                                       "nvmlDeviceGetEnforcedPowerLimit")):
                value = self.uint(name, handle)
                row[key] = value / 1000.0 if value is not None else None
            row["sm_mhz"] = self.uint("nvmlDeviceGetClockInfo", handle, c.c_uint(1))
            row["mem_mhz"] = self.uint("nvmlDeviceGetClockInfo", handle, c.c_uint(2))
            row["sm_max_mhz"] = self.uint("nvmlDeviceGetMaxClockInfo", handle, c.c_uint(1))
            row["mem_max_mhz"] = self.uint("nvmlDeviceGetMaxClockInfo", handle, c.c_uint(2))
            row["temp"] = self.uint("nvmlDeviceGetTemperature", handle, c.c_uint(0))
            state = self.uint("nvmlDeviceGetPerformanceState", handle)
            row["pstate"] = "P%d" % state if state is not None and state < 32 else None
            mask = self.uint("nvmlDeviceGetCurrentClocksEventReasons", handle, big=True)
            if mask is None:
                mask = self.uint("nvmlDeviceGetCurrentClocksThrottleReasons", handle, big=True)
            row["reasons"] = reason_names(mask) if mask is not None else None
            row["energy_mj"] = self.uint("nvmlDeviceGetTotalEnergyConsumption", handle, big=True)
            for key, name in (("pcie_gen", "CurrPcieLinkGeneration"), ("pcie_width", "CurrPcieLinkWidth"),
                              ("pcie_gen_max", "MaxPcieLinkGeneration"),
                              ("pcie_width_max", "MaxPcieLinkWidth")):
                row[key] = self.uint("nvmlDeviceGet" + name, handle)
            row["pcie_tx_kbs"] = self.uint("nvmlDeviceGetPcieThroughput", handle, c.c_uint(0))
            row["pcie_rx_kbs"] = self.uint("nvmlDeviceGetPcieThroughput", handle, c.c_uint(1))
            if fixed:
                row["ecc_uncorrected"] = self.uint("nvmlDeviceGetTotalEccErrors", handle, c.c_uint(1), c.c_uint(0),
                                                   big=True)
                four = [c.c_uint() for _ in range(4)]
                if self.do("nvmlDeviceGetRemappedRows", handle, *[c.byref(v) for v in four]) == 0:
                    row["remapped_rows"] = {"correctable": four[0].value, "uncorrectable": four[1].value,
                                            "pending": bool(four[2].value), "failed": bool(four[3].value)}
                mode, pending = c.c_uint(), c.c_uint()
                known = self.do("nvmlDeviceGetMigMode", handle, c.byref(mode), c.byref(pending)) == 0
                row["mig"] = known and mode.value == 1
            shares = {}  # type: dict
            number_ = c.c_uint(128)
            uses = (Use * 128)()  # type: ignore[operator]
            if self.do("nvmlDeviceGetProcessUtilization", handle, uses, c.byref(number_),
                                                   c.c_ulonglong(max(0, int((time.time() - 3) * 1e6)))) == 0:
                for i in range(min(128, number_.value)):
                    shares[uses[i].pid] = max(shares.get(uses[i].pid, 0), uses[i].sm)
            number_ = c.c_uint(256)
            infos = (Info * 256)()  # type: ignore[operator]
            call = getattr(lib, "nvmlDeviceGetComputeRunningProcesses_v3", None) or getattr(lib,
                "nvmlDeviceGetComputeRunningProcesses_v2", None)
            if call is not None and call(handle, c.byref(number_), infos) == 0:
                for i in range(min(256, number_.value)):
                    mem = infos[i].mem
                    out["apps"].append({"uuid": row["uuid"], "index": index, "pid": infos[i].pid, "mem": None
                                        if mem >= (1 << 63) else mem,
                                        "sm_util": shares.get(infos[i].pid), "comm": None})
            out["rows"].append(row)
        out["cuda"] = self.cuda
        return out


_nvml = []  # type: list


def ask_nvml(item: "tuple[int, float]") -> dict:
    index, start = item
    if not _nvml:
        try:
            _nvml.append(Nvml())
        except OSError:
            _nvml.append(None)
    if _nvml[0] is None:
        return {"status": "absent"}
    out = _nvml[0].read(index == 0)  # type: dict
    out["t"] = time.monotonic() - start
    return out


def gpu_present() -> bool:
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/proc/driver/nvidia/version")


def gpu_holders(_: object = None) -> dict:
    found = {}
    for pid in pids_now():
        try:
            names = os.listdir("/proc/%d/fd" % pid)[:3000]
        except OSError:
            continue
        mine = set()
        for name in names:
            target = readlink("/proc/%d/fd/%s" % (pid, name)) or ""
            if target.startswith(("/dev/nvidia", "/dev/kfd")) and re.match(r"/dev/(nvidia\d+|kfd)$", target):
                mine.add(target)
        if mine:
            found[pid] = sorted(mine)
    return found


def gpu_report(answers: "list[dict]", tool: "str | None", timed_out: bool) -> dict:
    """The answers of one tool, put together GPU by GPU."""
    good = [a for a in answers if a and a.get("rows")]
    out = {"status": "ok" if good else "timed_out" if timed_out else (answers[0]["status"] if answers and answers[0]
        else "absent"), "tool": tool,
           "error": next((a["error"] for a in answers if a and a.get("error")), None), "driver": None, "cuda": None,
           "gpus": [], "processes": [], "holders": {},
           "orphans": []}  # type: dict
    gpus = {}  # type: dict
    for answer in good:
        for row in answer["rows"]:
            gpu = gpus.setdefault(row.get("index"), {"index": row.get("index"), "uuid": None, "name": None, "bus": None,
                                                     "samples": [], "ecc_uncorrected": None,
                                                     "remapped_rows": None, "recovery": None, "lost": False,
                                                     "mig": False})
            for key in ("uuid", "name", "bus", "ecc_uncorrected", "remapped_rows", "recovery", "mig"):
                if row.get(key) is not None:
                    gpu[key] = row[key]
            gpu["lost"] = gpu["lost"] or bool(row.get("lost"))
            out["driver"] = row.get("driver") or out["driver"]
            sample = {"t": round(answer.get("t", 0.0), 2)}
            sample.update({k: row.get(k) for k in SAMPLE_KEYS})
            gpu["samples"].append(sample)
        out["cuda"] = answer.get("cuda") or out["cuda"]
    out["gpus"] = [gpus[k] for k in sorted(gpus, key=lambda k: (k is None, k))]
    if good:
        index_of = {g["uuid"]: g["index"] for g in out["gpus"]}
        for app in good[-1]["apps"]:
            out["processes"].append({"gpu": app.get("index", index_of.get(app["uuid"])), "pid": app["pid"],
                                     "mem": app["mem"], "sm_util": app.get("sm_util"),
                                     "comm": app.get("comm"), "user": None, "member": False, "alive": None})
    return out


# ----------------------------------------------------------------------------------------------------------------- host

KERNEL_KINDS = (("oom", r"out of memory|oom-kill|oom_reaper|invoked oom-killer|Killed process"), ("xid", r"NVRM: Xid"),
                ("nvrm", r"NVRM|nvidia"),
                ("segfault", r"segfault|general protection|traps:|trap invalid"),
                ("hung_task", r"blocked for more than|hung_task|soft lockup|rcu.*stall"),
                ("io_error", r"I/O error|EXT4-fs error|XFS.*(error|shutdown)|nvme.*(timeout|reset)|Buffer I/O"),
                ("nfs", r"nfs: server|nfs4?:|lustre|ceph:"),
                ("pcie", r"AER:|PCIe Bus Error"))
KERNEL_RE = [(kind, re.compile(pattern, re.I)) for kind, pattern in KERNEL_KINDS]


def kernel_log(_: object = None) -> dict:
    """The lines of the kernel log that matter (at most 60), where it may be read."""
    import ctypes

    buffer = ctypes.create_string_buffer(256 << 10)
    size = libc().klogctl(3, buffer, len(buffer))
    if size < 0:
        return {"readable": False, "error": errno.errorcode.get(ctypes.get_errno(), "?"), "lines": []}
    uptime = float((text("/proc/uptime") or "0").split()[0])
    lines = []
    for line in buffer.raw[:size].decode("utf-8", "replace").splitlines():
        match = re.match(r"(?:<\d+>)?\[\s*(\d+\.\d+)\]\s*(.*)", line)
        body = match.group(2) if match else line
        if "ommand line: " in body[:24]:  # what the kernel was started with is no event
            continue
        for kind, pattern in KERNEL_RE:
            if pattern.search(body):
                lines.append({"age_s": round(uptime - float(match.group(1)), 1) if match else None, "text": body[:300],
                              "kind": kind})
                break
    return {"readable": True, "lines": lines[-60:]}


def host_facts(_: object = None) -> dict:
    pressure = {name: parse_pressure(text("/proc/pressure/" + name)) for name in ("cpu", "memory", "io")}
    load = (text("/proc/loadavg") or "").split()
    running, _, total = load[3].partition("/") if len(load) > 3 else ("", "", "")
    stats = pairs(text("/proc/stat", 1 << 20), ("procs_running", "procs_blocked", "btime"))
    return {"pressure": pressure if any(pressure.values()) else None, "mem": parse_meminfo(text("/proc/meminfo")),
            "load": [float(v) for v in load[:3]], "cpus_online": os.cpu_count(),
            "processes": {"total": int(total) if total.isdigit() else None, "running": int(running)
                          if running.isdigit() else None,
                          "blocked": stats.get("procs_blocked")}, "btime": stats.get("btime")}


def infiniband(_: object = None) -> dict:
    out, base = {}, "/sys/class/infiniband"
    try:
        for dev in os.listdir(base):
            for port in os.listdir("%s/%s/ports" % (base, dev)):
                counters = "%s/%s/ports/%s/counters/" % (base, dev, port)
                rx, tx = number(counters + "port_rcv_data"), number(counters + "port_xmit_data")
                if rx is not None:
                    out["%s/%s" % (dev, port)] = {"rx_bytes": rx * 4, "tx_bytes": (tx or 0) * 4,
                                                  "state": (text("%s/%s/ports/%s/state" % (base, dev, port))
                                                            or "").strip()}
    except OSError:
        pass
    return out


# ------------------------------------------------------------------------------------------------------- slurm and NCCL


def ask_slurm(job: str) -> dict:
    """What the scheduler says of a job, where its tools are here."""
    out = {"job": job, "tools": False, "state": None, "text": {}}  # type: dict
    for name, argv in (("scontrol", ["scontrol", "-o", "show", "job", job]), ("squeue", ["squeue", "-h", "-j", job,
        "-o", "%i|%T|%r|%M|%l|%N|%u"]),
                       ("sacct", ["sacct", "-n", "-P", "-j", job, "-o",
                                  "JobID,State,ExitCode,DerivedExitCode,Elapsed,Timelimit,MaxRSS,Start,"
                                  "End,NodeList,Reason"])):
        status, blob = run_tool(argv, 65536)
        if status == 127 and not blob.strip():
            continue
        out["tools"] = True
        out["text"][name] = blob.strip()[:8000]
    state = re.search(r"JobState=(\w+)", out["text"].get("scontrol", ""))
    if state:
        out["state"] = state.group(1)
    elif "|" in out["text"].get("sacct", ""):
        out["state"] = out["text"]["sacct"].splitlines()[0].split("|")[1].split()[0]
    out["stdout"] = [m for m in re.findall(r"Std(?:Out|Err)=(\S+)", out["text"].get("scontrol", "")) if m != "(null)"]
    return out


def slurm_pids(table: Table, job: str, until: float) -> "list[int]":
    """Processes of a job: by cgroup name (readable by all), else by environment."""

    def look(pid: int) -> bool:
        if re.search(r"[/_]job_?%s(/|$|\.)" % re.escape(job), text("/proc/%d/cgroup" % pid, 8192) or "", re.M):
            return True
        try:
            return bool(re.search(b"(^|\0)SLURM_JOB(_)?ID=" + re.escape(job).encode() + b"(\0|$)",
                                  slurp("/proc/%d/environ" % pid, 262144)))
        except OSError:
            return False

    pids = [p for p in table.rows if p not in table.me and not table.kernel(p)]
    return [p for p, hit in zip(pids, collect("slurm job", pids, look, until, each=0.4, blame=lambda p: {"pid": p}))
            if hit]


def ask_ras(port: int, wait: float = 2.4) -> dict:
    """NCCL's RAS thread answers `verbose status` in plain text on a local port, after it has asked the other ranks, to
    whom it gives a second. What has come when the time is over is kept.
    """
    out = {"port": port, "status": "absent", "text": None, "ours": None}  # type: dict
    until, parts, have = time.monotonic() + wait, [], 0  # type: float, list, int
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.settimeout(min(1.0, wait))
    try:
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"CLIENT PROTOCOL 2\nTIMEOUT 1\nVERBOSE STATUS\n")
        while have < 262144:
            connection.settimeout(max(0.001, until - time.monotonic()))
            data = connection.recv(16384) if time.monotonic() < until else None
            if data is None:
                raise socket.timeout
            if not data:
                break
            parts.append(data)
            have += len(data)
        out.update(status="ok")
    except socket.timeout:
        out.update(status="timed_out")
    except ConnectionRefusedError:
        out.update(status="refused")
    except OSError as error:
        out.update(status="error", error=str(error))
    finally:
        connection.close()
    answer = b"".join(parts).decode("utf-8", "replace")
    while re.match(r"(SERVER PROTOCOL|OK\r?\n|ERROR: Unknown command)", answer):
        answer = answer.partition("\n")[2]
    out["text"] = answer or None
    return out


MAX_DUMP = 16 << 20


class Refused(Exception):
    """A dump that wants more than to be data."""


def plain_pickle(blob: bytes) -> object:
    """Unpickle containers, strings and numbers. Whatever names a class or function, which is how a pickle runs code, is
    refused before it is looked up.
    """
    import io
    import pickle

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            raise Refused("it asks for %s.%s" % (str(module)[:60], str(name)[:60]))

        def persistent_load(self, _pid: object) -> object:
            raise Refused("it refers to objects outside of it")

    return Plain(io.BytesIO(blob)).load()


def bound_child(memory: int, cpu_s: int) -> None:
    """Limits for this process, against data made to exhaust it."""
    import resource

    used = int((text("/proc/self/statm", 256) or "0").split()[0]) * PAGE
    spent = int(sum(os.times()[:2])) + 1
    for what, most in ((resource.RLIMIT_AS, used + memory), (resource.RLIMIT_CPU, spent + cpu_s)):
        soft, hard = resource.getrlimit(what)
        if soft == resource.RLIM_INFINITY or soft > most:
            resource.setrlimit(what, (most, hard))


def whole(value: object) -> "int | None":
    """An integer that fits into 64 bits, else nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


def short(value: object, most: int = 80) -> "str | None":
    return masked(value[:most]) if isinstance(value, str) else None


def dims(value: object) -> "list | None":
    """The sizes of a call's tensors, at most four of at most six dimensions; a longer list ends in None."""
    if not isinstance(value, (list, tuple)):
        return None
    found = [[whole(n) for n in one[:6]] for one in value[:4] if isinstance(one, (list, tuple))]  # type: list
    return found + [None] if len(value) > 4 else found


def numbers(value: object) -> "list[int] | None":
    """Ranks, as a list or as its text."""
    if isinstance(value, str):
        return [int(n) for n in re.findall(r"\d{1,7}", value[:65536])][:8192]
    if isinstance(value, (list, tuple)):
        return [n for n in value[:8192] if whole(n) is not None]
    return None


def flight_facts(dump: object) -> dict:
    """What a Flight Recorder dump says, process group by process group: how far this rank got, and its last calls."""
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ValueError("no Flight Recorder dump: there is no list of entries")
    config = dump["pg_config"] if isinstance(dump.get("pg_config"), dict) else {}
    states = dump["pg_status"] if isinstance(dump.get("pg_status"), dict) else {}
    groups = {}  # type: dict
    for entry in dump["entries"][-20000:]:
        if not isinstance(entry, dict):
            continue
        pair = entry.get("process_group")
        pair = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (str(entry.get("pg_id")), None)
        name = short(pair[0]) or "?"
        group = groups.get(name)
        if group is None:
            if len(groups) >= 64:
                continue
            known = config.get(pair[0]) or (config.get("") if len(config) == 1 else None)
            known = known if isinstance(known, dict) else {}
            status = states.get(str(entry.get("pg_id")))
            status = status if isinstance(status, dict) else {}
            group = groups[name] = {"name": name, "desc": short(pair[1]) or short(known.get("desc")),
                                    "ranks": numbers(known.get("ranks")), "p2p": 0, "calls": {}}
            for key in ("enqueued", "started", "completed"):
                group[key] = whole(status.get("last_%s_collective" % key))
        if entry.get("is_p2p") is True:
            group["p2p"] += 1
            continue
        seq = whole(entry.get("collective_seq_id", entry.get("seq_id")))
        if seq is None:
            continue
        if seq in group["calls"]:  # a coalesced call: one number for several
            group["calls"][seq]["more"] += 1
            continue
        state = short(entry.get("state"), 20)
        completed = group["completed"]
        done = state == "completed" or (seq <= completed if completed is not None else entry.get("retired") is True)
        group["calls"][seq] = {"seq": seq, "op": short(entry.get("profiling_name")), "state": state, "done": done,
                               "more": 0, "in": dims(entry.get("input_sizes")), "out": dims(entry.get("output_sizes")),
                               "dtype": short((entry.get("input_dtypes") or [None])[0], 20)
                               if isinstance(entry.get("input_dtypes"), list) else None,
                               "created_ns": whole(entry.get("time_created_ns")), "frames": entry.get("frames")}
    for group in groups.values():
        calls = [group["calls"][seq] for seq in sorted(group["calls"])]
        pending = [c for c in calls if not c["done"]][:8]
        kept = {c["seq"] for c in pending + calls[-24:]}
        group["calls"] = [c for c in calls if c["seq"] in kept]
        for call in group["calls"]:
            frames = call.pop("frames")
            call["at"] = calling_line(frames) if call in pending[:2] or call is calls[-1] else None
    return {"version": short(dump.get("version"), 20), "entries": len(dump["entries"]),
            "groups": [group for group in groups.values() if group["calls"]]}


def calling_line(frames: object) -> "str | None":
    """The innermost frame outside of torch, as "train.py:12 step"."""
    for frame in frames[:60] if isinstance(frames, list) else ():
        path = frame.get("filename") if isinstance(frame, dict) else None
        if isinstance(path, str) and "/torch/" not in path:
            return "%s:%s %s" % (os.path.basename(path)[:60], whole(frame.get("line")), short(frame.get("name"), 60))
    return None


class Dumps(object):
    """Flight Recorder dumps and NCCL debug files: the list of them, and what the dumps of this run say. A dump is a
    pickle that anybody may have put there: only the target's own are read, in a child with bounds.
    """

    READ = 32

    def __init__(self, patterns: "list[str]", since: float, uid: "int | None"):
        self.patterns, self.since, self.uid = patterns, since, uid
        self.files = None  # type: list[dict] | None

    def listed(self) -> "list[dict]":
        if self.files is None:
            bound_child(768 << 20, 3)
            self.files = nccl_dumps(self.patterns)
        return self.files

    def do(self, index: int) -> "list[dict] | dict | None":
        if index == 0:
            return self.listed()
        mine = [f for f in self.listed() if f["kind"] == "flight_recorder" and f["mtime"] >= self.since]
        return dict(self.read(mine[index - 1]), path=mine[index - 1]["path"]) if index <= len(mine) else None

    def read(self, file: dict) -> dict:
        if self.uid not in (None, file["uid"]) and file["uid"] != 0:
            return {"status": "refused", "error": "it belongs to another user (uid %d)" % file["uid"]}
        if file["size"] > MAX_DUMP:
            return {"status": "too_big", "error": "%d bytes" % file["size"]}
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            blob = slurp(os.open(file["path"], flags | getattr(os, "O_NOFOLLOW", 0)), MAX_DUMP)
            return dict(flight_facts(json.loads(blob.decode("utf-8")) if blob[:1] == b"{" else plain_pickle(blob)),
                        status="ok", error=None)
        except Refused as refused:
            return {"status": "refused", "error": str(refused)}
        except OSError as error:
            return {"status": "error", "error": why_not(error)}
        except MemoryError:
            return {"status": "damaged", "error": "it asks for more memory than such a dump needs"}
        except Exception as error:  # whatever bytes can do to a reader
            return {"status": "damaged", "error": ("%s: %s" % (type(error).__name__, error))[:200]}


def nccl_dumps(patterns: "list[str]") -> "list[dict]":
    """Flight Recorder dumps and NCCL debug files by their names, newest first."""
    found = []  # type: list
    for pattern in patterns[:12]:
        folder, prefix = os.path.split(pattern)
        try:
            with os.scandir(folder or ".") as entries:
                for count, entry in enumerate(entries):
                    if count > 5000:
                        break
                    if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        rank = re.search(r"(\d+)(?:\.json)?$", entry.name)
                        found.append({"path": entry.path, "size": info.st_size, "mtime": info.st_mtime,
                                      "uid": info.st_uid, "rank": int(rank.group(1)) if rank else None,
                                      "kind": "debug_file" if "debug" in pattern.lower() else "flight_recorder"})
        except OSError:
            continue
    found.sort(key=lambda f: -f["mtime"])
    return found[:64]


# --------------------------------------------------------------------------------------------------------------- stacks


def py_spy_threads(blob: str) -> "list[dict]":
    threads = []
    for thread in json.loads(blob):
        threads.append({"tid": thread.get("os_thread_id"), "name": thread.get("thread_name"),
                        "active": bool(thread.get("active")), "owns_gil": bool(thread.get("owns_gil")),
                        "frames": [{"func": f.get("name"), "file": f.get("short_filename") or f.get("filename"),
                                    "line": f.get("line")} for f in thread.get("frames", [])[:60]]})
    return threads[:64]


def dump_stacks(job: tuple) -> dict:
    """Python stacks by py-spy without pausing the target; afterwards the target must be untraced and not stopped."""
    pid, binary, native = job
    argv = [binary, "dump", "--pid", str(pid), "--json"] + (["--native"] if native else ["--nonblocking"])
    before = stat_of(pid)
    status, blob = run_tool(argv, 4 << 20)
    after = {}
    try:
        after = parse_status(slurp("/proc/%d/status" % pid, 8192))
    except OSError:
        pass
    out = {"status": "error", "error": None, "tool": binary, "threads": [], "tracer_after": after.get("TracerPid"),
           "state_after": (after.get("State") or "?")[:1],
           "state_before": before["state"] if before else None}  # type: dict
    if status == 0:
        try:
            out.update(status="ok", threads=py_spy_threads(blob[blob.index("["):]))
            return out
        except ValueError as error:
            out["error"] = "py-spy's answer was not understood: %s" % error
            return out
    out["error"] = " ".join(blob.split())[:400] or "exit %d" % status
    if re.search(r"permission|not permitted|root|ptrace", blob, re.I):
        out["status"] = "denied"
    elif status == 127:
        out["status"] = "absent"
    return out


def trace_calls(job: tuple) -> dict:
    """`strace -f` for two seconds (asked for by --deep only): it is told to let go by SIGINT, and waited for."""
    pid, seconds = job
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writer, 2)
            os.execvp("strace", ["strace", "-f", "-tt", "-T", "-y", "-s", "32", "-p", str(pid)])
        except OSError:
            os._exit(127)
    os.close(writer)
    parts, have, until, asked = [], 0, time.monotonic() + seconds, False
    while have < 1 << 20:
        left = until - time.monotonic()
        if left <= 0 and not asked:
            os.kill(child, signal.SIGINT)
            asked, until = True, time.monotonic() + 1.5
            continue
        if left <= 0:
            break
        ready, _, _ = select.select([reader], [], [], left)
        if ready:
            data = os.read(reader, 65536)
            if not data:
                break
            parts.append(data)
            have += len(data)
    if have >= 1 << 20 and not asked:
        os.kill(child, signal.SIGINT)
    os.close(reader)
    status = 0
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.005)
    else:
        os.kill(child, signal.SIGKILL)
    lines = b"".join(parts).decode("utf-8", "replace").splitlines()
    counts = {}  # type: dict
    for line in lines:
        match = re.search(r"(?:^|\s)(\w+)\(", line)
        if match:
            counts[match.group(1)] = counts.get(match.group(1), 0) + 1
    ok = any("(" in line and "=" in line or "unfinished" in line for line in lines)
    return {"status": "ok" if ok else "absent" if status >> 8 == 127 else "denied" if any("not permitted" in line
        for line in lines) else "error", "lines": lines[-200:],
            "counts": counts}


# ----------------------------------------------------------------------------------------------------------------- main

CAPS = ((2, "DAC_READ_SEARCH"), (19, "SYS_PTRACE"), (21, "SYS_ADMIN"), (34, "SYSLOG"))


def user_names(uids: "list[int]") -> dict:
    """Names of users; asks the name service, which may be a dead server."""
    import pwd

    names = {}  # type: dict
    for uid in uids:
        try:
            names[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            names[uid] = None
    return names


def meta_facts(started: float) -> dict:
    uname = os.uname()
    effective = re.search(r"CapEff:\s*(\w+)", text("/proc/self/status") or "")
    caps = int(effective.group(1), 16) if effective else 0
    uptime = float((text("/proc/uptime") or "0").split()[0])
    mounts = text("/proc/self/mountinfo", 1 << 20) or ""
    proc = next((line for line in reversed(mounts.splitlines()) if " /proc " in line and " - proc " in line), "")
    mapped = (text("/proc/self/uid_map", 256) or "").split()
    first = text("/proc/1/cgroup", 4096) or ""
    container = os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or \
        bool(re.search(r"docker|kubepods|containerd|lxc|libpod", first))
    return {"host": uname.nodename, "kernel": uname.release, "arch": uname.machine, "cpus": os.cpu_count(),
            "page_size": PAGE, "python": "%d.%d.%d" % sys.version_info[:3],
            "boot_id": (text("/proc/sys/kernel/random/boot_id") or "").strip() or None, "uptime_s": uptime,
            "boot_time": started - uptime, "uid": os.geteuid(), "user": None,
            "root": os.geteuid() == 0, "caps": [name for bit, name in CAPS if caps >> bit & 1],
            "yama": number("/proc/sys/kernel/yama/ptrace_scope"),
            "hidepid": bool(re.search(r"hidepid=(1|2|noaccess|invisible|ptraceable|4)", proc)), "container": container,
            "user_ns": mapped[:3] != ["0", "0", "4294967295"],
            "pid_ns": bracket(readlink("/proc/self/ns/pid") or ""), "started": started, "took_s": None, "cpu_s": None,
            "sample_cpu_s": [], "sample_times": [], "via": "local",
            "reduced": False, "clock_offset_s": 0.0, "redacted": False}


class Session(object):
    """One question, from the request to the snapshot."""

    def __init__(self, request: dict):
        self.ask = request
        self.start, self.wall = time.monotonic(), time.time()
        self.times = [float(t) for t in request.get("times") or (0.0, 1.0, 3.0)]
        self.soft = self.start + float(request.get("soft_s") or self.times[-1] + 1.6)  # nothing is waited for beyond it
        Courier.hard = max(self.soft, self.start + float(request.get("hard_s") or 0.0))
        self.errors = []  # type: list
        self.unseen = []  # type: list
        self.meta = meta_facts(self.wall)
        self.table = Table()
        self.target = {"asked": request.get("asked"), "kind": request.get("kind"), "host": request.get("host"),
                       "pid": None, "starttime": None, "exists": False,
                       "zombie": False, "exit_code": None, "how": None, "alternatives": [], "same_user": None,
                       "kernel_thread": False, "ours": None,
                       "log": request.get("log"), "run_dir": None, "name": None, "ended": None,
                       "note": None}  # type: dict
        self.extra_logs = []  # type: list
        self.gpu_asked = None  # type: Courier | None

    # .. resolving

    def resolve(self) -> "int | None":
        kind, value, table, target = self.ask.get("kind"), self.ask.get("value"), self.table, self.target
        until = min(self.soft, self.start + 1.5)
        chosen, others = None, []  # type: int | None, list
        if kind == "pid":
            pid = int(value)  # type: ignore[arg-type]
            if pid in table.rows:
                chosen, target["how"] = pid, "the PID given"
            else:
                row = stat_of(pid)  # a thread's id, too, opens here
                owner = text("/proc/%d/status" % pid, 4096) or ""
                group = re.search(r"Tgid:\s*(\d+)", owner)
                if row and group and int(group.group(1)) in table.rows:
                    chosen, target["how"] = int(group.group(1)), "the process of thread %d" % pid
                else:
                    target["pid"] = pid
                    target["note"] = "no process %d here" % pid + (" (processes of other users are hidden on this "
                                                                   "host)" if self.meta["hidepid"] else "")
        elif kind == "name":
            table.read_commands(list(table.rows), until)
            found = find_by_name(table, str(value))
            if found:
                chosen, target["how"] = found[0][0], "named %s" % value
                others = [brief(table, p, ["same name"], s) for p, s in found[1:9]]
            else:
                target["note"] = "no process named %s here" % value
        elif kind == "gpu":
            chosen, others = self._by_gpu(str(value), until)
        elif kind in ("log", "run_dir", "path"):
            place = collect("target", [str(value)], find_path, until, each=1.0, blame=lambda p: {"path": p})[0]
            if place is None:
                target.update(kind="log" if kind == "path" else kind,
                              note="%s does not exist on this host, or its file system does not answer" % value)
                target["log" if target["kind"] == "log" else "run_dir"] = str(value)
            else:
                kind, value = place
                target["kind"] = kind
                chosen, others = self._by_file(str(value), kind == "run_dir", until)
        elif kind == "slurm":
            pids = slurm_pids(table, str(value), until)
            table.read_commands(pids, until)
            best = sorted(topmost(table, pids), key=lambda p: (table.rows[p]["comm"] == "slurmstepd",
                                                               -table.score(p)[0], p))
            if best:
                chosen, target["how"] = best[0], "job %s of the scheduler" % value
                others = [brief(table, p, ["same job"], 0) for p in best[1:5]]
            else:
                target["note"] = "no process of job %s on this host" % value
        else:
            found3 = training_candidates(table, until)
            if found3:
                chosen, target["how"] = found3[0][0], "found: " + ", ".join(found3[0][2])
                others = [brief(table, p, w, s) for p, s, w in found3[1:9]]
            else:
                target["note"] = "no training process found on this host"
        target["alternatives"] = others
        return chosen

    def _by_gpu(self, value: str, until: float) -> "tuple[int | None, list]":
        table, target = self.table, self.target
        pids = []  # type: list
        self.gpu_asked = self._ask_gpu([0.0])
        Courier.wait(min(self.soft, self.start + 1.5), [self.gpu_asked])
        report = self._gpu_answer()
        for process in report["processes"]:
            if str(process["gpu"]) == value and process["pid"] in table.rows:
                pids.append(process["pid"])
        if not pids:
            for answer in collect("gpu holders", [0], gpu_holders, until, each=1.0):
                pids += [p for p, devices in (answer or {}).items() if "/dev/nvidia" + value in devices
                         and p in table.rows]
        table.read_commands(pids, until)
        pids = sorted(topmost(table, pids), key=lambda p: (-table.score(p)[0], p))
        if not pids:
            target["note"] = "no visible process uses GPU %s" % value if report["status"] == "ok" else \
                "the GPU tool gave no answer (%s)" % report["status"]
            return None, []
        target["how"] = "the process on GPU %s" % value
        return pids[0], [brief(table, p, ["on the same GPU"], table.score(p)[0]) for p in pids[1:5]]

    def _by_file(self, path: str, below: bool, until: float) -> "tuple[int | None, list]":
        table, target = self.table, self.target
        target["run_dir" if below else "log"] = path
        hits = file_holders(table, path, below, until)
        pids = [h["pid"] for h in hits]
        table.read_commands(pids, until)
        for hit in list(hits):  # a tee writes for somebody else
            if table.kind(hit["pid"]) == "tee":
                peers = pipe_peers(self._neighbours(hit["pid"]), until)
                stdin = bracket(readlink("/proc/%d/fd/0" % hit["pid"]) or "")
                writers = [p for p, _fd, _r, w in peers.get(stdin, ()) if w and p != hit["pid"]]
                table.read_commands(writers, until)
                hits += [dict(hit, pid=p, tee=hit["pid"]) for p in writers if table.kind(p) not in ("tee", "shell")]
        if below and not [h for h in hits if h["writes"]]:
            table.read_commands(list(table.rows), until)
            hits += [{"pid": p, "fd": None, "writes": False, "cwd": False} for p in table.rows if p not in table.me
                     and path in table.line(p) and table.python(p)]
        ranked = sorted(hits, key=lambda h: (not h["writes"], table.kind(h["pid"]) in ("tee", "shell", "tracker"),
                                             -table.score(h["pid"])[0], table.rows[h["pid"]]["starttime"]))
        ranked = [h for h in ranked if h["writes"] or below]
        if not ranked:
            target["note"] = "no visible process has %s open for writing" % path
            return None, []
        tops = topmost(table, [h["pid"] for h in ranked])
        best = next(h for h in ranked if h["pid"] in tops)
        target["how"] = ("the process that writes %s" % os.path.basename(path)) + (" through tee" if "tee" in best
            else "") if best["writes"] else "a process at work in %s" % path
        return best["pid"], [brief(table, h["pid"], ["has it open"], table.score(h["pid"])[0]) for h in ranked
                             if h["pid"] != best["pid"]][:4]

    def _neighbours(self, pid: int) -> "list[int]":
        """Those a pipe most likely leads to: same session or group, ancestors and their children."""
        rows = self.table.rows
        row = rows[pid]
        near = {p for p, r in rows.items() if r["pgrp"] == row["pgrp"] or (r["session"] == row["session"]
            and row["session"] > 0)}
        for above in self.table.ancestors(pid)[:6]:
            if above > 1:
                near.add(above)
                near.update(self.table.children.get(above, ())[:50])
        return [p for p in sorted(near) if p in rows and not self.table.kernel(p)][:600]

    # .. GPU

    def _ask_gpu(self, times: "list[float]") -> Courier:
        start, self.gpu_tool = self.start, "nvml"

        def wait(item: tuple) -> None:
            time.sleep(max(0.0, start + item[1] - time.monotonic()))

        def look(item: tuple) -> dict:
            answer = ask_nvml((item[0], start))
            if answer["status"] == "absent":
                answer = ask_smi()
                answer["tool"] = "nvidia-smi"
                answer["t"] = time.monotonic() - start
            return answer

        return Courier("gpu", list(enumerate(times)), look, each=2.5, before=wait, restarts=0,
                       blame=lambda _i: {"path": "NVML or nvidia-smi"})

    def _gpu_answer(self) -> dict:
        courier = self.gpu_asked
        if courier is None:
            return gpu_report([], None, False)
        answers = [courier.out[i] for i in sorted(courier.out)]
        late = any(t["probe"] == "gpu" for t in Courier.timed_out) or (not courier.done and not answers)
        tool = next((a.get("tool", "nvml") for a in answers if a.get("status") != "absent"), None)
        report = gpu_report(answers, tool or ("nvidia-smi" if late else None), late)
        if courier.errors and report["status"] == "absent":
            report.update(status="error", tool="nvml", error=str(list(courier.errors.values())[0]))
        if report["status"] == "absent" and gpu_present():
            report.update(status="error",
                          error="a driver is loaded, but neither libnvidia-ml.so.1 nor nvidia-smi answers here")
        return report

    # .. one job

    def explain(self) -> dict:
        pid = self.resolve()
        snapshot = {"schema": SCHEMA, "meta": self.meta, "target": self.target}
        if pid is None:
            self._without_process(snapshot)
        else:
            self._with_process(snapshot, pid)
        Courier.dismiss()
        used = os.times()
        self.meta.update(took_s=round(time.monotonic() - self.start, 3), cpu_s=round(sum(used[:4]), 3),
                         starved=sorted(set(Courier.starved)))
        snapshot.update(not_visible=self.unseen, probes_timed_out=Courier.timed_out, errors=self.errors)
        return snapshot

    def _empty(self, snapshot: dict) -> None:
        snapshot.update(job={"main": None, "launcher": None, "launcher_nproc": None, "world_size": None, "members": [],
                             "left_out": 0, "ranks": [], "kinds": {}, "edges": [],
                             "by": None}, processes={}, samples=[], died=[], mounts={}, files={}, datasets=[], logs=[],
                             outputs=[], caches=[], sockets=[], listening=[],
                        locks=[], lockfiles=[], pipes=[], cgroups={}, gpu={}, host={}, kernel_log={}, nccl={"ras": None,
                            "dumps": []}, slurm=None, stacks={}, deep={})

    def _common(self, first: list) -> Errands:
        """Facts of the host, after those asked for first."""
        uids = {os.geteuid(), self.table.uid(self.target["pid"] or 0)}
        return Errands("host", first + [
            ("host", host_facts, 0), ("infiniband", infiniband, 0),
            ("user names", user_names, sorted(u for u in uids if u is not None)),
            ("kernel log", kernel_log, 0), ("statvfs shm", shm_use, "/dev/shm", {"path": "/dev/shm"}),
            ("statvfs tmp", statvfs_of, "/tmp", {"path": "/tmp"})])

    def _take_common(self, snapshot: dict, common: Errands) -> None:
        host = common.get("host") or {}
        host.update(shm=common.get("statvfs shm"), tmp=common.get("statvfs tmp"), ib=common.get("infiniband"))
        snapshot["host"] = host
        log = common.get("kernel log") or {"readable": False, "lines": []}
        snapshot["kernel_log"] = log
        if not log["readable"]:
            self.unseen.append({"what": "the kernel log", "why": "dmesg is restricted here",
                                "needs": "root (CAP_SYSLOG)", "command": "sudo dmesg -T | tail -50"})
        self.users = common.get("user names") or {}
        self.meta["user"] = self.users.get(os.geteuid())

    def _without_process(self, snapshot: dict) -> None:
        """Nothing is left of the process: what its files, the host and the scheduler still say."""
        self._empty(snapshot)
        target = self.target
        common = self._common([])
        if self.gpu_asked is None:
            self.gpu_asked = self._ask_gpu([0.0])
        slurm = Courier("slurm", [str(self.ask["value"])], ask_slurm,
                        each=2.0) if self.ask.get("kind") == "slurm" else None
        logs = [p for p in (target["log"], self.ask.get("log")) if p]
        if target["run_dir"]:
            for found in collect("run directory", [target["run_dir"]], lambda p: newest_logs((p, 0.0)), self.soft,
                                 each=0.8, blame=lambda p: {"path": p}):
                logs += found or []
            for found in collect("run directory", [target["run_dir"]], lambda p: recent_outputs((p, 0.0)), self.soft,
                                 each=0.8, blame=lambda p: {"path": p}):
                snapshot["outputs"] = [self._output(f, None, []) for f in found or []
                                       if not LOG_NAME.search(os.path.basename(f["path"]))][:24]
                logs += [f["path"] for f in found or [] if LOG_NAME.search(os.path.basename(f["path"]))][:3]
        if slurm is not None:
            Courier.pump(self.soft, [slurm])
            snapshot["slurm"] = slurm.value()
            logs += (snapshot["slurm"] or {}).get("stdout", [])
        logs = [p for i, p in enumerate(logs) if p not in logs[:i]][:6]
        times = self.times if logs and not self.ask.get("quick") else [0.0]
        pause = [(i, p) for i in range(len(times)) for p in logs]
        base = self.start

        def wait(item: tuple) -> None:
            time.sleep(max(0.0, base + times[item[0]] - time.monotonic()))

        watch = Courier("log size", pause, lambda item: self._size(item[1]), each=0.7, before=wait,
                        blame=lambda item: {"path": item[1]})
        Courier.wait(self.soft, [watch, self.gpu_asked, common])
        growth = {}  # type: dict
        for index, (_i, path) in enumerate(pause):
            if index in watch.out:
                growth.setdefault(path, []).append(watch.out[index][0])
        reader = Courier("log", [(p, p, HEAD_BYTES, TAIL_BYTES) for p in logs], read_log, each=1.0,
                         blame=lambda j: {"path": j[0]})
        Courier.wait(max(self.soft, time.monotonic() + 0.3), [reader])
        for index, path in enumerate(logs):
            body = reader.out.get(index)
            how = "given" if path in (target["log"],
                                      self.ask.get("log")) else "run_dir" if target["run_dir"] else "slurm"
            entry = log_entry(path, how, growth=growth.get(path, []), error=None if body
                              else reader.errors.get(len(snapshot["logs"])) or "did not answer in time")
            if body:
                entry.update({k: v for k, v in body.items() if k != "ino"})
                entry["age_s"] = round(time.time() - body["mtime"], 1)
            snapshot["logs"].append(entry)
        snapshot["samples"] = [{"t": round(t, 3), "wall": self.wall + t, "cpu_s": 0.0, "procs": {},
                                "logs": {p: {"size": g[i]} for p, g in growth.items() if i < len(g)},
                                "outputs": {}, "caches": {}, "host": host_counters({})} for i, t in enumerate(times)
                                if i == len(times) - 1]
        self.meta["sample_times"] = times
        self._take_common(snapshot, common)
        self._finish_gpu(snapshot)
        ages = [e["age_s"] for e in snapshot["logs"] if e["age_s"] is not None]
        last = time.time() - min(ages) if ages else None
        ooms = [line for line in snapshot["kernel_log"]["lines"] if line["kind"] == "oom"]
        oom_since = None
        if last is not None and snapshot["kernel_log"]["readable"]:
            oom_since = any(line["age_s"] is not None and time.time() - line["age_s"] >= last - 60 for line in ooms)
        target["ended"] = {"by": "pid gone" if self.ask.get("kind") in ("pid", "name", "slurm", "gpu", "search")
                           else "log only", "last_output": last,
                           "log_age_s": min(ages) if ages else None, "oom_since": oom_since, "core_files": []}

    @staticmethod
    def _size(path: str) -> "tuple":
        seen = os.stat(path)
        return seen.st_size, seen.st_mtime

    def _finish_gpu(self, snapshot: dict, members: "list[int]" = ()) -> None:  # type: ignore[assignment]
        report = self._gpu_answer()
        holders = {}  # type: dict
        if report["status"] != "absent" or gpu_present():
            for answer in collect("gpu holders", [0], gpu_holders, self.soft + 0.3, each=0.8):
                holders = answer or {}
        for process in report["processes"]:
            process["member"] = process["pid"] in members
            row = self.table.rows.get(process["pid"])
            process["alive"] = row is not None or None
            process["comm"] = process["comm"] or (row["comm"] if row else None)
        report["holders"] = {str(p): d for p, d in holders.items()}
        held = set(holders) | {p["pid"] for p in report["processes"] if p["pid"] in self.table.rows}
        report["orphans"] = sorted(p for p in held if p not in members and p in self.table.rows
                                   and self.table.rows[p]["ppid"] == 1)
        if report["status"] == "absent":
            report["error"] = None
        snapshot["gpu"] = report

    def _with_process(self, snapshot: dict, pid: int) -> None:
        self._empty(snapshot)
        table, target, soft = self.table, self.target, self.soft
        job = Job(table, pid, min(soft, self.start + 2.0))
        row = table.rows[pid]
        target.update(pid=pid, starttime=row["starttime"], exists=True, zombie=row["state"] in "ZX",
                      same_user=table.uid(pid) == os.geteuid(), kernel_thread=table.kernel(pid))
        self.job, self.readers = job, {}  # type: ignore[var-annotated]
        self._find_readers()
        self._find_feeders()
        members = job.members
        costly = [p for p in members if job.kinds[p] in ("main", "rank", "launcher")][:12] + [p for p in members
            if job.kinds[p] in ("fork", "spawned", "other")][:3]
        groups, keys = {}, {}  # type: dict, dict
        hierarchies = cgroup_mounts()
        for p in members[:64]:
            blob = text("/proc/%d/cgroup" % p, 8192) or ""
            places = cgroup_places(blob, hierarchies)
            key = places.get("memory", places.get("2", places.get("cpu", ("?",))))[0]
            groups[p] = key
            if key not in keys and len(keys) < 4 and places:
                keys[key] = places
        sampler, items, begin = self._start_sampler(members, keys)
        identity = Courier("identity", [(p, p in costly) for p in members[:96] if table.rows[p]["state"] not in "ZX"],
                           identify, each=0.5,
                           blame=lambda j: {"pid": j[0], "path": "/proc/%d/environ or maps" % j[0]})
        main = job.main if job.main in table.rows else pid
        common = self._common([("mountinfo", mountinfo_of, main, {"pid": main})]
                              + [(k, cgroup_facts, keys[k], {"path": k}) for k in keys])
        if self.gpu_asked is None:
            self.gpu_asked = self._ask_gpu([0.0, min(1.6, self.times[-1])])
        firsts = [i for i, (s, _p) in enumerate(items) if s == 0]
        Courier.wait(min(soft, begin + 1.2), [sampler],
                     ready=lambda: sampler.done or all(i in sampler.out or i in sampler.errors for i in firsts))
        Courier.wait(min(soft, time.monotonic() + 0.8), [identity, common],
                     ready=lambda: identity.done and (common.done or 0 in common.out or 0 in common.errors))
        ids = {p: identity.out.get(i) for i, (p, _m) in enumerate(identity.items)}
        self.mounts = parse_mountinfo(common.get("mountinfo") or "")
        for mount in self.mounts.values():
            mount["device"] = None
        names = device_names()
        for mount in self.mounts.values():
            mount["device"] = names.get(mount["dev"])
        mine, theirs = readlink("/proc/self/ns/mnt"), (ids.get(main) or {}).get("ns_mnt")
        same = theirs is None or mine == theirs
        root = (ids.get(main) or {}).get("root")
        self.reach = Reach(main, same and root in (None, "/"), self.mounts)
        first = {p: sampler.out[i] for i, (s, p) in enumerate(items) if s == 0 and p is not None and sampler.out.get(i)}
        fact = self._start_facts(first, ids, main, begin)
        Courier.wait(min(soft, begin + self.times[-1] + 1.2), [sampler, fact["watch"]])
        self._assemble_samples(snapshot, sampler, items, begin, fact)
        self._late_files(snapshot, fact, first)
        rest = [c for c in fact.values() if isinstance(c, Courier)]
        Courier.wait(max(soft, time.monotonic() + 0.2), rest + [identity, common, self.gpu_asked])
        self._take_common(snapshot, common)
        self._take_processes(snapshot, ids, first, groups)
        self._take_facts(snapshot, fact, first, ids)
        snapshot["cgroups"] = {k: common.get(k) for k in keys if common.get(k)}
        for key, group in snapshot["cgroups"].items():
            group["pids"] = [p for p in members if groups.get(p) == key]
        for courier in (sampler, identity, common, fact["links"]):
            self.errors += ["%s: %s" % (courier.name, error) for error in list(courier.errors.values())[:5]]
        self._finish_gpu(snapshot, members)
        if self.ask.get("stacks") or self.ask.get("deep"):
            self._stacks(snapshot)
        self._end_of_target(snapshot)

    def _find_feeders(self) -> None:
        """Who writes into the pipe that the job reads as its standard input: it joins the job as a feeder, and so does
        what feeds that."""
        job, table = self.job, self.table
        ask = [p for p in job.members if job.kinds[p] in ("main", "rank")][:8]
        above = set(table.ancestors(ask[0] if ask else 0))  # who started it only holds the end
        for _ in range(3):
            wanted = {bracket(t) for t in (readlink("/proc/%d/fd/0" % p) or "" for p in ask) if t.startswith("pipe:")}
            if not wanted:
                return
            pids = [p for p in self._neighbours(ask[0]) if p not in job.members]
            found = pipe_peers(pids, min(self.soft, self.start + 2.0))
            ask = sorted({pid for inode in wanted for pid, fd, reads, writes in found.get(inode, ())
                          if writes and not reads and pid not in table.me and pid not in above})[:8]
            table.read_commands(ask, min(self.soft, self.start + 2.0))
            for pid in ask:
                if len(job.members) < MAX_MEMBERS:
                    job.members.append(pid)
                    job.kinds[pid] = "shell" if table.wrapper(pid) else "feeder"
            ask = [p for p in ask if job.kinds.get(p) == "feeder"]
            if not ask:
                return

    def _find_readers(self) -> None:
        """Who reads the job's output pipes: a tee joins the job, so that its files count as logs."""
        job, table = self.job, self.table
        wanted = {}  # type: dict
        for pid in [p for p in job.members if job.kinds[p] in ("main", "rank", "launcher")][:8]:
            for fd in (1, 2):
                target = readlink("/proc/%d/fd/%d" % (pid, fd)) or ""
                if target.startswith("pipe:"):
                    wanted[bracket(target)] = pid
        if not wanted:
            return
        pids = self._neighbours(job.main if job.main in table.rows else job.members[0])
        found = pipe_peers(pids, min(self.soft, self.start + 2.0))
        missing = [i for i in wanted if not any(reads for _p, _f, reads, _w in found.get(i, ()))]
        if missing and len(table.rows) < 5000:
            rest = [p for p in table.rows if p not in pids and not table.kernel(p)
                    and table.rows[p]["state"] not in "ZX"]
            for inode, ends in pipe_peers(rest, min(self.soft, self.start + 2.0)).items():
                found.setdefault(inode, []).extend(ends)
        for inode, writer in wanted.items():
            for pid, fd, reads, writes in found.get(inode, ()):
                if reads and not writes and pid != writer:
                    self.readers.setdefault(inode, []).append((pid, fd))
        everyone = sorted({p for ends in self.readers.values() for p, _fd in ends})
        table.read_commands(everyone, min(self.soft, self.start + 2.0))
        for pid in everyone:
            if pid not in job.members and pid not in table.me and len(job.members) < MAX_MEMBERS:
                kind = table.kind(pid)
                job.members.append(pid)
                job.kinds[pid] = "tee" if kind == "tee" else "reader"

    def _start_sampler(self, members: "list[int]", keys: dict) -> tuple:
        sampler = Sampler()
        known, times = set(self.table.rows) | {os.getpid()}, self.times
        family = {p for p in members if self.job.kinds[p] not in ("reader", "feeder")}
        items = [(i, p) for i in range(len(times)) for p in [None] + members]  # type: list
        begin = time.monotonic()

        def wait(item: tuple) -> None:
            pause = begin + times[item[0]] - time.monotonic()
            if pause > 0:
                time.sleep(pause)

        def look(item: tuple):  # type: ignore[no-untyped-def]
            index, pid = item
            before = time.process_time()
            if pid is None:
                out = dict(sampler.host(index, known, family, keys), t=time.monotonic())  # type: dict | None
            else:
                out = sampler.look(index, pid)
                if out is not None:
                    out["denied"] = sorted(sampler.denied.get(pid, ()))
            if out is not None:
                out["cpu_s"] = time.process_time() - before
            return out

        hung = set()  # type: set

        def blame(item: tuple) -> dict:
            hung.add(item[1])
            return {"pid": item[1], "path": "/proc/%s" % item[1]}

        return Courier("sample", items, look, each=0.8, before=wait, skip=lambda item: item[1] in hung
                       and item[1] is not None, blame=blame, restarts=4), items, begin

    def _assemble_samples(self, snapshot: dict, sampler: Courier, items: list, begin: float, fact: dict) -> None:
        samples = []
        for index in range(len(self.times)):
            sample = {"t": None, "wall": None, "cpu_s": 0.0, "procs": {}, "logs": {}, "outputs": {}, "caches": {},
                      "host": {}}  # type: dict
            for i, (s, pid) in enumerate(items):
                out = sampler.out.get(i)
                if s != index or not out:
                    continue
                sample["cpu_s"] += out.pop("cpu_s", 0.0)
                if pid is None:
                    sample["t"] = round(out["t"] - begin, 3)
                    sample["wall"] = self.wall + (out["t"] - self.start)
                    sample["host"] = out["host"]
                    for born, look in out["born"].items():
                        sample["procs"][born] = look
                        self._adopt(int(born), look)
                else:
                    sample["procs"][str(pid)] = out
            for look in sample["procs"].values():
                look["t"] = round(look["t"] - begin, 3)
                if not look["stat"]["exit_code"] and look["stat"]["state"] not in "ZX":
                    look["stat"]["exit_code"] = None
            if sample["t"] is None:
                continue
            sample["cpu_s"] = round(sample["cpu_s"], 4)
            samples.append(sample)
        for index, (i, what, name) in enumerate(fact["watch"].items):
            value = fact["watch"].out.get(index)
            if value is not None and i < len(samples):
                if what == "cache":
                    samples[i]["caches"][name] = {"entries": value["entries"], "mtime": value["mtime"]}
                else:
                    samples[i]["logs" if what == "log" else "outputs"][name] = {"size": value[0], "mtime": value[1]}
        snapshot["samples"] = samples
        self.meta["sample_times"] = [s["t"] for s in samples]
        self.meta["sample_cpu_s"] = [s["cpu_s"] for s in samples]
        for earlier, later in zip(samples, samples[1:]):
            for pid, look in earlier["procs"].items():
                if pid not in later["procs"] and not any(t.get("pid") == int(pid) for t in Courier.timed_out):
                    snapshot["died"].append({"pid": int(pid), "comm": look["stat"]["comm"],
                                             "kind": self.job.kinds.get(int(pid), "other"), "after_t": earlier["t"],
                                             "before_t": later["t"], "last_state": look["stat"]["state"],
                                             "exit_code": look["stat"]["exit_code"]})

    def _adopt(self, pid: int, look: dict) -> None:
        """A process born during the sampling."""
        table, job = self.table, self.job
        if pid not in table.rows:
            table.rows[pid] = look["stat"]
            table.children.setdefault(look["stat"]["ppid"], []).append(pid)
        if pid not in job.members:
            table.read_commands([pid], min(self.soft, time.monotonic() + 0.2), each=0.1)
            job.members.append(pid)
            job.kinds[pid] = table.kind(pid)

    # .. storage, logs, sockets

    def _log_candidates(self, first: dict, ids: dict, main: int) -> "list[dict]":
        """Where the job's words go, best first; paths only, nothing is touched yet."""
        job, found = self.job, []  # type: ignore[var-annotated]

        def add(path: "str | None", how: str, pid: "int | None", fd: "int | None", kind: str, **more: object) -> None:
            for entry in found:
                if entry["path"] == path and path is not None and entry["kind"] == kind:
                    return
            found.append(log_entry(path, how, pid, fd, kind, **more))

        for path in (self.ask.get("log"), self.target["log"]):
            if path:
                add(path, "given", None, None, "file")
        asked = self.target["pid"]
        order = [main] + ([asked] if asked != main and job.kinds.get(asked) in ("rank", "launcher", "other", "shell")
                          else []) + job.rank_pids[:8]
        order += [job.launcher] if job.launcher else []
        for pid in [p for i, p in enumerate(order) if p in first and p not in order[:i]]:
            for fd in (1, 2):
                held = first[pid]["fds"].get(str(fd))
                if not held:
                    continue
                how = "fd%d" % fd
                if held["kind"] in ("file", "shm"):
                    add(held["path"], how, pid, fd, "file", deleted=bool(held.get("deleted")),
                        append=bool(held.get("append")), mnt=held.get("mnt"))
                elif held["kind"] == "pipe":
                    readers = self.readers.get(held.get("inode"), [])
                    to = [{"pid": p, "comm": self.table.rows[p]["comm"], "cmd": self.table.line(p)}
                          for p, _fd in readers if p in self.table.rows]
                    for p, _fd in readers:
                        for n, other in sorted((first.get(p) or {"fds": {}})["fds"].items()):
                            if other["kind"] == "file" and written(other) and other["path"] != held["path"]:
                                add(other["path"], "tee", p, int(n), "file", via=p, deleted=bool(other.get("deleted")),
                                    append=bool(other.get("append")), mnt=other.get("mnt"))
                    add(held["path"], how, pid, fd, "pipe", to=to[0] if to else None)
                else:
                    add(held["path"], how, pid, fd, held["kind"] if held["kind"] in ("tty", "socket", "null")
                        else "file" if held["path"].startswith("/") else "other")
        for pid in job.members[:64]:
            if job.kinds.get(pid) in ("reader", "feeder"):
                continue
            for n, held in sorted((first.get(pid) or {"fds": {}})["fds"].items(), key=lambda x: int(x[0])):
                is_output = held["kind"] == "file" and written(held) and int(n) > 2
                if is_output and LOG_NAME.search(os.path.basename(held["path"])):
                    add(held["path"], "open", pid, int(n), "file", deleted=bool(held.get("deleted")),
                        append=bool(held.get("append")), mnt=held.get("mnt"))
        for path in self.extra_logs:
            add(path, "slurm", None, None, "file")
        rank = {"given": 0, "fd1": 1, "fd2": 2, "tee": 1, "slurm": 3, "open": 4}
        found.sort(key=lambda e: (e["kind"] != "file", rank.get(e["how"], 5)))
        return found[:12]

    def _touch(self, entry: dict) -> str:
        """The path by which a log is opened: its descriptor when it is deleted or lives elsewhere."""
        if entry["pid"] is not None and entry["fd"] is not None and (entry["deleted"] or not self.reach.same):
            return "/proc/%d/fd/%d" % (entry["pid"], entry["fd"])
        return self.reach(entry["path"])

    def _start_facts(self, first: dict, ids: dict, main: int, begin: float) -> dict:
        job, reach, table, fact = self.job, self.reach, self.table, {}  # type: Job, Reach, Table, dict
        env = (ids.get(main) or {}).get("environ") or {}
        slurm_id = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
        if self.ask.get("kind") == "slurm":
            slurm_id = str(self.ask["value"])
        if slurm_id:
            fact["slurm"] = Courier("slurm", [slurm_id], ask_slurm, each=2.0)
        logs = self._log_candidates(first, ids, main)
        if self.target["run_dir"] or not any(e["kind"] == "file" for e in logs):
            cwd = (ids.get(main) or {}).get("cwd")
            since = self.wall - (self.meta["uptime_s"] - table.rows[main]["starttime"]) - 5
            places = [p for p in (self.target["run_dir"], cwd) if p]
            for place, more in zip(places, collect("logs beside", [(reach(p), since) for p in places], newest_logs,
                                                   min(self.soft, time.monotonic() + 0.5), each=0.4,
                                                   blame=lambda j: {"path": j[0]}, skip=lambda j: reach.blocked(j[0]))):
                for path in more or []:
                    path = place + path[len(reach(place)):]
                    if not any(e["path"] == path for e in logs):
                        logs.append(log_entry(path, "run_dir" if place == self.target["run_dir"] else "guess"))
            logs.sort(key=lambda e: e["kind"] != "file")
        fact["logs"] = logs
        log_paths = {e["path"] for e in logs}
        data, outs = {}, {}  # type: dict, dict
        for pid, look in first.items():
            if job.kinds.get(pid) in ("tee", "reader", "feeder"):
                continue
            for n, held in look["fds"].items():
                if held["kind"] not in ("file", "shm") or held["path"] in log_paths or is_library(held["path"]):
                    continue
                side = outs if written(held) and held["kind"] == "file" else data
                if held["kind"] == "shm" and side is data:
                    continue  # shared memory between workers; counted under host.shm
                entry = side.setdefault(held["path"], {"pids": [], "fds": {}, "mnt": held.get("mnt"),
                                                       "kind": held["kind"], "deleted": held.get("deleted", False)})
                if len(entry["pids"]) < 32:
                    entry["pids"].append(pid)
                    entry["fds"][str(pid)] = int(n)
        for pid, known in ids.items():
            for path, size in ((known or {}).get("maps") or {}).get("mapped", []):
                entry = data.setdefault(path, {"pids": [], "fds": {}, "mnt": mount_of(self.mounts, path),
                                               "kind": "file", "deleted": False})
                entry["mapped"] = size
                if pid not in entry["pids"] and len(entry["pids"]) < 32:
                    entry["pids"].append(pid)
        fact["data"], fact["outs"] = data, outs
        since = max(self.wall - 3600, self.wall - (self.meta["uptime_s"] - table.rows[main]["starttime"]) - 5)
        cwd = (ids.get(main) or {}).get("cwd")
        roots = [p for p in [self.target["run_dir"], cwd] + [os.path.dirname(e["path"]) for e in logs
                                                             if e["kind"] == "file" and e["path"]][:2] if p]
        roots = [p for i, p in enumerate(roots) if p not in roots[:i] and p not in ("/", "/tmp", "/root", "/home")
                 and not p.startswith(("/dev", "/proc"))][:4]
        fact["recent"] = Courier("outputs", [(reach(p), since) for p in roots], recent_outputs, each=0.8,
                                 blame=lambda j: {"path": j[0]}, skip=lambda j: reach.blocked(j[0]))
        fact["recent_roots"] = roots
        reads = self._file_jobs(data)
        fact["files"] = Courier("file", reads, lambda j: inspect_file(j[1]), each=0.5, blame=lambda j: {"path": j[0]},
                                skip=lambda j: reach.blocked(j[0]))
        used = {}  # type: dict
        for path, role in [(p, "data") for p in data] + [(p, "output") for p in outs] + [(e["path"], "log")
            for e in logs if e["kind"] == "file"] + [(cwd, "cwd")] + \
                [("/dev/shm", "shm"), (env.get("TMPDIR") or "/tmp", "tmp")] + [(p, "output") for p in roots]:
            key = mount_of(self.mounts, path) if path else None
            if key is not None and role not in used.setdefault(key, []):
                used[key].append(role)
        for key, mount in self.mounts.items():  # a file system mounted inside the run's own place is one it writes to
            inside = any(mount["mountpoint"].startswith(p.rstrip("/") + "/") for p in roots)
            if inside and "output" not in used.get(key, ()) and len(used) < 24:
                used.setdefault(key, []).append("output")
        fact["used"] = used
        fact["statvfs"] = Courier("statvfs", sorted(used), lambda k: statvfs_of(reach(self.mounts[k]["mountpoint"])),
                                  each=0.6,
                                  blame=lambda k: {"path": self.mounts[k]["mountpoint"], "mount": k})
        Courier.pump(min(self.soft, time.monotonic() + 0.25), [fact["recent"]])
        caches = cache_dirs(env, None, env.get("USER"))
        fact["caches"] = caches
        watched = [("log", self._touch(e), e["path"]) for e in logs if e["kind"] == "file" and e["path"]]
        watched += [("output", self._fd_path(p, e) if e["deleted"] or not reach.same else reach(p), p) for p,
                    e in list(outs.items())[:24]]
        have = set(outs)
        for index, root in enumerate(roots):
            for found in fact["recent"].out.get(index) or []:
                path = root + found["path"][len(reach(root)):]
                if path not in have and path not in log_paths and len(watched) < 60:
                    have.add(path)
                    watched.append(("output", found["path"], path))
        watched += [("cache", reach(p), n) for n, p in caches]
        times = self.times

        def wait(item: tuple) -> None:
            time.sleep(max(0.0, begin + times[item[0]] - time.monotonic()))

        fact["touch"] = {name: path for _w, path, name in watched}
        fact["watch"] = Courier("size", [(i, what, name) for i in range(len(times)) for what, _p, name in watched],
                                lambda item: survey_cache(fact["touch"][item[2]]) if item[1] == "cache"
                                else self._size(fact["touch"][item[2]]), each=0.6, before=wait,
                                blame=lambda item: {"path": fact["touch"][item[2]]},
                                skip=lambda item: reach.blocked(fact["touch"][item[2]]), restarts=6)
        socket_inodes = {h["inode"] for look in first.values() for h in look["fds"].values() if h["kind"] == "socket"
                         and h.get("inode")}
        ras = re.search(r":(\d{1,5})$", env.get("NCCL_RAS_ADDR", ""))
        ras_port = int(ras.group(1)) & 0xFFFF if ras else KNOWN_PORTS[0]
        ports = list(KNOWN_PORTS) + [ras_port]
        if env.get("MASTER_PORT", "").isdigit():
            ports.append(int(env["MASTER_PORT"]))
        cache = env.get("XDG_CACHE_HOME") or (env.get("HOME") or "/nonexistent") + "/.cache"
        patterns = [env.get("TORCH_FR_DUMP_TEMP_FILE") or "", env.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") or "",
                    cache + "/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]
        if env.get("NCCL_DEBUG_FILE"):
            patterns.append(re.split(r"[.%]", env["NCCL_DEBUG_FILE"])[0])
        patterns = [reach(p) for i, p in enumerate(patterns) if p and p not in patterns[:i]]
        fact["links"] = Errands("links", [
            ("sockets", lambda p: tcp_table(p, socket_inodes, tuple(ports)), main, {"pid": main}),
            ("unix sockets", lambda p: unix_peers(p, socket_inodes), main, {"pid": main}),
            ("locks", lambda _i: parse_locks(text("/proc/locks", 1 << 20) or ""), 0)], each=1.3)
        dumps = Dumps(patterns, self.wall - (self.meta["uptime_s"] - table.rows[main]["starttime"]) - 5,
                      table.uid(main))
        fact["dumps"] = Courier("NCCL dumps", list(range(Dumps.READ + 1)), dumps.do, each=1.0,
                                blame=lambda _i: {"path": patterns[0]})
        net = readlink("/proc/%d/ns/net" % main)  # in another one, our 127.0.0.1 is not the target's
        soft = self.soft
        fact["ras"] = Courier("NCCL RAS", [ras_port] if net in (None, readlink("/proc/self/ns/net")) else [],
                              lambda port: ask_ras(port, max(0.3, min(2.4, soft - time.monotonic() - 0.3))), each=2.6)
        self._hunt_locks(fact, first, caches, [p for p in [cwd, self.target["run_dir"]] if p])
        return fact

    def _take_nccl(self, snapshot: dict, fact: dict) -> dict:
        ras, courier = fact["ras"].value(), fact["dumps"]
        if ras is not None and ras["status"] in ("ok", "timed_out"):
            listeners = [x["pid"] for x in snapshot["listening"] if x["port"] == ras["port"]]
            seen = all(p.get("visible", {}).get("fd") for p in snapshot["processes"].values())
            ras["ours"] = any(listeners) or (False if listeners and seen else None)  # one port a host, maybe another's
        files = courier.value() or []
        read = {a["path"]: a for i, a in courier.out.items() if i > 0 and a}
        for file in files:
            file.pop("uid", None)
            if file["kind"] == "flight_recorder":
                said = read.get(file["path"])
                file["flight"] = {k: v for k, v in said.items() if k != "path"} if said else None
                if said and said["status"] != "ok":
                    self.unseen.append({"what": "the Flight Recorder dump %s (%s)" % (file["path"], said["status"]),
                                        "why": said["error"], "needs": "a dump that is only data, of the target's user",
                                        "command": None})
        return {"ras": ras, "dumps": files}

    def _hunt_locks(self, fact: dict, first: dict, caches: list, places: "list[str]") -> None:
        """Look for the lock that a member waits for, when one naps or waits for a lock."""
        job = self.job
        nappers = [p for p, look in first.items() if job.kinds.get(p) in ("main", "rank", "fork", "spawned", "other")
                   and may_nap(p, look)]
        if not nappers:
            return
        nappers.sort(key=lambda p: (p != job.main, job.kinds[p] != "rank", p))
        held = [h["path"] for look in first.values() for h in look["fds"].values() if h["kind"] == "file"
                and LOCK_NAME.search(h["path"])]
        blocked = [t["syscall"]["path"] for look in first.values() for t in look["threads"].values()
                   if re.search("lock", t.get("wchan") or "") and (t.get("syscall") or {}).get("kind") == "file"]
        places += sorted({os.path.dirname(p) for p in list(fact["data"])[:50] if p.startswith("/")})[:4]
        places = [p for i, p in enumerate(places) if p not in places[:i] and p not in ("/", "/tmp", "/dev/shm")]
        items = [("held", None)] + [("dir", p) for p in places[:6]] \
            + [("cache", p) for n, p in caches if n in ("torch_extensions", "hf_hub", "hf_datasets")] \
            + [("watch", min(1.0, max(0.3, self.times[-1] - 1.0))), ("openers", 0.6)]  # type: list
        hunt = LockHunt(first, nappers, (blocked + held)[:24], self.reach)
        fact["hunt"] = Courier("lock files", items, hunt.do, each=1.8,
                               blame=lambda i: {"path": i[1] if i[0] in ("dir", "cache") else None},
                               skip=lambda i: i[0] in ("dir", "cache") and self.reach.blocked(i[1]))

    def _take_locks(self, snapshot: dict, fact: dict, first: dict) -> None:
        """Locks that touch a member, and the lock files that may be waited for, with whoever has them."""
        table, members = self.table, set(self.job.members)
        inos = {}  # type: dict
        for look in first.values():
            for held in look["fds"].values():
                if held.get("ino"):
                    mount = self.mounts.get(held.get("mnt")) or {}
                    inos.setdefault(held["ino"], (held["path"], mount.get("dev")))
        known = fact["links"].get("locks") or []
        table.read_commands(sorted({lock["holder"] for lock in known if members.intersection(lock["waiters"])
                                    and lock["holder"] in table.rows}), time.monotonic() + 0.3)
        for lock in known:
            path, dev = inos.get(lock["ino"], (None, None))
            major, _, minor = lock["dev"].partition(":")
            if path and dev and not is_hex_dev(major, minor, dev):
                path = None
            if lock["holder"] in members or members.intersection(lock["waiters"]) or path:
                row = table.rows.get(lock["holder"])
                lock.update(path=path, holder_comm=row["comm"] if row else None,
                            holder_cmd=table.line(lock["holder"]) if row else None)
                snapshot["locks"].append(lock)
        files = {}  # type: dict
        for pid, look in first.items():
            for held in look["fds"].values():
                if held["kind"] == "file" and LOCK_NAME.search(held["path"]) and len(files) < 40:
                    files[held["path"]] = {"path": held["path"], "pid": pid, "age_s": None, "open": True}
        hunt = fact.get("hunt")
        answers = {item[0]: hunt.out.get(i) for i, item in enumerate(hunt.items)} if hunt is not None else {}
        openers = answers.get("openers")
        for seen in answers.get("watch") or []:
            entry = files.setdefault(seen["path"], {"path": seen["path"], "pid": None, "open": False})
            entry.update({k: seen[k] for k in ("size", "age_s", "owner", "opens", "watch_s", "busy")})
            entry["polls"] = [{"pid": p, "wakes": n, "matched": seen["matched"].get(p, 0)}
                              for p, n in seen["wakes"].items()]
            entry["searched"], entry["unsearched"], entry["holders"] = openers is not None, None, []
            for opener in openers or []:
                if "denied" in opener:
                    entry["unsearched"] = opener["denied"]
                elif opener["path"] == seen["path"]:
                    row = table.rows.get(opener["pid"]) or stat_of(opener["pid"]) or {}
                    entry["holders"].append({"pid": opener["pid"], "fd": opener["fd"], "lock": opener["lock"],
                                             "comm": row.get("comm"), "cmd": None, "member": opener["pid"] in members,
                                             "age_s": round(self.meta["uptime_s"] - row["starttime"], 1)
                                             if row else None})
        wanted = [f for f in files.values() if f["open"] or f.get("opens") or LOCK_NAME.search(f["path"])]
        wanted.sort(key=lambda f: (-f.get("opens", 0), not f["open"], f["path"]))
        snapshot["lockfiles"] = wanted[:40]
        others = sorted({h["pid"] for f in snapshot["lockfiles"] for h in f.get("holders") or []
                         if h["pid"] in table.rows})
        table.read_commands(others, time.monotonic() + 0.3)
        for entry in snapshot["lockfiles"]:
            for holder in entry.get("holders") or []:
                holder["cmd"] = table.line(holder["pid"]) or None

    def _fd_path(self, path: str, entry: dict) -> str:
        for pid, fd in entry["fds"].items():
            return "/proc/%s/fd/%d" % (pid, fd)
        return self.reach(path)

    def _file_jobs(self, data: dict, seen: "set | tuple" = ()) -> "list[tuple]":
        """(path, how to open it) of data files to look at: big extensions first, at most 24."""
        likely = re.compile(r"\.(pt|pth|bin|npy|npz|h5|hdf5|parquet|arrow|tar|zarr|safetensors|tfrecords?|mdb|rec|"
                            r"jpe?g|png|jsonl?|gz|zst|idx|dat|pkl|ckpt|wav|flac|mp4|txt|csv)$", re.I)
        order = sorted((p for p in data if p not in seen), key=lambda p: (not likely.search(p), p))
        return [(p, self._fd_path(p, data[p]) if data[p]["fds"] and (data[p]["deleted"] or not self.reach.same)
                 else self.reach(p)) for p in order[:24]]

    def _late_files(self, snapshot: dict, fact: dict, first: dict) -> None:
        """Data files that came up after the first sample, the data sets they belong to, and the logs' bytes."""
        reach, data = self.reach, fact["data"]
        names = {}  # type: dict
        for sample in snapshot["samples"]:
            for pid, look in sample["procs"].items():
                if self.job.kinds.get(int(pid)) in ("tee", "reader"):
                    continue
                for n, held in look["fds"].items():
                    if held["kind"] not in ("file", "shm") or is_library(held["path"]) or written(held):
                        continue
                    if held["path"] not in data and len(data) < 400:
                        data[held["path"]] = {"pids": [int(pid)], "fds": {pid: int(n)}, "mnt": held.get("mnt"),
                                              "kind": held["kind"], "deleted": held.get("deleted", False)}
        seen = {j[0] for j in fact["files"].items}
        fact["files2"] = Courier("file", self._file_jobs(data, seen), lambda j: inspect_file(j[1]), each=0.4,
                                 blame=lambda j: {"path": j[0]}, skip=lambda j: reach.blocked(j[0]))
        for path, entry in data.items():
            ext = os.path.splitext(path)[1]
            if ext and not path.startswith(("/dev/", "/memfd", "/proc/", "/etc/",
                                            "/usr/")) and not entry["deleted"] and ext not in (".lock", ".py", ".so",
                                                                                               ".conf", ".pem", ".crt"):
                names.setdefault((os.path.dirname(path), ext), set()).add(os.path.basename(path))
        dirs = sorted(names, key=lambda k: -len(names[k]))[:6]
        fact["dataset_keys"] = [(d, e, sorted(names[(d, e)])) for d, e in dirs]
        fact["datasets"] = Courier("data set", [(reach(d), e, sorted(names[(d, e)])[:200]) for d, e in dirs],
                                   survey_dir, each=1.3, blame=lambda j: {"path": j[0]},
                                   skip=lambda j: reach.blocked(j[0]))
        if "slurm" in fact and fact["slurm"].done:
            for path in (fact["slurm"].value() or {}).get("stdout", []):
                if not any(e["path"] == path for e in fact["logs"]):
                    fact["logs"].append(log_entry(path, "slurm"))
        jobs, big = [], 0
        for entry in fact["logs"]:
            if entry["kind"] == "file" and entry["path"]:
                full = big < 2
                big += 1
                jobs.append((self._touch(entry), reach(entry["path"]), HEAD_BYTES if full else HEAD_BYTES // 8,
                             TAIL_BYTES if full else TAIL_BYTES // 8, entry["path"]))
        fact["log_jobs"] = jobs
        fact["log_bytes"] = Courier("log", jobs, lambda j: read_log(j[:4]), each=1.0, blame=lambda j: {"path": j[4]},
                                    skip=lambda j: reach.blocked(j[4]))

    def _output(self, found: dict, pid: "int | None", growth: list) -> dict:
        return {"path": found["path"], "size": found["size"], "mtime": found["mtime"],
                "age_s": round(time.time() - found["mtime"], 1) if found["mtime"] else None,
                "growth": growth, "open_by": pid, "tmp": bool(TEMPORARY.search(found["path"])),
                "kind": output_kind(found["path"])}

    def _take_facts(self, snapshot: dict, fact: dict, first: dict, ids: dict) -> None:
        job, table, samples = self.job, self.table, snapshot["samples"]
        # logs
        for entry in fact["logs"]:
            for index, work in enumerate(fact["log_jobs"]):
                if work[4] == entry["path"] and entry["kind"] == "file":
                    body = fact["log_bytes"].out.get(index)
                    if body:
                        entry.update({k: v for k, v in body.items() if k != "ino" and not (k == "rotated"
                            and entry["deleted"])})
                        entry["age_s"] = round(time.time() - body["mtime"], 1)
                    else:
                        entry["error"] = fact["log_bytes"].errors.get(index) or "did not answer in time"
            entry["growth"] = [s["logs"][entry["path"]]["size"] for s in samples if entry["path"] in s["logs"]]
            if entry["mnt"] is None and entry["path"] and entry["kind"] == "file":
                entry["mnt"] = mount_of(self.mounts, entry["path"])
            if entry["error"] and re.search("Permission", entry["error"]):
                self.unseen.append({"what": "the log %s" % entry["path"], "why": "not readable for this user",
                                    "needs": "read permission", "command": None})
        snapshot["logs"] = fact["logs"]
        # outputs
        last = samples[-1]["outputs"] if samples else {}
        for path, seen in last.items():
            holder = fact["outs"].get(path)
            growth = [s["outputs"][path]["size"] for s in samples if path in s["outputs"]]
            snapshot["outputs"].append(self._output({"path": path, "size": seen["size"], "mtime": seen["mtime"]},
                                                    holder["pids"][0] if holder else None, growth))
        grown = {o["path"] for o in snapshot["outputs"] if o["open_by"] is None and len(set(o["growth"])) > 1}
        if grown:  # a file that grows may be somebody else's
            outsiders = [p for p in table.rows if p not in job.members and p not in table.me and not table.kernel(p)]
            theirs = {p for paths in collect("open files", outsiders,
                                             lambda p: sorted(grown.intersection(open_paths(p))), time.monotonic()
                                             + 0.4, each=0.3)
                      for p in paths or ()}
            snapshot["outputs"] = [o for o in snapshot["outputs"] if o["path"] not in theirs]
        snapshot["outputs"].sort(key=lambda o: -(o["mtime"] or 0))
        # files
        for courier in (fact["files"], fact["files2"]):
            for index, (path, _how) in enumerate(courier.items):
                entry = fact["data"][path]
                seen = courier.out.get(index) or {}
                snapshot["files"][path] = {"pids": entry["pids"], "fds": entry["fds"], "mnt": entry["mnt"],
                                           "mapped": entry.get("mapped"), "size": seen.get("size"),
                                           "mtime": seen.get("mtime"), "kind": seen.get("kind", entry["kind"]),
                                           "cached": seen.get("cached"), "cached_by": seen.get("cached_by"),
                                           "dirty": seen.get("dirty"), "evicted": seen.get("evicted"),
                                           "recently_evicted": seen.get("recently_evicted"), "role": "data"}
        for index, (path, ext, names) in enumerate(fact["dataset_keys"]):
            seen = fact["datasets"].out.get(index)
            if seen:
                mnt = mount_of(self.mounts, path)
                snapshot["datasets"].append({"dir": path, "ext": ext, "files": seen["files"], "bytes": seen["bytes"],
                                             "exact": seen["exact"], "mnt": mnt, "seen": names[:50],
                                             "cached": seen["cached"], "checked": seen.get("checked", 0)})
        # mounts
        hung = {t.get("mount") for t in Courier.timed_out if t["probe"] == "statvfs"}
        for index, key in enumerate(fact["statvfs"].items):
            mount = dict(self.mounts[key], used_by=fact["used"][key], statvfs=fact["statvfs"].out.get(index))
            self.reach.update()
            mount["timed_out"] = key in hung or key in self.reach.bad
            snapshot["mounts"][str(key)] = mount
        for path, entry in snapshot["files"].items():
            key = entry["mnt"] if entry["mnt"] is not None else mount_of(self.mounts, path)
            if key in self.mounts and str(key) not in snapshot["mounts"]:
                snapshot["mounts"][str(key)] = dict(self.mounts[key], used_by=["data"])
        # caches
        watch = fact["watch"]
        for name, path in fact["caches"]:
            looks = [watch.out[i] for i, (_s, what, n) in enumerate(watch.items) if what == "cache" and n == name
                     and i in watch.out]
            if looks:
                now = looks[-1]
                snapshot["caches"].append({"name": name, "path": path, "entries": now["entries"], "mtime": now["mtime"]
                                           or None,
                                           "age_s": round(time.time() - now["mtime"], 1) if now["mtime"] else None,
                                           "newest": now["newest"],
                                           "growth": [v["entries"] for v in looks], "locks": now["locks"],
                                           "incomplete": now["incomplete"]})
        # sockets
        owners = {}  # type: dict
        for pid, look in first.items():
            for n, held in look["fds"].items():
                if held["kind"] == "socket" and held.get("inode"):
                    owners.setdefault(held["inode"], (pid, int(n)))
        tcp = fact["links"].get("sockets") or []
        ends = {(s["local"], s["lport"], s["peer"], s["pport"]): s["inode"] for s in tcp}
        for entry in tcp + (fact["links"].get("unix sockets") or []):
            pid, fd = owners.get(entry["inode"], (None, None))
            entry.update(pid=pid, fd=fd)
            if entry["state"] == "LISTEN":
                snapshot["listening"].append({"port": entry["lport"], "addr": entry["local"], "pid": pid,
                                              "comm": table.rows[pid]["comm"] if pid in table.rows else None})
            elif pid is not None and len(snapshot["sockets"]) < 400:
                other = owners.get(entry["peer_inode"] if entry["proto"] == "unix" else
                                   ends.get((entry["peer"], entry["pport"], entry["local"], entry["lport"])))
                entry["peer_pid"] = other[0] if other else None
                snapshot["sockets"].append(entry)
        members = set(job.members)
        self._take_locks(snapshot, fact, first)
        # pipes and edges
        pipes = {}  # type: dict
        for pid, look in first.items():
            for n, held in look["fds"].items():
                if held["kind"] == "pipe" and held.get("inode"):
                    pipe = pipes.setdefault(held["inode"], {"inode": held["inode"], "writers": [], "readers": [],
                                                            "queued": None})
                    access = held.get("access") or "rw"
                    if "w" in access and len(pipe["writers"]) < 24:
                        pipe["writers"].append({"pid": pid, "fd": int(n)})
                    if "r" in access and len(pipe["readers"]) < 24:
                        pipe["readers"].append({"pid": pid, "fd": int(n)})
        for inode, readers in self.readers.items():
            if inode in pipes:
                for pid, fd in readers:
                    if {"pid": pid, "fd": fd} not in pipes[inode]["readers"]:
                        pipes[inode]["readers"].append({"pid": pid, "fd": fd})
        snapshot["pipes"] = list(pipes.values())[:300]
        edges = []
        for pipe in snapshot["pipes"]:
            if len(pipe["writers"]) <= 4 and len(pipe["readers"]) <= 4:
                edges += [{"from": w["pid"], "fd": w["fd"], "to": r["pid"], "to_fd": r["fd"], "inode": pipe["inode"],
                           "via": "pipe"} for w in pipe["writers"]
                          for r in pipe["readers"] if w["pid"] != r["pid"]]
        ranks, world = job.ranks({p: (ids.get(p) or {}).get("environ") or {} for p in ids})
        nproc = job.nproc()
        snapshot["job"] = {"main": job.main, "launcher": job.launcher, "launcher_nproc": nproc, "world_size": world
                           or nproc, "members": job.members, "left_out": job.left_out,
                           "ranks": ranks, "kinds": {str(p): k for p, k in job.kinds.items()}, "edges": edges[:400],
                           "by": job.by}
        snapshot["nccl"] = self._take_nccl(snapshot, fact)
        snapshot["slurm"] = fact["slurm"].value() if "slurm" in fact else None
        shm_names = [h["path"] for look in first.values() for h in look["fds"].values() if h["kind"] == "shm"]
        if snapshot["host"].get("shm") is not None:
            snapshot["host"]["shm"]["open_by_job"] = len(set(shm_names))
        started = {p: r for p, r in table.rows.items() if p not in members}
        busy = []
        for pid, row in started.items():
            now = stat_of(pid) if row["state"] == "R" or row["utime"] + row["stime"] > 5 else None
            if now and now["starttime"] == row["starttime"]:
                share = (now["utime"] + now["stime"] - row["utime"] - row["stime"]) / max(0.1,
                    time.monotonic() - self.start)
                if share > 0.1 and pid not in table.me:
                    busy.append({"pid": pid, "comm": now["comm"], "cpu_share": round(share, 2), "rss": now["rss"]})
        snapshot["host"]["top"] = sorted(busy, key=lambda b: -b["cpu_share"])[:8]

    def _take_processes(self, snapshot: dict, ids: dict, first: dict, groups: dict) -> None:
        job, table = self.job, self.table
        blind = {}  # type: dict
        for pid in job.members:
            row, known = table.rows[pid], ids.get(pid) or {}
            look = first.get(pid) or next((s["procs"][str(pid)] for s in snapshot["samples"] if str(pid) in s["procs"]),
                                          None) or {"status": {}, "fds": {}, "threads": {}}
            args = table.args(pid)
            script, module, unbuffered = python_entry(args)
            python = table.python(pid)
            environ = known.get("environ")
            denied = set(look.get("denied", ()))
            status = look["status"]
            memory = {"rss": status.get("VmRSS"), "pss": None, "swap": status.get("VmSwap"),
                      "anon": status.get("RssAnon"), "file": status.get("RssFile"),
                      "shmem": status.get("RssShmem"), "peak": status.get("VmHWM")}  # type: dict
            sleeping = [t for t in look["threads"].values() if t["state"] in "SD"]
            visible = {"io": look.get("io") is not None, "fd": bool(look["fds"]) or ("fd" not in denied
                and "fd_count" in look), "syscall": "syscall" not in denied,
                       "wchan": not sleeping or any(t["wchan"] for t in sleeping), "environ": environ is not None,
                       "maps": known.get("maps") is not None}  # type: dict
            libs = (known.get("maps") or {}).get("libs") or []
            score, why = table.score(pid)
            frameworks = [n for n in libs if n in ("torch", "jax", "tensorflow", "mxnet", "paddle")]
            if frameworks:
                score, why = min(100, score + 45), why + [frameworks[0] + " in its maps"]
            if any(h["kind"] == "nvidia" for h in look["fds"].values()):
                score, why = min(100, score + 30), why + ["holds a GPU device"]
            pidns = status.get("nspid") or [pid]
            entry = {"comm": row["comm"], "ppid": row["ppid"], "kind": job.kinds[pid], "uid": (status.get("uids")
                or [table.uid(pid)])[0], "user": None, "starttime": row["starttime"],
                     "age_s": round(self.meta["uptime_s"] - row["starttime"], 2), "cmdline": args or None,
                     "exe": known.get("exe"), "cwd": known.get("cwd"),
                     "visible": visible, "environ": {k: v for k, v in environ.items() if k not in ("HOME", "USER",
                         "LOGNAME", "PWD")} if environ is not None else None,
                     "python": {"unbuffered_flag": unbuffered if args else None,
                                "unbuffered_env": bool(environ.get("PYTHONUNBUFFERED")) if environ is not None
                                else None,
                                "script": script, "module": module} if python else None,
                     "libs": libs if known.get("maps") is not None else None, "mapped": [{"path": p, "size": s} for p,
                         s in (known.get("maps") or {}).get("mapped", [])],
                     "ns": {"pid": pidns, "mnt": bracket(known.get("ns_mnt") or ""),
                            "same_mnt": known.get("ns_mnt") == readlink("/proc/self/ns/mnt") if known.get("ns_mnt")
                            else None,
                            "root": known.get("root")}, "limits": known.get("limits"),
                            "oom_score": known.get("oom_score"), "oom_score_adj": known.get("oom_score_adj"),
                     "nice": row["nice"], "cpus_allowed": cpu_count(status.get("Cpus_allowed_list")), "memory": memory,
                     "fd_count": look.get("fd_count"),
                     "fds_left_out": look.get("fds_left_out"), "cgroup": groups.get(pid), "training": {"score": score,
                         "why": why}}  # type: dict
            for name, n in (("stdin", "0"), ("stdout", "1"), ("stderr", "2")):
                held = look["fds"].get(n)
                entry[name] = {"path": held["path"], "kind": held["kind"]} if held else None
            entry["user"] = self.users.get(entry["uid"])
            snapshot["processes"][str(pid)] = entry
            if row["state"] not in "ZX" and not table.kernel(pid):
                for what in ("fd", "io", "syscall", "environ", "maps"):
                    if not visible[what] and (what != "maps" or known.get("maps_error")) and (what not in ("environ",
                        "maps") or known):
                        blind.setdefault(what, []).append(pid)
        words = {"fd": "open files", "io": "bytes read and written", "syscall": "system calls in progress",
                 "environ": "environment", "maps": "mapped libraries"}  # type: dict
        for what, pids in blind.items():
            mine = [p for p in pids if table.uid(p) == os.geteuid()]
            reason = "another user's process" if not mine else "protected process of the same user"
            if mine and self.meta["yama"]:
                reason = "the kernel allows tracing only from a parent (yama %s)" % self.meta["yama"]
            self.unseen.append({"what": "%s of %s" % (words[what], ", ".join(str(p) for p in pids[:4])
                                                      + (" and %d more" % (len(pids) - 4) if len(pids) > 4 else "")),
                                                      "why": reason,
                                "needs": "run as that user, or root (CAP_SYS_PTRACE)", "command": None})
        asked = self.target["pid"]
        main = snapshot["processes"].get(str(job.main)) or {}
        scores = [snapshot["processes"][str(p)]["training"]["score"] for p in (job.main, asked)
                  if str(p) in snapshot["processes"]]
        self.target["ours"] = (max(scores) >= 30) if scores else None
        entry_point = main.get("python") or {}
        self.target["name"] = entry_point.get("script") or entry_point.get("module") or main.get("comm")

    def _end_of_target(self, snapshot: dict) -> None:
        target, samples = self.target, snapshot["samples"]
        pid = str(target["pid"])
        looks = [s["procs"][pid] for s in samples if pid in s["procs"]]
        if looks and looks[-1]["stat"]["state"] in "ZX":
            target["zombie"] = True
            if target["same_user"] or os.geteuid() == 0:
                target["exit_code"] = looks[-1]["stat"]["exit_code"]
        gone = not samples or pid not in samples[-1]["procs"]
        if gone and any(t.get("pid") == target["pid"] for t in Courier.timed_out):
            gone = False
        if target["zombie"] or gone:
            ages = [e["age_s"] for e in snapshot["logs"] if e["age_s"] is not None]
            target["ended"] = {"by": "zombie" if target["zombie"] and not gone else "pid gone",
                               "last_output": time.time() - min(ages) if ages else None,
                               "log_age_s": min(ages) if ages else None, "oom_since": None, "core_files": []}

    # .. stacks, on request

    def _stacks(self, snapshot: dict) -> None:
        job = self.job
        binary = self.ask.get("py_spy") or "py-spy"
        pids = [p for p in job.members if job.kinds[p] in ("main", "rank", "fork", "spawned") and self.table.python(p)
                and stat_of(p)][:9]
        until = time.monotonic() + 2.6
        asked = [Courier("py-spy", [(p, binary, False)], dump_stacks, each=2.0, restarts=0,
                         blame=lambda j: {"pid": j[0], "path": None}) for p in pids]
        Courier.pump(until, asked)
        for pid, courier in zip(pids, asked):
            found = courier.value() or {"status": "timed_out", "error": courier.errors.get(0) or "no answer within 2 s",
                                        "tool": binary, "threads": []}
            if "tracer_after" not in found:
                status = parse_status(slurp("/proc/%d/status" % pid, 8192)) if stat_of(pid) else {}
                found.update(tracer_after=status.get("TracerPid"), state_after=(status.get("State") or "?")[:1])
            snapshot["stacks"][str(pid)] = found
        bad = [p for p, s in snapshot["stacks"].items() if s["status"] == "denied"]
        if bad:
            self.unseen.append({"what": "Python stacks of %s" % ", ".join(bad[:4]),
                                "why": "reading another process's memory was refused", "needs": "CAP_SYS_PTRACE",
                                "command": "sudo env \"PATH=$PATH\" py-spy dump --nonblocking --pid %s" % bad[0]})
        if any(s["status"] == "absent" for s in snapshot["stacks"].values()):
            self.unseen.append({"what": "Python stacks", "why": "py-spy is not installed on this host",
                                "needs": "pip install py-spy", "command": None})
        if self.ask.get("deep") and pids:
            main = job.main if job.main in pids else pids[0]
            native = Courier("py-spy --native", [(main, binary, True)], dump_stacks, each=4.0, restarts=0,
                             blame=lambda j: {"pid": j[0]})
            Courier.pump(time.monotonic() + 4.5, [native])
            calls = Courier("strace", [(main, 2.0)], trace_calls, each=5.0, restarts=0, blame=lambda j: {"pid": j[0]})
            Courier.pump(time.monotonic() + 5.5, [calls])
            gone = {"status": "timed_out", "threads": [], "lines": [], "counts": {}}
            snapshot["deep"][str(main)] = {"native": native.value() or gone, "strace": calls.value() or gone}
            status = parse_status(slurp("/proc/%d/status" % main, 8192)) if stat_of(main) else {}
            snapshot["deep"][str(main)].update(tracer_after=status.get("TracerPid"), state_after=(status.get("State")
                or "?")[:1])

    # .. ps

    def list_jobs(self) -> dict:
        """Training jobs of this host with the cheap signals of two looks, the most suspicious first."""
        table = self.table
        until = min(self.soft, self.start + 2.0)
        gpu = self.gpu_asked = self._ask_gpu([0.0])
        found = training_candidates(table, until)[:40]
        jobs = [(Job(table, pid, until), score, why) for pid, score, why in found]
        pids = sorted({p for job, _s, _w in jobs for p in job.members})[:400]
        begin = time.monotonic()
        sampler = Sampler(want_fds=False)
        items = [(i, p) for i in range(2) for p in pids]

        def wait(item: tuple) -> None:
            time.sleep(max(0.0, begin + item[0] * 1.0 - time.monotonic()))

        looks = Courier("sample", items, lambda item: sampler.look(item[0], item[1]), each=0.8, before=wait,
                        blame=lambda item: {"pid": item[1]})
        logs = [(job.main, readlink("/proc/%d/fd/1" % job.main) or "") for job, _s, _w in jobs]
        ages = Courier("log", [path for _p, path in logs], lambda p: os.stat(p).st_mtime if p.startswith("/")
                       and link_kind(p) == "file" else None, each=0.5, blame=lambda p: {"path": p})
        uids = sorted(u for u in {table.uid(job.main) for job, _s, _w in jobs} if u is not None)
        users = Courier("user names", [uids], user_names, each=0.7)
        Courier.wait(min(self.soft, begin + 2.5), [looks, ages, users, gpu])
        seen = {items[i]: v for i, v in looks.out.items() if v}
        report = self._gpu_answer()
        util = {g["index"]: g["samples"][-1].get("util") for g in report["gpus"] if g["samples"]}
        names = users.value() or {}
        rows = []
        for index, (job, score, why) in enumerate(jobs):
            row = self._ps_row(job, score, why, seen, report, util)
            mtime = ages.out.get(index)
            row["log"] = {"path": logs[index][1], "age_s": round(time.time() - mtime, 1) if mtime else None}
            row["user"] = names.get(table.uid(job.main))
            self._suspect(row)
            rows.append(row)
        rows.sort(key=lambda r: (-r["suspicion"], -r["score"]))
        Courier.dismiss()
        self.meta.update(took_s=round(time.monotonic() - self.start, 3), cpu_s=round(sum(os.times()[:4]), 3))
        return {"schema": PS_SCHEMA, "meta": self.meta, "rows": rows, "gpu": {"status": report["status"],
            "error": report["error"]}, "probes_timed_out": Courier.timed_out}

    def _ps_row(self, job: Job, score: int, why: list, seen: dict, report: dict, util: dict) -> dict:
        cpu, span, moved = 0.0, 1.0, 0
        states, dead = [], 0
        for pid in job.members:
            a, b = seen.get((0, pid)), seen.get((1, pid))
            if a and b:
                span = max(0.1, b["t"] - a["t"])
                cpu += b["stat"]["utime"] + b["stat"]["stime"] - a["stat"]["utime"] - a["stat"]["stime"]
                moved += (b["io"] or {}).get("rchar", 0) - (a["io"] or {}).get("rchar", 0)
                states.append((pid, a["stat"]["state"], b["stat"]["state"]))
                dead += b["stat"]["state"] in "ZX" and pid != job.main
        main = seen.get((1, job.main)) or seen.get((0, job.main))
        gpus = [{"index": p["gpu"], "mem": p["mem"], "util": util.get(p["gpu"])} for p in report["processes"]
                if p["pid"] in job.members]
        return {"pid": job.main, "launcher": job.launcher, "ranks": len(job.rank_pids), "members": len(job.members),
                "uid": self.table.uid(job.main),
                "user": None, "age_s": round(self.meta["uptime_s"] - self.table.rows[job.main]["starttime"], 1),
                "state": main["stat"]["state"] if main else self.table.rows[job.main]["state"], "cpu": round(cpu / span,
                    2), "read_bytes_s": int(moved / span),
                "rss": sum((seen.get((0, p)) or {"stat": {"rss": 0}})["stat"]["rss"] for p in job.members), "gpu": gpus,
                "wchan": main["wchan"] if main else None,
                "blocked": sum(1 for _p, x, y in states if x == "D" and y == "D"), "zombies": dead, "log": None,
                "score": score, "found_by": why, "suspicion": 0, "why": [],
                "cmd": self.table.line(job.main)}

    @staticmethod
    def _suspect(row: dict) -> None:
        """Points for what a healthy run does not show; only an order to look in, never a verdict."""
        points, why = 0, []  # type: int, list
        log_age = row["log"]["age_s"]
        if row["state"] in "Tt":
            points, why = points + 90, why + ["stopped"]
        if row["state"] in "ZX":
            points, why = points + 80, why + ["dead, not collected by its parent"]
        if row["zombies"]:
            points, why = points + 40, why + ["%d dead child%s" % (row["zombies"], "ren" if row["zombies"] > 1 else "")]
        if row["blocked"]:
            points, why = points + 35, why + ["%d waiting in the kernel (D)" % row["blocked"]]
        idle_gpu = [g for g in row["gpu"] if g["util"] == 0]
        if idle_gpu and len(idle_gpu) == len(row["gpu"]):
            points, why = points + 30, why + ["GPU held, 0 % busy"]
        if row["cpu"] < 0.02 and not any(g["util"] for g in row["gpu"]):
            points, why = points + 40, why + ["no CPU use"]
        if log_age is not None and log_age > 120:
            points, why = points + (10 if log_age < 600 else 25), why + ["log silent for %d min" % (log_age // 60)]
        row.update(suspicion=min(points, 100), why=why)


def frame(answer: dict, nonce: str) -> bytes:
    """The answer between two marks, so that banners and noise of a login shell cannot be taken for it."""
    words = json.dumps(answer, separators=(",", ":"))
    body = re.sub(r"(?<!\\ud[89ab]..)\\ud[c-f]..", "\\\\ufffd", words).encode("ascii")  # names that are no UTF-8
    mark = nonce.encode()
    return b"\n@@eyas " + mark + b" " + str(len(body)).encode() + b"\n" + body + b"\n@@eyas-end " + mark + b"\n"


def main(request: dict) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.disable()  # children share our memory as long as nobody writes to it
    try:
        libc()
    except (ImportError, OSError):
        pass
    session = Session(request)
    answer = session.list_jobs() if request.get("mode") == "ps" else session.explain()
    data = frame(answer, str(request.get("nonce", "")))
    while data:
        data = data[os.write(1, data):]
    sys.stdout.flush()
    os._exit(0)  # abandoned children are not waited for


if __name__ == "__main__":
    main(json.loads(globals().get("EYAS_REQUEST") or sys.argv[1]))
