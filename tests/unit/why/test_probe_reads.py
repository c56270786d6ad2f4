"""What the probe makes of the kernel's texts."""

from __future__ import annotations

import os

import pytest

from eyas.why import probe


def test_a_process_name_may_hold_blanks_and_brackets() -> None:
    fields = (
        "S 1 10 10 0 -1 4194304 5 0 7 0 250 50 1 2 20 0 3 0 12345 1000 25 "
        + "0 " * 13
        + "17 1 3 0 9 0 0 0 0 0 0 0 0 0 0 256"
    )
    seen = probe.parse_stat(f"42 (a) R (b) {fields}".encode())
    assert seen is not None
    assert (seen["comm"], seen["state"], seen["ppid"], seen["majflt"], seen["threads"]) == ("a) R (b", "S", 1, 7, 3)
    assert seen["utime"] == 250 / probe.TICK
    assert seen["rss"] == 25 * probe.PAGE


def test_own_stat_agrees_with_what_python_knows() -> None:
    seen = probe.stat_of(os.getpid())
    assert seen is not None
    assert seen["ppid"] == os.getppid()
    assert seen["state"] == "R"


def test_rubbish_is_no_process() -> None:
    assert probe.parse_stat(b"") is None
    assert probe.parse_stat(b"12 (x) S 1") is None


X86, ARM = probe.syscall_names("x86_64"), probe.syscall_names("aarch64")


@pytest.mark.parametrize(
    ("names", "blob", "expect"),
    [
        (X86, b"0 0x25 0x7f 0x1000 0 0 0 0x1 0x2", {"name": "read", "fd": 37}),
        (ARM, b"63 0x25 0x7f 0x1000 0 0 0 0x1 0x2", {"name": "read", "fd": 37}),
        (X86, b"202 0x7f00 0x80 0 0 0 0 0x1 0x2", {"name": "futex", "uaddr": 0x7F00, "op": "wait", "timeout": False}),
        (
            X86,
            b"202 0x7f00 0x189 0 0x7ffd 0 0xffffffff 0x1 0x2",
            {"name": "futex", "op": "wait_bitset", "timeout": True},
        ),
        (ARM, b"98 0x7f00 0x86 0 0 0 0 0x1 0x2", {"name": "futex", "op": "lock_pi", "timeout": False}),
        (X86, b"7 0x7f 0x1 0x1388 0 0 0 0x1 0x2", {"name": "poll", "timeout": True}),
        (X86, b"7 0x7f 0x1 0xffffffff 0 0 0 0x1 0x2", {"name": "poll", "timeout": False}),
        (X86, b"232 0x5 0x7f 0x100 0xffffffffffffffff 0 0 0x1 0x2", {"name": "epoll_wait", "fd": 5, "timeout": False}),
        (ARM, b"22 0x5 0x7f 0x100 0x64 0 0 0x1 0x2", {"name": "epoll_pwait", "fd": 5, "timeout": True}),
        (X86, b"61 0xffffffffffffffff 0 0 0 0 0 0x1 0x2", {"name": "wait4", "pid": -1, "timeout": False}),
        (X86, b"73 0x3 0x2 0 0 0 0 0x1 0x2", {"name": "flock", "fd": 3}),
        (X86, b"230 0 0 0x7f 0 0 0 0x1 0x2", {"name": "clock_nanosleep", "timeout": True}),
        (X86, b"running", {"name": "running", "nr": None}),
        (X86, b"-1 0x7ffe 0x7f00", {"name": "none", "nr": -1}),
        ({}, b"77 0 0 0 0 0 0 0x1 0x2", {"name": "syscall_77"}),
    ],
)
def test_a_system_call_says_what_it_waits_for(names: dict[int, str], blob: bytes, expect: dict[str, object]) -> None:
    call = probe.parse_syscall(blob, names)
    assert call is not None
    assert {k: call.get(k) for k in expect} == expect


def test_both_tables_know_the_calls_that_block() -> None:
    for table in (X86, ARM):
        known = set(table.values())
        assert {
            "read",
            "write",
            "futex",
            "epoll_pwait",
            "flock",
            "fsync",
            "recvfrom",
            "connect",
            "openat",
            "io_uring_enter",
            "cachestat",
        } <= known
    assert (X86[451], ARM[451]) == ("cachestat", "cachestat")
    assert (X86[0], X86[202], X86[257]) == ("read", "futex", "openat")
    assert (ARM[56], ARM[63], ARM[98], ARM[113]) == ("openat", "read", "futex", "clock_gettime")


@pytest.mark.parametrize(
    ("link", "kind"),
    [
        ("pipe:[77]", "pipe"),
        ("socket:[12]", "socket"),
        ("anon_inode:[eventpoll]", "eventpoll"),
        ("/dev/null", "null"),
        ("/dev/pts/3", "tty"),
        ("/dev/nvidia0", "nvidia"),
        ("/dev/shm/torch_1", "shm"),
        ("/data/x.pt", "file"),
        ("/memfd:x (deleted)", "memfd"),
        ("anon_inode:bpf-map", "anon"),
    ],
)
def test_a_descriptor_is_known_by_its_link_alone(link: str, kind: str) -> None:
    assert probe.link_kind(link) == kind


def test_the_inode_of_a_pipe_is_read() -> None:
    assert probe.bracket("pipe:[77]") == 77
    assert probe.bracket("/data/x.pt") is None


