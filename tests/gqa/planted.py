"""Random models whose heads are really redundant: their keys and values lie in fewer heads' worth of directions."""

from __future__ import annotations

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StableLmConfig,
    StableLmForCausalLM,
)

HEADS, HEAD_DIM, VOCABULARY = 4, 16, 128
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def mixed(base: torch.Tensor, heads: int, channels: int, pairs: int) -> torch.Tensor:
    """Returns rows of `heads` heads, `(heads * channels, width)`, mixed from those of fewer, `base`.

    The first `2 * pairs` channels are mixed as complex numbers, pair by pair, the others at will.
    """
    fewer = base.view(-1, channels, base.shape[1])
    out = torch.zeros(heads, channels, base.shape[1])
    real, imaginary = (torch.randn(heads, len(fewer), pairs, 1) for _ in range(2))
    first, second = fewer[:, :pairs], fewer[:, pairs : 2 * pairs]
    out[:, :pairs] = (real * first - imaginary * second).sum(1)
    out[:, pairs : 2 * pairs] = (imaginary * first + real * second).sum(1)
    rest = channels - 2 * pairs
    if rest:
        mixing = torch.randn(heads, rest, len(fewer) * rest) / rest**0.5
        out[:, 2 * pairs :] = mixing @ fewer[:, 2 * pairs :].flatten(0, 1)
    return out.flatten(0, 1)


def planted(kind: str, directions: int) -> PreTrainedModel:
    """Returns a model whose 4 heads lie in `directions` directions.

    Args:
        kind: `rope`, `partial` (a quarter of the channels) or `none`.
        directions: Heads' worth of them.
    """
    torch.manual_seed(3)
    fewer = directions * HEAD_DIM
    if kind == "none":
        config = {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
        model = GPT2LMHeadModel(GPT2Config(**config, n_positions=1024)).eval()
        for block in model.transformer.h:
            weight = block.attn.c_attn.weight.data
            for first in (COMMON["hidden_size"], 2 * COMMON["hidden_size"]):
                chosen = slice(first, first + COMMON["hidden_size"])
                base = 0.2 * torch.randn(fewer, COMMON["hidden_size"])
                weight[:, chosen] = mixed(base, HEADS, HEAD_DIM, 0).T
        return model
    if kind == "rope":
        model, pairs = LlamaForCausalLM(LlamaConfig(**COMMON, head_dim=HEAD_DIM)).eval(), HEAD_DIM // 2
    else:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        model, pairs = StableLmForCausalLM(StableLmConfig(**COMMON, rope_parameters=rope)).eval(), HEAD_DIM // 8
    for layer in model.model.layers:
        for name, turning in (("k_proj", pairs), ("v_proj", 0)):
            base = 0.2 * torch.randn(fewer, COMMON["hidden_size"])
            getattr(layer.self_attn, name).weight.data = mixed(base, HEADS, HEAD_DIM, turning)
    return model


def windows(count: int = 6, tokens: int = 96, seed: int = 0) -> list[torch.Tensor]:
    """Returns random text."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (tokens,), generator=generator) for _ in range(count)]
