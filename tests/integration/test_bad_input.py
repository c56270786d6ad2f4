"""Bad input: one clear line on standard error, exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from conftest import Eyas, Result, Tiny, write_conversations
from eyas.config import load_config
from eyas.store.layout import Manifest
from eyas.store.reader import open_source
from eyas.store.writer import StoreWriter
from eyas.train.batches import Loader
from eyas.train.loop import Run
from eyas.vocab import DraftVocab

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = ("--max-seq-len", 64, "--batch-tokens", 128, "--dtype", "fp32", "--epochs", 1)


def run_settings(tiny: Tiny, folder: Path) -> dict[str, Any]:
    """Of a run of one epoch into `folder`."""
    return {
        "verifier_path": str(tiny.verifier), "data_dir": tiny.store, "vocab_mapping_dir": tiny.vocab,
        "output_dir": folder, "max_seq_len": 64, "epochs": 1, "dtype": "fp32",
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of one epoch. Read it, never write to it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    Run(load_config(run_settings(tiny, folder)), lambda _text: None).train()
    return folder


def assert_refused(result: Result, *words: str) -> None:
    assert result.code == 2
    assert len(result.err) == 1, result.err
    assert result.err[0].startswith("eyas: ")
    for word in words:
        assert word in result.err[0]
    assert "Traceback" not in "\n".join(result.out)


def train_arguments(tiny: Tiny, output: Path, **changes: object) -> list[object]:
    """`eyas train` on the tiny store, with some arguments changed; None leaves one out."""
    arguments = {
        "verifier_path": tiny.verifier, "data_dir": tiny.store, "vocab_mapping_dir": tiny.vocab, "output_dir": output,
        **changes,
    }  # fmt: skip
    flags = [(f"--{n.replace('_', '-')}", value) for n, value in arguments.items() if value is not None]
    return ["train", *(x for pair in flags for x in pair), *SIZES]


def another_verifier(folder: Path, **changes: int) -> Path:
    """A random llama of the tiny verifier's sizes, but for `changes`, and with the same tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = changes.pop("source")
    torch.manual_seed(7)
    config = LlamaConfig(**{**LlamaConfig.from_pretrained(source).to_dict(), **changes})  # type: ignore[arg-type]
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def commands(tiny: Tiny, run: Path, output: Path, verifier: object) -> dict[str, list[object]]:
    """Every command with a verifier, writing to `output`."""
    v = ["--verifier-path", verifier]
    return {
        "prepare": ["prepare", *v, "--data", tiny.conversations, "--output-dir", output],
        "capture": ["capture", *v, "--prepared", tiny.prepared, "--output-dir", output, "--dtype", "fp32"],
        "vocab": ["vocab", *v, "--data", tiny.prepared, "--output-dir", output],
        "train": train_arguments(tiny, output, verifier_path=verifier),
        "eval": ["eval", run, *v, "--output", output / "eval.json", "--dtype", "fp32", "--prompts", 2],
        "export": ["export", run, *v, "--output-dir", output],
        "import": ["import", run / "best", *v, "--output-dir", output],
    }


STARTED = ("d2t.npy", "drafter.json", "samples.json", "t2d.npy", "vocab.json")
COMMANDS = ("prepare", "capture", "vocab", "train", "eval", "export", "import")


