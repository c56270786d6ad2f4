"""Stuck between ranks: a collective that not all entered, a broken path between GPUs, ranks that never met."""

from __future__ import annotations

import re

from eyas.why.facts import Facts
from eyas.why.ras import read_ras
from eyas.why.recorder import Finding, ranks_words, read_recorder
from eyas.why.verdicts.base import Case, Look, Rule, log_kinds, log_line, stuck, trainers_wait

_CONSUMER = re.compile(r"RTX|GeForce|TITAN|\bA6000|\bL40|\bA40\b|\bA10\b", re.I)
_OWN_CAUSE = ("dead", "stopped", "input", "lock", "gpu-driver", "storage", "pipe")


def _rank_sockets(f: Facts) -> int:
    """Established connections between members: gloo pairs or NCCL's bootstrap."""
    ranks = {p.pid for p in f.ranks}
    return sum(
        1
        for s in f.snap.get("sockets") or []
        if s.get("pid") in ranks and s.get("peer_pid") in ranks and s.get("state") == "ESTABLISHED"
    )


def _spinning(case: Case, f: Facts, weight: float) -> None:
    spin = [g for g in f.gpu.mine if g.spinning]
    case.yes(
        spin and not f.gpu.working,
        weight,
        f"the GPUs are busy at low power: their kernels wait ({spin[0].words if spin else ''})",
        "nvml",
    )
    quiet = (
        spin
        and all((g.pcie_kbs or 0) < 50_000 for g in spin if g.pcie_kbs is not None)
        and any(g.pcie_kbs is not None for g in spin)
    )
    case.yes(quiet, 0.5, "next to nothing goes over PCIe", "nvml")


def collective(look: Look) -> Case | None:
    f, split = look.f, look.split
    told = log_line(f, "collective-timeout")
    nccl = any(t.role in ("nccl", "nccl-watchdog", "nccl-heartbeat", "gloo") for p in f.trainers for t in p.threads)
    recorder, ras = read_recorder(f), read_ras(f.snap)
    first = recorder.first if recorder else None
    uneven = ras.mismatch if ras else None
    if not f.alive or not (f.distributed or told or first or uneven or (nccl and f.gpu.spinning)):
        return None
    case = stuck(look, "stuck.collective")
    words = split.odd_words if split else None
    case.who = words
    case.pids = [p.pid for p in split.odd] if split else []
    log = f.log
    col = log.collective if log else None
    case.yes(
        told or col, 3.5, "the log reports a collective that timed out", "log", told or (col.line if col else None)
    )
    absent = split.reported_missing if split else ()
    case.yes(absent, 1, f"rank {', '.join(map(str, absent[:6]))} is not among those that report", "log")
    _spinning(case, f, 3)
    victims = [p for w, ps in split.groups for p in ps if w in ("waiting", "spinning")] if split else []
    case.yes(
        split and len(victims) == len(f.ranks) > 1,
        2.5,
        f"all {len(f.ranks)} ranks wait for each other",
        "wchan, nvml",
        split.words if split else None,
    )
    apart = split is not None and split.odd and victims and split.odd_doing not in _OWN_CAUSE
    case.yes(apart, 2.5, f"all ranks wait but {words}", "wchan, nvml", split.words if split else None)
    case.yes(
        split and split.by_stack, 3.5, "the ranks are in different calls: " + (split.words if split else ""), "py-spy"
    )
    case.yes(f.stepped, 1, "steps were made before", "log", log.last_progress if log else None)
    case.yes(f.heartbeat, 1, "a heart-beat goes on, which proves no step", "log")
    case.yes(
        nccl or _rank_sockets(f),
        0.5,
        "communication threads or connections between ranks are there",
        "task/*/comm, net/tcp",
    )
    _recorded(case, f, first)
    if ras is not None:
        case.yes(uneven, 3, f"NCCL RAS: ranks out of step in {uneven.words if uneven else ''}", "NCCL RAS")
        case.yes(ras.errors, 1.5, f"NCCL RAS: errors in {ras.errors[0] if ras.errors else ''}", "NCCL RAS")
        if case.who is None and uneven is not None and uneven.odd:
            odd = uneven.odd
            case.who = f"{', '.join(r.words for r in odd[:4])} of NCCL communicator {uneven.comm}"
            case.pids = [r.pid for r in odd if r.pid in f.procs]
    own = split is not None and split.odd and split.odd_doing in _OWN_CAUSE
    case.no(own, 4, f"{words}: that is the cause; the collective is its consequence", "wchan")
    case.no(f.moved("main-cpu") and not f.gpu.spinning and not told, 4, "the ranks use the CPU", "stat")
    case.no(split and split.missing_count, 3, "a rank is gone: that is the cause", "/proc")
    case.no(f.gpu.working, 6, "the GPUs compute: " + f.gpu.words, "nvml")
    case.no(
        log is not None and not f.stepped and not told, 2, "no step was ever made: the ranks may never have met", "log"
    )
    busy = split is not None and [p for p in split.odd if (p.cpu or 0) > 0.2 and split.odd_doing == "computing"]
    case.no(
        split and busy and not split.by_stack and (f.overdue or 0) < 20 and (f.idle or 0) < 300,
        3,
        "that rank is at work and may still come",
        "stat",
    )
    seen = (
        bool(told or col or first or uneven) or any(g.spinning for g in f.gpu.mine) or bool(split and len(f.ranks) > 1)
    )
    case.no(not seen, 2.5, "neither the other ranks nor the GPUs could be seen", "job")
    case.no((f.overdue is not None and f.overdue < 3) and not told, 3, "the next line is not due yet", "log")
    return case


