"""Public cases C20-C29, C74, C92: starved for data, memory, clocks."""

from __future__ import annotations

from snapshot_parts import MB, POLLING, STARVED, cold, reading, stamped
from snapshots import GB, PIN, Snap, thread


def c20() -> Snap:
    s = Snap()
    s.trainer(STARVED, cpu=0.02, wakeups=0.3, main={"timeout": True})
    cold(s, count=8, rate=1.2e7, cached=0.05, device="sda")
    s.gpu([0, 0], 70, limit=300)
    text = "".join(
        f"Train Epoch: 0 [{i * 256}/788603 (0%)] Data (t): {12.5 if i % 8 == 0 else 0.02:.3f} Batch (t):"
        f" {13.0 if i % 8 == 0 else 0.52:.3f} LR: 0.0001 Loss: 4.2\n"
        for i in range(1, 65)
    )
    s.log(text, age=9)
    return s


def c21() -> Snap:
    s = Snap()
    s.trainer(STARVED, cpu=0.05, wakeups=0.3, main={"timeout": True}, libs="torch numpy cuda h5py")
    s.mount("22", "/data", "ext4", "sdb")
    s.disk("sdb", 6e6, 0.99, await_ms=14)
    s.data_file("/data/feat.h5", 400 * GB, "22", 0.03)
    s.d["host"]["pressure"]["io"]["some"]["avg10"] = 41.0
    s.workers(
        4,
        ["D folio_wait_bit_common pread64 9", "D folio_wait_bit_common pread64 9", "R"],
        cpu=0.1,
        wakeups=150,
        io={"rchar": 1.6e6, "read_bytes": 1.5e6, "syscr": 110},
        fds={"9": {"path": "/data/feat.h5", "pos": 0, "mnt": "22"}},
    )
    s.gpu(0, 60, limit=300)
    s.log(stamped(40, 6, 7), age=7)
    return s


def c22(will_warm: bool = True) -> Snap:
    s = Snap(mem=(256 if will_warm else 64) * GB)
    s.trainer(STARVED, cpu=0.01, wakeups=0.3, main={"timeout": True})
    cold(s, count=6, rate=3e7, cached=0.2)
    s.d["datasets"] = [
        {
            "dir": "/data/hs",
            "ext": ".jpg",
            "files": 1_281_167,
            "bytes": 145 * GB,
            "exact": False,
            "mnt": "22",
            "seen": [],
            "cached": 0.2,
        }
    ]
    s.gpu([3, 0], 80, limit=300)
    s.log("Epoch: [0][ 120/5005]\tTime 1.40 ( 1.51)\tData 1.20 ( 1.30)\tLoss 6.8\n" * 3, age=8)
    return s


def c23() -> Snap:
    s = Snap()
    s.trainer(STARVED, cpu=0.01, wakeups=0.3, main={"timeout": True})
    s.mount("30", "/mnt/imagenet", "nfs4", source="nas1:/imagenet")
    looks = ["D rpc_wait_bit_killable read 12", "D folio_wait_bit_common read 12", "R"]
    s.workers(
        8,
        looks,
        cpu=0.08,
        wakeups=200,
        io={"rchar": 4e6, "read_bytes": 4e6, "syscr": 50},
        fds=lambda n: reading(n, "/mnt/imagenet/train/n0{}.tar", 4e6, 900 * MB, "30"),
    )
    s.gpu([0, 4], 65, limit=250)
    s.log(stamped(60, 9, 6), age=6)
    return s


def c25() -> Snap:
    s = Snap(mem=64 * GB)
    s.d["host"]["mem"].update(available=1 * GB, free=300 * MB, cached=900 * MB)
    s.d["host"]["pressure"]["memory"]["some"]["avg10"] = 22.0
    s.d["host"]["pressure"]["io"]["some"]["avg10"] = 30.0
    s.trainer(["D do_swap_page", STARVED, STARVED], cpu=0.1, wakeups=30, majflt=180, swap=6 * GB)
    s.mount("22", "/data", "ext4", "nvme1n1")
    s.disk("nvme1n1", 9e7, 0.9)
    s.data_file("/data/hs/data_9142.pt", 100 * MB, "22", 0.3, recently_evicted=60 * MB)
    s.counter("vmstat", pswpin=2600, pswpout=3100, workingset_refault_file=9000, pgmajfault=900)
    s.workers(
        8,
        ["D folio_wait_bit_common read 37", "D do_swap_page", "R"],
        cpu=0.2,
        wakeups=300,
        majflt=60,
        swap=400 * MB,
        io={"rchar": 1.1e7, "read_bytes": 1.1e7},
        fds=lambda n: reading(n, speed=1e7),
    )
    s.gpu([0, 8], 70, limit=300)
    s.log(stamped(80, 12, 9), age=9)
    return s


