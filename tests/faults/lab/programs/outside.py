# Runs that came from outside the lab's own habits; the first word says which.
import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time

mode = sys.argv[1]


def burn(seconds):
    end = time.time() + seconds
    while time.time() < end:
        sum(i * i for i in range(500))


def steps(n, pause=0.3):
    for s in range(1, n):
        time.sleep(pause)
        print(f"step {s} loss {2 / s:.3f}", flush=True)


def tokens(i):
    random.seed(i)
    return sum(len(w) for _ in range(60) for w in " ".join(str(random.random()) for _ in range(3000)).split())


def item(i):
    time.sleep(0.5)
    if i == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


def rank(r, port, odd):
    import datetime

    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(r), WORLD_SIZE="3")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    for s in range(1, 10**6):
        time.sleep(0.3)
        if odd and s == 25 and r == 1:
            time.sleep(5000)
        dist.all_reduce(torch.ones(10))
        if r == 0:
            print(f"{s}/20000 loss: {2 / s:.3f}", flush=True)


if __name__ == "__main__":
    if mode == "pool":  # tokenising before the first step
        import multiprocessing as mp

        print("loaded 3 files, 91231 documents", flush=True)
        with mp.Pool(2) as p:
            sum(p.imap_unordered(tokens, range(10**6)))
    elif mode == "episodes":
        for s in range(1, 10**6):
            burn(0.1)
            time.sleep(0.7)
            print(f"Episode {s} reward {s * 0.3:.2f} eps 0.10", flush=True)
    elif mode == "lines":  # one line a batch of 40 that come over standard input
        for n, _ in enumerate(sys.stdin.buffer):
            if n % 40 == 39:
                print(f"batch {n // 40} loss {5 / n:.4f}", flush=True)
    elif mode == "feed":
        while True:
            burn(0.4)
            print("x" * 100, flush=True)
    elif mode == "lost":  # nobody reads what it prints
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        while True:
            burn(0.4)
            time.sleep(0.3)
            with contextlib.suppress(OSError):
                print("step loss 1.0", flush=True)
    elif mode == "child":  # a program computes for it
        steps(20)
        subprocess.run(["sh", "-c", "i=0; while :; do i=$((i+1)); done"])
    elif mode == "evaluates":  # without a word, in small matrices that need no new memory
        import numpy as np

        steps(30, 0.2)
        a = np.ones((200, 200))
        while True:
            np.dot(a, a, out=np.empty_like(a))
    elif mode in ("spawn", "spawn-odd"):
        import torch.multiprocessing as tmp

        tmp.spawn(rank, nprocs=3, args=(sys.argv[2], mode == "spawn-odd"))
    elif mode == "worker":
        import torch

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 10**7

            def __getitem__(self, i):
                time.sleep(0.02)
                return torch.ones(8)

        it = iter(torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2))
        for s in range(1, 10**6):
            next(it)
            time.sleep(0.3)
            print(f"step {s} loss {2 / s:.3f}", flush=True)
            if s == 20:
                os.kill(it._workers[1].pid, signal.SIGSTOP)
    elif mode == "thread":
        q = queue.Queue(4)

        def produce():
            for i in range(10**6):
                if i == 25:
                    raise ValueError("corrupt record 25 in part-0007")
                q.put(i)

        threading.Thread(target=produce).start()
        for s in range(1, 10**6):
            q.get()
            time.sleep(0.3)
            print(f"step {s} loss {2 / s:.3f}", flush=True)
    elif mode == "asks":
        steps(20)
        subprocess.run([sys.executable, "-c", "input('overwrite results? ')"])
    elif mode == "ring":
        echo = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
        p = subprocess.Popen([sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        steps(20)
        p.stdout.readline()
    elif mode == "pool-killed":  # one of two workers is killed with an item in its hands
        import multiprocessing as mp

        with mp.Pool(2) as pool:
            steps(20)
            pool.map(item, range(24), chunksize=1)
    elif mode == "fetches":  # a program asks for data, and the other side says nothing
        asked = socket.create_server(("127.0.0.1", 0))
        code = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
        steps(20)
        subprocess.run([sys.executable, "-c", code, str(asked.getsockname()[1])])
    elif mode == "serves":  # nobody asks it anything
        server = socket.create_server(("127.0.0.1", 0))
        print("listening", flush=True)
        server.accept()
    elif mode == "fifo":
        steps(20)
        os.mkfifo("batches")
        open("batches", "rb").read()
    elif mode == "threads-left":
        threading.Thread(target=queue.Queue().get).start()
        steps(20)
        raise RuntimeError("shape mismatch: [8, 128] vs [8, 127]")
    elif mode == "code":
        print("loading config", flush=True)
        print("ERROR: dataset /data/train.bin not found", file=sys.stderr)
        sys.exit(3)
    elif mode == "retries":
        import urllib.request

        steps(20)
        for n in range(1, 10**6):
            try:
                urllib.request.urlopen("http://127.0.0.1:9/shard-41.tar", timeout=5)
            except OSError as error:
                print(f"WARNING shard-41.tar: {error}; retry {n} in {min(2**n, 60)} s", flush=True)
                time.sleep(min(2**n, 60))
    elif mode == "disk":  # says nothing about it
        steps(20)
        while True:
            try:
                with open("out/weights.pt", "wb") as f:
                    f.write(bytes(16 << 20))
                break
            except OSError:
                time.sleep(4)
