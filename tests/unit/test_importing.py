"""Somebody's drafter into a checkpoint folder of ours, and ours into speculators' form and back: not a bit changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import LAYERS, VD, H, V, eagle3, make_verifier, mla, speculators, vocabulary, write
from safetensors.torch import load_file, save_file

from eyas.check.run import check
from eyas.drafter.checkpoint import checkpoint_layers, load_checkpoint
from eyas.errors import EyasError
from eyas.export import export
from eyas.importing import import_drafter
from eyas.verifier import Verifier

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny verifier with a tokenizer file, which fingerprints count. Read it, never write to it."""
    return make_verifier(tmp_path_factory.mktemp("v") / "verifier")


def silent(_text: str) -> None:
    """Say nothing."""


def renamed(prefix: str) -> Any:
    def change(_config: Any, tensors: Any) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[prefix + name.removeprefix("midlayer.")] = tensors.pop(name)

    return change


FORMS: dict[str, tuple[Any, Any, bool]] = {
    "eyas and SpecForge": (eagle3, None, False),
    "layers.0": (eagle3, renamed("layers.0."), False),
    "model.midlayer": (eagle3, renamed("model.midlayer."), False),
    "the EAGLE reference": (eagle3, lambda c, _t: c.update(architectures=["LlamaForCausalLM"]), True),
    "ModelOpt": (
        eagle3,
        lambda c, _t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [k - 1 for k in LAYERS]}),
        False,
    ),
    "speculators": (speculators, None, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_imported_drafter_is_ours_and_its_weights_and_vocabulary_are_theirs(
    verifier: Path, tmp_path: Path, form: str
) -> None:
    make, change, pickle = FORMS[form]
    folder = write(tmp_path / "theirs", *make(verifier), change, pickle)
    good = eagle3(verifier)[1]
    import_drafter(folder, str(verifier), tmp_path / "ours", say=silent)
    about = Verifier(verifier)
    drafter, vocab = load_checkpoint(tmp_path / "ours", about.config, about.embedding())
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, good[name].float()), name
    assert np.array_equal(vocab.targets, vocabulary())
    assert checkpoint_layers(tmp_path / "ours", about.config) == LAYERS
    told = json.loads((tmp_path / "ours" / "eyas.json").read_text())
    assert told["verifier"]["fingerprint"] == about.fingerprint
    assert sorted(load_file(tmp_path / "ours" / "model.safetensors")) == sorted(good)
    assert check(tmp_path / "ours", verifier_path=str(verifier), say=silent) == 0


