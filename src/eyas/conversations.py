"""Records of conversation files: JSON lines, a JSON array, Parquet, plain or gzipped, alone or in folders.

Lines and Parquet rows are streamed; a JSON array is read whole.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.errors import EyasError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")
OUTPUTS = ("prepared.parquet", "prepare.json", "regenerate.json")  # of `eyas prepare`, beside its conversations.jsonl


def find_files(sources: list[Path]) -> list[Path]:
    """The files of `sources`, those of a folder by name."""
    files = []
    for source in sources:
        if source.is_dir():
            named = [p for p in source.rglob("*") if p.name.endswith(SUFFIXES)]
            found = sorted(p for p in named if p.name not in OUTPUTS and not p.name.startswith("."))
            if not found:
                raise EyasError(f"no conversations in {source}: looked for {', '.join(SUFFIXES)}")
            files += found
        elif not source.exists():
            raise EyasError(f"no conversations at {source}: no such file")
        elif not source.name.endswith(SUFFIXES):
            raise EyasError(f"{source} is of no kind that eyas reads: give it as {', '.join(SUFFIXES)}")
        else:
            files.append(source)
    return files


def read_records(file: Path) -> Iterator[tuple[str, Any]]:
    """(place, record) of every record; the record is a ValueError where it is no JSON."""
    if file.name.endswith(".parquet"):
        import pyarrow.parquet as pq

        number = 0
        for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{file}:{number}", record
        return
    with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
        if ".json" in file.suffixes[-2:] and (whole := _json_array(lines.read())) is not None:
            yield from ((f"{file}:{number}", record) for number, record in enumerate(whole, start=1))
            return
        lines.seek(0)  # a .json file of lines is common too
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"{file}:{number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield f"{file}:{number}", ValueError(str(error))


def _json_array(data: bytes) -> list[Any] | None:
    """The records of a JSON array or of one object; None where `data` is neither."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else [found]
