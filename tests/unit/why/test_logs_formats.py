"""Each trainer's lines give step, total, pace and what else they hold."""

from __future__ import annotations

import json

import pytest
from loglines import bar, redraws, said, stamp


def test_tqdm_gives_step_total_pace_and_eta() -> None:
    facts = said(redraws(100, 40, 2.0, post=", loss=0.71"))
    assert (facts.format, facts.step, facts.total, facts.scope) == ("tqdm", 40, 100, "run")
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(2.0, rel=0.05)
    assert facts.eta_s == pytest.approx(120, rel=0.05)
    assert facts.loss == 0.71
    assert facts.single_line_bar


def test_tqdm_rate_flips_between_its_per_second_and_seconds_per_it() -> None:
    fast = said(bar(500, 1000, 50.0))
    slow = said(bar(3, 10, 90.0))
    assert fast.pace is not None and fast.pace.seconds_per_step == pytest.approx(0.1)
    assert slow.pace is not None and slow.pace.seconds_per_step == pytest.approx(30)


def test_tqdm_at_zero_is_a_start_without_pace() -> None:
    facts = said("\r  0%|          | 0/3000 [00:00<?, ?it/s]")
    assert (facts.step, facts.total, facts.pace, facts.eta_s) == (0, 3000, None, None)


def test_tqdm_without_total() -> None:
    facts = said("".join(f"\rtrain: {i}it [00:{i * 3:02d}, 3.00s/it]" for i in range(12)))
    assert (facts.step, facts.total) == (11, None)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(3)


def test_tqdm_glued_to_json_gives_both() -> None:
    lines = "".join(bar(i, 50, i * 4.0) + json.dumps({"step": i, "loss": 2.0 - i / 100}) + "\n" for i in range(1, 20))
    facts = said(lines)
    assert facts.step == 19 and facts.total == 50
    assert facts.loss == pytest.approx(1.81)


def test_nested_bars_epochs_outside_batches_inside() -> None:
    log = ""
    for epoch in range(2):
        log += "\r" + bar(epoch, 5, epoch * 100.0, "Epochs")
        log += redraws(50, 50 if epoch == 0 else 20, 2.0, desc=f"Epoch {epoch}")
    facts = said(log)
    assert (facts.step, facts.total, facts.scope, facts.epoch, facts.epochs) == (20, 50, "epoch", 2, 5)
    assert facts.eta_s == pytest.approx(30 * 2 + 3 * 100, rel=0.05)


def test_tqdm_rich_bar_printed_at_the_end() -> None:
    facts = said("Epoch 0 100% ━━━━━━━━━━━━━━━━━━━━ 6/6 [ 0:00:03 < 0:00:00 , 2 it/s ]\n")
    assert (facts.format, facts.step, facts.total) == ("tqdm.rich", 6, 6)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.5)


@pytest.mark.parametrize("quote", ["", "'"], ids=["floats", "strings"])
def test_hf_trainer_dicts(quote: str) -> None:
    log = "\r" + bar(0, 1000, 0)
    for step in range(1, 301):
        log += "\r" + bar(step, 1000, step * 1.5)
        if step % 100 == 0:
            loss, epoch = f"{quote}{0.9 - step / 1000:.4f}{quote}", f"{quote}{step / 500:.2f}{quote}"
            log += f"\r{{'loss': {loss}, 'grad_norm': {quote}1.2{quote}, 'learning_rate': {quote}5e-05{quote}, 'epoch': {epoch}}}\n"
            log += "\r" + bar(step, 1000, step * 1.5)
    facts = said(log)
    assert (facts.format, facts.step, facts.total) == ("hf-trainer", 300, 1000)
    assert (facts.loss, facts.learning_rate, facts.epoch) == (0.6, 5e-05, 0.6)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(1.5, rel=0.05)


def test_hf_trainer_evaluation_bar_is_a_phase_not_the_training() -> None:
    log = redraws(1000, 500, 1.0)
    log += redraws(40, 12, 0.5)
    facts = said(log)
    assert (facts.step, facts.total) == (500, 1000)
    assert facts.phase is not None
    assert (facts.phase.id, facts.phase.closed, facts.phase.step, facts.phase.total) == ("evaluating", False, 12, 40)


