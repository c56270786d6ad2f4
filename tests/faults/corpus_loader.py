"""Public cases C30-C43: loaders that deadlock, workers that die."""

from __future__ import annotations

from snapshot_parts import FOREVER, LOCKED, MB, POLLING, STARVED, idle_gpu, stamped, waiting_main
from snapshots import GB, PIN, Snap, thread


def c30() -> Snap:
    s = Snap()
    waiting_main(s)
    s.workers(2, "Z", first=4301, state="Z")
    s.workers(2, POLLING, first=4303, wakeups=0.0)
    s.d["host"]["shm"] = {"size": GB, "used": int(0.87 * GB), "free": int(0.13 * GB), "entries": 60}
    idle_gpu(s)
    s.log(stamped(300, 1, 3000), age=3000)
    return s


def c31() -> Snap:
    s = Snap()
    s.trainer(
        STARVED,
        wakeups=0.3,
        main={"timeout": True},
        extra=[thread(PIN, wakeups=1, timeout=True)],
        libs="torch numpy cuda gomp cv2",
    )
    s.workers(4, LOCKED, uaddr=0x7FAA0010)
    idle_gpu(s)
    s.log("Epoch 0\n", age=1800)
    return s


def c32() -> Snap:
    s = Snap()
    s.trainer(STARVED, wakeups=0.3, main={"timeout": True}, libs="torch numpy cuda tokenizers")
    s.workers(2, LOCKED, uaddr=0x7FBB0010)
    idle_gpu(s)
    s.log(
        "huggingface/tokenizers: The current process just got forked, after parallelism has already been used."
        " Disabling parallelism to avoid deadlocks...\n",
        age=900,
    )
    return s


def c33() -> Snap:
    s = Snap()
    waiting_main(s, libs="numpy", cuda=False)
    s.workers(3, LOCKED, uaddr=0x7FCC0010)
    s.stack(
        4301,
        "acquire logging/__init__.py:901",
        "handle logging/__init__.py:1027",
        "_flush_std_streams multiprocessing/util.py:430",
    )
    s.log("INFO start of the pool\n", age=600)
    return s


def c34() -> Snap:
    s = Snap()
    s.trainer("S do_wait wait4", main={"pid": 4400}, cuda=False, libs="numpy rich")
    s.proc(
        4400,
        "other",
        [thread("S wait_woken read 3", "sudo", paths={3: ("/dev/pts/4", "tty")})],
        comm="sudo",
        ppid=4242,
        cmd="sudo sysctl vm.drop_caches=3",
        age=57600,
    )
    s.log("Generating data ━━━━━━ 100% \n", age=57_600)
    return s


def c36() -> Snap:
    s = Snap()
    s.trainer(
        "S futex_do_wait futex",
        wakeups=0.0,
        main=FOREVER,
        extra=[thread("S poll_schedule_timeout poll", "pin_memory", wakeups=0.3, timeout=True)],
    )
    idle_gpu(s)
    s.log(stamped(200, 2, 1500), age=1500)
    return s


def c37() -> Snap:
    s = Snap()
    s.trainer(
        "S futex_do_wait futex",
        wakeups=0.0,
        main=FOREVER,
        extra=[thread("S poll_schedule_timeout poll", "python", wakeups=0.0)],
    )
    s.workers(4, POLLING, wakeups=0.0)
    idle_gpu(s)
    s.log(stamped(200, 2, 2400), age=2400)
    return s


def c39() -> Snap:
    s = Snap(mem=64 * GB)
    waiting_main(s, cgroup="job")
    s.workers(3, POLLING)
    s.workers(1, "Z", first=4310, state="Z")
    s.d["cgroups"]["job"] = {
        "version": 2,
        "memory": {"current": 30 * GB, "max": 32 * GB, "events": {"oom": 2, "oom_kill": 1}, "stat": {"file": GB}},
        "cpu": {},
    }
    s.d["kernel_log"] = {
        "readable": True,
        "lines": [{"age_s": 300, "text": "Memory cgroup out of memory: Killed process 4310 (python)", "kind": "oom"}],
    }
    idle_gpu(s)
    s.log(stamped(100, 2, 300) + "RuntimeError: DataLoader worker (pid 4310) is killed by signal: Killed.\n", age=300)
    return s


def c40() -> Snap:
    s = Snap()
    s.log(
        stamped(100, 2, 300)
        + "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory"
        " (shm).\n"
        "RuntimeError: DataLoader worker (pid 4310) is killed by signal: Bus error.\n",
        age=300,
    )
    s.d["host"]["shm"] = {"size": 64 * MB, "used": 64 * MB, "free": 0, "entries": 12}
    s.ended(exit_code=7)
    return s


def c42() -> Snap:
    s = Snap()
    waiting_main(s)
    s.workers(4, LOCKED, uaddr=0x7FDD0010)
    idle_gpu(s, mem=1713 * MB)
    s.log("Epoch: 0\n", age=172_800)
    return s


def c43() -> Snap:
    s = Snap()
    s.trainer(STARVED, wakeups=0.2, main={"timeout": True}, libs="torch numpy cuda gomp")
    s.workers(2, LOCKED, uaddr=0x7FEE0010)
    idle_gpu(s, mem=499 * MB)
    s.log("0it [00:00, ?it/s]", age=1300)
    return s


CASES = [
    (
        "C30",
        "zombie workers, shared memory nearly full",
        ["stuck.worker-dead", "stuck.shm-full", "stuck.fork-lock"],
        c30,
    ),
    ("C31", "OpenMP lock after fork", ["stuck.fork-lock"], c31),
    ("C32", "tokenizers after fork", ["stuck.fork-lock"], c32),
    ("C33", "logging lock at fork", ["stuck.fork-lock"], c33),
    ("C34", "swallowed sudo prompt", ["stuck.input"], c34),
    ("C36", "no worker left, pin thread loops", ["stuck.worker-dead"], c36),
    ("C37", "pin thread stuck", ["stuck.worker-dead", "stuck.deadlock"], c37),
    ("C39", "worker killed for memory", ["failed.oom-killed", "stuck.worker-dead"], c39),
    ("C40", "bus error for lack of shared memory", ["failed.native-crash", "stuck.shm-full"], c40),
    ("C42", "two days at epoch 0", ["stuck.worker-dead", "stuck.fork-lock"], c42),
    ("C43", "0it, cured by num_workers=0", ["stuck.fork-lock"], c43),
]
