"""Snapshots of the public cases: quiet, compiling, slow data (C00-C29, C74, C92 of why-cases.md)."""

from __future__ import annotations

from typing import Any

from snapshots import GB, IDLE_POOL, PIN, Snap, thread

MB = 10**6
STARVED = "S futex_do_wait futex"  # the main thread waits on the pin-memory thread's queue with a 5 s time-out
POLLING = "S poll_schedule_timeout poll"
PREAMBLE = "\n".join(f"[11:51:{i % 60:02d}] INFO     preparing item {i}" for i in range(49)) + "\n"


def lines(n: int, step: int = 10, first: int = 1, form: str = "step: {s}  loss: {l:.3f}  grad_norm: 1.2  tps: 6,234") -> str:
    return "".join(form.format(s=s, l=8.0 / (1 + 0.01 * s)) + "\n" for s in range(first * step, (first + n) * step, step))


def stamped(n: int, every: float, end: float, step: int = 10, start_step: int = 10) -> str:
    """Lines with a clock, the last of them at `end` seconds before now (now is 14:07:28 UTC of the snapshot's day)."""
    import datetime

    out = []
    for i in range(n):
        at = datetime.datetime.fromtimestamp(1764425248.0 - end - every * (n - 1 - i), datetime.UTC)
        out.append(f"{at:%Y-%m-%d %H:%M:%S} INFO step {start_step + i * step}/45000 loss {3 - i * 0.001:.4f} lr 5e-05\n")
    return "".join(out)


def reading(n: int, path: str = "/data/hs/data_{}.pt", speed: float = 5e7, size: int = 100 * MB, mnt: str = "22") -> dict[str, Any]:
    at = 10 * MB + n * MB
    return {"37": {"path": path.format(9142 + n), "pos": [at, int(at + speed), int(at + 3 * speed) % size], "mnt": mnt, "size": size}}


def cold(s: Snap, count: int = 4, rate: float = 5.3e7, cached: float = 0.1, device: str = "nvme1n1", fstype: str = "ext4") -> None:
    """Loader workers that read files from a disk that is too slow, and a main thread that waits."""
    s.mount("22", "/data", fstype, device)
    s.disk(device, rate * count, 0.97)
    s.d["host"]["pressure"]["io"]["some"]["avg10"] = 34.0

    def looks(n: int) -> list[str]:
        d = "D folio_wait_bit_common read 37"
        return [d, "R", d] if n % 2 else ["R", d, d]

    for n in range(count):
        s.data_file(f"/data/hs/data_{9142 + n}.pt", 100 * MB, "22", cached)
    s.workers(count, looks, cpu=0.15, wakeups=400, io={"rchar": rate, "read_bytes": rate * 0.99, "syscr": 60}, fds=lambda n: reading(n, speed=rate))


def c00() -> Snap:
    s = Snap()
    s.trainer([STARVED, STARVED, STARVED], cpu=0.01, wakeups=0.4, main={"timeout": True}, extra=[thread(PIN, "python", wakeups=2, timeout=True)], libs="torch numpy cuda rich")
    cold(s)
    s.d["datasets"] = [{"dir": "/data/hs", "ext": ".pt", "files": 9240, "bytes": 924 * GB, "exact": True, "mnt": "22", "seen": ["data_9142.pt"], "cached": 0.02}]
    s.gpu(0, 95, mem=int(17.6 * GB))
    s.log(PREAMBLE, age=490)
    return s


def c01() -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.95, libs="torch numpy cuda rich", io={"rchar": 2e6, "syscr": 40})
    s.workers(4, POLLING, wakeups=3)
    s.gpu([88, 92], 540)
    s.log("GPU available: True (cuda), used: True\nLOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0]\n", age=2400)
    return s


def c02() -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.97, unbuffered=False, io={"rchar": 3e6})
    s.workers(4, POLLING, wakeups=4)
    s.gpu([95, 97], 560)
    body = "".join(f"epoch 0 batch {i} loss {2.3 - i * 0.001:.4f}\n" for i in range(900))
    s.log(body[: body.rfind("\n", 0, 16384) + 1], age=1500)
    return s


def c02b() -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.99, unbuffered=False, age=1800, cuda=False)
    s.log("", age=1800)
    return s


