"""Parts that many cases share: logs with a pace, cold readers, compilers, ranks, a main thread that waits."""

from __future__ import annotations

from typing import Any

from snapshots import GB, Snap, thread

MB = 10**6


STARVED = "S futex_do_wait futex"  # the main thread waits on the pin-memory thread's queue with a 5 s time-out


POLLING = "S poll_schedule_timeout poll"


PREAMBLE = "\n".join(f"[11:51:{i % 60:02d}] INFO     preparing item {i}" for i in range(49)) + "\n"


FOREVER = {"timeout": False}


LOCKED = "S futex_do_wait futex"


NCCL = [
    thread("S poll_schedule_timeout poll", "pt_nccl_watchdg", wakeups=10),
    thread("S futex_do_wait futex", "pt_nccl_heartbt", wakeups=1),
]


def lines(
    n: int, step: int = 10, first: int = 1, form: str = "step: {s}  loss: {l:.3f}  grad_norm: 1.2  tps: 6,234"
) -> str:
    return "".join(
        form.format(s=s, l=8.0 / (1 + 0.01 * s)) + "\n" for s in range(first * step, (first + n) * step, step)
    )


def stamped(n: int, every: float, end: float, step: int = 10, start_step: int = 10) -> str:
    """Lines with a clock, the last of them at `end` seconds before now (now is 14:07:28 UTC of the snapshot's day)."""
    import datetime

    out = []
    for i in range(n):
        at = datetime.datetime.fromtimestamp(1764425248.0 - end - every * (n - 1 - i), datetime.UTC)
        out.append(
            f"{at:%Y-%m-%d %H:%M:%S} INFO step {start_step + i * step}/45000 loss {3 - i * 0.001:.4f} lr 5e-05\n"
        )
    return "".join(out)


def reading(
    n: int, path: str = "/data/hs/data_{}.pt", speed: float = 5e7, size: int = 100 * MB, mnt: str = "22"
) -> dict[str, Any]:
    at = 10 * MB + n * MB
    return {
        "37": {
            "path": path.format(9142 + n),
            "pos": [at, int(at + speed), int(at + 3 * speed) % size],
            "mnt": mnt,
            "size": size,
        }
    }


def cold(
    s: Snap, count: int = 4, rate: float = 5.3e7, cached: float = 0.1, device: str = "nvme1n1", fstype: str = "ext4"
) -> None:
    """Loader workers that read files from a disk that is too slow, and a main thread that waits."""
    s.mount("22", "/data", fstype, device)
    s.disk(device, rate * count, 0.97)
    s.d["host"]["pressure"]["io"]["some"]["avg10"] = 34.0

    def looks(n: int) -> list[str]:
        d = "D folio_wait_bit_common read 37"
        return [d, "R", d] if n % 2 else ["R", d, d]

    for n in range(count):
        s.data_file(f"/data/hs/data_{9142 + n}.pt", 100 * MB, "22", cached)
    s.workers(
        count,
        looks,
        cpu=0.15,
        wakeups=400,
        io={"rchar": rate, "read_bytes": rate * 0.99, "syscr": 60},
        fds=lambda n: reading(n, speed=rate),
    )


def compiling(s: Snap, name: str = "ptxas", state: str = "R", cpu: float = 0.9) -> None:
    look = "D folio_wait_bit_common read" if state == "D" else "R"
    s.proc(
        5001,
        "compiler",
        [thread(look, name, cpu=cpu)],
        comm=name,
        ppid=4242,
        cmd=f"/usr/local/cuda/bin/{name} -o x.cubin",
        age=20,
    )


def idle_gpu(s: Snap, mem: int = 20 * GB, power: float = 80) -> None:
    s.gpu([0, 0], power, limit=300, mem=mem)


def waiting_main(s: Snap, looks: str = "S anon_pipe_read read 8", **more: object) -> None:
    s.trainer(
        looks,
        cpu=0.0,
        wakeups=0.0,
        main={"timeout": False, "paths": {8: ("pipe:[9001]", "pipe")}},
        fds={"8": {"path": "pipe:[9001]", "kind": "pipe", "inode": 9001}},
        **more,
    )


def ranks(
    s: Snap,
    n: int,
    looks: object = "R",
    cpu: float = 1.0,
    util: float = 100,
    power: float = 210,
    limit: float = 700,
    env: dict[str, str] | None = None,
    name: str = "NVIDIA H100 80GB HBM3",
    world: int | None = None,
    mem: int = 60 * GB,
    skip: tuple[int, ...] = (),
    cuda: bool = True,
    **more: object,
) -> None:
    """`n` ranks of one job on this host. `looks`, `cpu`, `util` and `power` may be functions of the rank."""
    pick = lambda v, r: v(r) if callable(v) else v  # noqa: E731
    s.d["job"].update(world_size=world or n, launcher=4000, launcher_nproc=n)
    s.proc(
        4000,
        "launcher",
        [thread("S hrtimer_nanosleep clock_nanosleep", wakeups=10)],
        cmd="torchrun --nproc-per-node train.py",
    )
    for r in range(n):
        if r in skip:
            continue
        pid = 4242 + r
        s.trainer(
            pick(looks, r),
            cpu=pick(cpu, r),
            pid=pid,
            kind="rank",
            rank=r,
            ppid=4000,
            extra=[dict(t) for t in NCCL] if cuda else [],
            cuda=cuda,
            main={"timeout": False},
            env={"RANK": str(r), "WORLD_SIZE": str(world or n), "LOCAL_WORLD_SIZE": str(n), **(env or {})},
            **more,
        )
        if cuda:
            s.gpu(pick(util, r), pick(power, r), limit=limit, index=r, pids=[pid], name=name, mem=mem, pcie=2000)
