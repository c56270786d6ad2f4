"""The drafter that training starts with: random, near the verifier, or another checkpoint's.

A warm start (`--init-from`) takes a checkpoint's drafter as it is: weights, sizes, and its own draft vocabulary, for a
head whose rows mean other tokens has learnt nothing. What contradicts it is refused.

A run that goes on has its weights in its state, and its sizes and vocabulary in the run directory: the checkpoint and
the vocabulary's folder may be gone, damaged or another's by then. Only where the run is told of another one than it
was begun with is that one looked at, and refused where it is not the same (`state.check_identity`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from eyas.config import TrainConfig
from eyas.drafter.checkpoint import checkpoint_layers, load_checkpoint
from eyas.drafter.model import Drafter
from eyas.drafter.start import start_from_verifier, start_random
from eyas.errors import EyasError
from eyas.evaluate.run import check_verifier, find_checkpoint
from eyas.store.reader import Source
from eyas.train.rundir import START, begun_with, kept_start
from eyas.train.setup import aux_layers, drafter_config
from eyas.verifier import MLA, Verifier
from eyas.vocab import DraftVocab
from eyas.vocab import load as load_vocab

Say = Callable[[str], None]
SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")  # what a setting can say of the drafter


def make_drafter(
    config: TrainConfig, verifier: Verifier, source: Source, dtype: torch.dtype, say: Say, begun: bool = False
) -> tuple[Drafter, DraftVocab]:
    """The drafter as training starts with it, on the CPU, and its vocabulary.

    begun: a state of the run will be loaded over its weights; what they were taken from may be gone.
    """
    kept = kept_start(config.output_dir) if config.resume else None
    own = kept if begun else None
    was = begun_with(config.output_dir) if own is not None else {}
    vocab = None
    if config.vocab_mapping_dir is not None:
        if kept is not None and not config.vocab_mapping_dir.exists():
            vocab = kept[1]
            say(f"--vocab-mapping-dir {config.vocab_mapping_dir} is gone: the run's own copy of it is taken")
        elif own is not None and was.get("vocab_mapping_dir") == str(config.vocab_mapping_dir):
            vocab = own[1]
            _tell_another(config.vocab_mapping_dir, vocab, verifier, say)
        else:
            try:
                vocab = load_vocab(config.vocab_mapping_dir, verifier.config.vocab_size, verifier.fingerprint, say)
            except EyasError as e:
                raise EyasError(f"{e}{_without_copy(config) if begun and kept is None else ''}") from None
    layers = aux_layers(source, verifier)
    there = config.init_from is not None and _is_there(config.init_from)
    another = there and was.get("init_from") != str(config.init_from)
    if own is not None and config.init_from is not None and not another:
        drafter, vocab = Drafter(own[0], verifier.embedding(dtype)), own[1]
        if not there:
            say(f"--init-from {config.init_from} is gone: the run's state has the weights")
    elif config.init_from is not None:
        drafter, vocab = _warm(config, verifier, layers, vocab, say, begun)
        drafter.embedding = verifier.embedding(dtype)
    else:
        if config.freeze_head and config.init == "random":
            raise EyasError("--freeze-head leaves lm_head as it starts, which --init random makes noise: leave one out")
        if vocab is None:
            V = verifier.config.vocab_size
            vocab = DraftVocab(np.zeros(V, dtype=np.int64), np.ones(V, dtype=bool))
        drafter = Drafter(drafter_config(config, verifier.config, vocab.size), verifier.embedding(dtype))
        start_random(drafter, config.seed)
        if config.init == "verifier":
            taken = start_from_verifier(drafter, verifier, torch.from_numpy(vocab.targets), layers[2])
            say(f"starts from the verifier's {', '.join(taken) or 'nothing: the sizes differ'}")
    drafter.lm_head.weight.requires_grad_(not config.freeze_head)
    drafter.midlayer.dropout = drafter.midlayer.mlp.dropout = config.dropout
    drafter.midlayer.recompute = config.recompute
    return drafter, vocab


def _tell_another(folder: Path, own: DraftVocab, verifier: Verifier, say: Say) -> None:
    """Say where `folder` is no longer what the run took from it."""
    try:
        same = np.array_equal(load_vocab(folder, verifier.config.vocab_size, verifier.fingerprint).t2d, own.t2d)
        what = "holds another vocabulary by now"
    except EyasError as e:
        same, what = False, f"cannot be used any more ({e})"
    if not same:
        say(f"--vocab-mapping-dir {folder} {what}: the run's own copy is taken")


def _without_copy(config: TrainConfig) -> str:
    return f", and {config.output_dir / START}, which would stand in for it, is missing or damaged"


def _is_there(init_from: Path) -> bool:
    try:
        find_checkpoint(init_from)
    except EyasError:
        return False
    return True


def _warm(
    config: TrainConfig,
    verifier: Verifier,
    layers: tuple[int, ...],
    vocab: DraftVocab | None,
    say: Say,
    begun: bool,
) -> tuple[Drafter, DraftVocab]:
    assert config.init_from is not None
    try:
        folder, _ = find_checkpoint(config.init_from)
    except EyasError as e:
        more = f", and {config.output_dir} has no state to go on from without it" if config.resume else ""
        more = _without_copy(config) if begun else more
        raise EyasError(f"--init-from: {e}{more}") from None
    check_verifier(folder, verifier)
    drafter, own = load_checkpoint(folder, verifier.config)
    H = verifier.config.hidden_size
    if (drafter.config.hidden_size, drafter.config.target_hidden_size) != (H, H):
        raise EyasError(f"{folder} is {drafter.config.hidden_size} wide, {verifier.config.name} {H}: not its drafter")
    kind = "llama" if drafter.config.mla is None else "mla"
    if config.attention != kind:
        raise EyasError(f"{folder} has the attention of kind {kind}, and --init-from keeps it: say --attention {kind}")
    for name in (*SIZES, *MLA):
        asked, has = getattr(config, name), getattr(drafter.config, name, getattr(drafter.config.mla, name, None))
        if asked not in (None, has):
            raise EyasError(
                f"--{name.replace('_', '-')} {asked}: {folder} has {has or 'none'}, and --init-from keeps the"
                " checkpoint's sizes: leave the flag out"
            )
    if checkpoint_layers(folder, verifier.config) != layers:
        raise EyasError(f"{folder} reads other layers than {list(layers)}, which {config.data_dir} holds")
    if vocab is not None and not np.array_equal(vocab.t2d, own.t2d):
        raise EyasError(
            f"--vocab-mapping-dir {config.vocab_mapping_dir} is not the vocabulary of {folder}: --init-from keeps the"
            " checkpoint's own, leave the flag out"
        )
    say(f"starts from {folder}, with its vocabulary of {own.size:,} tokens")
    return drafter, own