def c03() -> Snap:
    s = Snap()
    s.trainer("R", cpu=0.9)
    s.gpu([80, 91], 480)
    s.log("Loading config\nLogging to ./runs/exp1\n", age=5400)
    s.output("/home/kim/run/runs/exp1/events.out.tfevents.1764.gpu7", 300_000, growth=2048, kind="tfevents", age=1)
    s.output("/home/kim/run/ckpt/last.pt", 2 * GB, kind="checkpoint", age=900)
    return s


def c04() -> Snap:
    s = Snap()
    s.trainer("R", cpu=1.0, cuda=False, extra=[thread("R", "python", cpu=0.9) for _ in range(6)])
    s.log("Start training\n", age=400)
    return s


def c06() -> Snap:
    s = Snap()
    s.trainer("S poll_schedule_timeout poll 40", cpu=0.3, wakeups=300, main={"paths": {40: ("/dev/nvidia0", "nvidia")}})
    s.workers(2, POLLING, wakeups=1)
    s.gpu([99, 99], 650)
    s.log("***** Running training *****\n  Num examples = 100,000\n  Total optimization steps = 9,000\n  Number of trainable parameters = 8,000,000,000\n", age=4800)
    return s


def compiling(s: Snap, name: str = "ptxas", state: str = "R", cpu: float = 0.9) -> None:
    look = "D folio_wait_bit_common read" if state == "D" else "R"
    s.proc(5001, "compiler", [thread(look, name, cpu=cpu)], comm=name, ppid=4242, cmd=f"/usr/local/cuda/bin/{name} -o x.cubin", age=20)


def c10() -> Snap:
    s = Snap()
    s.trainer(["S do_wait wait4", "R", "S do_wait wait4"], cpu=0.4, libs="torch numpy cuda triton", main={"pid": 5001})
    compiling(s, state="D", cpu=0.2)
    s.proc(5002, "compile_worker", [thread("S poll_schedule_timeout poll")], comm="python", ppid=4242, cmd="python torch/_inductor/compile_worker/__main__.py")
    s.gpu(0, 110, mem=20 * GB)
    s.cache("inductor", growth=3)
    s.log("Epoch 0:   0%|          | 262/44775 [1:03:10<178:00:00, 14.4s/it]\r", age=15)
    return s


def c12() -> Snap:
    s = Snap()
    s.trainer("S poll_schedule_timeout poll 60", cpu=0.02, wakeups=2, libs="torch numpy cuda triton")
    for n in range(4):
        s.proc(5002 + n, "compile_worker", [thread("R", cpu=0.97)], comm="python", ppid=4242, cmd="python torch/_inductor/compile_worker/__main__.py")
    s.gpu(0, 100, mem=40 * GB)
    s.cache("inductor", growth=1)
    s.log(stamped(72, 5, 420), age=420)
    return s


def c13() -> Snap:
    s = Snap(mem=512 * GB)
    s.trainer("R", cpu=1.0, libs="torch numpy triton", cuda=False, rss=60 * GB, rss_slope=2e6, minflt=600)
    s.cache("inductor", age=600)
    s.stack(4242, "_eval_power sympy/core/power.py:800", "simplify torch/_inductor/sizevars.py:90", "codegen torch/_inductor/graph.py:1900")
    s.log("compiling model\n", age=1800)
    return s


def c13b() -> Snap:
    s = Snap(mem=64 * GB)
    s.d["host"]["mem"]["available"] = 5 * GB
    s.trainer("R", cpu=1.0, libs="torch numpy triton", cuda=False, rss=55 * GB, rss_slope=4e7, minflt=10_000)
    s.log("compiling model\n", age=2400)
    return s


def c14() -> Snap:
    s = Snap()
    s.trainer("R", cpu=1.0, libs="torch numpy cuda triton")
    s.stack(4242, "make_llir triton/backends/nvidia/compiler.py:400", "compile triton/compiler/compiler.py:280", "create_block_mask torch/nn/attention/flex_attention.py:900")
    s.gpu(0, 100, mem=18 * GB)
    s.log(PREAMBLE, age=300)
    return s


