# Reads its data set by mmap over and over, in random order; the memory that it may use is far smaller.
import mmap
import os
import random
import sys

with open(sys.argv[1], "rb") as f:
    m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    size = os.path.getsize(sys.argv[1])
    print("***** Running training *****", flush=True)
    step, total = 0, 0
    while True:
        step += 1
        for _ in range(300):
            total += m[random.randrange(size)]
        print(f"step {step} loss {8 / step**0.3:.4f}", flush=True)
