"""docs/store.md describes every byte: its reader, which knows numpy and json alone, reads a real store."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from eyas.store import layout
from eyas.store.writer import StoreWriter
from storekit import LAYERS, LENGTHS, MANIFEST, SMALL, sample, write

DOCUMENT = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")


def reader() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    return str(code)


def test_the_documents_reader_reads_a_store_of_two_writers_one_at_work(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with StoreWriter(tmp_path, MANIFEST, writer="1", **SMALL) as second:
        for i in range(5, len(LENGTHS)):
            second.add(*sample(i))
        second.commit()
        with (tmp_path / "journal-1.jsonl").open("ab") as file:
            file.write(b'{"n":9,"id":"half a li')
        names: dict[str, type] = {}
        exec(reader(), names)  # its own words: the code of this repository's document
        store = names["Store"](tmp_path)
        assert [s["id"] for s in store.samples] == [f"s{i}" for i in range(len(LENGTHS))]
        for i in range(len(LENGTHS)):
            _, ids, mask, states = sample(i)
            found_ids, found_mask = store.tokens(i)
            np.testing.assert_array_equal(found_ids, ids)
            np.testing.assert_array_equal(found_mask, mask)
            for layer, expected in zip(LAYERS, states, strict=True):
                np.testing.assert_array_equal(store.states(i, layer), expected.float().numpy())
                part = store.states(i, layer, len(ids) // 3, len(ids))
                np.testing.assert_array_equal(part, expected[len(ids) // 3 :].float().numpy())
    assert torch.equal(torch.from_numpy(store.states(4, 8)), sample(4)[3][3].float()), "the shard is closed by now"


def test_the_documents_reader_is_30_lines_of_numpy_and_json() -> None:
    code = [line for line in reader().splitlines() if line.strip()]
    assert len(code) <= 35
    imported = set(re.findall(r"^(?:import|from) (\w+)", "\n".join(code), re.MULTILINE))
    assert imported == {"json", "pathlib", "numpy"}
    heavy = "any(m.split('.')[0] in ('eyas', 'torch', 'safetensors') for m in sys.modules)"
    probe = f"{reader()}\nimport sys\nassert not {heavy}"
    subprocess.run([sys.executable, "-c", probe], check=True)


def test_the_document_names_every_member_of_a_journal_line_and_of_the_manifest(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for name in layout.Record._fields:
        assert f"`{name}`" in DOCUMENT, name
    for name in layout.Manifest.__dataclass_fields__:
        assert f"`{name}`" in DOCUMENT, name
