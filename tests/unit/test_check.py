"""`eyas check`: every known fault is named, with what the user of an engine would see, and repaired where that is no guess."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import (
    LAYERS,
    VD,
    Change,
    Config,
    H,
    Tensors,
    V,
    eagle3,
    make_verifier,
    maps,
    mla,
    speculators,
    vocabulary,
    write,
)  # fmt: skip
from safetensors.torch import load_file, save_file

from eyas.check.engines import NORM_FLAGS
from eyas.check.run import check
from eyas.errors import EyasError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny verifier's folder. Read it, never write to it."""
    return make_verifier(tmp_path_factory.mktemp("v") / "verifier")


def answer(folder: Path, verifier: Path | None = None, **options: Any) -> dict[str, Any]:
    """The JSON of `eyas check`, and the exit code under "exit"."""
    lines: list[str] = []
    code = check(folder, verifier_path=str(verifier) if verifier else None, as_json=True, say=lines.append, **options)
    return {**json.loads("\n".join(lines)), "exit": code}


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# -- nothing wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [True, False])
def test_the_contracts_own_form_is_fine(verifier: Path, tmp_path: Path, beside: bool) -> None:
    found = answer(write(tmp_path / "c", *eagle3(verifier)), verifier if beside else None)
    assert (found["exit"], found["findings"], found["verdict"]) == (0, [], "fine")
    for engine in found["engines"]:
        assert (len(engine["loads"]), engine["random"], engine["refuses"]) == (14, [], None)
        assert engine["ignores"] == ["t2d"]
        assert engine["layers"] == (list(LAYERS) if beside else None)


def test_what_eyas_saves_is_fine(verifier: Path, tmp_path: Path) -> None:
    from eyas.drafter.checkpoint import load_checkpoint, save_checkpoint
    from eyas.verifier import Verifier

    about = Verifier(verifier)
    write(tmp_path / "c", *eagle3(verifier))
    drafter, vocab = load_checkpoint(tmp_path / "c", about.config, about.embedding())
    for i, (layers, options) in enumerate([(LAYERS, {}), ((1, 3, 6), {"with_embedding": True})]):
        save_checkpoint(tmp_path / str(i), drafter, vocab, about.config, layers, **options)
        found = answer(tmp_path / str(i), verifier)
        assert (found["exit"], found["findings"]) == (0, []), found["findings"]
        assert [e["layers"] for e in found["engines"]] == [list(layers)] * len(found["engines"])


def test_an_mla_drafter_is_fine(verifier: Path, tmp_path: Path) -> None:
    found = answer(write(tmp_path / "c", *mla(verifier)), verifier)
    assert (found["exit"], found["attention"], found["findings"]) == (0, "mla", [])


def test_the_pickle_of_the_eagle_reference_is_read_as_data_and_remarked(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier), pickle=True)
    found = answer(folder, verifier)
    assert (found["exit"], [f["key"] for f in found["findings"]]) == (1, ["pickle"])
    assert answer(folder, verifier, fix=tmp_path / "fixed")["exit"] == 0
    original = torch.load(folder / "pytorch_model.bin", weights_only=True)
    fixed = load_file(tmp_path / "fixed" / "model.safetensors")
    assert all(torch.equal(original[n], t) for n, t in fixed.items()) and len(fixed) == len(original)


