# A loader by hand: workers take indices and give batches; the trainer waits without a limit.
import multiprocessing as mp
import os
import sys
import time

mode = sys.argv[1]


def work(jobs, done):
    while True:
        i = jobs.get()
        time.sleep(0.1)
        if mode == "shm":
            with open(f"/dev/shm/torch_{os.getpid()}_{i}", "wb") as f:
                warned = False
                for _ in range(64):
                    while True:
                        try:
                            f.write(b"x" * (1 << 20))
                            f.flush()
                            break
                        except OSError as error:
                            if not warned:
                                print(
                                    f"RuntimeError: unable to write to file </torch_{os.getpid()}>: {error.strerror} (28): unable to allocate shared memory(shm)",
                                    flush=True,
                                )
                            warned = True
                            time.sleep(0.5)
        done.put(i)


if __name__ == "__main__":
    jobs, done = mp.Queue(), mp.Queue()
    pool = [mp.Process(target=work, args=(jobs, done)) for _ in range(int(sys.argv[2]))]
    for w in pool:
        w.start()
    print("***** Running training *****", flush=True)
    for i in range(len(pool)):
        jobs.put(i)
    for step in range(1, 100000):
        i = done.get()
        print(f"step {step} loss {8 / step:.4f}", flush=True)
        if step == 30 and mode == "dead":  # the kernel's OOM killer would do it like this
            for w in pool:
                os.kill(w.pid, 9)
        jobs.put(i)