def test_ours_into_speculators_form_and_back_is_the_same(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier))
    options: dict[str, Any] = {"verifier_path": str(verifier), "dtype": "fp32", "say": silent}
    export(folder, tmp_path / "s", form="speculators", **options)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(verifier.resolve()),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", V, 1)
    assert {config[k] for k in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")} == {False}
    weights = load_file(tmp_path / "s" / "model.safetensors")
    assert weights["layers.0.self_attn.q_proj.weight"].shape == (64, 2 * H) and not any(
        "midlayer" in n for n in weights
    )
    assert weights["embed_tokens.weight"].shape == (V, H) and weights["lm_head.weight"].shape == (VD, H)
    assert check(tmp_path / "s", verifier_path=str(verifier), engine="vllm", say=silent) == 0

    import_drafter(tmp_path / "s", str(verifier), tmp_path / "back", say=silent)
    export(tmp_path / "back", tmp_path / "e", **options)
    assert (tmp_path / "e" / "model.safetensors").read_bytes() != b""
    first, last = load_file(folder / "model.safetensors"), load_file(tmp_path / "e" / "model.safetensors")
    assert sorted(first) == sorted(last) and all(torch.equal(first[n], last[n]) for n in first)


@pytest.mark.parametrize(("name", "value"), [("fc.weight", np.nan), ("midlayer.hidden_norm.weight", -np.inf)])
def test_weights_that_are_no_numbers_are_refused_by_name(
    verifier: Path, tmp_path: Path, name: str, value: float
) -> None:
    config, tensors = eagle3(verifier)
    tensors[name].view(-1)[-1] = value
    folder = write(tmp_path / "theirs", config, tensors)
    for use in (import_drafter, lambda f, v, out, say: export(f, out, verifier_path=v, say=say)):
        with pytest.raises(EyasError, match=f"theirs: {name} holds NaN or infinity: take another checkpoint"):
            use(folder, str(verifier), tmp_path / "ours", say=silent)
    assert not (tmp_path / "ours").exists()


def test_numbers_that_are_left_out_anyway_may_be_none(verifier: Path, tmp_path: Path) -> None:
    config, tensors = eagle3(verifier)
    plain = import_drafter(write(tmp_path / "plain", config, tensors), str(verifier), tmp_path / "a", say=silent)
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.full((8,), torch.nan)
    folder = write(tmp_path / "theirs", config, tensors)
    ours = import_drafter(folder, str(verifier), tmp_path / "b", say=silent)
    assert (ours / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_a_tensor_in_two_shards_is_refused_by_name(verifier: Path, tmp_path: Path) -> None:
    config, tensors = eagle3(verifier)
    folder = write(tmp_path / "theirs", config, tensors)
    (folder / "model.safetensors").unlink()
    shards = {"a.safetensors": tensors, "b.safetensors": {"model.norm.weight": 2 * tensors["norm.weight"]}}
    for name, held in shards.items():
        save_file(held, folder / name)
    weight_map = {tensor: name for name, held in shards.items() for tensor in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(EyasError, match=r"theirs: model.norm.weight is there twice, under two names or in two files"):
        import_drafter(folder, str(verifier), tmp_path / "ours", say=silent)
    assert not (tmp_path / "ours").exists()


def test_an_export_that_may_not_be_written_is_not_told_to_free_space(
    verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier))

    def refuse(path: Path, *_args: Any, **_kw: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write everywhere
    with pytest.raises(EyasError) as caught:
        export(folder, tmp_path / "out", verifier_path=str(verifier), say=silent)
    out = tmp_path / "out"
    do = "name another folder, or change this one's permissions"
    assert str(caught.value) == f"cannot write the checkpoint {out}: Permission denied: {do}"


def test_an_export_of_either_form_replaces_the_other_and_nothing_else(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier))
    for form in ("speculators", "eagle3", "speculators"):
        export(folder, tmp_path / "out", form=form, verifier_path=str(verifier), say=silent)
        names = load_file(tmp_path / "out" / "model.safetensors")
        assert any(n.startswith("layers.0.") for n in names) == (form == "speculators")
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["README.md"], "who may read one may read all"
    with pytest.raises(EyasError, match=r"mine is a file: name a folder"):
        (tmp_path / "mine").touch()
        export(folder, tmp_path / "mine", verifier_path=str(verifier), say=silent)
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(EyasError, match="holds other files"):
        export(folder, tmp_path / "out", verifier_path=str(verifier), say=silent)
    with pytest.raises(EyasError, match="--format gguf: eagle3 or speculators"):
        export(folder, tmp_path / "o", form="gguf", verifier_path=str(verifier), say=silent)


def test_a_narrower_drafter_has_no_speculators_form(tmp_path: Path) -> None:
    wide = make_verifier(tmp_path / "v", hidden_size=96)
    config, tensors = eagle3(make_verifier(tmp_path / "narrow"))
    config |= {"target_hidden_size": 96}
    tensors |= {"fc.weight": torch.randn(H, 3 * 96), "embed_tokens.weight": torch.randn(V, H)}
    folder = write(tmp_path / "c", config, tensors)
    with pytest.raises(EyasError, match=r"no drafter of width 64 on states of 96: .*--format eagle3"):
        export(folder, tmp_path / "out", form="speculators", verifier_path=str(wide), say=silent)
    assert not (tmp_path / "out").exists()


def test_an_own_embedding_is_kept_and_said(verifier: Path, tmp_path: Path) -> None:
    config, tensors = eagle3(verifier)
    own = torch.randn(V, H)
    folder = write(tmp_path / "c", config, {**tensors, "embed_tokens.weight": own})
    lines: list[str] = []
    import_drafter(folder, str(verifier), tmp_path / "ours", say=lines.append)
    assert "its embedding is its own, which SGLang would replace" in lines[0]
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")["embed_tokens.weight"], own)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (eagle3, lambda c, _t: c.update(norm_before_residual=True), "norm_before_residual true is another function"),
        (speculators, lambda c, _t: c.update(norm_output=True), "norm_output true is another function"),
        (speculators, lambda c, _t: c.pop("norm_before_residual"), "does not say norm_before_residual"),
        (mla, lambda c, _t: c.pop("kv_lora_rank"), "does not say kv_lora_rank"),
        (
            eagle3,
            lambda _c, t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}),
            "norms on queries and keys, which eyas does not compute",
        ),
        (eagle3, lambda _c, t: t.update({"fc.bias": torch.ones(H)}), "fc.bias is no part of a drafter"),
        (eagle3, lambda _c, t: t.pop("lm_head.weight"), r"tensor lm_head\.weight \[40, 64\] is missing"),
        (eagle3, lambda _c, t: t.update(d2t=t["d2t"].bfloat16()), "d2t was cast to .*eyas check --fix"),
        (eagle3, lambda _c, t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), r"fc\.weight is quantised"),
        (
            eagle3,
            lambda c, _t: c.update(
                eagle_aux_hidden_state_layer_ids=[0, 2, 5], eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
            ),
            "are different layers: run `eyas check`",
        ),
        (eagle3, lambda c, _t: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), "reads layers 2, 4, 9 of 8"),
    ],
)
def test_a_drafter_that_eyas_cannot_use_is_one_line_and_nothing_is_written(
    verifier: Path, tmp_path: Path, make: Any, change: Any, message: str
) -> None:
    folder = write(tmp_path / "c", *make(verifier), change)
    with pytest.raises(EyasError, match=message) as error:
        import_drafter(folder, str(verifier), tmp_path / "ours", say=silent)
    assert "\n" not in str(error.value) and [p.name for p in tmp_path.iterdir()] == ["c"]