def test_a_pickle_that_names_code_is_refused_and_not_executed(verifier: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    config, tensors = eagle3(verifier)
    folder = write(tmp_path / "c", config, {**tensors, "x": Evil()}, pickle=True)  # type: ignore[dict-item]
    with pytest.raises(
        EyasError, match=r"pytorch_model\.bin: it names code \(posix\.mkdir\), which eyas does not"
    ) as error:
        answer(folder)
    assert "\n" not in str(error.value) and not (tmp_path / "executed").exists()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")
    with pytest.raises(EyasError, match="no whole file of tensors") as error:
        answer(folder)
    assert "weights_only" not in str(error.value)  # torch advises to execute it


def test_parameters_of_a_pickle_are_tensors_and_sparse_ones_are_refused(verifier: Path, tmp_path: Path) -> None:
    config, weights = eagle3(verifier)
    asked = {n: torch.nn.Parameter(t) if t.is_floating_point() else t for n, t in weights.items()}
    assert answer(write(tmp_path / "c", config, asked, pickle=True), verifier)["exit"] == 1
    for i, value in enumerate((weights["fc.weight"].to_sparse(), weights["fc.weight"].to("meta"))):
        folder = write(tmp_path / str(i), config, {**weights, "fc.weight": value}, pickle=True)
        with pytest.raises(EyasError, match=r"fc\.weight is sparse, or holds no numbers"):
            answer(folder, verifier)


def test_speculators_form_is_for_vllm_and_speculators(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *speculators(verifier))
    found = answer(folder, verifier)
    assert found["exit"] == 1 and {f["key"] for f in found["findings"]} == {"speculators-form", "null"}
    by_name = {e["engine"]: e for e in found["engines"]}
    assert "speculators" in by_name["SGLang"]["refuses"]
    assert (by_name["vLLM"]["refuses"], by_name["vLLM"]["random"], len(by_name["vLLM"]["loads"])) == (None, [], 15)
    assert by_name["vLLM"]["layers"] == list(LAYERS)
    assert {f["key"] for f in answer(folder, verifier, engine="vllm")["findings"]} == {"null"}


def test_weights_in_several_files_are_one_drafter(verifier: Path, tmp_path: Path) -> None:
    config, tensors = eagle3(verifier)
    folder = write(tmp_path / "c", config, tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[:6], names[6:])):
        save_file({n: tensors[n].contiguous() for n in part}, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert answer(folder, verifier)["exit"] == 0
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(EyasError, match=r"model-1\.safetensors, which .*index\.json names, is missing"):
        answer(folder, verifier)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"shape": [H - 1]}, "norm.weight another place than its shape"),
        ({"shape": [-H]}, "no whole safetensors file"),
        ({"shape": [str(H)]}, "no whole safetensors file"),
        ({"dtype": "BF16"}, "norm.weight another place than its shape"),
        ({"dtype": ["F32"]}, "unknown type"),
        ({"data_offsets": [0, 4 * H]}, "another place than its shape"),
        ({"data_offsets": [-4, 4 * H - 4]}, "norm.weight another place than its shape"),
        ({"data_offsets": [0]}, "no whole safetensors file"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    verifier: Path, tmp_path: Path, about: dict[str, Any], said: str
) -> None:
    file = write(tmp_path / "c", *eagle3(verifier)) / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["norm.weight"].update(about)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(EyasError, match=said):
        answer(tmp_path / "c", verifier)


def test_files_that_are_no_checkpoint_are_said_in_one_line(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier))
    good = (folder / "config.json").read_bytes()
    for text in (b"", b"[1]", b"[" * 100_000, b'{"a": "\xe9"}', b"\xef\xbb\xbf" + good):  # engines stop at a BOM, too
        (folder / "config.json").write_bytes(text)
        with pytest.raises(EyasError, match=r"config\.json"):
            answer(folder)
    (folder / "config.json").write_bytes(good)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(EyasError, match="git lfs pull"):
        answer(folder)
    (folder / "model.safetensors").unlink()
    for index in ('{"weight_map": {"fc.weight": 1}}', "[" * 100_000):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(EyasError, match="no index of weights"):
            answer(folder)


# -- the faults --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """How a good drafter is broken, what `check` must say, and what `--fix` must do.

    key: of the finding. sees: part of what the user would see. repaired: "whole": the copy is the good drafter again,
    tensor by tensor; "clean": it checks clean and differs; None: nothing is written. code: of the broken folder.
    """

    name: str
    change: Change
    key: str
    sees: str
    repaired: str | None
    code: int = 2
    beside: bool = True  # the verifier at hand
    form: str = "eagle3"
    family: str = "llama"
    options: tuple[tuple[str, Any], ...] = ()


def rename(old: str, new: str) -> Change:
    def change(_c: Config, t: Tensors) -> None:
        for name in [n for n in t if n.startswith(old) and n not in ("d2t", "t2d")]:
            t[new + name.removeprefix(old)] = t.pop(name)

    return change


def config(**values: Any) -> Change:
    return lambda c, _t: c.update(values)


def yarn(mscale: float, all_dim: float) -> Change:
    scaling = {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
    return config(rope_scaling=scaling, rope_parameters=scaling | {"rope_theta": 50_000.0})


def without(*keys: str) -> Change:
    def change(c: Config, t: Tensors) -> None:
        for key in keys:
            del (t if key in t else c)[key]

    return change


def tensors(**values: Any) -> Change:
    """Tensors replaced by what a function makes of them; `__` stands for a dot."""

    def change(_c: Config, t: Tensors) -> None:
        for key, value in values.items():
            name = key.replace("__", ".")
            t[name] = value(t[name]) if callable(value) else value

    return change


def both(*changes: Change) -> Change:
    return lambda c, t: [change(c, t) for change in changes]


def absolute(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(len(d2t))


def layer_ids(top: list[int] | None, inner: list[int] | None) -> Change:
    def change(c: Config, _t: Tensors) -> None:
        if top is not None:
            c["eagle_aux_hidden_state_layer_ids"] = top
        if inner is not None:
            c["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": inner}

    return change


def full_vocabulary(c: Config, t: Tensors) -> None:
    c["draft_vocab_size"] = V
    t["lm_head.weight"] = torch.randn(V, H, generator=torch.Generator().manual_seed(9))
    t["d2t"], t["t2d"] = torch.zeros(V, dtype=torch.int64), torch.ones(V, dtype=torch.bool)


def fresh(w: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(w).normal_(0, 0.02, generator=torch.Generator().manual_seed(5))


def not_clear(w: torch.Tensor) -> torch.Tensor:
    """A head that has nothing to do with the verifier's."""
    return torch.randn(w.shape, generator=torch.Generator().manual_seed(6))