# -- the verifier ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_verifier(tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, name: str) -> None:
    nowhere = tmp_path / "nowhere"
    result = eyas(*commands(tiny, run, tmp_path / "out", nowhere)[name])
    assert_refused(result, f"no verifier at {nowhere}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_is_no_verifier(tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(eyas(*commands(tiny, run, tmp_path / "out", tmp_path / "empty")[name]), "no config.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_drafter_is_no_verifier(tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, name: str) -> None:
    result = eyas(*commands(tiny, run, tmp_path / "out", run / "best")[name])
    assert_refused(
        result, f"{run / 'best'} is a drafter, and its verifier is wanted: name the model that it drafts for"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_prepared_folder(tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas) -> None:
    for name, folder in (("capture", tiny.prepared), ("vocab", tiny.prepared)):
        call = commands(tiny, run, tmp_path / "out", tiny.verifier)[name]
        result = eyas(*(tiny.conversations if word == folder else word for word in call))
        assert_refused(
            result,
            f"{tiny.conversations} is a file, and a folder that eyas prepare",
            f"made is wanted: eyas prepare --data {tiny.conversations} makes one of conversations",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["capture", "vocab", "train", "eval", "export", "import"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 32}, ()),
        ({"vocab_size": 402}, ()),
        ({}, ()),  # the same sizes, other weights
    ],
)
def test_what_belongs_to_another_verifier(
    tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, name: str, change: dict[str, int], words: tuple[str, ...]
) -> None:
    other = another_verifier(tmp_path / "other", source=tiny.verifier, **change)  # type: ignore[arg-type]
    result = eyas(*commands(tiny, run, tmp_path / "out", other)[name])
    assert_refused(result, *words, "other")
    assert not (tmp_path / "out").exists()
    if name == "train" and change.get("hidden_size"):
        assert "hidden size 64, not 32" in result.err[0]


def test_founding_files_of_another_hidden_size(tiny: Tiny, founding: Path, tmp_path: Path, eyas: Eyas) -> None:
    other = another_verifier(tmp_path / "other", source=tiny.verifier, hidden_size=32)  # type: ignore[arg-type]
    result = eyas(*train_arguments(tiny, tmp_path / "out", verifier_path=other, data_dir=founding / "D"))
    assert_refused(result, "states are 64 wide", "hidden size 32")
    assert not (tmp_path / "out").exists()


def test_founding_files_of_another_verifier(tiny: Tiny, founding: Path, tmp_path: Path, eyas: Eyas) -> None:
    other = another_verifier(tmp_path / "other", source=tiny.verifier)  # type: ignore[arg-type]
    result = eyas(*train_arguments(tiny, tmp_path / "out", verifier_path=other, data_dir=founding / "D"))
    assert_refused(result, "does not hold states of other")
    assert not (tmp_path / "out").exists()


# -- the vocabulary ----------------------------------------------------------------------------------------------------


