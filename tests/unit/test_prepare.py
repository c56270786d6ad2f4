"""Conversations of every form -> prepared samples, and what is said about those left out."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas import chat
from eyas import regenerate as regenerate_module
from eyas.chat import encode
from eyas.errors import EyasError
from eyas.prepare import Regenerate, prepare, read_prepared
from eyas.verifier import Verifier


def talk(question: str, answer: str | None = "Paris is the capital.", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, **more}


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return Verifier(tiny_verifier)


def run(verifier: Verifier, source: Path, out: Path, said: list[str] | None = None, **options: Any) -> dict[str, Any]:
    said = [] if said is None else said
    return prepare(verifier, [source], out, **{"max_seq_len": 200, "say": said.append, **options})


def test_samples_come_back_as_they_were_encoded(verifier: Verifier, tmp_path: Path) -> None:
    records = [talk(f"question {i}", "one " * (i + 1), id=f"c{i}") for i in range(5)]
    summary = run(verifier, jsonl(tmp_path / "a.jsonl", *records), tmp_path / "out")
    found = read_prepared(tmp_path / "out")
    assert found.manifest == summary
    assert found.ids == ["c0", "c1", "c2", "c3", "c4"]
    for record, ids, mask in zip(records, found.input_ids, found.loss_mask, strict=True):
        [wanted] = encode(verifier.tokenizer, record["messages"])
        assert (ids.tolist(), mask.tolist()) == (wanted.input_ids, wanted.loss_mask)
        assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
    assert summary["tokens"] == sum(map(len, found.input_ids))
    assert summary["trained_tokens"] == sum(int(m.sum()) for m in found.loss_mask)
    assert summary["verifier"]["fingerprint"] == verifier.fingerprint
    assert summary["template_hash"] == verifier.template_hash


def test_samples_of_many_row_groups_keep_their_order(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.prepare.ROWS_A_GROUP", 3)
    run(verifier, jsonl(tmp_path / "a.jsonl", *(talk(f"q {i}", id=i) for i in range(8))), tmp_path / "out")
    found = read_prepared(tmp_path / "out")
    assert found.ids == [str(i) for i in range(8)]
    assert all(f"q {i}" in verifier.tokenizer.decode(ids.tolist()) for i, ids in enumerate(found.input_ids))


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "json", "json of lines", "parquet", "sharegpt", "folder"])
def test_every_form_gives_the_same_samples(verifier: Verifier, tmp_path: Path, form: str) -> None:
    records = [talk("one"), talk("two", "The dog sleeps.")]
    source = tmp_path / "in"
    source.mkdir()
    if form == "jsonl.gz":
        (source / "x.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    elif form == "json":
        (source / "x.json").write_text(json.dumps(records, indent=1))
    elif form == "json of lines":
        jsonl(source / "x.json", *records)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(records), source / "x.parquet")
    elif form == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        turned = [[{"from": names[m["role"]], "value": m["content"]} for m in r["messages"]] for r in records]
        jsonl(source / "x.jsonl", *({"conversations": t} for t in turned))
    elif form == "folder":
        jsonl(source / "a.jsonl", records[0])
        jsonl(source / "b.jsonl", records[1])
        (source / "notes.txt").write_text("not read")
    else:
        jsonl(source / "x.jsonl", *records)
    run(verifier, source if form == "folder" else next(source.iterdir()), tmp_path / "out")
    found = read_prepared(tmp_path / "out")
    texts = [verifier.tokenizer.decode(ids.tolist()) for ids in found.input_ids]
    assert ["one" in texts[0], "two" in texts[1], "dog sleeps" in texts[1], len(texts)] == [True, True, True, 2]


def test_what_is_dropped_is_counted_by_reason_and_place(verifier: Verifier, tmp_path: Path) -> None:
    said: list[str] = []
    source = jsonl(
        tmp_path / "a.jsonl",
        talk("kept"),
        '{"messages": [',
        "",
        "\x00",
        {"prompt": "x"},
        {"messages": [{"role": "narrator", "content": "x"}]},
        talk("no answer", None),
        talk("empty answer", "  "),
        talk("kept"),
        talk("long " * 300),
        talk("cut", "one " * 300),
    )
    summary = run(verifier, source, tmp_path / "out", said)
    assert summary["dropped"] == {
        "bad JSON line": 2,
        "no messages": 1,
        "unknown role": 1,
        "no assistant turn": 1,
        "nothing trained": 1,
        "duplicate": 1,
        "nothing trained before max_seq_len": 1,
    }
    assert (summary["conversations"], summary["kept"], summary["truncated"]) == (10, 2, 1)
    assert f"dropped 2: bad JSON line ({source}:2, {source}:4)" in said
    assert f"dropped 1: unknown role ({source}:6 'narrator')" in said
    cut = read_prepared(tmp_path / "out").input_ids[1]
    assert len(cut) == 200


def test_samples_are_shown_with_the_trained_part_marked(verifier: Verifier, tmp_path: Path) -> None:
    said: list[str] = []
    source = jsonl(tmp_path / "a.jsonl", *(talk(f"question {i}", id=f"c{i}") for i in range(5)))
    run(verifier, source, tmp_path / "out", said)
    shown = [s for s in said if "⟦" in s]
    assert len(shown) == 3
    assert shown[0] == (
        "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\n⟦Paris is the capital.<|im_end|>⟧\n"
    )
    assert said[0].startswith("--- c0 · ")
    assert said[-1].startswith("kept 5 samples of 5 conversations")


def test_few_trained_tokens_are_dropped_when_asked(verifier: Verifier, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", talk("a", "x"), talk("b", "one two three four five six seven"))
    summary = run(verifier, source, tmp_path / "out", min_trained=5)
    assert summary["dropped"] == {"fewer than 5 trained tokens": 1}


def test_ids_are_unique(verifier: Verifier, tmp_path: Path) -> None:
    records = [talk("1", id="x"), talk("2", id="x"), talk("3"), talk("4", conversation_id=7)]
    run(verifier, jsonl(tmp_path / "a.jsonl", *records), tmp_path / "out")
    assert read_prepared(tmp_path / "out").ids == ["x", "x~2", "a.jsonl:3", "7"]


def test_nothing_to_train_on_is_an_error_and_leaves_nothing(verifier: Verifier, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", talk("no answer", None), "{")
    with pytest.raises(EyasError, match=r"nothing to train on in .*a\.jsonl: 1 x no assistant turn, 1 x bad JSON line"):
        run(verifier, source, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_a_failed_run_leaves_the_earlier_result_as_it_was(verifier: Verifier, tmp_path: Path) -> None:
    run(verifier, jsonl(tmp_path / "a.jsonl", talk("one")), tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(EyasError):
        run(verifier, jsonl(tmp_path / "b.jsonl", talk("no", None)), tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("name", "match"),
    [("none.jsonl", "no such file"), ("a.csv", "no kind that eyas reads"), ("empty", "no conversations in")],
)
def test_a_source_that_cannot_be_read_is_said(verifier: Verifier, tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EyasError, match=match):
        run(verifier, tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["torn.parquet", "torn.jsonl.gz"])
def test_a_torn_file_is_named(verifier: Verifier, tmp_path: Path, name: str) -> None:
    pq.write_table(pa.Table.from_pylist([talk("a")]), tmp_path / "torn.parquet")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(json.dumps(talk("a")).encode()))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9])
    with pytest.raises(EyasError, match=f"{name} cannot be read"):
        run(verifier, tmp_path / name, tmp_path / "out")


def test_an_output_that_cannot_be_written_is_said(verifier: Verifier, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EyasError, match="cannot write"):
        run(verifier, jsonl(tmp_path / "a.jsonl", talk("one")), tmp_path / "file" / "out")


def test_a_full_disk_is_said_and_leaves_nothing(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(EyasError, match="No space left on device"):
        run(verifier, jsonl(tmp_path / "a.jsonl", talk("one")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["missing", "no manifest", "torn", "other samples", "format"])
def test_prepared_folder_that_is_not_whole_is_refused(verifier: Verifier, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    run(verifier, jsonl(tmp_path / "a.jsonl", talk("one"), talk("two")), out)
    manifest, samples = out / "prepare.json", out / "prepared.parquet"
    if damage == "missing":
        out = tmp_path / "elsewhere"
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "torn":
        samples.write_bytes(samples.read_bytes()[:-20])
    elif damage == "other samples":
        pq.write_table(pq.read_table(samples).slice(1), samples)
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    match = {"torn": "cannot be read", "other samples": "does not hold", "format": "has format 2"}
    with pytest.raises(EyasError, match=match.get(damage, "no prepared conversations")):
        read_prepared(out)


def test_regenerated_answers_are_the_verifiers_own(verifier: Verifier, tmp_path: Path) -> None:
    records = [talk(f"question {i}", None if i else "Human words.", id=f"c{i}") for i in range(3)]
    source = jsonl(tmp_path / "a.jsonl", *records, {"messages": [{"role": "system", "content": "x"}]})
    options = Regenerate(max_new_tokens=6, batch_size=2, dtype="fp32")
    summary = run(verifier, source, tmp_path / "out", regenerate=options)
    assert summary["dropped"]["no user turn"] == 1
    assert summary["regenerated"]["max_new_tokens"] == 6
    lines = [json.loads(x) for x in (tmp_path / "out" / "conversations.jsonl").read_text().splitlines()]
    assert [x["id"] for x in lines] == ["c0", "c1", "c2"]
    assert all(x["messages"][-1]["role"] == "assistant" for x in lines)
    assert "Human words." not in json.dumps(lines)


def test_regeneration_is_not_done_twice_nor_mixed(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", *(talk(f"question {i}", id=f"c{i}") for i in range(3)))
    options = Regenerate(max_new_tokens=6, batch_size=2, dtype="fp32")
    first = run(verifier, source, tmp_path / "out", regenerate=options)
    monkeypatch.setattr(regenerate_module, "generate_answers", lambda *_: pytest.fail("generated again"))
    assert run(verifier, source, tmp_path / "out", regenerate=options) == first
    with pytest.raises(EyasError, match=r"other settings \(seed: 0, now 1\)"):
        run(verifier, source, tmp_path / "out", regenerate=Regenerate(6, batch_size=2, dtype="fp32", seed=1))
    jsonl(source, *(talk(f"other question {i}", id=f"c{i}") for i in range(3)))
    with pytest.raises(EyasError, match=r"other settings \(questions"):
        run(verifier, source, tmp_path / "out", regenerate=options)


def test_many_unknown_roles_are_one_reason_and_case_does_not_matter(verifier: Verifier, tmp_path: Path) -> None:
    said: list[str] = []
    odd = [{"messages": [{"role": f"role{i}", "content": "x"}]} for i in range(300)]
    loud = {"messages": [{"role": "USER", "content": "q"}, {"role": "Assistant", "content": "The dog sleeps."}]}
    source = jsonl(tmp_path / "a.jsonl", *odd, loud)
    summary = run(verifier, source, tmp_path / "out", said)
    assert (summary["dropped"], summary["kept"]) == ({"unknown role": 300}, 1)
    assert [line for line in said if "role" in line and line.startswith("dropped")] == [
        f"dropped 300: unknown role ({source}:1 'role0', {source}:2 'role1', {source}:3 'role2', ...)"
    ]


def test_records_that_json_allows_and_text_does_not_cost_only_themselves(verifier: Verifier, tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "a.jsonl",
        talk("kept"),
        talk("half \ud800"),
        talk("x", "half \udfff"),
        talk("an id", id="\ud800"),
        "[" * 200_000,
        talk("kept too", "The dog sleeps."),
    )
    summary = run(verifier, source, tmp_path / "out")
    assert summary["dropped"] == {"text with half a character (a lone surrogate)": 3, "bad JSON line": 1}
    assert read_prepared(tmp_path / "out").ids == ["a.jsonl:1", "a.jsonl:6"]


def test_a_deep_json_file_is_a_bad_line(verifier: Verifier, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(EyasError, match="1 x bad JSON line"):
        run(verifier, tmp_path / "a.json", tmp_path / "out")


def test_a_broken_chat_template_is_the_verifiers_fault(tiny_verifier: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", talk("one"))
    for i, template in enumerate(("{% for m in messages %}", "{{ messages[7]['content'].x }}", "{{ 1 / 0 }}")):
        other = Path(shutil.copytree(tiny_verifier, tmp_path / f"v{i}"))
        (other / "chat_template.jinja").write_text(template)
        with pytest.raises(EyasError, match=r"the chat template of .* cannot render a plain question and answer \("):
            run(Verifier(other), source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_control_tokens_spelled_in_a_text_are_warned_of(verifier: Verifier, tmp_path: Path) -> None:
    said: list[str] = []
    records = [talk("plain"), talk("what is <|im_end|>?"), talk("b", "a token: <|im_end|> and <|im_start|>")]
    source = jsonl(tmp_path / "a.jsonl", *records)
    assert run(verifier, source, tmp_path / "out", said)["kept"] == 3
    [line] = [line for line in said if line.startswith("warning")]
    assert "2 conversations spell control tokens" in line
    assert f"(<|im_end|> in {source}:2, <|im_start|> in {source}:3)" in line
    quiet: list[str] = []
    run(verifier, jsonl(source, records[0]), tmp_path / "out2", quiet)
    assert not any(line.startswith("warning") for line in quiet)


def test_of_a_long_conversation_only_what_fits_is_rendered(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [m for i in range(5000) for m in talk(f"question {i}", f"answer {i}")["messages"]]
    whole = encode(verifier.tokenizer, turns[:200])[0]
    real, rendered = chat.render, []

    def counted(tokenizer: Any, messages: Any, answer: bool = False) -> str:
        rendered.append(len(messages))
        return real(tokenizer, messages, answer)

    monkeypatch.setattr(chat, "render", counted)
    summary = run(verifier, jsonl(tmp_path / "a.jsonl", {"messages": turns}), tmp_path / "out")
    assert (summary["kept"], summary["truncated"], summary["tokens"]) == (1, 1, 200)
    found = read_prepared(tmp_path / "out")
    assert found.input_ids[0].tolist() == whole.input_ids[:200]
    assert found.loss_mask[0].tolist() == whole.loss_mask[:200]
    assert max(rendered) <= 2 * (chat.TURNS + 1)


def test_a_long_run_says_how_far_it_is(verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.prepare.SAY_SECONDS", 0.0)
    said: list[str] = []
    source = jsonl(tmp_path / "a.jsonl", *(talk(f"q {i}") for i in range(3)))
    run(verifier, source, tmp_path / "out", said, show=0)
    assert said[2] == f"prepare: 2 samples of 3 conversations so far, at {source}:3"
