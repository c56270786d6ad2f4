"""The stuck verdicts in words; see words.py for the fields."""

from __future__ import annotations

_DUMP = "Keep the evidence first: eyas why {target} --stacks --save why-{pid}.json"

STUCK: dict[str, tuple[str, str, str, tuple[str, ...], tuple[str, ...]]] = {
    "stuck.collective": (
        "{name} is stuck in a collective{since}: {who_or_all}.",
        "The ranks wait for each other: one is missing, or they are in different collectives.",
        "the stacks of all ranks side by side: eyas why {target} --stacks",
        (
            _DUMP,
            "Compare the ranks, on all hosts: eyas why {target} --stacks{look_at}",
            "Then end the whole job: kill -TERM {launcher}",
        ),
        (
            "Do not wait for the time-out if the odd rank is known: it will not come back by itself.",
            "Do not end only one rank: the launcher decides what becomes of the others.",
        ),
    ),
    "stuck.p2p": (
        "{name} is stuck in its first exchange between GPUs{since}.",
        "The path between the GPUs does not work: peer-to-peer over PCIe, IOMMU or ACS, or a bad transport.",
        "whether NCCL_P2P_DISABLE=1 cures it",
        (
            "Try NCCL_P2P_DISABLE=1, then NCCL_DEBUG=INFO",
            "Look at the paths: nvidia-smi topo -m; is an IOMMU on? dmesg | grep -i iommu",
        ),
        ("Do not change the training code: no step was ever made.",),
    ),
    "stuck.rendezvous": (
        "{name} waits for ranks that have not come{since}: {who}.",
        "The ranks have not met: a node is missing, or the master's address or port is wrong.",
        "the store's worker count, or the state of the connection to MASTER_PORT",
        (
            "Check the missing nodes; from them: nc -zv $MASTER_ADDR $MASTER_PORT",
            (
                "Compare MASTER_ADDR, MASTER_PORT, WORLD_SIZE on all nodes: tr '\\0' '\\n' < /proc/{pid}/environ | grep"
                " -E 'MASTER|RANK|WORLD'"
            ),
        ),
        ("Do not restart one node alone: the others keep the old rendezvous.",),
    ),
    "stuck.worker-dead": (
        "{name} waits{since} for a batch that nobody makes: {who_or_worker}.",
        "A loader worker died, or the item it held was lost; the trainer waits for ever.",
        "the state of the workers: ps --ppid {pid} -o pid,stat,comm",
        (
            _DUMP,
            (
                "See the workers: ps --ppid {pid} -o pid,stat,etime,comm; why it died: journalctl -k | grep -i oom; df"
                " -h /dev/shm"
            ),
            "Then end it and resume from the last checkpoint: kill -TERM {pid}",
        ),
        ("Do not kill the remaining workers one by one: the trainer may hang on its pin-memory thread.",),
    ),
    "stuck.fork-lock": (
        "{name} is stuck{since}: its workers sleep on a lock that was copied, locked, by fork ({who}).",
        "A lock was held by another thread when the workers were forked; in the children nobody will ever release it.",
        "a native stack of a worker: the same lock frame in all of them",
        (
            _DUMP,
            (
                "End it (kill -TERM {pid}) and start with multiprocessing_context='spawn' or 'forkserver',"
                " TOKENIZERS_PARALLELISM=false, cv2.setNumThreads(0), OMP_NUM_THREADS=1"
            ),
        ),
        ("Do not wait: such a lock is never released.",),
    ),
    "stuck.deadlock": (
        "{name} is deadlocked{since}: {lock_words}.",
        "Threads of one process wait for each other.",
        "wake-ups: a deadlock has none, a loader that waits with a time-out has one every few seconds",
        (
            _DUMP,
            "See who holds what: eyas why {target} --stacks",
            "Then end it: kill -TERM {pid}; if that does nothing, kill -KILL {pid}",
        ),
        ("Do not attach gdb or blocking py-spy before the evidence is kept.",),
    ),
    "stuck.gpu-lost": (
        "{name} hangs on a GPU or its driver{since}: {gpu_words}",
        "The GPU fell off the bus, or the driver does not answer.",
        "an Xid or 'fallen off the bus' in the host's kernel log",
        (
            "Look for it: journalctl -k | grep -iE 'xid|nvrm|fallen off'",
            "Drain the node and have the GPU reset or the host rebooted by its operator",
        ),
        (
            "Do not use kill -9: a process inside the driver cannot die, and the GPU stays blocked.",
            "Do not run nvidia-smi again and again: each one may hang too.",
        ),
    ),
    "stuck.filesystem": (
        "{name} hangs in a file system that does not answer{since}: {path}.",
        "A file server, a FUSE daemon or a disk does not answer any more.",
        "a look at the mount with a deadline: timeout 5 stat -f {path}",
        (
            "Test it without hanging yourself: timeout -s KILL 5 stat -f {path}",
            "Look at the server or the daemon; when it is back, the process goes on by itself",
        ),
        (
            "Do not use kill -9 yet: a process in state D cannot die, and it may go on when the server is back.",
            "Do not ls or df that mount in your shell.",
        ),
    ),
    "stuck.lock-file": (
        "{name} waits for a lock{since}: {path}, held by {holder_words}.",
        "Another process holds a lock file, or died and left it behind.",
        "whether the holder lives: fuser -v {path}; cat /proc/locks",
        (
            "See the holder: fuser -v {path}; ps -o pid,etime,cmd -p {holder}",
            "Only when no process holds it and none compiles or downloads: remove the stale lock file",
        ),
        ("Do not delete the lock file while its holder lives: two writers would tear the cache.",),
    ),
    "stuck.input": (
        "{name} waits for {typist}{since}: {who}.",
        "It asks a question on its terminal or standard input, and nobody answers.",
        "a read of descriptor 0 in its system call",
        (
            (
                "Answer it where it was started, or start it without a terminal: < /dev/null, WANDB_MODE=offline,"
                " HF_HUB_DISABLE_TELEMETRY=1, yes-flags of the tool"
            ),
        ),
        ("Do not wait: no time-out ends this.",),
    ),
    "stuck.stdout-pipe": (
        "{name} is blocked on writing its output{since}: nobody reads the pipe.",
        "The reader of its output does not read; the pipe is full, and every further print blocks.",
        "the pipe's reader: lsof -p {pid} | grep pipe",
        (
            (
                "Let the reader go on (PID {reader}), or drain the pipe without stopping anything: timeout 1 cat"
                " /proc/{pid}/fd/1 > drained.txt"
            ),
            "Start it with its output to a file next time",
        ),
        ("Do not end the reader: the trainer would die of SIGPIPE.",),
    ),
    "stuck.stopped": (
        "{name} is stopped{since}{stop_words}: it does not run at all.",
        "A signal, a debugger or a frozen cgroup holds it.",
        "the state letter: T stopped, t traced, D with a frozen cgroup",
        ("Let it go on: {resume}",),
        ("Do not use kill -9: nothing is wrong with the run itself.",),
    ),
    "stuck.disk-full": (
        "{name} is stuck because {path} is full{since}.",
        "No space or no inodes are left where it writes.",
        "free blocks and inodes: df -h {path}; df -i {path}",
        (
            "Make room: df -h {path}; df -i {path}; du -xsh {path}/* | sort -h | tail",
            "Then check the last checkpoint for a torn file before resuming",
        ),
        ("Do not delete the newest complete checkpoint.",),
    ),
    "stuck.shm-full": (
        "{name} is stuck because /dev/shm is full{since}.",
        "Loader workers hand over batches through shared memory, and there is no more.",
        "df -h /dev/shm",
        (
            "df -h /dev/shm; ls -lS /dev/shm | head",
            "In a container: --shm-size or --ipc=host; or num_workers=0, or the file_system sharing strategy",
        ),
        ("Do not delete files in /dev/shm that a living process uses.",),
    ),
    "stuck.orphans": (
        "{name} is over, but processes it left behind live on ({who}).",
        "The parent died and its children did not; they may hold a GPU.",
        "their parent: PPID 1",
        ("See them: ps -o pid,ppid,etime,cmd -p {pids}", "End them: kill -TERM {pids}"),
        ("Do not start the next run before they are gone: the GPU memory is still taken.",),
    ),
    "stuck.livelock": (
        "{name} runs in circles{since}: it burns CPU and nothing comes of it{memory_words}.",
        "An endless loop, a retry without end, or memory that grows without end.",
        "the same frames in several stacks: eyas why {target} --stacks, three times",
        (_DUMP, "See the loop: eyas why {target} --stacks, three times"),
        ("Do not call it a loop from one stack.",),
    ),
    "stuck.download": (
        "{name} is stuck in a download{since}.",
        "A download does not advance, or is retried without end.",
        "whether the .incomplete file grows",
        (
            (
                "Test the network from this host: curl -sSIm 10 https://huggingface.co | head -1; check proxies and"
                " HF_ENDPOINT"
            ),
            "Download beforehand, then run with HF_HUB_OFFLINE=1",
        ),
        ("Do not delete the .incomplete file: a later try resumes from it.",),
    ),
}
