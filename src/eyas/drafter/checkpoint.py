"""The checkpoint that SGLang and vLLM both load: names, shapes, dtypes and config, both ways, in this one file.

    fc.weight                                     [H, 3 Ht]
    midlayer.self_attn.{q,k,v}_proj.weight        [heads d, 2H]
    midlayer.self_attn.o_proj.weight              [H, n d]    (of MLA: `conventions.ATTENTION`, `mla`)
    midlayer.mlp.{gate,up}_proj.weight            [I, H]
    midlayer.mlp.down_proj.weight                 [H, I]
    midlayer.{hidden_norm,input_layernorm,post_attention_layernorm}.weight, norm.weight   [H]
    lm_head.weight                                [Vd, H]   always: SGLang leaves a missing one random, silently
    d2t                                           [Vd] int64, verifier id = draft id + d2t[draft id]
    t2d                                           [V] bool
    embed_tokens.weight                           [V, H]    on demand: both engines share the verifier's

d2t and t2d are left out when the draft vocabulary is the whole one. `midlayer.*` is the one naming that old and new
SGLang and vLLM all take. What engines do with other folders is in `conventions.py`, speculators' form in
`speculators.py`; any trainer's folder of a drafter that computes this same function is read.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eyas.drafter.conventions import (
    CONTRACT_ARCHITECTURE,
    SGLANG_FIRST_IS_ONE,
    USELESS,
    parameters,
    read_by_sglang,
)
from eyas.drafter.folder import CONFIG, FLOATS, WEIGHTS, DrafterFolder
from eyas.drafter.mla import MlaSizes
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.drafter.speculators import speculators_config, speculators_name
from eyas.errors import EyasError
from eyas.files import refusal, sync_folder
from eyas.verifier import MLA, VerifierConfig
from eyas.vocab import DraftVocab

LAYER_KEY = "eagle_aux_hidden_state_layer_ids"
# Settings of other drafters that make another function than the one computed here.
OTHER_FUNCTION = ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")


def config_json(
    drafter: DrafterConfig, verifier: VerifierConfig, layers: tuple[int, ...], dtype: str
) -> dict[str, Any]:
    """The engines' config.json. layers: HF indices of the three captured states; dtype: "bfloat16" or "float32".

    No value is null: engines' config classes reject a null in a typed field.
    """
    scaling = {k: v for k, v in (drafter.rope_scaling or {}).items() if v is not None}
    rope_type = scaling.get("rope_type") or scaling.pop("type", None) or "default"
    architecture, model_type = CONTRACT_ARCHITECTURE["llama" if drafter.mla is None else "mla"]
    c: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "vocab_size": drafter.vocab_size,
        "draft_vocab_size": drafter.draft_vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": drafter.rms_norm_eps,
        "rope_theta": drafter.rope_theta,
        "rope_parameters": {**scaling, "rope_type": rope_type, "rope_theta": drafter.rope_theta},
        "max_position_embeddings": verifier.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "torch_dtype": dtype,
    }
    if drafter.mla is not None:
        del c["head_dim"]  # which this family's config class makes out of the others
        c |= {
            **asdict(drafter.mla),
            "rope_interleave": True,
            "first_k_dense_replace": 1,
        }  # the one layer has no experts
    if rope_type != "default":
        c["rope_scaling"] = {**scaling, "rope_type": rope_type}
    if drafter.target_hidden_size != drafter.hidden_size:
        c["target_hidden_size"] = drafter.target_hidden_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (value := getattr(verifier, name)) is not None:
            c[name] = value
    if tuple(layers) != verifier.capture_layers():
        c["eagle_aux_hidden_state_layer_ids"] = list(layers)  # vLLM's unit is the HF index
        c["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": sglang_layer_ids(layers, verifier.model_type),
        }
    return c


def sglang_layer_ids(layers: tuple[int, ...], verifier_type: str) -> list[int]:
    """HF indices in the unit that SGLang reads from `eagle_config` for this family of verifiers.

    Raises EyasError for the one list that the family cannot express.
    """
    less_one = [k - 1 for k in layers]
    if verifier_type in SGLANG_FIRST_IS_ONE and less_one[0] != 1:
        if layers[0] == 1:
            raise EyasError(f"SGLang cannot serve layers {list(layers)} of {verifier_type}: start with another than 1")
        return list(layers)
    return less_one


def save_checkpoint(
    folder: Path,
    drafter: Drafter,
    vocab: DraftVocab,
    verifier: VerifierConfig,
    layers: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    with_embedding: bool = False,
    more: dict[str, Any] | None = None,
) -> None:
    """Write `folder` whole or not at all; an older one is replaced.

    more: further files, by name, as JSON values. Raises EyasError when the disk refuses.
    """
    config = config_json(drafter.config, verifier, layers, str(dtype).removeprefix("torch."))
    write_folder(folder, tensors_of(drafter, vocab, dtype, with_embedding), {CONFIG: config, **(more or {})})


def save_speculators(
    folder: Path,
    drafter: Drafter,
    vocab: DraftVocab,
    verifier: VerifierConfig,
    layers: tuple[int, ...],
    verifier_path: str,
    draft_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The same in speculators' form, with the embedding, as `save_checkpoint` does it.

    verifier_path: what `vllm serve FOLDER` is to load beside it; draft_tokens: proposed a round.
    """
    config = config_json(drafter.config, verifier, layers, str(dtype).removeprefix("torch."))
    told = json.loads((verifier.path / CONFIG).read_bytes()).get("architectures") or []
    nested = speculators_config(config, layers, verifier_path, told, draft_tokens)
    tensors = tensors_of(drafter, vocab, dtype, with_embedding=True)
    write_folder(folder, {speculators_name(n): t for n, t in tensors.items()}, {CONFIG: nested})


