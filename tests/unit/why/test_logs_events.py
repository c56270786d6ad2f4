"""Failures, ends, phases and questions, and which failure explains the end."""

from __future__ import annotations

import pytest
from loglines import bar, redraws, said

TRACE = 'Traceback (most recent call last):\n  File "/w/train.py", line 212, in <module>\n    main()\n  File "/w/train.py", line 90, in main\n    step()\n'


def ranked(text: str, rank: int) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def test_a_traceback_gives_exception_message_and_frame() -> None:
    facts = said(redraws(100, 40, 1.0) + "\n" + TRACE + "ValueError: shapes do not fit: 3 and 4\n")
    error = facts.error
    assert error is not None and error.final
    assert (error.kind, error.exception, error.message) == ("exception", "ValueError", "shapes do not fit: 3 and 4")
    assert error.where == "train.py:90 in main"
    assert facts.step == 40


def test_a_caught_traceback_is_not_final() -> None:
    facts = said(TRACE + "OSError: try again\n" + redraws(100, 40, 1.0))
    assert facts.error is not None and not facts.error.final


def test_ignored_and_thread_and_child_tracebacks_are_told_apart() -> None:
    assert said("Exception ignored in: <function F at 0x1>\n" + TRACE + "ImportError: down\n").errors == ()
    thread = said("Exception in thread Thread-3 (pump):\n" + TRACE + "KeyError: 'x'\n").error
    child = said("Process SpawnProcess-1:\n" + TRACE + "KeyError: 'x'\n").error
    assert thread is not None and thread.kind == "thread-exception"
    assert child is not None and child.kind == "child-exception"


def test_the_first_of_chained_exceptions_is_the_cause() -> None:
    log = (
        TRACE
        + "FileNotFoundError: [Errno 2] data_9.pt\n\nDuring handling of the above exception, another exception occurred:\n\n"
    )
    facts = said(log + TRACE + "RuntimeError: cannot load\n")
    assert facts.error is not None and facts.error.exception == "FileNotFoundError"
    assert len(facts.errors) == 2


def test_the_root_rank_of_torchrun_is_preferred_to_the_first_printed() -> None:
    table = (
        "============================================================\ntrain.py FAILED\n"
        "------------------------------------------------------------\nFailures:\n[1]:\n  time      : 2025-10-09_10:00:01\n"
        "  host      : node1\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 500)\n  error_file: <N/A>\n"
        "  traceback : To enable traceback see: ...\n------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2025-10-09_10:00:00\n  host      : node1\n"
        "  rank      : 3 (local_rank: 3)\n  exitcode  : 1 (pid: 503)\n  error_file: <N/A>\n  traceback : ...\n"
        "============================================================\n"
    )
    log = (
        ranked(TRACE + "RuntimeError: peer went away", 0) + ranked(TRACE + "AssertionError: batch is empty", 3) + table
    )
    facts = said(log)
    assert facts.error is not None and (facts.error.rank, facts.error.exception) == (3, "AssertionError")
    assert [(f.rank, f.exitcode, f.pid, f.root) for f in facts.rank_failures] == [(0, 1, 500, False), (3, 1, 503, True)]


def test_interleaved_tracebacks_of_two_ranks() -> None:
    lines = [(TRACE + "ValueError: left").splitlines(), (TRACE + "ValueError: right").splitlines()]
    log = "".join(f"[rank{r}]: {lines[r][i]}\n" for i in range(len(lines[0])) for r in (0, 1))
    facts = said(log)
    assert [(e.rank, e.message) for e in facts.errors] == [(0, "left"), (1, "right")]
    assert facts.ranks == (0, 1)


