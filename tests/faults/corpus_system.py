"""Public cases C70-C93: drivers, file systems, locks, terminals, pipes, disks."""

from __future__ import annotations

from snapshot_parts import LOCKED, POLLING, STARVED, idle_gpu, stamped
from snapshots import GB, Snap, thread


def c70() -> Snap:
    s = Snap()
    s.trainer("R", cpu=1.0)
    s.d["gpu"] = {
        "status": "error",
        "tool": "nvidia-smi",
        "error": "Unable to determine the device handle for GPU0000:65:00.0: Unknown Error",
        "gpus": [],
        "processes": [],
    }
    s.d["kernel_log"] = {
        "readable": True,
        "lines": [{"age_s": 500, "text": "NVRM: GPU at PCI:0000:65:00: GPU has fallen off the bus.", "kind": "nvrm"}],
    }
    s.log(stamped(90, 2, 500), age=500)
    return s


def c71() -> Snap:
    s = Snap()
    s.trainer("D uvm_ioctl ioctl 25", cpu=0.0, main={"paths": {25: ("/dev/nvidia-uvm", "nvidia")}})
    idle_gpu(s)
    s.log(stamped(90, 2, 900), age=900)
    return s


def c72() -> Snap:
    s = Snap()
    s.trainer("D os_acquire_rwlock_write ioctl 25", cpu=0.0, main={"paths": {25: ("/dev/nvidiactl", "nvidia")}})
    s.d["gpu"] = {
        "status": "timed_out",
        "tool": "nvidia-smi",
        "error": "did not answer in 2 s",
        "gpus": [],
        "processes": [],
    }
    s.d["probes_timed_out"] = [{"probe": "nvidia-smi", "after_s": 2.0, "state": "D", "wchan": "os_acquire_mutex"}]
    s.log(stamped(90, 2, 900), age=900)
    return s


def c73() -> Snap:
    s = Snap()
    s.ended(zombie=True, exit_code=9)
    s.proc(4242, "main", [thread("Z")], state="Z", ppid=1)
    s.workers(3, "S futex_do_wait futex", parent=1)
    s.gpu(0, 60, limit=250, mem=8 * GB)
    s.d["gpu"]["orphans"] = [4301, 4302]
    return s


def c81(wchan: str = "rpc_wait_bit_killable") -> Snap:
    s = Snap()
    s.trainer(f"D {wchan} openat 5", main={"paths": {5: ("/mnt/nas/ckpt/step-500/model.pt", "file")}})
    s.mount("30", "/mnt/nas", "nfs4", source="nas1:/export", used_by=["output"], timed_out=True)
    s.d["mounts"]["30"]["statvfs"] = None
    s.d["probes_timed_out"] = [
        {
            "probe": "statvfs /mnt/nas",
            "path": "/mnt/nas",
            "after_s": 1.0,
            "state": "D",
            "wchan": "rpc_wait_bit_killable",
        }
    ]
    idle_gpu(s)
    s.log(stamped(90, 3, 1300), age=1300)
    return s


def c82() -> Snap:
    s = c81("rwsem_down_read_slowpath")
    s.d["processes"]["4242"].update(cmdline=None, environ=None, libs=[])
    s.d["probes_timed_out"].append(
        {"probe": "cmdline 4242", "pid": 4242, "after_s": 1.0, "state": "D", "wchan": "__access_remote_vm"}
    )
    return s


def c83() -> Snap:
    s = Snap()
    s.trainer(
        "S locks_lock_inode_wait flock 14",
        main={"paths": {14: ("/home/kim/.cache/huggingface/datasets/x.lock", "file")}},
        cuda=False,
    )
    s.d["locks"] = [
        {
            "id": 4,
            "type": "FLOCK",
            "mode": "WRITE",
            "holder": 3999,
            "holder_comm": "python",
            "path": "/home/kim/.cache/huggingface/datasets/x.lock",
            "waiters": [4242],
        }
    ]
    s.log("Loading dataset\n", age=1300)
    return s


def c83b() -> Snap:
    s = Snap()
    s.trainer(
        "S hrtimer_nanosleep clock_nanosleep",
        cpu=0.004,
        wakeups=20,
        cuda=False,
        fds={"14": {"path": "/home/kim/.cache/huggingface/datasets/x.lock", "pos": 0, "access": "rw"}},
    )
    s.d["lockfiles"] = [
        {"path": "/home/kim/.cache/huggingface/datasets/x.lock", "pid": 4242, "age_s": 4000, "open": True}
    ]
    s.log("Loading dataset\n", age=3000)
    return s


def c85() -> Snap:
    s = Snap()
    s.trainer("S do_epoll_wait epoll_wait 9", cpu=0.01, wakeups=3, main={"timeout": True})
    s.proc(
        4500,
        "tracker",
        [thread("S ep_poll epoll_wait", "wandb-core", cpu=0.02, wakeups=20)],
        comm="wandb-core",
        ppid=4242,
        cmd="wandb-core",
    )
    idle_gpu(s)
    s.log(
        "100%|██████████| 1000/1000 [1:00:00<00:00,  3.6s/it]\n{'train_runtime': '3600.1', 'train_loss': '1.2',"
        " 'epoch': '3.0'}\nwandb: Waiting for W&B process to finish... (success).\n"
        + "wandb: 3859.464 MB of 3859.464 MB uploaded (0.000 MB deduped)\r"
        * 30,
        age=2,
        growth=60,
    )
    return s