def test_hf_trainer_without_bar_takes_steps_from_banner_and_epoch() -> None:
    log = "***** Running training *****\n  Num examples = 4,000\n  Num Epochs = 2\n  Total optimization steps = 1,000\n"
    log += "{'loss': '0.69', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.5'}\n"
    log += "{'loss': '0.60', 'grad_norm': '1.1', 'learning_rate': '4e-05', 'epoch': '1.0'}\n"
    facts = said(log)
    assert (facts.step, facts.total, facts.epoch, facts.epochs, facts.steps_per_line) == (500, 1000, 1.0, 2.0, 250)


def test_hf_trainer_end() -> None:
    log = redraws(30, 30, 0.4)
    log += "\r{'train_runtime': '12.1', 'train_samples_per_second': '20.5', 'train_loss': '0.5', 'epoch': '3'}\n"
    log += "\r" + bar(30, 30, 12) + "\n"
    facts = said(log)
    assert facts.ended and facts.at_last_step and facts.error is None


def test_axolotl_is_known_by_its_memory_keys() -> None:
    log = "[2025-10-09 08:00:01,123] [INFO] [axolotl.train.train:158] [PID:77] [RANK:0] Starting trainer...\n"
    log += redraws(200, 9, 3.0)
    log += (
        "\r{'loss': 1.1, 'grad_norm': 0.4, 'learning_rate': 2e-4, 'memory/max_allocated (GiB)': 20.1, 'epoch': 0.05}\n"
    )
    log += "\r" + bar(10, 200, 30.0)
    facts = said(log)
    assert (facts.format, facts.step, facts.total, facts.loss, facts.rank) == ("axolotl", 10, 200, 1.1, 0)


def test_lightning_bar() -> None:
    log = "Sanity Checking DataLoader 0: 100%|██████████| 2/2 [00:00<00:00, 3.1it/s]\n"
    log += "".join("\r" + bar(i, 100, i * 0.5, "Epoch 3", ", v_num=0, loss=0.532") for i in range(46))
    facts = said(log)
    assert (facts.step, facts.total, facts.scope, facts.epoch, facts.loss) == (45, 100, "epoch", 3, 0.532)
    validating = said(log + "\n" + "".join("\r" + bar(i, 20, i * 0.2, "Validation DataLoader 0") for i in range(9)))
    assert validating.phase is not None and validating.phase.id == "evaluating" and not validating.phase.closed
    assert validating.step == 45


def test_lightning_rich_bar() -> None:
    facts = said("Epoch 3/9 ━━━━━━━━━━━━━━━━ 45/100 0:00:05 • 0:00:06 9.71it/s v_num: 0\n")
    assert (facts.format, facts.step, facts.total, facts.epoch, facts.epochs) == ("lightning", 45, 100, 3, 9)


def test_torchtitan_coloured() -> None:
    log = f"[titan] {stamp(-400)},001 - root - INFO - Training starts at step 1, total steps 1000 (warmup 200)\n"
    for i in range(1, 21):
        log += (
            f"[rank0]:[titan] {stamp(-400 + i * 20)},500 - root - INFO - \x1b[31mstep: {i * 10:2d}  \x1b[32mloss:  {8 - i / 10:.4f}"
            "  \x1b[38;2;180;60;0mgrad_norm:  1.3012  \x1b[33mmemory:  3.20GiB(3.43%)  \x1b[34mtps: 6,234  "
            "\x1b[36mtflops: 44.21  \x1b[35mmfu: 9.41%\x1b[39m\n"
        )
    facts = said(log)
    assert (facts.format, facts.step, facts.total, facts.loss, facts.tokens_per_s) == (
        "torchtitan",
        200,
        1000,
        6.0,
        6234,
    )
    assert facts.pace is not None
    assert (facts.pace.seconds_per_step, facts.pace.source) == (pytest.approx(2.0), "stamps")
    assert (facts.steps_per_line, facts.line_interval_s) == (10, pytest.approx(20))
    assert facts.last_at == pytest.approx(1_760_000_000, abs=1)


