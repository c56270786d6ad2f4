"""Healthy runs that look suspicious to one signal or another. None of them may ever be called stuck or failed."""

from __future__ import annotations

from corpus_classes import checkpointing, evaluating, initialising, long_step, tokenising
from corpus_quiet import c10
from snapshot_parts import POLLING, STARVED, lines, ranks, reading, stamped
from snapshots import GB, PIN, Snap, thread

FINE = ["healthy.training", "quiet.interval", "quiet.long-step"]


def steps(
    age: float = 2, growth: int = 120, every: float = 2, util: float = 95, power: float = 560, **more: object
) -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.97, io={"rchar": 1e6}, **more)
    s.workers(4, POLLING, wakeups=4)
    s.gpu([util, util], power)
    s.log(stamped(80, every, age), age=age, growth=growth)
    return s


def sync_wait() -> Snap:
    """The main thread sleeps in the driver until the step is done."""
    s = Snap()
    s.trainer("S poll_schedule_timeout poll 40", cpu=0.1, wakeups=100, main={"paths": {40: ("/dev/nvidia0", "nvidia")}})
    s.gpu([99, 100], 610)
    s.log(stamped(40, 30, 22), age=22)
    return s


def accumulation() -> Snap:
    return steps(age=170, growth=0, every=200)


def cpu_loop(age: float = 4, growth: int = 0, every: float = 5) -> Snap:
    s = Snap(cpus=4)
    s.trainer("R", cpu=0.99, cuda=False, extra=[thread("R", cpu=0.9) for _ in range(3)])
    s.log(stamped(40, every, age), age=age, growth=growth)
    return s


def jax() -> Snap:
    s = Snap()
    s.trainer("S futex_do_wait futex", cpu=0.05, wakeups=40, libs="jax cuda numpy", main={"timeout": False})
    s.gpu([97, 99], 600)
    s.log(lines(80, form="step {s} loss={l:.3f}"), age=20)
    return s


def jax_cpu() -> Snap:
    s = Snap()
    s.trainer(
        "S futex_do_wait futex",
        cpu=0.0,
        wakeups=1,
        libs="jax numpy",
        cuda=False,
        extra=[thread("R", "tf_XLAEigen", cpu=0.95) for _ in range(8)],
    )
    s.log(lines(30, form="step {s} loss={l:.3f}"), age=45)
    return s


def keras() -> Snap:
    s = steps()
    s.d["logs"].clear()
    s.log(
        "Epoch 3/10\n"
        + "".join(f"{i}/430 ━━━━━━━━━━━━━━━━━━━━ {430 - i}s 1s/step - loss: 0.91\n" for i in range(1, 200)),
        age=1,
        growth=80,
    )
    return s


def prefetched() -> Snap:
    """A short wait on the queue at each look, but the GPU is loaded: nothing starves."""
    s = Snap()
    s.trainer(STARVED, cpu=0.2, wakeups=60, main={"timeout": True}, extra=[thread(PIN, wakeups=20)])
    s.workers(
        8,
        ["R", POLLING, POLLING],
        cpu=0.4,
        wakeups=50,
        io={"rchar": 2e7, "read_bytes": 0.0},
        fds=lambda n: reading(n, speed=2e7, mnt="21"),
    )
    s.gpu([93, 96], 590)
    s.log(stamped(80, 3, 1), age=1, growth=90)
    return s


def between_steps() -> Snap:
    """GPU at 0 % at both looks, yet the log moves."""
    return steps(util=0, power=120)


def ddp() -> Snap:
    s = Snap()
    ranks(s, 8, util=100, power=620)
    s.log(stamped(60, 3, 1), age=1, growth=90)
    return s


def ddp_quiet() -> Snap:
    s = Snap()
    ranks(s, 8, util=100, power=640)
    s.log(stamped(20, 60, 50), age=50)
    return s


def gloo_cpu() -> Snap:
    s = Snap()
    ranks(
        s,
        4,
        looks=lambda r: "R" if r else "S futex_do_wait futex",
        cpu=lambda r: 0.9 if r else 0.6,
        cuda=False,
        libs="torch numpy",
    )
    s.log(stamped(30, 15, 11), age=11)
    return s


