"""Rules on config.json: what an engine would refuse, read differently from another, or fill with a default."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from eyas.check.engines import LAYER_KEY, NORM_FLAGS, Loading, borrows, told_layers
from eyas.check.subject import LITTLE, NOTHING, Finding, Subject, listed, titles
from eyas.drafter.conventions import CONTRACT_ARCHITECTURE, read_by_sglang, yarn_m

REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
REQUIRED_OF_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEFAULT_THETA = 10_000.0
WHOLE = (
    *("hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "max_position_embeddings"),
    *REQUIRED_OF_MLA,
)
REAL = ("rms_norm_eps", "rope_theta")
FLAGS = (*NORM_FLAGS, "tie_word_embeddings", "attention_bias", "mlp_bias")
PARTS = ("rope_parameters", "rope_scaling", "eagle_config", "transformer_layer_config")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def rules(s: Subject) -> Iterator[Finding]:
    """Everything that config.json shows."""
    yield from types(s)
    yield from architecture(s)
    yield from sizes(s)
    yield from nulls(s)
    yield from flags(s)
    yield from rope(s)
    yield from layers(s)


def types(s: Subject) -> Iterator[Finding]:
    """Values of another type than their key's, which other rules would take for values that are not there."""
    eagle = s.config.get("eagle_config")
    inner = {f"eagle_config.{LAYER_KEY}": eagle.get(LAYER_KEY)} if isinstance(eagle, dict) else {}
    for key, value in {**s.config, **inner, **{k: s.folder.raw[k] for k in PARTS if k in s.folder.raw}}.items():
        wanted = wanted_type(key)
        if wanted is None or value is None or right_type(key, value):
            continue
        number = as_number(key, value)
        yield Finding(
            "type",
            True,
            f"{key} is {json.dumps(value)[:60]} in config.json, where {wanted} belongs",
            "engines stop, or compute with another value than was meant",
            None if number is None else f"writes {key} as {number:,}",
            f"write {wanted} there, as it was in training",
        )


def wanted_type(key: str) -> str | None:
    """The type of a key's value, in words; None where no rule reads it."""
    if key in WHOLE:
        return "a whole number above 0"
    if key in REAL:
        return "a number above 0"
    if key in FLAGS:
        return "true or false"
    if key.endswith(LAYER_KEY):
        return "a list of whole numbers"
    return "an object" if key in PARTS else None


def right_type(key: str, value: Any) -> bool:
    """Whether `value` is of the type that its key wants."""
    if key in WHOLE:
        return type(value) is int and value > 0
    if key in REAL:
        return type(value) in (int, float) and 0 < value < math.inf
    if key in FLAGS:
        return isinstance(value, bool)
    if key.endswith(LAYER_KEY):
        return isinstance(value, list) and all(type(k) is int for k in value)
    return isinstance(value, dict)