def c16() -> Snap:
    s = Snap()
    s.trainer("R", cpu=1.0, libs="torch numpy cuda ptxjit", age=200)
    s.gpu(0, 60, mem=300 * MB)
    s.cache("cuda", growth=1, age=1)
    s.log("building the model\n", age=150)
    return s


def c18() -> Snap:
    s = Snap()
    s.trainer("S hrtimer_nanosleep clock_nanosleep", cpu=0.002, wakeups=10, libs="torch numpy cuda triton")
    s.cache("torch_extensions", age=86_000, locks=["fused_adam/lock"])
    s.d["lockfiles"] = [{"path": "/home/kim/.cache/torch_extensions/fused_adam/lock", "pid": 4242, "age_s": 86_000, "open": False}]
    s.stack(4242, "wait torch/utils/file_baton.py:46", "_jit_compile torch/utils/cpp_extension.py:1700")
    s.gpu(0, 90, mem=1 * GB)
    s.log("Using /home/kim/.cache/torch_extensions as PyTorch extensions root...\n", age=1200)
    return s


def c20() -> Snap:
    s = Snap()
    s.trainer(STARVED, cpu=0.02, wakeups=0.3, main={"timeout": True})
    cold(s, count=8, rate=1.2e7, cached=0.05, device="sda")
    s.gpu([0, 0], 70, limit=300)
    text = "".join(f"Train Epoch: 0 [{i * 256}/788603 (0%)] Data (t): {12.5 if i % 8 == 0 else 0.02:.3f} Batch (t): {13.0 if i % 8 == 0 else 0.52:.3f} LR: 0.0001 Loss: 4.2\n" for i in range(1, 65))
    s.log(text, age=9)
    return s


def c21() -> Snap:
    s = Snap()
    s.trainer(STARVED, cpu=0.05, wakeups=0.3, main={"timeout": True}, libs="torch numpy cuda h5py")
    s.mount("22", "/data", "ext4", "sdb")
    s.disk("sdb", 6e6, 0.99, await_ms=14)
    s.data_file("/data/feat.h5", 400 * GB, "22", 0.03)
    s.d["host"]["pressure"]["io"]["some"]["avg10"] = 41.0
    s.workers(4, ["D folio_wait_bit_common pread64 9", "D folio_wait_bit_common pread64 9", "R"], cpu=0.1, wakeups=150,
              io={"rchar": 1.6e6, "read_bytes": 1.5e6, "syscr": 110}, fds={"9": {"path": "/data/feat.h5", "pos": 0, "mnt": "22"}})  # fmt: skip
    s.gpu(0, 60, limit=300)
    s.log(stamped(40, 6, 7), age=7)
    return s


def c22(will_warm: bool = True) -> Snap:
    s = Snap(mem=(256 if will_warm else 64) * GB)
    s.trainer(STARVED, cpu=0.01, wakeups=0.3, main={"timeout": True})
    cold(s, count=6, rate=3e7, cached=0.2)
    s.d["datasets"] = [{"dir": "/data/hs", "ext": ".jpg", "files": 1_281_167, "bytes": 145 * GB, "exact": False, "mnt": "22", "seen": [], "cached": 0.2}]
    s.gpu([3, 0], 80, limit=300)
    s.log("Epoch: [0][ 120/5005]\tTime 1.40 ( 1.51)\tData 1.20 ( 1.30)\tLoss 6.8\n" * 3, age=8)
    return s


def c23() -> Snap:
    s = Snap()
    s.trainer(STARVED, cpu=0.01, wakeups=0.3, main={"timeout": True})
    s.mount("30", "/mnt/imagenet", "nfs4", source="nas1:/imagenet")
    looks = ["D rpc_wait_bit_killable read 12", "D folio_wait_bit_common read 12", "R"]
    s.workers(8, looks, cpu=0.08, wakeups=200, io={"rchar": 4e6, "read_bytes": 4e6, "syscr": 50},
              fds=lambda n: reading(n, "/mnt/imagenet/train/n0{}.tar", 4e6, 900 * MB, "30"))  # fmt: skip
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
    s.workers(8, ["D folio_wait_bit_common read 37", "D do_swap_page", "R"], cpu=0.2, wakeups=300, majflt=60, swap=400 * MB,
              io={"rchar": 1.1e7, "read_bytes": 1.1e7}, fds=lambda n: reading(n, speed=1e7))  # fmt: skip
    s.gpu([0, 8], 70, limit=300)
    s.log(stamped(80, 12, 9), age=9)
    return s