OTHER = maps(vocabulary(1))
SHUFFLED = torch.randperm(VD, generator=torch.Generator().manual_seed(4))
SECOND = {"layers.1.mlp.up_proj.weight": torch.ones(48, H), "layers.1.self_attn.q_proj.weight": torch.ones(64, H)}

FAULTS = [
    Fault("no head", without("lm_head.weight"), "head-missing", "SGLang leaves it random: accept length 1.00, no warning", "clean"),
    Fault("no head, no verifier", without("lm_head.weight"), "head-missing", "leaves it random", None, beside=False),
    Fault("layers.0 for an old SGLang", rename("midlayer.", "layers.0."), "names", "SGLang 0.5.5 to 0.5.9 passes over them and drafts with random ones: accept length 1.00", "whole", code=1),
    Fault("model. before every name", rename("", "model."), "names", "vLLM stops at loading", "whole"),
    Fault("names of a DDP wrapper", rename("", "module."), "names", "SGLang passes over them", "whole"),
    Fault("names of a compiled drafter", rename("", "_orig_mod."), "names", "accept length 1.00", "whole"),
    Fault("LlamaForCausalLM", config(architectures=["LlamaForCausalLM"]), "architecture", "SGLang stops: LlamaForCausalLM is no drafter", "whole"),
    Fault("no architecture", without("architectures"), "architecture", "config.json names no architecture", "whole"),
    Fault("no model_type", without("model_type"), "model-type", "transformers does not know", "whole"),
    Fault("absolute d2t", tensors(d2t=absolute), "map-absolute", "accept length 1.00, no warning", "whole", beside=False),
    Fault("absolute d2t, no t2d", both(tensors(d2t=absolute), without("t2d")), "map-absolute", "becomes token", "whole"),
    Fault("map of another data set", both(tensors(**OTHER)), "head-rows", "draft other tokens than the head means", "whole"),
    Fault("d2t of another run than t2d", tensors(d2t=OTHER["d2t"]), "map-of-another", "accept length 1.00", "whole"),
    Fault("t2d of another run than d2t", tensors(t2d=OTHER["t2d"]), "map-of-another", "accept length 1.00", "whole"),
    Fault("two maps and nothing to tell", tensors(d2t=OTHER["d2t"], lm_head__weight=not_clear), "map-of-another", "accept length 1.00", None),
    Fault("d2t with a full vocabulary", full_vocabulary, "map-of-all", "vLLM stops at loading: it has no place for d2t", "clean"),
    Fault("d2t that moves tokens of a full vocabulary", both(full_vocabulary, tensors(d2t=lambda d: d + 3)), "map-of-all", "SGLang drafts other tokens", None),
    Fault("map cast to bfloat16", tensors(d2t=lambda d: d.bfloat16()), "map-dtype", "numbers of this type are no index", "whole"),
    Fault("map cast to bfloat16 and rounded, no t2d", both(tensors(d2t=lambda d: (d * 1000).bfloat16()), without("t2d"), config(vocab_size=90_000)), "map-dtype", "drafts wrong tokens", None, beside=False),
    Fault("map as int32", tensors(d2t=lambda d: d.int()), "map-dtype", "nothing: engines convert it", "whole", code=1),
    Fault("no map", without("d2t"), "map-missing", "engines take draft id j for token j", "whole"),
    Fault("no maps at all", without("d2t", "t2d"), "map-missing", "accept length 1.00, no warning", None),
    Fault("no t2d", without("t2d"), "t2d-missing", "nothing in an engine", "whole", code=1),
    Fault("map outside the vocabulary", tensors(d2t=lambda d: d + V), "map-range", "index out of range", "whole"),
    Fault("map of another length", tensors(d2t=lambda d: d[:-1]), "map-length", "vLLM stops at loading", "whole"),
    Fault("nulls", config(rope_scaling=None, pad_token_id=None, pretraining_tp=None), "null", "stops at a null in a typed field", "clean"),
    Fault("no rope_theta", without("rope_theta"), "rope-one-form", "transformers 4 takes 10,000 without a word", "whole"),
    Fault("no rope keys", without("rope_theta", "rope_parameters"), "rope-missing", "every engine takes 10,000, the verifier's is 50,000", None, code=1),
    Fault("Kimi's YaRN", yarn(1.0, 1.0), "rope-yarn", "SGLang 0.5.14, 0.5.5 to 0.5.9 passes over both: RoPE is multiplied by 1.416 in place of 1.000, attention scores are 2.00 times", None, code=1),
    Fault("two thetas", config(rope_theta=1e6), "rope-two", "read different ones", None),
    Fault("short positions", config(max_position_embeddings=128), "max-positions", "beyond 128 tokens", "whole"),
    Fault("no positions", without("max_position_embeddings"), "max-positions", "transformers' default", "clean"),
    Fault("ids in eagle_config only", layer_ids(None, [0, 2, 5]), "layer-unit", "vLLM 0.32 (V1 runner) feeds layers 0, 2, 5", "clean"),
    Fault("ids at the top only", layer_ids([1, 3, 6], None), "layer-unit", "SGLang feeds layers 2, 4, 5", "clean"),
    Fault("ids off by one for a llama", layer_ids([0, 2, 5], [0, 2, 5]), "layer-unit", "vLLM feeds layers 0, 2, 5", None),
    Fault("ids off by one, and the layers known", layer_ids([0, 2, 5], [0, 2, 5]), "layer-unit", "vLLM feeds layers 0, 2, 5", "clean", options=(("layers", (1, 3, 6)),)),
    Fault("ids off by one for gpt_oss", layer_ids([2, 4, 8], [2, 4, 8]), "layer-unit", "SGLang 0.5.14, 0.5.5 to 0.5.9 feeds layers 3, 5, 9", None, code=1, family="gpt_oss"),
    Fault("ids as is for deepseek_v3", layer_ids([3, 4, 6], [2, 3, 5]), "layer-unit", "SGLang 0.5.23, 0.5.14 feeds layers 2, 3, 5", None, family="deepseek_v3"),
    Fault("ids beyond the verifier", layer_ids([2, 4, 9], None), "layer-range", "stops, or hands over fewer states", None),
    Fault("two ids", layer_ids([2, 4], [1, 3]), "layer-ids", "the shape of fc", None),
    Fault("norm_before_residual", config(norm_before_residual=True), "norm-before-residual", "SGLang computes it without", None),
    Fault("speculators' default training", config(norm_before_residual=True, norm_output=True), "norm-output", "SGLang 0.5.5 to 0.5.9 computes it without: accept length near 1", None),
    Fault("no fc", without("fc.weight"), "fc-missing", "leave it random: accept length 1.00", None),
    Fault("fresh fc", tensors(fc__weight=fresh), "fc-untrained", "blind to the verifier's states", None),
    Fault("fc of torch's default start", tensors(fc__weight=lambda w: torch.nn.Linear(w.shape[1], w.shape[0]).weight.detach()), "fc-untrained", "blind", None),
    Fault("fc of zeros", tensors(fc__weight=torch.zeros_like), "all-zero", "accept length 1.00", None),
    Fault("NaN", tensors(midlayer__mlp__up_proj__weight=lambda w: w * float("nan")), "not-finite", "token 0 or noise", None),
    Fault("fc of two states", tensors(fc__weight=lambda w: w[:, : 2 * H]), "fc-width", "shape mismatch", None),
    Fault("a missing projection", without("midlayer.mlp.up_proj.weight"), "tensor-missing", "accept length 1.00", None),
    Fault("shuffled rows of the head", tensors(lm_head__weight=lambda w: w[SHUFFLED]), "head-rows", "draft other tokens", "whole"),
    Fault("another embedding", tensors(embed_tokens__weight=torch.randn(V, H)), "embedding-differs", "puts the verifier's in its place", None),
    Fault("two layers", both(config(num_hidden_layers=2), tensors(**{k.replace(".", "__"): v for k, v in SECOND.items()})), "two-layers", "SGLang 0.5.5 to 0.5.9 stops", None),
    Fault("the verifier's count of layers", config(num_hidden_layers=32), "layer-count", "leave them random", "whole"),
    Fault("tied", config(tie_word_embeddings=True), "tied", "drafts with the embedding in place of lm_head", "whole"),
    Fault("no draft_vocab_size", without("draft_vocab_size"), "draft-vocab-size", "SGLang stops: its config has no such attribute", "whole"),
    Fault("draft_vocab_size null", config(draft_vocab_size=None), "draft-vocab-size", "the verifier's whole head in place of lm_head", "whole"),
    Fault("wrong draft_vocab_size", config(draft_vocab_size=32), "draft-vocab-size", "stop at the shape of lm_head", "whole"),
    Fault("wrong intermediate_size", config(intermediate_size=64), "shape", "shape mismatch", "whole"),
    Fault("no head_dim where it is not H / heads", without("head_dim"), "shape", "shape mismatch", "whole", form="wide heads"),
    Fault("another verifier's vocabulary", config(vocab_size=200), "vocab-size", "accept length 1.00", None),
    Fault("another verifier's width", config(target_hidden_size=32), "hidden-size", "shape mismatch", None),
    Fault("norms on queries", tensors(midlayer__self_attn__q_norm__weight=torch.ones(16)), "other-function", "SGLang passes over them and computes another function", None),
    Fault("dead weight", tensors(midlayer__self_attn__rotary_emb__inv_freq=torch.ones(8)), "useless", "may stop at loading", "whole"),
    Fault("eagle_config without aux states", config(eagle_config={"use_aux_hidden_state": False}), "no-aux", "the last state alone", "clean"),
    Fault("biases announced and not there", config(attention_bias=True), "bias-flag", "leave them unfilled", "whole"),
    Fault("no torch_dtype", without("torch_dtype"), "dtype-missing", "takes float32 or its own default", "whole", code=1),
    Fault("other activation", config(hidden_act="gelu"), "activation", "SwiGLU", None),
    Fault("MLA under llama's name", config(architectures=["LlamaForCausalLMEagle3"]), "architecture", "makes a drafter of the llama kind and leaves it random", "whole", form="mla"),
    Fault("MLA of DeepSeek-V3's type", config(model_type="deepseek_v3"), "model-type", "takes it for DeepSeek's multi-token prediction", "whole", form="mla"),
    Fault("MLA drafter without head", without("lm_head.weight"), "head-missing", "SGLang 0.5.23, 0.5.14 leaves it random", "clean", form="mla"),
    Fault("a size in quotes", config(hidden_size=str(H)), "type", "another value than was meant", "whole"),
    Fault("a size as a fraction", config(vocab_size=float(V)), "type", "engines stop", "whole"),
    Fault("a theta in quotes", both(config(rope_theta="50000"), without("rope_parameters")), "type", "engines stop", "whole"),
    Fault("a size of nothing", config(num_attention_heads=0), "type", "engines stop", None),
    Fault("a flag in quotes", config(tie_word_embeddings="false"), "type", "another value than was meant", None),
    Fault("layer ids that are no list", config(eagle_aux_hidden_state_layer_ids="2,4,5"), "type", "engines stop", None),
    Fault("eps that is no number", config(rms_norm_eps=float("nan")), "type", "engines stop", None),
    Fault("MLA with a size in quotes", config(kv_lora_rank="16"), "type", "engines stop", "whole", form="mla"),
    Fault("fp8 weights without scales", tensors(midlayer__mlp__up_proj__weight=lambda w: w.to(torch.float8_e4m3fn)), "quantised", "without their scales", None),
    Fault("int8 weights with scales", tensors(fc__weight=lambda w: w.to(torch.int8), fc__weight_scale=torch.ones(1)), "quantised", "without their scales", None),
    Fault("a map of NaN", tensors(d2t=lambda d: d * float("nan")), "map-unreadable", "engines stop", "whole"),
    Fault("a map of two dimensions", tensors(d2t=lambda d: d[None]), "map-unreadable", "engines stop", "whole"),
    Fault("speculators without norm_before_residual", without("norm_before_residual"), "norm-before-residual-unsaid", "vLLM takes it as true", None, form="speculators"),
]  # fmt: skip
MAKE: dict[str, Any] = {
    "eagle3": eagle3, "mla": mla, "speculators": speculators, "wide heads": lambda v: eagle3(v, 32)
}  # fmt: skip


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory, verifier: Path) -> dict[str, Path]:
    """The same verifier under other families' names."""
    folder = tmp_path_factory.mktemp("families")
    names = {f.family for f in FAULTS} - {"llama"}
    return {"llama": verifier, **{n: make_verifier(folder / n, model_type=n) for n in names}}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_is_named_with_what_the_user_would_see_and_repaired(
    fault: Fault, families: dict[str, Path], tmp_path: Path
) -> None:
    verifier, beside = families[fault.family], families[fault.family] if fault.beside else None
    good = MAKE[fault.form](verifier)[1]
    folder = write(tmp_path / "broken", *MAKE[fault.form](verifier), fault.change)
    before, options = files(folder), dict(fault.options)
    found = answer(folder, beside, **options)
    named = {f["key"]: f for f in found["findings"]}
    assert fault.key in named, found["findings"]
    assert fault.sees in named[fault.key]["sees"]
    assert (found["exit"], found["code"]) == (fault.code, fault.code), found["findings"]
    assert named[fault.key]["what"] and (named[fault.key]["repair"] or named[fault.key]["todo"])

    if fault.repaired is None:
        with pytest.raises(EyasError, match="nothing was written") as error:
            answer(folder, beside, fix=tmp_path / "fixed", **options)
        assert "\n" not in str(error.value)
        assert [p.name for p in tmp_path.iterdir()] == ["broken"]
    else:
        fixed = answer(folder, beside, fix=tmp_path / "fixed", **options)
        assert (fixed["exit"], fixed["copy"]["findings"]) == (0, [])
        again = answer(tmp_path / "fixed", beside, **options)
        assert (again["exit"], again["findings"]) == (0, [])
        if fault.repaired == "whole":
            copy = load_file(tmp_path / "fixed" / "model.safetensors")
            assert sorted(copy) == sorted(good)
            assert all(torch.equal(copy[n], t) for n, t in good.items())
    assert files(folder) == before


