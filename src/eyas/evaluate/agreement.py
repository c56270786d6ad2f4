"""Whether an engine accepts as often as eyas says: the same prompts decoded by eyas, and counted on the engine's text.

    decoded     eyas decodes the prompts with the drafter (`decode.py`) and counts its rounds
    simulated   what `eyas eval` says without decoding: from the states of what the engine wrote alone, greedily
    on_text     rounds on a text, greedy or sampled: a draft is kept where it is the text's own next token

`on_text` is exact for sampling too, where drafts are the drafter's first choices (vLLM's `draft_sample_method` greedy,
its default): such a draft d is accepted with the verifier's probability p(d), and what replaces a rejected one is drawn
from p without d. So the next token is drawn from p, and the draft was accepted exactly where it is that token.

Cost: a greedy decoding by transformers for each number of drafts, and one capture of the engine's text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from eyas.capture.local import capture
from eyas.drafter.model import Drafter
from eyas.evaluate.decode import Decoded
from eyas.evaluate.rounds import accept_length, beginnings
from eyas.evaluate.run import EvalOptions, decoder, offline
from eyas.record.record import Record
from eyas.store.reader import Source, open_source
from eyas.train.batches import Loader, pack
from eyas.verifier import Verifier
from eyas.vocab import DraftVocab

Say = Callable[[str], None]
WITHIN = 0.03  # of the engine's accept length


def decoded(
    verifier: Verifier,
    drafter: Drafter,
    vocab: DraftVocab,
    layers: tuple[int, ...],
    prompts: list[list[int]],
    draft_tokens: tuple[int, ...],
    max_new_tokens: int,
    batch_size: int,
    say: Say,
) -> dict[int, Decoded]:
    """eyas's own greedy decoding of the prompts in float32, by the number of drafts."""
    model = verifier.load_model(torch.float32)
    drafter = drafter.for_inference(torch.float32)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # prompts of like length share a batch
    found = {}
    for k in draft_tokens:
        options = EvalOptions(draft_tokens=k, max_new_tokens=max_new_tokens)
        run = decoder(model, drafter, vocab, verifier, layers, options, torch.float32)
        all_of = Decoded([[]] * len(prompts), accepted=[0] * k)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            part = run([prompts[i] for i in rows], True)
            for i, tokens in zip(rows, part.tokens, strict=True):
                all_of.tokens[i] = tokens
            all_of.rounds += part.rounds
            all_of.accepted = [a + b for a, b in zip(all_of.accepted, part.accepted, strict=True)]
        found[k] = all_of
        say(f"agreement: decoded by eyas, {k} drafts a round · accept length {all_of.accept_length:.3f}")
    return found


def write_prepared(folder: Path, verifier: Verifier, samples: list[tuple[npt.NDArray[np.int32], int]]) -> None:
    """Prepared samples of given tokens. samples: (token ids of prompt and answer, tokens of the prompt)."""
    folder.mkdir(parents=True)
    masks = [(np.arange(len(ids)) >= prompt).tolist() for ids, prompt in samples]
    columns = {
        "id": pa.array([f"sample-{i}" for i in range(len(samples))]),
        "input_ids": pa.array([ids.tolist() for ids, _ in samples], pa.list_(pa.int32())),
        "loss_mask": pa.array(masks, pa.list_(pa.bool_())),
    }
    pq.write_table(pa.table(columns), folder / "prepared.parquet")
    about = {
        "format": 1,
        "verifier": {"name": verifier.config.name, "fingerprint": verifier.fingerprint},
        "template_hash": verifier.template_hash,
        "kept": len(samples),
        "tokens": sum(len(ids) for ids, _ in samples),
    }
    (folder / "prepare.json").write_text(json.dumps(about))


def text_store(
    verifier: Verifier, prompts: list[list[int]], answers: list[list[int]], folder: Path, dtype: str, say: Say
) -> Source:
    """The states of prompts and answers as a store in `folder`, captured in this process."""
    samples = [(np.array(p + a, np.int32), len(p)) for p, a in zip(prompts, answers, strict=True)]
    write_prepared(folder / "prepared", verifier, samples)
    capture(verifier, folder / "prepared", folder / "store", dtype=dtype, say=say)
    return open_source(folder / "store", verifier.config, verifier.fingerprint)


def simulated(drafter: Drafter, vocab: DraftVocab, verifier: Verifier, source: Source, draft_tokens: int) -> float:
    """The greedy accept length that `eyas eval` simulates on all samples of `source`, in float32."""
    longest, every = int(source.lengths.max()), list(range(len(source.ids)))
    figures = offline(
        drafter.eval(), vocab, verifier, source, every, longest, draft_tokens, torch.float32, Record(None)
    )
    return figures.accept_length_greedy if figures is not None else 1.0


@torch.inference_mode()
def on_text(drafter: Drafter, vocab: DraftVocab, source: Source, draft_tokens: int) -> float:
    """The accept length on the text of `source`, whatever drew it: drafts are kept where they are its next tokens."""
    longest, every = int(source.lengths.max()), list(range(len(source.ids)))
    targets = torch.from_numpy(vocab.targets)
    kept: list[list[Tensor]] = [[] for _ in range(draft_tokens)]  # per step, 0/1 per query, -1 behind the answer
    begins: list[Tensor] = []
    drafter = drafter.eval()
    for batch in Loader(source, pack(every, source.lengths, longest, longest), draft_tokens, longest, 2):
        plan = batch.plan
        begins.append(beginnings(plan))
        for k, out in enumerate(drafter(plan, batch.states.float())):
            choice = targets[drafter.lm_head(drafter.norm(out[plan.trained[k]])).argmax(-1)]
            values = torch.full((len(plan.query_row),), -1.0)
            values[plan.trained[k]] = (choice == plan.next_token[plan.target[k]]).float()
            kept[k].append(values)
    return accept_length(torch.stack([torch.cat(step) for step in kept]), torch.cat(begins))


def apart(engine: float, ours: float) -> float:
    """The relative distance of two accept lengths."""
    return abs(ours / engine - 1)
