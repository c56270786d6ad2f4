"""`eyas prepare`: conversations -> prepared.parquet (token ids and loss masks) and prepare.json (what is in it).

One pass; samples go to disk a few thousand at a time, so memory does not grow with the input (16 bytes a sample, to
find duplicates). Rendering and tokenizing cost about 1 ms a conversation, and of a long one only the turns that
max_seq_len has room for are looked at. Both files are written under other names
and renamed when everything is there. Whatever is left out is counted by its reason.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.chat import HALF, BadConversation, Encoded, Message, encode, is_text, messages_of, prompt_ids, render
from eyas.conversations import find_files, read_records
from eyas.errors import EyasError
from eyas.files import check_unused, write_whole
from eyas.regenerate import Regenerate, answer_again
from eyas.verifier import Verifier, first_line

FORMAT = 1
ROWS_A_GROUP = 2000
PLACES_SHOWN = 3  # file:line of a reason's first cases
SAY_SECONDS = 10.0
SHOWN_CHARACTERS = 600  # of each run of a sample shown
Say = Callable[[str], None]


@dataclass
class Prepared:
    """What a folder made by `prepare` holds: per sample an id, token ids int32 [T] and the loss mask bool [T]."""

    manifest: dict[str, Any]
    ids: list[str]
    input_ids: list[npt.NDArray[np.int32]]
    loss_mask: list[npt.NDArray[np.bool_]]


@dataclass
class _Count:
    """What was kept and dropped, and where the first of each reason lie."""

    conversations: int = 0
    kept: int = 0
    truncated: int = 0
    tokens: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    with_control: int = 0
    control: dict[str, str] = field(default_factory=dict)  # token -> the first place that has it

    def drop(self, reason: str, place: str, detail: str = "") -> None:
        self.dropped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES_SHOWN:
            places.append(f"{place} {detail}".rstrip())


def prepare(
    verifier: Verifier,
    sources: list[Path],
    output_dir: Path,
    *,
    max_seq_len: int,
    min_trained: int = 1,
    regenerate: Regenerate | None = None,
    show: int = 3,
    say: Say = print,
) -> dict[str, Any]:
    """Encode the conversations of `sources` into `output_dir`; returns what prepare.json says.

    sources: JSONL, JSON array (gzipped or not) and Parquet files, or folders of them.
    max_seq_len: longer samples are cut to this many tokens. min_trained: samples with fewer trained tokens are dropped.
    regenerate: replace the answers by the verifier's own first, into output_dir/conversations.jsonl; a run that was
        interrupted there goes on, one with other settings is refused.
    show: so many samples are decoded through `say`, with the trained part in ⟦ ⟧.
    Raises EyasError when a source cannot be read, nothing would be trained on or the output cannot be written;
    then no prepared file is left behind.
    """
    if max_seq_len < 2:
        raise EyasError(f"max_seq_len is {max_seq_len}: a sample needs two tokens at least")
    files = find_files(sources)
    _check_no_input(files, output_dir, regenerate is not None)
    check_unused(output_dir, "prepared.parquet")
    tokenizer, template_hash = verifier.tokenizer, verifier.template_hash
    _check_template(verifier)
    count = _Count()
    try:
        with _new_folder(output_dir):
            records = _conversations(files, count)
            if regenerate is not None:
                answered = output_dir / "conversations.jsonl"
                answer_again(_questions(records, tokenizer, max_seq_len, count), answered, verifier, regenerate, say)
                records = ((r["id"], place, r["messages"]) for place, r in read_records(answered))
            samples = _samples(_told(records, count, say), tokenizer, max_seq_len, min_trained, count)
            temporary = output_dir / f".prepared.parquet.{os.getpid()}"
            about = output_dir / f".prepare.json.{os.getpid()}.new"
            try:
                _write_parquet(_shown(samples, tokenizer, show, say), temporary)
                if not count.kept:
                    _say_dropped(count, say)
                    raise EyasError(f"nothing to train on in {_names(sources)}: {_reasons(count)}")
                manifest = {
                    "format": FORMAT,
                    "verifier": {
                        "name": verifier.config.name,
                        "fingerprint": verifier.fingerprint,
                        "vocab_size": verifier.config.vocab_size,
                    },
                    "template_hash": template_hash,
                    "conversations": count.conversations,
                    "kept": count.kept,
                    "dropped": dict(count.dropped.most_common()),
                    "truncated": count.truncated,
                    "tokens": count.tokens,
                    "trained_tokens": count.trained,
                    "max_seq_len": max_seq_len,
                    "regenerated": None if regenerate is None else asdict(regenerate),
                    "source": [str(s) for s in sources],
                }
                # Both are on the disk before either gets its name, so that a full disk leaves what was there.
                write_whole(about, json.dumps(manifest, indent=1, ensure_ascii=False).encode(errors="replace"))
                (output_dir / "prepare.json").unlink(missing_ok=True)  # never beside another run's samples
                temporary.replace(output_dir / "prepared.parquet")
                about.replace(output_dir / "prepare.json")
            finally:
                temporary.unlink(missing_ok=True)
                about.unlink(missing_ok=True)
    except OSError as error:
        raise EyasError(f"cannot write {output_dir}: {error.strerror or error}") from error
    say(
        f"kept {count.kept:,} samples of {count.conversations:,} conversations · {count.tokens:,} tokens, "
        f"{count.trained:,} trained ({count.trained / count.tokens:.0%}) · {count.truncated:,} cut at {max_seq_len:,}"
    )
    _say_dropped(count, say)
    return manifest


def read_prepared(folder: Path) -> Prepared:
    """The samples of a folder made by `prepare`; EyasError where it is missing, torn or of another format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if folder.is_file():
        raise EyasError(
            f"{folder} is a file, and a folder that eyas prepare made is wanted: eyas prepare --data {folder} makes one"
            " of conversations"
        )
    manifest_path, samples_path = folder / "prepare.json", folder / "prepared.parquet"
    if not manifest_path.exists() or not samples_path.exists():
        raise EyasError(f"no prepared conversations in {folder}: make them with `eyas prepare`")
    try:
        manifest = json.loads(manifest_path.read_bytes())
        if manifest["format"] != FORMAT:
            raise EyasError(f"{manifest_path} has format {manifest['format']}, this eyas reads {FORMAT}: prepare again")
        table = pq.read_table(samples_path, columns=["id", "input_ids", "loss_mask"])
        ids = table.column("id").to_pylist()
        input_ids = [a.astype(np.int32, copy=False) for a in _rows(table.column("input_ids"))]
        loss_mask = [a.astype(np.bool_, copy=False) for a in _rows(table.column("loss_mask"))]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise EyasError(f"{folder} cannot be read ({first_line(error)}): prepare again") from None
    same = all(len(t) == len(m) for t, m in zip(input_ids, loss_mask, strict=True))
    if not same or manifest.get("kept") != len(ids) or manifest.get("tokens") != sum(map(len, input_ids)):
        raise EyasError(f"{samples_path} does not hold what {manifest_path.name} says: prepare again")
    return Prepared(manifest, ids, input_ids, loss_mask)


