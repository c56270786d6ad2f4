"""Classes of the taxonomy that no public case shows: phases, slow hosts, other stuck states."""

from __future__ import annotations

from snapshot_parts import LOCKED, MB, POLLING, STARVED, idle_gpu, ranks, reading, stamped
from snapshots import GB, Snap, thread


def evaluating() -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.95)
    s.workers(4, POLLING, wakeups=5)
    s.gpu([60, 85], 420)
    s.log(stamped(60, 3, 240) + "***** Running Evaluation *****\n  Num examples = 20000\n  Batch size = 8\n", age=240)
    return s


def checkpointing() -> Snap:
    s = Snap()
    s.trainer(
        ["D balance_dirty_pages write 44", "R", "D balance_dirty_pages write 44"],
        cpu=0.4,
        wakeups=90,
        io={"wchar": 4e8, "write_bytes": 4e8},
        main={"paths": {44: ("/home/kim/run/ckpt/step-500.tmp/model.pt", "file")}},
    )
    s.output("/home/kim/run/ckpt/step-500.tmp/model.pt", 30 * GB, growth=1200 * MB, tmp=True)
    idle_gpu(s)
    s.log(stamped(60, 3, 90) + "Saving checkpoint to ckpt/step-500\n", age=90)
    return s


def checkpointing_nfs() -> Snap:
    s = Snap()
    s.trainer(
        ["D nfs_wait_on_request fsync 44", "D rpc_wait_bit_killable write 44", "D nfs_wait_on_request fsync 44"],
        cpu=0.1,
        wakeups=300,
        io={"wchar": 9e7},
        main={"paths": {44: ("/mnt/nas/ckpt/model-00003.safetensors", "file")}},
    )
    s.mount("30", "/mnt/nas", "nfs4", source="nas1:/export", used_by=["output"])
    s.output("/mnt/nas/ckpt/model-00003.safetensors", 4 * GB, growth=270 * MB)
    idle_gpu(s)
    s.log(stamped(60, 3, 60), age=60)
    return s


def initialising() -> Snap:
    s = Snap()
    s.trainer(
        ["D folio_wait_bit_common read 9", "R", "R"],
        cpu=0.6,
        wakeups=200,
        age=50,
        io={"rchar": 4e8, "read_bytes": 3e8},
        fds={
            "9": {
                "path": "/models/llama/model-00002-of-00030.safetensors",
                "pos": [GB, int(1.4 * GB), int(2.2 * GB)],
                "mnt": "21",
            }
        },
    )
    s.gpu(0, 90, mem=2 * GB)
    s.log("Loading checkpoint shards:   3%|▎         | 1/30 [00:10<04:50, 10.0s/it]", age=12)
    return s


def tokenising() -> Snap:
    s = Snap()
    s.trainer(POLLING, cpu=0.02, wakeups=10, cuda=False, age=900)
    s.workers(8, "R", cpu=0.99, kind="spawned", io={"rchar": 1e6, "wchar": 2e6})
    s.cache("hf_datasets", growth=2)
    s.log("Map (num_proc=8):  43%|████▎     | 430000/1000000 [12:00<16:00, 600.00 examples/s]", age=0.5, growth=90)
    return s


def long_step() -> Snap:
    s = Snap()
    s.trainer("S poll_schedule_timeout poll 40", cpu=0.1, wakeups=50, main={"paths": {40: ("/dev/nvidia0", "nvidia")}})
    s.gpu([100, 100], 660)
    s.log(stamped(30, 20, 75), age=75)
    return s


def small_files() -> Snap:
    s = Snap()
    s.trainer(STARVED, wakeups=0.3, main={"timeout": True})
    s.mount("22", "/data", "ext4", "sda")
    s.disk("sda", 3e6, 0.9, await_ms=6)
    s.workers(
        8,
        ["D folio_wait_bit_common openat", "S hidden", "D folio_wait_bit_common newfstatat"],
        cpu=0.2,
        wakeups=300,
        io={"rchar": 1.2e6, "read_bytes": 4e5, "syscr": 400},
        fds=lambda n: {
            "30": {"path": f"/data/img/{n}/a.jpg", "pos": 0, "mnt": "22", "at": (0,)},
            "31": {"path": f"/data/img/{n}/b.jpg", "pos": 0, "mnt": "22", "at": (1,)},
            "32": {"path": f"/data/img/{n}/c.jpg", "pos": 0, "mnt": "22", "at": (2,)},
        },
    )
    s.d["datasets"] = [
        {
            "dir": "/data/img",
            "ext": ".jpg",
            "files": 4_000_000,
            "bytes": 80 * GB,
            "exact": False,
            "mnt": "22",
            "seen": [],
            "cached": None,
        }
    ]
    s.gpu([2, 0], 70, limit=300)
    s.log(stamped(60, 5, 4), age=4)
    return s


