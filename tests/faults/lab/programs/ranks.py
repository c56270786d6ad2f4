# One rank of a job with gloo; the first word says what goes wrong.
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

mode = sys.argv[1]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
print(f"[rank{rank}]: initializing process group, world_size={size}", flush=True)
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=20))
other = dist.new_group(backend="gloo")
t = torch.ones(1000)


def busy(seconds):
    end = time.time() + seconds
    while time.time() < end:
        sum(i * i for i in range(1000))


for step in range(1, 100000):
    slow = 4.0 if mode == "straggler" and rank == 1 and step > 4 else 0.2 if mode != "even" else 0.5
    busy(slow) if mode == "straggler" else time.sleep(slow)
    if step == 12:
        if mode == "mismatch" and rank == 2:  # one rank leaves the loop early and waits at the end
            dist.barrier(group=other)
        if mode == "crash" and rank == 1:
            raise ValueError(f"bad sample in shard {rank}")
        if mode == "kill" and rank == 1:
            os.kill(os.getpid(), 9)
        if mode == "leave":
            if rank == 1:
                os._exit(3)
            dist.distributed_c10d._get_default_store().get("never")
    dist.all_reduce(t)
    t.fill_(1)
    if rank == 0:
        print(f"step {step}/1000 loss {8 / step**0.3:.4f}", flush=True)
