"""The plan's arithmetic against figures worked out by hand, and its choice of what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.cli import app
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.errors import EyasError
from eyas.plan import measure
from eyas.plan.remedies import bottleneck, cheapest, remedies
from eyas.plan.run import _named_gpu as named_gpu
from eyas.plan.step import GPUS, Plan, flops_per_token, gpu_memory, parameters

KIMI = DrafterConfig(7168, 7168, 12288, 64, 64, 128, 163_840, 32_000)

# 10,000 steps of 1,000 tokens x 100 kB = 100 MB a step, 1 TB in all; 100 ms of computing.
PLAN = Plan(
    tokens=10_000_000, trained_share=0.5, bytes_per_token=1e5, batch_tokens=1000, gpus=1, epochs=3, compute_s=0.1,
    cpu_s=0.04, threads=4, disk_bytes_s=2e9, copy_bytes_s=50e9, cache_bytes=0, hidden_size=12_500,
)  # fmt: skip


def test_kimis_drafter_costs_what_the_documentation_says() -> None:
    assert sum(parameters(KIMI).values()) == pytest.approx(1.06e9, rel=0.01)
    assert flops_per_token(KIMI, 3, 1.0, 2048) == pytest.approx(18e9, rel=0.03)
    assert flops_per_token(KIMI, 3, 0.5, 2048) < 0.6 * flops_per_token(KIMI, 3, 1.0, 2048)
    assert flops_per_token(KIMI, 1, 1.0, 2048) == pytest.approx(flops_per_token(KIMI, 3, 1.0, 2048) / 2.7, rel=0.05)
    memory = gpu_memory(KIMI, 3, 2048, 0.5)
    assert memory["weights and optimiser"] == pytest.approx(18 * 1.0588e9, rel=0.001)
    assert 20e9 < sum(memory.values()) < 32e9


def test_parameters_are_the_drafters_own() -> None:
    small = DrafterConfig(64, 64, 128, 4, 2, 16, 400, 100)
    import torch

    drafter = Drafter(small, torch.zeros(400, 64))
    assert sum(p.numel() for p in drafter.parameters()) == sum(parameters(small).values())


def test_a_step_is_the_slowest_of_its_terms() -> None:
    assert PLAN.terms() == {"compute": 0.1, "copy": 0.002, "cpu": 0.01, "disk": 0.05}
    assert (PLAN.step_s(), PLAN.bound_by(), PLAN.busy()) == (0.1, "compute", 1.0)
    slow = replace(PLAN, disk_bytes_s=0.2e9)
    assert (slow.step_s(), slow.bound_by(), slow.busy()) == (0.5, "disk", 0.2)
    assert replace(PLAN, gpus=4).terms()["disk"] == 0.2  # one disk for all
    assert replace(PLAN, threads=1, cpu_s=0.2).bound_by() == "cpu"
    assert replace(PLAN, copy_bytes_s=0.5e9).bound_by() == "copy"
    assert slow.disk_needed == 1e9


def test_the_cache_helps_from_the_second_epoch_on_and_by_its_share() -> None:
    slow = replace(PLAN, disk_bytes_s=0.2e9, cache_bytes=0.6e12)
    assert slow.hit == 0.6
    assert slow.step_s(0.0) == 0.5
    assert slow.step_s() == pytest.approx(0.2)
    first, whole = slow.hours()
    assert first == pytest.approx(10_000 * 0.5 / 3600)
    assert whole == pytest.approx(10_000 * (0.5 + 2 * 0.2) / 3600)
    assert replace(slow, cache_bytes=5e12).hit == 1.0


def test_remedies_are_the_plan_computed_again() -> None:
    slow = replace(PLAN, disk_bytes_s=0.2e9)
    gains = {r.what.split(" (")[0]: r.gain for r in remedies(slow)}
    assert gains["keep the last state of trained tokens only"] == pytest.approx(1 / 0.875)
    assert gains["8-bit states"] == pytest.approx(2, rel=0.001)
    assert gains["1,000 GB more memory for the page cache"] == pytest.approx(1.5 / 0.7)  # the first epoch stays
    assert gains["a copy on disks that give 1.0 GB/s"] == pytest.approx(5)
    best = cheapest(remedies(slow))
    assert best is not None
    assert best.what.startswith("a copy on disks that give 1.0 GB/s (5 such as this one)")
    assert bottleneck(slow) == "disk"
    # Where eight bits bring as much as anything, nothing dearer is named.
    near = replace(PLAN, disk_bytes_s=0.55e9)
    assert cheapest(remedies(near)).what.startswith("8-bit states")  # type: ignore[union-attr]
    assert remedies(replace(slow, codec="int8", last_rows="trained"))[0].what.startswith("1,000 GB")


def test_where_computing_binds_no_data_remedy_is_named() -> None:
    assert bottleneck(PLAN) == "compute"
    assert [r.what for r in remedies(PLAN)] == ["2 GPUs instead of 1"]
    assert remedies(PLAN)[0].gain == pytest.approx(2)
    # Two epochs from the cache do not outweigh a first one that takes ten times as long.
    first = replace(PLAN, disk_bytes_s=0.02e9, cache_bytes=2e12)
    assert bottleneck(first) == "disk"
    assert first.bound_by() == "compute"


def test_gpus_are_named_as_people_type_them() -> None:
    assert named_gpu("rtx pro 6000") is GPUS["RTX PRO 6000"]
    assert named_gpu("h100") is GPUS["H100"]
    assert named_gpu("a100") is GPUS["A100-80GB"]
    assert named_gpu(None) is None
    for wrong in ("rtx", "V100"):
        with pytest.raises(EyasError, match="name one of A100-80GB, "):
            named_gpu(wrong)


def test_the_disk_is_measured_on_the_files_themselves(tmp_path: Path) -> None:
    for k in range(3):
        (tmp_path / f"{k}.bin").write_bytes(bytes(20 << 20))
    rate = measure.disk_rate(sorted(tmp_path.iterdir()), seconds=0.1)
    assert rate is not None
    assert rate.bytes_per_s > 0
    assert 16 << 20 <= rate.nbytes <= 60 << 20
    (tmp_path / "small").write_bytes(b"1" * 10_000)
    assert measure.disk_rate([tmp_path / "small"]) is None
    assert measure.disk_rate([]) is None
    assert measure.memcpy_rate(1 << 20, 1) > 0


@pytest.mark.parametrize("asked", [["--codec", "int4"], ["--last", "logits:0"], ["--last", "some"]])
def test_a_codec_that_does_not_exist_is_not_planned_for(tiny_verifier: Path, asked: list[str]) -> None:
    given = ["plan", "--verifier-path", str(tiny_verifier), "--tokens", "1000", "--gpu", "H100", *asked]
    result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, EyasError) and str(result.exception).startswith(f"{asked[0]} {asked[1]}: use ")


def test_the_size_of_a_draft_vocabulary_is_not_passed_over_where_steps_are_real(tiny_verifier: Path) -> None:
    result = CliRunner().invoke(
        app, ["plan", "--verifier-path", str(tiny_verifier), "--tokens", "1000", "--draft-vocab", "50"]
    )
    assert isinstance(result.exception, EyasError)
    assert str(result.exception).startswith("--draft-vocab 50 counts with --gpu alone: without one the steps are real")
