# A torch DataLoader over files; the items decide what is slow.
import os
import socket
import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

kind, folder, workers, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lock = threading.Lock()


class Items(Dataset):
    def __init__(self):
        self.names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []

    def __len__(self):
        return 100000

    def __getitem__(self, i):
        if kind == "decode":  # as a JPEG or audio decoder: computes all the time
            if self.names:
                with open(os.path.join(folder, self.names[i % len(self.names)]), "rb") as f:
                    f.read()
            end = time.process_time() + 0.4
            while time.process_time() < end:
                sum(x * x for x in range(1000))
        elif kind == "files":
            with open(os.path.join(folder, self.names[i % len(self.names)]), "rb", buffering=0) as f:
                while f.read(1 << 20):
                    pass
        elif kind == "service":
            with socket.create_connection(("127.0.0.1", int(folder))) as link:
                link.sendall(b"POST /hidden_states HTTP/1.1\r\n\r\n")
                link.recv(4096)
        elif kind == "lock":
            with lock:
                pass
        return torch.zeros(16)


def hold():
    with lock:
        time.sleep(3600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("loading data ...\nmodel: 1.2 B parameters, 24 layers\nepoch 1 begins", flush=True)
    if kind == "lock":
        threading.Thread(target=hold, daemon=True).start()
        time.sleep(0.2)
    for step, _ in enumerate(
        DataLoader(Items(), batch_size=batch, num_workers=workers, prefetch_factor=2 if workers else None), 1
    ):
        time.sleep(0.02)
        print(f"step {step} loss {8 / step**0.3:.4f}", flush=True)