def test_a_killed_rank_in_the_table() -> None:
    facts = said(
        "  time      : x\n  host      : n1\n  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n  traceback : Signal 9 (SIGKILL) received by PID 77\n"
    )
    assert facts.error is not None
    assert (facts.error.kind, facts.error.rank, facts.error.exitcode, facts.error.signal, facts.error.pid) == (
        "killed",
        5,
        -9,
        9,
        77,
    )


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23 GiB", "gpu-oom"),
        ("RuntimeError: CUDA error: out of memory", "gpu-oom"),
        ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.", "gpu-oom"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "gpu-error"),
        ("RuntimeError: CUDA error: device-side assert triggered", "gpu-error"),
        ("[17.1] NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "gpu-error"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu-error"),
        ("Killed", "killed"),
        ("/var/spool/job.sh: line 12: 3300 Killed                  python train.py", "killed"),
        ("srun: error: node7: task 3: Out Of Memory", "host-oom"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some of the step tasks have been OOM Killed.", "host-oom"),
        ("MemoryError", "host-oom"),
        ("OSError: [Errno 12] Cannot allocate memory", "host-oom"),
        ("slurmstepd: error: *** JOB 991 ON node7 CANCELLED AT 2025-10-09T10:00:00 DUE TO TIME LIMIT ***", "time-limit"),
        ("slurmstepd: error: *** STEP 991.0 ON node7 CANCELLED AT 2025-10-09T10:00:00 DUE TO PREEMPTION ***", "preempted"),
        ("slurmstepd: error: *** JOB 991 ON node7 CANCELLED AT 2025-10-09T10:00:00 ***", "cancelled"),
        ("Segmentation fault (core dumped)", "native-crash"),
        ("Fatal Python error: Aborted", "native-crash"),
        ("terminate called after throwing an instance of 'c10::Error'", "native-crash"),
        ("RuntimeError: DataLoader worker (pid 4411) is killed by signal: Killed. ", "worker-died"),
        ("RuntimeError: DataLoader worker (pid(s) 4411, 4412) exited unexpectedly", "worker-died"),
        ("RuntimeError: DataLoader worker (pid 4411) is killed by signal: Bus error. It is possible that dataloader's workers are "
         "out of shared memory. Please try to raise your shared memory limit.", "shm-full"),
        ("RuntimeError: unable to write to file </torch_1_2>: No space left on device (28) /dev/shm", "shm-full"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk-full"),
        ("KeyboardInterrupt", "interrupted"),
        ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 71 got signal: 15", "signal"),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (n1, 29500).",
         "rendezvous"),
        ("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 7/16 clients joined.", "rendezvous"),
        ("RuntimeError: [/b/gloo/pair.cc:525] Connection closed by peer [127.0.0.1]:4242", "peer-lost"),
        ("RuntimeError: [/b/gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
         "collective-timeout"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("raised", [False, True], ids=["bare", "raised"])
def test_kinds_of_failure(line: str, kind: str, raised: bool) -> None:
    if raised and not line.split(":")[0].endswith(("Error", "Exception", "Interrupt")):
        pytest.skip("not an exception")
    facts = said(redraws(9, 4, 1.0) + "\n" + (TRACE if raised else "") + line + "\n")
    assert facts.error is not None, line
    assert facts.error.kind == kind
    assert facts.error.final


def test_a_worker_killed_names_pid_and_signal() -> None:
    error = said("RuntimeError: DataLoader worker (pid 4411) is killed by signal: Killed. \n").error
    assert error is not None and (error.pid, error.signal) == (4411, 9)


def test_signals() -> None:
    for line in (
        "W1009 10:00:00.123000 99 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers",
        "Signal 15 (SIGTERM) received by PID 71",
        "[2025-10-09 10:00:00,000] [INFO] [launch.py:1] Received SIGTERM, saving and exiting",
        "Terminated",
    ):
        error = said(line + "\n").error
        assert error is not None and error.kind == "signal", line


def test_time_limit_explains_the_sigterm_and_the_traceback_after_it() -> None:
    log = (
        "slurmstepd: error: *** JOB 9 ON n CANCELLED AT 2025-10-09T10:00:00 DUE TO TIME LIMIT ***\n"
        + TRACE
        + "KeyboardInterrupt\n"
    )
    facts = said(log)
    assert facts.error is not None and facts.error.kind == "time-limit"


def watchdog(rank: int, seq: int = 167) -> str:
    return (
        f"[rank{rank}]:[E1009 10:10:00.123456789 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600272 milliseconds before "
        "timing out.\n"
    )


def test_watchdog_names_the_collective_and_the_rank_that_did_not_report() -> None:
    log = "[rank0]: world_size=4\n" + redraws(100, 40, 1.0) + "\n" + "".join(watchdog(r) for r in (0, 1, 3))
    facts = said(log)
    c = facts.collective
    assert c is not None
    assert (c.op, c.seq, c.timeout_s, c.ran_s) == ("ALLREDUCE", 167, 600, 600.272)
    assert (c.reporting, c.missing, c.world_size) == ((0, 1, 3), (2,), 4)
    assert facts.error is not None and facts.error.kind == "collective-timeout"


def test_store_barrier_waits_for_workers() -> None:
    log = (
        "[2025-10-09 10:00:10,000] INFO Waiting in store based barrier to initialize process group for rank: 0, key: "
        "store_based_barrier_key:1 (world_size=16, worker_count=7, timeout=0:30:00)\n"
    )
    facts = said(log)
    assert facts.barrier is not None and facts.barrier.final
    assert (facts.barrier.joined, facts.barrier.world_size, facts.barrier.timeout_s) == (7, 16, 1800)
    assert facts.phase is not None and facts.phase.id == "rendezvous"
    assert facts.error is None


@pytest.mark.parametrize(
    "line",
    [
        "{'train_runtime': '12.1', 'train_loss': '0.5', 'epoch': '3'}",
        "Training complete.",
        "INFO:train:Training finished in 3.2 h",
        "2025-10-09 10:00:00,000 - root - INFO - Training completed",
        "`Trainer.fit` stopped: `max_epochs=3` reached.",
        "100 epochs completed in 2.041 hours.",
        "wandb: Run history:",
        "[after training is done] datetime: 2025-10-09 10:00:00",
        "Done training!",
    ],
)
def test_ends(line: str) -> None:
    facts = said(redraws(30, 30, 1.0) + "\n" + line + "\n")
    assert facts.ended and facts.ended_line is not None
    assert facts.error is None and facts.at_last_step


@pytest.mark.parametrize(
    "line",
    [
        "Training epoch 3 done",
        "finished training epoch 2",
        "Finished loading data",
        "starting training",
        "early stopping: patience 3, best metric loss",
    ],
)
def test_no_ends(line: str) -> None:
    assert not said(line + "\n").ended


def test_training_after_an_end_line_is_not_ended() -> None:
    facts = said("Training complete.\n" + redraws(30, 12, 1.0))
    assert not facts.ended


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("***** Running Evaluation *****", "evaluating"),
        ("Running validation...", "evaluating"),
        ("Saving model checkpoint to /w/out/checkpoint-500", "checkpointing"),
        ("saving checkpoint at iteration    1000 to /w/ckpt in torch_dist format", "checkpointing"),
        ("Compiling the model with torch.compile", "compiling"),
        ("INFO: torch._inductor.autotune: AUTOTUNE mm(512x512)", "compiling"),
        ("[1/3] /usr/local/cuda/bin/nvcc --generate-dependencies -o fused_adam.o", "compiling"),
        ("Using /root/.cache/torch_extensions/py311_cu128 as PyTorch extensions root...", "compiling"),
        ("Downloading shards from the hub", "downloading"),
        ("Tokenizing the dataset (num_proc=8)", "tokenising"),
        ("Loading checkpoint from /w/ckpt", "loading-model"),
        ("Loading dataset /data/c4", "loading-data"),
        ("Filling up shuffle buffer (this may take a while): 120 of 10000", "loading-data"),
        ("Initializing distributed backend nccl", "initialising"),
        ("wandb: 3859.464 MB of 3859.464 MB uploaded", "uploading"),
    ],
)
def test_phases(line: str, phase: str) -> None:
    facts = said(line + "\n")
    assert facts.phase is not None and facts.phase.id == phase and not facts.phase.closed
    later = said(line + "\n" + redraws(40, 5, 1.0))
    assert later.phase is not None and later.phase.closed


