"""Two ranks under torchrun, gloo on the CPU; one dies, stops, fails or is slow: rank 0's log says which, and why.

Each rank writes a log of its own here, as on a cluster; what is asked of is that of rank 0, and log.txt.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from from_integration import conftest
from recorded import gone

import eyas as package
from eyas.record import beat, events
from eyas.store.reader import StoreSource
from eyas.train.batches import epoch_order, pack, split_source

SOON = 20.0  # seconds: fifteen, and some for a busy machine
LENGTH, BATCH = 64, 64


@dataclass
class Made:
    verifier: Path
    store: Path
    vocab: Path


@pytest.fixture(scope="module")
def made(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A store of 600 conversations: an epoch of some 250 steps of two ranks."""
    from eyas.capture.local import capture
    from eyas.prepare import prepare
    from eyas.verifier import Verifier
    from eyas.vocab import build

    folder = tmp_path_factory.mktemp("ranks")
    verifier = Verifier(tiny_verifier)
    conftest.write_conversations(folder / "conversations.jsonl", 600)
    prepare(verifier, [folder / "conversations.jsonl"], folder / "prepared", max_seq_len=LENGTH, show=0, say=_silent)
    capture(verifier, folder / "prepared", folder / "store", dtype="fp32", say=_silent)
    build(folder / "prepared", verifier, 96, folder / "vocab", say=_silent)
    return Made(tiny_verifier, folder / "store", folder / "vocab")


def _silent(_text: str) -> None:
    pass


class Job:
    """`torchrun -m eyas train` on two ranks, each with its own log."""

    def __init__(self, made: Made, folder: Path, store: Path | None = None, paths: Sequence[Path] = ()) -> None:
        self.run, self.logs = folder / "run", folder / "logs"
        words = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--log-dir",
            self.logs, "--redirects", 3, "-m", "eyas", "train", "--verifier-path", made.verifier, "--data-dir",
            store or made.store, "--vocab-mapping-dir", made.vocab, "--output-dir", self.run, "--max-seq-len", LENGTH,
            "--batch-tokens", BATCH, "--dtype", "fp32", "--epochs", 100, "--val-ratio", 0,
        ]  # fmt: skip
        self.said = folder / "torchrun.txt"
        source = ":".join(map(str, [*paths, Path(package.__file__).parents[1]]))
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                list(map(str, words)), stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source},
            )  # fmt: skip

    def beat(self, rank: int) -> dict[str, Any]:
        try:
            return beat.read(self.run / ("beat" if rank == 0 else f"beat.{rank}"))
        except (OSError, ValueError):
            return {}

    def log(self, rank: int = 0) -> list[str]:
        """Standard output of a rank."""
        return [line for path in self.logs.glob(f"*/attempt_0/{rank}/stdout.log") for line in lines(path)]

    def kept(self) -> list[str]:
        """log.txt without its times."""
        path = self.run / "log.txt"
        return [line[20:] for line in lines(path)] if path.exists() else []

    def until(self, what: Callable[[], Any], limit: float = SOON) -> Any:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.05)
        errors = "\n".join(path.read_text()[-2000:] for path in self.logs.glob("*/attempt_0/*/stderr.log"))
        raise AssertionError(
            "it did not come:\n" + "\n".join([*self.kept(), "--", errors, self.said.read_text()[-2000:]])
        )

    def says(self, words: str, limit: float = SOON) -> str:
        """The line of rank 0's log that holds these words, waited for. It stands in log.txt too."""
        line: str = self.until(lambda: next((line for line in self.log() if words in line), ""), limit)
        self.until(lambda: line in self.kept(), 5)
        return line

    def trains(self) -> tuple[int, int]:
        """The PIDs of the ranks, when both have made 20 steps."""
        self.until(lambda: all(self.beat(rank).get("step", 0) >= 20 for rank in (0, 1)), 120)
        return self.beat(0)["pid"], self.beat(1)["pid"]

    def end(self) -> None:
        pids = [self.process.pid, *(pid for rank in (0, 1) if (pid := self.beat(rank).get("pid")))]
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


def lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


@pytest.fixture
def job(made: Made, tmp_path: Path) -> Iterator[Job]:
    job = Job(made, tmp_path)
    yield job
    job.end()


