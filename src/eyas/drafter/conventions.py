"""What others do with an EAGLE-3 drafter's folder: tables of facts, each with the release it was read from.

Engines differ in the names they take, in what they do with a tensor that is missing or unknown, in the keys of
config.json they read, and in the unit of layer ids. `eyas check` judges by these tables and `drafter/checkpoint.py`
writes by them; nothing else in eyas knows an engine. When an engine changes, a row changes here and nowhere else.

Layer ids. One unit everywhere in eyas: HF index k, the state after k layers. What a list means in an engine depends on
the key it stands under and, in SGLang, on the verifier's family and the release (`Engine.reads`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

# -- the tensors -------------------------------------------------------------------------------------------------------

# The layer's parameters under `midlayer.`, by its kind. llama: the contract's. qwen3: the same with norms on queries
# and keys, which only vLLM computes. mla: DeepSeek's latent attention.
COMMON = (
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "hidden_norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
LLAMA = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
ATTENTION = {
    "llama": LLAMA,
    "qwen3": (*LLAMA, "q_norm.weight", "k_norm.weight"),
    "mla": (
        "q_a_proj.weight",
        "q_a_layernorm.weight",
        "q_b_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
        "o_proj.weight",
    ),
}
MAPS = ("d2t", "t2d")
# In files by habit of a trainer, and of no use to anybody who reads a drafter: dropping them changes nothing.
USELESS = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight", "mask_hidden", "log_vars")
# Wrappers that a training framework puts before every name: DDP, torch.compile, SpecForge's outer model.
WRAPPERS = ("module.", "_orig_mod.", "draft_model.")


def parameters(kind: str) -> tuple[str, ...]:
    """Every parameter of a drafter of `kind` ("llama", "qwen3", "mla"), by its name in the contract."""
    layer = [f"midlayer.self_attn.{n}" for n in ATTENTION[kind]] + [f"midlayer.{n}" for n in COMMON]
    return ("fc.weight", *layer, "norm.weight", "lm_head.weight")


# Tensors that belong to a setting of config.json, and are a part of the drafter where it is true.
FLAG_TENSORS = {
    "input_norm.": ("norm_before_fc",),
    "fc_norm.": ("fc_norm", "use_aux_norm"),
    "aux_norm_": ("fc_norm", "use_aux_norm"),
}


def canonical(name: str) -> str:
    """The contract's name of a tensor that a trainer named in its own way: `model.layers.0.x` -> `midlayer.x`."""
    while stripped := next((name.removeprefix(w) for w in (*WRAPPERS, "model.") if name.startswith(w)), ""):
        name = stripped
    if name == "draft_id_to_target_id":
        return "d2t"
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


# -- the engines -------------------------------------------------------------------------------------------------------

# The first architecture in config.json -> the kind of drafter that is loaded for it.
SGLANG_LLAMA = {"LlamaForCausalLMEagle3": "llama"}
SGLANG_BOTH = {**SGLANG_LLAMA, "Eagle3DeepseekV2ForCausalLM": "mla"}
# With method eagle3 vLLM puts Eagle3 before a name that neither begins nor ends with it, and looks that up.
VLLM = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
VLLM |= {name.removeprefix("Eagle3"): kind for name, kind in VLLM.items() if name.startswith("Eagle3")}
# vLLM takes these for DeepSeek's own multi-token prediction, whatever architecture a drafter names.
VLLM_MTP_TYPES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
# The architecture that the contract gives a kind of drafter, and a model_type that goes with it. Of DeepSeek's types v2
# is the one that vLLM 0.32 both leaves alone and knows for latent attention (tried; transformers reads the same keys).
CONTRACT_ARCHITECTURE = {
    "llama": ("LlamaForCausalLMEagle3", "llama"),
    "qwen3": ("Eagle3Qwen3ForCausalLM", "qwen3"),
    "mla": ("Eagle3DeepseekV2ForCausalLM", "deepseek_v2"),
}

# SGLang reads a list that starts with 1 as k - 1 in these families, and any other list as k.
SGLANG_FIRST_IS_ONE = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"),
    *("kimi_k2", "kimi_k25"),
)
# SGLang reads k - 1, and k where the largest id is the number of layers.
SGLANG_LAST_IS_COUNT = ("gpt_oss",)