def test_a_saved_checkpoint_closes_the_phase() -> None:
    facts = said("saving checkpoint at iteration 1000 to /w/ckpt\nsuccessfully saved checkpoint from iteration 1000\n")
    assert facts.phase is not None and facts.phase.closed


@pytest.mark.parametrize(
    "text",
    [
        "wandb: (1) Create a W&B account\nwandb: (2) Use an existing W&B account\nwandb: Enter your choice: ",
        "The repository contains custom code. Do you wish to run the custom code? [y/N] ",
        "Output directory exists. Overwrite? (y/n) ",
        "[sudo] password for user: ",
        "> /w/train.py(12)main()\n(Pdb) ",
        "Enter your token (input will not be visible): ",
    ],
)
def test_prompts(text: str) -> None:
    facts = said(text)
    assert facts.prompt is not None and facts.prompt_open
    assert said(text + "y\n" + redraws(40, 5, 1.0)).prompt is None


def test_notes_and_trackers() -> None:
    log = (
        "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism\n"
        "The 'train_dataloader' does not have many workers which may be a bottleneck.\n"
        "wandb: Tracking run with wandb version 0.22\n"
    )
    facts = said(log + bar(3, 10, 3))
    assert {"tokenizers-fork", "few-workers"} <= set(facts.notes)
    assert facts.trackers == ("wandb",)
    assert facts.error is None


@pytest.mark.parametrize(
    "line",
    [
        "Some weights were not initialized from the checkpoint",
        "UserWarning: error bars are off",
        "0 errors, 3 warnings",
        "nccl watchdog enabled, heartbeat interval 60 s",
        "Using shared memory for the cache",
        "Signal handlers installed for SIGTERM",
        "CUDA error checking is on",
        "loss is terminated by eos",
        "[W1009 10:00:00.1 socket.cpp:755] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).",
        "WARNING scheduler.py:1057] Sequence group 0 is preempted by PreemptionMode.RECOMPUTE mode",
        "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old",
        "early_stopping: patience 3, metric best",
    ],
)
def test_harmless_lines(line: str) -> None:
    facts = said(redraws(9, 4, 1.0) + "\n" + line + "\n")
    assert facts.error is None, facts.error


def test_a_single_rank_log_does_not_accuse_the_others() -> None:
    facts = said("world_size=4\n" + watchdog(1))
    assert facts.collective is not None and facts.collective.missing == ()


def test_hf_checkpoint_stays_open_until_training_goes_on() -> None:
    log = "Saving model checkpoint to out/checkpoint-500\nConfiguration saved in out/checkpoint-500/config.json\nModel weights saved in out/checkpoint-500/model.safetensors\n"
    facts = said(log)
    assert facts.phase is not None and facts.phase.id == "checkpointing" and not facts.phase.closed
    done = said("Saving checkpoint\nCheckpoint saved in 3.2 seconds\n")
    assert done.phase is not None and done.phase.closed


def test_a_dumped_configuration_is_no_prompt() -> None:
    assert said("model: x\npassword: null\n").prompt is None