def test_the_head_is_taken_from_the_verifier_row_by_row(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier), without("lm_head.weight"))
    answer(folder, verifier, fix=tmp_path / "fixed")
    head = load_file(verifier / "model.safetensors")["lm_head.weight"]
    fixed = load_file(tmp_path / "fixed" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(fixed, head[torch.from_numpy(vocabulary())])


@pytest.mark.parametrize(
    ("family", "top", "inner", "layers"),
    [
        ("llama", None, [0, 2, 5], [1, 3, 6]),
        ("llama", [1, 3, 6], None, [1, 3, 6]),
        ("qwen3", None, [1, 3, 4], [2, 4, 5]),  # the usual ones: no ids are written
        ("gpt_oss", None, [2, 4, 8], [2, 4, 8]),  # the largest is the count of layers: read as is
        ("deepseek_v3", None, [1, 3, 5], [2, 4, 6]),  # begins with 1: read as k - 1
    ],
)
def test_one_list_of_layers_is_written_in_each_engines_unit(
    tmp_path: Path, family: str, top: Any, inner: Any, layers: list[int]
) -> None:
    about = make_verifier(tmp_path / "v", model_type=family)
    folder = write(tmp_path / "c", *eagle3(about), layer_ids(top, inner))
    fixed = answer(folder, about, fix=tmp_path / "fixed")
    assert fixed["exit"] == 0
    again = answer(tmp_path / "fixed", about)
    assert [e["layers"] for e in again["engines"]] == [layers] * len(again["engines"])
    written = json.loads((tmp_path / "fixed" / "config.json").read_text())
    assert ("eagle_config" in written) == (layers != list(LAYERS))


def test_layers_that_a_family_cannot_say_to_every_release_are_remarked(tmp_path: Path) -> None:
    about = make_verifier(tmp_path / "v", model_type="deepseek_v3")
    folder = write(tmp_path / "c", *eagle3(about), layer_ids(None, [3, 4, 6]))
    fixed = answer(folder, about, fix=tmp_path / "fixed")
    assert fixed["exit"] == 1
    read = {e["versions"]: e["layers"] for e in answer(tmp_path / "fixed", about)["engines"]}
    assert read["0.5.23"] == read["0.5.14"] == read["0.32 (V1 runner)"] == read["0.32 (V2 runner)"] == [3, 4, 6]
    assert read["0.5.5 to 0.5.9"] == [4, 5, 7]
    (left,) = fixed["copy"]["findings"]
    assert left["key"] == "layer-unit" and "newer release" in left["todo"] and not left["broken"]


def test_speculators_trained_by_default_is_served_by_vllm_alone(verifier: Path, tmp_path: Path) -> None:
    """speculators 0.9.0 trains with all three norms on, and writes a tensor for one of them."""
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    form, weights = speculators(verifier, **flags)
    folder = write(tmp_path / "c", form, {**weights, "input_norm.weight": torch.ones(3 * H)})
    found = answer(folder, verifier, engine="vllm")
    assert {f["key"] for f in found["findings"]} == {"null"} and found["exit"] == 1
    assert all("input_norm.weight" in e["loads"] for e in found["engines"])


def test_several_faults_are_repaired_together(verifier: Path, tmp_path: Path) -> None:
    change = both(
        rename("midlayer.", "model.layers.0."), tensors(d2t=absolute), config(architectures=["LlamaForCausalLM"]),
        without("rope_theta"), config(rope_scaling=None, max_position_embeddings=64), without("lm_head.weight"),
    )  # fmt: skip
    folder = write(tmp_path / "c", *eagle3(verifier), change, pickle=True)
    found = answer(folder, verifier)
    keys = {f["key"] for f in found["findings"]}
    assert keys >= {
        "names",
        "map-absolute",
        "architecture",
        "rope-one-form",
        "null",
        "max-positions",
        "head-missing",
        "pickle",
    }
    fixed = answer(folder, verifier, fix=tmp_path / "fixed")
    assert (fixed["exit"], fixed["copy"]["findings"]) == (0, [])
    assert len(fixed["copy"]["repairs"]) == 8


def test_a_head_from_nothing_says_nothing_of_the_map(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier), tensors(lm_head__weight=not_clear, **OTHER))
    assert answer(folder, verifier)["exit"] == 0


