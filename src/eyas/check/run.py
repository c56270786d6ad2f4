"""The command: read the folder, judge it, say it, and write the repaired copy where one is asked for.

Exit codes: 0 fine, 1 works with remarks, 2 broken (or not to be judged: then one line says why).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.check import against, maps, settings, tensors
from eyas.check.engines import Loading
from eyas.check.subject import Finding, Subject, listed
from eyas.drafter.conventions import ENGINES, written_by
from eyas.drafter.folder import DrafterFolder
from eyas.errors import EyasError

if TYPE_CHECKING:
    from eyas.verifier import Verifier

FINE, REMARKS, BROKEN = 0, 1, 2
PASSES = 4  # of repairing and judging again
WORDS = {FINE: "fine", REMARKS: "works, with remarks", BROKEN: "broken"}


def judge(s: Subject) -> list[Finding]:
    """Everything that is found, faults first. Raises EyasError where the folder holds no EAGLE-3 drafter."""
    if tensors.nothing_there(s):
        raise EyasError(
            f"{s.folder.path} holds no EAGLE-3 drafter (no fc.weight, no midlayer): its tensors are "
            f"{listed(t.name for t in s.folder.tensors.values()) or 'none'}"
        )
    found = [f for rules in (tensors, maps, settings, against) for f in rules.rules(s)]
    return sorted(found, key=lambda f: not f.broken)


def code(found: list[Finding]) -> int:
    """The exit code."""
    return BROKEN if any(f.broken for f in found) else REMARKS if found else FINE


def check(
    path: Path,
    *,
    verifier_path: str | None = None,
    engine: str | None = None,
    layers: tuple[int, ...] | None = None,
    fix: Path | None = None,
    as_json: bool = False,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Judge the drafter in `path` (a run directory means its best checkpoint); returns the exit code.

    engine: "sglang" or "vllm", to be served by that one only. layers: HF indices it was trained on, where known.
    fix: a new folder for a repaired copy; the code is then the copy's. Raises EyasError where nothing can be judged.
    """
    folder = path / "best" if (path / "best" / "config.json").exists() else path
    engines = tuple(e for e in ENGINES if engine is None or e.name.lower() == engine.lower())
    if not engines:
        raise EyasError(f"--engine {engine}: name sglang or vllm")
    if fix is not None and fix.exists() and (not fix.is_dir() or any(fix.iterdir())):
        raise EyasError(f"{fix} is there already: name a new folder for the repaired copy")
    verifier = _verifier(verifier_path, trust_remote_code)
    subject = Subject(DrafterFolder(folder), engines, verifier, layers)
    found = judge(subject)
    copy: dict[str, Any] | None = None
    result = code(found)
    if not as_json:
        for line in told(subject, found, path):
            say(line)
    if fix is not None and found:
        again, left, repairs = write_copy(subject, found, fix)
        result = code(left)
        copy = {"path": str(fix), "repairs": repairs, "findings": [asdict(f) for f in left]}
        if not as_json:
            say(f"repaired copy in {fix}: " + "; ".join(repairs))
            for line in told(again, left, fix):
                say(line)
    elif fix is not None and not as_json:
        say("nothing to repair: no copy was written")
    if as_json:
        say(json.dumps(as_data(subject, found, path, copy), indent=1))
    return result


def _verifier(path: str | None, trust_remote_code: bool) -> Verifier | None:
    if path is None:
        return None
    from eyas.verifier import Verifier

    return Verifier(path, trust_remote_code=trust_remote_code)


