"""The plan as a report, and the report in words."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.plan.remedies import bottleneck, cheapest, remedies
from eyas.plan.step import GB, Gpu, Plan


def make_report(
    plan: Plan, verifier: str, gpu: Gpu | None, rates: dict[str, Any], memory: dict[str, float], output: Path | None
) -> dict[str, Any]:
    """Everything that `eyas plan --json` prints but for what `run.py` adds.

    rates: bytes a second; memory: bytes on the device by what they are for; output: where a capture would go.
    """
    first, whole = plan.hours()
    found = remedies(plan)
    best = cheapest(found)
    need = sum(memory.values())
    report: dict[str, Any] = {
        "verifier": verifier,
        "gpu": gpu.name if gpu else "this machine",
        "gpus": plan.gpus,
        "tokens": plan.tokens,
        "trained_share": round(plan.trained_share, 4),
        "bytes_per_token": round(plan.bytes_per_token, 1),
        "data_bytes": round(plan.data_bytes),
        "batch_tokens": plan.batch_tokens,
        "steps_per_epoch": plan.steps,
        "rates": {k: v for k, v in rates.items() if k != "ram"},
        "gpu_memory": {**{k: round(v) for k, v in memory.items()}, "sum": round(need)},
        "gpu_fits": None if gpu is None else need < 0.92 * gpu.memory,
        "first_epoch": _phase(plan, 0.0),
        "later_epochs": _phase(plan, plan.hit),
        "disk_needed_bytes_s": plan.disk_needed,
        "hours": {"first_epoch": first, "all_epochs": whole, "epochs": plan.epochs},
        "bottleneck": bottleneck(plan),
        "remedies": [asdict(r) for r in found],
        "cheapest": asdict(best) if best else None,
        "warnings": [],
    }
    where = output
    if where is not None:
        free = float(shutil.disk_usage(next(p for p in (where, *where.absolute().parents) if p.exists())).free)
        report["free_bytes"] = free
        if plan.data_bytes > free:
            report["warnings"].append(
                f"a capture into {where} needs {plan.data_bytes / GB:,.1f} GB, and {free / GB:,.1f} GB are free there"
            )
    if report["gpu_fits"] is False and gpu is not None:
        report["warnings"].append(
            f"{need / GB:,.0f} GB will not fit the {gpu.memory / GB:,.0f} GB of a {gpu.name}: fewer --batch-tokens"
        )
    if plan.disk_bytes_s is None:
        report["warnings"].append(
            f"the disk is not measured: {plan.disk_needed / GB:,.2f} GB/s keep the GPU busy (--disk-gb-s)"
        )
    return report


def _phase(plan: Plan, hit: float) -> dict[str, Any]:
    return {
        "terms": plan.terms(hit),
        "step_s": plan.step_s(hit),
        "busy": plan.busy(hit),
        "bound_by": plan.bound_by(hit),
    }


def lines(r: dict[str, Any]) -> list[str]:
    """The report in words."""
    rates, memory, host = r["rates"], r["gpu_memory"], r["host_memory"]
    disk = f"{rates['disk'] / GB:.2f} GB/s" if rates["disk"] else "unknown"
    compute = f"at {r['utilisation']:.0%} of its peak" if r["utilisation"] else "from real steps"
    out = [
        f"data: {r['tokens']:,} tokens ({r['trained_share']:.0%} trained) x {r['bytes_per_token']:,.0f} bytes"
        f" = {r['data_bytes'] / GB:,.1f} GB"
        + (f"; {r['free_bytes'] / GB:,.1f} GB are free" if "free_bytes" in r else ""),
        f"drafter: {r['parameters'] / 1e6:,.1f} M parameters, {r['flops_per_token'] / 1e9:,.2f} GFLOP a token",
        f"speeds: disk {disk} ({rates['disk_how']}) · memory {rates['memcpy'] / GB:.1f} GB/s"
        f" · to the device {rates['copy'] / GB:.1f} GB/s ({rates['copy_how']})",
        f"memory: {host['needed'] / GB:,.1f} GB of host memory, {host['cache'] / GB:,.1f} GB left for the page cache"
        f" ({host['hit']:.0%} of the data) · {memory['sum'] / GB:,.1f} GB on the device",
    ]
    for name, title in (("first_epoch", "first epoch"), ("later_epochs", "later epochs")):
        phase = r[name]
        terms = " · ".join(f"{k} {1000 * v:,.1f}" for k, v in sorted(phase["terms"].items(), key=lambda kv: -kv[1]))
        out.append(
            f"{title}: a step of {r['batch_tokens']:,.0f} tokens takes {1000 * phase['step_s']:,.1f} ms"
            f" ({terms} ms, compute {compute}) · GPU busy {phase['busy']:.0%} · bound by {phase['bound_by']}"
        )
    hours = r["hours"]
    out.append(
        f"time: {r['steps_per_epoch']:,} steps an epoch on {r['gpus']} x {r['gpu']} · first epoch"
        f" {_long(hours['first_epoch'])}, all {hours['epochs']} {_long(hours['all_epochs'])}"
    )
    best = r["cheapest"]
    if best:
        out.append(f"bottleneck: {r['bottleneck']}. Cheapest remedy: {best['what']}: {best['gain']:.2f} times as fast")
        out += [f"or: {o['what']}: {o['gain']:.2f} times as fast" for o in r["remedies"] if o != best]
    else:
        out.append(f"bottleneck: {r['bottleneck']}. Nothing on the data side would make it faster")
    return out + [f"warning: {w}" for w in r["warnings"]]


def _long(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min" if hours > 1 / 60 else f"{3600 * hours:,.0f} s"
