"""Page-aligned buffers that are used again and again: a fresh one of 100 MB costs ten times a copy in page faults.

A lease is an array over one buffer. When the last array and tensor over it is gone, the buffer is free again: nobody
has to give anything back, and nobody who still looks at a buffer has it overwritten. So the ring never blocks: what
bounds its memory is how many leases are alive (train/batches.py decides). It finds its buffers' size itself.

On CUDA the buffers are registered, so that the device can fetch from them while the host goes on. torch's own pinned
memory would be rounded up to a power of two.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import weakref

import numpy as np
import numpy.typing as npt
import torch

_UNIT = 2 << 20  # sizes of buffers


class _Buffer:
    """Anonymous memory, page-aligned; registered with CUDA for `device` where one is given."""

    def __init__(self, nbytes: int, device: torch.device | None) -> None:
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes, self.address = nbytes, 0
        # Direct I/O into pages of 4 KiB is cut into pieces where they do not lie together in the machine's memory: it
        # reached half of what it reaches into huge pages, at twice the CPU time (bench/RESULTS.md).
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        if device is not None:
            address = np.frombuffer(self.memory, np.uint8).ctypes.data
            with torch.cuda.device(device):
                # Where CUDA refuses (a limit on locked memory) copies go the slow way, and nothing else changes.
                if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:  # type: ignore[no-untyped-call]
                    self.address = address

    def __del__(self) -> None:
        if getattr(self, "address", 0) and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


class Ring:
    """Buffers of one kind. device: the CUDA device that shall fetch from them, or None. For many threads."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: list[_Buffer] = []
        self._largest = 0
        self.made = 0  # buffers allocated so far

    def lease(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """`nbytes` bytes, uint8, page-aligned, of any content; the caller's for as long as it or a view of it lives."""
        with self._lock:
            fitting = [b for b in self._free if b.nbytes >= nbytes]
            buffer = min(fitting, key=lambda b: b.nbytes, default=None)
            if buffer is not None:
                self._free.remove(buffer)
            elif self._free:  # all of them are too small: one makes room for a larger one
                self._free.pop()
            self._largest = max(self._largest, nbytes)
        if buffer is None:
            buffer = _Buffer(max(1, -(-self._largest // _UNIT)) * _UNIT, self._device)
            self.made += 1
        lease = np.frombuffer(buffer.memory, np.uint8, nbytes)
        # Views of an array keep the array, not what it was made over, as long as that is no array itself.
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return lease
