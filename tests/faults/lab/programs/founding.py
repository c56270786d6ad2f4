# The case that eyas why was started from: a drafter's first epoch over large files that are not in memory.
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

folder, count = sys.argv[1], int(sys.argv[2])


class States(Dataset):
    def __len__(self):
        return count

    def __getitem__(self, i):
        path = os.path.join(folder, f"data_{9140 + i % 16}.pt")
        with open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return torch.load(path)["hidden_states"][:1, :1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for i in range(49):
        print(f"[11:51:{i % 60:02d}] INFO     config.{i}: value", flush=True)
    for step, _ in enumerate(DataLoader(States(), batch_size=4, num_workers=4, prefetch_factor=2), 1):
        time.sleep(0.02)
        if step % 50 == 0:
            print(f"step {step} loss 7.1", flush=True)
