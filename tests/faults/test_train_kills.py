"""100 times kill -9 at random moments of training: always resumable, never a torn state taken for a whole one, and in
the end the weights of the run that nobody killed, to the bit.

Takes a few minutes; `EYAS_KILLS=20` for less.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from from_integration import conftest
from ranks import play, settings, start, steps, tensors, trace

tiny = conftest.tiny  # the fixture

KILLS = int(os.environ.get("EYAS_KILLS", "100"))
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("ranks", "share"), [(1, 0.7), (2, 0.3)])
def test_killed_at_any_moment_a_run_goes_on_to_the_same_end(
    tiny: Any, tmp_path: Path, ranks: int, share: float
) -> None:
    flags = {"epochs": 3, "save_every": 1, "keep": 2, "grad_accumulation": 2 // ranks, "batch_tokens": 75}
    begun = time.monotonic()
    assert play(settings(tiny, tmp_path / "whole", **flags), ranks).codes == [0] * ranks
    lasts = time.monotonic() - begun
    expected = {line["step"]: line for line in trace(tmp_path / "whole")}
    total = len(expected)
    moments, kills, runs = random.Random(0), 0, 0
    while kills < round(KILLS * share):
        output, runs = tmp_path / f"run{runs}", runs + 1
        done = False
        while not done:
            children = start(settings(tiny, output, **flags, resume=True), ranks)
            children[0].join(moments.uniform(0, lasts))
            done = not children[0].is_alive()
            for child in children:
                if not done:
                    os.kill(child.pid, signal.SIGKILL)
                child.join(60)
            kills += not done
            assert not done or [child.exitcode for child in children] == [0] * ranks, output.with_suffix(".said")
            for step in steps(output):  # whatever has a state's name is whole
                about = json.loads((output / "state" / f"step-{step:06d}" / "state.json").read_text())
                assert about["step"] == step and len(tensors(output, step)) > 40
        for line in trace(output) if output.with_suffix(".0.jsonl").exists() else []:
            assert line == expected[line["step"]], "every step, also one that is made again, is the one step"
        a, b = tensors(output, total), tensors(tmp_path / "whole", total)
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    print(f"{kills} kills in {runs} runs of {total} steps on {ranks} ranks")
