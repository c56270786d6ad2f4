"""Public cases C50-C64: collectives, rendezvous, paths between GPUs."""

from __future__ import annotations

from snapshot_parts import MB, ranks, stamped
from snapshots import GB, Snap


def c50() -> Snap:
    s = Snap()
    ranks(s, 8, world=512, power=290, limit=1000)
    text = "".join(f"step {i} loss 2.1 took 9.1 s\n" for i in range(150, 184)) + "".join(
        f"heartbeat alive {i}\n" for i in range(200)
    )
    s.log(text, age=3, growth=20)
    return s


def c51() -> Snap:
    s = Snap()
    ranks(
        s,
        4,
        util=lambda r: 0 if r == 2 else 100,
        power=lambda r: 55 if r == 2 else 75,
        limit=250,
        cpu=1.0,
        name="NVIDIA TITAN V",
        mem=8 * GB,
    )
    s.log("".join(f"iter {i}: loss 4.2, time 250.11ms, mfu 12.3%\n" for i in range(0, 400, 10)), age=1900)
    return s


def c52() -> Snap:
    s = Snap()
    ranks(s, 8, power=180, limit=700)
    for r in range(8):
        if r < 3:
            s.stack(
                4242 + r,
                "all_reduce torch/distributed/distributed_c10d.py:2800",
                "complete_grad_norm_calculation_for_cpu_offload deepspeed/runtime/zero/stage3.py:1467",
                "step deepspeed/runtime/zero/stage3.py:2000",
            )
        else:
            s.stack(
                4242 + r,
                "reduce_scatter_tensor torch/distributed/distributed_c10d.py:4000",
                "reduce_scatter_coalesced deepspeed/runtime/comm/coalesced_collectives.py:130",
            )
    s.log(stamped(60, 10, 1500), age=1500)
    return s


def c53() -> Snap:
    s = Snap()
    ranks(s, 8, power=170, limit=700)
    s.log(stamped(30, 14, 900), age=900)
    return s


def c55() -> Snap:
    s = Snap()
    ranks(
        s,
        2,
        looks=lambda r: "S futex_do_wait futex" if r == 0 else "R",
        cpu=lambda r: 0.0 if r == 0 else 1.0,
        util=lambda r: 0 if r == 0 else 100,
        power=lambda r: 80 if r == 0 else 150,
    )
    s.log(stamped(60, 5, 1400) + "Saving model checkpoint to out/checkpoint-600\n", age=1400)
    return s


def c56() -> Snap:
    s = Snap()
    ranks(s, 4, power=90, limit=400, util=lambda r: 0 if r == 3 else 100, looks="R")
    s.log(
        "Epoch 1: 100%|██████████| 250/250 [05:00<00:00,  0.83it/s, v_num=0, loss=1.2]\nValidation DataLoader 0:"
        " 100%|██████████| 30/30 [00:20<00:00, 1.5it/s]\n",
        age=2100,
    )
    return s


def c57() -> Snap:
    s = Snap()
    ranks(s, 8, power=160)
    s.log(
        stamped(40, 12, 700)
        + "[rank3]:[E1129 13:00:00 ProcessGroupNCCL.cpp:1300] [PG ID 0 PG GUID 0 Rank 3] Heartbeat monitor timed out!"
        " Process will be terminated after dumping debug info. workMetaList_.size()=1\n[rank3]:[F"
        " ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds without"
        " making progress in monitoring enqueued collectives.\n",
        age=120,
    )
    return s


def c58() -> Snap:
    s = Snap()
    ranks(s, 4, power=140, limit=400)
    log = stamped(30, 5, 800)
    for r in (0, 1, 3):
        log += (
            f"[rank{r}]:[E ProcessGroupNCCL.cpp:475] [Rank {r}] Watchdog caught collective operation timeout:"
            " WorkNCCL(SeqNum=167, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600272"
            " milliseconds before timing out.\n"
        )
    s.log(log, age=60)
    return s


def c59() -> Snap:
    s = Snap()
    ranks(s, 8, power=95, limit=450, name="NVIDIA GeForce RTX 4090", mem=9 * GB)
    s.log("***** Running training *****\n  0%|          | 0/1000 [00:00<?, ?it/s]", age=1500)
    return s


def c60(state: str = "ESTABLISHED") -> Snap:
    s = Snap()
    ranks(
        s,
        8,
        looks="S poll_schedule_timeout poll 30",
        cpu=0.0,
        util=0,
        power=70,
        world=16,
        mem=400 * MB,
        env={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    )
    for r in range(8):
        s.socket(4242 + r, 30, "10.0.0.1", 29500, state)
    if state == "ESTABLISHED":
        s.log(
            "INFO Added key: store_based_barrier_key:1 to store for rank: 3\nINFO Waiting in store based barrier to"
            " initialize process group for rank: 3, key: store_based_barrier_key:1 (world_size=16, worker_count=7,"
            " timeout=0:30:00)\n",
            age=10,
        )
    else:
        s.log("initialising distributed\n", age=400)
    return s


def c63() -> Snap:
    s = Snap()
    ranks(s, 2, power=120, limit=350, name="NVIDIA GeForce RTX 3090", mem=18 * GB)
    s.log("phase: step, starting\n" + "".join(f"[hb] alive t={i}\n" for i in range(40)), age=4, growth=15)
    return s


def c64() -> Snap:
    s = Snap()
    ranks(s, 8, power=110, limit=400, world=16, env={"CUDA_LAUNCH_BLOCKING": "1"}, name="NVIDIA A100-SXM4-40GB")
    s.log("***** Running training *****\n  Total optimization steps = 1,000\n", age=1700)
    return s


CASES = [
    ("C50", "512 GPUs wedged, heart-beats go on", ["stuck.collective", "stuck.gpu-lost"], c50),
    ("C51", "100 % at idle power, one rank left out", ["stuck.collective"], c51),
    ("C52", "3 ranks in all_reduce, 5 in reduce_scatter", ["stuck.collective"], c52),
    ("C53", "MoE under ZeRO-3", ["stuck.collective"], c53),
    ("C55", "checkpoint gather on rank 0 only", ["stuck.collective", "quiet.checkpointing"], c55),
    ("C56", "metric sync on one rank only", ["stuck.collective"], c56),
    ("C57", "watchdog stuck for 480 s", ["stuck.collective", "stuck.deadlock"], c57),
    ("C58", "barrier without one rank", ["stuck.collective"], c58),
    ("C59", "peer-to-peer broken on consumer cards", ["stuck.p2p"], c59),
    ("C60", "store barrier, 7 of 16", ["stuck.rendezvous"], c60),
    ("C60b", "master does not answer", ["stuck.rendezvous"], lambda: c60("SYN_SENT")),
    ("C63", "ZeRO-3 step-0 deadlock", ["stuck.collective", "stuck.p2p"], c63),
    ("C64", "launch blocking across nodes", ["stuck.p2p"], c64),
]