@pytest.mark.parametrize(
    ("line", "expect"),
    [
        ("python train.py -u", ("train.py", None, False)),
        ("python -u train.py", ("train.py", None, True)),
        ("python -m torch.distributed.run x.py", (None, "torch.distributed.run", False)),
        ("python3 -X dev -W ignore -um pkg.train", (None, "pkg.train", True)),
        ("python -c print()", (None, None, False)),
        ("python -Xutf8 run.py", ("run.py", None, False)),
        ("python", (None, None, False)),
    ],
)
def test_the_script_of_a_python_command_line_is_found(line: str, expect: tuple[str | None, str | None, bool]) -> None:
    assert probe.python_entry(line.split()) == expect


def test_secrets_on_a_command_line_are_masked_and_training_options_are_not() -> None:
    line = (
        "python train.py --hf_token hf_abcdefghijkl --api-key=sk-abcdefghijk --wandb_api_key 0123 --password pw --max_tokens 99 "
        "batch_tokens=512 --tokenizer t --author me --data https://me:secret@host/x --key_dim 3 lr=1e-4"
    )
    masked = " ".join(probe.masked_args(line.split()))
    for secret in ("hf_abc", "sk-abc", "0123", "pw", "me:secret"):
        assert secret not in masked, secret
    for kept in ("--max_tokens 99", "batch_tokens=512", "--tokenizer t", "--author me", "--key_dim 3", "lr=1e-4"):
        assert kept in masked, kept


def test_tcp_tables_of_both_families_are_read() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    four = (
        head
        + "   0: 0100007F:1F90 0200007F:C350 01 00000010:00000020 01:00000014 00000003  1000        0 555 1 0 20 4 30 10 -1\n"
    )
    (row,) = probe.parse_tcp(four, "tcp", {555})
    assert (row["local"], row["lport"], row["peer"], row["pport"]) == ("127.0.0.1", 8080, "127.0.0.2", 50000)
    assert (row["state"], row["tx_queue"], row["rx_queue"], row["retrans"]) == ("ESTABLISHED", 16, 32, 3)
    six = (
        head
        + "   0: 00000000000000000000000001000000:01BB 0000000000000000FFFF00000100007F:0016 02 0:0 00:0 0 0 0 556 1\n"
    )
    (row,) = probe.parse_tcp(six, "tcp6", {556})
    assert (row["local"], row["peer"], row["state"]) == ("::1", "127.0.0.1", "SYN_SENT")
    assert probe.parse_tcp(four, "tcp", {1}) == []


def test_waiters_of_a_lock_stand_with_its_holder() -> None:
    blob = "1: FLOCK  ADVISORY  WRITE 100 fe:00:77 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 101 fe:00:77 0 EOF\n2: POSIX  ADVISORY  READ 102 fe:00:78 0 EOF\n"
    first, second = probe.parse_locks(blob)
    assert (first["holder"], first["waiters"], first["ino"], first["mode"]) == (100, [101], 77, "WRITE")
    assert (second["holder"], second["type"], second["waiters"]) == (102, "POSIX", [])


def test_a_path_is_placed_on_its_mount_without_touching_it() -> None:
    blob = (
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "40 27 0:50 / /mnt/my\\040data rw - nfs4 server:/x rw,vers=4.2\n"
        "41 40 0:51 / /mnt/my\\040data/sub ro - fuse.s3fs s3fs rw\n"
    )
    mounts = probe.parse_mountinfo(blob)
    assert probe.mount_of(mounts, "/mnt/my data/a/b.pt") == 40
    assert probe.mount_of(mounts, "/mnt/my data/sub/x") == 41
    assert probe.mount_of(mounts, "/mnt/my dataset") == 27
    assert (mounts[40]["network"], mounts[41]["fuse"], mounts[41]["ro"], mounts[27]["network"]) == (
        True,
        True,
        True,
        False,
    )


def test_pressure_is_read() -> None:
    found = probe.parse_pressure(
        "some avg10=1.50 avg60=0.10 avg300=0.00 total=77\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=5\n"
    )
    assert found is not None
    assert (found["some"]["avg10"], found["full"]["total_us"]) == (1.5, 5)
    assert probe.parse_pressure(None) is None


SMI = """index, uuid, utilization.gpu [%], memory.used [MiB], memory.total [MiB], power.draw [W], clocks.current.sm [MHz], clocks_event_reasons.active
0, GPU-a, 0, 16785, 81559, 71.20, 345, 0x0000000000000001
1, GPU-b, [N/A], 10, 81559, [Unknown Error], 1980, 0x0000000000000024
"""


def test_nvidia_smi_is_read_by_its_header() -> None:
    first, second = probe.parse_smi("some banner\n" + SMI)
    assert (first["util"], first["mem_used"], first["power_w"], first["sm_mhz"], first["reasons"]) == (
        0,
        16785 << 20,
        71.2,
        345,
        ["idle"],
    )
    assert "util" not in second and "power_w" not in second, "what was not told is no zero"
    assert second["reasons"] == ["sw_power_cap", "sw_thermal"]


def test_nvidia_smi_with_units_in_the_cells_is_read_too() -> None:
    (row,) = probe.parse_smi("utilization.gpu [%], memory.used [MiB], mig.mode.current\n97 %, 1024 MiB, Disabled\n")
    assert (row["util"], row["mem_used"], row["mig"]) == (97, 1 << 30, False)


def test_names_that_are_no_utf8_do_not_spoil_the_answer() -> None:
    framed = probe.frame({"a": "x\udc80y", "b": "\U0001f600"}, "n")
    assert b"\\udc80" not in framed
    assert b"\\ud83d\\ude00" in framed