def as_number(key: str, value: Any) -> int | float | None:
    """The number that is written as a string, or a whole one as a fraction; None where `value` says no other number."""
    if key not in (*WHOLE, *REAL) or isinstance(value, bool) or right_type(key, value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not 0 < number < math.inf or (key in WHOLE and number != int(number)):
        return None
    return int(number) if key in WHOLE else number


def architecture(s: Subject) -> Iterator[Finding]:
    """The name by which an engine chooses its code."""
    if s.folder.speculators:
        deaf = [x for x in s.loadings if not x.engine.speculators_form]
        alone = len(deaf) == len(s.loadings)  # nobody is left who reads it
        if deaf:
            yield Finding(
                "speculators-form",
                alone,
                "config.json is speculators' nested one",
                f"{titles(deaf)} stops: it does not read this form" + ("" if alone else "; vLLM loads it by itself"),
                None,
                "`eyas import` and `eyas export` make the form that both engines load",
            )
        return
    name, model_type = CONTRACT_ARCHITECTURE[s.kind]
    told = s.config.get("architectures")
    lost = [x for x in s.loadings if x.kind is None]
    other = [x for x in s.loadings if x.kind not in (None, s.kind) and not (s.kind == "qwen3" and x.kind == "llama")]
    if helped_by_name(lost, other, name) or any(x.engine.current for x in (*lost, *other)):
        sees = [f"{titles(lost)} stops: {lost[0].refuses}"] if lost else []
        if other:
            sees.append(f"{titles(other)} makes a drafter of the {other[0].kind} kind and leaves it random: {NOTHING}")
        yield Finding(
            "architecture",
            any(x.engine.current for x in (*lost, *other)),
            f"architectures is {told}, the tensors are of the {s.kind} kind",
            "; ".join(sees),
            f"names it {name}" if helped_by_name(lost, other, name) else None,
            f"these releases have no drafter of the {s.kind} kind: serve it with another",
        )
    if not isinstance(s.config.get("model_type"), str):
        yield Finding(
            "model-type",
            True,
            "config.json gives no model_type",
            "engines stop: transformers does not know which config this is",
            f"sets model_type to {model_type}",
        )
    elif taken := [x for x in s.loadings if s.config["model_type"] in x.engine.mtp_types]:
        yield Finding(
            "model-type",
            any(x.engine.current for x in taken),
            f"model_type is {s.config['model_type']}",
            f"{titles(taken)} takes it for DeepSeek's multi-token prediction, whatever the architecture, and stops",
            f"sets model_type to {model_type}",
        )


def helped_by_name(lost: list[Loading], other: list[Loading], name: str) -> bool:
    """Whether one of these would load the drafter if it were called by `name`."""
    return any(name in x.engine.architectures for x in (*lost, *other))


def sizes(s: Subject) -> Iterator[Finding]:
    """Counts that are missing or contradict the tensors."""
    wanted = (*REQUIRED, *REQUIRED_OF_MLA) if s.kind == "mla" else REQUIRED
    lost = [k for k in wanted if s.config.get(k) is None]
    guessable = {"intermediate_size", "hidden_size", "vocab_size"}
    for key in lost:
        by_tensor = {
            "hidden_size": s.shape("norm.weight", 0),
            "intermediate_size": s.shape("midlayer.mlp.gate_proj.weight", 0),
            "vocab_size": s.shape("t2d", 0) or s.shape("embed_tokens.weight", 0),
        }.get(key)
        yield Finding(
            "size-missing",
            True,
            f"config.json gives no {key}",
            "engines stop, or take transformers' default for it and stop at a shape",
            f"sets it to {by_tensor:,}, as the tensors are" if key in guessable and by_tensor else None,
            "take the config.json that was written with the weights",
        )
    told = s.whole("draft_vocab_size")
    rows = s.shape("lm_head.weight", 0) or s.shape("d2t", 0)
    if rows is not None and told != rows:
        if told is not None:
            sees = "engines stop at the shape of lm_head"
        elif borrows(s.folder):
            sees = f"SGLang drafts with the verifier's whole head in place of lm_head; vLLM makes a head of {s.V} rows"
        else:
            sees = f"SGLang stops: its config has no such attribute; vLLM makes a head of {s.V} rows"
        yield Finding(
            "draft-vocab-size",
            True,
            f"draft_vocab_size is {'missing' if told is None else f'{told:,}'}, the head has {rows:,} rows",
            sees,
            f"sets it to {rows:,}",
        )
    count = s.whole("num_hidden_layers")
    if count != 1 and not any(n.startswith("layers.") for n in s.folder.tensors):
        yield Finding(
            "layer-count",
            True,
            f"num_hidden_layers is {count}, the file holds one layer",
            f"vLLM and SGLang 0.5.14 and later make as many and leave them random: {NOTHING}, or nothing to see where "
            "their memory happens to be zeros; older SGLang stops",
            "sets it to 1",
        )
    if s.config.get("tie_word_embeddings") and "lm_head.weight" in s.folder.tensors:
        yield Finding(
            "tied",
            True,
            "tie_word_embeddings is true, and there is an lm_head",
            f"SGLang drafts with the embedding in place of lm_head: {NOTHING}",
            "sets it to false",
        )
    if "tie_word_embeddings" not in s.config and not s.folder.speculators:
        yield Finding(
            "tied-missing",
            False,
            "config.json does not say tie_word_embeddings",
            "nothing as long as the default of the config class is false, as llama's is",
            "says false",
        )
    if not s.config.get("torch_dtype") and not s.config.get("dtype"):
        yield Finding(
            "dtype-missing",
            False,
            "config.json does not say torch_dtype",
            "an engine that goes by it takes float32 or its own default",
            "says the type of the weights",
        )
    if s.folder.pickled:
        yield Finding(
            "pickle",
            False,
            f"the weights are a pickle ({s.folder.files[0].name})",
            "engines load it, some only after a flag; pickles can hold code",
            "writes safetensors",
        )


def nulls(s: Subject) -> Iterator[Finding]:
    """null where a config class wants a value."""
    found = null_keys(s.folder.raw)
    if found:
        yield Finding(
            "null",
            not s.folder.speculators,
            f"null in config.json: {listed(found, 6)}",
            "an engine whose transformers checks types stops at a null in a typed field",
            "leaves these keys out, which means the same",
        )


def null_keys(value: Any, where: str = "") -> list[str]:
    """Keys of `value`, at any depth, whose value is null."""
    if isinstance(value, dict):
        return [n for k, v in value.items() for n in null_keys(v, f"{where}.{k}".lstrip("."))]
    return [where] if value is None else []


def flags(s: Subject) -> Iterator[Finding]:
    """Settings that make the drafter another function, which not every engine computes."""
    for flag in NORM_FLAGS:
        deaf = [x for x in s.loadings if flag in x.differently and x.kind is not None]
        if deaf:
            yield Finding(
                flag.replace("_", "-"),
                any(x.engine.current for x in deaf),
                f"{flag} is true, another function than EAGLE-3's",
                f"{titles(deaf)} computes it without: {LITTLE}",
                None,
                "serve it with an engine that computes it, or train with it off",
            )
    if s.folder.speculators and s.config.get("norm_before_residual") is None:
        yield Finding(
            "norm-before-residual-unsaid",
            True,
            "config.json does not say norm_before_residual",
            f"vLLM takes it as true, speculators 0.9.0 as false: with the wrong one {LITTLE}",
            None,
            "write down how it was trained: speculators' trainer has it on unless it is told otherwise",
        )
    eagle = s.config.get("eagle_config")
    if isinstance(eagle, dict) and eagle.get("use_aux_hidden_state") is False and "fc.weight" in s.folder.tensors:
        yield Finding(
            "no-aux",
            True,
            "eagle_config says use_aux_hidden_state false, and fc.weight reads three states",
            f"engines feed it the last state alone: they stop at a shape, or {NOTHING}",
            "sets it to true",
        )
    biases = [k for k in ("attention_bias", "mlp_bias", "bias") if s.config.get(k)]
    if biases and not any(n.endswith(".bias") for n in s.folder.tensors):
        yield Finding(
            "bias-flag",
            True,
            f"{' and '.join(biases)} true, and the file holds no bias",
            f"engines make biases and leave them unfilled, zeros at best: {LITTLE}",
            "sets it to false",
        )
    if s.config.get("hidden_act", "silu") != "silu":
        yield Finding(
            "activation",
            True,
            f"hidden_act is {s.config['hidden_act']!r}",
            "engines compute SwiGLU or stop",
            None,
            "train with silu",
        )


def rope(s: Subject) -> Iterator[Finding]:
    """theta and scaling, in the form of transformers 4 (two keys) and of transformers 5 (one)."""
    theta, inner, scaling = rope_settings(s.config)
    if theta is None and inner is None:
        verifier = s.verifier.config.rope_theta if s.verifier else None
        same = verifier == DEFAULT_THETA and s.verifier is not None and s.verifier.config.rope_scaling is None
        yield Finding(
            "rope-missing",
            False,
            "config.json says nothing of RoPE's theta",
            "every engine takes 10,000"
            + (
                f", the verifier's is {verifier:,.0f}: if it was trained with that, {LITTLE}"
                if verifier and not same
                else ""
            ),
            "writes 10,000 in both forms" if same or verifier is None else None,
            "write rope_theta as it was in training; most trainers take the verifier's",
        )
    elif theta is not None and inner is not None and theta != inner:
        yield Finding(
            "rope-two",
            True,
            f"rope_theta is {theta:,.0f}, rope_parameters says {inner:,.0f}",
            f"transformers 4 and 5, and engines built on them, read different ones: with the wrong one {LITTLE}",
            None,
            "keep the one it was trained with",
        )
    elif theta is None or inner is None:
        lost = "rope_theta" if theta is None else "rope_parameters"
        yield Finding(
            "rope-one-form",
            theta is None and not s.folder.speculators,
            f"{lost} is missing, RoPE's theta stands in the other form only",
            "an engine on transformers 4 takes 10,000 without a word"
            if theta is None
            else "nothing today: transformers 5 reads the old form too",
            "writes it in both forms",
        )
    yield from _yarn(s, scaling or {})
    if s.verifier and (theta or inner) and scaling is None and s.verifier.config.rope_scaling:
        kind = s.verifier.config.rope_scaling.get("rope_type") or s.verifier.config.rope_scaling.get("type")
        yield Finding(
            "rope-scaling",
            False,
            f"no rope_scaling, the verifier has {kind}",
            "right if it was trained without; else drafts get worse with the length of the text",
            None,
            "compare with the settings of the training run",
        )


def _yarn(s: Subject, scaling: dict[str, Any]) -> Iterator[Finding]:
    """YaRN's factor on cos and sin, where DeepSeek's and Kimi's two settings of it stand in a llama-type drafter."""
    kind, settings = scaling.get("rope_type") or scaling.get("type"), ("factor", "mscale", "mscale_all_dim")
    numbers = [scaling.get(key) for key in settings]
    if kind != "yarn" or s.kind == "mla" or not all(isinstance(x, int | float) and x > 0 for x in numbers):
        return
    factor, mscale, all_dim = (float(x) for x in numbers if x is not None)
    meant, taken = yarn_m(factor, mscale) / yarn_m(factor, all_dim), yarn_m(factor, 1)
    deaf = [x for x in s.loadings if x.kind is not None and not x.engine.yarn_mscale]
    if deaf and abs(meant / taken - 1) > 1e-3:
        yield Finding(
            "rope-yarn",
            any(x.engine.current for x in deaf),
            f"YaRN with mscale {mscale:g} and mscale_all_dim {all_dim:g}",
            f"{titles(deaf)} passes over both: RoPE is multiplied by {taken:.3f} in place of {meant:.3f}, attention "
            f"scores are {(taken / meant) ** 2:.2f} times what they were in training",
            None,
            "serve it with an engine that reads them: SGLang 0.5.23 and vLLM do",
        )


def rope_settings(config: dict[str, Any]) -> tuple[float | None, float | None, dict[str, Any] | None]:
    """theta of transformers 4's key, theta of transformers 5's, and the scaling of either, None for plain RoPE."""
    new = config.get("rope_parameters")
    new = new if isinstance(new, dict) else {}
    old = config.get("rope_scaling")
    old = old if isinstance(old, dict) else {}
    scaling = old or {k: v for k, v in new.items() if k != "rope_theta"}
    plain = (scaling.get("rope_type") or scaling.get("type") or "default") == "default"
    thetas = [
        float(t) if isinstance(t, int | float) and not isinstance(t, bool) else None
        for t in (config.get("rope_theta"), new.get("rope_theta"))
    ]
    return thetas[0], thetas[1], None if plain else dict(scaling)


def layers(s: Subject) -> Iterator[Finding]:
    """Which states each engine would feed it."""
    top, inner = told_layers(s.config)
    if not top and not inner and s.trained_layers is None:
        return  # every engine takes the usual ones
    read = [(x, x.layers or s.default_layers) for x in s.loadings if x.kind is not None]
    able = s.trained_layers is not None
    repair = f"writes layers {named(s.trained_layers)} in each engine's unit" if able else None
    todo = "name the HF indices it was trained on with --layers, and it can be repaired"
    n = s.num_layers
    wrong = [(x, ids) for x, ids in read if ids and n is not None and (min(ids) < 0 or max(ids) > n)]
    if hurt := [x for x, _ in wrong if x.engine.current]:
        yield Finding(
            "layer-range",
            True,
            f"{titles(hurt)} reads layers {named(wrong[0][1])}, the verifier has {n}",
            f"{titles(hurt)} stops, or hands over fewer states than fc reads",
            repair,
            todo,
        )
    elif odd := next((i for i in (top, inner) if i and len(set(i)) != 3), None):
        yield Finding(
            "layer-ids",
            True,
            f"{LAYER_KEY} is {list(odd)}: three different layers are read",
            "engines stop at the shape of fc, or feed one state twice",
            repair,
            todo,
        )
    elif len({*([s.trained_layers] if able else []), *(ids for _, ids in read)}) > 1:
        yield _layer_unit(s, read, repair)


def _layer_unit(s: Subject, read: list[tuple[Loading, tuple[int, ...] | None]], repair: str | None) -> Finding:
    top, inner = told_layers(s.config)
    each: dict[str, list[Loading]] = {}
    for x, ids in read:
        each.setdefault(named(ids), []).append(x)
    said = "; ".join(f"{titles(loadings)} feeds layers {ids}" for ids, loadings in each.items())
    today = {ids for x, ids in read if x.engine.current}
    agreed = len({*today, *([s.trained_layers] if s.trained_layers else [])}) == 1
    # With one list and no verifier, what the engine without a list takes may be the same.
    unsure = s.family is None and not (top and inner) and s.trained_layers is None
    todo = "name the HF indices it was trained on with --layers, and both lists can be written"
    if agreed:
        repair, todo = None, "serve it with a newer release: no list means the same to all of them"
    elif unsure:
        todo = "name --verifier-path: the usual layers and SGLang's unit depend on it"
    elif repair is None and not (top and inner):  # each key has a unit of its own, so one list says which layers
        repair = f"writes layers {named(meant_layers(s))} in each engine's unit"
    if top and inner:
        where = f"layer ids {list(top)} at the top of config.json and {list(inner)} in eagle_config"
    elif top or inner:
        where = f"layer ids {list(top or inner)} stand {'at the top of config.json' if top else 'in eagle_config'} only"
    else:
        where = "no layer ids in config.json"
    sees = f"{said}: with layers it was not trained on it accepts less, no warning"  # one off: 1 in 15 drafts
    return Finding("layer-unit", not unsure and not agreed, where, sees, repair, todo)


def named(ids: tuple[int, ...] | None) -> str:
    """2, 15, 27."""
    return ", ".join(map(str, ids)) if ids else "2, n//2, n-3"


def meant_layers(s: Subject) -> tuple[int, ...] | None:
    """HF indices that one list alone means, in the unit of its key; None for the usual ones."""
    top, inner = told_layers(s.config)
    if top:
        return top
    return read_by_sglang(inner, s.family or "llama", s.num_layers) if inner else None
