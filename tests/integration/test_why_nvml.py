"""The probe's own NVML calls, against a library of the same interface that knows one GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whylab import look, running

SLEEP = "ready()\nimport time\ntime.sleep(600)"


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler must be installed for this test"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(source)], check=True)
    with running(SLEEP) as p:
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")
        monkeypatch.setenv("FAKE_PID", str(p.pid))
        yield p


def test_power_clocks_reasons_and_processes_are_read(target: Any) -> None:
    gpu = look(target.pid, times=(0.0, 0.5, 2.0))["gpu"]
    assert (gpu["status"], gpu["tool"], gpu["driver"], gpu["cuda"]) == ("ok", "nvml", "570.86", "12.8")
    (card,) = gpu["gpus"]
    assert (card["uuid"], card["ecc_uncorrected"], card["remapped_rows"]["pending"]) == ("GPU-7", 2, True)
    assert len(card["samples"]) == 2
    seen = card["samples"][-1]
    assert (seen["util"], seen["power_w"], seen["power_limit_w"]) == (100, 121.5, 700.0), (
        "busy by the clock, idle by power"
    )
    assert (seen["sm_mhz"], seen["sm_max_mhz"], seen["mem_used"], seen["energy_mj"]) == (345, 1980, 600, 5_000_000_000)
    assert (seen["pcie_tx_kbs"], seen["pcie_rx_kbs"], seen["reasons"]) == (10, 20, ["sw_power_cap", "hw_thermal"])
    (holder,) = gpu["processes"]
    assert (holder["pid"], holder["mem"], holder["sm_util"], holder["member"]) == (target.pid, 600, 88, True)


def test_a_lost_gpu_is_said_to_be_lost(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML", "lost")
    gpu = look(target.pid)["gpu"]
    assert gpu["gpus"][0]["lost"] is True
    assert "GPU is lost" in gpu["error"]


def test_a_driver_that_is_gone_is_an_error_with_its_words(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML", "broken")
    gpu = look(target.pid)["gpu"]
    assert gpu["status"] == "error"
    assert "Driver Not Loaded" in gpu["error"]


def test_an_nvml_that_never_returns_is_left_behind(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML", "hang")
    began = time.monotonic()
    snap = look(target.pid, times=(0.0, 1.0, 2.0))
    assert time.monotonic() - began < 12
    assert snap["gpu"]["status"] == "timed_out"
    assert any(t["probe"] == "gpu" for t in snap["probes_timed_out"])
    assert snap["samples"][-1]["procs"][str(target.pid)]["stat"]["state"] == "S"
