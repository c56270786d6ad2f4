"""What an engine does with a drafter's folder when it loads it: takes, ignores, leaves random, computes differently.

A simulation of the loaders by the rows of `drafter/conventions.py`. It says what happens, not whether that is good;
the rules do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas.drafter.conventions import FLAG_TENSORS, MAPS, USELESS, Engine, canonical, parameters
from eyas.drafter.folder import DrafterFolder

EMBEDDING = "embed_tokens.weight"
LAYER_KEY = "eagle_aux_hidden_state_layer_ids"
# Keys of config.json that change the function where they are true.
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")


@dataclass(frozen=True)
class Loading:
    """One engine and one folder.

    kind: of the drafter that it makes (`conventions.ATTENTION`), None where it makes none. refuses: why it stops, or
    None. loads: parameters that it fills from the folder, by the contract's name. ignores: tensors it passes over, by
    their name in the file. random: parameters that stay as they were made. layers: HF indices of the states it would
    feed, None for its default. differently: settings that it does not compute.
    """

    engine: Engine
    kind: str | None
    refuses: str | None
    loads: tuple[str, ...]
    ignores: tuple[str, ...]
    random: tuple[str, ...]
    layers: tuple[int, ...] | None
    differently: tuple[str, ...]


def load(folder: DrafterFolder, engine: Engine, num_layers: int | None, family: str | None) -> Loading:
    """What `engine` does with `folder`. num_layers, family: the verifier's, where it is known."""
    kind, refuses = made(folder, engine)
    wanted = parameters(kind or folder.kind)
    own = (EMBEDDING,) if engine.own_embedding else ()
    loads, ignores, stops = [], [], []
    for stored in folder.tensors.values():
        name = taken_as(stored.name, engine, kind or folder.kind)
        if name in (*wanted, *own) or name == "d2t" or flagged(folder, engine, name):
            loads.append(name)
        elif name in ("t2d", EMBEDDING) or engine.unknown == "ignored" or "mask_hidden" in stored.name:
            ignores.append(stored.name)
        else:
            stops.append(stored.name)
    if refuses is None and "d2t" in loads and not engine.map_of_all and whole_vocabulary(folder):
        refuses = "it has no place for d2t beside a whole vocabulary"
    if refuses is None and stops:
        refuses = f"it has no place for {stops[0]}" + (f" and {len(stops) - 1} more" if len(stops) > 1 else "")
    shared = engine.no_head == "verifier" or borrows(folder)
    random = [n for n in wanted if n not in loads and not (n == "lm_head.weight" and shared)]
    flags = [f for f in NORM_FLAGS if setting(folder, engine, f) and f not in engine.flags]
    return Loading(
        engine,
        kind,
        refuses,
        tuple(str(n) for n in loads),
        tuple(ignores),
        tuple(random),
        layers_of(folder, engine, num_layers, family),
        tuple(flags),
    )


def whole_vocabulary(folder: DrafterFolder) -> bool:
    """Whether the draft vocabulary is the verifier's whole one, by config.json first, as engines go."""
    V, Vd = folder.config.get("vocab_size"), folder.config.get("draft_vocab_size")
    shape = folder.shape("lm_head.weight")
    return V is not None and (Vd or (shape[0] if shape else V)) == V


def borrows(folder: DrafterFolder) -> bool:
    """Whether SGLang drafts with the verifier's own head: where draft_vocab_size is there, and null."""
    return "draft_vocab_size" in folder.raw and folder.raw["draft_vocab_size"] is None


def made(folder: DrafterFolder, engine: Engine) -> tuple[str | None, str | None]:
    """The kind of drafter that `engine` makes for the folder's config.json, or why it makes none."""
    if folder.speculators:
        if not engine.speculators_form:
            return None, "it does not read speculators' config.json"
        kind = str(folder.config.get("model_type", "llama"))
        return (kind, None) if kind in ("llama", "qwen3") else (None, f"it knows no speculators' layer of {kind}")
    names = folder.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name is None:
        return None, "config.json names no architecture"
    if name not in engine.architectures:
        return None, f"{name} is no drafter to it"
    if engine.one_layer and folder.config.get("num_hidden_layers") != 1:
        return engine.architectures[name], "it takes drafters of one layer only"
    return engine.architectures[name], None


def taken_as(name: str, engine: Engine, kind: str) -> str | None:
    """The parameter that `engine` fills from the tensor `name` of a file, by the contract's name; None for none."""
    short = name.removeprefix("model.") if kind in engine.model_prefix else name
    for map_ in MAPS:  # found by a part of the name, whatever stands before
        if name == map_ or name.endswith(f".{map_}"):
            return map_
    if short.startswith("lm_head.") and short != name:
        return None  # a prefix is put before the others' names, never before the head's
    for prefix in engine.layer_names:
        if short.startswith(prefix):
            return "midlayer." + short.removeprefix(prefix)
    known = ("fc.", "norm.", "lm_head.", "embed_tokens.", *FLAG_TENSORS)
    return short if short.startswith(known) else None


def flagged(folder: DrafterFolder, engine: Engine, name: str | None) -> bool:
    """Whether a tensor belongs to a setting that is on and that `engine` computes."""
    flags = next((f for prefix, f in FLAG_TENSORS.items() if name is not None and name.startswith(prefix)), ())
    return any(setting(folder, engine, f) and f in engine.flags for f in flags)


def setting(folder: DrafterFolder, engine: Engine, key: str) -> bool:
    """A yes or no of config.json as `engine` reads it: speculators' missing norm_before_residual is a yes to vLLM."""
    missing = key == "norm_before_residual" and folder.speculators and engine.speculators_form
    value = folder.config.get(key)
    return missing if value is None else bool(value)


def layers_of(
    folder: DrafterFolder, engine: Engine, num_layers: int | None, family: str | None
) -> tuple[int, ...] | None:
    """HF indices of the states that `engine` would feed the drafter; None: its default, 2, n//2, n-3."""
    top, inner = told_layers(folder.config)
    if engine.top_level_ids and top:
        return top
    if inner and engine.eagle_config_ids is not None:
        return engine.reads(inner, family or "llama", num_layers)
    return None


def told_layers(config: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two lists of layer ids in config.json: at the top (HF indices), and inside `eagle_config` (SGLang's unit)."""
    eagle = config.get("eagle_config")
    lists = config.get(LAYER_KEY), eagle.get(LAYER_KEY) if isinstance(eagle, dict) else None
    top, inner = (tuple(ids) if isinstance(ids, list) and all(type(k) is int for k in ids) else () for ids in lists)
    return top, inner


def useless(name: str) -> bool:
    """Whether a tensor is one that some trainers write and nobody reads."""
    return any(canonical(name).endswith(u) for u in USELESS)
