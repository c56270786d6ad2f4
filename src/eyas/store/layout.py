"""The store on disk: what its files are called and what stands in them.

    manifest.json                     whose states these are, which layers, which side of the final norm
    shard-<writer>-00000.safetensors  the states; `.part` is appended while it is still open
    journal-<writer>.jsonl            one line per sample: where it lies, and the xxh3-64 of every part of it
    tokens-<writer>.bin               per sample int32 input_ids [T], then uint8 loss_mask [T]

A sample exists when its journal line does, and never because a file does. Each writer has its own three kinds of file,
so writers need no locks. A shard is an ordinary safetensors file: one tensor [T, Ht] per layer and sample, each at a
multiple of 4 KiB (direct I/O needs that), the gaps filled by `pad.N` tensors because safetensors allows no holes.

Cost: about 400 bytes of journal per sample, 5 bytes per token in the tokens file, at most 4 KiB of padding per layer
and sample, 1 MiB of reserved header per shard. A journal of 100,000 samples is 40 MB of JSON: index.py keeps what it
says as arrays.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from eyas.errors import EyasError
from eyas.files import refusal, sync_folder, write_whole

FORMAT = 1
PAGE = 4096
MANIFEST = "manifest.json"
QUARANTINE = "quarantine.json"  # {sample: why}: left out when the folder is opened; `eyas store check` writes it
OPEN_SUFFIX = ".part"
BYTES_PER_TOKEN = 5  # in the tokens file: int32 id, uint8 mask
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)  # a file system that cannot
_DTYPES = {  # safetensors' name, bytes
    "bfloat16": ("BF16", 2), "float8_e4m3fn": ("F8_E4M3", 1), "int8": ("I8", 1),
    "float32": ("F32", 4), "int32": ("I32", 4), "float16": ("F16", 2),
}  # fmt: skip
STORED_AS = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "int8": "int8"}  # by codec


@dataclass(frozen=True)
class Manifest:
    """What the states of a source are.

    verifier: its name; fingerprint: of its weights and sizes ("" where unknown); revision: the hub's, or "".
    layers: what the states hold, ascending; the last one is the verifier's last state.
    layer_unit: "hf" (k is `hidden_states[k]`, the state after k layers) or, in files that do not say, "position".
    norm_side: "before" or "after" the final norm: the side that the last state is on ("unknown" without a verifier).
    source: hash of the tokens and masks that were captured, or "".
    codec: how values are stored (codecs.py); channels: of int8, the channels' sizes, float32 [layers, Ht] in base64.
    samples: how many it was begun for, 0 where that is not known: fewer in the journals are an unfinished capture.
    last_rows: "all", or "trained" where the last layer has only the rows whose token is trained on, or "logits:k"
        where these rows are the verifier's k likeliest tokens in place of its last state (logits.py).
    """

    verifier: str
    fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    layers: tuple[int, ...]
    norm_side: str
    template_hash: str = ""
    extractor: str = ""
    revision: str = ""
    source: str = ""
    layer_unit: str = "hf"
    dtype: str = "bfloat16"
    codec: str = "bf16"
    last_rows: str = "all"
    channels: str = ""
    samples: int = 0
    created: str = ""
    format: int = FORMAT

    @property
    def logits(self) -> int:
        """k where the last layer is the verifier's k likeliest tokens, else 0."""
        return logits_of(self.last_rows)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that hold states: all, but for the last one where logits are kept in its place."""
        return self.layers[:-1] if self.logits else self.layers

    def differences(self, other: Manifest) -> list[str]:
        """What keeps the two from sharing a store, as "norm_side before, not after".

        The time of creation does not, nor the number of samples, which `source` tells better and older stores lack.
        """
        names = [f.name for f in fields(self) if f.name not in ("created", "samples")]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        words = {"channels": "the int8 channels have other sizes", "source": "other prepared samples"}
        return [words.get(name, f"{name} {mine}, not {theirs}") for name, mine, theirs in pairs if mine != theirs]

    def create(self, folder: Path) -> None:
        """Write `manifest.json`, whole, unless somebody else has: of writers that begin at once one wins.

        Raises OSError.
        """
        side = folder / f".{MANIFEST}.{secrets.token_hex(8)}"
        try:
            write_whole(side, self._text())
            os.link(side, folder / MANIFEST)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in NO_LINKS or (folder / MANIFEST).exists():
                raise
            side.rename(folder / MANIFEST)
        finally:
            side.unlink(missing_ok=True)
        sync_folder(folder)

    def recount(self, folder: Path) -> None:
        """Have the store's manifest say how many samples it is for as this one does. Raises EyasError."""
        there = Manifest.load(folder)
        if there.samples != self.samples:
            try:
                write_whole(folder / MANIFEST, replace(there, samples=self.samples)._text())
            except OSError as error:
                raise EyasError(f"{folder / MANIFEST} cannot be written: {refusal(error)}") from None

    def _text(self) -> bytes:
        content = {**asdict(self), "layers": list(self.layers)}
        return json.dumps({**content, "check": _digest_of(content)}, indent=1, ensure_ascii=False).encode() + b"\n"

    @staticmethod
    def load(folder: Path) -> Manifest:
        """Read `manifest.json`. Raises EyasError when it is missing, damaged or of a newer format."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("no JSON object")
            check = content.pop("check")
        except FileNotFoundError:
            raise EyasError(f"{folder} is not a store: it has no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise EyasError(f"{path} cannot be read ({error!r}): restore it, or capture again") from None
        if content.get("format") != FORMAT:
            raise EyasError(f"{path} has format {content.get('format')}; this eyas reads format {FORMAT}: update eyas")
        if check != _digest_of(content):
            raise EyasError(f"{path} does not match its own checksum: restore it, or capture again")
        known = {f.name for f in fields(Manifest)}
        missing = [f.name for f in fields(Manifest) if f.default is MISSING and f.name not in content]
        if missing:
            raise EyasError(f"{path} says nothing of {', '.join(missing)}: restore it, or capture again")
        kept: dict[str, Any] = {k: tuple(v) if k == "layers" else v for k, v in content.items() if k in known}
        return Manifest(**kept)


def _digest_of(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


class Part(NamedTuple):
    """One layer of a sample, or its scales: bytes [offset, offset + nbytes) of the shard file, their xxh3-64 in hex."""

    offset: int
    nbytes: int
    xxh3: str


class Record(NamedTuple):
    """One sample, as its journal line has it."""

    n: int  # the writer's running number; the sample's tensors are called <n>.h<layer>
    id: str
    shard: str  # file name of the closed shard
    tokens: int
    trained: int
    dtype: str
    parts: tuple[Part, ...]  # one per layer of the manifest; of an 8-bit codec two, rows and scales
    text_offset: int  # of this sample in the tokens file
    text_xxh3: str
    needs: int  # of its first tokens that it takes to train anything, `needs_tokens` of its mask

    @property
    def end(self) -> int:
        """Where the sample ends in its shard, the padding included."""
        return round_up(self.parts[-1].offset + self.parts[-1].nbytes)

    @property
    def text_end(self) -> int:
        """Where the sample ends in the tokens file."""
        return self.text_offset + self.tokens * BYTES_PER_TOKEN

    def line(self) -> bytes:
        """The journal line: a JSON object whose last member, `check`, is the xxh3-64 of all bytes before its comma."""
        members = {**self._asdict(), "parts": [list(p) for p in self.parts]}
        body = json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
        return body + _CHECK + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


_CHECK = b',"check":"'
_CHECK_BYTES = len(_CHECK) + 16 + len(b'"}')


WRONG_LINE = "does not match its own checksum"


class Journal(NamedTuple):
    """What a journal holds."""

    records: list[Record]
    broken: list[tuple[str, str]]  # (which line, why)
    good_bytes: int  # the journal up to the end of its last good line


def read_journal(path: Path) -> Journal:
    """Every good line of a journal, and the others by name. Raises EyasError when it cannot be read at all."""
    try:
        return parse_journal(path.name, path.read_bytes())
    except OSError as error:
        raise EyasError(f"{path} cannot be read: {error.strerror}") from None


def parse_journal(name: str, data: bytes) -> Journal:
    """`read_journal` of the bytes of a journal of this name."""
    records: list[Record] = []
    broken: list[tuple[str, str]] = []
    position = good_bytes = 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        position += len(line) + 1
        if not line and position > len(data):
            break
        record = _parse(line)
        if record is not None and position <= len(data):
            records.append(record)
            good_bytes = position
        elif position > len(data):
            broken.append((f"{name} line {number}", "is unfinished: its writer is at work, or was stopped"))
        else:
            broken.append((f"{name} line {number}", WRONG_LINE))
    return Journal(records, broken, good_bytes)


def _parse(line: bytes) -> Record | None:
    body, check = line[:-_CHECK_BYTES], line[-_CHECK_BYTES:]
    if check != _CHECK + xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
        return None
    m = json.loads(line)
    parts = tuple(Part(*p) for p in m["parts"])
    return Record(
        m["n"],
        m["id"],
        m["shard"],
        m["tokens"],
        m["trained"],
        m["dtype"],
        parts,
        m["text_offset"],
        m["text_xxh3"],
        m.get("needs", UNKNOWN),
    )


UNKNOWN = -1  # the first stores do not say what a sample needs: its mask does


def needs_tokens(loss_mask: npt.NDArray[Any]) -> int:
    """How many of a sample's first tokens it takes to train anything; 0 where nothing ever is. loss_mask: [T].

    The first step trains where two neighbouring tokens behind the first one are marked (docs/eagle3.md).
    """
    marked = np.asarray(loss_mask, dtype=np.bool_)
    first = np.flatnonzero(marked[1:-1] & marked[2:])[:1]
    return int(first[0]) + 3 if len(first) else 0


def quarantined(folder: Path) -> dict[str, str]:
    """Samples that `eyas store check` has shut out of this folder, and why. Raises EyasError for a damaged list."""
    path = folder / QUARANTINE
    try:
        listed = json.loads(path.read_bytes())
        if not isinstance(listed, dict) or not all(isinstance(why, str) for why in listed.values()):
            raise ValueError("no object of names and reasons")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EyasError(f"{path} cannot be read ({error}): restore it, or delete it and check again") from None
    return listed


def journals(folder: Path) -> list[Path]:
    """The journals of every writer of a store, in a fixed order."""
    return sorted(folder.glob("journal-*.jsonl"))


def writer_of(journal: Path) -> str:
    """The writer's name in the journal's."""
    return journal.name.removeprefix("journal-").removesuffix(".jsonl")


def journal_path(folder: Path, writer: str) -> Path:
    return folder / f"journal-{writer}.jsonl"


def tokens_path(folder: Path, writer: str) -> Path:
    return folder / f"tokens-{writer}.bin"


def shard_name(writer: str, number: int) -> str:
    return f"shard-{writer}-{number:05d}.safetensors"


def shard_number(name: str) -> int:
    return int(name.removesuffix(".safetensors").rsplit("-", 1)[1])


def digest(data: bytes | memoryview) -> str:
    """xxh3-64 of the bytes in hex.

    By the library's object, which lets go of the GIL meanwhile; its one-shot functions keep it, and then a thread that
    hashes 32 MiB stops all the others.
    """
    hashed = xxhash.xxh3_64()
    hashed.update(data)
    return hashed.hexdigest()


def round_up(size: int, unit: int = PAGE) -> int:
    return -(-size // unit) * unit


def logits_of(last_rows: str) -> int:
    """k of "logits:k", 0 for anything else."""
    word, _, k = last_rows.partition(":")
    return int(k) if word == "logits" and k.isdecimal() else 0


class Plane(NamedTuple):
    """A part that every sample has. name: of its tensors, behind `<n>.`: h2, s2, i61, p61; width: values of a row."""

    name: str
    layer: int
    dtype: str
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * _DTYPES[self.dtype][1]


def planes(manifest: Manifest) -> list[Plane]:
    """The parts of a sample, in their order: rows of each layer, in an 8-bit codec their scales behind them; of kept
    logits token ids, and their log p behind them."""
    found: list[Plane] = []
    for layer in manifest.state_layers:
        found.append(Plane(f"h{layer}", layer, STORED_AS[manifest.codec], manifest.hidden_size))
        if manifest.codec != "bf16":
            found.append(Plane(f"s{layer}", layer, "float32", 1))
    if manifest.logits:
        last = manifest.layers[-1]
        found += [
            Plane(f"i{last}", last, "int32", manifest.logits),
            Plane(f"p{last}", last, "float16", manifest.logits),
        ]
    return found


def parts_count(manifest: Manifest) -> int:
    """Parts of a sample."""
    return len(planes(manifest))


def sample_bytes(tokens: int, manifest: Manifest) -> int:
    """Bytes that a sample takes on disk at most, its tokens and journal line included."""
    return sum(round_up(tokens * p.row_bytes) for p in planes(manifest)) + tokens * BYTES_PER_TOKEN + 512


def samples_in_header(header_bytes: int, parts: int) -> int:
    """How many samples a reserved header surely holds: a part's entry and its pad take less than 200 bytes."""
    return (header_bytes - 128) // (200 * parts)


