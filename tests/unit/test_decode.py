"""Decoding with drafts: what comes out is what the verifier says alone, and what is counted is what happened."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.drafter.model import Drafter, DrafterConfig
from eyas.drafter.plan import make_plan
from eyas.errors import EyasError
from eyas.evaluate.decode import Decoded, EagleDraft, check_full_attention, decode, near_tie
from eyas.evaluate.run import Spoken, spread
from eyas.record.record import Record

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (2, 4, 5)
PROMPTS = [[1, 50, 60, 70], [1, 300, 9], [1, *range(100, 141)], [1, 7], [1, 222, 111, 42, 43, 44, 45, 80, 81]]


@pytest.fixture(scope="module")
def model(tiny_verifier: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()


def alone(model: Any, prompt: list[int], count: int, end: set[int] | None = None) -> list[int]:
    """What `model.generate` says, greedily."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=sorted(end) if end else [-1],
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@functools.cache
def _future(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    return [*prompt, *alone(model, list(prompt), count)]


class Rigged:
    """Knows the verifier's own output and drafts it, but for the drafts that `right(row, x)` says are wrong.

    Also checks what it is given: the pairs it reads are the true tokens at their true positions, each once.
    """

    def __init__(self, model: Any, prompts: list[list[int]], right: Any) -> None:
        self.truth = [_future(model, tuple(p), 100) for p in prompts]
        self.right, self.vocab = right, model.config.vocab_size
        self.read_up_to = [0] * len(prompts)

    def read(self, tokens: Tensor, states: Tensor, position: Tensor, valid: Tensor) -> None:
        assert states.shape == (*tokens.shape, 3 * 64)
        for row, truth in enumerate(self.truth):
            for token, p, is_valid in zip(
                tokens[row].tolist(), position[row].tolist(), valid[row].tolist(), strict=True
            ):
                if is_valid and p + 1 < len(truth):
                    assert token == truth[p + 1]
                    assert p == self.read_up_to[row]
                    self.read_up_to[row] += 1

    def propose(self, count: int) -> Tensor:
        drafts = []
        for row, truth in enumerate(self.truth):
            first = self.read_up_to[row] + 1  # x[0..read_up_to] are known
            line = [truth[x] if x < len(truth) else 0 for x in range(first, first + count)]
            drafts.append([t if self.right(row, first + k) else (t + 1) % self.vocab for k, t in enumerate(line)])
        return torch.tensor(drafts)


def drafted(
    model: Any, prompts: list[list[int]], draft: Any, count: int, K: int = 3, end: set[int] | None = None
) -> Decoded:
    return decode(
        model, LAYERS, prompts, draft=draft, draft_tokens=K, max_new_tokens=count, end_tokens=end or set()
    )  # fmt: skip


# -- what is counted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 3, 5])
def test_a_drafter_that_copies_the_verifier_reaches_accept_length_k_plus_1(model: Any, K: int) -> None:
    result = drafted(model, PROMPTS, Rigged(model, PROMPTS, lambda _row, _x: True), 1 + 4 * (K + 1), K)
    assert result.accept_length == K + 1
    assert result.per_position == [1.0] * K
    assert result.rounds == 4 * len(PROMPTS)
    assert result.tokens == [alone(model, p, 1 + 4 * (K + 1)) for p in PROMPTS]


def test_a_drafter_that_is_always_wrong_has_accept_length_1(model: Any) -> None:
    result = drafted(model, PROMPTS, Rigged(model, PROMPTS, lambda _row, _x: False), 12)
    assert result.accept_length == 1.0
    assert result.per_position == [0.0, 0.0, 0.0]
    assert result.rounds == 11 * len(PROMPTS)
    assert result.tokens == [alone(model, p, 12) for p in PROMPTS]


def test_a_draft_behind_a_wrong_one_is_not_kept(model: Any) -> None:
    prompt = PROMPTS[0]
    # x[5], the first draft of the first round, is right, x[6] wrong, x[7] right: one draft is kept.
    result = drafted(model, [prompt], Rigged(model, [prompt], lambda _row, x: x != 6), 3)
    assert result.rounds == 1 and result.accepted == [1, 0, 0]
    assert result.tokens == [alone(model, prompt, 3)]


def test_without_a_drafter_every_round_gives_one_token(model: Any) -> None:
    result = drafted(model, PROMPTS, None, 9)
    assert (result.accept_length, result.rounds, result.accepted) == (1.0, 8 * len(PROMPTS), [])
    assert result.new_tokens == 9 * len(PROMPTS)


# -- what comes out ----------------------------------------------------------------------------------------------------


def ragged(row: int, x: int) -> bool:
    """Right or wrong by a hash, so that every row keeps other numbers of drafts."""
    return (x * 2654435761 + row * 40503) % 97 > 30


def test_a_ragged_batch_equals_each_row_alone_and_generate(model: Any) -> None:
    together = drafted(model, PROMPTS, Rigged(model, PROMPTS, ragged), 40)
    assert together.tokens == [alone(model, p, 40) for p in PROMPTS]
    rounds, accepted = 0, np.zeros(3, int)
    for row, prompt in enumerate(PROMPTS):
        single = drafted(model, [prompt], Rigged(model, [prompt], lambda _row, x, row=row: ragged(row, x)), 40)
        assert single.tokens == [together.tokens[row]]
        rounds, accepted = rounds + single.rounds, accepted + single.accepted
    assert (together.rounds, together.accepted) == (rounds, accepted.tolist())
    assert 1.3 < together.accept_length < 3.5


def make_drafter(model: Any, draft_vocab: int = 150, seed: int = 0) -> tuple[Drafter, Tensor]:
    """An untrained drafter, and the verifier ids of its vocabulary."""
    V = model.config.vocab_size
    config = DrafterConfig(64, 64, 96, 4, 2, 16, V, draft_vocab, rms_norm_eps=1e-6)
    g = torch.Generator().manual_seed(seed)
    drafter = Drafter(config, model.model.embed_tokens.weight.detach().clone())
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.1 + (p.ndim == 1))
    targets = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(V)[:draft_vocab]))
    return drafter, targets