def test_megatron() -> None:
    log = ""
    for i in range(1, 8):
        log += (
            f" [{stamp(i * 46)}] iteration {i * 10:8d}/    1000 | consumed samples: {i * 5120:12d} | elapsed time per iteration (ms): "
            f"{4647.8 if i > 1 else 21000.0} | throughput per GPU (TFLOP/s/GPU): 310.2 | learning rate: 1.500000E-06 | global batch "
            "size:   512 | lm loss: 9.761E+00 | loss scale: 1.0 | grad norm: 2.134 | number of skipped iterations:   0 | number of "
            "nan iterations:   0 |\n"
        )
    facts = said(log)
    assert (facts.format, facts.step, facts.total, facts.loss, facts.learning_rate) == (
        "megatron",
        70,
        1000,
        9.761,
        1.5e-6,
    )
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(4.6478)
    assert facts.line_interval_s == pytest.approx(46, rel=0.05)
    assert facts.eta_s == pytest.approx(930 * 4.6478)
    assert "nan" not in facts.notes


def test_deepspeed_counts_and_has_no_loss() -> None:
    log = ""
    for i in range(1, 9):
        log += (
            f"worker-0: [{stamp(i * 30 - 300)},120] [INFO] [logging.py:107:log_dist] [Rank 0] step={i * 10}, skipped=0, "
            "lr=[5e-05, 5e-05], mom=[(0.9, 0.999), (0.9, 0.999)]\n"
        )
        log += (
            f"worker-0: [{stamp(i * 30 - 300)},121] [INFO] [timer.py:264:stop] epoch=0/micro_step={i * 40}/global_step={i * 10}, "
            "RunningAvgSamplesPerSec=14.2, CurrSamplesPerSec=14.5, MemAllocated=21.3GB, MaxMemAllocated=40.1GB\n"
        )
    facts = said(log)
    assert (facts.format, facts.step, facts.loss, facts.learning_rate, facts.rank) == ("deepspeed", 80, None, 5e-05, 0)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(3.0)


def speculators_record(at: str, step: int, fetch: float = 400.0) -> str:
    """One metrics record as RichHandler wraps it at 80 columns."""
    total = fetch + 100
    pieces = [
        "train/loss=2.4120, profile/fetch_ms=" + f"{fetch:.1f},",
        "profile/fwd_ms=31.0, profile/bwd_ms=60.2,",
        f"profile/opt_ms=4.1, profile/step_ms={total:.1f},",
        f"tokens_per_s=5120.0, fetch_frac={fetch / total:.3f},",
        f"epoch=0, lr=1.00e-04, global_step={step}",
    ]
    head = f"{at} INFO     {pieces[0]:<50} trainer.py:412\n"
    return head + "".join(" " * 20 + piece.ljust(45) + " " * 15 + "\n" for piece in pieces[1:])


def test_speculators_records_are_joined_from_rich_wraps() -> None:
    log = "".join(speculators_record(f"[11:51:{i:02d}]" if i % 2 else " " * 10, i) for i in range(1, 21))
    facts = said(log)
    assert (facts.format, facts.step, facts.loss, facts.epoch) == ("speculators", 20, 2.412, 0)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.5)
    assert facts.data_wait == pytest.approx(0.8)
    assert facts.progress_lines == 20


def test_specforge_bar() -> None:
    facts = said("".join("\r" + bar(i, 9000, i * 1.2, "Training", unit="step") for i in range(40)))
    assert (facts.format, facts.step, facts.total) == ("specforge", 39, 9000)


def test_nanogpt() -> None:
    log = "step 0: train loss 10.9, val loss 10.8\n"
    log += "".join(
        f"iter {i}: loss {4.2 - i / 1000:.4f}, time {123.45 if i else 4000.0}ms, mfu 12.30%\n"
        for i in range(0, 500, 10)
    )
    facts = said(log)
    assert (facts.format, facts.step, facts.total, facts.steps_per_line) == ("nanogpt", 490, None, 10)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.12345)
    assert facts.pace.first_step == 4.0
    assert facts.line_interval_s == pytest.approx(1.2345)