def header_entries(records: Iterable[Record], manifest: Manifest, data_start: int) -> dict[str, dict[str, Any]]:
    """The safetensors header entries of a shard that holds `records`; every byte after `data_start` has an owner."""
    named = planes(manifest)
    entries: dict[str, dict[str, Any]] = {}
    end = 0  # offsets in the header count from data_start

    def pad_to(stop: int) -> None:
        if stop > end:
            entries[f"pad.{len(entries)}"] = {"dtype": "U8", "shape": [stop - end], "data_offsets": [end, stop]}

    for record in records:
        for plane, part in zip(named, record.parts, strict=True):
            start = part.offset - data_start
            pad_to(start)
            end = start + part.nbytes
            if part.nbytes % plane.row_bytes:
                raise ValueError(f"sample {record.id}: {part.nbytes} bytes are no rows of {plane.width} values")
            rows = part.nbytes // plane.row_bytes
            shape = [rows] if plane.name[0] == "s" else [rows, plane.width]
            kind = _DTYPES[plane.dtype][0]
            entries[f"{record.n}.{plane.name}"] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        pad_to(record.end - data_start)
        end = record.end - data_start
    return entries


def header_json(entries: dict[str, dict[str, Any]]) -> bytes:
    whole = {"__metadata__": {"format": "pt", "eyas": str(FORMAT)}, **entries}
    return json.dumps(whole, separators=(",", ":")).encode()
