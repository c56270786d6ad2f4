"""The figures of `eyas bench`, from what an engine counted, and how they are printed."""

from __future__ import annotations

from typing import Any

from eyas.evaluate.run import slashed

TASKS = 24  # more than so many are no tasks, but names


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Of one run: {tokens, seconds, tokens_per_s, ms_per_token, accept_length (None if uncounted), per_position}."""
    count = sum(run["counts"]) if "counts" in run else sum(map(len, run["tokens"]))
    kept = [n / run["drafts"] for n in run["accepted"]] if run["drafts"] else []
    return {
        "tokens": count,
        "seconds": run["seconds"],
        "tokens_per_s": count / max(run["seconds"], 1e-9),
        "ms_per_token": 1000 * run["per_token"],
        "accept_length": 1 + sum(kept) if kept else run.get("accept_length"),
        "per_position": kept,
    }


def by_task(run: dict[str, Any], tasks: list[str]) -> dict[str, dict[str, float]]:
    """Task -> {prompts, accept_length}: tokens that came out of a verification; {} where there are not several tasks.

    Counted from what every step of the engine gave a prompt; a server does not tell.
    """
    if "rounds" not in run or not 1 < len(set(tasks)) <= TASKS:
        return {}
    found = {}
    for task in sorted(set(tasks)):
        mine = [i for i, t in enumerate(tasks) if t == task]
        rounds = sum(run["rounds"][i] for i in mine)
        new = sum(len(run["tokens"][i]) - 1 for i in mine)  # the first token came out of the prompt's pass
        found[task] = {"prompts": len(mine), "accept_length": new / rounds if rounds else 1.0}
    return found


def line(k: int, runs: dict[str, Any]) -> str:
    """What one configuration gave, k drafts a round or 0, in a line."""
    one, many = figures(runs["one_stream"]), figures(runs["greedy"])
    text = f"bench: one stream {one['tokens_per_s']:.1f} tokens/s, all at once {many['tokens_per_s']:.1f} tokens/s"
    if many["accept_length"]:
        text += f" · accept length {many['accept_length']:.3f}"
        text += f" · kept {slashed(many['per_position'])}" if many["per_position"] else ""
    return text if k else text + " (alone)"


def table(r: dict[str, Any]) -> str:
    """The result as plain text: a line for the verifier alone, and one for each number of drafts."""
    head = [
        "drafts",
        "accept length",
        "sampled",
        "one stream",
        "times",
        "ms/token",
        f"{r['streams']} streams",
        "times",
        "identical",
    ]
    rows = [head]
    for entry in [*([{"draft_tokens": 0} | r["alone"]] if r["alone"] else []), *r["drafted"]]:
        k, speedup = entry["draft_tokens"], entry.get("speedup")
        rows.append(
            [
                str(k) if k else "none",
                *(
                    f"{entry[n]['accept_length']:.3f}" if n in entry and entry[n]["accept_length"] else "-"
                    for n in ("greedy", "sampled")
                ),
                f"{entry['one_stream']['tokens_per_s']:.1f}",
                f"{speedup['one_stream']:.2f}" if speedup else "-",
                f"{entry['one_stream']['ms_per_token']:.1f}",
                f"{entry['greedy']['tokens_per_s']:.1f}",
                f"{speedup['greedy']:.2f}" if speedup else "-",
                f"{entry['identical']} of {r['prompts']}" if "identical" in entry else "-",
            ]
        )
    widths = [max(len(row[j]) for row in rows) for j in range(len(head))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    said = f"best for one stream: {r['best']} drafts a round; for {r['streams']}: {r['best_streams']}"
    top = f"{r['engine']} · {r['verifier']} · {r['dtype']}"
    top += f" · {r['prompts']} prompts, up to {r['max_new_tokens']} new tokens"
    return "\n".join([top, *lines, *([said] if len(r["drafted"]) > 1 else [])])


def agreement_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The accept lengths by the engine's counters beside eyas's, as plain text.

    rows: {draft_tokens, engine, decoded, simulated, apart} each.
    """
    each = (
        f"           {r['draft_tokens']:>6}  {r['engine']:>6.3f}  {r['decoded']:>7.3f}  {r['simulated']:>9.3f}"
        f"  {r['apart']:>5.1%}"
        for r in rows
    )
    return ["agreement: drafts  engine  decoded  simulated  apart", *each]


def told(r: dict[str, Any]) -> list[str]:
    """What stands below the table: tasks, agreement, differences, and what had to be mended."""
    lines = []
    best = next((e for e in r["drafted"] if e["draft_tokens"] == r["best"]), None)
    if tasks := best and best["tasks"]:
        each = sorted(tasks.items(), key=lambda item: -item[1]["accept_length"])
        lines.append(
            f"accept length by task, {r['best']} drafts: "
            + " · ".join(f"{task} {f['accept_length']:.2f} ({f['prompts']})" for task, f in each)
        )
    if "agreement" in r:
        lines += agreement_lines(r["agreement"])
    for entry in r["drafted"]:
        if found := entry.get("differences"):
            unexplained = sum(not d["explained"] for d in found)
            lines.append(
                f"{entry['draft_tokens']} drafts: {len(found)} outputs differ, "
                + (f"{unexplained} of them at no near-tie" if unexplained else "each first at a near-tie")
            )
    if r.get("mended") and r["temperature"]:
        lines.append(
            "sampled: this vLLM loses the temperature of drafted positions on a CPU; mended for this measurement"
            " (docs/engines.md)"
        )
    return lines
