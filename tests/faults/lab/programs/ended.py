# Runs that end, each in its own way.
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time

how = sys.argv[1]
print("***** Running training *****\n  Total optimization steps = 40")
for step in range(1, 41):
    time.sleep(0.02)
    print({"loss": f"{8 / step:.4f}", "grad_norm": "1.2", "learning_rate": "5e-05", "epoch": f"{step / 40:.2f}"})
    if step == 17 and how in ("exception", "gpu-oom", "gpu-error"):

        class OutOfMemoryError(RuntimeError):
            __module__ = "torch"

        def training_step():
            if how == "exception":
                raise ValueError("expected input batch_size (32) to match target batch_size (31).")
            if how == "gpu-error":
                raise RuntimeError(
                    "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
                )
            raise OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB is free."
            )

        training_step()
    if step == 17 and how == "crash":
        faulthandler.enable()
        ctypes.string_at(8)
    if step == 17 and how == "eat":
        hoard = []
        while True:
            hoard.append(bytearray(b"x" * (4 << 20)))
            time.sleep(0.01)
    if step == 17 and how == "wait":
        time.sleep(600)
    if step == 17 and how == "time-limit":
        print(f"slurmstepd: error: *** JOB 4711 ON gpu7 CANCELLED AT {time.strftime('%FT%T')} DUE TO TIME LIMIT ***")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
print({"train_runtime": "812.3", "train_samples_per_second": "49.2", "train_loss": "1.234", "epoch": "1.0"})
print("Training completed. Model saved to ./out")
if how == "linger":
    import socket

    link = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    upload = threading.Thread(target=lambda: link.recv(1))
    upload.start()
    print("wandb: Waiting for W&B process to finish... (success).", flush=True)
    upload.join()
