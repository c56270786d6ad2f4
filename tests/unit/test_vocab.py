"""The draft vocabulary: what is chosen, what is written, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.prepare import prepare, read_prepared
from eyas.verifier import Verifier
from eyas.vocab import DraftVocab, build, choose, count_tokens, load


def counts(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def test_the_most_frequent_trained_tokens_are_taken() -> None:
    vocab = choose(counts(5, 0, 9, 1, 7, 2), 3)
    assert vocab.targets.tolist() == [0, 2, 4]
    assert vocab.d2t.tolist() == [0, 1, 2]
    assert vocab.t2d.tolist() == [True, False, True, False, True, False]
    assert (vocab.d2t.dtype, vocab.t2d.dtype) == (np.int64, np.bool_)


def test_of_equally_frequent_tokens_the_lower_id_is_taken() -> None:
    assert choose(counts(1, 3, 3, 3, 9), 3, counts(0, 0, 9, 9, 0)).targets.tolist() == [1, 2, 4]


def test_more_than_were_trained_on_is_filled_from_the_prompts_then_from_the_lowest_ids() -> None:
    trained, prompts = counts(0, 0, 0, 4, 0, 0), counts(0, 0, 0, 0, 2, 8)
    assert choose(trained, 2, prompts).targets.tolist() == [3, 5]
    assert choose(trained, 3, prompts).targets.tolist() == [3, 4, 5]
    assert choose(trained, 5, prompts).targets.tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("size", [6, 7, 10**9])
def test_a_size_of_the_vocabulary_or_more_is_the_whole_of_it(size: int) -> None:
    vocab = choose(counts(0, 0, 0, 4, 0, 0), size)
    assert vocab.d2t.tolist() == [0] * 6
    assert vocab.t2d.all()


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(EyasError, match="0 tokens"):
        choose(counts(1, 2), 0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 60))
def test_every_choice_is_valid_and_no_other_covers_more(numbers: list[int], size: int) -> None:
    trained = counts(*numbers)
    vocab = choose(trained, size)
    assert vocab.size == min(size, len(numbers)) == vocab.t2d.sum()
    assert (np.diff(vocab.targets) > 0).all()
    assert np.array_equal(np.flatnonzero(vocab.t2d), vocab.targets)
    best = sum(sorted(numbers, reverse=True)[:size])
    assert vocab.coverage(trained) == pytest.approx(best / max(sum(numbers), 1))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    vocab = DraftVocab(*_arrays(choose(counts(5, 0, 9, 1), 2)), "org/name", "f" * 32, 0.93)
    vocab.save(tmp_path / "v")
    found = load(tmp_path / "v", 4, "f" * 32)
    assert found.d2t.tolist() == vocab.d2t.tolist() and found.t2d.tolist() == vocab.t2d.tolist()
    assert (found.verifier, found.fingerprint, found.covered) == ("org/name", "f" * 32, 0.93)
    about = json.loads((tmp_path / "v" / "vocab.json").read_text())
    assert (about["vocab_size"], about["size"], about["coverage"]) == (4, 2, 0.93)
    assert sorted(p.name for p in (tmp_path / "v").iterdir()) == ["d2t.npy", "t2d.npy", "vocab.json"]


def _arrays(vocab: DraftVocab) -> tuple[Any, Any]:
    return vocab.d2t, vocab.t2d


def put(folder: Path, d2t: Any, t2d: Any, kind: str = "npy") -> Path:
    folder.mkdir(exist_ok=True)
    for name, value in (("d2t", d2t), ("t2d", t2d)):
        if kind == "npy":
            np.save(folder / f"{name}.npy", np.asarray(value))
        else:
            torch.save(torch.as_tensor(value), folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("kind", ["npy", "pt"])
def test_other_tools_files_are_read(tmp_path: Path, kind: str) -> None:
    found = load(put(tmp_path / "v", [1, 1, 3], [False, True, True, False, False, True], kind), 6)
    assert found.targets.tolist() == [1, 2, 5]


def test_t2d_of_zeros_and_ones_is_read(tmp_path: Path) -> None:
    assert load(put(tmp_path / "v", [1, 1], [0, 1, 1, 0])).t2d.tolist() == [False, True, True, False]


def test_absolute_ids_are_converted_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    found = load(put(tmp_path / "v", [1, 2, 5], [False, True, True, False, False, True]), say=said.append)
    assert found.d2t.tolist() == [1, 1, 3]
    assert len(said) == 1 and "absolute ids" in said[0]


@pytest.mark.parametrize(
    ("d2t", "t2d", "match"),
    [
        ([1, 1], [True, True, False, False], "d2t and t2d disagree"),
        ([1, 1], [False, True, True, True], "d2t names 2 tokens, t2d marks 3"),
        ([0, 5], [True, True, False, False], r"d2t\[1\] = 5 leads to token 6, outside the vocabulary of 4"),
        ([-1, 0], [True, True, False, False], "outside the vocabulary"),
        ([2, 1], [False, False, True, False], "they must increase"),
        ([2, 3], [True, True, False, False], "absolute ids, but t2d marks other"),
        ([[0, 1]], [True, True, False, False], "whole numbers"),
        ([0.0, 0.0], [True, True, False, False], "whole numbers"),
        ([0, 0], [1, 3, 0, 0], "t2d must be booleans"),
        ([0, 0], [True, True, False], "t2d is for 3 tokens, the verifier has 4"),
    ],
)
def test_a_vocabulary_that_is_wrong_is_refused(tmp_path: Path, d2t: Any, t2d: Any, match: str) -> None:
    with pytest.raises(EyasError, match=match):
        load(put(tmp_path / "v", d2t, t2d), 4)


def test_missing_torn_and_foreign_vocabularies_are_refused(tmp_path: Path) -> None:
    folder = put(tmp_path / "v", [0, 0], [True, True, False, False])
    (folder / "vocab.json").write_text(json.dumps({"verifier": "org/other", "fingerprint": "a"}))
    with pytest.raises(EyasError, match="another verifier"):
        load(folder, 4, "b")
    (folder / "d2t.npy").write_bytes(b"\x93NUMPY torn")
    with pytest.raises(EyasError, match=r"d2t\.npy cannot be read"):
        load(folder)
    (folder / "d2t.npy").unlink()
    with pytest.raises(EyasError, match=r"no d2t\.npy or d2t\.pt in"):
        load(folder)
    (folder / "d2t.pt").write_bytes(b"torn")
    with pytest.raises(EyasError, match=r"d2t\.pt cannot be read"):
        load(folder)


@pytest.fixture(scope="module")
def prepared(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    talks = [
        {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "one two " * i}]}
        for i in range(1, 6)
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, talks)))
    prepare(Verifier(tiny_verifier), [folder / "a.jsonl"], folder / "out", max_seq_len=99, show=0, say=lambda _: None)
    return folder / "out"


def test_vocabulary_of_prepared_conversations_is_of_their_answers(
    prepared: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    verifier, said = Verifier(tiny_verifier), list[str]()
    samples = read_prepared(prepared)
    spoken = set(np.concatenate([t[m] for t, m in zip(samples.input_ids, samples.loss_mask, strict=True)]).tolist())
    build(prepared, verifier, len(spoken), tmp_path / "v", said.append)
    found = load(tmp_path / "v", verifier.config.vocab_size, verifier.fingerprint)
    assert set(found.targets.tolist()) == spoken
    assert found.covered == 1.0
    assert "covers 100.00% of" in said[0] and f"({len(spoken)} distinct)" in said[0]
    build(prepared, verifier, len(spoken) + 5, tmp_path / "v", said.append)
    assert f"only {len(spoken)} tokens were trained on: the other 5 fill it up" in said


def test_vocabulary_of_a_store_is_that_of_its_tokens(prepared: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    samples = read_prepared(prepared)
    store = SimpleNamespace(ids=samples.ids, tokens=lambda i: (samples.input_ids[i], samples.loss_mask[i]))
    verifier = Verifier(tiny_verifier)
    one = build(store, verifier, 20, tmp_path / "a", lambda _: None)
    two = build(samples, verifier, 20, tmp_path / "b", lambda _: None)
    assert one.d2t.tolist() == two.d2t.tolist()


def test_prepared_samples_beside_states_are_chosen_from_and_that_is_said(
    prepared: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    both = shutil.copytree(prepared, tmp_path / "both")
    build(both, Verifier(tiny_verifier), 20, tmp_path / "v", said.append)
    assert not any("prepared samples" in line for line in said)
    said.clear()
    (both / "manifest.json").write_text("{}")
    build(both, Verifier(tiny_verifier), 20, tmp_path / "v", said.append)
    assert said[0] == f"{both} holds prepared samples and states: the vocabulary is chosen from the prepared samples"


def test_tokens_of_another_verifier_are_refused(prepared: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    samples = read_prepared(prepared)
    with pytest.raises(EyasError, match="the verifier knows 3"):
        count_tokens(samples, 3)
    samples.manifest["verifier"]["fingerprint"] = "other"
    with pytest.raises(EyasError, match="prepare them again"):
        build(samples, Verifier(tiny_verifier), 20, tmp_path / "v", lambda _: None)
    silent = SimpleNamespace(ids=["a"], tokens=lambda _: (np.arange(4, dtype=np.int32), np.zeros(4, bool)))
    with pytest.raises(EyasError, match="no trained tokens"):
        build(silent, Verifier(tiny_verifier), 20, tmp_path / "v", lambda _: None)
    assert not (tmp_path / "v").exists()


def test_an_output_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EyasError, match="cannot write the vocabulary"):
        choose(counts(1, 2), 1).save(tmp_path / "file" / "v")
