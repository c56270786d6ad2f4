"""torch.save's files are understood without running anything of them, and everything unusual is refused by name."""

from __future__ import annotations

import collections
import gzip
import io
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.store.foreign.torchzip import ALLOWED, ITEMSIZE, Saved, Stream, Unreadable, open_saved, parse

RNG = torch.Generator().manual_seed(0)
DTYPES = [getattr(torch, name) for name in ITEMSIZE]


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=RNG) * 100).to(dtype)


def read(path: Path, saved: Saved) -> torch.Tensor:
    """The tensor at the place that was found for it."""
    last = sum((n - 1) * step for n, step in zip(saved.shape, saved.stride, strict=True))
    count = (last + 1) * ITEMSIZE[saved.dtype] if 0 not in saved.shape else 0
    with path.open("rb") as file:
        file.seek(saved.offset)
        raw = torch.frombuffer(bytearray(file.read(count) or b"\0" * 8), dtype=torch.uint8)
    flat = raw.view(getattr(torch, saved.dtype))
    return flat.as_strided(saved.shape, saved.stride)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(t: torch.Tensor) -> bytes:
        return bytes(t.contiguous().reshape(-1).view(torch.uint8))

    return a.shape == b.shape and a.dtype == b.dtype and raw(a) == raw(b)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_protocol_is_found_where_torch_put_it(
    tmp_path: Path, dtype: torch.dtype, protocol: int
) -> None:
    path = tmp_path / "a.pt"
    content = {"a": tensor(dtype, 5, 7), "b": [tensor(dtype, 1, 3, 4), tensor(dtype, 2)], "n": 3, "t": "text"}
    torch.save(content, path, pickle_protocol=protocol)
    found = open_saved(path)
    assert same(read(path, found["a"]), content["a"])
    assert all(same(read(path, s), t) for s, t in zip(found["b"], content["b"], strict=True))
    assert (found["n"], found["t"]) == (3, "text")


