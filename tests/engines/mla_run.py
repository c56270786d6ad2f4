"""eyas's program for vLLM (`evaluate/vllm_job.py`), which also keeps what an MLA drafter is given and what it answers.

A job may name `record`, a file. It gets a list of the calls of vLLM's Eagle3DeepseekV2ForCausalLM in their order, to be
read by torch.load: {states, combined} of `fc`, or {input_ids, positions, hidden, normed, out} of the layer.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "src" / "eyas" / "evaluate" / "vllm_job.py"


def record(calls: list[dict[str, Any]]) -> None:
    """Have every call of the drafter's appended to `calls`."""
    from vllm.model_executor.models.deepseek_eagle3 import Eagle3DeepseekV2ForCausalLM as Model

    combine, forward = Model.combine_hidden_states, Model.forward

    def combine_and_keep(self: Any, hidden_states: Any) -> Any:
        combined = combine(self, hidden_states)
        calls.append({"states": hidden_states.clone(), "combined": combined.clone()})
        return combined

    def forward_and_keep(
        self: Any, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any = None
    ) -> Any:
        given = {"input_ids": input_ids, "positions": positions, "hidden": hidden_states}
        given = {name: x.clone() for name, x in given.items()}
        normed, out = forward(self, input_ids, positions, hidden_states, inputs_embeds)
        calls.append(given | {"normed": normed.clone(), "out": out.clone()})
        return normed, out

    Model.combine_hidden_states, Model.forward = combine_and_keep, forward_and_keep


def main() -> None:
    """The program's own main, with another `serve`."""
    spec = importlib.util.spec_from_file_location("vllm_job", PROGRAM)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    serve = program.serve

    def serve_and_record(job: dict[str, Any]) -> Any:
        import torch

        calls: list[dict[str, Any]] = []
        if "record" in job:
            record(calls)
        result = serve(job)
        if "record" in job:
            torch.save(calls, job["record"])
        return result

    program.serve = serve_and_record
    program.main()


if __name__ == "__main__":
    main()
