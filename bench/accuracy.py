"""How often is `eyas why` right? Runs the fault lab (real processes) and the snapshot corpus; writes docs/accuracy.*.

    python bench/accuracy.py [--out DIR] [--no-lab]

Needs root for the scenarios with cgroups, mounts and FUSE; without it those are left out and counted as left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "faults")]

from eyas.why.judge import judge  # noqa: E402

STATES = ("healthy", "quiet", "finished", "failed", "slow", "stuck", "unknown")


@dataclass(frozen=True)
class Judged:
    """One run or snapshot: what it was, and what it was called."""

    name: str
    right: tuple[str, ...]  # the verdicts that count as right; () for a healthy run of the lab
    verdict: str
    runner_up: str | None
    fine: bool  # healthy, or quiet for a good reason
    took_s: float = 0.0

    @property
    def top1(self) -> bool:
        return self.verdict in self.right

    @property
    def top2(self) -> bool:
        return self.top1 or self.runner_up in self.right

    @property
    def alarm(self) -> bool:
        return self.fine and self.verdict.startswith(("stuck", "failed"))


def snapshots() -> list[Judged]:
    found = []
    for path in sorted((ROOT / "tests" / "faults" / "corpus").glob("*.json")):
        entry = json.loads(path.read_text("utf-8"))
        answer = judge(entry["snapshot"])
        right = tuple(entry["expect"])
        fine = entry["healthy"] or all(v.startswith(("healthy", "quiet")) for v in right)
        found.append(
            Judged(entry["case"], right, answer.verdict, answer.runner.verdict if answer.runner else None, fine)
        )
    return found


def live() -> tuple[list[Judged], list[Judged], list[str]]:
    """(faults, healthy runs, what was left out or could not be started)."""
    import lab.outside  # noqa: F401  adds its scenarios to both lists
    from lab.healthy import HEALTHY
    from lab.run import play_all, show
    from lab.scenes import SCENES

    faults, healthy, left_out = [], [], []
    for row in play_all([*SCENES, *HEALTHY], show):
        if row.skipped or row.error:
            left_out.append(f"{row.name}: {row.skipped or row.error}")
            continue
        right = (row.expect, *row.also) if row.expect else ()
        fine = not row.expect or row.expect.startswith(("healthy", "quiet"))
        judged = Judged(row.name, right, row.verdict, row.runner_up, fine, row.took_s)
        (faults if row.expect else healthy).append(judged)
    return faults, healthy, left_out


def share(items: list[Judged], what: str) -> float:
    return round(sum(getattr(i, what) for i in items) / len(items), 4) if items else 0.0


def numbers(faults: list[Judged], healthy: list[Judged]) -> dict[str, Any]:
    everything = faults + healthy
    return {
        "classes": len({i.right[0] for i in faults}),
        "cases": len(faults),
        "top1": share(faults, "top1"),
        "top2": share(faults, "top2"),
        "false_alarms": sum(i.alarm for i in everything),
        "healthy_runs": len(healthy) + sum(i.fine for i in faults),
        "max_took_s": round(max((i.took_s for i in everything), default=0.0), 2),
    }


def table(head: list[str], rows: list[list[object]]) -> list[str]:
    line = "| " + " | ".join(head) + " |"
    rule = "|" + "|".join("---" for _ in head) + "|"
    return [line, rule, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]


def by_class(items: list[Judged]) -> list[str]:
    groups: dict[str, list[Judged]] = {}
    for item in items:
        groups.setdefault(item.right[0], []).append(item)
    rows: list[list[object]] = []
    for name, group in sorted(groups.items()):
        wrong = Counter(i.verdict for i in group if not i.top1)
        called = ", ".join(f"{v} ({n})" if n > 1 else v for v, n in wrong.most_common())
        rows.append([f"`{name}`", len(group), sum(i.top1 for i in group), sum(i.top2 for i in group), called])
    return table(["class", "cases", "right", "right or runner-up", "called instead"], rows)


def confusion(faults: list[Judged], healthy: list[Judged]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for item in faults:
        counts[item.right[0].split(".")[0], item.verdict.split(".")[0]] += 1
    for item in healthy:
        counts["healthy run", item.verdict.split(".")[0]] += 1
    names = [s for s in (*STATES, "healthy run") if any(counts[s, c] for c in STATES)]
    rows: list[list[object]] = [[n, *(counts[n, c] or "" for c in STATES)] for n in names]
    return table(["was \\ called", *STATES], rows)


def report(parts: list[tuple[str, str, list[Judged], list[Judged]]], total: dict[str, Any], left_out: list[str]) -> str:
    lines = [
        "# Accuracy of `eyas why`",
        "",
        "Written by `make accuracy`. Top-1: the verdict is right. Top-2: the verdict or the runner-up is right. A false"
        " alarm is a healthy run, or one that is quiet for a good reason, called stuck or failed.",
        "",
        f"{total['cases']} cases of {total['classes']} classes: top-1 {100 * total['top1']:.1f} %, top-2"
        f" {100 * total['top2']:.1f} %; {total['false_alarms']} false alarm(s) in {total['healthy_runs']} healthy or"
        f" quiet runs; the longest look took {total['max_took_s']:.1f} s.",
    ]
    for title, words, faults, healthy in parts:
        got = numbers(faults, healthy)
        lines += ["", f"## {title}", "", words, ""]
        lines += [
            f"{got['cases']} cases, {got['classes']} classes: top-1 {100 * got['top1']:.1f} %, top-2"
            f" {100 * got['top2']:.1f} %; {got['false_alarms']} false alarm(s) in {got['healthy_runs']}.",
            "",
        ]
        lines += [*confusion(faults, healthy), "", *by_class(faults)]
        if healthy:
            called = Counter(i.verdict for i in healthy).most_common()
            lines += ["", "Healthy runs were called: " + ", ".join(f"{v} ({n})" for v, n in called) + "."]
    if left_out:
        lines += ["", "## Left out", "", *(f"- {what}" for what in left_out)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--no-lab", action="store_true", help="the snapshots only")
    given = parser.parse_args()
    begun, load = time.monotonic(), os.getloadavg()[0]
    faults, healthy, left_out = ([], [], ["the lab (--no-lab)"]) if given.no_lab else live()
    corpus = snapshots()
    parts = []
    if faults:
        words = (
            "Every scenario is a tree of real processes, brought into its state and asked about with the real command;"
            f" {os.cpu_count()} CPUs, Linux {platform.release().split('-')[0]}, load {load:.1f} at the start, no GPU"
            " (its tool's answers are recorded)."
        )
        parts.append(("Fault lab", words, faults, healthy))
    words = "States that need a GPU, a cluster or hours, written down as snapshots from public reports."
    parts.append(("Snapshots", words, corpus, []))
    total = numbers(faults + corpus, healthy)
    split = {"lab": numbers(faults, healthy), "snapshots": numbers(corpus, [])}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "accuracy.md").write_text(report(parts, total, left_out), encoding="utf-8")
    (given.out / "accuracy.json").write_text(json.dumps({**total, **split, "left_out": left_out}, indent=2) + "\n")
    print(json.dumps(total))
    print(f"{time.monotonic() - begun:.0f} s; written to {given.out}/accuracy.md and accuracy.json")
    return 0 if total["false_alarms"] == 0 and total["top1"] >= 0.90 and total["top2"] >= 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
