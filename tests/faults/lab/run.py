"""Start every scenario, wait for its state, ask the real command, clean up; a row for each.

python -m lab.run [NAME ..]      (from tests/faults) prints the rows
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.kit import Ask, Lab, Unable, ask
from lab.scenes import Scene

TOGETHER = int(os.environ.get("EYAS_LAB_JOBS", "8"))


@dataclass(frozen=True)
class Row:
    name: str
    expect: str  # a verdict, or "" for a healthy run
    also: tuple[str, ...]
    verdict: str
    runner_up: str | None
    state: str
    grade: str
    code: int
    took_s: float
    wall_s: float
    sentence: str
    skipped: str | None = None
    error: str | None = None

    @property
    def top1(self) -> bool:
        return self.verdict == self.expect or self.verdict in self.also

    @property
    def top2(self) -> bool:
        return self.top1 or self.runner_up == self.expect

    @property
    def alarm(self) -> bool:
        """A healthy or quiet run that was called stuck or failed."""
        return (not self.expect or self.expect.startswith(("healthy", "quiet"))) and self.state in ("stuck", "failed")

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def play(scene: Scene) -> Row:
    """One scenario from start to clean-up."""
    keep = os.environ.get("EYAS_LAB_KEEP")
    try:
        with Lab() as lab:
            question: Ask = scene.start(lab)
            answer = ask(question, timeout=20.0, keep=Path(keep) / f"{scene.name}.json" if keep else None)
    except Unable as reason:
        return Row(scene.name, scene.expect, scene.also, "", None, "", "", 0, 0.0, 0.0, "", skipped=str(reason))
    except Exception as error:
        return Row(
            scene.name,
            scene.expect,
            scene.also,
            "",
            None,
            "",
            "",
            -1,
            0.0,
            0.0,
            "",
            error=f"{type(error).__name__}: {error}",
        )
    found = answer.json
    return Row(
        scene.name,
        scene.expect,
        scene.also,
        answer.verdict,
        answer.runner,
        answer.state,
        str(found.get("grade")),
        answer.code,
        answer.took,
        answer.wall,
        str(found.get("sentence")),
        error=None if found else answer.stderr[-400:] or "no answer",
    )


def play_all(
    scenes: Iterable[Scene], told: Callable[[Row], None] = lambda _: None, together: int = TOGETHER
) -> list[Row]:
    """Scenarios that only wait run side by side; those that need the CPUs run one by one afterwards."""
    scenes = list(scenes)
    rows: list[Row] = []

    def one(scene: Scene) -> None:
        row = play(scene)
        rows.append(row)
        told(row)

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(one, [s for s in scenes if not s.alone]))
    for scene in scenes:
        if scene.alone:
            one(scene)
    order = {s.name: i for i, s in enumerate(scenes)}
    return sorted(rows, key=lambda r: order[r.name])


def show(row: Row) -> None:
    mark = (
        "skip"
        if row.skipped
        else "ERR "
        if row.error
        else "ALARM"
        if row.alarm
        else "ok  "
        if not row.expect or row.top1
        else "top2"
        if row.top2
        else "MISS"
    )
    print(
        f"{mark:5} {row.name:26} {row.expect:24} -> {row.verdict:24} ({row.grade}; then {row.runner_up})",
        f"{row.took_s:.1f}/{row.wall_s:.1f} s",
        row.skipped or row.error or "",
        flush=True,
    )


def main(words: Sequence[str]) -> int:
    import lab.outside  # noqa: F401  adds its scenarios to both lists
    from lab.healthy import HEALTHY
    from lab.scenes import SCENES

    known = {s.name: s for s in [*SCENES, *HEALTHY]}
    chosen = [known[w] for w in words if w in known] or {
        "faults": SCENES,
        "healthy": HEALTHY,
        "quick": [s for s in SCENES if s.quick],
    }.get(words[0] if words else "faults", [])
    begun = time.monotonic()
    rows = play_all(chosen, show)
    judged = [r for r in rows if r.expect and not r.skipped]
    print(
        f"{len(rows)} runs in {time.monotonic() - begun:.0f} s; of {len(judged)} top-1 {sum(r.top1 for r in judged)},",
        f"top-2 {sum(r.top2 for r in judged)}; false alarms {sum(r.alarm for r in rows)}",
    )
    if keep := os.environ.get("EYAS_LAB_KEEP"):
        (Path(keep) / "rows.json").write_text(json.dumps([r.to_dict() for r in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