def parent_waits() -> Snap:
    """The named process only waits for its child, which trains."""
    s = Snap()
    s.trainer("S do_wait wait4", cuda=False, libs="", main={"pid": 4300})
    s.proc(4300, "spawned", [thread("R", cpu=0.99)], ppid=4242)
    s.log(stamped(30, 4, 3), age=3, growth=60)
    return s


def other_user() -> Snap:
    """Nothing but stat is visible: CPU moves, the log cannot be read."""
    s = Snap()
    s.trainer(["R", "S", "R"], cpu=0.8, io=None)
    for sample in s.d["samples"]:
        for proc in sample["procs"].values():
            proc.update(io=None, wchan=None, syscall=None, fds={})
            for t in proc["threads"].values():
                t.update(wchan=None, syscall=None)
    s.d["not_visible"] = [
        {
            "what": "open files of 4242",
            "why": "another user's process",
            "needs": "root",
            "command": "sudo eyas why 4242",
        }
    ]
    s.gpu([91, 93], 500)
    return s


def other_user_idle_looking() -> Snap:
    s = other_user()
    for sample in s.d["samples"]:
        for proc in sample["procs"].values():
            proc["stat"]["state"] = "S"
            for t in proc["threads"].values():
                t["state"] = "S"
    return s


def terminal() -> Snap:
    s = Snap()
    out = {"path": "/dev/pts/2", "kind": "tty"}
    s.trainer("R", cpu=0.9, stdout=out)
    s.gpu([90, 92], 530)
    s.d["logs"] = [{"path": "/dev/pts/2", "how": "fd1", "pid": 4242, "fd": 1, "kind": "tty", "growth": []}]
    return s


def zombie_helper() -> Snap:
    """A finished helper that nobody collected is not a dead worker as long as steps go on."""
    s = steps()
    s.proc(4399, "fork", [thread("Z")], state="Z", ppid=4242)
    return s


def old_error() -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.9)
    s.gpu([95, 95], 580)
    s.log(
        'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nConnectionError: tracker not'
        " reachable, retrying\n" + stamped(60, 3, 2),
        age=2,
        growth=80,
    )
    return s


def xid_elsewhere() -> Snap:
    s = steps()
    s.d["kernel_log"] = {
        "readable": True,
        "lines": [{"age_s": 90_000, "text": "NVRM: Xid (PCI:0000:b1:00): 13, Graphics Exception", "kind": "xid"}],
    }
    return s


def slow_nvidia_smi() -> Snap:
    s = steps()
    s.d["gpu"] = {
        "status": "timed_out",
        "tool": "nvidia-smi",
        "error": "did not answer in 2 s",
        "gpus": [],
        "processes": [],
    }
    s.d["probes_timed_out"] = [{"probe": "nvidia-smi", "after_s": 2.0, "state": "S", "wchan": None}]
    return s


def lock_open() -> Snap:
    s = steps()
    s.d["lockfiles"] = [{"path": "/home/kim/.cache/huggingface/x.lock", "pid": 4242, "age_s": 9000, "open": True}]
    return s


def full_tmp() -> Snap:
    s = steps()
    s.mount("9", "/tmp", "tmpfs", free=0, size=GB, used_by=["tmp"])
    return s


def full_shm() -> Snap:
    s = steps()
    s.d["host"]["shm"] = {"size": GB, "used": int(0.99 * GB), "free": int(0.01 * GB), "entries": 9}
    return s


def sleepy_poll_loop() -> Snap:
    """A trainer that naps between short CPU steps; next line not due."""
    s = Snap()
    s.trainer("S hrtimer_nanosleep clock_nanosleep", cpu=0.03, wakeups=5, cuda=False)
    s.log(stamped(30, 20, 12), age=12)
    return s


def rl_rollout() -> Snap:
    """Rollouts by a vLLM child; the trainer waits, the GPU works."""
    s = Snap()
    s.trainer("S do_epoll_wait epoll_wait 9", cpu=0.05, wakeups=60)
    s.proc(4300, "spawned", [thread("R", cpu=0.9)], ppid=4242, comm="VLLM::EngineCor")
    s.gpu([88, 97], 520, pids=[4242, 4300])
    s.log(stamped(20, 90, 80), age=80)
    return s


