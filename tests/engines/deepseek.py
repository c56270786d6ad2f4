"""A tiny verifier of DeepSeek's kind and an MLA drafter trained on its own text, both made in half a minute.

Sizes are the least that vLLM's latent attention on a CPU takes: a latent of 512 and 64 numbers with RoPE. With YaRN,
for vLLM 0.32's kernel for plain RoPE on a CPU is wrong with several heads (bench/RESULTS.md); it stretches 16 positions
to 128, so that most of a text lies beyond them, and mscale and mscale_all_dim differ, so that both its factors count.
Layers are dense: routing is not what is in question. Weights are large enough to make first choices clear ones: float32
sums in another order turn none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

V, H, LAYERS, HEADS, INNER, VD, END = 384, 128, 8, 4, 256, 256, 0
MLA = {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
PROMPT, ANSWER, TTT_STEPS = 12, 48, 3
SHARE = 1.2  # of what a layer adds to the state: of 100 tokens 28 do not follow from the last one alone


def make_verifier(folder: Path) -> Any:
    """transformers' DeepSeek-V2 of random weights, in `folder`; the model itself in float32."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=V, hidden_size=H, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, **MLA, first_k_dense_replace=LAYERS, n_routed_experts=2, n_shared_experts=1,
        num_experts_per_tok=1, moe_intermediate_size=8, max_position_embeddings=128, rope_parameters=YARN,
        rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=END,
    )  # fmt: skip
    model = DeepseekV2ForCausalLM(config).float().eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                size = 1.0 if "embed" in name else p.shape[1] ** -0.5
                size *= SHARE if "o_proj" in name or "down" in name else 1
                p.copy_(torch.randn(p.shape, generator=g) * size)
        # The next token leans on the last one, so that a drafter can be trained in seconds.
        model.lm_head.weight.copy_(model.model.embed_tokens.weight[torch.randperm(V, generator=g)] * 0.5)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def texts(model: Any, count: int, seed: int) -> Tensor:
    """Random prompts of PROMPT tokens, each with ANSWER tokens of greedy text: [count, PROMPT + ANSWER]."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(2, V, (count, PROMPT)))
    length = {"min_new_tokens": ANSWER, "max_new_tokens": ANSWER}
    whole: Tensor = model.generate(
        ids, **length, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=END
    )
    return whole


def make_drafter(model: Any, verifier: Any, folder: Path, steps: int = 80) -> None:
    """An MLA drafter of the verifier, trained for so many steps on its text, in `folder`."""
    from eyas.drafter.checkpoint import save_checkpoint
    from eyas.drafter.mla import MlaSizes
    from eyas.drafter.model import Drafter, DrafterConfig
    from eyas.drafter.plan import make_plan
    from eyas.vocab import choose

    c, sizes = verifier.config, MlaSizes(**MLA)
    ids = texts(model, 128, 0)
    vocab = choose(np.bincount(ids[:, PROMPT:].flatten().numpy(), minlength=V), VD)
    layers = c.capture_layers()
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    states = torch.cat([hidden[k] for k in layers], -1)
    drafter = Drafter(
        DrafterConfig(
            H, H, INNER, HEADS, HEADS, sizes.head_dim, V, VD, rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope_theta,
            rope_scaling=c.rope_scaling, max_position_embeddings=c.max_position_embeddings, mla=sizes,
        ),
        verifier.embedding(),
    )  # fmt: skip
    g, rng = torch.Generator().manual_seed(1), np.random.default_rng(1)
    with torch.no_grad():
        for p in drafter.parameters():
            if p.dim() == 2:
                p.copy_(torch.randn(p.shape, generator=g) * p.shape[1] ** -0.5)
    draft_id = torch.full((V,), -1)
    draft_id[torch.from_numpy(vocab.targets)] = torch.arange(VD)
    answered = np.arange(PROMPT + ANSWER) >= PROMPT
    optimiser = torch.optim.AdamW(drafter.parameters())
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        batch = rng.integers(0, len(ids), 32)
        plan = make_plan([(ids[i].numpy().astype(np.int32), answered) for i in batch], TTT_STEPS)
        loss = torch.zeros(())
        for k, out in enumerate(drafter(plan, states[batch].flatten(0, 1)[plan.key_row])):
            said = drafter.lm_head(drafter.norm(out[plan.trained[k]]))
            wanted = draft_id[plan.next_token[plan.target[k]].long()]
            loss = loss + torch.nn.functional.cross_entropy(said, wanted, ignore_index=-1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_checkpoint(folder, drafter, vocab, c, layers)