def test_a_vocabulary_of_another_size(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    (tmp_path / "m").mkdir()
    np.save(tmp_path / "m" / "d2t.npy", np.zeros(3, np.int64))
    np.save(tmp_path / "m" / "t2d.npy", np.arange(401) < 3)
    result = eyas(*train_arguments(tiny, tmp_path / "out", vocab_mapping_dir=tmp_path / "m"))
    assert_refused(result, "t2d is for 401 tokens, the verifier has 400")
    assert not (tmp_path / "out").exists()


def test_a_missing_vocabulary(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    result = eyas(*train_arguments(tiny, tmp_path / "out", vocab_mapping_dir=tmp_path / "m"))
    assert_refused(result, "no d2t.npy or d2t.pt", "eyas vocab")
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_that_is_a_pickle_is_not_executed(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "m").mkdir()
    torch.save({"d2t": Evil()}, tmp_path / "m" / "d2t.pt")
    torch.save(torch.ones(400, dtype=torch.bool), tmp_path / "m" / "t2d.pt")
    result = eyas(*train_arguments(tiny, tmp_path / "out", vocab_mapping_dir=tmp_path / "m"))
    assert_refused(result, "d2t.pt cannot be read")
    assert not (tmp_path / "executed").exists()


# -- the data ----------------------------------------------------------------------------------------------------------


def write_store(tiny: Tiny, folder: Path, trained: int) -> Path:
    """A store of the tiny verifier's in which every sample has so many trained tokens."""
    with StoreWriter(folder, Manifest.load(tiny.store)) as store:
        for i in range(6):
            store.add(f"s{i}", np.arange(20), np.arange(20) >= 20 - trained, torch.randn(4, 20, 64))
    return folder


@pytest.mark.parametrize("trained", [0, 1])
def test_no_trainable_tokens(tiny: Tiny, tmp_path: Path, eyas: Eyas, trained: int) -> None:
    store = write_store(tiny, tmp_path / "store", trained)
    result = eyas(*train_arguments(tiny, tmp_path / "out", data_dir=store))
    assert_refused(result, "no trained token" if trained == 0 else "no trainable tokens")
    assert not (tmp_path / "out").exists()


def test_no_trainable_tokens_in_conversations(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hello?"}]}) + "\n")
    v = ("--verifier-path", tiny.verifier)
    result = eyas("prepare", *v, "--data", tmp_path / "c.jsonl", "--output-dir", tmp_path / "out")
    assert_refused(result, "nothing to train on")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["nowhere", "empty", "file"])
def test_no_data(tiny: Tiny, tmp_path: Path, eyas: Eyas, kind: str) -> None:
    data = tmp_path / kind
    if kind == "empty":
        data.mkdir()
    elif kind == "file":
        data.touch()
    assert_refused(eyas(*train_arguments(tiny, tmp_path / "out", data_dir=data)), str(data))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def damaged(founding: Path, tmp_path: Path) -> Path:
    """The founding story's folder with an empty, a truncated, a wordless and an untrained file in it."""
    folder = tmp_path / "D"
    shutil.copytree(founding / "D", folder)
    whole = (folder / "data_3.pt").read_bytes()
    (folder / "data_1.pt").write_bytes(b"")
    (folder / "data_3.pt").write_bytes(whole[: len(whole) * 2 // 3])
    data = torch.load(folder / "data_5.pt", weights_only=True)
    torch.save({**data, "input_ids": data["input_ids"][:0], "loss_mask": data["loss_mask"][:0]}, folder / "data_5.pt")
    data = torch.load(folder / "data_7.pt", weights_only=True)
    torch.save({**data, "loss_mask": data["loss_mask"] * 0}, folder / "data_7.pt")
    return folder


def test_broken_samples_are_skipped_counted_and_named(tiny: Tiny, damaged: Path, tmp_path: Path, eyas: Eyas) -> None:
    result = eyas(*train_arguments(tiny, tmp_path / "out", data_dir=damaged))
    assert (result.code, result.err) == (0, [])
    names = {"data_1.pt": "is empty", "data_3.pt": "cannot be read", "data_5.pt": "has no tokens", "data_7.pt": "train"}
    for name, reason in names.items():
        assert any(line.startswith(f"skipped {name}: ") and reason in line for line in result.out), name
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert sorted(name for name, _ in summary["skipped"]) == sorted(names)
    assert yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())["data"]["samples"] == 20


def test_many_broken_samples_are_counted(tiny: Tiny, founding: Path, tmp_path: Path, eyas: Eyas) -> None:
    shutil.copytree(founding / "D", tmp_path / "D")
    for i in range(9):
        (tmp_path / "D" / f"data_{i}.pt").write_bytes(b"")
    result = eyas(*train_arguments(tiny, tmp_path / "out", data_dir=tmp_path / "D"))
    assert result.code == 0
    assert sum(line.startswith("skipped data_") for line in result.out) == 5
    assert "skipped 9 samples in all" in result.out
    assert len(json.loads((tmp_path / "out" / "summary.json").read_text())["skipped"]) == 9


def test_nothing_but_broken_samples(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    (tmp_path / "D").mkdir()
    for i in range(3):
        (tmp_path / "D" / f"data_{i}.pt").write_bytes(b"PK\x03\x04 and no more")
    result = eyas(*train_arguments(tiny, tmp_path / "out", data_dir=tmp_path / "D"))
    assert_refused(result, "none of 3 data_*.pt files can be used")
    assert not (tmp_path / "out").exists()


def test_a_truncated_shard_costs_its_samples_by_name(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    shutil.copytree(tiny.store, tmp_path / "store")
    (shard,) = (tmp_path / "store").glob("shard-*")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size * 3 // 4)
    lost = [name for name, _ in open_source(tmp_path / "store").skipped]
    result = eyas(*train_arguments(tiny, tmp_path / "out", data_dir=tmp_path / "store"))
    assert (result.code, result.err) == (0, [])
    assert 3 < len(lost) < 35
    (told,) = [line for line in result.out if "lost" in line]
    assert told.startswith(f"warning: {len(lost)} of 40 samples are lost: in {tmp_path / 'store'}, {shard.name} is ")
    assert "restore the file from a copy, or delete" in told and not any(x.startswith("skipped") for x in result.out)
    skipped = json.loads((tmp_path / "out" / "summary.json").read_text())["skipped"]
    assert [name for name, _ in skipped] == lost


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_stop_the_run_with_their_names(
    tiny: Tiny, tmp_path: Path, eyas: Eyas, value: float
) -> None:
    with StoreWriter(tmp_path / "store", Manifest.load(tiny.store)) as store:
        for i in range(4):
            store.add(f"s{i}", np.arange(20), np.arange(20) >= 5, torch.full((4, 20, 64), value))
    result = eyas(*train_arguments(tiny, tmp_path / "out", data_dir=tmp_path / "store"))
    assert_refused(result, "the loss is nan", "at step 1: samples s")
    assert not (tmp_path / "out" / "best").exists() and not any((tmp_path / "out" / "checkpoints").iterdir())


# -- settings and checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lr", "0"], "--lr 0.0"),
        (["--lr", "inf"], "--lr inf"),
        (["--loss", "mse"], "--loss 'mse'"),
        (["--dtype", "int8"], "--dtype 'int8'"),
        (["--device", "tpu9"], "--device tpu9"),
        (["--num-heads", "3"], "3 heads cannot share 2 key/value heads"),
        (["--head-dim", "7"], "a head size of 7 is odd"),
        (["--seed", "-1"], "--seed -1"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
    ],
)
def test_settings_that_cannot_be(tiny: Tiny, tmp_path: Path, eyas: Eyas, arguments: list[str], words: str) -> None:
    assert_refused(eyas(*train_arguments(tiny, tmp_path / "out"), *arguments), words)
    assert not (tmp_path / "out").exists()


def test_what_typer_refuses_has_code_2_and_no_traceback(eyas: Eyas) -> None:
    for arguments in (["train", "--epochs", "many"], ["train", "--nonsense"], ["prepare"], ["nonsense"]):
        result = eyas(*arguments)
        assert result.code == 2 and not any("Traceback" in line for line in result.err)


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_checkpoint_that_is_none(tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, command: str) -> None:
    out = ["--output", tmp_path / "out" / "e.json"] if command == "eval" else ["--output-dir", tmp_path / "out"]
    assert_refused(eyas(command, tmp_path / "nowhere", *out), "neither a run directory")
    assert_refused(eyas(command, tiny.store, *out), "neither a run directory")
    alone = tmp_path / "alone"
    shutil.copytree(run / "best", alone)
    assert_refused(eyas(command, alone, *out), "lies in no run directory", "--verifier-path")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    (copy / "run.yaml").write_text("not: [what")
    assert_refused(eyas(command, copy, *out), "run.yaml cannot be read")
    (copy / "run.yaml").write_bytes((run / "run.yaml").read_bytes())
    weights = (copy / "best").resolve() / "model.safetensors"
    tensors = load_file(weights)
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, weights)
    assert_refused(eyas(command, copy, *out), "tensor lm_head.weight [96, 64] is missing")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert_refused(eyas(command, copy, *out), "cannot be read")
    assert not (tmp_path / "out").exists()


def test_check_has_an_exit_code_of_its_own_and_refuses_in_one_line(
    tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas
) -> None:
    v = ("--verifier-path", tiny.verifier)
    fine = eyas("check", run, *v)
    assert (fine.code, fine.err, fine.out[-1]) == (0, [], "fine")
    broken = tmp_path / "broken"
    shutil.copytree(run / "best", broken)
    tensors = load_file(broken / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, broken / "model.safetensors")
    said = eyas("check", broken, *v, "--json")
    assert (said.code, said.err) == (2, []) and json.loads("\n".join(said.out))["verdict"] == "broken"
    fixed = eyas("check", broken, *v, "--fix", tmp_path / "fixed")
    assert (fixed.code, fixed.out[-1]) == (0, "fine")
    assert_refused(eyas("check", broken, "--fix", tmp_path / "out"), "nothing was written", "--verifier-path")
    assert_refused(eyas("check", broken, *v, "--fix", broken), "is there already")
    assert_refused(eyas("check", broken, *v, "--layers", "two"), "--layers two: name three numbers")
    assert_refused(eyas("check", broken, *v, "--engine", "llama.cpp"), "name sglang or vllm")
    assert_refused(eyas("check", tmp_path / "nowhere"), "is no folder")
    assert_refused(eyas("check", tiny.store), "config.json is missing")
    (tmp_path / "file").touch()
    assert_refused(eyas("check", broken, *v, "--fix", tmp_path / "file" / "out"), "Not a directory")
    assert not (tmp_path / "out").exists()


def test_a_drafter_is_not_evaluated_on_states_of_other_layers(
    tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas
) -> None:
    v = ("--verifier-path", tiny.verifier)
    captured = eyas(
        "capture",
        *v,
        "--prepared",
        tiny.prepared,
        "--output-dir",
        tmp_path / "s",
        "--layers",
        "1,3,6",
        "--dtype",
        "fp32",
    )
    assert captured.code == 0
    out = ("--output", tmp_path / "out.json", "--dtype", "fp32")
    assert_refused(eyas("eval", run, "--data-dir", tmp_path / "s", *out), "reads other layers than [1, 3, 6]")
    assert not (tmp_path / "out.json").exists()


# -- the output --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_below_a_file(tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    result = eyas(*commands(tiny, run, tmp_path / "file" / "out", tiny.verifier)[name])
    assert_refused(result, str(tmp_path / "file"), "Not a directory")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


class Disk:
    """A small file system of its own, at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, *options: str) -> None:
        self.path.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", self.path], check=False)
        if done.returncode:
            pytest.skip("needs root, to mount a small disk")

    def fill(self, free_kib: int) -> None:
        (self.path / "filler").write_bytes(bytes(shutil.disk_usage(self.path).free - free_kib * 1024))

    def files(self) -> list[str]:
        return sorted(
            str(p.relative_to(self.path)) for p in self.path.rglob("*") if not p.is_dir() and p.name != "filler"
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk")
    yield made
    if os.path.ismount(made.path):
        subprocess.run(["umount", "-l", made.path], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_must_not_be_written(tiny: Tiny, run: Path, disk: Disk, eyas: Eyas, name: str) -> None:
    if os.geteuid():
        disk.path.mkdir()
        disk.path.chmod(0o555)
    else:  # root writes everywhere but on a read-only disk
        disk.mount("ro", "size=64m")
    result = eyas(*commands(tiny, run, disk.path / "out", tiny.verifier)[name])
    assert_refused(result, str(disk.path), "Permission denied" if os.geteuid() else "Read-only file system")
    assert list(disk.path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "free_kib", "left"),
    [
        ("prepare", 0, []),
        ("prepare", 4, []),
        ("capture", 0, []),
        ("capture", 64, []),
        ("vocab", 0, []),
        ("train", 0, []),
        ("train", 64, ["out/resume.txt", "out/run.yaml", *(f"out/start/{n}" for n in STARTED)]),
        ("eval", 0, []),
        ("export", 0, []),
        ("export", 64, []),
        ("import", 0, []),
        ("import", 64, []),
    ],
)
def test_a_full_output(
    tiny: Tiny, run: Path, disk: Disk, eyas: Eyas, name: str, free_kib: int, left: list[str]
) -> None:
    disk.mount("size=4m")
    disk.fill(free_kib)
    if name == "eval":
        (disk.path / "out").mkdir()
    result = eyas(*commands(tiny, run, disk.path / "out", tiny.verifier)[name])
    assert_refused(result, str(disk.path), "free there" if name == "capture" else "No space left")
    recorded = {"beat", "events.jsonl", "log.txt"}
    assert [name for name in disk.files() if Path(name).name not in recorded] == left
    if left:
        assert yaml.safe_load((disk.path / "out" / "run.yaml").read_text())["config"]["max_seq_len"] == 64


def test_a_disk_that_fills_up_during_training_leaves_what_was_whole_and_the_run_goes_on_later(
    tiny: Tiny, run: Path, disk: Disk, eyas: Eyas
) -> None:
    size = sum(p.stat().st_size for p in (run / "best").resolve().iterdir())  # a state is three times as large
    disk.mount("size=16m")
    disk.fill((2 * 4 * size + 2 * size) // 1024)
    arguments = train_arguments(tiny, disk.path / "out")
    arguments[arguments.index("--epochs") + 1] = 4
    assert_refused(eyas(*arguments), "cannot write the checkpoint", "No space left")
    folders = sorted((disk.path / "out" / "checkpoints").iterdir())
    assert len(folders) == 3
    for folder in folders:
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "eyas.json", "model.safetensors"]
        assert load_file(folder / "model.safetensors").keys() == load_file(run / "best" / "model.safetensors").keys()
    assert (disk.path / "out" / "last").resolve() == folders[-1]
    states = sorted((disk.path / "out" / "state").iterdir())
    assert [p.name for p in states] == [p.name for p in folders[:2]]
    (disk.path / "filler").unlink()
    done = eyas("train", "--output-dir", disk.path / "out", "--resume")
    assert (done.code, done.err) == (0, [])
    assert any(f"goes on from {states[-1]}" in line for line in done.out)


def test_a_disk_that_fills_up_during_capture_keeps_what_is_recorded_and_goes_on_later(
    tiny: Tiny, disk: Disk, eyas: Eyas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.mount("size=16m")
    monkeypatch.setattr("eyas.capture.local.check_space", lambda *_: None)  # somebody else fills it meanwhile
    disk.fill(900)
    arguments = commands(tiny, tmp_path, disk.path / "out", tiny.verifier)["capture"]
    result = eyas(*arguments, "--batch-tokens", 100)
    assert_refused(result, "cannot be written: No space left")
    (disk.path / "filler").unlink()
    assert eyas(*arguments).code == 0
    whole, again = open_source(tiny.store), open_source(disk.path / "out")
    assert sorted(whole.ids) == sorted(again.ids) and again.skipped == []


def test_more_conversations_under_the_same_name_are_prepared_whole(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    """A refused run leaves the older output as it was."""
    v = ("--verifier-path", tiny.verifier)
    write_conversations(tmp_path / "c.jsonl", 5)
    assert eyas("prepare", *v, "--data", tmp_path / "c.jsonl", "--output-dir", tmp_path / "out").code == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    (tmp_path / "c.jsonl").write_text("{}\n")
    assert_refused(eyas("prepare", *v, "--data", tmp_path / "c.jsonl", "--output-dir", tmp_path / "out"), "nothing to")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("name", ["train", "eval", "export"])
def test_an_output_is_tried_before_the_verifier_is_read(
    tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def not_yet(*_args: object, **_named: object) -> None:
        raise AssertionError("the verifier is read before the output is tried")

    monkeypatch.setattr("eyas.evaluate.run.Verifier", not_yet)
    monkeypatch.setattr("eyas.train.loop.Verifier", not_yet)
    (tmp_path / "file").write_text("mine")
    result = eyas(*commands(tiny, run, tmp_path / "file" / "out", tiny.verifier)[name])
    assert_refused(result, str(tmp_path / "file"), "cannot be written: Not a directory")


def test_outputs_of_the_wrong_kind_are_called_what_they_are(run: Path, tmp_path: Path, eyas: Eyas) -> None:
    (tmp_path / "mine.jsonl").write_text("mine")
    result = eyas("export", run, "--output-dir", tmp_path / "mine.jsonl")
    assert_refused(result, f"{tmp_path / 'mine.jsonl'} is a file: name a folder")
    assert_refused(eyas("eval", run, "--output", tmp_path), f"--output {tmp_path} is a folder: name a file")
    assert (tmp_path / "mine.jsonl").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_an_export_does_not_replace_its_own_source(tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas) -> None:
    out, link = tmp_path / "drafter", tmp_path / "link"
    assert eyas("export", run, "--output-dir", out, "--dtype", "fp32").code == 0
    link.symlink_to(out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    for target in (out, link):
        again = eyas("export", out, "--output-dir", target, "--verifier-path", tiny.verifier)
        assert_refused(again, f"{target} is the checkpoint that is to be exported: name another folder")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    result = eyas("export", out, "--output-dir", tmp_path / "bf16", "--verifier-path", tiny.verifier)
    assert result.code == 0  # an export can be exported, elsewhere


MARKS = {  # of what each command writes, the file that tells it
    "prepare": ("prepared.parquet", "prepared samples"), "capture": ("manifest.json", "a store"),
    "train": ("run.yaml", "a training run"), "vocab": ("vocab.json", "a draft vocabulary"),
    "export": ("config.json", "a model or a drafter"), "other": ("data_7.pt", "another tool's samples"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["prepare", "capture", "vocab", "train", "convert", "merge"])
def test_no_command_writes_among_the_files_of_another(
    tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, name: str
) -> None:
    out = tmp_path / "out"
    calls = commands(tiny, run, out, tiny.verifier) | {
        "convert": ["store", "convert", tiny.store, out], "merge": ["store", "merge", tiny.store, "--output-dir", out],
    }  # fmt: skip
    own = "capture" if name in ("convert", "merge") else name
    for other in MARKS.keys() - {own}:
        mark, words = MARKS[other]
        out.mkdir()
        (out / mark).write_text("theirs")
        assert_refused(eyas(*calls[name]), f"{out} holds {words} ({mark}", "name another folder")
        assert [p.name for p in out.iterdir()] == [mark] and (out / mark).read_text() == "theirs"
        shutil.rmtree(out)


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_figures_are_not_written_over_other_files(run: Path, tmp_path: Path, eyas: Eyas, command: str) -> None:
    for name, text in (("states.safetensors", "\0states"), ("manifest.json", '{"format": 1}'), ("list.json", "[1]")):
        (tmp_path / name).write_text(text)
        result = eyas(command, run, "--output", tmp_path / name)
        assert_refused(result, f"--output {tmp_path / name} holds something else than figures: name another file")
        assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("name", ["conversations.jsonl", "prepared.parquet"])
def test_prepare_does_not_replace_its_own_input(tiny: Tiny, tmp_path: Path, eyas: Eyas, name: str) -> None:
    (tmp_path / name).write_bytes(tiny.conversations.read_bytes())
    arguments = ("--verifier-path", tiny.verifier, "--data", tmp_path / name, "--output-dir", tmp_path)
    result = eyas("prepare", *arguments, "--regenerate", "--max-seq-len", 64)
    assert_refused(result, f"{tmp_path / name} is to be read and would be written over: name another --output-dir")
    assert (tmp_path / name).read_bytes() == tiny.conversations.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == [name]


# -- settings that leave nothing, and runs that were moved -------------------------------------------------------------


def test_a_max_seq_len_that_leaves_nothing_is_named(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    least = int(open_source(tiny.store).needs.min())
    arguments = [*train_arguments(tiny, tmp_path / "out"), "--max-seq-len", 5]
    words = f"no sample of {tiny.store} has a trained position within --max-seq-len 5"
    assert_refused(eyas(*arguments), words, f"the least that one needs is {least} tokens")
    assert least > 5 and not (tmp_path / "out").exists()


def test_a_vocabulary_that_leaves_nothing_to_train_is_refused(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    whole = Run(load_config({**run_settings(tiny, tmp_path / "whole"), "vocab_mapping_dir": None}), lambda _text: None)
    packs = Loader(whole.reads, [[i] for i in whole.train_samples + whole.val_samples], 1, 64, 0)
    head = whole.objective.verifier
    said = torch.cat([head.first_choice(head.targets(b.last, torch.float32)) for b in packs])
    never = np.setdiff1d(np.arange(400), said.numpy())[:8]
    save_vocab(tmp_path / "never", never)
    arguments = train_arguments(tiny, tmp_path / "out", vocab_mapping_dir=tmp_path / "never", outside="drop")
    words = ("--outside drop leaves nothing to train", "in the draft vocabulary of 8 tokens", "eyas vocab")
    assert_refused(eyas(*arguments), *words)
    assert not (tmp_path / "out").exists()
    often = int(said.bincount().argmax())
    save_vocab(tmp_path / "one", np.sort(np.append(never, often)))
    assert eyas(*train_arguments(tiny, tmp_path / "out", vocab_mapping_dir=tmp_path / "one", outside="drop")).code == 0


def save_vocab(folder: Path, targets: np.ndarray) -> None:
    """The draft vocabulary of these tokens, of 400, in `folder`."""
    DraftVocab(targets - np.arange(len(targets)), np.isin(np.arange(400), targets)).save(folder)


def test_batches_of_one_sample_each_are_said(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    result = eyas(*train_arguments(tiny, tmp_path / "out"), "--batch-tokens", 10)
    trained = len(Run(load_config(run_settings(tiny, tmp_path / "other")), lambda _text: None).train_samples)
    words = f"warning: {trained} of {trained} samples are longer than --batch-tokens 10: each is a batch of its own"
    assert result.code == 0 and any(line.startswith(words) for line in result.out), result.out


def moved(run: Path, copy: Path, folder: Path, **changes: object) -> Path:
    """A copy of the run, whose run.yaml says that it was started in `folder` with other settings."""
    shutil.copytree(run, copy, symlinks=True)
    about = yaml.safe_load((copy / "run.yaml").read_text())
    about["config"].update(changes)
    about["folder"] = str(folder)
    (copy / "run.yaml").write_text(yaml.safe_dump(about))
    return copy


def test_a_run_is_evaluated_and_exported_from_any_folder(
    tiny: Tiny, run: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch
) -> None:
    relative = {"data_dir": tiny.store.name, "verifier_path": os.path.relpath(tiny.verifier, tiny.store.parent)}
    copy = moved(run, tmp_path / "run", folder=tiny.store.parent, **relative)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = eyas("eval", copy, "--dtype", "fp32", "--prompts", 2, "--max-new-tokens", 6)
    assert (result.code, result.err) == (0, [])
    result = eyas("export", copy, "--output-dir", "drafter")
    assert result.code == 0 and f"--model-path {tiny.store.parent / relative['verifier_path']}" in "\n".join(result.out)


def test_paths_of_a_run_that_lead_nowhere_are_said_to_be_the_run_s(
    run: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = moved(run, tmp_path / "run", folder=tmp_path, data_dir="work/store")
    words = ("the run's data are not at work/store", f"{copy / 'run.yaml'} names: name --data-dir", "started in")
    assert_refused(eyas("eval", copy), *words)
    copy = moved(run, tmp_path / "other", folder=tmp_path, verifier_path="./work/v")
    for command in (["eval", copy], ["export", copy, "--output-dir", "drafter"]):
        assert_refused(eyas(*command), "work/v", f"(named by {copy / 'run.yaml'}: --verifier-path names another)")


def test_a_run_yaml_that_cannot_be_read_says_why(run: Path, tmp_path: Path, eyas: Eyas) -> None:
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    (copy / "run.yaml").unlink()
    (copy / "run.yaml").mkdir()  # root reads whatever its permissions say
    result = eyas("eval", copy)
    assert_refused(result, f"{copy / 'run.yaml'} cannot be read: Is a directory")
    assert "not what eyas train wrote" not in result.err[0]


def test_eval_speaks_while_it_decodes_batches_and_one_stream(
    run: Path, tmp_path: Path, eyas: Eyas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.evaluate.run.SAY_SECONDS", 0.0)
    settings = ("--dtype", "fp32", "--prompts", 2, "--max-new-tokens", 6, "--output", tmp_path / "eval.json")
    result = eyas("eval", run, *settings)
    assert result.code == 0
    for how in ("with the drafter", "the verifier alone"):
        assert f"decoding prompts 1 to 2 of 2, {how} · 2 of at most 12 tokens" in result.out
        for prompt in (1, 2):
            assert f"decoding one stream, prompt {prompt} of 2, {how} · 1 of at most 6 tokens" in result.out
