"""bench/gpu.py at tiny sizes: all of it that does not need a GPU runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.usefixtures("one_thread")
def test_the_gpu_benchmark_measures_each_step_and_says_what_it_ran_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("gpu_bench", BENCH / "gpu.py")
    assert spec and spec.loader
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--out", str(tmp_path / "gpu.json")])
    bench.main()
    report = json.loads((tmp_path / "gpu.json").read_text())
    for variant in ("llama", "llama, --recompute", "mla"):
        found = report[variant]
        assert 0 < found["backward_s"] < found["step_s"]
        assert found["kernels"]["attention"].startswith("blocks (" if report["device"] == "CPU" else "")
    assert report["llama"]["of_measured_peak"] > 0 and report["llama"]["fed_step_s"] > 0
    assert report["tokens"] == 128 and report["sizes"]["hidden_size"] == 64
