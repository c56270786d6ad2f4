"""Public cases C01-C18 of why-cases.md and the founding case C00: quiet, and compiling."""

from __future__ import annotations

from snapshot_parts import MB, POLLING, PREAMBLE, STARVED, cold, compiling, stamped
from snapshots import GB, PIN, Snap, thread


def c00() -> Snap:
    s = Snap()
    s.trainer(
        [STARVED, STARVED, STARVED],
        cpu=0.01,
        wakeups=0.4,
        main={"timeout": True},
        extra=[thread(PIN, "python", wakeups=2, timeout=True)],
        libs="torch numpy cuda rich",
    )
    cold(s)
    s.d["datasets"] = [
        {
            "dir": "/data/hs",
            "ext": ".pt",
            "files": 9240,
            "bytes": 924 * GB,
            "exact": True,
            "mnt": "22",
            "seen": ["data_9142.pt"],
            "cached": 0.02,
        }
    ]
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
    s.log(
        "***** Running training *****\n  Num examples = 100,000\n  Total optimization steps = 9,000\n  Number of"
        " trainable parameters = 8,000,000,000\n",
        age=4800,
    )
    return s


def c10() -> Snap:
    s = Snap()
    s.trainer(["S do_wait wait4", "R", "S do_wait wait4"], cpu=0.4, libs="torch numpy cuda triton", main={"pid": 5001})
    compiling(s, state="D", cpu=0.2)
    s.proc(
        5002,
        "compile_worker",
        [thread("S poll_schedule_timeout poll")],
        comm="python",
        ppid=4242,
        cmd="python torch/_inductor/compile_worker/__main__.py",
    )
    s.gpu(0, 110, mem=20 * GB)
    s.cache("inductor", growth=3)
    s.log("Epoch 0:   0%|          | 262/44775 [1:03:10<178:00:00, 14.4s/it]\r", age=15)
    return s


def c12() -> Snap:
    s = Snap()
    s.trainer("S poll_schedule_timeout poll 60", cpu=0.02, wakeups=2, libs="torch numpy cuda triton")
    for n in range(4):
        s.proc(
            5002 + n,
            "compile_worker",
            [thread("R", cpu=0.97)],
            comm="python",
            ppid=4242,
            cmd="python torch/_inductor/compile_worker/__main__.py",
        )
    s.gpu(0, 100, mem=40 * GB)
    s.cache("inductor", growth=1)
    s.log(stamped(72, 5, 420), age=420)
    return s


def c13() -> Snap:
    s = Snap(mem=512 * GB)
    s.trainer("R", cpu=1.0, libs="torch numpy triton", cuda=False, rss=60 * GB, rss_slope=2e6, minflt=600)
    s.cache("inductor", age=600)
    s.stack(
        4242,
        "_eval_power sympy/core/power.py:800",
        "simplify torch/_inductor/sizevars.py:90",
        "codegen torch/_inductor/graph.py:1900",
    )
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
    s.stack(
        4242,
        "make_llir triton/backends/nvidia/compiler.py:400",
        "compile triton/compiler/compiler.py:280",
        "create_block_mask torch/nn/attention/flex_attention.py:900",
    )
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
    s.d["lockfiles"] = [
        {"path": "/home/kim/.cache/torch_extensions/fused_adam/lock", "pid": 4242, "age_s": 86_000, "open": False}
    ]
    s.stack(4242, "wait torch/utils/file_baton.py:46", "_jit_compile torch/utils/cpp_extension.py:1700")
    s.gpu(0, 90, mem=1 * GB)
    s.log("Using /home/kim/.cache/torch_extensions as PyTorch extensions root...\n", age=1200)
    return s


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
]
