"""Fixtures shared by all tests: a tiny llama with a real tokenizer and chat template, made on the spot, offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "What is the capital of France? The capital of France is Paris.",
    "Write a Python function that returns the sum of two numbers.\ndef add(a, b):\n    return a + b\n",
    "Hello! How can I help you today? I would like to know the time, please.",
    "user assistant system one two three four five six seven eight nine ten",
] * 4


def make_tokenizer(template: str = TEMPLATE, vocab_size: int = 400) -> Any:
    """A byte-level BPE with ChatML's special tokens, as a transformers fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Its tokenizer: about 400 tokens, ids 0..2 are <|endoftext|>, <|im_start|>, <|im_end|>."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A folder with a random llama (8 layers, H = 64, untied, float32). Read it, never write to it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # a norm of ones would hide a norm left out
        model.model.norm.weight.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("verifier") / "tiny"
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread: on tensors this small a second one only waits, and on a busy machine for long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def on_policy(tiny_verifier: Path) -> list[dict[str, Any]]:
    """What the verifier says to random prompts: {input_ids, loss_mask, before, after (the four states, float32)}."""
    import torch

    from eyas.verifier import Verifier

    model = Verifier(tiny_verifier).load_model(torch.float32)
    kept: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _m, args: kept.append(args[0]))
    samples, rng = [], torch.Generator().manual_seed(0)
    for i in range(12):
        prompt = torch.randint(3, 300, (1, 5 + i), generator=rng)
        with torch.inference_mode():
            ids = model.generate(prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
            kept.clear()
            states = model(ids, output_hidden_states=True).hidden_states
        aux = [states[k][0].clone() for k in (2, 4, 5)]
        mask = torch.arange(ids.shape[1]) >= prompt.shape[1]
        sample = {"input_ids": ids[0].clone(), "loss_mask": mask.long()}
        samples.append({**sample, "before": [*aux, kept[0][0].clone()], "after": [*aux, states[-1][0].clone()]})
    return samples
