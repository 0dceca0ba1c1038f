"""The layers of a cache take turns with buffers for dense states, and nobody can tell but by the time it takes."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch

from conftest import tiny_llama_config
from hf_kvplus import build_cache, measure_memory
from hf_kvplus.compat import cache_keyword
from hf_kvplus.stores.hostmemory import SMALLEST_MAPPED_BYTES, DensePool

LAYERS, TOKENS = 4, 1500


def filled(strategy: str = "int8", layers: int = LAYERS):
    cache = build_cache(strategy, tiny_llama_config(num_hidden_layers=layers))
    states = torch.randn(1, 2, TOKENS, 16, generator=torch.Generator().manual_seed(0))
    for layer in range(layers):
        cache.update(states + layer, states - layer, layer)
    assert states.nbytes > SMALLEST_MAPPED_BYTES
    return cache


def read(cache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), layer)


def test_layers_take_turns_and_nothing_stays_behind_the_last():
    cache, addresses = filled(), set()
    for _ in range(2):
        for layer in range(LAYERS):
            keys, values = read(cache, layer)
            addresses |= {keys.data_ptr(), values.data_ptr()}
            del keys, values
            held = cache.layers[0].dense_pool.held_bytes
            assert (held > 0) == (layer < LAYERS - 1)
    assert len(addresses) <= 4
    assert measure_memory(cache).other_bytes == 0


def test_states_that_somebody_keeps_stay_what_they_are():
    """Whoever holds any view of them: a model whose layers share states, an array, a detached tensor."""
    cache, fresh = filled(), filled()
    for layer in fresh.layers:
        layer.dense_pool = None
    kept, expected = [], []
    for layer in range(LAYERS):
        for one, into in ((cache, kept), (fresh, expected)):
            keys, values = read(one, layer)
            into += [keys[:, 1:, 5:].detach().numpy(), values.transpose(1, 2)[:, 3:]]
            del keys, values
    for one, other in zip(kept, expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_gradients_are_those_of_fresh_memory(llama):
    gradients = []
    for pooled in (True, False):
        cache = build_cache("int8", llama.config)
        if not pooled:
            for layer in cache.layers:
                layer.dense_pool = None
        ids = torch.arange(1200)[None] % 128
        with torch.no_grad():
            llama(ids, **{cache_keyword(llama): cache})
        llama.zero_grad()
        llama(ids[:, :70], **{cache_keyword(llama): cache}).logits.square().mean().backward()
        gradients.append([weights.grad.clone() for weights in llama.parameters() if weights.grad is not None])
    llama.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert gradients[0]


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_have_buffers_of_their_own(twin_of):
    cache = filled()
    mine = read(cache, 0)
    twin = twin_of(cache)
    assert len({id(layer.dense_pool) for layer in (*cache.layers, *twin.layers)}) == 2
    expected = [tensor.clone() for tensor in mine]
    read(twin, 1)
    assert all(torch.equal(*pair) for pair in zip(mine, expected, strict=True))


def test_looking_at_states_holds_nothing():
    cache = filled()
    assert cache.layers[1].keys.shape[2] == TOKENS
    assert cache.layers[0].dense_pool.held_bytes == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_writes_into_memory_of_its_own():
    pool = DensePool()
    states = pool.empty_like(torch.empty(0), (300, 300)).fill_(1)
    child = os.fork()
    if child == 0:
        states.fill_(2)
        os._exit(0)
    os.waitpid(child, 0)
    assert (states == 1).all()


def test_only_plain_memory_is_lent():
    pool = DensePool()
    assert pool.empty_like(torch.empty(0, device="meta"), (300, 300)).device.type == "meta"
    pool.empty_like(torch.empty(0), (3, 3))
    assert pool.held_bytes == 0