def c87() -> Snap:
    s = Snap()
    s.trainer("S wait_woken read 0", main={"paths": {0: ("/dev/pts/3", "tty")}})
    s.d["processes"]["4242"]["stdin"] = {"path": "/dev/pts/3", "kind": "tty"}
    s.log(
        "wandb: (1) Create a W&B account\nwandb: (2) Use an existing W&B account\nwandb: (3) Don't visualize my"
        " results\nwandb: Enter your choice: ",
        age=700,
    )
    return s


def c87b() -> Snap:
    s = Snap()
    s.trainer("T do_signal_stop read 0", main={"paths": {0: ("/dev/pts/3", "tty")}}, state="T")
    s.d["processes"]["4242"]["stdin"] = {"path": "/dev/pts/3", "kind": "tty"}
    s.log("wandb: (3) Don't visualize my results\nwandb: Enter your choice: ", age=700)
    return s


def c88() -> Snap:
    s = Snap()
    out = {"path": "pipe:[777]", "kind": "pipe", "inode": 777}
    s.trainer("S anon_pipe_write write 1", main={"paths": {1: ("pipe:[777]", "pipe")}}, stdout=out, fds={"1": out})
    s.proc(4100, "other", [thread("S do_epoll_wait epoll_wait 4", "node")], comm="node", cmd="node server.js")
    s.d["pipes"] = [
        {"inode": 777, "writers": [{"pid": 4242, "fd": 1}], "readers": [{"pid": 4100, "fd": 20}], "queued": 65536}
    ]
    s.d["logs"] = [
        {
            "path": "pipe:[777]",
            "how": "fd1",
            "pid": 4242,
            "fd": 1,
            "kind": "pipe",
            "to": {"pid": 4100, "comm": "node"},
            "growth": [],
        }
    ]
    idle_gpu(s)
    return s


def c89() -> Snap:
    s = Snap()
    s.trainer("S futex_do_wait futex", wakeups=0.0, extra=[thread("S do_epoll_wait epoll_wait", "wandb", wakeups=1)])
    s.proc(
        4500,
        "tracker",
        [thread("S ep_poll epoll_wait", "wandb-core", wakeups=3)],
        comm="wandb-core",
        ppid=4242,
        cmd="wandb-core",
    )
    s.mount("21", "/home", "xfs", "sda", free=0, used_by=["cwd", "log", "output"])
    idle_gpu(s)
    s.log(
        stamped(90, 3, 2000)
        + 'Traceback (most recent call last):\n  File "train.py", line 88, in save\n    torch.save(state,'
        " path)\nOSError: [Errno 122] Disk quota exceeded\n",
        age=2000,
    )
    return s


def c90() -> Snap:
    s = Snap()
    s.trainer("T do_signal_stop", state="T")
    s.workers(2, POLLING)
    idle_gpu(s)
    s.log(stamped(90, 3, 400), age=400)
    return s


def c91() -> Snap:
    s = Snap()
    s.trainer(
        "S futex_do_wait futex",
        wakeups=0.0,
        main={"timeout": True},
        extra=[thread("S futex_do_wait futex", "python", wakeups=0.3)],
    )
    s.stack(4242, "cuptiFinalize libcupti.so:0", "stop torch/profiler/profiler.py:300")
    idle_gpu(s)
    s.log(stamped(20, 3, 900), age=900)
    return s


def c93() -> Snap:
    s = Snap()
    s.trainer(STARVED, wakeups=0.3, main={"timeout": True}, libs="torch numpy cuda h5py")
    s.workers(4, LOCKED, uaddr=0x7FF10010)
    idle_gpu(s)
    s.log("Epoch 1/10\n", age=900)
    return s


CASES = [
    ("C70", "GPU off the bus", ["stuck.gpu-lost"], c70),
    ("C71", "state D in uvm_ioctl", ["stuck.gpu-lost"], c71),
    ("C72", "NVML itself hangs", ["stuck.gpu-lost"], c72),
    ("C73", "defunct process, GPU held", ["stuck.gpu-lost", "stuck.orphans"], c73),
    ("C81", "NFS in state D", ["stuck.filesystem"], c81),
    ("C82", "reading cmdline blocks too", ["stuck.filesystem"], c82),
    ("C83", "flock held by another process", ["stuck.lock-file"], c83),
    ("C83b", "lock polled for ever", ["stuck.lock-file"], c83b),
    ("C85", "wandb after training", ["finished.lingering"], c85),
    ("C87", "prompt on stdin", ["stuck.input"], c87),
    ("C87b", "prompt in the background", ["stuck.input"], c87b),
    ("C88", "stdout pipe not drained", ["stuck.stdout-pipe"], c88),
    ("C89", "quota exceeded", ["stuck.disk-full"], c89),
    ("C90", "left stopped", ["stuck.stopped"], c90),
    ("C91", "profiler hang", ["stuck.deadlock"], c91),
    ("C93", "HDF5 handles forked", ["stuck.fork-lock"], c93),
]
