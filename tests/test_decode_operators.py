"""A decode step appends; it never concatenates the cache. Read off every operator that 512 steps run."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import tiny_llama
from hf_kvplus import build_cache
from hf_kvplus.stores import GrowingStore

PROMPT_TOKENS, STEPS = 8192, 512


class OperatorProfiler(TorchDispatchMode):
    """Records the name of each operator that takes a tensor with an element or more for each token of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.on_whole_cache: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.numel() >= PROMPT_TOKENS for tensor in tensors):
            self.on_whole_cache.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=16, head_dim=16)


def decode_operators(model, strategy: str) -> list[str]:
    """Returns the operators on tensors as large as the cache, packed or not, in `STEPS` steps after the prompt."""
    cache = build_cache(strategy, model.config)
    with torch.no_grad():
        model(torch.randint(0, 128, (1, PROMPT_TOKENS)), past_key_values=cache, logits_to_keep=1)
        token = torch.zeros(1, 1, dtype=torch.long)
        with OperatorProfiler() as profiler:
            for _ in range(STEPS):
                model(token, past_key_values=cache)
    assert cache.get_seq_length() == PROMPT_TOKENS + STEPS
    return profiler.on_whole_cache


@pytest.mark.parametrize("strategy", ["fp", "int4"])
def test_no_step_concatenates_the_whole_cache(model, strategy):
    operators = decode_operators(model, strategy)
    assert len(operators) >= STEPS  # attention itself reads all of it
    assert "cat" not in operators


def test_packed_blocks_that_were_concatenated_would_be_noticed(model, monkeypatch):
    """Blocks have shapes in which no dimension is as long as the prompt."""
    append = GrowingStore.append

    def concatenate(store, fields, *arguments, **options):
        if len(store):
            fields = {name: torch.cat([store.get(name), tensor], dim=2) for name, tensor in fields.items()}
            store.clear()
        append(store, fields, *arguments, **options)

    monkeypatch.setattr(GrowingStore, "append", concatenate)
    flushes = STEPS // 48
    assert decode_operators(model, "int4").count("cat") >= 2 * flushes


def test_full_precision_copies_the_cache_only_when_its_buffer_grows(model):
    copies = decode_operators(model, "fp").count("copy_")
    growths = STEPS // (PROMPT_TOKENS // 32)
    appends = 2 * STEPS  # each names the buffer, but writes one token
    assert copies <= appends + 2 * (growths + 1)


def test_the_yardstick_does_concatenate(model):
    assert decode_operators(model, "dynamic").count("cat") == 2 * STEPS
