"""The answer for people and for programs. The first line is the verdict in one sentence; the rest says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.why.chain import size
from eyas.why.compose import compose
from eyas.why.judge import Judgement
from eyas.why.redact import redact
from eyas.why.verdicts.base import span_words

__all__ = ["EXIT", "KEYS", "STATES", "exit_code", "redact", "render", "to_json"]

Answer = dict[str, Any]
KEYS = (
    "schema",
    "target",
    "took_s",
    "state",
    "verdict",
    "grade",
    "sentence",
    "questions",
    "evidence",
    "against",
    "runner_up",
    "also",
    "chain",
    "ranks",
    "progress",
    "data",
    "silence",
    "next",
    "do_not",
    "not_visible",
    "beat",
)
STATES = ("finished", "failed", "quiet", "slow", "stuck", "healthy", "unknown")
EXIT = {"healthy": 0, "quiet": 0, "finished": 0, "slow": 1, "stuck": 2, "failed": 2, "unknown": 3}
_COLOR = {"healthy": 32, "quiet": 32, "finished": 32, "slow": 33, "stuck": 31, "failed": 31}
_QUESTIONS = (
    ("finished", "Finished?"),
    ("crashed", "Crashed?"),
    ("stalled", "Stalled?"),
    ("only_quiet", "Only quiet?"),
)


def exit_code(state: str) -> int:
    """0 healthy, quiet or finished; 1 slow; 2 stuck or failed; 3 unknown."""
    return EXIT.get(state, 3)


def to_json(judgement: Judgement) -> Answer:
    """The answer as plain data, in the schema that docs/why.md describes."""
    return compose(judgement)


def render(judgement: Judgement, *, color: bool = False, verbose: bool = False) -> str:
    """Plain text, at home in a pipe; `color` marks the first line only."""
    return render_answer(compose(judgement), color=color, verbose=verbose)


def render_answer(given: Answer, *, color: bool = False, verbose: bool = False) -> str:
    """`render` of an answer that is there already."""
    first = given["sentence"]
    if color:
        first = f"\x1b[1;{_COLOR.get(given['state'], 36)}m{first}\x1b[0m"
    lines = [first, f"  {given['verdict']} ({given['grade']}), {given['took_s']:.1f} s of looking", ""]
    for key, title in _QUESTIONS:
        question = given["questions"][key]
        lines.append(f"  {title:<12} {question['answer']:<8}{question['evidence']}")
    if given["beat"] is not None:
        lines += ["", "The run's own beat", *_beat(given["beat"])]
    if given["chain"]:
        lines += ["", "Wait chain"]
        for depth, link in enumerate(given["chain"]):
            raw = f"   [{link['raw']}]" if link.get("raw") else ""
            lines.append("  " + "   " * depth + ("-> " if depth else "") + link["words"] + raw)
    if given["ranks"]:
        lines += ["", "Ranks", *(f"  {_numbers(g)}: {g['doing']}" for g in given["ranks"]["groups"])]
    lines += _evidence(given, verbose)
    lines += _progress(given)
    lines += [
        "",
        _log_title(given),
        "  " + given["silence"]["sentence"],
    ]
    lines += _list("What to do", given["next"]) + _list("What not to do", given["do_not"])
    lines += _list("What could not be seen", [_hidden(n) for n in given["not_visible"]])
    return "\n".join(lines)


def _log_title(given: Answer) -> str:
    over = given["state"] in ("finished", "failed")
    return "The log" if over or given["silence"]["reason"] == "not-silent" else "Why the log is silent"


def _beat(told: Mapping[str, Any]) -> list[str]:
    lines = [f"  {told['words']}"] + [f"  they differ: {words}" for words in told["differs"]]
    return lines if told["differs"] else [*lines, "  /proc agrees"]


def _numbers(group: Mapping[str, Any]) -> str:
    names = [str(r) if r is not None else f"PID {p}" for r, p in zip(group["ranks"], group["pids"], strict=True)]
    return "rank " + ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")


def _evidence(given: Answer, verbose: bool) -> list[str]:
    most = None if verbose else 7
    lines = ["", "Evidence"]
    for mark, items in (("+", given["evidence"][:most]), ("-", given["against"][:most])):
        for item in items:
            raw = f"   [{str(item['raw'])[:110]}]" if item.get("raw") and (verbose or item["source"] == "log") else ""
            lines.append(f"  {mark} {item['derived']} ({item['source']}){raw}")
    runner = given["runner_up"]
    if runner["verdict"]:
        lines.append(f"  Runner-up: {runner['verdict']}" + (f": {runner['evidence'][0]}" if runner["evidence"] else ""))
    lines.append(f"  To tell them apart: {runner['separate']}")
    lines += [f"  Also: {also['verdict']}: {'; '.join(also['evidence'][:1])}" for also in given["also"]]
    return lines


def _progress(given: Answer) -> list[str]:
    p, data = given["progress"], given["data"]
    lines = ["", "Progress"]
    if p["step"] is not None:
        total = f" of {p['total']:,}" if p["total"] else ""
        pace = f", {p['seconds_per_step']:.3g} s a {p['unit']}" if p["seconds_per_step"] else ""
        eta = f", about {span_words(p['eta_s'])} left" if p["eta_s"] is not None else ""
        lines.append(
            f"  {p['unit']} {p['step']:,}{total}{pace}{eta}"
            + (" in this epoch" if p["scope"] == "epoch" and eta else "")
        )
    else:
        lines.append("  the log shows no step yet")
    if data is not None and data["files"]:
        names = ", ".join(path.rsplit("/", 1)[-1] for path in data["files"][:4])
        rate = max(data[key] or 0 for key in ("read_bytes_per_s", "offset_bytes_per_s", "rchar_per_s"))
        cached = f", {100 * data['cached']:.0f} % of it in the page cache" if data["cached"] is not None else ""
        lines.append(f"  reading {names} at {size(rate)}/s{cached}")
    if data is not None and data["dataset"] and data["dataset"].get("bytes"):
        room = f", room for {size(data['page_cache_room'])} in memory" if data["page_cache_room"] else ""
        warm = {
            True: "it will warm up",
            False: "it will not warm up: larger than the free memory",
            None: "unknown whether it warms up",
        }[data["will_warm_up"]]
        whole = f"; one pass at this rate takes {span_words(p['data_pass_s'])}" if p["data_pass_s"] else ""
        lines.append(
            f"  data set: {data['dataset'].get('files', '?')} files, {size(data['dataset']['bytes'])}{room}:"
            f" {warm}{whole}"
        )
    moved = [s["name"] for s in p["signals"] if s["moved"]]
    still = [s["name"] for s in p["signals"] if s["moved"] is False]
    unseen = [s["name"] for s in p["signals"] if s["moved"] is None]
    lines.append(
        f"  moved: {', '.join(moved) or 'nothing'}; still: {', '.join(still) or 'nothing'}"
        + (f"; not seen: {', '.join(unseen)}" if unseen else "")
    )
    return lines


def _list(title: str, items: list[str]) -> list[str]:
    return ["", title, *(f"  {item}" for item in items)] if items else []


def _hidden(item: Mapping[str, Any]) -> str:
    needs = f"; needs {item['needs']}" if item.get("needs") else ""
    command = f": {item['command']}" if item.get("command") else ""
    return f"{item.get('what')} ({item.get('why')}{needs}){command}"
