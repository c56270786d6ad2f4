"""Any bytes, in bounded time: rubbish, one giant line, carriage returns only."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loglines import NOW, bar, redraws, said

from eyas.why.logs.reader import TAIL_BYTES, read, read_path

PIECES = [
    "\r", "\n", "\b", "\x1b[", "\x1b]0;", "\0", "100%|", "|", "[", "]", "<", "{'", "': ", "{", "}", '"', "step ", "12", "/", ",",
    "loss", "=", ": ", "Traceback (most recent call last):", "━", " " * 20, "Epoch ", "iteration ", "[rank", "2025-10-09 10:00:00",
    "Killed", "exitcode", "SeqNum=", "nan", "1e999", "9" * 40, "it/s", "\ufffd", "é", "[y/N]", "ms", "-", ".", "SamplesPerSec=", "(", ")",
]  # fmt: skip


@given(st.binary(max_size=2000))
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_facts(data: bytes) -> None:
    json.dumps(said(data).to_dict(), allow_nan=False)


@given(st.lists(st.sampled_from(PIECES), max_size=120))
@settings(max_examples=200, deadline=None)
def test_any_mix_of_the_words_we_look_for_gives_facts(pieces: list[str]) -> None:
    json.dumps(said("".join(pieces)).to_dict(), allow_nan=False)


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 10**12), st.floats(0, 4e9), st.floats(0, 4e9))
@settings(max_examples=100, deadline=None)
def test_any_size_and_times(head: bytes, tail: bytes, size: int, mtime: float, now: float) -> None:
    facts = read(head, tail, size=size, mtime=mtime, now=now)
    assert facts.idle_s >= 0


@given(st.integers(0, 4000))
@settings(max_examples=30, deadline=None)
def test_a_log_cut_anywhere_never_goes_backwards_far(cut: int) -> None:
    """A torn last line must not invent a step."""
    log = "".join(f"step {i}/1000, loss 0.5\n" for i in range(100, 300))
    facts = said(log[: max(cut, 60)])
    assert facts.step is None or 1 <= facts.step < 300


def pathological() -> dict[str, bytes]:
    rng = random.Random(7)
    n = TAIL_BYTES
    return {
        "carriage returns": b"\r" * n,
        "newlines": b"\n" * n,
        "backspaces": b"\b" * n,
        "short redraws": b"a\r" * (n // 2),
        "one giant line": b"x" * n,
        "one giant line of digits": b"9" * n,
        "blanks": b" " * n,
        "blanks and digits": b" 1" * (n // 2),
        "escapes": b"\x1b[" * (n // 2),
        "open titles": b"\x1b]" * (n // 2),
        "open title": b"\x1b]0;" + b"a" * n,
        "bars of bars": b"100%|" * (n // 5),
        "pipes": b"|" * n,
        "brackets": b"[" * n,
        "braces": b"{" * n,
        "json": b'{"a":' * (n // 5),
        "quotes": b"{'a': '" * (n // 7),
        "pairs": b"a=1 " * (n // 4),
        "keys": b"loss:" * (n // 5),
        "steps": b"step 1/2 " * (n // 9),
        "lines of steps": b"step 1/2\n" * (n // 9),
        "rules": "━".encode() * (n // 3),
        "tracebacks": b"Traceback (most recent call last):\n" * (n // 36),
        "words": "".join(rng.choice(PIECES) for _ in range(n // 4)).encode()[:n],
        "random": rng.randbytes(n),
        "zeros": bytes(n),
        "wide": "漢".encode() * (n // 3),
    }


@pytest.mark.parametrize("name", sorted(pathological()))
def test_pathological_logs_are_read_quickly(name: str) -> None:
    data = pathological()[name]
    best = 9.0
    for _ in range(3):
        begin = time.process_time()
        json.dumps(said(data, size=10**10).to_dict(), allow_nan=False)
        best = min(best, time.process_time() - begin)
        if best < 0.5:
            break
    assert best < 0.5, f"{best * 1000:.0f} ms"


def ordinary() -> dict[str, str]:
    hf = "".join(
        bar(i, 100_000, i * 1.5) + "\r{'loss': '0.9', 'grad_norm': '1.2', 'epoch': '0.1'}\n" for i in range(3000)
    )
    megatron = "".join(
        f" [2025-10-09 10:00:00] iteration {i:8d}/  100000 | consumed samples: {i * 512:12d} | elapsed time per iteration (ms): 4647.8 | "
        "learning rate: 1.5E-06 | global batch size:   512 | lm loss: 9.7E+00 | loss scale: 1.0 | grad norm: 2.1 |\n"
        for i in range(2000)
    )
    return {
        "hf": hf,
        "megatron": megatron,
        "tqdm": redraws(100_000, 4000, 1.0),
        "plain": "INFO:root:step 12/100 loss 0.5\n" * 9000,
    }


@pytest.mark.parametrize("name", sorted(ordinary()))
def test_ordinary_logs_are_read_in_little_time(name: str) -> None:
    data = ordinary()[name].encode()
    took = []
    for _ in range(5):
        begin = time.process_time()
        said(data)
        took.append(time.process_time() - begin)
    assert min(took) < 0.15, f"{min(took) * 1000:.0f} ms"


def test_a_file_of_ten_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as f:
        f.write(b"step 1/1000 loss 2\nstep 2/1000 loss 2\n")
        f.truncate(10 * 2**30)
        f.seek(0, 2)
        f.write(b"\nstep 900/1000 loss 1\nstep 901/1000 loss 1\n")
    begin = time.perf_counter()
    facts = read_path(path)
    assert time.perf_counter() - begin < 2
    assert (facts.step, facts.total, facts.size > 10 * 2**30, facts.holes) == (901, 1000, True, True)


def test_an_empty_log() -> None:
    facts = said(b"")
    assert facts.empty and facts.lines == 0 and facts.format is None and facts.step is None


def test_the_future_is_not_negative_idleness() -> None:
    assert read(b"", b"x\n", size=2, mtime=NOW + 50, now=NOW).idle_s == 0


def test_imports_only_the_standard_library() -> None:
    code = "import sys; import eyas.why.logs.reader, eyas.why.logs.silence; print([m for m in sys.modules if m.split('.')[0] in " \
           "('torch', 'numpy', 'rich', 'psutil', 'transformers', 'pydantic', 'yaml')])"  # fmt: skip
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert run.stdout.strip() == "[]"