def fuse_slow() -> Snap:
    s = Snap()
    s.trainer(STARVED, wakeups=0.3, main={"timeout": True})
    s.mount("40", "/mnt/s3", "fuse.rclone", source="s3:bucket")
    s.workers(
        4,
        ["D request_wait_answer read 12", "S request_wait_answer read 12", "D request_wait_answer read 12"],
        cpu=0.02,
        wakeups=40,
        io={"rchar": 1e6},
        fds=lambda n: reading(n, "/mnt/s3/shard-{}.tar", 1e6, 900 * MB, "40"),
    )
    s.gpu([0, 0], 70, limit=300)
    s.log(stamped(60, 15, 20), age=20)
    return s


def quota() -> Snap:
    s = Snap(cpus=64)
    s.d["cgroups"]["job"] = {
        "version": 2,
        "memory": {"current": 9 * GB, "max": 64 * GB, "events": {"oom_kill": 0}},
        "cpu": {"quota_cpus": 2.0, "nr_periods": 1, "nr_throttled": 1},
    }
    s.counter("cgroups/job", nr_periods=10, nr_throttled=9.4, throttled_s=3.2, usage_s=2.0)
    s.trainer(["R", STARVED, "R"], cpu=0.3, wakeups=300, main={"waits": 0.5}, cgroup="job")
    s.workers(8, "R", cpu=0.2, wakeups=100, waits=0.7, cgroup="job")
    s.gpu([5, 9], 90, limit=400)
    s.log(stamped(60, 9, 8), age=8)
    return s


def gpu_shared() -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.99)
    s.gpu([100, 100], 380, limit=400)
    s.d["gpu"]["processes"].append(
        {
            "gpu": 0,
            "pid": 9000,
            "mem": 20 * GB,
            "sm_util": 48,
            "comm": "vllm",
            "user": "lee",
            "member": False,
            "alive": True,
        }
    )
    s.log(stamped(60, 9, 4), age=4)
    return s


def host_python() -> Snap:
    s = Snap()
    s.trainer("R", cpu=1.0)
    s.workers(4, POLLING, wakeups=2)
    s.gpu([14, 9], 95, limit=400)
    s.log(stamped(60, 2, 1), age=1, growth=140)
    return s


def straggler() -> Snap:
    s = Snap()
    ranks(s, 8, util=lambda r: 55 if r == 6 else 100, power=lambda r: 200 if r == 6 else 160, limit=400)
    s.d["gpu"]["gpus"][6]["samples"] = [
        {**x, "reasons": ["hw_thermal"], "sm_mhz": 600, "temp": 92} for x in s.d["gpu"]["gpus"][6]["samples"]
    ]
    s.log(stamped(60, 12, 4), age=4, growth=90)
    return s


def transport() -> Snap:
    s = Snap()
    ranks(s, 8, world=32, util=100, power=310, limit=700, env={"NCCL_IB_DISABLE": "1"})
    s.counter("net/eth0", rx_bytes=1.1e9, tx_bytes=1.1e9)
    s.counter("ib/mlx5_0", rx_bytes=0, tx_bytes=0)
    s.log("gpu7:123:456 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>\n" + stamped(60, 12, 4), age=4, growth=90)
    return s


def shm_full() -> Snap:
    s = Snap()
    s.trainer(STARVED, wakeups=0.3, main={"timeout": True})
    s.workers(4, POLLING, wakeups=0.0)
    s.d["host"]["shm"] = {"size": 64 * MB, "used": 64 * MB, "free": 0, "entries": 40, "by_job": 64 * MB}
    idle_gpu(s)
    s.log(
        "RuntimeError: unable to write to file </torch_4301_1>: No space left on device (28). It is possible that"
        " dataloader's workers are out of shared memory. Please try to raise your shared memory limit.\n",
        age=400,
    )
    return s