@pytest.mark.parametrize(
    ("line", "step", "total"),
    [
        ("step 00{i:03d}/21400 (0.06%) | loss: 3.2 | lrm: 1.00 | dt: 123.40ms | tok/sec: 123,456 | mfu: 40.1\n", 19, 21400),
        ("step:{i}/5100 train_time:{i}23ms step_avg:123.40ms\n", 19, 5100),
        ("step   {i}/19560 | loss 11.0 (+nanz)| norm 15.1 (+nanz)| lr 1.00e-06 | 123.40 ms | 57% bf16 MFU | 174000 tok/s\n", 19, 19560),
    ],
)  # fmt: skip
def test_speedrun_family(line: str, step: int, total: int) -> None:
    facts = said("".join(line.format(i=i) for i in range(1, 20)))
    assert (facts.format, facts.step, facts.total) == ("nanogpt", step, total)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.1234)


def test_keras_on_a_file() -> None:
    log = "Epoch 2/10\n"
    for i in range(1, 30):
        log += f"{i}/43 ━━━━━━━━━━━━━━━━━━━━ {(43 - i) * 2}s 2s/step - accuracy: 0.5 - loss: 0.69\n"
    facts = said(log)
    assert (facts.format, facts.step, facts.total, facts.scope, facts.epoch, facts.epochs) == (
        "keras",
        29,
        43,
        "epoch",
        2,
        10,
    )
    assert facts.pace is not None and facts.pace.seconds_per_step == 2
    assert facts.eta_s == pytest.approx(14 * 2 + 8 * 43 * 2)


def test_keras_on_a_terminal_redraws_with_backspaces() -> None:
    log = "Epoch 1/3\n" + "".join(
        "\b" * 60 + f"\r\x1b[1m{i}/43\x1b[0m ━━━━━━━━━━ 1s 25ms/step - loss: 0.6" for i in range(1, 20)
    )
    facts = said(log)
    assert (facts.step, facts.total, facts.epochs) == (19, 43, 3)


def test_keras_verbose_2_is_one_line_an_epoch() -> None:
    log = "".join(f"Epoch {e}/10\n43/43 - 2s - 45ms/step - accuracy: 0.61 - loss: 0.51\n" for e in range(1, 4))
    facts = said(log)
    assert (facts.format, facts.epoch, facts.epochs, facts.at_last_step) == ("keras", 3, 10, False)
    assert said(log.replace("/10", "/3")).at_last_step


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mm", "{t} - mmdet - INFO - Epoch [2][{i}/8541]\tlr: 2.000e-02, eta: 11:31:27, time: 0.500, data_time: 0.400, memory: 3900, loss: 1.25"),
        ("mm", "{d} - mmengine - INFO - Epoch(train)  [2][{i}/8541]  lr: 2.0e-02  eta: 11:31:27  time: 0.5000  data_time: 0.4000  memory: 3900  loss: 1.25"),
        ("mm", "{d} - mmengine - INFO - Iter(train) [  {i}/80000]  lr: 2.0e-02  eta: 11:31:27  time: 0.5000  data_time: 0.4000  loss: 1.25"),
        ("detectron2", "[{d} d2.utils.events]:  eta: 11:31:27  iter: {i}  total_loss: 1.25  time: 0.5000  last_time: 0.5  data_time: 0.4000  lr: 0.02"),
        ("meter", "Epoch: [2]  [ {i}/1251]  eta: 0:12:34  lr: 0.001000  loss: 1.25 (1.25)  time: 0.5000  data: 0.4000  max mem: 1234"),
        ("meter", "Epoch: [2][ {i}/5005]\tTime  0.500 ( 0.510)\tData  0.400 ( 0.410)\tLoss 1.25e+00 (1.2e+00)\tAcc@1   0.39 (  0.21)"),
        ("timm", "Train: 2 [  {i}/1251 ( 20%)]  Loss: 1.25 (1.3)  Time: 0.500s, 1234.5/s  (0.510s, 1230.1/s)  LR: 1.0e-04  Data: 0.400 (0.410)"),
        ("espnet", "[node7] {t},000 (trainer:763) INFO: 2epoch:train:1-{i}batch: iter_time=0.400, forward_time=0.05, loss=1.25, train_time=0.500"),
    ],
)  # fmt: skip
def test_lines_with_data_time(name: str, line: str) -> None:
    log = "".join(
        line.format(i=i * 50, t=stamp(i * 25 - 500), d=stamp(i * 25 - 500, "%m/%d %H:%M:%S")) + "\n"
        for i in range(1, 16)
    )
    facts = said(log)
    assert (facts.format, facts.step, facts.steps_per_line) == (name, 750, 50)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.5)
    assert facts.data_wait == pytest.approx(0.8)
    assert facts.loss == 1.25
    assert facts.line_interval_s == pytest.approx(25)


