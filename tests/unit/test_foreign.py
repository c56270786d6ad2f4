"""The founding story's files are read in place, checked against the verifier, and never executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.errors import EyasError
from eyas.store.agreement import agreement, norm_side
from eyas.store.foreign import founding, index
from eyas.store.foreign.index import KEPT_NAME
from eyas.store.reader import open_source
from eyas.verifier import FinalNorm, Verifier

COUNT = 12  # of the fixture on_policy


def save(
    folder: Path, samples: list[dict[str, Any]], side: str = "before", dtype: torch.dtype = torch.bfloat16
) -> Path:
    folder.mkdir(exist_ok=True)
    for i, s in enumerate(samples):
        states = [h.to(dtype) for h in s[side]]
        content = {"input_ids": s["input_ids"], "loss_mask": s["loss_mask"], "hidden_states": states}
        torch.save(content, folder / f"data_{i}.pt")
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_founding_files_are_read_in_place(tmp_path: Path, on_policy: list[Any], dtype: torch.dtype) -> None:
    source = open_source(save(tmp_path / "d", on_policy, dtype=dtype))
    assert source.ids == [f"data_{i}.pt" for i in range(COUNT)]  # 2 before 10
    assert source.skipped == []
    assert source.manifest.norm_side == "unknown"
    for i, s in enumerate(on_policy):
        ids, mask = source.tokens(i)
        assert ids.dtype == np.int32
        assert ids.tolist() == s["input_ids"].tolist()
        assert mask.tolist() == s["loss_mask"].bool().tolist()
        assert (source.lengths[i], source.trained[i]) == (25 + i, 20)
        expected = torch.stack([h.to(dtype).to(torch.bfloat16) for h in s["before"]])
        assert torch.equal(source.states(i), expected)
        assert torch.equal(source.states(i, 3, 9, layers=source.manifest.layers[1:3]), expected[1:3, 3:9])
        assert source.nbytes(i) == 4 * (25 + i) * 64 * dtype.itemsize


def test_a_leading_one_in_the_shapes_is_taken_off(tmp_path: Path, on_policy: list[Any]) -> None:
    s = on_policy[0]
    content = {
        "input_ids": s["input_ids"][None],
        "loss_mask": s["loss_mask"][None],
        "hidden_states": [h[None] for h in s["before"]],
    }
    torch.save(content, tmp_path / "data_0.pt")
    source = open_source(tmp_path)
    assert source.tokens(0)[0].tolist() == s["input_ids"].tolist()
    assert torch.equal(source.states(0, 2, 4), torch.stack(s["before"])[:, 2:4].to(torch.bfloat16))


@pytest.mark.parametrize("side", ["before", "after"])
def test_the_norm_side_is_found_by_agreement(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path, side: str
) -> None:
    source = open_source(save(tmp_path / "d", on_policy, side), Verifier(tiny_verifier).config)
    assert source.manifest.norm_side == side
    assert source.manifest.layers == (2, 4, 5, 8)
    assert source.manifest.layer_unit == "hf"


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_norm_of_equal_weights_is_told_by_its_root_mean_square(side: str) -> None:
    rng = torch.Generator().manual_seed(0)
    head, norm = torch.randn(50, 32, generator=rng), FinalNorm(torch.ones(32), 1e-6, False)
    states = 7 * torch.randn(400, 32, generator=rng)
    states = states if side == "before" else norm(states)
    targets = (states @ head.T).argmax(dim=1)
    assert norm_side(states.to(torch.bfloat16), targets, head, norm)[0] == side


def test_agreement_counts_the_positions_whose_target_is_first() -> None:
    head = torch.eye(4)
    states = torch.tensor([[1.0, 0, 0, 0], [0, 2, 1, 0], [0, 0, 3, 1], [0, 0, 1, 4]])
    assert agreement(states, torch.tensor([0, 1, 3, 3]), head) == 0.75
    assert agreement(states, torch.tensor([0, 1, 3, 3]), head, lambda h: h.flip(1)) == 0.0
    assert agreement(states[:0], torch.tensor([]), head) == 0.0


def test_states_of_another_verifier_are_refused(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    rolled = [{**s, "before": [h.roll(1, dims=1) for h in s["before"]]} for s in on_policy]
    with pytest.raises(EyasError, match="does not hold states of") as caught:
        open_source(save(tmp_path / "d", rolled), Verifier(tiny_verifier).config)
    assert "\n" not in str(caught.value)


def test_states_of_another_width_are_refused(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    narrow = [{**s, "before": [h[:, :32] for h in s["before"]]} for s in on_policy]
    with pytest.raises(EyasError, match=r"states are 32 wide, but .* has hidden size 64"):
        open_source(save(tmp_path / "d", narrow), Verifier(tiny_verifier).config)


def test_broken_files_are_left_out_by_name(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    folder = save(tmp_path / "d", on_policy)
    good = torch.load(folder / "data_3.pt", weights_only=True)

    def put(name: str, **changes: Any) -> None:
        torch.save({k: v for k, v in {**good, **changes}.items() if v is not None}, folder / name)

    put("data_20.pt", loss_mask=None)
    put("data_21.pt", loss_mask=good["loss_mask"][:-1])
    put("data_22.pt", hidden_states=[h[:-1] for h in good["hidden_states"]])
    put("data_23.pt", hidden_states=good["hidden_states"][:3])
    put("data_24.pt", loss_mask=torch.zeros_like(good["loss_mask"]))
    put("data_25.pt", input_ids=torch.full_like(good["input_ids"], 5000))
    torch.save([1, 2], folder / "data_26.pt")
    (folder / "data_27.pt").touch()
    (folder / "data_28.pt").write_bytes((folder / "data_4.pt").read_bytes()[:-2000])
    (folder / "data_29.pt").write_bytes(b"\0" * 5000)
    put("data_30.pt", input_ids=good["input_ids"][:0], loss_mask=good["loss_mask"][:0])
    source = open_source(folder, Verifier(tiny_verifier).config)
    reasons = dict(source.skipped)
    assert source.ids == [f"data_{i}.pt" for i in range(COUNT)]
    assert sorted(reasons) == [f"data_{i}.pt" for i in range(20, 31)]
    for number, part in {
        20: "has no 'loss_mask'",
        21: "loss_mask has 27 values for 28 tokens",
        22: "for 28 tokens",
        23: "must be 4 tensors",
        24: "no trained token",
        25: "token id 5000 is outside",
        26: "not a dictionary",
        27: "is empty",
        28: "cannot be read",
        29: "cannot be read",
        30: "no tokens",
    }.items():
        assert part in reasons[f"data_{number}.pt"]
    assert all("\n" not in reason for reason in reasons.values())


def test_a_folder_of_broken_files_only_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data_0.pt").touch()
    with pytest.raises(EyasError, match=r"none of 1 data_\*\.pt files can be used; data_0\.pt: is empty"):
        open_source(tmp_path)


class Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_malicious_pickle_does_not_run(tmp_path: Path, on_policy: list[Any]) -> None:
    folder = save(tmp_path / "d", on_policy[:1])
    marker = tmp_path / "ran"
    torch.save({"input_ids": Malice(marker)}, folder / "data_1.pt")
    (folder / "data_2.pt").write_bytes(pickle.dumps(Malice(marker)))
    source = open_source(folder)
    assert source.ids == ["data_0.pt"]
    assert [name for name, _ in source.skipped] == ["data_1.pt", "data_2.pt"]
    assert not marker.exists()


def test_the_index_is_built_once_and_again_when_a_file_changes(
    tmp_path: Path, on_policy: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looked = save(tmp_path / "d", on_policy), []
    real = founding.look
    monkeypatch.setattr(founding, "look", lambda path, folder: looked.append(path.name) or real(path, folder))
    first = open_source(folder)
    assert len(looked) == COUNT
    second = open_source(folder)
    assert len(looked) == COUNT
    assert second.ids == first.ids
    assert second.lengths.tolist() == first.lengths.tolist()
    assert second.tokens(5)[0].tolist() == on_policy[5]["input_ids"].tolist()
    torch.save({"input_ids": [1]}, folder / "data_5.pt")
    third = open_source(folder)
    assert len(looked) == 2 * COUNT
    assert [name for name, _ in third.skipped] == ["data_5.pt"]
    assert third.tokens(5)[0].tolist() == on_policy[6]["input_ids"].tolist()


def test_a_long_index_build_says_where_it_is(
    tmp_path: Path, on_policy: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = save(tmp_path / "d", on_policy * 4), list[str]()
    (folder / "data_7.pt").write_bytes(b"torn")
    monkeypatch.setattr(index, "SAY_SECONDS", 0)
    monkeypatch.setattr(index, "_TOGETHER", 5)
    open_source(folder, say=said.append)
    assert said[-1].startswith("index 48/48 samples · ")
    assert said[-1].endswith(" a second · 1 left out · 0 s left")
    again = list[str]()
    open_source(folder, say=again.append)
    assert again == []


def test_a_damaged_index_is_not_believed(tmp_path: Path, on_policy: list[Any]) -> None:
    folder = save(tmp_path / "d", on_policy)
    open_source(folder)
    index = folder / KEPT_NAME
    data = bytearray(index.read_bytes())
    data[-3] ^= 4
    index.write_bytes(data)
    assert open_source(folder).tokens(11)[0].tolist() == on_policy[11]["input_ids"].tolist()
    assert index.read_bytes() != bytes(data)


def test_where_the_folder_cannot_be_written_the_index_is_kept_elsewhere(
    tmp_path: Path, on_policy: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save(tmp_path / "d", on_policy)
    (folder / KEPT_NAME).mkdir()  # what root cannot overwrite either
    open_source(folder)
    assert len(list((tmp_path / "cache" / "eyas").glob("index-*.safetensors"))) == 1
    monkeypatch.setattr(founding, "look", lambda *_: pytest.fail("the kept index was not used"))
    assert open_source(folder).ids[0] == "data_0.pt"


def test_a_file_that_vanishes_later_is_one_line(tmp_path: Path, on_policy: list[Any]) -> None:
    source = open_source(save(tmp_path / "d", on_policy[:2]))
    (tmp_path / "d" / "data_1.pt").unlink()
    with pytest.raises(EyasError, match=r"data_1\.pt is missing"):
        source.states(1)


def test_a_link_to_nothing_costs_itself_and_is_seen_when_it_is_mended(tmp_path: Path, on_policy: list[Any]) -> None:
    save(tmp_path, on_policy, "before")
    (tmp_path / "data_0.pt").rename(tmp_path / "elsewhere")
    (tmp_path / "data_0.pt").symlink_to(tmp_path / "not there")
    source = open_source(tmp_path)
    assert source.skipped == [("data_0.pt", "cannot be read (No such file or directory)")]
    assert len(source.ids) == len(on_policy) - 1
    (tmp_path / "elsewhere").rename(tmp_path / "not there")
    assert open_source(tmp_path).skipped == []


def test_a_file_that_could_not_be_opened_is_asked_again(
    tmp_path: Path, on_policy: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, on_policy, "before")
    real = founding.open_saved

    def refused(path: Path) -> Any:
        if path.name == "data_3.pt":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(founding, "open_saved", refused)
    assert open_source(tmp_path).skipped == [("data_3.pt", "cannot be opened (Permission denied)")]
    assert not (tmp_path / KEPT_NAME).exists()
    monkeypatch.setattr(founding, "open_saved", real)  # the permission is given: neither size nor time has changed
    assert open_source(tmp_path).skipped == []
    assert (tmp_path / KEPT_NAME).exists()
