"""Top-k logits in place of the last state: what is kept, what it stands for, and that a store of it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import write
from safetensors import safe_open

from eyas.config import TrainConfig
from eyas.drafter.loss import head_loss
from eyas.errors import EyasError
from eyas.evaluate.kept import KeptHead
from eyas.store import logits
from eyas.store.check import check
from eyas.store.convert import convert
from eyas.store.layout import Manifest, planes, sample_bytes
from eyas.store.reader import StoreSource, open_source
from eyas.store.writer import StoreWriter
from eyas.train.batches import Loader, load_batch
from eyas.train.loop import Run
from eyas.verifier import Verifier

pytestmark = pytest.mark.usefixtures("one_thread")

HT, V, K = 24, 200, 7


def quiet(_line: str) -> None:
    pass


@pytest.fixture
def head() -> torch.Tensor:
    return torch.randn(V, HT, generator=torch.Generator().manual_seed(1)) * 0.5


@pytest.fixture
def last() -> torch.Tensor:
    return torch.randn(300, HT, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


def test_a_row_holds_the_likeliest_tokens_and_their_log_probability(head: torch.Tensor, last: torch.Tensor) -> None:
    words = logits.TopK(K, head, None).rows(last)
    assert words.shape == (300, 3 * K)
    ids, log_p = logits.split(words)
    true = torch.log_softmax(last.float() @ head.T, dim=-1)
    values, tokens = true.topk(K, dim=1)
    assert torch.equal(ids.long(), tokens)
    torch.testing.assert_close(log_p.float(), values, rtol=1e-3, atol=1e-4)
    assert torch.equal(logits.first_choice(words), true.argmax(-1))
    assert torch.equal(logits.pack(ids, log_p).view(torch.int16), words.view(torch.int16))


def test_what_is_not_kept_shares_the_rest_of_the_mass_evenly(head: torch.Tensor, last: torch.Tensor) -> None:
    words = logits.TopK(K, head, None).rows(last[:5])
    p = logits.Complete(torch.arange(V), V)(words).exp()
    true = torch.softmax(last[:5].float() @ head.T, dim=-1)
    torch.testing.assert_close(p.sum(1), torch.ones(5), rtol=1e-5, atol=1e-5)
    for row, whole in zip(p, true, strict=True):
        kept = whole.topk(K).indices
        torch.testing.assert_close(row[kept], whole[kept], rtol=1e-3, atol=1e-5)
        rest = torch.ones(V, dtype=torch.bool).index_fill(0, kept, False)
        torch.testing.assert_close(row[rest], ((1 - whole[kept].sum()) / (V - K)).expand(V - K), rtol=2e-2, atol=1e-6)


def test_over_a_draft_vocabulary_tokens_keep_their_probability(head: torch.Tensor, last: torch.Tensor) -> None:
    draft = torch.arange(0, V, 3)
    words = logits.TopK(K, head, None).rows(last)
    kept = KeptHead(draft, V)
    whole = logits.Complete(torch.arange(V), V)(words)
    torch.testing.assert_close(kept.draft_head()(words), whole[:, draft])
    choice, share = kept.over_all(words)
    assert torch.equal(choice, (last.float() @ head.T).argmax(-1))
    torch.testing.assert_close(share, whole[:, draft].logsumexp(-1))


@pytest.mark.parametrize("kinds", [{"kl": 1.0}, {"reverse_kl": 1.0}, {"tv": 0.5, "lk": 1.0}])
def test_the_loss_and_its_gradient_are_those_of_the_completed_distribution(
    head: torch.Tensor, last: torch.Tensor, kinds: dict[str, float]
) -> None:
    draft = torch.arange(5, 150)
    words, kept = logits.TopK(K, head, None).rows(last), KeptHead(draft, V)
    whole = kept.draft_head()(words)  # as if these were states of a head that passes them through
    rng = torch.Generator().manual_seed(3)
    hidden, weights = torch.randn(400, 16, generator=rng), torch.randn(len(draft), 16, generator=rng)
    target = torch.randint(0, 300, (400,), generator=rng).sort().values
    found = []
    for rows, of in ((whole, torch.eye(len(draft))), (kept.targets(words, torch.bfloat16), kept.draft_head())):
        h, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        loss, right = head_loss(h, w, rows, of, target, torch.ones(400) / 400, kinds)
        loss.backward()
        found.append((loss.detach(), right.float(), h.grad, w.grad))
    for a, b in zip(*found, strict=True):
        assert torch.isfinite(b).all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_store_keeps_them_as_two_tensors_that_any_safetensors_tool_reads(
    tmp_path: Path, on_policy: list[Any], tiny_verifier: Path
) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    plain = open_source(folder, verifier.config, verifier.fingerprint)
    for codec in ("bf16", "int8"):
        report = convert(folder, tmp_path / codec, verifier, codec=codec, last="logits:5", say=quiet)
        assert report["samples"] == len(plain.ids)
        source = open_source(tmp_path / codec)
        assert isinstance(source, StoreSource)
        names = [p.name for p in planes(source.manifest)]
        last = plain.manifest.layers[-1]
        assert names[-2:] == [f"i{last}", f"p{last}"]
        with safe_open(next((tmp_path / codec).glob("*.safetensors")), framework="pt") as shard:
            trained = int(plain.trained[0])
            ids, log_p = shard.get_tensor(f"0.i{last}"), shard.get_tensor(f"0.p{last}")
            assert (ids.shape, ids.dtype, log_p.dtype) == ((trained, 5), torch.int32, torch.float16)
        assert torch.equal(logits.pack(ids, log_p).view(torch.int16), source.logits(0).view(torch.int16))
        mask = plain.tokens(0)[1]
        norm = verifier.final_norm() if plain.manifest.norm_side == "before" else lambda x: x
        states = plain.states(0, layers=[last])[0][torch.from_numpy(mask)].float()
        true = torch.log_softmax(norm(states) @ verifier.lm_head().float().T, -1)
        torch.testing.assert_close(log_p.float(), true.topk(5).values, rtol=1e-3, atol=1e-4)
        assert source.states(0).shape[0] == 3
        ok = check(tmp_path / codec, verifier, against=folder, say=quiet)
        assert ok["ok"]
        assert ok["agreement"]["share"] > 0.5
        assert ok["codecs"][0]["codec"] == f"{codec}, logits:5"
        assert ok["codecs"][0]["top1"] > 0.99
        exact = source.nbytes(0)
        assert exact == sum(
            int(p.row_bytes) * (trained if p.layer == last else len(mask)) for p in planes(source.manifest)
        )
        assert exact < sample_bytes(len(mask), source.manifest)


def test_batches_hold_the_kept_rows_of_their_targets(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    convert(folder, tmp_path / "s", verifier, last="logits:6", say=quiet)
    plain, kept = open_source(folder, verifier.config), open_source(tmp_path / "s")
    norm = verifier.final_norm() if plain.manifest.norm_side == "before" else lambda x: x
    top = logits.TopK(6, verifier.lm_head(dtype=torch.float32), norm)
    packs = [[3, 0, 7], [11], [1, 2, 4, 5, 6]]
    for cut in (512, 19):
        for pack, batch in zip(packs, Loader(kept, packs, 3, cut, 2), strict=True):
            wanted = load_batch(plain, pack, 3, cut)
            assert torch.equal(batch.states, wanted.states)
            assert torch.equal(batch.last.view(torch.int16), top.rows(wanted.last).view(torch.int16))


def test_a_flipped_bit_and_a_wrong_value_are_found(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    verifier = Verifier(tiny_verifier)
    convert(write("founding", tmp_path / "d", on_policy), tmp_path / "s", verifier, last="logits:5", say=quiet)
    source = open_source(tmp_path / "s")
    assert isinstance(source, StoreSource)
    part = source.records[4].parts[-1]
    shard = next((tmp_path / "s").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[part.offset] ^= 1
    shard.write_bytes(data)
    with pytest.raises(EyasError, match="does not match its checksum"):
        source.logits(4)
    words = source.logits(3)
    assert logits.faults(words, 8, verifier.config.vocab_size) == []
    ids, log_p = logits.split(words)
    assert logits.faults(logits.pack(ids, log_p.flip(1)), 8, 999)[0][0] == "logits"
    assert "outside the vocabulary" in logits.faults(words, 8, int(ids.max()))[0][1]
    log_p[2, 1] = torch.nan
    assert logits.faults(logits.pack(ids, log_p), 8, 999)[0][0] == "not finite"


def test_what_cannot_be_is_refused(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    for wrong in ("logits:0", "logits:9999", "logits:", "logits:a", "logit:5"):
        with pytest.raises(EyasError, match=f"--last {wrong}: use all, trained, or logits:64"):
            convert(folder, tmp_path / "x", verifier, last=wrong, say=quiet)
    with pytest.raises(EyasError, match=r"--last logits:1000: .* has .* tokens"):
        convert(folder, tmp_path / "x", verifier, last="logits:1000", say=quiet)
    convert(folder, tmp_path / "bf16", verifier, say=quiet)
    with pytest.raises(EyasError, match="name the verifier"):
        convert(tmp_path / "bf16", tmp_path / "x", last="logits:5", say=quiet)
    convert(tmp_path / "bf16", tmp_path / "kept", verifier, last="logits:5", say=quiet)
    for other in ("all", "trained", "logits:4"):
        with pytest.raises(EyasError, match="keeps logits and no last states: --last logits:5"):
            convert(tmp_path / "kept", tmp_path / "x", verifier, last=other, say=quiet)
    convert(tmp_path / "kept", tmp_path / "smaller", verifier, codec="int8", last="logits:5", say=quiet)
    a, b = open_source(tmp_path / "kept"), open_source(tmp_path / "smaller")
    assert isinstance(a, StoreSource) and isinstance(b, StoreSource)
    assert torch.equal(a.logits(2).view(torch.int16), b.logits(2).view(torch.int16))
    with pytest.raises(EyasError, match="keeps logits and no last states: name what"):
        check(tmp_path / "smaller", verifier, against=tmp_path / "kept", say=quiet)
    config = TrainConfig(verifier_path=str(tiny_verifier), data_dir=tmp_path / "kept", output_dir=tmp_path / "run",
                         state_weight=1.0)  # fmt: skip
    with pytest.raises(EyasError, match="--state-weight 0"):
        Run(config, quiet)


def test_a_drafter_trains_on_them_as_on_the_states(tmp_path: Path, on_policy: list[Any], tiny_verifier: Path) -> None:
    folder, verifier = write("founding", tmp_path / "d", on_policy), Verifier(tiny_verifier)
    convert(folder, tmp_path / "s", verifier, last=f"logits:{verifier.config.vocab_size - 1}", say=quiet)
    found = []
    for name, data in (("a", folder), ("b", tmp_path / "s")):
        config = TrainConfig(verifier_path=str(tiny_verifier), data_dir=data, output_dir=tmp_path / name, epochs=1,
                             dtype="fp32", outside="drop", max_seq_len=128)  # fmt: skip
        Run(config, quiet).train()
        found.append(json.loads((tmp_path / name / "summary.json").read_text())["validations"][0])
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=0.01)
    assert found[1]["accept_length"] == pytest.approx(found[0]["accept_length"], rel=0.01)
    assert found[1]["positions"] == found[0]["positions"]


def test_the_first_word_of_the_manifest_is_enough_for_sizes() -> None:
    manifest = Manifest("v", "", 64, 8, 999, (2, 4, 5, 8), "before", codec="int8", last_rows="logits:10")
    assert [(p.name, p.row_bytes) for p in planes(manifest)] == [
        ("h2", 64), ("s2", 4), ("h4", 64), ("s4", 4), ("h5", 64), ("s5", 4), ("i8", 40), ("p8", 20)
    ]  # fmt: skip
    assert manifest.state_layers == (2, 4, 5)


def test_a_writer_takes_words_of_trained_rows_alone(tmp_path: Path, head: torch.Tensor) -> None:
    manifest = Manifest("v", "", HT, 8, V, (2, 4, 5, 8), "after", last_rows=f"logits:{K}")
    states = torch.randn(4, 20, HT, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    mask = np.arange(20) % 3 > 0
    layers = logits.TopK(K, head, None).instead(list(states), mask)
    with StoreWriter(tmp_path, manifest) as writer:
        writer.add("a", np.arange(20), mask, layers)
        with pytest.raises(ValueError, match="states"):
            writer.add("b", np.arange(20), mask, states)
    source = open_source(tmp_path)
    assert isinstance(source, StoreSource)
    assert torch.equal(source.logits(0).view(torch.int16), layers[-1].view(torch.int16))
    assert torch.equal(source.states(0, 3, 11), states[:3, 3:11])