def orphans() -> Snap:
    s = Snap()
    s.ended()
    s.d["target"]["pid"] = 4242
    s.workers(4, POLLING, parent=1, wakeups=0.2)
    s.gpu(0, 60, limit=300, pids=[4301], mem=12 * GB)
    s.d["gpu"]["orphans"] = [4301]
    s.log(stamped(60, 3, 4000), age=4000)
    return s


def livelock() -> Snap:
    s = Snap()
    s.trainer("R", cpu=1.0, minflt=0.0, io={})
    s.workers(4, POLLING, wakeups=0.2)
    idle_gpu(s)
    s.log(stamped(200, 2, 1200), age=1200)
    return s


def download() -> Snap:
    s = Snap()
    s.trainer("S poll_schedule_timeout poll 11", wakeups=0.2, main={"paths": {11: ("socket:[5]", "socket")}}, age=900)
    s.socket(4242, 11, "18.1.1.1", 443)
    s.cache("hf_hub", age=800, incomplete=[{"name": "ab12.incomplete", "size": 90 * MB}])
    s.gpu(0, 60, mem=400 * MB)
    s.log(
        "Downloading shards:   0%|          | 0/30 [00:00<?, ?it/s]\nmodel-00001.safetensors:   2%|▏         |"
        " 94.4M/4.98G [00:10<08:00, 10.2MB/s]\n'(MaxRetryError(\"HTTPSConnectionPool: Read timed out. (read"
        " timeout=10)\"))' Retrying in 1s [Retry 1/5].\nRead timed out. Retrying in 8s [Retry 4/5].\n",
        age=300,
    )
    return s


def frozen() -> Snap:
    s = Snap()
    s.d["cgroups"]["job"] = {"version": 1, "memory": {}, "cpu": {}, "frozen": True}
    s.trainer("D folio_wait_bit_common read 9", cgroup="job")
    s.log(stamped(60, 3, 500), age=500)
    return s


def deadlock() -> Snap:
    s = Snap()
    s.trainer(
        "S futex_do_wait futex",
        main={"timeout": False},
        cuda=False,
        extra=[thread(LOCKED, uaddr=0x999, timeout=False), thread(LOCKED, uaddr=0x998, timeout=False)],
    )
    s.log(stamped(60, 1, 300), age=300)
    return s


def gloo_mismatch() -> Snap:
    s = Snap()
    ranks(s, 3, looks="S futex_do_wait futex", cpu=0.0, cuda=False, libs="torch numpy")
    for r in range(3):
        s.socket(4242 + r, 20, "127.0.0.1", 41000 + r, peer_pid=4242 + (r + 1) % 3)
    s.log(stamped(60, 1, 240), age=240)
    return s


CASES = [
    ("B4", "evaluation", ["quiet.evaluating"], evaluating),
    ("B5", "checkpoint", ["quiet.checkpointing"], checkpointing),
    ("B5b", "checkpoint to NFS, log silent about it", ["quiet.checkpointing"], checkpointing_nfs),
    ("B7", "loading a model", ["quiet.initialising"], initialising),
    ("B7b", "tokenising a data set", ["quiet.initialising"], tokenising),
    ("B8", "long GPU step", ["quiet.long-step"], long_step),
    ("T-C2", "object store over FUSE", ["slow.data.network"], fuse_slow),
    ("T-C5", "millions of small files", ["slow.data.small-files"], small_files),
    ("T-C7", "CPU quota", ["slow.cpu.quota"], quota),
    ("T-C10", "GPU shared", ["slow.gpu.shared"], gpu_shared),
    ("T-C11", "host Python", ["slow.host-python"], host_python),
    ("T-C12", "one throttled GPU of eight", ["slow.straggler", "slow.gpu.throttled"], straggler),
    ("T-C13", "sockets instead of InfiniBand", ["slow.transport"], transport),
    ("D1", "gloo ranks wait for each other", ["stuck.collective"], gloo_mismatch),
    ("D6", "deadlock in one process", ["stuck.deadlock"], deadlock),
    ("D12", "frozen cgroup", ["stuck.stopped"], frozen),
    ("D14", "shared memory full", ["stuck.shm-full"], shm_full),
    ("D15", "orphans hold a GPU", ["stuck.orphans"], orphans),
    ("D16", "livelock", ["stuck.livelock"], livelock),
    ("D17", "download retries", ["stuck.download"], download),
]