def write_copy(s: Subject, found: list[Finding], output: Path) -> tuple[Subject, list[Finding], list[str]]:
    """Write the repaired copy; returns it, what is found in it, and what was repaired.

    A repair can bring to light what a wrong setting hid, so the copy is judged and repaired again. Raises EyasError,
    and leaves nothing, where a fault is left that nobody can repair.
    """
    from eyas.check.fixing import repaired
    from eyas.drafter.checkpoint import write_folder

    repairs: list[str] = []
    for _ in range(PASSES):
        if left := [f for f in found if f.broken and not f.repair]:
            _remove(output)
            more = f" ({len(left) - 1} more faults cannot be repaired either)" if len(left) > 1 else ""
            raise EyasError(f"not repaired, and nothing was written: {left[0].what}; {left[0].todo}{more}")
        wanted = [f.repair for f in found if f.repair]
        if not wanted:
            break
        repairs += [r for r in wanted if r not in repairs]
        config, weights = repaired(s, found)
        write_folder(output, weights, {"config.json": config})
        s = Subject(DrafterFolder(output), tuple(x.engine for x in s.loadings), s.verifier, s.trained_layers)
        found = judge(s)
    if not repairs:
        raise EyasError(f"nothing of this can be repaired without guessing, and nothing was written: {found[0].todo}")
    if code(found) == BROKEN:
        _remove(output)
        raise EyasError(f"not repaired, and nothing was written: {found[0].what} comes back")
    return s, found, repairs


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def told(s: Subject, found: list[Finding], path: Path) -> list[str]:
    """The answer in lines: the drafter, each engine, each finding, the verdict."""
    lines = [f"{path}: {describe(s)}"]
    lines += [f"  {x.engine.title:<{_width(s)}}  {loading_line(x, s)}" for x in s.loadings]
    for f in found:
        lines.append(f"{'BROKEN' if f.broken else 'remark'}  {f.key}: {f.what}")
        lines.append(f"        seen: {f.sees}")
        lines.append(f"        --fix {f.repair}" if f.repair else f"        to do: {f.todo}")
    faults = sum(f.broken for f in found)
    count = f" ({faults} faults, {len(found) - faults} remarks)" if found else ""
    lines.append(WORDS[code(found)] + count)
    return lines


def _width(s: Subject) -> int:
    return max(len(x.engine.title) for x in s.loadings)


def describe(s: Subject) -> str:
    """EAGLE-3 drafter, llama attention, H 576, 4,096 of 49,152 tokens, written by eyas."""
    sizes = f"{s.Vd:,} of {s.V:,} tokens" if s.Vd and s.V else "vocabulary unknown"
    parameters = sum(_count(t.shape) for n, t in s.folder.tensors.items() if n not in ("d2t", "t2d"))
    return (
        f"EAGLE-3 drafter, {s.kind} attention, H {s.H}, {sizes}, {parameters / 1e6:.1f} M parameters, "
        f"written by {written_by(s.folder.raw, s.folder.pickled)}"
    )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def loading_line(x: Loading, s: Subject) -> str:
    """What one engine does, in a line."""
    if x.refuses:
        return f"stops at loading: {x.refuses}"
    parts = [f"loads {len(x.loads)} tensors"]
    if x.ignores:
        parts.append(f"ignores {listed(x.ignores)}")
    if x.random:
        parts.append(f"leaves random {listed(x.random)}")
    if x.differently:
        parts.append(f"computes without {listed(x.differently)}")
    ids = x.layers or s.default_layers
    parts.append(f"feeds layers {', '.join(map(str, ids)) if ids else '2, n//2, n-3'}")
    return " · ".join(parts)


def as_data(s: Subject, found: list[Finding], path: Path, copy: dict[str, Any] | None) -> dict[str, Any]:
    """The answer for programs; docs/check.md names the fields."""
    return {
        "path": str(path),
        "verdict": WORDS[code(found)],
        "code": code(found),
        "written_by": written_by(s.folder.raw, s.folder.pickled),
        "attention": s.kind,
        "hidden_size": s.H,
        "vocab_size": s.V,
        "draft_vocab_size": s.Vd,
        "engines": [
            {
                "engine": x.engine.name,
                "versions": x.engine.versions,
                "read_from": x.engine.read_from,
                "refuses": x.refuses,
                "loads": list(x.loads),
                "ignores": list(x.ignores),
                "random": list(x.random),
                "layers": list(x.layers or s.default_layers or ()) or None,
                "computes_without": list(x.differently),
            }
            for x in s.loadings
        ],
        "findings": [asdict(f) for f in found],
        "copy": copy,
    }