def test_views_of_one_storage_keep_their_own_places(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.pt", tensor(torch.bfloat16, 4, 6, 8)
    views = {"layer": whole[2], "rows": whole[1, 2:5], "column": whole[:, :, 3], "across": whole[0].T, "all": whole}
    torch.save(views, path)
    found = open_saved(path)
    for name, view in views.items():
        assert same(read(path, found[name]), view)
    assert found["rows"].rows() == (3, 8, 16)
    assert found["layer"].rows() == (6, 8, 16)
    with pytest.raises(Unreadable, match="row by row"):
        found["across"].rows()


def test_random_dictionaries_are_read_as_they_were_saved(tmp_path: Path) -> None:
    rng = random.Random(0)
    for case in range(50):
        path = tmp_path / f"{case}.pt"
        content: Any = {}
        for _ in range(rng.randint(0, 6)):
            value: Any = rng.choice(
                [
                    tensor(rng.choice(DTYPES), *(rng.randint(0, 9) for _ in range(rng.randint(0, 3)))),
                    [tensor(torch.bfloat16, 2, 3) for _ in range(rng.randint(0, 4))],
                    (1, 2.5, None, True, "é" * rng.randint(0, 300), -(2**40)),
                    {"deeper": tensor(torch.float32, 3)},
                    collections.OrderedDict(),
                ]
            )
            content[f"k{rng.randint(0, 10**6)}"] = value
        torch.save(content, path, pickle_protocol=rng.choice([2, 4]))
        assert_like(path, open_saved(path), content)


def assert_like(path: Path, found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert same(read(path, found), wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_like(path, found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for f, w in zip(found, wanted, strict=True):
            assert_like(path, f, w)
    else:
        assert found == wanted


class Calls:
    """Pickles as a call of `what`."""

    def __init__(self, what: Any, *arguments: Any) -> None:
        self.call = what, arguments

    def __reduce__(self) -> Any:
        return self.call


class WithState:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __setstate__(self, state: Any) -> None:
        Path(state["marker"]).mkdir()


EVIL = [
    lambda marker: Calls(os.mkdir, marker),
    lambda marker: Calls(os.system, f"mkdir {marker}"),
    lambda marker: Calls(eval, f"__import__('os').mkdir({marker!r})"),
    lambda marker: [Calls(Calls, os.mkdir, marker)],
    lambda marker: WithState(marker),
    lambda marker: Calls(torch.load, marker),
    lambda marker: {Calls(os.mkdir, marker): 1},
    lambda marker: collections.OrderedDict([(1, Calls(os.mkdir, marker))]),
]


@pytest.mark.parametrize("make", EVIL)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, make: Any, protocol: int) -> None:
    marker, path = tmp_path / "ran", tmp_path / "a.pt"
    torch.save({"input_ids": make(str(marker))}, path, pickle_protocol=protocol)
    with pytest.raises(Unreadable, match="is refused: its pickle"):
        open_saved(path)
    assert not marker.exists()


# The same by hand, with opcodes that Python's pickler would not write in this place.
BY_HAND = {
    "INST": b"(S'/tmp/eyas-ran'\nios\nmkdir\n.",
    "OBJ": b"(cos\nmkdir\nS'/tmp/eyas-ran'\no.",
    "NEWOBJ": b"\x80\x02cos\nmkdir\n(X\x01\x00\x00\x00at\x81.",
    "EXT1": b"\x80\x02\x82\x01.",
    "BUILD": b"\x80\x02}(X\x01\x00\x00\x00aK\x01ub.",
    "PERSID": b"Pstorage\n.",
    "getattr through a name with dots": b"\x80\x04\x8c\x05torch\x8c\x0bos.mkdir.xy\x93.",
    "names that are no text": b"\x80\x04K\x01K\x02\x93.",
    "a call of something that is no name": b"\x80\x02}(K\x01tR.",
    "a call of a storage class": b"\x80\x02ctorch\nFloatStorage\nK\x05\x85R.",
    "a call of OrderedDict with arguments": b"\x80\x02ccollections\nOrderedDict\n]\x85R.",
}


@pytest.mark.parametrize("data", BY_HAND.values(), ids=BY_HAND)
def test_opcodes_that_a_dictionary_of_tensors_needs_not_are_refused(data: bytes) -> None:
    with pytest.raises(Unreadable, match=r"is refused|cannot be read"):
        parse(data)
    assert not Path("/tmp/eyas-ran").exists()


def test_a_small_pickle_that_unfolds_into_a_large_tree_does_not(tmp_path: Path) -> None:
    level: Any = [torch.zeros(1)]
    for _ in range(4):
        level = [level] * 3000  # 3000^4 leaves, were each place walked
    torch.save({"input_ids": level}, tmp_path / "a.pt")
    assert len(open_saved(tmp_path / "a.pt")["input_ids"]) == 3000


def test_nothing_that_may_be_named_is_imported_or_called() -> None:
    """The allow-list holds text; parsing a name of it gives a pair of strings, whatever torch would make of it."""
    assert all(isinstance(module, str) and isinstance(name, str) for module, name in ALLOWED)
    tree, tensors = parse(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n.")
    assert tuple(tree) == ("torch._utils", "_rebuild_tensor_v2")
    assert tensors == []


def test_every_cut_and_many_flips_of_a_file_are_refused_or_harmless(tmp_path: Path) -> None:
    path, torn = tmp_path / "a.pt", tmp_path / "b.pt"
    content = {"input_ids": torch.arange(9), "hidden_states": [tensor(torch.bfloat16, 9, 4) for _ in range(4)]}
    torch.save(content, path)
    data = path.read_bytes()
    for stop in range(0, len(data), 7):
        torn.write_bytes(data[:stop])
        with pytest.raises(Unreadable):
            open_saved(torn)
    rng = random.Random(1)
    for _ in range(400):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        torn.write_bytes(flipped)
        try:
            found = open_saved(torn)
        except Unreadable:
            continue
        if isinstance(found, dict):  # what was found lies inside the file
            for saved in [s for v in found.values() for s in (v if isinstance(v, list) else [v])]:
                assert not isinstance(saved, Saved) or 0 <= saved.offset <= len(data)


def test_a_tensor_past_its_storage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(8, dtype=torch.int32)}, path)
    whole = bytearray(path.read_bytes())
    at = whole.index(b"K\x08\x85")  # the shape (8,)
    whole[at + 1] = 200
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        assert archive.testzip() is None
    with pytest.raises(Unreadable, match="reaches past its storage"):
        parse(bytes(whole[whole.index(b"\x80\x02") :]))


def test_a_zip_of_something_else_and_an_old_torch_file_are_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    torch.save({"a": 1}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "c.pt").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "d.pt").touch()
    for name, reason in {
        "a": "not one of torch.save",
        "b": "no whole torch zip",
        "c": "no whole torch zip",
        "d": "empty",
    }.items():
        with pytest.raises(Unreadable, match=reason):
            open_saved(tmp_path / f"{name}.pt")


def test_a_compressed_zip_is_not_read_as_if_it_were_plain(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"a": torch.zeros(5000)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with pytest.raises(Unreadable, match="compressed"):
        open_saved(packed)


def test_a_stream_inside_gzip_gives_the_storages_in_order(tmp_path: Path) -> None:
    content = {"a": torch.arange(3000), "b": tensor(torch.bfloat16, 40, 64), "c": tensor(torch.float16, 9)}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(buffer.getvalue(), 1))
    with Stream(path) as stream:
        found = {key: stream.take(nbytes) if key != "1" else b"" for key, nbytes in stream.storages()}
    assert list(found) == ["0", "1", "2"]
    assert np.array_equal(np.frombuffer(found["0"], np.int64), content["a"].numpy())
    assert found["2"] == content["c"].numpy().tobytes()
    assert stream.tree["b"].shape == (40, 64)
    assert stream.tree["b"].key == "1"


def test_a_damaged_stream_is_refused(tmp_path: Path) -> None:
    path, buffer = tmp_path / "a.gz", io.BytesIO()
    torch.save({"a": torch.arange(3000)}, buffer)
    whole = gzip.compress(buffer.getvalue())
    for data in (
        whole[: len(whole) // 2],
        buffer.getvalue(),
        gzip.compress(b"hello" * 20),
        b"",
        whole[:200] + b"x" * 900,
    ):
        path.write_bytes(data)
        with pytest.raises(Unreadable), Stream(path) as stream:
            for _, nbytes in stream.storages():
                stream.take(nbytes)
    evil = io.BytesIO()
    torch.save({"a": Calls(os.mkdir, str(tmp_path / "ran"))}, evil)
    path.write_bytes(gzip.compress(evil.getvalue()))
    with pytest.raises(Unreadable, match="is refused"), Stream(path) as stream:
        list(stream.storages())
    assert not (tmp_path / "ran").exists()
