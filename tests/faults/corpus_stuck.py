"""Snapshots of the public cases: loaders, collectives, drivers, storage, terminals (C30-C93 of why-cases.md)."""

from __future__ import annotations

from corpus_quiet import MB, POLLING, STARVED, stamped
from snapshots import GB, NOW, PIN, Snap, thread

FOREVER = {"timeout": False}
LOCKED = "S futex_do_wait futex"
NCCL = [thread("S poll_schedule_timeout poll", "pt_nccl_watchdg", wakeups=10), thread("S futex_do_wait futex", "pt_nccl_heartbt", wakeups=1)]


def idle_gpu(s: Snap, mem: int = 20 * GB, power: float = 80) -> None:
    s.gpu([0, 0], power, limit=300, mem=mem)


def waiting_main(s: Snap, looks: str = "S anon_pipe_read read 8", **more: object) -> None:
    s.trainer(looks, cpu=0.0, wakeups=0.0, main={"timeout": False, "paths": {8: ("pipe:[9001]", "pipe")}},
              fds={"8": {"path": "pipe:[9001]", "kind": "pipe", "inode": 9001}}, **more)  # type: ignore[arg-type]  # fmt: skip


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
    s.trainer(STARVED, wakeups=0.3, main={"timeout": True}, extra=[thread(PIN, wakeups=1, timeout=True)], libs="torch numpy cuda gomp cv2")
    s.workers(4, LOCKED, uaddr=0x7FAA0010)
    idle_gpu(s)
    s.log("Epoch 0\n", age=1800)
    return s


def c32() -> Snap:
    s = Snap()
    s.trainer(STARVED, wakeups=0.3, main={"timeout": True}, libs="torch numpy cuda tokenizers")
    s.workers(2, LOCKED, uaddr=0x7FBB0010)
    idle_gpu(s)
    s.log("huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\n", age=900)
    return s


def c33() -> Snap:
    s = Snap()
    waiting_main(s, libs="numpy", cuda=False)
    s.workers(3, LOCKED, uaddr=0x7FCC0010)
    s.stack(4301, "acquire logging/__init__.py:901", "handle logging/__init__.py:1027", "_flush_std_streams multiprocessing/util.py:430")
    s.log("INFO start of the pool\n", age=600)
    return s


def c34() -> Snap:
    s = Snap()
    s.trainer("S do_wait wait4", main={"pid": 4400}, cuda=False, libs="numpy rich")
    s.proc(4400, "other", [thread("S wait_woken read 3", "sudo", paths={3: ("/dev/pts/4", "tty")})], comm="sudo", ppid=4242, cmd="sudo sysctl vm.drop_caches=3", age=57600)
    s.log("Generating data ━━━━━━ 100% \n", age=57_600)
    return s


def c36() -> Snap:
    s = Snap()
    s.trainer("S futex_do_wait futex", wakeups=0.0, main=FOREVER, extra=[thread("S poll_schedule_timeout poll", "pin_memory", wakeups=0.3, timeout=True)])
    idle_gpu(s)
    s.log(stamped(200, 2, 1500), age=1500)
    return s


def c37() -> Snap:
    s = Snap()
    s.trainer("S futex_do_wait futex", wakeups=0.0, main=FOREVER, extra=[thread("S poll_schedule_timeout poll", "python", wakeups=0.0)])
    s.workers(4, POLLING, wakeups=0.0)
    idle_gpu(s)
    s.log(stamped(200, 2, 2400), age=2400)
    return s


def c39() -> Snap:
    s = Snap(mem=64 * GB)
    waiting_main(s, cgroup="job")
    s.workers(3, POLLING)
    s.workers(1, "Z", first=4310, state="Z")
    s.d["cgroups"]["job"] = {"version": 2, "memory": {"current": 30 * GB, "max": 32 * GB, "events": {"oom": 2, "oom_kill": 1}, "stat": {"file": GB}}, "cpu": {}}
    s.d["kernel_log"] = {"readable": True, "lines": [{"age_s": 300, "text": "Memory cgroup out of memory: Killed process 4310 (python)", "kind": "oom"}]}
    idle_gpu(s)
    s.log(stamped(100, 2, 300) + "RuntimeError: DataLoader worker (pid 4310) is killed by signal: Killed.\n", age=300)
    return s


def c40() -> Snap:
    s = Snap()
    s.log(stamped(100, 2, 300) + "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
          "RuntimeError: DataLoader worker (pid 4310) is killed by signal: Bus error.\n", age=300)  # fmt: skip
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