def tensors_of(drafter: Drafter, vocab: DraftVocab, dtype: torch.dtype, with_embedding: bool) -> dict[str, Tensor]:
    """The tensors of the contract, by name."""
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in drafter.named_parameters()}
    if vocab.size < vocab.vocab_size:
        tensors["d2t"] = torch.from_numpy(vocab.d2t)
        tensors["t2d"] = torch.from_numpy(vocab.t2d)
    if with_embedding:
        tensors["embed_tokens.weight"] = drafter.embedding.to("cpu", dtype).contiguous()
    return tensors


def write_folder(folder: Path, tensors: dict[str, Tensor], files: dict[str, Any]) -> None:
    """Weights, and JSON files by name, as a folder that is whole or not there: a side folder, synced and renamed.

    An older folder is replaced, also behind a link. Raises EyasError when the disk refuses.
    """
    folder = Path(os.path.realpath(folder))
    side, old = (folder.with_name(f".{folder.name}.{os.getpid()}{end}") for end in ("", ".old"))
    try:
        shutil.rmtree(side, ignore_errors=True)
        side.mkdir(parents=True)
        save_file(tensors, side / WEIGHTS, metadata={"format": "pt"})
        for name, value in files.items():
            (side / name).write_text(json.dumps(value, indent=2) + "\n")
        (side / WEIGHTS).chmod((side / CONFIG).stat().st_mode)  # safetensors writes for the owner alone
        for path in (*side.iterdir(), side):
            sync_folder(path)
        if folder.exists():
            folder.rename(old)
            side.rename(folder)
            shutil.rmtree(old)
        else:
            side.rename(folder)
        sync_folder(folder.parent)
    except BaseException as e:  # a Ctrl-C, too
        shutil.rmtree(side, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        if not isinstance(e, (OSError, SafetensorError)):
            raise
        raise EyasError(f"cannot write the checkpoint {folder}: {refusal(e)}") from None


def load_checkpoint(
    folder: Path, verifier: VerifierConfig, embedding: Tensor | None = None
) -> tuple[Drafter, DraftVocab]:
    """A drafter (fp32) and its vocabulary from a checkpoint of ours or of another EAGLE-3 trainer's naming.

    embedding: [V, H], the verifier's, used when the checkpoint has none. Raises EyasError in one line.
    """
    found = DrafterFolder(folder)
    if reason := other_function(found):
        raise EyasError(f"{folder}: {reason}")
    if found.twice:
        raise EyasError(
            f"{folder}: {found.twice[0]} is there twice, under two names or in two files: find out which is the trained"
            " one, and delete the other"
        )
    config = _drafter_config(found, verifier)
    tensors = {name: found.tensor(name) for name in found.tensors if name in known_names(found)}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise EyasError(
                f"{folder}: {found.tensors[name].name} holds NaN or infinity: take another checkpoint of it"
            )
    embedding = tensors.pop("embed_tokens.weight", embedding)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    drafter = Drafter(config, None if embedding is None else embedding.float())
    wanted = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    for name, shape in wanted.items():
        if name not in tensors:
            raise EyasError(f"{folder}: tensor {name} {list(shape)} is missing")
        if tuple(tensors[name].shape) != shape:
            raise EyasError(f"{folder}: {name} is {list(tensors[name].shape)}, its config.json says {list(shape)}")
    drafter.load_state_dict({name: tensors[name].float() for name in wanted}, strict=True)
    return drafter, _vocab(d2t, t2d, config, folder)


def known_names(folder: DrafterFolder) -> tuple[str, ...]:
    """The tensors of the folder that mean something to eyas; what else it may hold is left out."""
    return (*parameters(folder.kind), "embed_tokens.weight", "d2t", "t2d")


def other_function(folder: DrafterFolder) -> str | None:
    """Why the drafter in `folder` is none that eyas computes, in words; None where it is one."""
    if folder.kind == "qwen3":
        return "a drafter with norms on queries and keys, which eyas does not compute"
    if folder.kind == "mla" and folder.config.get("rope_interleave") is False:
        return "rope_interleave false is another function, which eyas does not compute and vLLM neither"
    for flag in OTHER_FUNCTION:
        if folder.config.get(flag):
            return f"{flag} true is another function, which eyas does not compute" + (
                " and SGLang neither" if flag == "norm_before_residual" else ""
            )
    if folder.speculators and folder.config.get("norm_before_residual") is None:
        return f"{CONFIG} does not say norm_before_residual, which readers take for true or for false"
    more = [t.name for n, t in folder.tensors.items() if n not in known_names(folder) and not n.endswith(USELESS)]
    if more:
        return f"{more[0]} is no part of a drafter that eyas computes" + (
            f" ({len(more)} such)" if len(more) > 1 else ""
        )
    wrong = [t for n, t in folder.tensors.items() if n not in ("d2t", "t2d") and t.dtype not in FLOATS]
    if wrong:
        return f"{wrong[0].name} is quantised ({wrong[0].dtype}): eyas reads bf16, fp16 and fp32"
    return None


def checkpoint_layers(folder: Path, verifier: VerifierConfig) -> tuple[int, ...]:
    """HF indices of the states that the checkpoint in `folder` reads: those it names, or the usual ones.

    The list at the top of config.json is in HF indices, the one in `eagle_config` in SGLang's unit. Raises EyasError
    where the two name different layers.
    """
    config = json.loads((folder / CONFIG).read_bytes())
    eagle = config.get("eagle_config")
    top, inner = config.get(LAYER_KEY), eagle.get(LAYER_KEY) if isinstance(eagle, dict) else None
    for ids in (top, inner):
        if ids and not (isinstance(ids, list) and all(type(k) is int for k in ids)):
            raise EyasError(f"{folder}: {LAYER_KEY} in {CONFIG} is no list of whole numbers: {json.dumps(ids)[:60]}")
    meant = read_by_sglang(inner, verifier.model_type, verifier.num_layers) if inner else None
    if top and inner and tuple(top) != meant:
        raise EyasError(
            f"{folder}: {LAYER_KEY} is {list(top)} at the top of {CONFIG} and {list(inner)} in eagle_config, which "
            "are different layers: run `eyas check` on it"
        )
    return tuple(top) if top else meant or verifier.capture_layers()


def _drafter_config(found: DrafterFolder, verifier: VerifierConfig) -> DrafterConfig:
    from eyas.check.settings import right_type, wanted_type

    folder, c = found.path, found.config
    for key, value in c.items():
        wanted = wanted_type(key)
        if wanted and value is not None and not right_type(key, value):
            raise EyasError(f"{folder}/{CONFIG}: {key} is {json.dumps(value)[:60]}, where {wanted} belongs")
    rope = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"}
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        scaling = None
    mla = None
    try:
        if found.kind == "mla":
            mla = MlaSizes(**{name: c[name] for name in MLA})
            c = {**c, "head_dim": mla.head_dim, "num_key_value_heads": c["num_attention_heads"]}
        config = DrafterConfig(
            hidden_size=c["hidden_size"],
            target_hidden_size=c.get("target_hidden_size") or c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            num_heads=c["num_attention_heads"],
            num_kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
            head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            vocab_size=c["vocab_size"],
            draft_vocab_size=c.get("draft_vocab_size") or c["vocab_size"],
            rms_norm_eps=c["rms_norm_eps"],
            rope_theta=float(c.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            rope_scaling=scaling,
            max_position_embeddings=c["max_position_embeddings"],
            mla=mla,
        )
    except KeyError as e:
        raise EyasError(f"{folder}/{CONFIG} does not say {e.args[0]}") from None
    except EyasError as e:
        raise EyasError(f"{folder}/{CONFIG}: {e}") from None
    if config.vocab_size != verifier.vocab_size:
        raise EyasError(
            f"{folder} is a drafter for a vocab_size of {config.vocab_size:,}, "
            f"{verifier.name} has {verifier.vocab_size:,}"
        )
    if config.target_hidden_size != verifier.hidden_size:
        raise EyasError(
            f"{folder} reads states of size {config.target_hidden_size:,}, {verifier.name} has {verifier.hidden_size:,}"
        )
    return config


def _vocab(d2t: Tensor | None, t2d: Tensor | None, config: DrafterConfig, folder: Path) -> DraftVocab:
    V, Vd = config.vocab_size, config.draft_vocab_size
    if d2t is None:
        if Vd != V:
            raise EyasError(
                f"{folder} has a draft vocabulary of {Vd:,} but no d2t: nobody can know which tokens they are"
            )
        return DraftVocab(np.zeros(V, dtype=np.int64), np.ones(V, dtype=bool))
    if d2t.is_floating_point():
        raise EyasError(f"{folder}: d2t was cast to {d2t.dtype} with the weights: `eyas check --fix` can repair it")
    if d2t.ndim != 1 or not len(d2t):
        raise EyasError(f"{folder}: d2t is no list of numbers, its shape is {list(d2t.shape)}")
    offsets = d2t.numpy().astype(np.int64)
    targets = np.arange(len(offsets)) + offsets
    if len(offsets) != Vd or targets.min() < 0 or targets.max() >= V or (np.diff(targets) <= 0).any():
        raise EyasError(f"{folder}: d2t does not name {Vd:,} increasing tokens of {V:,}: is it absolute, not offsets?")
    marked = np.zeros(V, dtype=bool)
    marked[targets] = True
    if t2d is not None and not np.array_equal(t2d.numpy().astype(bool), marked):
        raise EyasError(f"{folder}: d2t and t2d disagree")
    return DraftVocab(offsets, marked)
