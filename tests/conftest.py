"""Shared fixtures: tiny random models, and the real one loaded once per process."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Two test processes on two cores; more threads than cores wait for each other.
torch.set_num_threads(1)


# Makes the configuration of nearly any decoder a tiny one; classes leave alone what they don't know.
TINY_OPTIONS = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
}


def tiny_llama_config(**changes) -> LlamaConfig:
    """Returns the configuration of a two-layer Llama with 4 query heads and 2 KV heads of 16 channels."""
    options = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaConfig(**{**options, **changes})


def tiny_llama(**changes) -> LlamaForCausalLM:
    """Returns a seeded random model of that configuration, in float32 and evaluation mode."""
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config(**changes)).eval()


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1234)