def test_an_untrained_drafter_changes_nothing_of_the_output(model: Any) -> None:
    drafter, targets = make_drafter(model)
    result = drafted(model, PROMPTS, EagleDraft(drafter, targets, torch.float32), 30)
    assert result.tokens == [alone(model, p, 30) for p in PROMPTS]
    assert result.rounds > 0


def test_the_limit_holds_exactly_wherever_it_falls_in_a_round(model: Any) -> None:
    for count in range(1, 12):
        result = drafted(model, PROMPTS[:2], Rigged(model, PROMPTS[:2], lambda _row, _x: True), count)
        assert result.tokens == [alone(model, p, count) for p in PROMPTS[:2]]


def test_an_end_token_stops_its_row_wherever_it_falls_in_a_round(model: Any) -> None:
    prompt, others = PROMPTS[0], PROMPTS[1:3]
    text = alone(model, prompt, 40)
    firsts = [i for i, t in enumerate(text) if t not in text[:i]]
    assert len({i % 4 for i in firsts}) == 4, "the first token, an accepted draft and the verifier's own are all tried"
    for at in firsts:
        prompts = [prompt, *others]
        result = drafted(model, prompts, Rigged(model, prompts, lambda _row, _x: True), 40, end={text[at]})
        assert result.tokens == [alone(model, p, 40, {text[at]}) for p in prompts]
        assert result.tokens[0] == text[: at + 1]


