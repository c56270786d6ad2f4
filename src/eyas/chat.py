"""Conversations -> token ids and loss mask, through the verifier's own chat template.

Trained on is what the verifier itself would generate: an assistant turn's text up to and including the token that
ends it, not the header before it nor the template's newline after it. The span is found by rendering the conversation
up to the turn (with the generation prompt) and through the turn, and by the tokenizer's character offsets; no
template needs to be known, nor to carry {% generation %} marks (where they are, they say the same or less).

Cost: two short renderings a turn and one tokenization a conversation, about 1 ms for a thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.errors import EyasError

Message = dict[str, Any]
HALF = "text with half a character (a lone surrogate)"
TURNS = 32  # answers in the first look at how many turns a sample can hold
ROLES = {  # in lower case
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}


class BadConversation(EyasError):
    """A conversation that cannot be used. reason: one that fits many, to be counted by; detail: what this one has."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} {detail}".rstrip())
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Encoded:
    """One training sample. input_ids: token ids [T]; loss_mask: True [T] where the verifier would have written it."""

    input_ids: list[int]
    loss_mask: list[bool]


def messages_of(record: Any) -> list[Message]:
    """The turns of a record in the OpenAI form (`messages`) or ShareGPT's (`conversations`: from, value).

    Content given as a list of text parts is joined; `reasoning_content` is kept for the template.
    Raises BadConversation: no messages, an unknown role, tools, content other than text, half a character.
    """
    turns = next((record[k] for k in ("messages", "conversations") if record.get(k)), None)
    if not isinstance(turns, list | tuple):
        raise BadConversation("no messages")
    return [_message(turn) for turn in turns]


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise BadConversation("no messages")
    given = turn.get("role") or turn.get("from")
    said = given.lower() if isinstance(given, str) else ""
    if said in ("tool", "function", "observation", "function_call") or turn.get("tool_calls"):
        raise BadConversation("tool calls")
    if said not in ROLES:
        raise BadConversation("unknown role", repr(given)[:40])
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if isinstance(content, list | tuple):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise BadConversation("content that is not text")
        content = "".join(p["text"] for p in content)
    if content is not None and not isinstance(content, str):
        raise BadConversation("content that is not text")
    message = {"role": ROLES[said], "content": content or ""}
    if isinstance(turn.get("reasoning_content"), str):
        message["reasoning_content"] = turn["reasoning_content"]
    if not all(map(is_text, message.values())):
        raise BadConversation(HALF)
    return message


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON may hold half of a surrogate pair, as `\\ud800`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` and of the header that asks for an answer: what an engine feeds the verifier."""
    ids: list[int] = tokenizer(render(tokenizer, messages, answer=True), add_special_tokens=False)["input_ids"]
    return ids


def encode(tokenizer: Any, messages: Sequence[Message], most: int | None = None) -> list[Encoded]:
    """`messages` as one sample with every answer trained on, or as one sample an answer.

    The latter where the template rewrites earlier turns (Qwen3 drops the thinking of all answers but the last):
    each answer is then seen as it stood when it was given. What follows the last answer is left out; an empty answer
    and one before any question are not trained on. The list is empty when no answer is left.
    most: tokens of a sample that are wanted; turns that lie behind them are not looked at.
    Raises BadConversation when the template refuses the conversation.
    """
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > first and _says_something(m)]
    if not answers:
        return []
    if most is not None:
        answers = _within(tokenizer, messages, answers, most)
    messages = messages[: answers[-1] + 1]
    whole = render(tokenizer, messages)
    through = {i: whole if i == answers[-1] else render(tokenizer, messages[: i + 1]) for i in answers}
    spans = {i: _answer_span(tokenizer, messages[:i], through[i]) for i in answers}
    if all(whole.startswith(through[i][: spans[i][1]]) for i in answers):
        return [_tokens(tokenizer, whole, list(spans.values()))]
    return [_tokens(tokenizer, through[i], [spans[i]]) for i in answers]


def _within(tokenizer: Any, messages: Sequence[Message], answers: list[int], most: int) -> list[int]:
    """The first answers, up to one whose prompt is longer than `most` tokens: every answer costs renderings."""
    k = TURNS
    while k < len(answers):
        if len(prompt_ids(tokenizer, messages[: answers[k]])) > most:
            return answers[: k + 1]
        k *= 2
    return answers


def render(tokenizer: Any, messages: Sequence[Message], answer: bool = False) -> str:
    """The chat template's text for `messages`, with the header of an answer at the end if `answer`."""
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
    except Exception as error:  # a template is a program: its own raise_exception, and whatever else Python has
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadConversation("the chat template refuses it", f"({said[:80]})") from None
    return str(text)


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("reasoning_content", "").strip())


def _answer_span(tokenizer: Any, before: Sequence[Message], through: str) -> tuple[int, int]:
    """First and past-the-last character of the answer that ends `through`.

    A generation prompt may open what a finished answer does not show (DeepSeek-R1's `<think>`): the answer begins
    where the two texts part.
    """
    prompt = render(tokenizer, before, answer=True)
    start = _common(prompt, through)
    if start < len(prompt) and start < len(prompt[: _common(prompt, render(tokenizer, before))].rstrip()):
        raise BadConversation("the chat template changes the question once it is answered")
    return start, len(through.rstrip())


def _common(a: str, b: str) -> int:
    """How many characters the two texts share at their beginning."""
    if a.startswith(b) or b.startswith(a):  # nearly always
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _tokens(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> Encoded:
    """`text` as token ids; trained on where a token lies wholly in one of `spans`."""
    if not tokenizer.is_fast:
        return _tokens_by_piece(tokenizer, text, spans)
    # verbose=False: no warning about the model's maximum length, prepare has its own
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)
    start, stop = offsets[:, 0].copy(), offsets[:, 1]
    # Some tokenizers trim blanks from offsets: a blank token's are empty, and it lies behind the token before it.
    empty = np.flatnonzero(start == stop)
    start[empty] = np.where(empty > 0, stop[empty - 1], 0)
    if any(((start < first) & (stop > first)).any() for first, _ in spans):
        # One token would hold the header's end and the answer's beginning, which the verifier never wrote as one.
        return _tokens_by_piece(tokenizer, text, spans)
    mask = np.zeros(len(start), bool)
    for first, last in spans:
        mask |= (start >= first) & (start < last) & (stop <= last)
    return Encoded(list(found["input_ids"]), mask.tolist())


def _tokens_by_piece(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> Encoded:
    """The same with prompts and answers tokenized apart, which needs no offsets (tiktoken tokenizers have none)."""
    ids: list[int] = []
    mask: list[bool] = []
    at = 0
    for first, last in [*spans, (len(text), len(text))]:
        for piece, trained in ((text[at:first], False), (text[first:last], True)):
            new = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += new
            mask += [trained] * len(new)
        at = last
    return Encoded(ids, mask)
