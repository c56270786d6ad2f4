"""What training and evaluation need of a verifier and its data: sizes, layers, norm, head; and which samples train."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from eyas.config import TrainConfig
from eyas.drafter.mla import MlaSizes
from eyas.drafter.model import DrafterConfig
from eyas.errors import EyasError
from eyas.evaluate.kept import KeptHead
from eyas.evaluate.offline import VerifierHead
from eyas.store.reader import Source, unverified
from eyas.store.whole import cut, remarks
from eyas.train.batches import split_source
from eyas.verifier import MLA, Verifier, VerifierConfig
from eyas.vocab import DraftVocab


def drafter_config(c: TrainConfig, v: VerifierConfig, draft_vocab: int) -> DrafterConfig:
    """The drafter's sizes: the verifier's, but for what the settings name. Raises EyasError for impossible ones."""
    heads, kv_heads, head_dim = c.num_heads or v.num_heads, c.num_kv_heads or v.num_kv_heads, c.head_dim or v.head_dim
    mla = mla_sizes(c, v)
    if mla is not None:
        kv_heads, head_dim = heads, mla.head_dim
    if heads % kv_heads:
        raise EyasError(f"{heads} heads cannot share {kv_heads} key/value heads: set --num-heads and --num-kv-heads")
    turned = mla.qk_rope_head_dim if mla else head_dim
    if turned % 2:
        flag = "--qk-rope-head-dim" if mla else "--head-dim"
        raise EyasError(f"a head size of {turned} is odd, which rotary positions do not allow: set {flag}")
    return DrafterConfig(
        hidden_size=v.hidden_size,
        target_hidden_size=v.hidden_size,
        intermediate_size=c.intermediate_size or v.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=v.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=v.rms_norm_eps,
        rope_theta=v.rope_theta,
        rope_scaling=v.rope_scaling,
        max_position_embeddings=v.max_position_embeddings,
        mla=mla,
    )


def mla_sizes(c: TrainConfig, v: VerifierConfig) -> MlaSizes | None:
    """Sizes of latent attention: the verifier's, but for what the settings name; None for a llama's.

    Raises EyasError for settings of the other kind, and where a size comes from nowhere.
    """
    other = ("num_kv_heads", "head_dim") if c.attention == "mla" else MLA
    if given := [name for name in other if getattr(c, name) is not None]:
        raise EyasError(
            f"--{given[0].replace('_', '-')} says nothing of a drafter with --attention {c.attention}: leave it out"
        )
    if c.attention == "llama":
        return None
    sizes: dict[str, int] = {name: getattr(c, name) or (v.mla or {}).get(name, 0) for name in MLA}
    if missing := ["--" + name.replace("_", "-") for name, size in sizes.items() if not size]:
        raise EyasError(f"{v.name} has no latent attention to take sizes from: set {', '.join(missing)}")
    return MlaSizes(**sizes)


def aux_layers(source: Source, verifier: Verifier) -> tuple[int, ...]:
    """HF indices of the three states that the drafter reads; files that do not say hold the usual ones."""
    manifest = source.manifest
    return tuple(manifest.layers[:3]) if manifest.layer_unit == "hf" else verifier.config.capture_layers()


def verifier_head(
    verifier: Verifier, source: Source, vocab: DraftVocab, device: torch.device, dtype: torch.dtype
) -> VerifierHead | KeptHead:
    """The verifier's norm and head as needed for the last states of `source`, or for the logits in their place."""
    draft_ids = torch.from_numpy(vocab.targets).to(device)
    if source.manifest.logits:
        return KeptHead(draft_ids, verifier.config.vocab_size)
    norm = verifier.final_norm()
    if source.manifest.norm_side not in ("before", "after"):
        raise EyasError(
            "the data does not show which side of the final norm its last states are on: no trained tokens?"
        )
    return VerifierHead(
        norm=(lambda x: norm(x.float())) if source.manifest.norm_side == "before" else (lambda x: x),
        head=verifier.lm_head(dtype=dtype).to(device),
        draft_ids=draft_ids,
    )


def training_samples(c: TrainConfig, source: Source, say: Callable[[str], None]) -> tuple[list[int], list[int]]:
    """Indices of the samples that train and that validate; says what is left out, and what is cut.

    Raises EyasError where nothing can be trained.
    """
    for remark in remarks(source):
        say(f"warning: {remark}; training goes on with what is there")
    skipped = [(name, reason) for name, reason in source.skipped if not cut(reason)]
    for name, reason in skipped[:5]:
        say(f"skipped {name}: {reason}")
    if len(skipped) > 5:
        say(f"skipped {len(skipped):,} samples in all")
    K = c.max_seq_len
    train, val, unusable = split_source(source, K, c.val_ratio)
    if unusable:
        say(f"left out {unusable:,} samples with no trained position in their first {K:,} tokens")
    needs = source.needs[source.needs > K]
    if not train and len(needs):
        raise EyasError(
            f"no sample of {c.data_dir} has a trained position within --max-seq-len {K}:"
            f" the least that one needs is {needs.min():,} tokens"
        )
    if not train:
        raise EyasError(f"{c.data_dir} holds no trainable tokens: check the loss masks (eyas prepare)")
    if c.patience is not None and not val:
        raise EyasError("--patience looks at validations, and no sample validates: raise --val-ratio, or leave it out")
    long = int((source.lengths[train + val] > K).sum())
    if long:
        unproved = unverified(source, train + val, K)
        more = f"; {unproved:,} so short that no checksum proves what is read of them" if unproved else ""
        say(f"{long:,} samples are longer than {K:,} tokens and are cut there (--max-seq-len){more}")
    room = c.batch_tokens or K
    alone = int((np.minimum(source.lengths[train], K) > room).sum())
    if alone:
        say(
            f"warning: {alone:,} of {len(train):,} samples are longer than --batch-tokens {room:,}: each is a batch"
            " of its own, and takes its own length in memory"
        )
    return train, val
