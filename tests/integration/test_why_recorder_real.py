"""Dumps that torch itself writes: two ranks of which one does not come, over gloo on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from whylab import look, wait_for

from eyas.why.judge import facts_of, judge
from eyas.why.recorder import read_recorder

RANK = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
rank, place = int(os.environ["RANK"]), sys.argv[1]
limit = datetime.timedelta(seconds=300)
dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2, timeout=limit)
x = torch.ones(1000)
for _ in range(3):
    dist.all_reduce(x)
if rank == 0:
    waiting = dist.all_reduce(x, async_op=True)
import pickle  # another thread writes the record of a collective, perhaps later
while len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]) < 4 - rank:
    time.sleep(0.01)
with open(f"{place}/part_{rank}", "wb") as out:
    out.write(torch._C._distributed_c10d._dump_fr_trace())
os.rename(f"{place}/part_{rank}", f"{place}/trace_{rank}")
if rank == 0:
    waiting.wait()
time.sleep(600)
"""


def test_the_rank_that_did_not_come_is_read_from_the_dumps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK)
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")}
    env |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        for rank in range(2):
            words = [sys.executable, str(script), str(tmp_path)]
            ranks.append(
                subprocess.Popen(words, env={**env, "RANK": str(rank)}, stdout=subprocess.DEVNULL, cwd=tmp_path)
            )
        wait_for(lambda: all((tmp_path / f"trace_{r}").exists() for r in range(2)), 120)
        time.sleep(0.5)
        snap = look(ranks[0].pid)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert snap["errors"] == [] and snap["not_visible"] == []
    assert [d["flight"]["status"] for d in snap["nccl"]["dumps"]] == ["ok", "ok"]
    found = read_recorder(facts_of(snap))
    assert found is not None and found.first is not None
    assert (found.first.kind, found.first.seq, found.first.odd) == ("behind", 4, (1,))
    assert "rank 1 did not make all_reduce no. 4 (at train.py:12 <module>)" in found.first.words
    assert any(link["kind"] == "collective" for link in judge(snap).chain)