def test_open_clip_samples_become_batches() -> None:
    log = "".join(
        f"{stamp(i * 50 - 900)} | INFO | Train Epoch: 0 [{i * 25600:7d}/7886030 (0%)] Data (t): 0.400 Batch (t): 0.500, 512.0/s, "
        "512.0/s/gpu LR: 0.000005 Logit Scale: 14.286 Contrastive_loss: 5.5341 (5.5341) Loss: 5.5341 (5.5341)\n"
        for i in range(1, 10)
    )
    facts = said(log)
    assert (facts.format, facts.step, facts.total, facts.unit) == ("open_clip", 900, 30805, "step")
    assert facts.data_wait == pytest.approx(0.8)


def test_mnist_example_counts_samples() -> None:
    log = "".join(f"Train Epoch: 1 [{i * 640}/60000 ({i}%)]\tLoss: 2.2955{i}\n" for i in range(20))
    facts = said(log)
    assert (facts.step, facts.total, facts.unit, facts.scope) == (12160, 60000, "sample", "epoch")


def test_fairseq() -> None:
    log = "".join(
        f"{stamp(i * 40 - 800)} | INFO | train_inner | epoch 001:  {i * 100:5d} / 4000 loss=8.1, ppl=280.1, wps=51000, ups=2.5, "
        f"wpb=20000, bsz=600, num_updates={i * 100}, lr=1e-05, gnorm=1.2, train_wall=39, wall={i * 40}\n"
        for i in range(1, 12)
    )
    facts = said(log)
    assert (facts.format, facts.step, facts.total, facts.epoch, facts.loss) == ("fairseq", 1100, 4000, 1, 8.1)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.4)


@pytest.mark.parametrize(
    "percent", [" 45%|████▌     | 10/22 [00:05<00:06,  2.00it/s]", "45% ━━━━━─────── 10/22 2.0it/s 5.0s<6.0s"]
)
def test_ultralytics(percent: str) -> None:
    facts = said(f"      2/100      2.56G      1.213      3.114      1.526         12        640: {percent}")
    assert (facts.step, facts.total, facts.epoch, facts.epochs) == (10, 22, 2, 100)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(0.5)
    assert facts.eta_s == pytest.approx(12 * 0.5 + 98 * 22 * 0.5)


def test_json_lines() -> None:
    log = "".join(
        json.dumps({"ts": 1_759_999_000 + i * 7, "step": i, "max_steps": 500, "train/loss": 3.1, "lr": 1e-4}) + "\n"
        for i in range(1, 30)
    )
    facts = said(log)
    assert (facts.format, facts.step, facts.total, facts.loss) == ("json", 29, 500, 3.1)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(7)


def test_llama_factory_json() -> None:
    log = "".join(
        json.dumps(
            {
                "current_steps": i * 5,
                "total_steps": 100,
                "loss": 1.0,
                "epoch": i / 10,
                "elapsed_time": f"0:00:{i * 5:02d}",
            }
        )
        + "\n"
        for i in range(1, 9)
    )
    facts = said(log)
    assert (facts.step, facts.total) == (40, 100)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(1)


