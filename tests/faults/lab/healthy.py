"""Healthy runs of many kinds. Not one of them may be called stuck or failed, however quiet it is."""

from __future__ import annotations

from collections.abc import Callable

from lab.kit import Ask, Lab
from lab.scenes import SILENT, Scene, torchrun

HEALTHY: list[Scene] = []


def add(name: str, start: Callable[[Lab], Ask], alone: bool = False) -> None:
    HEALTHY.append(Scene(f"ok_{name}", "", start, alone=alone))


def loop(
    name: str,
    options: str,
    says: str = "Total optimization steps",
    settle: float = SILENT,
    via: tuple[str, ...] = (),
    buffered: bool = False,
    gpu: bool = False,
    alone: bool = False,
) -> None:
    """A run of programs/loop.py, asked `settle` seconds after its log has `says`."""

    def start(lab: Lab) -> Ask:
        child = lab.run("loop", *options.split(), via=via, unbuffered=not buffered)
        if buffered:
            import time

            time.sleep(settle + 1)
        else:
            lab.says(says, settle=settle)
        return Ask(str(child.pid), env=lab.smi(child.pid, utilization__gpu=97, power__draw=602.0) if gpu else {})

    add(name, start, alone)


# ---- every log style, at a pace of its own; some silent for longer than usual
for style in (
    "plain",
    "hf",
    "torchtitan",
    "megatron",
    "nanogpt",
    "keras",
    "json",
    "deepspeed",
    "openclip",
    "mm",
    "logging",
    "tqdm",
    "rich",
    "dots",
):
    loop(f"style_{style}", f"--style {style} --step 0.4 --work duty", settle=6)
loop("long_steps_hf", "--style hf --step 9 --first 2 --work duty")
loop("long_steps_plain_asleep", "--step 15 --first 3 --work sleep", settle=14)
loop("long_steps_megatron", "--style megatron --step 12 --first 1 --work duty", settle=18)
loop("long_steps_tqdm", "--style tqdm --step 13 --first 2", settle=16)
loop("long_steps_gpu", "--step 40 --first 5 --work sleep", settle=20, gpu=True)
loop("slow_log_50", "--every 50 --step 0.4 --work duty", settle=15)
loop("slow_log_500_hf", "--style hf --every 500 --step 0.2 --work duty", settle=15)
loop("slow_log_gpu", "--every 100 --step 0.6 --work sleep", settle=15, gpu=True)
loop("slow_log_asleep", "--every 200 --step 1.0 --work sleep", settle=15)
loop("accumulation_32", "--accum 32 --step 0.5 --work duty --style hf", settle=20)
loop("accumulation_8_logging", "--accum 8 --step 1.5 --work duty --style logging", settle=15)
loop("mute", "--mute --work duty", settle=15)
loop("mute_asleep", "--mute --work sleep --step 2", settle=15)
loop("buffered", "--work duty --step 0.5", settle=15, buffered=True)
loop("buffered_asleep", "--work sleep --step 1", settle=15, buffered=True)
loop("buffered_gpu", "--work sleep --step 1", settle=15, buffered=True, gpu=True)
loop("no_style_tracker", "--style none --work duty --tracker metrics.jsonl", settle=12)
# ---- plain loops that compute, with and without company
loop("cpu_bound", "--work cpu --step 0.5", settle=4)
loop("cpu_bound_slow_log", "--work cpu --step 0.5 --every 60", settle=12)
loop("torch_bound", "--work torch --step 0.5 --style nanogpt", settle=4)
loop("niced", "--work cpu --step 0.5 --every 30", via=("nice", "-n", "15"), settle=12)
loop("idle_class", "--work duty --step 0.5 --every 40", via=("chrt", "-i", "0"), settle=12)
loop("one_cpu", "--work duty --step 0.5 --every 40", via=("taskset", "-c", "0"), settle=12)
loop("jax_like", "--work async --step 3 --first 2 --style json", settle=12)
loop("jax_like_long", "--work async --step 30 --first 3", settle=14)
# ---- loaders
loop("workers_fork", "--workers 3 --work duty --step 0.3", settle=6)
loop("workers_spawn", "--workers 2 --method spawn --work duty --step 0.3", settle=8)
loop("workers_forkserver", "--workers 2 --method forkserver --work duty --step 0.3", settle=8)
loop("workers_idle_long_step", "--workers 3 --work duty --step 20 --first 5", settle=14)
loop("workers_idle_asleep", "--workers 3 --work sleep --step 25 --first 5", settle=14)
loop("workers_slow_items", "--workers 2 --item 4 --work duty --step 0.1", settle=12)
loop("workers_gpu", "--workers 3 --work sleep --step 0.5 --every 100", settle=12, gpu=True)
# ---- phases
loop("evaluating_gpu", "--style hf --step 0.2 --eval-at 10", "Running Evaluation", settle=12, gpu=True)
loop("evaluating_plain", "--step 0.2 --eval-at 8", "Running Evaluation", settle=14)
loop("saving", "--step 0.2 --save-at 8 --style nanogpt", "Saving model", settle=5)
loop("slower_later", "--work duty --step 0.3 --slow-at 12 --slow 8", "step 12 ", settle=6)


def _loader(name: str, kind: str, workers: int, batch: int, settle: float) -> None:
    def start(lab: Lab) -> Ask:
        (lab.dir / "data").mkdir()
        for i in range(50):
            (lab.dir / "data" / f"{i:04d}.bin").write_bytes(b"x" * 200000)
        child = lab.run("loader", kind, lab.dir / "data", workers, batch)
        lab.says("epoch 1 begins", settle=settle)
        return Ask(str(child.pid))

    add(name, start)


_loader("torch_loader_cached", "files", 2, 8, 5)
_loader("torch_loader_no_workers", "files", 0, 8, 5)


def _torchrun(lab: Lab) -> Ask:
    child = torchrun(lab, "even", 2)
    lab.says("step 5/", settle=1)
    return Ask(str(child.pid))


def _trainer(mode: str, every: int) -> Callable[[Lab], Ask]:
    def start(lab: Lab) -> Ask:
        child = lab.run("trainer", every, mode)
        log = lab.dir / "train.log"
        lab.until(lambda: log.stat().st_size > 0 or mode == "quiet", 120)
        import time

        time.sleep(25)
        return Ask(str(child.pid))

    return start


def _compile(lab: Lab) -> Ask:
    child = lab.run("compile", env={"TORCHINDUCTOR_CACHE_DIR": str(lab.dir / "cache"), "TMPDIR": str(lab.dir)})
    lab.says("model built", settle=4)
    return Ask(str(child.pid))


def _initialise(lab: Lab) -> Ask:
    weights = lab.dir / "model.safetensors"
    weights.write_bytes(b"x" * (16 << 20))
    child = lab.run("initialise", weights)
    lab.says("Loading", settle=3)
    return Ask(str(child.pid))


def _many(lab: Lab) -> Ask:
    child = lab.run("many", 60, 300)
    lab.says("step 5 ", settle=1)
    return Ask(str(child.pid))


def _starting(lab: Lab) -> Ask:
    """Asked while it still imports torch."""
    child = lab.run("trainer", 10, "bar")
    return Ask(str(child.pid))


add("torchrun_2", _torchrun)
add("hf_trainer_bar", _trainer("bar", 500), alone=True)
add("hf_trainer_quiet", _trainer("quiet", 500), alone=True)
add("compile_early", _compile, alone=True)
add("initialising", _initialise)
add("threads_60", _many)
add("starting", _starting)