# -- conversations -----------------------------------------------------------------------------------------------------


def _conversations(files: list[Path], count: _Count) -> Iterator[tuple[str, str, list[Message]]]:
    """(id, place, messages) of every readable conversation; ids are unique."""
    seen: Counter[str] = Counter()
    for file in files:
        try:
            for place, record in read_records(file):
                count.conversations += 1
                if not isinstance(record, dict):
                    count.drop("bad JSON line" if isinstance(record, ValueError) else "no messages", place)
                    continue
                try:
                    messages = messages_of(record)
                except BadConversation as error:
                    count.drop(error.reason, place, error.detail)
                    continue
                given = record.get("id") if record.get("id") is not None else record.get("conversation_id")
                name = f"{file.name}:{place.rpartition(':')[2]}" if given is None else str(given)
                if not is_text(name):
                    count.drop(HALF, place)
                    continue
                seen[name] += 1
                yield name if seen[name] == 1 else f"{name}~{seen[name]}", place, messages
        except (OSError, EOFError, ValueError) as error:  # pyarrow's errors are ValueErrors and OSErrors
            raise EyasError(f"{file} cannot be read ({first_line(error)})") from None


def _questions(
    conversations: Iterable[tuple[str, str, list[Message]]], tokenizer: Any, max_seq_len: int, count: _Count
) -> list[dict[str, Any]]:
    """The conversations that the verifier can be asked, in the form that `regenerate` takes."""
    asked = []
    for name, place, messages in conversations:
        first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
        try:
            if first is None:
                count.drop("no user turn", place)
            elif len(prompt_ids(tokenizer, messages[: first + 1])) >= max_seq_len:
                count.drop("prompt longer than max_seq_len", place)
            else:
                asked.append({"id": name, "messages": messages})
        except BadConversation as error:
            count.drop(error.reason, place, error.detail)
    if not asked:
        raise EyasError(f"nothing to regenerate: {_reasons(count)}")
    return asked


