"""One real process tree for every class that can be made on a plain machine. Each scenario returns the question to ask.

`also` names verdicts that are just as right for that state. `alone`: needs the CPUs for itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.kit import Ask, Lab, Server, children_of, state_of

SILENT = 11.0  # longer than a reader would call fresh


@dataclass(frozen=True)
class Scene:
    name: str
    expect: str
    start: Callable[[Lab], Ask]
    also: tuple[str, ...] = ()
    alone: bool = False
    quick: bool = False


SCENES: list[Scene] = []


def scene(
    expect: str, *also: str, alone: bool = False, quick: bool = False
) -> Callable[[Callable[[Lab], Ask]], Callable[[Lab], Ask]]:
    def add(start: Callable[[Lab], Ask]) -> Callable[[Lab], Ask]:
        SCENES.append(Scene(start.__name__, expect, start, also, alone, quick))
        return start

    return add


def torchrun(lab: Lab, mode: str, ranks: int, log: str = "train.log") -> subprocess.Popen[bytes]:
    via = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return lab.run("ranks", mode, via=via, log=log)


# ---------------------------------------------------------------------------------------------------------------- ended


@scene("finished.ok", quick=True)
def finished(lab: Lab) -> Ask:
    child = lab.run("ended", "well")
    child.wait(200)
    return Ask(str(lab.dir / "train.log"))


@scene("finished.ok")
def finished_zombie(lab: Lab) -> Ask:
    child = lab.run("ended", "well")
    lab.over(child)
    return Ask(str(child.pid))


@scene("finished.lingering")
def lingering(lab: Lab) -> Ask:
    child = lab.run("ended", "linger", Server(lab).port)
    lab.says("Waiting for W&B", settle=SILENT)
    return Ask(str(child.pid))


@scene("failed.exception", quick=True)
def exception(lab: Lab) -> Ask:
    lab.run("ended", "exception").wait(200)
    return Ask(str(lab.dir / "train.log"))


@scene("failed.gpu-oom")
def gpu_oom(lab: Lab) -> Ask:
    lab.run("ended", "gpu-oom").wait(200)
    return Ask(str(lab.dir / "train.log"))


@scene("failed.gpu-error")
def gpu_error(lab: Lab) -> Ask:
    lab.run("ended", "gpu-error").wait(200)
    return Ask(str(lab.dir / "train.log"))


@scene("failed.oom-killed")
def oom_killed(lab: Lab) -> Ask:
    child = lab.run("ended", "eat", cgroups=[lab.cgroup("memory", memory__limit_in_bytes=64 << 20)])
    lab.over(child)
    return Ask(str(child.pid))


@scene("failed.signal")
def terminated(lab: Lab) -> Ask:
    child = lab.run("ended", "wait")
    lab.says("'epoch': '0.42'")
    child.terminate()
    lab.over(child)
    return Ask(str(child.pid))


@scene("failed.preempted")
def time_limit(lab: Lab) -> Ask:
    lab.run("ended", "time-limit").wait(200)
    return Ask(str(lab.dir / "train.log"))


@scene("failed.native-crash")
def native_crash(lab: Lab) -> Ask:
    child = lab.run("ended", "crash")
    lab.over(child)
    return Ask(str(child.pid))


@scene("failed.exception", "failed.rank-dead")
def rank_raises(lab: Lab) -> Ask:
    torchrun(lab, "crash", 2).wait(200)
    return Ask(str(lab.dir / "train.log"))


@scene("failed.rank-dead", "failed.signal")
def rank_killed(lab: Lab) -> Ask:
    torchrun(lab, "kill", 2).wait(200)
    return Ask(str(lab.dir / "train.log"))


@scene("failed.rank-dead")
def rank_missing(lab: Lab) -> Ask:
    """No launcher watches: one rank is gone, the others wait for it."""
    env = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    group = [lab.run("ranks", "leave", append=True, env={**env, "RANK": r, "LOCAL_RANK": r}) for r in "012"]
    lab.says("step 11/1000", settle=SILENT)
    lab.over(group[1])
    return Ask(str(group[0].pid))


# ------------------------------------------------------------------------------------------------------- quiet but fine


@scene("quiet.interval", quick=True)
def interval(lab: Lab) -> Ask:
    child = lab.run("loop", "--style", "plain", "--work", "duty", "--step", "0.3", "--every", "50", "--first", "0")
    lab.says("step 100 ", settle=SILENT)
    return Ask(str(child.pid))


@scene("quiet.buffered", quick=True)
def buffered(lab: Lab) -> Ask:
    child = lab.run("buffered", unbuffered=False)
    log = lab.dir / "train.log"
    lab.until(lambda: log.stat().st_size > 3 * 8000)
    lab.until(lambda: time.time() - log.stat().st_mtime > SILENT + 2)
    return Ask(str(child.pid))


@scene("quiet.elsewhere")
def tracker_only(lab: Lab) -> Ask:
    (lab.dir / "wandb").mkdir()
    child = lab.run("loop", "--work", "duty", "--mute", "--tracker", "metrics.jsonl")
    lab.says("Total optimization steps", settle=SILENT)
    return Ask(str(child.pid))


@scene("quiet.elsewhere")
def log_deleted(lab: Lab) -> Ask:
    child = lab.run("loop", "--work", "duty")
    lab.says("step 10 ")
    (lab.dir / "train.log").unlink()
    time.sleep(SILENT)
    return Ask(str(child.pid))


@scene("quiet.elsewhere")
def rich_bar(lab: Lab) -> Ask:
    child = lab.run("loop", "--work", "duty", "--style", "rich")
    lab.says("Total optimization steps", settle=SILENT)
    return Ask(str(child.pid))


@scene("quiet.evaluating", quick=True)
def evaluating(lab: Lab) -> Ask:
    child = lab.run("loop", "--style", "hf", "--step", "0.2", "--eval-at", "30")
    lab.says("Running Evaluation", settle=SILENT)
    return Ask(str(child.pid))


@scene("quiet.checkpointing")
def checkpointing(lab: Lab) -> Ask:
    child = lab.run("loop", "--style", "hf", "--step", "0.2", "--save-at", "30")
    lab.says("Saving model checkpoint", settle=SILENT)
    return Ask(str(child.pid))


@scene("quiet.compiling", alone=True)
def compiling(lab: Lab) -> Ask:
    child = lab.run("compile", env={"TORCHINDUCTOR_CACHE_DIR": str(lab.dir / "cache"), "TMPDIR": str(lab.dir)})
    lab.says("model built")
    lab.until(lambda: len(list((lab.dir / "cache").rglob("*.so"))) > 1, 400, "its second compiled kernel")
    time.sleep(3)
    return Ask(str(child.pid))


@scene("quiet.initialising")
def initialising(lab: Lab) -> Ask:
    weights = lab.dir / "model-00001-of-00004.safetensors"
    weights.write_bytes(os.urandom(32 << 20))
    child = lab.run("initialise", weights)
    lab.says("Loading checkpoint", settle=SILENT)
    return Ask(str(child.pid))


@scene("quiet.long-step", "quiet.interval", alone=True)
def long_step(lab: Lab) -> Ask:
    child = lab.run("loop", "--work", "cpu", "--step", "2.5", "--first", "0", "--slow-at", "7", "--slow", "600")
    lab.says("step 6 ", settle=SILENT)
    return Ask(str(child.pid))


# ----------------------------------------------------------------------------------------------------------------- slow


def big_files(place: Path, count: int, size: int) -> Path:
    place.mkdir()
    block = os.urandom(1 << 20)
    for i in range(count):
        with (place / f"shard_{i:05d}.bin").open("wb") as f:
            for _ in range(size >> 20):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return place


@scene("slow.data.disk-cold", quick=True)
def disk_cold(lab: Lab) -> Ask:
    data = big_files(lab.dir / "data", 4, 48 << 20)
    child = lab.run("loader", "files", data, 2, 1, cgroups=[lab.throttle(lab.disk(), bytes_per_s=6 << 20)])
    lab.says("epoch 1 begins", settle=SILENT / 2)
    return Ask(str(child.pid), env=lab.smi(child.pid))


@scene("slow.data.network")
def fuse_slow(lab: Lab) -> Ask:
    lab.fuse("mnt", {f"shard_{i}.tar": 1 << 30 for i in range(4)}, read_delay=0.25)
    child = lab.run("loader", "files", lab.dir / "mnt", 3, 1)
    lab.says("epoch 1 begins", settle=SILENT / 2)
    return Ask(str(child.pid))


@scene("slow.data.decode", alone=True)
def decode(lab: Lab) -> Ask:
    child = lab.run("loader", "decode", "-", 3, 16)
    lab.says("epoch 1 begins", settle=SILENT)
    return Ask(str(child.pid), env=lab.smi(child.pid))


@scene("slow.data.few-workers", alone=True)
def one_worker(lab: Lab) -> Ask:
    child = lab.run("loader", "decode", "-", 1, 16)
    lab.says("epoch 1 begins", settle=SILENT)
    return Ask(str(child.pid), env=lab.smi(child.pid))


@scene("slow.data.few-workers", alone=True)
def no_workers(lab: Lab) -> Ask:
    """The training process reads and decodes by itself; the GPU waits for it."""
    child = lab.run("loader", "decode", big_files(lab.dir / "data", 6, 2 << 20), 0, 8)
    lab.says("step 2 ", settle=1)
    return Ask(str(child.pid), env=lab.smi(child.pid, utilization__gpu=3))


@scene("slow.data.small-files")
def small_files(lab: Lab) -> Ask:
    def fill(place: Path) -> None:
        for i in range(6000):
            (place / f"{i:06d}.jpg").write_bytes(b"x" * 5000)

    place, device = lab.image("data", "160M", fill)
    child = lab.run("loader", "files", place, 3, 64, cgroups=[lab.throttle(device, reads_per_s=60)])
    lab.says("epoch 1 begins", settle=SILENT / 2)
    return Ask(str(child.pid), env=lab.smi(child.pid))


@scene("slow.data.remote-service")
def service(lab: Lab) -> Ask:
    child = lab.run("loader", "service", Server(lab).port, 4, 1)
    lab.says("epoch 1 begins", settle=SILENT)
    return Ask(str(child.pid), env=lab.smi(child.pid))


@scene("slow.cpu.quota", quick=True)
def cpu_quota(lab: Lab) -> Ask:
    group = lab.cgroup("cpu", cpu__cfs_quota_us=10000)
    child = lab.run("loop", "--work", "cpu", "--step", "0.4", "--first", "0", cgroups=[group])
    lab.says("step 4 ")
    return Ask(str(child.pid))


@scene("slow.memory")
def thrash(lab: Lab) -> Ask:
    data = big_files(lab.dir / "data", 1, 256 << 20) / "shard_00000.bin"
    child = lab.run("thrash", data, cgroups=[lab.cgroup("memory", memory__limit_in_bytes=48 << 20)])
    lab.says("step 1 ")
    return Ask(str(child.pid))


@scene("slow.straggler", alone=True)
def straggler(lab: Lab) -> Ask:
    """Rank 1 computes for four seconds a step; the others wait for it."""
    child = torchrun(lab, "straggler", 3)
    lab.says("step 5/1000", settle=0.2)
    return Ask(str(child.pid))


@scene("slow.host-python", alone=True)
def host_python(lab: Lab) -> Ask:
    child = lab.run("loop", "--work", "cpu", "--step", "0.5", "--workers", "3", "--item", "0.01")
    lab.says("step 8 ")
    return Ask(str(child.pid), env=lab.smi(child.pid, utilization__gpu=6, power__draw=131.0))


@scene("slow.gpu.throttled")
def gpu_throttled(lab: Lab) -> Ask:
    child = lab.run("loop", "--step", "0.5")
    lab.says("step 8 ")
    hot = {
        "utilization__gpu": 99,
        "power__draw": 310.0,
        "clocks__sm": 690,
        "temperature__gpu": 91,
        "clocks_throttle_reasons__active": "0x0000000000000048",
    }
    return Ask(str(child.pid), env=lab.smi(child.pid, **hot))


# ---------------------------------------------------------------------------------------------------------------- stuck


@scene("stuck.collective", quick=True)
def mismatch(lab: Lab) -> Ask:
    child = torchrun(lab, "mismatch", 3)
    lab.says("step 11/1000", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.rendezvous")
def rendezvous(lab: Lab) -> Ask:
    env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29627"}
    first, _ = (
        lab.run("ranks", "even", append=True, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)
    )
    lab.says("initializing process group", settle=SILENT)
    return Ask(str(first.pid))


@scene("stuck.rendezvous")
def master_silent(lab: Lab) -> Ask:
    env = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(Server(lab).port),
        "RANK": "1",
        "LOCAL_RANK": "0",
    }
    child = lab.run("ranks", "even", env=env)
    lab.says("initializing process group", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.worker-dead", quick=True)
def worker_dead(lab: Lab) -> Ask:
    child = lab.run("queue", "dead", 3)
    lab.says("step 30 ", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.fork-lock", quick=True)
def fork_lock(lab: Lab) -> Ask:
    child = lab.run("loader", "lock", "-", 3, 1)
    lab.says("epoch 1 begins", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.deadlock", quick=True)
def deadlock(lab: Lab) -> Ask:
    child = lab.run("stuck", "deadlock")
    lab.says("step 25/", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.filesystem", quick=True)
def fuse_hung(lab: Lab) -> Ask:
    fs = lab.fuse("mnt", {"data_9142.pt": 1 << 30})
    child = lab.run("stuck", "read", lab.dir / "mnt" / "data_9142.pt")
    lab.says("step 25/", settle=0.5)
    fs.hang()
    time.sleep(SILENT)
    return Ask(str(child.pid))


@scene("stuck.lock-file")
def flock(lab: Lab) -> Ask:
    lock, other = lab.dir / "cache.lock", lab.dir / "other"
    other.mkdir()
    lab.run("stuck", "flock", lock, log="first.log", cwd=other)
    lab.says("step 25/", "other/first.log", settle=0.5)
    child = lab.run("stuck", "flock", lock)
    lab.says("step 25/", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.lock-file")
def lock_polled(lab: Lab) -> Ask:
    lock, other = lab.dir / "data.arrow.lock", lab.dir / "other"
    other.mkdir()
    lab.run("stuck", "filelock", lock, log="first.log", cwd=other)
    lab.says("step 25/", "other/first.log", settle=1.0)
    held = lab.run("stuck", "filelock", lock)
    lab.says("step 25/", settle=SILENT)
    return Ask(str(held.pid))


@scene("stuck.input")
def asks(lab: Lab) -> Ask:
    child = lab.on_terminal("stuck", "input", log="train.log")
    lab.says("step 25/", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.stdout-pipe", quick=True)
def pipe_full(lab: Lab) -> Ask:
    child = lab.run("stuck", "flood", log=None, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lab.until(lambda: "pipe_write" in Path(f"/proc/{child.pid}/wchan").read_text())
    time.sleep(2)
    return Ask(str(child.pid))


@scene("stuck.stopped")
def stopped(lab: Lab) -> Ask:
    child = lab.run("loop", "--step", "0.2")
    lab.says("step 20 ")
    child.send_signal(signal.SIGSTOP)
    time.sleep(SILENT)
    return Ask(str(child.pid))


@scene("stuck.stopped")
def frozen(lab: Lab) -> Ask:
    group = lab.cgroup("freezer")
    child = lab.run("loop", "--step", "0.2", cgroups=[group])
    lab.says("step 20 ")
    (group / "freezer.state").write_text("FROZEN")
    time.sleep(SILENT)
    return Ask(str(child.pid))


@scene("stuck.disk-full")
def disk_full(lab: Lab) -> Ask:
    child = lab.run("stuck", "disk", lab.tmpfs("out", "2m"))
    lab.says("No space left", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.shm-full")
def shm_full(lab: Lab) -> Ask:
    """Docker's default of a small /dev/shm, in a mount namespace of its own."""
    inside = 'mount -t tmpfs -o size=16m shm /dev/shm && exec "$0" "$@"'
    child = lab.run("queue", "shm", 3, via=["unshare", "-m", "--propagation", "private", "sh", "-c", inside])
    lab.says("unable to allocate shared memory", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.orphans")
def orphans(lab: Lab) -> Ask:
    child = lab.run("queue", "live", 3)
    lab.says("step 10 ")
    workers = children_of(child.pid)
    child.kill()
    child.wait()
    time.sleep(2)
    left = [w for w in workers if state_of(w) == "S"]
    return Ask(str(left[0]), env=lab.smi(left[0]))


@scene("stuck.livelock", alone=True)
def livelock(lab: Lab) -> Ask:
    child = lab.run("stuck", "spin")
    lab.says("step 25/", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.download")
def download(lab: Lab) -> Ask:
    child = lab.run("download", Server(lab).port, env={"HF_HOME": str(lab.dir / "hf")})
    lab.says("Downloading model", settle=SILENT)
    return Ask(str(child.pid))


@scene("stuck.gpu-lost")
def gpu_lost(lab: Lab) -> Ask:
    child = lab.run("stuck", "wait")
    lab.says("step 25/", settle=SILENT)
    return Ask(
        str(child.pid),
        env=lab.smi(child.pid, broken="Unable to determine the device handle for GPU0000:0F:00.0: Unknown Error"),
    )
