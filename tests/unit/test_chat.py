"""Which tokens of a conversation are trained on."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.chat import BadConversation, Encoded, encode, messages_of, prompt_ids

U = {"role": "user", "content": "What is the capital of France?"}
A = {"role": "assistant", "content": "The capital of France is Paris."}
U2 = {"role": "user", "content": "Hello!"}
A2 = {"role": "assistant", "content": "How can I help you today?"}

HEADER = "'<|im_start|>' + m['role'] + '\n'"
# Qwen3: thinking is shown in the last answer only
STRIPS_THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ " + HEADER + " + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# DeepSeek-R1: the prompt opens a thought that a finished answer does not show
OPENS_THINKING = (
    "{% for m in messages %}{{ " + HEADER + " + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Llama-3: a BOS, trimmed content, no newline behind a turn
TRIMS = (
    "{{ '<|endoftext|>' }}{% for m in messages %}{{ " + HEADER + " + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# a header that ends in a blank, which byte-level tokenizers would join to the answer's first word
ENDS_IN_A_BLANK = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ " + HEADER + " + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_template(tokenizer: Any, template: str) -> Any:
    import copy

    other = copy.copy(tokenizer)
    other.chat_template = template
    return other


def trained(tokenizer: Any, sample: Encoded) -> list[str]:
    """The trained runs as text."""
    runs: list[list[int]] = []
    before = False
    for token, on in zip(sample.input_ids, sample.loss_mask, strict=True):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(token)
        before = on
    return [tokenizer.decode(run) for run in runs]


def test_answer_is_trained_through_its_end_token_and_no_further(tiny_tokenizer: Any) -> None:
    [sample] = encode(tiny_tokenizer, [U, A])
    assert trained(tiny_tokenizer, sample) == ["The capital of France is Paris.<|im_end|>"]
    assert not sample.loss_mask[-1]
    assert tiny_tokenizer.decode(sample.input_ids[-1:]) == "\n"


def test_first_answer_token_is_trained(tiny_tokenizer: Any) -> None:
    [sample] = encode(tiny_tokenizer, [U, A])
    first = len(prompt_ids(tiny_tokenizer, [U]))
    assert sample.input_ids[:first] == prompt_ids(tiny_tokenizer, [U])
    assert sample.loss_mask.index(True) == first


def test_prompt_ids_are_plain_and_end_in_the_answers_header(tiny_tokenizer: Any) -> None:
    ids = prompt_ids(tiny_tokenizer, [U])
    assert type(ids) is list and all(type(i) is int for i in ids)
    assert tiny_tokenizer.decode(ids) == f"<|im_start|>user\n{U['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_all_answers_of_a_conversation_are_trained_in_one_sample(tiny_tokenizer: Any) -> None:
    [sample] = encode(tiny_tokenizer, [{"role": "system", "content": "one"}, U, A, U2, A2])
    assert trained(tiny_tokenizer, sample) == [f"{A['content']}<|im_end|>", f"{A2['content']}<|im_end|>"]


def test_template_that_rewrites_history_gives_one_sample_an_answer(tiny_tokenizer: Any) -> None:
    tokenizer = with_template(tiny_tokenizer, STRIPS_THINKING)
    thought = {"role": "assistant", "content": "<think>so</think>Paris."}
    first, second = encode(tokenizer, [U, thought, U2, {"role": "assistant", "content": "<think>hm</think>Hello!"}])
    assert trained(tokenizer, first) == ["<think>so</think>Paris.<|im_end|>"]
    assert trained(tokenizer, second) == ["<think>hm</think>Hello!<|im_end|>"]
    assert "so" not in tokenizer.decode(second.input_ids).replace("assistant", "")
    assert second.input_ids[: second.loss_mask.index(True)] == prompt_ids(tokenizer, [U, thought, U2])


def test_template_that_would_rewrite_but_has_nothing_to_gives_one_sample(tiny_tokenizer: Any) -> None:
    assert len(encode(with_template(tiny_tokenizer, STRIPS_THINKING), [U, A, U2, A2])) == 1


def test_answer_begins_where_prompt_and_finished_answer_part(tiny_tokenizer: Any) -> None:
    tokenizer = with_template(tiny_tokenizer, OPENS_THINKING)
    [sample] = encode(tokenizer, [U, A])
    assert trained(tokenizer, sample) == ["The capital of France is Paris.<|im_end|>"]


def test_there_is_one_bos_and_trimmed_answers_are_found(tiny_tokenizer: Any) -> None:
    tokenizer = with_template(tiny_tokenizer, TRIMS)
    [sample] = encode(tokenizer, [U, {"role": "assistant", "content": "  Paris. \n"}, U2, A2])
    assert trained(tokenizer, sample) == ["Paris.<|im_end|>", f"{A2['content']}<|im_end|>"]
    assert sample.input_ids.count(0) == 1
    assert sample.loss_mask[-1]


def test_answers_of_many_bytes_a_character_are_trained_whole(tiny_tokenizer: Any) -> None:
    [sample] = encode(tiny_tokenizer, [U, {"role": "assistant", "content": "🦅 Zürich ⟦☂⟧"}])
    assert trained(tiny_tokenizer, sample) == ["🦅 Zürich ⟦☂⟧<|im_end|>"]


@pytest.mark.parametrize("content", ["\n\nParis", "   ", "Paris\n\n", "a  b"])
def test_blanks_at_an_answers_edges_never_train_the_header(tiny_tokenizer: Any, content: str) -> None:
    samples = encode(tiny_tokenizer, [U, {"role": "assistant", "content": content}])
    if not content.strip():
        assert samples == []
        return
    [text] = trained(tiny_tokenizer, samples[0])
    assert text == content + "<|im_end|>"
    assert not any(samples[0].loss_mask[: len(prompt_ids(tiny_tokenizer, [U])) - 1])


def test_tokenizer_that_trims_blanks_from_offsets_masks_the_same(tiny_tokenizer: Any) -> None:
    import copy

    from tokenizers import processors

    plain = with_template(tiny_tokenizer, ENDS_IN_A_BLANK)
    other = copy.deepcopy(plain)
    other.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    talk = [U, {"role": "assistant", "content": "\nParis \n\n is"}, U2, {"role": "assistant", "content": "\n "}]
    assert encode(other, talk) == encode(plain, talk)
    [sample] = encode(other, talk)
    assert trained(other, sample) == ["\nParis \n\n is<|im_end|>"]


def test_token_across_the_answers_beginning_is_cut_there(tiny_tokenizer: Any) -> None:
    tokenizer = with_template(tiny_tokenizer, ENDS_IN_A_BLANK)  # " The" is one token when they are not kept apart
    [sample] = encode(tokenizer, [U, A, U2, A2])
    assert trained(tokenizer, sample) == [f"{A['content']}<|im_end|>", f"{A2['content']}<|im_end|>"]
    first = sample.loss_mask.index(True)
    assert sample.input_ids[:first] == prompt_ids(tokenizer, [U])


def test_tokenizer_without_offsets_masks_the_same(tiny_tokenizer: Any) -> None:
    class Slow:
        is_fast = False

        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return tiny_tokenizer(text, add_special_tokens=add_special_tokens)

        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_tokenizer, name)

    assert encode(Slow(), [U, A, U2, A2]) == encode(tiny_tokenizer, [U, A, U2, A2])


def test_sentencepiece_like_tokenizer_trains_the_first_word() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.train_from_iterator(["[INST] q [/INST] Paris is it"] * 9, trainers.BpeTrainer(special_tokens=["<s>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
    )
    [sample] = encode(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Paris is it"}])
    tokens = tokenizer.convert_ids_to_tokens([t for t, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m])
    assert "".join(tokens) == "▁Paris▁is▁it</s>"


def test_empty_answers_and_what_follows_the_last_are_left_out(tiny_tokenizer: Any) -> None:
    empty = {"role": "assistant", "content": ""}
    [sample] = encode(tiny_tokenizer, [U, empty, U2, A2, U])
    assert trained(tiny_tokenizer, sample) == [f"{A2['content']}<|im_end|>"]
    assert encode(tiny_tokenizer, [U, A2, U])[0] == encode(tiny_tokenizer, [U, A2])[0]
    assert encode(tiny_tokenizer, [U, empty]) == []


def test_greeting_before_any_question_is_not_trained(tiny_tokenizer: Any) -> None:
    [sample] = encode(tiny_tokenizer, [A2, U, A])
    assert trained(tiny_tokenizer, sample) == [f"{A['content']}<|im_end|>"]


def test_template_that_refuses_is_a_reason(tiny_tokenizer: Any) -> None:
    tokenizer = with_template(tiny_tokenizer, NO_SYSTEM)
    assert encode(tokenizer, [U, A])
    with pytest.raises(BadConversation, match="System role not supported"):
        encode(tokenizer, [{"role": "system", "content": "x"}, U, A])


def test_openai_and_sharegpt_records_are_the_same_conversation() -> None:
    openai = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, A]}
    sharegpt = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": A["content"]},
        ]
    }
    assert messages_of(openai) == messages_of(sharegpt) == [dict(m) for m in openai["messages"]]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of({"messages": [{"role": "user", "content": parts}]}) == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "no messages"),
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "no messages"),
        ({"messages": ["hi"]}, "no messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        ({"messages": [{"content": "x"}]}, "unknown role None"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool calls"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]}, "tool calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content that is not text"),
        ({"messages": [{"role": "user", "content": 5}]}, "content that is not text"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
    ],
)
def test_what_cannot_be_used_is_a_reason(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadConversation, match=reason):
        messages_of(record)
