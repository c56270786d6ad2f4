"""Classes of the taxonomy that no public case shows: how runs end."""

from __future__ import annotations

from snapshot_parts import lines, ranks, stamped
from snapshots import GB, NOW, Snap


def gone(text: str, age: float, code: int | None = None, **ended: object) -> Snap:
    s = Snap()
    s.log(text, age)
    s.ended(exit_code=code, last_output=NOW - age, **ended)
    return s


def trace(error: str) -> str:
    return (
        stamped(50, 2, 100)
        + 'Traceback (most recent call last):\n  File "train.py", line 212, in <module>\n    main()\n  File'
        f' "train.py", line 80, in step\n    loss.backward()\n{error}\n'
    )


def finished() -> Snap:
    s = gone(
        "100%|██████████| 1000/1000 [1:00:00<00:00,  3.6s/it]\n{'train_runtime': '3600.1', 'train_samples_per_second':"
        " '2.2', 'train_loss': '1.2', 'epoch': '3.0'}\n",
        1800,
    )
    s.output("/home/kim/run/out/model.safetensors", GB, age=1795)
    return s


def finished_plain() -> Snap:
    return gone(lines(50, 20) + "Training complete.\nSaved model to out/final\n", 40)


def oom_main() -> Snap:
    s = gone(stamped(90, 2, 60) + "Killed\n", 60, code=9, oom_since=True)
    s.d["kernel_log"] = {
        "readable": True,
        "lines": [{"age_s": 61, "text": "Out of memory: Killed process 4242 (python) total-vm:90GB", "kind": "oom"}],
    }
    return s


def slurm(state: str, text: str) -> Snap:
    s = gone(stamped(90, 2, 600) + text, 600)
    s.d["slurm"] = {"job": 77, "source": "asked", "tools": True, "state": state, "text": {"sacct": state}}
    return s


def rank_dead() -> Snap:
    s = Snap()
    ranks(s, 4, looks="S futex_do_wait futex", cpu=0.0, cuda=False, skip=(2,), libs="torch numpy")
    s.log(stamped(60, 3, 200), age=200)
    return s


def rank_dead_nccl() -> Snap:
    s = Snap()
    ranks(s, 8, power=130, skip=(5,))
    s.log(stamped(60, 3, 400) + "srun: error: gpu7: task 5: Exited with exit code 1\n", age=400)
    return s


def host_down() -> Snap:
    s = gone(stamped(60, 3, 7200), 7200)
    s.d["meta"].update(boot_time=NOW - 6000, uptime_s=6000)
    return s


CASES = [
    ("A1", "finished", ["finished.ok"], finished),
    ("A1b", "finished, plain loop", ["finished.ok"], finished_plain),
    ("A2", "exit code 0, log says nothing", ["finished.ok"], lambda: gone(lines(50, 20), 40, code=0)),
    (
        "A3",
        "Python exception",
        ["failed.exception"],
        lambda: gone(trace("ValueError: shapes do not match"), 90, code=256),
    ),
    (
        "A4",
        "illegal memory access",
        ["failed.gpu-error"],
        lambda: gone(trace("torch.AcceleratorError: CUDA error: an illegal memory access was encountered"), 90, code=6),
    ),
    (
        "A5",
        "GPU out of memory",
        ["failed.gpu-oom"],
        lambda: gone(trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."), 90, code=256),
    ),
    ("A6", "killed for memory", ["failed.oom-killed"], oom_main),
    ("A7", "SIGTERM", ["failed.signal"], lambda: gone(stamped(50, 2, 90), 90, code=15)),
    ("A7b", "SIGHUP", ["failed.signal"], lambda: gone(stamped(50, 2, 90), 90, code=1)),
    (
        "A8",
        "time limit",
        ["failed.preempted"],
        lambda: slurm(
            "TIMEOUT", "slurmstepd: error: *** JOB 77 ON gpu7 CANCELLED AT 2026-11-29T10:00:00 DUE TO TIME LIMIT ***\n"
        ),
    ),
    ("A8b", "pre-empted, only Slurm knows", ["failed.preempted"], lambda: slurm("PREEMPTED", "")),
    ("A9", "segmentation fault", ["failed.native-crash"], lambda: gone(stamped(50, 2, 90), 90, code=11 | 128)),
    ("A10", "one gloo rank gone", ["failed.rank-dead"], rank_dead),
    ("A10b", "one NCCL rank gone", ["failed.rank-dead"], rank_dead_nccl),
    ("A11", "host rebooted", ["failed.host"], host_down),
    ("A0", "gone without a word", ["unknown"], lambda: gone(stamped(50, 2, 900), 900)),
]