def ranks(s: Snap, n: int, looks: object = "R", cpu: float = 1.0, util: float = 100, power: float = 210, limit: float = 700, env: dict[str, str] | None = None,
          name: str = "NVIDIA H100 80GB HBM3", world: int | None = None, mem: int = 60 * GB, skip: tuple[int, ...] = (), cuda: bool = True, **more: object) -> None:  # fmt: skip
    """`n` ranks of one job on this host. `looks`, `cpu`, `util` and `power` may be functions of the rank."""
    pick = lambda v, r: v(r) if callable(v) else v  # noqa: E731
    s.d["job"].update(world_size=world or n, launcher=4000, launcher_nproc=n)
    s.proc(4000, "launcher", [thread("S hrtimer_nanosleep clock_nanosleep", wakeups=10)], cmd="torchrun --nproc-per-node train.py")
    for r in range(n):
        if r in skip:
            continue
        pid = 4242 + r
        s.trainer(pick(looks, r), cpu=pick(cpu, r), pid=pid, kind="rank", rank=r, ppid=4000, extra=[dict(t) for t in NCCL] if cuda else [], cuda=cuda,
                  main={"timeout": False}, env={"RANK": str(r), "WORLD_SIZE": str(world or n), "LOCAL_WORLD_SIZE": str(n), **(env or {})}, **more)  # type: ignore[arg-type]  # fmt: skip
        if cuda:
            s.gpu(pick(util, r), pick(power, r), limit=limit, index=r, pids=[pid], name=name, mem=mem, pcie=2000)


def c50() -> Snap:
    s = Snap()
    ranks(s, 8, world=512, power=290, limit=1000)
    text = "".join(f"step {i} loss 2.1 took 9.1 s\n" for i in range(150, 184)) + "".join(f"heartbeat alive {i}\n" for i in range(200))
    s.log(text, age=3, growth=20)
    return s


def c51() -> Snap:
    s = Snap()
    ranks(s, 4, util=lambda r: 0 if r == 2 else 100, power=lambda r: 55 if r == 2 else 75, limit=250, cpu=1.0, name="NVIDIA TITAN V", mem=8 * GB)
    s.log("".join(f"iter {i}: loss 4.2, time 250.11ms, mfu 12.3%\n" for i in range(0, 400, 10)), age=1900)
    return s


def c52() -> Snap:
    s = Snap()
    ranks(s, 8, power=180, limit=700)
    for r in range(8):
        if r < 3:
            s.stack(4242 + r, "all_reduce torch/distributed/distributed_c10d.py:2800", "complete_grad_norm_calculation_for_cpu_offload deepspeed/runtime/zero/stage3.py:1467", "step deepspeed/runtime/zero/stage3.py:2000")
        else:
            s.stack(4242 + r, "reduce_scatter_tensor torch/distributed/distributed_c10d.py:4000", "reduce_scatter_coalesced deepspeed/runtime/comm/coalesced_collectives.py:130")
    s.log(stamped(60, 10, 1500), age=1500)
    return s


def c53() -> Snap:
    s = Snap()
    ranks(s, 8, power=170, limit=700)
    s.log(stamped(30, 14, 900), age=900)
    return s


def c55() -> Snap:
    s = Snap()
    ranks(s, 2, looks=lambda r: "S futex_do_wait futex" if r == 0 else "R", cpu=lambda r: 0.0 if r == 0 else 1.0, util=lambda r: 0 if r == 0 else 100, power=lambda r: 80 if r == 0 else 150)
    s.log(stamped(60, 5, 1400) + "Saving model checkpoint to out/checkpoint-600\n", age=1400)
    return s


def c56() -> Snap:
    s = Snap()
    ranks(s, 4, power=90, limit=400, util=lambda r: 0 if r == 3 else 100, looks="R")
    s.log("Epoch 1: 100%|██████████| 250/250 [05:00<00:00,  0.83it/s, v_num=0, loss=1.2]\nValidation DataLoader 0: 100%|██████████| 30/30 [00:20<00:00, 1.5it/s]\n", age=2100)
    return s