def test_every_finding_is_in_the_docs() -> None:
    root = Path(__file__).parents[2]
    keys = set(NORM_FLAGS)
    for file in (root / "src/eyas/check").glob("*.py"):
        keys |= set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', file.read_text()))
    assert len(keys) > 40
    told = (root / "docs/check.md").read_text()
    assert [k for k in sorted(keys) if f"`{k.replace('_', '-')}`" not in told and k != "use_aux_norm"] == []


# -- the answer in words, and bad input --------------------------------------------------------------------------------


def test_the_words_name_engines_fault_sight_and_remedy(verifier: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = write(tmp_path / "c", *eagle3(verifier), without("lm_head.weight"))
    assert check(folder, verifier_path=str(verifier), say=lines.append) == 2
    assert lines[0].startswith(f"{folder}: EAGLE-3 drafter, llama attention, H 64, 40 of 120 tokens, ")
    assert any(
        "SGLang 0.5.23" in x and "leaves random lm_head.weight" in x and "feeds layers 2, 4, 5" in x for x in lines
    )
    at = lines.index("BROKEN  head-missing: lm_head.weight is missing")
    assert "accept length 1.00, no warning" in lines[at + 1]
    assert lines[at + 2] == "        --fix takes the verifier's rows of the draft vocabulary"
    assert lines[-1] == "broken (1 faults, 0 remarks)"


def test_one_engine_can_be_asked_for(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier), config(norm_before_residual=True))
    assert answer(folder, verifier, engine="sglang")["exit"] == 2
    assert answer(folder, verifier, engine="vllm")["exit"] == 0
    with pytest.raises(EyasError, match="--engine trt: name sglang or vllm"):
        answer(folder, engine="trt")