def c26() -> Snap:
    s = Snap(cpus=8)
    s.trainer(STARVED, cpu=0.05, wakeups=4, main={"timeout": True})
    s.workers(
        8,
        ["R", "R", "R"],
        cpu=0.93,
        wakeups=30,
        waits=0.05,
        io={"rchar": 3e6, "read_bytes": 0.0, "syscr": 20},
        fds=lambda n: reading(n, "/home/kim/img/{}.tar", 3e6, 500 * MB, "21"),
    )
    s.gpu([0, 0], 70, limit=300, mem=23 * GB)
    s.log(stamped(90, 4, 3), age=3)
    return s


def c27() -> Snap:
    s = Snap(cpus=40)
    s.trainer(
        ["R", "R", "D folio_wait_bit_common read 11"],
        cpu=0.93,
        io={"rchar": 8e6, "read_bytes": 1e5, "syscr": 300},
        libs="torch numpy cuda",
        fds={
            "11": {"path": "/home/kim/wav/a_2.wav", "pos": [0, 9 * MB, 12 * MB], "mnt": "21"},
            "12": {"path": "/home/kim/wav/a_9.wav", "pos": 100, "at": (2,)},
        },
    )
    s.gpu([0, 0], 60, limit=300, mem=30 * GB)
    s.log(
        "The 'train_dataloader' does not have many workers which may be a bottleneck. Consider increasing the value of"
        " the `num_workers` argument\nEpoch 0:   4%|▍         | 45/1100 [03:05<1:12:00,  4.1s/it, v_num=0, loss=3.2]\r",
        age=3,
    )
    return s


def c29() -> Snap:
    s = Snap()
    s.trainer(STARVED, cpu=0.0, wakeups=0.3, main={"timeout": True}, extra=[thread(PIN, wakeups=1, timeout=True)])
    s.workers(4, "S wait_woken recvfrom 21", io={"rchar": 0.0, "read_bytes": 0.0})
    for n in range(4):
        s.socket(4301 + n, 21, "10.0.0.9", 8000)
    s.gpu(0, 80, mem=20 * GB)
    s.log(stamped(30, 8, 260), age=260)
    return s


def c29b() -> Snap:
    s = c29()
    for sock in s.d["sockets"]:
        sock.update(state="SYN_SENT", retrans=4)
    for sample in s.d["samples"]:
        for pid in range(4301, 4305):
            t = sample["procs"][str(pid)]["threads"][str(pid)]
            t.update(wchan="inet_stream_connect", syscall={**t["syscall"], "name": "connect"})
    return s


def c74() -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.98)
    s.workers(4, POLLING, wakeups=3)
    s.gpu(
        [98, 99], 180, limit=300, sm=0.45, reasons=["hw_thermal", "sw_thermal"], temp=91, name="NVIDIA GeForce RTX 3080"
    )
    s.log(stamped(50, 9, 5), age=5)
    return s


def c92() -> Snap:
    s = Snap(mem=32 * GB)
    s.d["host"]["mem"].update(available=int(0.4 * GB), free=100 * MB)
    s.d["host"]["pressure"]["memory"]["some"]["avg10"] = 47.0
    s.trainer(["D do_swap_page", "R", "D do_swap_page"], cpu=0.3, wakeups=500, majflt=500, swap=12 * GB, rss=17 * GB)
    s.counter("vmstat", pswpin=5000, pswpout=4800, pgmajfault=900)
    s.workers(
        4, ["D do_swap_page", "S futex_do_wait futex", "D do_swap_page"], cpu=0.05, wakeups=80, majflt=90, swap=1 * GB
    )
    s.gpu([0, 30], 80, limit=300)
    s.log(stamped(50, 20, 30), age=30)
    return s


CASES = [
    ("C20", "a stop every num_workers steps", ["slow.data.disk-cold"], c20),
    ("C21", "HDF5 read at random", ["slow.data.disk-cold", "slow.data.small-files"], c21),
    ("C22", "first epoch slow, later fast", ["slow.data.disk-cold"], c22),
    ("C22b", "data set larger than memory", ["slow.data.disk-cold"], lambda: c22(False)),
    ("C23", "data on NFS", ["slow.data.network"], c23),
    ("C25", "page cache squeezed out", ["slow.memory"], c25),
    ("C26", "decode-bound workers", ["slow.data.decode", "slow.data.few-workers"], c26),
    ("C27", "no workers", ["slow.data.few-workers"], c27),
    ("C29", "workers wait for a service that does not answer", ["slow.data.remote-service"], c29),
    ("C29b", "workers cannot connect to the service", ["slow.data.remote-service"], c29b),
    ("C74", "thermal throttling", ["slow.gpu.throttled"], c74),
    ("C92", "memory grows into swap", ["slow.memory"], c92),
]