def c57() -> Snap:
    s = Snap()
    ranks(s, 8, power=160)
    s.log(stamped(40, 12, 700) + "[rank3]:[E1129 13:00:00 ProcessGroupNCCL.cpp:1300] [PG ID 0 PG GUID 0 Rank 3] Heartbeat monitor timed out! Process will be terminated after dumping debug info. "
          "workMetaList_.size()=1\n[rank3]:[F ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n", age=120)  # fmt: skip
    return s


def c58() -> Snap:
    s = Snap()
    ranks(s, 4, power=140, limit=400)
    log = stamped(30, 5, 800)
    for r in (0, 1, 3):
        log += f"[rank{r}]:[E ProcessGroupNCCL.cpp:475] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=167, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600272 milliseconds before timing out.\n"
    s.log(log, age=60)
    return s


def c59() -> Snap:
    s = Snap()
    ranks(s, 8, power=95, limit=450, name="NVIDIA GeForce RTX 4090", mem=9 * GB)
    s.log("***** Running training *****\n  0%|          | 0/1000 [00:00<?, ?it/s]", age=1500)
    return s


def c60(state: str = "ESTABLISHED") -> Snap:
    s = Snap()
    ranks(s, 8, looks="S poll_schedule_timeout poll 30", cpu=0.0, util=0, power=70, world=16, mem=400 * MB, env={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    for r in range(8):
        s.socket(4242 + r, 30, "10.0.0.1", 29500, state)
    if state == "ESTABLISHED":
        s.log("INFO Added key: store_based_barrier_key:1 to store for rank: 3\nINFO Waiting in store based barrier to initialize process group for rank: 3, key: store_based_barrier_key:1 (world_size=16, worker_count=7, timeout=0:30:00)\n", age=10)
    else:
        s.log("initialising distributed\n", age=400)
    return s


def c63() -> Snap:
    s = Snap()
    ranks(s, 2, power=120, limit=350, name="NVIDIA GeForce RTX 3090", mem=18 * GB)
    s.log("phase: step, starting\n" + "".join(f"[hb] alive t={i}\n" for i in range(40)), age=4, growth=15)
    return s


def c64() -> Snap:
    s = Snap()
    ranks(s, 8, power=110, limit=400, world=16, env={"CUDA_LAUNCH_BLOCKING": "1"}, name="NVIDIA A100-SXM4-40GB")
    s.log("***** Running training *****\n  Total optimization steps = 1,000\n", age=1700)
    return s


def c70() -> Snap:
    s = Snap()
    s.trainer("R", cpu=1.0)
    s.d["gpu"] = {"status": "error", "tool": "nvidia-smi", "error": "Unable to determine the device handle for GPU0000:65:00.0: Unknown Error", "gpus": [], "processes": []}
    s.d["kernel_log"] = {"readable": True, "lines": [{"age_s": 500, "text": "NVRM: GPU at PCI:0000:65:00: GPU has fallen off the bus.", "kind": "nvrm"}]}
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
    s.d["gpu"] = {"status": "timed_out", "tool": "nvidia-smi", "error": "did not answer in 2 s", "gpus": [], "processes": []}
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
    s.d["probes_timed_out"] = [{"probe": "statvfs /mnt/nas", "path": "/mnt/nas", "after_s": 1.0, "state": "D", "wchan": "rpc_wait_bit_killable"}]
    idle_gpu(s)
    s.log(stamped(90, 3, 1300), age=1300)
    return s


def c82() -> Snap:
    s = c81("rwsem_down_read_slowpath")
    s.d["processes"]["4242"].update(cmdline=None, environ=None, libs=[])
    s.d["probes_timed_out"].append({"probe": "cmdline 4242", "pid": 4242, "after_s": 1.0, "state": "D", "wchan": "__access_remote_vm"})
    return s


def c83() -> Snap:
    s = Snap()
    s.trainer("S locks_lock_inode_wait flock 14", main={"paths": {14: ("/home/kim/.cache/huggingface/datasets/x.lock", "file")}}, cuda=False)
    s.d["locks"] = [{"id": 4, "type": "FLOCK", "mode": "WRITE", "holder": 3999, "holder_comm": "python", "path": "/home/kim/.cache/huggingface/datasets/x.lock", "waiters": [4242]}]
    s.log("Loading dataset\n", age=1300)
    return s


def c83b() -> Snap:
    s = Snap()
    s.trainer("S hrtimer_nanosleep clock_nanosleep", cpu=0.004, wakeups=20, cuda=False,
              fds={"14": {"path": "/home/kim/.cache/huggingface/datasets/x.lock", "pos": 0, "access": "rw"}})  # fmt: skip
    s.d["lockfiles"] = [{"path": "/home/kim/.cache/huggingface/datasets/x.lock", "pid": 4242, "age_s": 4000, "open": True}]
    s.log("Loading dataset\n", age=3000)
    return s


def c85() -> Snap:
    s = Snap()
    s.trainer("S do_epoll_wait epoll_wait 9", cpu=0.01, wakeups=3, main={"timeout": True})
    s.proc(4500, "tracker", [thread("S ep_poll epoll_wait", "wandb-core", cpu=0.02, wakeups=20)], comm="wandb-core", ppid=4242, cmd="wandb-core")
    idle_gpu(s)
    s.log("100%|██████████| 1000/1000 [1:00:00<00:00,  3.6s/it]\n{'train_runtime': '3600.1', 'train_loss': '1.2', 'epoch': '3.0'}\nwandb: Waiting for W&B process to finish... (success).\n"
          + "wandb: 3859.464 MB of 3859.464 MB uploaded (0.000 MB deduped)\r" * 30, age=2, growth=60)  # fmt: skip
    return s


def c87() -> Snap:
    s = Snap()
    s.trainer("S wait_woken read 0", main={"paths": {0: ("/dev/pts/3", "tty")}})
    s.d["processes"]["4242"]["stdin"] = {"path": "/dev/pts/3", "kind": "tty"}
    s.log("wandb: (1) Create a W&B account\nwandb: (2) Use an existing W&B account\nwandb: (3) Don't visualize my results\nwandb: Enter your choice: ", age=700)
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
    s.d["pipes"] = [{"inode": 777, "writers": [{"pid": 4242, "fd": 1}], "readers": [{"pid": 4100, "fd": 20}], "queued": 65536}]
    s.d["logs"] = [{"path": "pipe:[777]", "how": "fd1", "pid": 4242, "fd": 1, "kind": "pipe", "to": {"pid": 4100, "comm": "node"}, "growth": []}]
    idle_gpu(s)
    return s


def c89() -> Snap:
    s = Snap()
    s.trainer("S futex_do_wait futex", wakeups=0.0, extra=[thread("S do_epoll_wait epoll_wait", "wandb", wakeups=1)])
    s.proc(4500, "tracker", [thread("S ep_poll epoll_wait", "wandb-core", wakeups=3)], comm="wandb-core", ppid=4242, cmd="wandb-core")
    s.mount("21", "/home", "xfs", "sda", free=0, used_by=["cwd", "log", "output"])
    idle_gpu(s)
    s.log(stamped(90, 3, 2000) + "Traceback (most recent call last):\n  File \"train.py\", line 88, in save\n    torch.save(state, path)\nOSError: [Errno 122] Disk quota exceeded\n", age=2000)
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
    s.trainer("S futex_do_wait futex", wakeups=0.0, main={"timeout": True}, extra=[thread("S futex_do_wait futex", "python", wakeups=0.3)])
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


_ = NOW
CASES = [
    ("C30", "zombie workers, shared memory nearly full", ["stuck.worker-dead", "stuck.shm-full", "stuck.fork-lock"], c30),
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
    ("C50", "512 GPUs wedged, heart-beats go on", ["stuck.collective", "stuck.gpu-lost"], c50),
    ("C51", "100 % at idle power, one rank left out", ["stuck.collective"], c51),
    ("C52", "3 ranks in all_reduce, 5 in reduce_scatter", ["stuck.collective"], c52),
    ("C53", "MoE under ZeRO-3", ["stuck.collective"], c53),
    ("C55", "checkpoint gather on rank 0 only", ["stuck.collective", "quiet.checkpointing"], c55),
    ("C56", "metric sync on one rank only", ["stuck.collective"], c56),
    ("C57", "watchdog stuck for 480 s", ["stuck.collective", "stuck.deadlock"], c57),
    ("C58", "barrier without one rank", ["stuck.collective"], c58),
    ("C59", "peer-to-peer broken on consumer cards", ["stuck.p2p"], c59),
    ("C60", "store barrier, 7 of 16", ["stuck.rendezvous"], c60),
    ("C60b", "master does not answer", ["stuck.rendezvous"], lambda: c60("SYN_SENT")),
    ("C63", "ZeRO-3 step-0 deadlock", ["stuck.collective", "stuck.p2p"], c63),
    ("C64", "launch blocking across nodes", ["stuck.p2p"], c64),
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