def _recorded(case: Case, f: Facts, first: Finding | None) -> None:
    """What the dumps of the ranks say, and whom they accuse; a rank that is stopped or dead keeps the blame."""
    if first is None:
        return
    weight = {"mismatch": 4.5, "sizes": 4.5, "behind": 4, "same": 1.5, "alone": 1.5}[first.kind]
    case.yes(True, weight, f"the Flight Recorder: {first.words}", "Flight Recorder dumps")
    if first.odd and (case.who is None or first.kind != "behind" or not case.pids):
        case.who = ranks_words(list(first.odd)) + {
            "behind": f" (has not come to call no. {first.seq} of group {first.group})",
            "mismatch": f" (made another call no. {first.seq} in group {first.group})",
            "sizes": f" (other sizes in call no. {first.seq} of group {first.group})",
        }.get(first.kind, "")
        case.pids = [p.pid for p in f.ranks if p.rank in first.odd]


def p2p(look: Look) -> Case | None:
    f, split = look.f, look.split
    if not f.alive or not f.distributed or f.main is None or f.stepped:
        return None
    told = log_line(f, "collective-timeout")
    if not (f.gpu.spinning or told or f.main.env("CUDA_LAUNCH_BLOCKING") == "1"):
        return None
    case = stuck(look, "stuck.p2p")
    _spinning(case, f, 3)
    case.yes(f.log is not None, 1.5, "no step was ever made: it hangs in the first exchange between GPUs", "log")
    same = split is not None and len(split.groups) == 1
    case.yes(same, 1.5, "all ranks do the same", "wchan, nvml", split.words if split else None)
    consumer = any(_CONSUMER.search(g.name) for g in f.gpu.mine)
    case.yes(
        consumer,
        1.5,
        f"{f.gpu.mine[0].name if f.gpu.mine else ''}: peer-to-peer over PCIe is often broken on such cards or behind an"
        " IOMMU",
        "nvml",
    )
    off = f.main.env("NCCL_P2P_DISABLE") == "1"
    case.yes(not off and f.main.raw.get("environ") is not None, 0.5, "NCCL_P2P_DISABLE is not set", "environ")
    case.no(off, 1.5, "NCCL_P2P_DISABLE=1 is set already", "environ")
    blocking = f.main.env("CUDA_LAUNCH_BLOCKING") == "1"
    case.yes(blocking, 2.5, "CUDA_LAUNCH_BLOCKING=1 is set, with which some NCCL versions hang", "environ")
    case.yes(told, 1.5, "the first collective timed out", "log", told)
    recorder = read_recorder(f)
    first = recorder.first if recorder else None
    case.yes(first and first.kind == "same", 1.5, first.words if first else "", "Flight Recorder dumps")
    case.no(first and first.odd, 3, first.words if first else "", "Flight Recorder dumps")
    number = f.log.collective.seq if f.log and f.log.collective else first.seq if first else None
    case.no(number is not None and number > 20, 2, f"{number} collectives went well before", "log")
    case.yes(number is not None and number <= 5, 1, f"it is collective number {number}", "log")
    case.no(split is not None and split.odd, 2, f"one is apart: {split.odd_words if split else ''}", "wchan")
    case.no(f.gpu.idle, 3, "the GPUs idle: " + f.gpu.words, "nvml")
    case.no(f.gpu.working, 6, "the GPUs compute", "nvml")
    return case


