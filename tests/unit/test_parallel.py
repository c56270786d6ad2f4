"""Who a process is among ranks, and what a step is made of, without any other process."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from eyas.config import TrainConfig
from eyas.errors import EyasError, OtherRankGone
from eyas.train import stop
from eyas.train.command import recorder
from eyas.train.objective import pack_seed
from eyas.train.optim import check_optimiser, learning_rate
from eyas.train.parallel import Ranks, held_back, other_ranks_gone, whole


def config(**settings: object) -> TrainConfig:
    return TrainConfig(verifier_path="v", data_dir="d", output_dir="o", **settings)  # type: ignore[arg-type]


def test_without_torchrun_there_is_one_rank_and_nothing_to_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other launchers set RANK and WORLD_SIZE by hosts: without a local rank they mean something else.
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    ranks = Ranks.join("cpu")
    assert (ranks.rank, ranks.local_rank, ranks.world, ranks.first) == (0, 0, 1, True)
    assert ranks.sum([2.0, 3.0]) == [2.0, 3.0] and ranks.any(True) and not ranks.any(False)
    record = recorder(config())
    assert (record.rank, record.world) == (0, 1), "and each of them speaks"
    record.beat.unlink()


def test_one_device_for_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EyasError, match="--device cuda:0 is one device for 2 ranks: say cuda"):
        Ranks.join("cuda:0")


def test_a_second_signal_does_not_ask_and_one_that_follows_at_once_is_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with stop.Stop() as asked:
        assert asked.asked is None
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 1
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.asked == "SIGINT"
        now[0] += 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_muon_and_sharded_matrices_are_refused_together() -> None:
    check_optimiser(config(optimiser="muon", parallel="fsdp"), 1)
    with pytest.raises(EyasError, match="--optimiser muon needs whole matrices"):
        check_optimiser(config(optimiser="muon", parallel="fsdp"), 2)


def test_a_model_that_is_not_spread_is_left_as_it_is() -> None:
    model = torch.nn.Linear(2, 2)
    with held_back(model, True):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None and torch.equal(whole(model.weight), model.weight)


def test_the_learning_rate_of_large_steps_is_that_of_the_packs_they_take() -> None:
    c = config(lr=1.0, warmup_ratio=0.1)
    assert [learning_rate(done, 100, c, 4) for done in (0, 4, 8)] == pytest.approx([0.4, 0.8, 1.0])
    for done in range(12, 100, 4):
        assert learning_rate(done, 100, c, 4) == learning_rate(done, 100, c)


def test_every_pack_has_a_seed_of_its_own() -> None:
    seeds = {pack_seed(seed, epoch, pack) for seed in range(3) for epoch in range(5) for pack in range(50)}
    assert len(seeds) == 3 * 5 * 50
    assert pack_seed(1, 2, 3) == pack_seed(1, 2, 3)


def test_a_rank_that_is_gone_is_one_line_without_torchs_own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    told = "[/p/gloo/tcp/pair.cc:537] Read error [127.0.0.1]:22: Connection reset. It is\nmore"
    with pytest.raises(OtherRankGone) as caught, other_ranks_gone():
        raise RuntimeError(told)
    said = "another rank is gone, see what it said (Read error [127.0.0.1]:22: Connection reset)"
    assert str(caught.value) == said
    with pytest.raises(RuntimeError, match="shapes"), other_ranks_gone():
        raise RuntimeError("shapes do not fit")
