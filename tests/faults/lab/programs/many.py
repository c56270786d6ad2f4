# 500 threads that idle, 5,000 open files, and a main thread that works.
import os
import sys
import threading
import time

threads, files = int(sys.argv[1]), int(sys.argv[2])
threading.stack_size(64 * 1024)
for _ in range(threads):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
held = [os.open("train.py", os.O_RDONLY) for _ in range(files)]
print("***** Running training *****", flush=True)
for step in range(1, 100000):
    sum(i * i for i in range(100000))
    time.sleep(0.2)
    print(f"step {step} loss {8 / step**0.3:.4f}", flush=True)