def test_layers_can_be_named_where_config_json_is_of_two_minds(verifier: Path, tmp_path: Path) -> None:
    config, tensors = eagle3(verifier)
    config |= {
        "eagle_aux_hidden_state_layer_ids": [0, 2, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
    }
    folder = write(tmp_path / "c", config, tensors)
    import_drafter(folder, str(verifier), tmp_path / "ours", layers=(1, 3, 6), say=silent)
    assert checkpoint_layers(tmp_path / "ours", Verifier(verifier).config) == (1, 3, 6)
    with pytest.raises(EyasError, match="is there already: name a new folder"):
        import_drafter(folder, str(verifier), tmp_path / "ours", say=silent)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", str(H), 'hidden_size is "64", where a whole number'),
        ("num_attention_heads", 0, "num_attention_heads is 0, where"),
        ("rope_parameters", [1], "rope_parameters is .1., where an object"),
        ("eagle_aux_hidden_state_layer_ids", [2, None, 5], "where a list of whole numbers"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": "1,3,4"}, "is no list of whole numbers"),
    ],
)
def test_a_value_of_another_type_is_refused_in_words(
    verifier: Path, tmp_path: Path, key: str, value: Any, said: str
) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier), lambda c, _t: c.update({key: value}))
    with pytest.raises(EyasError, match=said):
        import_drafter(folder, str(verifier), tmp_path / "ours", say=silent)
    assert not (tmp_path / "ours").exists()


def test_a_map_that_is_no_list_is_refused_in_words(verifier: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *eagle3(verifier), lambda _c, t: t.update(d2t=t["d2t"][None]))
    with pytest.raises(EyasError, match=r"d2t is no list of numbers, its shape is \[1, 40\]"):
        import_drafter(folder, str(verifier), tmp_path / "ours", say=silent)
