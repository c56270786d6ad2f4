"""speculators' form of a drafter's folder: the same weights under `layers.0.*`, and a nested config.json.

    speculators_model_type "eagle3"      how vLLM and speculators know the form
    transformer_layer_config             the layer's settings, as transformers' config of a llama
    speculators_config.verifier          name_or_path: `vllm serve FOLDER` serves this model with the drafter
    speculators_config.proposal_methods  how many tokens a round
    norm_before_residual, ...            said one by one: readers disagree about what a missing one means

Facts from speculators 0.9.0 (`models/eagle3/config.py`, `core.py`) and from vLLM 0.32's reader of this form. The layer
ids at the top are HF indices. The embedding is in the file, as speculators writes it itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.errors import EyasError

VERSION = "0.9.0"
LAYER_KEY = "eagle_aux_hidden_state_layer_ids"
# Keys of the contract's config.json that stand at the top here, or nowhere.
NOT_THE_LAYERS = ("architectures", "draft_vocab_size", "norm_before_residual", "eagle_config", LAYER_KEY, "torch_dtype")


def speculators_config(
    config: dict[str, Any],
    layers: tuple[int, ...],
    verifier_path: str,
    architectures: list[str],
    draft_tokens: int,
) -> dict[str, Any]:
    """The nested config.json of the contract's `config`.

    layers: HF indices. verifier_path, architectures: the verifier's folder or hub id, and what its config.json calls
    it. draft_tokens: proposed a round. Raises EyasError for a drafter whose width is not the verifier's,
    or whose attention is MLA.
    """
    if "target_hidden_size" in config:
        raise EyasError(
            f"speculators {VERSION} has no drafter of width {config['hidden_size']} on states of "
            f"{config['target_hidden_size']}: export it with --format eagle3"
        )
    if "kv_lora_rank" in config:
        raise EyasError(f"speculators {VERSION} has no drafter with MLA attention: export it with --format eagle3")
    path = Path(verifier_path).expanduser()
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
        LAYER_KEY: list(layers),
        "transformer_layer_config": {k: v for k, v in config.items() if k not in NOT_THE_LAYERS},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": str(path.resolve()) if path.is_dir() else verifier_path,
                "architectures": architectures,
            },
        },
    }


def speculators_name(name: str) -> str:
    """The name of a tensor of the contract in this form."""
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