def test_a_rank_that_is_killed_is_named_with_its_signal(job: Job) -> None:
    _, one = job.trains()
    os.kill(one, signal.SIGKILL)
    line = job.says("rank 1 failed first")
    assert f"eyas train (PID {one}) was killed by SIGKILL, at step" in line and "to go on: " in line, line
    assert job.process.wait(60) != 0
    report = job.said.read_text()
    assert "local_rank: 1" in report and "SIGKILL" in report, "torchrun names the same rank"
    ends = {e["rank"]: e for e in events.read(job.run / "events.jsonl") if e["event"] == "end"}
    assert ends[1]["how"] == "vanished" and ends[1]["status"] == signal.SIGKILL
    assert ends[0].get("follows") or ends[0]["how"] != "error", "rank 0 does not take the blame"


def test_rank_0_that_is_killed_is_named_in_the_log_of_both(job: Job) -> None:
    zero, _ = job.trains()
    os.kill(zero, signal.SIGKILL)
    line = job.says("the end:")
    assert line.startswith(f"rank 0: the end: eyas train (PID {zero}) was killed by SIGKILL, at step"), line
    assert job.process.wait(60) != 0
    assert not any("failed first" in line for line in job.kept()), "nobody failed before it"


def test_a_rank_that_is_stopped_is_the_one_that_is_waited_for(job: Job) -> None:
    _, one = job.trains()
    os.kill(one, signal.SIGSTOP)
    line = job.says("waits for rank 1")
    assert line.startswith("rank 0: step ") and f"which is stopped (kill -CONT {one} lets it go on)" in line, line
    step = job.beat(0)["step"]
    os.kill(one, signal.SIGCONT)
    job.until(lambda: job.beat(0)["step"] > step + 20, 60)


def test_a_rank_that_sleeps_is_named_with_where_it_does(made: Made, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, time\n"
        "if os.environ.get('RANK') == '1': signal.signal(signal.SIGUSR2, lambda *_: time.sleep(25))\n"
    )
    job = Job(made, tmp_path, paths=[tmp_path])
    try:
        _, one = job.trains()
        os.kill(one, signal.SIGUSR2)
        line = job.says("is behind")
        step = job.beat(0)["step"]
        assert line.startswith("rank 0: step ") and f"rank 1 (PID {one}) is behind: step " in line, line
        assert "no CPU used; the main thread is sleeping by the clock" in line.partition("is behind")[2], line
        job.until(lambda: job.beat(0)["step"] > step + 20, 60)
    finally:
        job.end()


def test_a_rank_at_a_third_of_the_speed_is_named_with_what_it_is_slow_in(job: Job) -> None:
    _, one = job.trains()
    over = threading.Event()

    def hold_back() -> None:
        while not over.is_set() and not gone(one):
            os.kill(one, signal.SIGSTOP)
            time.sleep(0.04)
            os.kill(one, signal.SIGCONT)
            time.sleep(0.02)

    slow = threading.Thread(target=hold_back)
    slow.start()
    try:
        line = job.says("times slower than the others")
    finally:
        over.set()
        slow.join()
    assert line.startswith("rank 1 is ") and line.rpartition(": ")[2] in ("forward", "waiting for data"), line
    factor = float(line.split()[3])
    assert 1.5 <= factor < 8, line
    assert [e["text"] for e in events.read(job.run / "events.jsonl") if e["event"] == "straggler"] == [line]


def test_a_rank_that_fails_by_its_data_is_named_with_the_sample(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.store, tmp_path / "store")
    source = StoreSource(tmp_path / "store")
    order = epoch_order(split_source(source, LENGTH, 0.0)[0], 0, 0)
    packs = pack(order, source.lengths, BATCH, LENGTH)
    bad = packs[2 * 25 + 1][0]  # the 26th step of rank 1
    record = source.records[bad]
    shard = next(p for p in (tmp_path / "store").glob("shard-*") if record.shard in p.name)
    with shard.open("r+b") as file:
        file.seek(record.parts[1].offset + 9)
        file.write(b"\x55\x55")
    job = Job(made, tmp_path, tmp_path / "store")
    try:
        line = job.says("rank 1 failed first", 120)
        assert "step 25/" in line and f"sample {source.ids[bad]}" in line and "checksum" in line, line
        assert any(kept.startswith("rank 1: step 25/") for kept in job.kept())
        assert job.process.wait(60) != 0
    finally:
        job.end()