def epoch_end() -> Snap:
    return steps(age=15, growth=0, util=40, power=330)


def heavy_logging_tracker() -> Snap:
    s = steps()
    s.proc(
        4500,
        "tracker",
        [thread("S ep_poll epoll_wait", "wandb-core", wakeups=40)],
        comm="wandb-core",
        ppid=4242,
        cmd="wandb-core",
    )
    return s


def ten_minutes_evaluation() -> Snap:
    s = evaluating()
    s.d["logs"][0].update(mtime=s.d["logs"][0]["mtime"] - 400, age_s=640)
    return s


def single_look() -> Snap:
    s = Snap()
    s.trainer("S futex_do_wait futex", cuda=False)
    s.log(stamped(60, 1, 300), age=300)
    s.d["samples"] = s.d["samples"][:1]
    return s


def wait_for_slow_worker() -> Snap:
    """Workers compute a hard batch; the main thread waits; the CPU moves."""
    s = Snap()
    s.trainer(STARVED, wakeups=0.3, main={"timeout": True}, cuda=False)
    s.workers(2, "R", cpu=0.99)
    s.log(stamped(30, 20, 18), age=18)
    return s


QUIET_OR_SLOW = [*FINE, "slow.data.decode", "slow.data.few-workers", "unknown"]


CASES = [
    ("H01", "steps go on", ["healthy.training"], steps),
    ("H02", "main thread asleep in the driver", FINE, sync_wait),
    ("H03", "gradient accumulation, 200 s a line", FINE, accumulation),
    ("H04", "CPU loop", FINE, cpu_loop),
    ("H05", "CPU loop, long lines", FINE, lambda: cpu_loop(60, 0, 45)),
    ("H06", "JAX on a GPU", FINE, jax),
    ("H07", "JAX on the CPU", FINE, jax_cpu),
    ("H08", "Keras", FINE, keras),
    ("H09", "prefetch keeps up", FINE, prefetched),
    ("H10", "GPU idle at both looks", [*FINE, "slow.host-python"], between_steps),
    ("H11", "eight ranks", FINE, ddp),
    ("H12", "eight ranks, quiet log", FINE, ddp_quiet),
    ("H13", "gloo on CPUs", [*FINE, "slow.straggler"], gloo_cpu),
    ("H14", "parent waits for a training child", FINE, parent_waits),
    ("H15", "another user's run", [*FINE, "quiet.elsewhere"], other_user),
    ("H16", "another user's run, asleep at each look", [*FINE, "quiet.elsewhere"], other_user_idle_looking),
    ("H17", "output on a terminal", [*FINE, "quiet.elsewhere"], terminal),
    ("H18", "a helper is a zombie", FINE, zombie_helper),
    ("H19", "an old error in the log", FINE, old_error),
    ("H20", "an old Xid of another GPU", FINE, xid_elsewhere),
    ("H21", "nvidia-smi does not answer in time", FINE, slow_nvidia_smi),
    ("H22", "a lock file is open", FINE, lock_open),
    ("H23", "/tmp is full", FINE, full_tmp),
    ("H24", "/dev/shm is nearly full", FINE, full_shm),
    ("H25", "naps between steps", [*FINE, "unknown"], sleepy_poll_loop),
    ("H26", "rollouts by a child", FINE, rl_rollout),
    ("H27", "end of an epoch", FINE, epoch_end),
    ("H28", "a tracker beside it", FINE, heavy_logging_tracker),
    ("H29", "evaluation of ten minutes", ["quiet.evaluating"], ten_minutes_evaluation),
    ("H30", "only one look", ["unknown", *FINE], single_look),
    ("H31", "a hard batch", QUIET_OR_SLOW, wait_for_slow_worker),
    ("H32", "checkpoint", ["quiet.checkpointing"], checkpointing),
    ("H33", "loading", ["quiet.initialising"], initialising),
    ("H34", "tokenising", ["quiet.initialising"], tokenising),
    ("H35", "long step", FINE, long_step),
    ("H36", "compiling", ["quiet.compiling"], c10),
]
