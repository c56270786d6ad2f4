"""Regeneration: the verifier's own words, the same wherever it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.errors import EyasError
from eyas.regenerate import end_token_ids, generate_answers, regenerate
from eyas.verifier import Verifier


@pytest.fixture(scope="module")
def model(tiny_verifier: Path) -> Any:
    return Verifier(tiny_verifier).load_model(torch.float32)


def conversations(n: int = 5) -> list[dict[str, Any]]:
    return [
        {
            "id": f"c{i}",
            "kind": "test",
            "messages": [
                {"role": "system", "content": "one two"},
                {"role": "user", "content": f"question {i} " * (i + 1)},
                {"role": "assistant", "content": "somebody else's words"},
                {"role": "user", "content": "and the dog?"},
            ],
        }
        for i in range(n)
    ]


def run(output: Path, model: Any, tokenizer: Any, **options: Any) -> list[dict[str, Any]]:
    settings = {"max_new_tokens": 3, "batch_size": 2, "say": lambda _: None, **options}
    talks = settings.pop("talks", conversations())
    assert regenerate(talks, output, model=model, tokenizer=tokenizer, **settings) == len(talks)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_every_assistant_turn_is_replaced_and_the_last_question_answered(
    tmp_path: Path, model: Any, tiny_tokenizer: Any
) -> None:
    found = run(tmp_path / "x.jsonl", model, tiny_tokenizer)
    assert [c["id"] for c in found] == [f"c{i}" for i in range(5)]
    assert all(c["kind"] == "test" for c in found)
    for before, after in zip(conversations(), found, strict=True):
        assert [m["role"] for m in after["messages"]] == ["system", "user", "assistant", "user", "assistant"]
        assert [m for m in after["messages"] if m["role"] != "assistant"] == [
            m for m in before["messages"] if m["role"] != "assistant"
        ]
    assert "somebody" not in json.dumps(found)


def test_greedy_answers_are_the_models_argmax(model: Any, tiny_tokenizer: Any) -> None:
    from eyas.chat import prompt_ids

    prompts = [[{"role": "user", "content": q}] for q in ("Hello!", "What is the time, please?")]
    answers = generate_answers(prompts, model, tiny_tokenizer, 6)
    for prompt, (text, count) in zip(prompts, answers, strict=True):
        ids = prompt_ids(tiny_tokenizer, prompt)
        new: list[int] = []
        while len(new) < 6 and not set(new) & set(end_token_ids(model, tiny_tokenizer)):
            with torch.inference_mode():
                new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
        assert count == len(new)
        assert text == tiny_tokenizer.decode(new, skip_special_tokens=True)


def test_answer_stops_before_its_end_token(model: Any, tiny_tokenizer: Any) -> None:
    class Ends:
        device = torch.device("cpu")
        generation_config = model.generation_config

        def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            said = tiny_tokenizer("dog<|im_end|>fox", add_special_tokens=False)["input_ids"]
            return torch.cat([input_ids, torch.tensor([said])], dim=1)

    [(text, count)] = generate_answers([[{"role": "user", "content": "x"}]], Ends(), tiny_tokenizer, 9)
    assert text == "dog"
    assert count == len(tiny_tokenizer("dog<|im_end|>", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kill_at_any_byte_loses_nothing(tmp_path: Path, model: Any, tiny_tokenizer: Any, temperature: float) -> None:
    whole = tmp_path / "whole.jsonl"
    run(whole, model, tiny_tokenizer, temperature=temperature)
    data = whole.read_bytes()
    lines = data.splitlines(keepends=True)
    ends = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    for cut in sorted({0, ends[1] + 1, ends[2], ends[4] - 1, len(data) - 1, len(data)}):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(data[:cut])
        run(torn, model, tiny_tokenizer, temperature=temperature)
        assert torn.read_bytes() == data, f"cut at {cut}"


def test_another_seed_samples_other_answers(tmp_path: Path, model: Any, tiny_tokenizer: Any) -> None:
    one = run(tmp_path / "1.jsonl", model, tiny_tokenizer, temperature=1.0, seed=0)
    two = run(tmp_path / "2.jsonl", model, tiny_tokenizer, temperature=1.0, seed=100)
    assert one != two


def test_output_of_other_conversations_is_refused(tmp_path: Path, model: Any, tiny_tokenizer: Any) -> None:
    run(tmp_path / "x.jsonl", model, tiny_tokenizer)
    before = (tmp_path / "x.jsonl").read_bytes()
    with pytest.raises(EyasError, match="holds other conversations"):
        run(tmp_path / "x.jsonl", model, tiny_tokenizer, talks=conversations()[::-1])
    assert (tmp_path / "x.jsonl").read_bytes() == before