@dataclass(frozen=True)
class Engine:
    """One release of an engine, and what it does with a drafter's folder.

    layer_names: the names of the first layer that it takes. model_prefix: kinds for which `model.x` is taken for `x`.
    unknown: what happens to a tensor that it has no place for, "ignored" or "refused". no_head: whose head drafts where
    lm_head is missing, "random" or "verifier". own_embedding: whether embed_tokens of the folder is used. flags: keys
    of config.json that change the function and that it computes. one_layer: whether it refuses more than one.
    map_of_all: whether it takes a d2t beside a whole vocabulary. top_level_ids: whether it reads the list of layers at
    the top of config.json (HF indices); eagle_config_ids: the unit in which it reads the list in `eagle_config`,
    "sglang", "hf", or None for not at all; first_is_one, last_is_count: the families with a unit of their own.
    speculators_form: whether it reads speculators' config.json. mtp_types: values of model_type that it takes for
    another kind of drafter. yarn_mscale: whether YaRN of a llama-type drafter reads mscale and mscale_all_dim.
    """

    name: str
    versions: str
    read_from: str
    current: bool
    architectures: dict[str, str]
    layer_names: tuple[str, ...]
    model_prefix: tuple[str, ...]
    unknown: str
    no_head: str
    own_embedding: bool
    flags: tuple[str, ...]
    one_layer: bool
    map_of_all: bool
    top_level_ids: bool
    eagle_config_ids: str | None
    first_is_one: tuple[str, ...]
    last_is_count: tuple[str, ...]
    speculators_form: bool
    mtp_types: tuple[str, ...] = ()
    yarn_mscale: bool = True

    @property
    def title(self) -> str:
        """Name and versions, as printed."""
        return f"{self.name} {self.versions}"

    def reads(self, ids: Sequence[int], family: str, num_layers: int | None) -> tuple[int, ...]:
        """The HF indices that a list in `eagle_config` means to it, with a verifier of this family."""
        as_is = self.eagle_config_ids == "hf" or (family in self.first_is_one and ids[0] != 1)
        as_is = as_is or (family in self.last_is_count and max(ids) == num_layers)
        return tuple(ids) if as_is else tuple(k + 1 for k in ids)


SGLANG = Engine(
    name="SGLang",
    versions="0.5.23",
    read_from="srt/models/llama_eagle3.py, kimi_k25_eagle3.py, set_eagle3_layers_to_capture of the verifiers' models",
    current=True,
    architectures=SGLANG_BOTH,
    layer_names=("midlayer.", "layers.0."),
    model_prefix=("llama",),
    unknown="ignored",
    no_head="random",
    own_embedding=False,
    flags=("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"),
    one_layer=False,
    map_of_all=True,
    top_level_ids=False,
    eagle_config_ids="sglang",
    first_is_one=SGLANG_FIRST_IS_ONE,
    last_is_count=SGLANG_LAST_IS_COUNT,
    speculators_form=False,
)
VLLM_V2 = Engine(
    name="vLLM",
    versions="0.32 (V2 runner)",
    read_from="model_executor/models/{llama,qwen3,deepseek}_eagle3.py, v1/worker/gpu/spec_decode/eagle, "
    "transformers_utils/configs/speculators",
    current=True,
    architectures=VLLM,
    layer_names=("midlayer.", "layers.0."),
    model_prefix=(),
    unknown="refused",
    no_head="verifier",
    own_embedding=True,
    flags=("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    one_layer=False,
    map_of_all=False,
    top_level_ids=True,
    eagle_config_ids=None,
    first_is_one=(),
    last_is_count=(),
    speculators_form=True,
    mtp_types=VLLM_MTP_TYPES,
)
ENGINES = (
    SGLANG,
    replace(
        SGLANG,
        versions="0.5.14",
        current=False,
        flags=("fc_norm", "use_aux_norm", "norm_output"),
        last_is_count=(),
        yarn_mscale=False,
    ),
    replace(
        SGLANG,
        versions="0.5.5 to 0.5.9",
        current=False,
        architectures=SGLANG_LLAMA,
        layer_names=("midlayer.",),
        flags=(),
        one_layer=True,
        first_is_one=(),
        last_is_count=(),
        yarn_mscale=False,
    ),
    replace(VLLM_V2, versions="0.32 (V1 runner)", read_from="v1/worker/gpu_model_runner.py", eagle_config_ids="hf"),
    VLLM_V2,
)


def read_by_sglang(ids: Sequence[int], family: str, num_layers: int | None) -> tuple[int, ...]:
    """The HF indices that today's SGLang takes the list in `eagle_config` for."""
    return SGLANG.reads(ids, family, num_layers)


# -- who wrote it ------------------------------------------------------------------------------------------------------


def yarn_m(factor: float, mscale: float) -> float:
    """m of DeepSeek's YaRN: 0.1 mscale ln(factor) + 1, and 1 for a factor up to 1."""
    return 0.1 * float(mscale) * max(math.log(factor), 0.0) + 1


def written_by(config: dict[str, Any], pickled: bool) -> str:
    """The trainer that a config.json looks like, in words; a guess that no rule builds on."""
    eagle = config.get("eagle_config")
    if "speculators_model_type" in config:
        return f"speculators {config.get('speculators_version', '')}".strip()
    if isinstance(eagle, dict) and {"use_last_layernorm", "use_input_layernorm_in_first_layer"} & set(eagle):
        return "ModelOpt"
    if "norm_before_residual" in config and "rope_parameters" in config and "mlp_bias" in config:
        return "eyas or in its form"
    if str(config.get("model_type", "")).startswith(("deepseek", "kimi")):
        return "TorchSpec or another trainer of MLA drafters"
    if pickled or config.get("architectures") == ["LlamaForCausalLM"]:
        return "the EAGLE reference or a trainer like it"
    return "SpecForge or a trainer like it"