def test_drafts_behind_an_end_token_are_not_counted(model: Any) -> None:
    prompt = PROMPTS[0]
    text = alone(model, prompt, 40)
    copy = functools.partial(Rigged, model, [prompt], lambda _row, _x: True)
    for at in (i for i, t in enumerate(text) if t not in text[:i]):
        result = drafted(model, [prompt], copy(), 40, end={text[at]})
        whole, rest = divmod(at, 4)  # text[0] comes with the prompt, then four a round
        expected = [whole + (rest > k) for k in range(3)] if at else [0, 0, 0]
        assert result.rounds == -(-at // 4)
        assert result.accepted == expected


# -- training and serving are the same function ------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[12], [5, 4, 3], [1] * 12])
@torch.no_grad()
def test_drafts_have_the_logits_of_the_training_forward_on_the_same_tokens(model: Any, chunks: list[int]) -> None:
    K, n = 4, 12
    drafter, targets = make_drafter(model)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (n + 1,), generator=g)  # x[0..n]
    states = torch.randn(n, 192, generator=g)
    served: list[Tensor] = []
    drafter.lm_head.register_forward_hook(lambda _m, _i, out: served.append(out[0]))
    draft = EagleDraft(drafter, targets, torch.float32)
    start = 0
    for size in chunks:
        at = torch.arange(start, start + size)
        draft.read(ids[None, at + 1], states[None, at], at[None], torch.ones(1, size, dtype=torch.bool))
        start += size
        if start < n:
            draft.propose(2)  # drafts of an earlier round must leave no trace
    served.clear()
    drafts = draft.propose(K)[0]

    # The training forward over the same text, the drafts being its true tokens from x[n + 1] on.
    text = torch.cat([ids, drafts, torch.zeros(4, dtype=torch.int64)]).numpy().astype(np.int32)
    plan = make_plan([(text, np.ones(len(text), bool))], K)
    padded = torch.cat([states, torch.randn(len(text) - n, 192, generator=g)])
    outputs = drafter(plan, padded[plan.key_row])
    (query,) = torch.nonzero(plan.key_row[plan.query_row] == n - 1)[0].tolist()
    for k in range(K):
        trained = torch.nn.functional.linear(drafter.norm(outputs[k][query]), drafter.lm_head.weight)
        torch.testing.assert_close(served[k], trained, rtol=1e-4, atol=1e-4)
        assert int(drafts[k]) == int(targets[trained.argmax()])


@torch.no_grad()
def test_padding_and_rejected_positions_change_no_draft(model: Any) -> None:
    drafter, targets = make_drafter(model)
    g = torch.Generator().manual_seed(2)
    V = model.config.vocab_size
    lengths = [9, 4]
    ids = [torch.randint(0, V, (T,), generator=g) for T in lengths]
    states = [torch.randn(T, 192, generator=g) for T in lengths]
    served: list[Tensor] = []
    drafter.lm_head.register_forward_hook(lambda _m, _i, out: served.append(out))

    single = []
    for x, s in zip(ids, states, strict=True):
        draft = EagleDraft(drafter, targets, torch.float32)
        draft.read(x[None], s[None], torch.arange(len(x))[None], torch.ones(1, len(x), dtype=torch.bool))
        served.clear()
        single.append((draft.propose(3)[0], torch.cat(served)))

    # Together: row 1 padded on the left, and after two pairs both rows get pairs that are marked as rejected.
    draft = EagleDraft(drafter, targets, torch.float32)
    first = torch.zeros(2, 5, dtype=torch.int64)
    g_first, position = torch.randn(2, 5, 192, generator=g), torch.zeros(2, 5, dtype=torch.int64)
    valid = torch.zeros(2, 5, dtype=torch.bool)
    for row, count in enumerate((5, 2)):
        first[row, 5 - count :], g_first[row, 5 - count :] = ids[row][:count], states[row][:count]
        position[row, 5 - count :], valid[row, 5 - count :] = torch.arange(count), True
    draft.read(first, g_first, position, valid)
    second, g_second = torch.randint(0, V, (2, 5), generator=g), torch.randn(2, 5, 192, generator=g)
    valid = torch.zeros(2, 5, dtype=torch.bool)
    for row, (start, count) in enumerate(((5, 4), (2, 2))):
        second[row, :count], g_second[row, :count] = ids[row][start:], states[row][start:]
        valid[row, :count] = True
    draft.read(second, g_second, torch.tensor([[5], [2]]) + torch.arange(5), valid)
    served.clear()
    together = draft.propose(3)
    for row, (drafts, logits) in enumerate(single):
        assert together[row].tolist() == drafts.tolist()
        torch.testing.assert_close(torch.stack([s[row] for s in served]), logits, rtol=1e-4, atol=1e-4)


