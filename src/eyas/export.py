"""`eyas export`: the checkpoint that engines load, how to serve it, and a card that says how good it is.

`eagle3` is the contract's form, for SGLang and vLLM. `speculators` is for vLLM and for the speculators library: one
folder that `vllm serve FOLDER` loads with its verifier, and that speculators' own tools read.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.device import parse_dtype
from eyas.drafter.checkpoint import checkpoint_layers, load_checkpoint, save_checkpoint, save_speculators
from eyas.drafter.conventions import CONTRACT_ARCHITECTURE
from eyas.errors import EyasError
from eyas.evaluate.run import check_verifier, find_checkpoint, slashed, verifier_of
from eyas.files import check_writable, write_whole
from eyas.verifier import Verifier

FORMS = ("eagle3", "speculators")
SPECULATORS = '"speculators_model_type": "eagle3"'


def export(
    path: Path,
    output_dir: Path,
    *,
    form: str = "eagle3",
    verifier_path: str | None = None,
    dtype: str = "bf16",
    with_embedding: bool = False,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the checkpoint of `path` (a run directory or a checkpoint) for SGLang and vLLM; returns the folder.

    form: "eagle3" or "speculators". dtype: of the weights, "bf16" or "fp32". with_embedding: also store the verifier's
    embedding, which engines share with the verifier when it is left out (speculators' form has it always).
    Raises EyasError.
    """
    if form not in FORMS:
        raise EyasError(f"--format {form}: {' or '.join(FORMS)}")
    folder, run = find_checkpoint(path)
    given, verifier_path = verifier_path, verifier_path or run.get("verifier_path")
    if not verifier_path:
        raise EyasError(f"{folder} lies in no run directory: name --verifier-path")
    if output_dir.exists() and not output_dir.is_dir():
        raise EyasError(f"{output_dir} is a file: name a folder")
    if not _may_replace(output_dir):
        raise EyasError(f"{output_dir} holds other files: name a new folder, or one that an export made")
    if output_dir.exists() and output_dir.samefile(folder):
        raise EyasError(f"{output_dir} is the checkpoint that is to be exported: name another folder")
    check_writable(output_dir.absolute().parent, f"the checkpoint {output_dir}")
    verifier = verifier_of(run, given, trust_remote_code)
    check_verifier(folder, verifier)
    embed = with_embedding or form == "speculators"
    drafter, vocab = load_checkpoint(folder, verifier.config, verifier.embedding() if embed else None)
    layers = checkpoint_layers(folder, verifier.config)
    figures = _figures(run, folder)
    k = figures["decode"]["draft_tokens"] if figures else 3
    about, torch_dtype = verifier.config, parse_dtype(dtype)
    if form == "speculators":
        save_speculators(output_dir, drafter, vocab, about, layers, verifier_path, k, torch_dtype)
    else:
        save_checkpoint(output_dir, drafter, vocab, about, layers, dtype=torch_dtype, with_embedding=with_embedding)
    commands = serve_commands(verifier_path, output_dir, k, form)
    parameters = sum(p.numel() for p in drafter.parameters())
    try:
        text = card(verifier, commands, layers, figures, parameters, run)
        write_whole(output_dir / "README.md", text.encode())
    except OSError as e:
        raise EyasError(f"cannot write {output_dir / 'README.md'}: {e.strerror or e}") from None
    say(f"exported {folder.name} to {output_dir} ({dtype})")
    for engine, command in commands.items():
        say(f"serve with {engine}:\n  {command}")
    return output_dir


def _may_replace(folder: Path) -> bool:
    """Whether an export may take the place of `folder`: nothing is there, or what an export wrote and no more."""
    if not folder.exists():
        return True
    names = {p.name for p in folder.iterdir()}
    if not names:
        return True
    ours = names <= {"config.json", "model.safetensors", "README.md"} and "config.json" in names
    text = (folder / "config.json").read_text(errors="replace") if ours else ""
    return any(name in text for name, _ in CONTRACT_ARCHITECTURE.values()) or SPECULATORS in text


def serve_commands(verifier_path: str, drafter_dir: Path, draft_tokens: int, form: str = "eagle3") -> dict[str, str]:
    """The exact command for each engine that loads this form.

    With `EAGLE` in place of `EAGLE3` SGLang accepts nothing, without a word.
    """
    v, d = shlex.quote(str(verifier_path)), shlex.quote(str(drafter_dir))
    if form == "speculators":
        return {"vLLM": f"vllm serve {d}"}
    config = json.dumps({"method": "eagle3", "model": str(drafter_dir), "num_speculative_tokens": draft_tokens})
    return {
        "SGLang": (
            f"python -m sglang.launch_server --model-path {v} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {d} --speculative-num-steps {draft_tokens} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_tokens + 1}"
        ),
        "vLLM": f"vllm serve {v} --speculative-config {shlex.quote(config)}",
    }


def _figures(run: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """eval.json of the run, if it is of this checkpoint."""
    try:
        found: dict[str, Any] = json.loads((Path(run["run_dir"]) / "eval.json").read_text())
    except (KeyError, OSError, ValueError):
        return None
    return found if found.get("checkpoint") == folder.name else None


def card(
    verifier: Verifier,
    commands: dict[str, str],
    layers: tuple[int, ...],
    figures: dict[str, Any] | None,
    parameters: int,
    run: dict[str, Any],
) -> str:
    """The model card, in Markdown. commands: how to serve it, by engine."""
    name = verifier.config.name
    lines = [
        "---",
        "library_name: eyas",
        "tags: [eagle3, speculative-decoding, draft-model]",
        "---",
        f"# EAGLE-3 drafter for {name}",
        "",
        f"{parameters / 1e6:.1f} M trained parameters, one layer. Reads the verifier's states "
        f"{', '.join(map(str, layers))} (HF index) and drafts the tokens it would say next.",
        "",
    ]
    if figures:
        d, v = figures["decode"], figures["val"]
        lines += [
            "## How good it is",
            "",
            "| figure | value |",
            "|---|---|",
            f"| accept length, greedy, {d['draft_tokens']} drafts a round ({d['prompts']} held-out prompts, "
            f"{d['tokens']:,} tokens) | **{d['accept_length']:.2f}** |",
            f"| drafts kept by position | {slashed(d['per_position'])} |",
            f"| output equal to the verifier's own | {d['identical']} of {d['prompts']} ({d['dtype']}) |",
            f"| tokens/s of one stream, with / without, where it was measured | {d['tokens_per_s']:.1f} / "
            f"{d['tokens_per_s_alone']:.1f} |",
        ]
        if v:
            lines.append(f"| simulated accept length at temperature 1 (validation) | {v['accept_length']:.2f} |")
        lines.append("")
    lines += ["## Serve it", ""]
    for engine, command in commands.items():
        lines += [f"{engine}:", "```", command, "```"]
    keep = (
        "epochs",
        "lr",
        "ttt_steps",
        "loss",
        "step_weight_decay",
        "state_weight",
        "noise_std",
        "max_seq_len",
        "batch_tokens",
        "seed",
    )
    if run:
        lines += ["## How it was trained", "", ", ".join(f"{k} {run[k]}" for k in keep if run.get(k) is not None), ""]
    return "\n".join(lines)
