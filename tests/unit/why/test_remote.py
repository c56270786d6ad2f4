"""How the question gets to the probe and the answer back."""

from __future__ import annotations

import ast
import json

import pytest

from eyas.why import probe, remote
from eyas.why.shell import SHELL_COLLECTOR, parse_shell
from eyas.why.target import UsageError


def test_the_question_travels_as_data_whatever_it_says() -> None:
    nasty = "x\"'''\\\n$(rm -rf /)`id`\udc80\U0001f600"
    text = remote._payload({"value": nasty, "nonce": "n"})
    first = text.split("\n", 1)[0]
    assert first.isascii()
    tree = ast.parse(text.split("\n", 1)[0])
    assert json.loads(ast.literal_eval(tree.body[0].value))["value"] == nasty  # type: ignore[attr-defined]


def test_the_remote_command_holds_nothing_of_the_target() -> None:
    command = [*remote.ssh_command("host"), remote.REMOTE]
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command and "ConnectTimeout=6" in command and "-T" in command
    assert command[-3:-1] == ["--", "host"], "what follows -- is no option"
    assert "{" not in remote.REMOTE and "!" not in remote.REMOTE


def test_the_control_socket_has_a_private_short_place() -> None:
    path = remote.control_path()
    assert path is None or (path.endswith("%C") and len(path) < 60)


@pytest.mark.parametrize("host", ["-oProxyCommand=touch /tmp/x", "a b", "a;b", "u@-x"])
def test_a_host_that_could_be_an_option_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        remote.ask({"kind": "search"}, 1.0, host)


def test_banners_and_noise_are_no_answer() -> None:
    framed = probe.frame({"schema": "s"}, "abc")
    assert remote.unframe(b"Welcome!\n@@eyas zzz 3\n{}\n" + framed + b"bye", "abc") == {"schema": "s"}
    assert remote.unframe(framed, "other") is None
    assert remote.unframe(framed[:-30], "abc") is None, "cut off"
    assert remote.unframe(b"", "abc") is None


def test_sampling_fits_into_the_time_given() -> None:
    assert remote.sampling_times(10) == [0.0, 1.0, 3.0]
    assert remote.sampling_times(3)[-1] < 1.5
    assert remote.sampling_times(0.5)[-1] > 0


def test_the_sh_collector_gives_a_reduced_snapshot() -> None:
    n = "abc"
    stat = "77 (python) D 1 77 77 0 -1 0 0 0 0 0 {} 0 0 0 20 0 2 0 500 0 100 " + "0 " * 14 + "0 0 0 0 0 0 0 0 0 0 0 0 0"
    body = [("begin", "1700000000"), ("uname", "gpu7\n5.15.0\naarch64"), ("ids", "1000\n100\n4096"), ("pid", "77")]
    for round_, ticks in ((0, 100), (1, 200)):
        body += [
            (f"sample {round_}", f"{1000 + round_}.00 5.0"),
            (f"host {round_} loadavg", "1.0 2.0 3.0 1/2 3"),
            (f"proc {round_} 77 stat", stat.format(ticks)),
            (
                f"proc {round_} 77 status",
                "Name:\tpython\nState:\tD (disk sleep)\nUid:\t1000\t1000\t1000\t1000\nTracerPid:\t0\n",
            ),
            (f"proc {round_} 77 wchan", "folio_wait_bit_common"),
            (f"proc {round_} 77 io", "rchar: 10\nread_bytes: 20\n"),
            (f"proc {round_} 77 syscall", "63 0x3 0 0 0 0 0 0x1 0x2"),
        ]
    body += [
        (
            "fds 77",
            "total 0\nlrwx------ 1 u g 64 Jan 1 00:00 3 -> /data/a b.pt\nl-wx------ 1 u g 64 Jan 1 00:00 1 -> /x/log (deleted)\n",
        ),
        ("fdinfo 77", "fd 3\npos:\t4096\nflags:\t0100000\n"),
        ("cmdline 77", "python\ntrain.py\n--hf_token\nhf_abcdefghijkl\n"),
        ("log", "/x/log\n5\n1699999990"),
        ("logtail", " 68 65 6c 6c 6f\n"),
        ("end", ""),
    ]
    text = "motd noise\n" + "".join(f"\n@@{n} {name}\n{content}\n" for name, content in body)
    snap = parse_shell(text, n, {"asked": "gpu7:77", "kind": "pid", "host": "gpu7"})
    assert snap is not None
    assert snap["meta"]["reduced"] and snap["target"]["exists"]
    first, second = snap["samples"]
    assert second["t"] == 1.0
    assert second["procs"]["77"]["stat"]["utime"] - first["procs"]["77"]["stat"]["utime"] == 1.0
    call = second["procs"]["77"]["syscall"]
    assert (call["name"], call["path"]) == ("read", "/data/a b.pt"), "the arm64 table, and the descriptor's name"
    assert second["procs"]["77"]["fds"]["3"]["pos"] == 4096
    assert second["procs"]["77"]["fds"]["1"]["deleted"] is True
    assert snap["processes"]["77"]["cmdline"] == ["python", "train.py", "--hf_token", "***"]
    assert snap["logs"][0]["tail"]["b64"] == "aGVsbG8="
    assert snap["not_visible"]


def test_the_sh_collector_is_not_believed_when_it_never_began() -> None:
    assert parse_shell("sh: not found", "abc", {}) is None


def test_the_sh_collector_writes_nothing() -> None:
    code = "\n".join(line for line in SHELL_COLLECTOR.splitlines() if not line.strip().startswith("#"))
    assert ">" not in code.replace("2>/dev/null", ""), "no redirection but of errors to nowhere"
    for word in ("kill", "rm ", "mv ", "touch", "mkdir", "tee "):
        assert word not in code
