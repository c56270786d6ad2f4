"""Every verdict in words: what it means, the sentence, the one look that decides it, what to do, what not to do.

Fields in braces are filled in from the facts by compose.py: {name} {pid} {who} {idle} {rate} {mount} {error} {path}.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.why.verdicts.words_stuck import STUCK


@dataclass(frozen=True)
class Words:
    sentence: str
    meaning: str
    decides: str  # the observation that would confirm it against a neighbour
    next: tuple[str, ...]
    do_not: tuple[str, ...] = ()


_NO_RESTART = "Do not restart it: the work done so far would be lost, and the wait would begin again."
_WAIT = "Nothing needs to be done. Ask again later: eyas why {target}"

OK: dict[str, Words] = {
    "finished.ok": Words(
        "{name} has finished{at_step}.",
        "The process is gone and its log ends as a run that went well.",
        "the exit code, or an end-of-training line in the log",
        ("Look at the result: tail -n 20 {log}",),
    ),
    "finished.lingering": Words(
        "{name} has finished training{at_step} but its process has not ended ({idle} since its last line).",
        "Training is over; what is left is an upload, a join, or a child that does not end.",
        "whether the last checkpoint is complete and bytes still leave the host",
        ("Check that the last checkpoint is complete, then end it gently: kill -TERM {pid}",),
        ("Do not use kill -9 while an upload runs: the last files may be missing on the server.",),
    ),
    "failed.exception": Words(
        "{name} has failed: {error}",
        "A Python exception ended the run.",
        "the traceback in the log",
        ("Read the traceback: tail -n 60 {log}",),
        ("Do not resume before the cause is understood: it is likely to come back.",),
    ),
    "failed.gpu-error": Words(
        "{name} has failed with a GPU error: {error}",
        "The GPU or a kernel on it faulted: illegal access, device assert, Xid, ECC.",
        "an Xid in the kernel log of the host (journalctl -k | grep -i xid)",
        (
            "Look for an Xid: journalctl -k | grep -iE 'xid|nvrm'",
            "Find the kernel: run again with CUDA_LAUNCH_BLOCKING=1",
        ),
    ),
    "failed.gpu-oom": Words(
        "{name} has failed: the GPU ran out of memory. {error}",
        "An allocation on the GPU did not fit.",
        "the out-of-memory line in the log",
        ("Use a smaller micro-batch or sequence, or activation checkpointing; see what else holds memory: nvidia-smi",),
    ),
    "failed.oom-killed": Words(
        "{name} was killed by the kernel because memory ran out{victim}.",
        "The out-of-memory killer ended it: too much host memory, or a cgroup limit.",
        "an oom line with its PID in the kernel log, or oom_kill in the cgroup's memory.events",
        (
            "See the kernel's word: journalctl -k | grep -iE 'oom|killed process'",
            "Use fewer loader workers or a smaller prefetch, or ask for more memory",
        ),
        ("Do not just restart it with the same settings: it will be killed at the same place.",),
    ),
    "failed.signal": Words(
        "{name} was ended by {signal}.",
        "Somebody or something sent a signal: a user, a closed ssh session, a scheduler.",
        "the wait status, or the scheduler's accounting",
        ("Ask the scheduler or the shell's history who sent it; start long runs under tmux, nohup or systemd-run",),
    ),
    "failed.preempted": Words(
        "{name} was ended by the scheduler: {error}",
        "The time limit was reached, or the job was pre-empted.",
        "the job's state in sacct",
        ("Resume from the last checkpoint with a longer limit: sacct -j JOB -o State,Elapsed,Timelimit",),
    ),
    "failed.native-crash": Words(
        "{name} has crashed in native code{with_signal}.",
        "A segmentation fault, bus error or abort below Python.",
        "the signal in the wait status, a core file, or a segfault line in the kernel log",
        (
            "Get the place: run again with PYTHONFAULTHANDLER=1; read the core: coredumpctl info",
            "On SIGBUS look at shared memory: df -h /dev/shm",
        ),
    ),
    "failed.rank-dead": Words(
        "{name} has lost ranks: {who}; the others wait for it.",
        "Part of the job is dead. A collective cannot end without them.",
        "the number of live ranks against the number started, or NCCL RAS",
        (
            "Read the dead rank's own log first, not the time-outs of the others",
            "Then end the rest: kill -TERM {launcher}",
        ),
        ("Do not look for the cause in the ranks that wait: they are the victims.",),
    ),
    "failed.host": Words(
        "{name} ended because its host went down.",
        "The host was rebooted, or failed, after the run's last output.",
        "the boot time against the log's last line",
        ("See why: last -x | head; journalctl -b -1 -e", "Resume from the last checkpoint"),
    ),
    "healthy.training": Words(
        "{name} is {does}{at_step}: {moves}.",
        "Steps go on at their usual pace.",
        "the next step in the log",
        (_WAIT,),
    ),
    "quiet.interval": Words(
        "{name} works; its log is only quiet{due}: {moves}.",
        "Work goes on and the next log line is not due yet, or no interval is known.",
        "the next line, when it is due",
        (_WAIT,),
        (_NO_RESTART,),
    ),
    "quiet.buffered": Words(
        "{name} works; its log is silent because Python holds back what it prints: {moves}.",
        "Standard output is not a terminal, so Python writes it in blocks of 8 KiB.",
        "whether the log grows in jumps of 8 KiB",
        (_WAIT, "Next time: PYTHONUNBUFFERED=1, python -u, or flush=True"),
        ("Do not kill it with -9: what is in the buffer would be lost.", _NO_RESTART),
    ),
    "quiet.elsewhere": Words(
        "{name} works; its progress goes somewhere else than this log: {moves}.",
        "The log is not where the progress is: a rich bar on a file, a tracker, another rank, a deleted or rotated"
        " file.",
        "whether another output of the run advances",
        ("Look there instead: ls -lt $(ls -d /proc/{pid}/cwd/*/ | head); ls -l /proc/{pid}/fd",),
        (_NO_RESTART,),
    ),
    "quiet.evaluating": Words(
        "{name} is evaluating: {moves}.",
        "An evaluation runs; training lines come after it.",
        "an evaluation line or frame",
        (_WAIT,),
        (_NO_RESTART,),
    ),
    "quiet.checkpointing": Words(
        "{name} is writing a checkpoint: {moves}.",
        "A checkpoint is being written.",
        "whether the checkpoint file grows",
        (_WAIT,),
        ("Do not end it now: the checkpoint would be torn.",),
    ),
    "quiet.compiling": Words(
        "{name} is compiling: {moves}.",
        "torch.compile, Triton, nvcc, XLA or the driver translates code; the first steps take minutes.",
        "CPU time of compiler processes, a growing cache, or compiler frames in the main thread's stack",
        (_WAIT, "See the code being compiled: eyas why {target} --stacks"),
        ("Do not restart it: compilation would begin from the start.",),
    ),
    "quiet.initialising": Words(
        "{name} is still starting: {moves}.",
        "Imports, model files, downloads, data preparation: no step yet.",
        "the first step in the log",
        (_WAIT,),
        (_NO_RESTART,),
    ),
    "quiet.long-step": Words(
        "{name} is in a long step: {moves}.",
        "The GPU, or the CPU, computes; the step just takes long.",
        "GPU power: near the limit it computes, near idle it waits",
        (_WAIT,),
        (_NO_RESTART,),
    ),
    "slow.data.disk-cold": Words(
        "{name} is alive and waits for the disk: {workers_words} read {file_words}from {mount} at {rate}/s{cached}.",
        "The data comes from the disk and not from memory, and the disk is slower than the GPU.",
        "read_bytes against rchar of the readers (cat /proc/PID/io)",
        (
            "{warm_advice}",
            "Else: a faster disk, more loader workers, or fewer bytes a sample",
            "Warm the next files: vmtouch -t DIR (only if they fit in memory)",
        ),
        (
            "Do not restart it: the page cache it has warmed helps, a new start repeats the cold files.",
            "Do not look for a deadlock: bytes move.",
        ),
    ),
    "slow.data.network": Words(
        "{name} is alive and waits for a network or FUSE file system: {mount}, {rate}/s.",
        "The data lies on a file server, an object store or a FUSE mount that answers slowly.",
        "the mount type, and whether bytes still come",
        ("Copy the data to a local disk, or cache it there; see the mount: nfsstat -m, or the FUSE daemon's log",),
        (_NO_RESTART,),
    ),
    "slow.data.decode": Words(
        "{name} is alive and waits for its loader workers, which are busy decoding on the CPU ({workers_words}).",
        "Preparing the samples takes more CPU than the workers have.",
        "the workers' CPU share: near 100 % each, with an idle disk",
        (
            "More workers if CPUs are free, cheaper transforms, or data prepared beforehand",
            "See where: py-spy record --nonblocking -p WORKER",
        ),
        (_NO_RESTART,),
    ),
    "slow.data.few-workers": Words(
        "{name} is alive and starved: too few loader workers ({workers_words}).",
        "The data could come faster if more processes fetched it.",
        "CPUs that idle beside one busy worker",
        ("Raise num_workers (now {workers}, {cpus} CPUs may be used) and prefetch_factor",),
        (_NO_RESTART,),
    ),
    "slow.data.small-files": Words(
        "{name} is alive and waits for many small files on {mount}.",
        "Opening and looking up files takes the time, not the bytes.",
        "opens a second, and the mean size of a file",
        ("Pack the samples into larger files (tar shards, Arrow, safetensors)",),
        (_NO_RESTART,),
    ),
    "slow.data.remote-service": Words(
        "{name} is alive and waits for a remote service at {peer}.",
        "The samples come from another service over the network, and it does not answer fast enough, or at all.",
        "the state and the queues of the connection (ss -tnp), and the service's own log",
        ("Look at the service: ss -tnp | grep {pid}; ask it: curl -m 5 http://{peer}/health",),
        ("Do not restart the trainer before the service answers.",),
    ),
    "slow.cpu.quota": Words(
        "{name} is alive but gets too little CPU{quota_words}.",
        "A CPU quota or pinning holds the job back.",
        "nr_throttled in the cgroup's cpu.stat, or Cpus_allowed_list",
        (
            "See: grep -H . /proc/{pid}/cgroup; grep Cpus_allowed_list /proc/{pid}/status",
            "Ask for more CPUs, or use fewer threads: OMP_NUM_THREADS",
        ),
        (_NO_RESTART,),
    ),
    "slow.memory": Words(
        "{name} is alive but short of memory: pages go out and come back.",
        "Swap, or a page cache that is too small, makes everything slow.",
        "pswpin, workingset_refault_file in /proc/vmstat, and pressure/memory",
        (
            "See who holds it: ps -eo pid,rss,comm --sort=-rss | head",
            "Fewer workers, less prefetch, no data set cache in memory",
        ),
        ("Do not drop caches: it makes the reading colder.",),
    ),
    "slow.gpu.throttled": Words(
        "{name} is slow because {who} runs at lower clocks.",
        "Heat, power supply or a hardware brake lowers the clocks.",
        "the clock-event reasons: nvidia-smi -q -d PERFORMANCE",
        ("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; tell the host's operator",),
        (_NO_RESTART,),
    ),
    "slow.gpu.shared": Words(
        "{name} shares its GPU with {who}.",
        "Another process uses the same GPU.",
        "the per-process SM share: nvidia-smi pmon -c 3",
        ("nvidia-smi pmon -c 3; agree with its owner, or move to another GPU",),
        ("Do not end a process that is not yours.",),
    ),
    "slow.host-python": Words(
        "{name} is limited by its own Python code: the main thread is busy, the GPU is not.",
        "Host code between the kernels sets the pace: logging, metrics, small kernels, .item().",
        "the main thread's stack, several times: eyas why {target} --stacks",
        ("See where: eyas why {target} --stacks; py-spy record --nonblocking -p {pid}",),
        (_NO_RESTART,),
    ),
    "slow.straggler": Words(
        "{name} is held up by one rank: {who}.",
        "All other ranks wait in every step for the slowest.",
        "the other ranks' wait against this rank's work",
        ("Look at that rank alone: eyas why {who_pid}; compare its GPU, disk and CPU with a neighbour's",),
        (_NO_RESTART,),
    ),
    "slow.transport": Words(
        "{name} exchanges gradients over a slow transport.",
        "NCCL uses sockets although something faster is there, or has nothing faster.",
        "the NET line with NCCL_DEBUG=INFO",
        ("Run with NCCL_DEBUG=INFO and look for NET/IB or NET/Socket; check NCCL_IB_DISABLE, NCCL_SOCKET_IFNAME",),
        (_NO_RESTART,),
    ),
    "unknown": Words(
        "Not enough is visible to say what {name} is doing{unknown_why}.",
        "No mechanism could be established.",
        "a stack of the main thread",
        ("Take a stack: eyas why {target} --stacks", "Look again in a minute: eyas why {target}"),
        ("Do not conclude from silence alone.",),
    ),
}

WORDS: dict[str, Words] = OK | {verdict: Words(*parts) for verdict, parts in STUCK.items()}
VERDICTS: tuple[str, ...] = tuple(WORDS)


def state_of(verdict: str) -> str:
    """The state word of a verdict."""
    return verdict.split(".", 1)[0]