def rendezvous(look: Look) -> Case | None:
    f = look.f
    log = f.log
    barrier = log.barrier if log and log.barrier and log.barrier.final else None
    line = log.phase.line if log and log.phase and log.phase.id == "rendezvous" and not log.phase.closed else None
    told = log_line(f, "rendezvous")
    port = f.main.env("MASTER_PORT") if f.main else None
    to_master = [
        s
        for s in f.snap.get("sockets") or []
        if s.get("pid") in {p.pid for p in f.trainers} | {p.pid for p in f.of_kind("launcher")}
        and (str(s.get("pport")) == str(port) or str(s.get("pport")) in ("29400", "29500"))
    ]
    if not f.alive or not (barrier or line or told or (to_master and not f.stepped)):
        return None
    case = stuck(look, "stuck.rendezvous")
    case.yes(
        barrier,
        4.5,
        f"{barrier.joined if barrier else '?'} of {barrier.world_size if barrier else '?'} ranks have come",
        "log",
        barrier.line if barrier else None,
    )
    case.yes(line and not barrier, 2.5, "the log's last words are about the ranks meeting", "log", line)
    case.yes(told, 3, "the log reports a failed rendezvous", "log", told)
    syn = [s for s in to_master if s.get("state") == "SYN_SENT"]
    case.yes(
        syn,
        3.5,
        f"the master {syn[0].get('peer') if syn else ''}:{syn[0].get('pport') if syn else ''} does not accept the"
        " connection",
        "net/tcp",
    )
    case.yes(
        to_master and not syn,
        1.5,
        "it is connected to the master at"
        f" {to_master[0].get('peer') if to_master else ''}:{to_master[0].get('pport') if to_master else ''} and waits",
        "net/tcp",
    )
    small = f.gpu.status == "ok" and (f.gpu.job_mem or 0) < 800e6 * max(1, len(f.trainers)) and not f.gpu.working
    case.yes(small, 1, "hardly any GPU memory is in use yet", "nvml")
    case.yes(trainers_wait(f), 1.5, "the main thread waits", "wchan", f.main.critical.wait.raw if f.main else None)
    short = f.world_size and f.local_size and len(f.ranks) < f.local_size
    case.yes(short, 1, f"{len(f.ranks)} of {f.local_size} local ranks run", "job")
    local = (f.main.env("MASTER_ADDR") if f.main else None) in ("localhost", "127.0.0.1") and (f.world_size or 0) > (
        f.local_size or f.world_size or 0
    )
    case.yes(local, 2, "MASTER_ADDR is this host itself, though the job spans several", "environ")
    case.no(f.stepped, 6, "steps were made: the ranks had met", "log", log.last_progress if log else None)
    case.no(f.gpu.spinning, 3, "the GPUs are in a collective already: " + f.gpu.words, "nvml")
    if barrier and barrier.joined is not None and barrier.world_size:
        case.who = f"the {barrier.world_size - barrier.joined} missing rank(s)"
    elif syn:
        case.who = f"{syn[0].get('peer')}:{syn[0].get('pport')}"
    case.no(log_kinds(f) & {"gpu-oom", "exception"}, 2, "the log ends in another error", "log")
    return case


RANK_RULES: list[Rule] = [collective, p2p, rendezvous]