def test_maxtext_nemo_verl() -> None:
    maxtext = said(
        "".join(
            f"completed step: {i}, seconds: 1.25, TFLOP/s/device: 190.1, Tokens/s/device: 9800.2, loss: 9.1\n"
            for i in range(9)
        )
    )
    nemo = said(
        "".join(
            f"Training epoch 0, iteration {i}/999 | lr: 3e-06 | global_batch_size: 8 | global_step: {i} | reduced_train_loss: 11.0"
            " | train_step_timing in s: 1.25 | consumed_samples: 8\n"
            for i in range(1, 9)
        )
    )
    verl = said(
        "".join(
            f"step:{i} - actor/entropy:0.1 - actor/pg_loss:0.2 - timing_s/step:1.25 - perf/throughput:900.0\n"
            for i in range(1, 9)
        )
    )
    for facts, name in ((maxtext, "maxtext"), (nemo, "nemo"), (verl, "verl")):
        assert facts.format == name and facts.step == 8
        assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(1.25), name
    assert nemo.total == 999


def test_own_status_lines() -> None:
    log = (
        "step 1/45,000 · loss 9.1 · 1.4 s/step\n"
        + "step 812/45,000 · waiting for data 14 s · data_9142.pt · 212 MB/s of the 720 needed\n"
    )
    facts = said(log)
    assert (facts.format, facts.step, facts.total) == ("eyas", 812, 45000)
    assert facts.status == "waiting for data 14 s · data_9142.pt · 212 MB/s of the 720 needed"


@pytest.mark.parametrize(
    "line",
    [
        "step {i}, loss 0.5",
        "Iter {i}: train loss=0.5",
        "iteration {i} of 100 | loss 0.5",
        "[{i}/100] nothing" if False else "Step [{i}/100], Loss: 0.5",
        "batch {i}/100 loss: 0.5",
        "global_step={i} loss=0.5",
        "INFO:train:step={i} loss=0.5",
    ],
)
def test_plain_loops(line: str) -> None:
    facts = said("".join(f"{stamp(i * 4 - 200)} {line.format(i=i)}\n" for i in range(1, 20)))
    assert (facts.format, facts.step, facts.loss) == ("generic", 19, 0.5)
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(4)


def test_plain_epochs() -> None:
    facts = said("".join(f"Epoch {i}/20, loss: 0.5\n" for i in range(1, 6)))
    assert (facts.step, facts.total, facts.unit, facts.epoch, facts.epochs) == (5, 20, "epoch", 5, 20)


@pytest.mark.parametrize(
    "text",
    [
        "Saving checkpoint at step 500\nSaving checkpoint at step 1000\n",
        "Resuming from step 1200\n",
        "Listening on port 8080, step 3 of setup done\n",
        "max_steps 1000 warmup steps 10\n",
        "best epoch 3\nbest epoch 4\n",
    ],
)
def test_sentences_that_only_mention_steps_are_no_progress(text: str) -> None:
    facts = said(text)
    assert facts.step in (None, 3) and facts.pace is None


def test_loading_bars_are_not_training() -> None:
    facts = said(redraws(30, 4, 2.0, desc="Loading checkpoint shards"))
    assert facts.step is None
    assert facts.phase is not None
    assert (facts.phase.id, facts.phase.step, facts.phase.total, facts.phase.closed) == ("loading-model", 4, 30, False)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("model-00001-of-00004.safetensors:  45%|████▌     | 2.21G/4.98G [00:41<00:52, 52.9MB/s]", "downloading"),
        ("Fetching 12 files:  25%|██▌       | 3/12 [00:10<00:30,  3.40s/it]", "downloading"),
        ("Map (num_proc=8):  20%|██        | 2000/10000 [00:04<00:16, 480.12 examples/s]", "tokenising"),
        ("Tokenizing:  20%|██        | 2000/10000 [00:04<00:16, 480.12it/s]", "tokenising"),
        ("Generating train split: 120000 examples [00:03, 38211.21 examples/s]", "loading-data"),
        ("Capturing CUDA graph shapes:  20%|██        | 7/35 [00:04<00:16, 1.70it/s]", "compiling"),
        ("Writing model shards:   0%|          | 0/4 [00:00<?, ?it/s]", "checkpointing"),
        ("Evaluating:  20%|██        | 7/35 [00:04<00:16, 1.70it/s]", "evaluating"),
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:05,  1.80s/it]", "loading-model"),
    ],
)
def test_bars_of_other_phases(line: str, phase: str) -> None:
    facts = said("\r" + line)
    assert facts.phase is not None and facts.phase.id == phase
    assert facts.step is None