# -- samples ---------------------------------------------------------------------------------------------------------


def _samples(
    conversations: Iterable[tuple[str, str, list[Message]]],
    tokenizer: Any,
    max_seq_len: int,
    min_trained: int,
    count: _Count,
) -> Iterator[tuple[str, Encoded]]:
    """(id, sample) of what is kept."""
    from xxhash import xxh3_128_digest

    seen: set[bytes] = set()
    control = _control_tokens(tokenizer)
    for name, place, messages in conversations:
        if found := {token for m in messages for text in m.values() for token in control.findall(text)}:
            count.with_control += 1
            for token in sorted(found):
                count.control.setdefault(token, place)
        if not any(m["role"] == "assistant" for m in messages):
            count.drop("no assistant turn", place)
            continue
        try:
            encoded = encode(tokenizer, messages, max_seq_len)
        except BadConversation as error:
            count.drop(error.reason, place, error.detail)
            continue
        if not encoded:
            count.drop("nothing trained", place)
        for number, sample in enumerate(encoded, start=1):
            cut = len(sample.input_ids) > max_seq_len
            sample = Encoded(sample.input_ids[:max_seq_len], sample.loss_mask[:max_seq_len])
            trained = sum(sample.loss_mask)
            key = xxh3_128_digest(np.asarray(sample.input_ids, np.int32).tobytes())
            if trained < max(min_trained, 1):
                reason = f"fewer than {min_trained} trained tokens" if trained else "nothing trained"
                count.drop(f"{reason} before max_seq_len" if cut else reason, place)
            elif key in seen:
                count.drop("duplicate", place)
            else:
                seen.add(key)
                count.kept += 1
                count.truncated += cut
                count.tokens += len(sample.input_ids)
                count.trained += trained
                yield name if len(encoded) == 1 else f"{name}#{number}", sample


def _check_template(verifier: Verifier) -> None:
    """EyasError for a chat template that cannot render a question and its answer: no conversation is to blame."""
    plain = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    try:
        render(verifier.tokenizer, plain[:1], answer=True)
        render(verifier.tokenizer, plain)
    except BadConversation as error:
        raise EyasError(
            f"the chat template of {verifier.path} cannot render a plain question and answer {error.detail}: mend it"
        ) from None


def _control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Matches the special tokens that text is encoded to wherever it spells one."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
    spelled = sorted((t for t in tokens if len(t) > 2), key=len, reverse=True)  # a pad token may be a mere "!"
    return re.compile("|".join(map(re.escape, spelled)) or r"(?!)")


