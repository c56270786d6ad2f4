"""The offline figures against brute force: whole softmaxes over the full vocabulary, position by position."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.drafter.loss import distribution
from eyas.drafter.model import Drafter, DrafterConfig
from eyas.drafter.plan import Plan, make_plan
from eyas.errors import EyasError
from eyas.evaluate import offline as offline_module
from eyas.evaluate.offline import OfflineFigures, VerifierHead, evaluate
from eyas.store.layout import Manifest
from eyas.store.reader import Source, open_source
from eyas.store.writer import StoreWriter
from eyas.train.batches import load_batch

pytestmark = pytest.mark.usefixtures("one_thread")

H, HT, V, K = 16, 24, 30, 3
MANIFEST = Manifest("tiny", "f00d", HT, 8, V, (2, 4, 5, 8), "before")


def make_drafter(draft_vocab: int, seed: int = 0) -> Drafter:
    g = torch.Generator().manual_seed(seed)
    drafter = Drafter(DrafterConfig(H, HT, 20, 2, 1, 8, V, draft_vocab), torch.randn(V, H, generator=g))
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.4 if p.ndim > 1 else 0.1) + (p.ndim == 1))
    return drafter


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("offline") / "store"
    rng = np.random.default_rng(0)
    with StoreWriter(folder, MANIFEST) as store:
        for i, (prompt, answer) in enumerate([(5, 4), (3, 12), (1, 2), (6, 3), (2, 25)]):
            T = prompt + answer
            states = torch.from_numpy(rng.standard_normal((4, T, HT))).float()
            store.add(f"s{i}", rng.integers(0, V, T), np.arange(T) >= prompt, states)
    return open_source(folder)


def make_head(draft_ids: np.ndarray, seed: int = 5, scale: float = 0.6) -> VerifierHead:
    g = torch.Generator().manual_seed(seed)
    weight = torch.rand(HT, generator=g) + 0.5

    def norm(x: Tensor) -> Tensor:
        x = x.float()
        return x / x.square().mean(-1, keepdim=True).sqrt() * weight

    return VerifierHead(norm, torch.randn(V, HT, generator=g) * scale, torch.from_numpy(draft_ids))


@dataclass
class Brute:
    """Per step: right[k] and accepted[k], each {(sample, p): value}; and the loss of step 0."""

    right: list[dict[tuple[int, int], float]] = field(default_factory=lambda: [{} for _ in range(K)])
    accepted: list[dict[tuple[int, int], float]] = field(default_factory=lambda: [{} for _ in range(K)])
    losses: list[float] = field(default_factory=list)


def brute_force(drafter: Drafter, source: Source, head: VerifierHead) -> Brute:
    """One sample at a time, one position at a time, both distributions over all V tokens."""
    found = Brute()
    for i in range(len(source.ids)):
        ids, mask = source.tokens(i)
        states = source.states(i).float()
        everything = make_plan([(ids, np.ones(len(ids), bool))], K)
        outputs = drafter(everything, states[:3].transpose(0, 1).reshape(len(ids), 3 * HT)[everything.key_row])
        position = everything.key_row[everything.query_row].tolist()
        y = head.norm(states[3]) @ head.head.T  # [T, V]
        for k in range(K):
            for p in range(len(ids)):
                if p + 2 + k >= len(ids) or not (mask[p + 1 + k] and mask[p + 2 + k]):
                    continue
                q = torch.zeros(V)
                logits = drafter.lm_head(drafter.norm(outputs[k][position.index(p)]))
                q[head.draft_ids] = torch.softmax(logits, -1)
                full = torch.softmax(y[p + 1 + k], -1)
                found.right[k][i, p] = float(q.argmax() == full.argmax())
                found.accepted[k][i, p] = float(torch.minimum(full, q).sum())
                if k == 0:
                    goal = torch.softmax(y[p + 1][head.draft_ids], -1)
                    found.losses.append(float((goal * (goal.log() - torch.log_softmax(logits, -1))).sum()))
    return found


def by_rounds(kept: list[dict[tuple[int, int], float]], sample: int, p: int) -> tuple[float, float]:
    """Expected rounds and kept drafts from a round at p to the answer's end: every outcome of the round in turn."""
    if (sample, p) not in kept[0]:
        return 0.0, 0.0
    rounds, total, reached = 1.0, 0.0, 1.0
    for j in range(K + 1):
        stays = kept[j].get((sample, p)) if j < K else None
        chance = reached if stays is None else reached * (1 - stays)  # of exactly j drafts kept
        further, more = by_rounds(kept, sample, p + j + 1)
        rounds, total = rounds + chance * further, total + chance * (j + more)
        if stays is None:
            break
        reached *= stays
    return rounds, total


def length_by_rounds(kept: list[dict[tuple[int, int], float]], source: Source) -> float:
    """Mean over every answer, from its first round: behind the last token of the prompt."""
    ends = [by_rounds(kept, i, int(np.argmax(source.tokens(i)[1])) - 1) for i in range(len(source.ids))]
    return 1 + sum(total for _, total in ends) / sum(rounds for rounds, _ in ends)


