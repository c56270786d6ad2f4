"""Why a log is silent: log and process together."""

from __future__ import annotations

import json

import pytest
from loglines import redraws, said, stamp

from eyas.why.logs.facts import LogFacts
from eyas.why.logs.silence import ProcessFacts, Silence, why_silent


def every(seconds: float, *, idle: float, lines: int = 30) -> LogFacts:
    log = "".join(f"{stamp(-idle - (lines - i) * seconds)} step {i * 10}/10000 loss 1.0\n" for i in range(1, lines + 1))
    return said(log, idle=idle)


FILE = ProcessFacts(stdout="file", unbuffered=True, progressing=True)


def test_a_growing_log_is_not_silent() -> None:
    assert why_silent(every(60, idle=40), ProcessFacts(stdout="file", log_growth=120)).reason == "not-silent"
    assert why_silent(every(60, idle=4), FILE).reason == "not-silent"


def test_the_next_line_is_not_due_yet() -> None:
    found = why_silent(every(100, idle=40), FILE)
    assert found.reason == "interval-not-due"
    assert found.expected_in_s == pytest.approx(60, abs=1)
    assert "60 s" in found.sentence and any("10 steps" in e for e in found.evidence)


def test_a_little_late_is_still_the_interval_and_very_late_is_not() -> None:
    assert why_silent(every(100, idle=200), FILE).reason == "interval-not-due"
    late = why_silent(every(100, idle=2000), FILE)
    assert late.reason == "unknown" and late.expected_in_s is not None and late.expected_in_s < 0


def test_block_buffered() -> None:
    log = said("loading\n", idle=1800)
    found = why_silent(log, ProcessFacts(stdout="file", unbuffered=False, progressing=True))
    assert found.reason == "block-buffered"
    empty = why_silent(said(b"", idle=1800), ProcessFacts(stdout="pipe", unbuffered=False))
    assert empty.reason == "block-buffered"
    edge = said("x" * 81 + "\n" + "a line of text\n" * 540, idle=1800)
    assert why_silent(edge, ProcessFacts(stdout="file")).reason == (
        "block-buffered" if abs(edge.size - 8192) <= 32 else "unknown"
    )


def test_an_unbuffered_or_stopped_or_finished_process_is_not_buffering() -> None:
    log = said("loading\n", idle=1800)
    assert why_silent(log, ProcessFacts(stdout="file", unbuffered=True)).reason == "unknown"
    assert why_silent(log, ProcessFacts(stdout="file", unbuffered=False, progressing=False)).reason == "unknown"
    assert why_silent(log, ProcessFacts(stdout="tty", unbuffered=False)).reason == "unknown"
    ended = said("Training complete.\n", idle=1800)
    assert why_silent(ended, ProcessFacts(stdout="file", unbuffered=False)).reason == "unknown"


def test_rich_bar_on_a_file() -> None:
    log = said("[11:51:57] INFO     Starting training                        train.py:12\n" * 3, idle=600)
    found = why_silent(log, ProcessFacts(stdout="file", uses_rich=True, unbuffered=False))
    assert found.reason == "rich-bar-on-file"
    assert why_silent(log, ProcessFacts(stdout="file", unbuffered=True)).reason == "rich-bar-on-file"
    assert why_silent(log, ProcessFacts(stdout="tty", uses_rich=True)).reason == "unknown"


def test_another_rank_logs() -> None:
    log = said("[rank3]: NCCL version 2.27\n", idle=600)
    assert why_silent(log, ProcessFacts(stdout="file", rank=3, world_size=8, unbuffered=True)).reason == "other-rank"
    assert why_silent(log, ProcessFacts(stdout="file", rank=0, world_size=8, unbuffered=True)).reason == "unknown"
    assert why_silent(log, ProcessFacts(stdout="file", rank=0, world_size=1, unbuffered=True)).reason == "unknown"


def test_progress_goes_to_a_tracker() -> None:
    log = said("wandb: Tracking run\n", idle=900)
    found = why_silent(log, ProcessFacts(stdout="file", unbuffered=True, other_outputs=("runs/events.out.tfevents.1",)))
    assert found.reason == "elsewhere-tracker" and "tfevents" in found.sentence and "wandb" in found.evidence


def test_deleted_or_rotated() -> None:
    assert why_silent(every(10, idle=900), ProcessFacts(stdout="deleted")).reason == "deleted-or-rotated"
    holes = said(b"\0" * 5000 + b"words\n", idle=900)
    assert why_silent(holes, FILE).reason == "deleted-or-rotated"


def test_never_logged() -> None:
    assert why_silent(None, ProcessFacts(stdout="null")).reason == "never-logged"
    assert why_silent(None, ProcessFacts(stdout="tty")).reason == "never-logged"
    assert why_silent(said(b"", idle=90), FILE).reason == "never-logged"


def test_the_whole_log_is_one_bar() -> None:
    log = said(redraws(100, 12, 60.0), idle=30)
    assert why_silent(log, FILE).reason in ("single-line-bar", "interval-not-due")
    no_pace = said("".join("\r  0%|          | 0/30 [00:00<?, ?it/s]" for _ in range(5)), idle=100)
    found = why_silent(no_pace, FILE)
    assert found.reason == "single-line-bar"


def test_a_bar_that_stopped_is_not_explained() -> None:
    log = said(redraws(1000, 400, 1.0), idle=480)
    found = why_silent(log, FILE)
    assert found.reason == "unknown" and "overdue" in found.sentence


def test_silence_is_json() -> None:
    json.dumps(why_silent(every(100, idle=40), FILE).to_dict(), allow_nan=False)
    assert isinstance(why_silent(None, ProcessFacts()), Silence)