def _write_parquet(samples: Iterable[tuple[str, Encoded]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [("id", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))],
    )
    group: list[tuple[str, Encoded]] = []
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:

            def flush() -> None:
                columns = [[n for n, _ in group], [s.input_ids for _, s in group], [s.loss_mask for _, s in group]]
                arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
                group.clear()

            for item in samples:
                group.append(item)
                if len(group) == ROWS_A_GROUP:
                    flush()
            if group:
                flush()
        file.flush()
        os.fsync(file.fileno())


def _rows(column: Any) -> Iterator[npt.NDArray[Any]]:
    """The lists of a Parquet column as numpy views into it."""
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy(zero_copy_only=False)
        for start, stop in itertools.pairwise(ends):
            yield values[start:stop]


def _check_no_input(files: list[Path], output_dir: Path, regenerate: bool) -> None:
    """EyasError where what is to be written is one of the files that are to be read."""
    written = [output_dir / name for name in ("prepared.parquet", *(["conversations.jsonl"] if regenerate else []))]
    for path in (p for p in written if p.exists()):
        if any(path.samefile(file) for file in files):
            raise EyasError(f"{path} is to be read and would be written over: name another --output-dir")


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """`folder`, made if need be; what was made is taken away again if the block fails and left nothing in it."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for p in made:
                p.rmdir()
        raise


# -- telling ---------------------------------------------------------------------------------------------------------


def _shown(
    samples: Iterable[tuple[str, Encoded]], tokenizer: Any, show: int, say: Say
) -> Iterator[tuple[str, Encoded]]:
    """Passes `samples` on and says the first `show` of them."""
    for number, (name, sample) in enumerate(samples):
        if number < show:
            say(f"--- {name} · {len(sample.input_ids):,} tokens, {sum(sample.loss_mask):,} trained")
            say(marked(tokenizer, sample))
        yield name, sample


def marked(tokenizer: Any, sample: Encoded) -> str:
    """The sample as text with ⟦ ⟧ around what is trained on; the middle of long runs is left out."""
    text, at = "", 0
    ids, mask = sample.input_ids, sample.loss_mask
    while at < len(ids):
        stop = next((i for i in range(at, len(ids)) if mask[i] != mask[at]), len(ids))
        run = tokenizer.decode(ids[at:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if len(run) > SHOWN_CHARACTERS:
            run = f"{run[: SHOWN_CHARACTERS // 2]} […] {run[-SHOWN_CHARACTERS // 2 :]}"
        text += f"⟦{run}⟧" if mask[at] else run
        at = stop
    return text


def _told(
    conversations: Iterable[tuple[str, str, list[Message]]], count: _Count, say: Say
) -> Iterator[tuple[str, str, list[Message]]]:
    """Passes them on and says every SAY_SECONDS how far it is."""
    said = time.monotonic()
    for item in conversations:
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            say(f"prepare: {count.kept:,} samples of {count.conversations:,} conversations so far, at {item[1]}")
        yield item


def _say_dropped(count: _Count, say: Say) -> None:
    if count.control:
        first = ", ".join(f"{token} in {place}" for token, place in itertools.islice(count.control.items(), 3))
        say(
            f"warning: {count.with_control:,} conversations spell control tokens of the verifier in their text ({first}"
            f"{', ...' if len(count.control) > PLACES_SHOWN else ''}): they become real ones; take them out if they are"
            " not meant"
        )
    for reason, n in count.dropped.most_common():
        places = ", ".join(count.places[reason]) + (", ..." if n > PLACES_SHOWN else "")
        say(f"dropped {n:,}: {reason} ({places})")


def _reasons(count: _Count) -> str:
    return ", ".join(f"{n:,} x {reason}" for reason, n in count.dropped.most_common()) or "no conversations at all"


def _names(sources: list[Path]) -> str:
    return ", ".join(map(str, sources[:3])) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
