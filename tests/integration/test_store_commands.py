"""`eyas store check`, `eyas store convert`, `eyas capture --codec` and `eyas plan`, as they are typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eyas.store.logits import split
from eyas.store.reader import StoreSource, open_source


def test_check_says_that_all_is_well_in_words_and_json(tiny: Any, founding: Path, eyas: Any) -> None:
    done = eyas("store", "check", founding / "D", "--verifier-path", tiny.verifier)
    assert done.code == 0
    assert done.out[-1] == "nothing wrong was found"
    assert any(line.startswith("as int8: KL ") for line in done.out)
    told = eyas("store", "check", tiny.store, "--json")
    report = json.loads("\n".join(told.out))
    assert (told.code, report["ok"], report["findings"], report["kind"]) == (0, True, [], "store")
    assert report["samples"] == len(open_source(tiny.store).ids)


@pytest.mark.parametrize("damaged", ["states", "tokens"])
def test_check_finds_a_fault_exits_with_1_and_shuts_the_sample_out(
    tiny: Any, eyas: Any, tmp_path: Path, damaged: str
) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny.store, store)
    record = open_source(store).records[1]
    file, at = store / record.shard, record.parts[0].offset
    if damaged == "tokens":
        file, at = next(store.glob("tokens-*")), record.text_offset
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    done = eyas("store", "check", store, "--quarantine")
    assert done.code == 1
    assert any(line.startswith(f"unreadable: {record.id}: ") for line in done.out)
    assert done.out[-1] == "1 samples are faulty, 0 unusable"
    assert record.id not in open_source(store).ids
    again = eyas("store", "check", store)
    assert (again.code, again.out[-1]) == (1, "0 samples are faulty, 1 unusable")


def test_an_error_exits_with_2(eyas: Any, tmp_path: Path) -> None:
    done = eyas("store", "check", tmp_path)
    assert (done.code, len(done.err)) == (2, 1)
    done = eyas("store", "convert", tmp_path / "gone", tmp_path / "out")
    assert (done.code, len(done.err)) == (2, 1)


def test_a_converted_store_trains_like_the_original(tiny: Any, eyas: Any, tmp_path: Path) -> None:
    options = ["--codec", "int8", "--last", "trained"]
    done = eyas("store", "convert", tiny.store, tmp_path / "small", *options)
    assert done.code == 0, done.err
    assert eyas("store", "info", tmp_path / "small").code == 0
    before, after = open_source(tiny.store), open_source(tmp_path / "small")
    assert after.ids == before.ids
    size = [sum(s.nbytes(i) for i in range(len(s.ids))) for s in (before, after)]
    assert size[1] < 0.55 * size[0]
    lengths = []
    for data, run in ((tiny.store, "a"), (tmp_path / "small", "b")):
        done = eyas(
            "train", "--verifier-path", tiny.verifier, "--data-dir", data, "--vocab-mapping-dir", tiny.vocab,
            "--output-dir", tmp_path / run, "--epochs", 1, "--max-seq-len", 128,
        )  # fmt: skip
        assert done.code == 0, done.err
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        lengths.append(summary["validations"][0]["accept_length"])
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05)


def test_capture_in_a_codec_holds_what_a_conversion_would(tiny: Any, eyas: Any, tmp_path: Path) -> None:
    for name, codec, last in (("a", "int8", "trained"), ("b", "fp8", "all")):
        done = eyas(
            "capture", "--verifier-path", tiny.verifier, "--prepared", tiny.prepared, "--output-dir", tmp_path / name,
            "--codec", codec, "--last", last, "--dtype", "fp32",
        )  # fmt: skip
        assert done.code == 0, done.err
        assert any(" take " in line and "free in" in line for line in done.out)
        states, original = open_source(tmp_path / name), open_source(tiny.store)
        assert states.ids == original.ids
        for i in (0, 20, 39):
            mask = original.tokens(i)[1]
            a, b = (s.states(i)[:, mask].float() for s in (states, original))
            assert float((a - b).norm() / b.norm()) < 0.05
        manifest = open_source(tmp_path / name).manifest
        assert (manifest.codec, manifest.last_rows) == (codec, last)
        again = eyas(
            "capture", "--verifier-path", tiny.verifier, "--prepared", tiny.prepared, "--output-dir", tmp_path / name,
            "--codec", codec, "--last", last, "--dtype", "fp32",
        )  # fmt: skip
        assert again.code == 0, again.err
        assert any("are in" in line and "already" in line for line in again.out)
    wrong = eyas(
        "capture", "--verifier-path", tiny.verifier, "--prepared", tiny.prepared, "--output-dir", tmp_path / "a",
        "--dtype", "fp32",
    )  # fmt: skip
    assert wrong.code == 2
    assert "codec int8, not bf16" in wrong.err[0]


def test_logits_in_place_of_the_last_state_from_capture_and_from_convert(tiny: Any, eyas: Any, tmp_path: Path) -> None:
    options = ["--verifier-path", tiny.verifier, "--last", "logits:20"]
    command = ["capture", *options, "--prepared", tiny.prepared, "--output-dir", tmp_path / "a", "--dtype", "fp32"]
    assert eyas(*command).code == 0
    again = eyas(*command, "--codec", "bf16")
    assert any("are in" in line and "already" in line for line in again.out)
    done = eyas("store", "convert", tiny.store, tmp_path / "b", *options)
    assert done.code == 0, done.err
    a, b = open_source(tmp_path / "a"), open_source(tmp_path / "b")
    assert isinstance(a, StoreSource) and isinstance(b, StoreSource)
    assert a.ids == b.ids
    for i in (0, 20, 39):
        (ids, p), (others, q) = split(a.logits(i)), split(b.logits(i))
        assert ids[:, 0].equal(others[:, 0])
        assert float((p - q).abs().float().max()) < 0.05
    told = eyas("store", "info", tmp_path / "a")
    assert any("in place of the last state the 20 likeliest tokens of each trained row" in line for line in told.out)
    checked = eyas("store", "check", tmp_path / "b", "--verifier-path", tiny.verifier, "--against", tiny.store)
    assert [line for line in checked.out if line.startswith(("agreement", "logits"))][1:] == []  # another's text: one
    assert any(line.startswith("as bf16, logits:20: KL ") for line in checked.out)
    done = eyas(
        "train", "--verifier-path", tiny.verifier, "--data-dir", tmp_path / "b", "--vocab-mapping-dir", tiny.vocab,
        "--output-dir", tmp_path / "run", "--epochs", 1, "--max-seq-len", 128,
    )  # fmt: skip
    assert done.code == 0, done.err
    done = eyas("eval", tmp_path / "run", "--prompts", 2, "--max-new-tokens", 4, "--dtype", "fp32")
    assert done.code == 0, done.err
    plan = eyas("plan", "--verifier-path", tiny.verifier, "--tokens", 1000, "--gpu", "H100", "--last", "logits:20",
                "--disk-gb-s", 1, "--ram-gb", 1, "--json")  # fmt: skip
    assert plan.code == 0, plan.err


def test_plan_of_data_here_and_of_data_to_come(tiny: Any, eyas: Any, tmp_path: Path) -> None:
    here = eyas(
        "plan", "--verifier-path", tiny.verifier, "--data-dir", tiny.store, "--vocab-mapping-dir", tiny.vocab,
        "--max-seq-len", 128, "--json",
    )  # fmt: skip
    assert here.code == 0, here.err
    report = json.loads("\n".join(here.out))
    assert report["gpu"] == "this machine"
    assert report["real_steps"]["step_s"] > 0
    assert report["later_epochs"]["step_s"] == max(report["later_epochs"]["terms"].values())
    to_come = eyas(
        "plan", "--verifier-path", tiny.verifier, "--tokens", 10**15, "--gpu", "H100", "--disk-gb-s", 0.1,
        "--ram-gb", 100, "--output-dir", tmp_path,
    )  # fmt: skip
    assert to_come.code == 0, to_come.err
    assert any(line.startswith("bottleneck: disk. Cheapest remedy: ") for line in to_come.out)
    assert any(line.startswith("warning: a capture into ") and " GB are free there" in line for line in to_come.out)
    for wrong in (["--tokens", 5, "--data-dir", tiny.store], [], ["--tokens", 5], ["--tokens", 5, "--gpu", "V100"]):
        done = eyas("plan", "--verifier-path", tiny.verifier, *wrong)
        assert (done.code, len(done.err)) == (2, 1)
