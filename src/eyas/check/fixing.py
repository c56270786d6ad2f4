"""The repaired copy: what the findings said can be repaired, brought to the contract in one pass.

A repair changes what is written about the weights (names, config, map), puts in what the verifier has, or orders rows
that are all there. It never makes up a number that training would have made. The original is read and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.check.against import mapped, rows_of_head
from eyas.check.engines import LAYER_KEY, useless
from eyas.check.maps import targets
from eyas.check.settings import DEFAULT_THETA, IDS, as_number, meant_layers, rope_settings
from eyas.check.subject import Finding, Ints, Subject
from eyas.check.tensors import head_dim_by_shape
from eyas.drafter.checkpoint import sglang_layer_ids
from eyas.drafter.conventions import CONTRACT_ARCHITECTURE, MAPS
from eyas.drafter.speculators import speculators_name

if TYPE_CHECKING:
    from torch import Tensor

TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def repaired(s: Subject, findings: list[Finding]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of the repaired copy, in the contract's names; other tensors and keys as they are.

    A folder in speculators' form keeps it: its names are `layers.0.*`, and settings go back to where they stood.
    """
    keys = {f.key for f in findings if f.repair}
    tensors = {name: s.folder.tensor(name) for name, t in s.folder.tensors.items() if not useless(t.name)}
    _head_and_map(s, keys, tensors)
    config = _settings(s, keys, _without_nulls(s.folder.raw))
    if s.folder.speculators:
        tensors = {speculators_name(n): t for n, t in tensors.items()}
    return config, {n: t.contiguous() for n, t in tensors.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return value


def _head_and_map(s: Subject, keys: set[str], tensors: dict[str, Tensor]) -> None:
    """lm_head, d2t and t2d, which belong together."""
    import torch

    tokens: Ints | None = mapped(s)
    if "head-rows" in keys and tokens is not None and (shown := rows_of_head(s, tokens)) is not None:
        order = np.argsort(shown)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][torch.from_numpy(order)]
        tokens = shown[order]
    if "head-missing" in keys and s.verifier is not None:
        rows = torch.from_numpy(tokens) if tokens is not None and s.Vd != s.V else None
        tensors["lm_head.weight"] = s.verifier.lm_head(rows, tensors["fc.weight"].dtype)
    if "map-of-all" in keys or s.Vd == s.V:
        for name in MAPS:
            tensors.pop(name, None)
        return
    maps = {
        *("map-missing", "map-unreadable", "map-length", "map-dtype"),
        *("map-absolute", "map-range", "map-of-another", "head-rows"),
    }
    if not keys & {*maps, "t2d-missing", "t2d-length"}:
        return
    tokens = tokens if "head-rows" in keys else targets(s)
    if tokens is None:  # a type that is wrong, on numbers that are right
        tensors["d2t"] = tensors["d2t"].round().to(torch.int64)
        return
    marked = np.zeros(s.V or 0, dtype=bool)
    marked[tokens] = True
    tensors["d2t"] = torch.from_numpy(tokens - np.arange(len(tokens)))
    tensors["t2d"] = torch.from_numpy(marked)


def _settings(s: Subject, keys: set[str], config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the repairs in it; in speculators' form the layer's settings lie one level down."""
    layer = config.get("transformer_layer_config", config) if s.folder.speculators else config
    if "architecture" in keys:
        config["architectures"] = [CONTRACT_ARCHITECTURE[s.kind][0]]
    if "model-type" in keys:
        config["model_type"] = CONTRACT_ARCHITECTURE[s.kind][1]
    if "type" in keys:
        for part in (config, layer):
            part.update({k: meant for k, v in part.items() if (meant := as_number(k, v)) is not None})
    if "size-missing" in keys or "shape" in keys:
        _sizes(s, layer)
    if "draft-vocab-size" in keys or "draft_vocab_size" not in config:
        config["draft_vocab_size"] = s.Vd
    if "layer-count" in keys:
        layer["num_hidden_layers"] = 1
    if keys & {"tied", "tied-missing"}:
        config["tie_word_embeddings"] = False
    if "dtype-missing" in keys:
        config["torch_dtype"] = TORCH[s.folder.tensors["fc.weight"].dtype]
    if "bias-flag" in keys:
        for part in (config, layer):
            part.update({k: False for k in ("attention_bias", "mlp_bias", "bias") if part.get(k)})
    if "no-aux" in keys:
        config["eagle_config"]["use_aux_hidden_state"] = True
    if "max-positions" in keys and s.verifier is not None:
        layer["max_position_embeddings"] = s.verifier.config.max_position_embeddings
    if s.verifier is not None and "null" in keys:
        for name in IDS:
            value = getattr(s.verifier.config, name)
            if name not in layer and value is not None:
                layer[name] = value
    if keys & {"rope-missing", "rope-one-form"}:
        theta, inner, scaling = rope_settings(s.config)
        kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
        rest = {k: v for k, v in (scaling or {}).items() if k not in ("type", "rope_type")}
        value = theta or inner or DEFAULT_THETA
        layer["rope_theta"] = value
        layer["rope_parameters"] = {**rest, "rope_type": kind, "rope_theta": value}
        if scaling:
            layer["rope_scaling"] = {**rest, "rope_type": kind}
    if "layer-unit" in keys or "layer-range" in keys or "layer-ids" in keys:
        _layers(s, config)
    return config


def _sizes(s: Subject, layer: dict[str, Any]) -> None:
    by_tensors = {
        "hidden_size": s.shape("norm.weight", 0),
        "intermediate_size": s.shape("midlayer.mlp.gate_proj.weight", 0),
        "vocab_size": s.V or s.shape("embed_tokens.weight", 0),
        "head_dim": head_dim_by_shape(s) if s.kind != "mla" else None,
    }
    layer.update({key: value for key, value in by_tensors.items() if value is not None})


def _layers(s: Subject, config: dict[str, Any]) -> None:
    """Both lists, each in its engine's unit; neither where the layers are the usual ones."""
    meant = s.trained_layers or meant_layers(s)
    eagle = dict(config.get("eagle_config") or {})
    config.pop(LAYER_KEY, None)
    eagle.pop(LAYER_KEY, None)
    if meant is None or meant == s.default_layers:
        config.pop("eagle_config", None)
        if eagle != {"use_aux_hidden_state": True}:
            config["eagle_config"] = eagle
        return
    config[LAYER_KEY] = list(meant)
    if not s.folder.speculators:
        ids = sglang_layer_ids(meant, s.family or "llama")
        config["eagle_config"] = {"use_aux_hidden_state": True, **eagle, LAYER_KEY: ids}
