"""The log reader on what the real programs print. Each test runs one for a few seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.why.logs.facts import LogFacts
from eyas.why.logs.reader import read_path
from eyas.why.logs.silence import ProcessFacts, why_silent


def run(tmp_path: Path, code: str, *launcher: str, until: Callable[[LogFacts], bool] | None = None) -> LogFacts:
    """Run `code` with its output in a file, as under nohup, and read that file: at the end, or once `until` holds."""
    script, log = tmp_path / "train.py", tmp_path / "log.txt"
    script.write_text(code)
    unwanted = ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "PYTHONUNBUFFERED")
    env = {k: v for k, v in os.environ.items() if k not in unwanted}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            cwd=tmp_path,
        )
    try:
        if until is None:
            process.wait(timeout=280)
        while process.poll() is None and not (until is not None and until(read_path(log))):
            time.sleep(0.2)
        return read_path(log)
    finally:
        process.kill()
        process.wait()


def test_tqdm(tmp_path: Path) -> None:
    code = "import time\nfrom tqdm import tqdm\nfor _ in tqdm(range(1000), desc='train'):\n    time.sleep(0.05)\n"
    facts = run(tmp_path, code, until=lambda log: (log.step or 0) >= 120)
    assert (facts.format, facts.total) == ("tqdm", 1000)
    assert facts.step is not None and 120 <= facts.step < 1000
    assert facts.pace is not None and 0.045 < facts.pace.seconds_per_step < 1
    assert facts.single_line_bar
    assert facts.eta_s == pytest.approx((1000 - facts.step) * facts.pace.seconds_per_step, abs=0.01)


def test_nested_tqdm(tmp_path: Path) -> None:
    code = (
        "import time\nfrom tqdm import tqdm\n"
        "for e in tqdm(range(3), desc='Epochs'):\n    for _ in tqdm(range(40), desc=f'Epoch {e}'):\n        time.sleep(0.02)\n"
    )
    facts = run(tmp_path, code)
    assert (facts.total, facts.step, facts.scope, facts.epoch, facts.epochs) == (40, 40, "epoch", 3, 3)
    assert facts.at_last_step


def test_tqdm_rich_on_a_file_draws_nothing_before_the_end(tmp_path: Path) -> None:
    code = (
        "import time, warnings\nwarnings.simplefilter('ignore')\nfrom tqdm.rich import tqdm\nfrom pathlib import Path\n"
        "for i in tqdm(range({n}), desc='Epoch 0'):\n    time.sleep(0.05)\n    Path('step').write_text(str(i))\n"
    )
    begun = tmp_path / "step"
    during = run(tmp_path, code.format(n=1000), until=lambda _: begun.exists() and int(begun.read_text() or 0) > 20)
    assert during.step is None
    process = ProcessFacts(stdout="file", unbuffered=False, uses_rich=True, idle_s=60, progressing=True)
    assert why_silent(during, process).reason in ("rich-bar-on-file", "block-buffered")
    after = run(tmp_path, code.format(n=20))
    assert (after.format, after.step, after.total) == ("tqdm.rich", 20, 20)


def test_rich_handler_wraps_are_joined(tmp_path: Path) -> None:
    code = (
        "import logging, time\nfrom rich.logging import RichHandler\n"
        "logging.basicConfig(level='INFO', format='%(message)s', datefmt='[%X]', handlers=[RichHandler()])\n"
        "keys = ['train/loss', 'profile/fetch_ms', 'profile/fwd_ms', 'profile/bwd_ms', 'profile/opt_ms', 'profile/step_ms',\n"
        "        'tokens_per_s', 'fetch_frac', 'epoch', 'lr']\n"
        "for step in range(30):\n"
        "    values = dict.fromkeys(keys, 0.5) | {'profile/step_ms': 500.0, 'profile/fetch_ms': 400.0, 'fetch_frac': 0.8, 'epoch': 0}\n"
        "    logging.info(', '.join(f'{k}={v}' for k, v in values.items()) + f', global_step={step}')\n"
        "    time.sleep(0.02)\n"
    )
    facts = run(tmp_path, code)
    assert facts.lines > 60  # wrapped indeed
    assert (facts.format, facts.step, facts.progress_lines, facts.loss) == ("speculators", 29, 30, 0.5)
    assert facts.data_wait == pytest.approx(0.8)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.5)


TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=2, vocab_size=128, max_position_embeddings=64)
data = [{"input_ids": torch.arange(16) % 128, "labels": torch.arange(16) % 128} for _ in range(64)]
arguments = TrainingArguments(output_dir="out", per_device_train_batch_size=4, max_steps=24, logging_steps=4, report_to=[],
                              eval_strategy="steps", eval_steps=12, save_steps=12, use_cpu=True, disable_tqdm=DISABLE)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, eval_dataset=data[:16]).train()
"""