JUNK: list[Any] = [None, 0, -1, 3, 1e30, "x", "", [], [1], {}, {"a": None}, True, [2, 4, 5], [None]]


def scramble(rng: np.random.Generator, c: Config, t: Tensors) -> None:
    """A few settings and tensors replaced by something that nobody would write."""
    extra = ["rope_scaling", "eagle_config", "eagle_aux_hidden_state_layer_ids", "norm_output", "dtype", "bias"]
    for _ in range(rng.integers(1, 4)):
        key = str(rng.choice([*sorted(c), *extra]))
        if rng.random() < 0.3:
            c.pop(key, None)
        else:
            c[key] = JUNK[rng.integers(len(JUNK))]
    for _ in range(rng.integers(0, 3)):
        key = str(rng.choice(sorted(t)))
        shape = tuple(int(x) for x in rng.integers(0, 130, rng.integers(0, 4)))
        dtype = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int8, torch.float16][rng.integers(6)]
        if rng.random() < 0.3:
            t.pop(key)
        else:
            t[key] = torch.randn(shape if shape and np.prod(shape) < 50_000 else (3,)).to(dtype)


@pytest.mark.parametrize("form", ["eagle3", "mla", "speculators"])
def test_whatever_stands_in_the_folder_is_judged_or_refused_in_a_line(
    verifier: Path, tmp_path: Path, form: str
) -> None:
    rng = np.random.default_rng(0)
    codes = set()
    for i in range(40):
        folder = write(tmp_path / f"c{i}", *MAKE[form](verifier), lambda c, t: scramble(rng, c, t))
        for options in ({}, {"fix": tmp_path / f"fixed{i}"}):
            try:
                code = answer(folder, verifier if i % 4 else None, **options)["exit"]
                assert code < 2 or not (tmp_path / f"fixed{i}").exists(), "a copy that is still broken"
                codes.add(code)
            except EyasError as e:
                assert "\n" not in str(e)
    assert 2 in codes