def c26() -> Snap:
    s = Snap(cpus=8)
    s.trainer(STARVED, cpu=0.05, wakeups=4, main={"timeout": True})
    s.workers(8, ["R", "R", "R"], cpu=0.93, wakeups=30, waits=0.05, io={"rchar": 3e6, "read_bytes": 0.0, "syscr": 20}, fds=lambda n: reading(n, "/home/kim/img/{}.tar", 3e6, 500 * MB, "21"))
    s.gpu([0, 0], 70, limit=300, mem=23 * GB)
    s.log(stamped(90, 4, 3), age=3)
    return s


def c27() -> Snap:
    s = Snap(cpus=40)
    s.trainer(["R", "R", "D folio_wait_bit_common read 11"], cpu=0.93, io={"rchar": 8e6, "read_bytes": 1e5, "syscr": 300}, libs="torch numpy cuda",
              fds={"11": {"path": "/home/kim/wav/a_2.wav", "pos": [0, 9 * MB, 12 * MB], "mnt": "21"}, "12": {"path": "/home/kim/wav/a_9.wav", "pos": 100, "at": (2,)}})  # fmt: skip
    s.gpu([0, 0], 60, limit=300, mem=30 * GB)
    s.log("The 'train_dataloader' does not have many workers which may be a bottleneck. Consider increasing the value of the `num_workers` argument\n"
          "Epoch 0:   4%|▍         | 45/1100 [03:05<1:12:00,  4.1s/it, v_num=0, loss=3.2]\r", age=3)  # fmt: skip
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
    s.gpu([98, 99], 180, limit=300, sm=0.45, reasons=["hw_thermal", "sw_thermal"], temp=91, name="NVIDIA GeForce RTX 3080")
    s.log(stamped(50, 9, 5), age=5)
    return s


def c92() -> Snap:
    s = Snap(mem=32 * GB)
    s.d["host"]["mem"].update(available=int(0.4 * GB), free=100 * MB)
    s.d["host"]["pressure"]["memory"]["some"]["avg10"] = 47.0
    s.trainer(["D do_swap_page", "R", "D do_swap_page"], cpu=0.3, wakeups=500, majflt=500, swap=12 * GB, rss=17 * GB)
    s.counter("vmstat", pswpin=5000, pswpout=4800, pgmajfault=900)
    s.workers(4, ["D do_swap_page", "S futex_do_wait futex", "D do_swap_page"], cpu=0.05, wakeups=80, majflt=90, swap=1 * GB)
    s.gpu([0, 30], 80, limit=300)
    s.log(stamped(50, 20, 30), age=30)
    return s


_ = IDLE_POOL
CASES = [
    ("C00", "cold first epoch of an EAGLE-3 drafter", ["slow.data.disk-cold"], c00),
    ("C01", "rich progress bar on a file", ["quiet.elsewhere"], c01),
    ("C02", "standard output in blocks", ["quiet.buffered"], c02),
    ("C02b", "nothing printed at all yet, buffered", ["quiet.buffered"], c02b),
    ("C03", "progress goes to TensorBoard", ["quiet.elsewhere"], c03),
    ("C04", "nothing is printed during the train call", ["quiet.interval"], c04),
    ("C06", "HF Trainer logs every 500 steps", ["quiet.interval"], c06),
    ("C10", "recompilation, ptxas in state D", ["quiet.compiling"], c10),
    ("C12", "inductor in the middle of a run", ["quiet.compiling"], c12),
    ("C13", "compile that does not end", ["quiet.compiling"], c13),
    ("C13b", "compile that eats all memory", ["stuck.livelock"], c13b),
    ("C14", "block mask compilation", ["quiet.compiling"], c14),
    ("C16", "PTX JIT at the first use of the GPU", ["quiet.compiling"], c16),
    ("C18", "left-over lock in the extension cache", ["quiet.compiling", "stuck.lock-file"], c18),
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