@pytest.mark.parametrize("disable", [False, True], ids=["bar", "no bar"])
def test_hf_trainer(tmp_path: Path, disable: bool) -> None:
    facts = run(tmp_path, TRAINER.replace("DISABLE", str(disable)))
    assert facts.format == "hf-trainer", facts.last_line
    assert facts.ended and facts.ended_line is not None and "train_runtime" in facts.ended_line
    assert facts.error is None
    assert facts.loss is not None and 0 < facts.loss < 10
    assert facts.epoch == pytest.approx(1.5)
    if not disable:
        assert (facts.step, facts.total, facts.at_last_step) == (24, 24, True)


def test_a_python_traceback(tmp_path: Path) -> None:
    code = "import time\nfrom tqdm import tqdm\nfor i in tqdm(range(20)):\n    time.sleep(0.02)\n    if i == 9:\n        [1, 2][i]\n"
    facts = run(tmp_path, code)
    assert facts.error is not None and facts.error.final
    assert (facts.error.kind, facts.error.exception) == ("exception", "IndexError")
    assert facts.error.where == "train.py:6 in <module>"
    assert facts.step is not None and facts.step <= 10 and not facts.ended


RANKS = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
for step in range(3):
    print(f"step {step}/100 loss 1.0", flush=True)
    time.sleep(0.05)
if rank == 1:
    FAULT
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("fault", "kind", "exitcode"),
    [
        ("raise AssertionError('empty batch')", "exception", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", -9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "native-crash", -11),
    ],
)
def test_torchrun_failure_table(tmp_path: Path, fault: str, kind: str, exitcode: int) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.2")
    facts = run(tmp_path, RANKS.replace("FAULT", fault), *launcher)
    assert facts.error is not None, facts.last_line
    assert (facts.error.kind, facts.error.final) == (kind, True)
    root = next(f for f in facts.rank_failures if f.root)
    assert (root.rank, root.exitcode) == (1, exitcode)
    assert root.pid is not None and root.pid > 1


def test_block_buffering_leaves_the_log_empty_and_is_explained(tmp_path: Path) -> None:
    code = (
        "import time\nfrom pathlib import Path\nfor i in range(1000):\n    print(f'step {i}/1000 loss 0.5')\n"
        "    time.sleep(0.05)\n    Path('step').write_text(str(i))\n"
    )
    begun = tmp_path / "step"
    facts = run(tmp_path, code, until=lambda _: begun.exists() and int(begun.read_text() or 0) > 20)
    assert facts.empty
    found = why_silent(facts, ProcessFacts(stdout="file", unbuffered=False, progressing=True))
    assert found.reason == "block-buffered"


def test_python_logging_stamps_are_tied_to_the_clock(tmp_path: Path) -> None:
    code = (
        "import logging, time\nlogging.basicConfig(level='INFO', format='%(asctime)s - %(name)s - %(levelname)s - %(message)s')\n"
        "for i in range(30):\n    logging.info('step %d/100 loss 0.5', i)\n    time.sleep(0.05)\n"
    )
    facts = run(tmp_path, code)
    assert facts.step == 29 and facts.last_at == pytest.approx(time.time(), abs=30)
    assert facts.pace is not None and 0.045 < facts.pace.seconds_per_step < 1