def test_the_states_a_drafter_reads_are_those_that_capture_would_store(model: Any) -> None:
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    class Spy(Rigged):
        def read(self, tokens: Tensor, states: Tensor, position: Tensor, valid: Tensor) -> None:
            seen.append((tokens, states, position, valid))
            super().read(tokens, states, position, valid)

    result = drafted(model, PROMPTS[:3], Spy(model, PROMPTS[:3], ragged), 20)
    for row, prompt in enumerate(PROMPTS[:3]):
        text = [*prompt, *result.tokens[row]]
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[k][0] for k in LAYERS], -1)
        checked = 0
        for _, states, position, valid in seen:
            for p in position[row][valid[row]].tolist():
                if p == checked < len(text):
                    at = int(torch.nonzero((position[row] == p) & valid[row])[0])
                    torch.testing.assert_close(states[row, at], expected[p], rtol=1e-3, atol=1e-4)
                    checked += 1
        assert checked >= len(text) - 1


# -- what cannot be decoded, and near-ties -----------------------------------------------------------------------------


def test_a_window_that_decoding_would_leave_is_refused() -> None:
    def config(**fields: Any) -> Any:
        made = SimpleNamespace(**fields)
        made.get_text_config = lambda: made
        return made

    mixed = ["full_attention", "sliding_attention"]
    check_full_attention(config(sliding_window=None), 10_000)
    check_full_attention(config(sliding_window=512, layer_types=mixed), 512)
    check_full_attention(config(sliding_window=512, use_sliding_window=False), 10_000)
    check_full_attention(config(sliding_window=512, layer_types=["full_attention"] * 2), 10_000)
    for narrow in (config(sliding_window=512), config(sliding_window=512, layer_types=mixed)):
        with pytest.raises(EyasError, match="a window of 512 tokens"):
            check_full_attention(narrow, 513)


def test_a_near_tie_is_told_from_a_real_difference(tiny_verifier: Path) -> None:
    from transformers import AutoModelForCausalLM

    prefix = PROMPTS[2]
    exact = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()
    with torch.no_grad():
        best = int(exact(torch.tensor([prefix])).logits[0, -1].argmax())
        exact.lm_head.weight[3] = exact.lm_head.weight[best] * (1 + 1e-5)
    rounded = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        rounded.lm_head.weight[3] = exact.lm_head.weight[3].to(torch.bfloat16)
        order = exact(torch.tensor([prefix])).logits[0, -1].argsort(descending=True).tolist()
    assert {order[0], order[1]} == {best, 3}
    is_one, gap, limit = near_tie(rounded, exact, prefix, best, 3)
    assert is_one and gap < limit
    assert not near_tie(rounded, exact, prefix, best, order[-1])[0], "far apart"
    low = order[-2:]
    assert not near_tie(rounded, exact, prefix, *low)[0], "close to each other, but far from the best"
    assert not near_tie(exact, exact, prefix, best, order[2])[0], "without rounding nothing is a tie but equality"


def test_decoded_prompts_are_spread_over_the_samples() -> None:
    assert spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert spread(list("ab"), 5) == ["a", "b"]


def test_a_long_decoding_is_spoken_of_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("eyas.evaluate.run.time", SimpleNamespace(monotonic=lambda: now[0]))
    lines: list[str] = []
    record = Record(None)
    told = Spoken(lines.append, record).about("prompts 1 to 2 of 2, with the drafter", 128)
    for second in range(0, 20, 2):  # a round every two seconds, two rows
        now[0] = second
        told(Decoded([[7] * second] * 2))
    assert lines == [
        f"decoding prompts 1 to 2 of 2, with the drafter · {n} of at most 128 tokens" for n in (12, 24, 36)
    ]
    beat = record.beat_values()
    assert (beat["part"], beat["parts"]) == (36, 128)


def test_every_round_is_told(model: Any) -> None:
    seen: list[int] = []
    result = decode(
        model, (2, 4, 5), [[5, 6, 7]], draft=None, draft_tokens=3, max_new_tokens=6, end_tokens=set(),
        told=lambda so_far: seen.append(so_far.new_tokens),
    )  # fmt: skip
    assert seen == [1, 2, 3, 4, 5] and result.new_tokens == 6