def spoil(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "is no drafter checkpoint: config.json is missing"),
        ("config.json", b"{", "cannot be read: config.json"),
        ("config.json", b"[1]", "config.json is no JSON object"),
        ("model.safetensors", None, "is no drafter checkpoint: model.safetensors is missing"),
        ("model.safetensors", b"", "is no whole safetensors file"),
        ("model.safetensors", b"\xff" * 64, "is no whole safetensors file"),
    ],
)
def test_a_folder_that_cannot_be_judged_is_one_line(
    verifier: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier))
    spoil(folder, name, content)
    with pytest.raises(EyasError, match=message) as error:
        answer(folder, verifier, fix=tmp_path / "fixed")
    assert "\n" not in str(error.value) and [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_file_cut_short_is_one_line_wherever_it_is_cut(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier))
    whole = (folder / "model.safetensors").read_bytes()
    for size in (3, 8, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(EyasError, match="cannot be read") as error:
            answer(folder)
        assert "\n" not in str(error.value)


def test_shapes_of_another_layer_are_not_called_repairable(verifier: Path, tmp_path: Path) -> None:
    half = {f"midlayer__self_attn__{n}_proj__weight": (lambda w: w[:, :H]) for n in "qkv"}
    found = answer(write(tmp_path / "c", *eagle3(verifier), tensors(**half)), verifier)
    wrong = [f for f in found["findings"] if f["key"] == "shape"]
    assert len(wrong) == 3 and all(f["repair"] is None and "two drafters" in f["todo"] for f in wrong)


def test_a_folder_of_something_else_is_no_drafter(verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"holds no EAGLE-3 drafter"):
        answer(verifier)
    with pytest.raises(EyasError, match="is no folder"):
        answer(tmp_path / "nowhere")
    with pytest.raises(EyasError, match="is there already: name a new folder"):
        answer(write(tmp_path / "c", *eagle3(verifier), without("t2d")), fix=verifier)


def test_check_without_a_verifier_starts_without_torch(verifier: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = write(tmp_path / "c", *eagle3(verifier))
    program = (
        "import sys; from pathlib import Path; from eyas.check.run import check; "
        f"assert check(Path({str(folder)!r})) == 0; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_number_of_a_map_in_halves_is_kept(verifier: Path, tmp_path: Path) -> None:
    """Offsets below 256 are whole in bfloat16: without t2d the map is repaired to the last token."""
    folder = write(tmp_path / "c", *eagle3(verifier), both(tensors(d2t=lambda d: d.bfloat16()), without("t2d")))
    answer(folder, fix=tmp_path / "fixed")
    fixed = load_file(tmp_path / "fixed" / "model.safetensors")
    assert np.array_equal(fixed["d2t"].numpy() + np.arange(VD), vocabulary())