@pytest.mark.parametrize("draft_vocab", [V, 12, 1])
@pytest.mark.parametrize("chunk", [256, 3])
@torch.no_grad()
def test_every_figure_equals_brute_force(
    source: Source, draft_vocab: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_module, "CHUNK", chunk)
    drafter = make_drafter(draft_vocab)
    head = make_head(np.sort(np.random.default_rng(2).permutation(V)[:draft_vocab]))
    batches = [load_batch(source, samples, K, 1000) for samples in ([3, 0], [2], [4, 1])]
    figures = evaluate(drafter, head, batches, K, torch.float32)
    assert figures is not None

    brute = brute_force(drafter, source, head)
    every = set(brute.right[0]) & set(brute.right[1]) & set(brute.right[2])
    assert 20 < len(every) < len(brute.right[0])
    joint = [np.mean([np.prod([brute.right[j][at] for j in range(k + 1)]) for at in every]) for k in range(K)]
    before = [at for at in every if brute.right[0][at]]
    assert figures.accuracy_joint == pytest.approx(joint, abs=1e-6)
    assert figures.accuracy[0] == pytest.approx(joint[0], abs=1e-6)
    if before:
        assert figures.accuracy[1] == pytest.approx(np.mean([brute.right[1][at] for at in before]), abs=1e-6)
    assert figures.acceptance == pytest.approx([np.mean(list(a.values())) for a in brute.accepted], abs=1e-5)
    assert figures.accept_length == pytest.approx(length_by_rounds(brute.accepted, source), abs=1e-5)
    assert figures.accept_length_greedy == pytest.approx(length_by_rounds(brute.right, source), abs=1e-6)
    assert figures.loss == pytest.approx(np.mean(brute.losses), abs=1e-5)
    assert (figures.positions, figures.samples) == (len(every), 5)


def test_conditional_times_conditional_is_joint(source: Source) -> None:
    drafter, head = make_drafter(V), make_head(np.arange(V))
    drafter.lm_head.weight.data[:] = head.head[:, :H]  # a drafter that is right now and then
    figures = evaluate(drafter, head, [load_batch(source, [0, 1, 3, 4], K, 1000)], K, torch.float32)
    assert figures is not None
    assert figures.accuracy_joint == pytest.approx(np.cumprod(figures.accuracy).tolist())
    assert figures.accuracy_joint[0] >= figures.accuracy_joint[1] >= figures.accuracy_joint[2]


class Rigged:
    """Stands in for a drafter; its logits are the logarithms of `p` [R, Vd]."""

    def __init__(self, p: Tensor) -> None:
        self.p, self.lm_head = p, SimpleNamespace(weight=torch.eye(p.shape[1]))

    def norm(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, plan: Plan, _states: Tensor) -> list[Tensor]:
        outputs = [torch.zeros(len(plan.query_row), self.p.shape[1]) for _ in range(K)]
        for k, out in enumerate(outputs):
            out[plan.trained[k]] = self.p[plan.target[k]].log()
        return outputs


@pytest.mark.parametrize("tokens", [V, 3])
def test_a_drafter_that_says_what_the_verifier_does_is_accepted_for_what_it_can_say(
    source: Source, tokens: int
) -> None:
    """With the verifier's own probabilities acceptance is the verifier's mass on the draft vocabulary: 1 for all."""
    draft_ids = np.sort(np.random.default_rng(3).permutation(V)[:tokens])
    head = make_head(draft_ids)
    batch = load_batch(source, [4], K, 1000)
    last = head.norm(batch.last)
    mass = torch.softmax(last @ head.head.T, -1)[:, draft_ids].sum(-1)  # [R]
    p = distribution(last @ head.draft_head().T).p
    figures = evaluate(Rigged(p), head, [batch], K, torch.float32)  # type: ignore[arg-type]
    assert figures is not None
    for k in range(K):
        assert figures.acceptance[k] == pytest.approx(float(mass[batch.plan.target[k]].mean()), abs=1e-5)
    assert figures.loss == pytest.approx(0, abs=1e-5)
    if tokens == V:  # 24 positions: six rounds of four tokens
        assert figures.accept_length == pytest.approx(K + 1, abs=1e-5)
        assert figures.accept_length_greedy == K + 1
    else:
        assert figures.acceptance[0] < 0.6


def test_nothing_that_all_steps_train_gives_no_figures(source: Source) -> None:
    drafter, head = make_drafter(V), make_head(np.arange(V))
    assert evaluate(drafter, head, [], K, torch.float32) is None
    assert evaluate(drafter, head, [load_batch(source, [2], K, 1000)], 3, torch.float32) is None


@pytest.mark.parametrize("what", ["drafter", "states"])
def test_what_is_no_number_is_refused_and_never_the_best(source: Source, what: str) -> None:
    drafter, batch = make_drafter(V), load_batch(source, [1, 4], K, 64)
    if what == "drafter":
        drafter.lm_head.weight.data[3] = torch.nan
    else:
        batch.last[5] = torch.nan  # one row of many
    with pytest.raises(EyasError, match="NaN or infinity in what is validated: train with a lower --lr"):
        evaluate(drafter, make_head(np.arange(V)), [batch], K, torch.float32)


def test_figures_are_plain_values(source: Source, tmp_path: Path) -> None:
    import json

    drafter, head = make_drafter(V), make_head(np.arange(V))
    figures = evaluate(drafter, head, [load_batch(source, [1, 4], K, 1000)], K, torch.float32)
    assert isinstance(figures, OfflineFigures)
    (tmp_path / "f.json").write_text(json.dumps(figures.to_dict()))
    assert OfflineFigures(**json.loads((tmp_path / "f.json").read_text())) == figures
