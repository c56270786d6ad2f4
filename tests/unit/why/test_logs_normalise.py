"""Lines without colours, redraws, wraps and prefixes."""

from __future__ import annotations

import pytest
from loglines import NOW, bar, said, stamp

from eyas.why.logs.normalise import Record, normalise


def records(text: str) -> list[Record]:
    return normalise(text.encode(), NOW).records


def test_splits_on_newline_and_carriage_return() -> None:
    assert [r.text for r in records("a\rb\r\nc\n\n  \rd")] == ["a", "b", "c", "d"]
    assert [r.redraw for r in records("a\rb\r\nc")] == [True, False, False]


def test_strips_colours_titles_and_backspaces() -> None:
    text = (
        "\x1b]0;title\x07\x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3mrgb\x1b[m\x1b(B \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\"
    )
    assert [r.text for r in records(text)] == ["red rgb link"]
    assert [r.text for r in records("abc\b\b\bdef")] == ["abc", "def"]
    assert [r.text for r in records("bar one\x1b[A\rbar two\x1b[K")] == ["bar one", "bar two"]


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank3]: ", 3),
        ("[rank3]:", 3),
        ("[default0]:", 0),
        ("[trainer2]: ", 2),
        ("(Worker pid=77, ip=10.0.0.1) ", None),
        ("(RayTrainWorker pid=77) ", None),
        ("2025-10-09T10:00:00.123456789Z ", None),
        ("2025-10-09T10:00:00.123456789+00:00 stdout F ", None),
        ("2025-10-09 10:00:00,123 - trainer.main - INFO - ", None),
        ("2025-10-09 10:00:00,123 ", None),
        ("[2025-10-09 10:00:00,123] [INFO] [logging.py:107:log_dist] [Rank 0] ", 0),
        ("[2025-10-09 10:00:00,123] [INFO] [axolotl.train.train:123] [PID:7] [RANK:4] ", 4),
        ("[INFO|trainer.py:2128] 2025-10-09 10:00:00,123 >> ", None),
        ("2025-10-09 10:00:00 | INFO | fairseq_cli.train | ", None),
        ("2025-10-09 10:00:00.123 | INFO     | a.b:main:12 - ", None),
        ("2025/10/09 10:00:00 - mmengine - INFO - ", None),
        ("INFO:root:", None),
        ("WARNING: ", None),
        ("[10:00:00] ", None),
        ("10:00:00 ", None),
        ("I1009 10:00:00.123456 140 loop.cc:12] ", None),
        ("[rank1]:[W1009 10:00:00.123456789 Module.cpp:156] ", 1),
        ("Oct  9 10:00:00 node7 train.sh[991]: ", None),
        ("[titan] 2025-10-09 10:00:00,123 - root - INFO - ", None),
        ("[rank2]: 2025-10-09 10:00:00,123 - root - INFO - ", 2),
        ("", None),
    ],
)
def test_prefixes_go_and_the_rank_stays(prefix: str, rank: int | None) -> None:
    (record,) = records(prefix + "some words of a step\n")
    assert record.text == "some words of a step"
    assert record.rank == rank
    assert record.raw == prefix + "some words of a step"


def test_srun_labels_and_host_names_only_when_they_are_everywhere() -> None:
    labelled = records("".join(f" {i % 4}: words {i}\n" for i in range(20)))
    assert {r.rank for r in labelled} == {0, 1, 2, 3} and labelled[5].text == "words 5"
    assert records("words\n12: not a label\nmore words\nagain\n")[1].text == "12: not a label"
    hosts = records("".join(f"worker-{i % 2}: words\n" for i in range(8)))
    assert hosts[3].host == "worker-1" and hosts[3].text == "words"


def test_indentation_of_tracebacks_survives_the_prefix() -> None:
    assert records('[rank0]:   File "x.py", line 3, in f\n')[0].text == '  File "x.py", line 3, in f'


def test_rich_wraps_are_joined_for_both_time_formats() -> None:
    short = (
        "[11:51:57] INFO     first part of it,                         trainer.py:412\n" + " " * 20 + "second part\n"
    )
    long = "[10/09/25 11:51:57] INFO     first part of it,                trainer.py:412\n" + " " * 29 + "second part\n"
    same_second = short + " " * 11 + "INFO     another record                              trainer.py:412\n"
    assert [r.text for r in records(short)] == ["first part of it, second part"]
    assert [r.text for r in records(long)] == ["first part of it, second part"]
    assert [r.text for r in records(same_second)] == ["first part of it, second part", "another record"]


def test_a_deeply_indented_line_after_plain_text_is_not_joined() -> None:
    assert len(records("plain\n" + " " * 20 + "indented\n")) == 2


def test_text_behind_a_bar_is_a_line_of_its_own() -> None:
    texts = [r.text for r in records(bar(3, 10, 9.0) + "Traceback (most recent call last):\n")]
    assert texts[1] == "Traceback (most recent call last):"
    assert len(records(bar(3, 10, 9.0, post=", lr=[5e-5, 1e-5]"))) == 1


@pytest.mark.parametrize("zone", [-8, 0, 5.5, 14])
def test_naive_stamps_are_tied_to_mtime_in_any_zone(zone: float) -> None:
    text = normalise(f"{stamp(zone * 3600 - 3)} - root - INFO - words\n".encode(), NOW)
    assert text.offset == -zone * 3600


def test_stamps_far_from_mtime_are_not_tied() -> None:
    assert normalise(f"{stamp(-1000)} words\n".encode(), NOW).offset is None
    facts = said(f"{stamp(-1000)} words\nand no stamp here\n")
    assert facts.last_at is None and facts.last_stamp == stamp(-1000)


def test_clock_only_stamps_pass_midnight() -> None:
    lines = ["23:59:50 step 1 of 9", "23:59:56 step 2 of 9", "00:00:02 step 3 of 9", "00:00:08 step 4 of 9"]
    facts = said("\n".join(lines))
    assert facts.pace is not None and facts.pace.seconds_per_step == pytest.approx(6)


def test_a_hole_left_by_rotation_is_noticed() -> None:
    facts = said(b"\0" * 4096 + b"step 12/100\n")
    assert facts.holes and not facts.binary and facts.step == 12


def test_binary_is_noticed() -> None:
    assert said(bytes(range(256)) * 40).binary
    assert not said("naïve café ━━━ █ 你好\n" * 50).binary


def test_rank_of_a_log() -> None:
    assert said("[rank2]: hello\n[rank2]: again\n").rank == 2
    both = said("[rank2]: hello\n[rank1]: again\n")
    assert both.rank is None and both.ranks == (1, 2)
