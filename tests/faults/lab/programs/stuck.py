# Loops that stop for ever at some step.
import fcntl
import os
import sys
import threading
import time

how = sys.argv[1]
arg = sys.argv[2] if len(sys.argv) > 2 else None
print("***** Running training *****", flush=True)
first, second = threading.Lock(), threading.Lock()


def crossed(a, b):
    with a:
        time.sleep(0.3)
        with b:
            pass


for step in range(1, 26):
    time.sleep(0.1)
    sum(i * i for i in range(20000))
    print(f"step {step}/1000 loss {8 / step:.4f}", flush=True)
if how == "deadlock":
    other = threading.Thread(target=crossed, args=(second, first))
    other.start()
    crossed(first, second)
elif how == "spin":
    n = 1
    while n:
        n = n + 1 if n < 1000 else 1
elif how == "flock":
    lock = open(arg, "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    time.sleep(3600)
elif how == "filelock":
    from filelock import FileLock

    with FileLock(arg):
        time.sleep(3600)
elif how == "read":
    f = open(arg, "rb", buffering=0)
    while f.read(65536):
        pass
elif how == "input":
    input("Overwrite ./out? [y/N] ")
elif how == "flood":
    while True:
        step += 1
        print(f"step {step}/1000000 loss {8 / step:.4f} " + "." * 80)
elif how == "disk":
    os.makedirs(arg, exist_ok=True)
    print(f"Saving checkpoint to {arg}", flush=True)
    told = False
    with open(f"{arg}/checkpoint-25.pt", "wb", buffering=0) as f:
        while True:
            try:
                f.write(b"x" * 65536)
            except OSError as error:
                if not told:
                    print(f"OSError: [Errno 28] {error.strerror}: '{arg}/checkpoint-25.pt', will try again", flush=True)
                told = True
                time.sleep(1)
elif how == "vfork":
    import ctypes

    libc = ctypes.CDLL(None)
    if libc.vfork() == 0:
        libc.sleep(3600)
        libc._exit(0)
elif how == "wait":
    time.sleep(3600)
