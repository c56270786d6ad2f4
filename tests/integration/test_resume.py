"""A run that is interrupted and goes on is the run that was not, to the bit; and it goes on with nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from ranks import Played, play, settings, start, state_json, steps, tensors, trace
from safetensors.torch import load_file

import eyas as package
from conftest import Eyas, Tiny
from eyas.config import load_config
from eyas.errors import EyasError
from eyas.store.convert import convert
from eyas.store.layout import Manifest
from eyas.store.writer import StoreWriter
from eyas.train.loop import Run
from eyas.train.samples import kept_samples
from eyas.verifier import MLA, Verifier

pytestmark = pytest.mark.usefixtures("one_thread")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], kind: str) -> float:
    """The largest |a - b| / |a| of the tensors of this kind."""
    names = [name for name in a if name.startswith(kind)]
    assert names and a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / a[n].norm().clamp_min(1e-12)) for n in names)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 2), (3, 1)])
def test_killed_and_resumed_is_the_run_that_was_not_killed(
    tiny: Tiny, tmp_path: Path, ranks: int, accumulation: int
) -> None:
    whole = tmp_path / "whole"
    flags = {"grad_accumulation": accumulation, "batch_tokens": 300 // (ranks * accumulation)}
    assert play(settings(tiny, whole, **flags), ranks).codes == [0] * ranks
    total = len(trace(whole))
    assert total >= 8, "two epochs of four steps at least"
    # in the middle of the first epoch; at its end, with nothing saved but there; in the middle of the second, unsaved
    cuts = [(3, 3), (total // 2, None), (total // 2 + 2, None)]
    for again, (kill_at, save_every) in enumerate(cuts[: 1 if ranks > 2 else 3]):
        output = tmp_path / f"cut{again}"
        killed = play(settings(tiny, output, **flags, save_every=save_every), ranks, kill_at)
        assert killed.codes == [-signal.SIGKILL] * ranks
        saved = min(kill_at, total // 2) if save_every is None else 3
        assert steps(output)[-1] == saved
        assert play({"output_dir": output, "resume": True}, ranks).codes == [0] * ranks
        for rank in range(ranks):
            made = trace(output, rank)
            assert made[:kill_at] + made[kill_at + (kill_at - saved) :] == trace(whole, rank)
            assert made[kill_at:][: kill_at - saved] == made[saved:kill_at], "steps done twice are the same steps"
        assert same(tensors(output, total), tensors(whole, total))
        assert state_json(output, total) == state_json(whole, total)
        last = "last/model.safetensors"
        assert same(load_file(output / last), load_file(whole / last))


def test_two_ranks_resumed_as_one_see_the_same_remaining_samples(tiny: Tiny, tmp_path: Path) -> None:
    two, mixed = tmp_path / "two", tmp_path / "mixed"
    flags = {"batch_tokens": 150}
    assert play(settings(tiny, two, **flags), 2).codes == [0, 0]
    play(settings(tiny, mixed, **flags, save_every=3), 2, kill_at=3)
    resumed = play({"output_dir": mixed, "resume": True})
    assert resumed.codes == [0]
    assert any("a step takes 1 packs now" in line for line in resumed.said)
    seen = [name for step in trace(two) for name in step["samples"]]
    assert [name for step in trace(mixed) for name in step["samples"]] == seen
    assert len(trace(mixed)) > len(trace(two))
    rates = [float.fromhex(step["lr"]) for step in trace(mixed)]
    assert max(abs(a - b) for a, b in pairwise(rates)) < 1e-3, "the schedule goes on where it was"
    # and with twice the accumulation, one rank makes the very steps that two would have made
    shutil.rmtree(mixed)
    mixed.with_suffix(".0.jsonl").unlink()
    play(settings(tiny, mixed, **flags, save_every=3), 2, kill_at=3)
    assert play({"output_dir": mixed, "resume": True, "grad_accumulation": 2}).codes == [0]
    total = len(trace(two))
    assert [s["samples"] for s in trace(mixed)] == [s["samples"] for s in trace(two)]
    assert distance(tensors(two, total), tensors(mixed, total), "weights/") < 1e-5


def test_one_rank_with_accumulation_two_equals_two_ranks_and_sharded_ones(tiny: Tiny, tmp_path: Path) -> None:
    flags = {"batch_tokens": 220}
    runs = {
        "one": ({"grad_accumulation": 2}, 1),
        "two": ({}, 2),
        "sharded": ({"parallel": "fsdp"}, 2),
    }
    for name, (more, ranks) in runs.items():
        assert play(settings(tiny, tmp_path / name, **flags, **more), ranks).codes == [0] * ranks
    total = len(trace(tmp_path / "one"))
    packs = [len(p) for p in Run(load_config(settings(tiny, tmp_path / "x", **flags)), lambda _t: None).epochs]
    assert any(n % 2 for n in packs), "a rank had nothing to train in some step"
    one = tensors(tmp_path / "one", total)
    for name in ("two", "sharded"):
        other = tensors(tmp_path / name, total)
        assert [s["samples"] for s in trace(tmp_path / name)] == [s["samples"] for s in trace(tmp_path / "one")]
        assert distance(one, other, "weights/") < 1e-5
        assert distance(one, other, "average/") < 1e-5
        for a, b in zip(trace(tmp_path / "one"), trace(tmp_path / name), strict=True):
            assert float.fromhex(a["loss"]) == pytest.approx(float.fromhex(b["loss"]), rel=1e-5)
            assert float.fromhex(a["lr"]) == float.fromhex(b["lr"])
        a, b = (state_json(tmp_path / n, total)["validations"][-1] for n in ("one", name))
        assert a["positions"] == b["positions"] and a["samples"] == b["samples"]
        assert a["accept_length"] == pytest.approx(b["accept_length"], rel=1e-4)


def test_sharded_states_go_on_exactly_and_as_one_rank(tiny: Tiny, tmp_path: Path) -> None:
    flags = {"batch_tokens": 150, "parallel": "fsdp"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert play(settings(tiny, whole, **flags), 2).codes == [0, 0]
    play(settings(tiny, cut, **flags, save_every=3), 2, kill_at=3)
    shutil.copytree(cut, tmp_path / "single")
    assert play({"output_dir": cut, "resume": True}, 2).codes == [0, 0]
    total = len(trace(whole))
    assert same(tensors(cut, total), tensors(whole, total))
    alone = play({"output_dir": tmp_path / "single", "resume": True, "grad_accumulation": 2})
    assert alone.codes == [0]
    assert distance(tensors(whole, total), tensors(tmp_path / "single", total), "weights/") < 1e-5


def test_torchrun_trains_and_only_rank_0_speaks(tiny: Tiny, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "eyas", "train",
         "--verifier-path", tiny.verifier, "--data-dir", tiny.store, "--vocab-mapping-dir", tiny.vocab, "--output-dir",
         tmp_path / "run", "--max-seq-len", "64", "--dtype", "fp32", "--epochs", "1"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(package.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    lines = done.stdout.splitlines()
    assert sum("2 ranks (ddp)" in line for line in lines) == 1
    assert sum(line.startswith("done: ") for line in lines) == 1
    assert "torchrun --nproc-per-node 2 -m eyas train" in (tmp_path / "run" / "resume.txt").read_text()
    assert (tmp_path / "run" / "best" / "model.safetensors").exists()


def test_a_rank_that_is_killed_ends_the_others_with_one_line(tiny: Tiny, tmp_path: Path) -> None:
    children = start(settings(tiny, tmp_path / "run", batch_tokens=75, epochs=999), 2)
    while not tmp_path.joinpath("run.0.jsonl").exists():
        assert children[0].is_alive()
        time.sleep(0.05)
    children[1].kill()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [2, -signal.SIGKILL]
    assert (tmp_path / "run.said").read_text().splitlines()[-1].startswith("eyas: another rank is gone")


# -- what can be gone on with ------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tiny: Tiny, tmp_path: Path) -> Path:
    """A run killed before step 5, with states of steps 2 and 4."""
    output = tmp_path / "run"
    play(settings(tiny, output, save_every=2), kill_at=5)
    assert steps(output) == [2, 4]
    return output


def resume(output: Path, **flags: Any) -> Played:
    return play({"output_dir": output, "resume": True, **flags})


def test_a_run_is_not_written_over(tiny: Tiny, stopped: Path) -> None:
    refused = play(settings(tiny, stopped))
    assert refused.codes == [2]
    assert refused.said == [
        f"eyas: --output-dir {stopped} holds a run: go on with it by --resume, or name a new folder"
    ]
    assert steps(stopped) == [2, 4]


def test_what_matters_must_be_the_same_and_is_named(tiny: Tiny, stopped: Path, tmp_path: Path) -> None:
    before = (stopped / "run.yaml").read_bytes()
    t2d = np.zeros(400, dtype=bool)
    t2d[:96] = True
    (tmp_path / "m").mkdir()
    np.save(tmp_path / "m" / "t2d.npy", t2d)
    np.save(tmp_path / "m" / "d2t.npy", np.zeros(96, dtype=np.int64))
    for flags, words in (
        ({"lr": 1e-3}, ["--lr (was 0.002, is 0.001)"]),
        ({"seed": 1, "loss": "tv"}, ["--loss (was kl, is tv)", "--seed (was 0, is 1)"]),
        ({"grad_accumulation": 2}, ["--grad-accumulation (was 1, is 2)"]),
        ({"vocab_mapping_dir": tmp_path / "m"}, ["vocabulary"]),
    ):
        refused = resume(stopped, **flags)
        assert refused.codes == [2]
        assert all(word in refused.said[-1] for word in ["--resume: the run in", *words]), refused.said[-1]
        assert (stopped / "run.yaml").read_bytes() == before
    shutil.copytree(tiny.store, tmp_path / "elsewhere")
    assert resume(stopped, data_dir=tmp_path / "elsewhere", num_workers=0, keep=9).codes == [0]  # all that may differ


def test_a_run_goes_on_where_its_eyas_knew_fewer_settings_all_at_their_defaults(stopped: Path) -> None:
    later = {"attention", "recompute", "stage_dir", *MLA}
    about = yaml.safe_load((stopped / "run.yaml").read_text())
    about["config"] = {name: value for name, value in about["config"].items() if name not in later}
    (stopped / "run.yaml").write_text(yaml.safe_dump(about))
    for path in (stopped / "state").glob("step-*/state.json"):
        state = json.loads(path.read_text())
        for name in (*("--" + name.replace("_", "-") for name in later), "codec", "drafter's sizes"):
            state["identity"].pop(name, None)
        path.write_text(json.dumps(state))
    other = resume(stopped, attention="mla", **dict.fromkeys(MLA, 8))
    assert other.codes == [2] and "--attention (was llama, is mla)" in other.said[-1]
    assert resume(stopped).codes == [0]


def test_a_warm_start_from_another_drafter_than_the_runs_is_refused_and_not_its_state(
    tiny: Tiny, tmp_path: Path
) -> None:
    for name, width in (("a", 128), ("b", 96)):
        play(settings(tiny, tmp_path / name, epochs=1, batch_tokens=2000, intermediate_size=width))
    output = tmp_path / "run"
    play(settings(tiny, output, init_from=tmp_path / "a", save_every=2), kill_at=3)
    other = resume(output, init_from=tmp_path / "b")
    assert other.codes == [2] and other.said[-1].endswith("has other drafter's sizes: name a new --output-dir")
    assert resume(output).codes == [0]


def test_a_run_whose_data_lost_a_sample_says_how_to_begin_another_from_it(tiny: Tiny, tmp_path: Path) -> None:
    store = shutil.copytree(tiny.store, tmp_path / "store")
    play(settings(tiny, tmp_path / "run", data_dir=store, epochs=2, save_every=2), kill_at=3)
    journal = next(store.glob("journal-*.jsonl"))
    journal.write_bytes(journal.read_bytes().partition(b"\n")[2])
    told = resume(tmp_path / "run")
    assert told.codes == [2] and f"and --init-from {tmp_path / 'run'} to start from its best" in told.said[-1]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_goes_on_without_samples_that_were_shut_out_and_trains_each_other_one_once(
    tiny: Tiny, tmp_path: Path, accumulation: int
) -> None:
    store, whole, cut = shutil.copytree(tiny.store, tmp_path / "store"), tmp_path / "whole", tmp_path / "cut"
    flags = {"data_dir": store, "batch_tokens": 75, "grad_accumulation": accumulation, "save_every": 2}
    assert play(settings(tiny, whole, **flags)).codes == [0]
    planned = [name for step in trace(whole) for name in step["samples"]]
    epoch, saved = len(planned) // 2, 2
    assert sorted(planned[:epoch]) == sorted(planned[epoch:])
    play(settings(tiny, cut, **flags), kill_at=3)
    left = planned[sum(len(step["samples"]) for step in trace(cut)[:saved]) :]
    kept = json.loads((cut / "start" / "samples.json").read_text())
    validates = kept["ids"][kept["validate"][0]]
    listed: list[str] = []
    for more, kill_at in ((left[3:9], 7), ([left[12], validates], None)):  # whole packs among them
        listed += more
        (store / "quarantine.json").write_text(json.dumps(dict.fromkeys(listed, "checksum")))
        cut.with_suffix(".0.jsonl").unlink()
        went_on = play({"output_dir": cut, "resume": True}, kill_at=kill_at)
        assert any(f"warning: {len(listed)} of the run's 40 samples are in quarantine" in x for x in went_on.said)
        left = [name for name in left if name not in listed]
        seen = [name for step in trace(cut) for name in step["samples"]]
        assert seen == left[: len(seen)], "in the order that they would have had, each once"
        trained, saved = trace(cut)[: steps(cut)[-1] - saved], steps(cut)[-1]
        left = left[sum(len(step["samples"]) for step in trained) :]
    assert went_on.codes == [0] and left == []
    last, other = (
        json.loads((run / "state" / f"step-{steps(run)[-1]:06d}" / "state.json").read_text()) for run in (cut, whole)
    )
    assert (last["packs"], last["identity"]) == (other["packs"], other["identity"]), "the schedule has come to its end"
    (store / "quarantine.json").unlink()
    assert not any("quarantine" in line for line in resume(cut).said)


def test_epochs_without_a_validation_take_the_best_from_none_that_had_one(tiny: Tiny, tmp_path: Path) -> None:
    """The validation samples are shut out for the second epoch of three, and let in again for the last."""
    store, run = shutil.copytree(tiny.store, tmp_path / "store"), tmp_path / "run"
    play(settings(tiny, run, data_dir=store, epochs=3, batch_tokens=600), kill_at=5)
    kept = json.loads((run / "start" / "samples.json").read_text())
    shut_out = {kept["ids"][i]: "checksum" for i in kept["validate"]}
    (store / "quarantine.json").write_text(json.dumps(shut_out))
    first = (run / "best").resolve()
    without = play({"output_dir": run, "resume": True}, kill_at=9)
    assert (
        "no validation after epoch 2: all its samples are in quarantine; so the last checkpoint that was validated"
        " stays the best, and --patience ends nothing"
    ) in without.said
    assert (run / "best").resolve() == first != (run / "last").resolve()
    (store / "quarantine.json").unlink()
    assert resume(run).codes == [0]
    told = json.loads((run / "summary.json").read_text())
    lengths = {f"step-{v['step']:06d}": v["accept_length"] for v in told["validations"]}
    assert len(lengths) == 2 and told["best"] == max(lengths, key=lambda name: lengths[name])


@pytest.mark.parametrize("change", [{"ids": [1, 2]}, {"train": [0, 40]}, {"train": ["0"]}, {"lengths": None}])
def test_a_damaged_list_of_samples_is_no_list(stopped: Path, change: dict[str, Any]) -> None:
    path = stopped / "start" / "samples.json"
    assert kept_samples(path.parent) is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert kept_samples(path.parent) is None
    assert resume(stopped).codes == [0], "the data are those of the run, and tell it themselves"
    assert kept_samples(path.parent) is not None


def test_what_a_run_has_trained_is_never_held_out(tiny: Tiny, tmp_path: Path, eyas: Eyas) -> None:
    """Without one of its samples the data split elsewhere; evaluation keeps to what the run has not seen."""
    store, run = shutil.copytree(tiny.store, tmp_path / "store"), tmp_path / "run"
    play(settings(tiny, run, data_dir=store, epochs=1, batch_tokens=600))
    kept = json.loads((run / "start" / "samples.json").read_text())
    validates = [kept["ids"][i] for i in kept["validate"]]
    (store / "quarantine.json").write_text(json.dumps({validates[0]: "checksum"}))
    assert eyas("eval", run, "--dtype", "fp32", "--prompts", 99, "--max-new-tokens", 2).code == 0
    assert set(json.loads((run / "eval.json").read_text())["decode"]["prompt_ids"]) == set(validates[1:])


def warm_and_killed(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path, Path, Path]:
    """What two runs start from (a checkpoint and a vocabulary), one that ended, and one killed at its third step."""
    before, vocab, whole, output = (tmp_path / name for name in ("before", "vocab", "whole", "run"))
    shutil.copytree(tiny.vocab, vocab)
    play(settings(tiny, before, epochs=1, batch_tokens=2000, intermediate_size=96))
    flags = {"init_from": before, "vocab_mapping_dir": vocab, "save_every": 2}
    assert play(settings(tiny, whole, **flags)).codes == [0]
    play(settings(tiny, output, **flags), kill_at=3)
    return before, vocab, whole, output


def test_a_warm_started_run_goes_on_to_the_bit_when_what_it_started_from_is_gone(tiny: Tiny, tmp_path: Path) -> None:
    before, vocab, whole, output = warm_and_killed(tiny, tmp_path)
    shutil.rmtree(before)
    shutil.rmtree(vocab)
    gone = resume(output)
    assert gone.codes == [0]
    assert f"--init-from {before} is gone: the run's state has the weights" in gone.said
    assert f"--vocab-mapping-dir {vocab} is gone: the run's own copy of it is taken" in gone.said
    total = len(trace(whole))
    assert same(tensors(output, total), tensors(whole, total))
    assert same(load_file(output / "last/model.safetensors"), load_file(whole / "last/model.safetensors"))
    (output / "start").rename(tmp_path / "start")
    missing = resume(output)
    assert missing.codes == [2] and missing.said[-1].endswith(
        f"and {output / 'start'}, which would stand in for it, is missing or damaged"
    )
    (tmp_path / "start").rename(output / "start")
    shutil.rmtree(output / "state")  # the weights that it began with are nowhere now
    refused = resume(output)
    assert refused.codes == [2]
    assert f"--init-from: {before} is neither a run directory with a best checkpoint" in refused.said[-1]
    assert refused.said[-1].endswith(f"and {output} has no state to go on from without it")


def test_a_run_goes_on_from_its_own_copies_where_what_it_started_from_is_another_by_now(
    tiny: Tiny, tmp_path: Path
) -> None:
    before, vocab, whole, output = warm_and_killed(tiny, tmp_path)
    (before / "best/model.safetensors").write_bytes(b"cut")
    (vocab / "t2d.npy").write_bytes(b"cut")
    went_on = resume(output)
    assert went_on.codes == [0], went_on.said
    (told,) = [line for line in went_on.said if "the run's own copy is taken" in line]
    assert told.startswith(f"--vocab-mapping-dir {vocab} cannot be used any more (")
    total = len(trace(whole))
    assert same(tensors(output, total), tensors(whole, total))


def test_a_run_is_resumed_from_any_folder(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "run"
    monkeypatch.chdir(tiny.store.parent)
    flags = {name: os.path.relpath(getattr(tiny, name)) for name in ("verifier", "store", "vocab")}
    places = {"verifier_path": flags["verifier"], "data_dir": flags["store"], "vocab_mapping_dir": flags["vocab"]}
    play({**settings(tiny, output, save_every=2), **places}, kill_at=3)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    went_on = resume(output)
    assert went_on.codes == [0] and any(line.startswith("goes on from ") for line in went_on.said)


def test_data_kept_in_another_way_are_other_data(tiny: Tiny, stopped: Path, tmp_path: Path) -> None:
    verifier = Verifier(tiny.verifier)
    for codec, last, told in (("fp8", "all", "fp8"), ("bf16", "logits:8", "bf16, logits:8")):
        store = tmp_path / last / codec
        convert(tiny.store, store, verifier, codec=codec, last=last, say=lambda _text: None)
        refused = resume(stopped, data_dir=store)
        assert refused.codes == [2] and f"has other codec (was bf16, is {told})" in refused.said[-1]
    # rows where nothing is trained are read by nobody
    convert(tiny.store, tmp_path / "trained", verifier, last="trained", say=lambda _text: None)
    assert resume(stopped, data_dir=tmp_path / "trained").codes == [0]


def test_a_state_that_is_not_whole_is_never_taken(stopped: Path) -> None:
    newest = stopped / "state" / "step-000004"
    shard = next(newest.glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    (stopped / "state" / ".step-000006").mkdir()  # what a killed process had begun
    resumed = resume(stopped)
    assert resumed.codes == [0]
    assert any("step-000004 is not whole" in line for line in resumed.said)
    assert any(line.startswith(f"goes on from {stopped / 'state' / 'step-000002'}") for line in resumed.said)
    assert not (stopped / "state" / ".step-000006").exists()


def test_resume_starts_a_run_that_is_not_there_and_leaves_a_finished_one_alone(tiny: Tiny, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert play(settings(tiny, output, resume=True)).codes == [0]
    made, weights = trace(output), (output / "best" / "model.safetensors").read_bytes()
    assert resume(output).codes == [0]
    assert trace(output) == made
    assert (output / "best" / "model.safetensors").read_bytes() == weights
    assert len(yaml.safe_load((output / "run.yaml").read_text())["resumed"]) == 1


def test_two_processes_do_not_train_into_one_directory(tiny: Tiny, tmp_path: Path) -> None:
    config = load_config(settings(tiny, tmp_path / "run"))
    run = Run(config, lambda _text: None)
    (tmp_path / "run").mkdir()
    with run.states:
        run.states.lock()
        refused = play(settings(tiny, tmp_path / "run"))
        assert refused.codes == [2] and "another process trains into it" in refused.said[-1]
    assert play(settings(tiny, tmp_path / "run")).codes == [0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(tiny: Tiny, tmp_path: Path, eyas: Eyas, number: signal.Signals) -> None:
    whole, output = tmp_path / "whole", tmp_path / "it's a run"
    play(settings(tiny, whole))
    stopped = play(settings(tiny, output), kill_at=3, wake=number)
    assert stopped.codes == [0]
    match = re.fullmatch(r"stopped after step 3/(\d+), and saved · go on with: (.*)", stopped.said[-1])
    assert match, stopped.said
    assert match[2] == (output / "resume.txt").read_text().strip()
    assert json.loads((output / "summary.json").read_text())["stopped"] == "signal"
    words = shlex.split(match[2].split(" && ")[1])
    assert words[-3:] == ["--output-dir", str(output), "--resume"]
    result = eyas(*words[words.index("train") :])
    assert (result.code, result.err) == (0, [])
    total = len(trace(whole))
    assert same(tensors(output, total), tensors(whole, total))


def test_a_signal_while_validating_leaves_the_validation_for_later(tiny: Tiny, tmp_path: Path) -> None:
    whole = Run(load_config(settings(tiny, tmp_path / "whole")), lambda _text: None)
    expected = whole.train()
    run = Run(load_config(settings(tiny, tmp_path / "run")), lambda _text: None)
    validate = run.validate

    def interrupted(drafter: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(drafter)

    run.validate = interrupted  # type: ignore[method-assign]
    summary = run.train()
    assert summary["stopped"] == "signal" and summary["validations"] == []
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    resumed = Run(load_config({"output_dir": tmp_path / "run", "resume": True}), lambda _text: None).train()
    assert resumed["validations"] == expected["validations"]


# -- when it ends, what it starts from, what it keeps ------------------------------------------------------------------


def test_patience_ends_a_run_whose_accept_length_grows_no_more(tiny: Tiny, tmp_path: Path) -> None:
    flags = settings(tiny, tmp_path / "run", lr=1e-30, batch_tokens=2000, epochs=9, patience=2)
    said: list[str] = []
    summary = Run(load_config(flags), said.append).train()
    assert summary["stopped"] == "patience" and summary["epochs"] == 3
    assert said[-1].startswith("done (--patience)")
    assert Run(load_config({"output_dir": tmp_path / "run", "resume": True}), said.append).train()["epochs"] == 3


def test_patience_without_a_validation_is_refused_or_told(tiny: Tiny, tmp_path: Path) -> None:
    flags = settings(tiny, tmp_path / "run", epochs=1, patience=1)
    with pytest.raises(EyasError, match="--patience looks at validations, and no sample validates: raise --val-ratio"):
        Run(load_config(flags | {"val_ratio": 0.0}), lambda _text: None)
    with StoreWriter(tmp_path / "short", Manifest.load(tiny.store)) as store:  # of 4 tokens, which step 2 never trains
        for i in range(4):
            store.add(f"s{i}", np.arange(4), np.ones(4, dtype=bool), torch.randn(4, 4, 64))
    said: list[str] = []
    assert Run(load_config(flags | {"data_dir": tmp_path / "short"}), said.append).train()["validations"] == []
    assert any(line.startswith("no validation after epoch 1: no position of its 1 samples trains all") for line in said)


def test_a_run_whose_time_is_over_before_its_first_step_names_no_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    said: list[str] = []
    run = Run(load_config(settings(tiny, tmp_path / "run", epochs=1, max_minutes=1e-9)), said.append)
    assert run.train()["steps"] == 0 and not (tmp_path / "run" / "best").exists()
    assert said[-2].endswith("no checkpoint yet") and said[-1].endswith("--resume")
    assert resume(tmp_path / "run", max_minutes=60.0).codes == [0] and (tmp_path / "run" / "best").exists()


def test_max_minutes_ends_with_a_validated_drafter_and_the_run_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    Run(load_config(settings(tiny, tmp_path / "whole")), lambda _text: None).train()
    config = load_config(settings(tiny, tmp_path / "run", max_minutes=0.01))
    run = Run(config, lambda _text: None)
    step = run._step

    def slow(*arguments: Any) -> Any:
        run.began -= 0.25  # time passes
        return step(*arguments)

    run._step = slow  # type: ignore[method-assign]
    summary = run.train()
    assert summary["stopped"] == "time" and summary["steps"] == 2 and len(summary["validations"]) == 1
    assert (tmp_path / "run" / "best").resolve().name == "step-000002"
    flags = {"output_dir": tmp_path / "run", "resume": True, "max_minutes": 60.0}
    total = Run(load_config(flags), lambda _text: None).train()["steps"]
    assert same(tensors(tmp_path / "run", total), tensors(tmp_path / "whole", total))


def test_the_moving_average_is_validated_and_exported(tiny: Tiny, tmp_path: Path) -> None:
    flags = settings(tiny, tmp_path / "run", batch_tokens=2000, epochs=3, ema=0.5)
    run = Run(load_config(flags), lambda _text: None)
    weights = {name: p.detach().clone() for name, p in run.drafter.named_parameters()}
    average, step = {name: w.clone() for name, w in weights.items()}, run._step

    def watched(*arguments: Any) -> Any:
        metrics = step(*arguments)
        for name, p in run.drafter.named_parameters():
            average[name] = 0.5 * average[name] + 0.5 * p.detach()
        return metrics

    run._step = watched  # type: ignore[method-assign]
    run.train()
    saved = load_file(tmp_path / "run" / "last" / "model.safetensors")
    for name, p in run.drafter.named_parameters():
        torch.testing.assert_close(saved[name], average[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(saved[name], p)


def test_muon_trains_and_goes_on_exactly(tiny: Tiny, tmp_path: Path) -> None:
    flags = {"optimiser": "muon", "lr": 5e-3}
    play(settings(tiny, tmp_path / "whole", **flags))
    play(settings(tiny, tmp_path / "cut", **flags, save_every=3), kill_at=3)
    assert resume(tmp_path / "cut").codes == [0]
    made = trace(tmp_path / "whole")
    assert trace(tmp_path / "cut") == made
    assert float.fromhex(made[-1]["loss"]) < float.fromhex(made[0]["loss"])
    saved = tensors(tmp_path / "whole", len(made))
    assert same(tensors(tmp_path / "cut", len(made)), saved)
    assert "optimiser/momentum_buffer/midlayer.mlp.up_proj.weight" in saved
    assert "optimiser/exp_avg/lm_head.weight" in saved


def test_a_warm_start_keeps_the_checkpoints_vocabulary_and_refuses_another(
    tiny: Tiny, tmp_path: Path, eyas: Eyas
) -> None:
    v = ("--verifier-path", tiny.verifier)
    common = ("train", *v, "--data-dir", tiny.store, "--max-seq-len", 64, "--dtype", "fp32", "--epochs", 1)
    assert eyas(*common, "--vocab-mapping-dir", tiny.vocab, "--output-dir", tmp_path / "a").code == 0
    warm = eyas(*common, "--init-from", tmp_path / "a", "--output-dir", tmp_path / "b", "--lr", 1e-12)
    assert (warm.code, warm.err) == (0, [])
    assert any("with its vocabulary of 96 tokens" in line for line in warm.out)
    a, b = (load_file(tmp_path / n / "best" / "model.safetensors") for n in "ab")
    assert torch.equal(a["d2t"], b["d2t"]) and torch.equal(a["t2d"], b["t2d"])
    for name in a:
        torch.testing.assert_close(a[name].float(), b[name].float(), rtol=0, atol=1e-8)
    assert eyas("vocab", *v, "--data", tiny.prepared, "--output-dir", tmp_path / "m", "--size", 97).code == 0
    for more, words in (
        (("--vocab-mapping-dir", tmp_path / "m"), "is not the vocabulary of"),
        (("--num-heads", 8), "--init-from keeps the checkpoint's sizes"),
        (("--q-lora-rank", 8), "has none, and --init-from keeps the checkpoint's sizes"),
    ):
        refused = eyas(*common, "--init-from", tmp_path / "a", "--output-dir", tmp_path / "c", *more)
        assert (refused.code, len(refused.err)) == (2, 1) and words in refused.err[0]


def test_a_head_of_noise_is_not_frozen(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="--freeze-head leaves lm_head as it starts, which --init random makes noise"):
        Run(load_config(settings(tiny, tmp_path / "run", freeze_head=True, init="random")), lambda _text: None)


def test_the_last_states_and_the_best_checkpoint_are_kept(tiny: Tiny, tmp_path: Path) -> None:
    output = tmp_path / "run"
    flags = settings(tiny, output, batch_tokens=2000, epochs=6, keep=2, lr=0.5, warmup_ratio=0.0)
    summary = Run(load_config(flags), lambda _text: None).train()
    assert steps(output) == [5, 6]
    lengths = [v["accept_length"] for v in summary["validations"]]
    best = f"step-{summary['validations'][int(np.argmax(lengths))]['step']:06d}"
    kept = sorted(p.name for p in (output / "checkpoints").iterdir())
    assert kept == sorted({best, "step-000005", "step-000006"})
    assert (output / "best").resolve().name == best
    assert not list(output.rglob(".*"))


def test_eight_bit_moments_resume_to_the_bit(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="pip install 'eyas[8bit]'")
    flags = {"optimiser": "adamw8bit", "lr": 1e-3}
    whole, cut, plain = tmp_path / "whole", tmp_path / "cut", tmp_path / "plain"
    with torch.compiler.set_stance("force_eager"):  # a shape takes many seconds to compile on a CPU
        assert play(settings(tiny, whole, **flags)).codes == [0]
        assert play(settings(tiny, cut, **flags, save_every=3), kill_at=4).codes == [-signal.SIGKILL]
        resumed = play({"output_dir": cut, "resume": True})
    assert resumed.codes == [0] and any("compiling the 8-bit optimiser" in line for line in resumed.said)
    total = len(trace(whole))
    assert same(tensors(whole, total), tensors(cut, total))
    state = tensors(whole, total)
    name = "midlayer.mlp.up_proj.weight"
    assert state[f"optimiser/exp_avg/{name}/codes"].dtype == torch.uint8
    assert f"optimiser/exp_avg/{name}" not in state
    assert play(settings(tiny, plain, **flags | {"optimiser": "adamw"})).codes == [0]
    losses = [json.loads((run / "summary.json").read_text())["validations"][-1]["loss"] for run in (whole, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02), "it learns what AdamW learns"
