"""What binds a run, and what would make it shorter: the plan computed again with one number changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eyas.plan.step import GB, LAYERS, Plan
from eyas.store.codecs import bytes_per_token


@dataclass(frozen=True)
class Remedy:
    """Something that can be done, the hours that all epochs then take, and how many times as fast that is."""

    what: str
    hours: float
    gain: float


def bottleneck(plan: Plan) -> str:
    """The term that binds where most of the time goes: in the first epoch, or in the later ones."""
    first, whole = plan.hours()
    return plan.bound_by(0.0) if first >= whole - first else plan.bound_by()


def remedies(plan: Plan) -> list[Remedy]:
    """What would make the run shorter, in the order of what it costs to do; only what gains 2 % or more."""
    now = plan.hours()[1]
    found: list[Remedy] = []

    def offer(what: str, changed: Plan) -> None:
        hours = changed.hours()[1]
        if hours < now / 1.02:
            found.append(Remedy(what, hours, now / hours))

    bounds = {plan.bound_by(0.0), plan.bound_by()}
    if "cpu" in bounds:
        offer(f"more reading threads (--num-workers {2 * plan.threads})", replace(plan, threads=2 * plan.threads))
    if bounds & {"disk", "copy"}:
        if plan.last_rows == "all":
            share = (LAYERS - 1 + plan.trained_share) / LAYERS
            offer(
                "keep the last state of trained tokens only (eyas store convert --last trained)",
                replace(plan, bytes_per_token=plan.bytes_per_token * share, last_rows="trained"),
            )
        if plan.codec == "bf16":
            halved = plan.bytes_per_token * bytes_per_token("int8", plan.hidden_size, 1) / (2 * plan.hidden_size)
            offer("8-bit states (eyas store convert --codec int8)", replace(plan, bytes_per_token=halved, codec="int8"))
    if "disk" in bounds and plan.disk_bytes_s:
        missing = plan.data_bytes - plan.cache_bytes
        if missing > 0:
            offer(f"{missing / GB:,.0f} GB more memory for the page cache", replace(plan, cache_bytes=plan.data_bytes))
        times = max(2, -(-plan.disk_needed // plan.disk_bytes_s))
        offer(
            f"a copy on disks that give {plan.disk_bytes_s * times / GB:,.1f} GB/s ({times:.0f} such as this one)",
            replace(plan, disk_bytes_s=plan.disk_bytes_s * times),
        )
    if "compute" in bounds:
        offer(f"{2 * plan.gpus} GPUs instead of {plan.gpus}", replace(plan, gpus=2 * plan.gpus))
    return found


def cheapest(found: list[Remedy]) -> Remedy | None:
    """The first remedy that brings at least nine tenths of what the best one does."""
    if not found:
        return None
    best = min(r.hours for r in found)
    return next(r for r in found if r.hours <= best / 0.9)
