"""What vLLM does with drafters that are broken in one way each, beside what `eyas check` says of them.

    python bench/broken.py --drafter runs/demo/drafter --verifier V --prompts FILE.jsonl --engine-python PYTHON

The drafter is one that `eyas export` wrote; each copy of it has one of the faults that public reports are about. The
engine's accept length (greedy, 3 drafts a round) is the measure, or its own error where it stops.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas.check.run import check
from eyas.errors import EyasError
from eyas.evaluate.engine_figures import figures
from eyas.evaluate.engines import BenchOptions, make_runs, prompts_from, run_vllm
from eyas.evaluate.hosted import Host
from eyas.evaluate.run import spread
from eyas.verifier import Verifier

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]


def no_head(_: Config, tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def shuffled_head(_: Config, tensors: Tensors) -> None:
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(0))]


def absolute_map(_: Config, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def llama_architecture(config: Config, _: Tensors) -> None:
    config["architectures"] = ["LlamaForCausalLM"]


def layers_off_by_one(config: Config, _: Tensors) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [3, 16, 28]


def sglang_unit(config: Config, _: Tensors) -> None:
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}


def norm_before_residual(config: Config, _: Tensors) -> None:
    config["norm_before_residual"] = True


def no_fc(_: Config, tensors: Tensors) -> None:
    del tensors["fc.weight"]


def rounded_map(_: Config, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"].to(torch.bfloat16)


def prefixed(_: Config, tensors: Tensors) -> None:
    for name in [n for n in tensors if n not in ("d2t", "t2d", "lm_head.weight")]:
        tensors[f"model.{name}"] = tensors.pop(name)


def two_layers(config: Config, _: Tensors) -> None:
    config["num_hidden_layers"] = 2


FAULTS: dict[str, Callable[[Config, Tensors], None]] = {
    f.__name__: f
    for f in (
        no_head, shuffled_head, absolute_map, llama_architecture, layers_off_by_one, sglang_unit, norm_before_residual,
        no_fc, rounded_map, prefixed, two_layers,
    )
}  # fmt: skip


def broken(drafter: Path, fault: Callable[[Config, Tensors], None], folder: Path) -> Path:
    shutil.copytree(drafter, folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    fault(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=list(FAULTS))
    a = parser.parse_args()
    verifier = Verifier(a.verifier)
    options = BenchOptions(max_new_tokens=32, streams=a.count)
    prompts = spread([p.ids for p in prompts_from([a.prompts], verifier)], a.count)
    runs = make_runs(prompts, options)[:1]
    with Host(a.engine_python) as host, tempfile.TemporaryDirectory() as work:
        for name in ("as it is", *a.only):
            folder = a.drafter if name == "as it is" else broken(a.drafter, FAULTS[name], Path(work) / name)
            lines: list[str] = []
            check(folder, verifier_path=a.verifier, engine="vllm", as_json=True, say=lines.append)
            found = json.loads("\n".join(lines))["findings"]
            try:
                run = run_vllm(host, verifier, folder, 3, runs, "float32", options, lambda _: None)["runs"]["greedy"]
                seen = f"accept length {figures(run)['accept_length']:.3f}"
            except EyasError as error:
                seen = str(error).partition(" (its log")[0]
            print(f"{name}: {seen}", flush=True)
            for f in found:
                print(f"    {'BROKEN' if f['broken'] else 'remark'} {f['key']}: {f['sees']}", flush=True)


if __name__ == "__main__":
    main()
