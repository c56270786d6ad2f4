"""A file system that can be slow or stop answering: a FUSE server in a process of its own, in plain Python (root only).

    with MiniFuse(mountpoint, {"data.bin": 1 << 20}, read_delay=0.2) as fs:
        ...
        fs.hang()      # from now on no request is answered; what waits for one waits for ever

Leaving the block ends the server, which lets everybody go who waits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

ATTR = struct.Struct("<6Q10I")
HEAD = struct.Struct("<IIQQIIII")


class MiniFuse:
    def __init__(self, mountpoint: Path, files: dict[str, int], read_delay: float = 0.0) -> None:
        self.mountpoint, self.files, self.read_delay = mountpoint, files, read_delay
        self.server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MiniFuse:
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        words = [f"{name}={size}" for name, size in self.files.items()]
        self.server = subprocess.Popen(
            [sys.executable, __file__, str(self.mountpoint), str(self.read_delay), *words],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.server.stdout is not None
        said = self.server.stdout.readline()
        assert said == b"mounted\n", said
        return self

    def hang(self) -> None:
        """Stop answering."""
        assert self.server is not None
        self.server.send_signal(signal.SIGUSR1)
        time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        ctypes.CDLL(None).umount2(str(self.mountpoint).encode(), 2)  # MNT_DETACH


def _attr(node: int, files: list[tuple[str, int]]) -> bytes:
    directory = node == 1
    size = 0 if directory else files[node - 2][1]
    mode = 0o040755 if directory else 0o100644
    when = 1_700_000_000
    return ATTR.pack(node, size, size // 512, when, when, when, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer(op: int, node: int, body: bytes, files: list[tuple[str, int]], delay: float) -> bytes | int | None:
    """The reply to a request: bytes, an error number, or None for requests without reply."""
    if op == 26:  # INIT
        return struct.pack("<IIIIHHIIHHI7I", 7, 31, 65536, 0, 16, 12, 131072, 1, 32, 0, 0, *[0] * 7)
    if op == 1:  # LOOKUP
        name = body.split(b"\0")[0].decode()
        found = next((i + 2 for i, (n, _) in enumerate(files) if n == name), None)
        if found is None:
            return errno.ENOENT
        return struct.pack("<QQQQII", found, 0, 0, 0, 0, 0) + _attr(found, files)
    if op == 3:  # GETATTR
        return struct.pack("<QII", 0, 0, 0) + _attr(node, files)
    if op in (14, 27):  # OPEN, OPENDIR
        return struct.pack("<QII", 0, 0, 0)
    if op == 28:  # READDIR
        offset = struct.unpack_from("<QQI", body)[1]
        out = b""
        for index, (name, _) in enumerate(files[offset:], start=offset):
            raw = name.encode()
            out += struct.pack("<QQII", index + 2, index + 1, len(raw), 8) + raw + b"\0" * (-len(raw) % 8)
        return out
    if op == 15:  # READ
        _, offset, size = struct.unpack_from("<QQI", body)
        time.sleep(delay)
        return b"\1" * max(0, min(size, files[node - 2][1] - offset))
    if op == 17:  # STATFS
        return struct.pack("<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 100, 50, 4096, 255, 4096, 0, *[0] * 6)
    if op in (18, 25, 29):  # RELEASE, FLUSH, RELEASEDIR
        return b""
    if op in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET
        return None
    return errno.ENOSYS


def serve(mountpoint: str, delay: float, files: list[tuple[str, int]]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"minifuse", mountpoint.encode(), b"fuse.minifuse", 0, options) != 0:
        print("mount failed:", os.strerror(ctypes.get_errno()), flush=True)
        sys.exit(1)
    hung = []
    signal.signal(signal.SIGUSR1, lambda *_: hung.append(True))
    print("mounted", flush=True)
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError:
            return
        if hung:
            continue
        _, op, unique, node, *_ = HEAD.unpack_from(request)
        reply = _answer(op, node, request[HEAD.size :], files, delay)
        if hung or reply is None:
            continue
        error = -reply if isinstance(reply, int) else 0
        payload = b"" if isinstance(reply, int) else reply
        os.write(device, struct.pack("<IiQ", 16 + len(payload), error, unique) + payload)


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), [(n, int(s)) for n, s in (word.split("=") for word in sys.argv[3:])])
