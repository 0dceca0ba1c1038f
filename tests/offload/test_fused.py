"""Fused attention over offloaded blocks: read in pieces, to the same bits as read at once."""

from __future__ import annotations

import pytest
import torch

from hf_kvplus.attention.base import Scoring
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.layer import KVLayer
from hf_kvplus.projections import HeadProjection
from hf_kvplus.recipes import Quantization
from hf_kvplus.stores import offloaded, packed
from hf_kvplus.stores.space import MEMORY, Offload, Shelf, Shelves, Space

WIDTHS = {"fp": None, "int8": (8, 8), "int4": (4, 4), "k8v3": (8, 3), "k16v4": (16, 4)}
TIERS = [Offload("cpu"), Offload("disk", budget_bytes=0), Offload("disk", budget_bytes=0, prefetch_layers=0)]


def make_layer(width: str, offload: Offload, recipe: str = "auto") -> KVLayer:
    codecs = Quantization(*WIDTHS[width], recipe=recipe).codecs() if WIDTHS[width] else ()
    layer = KVLayer(*codecs)
    layer.shelve(None if offload.tier == MEMORY else Shelf(Shelves(Space(offload)), 0))
    return layer


def fill(layer: KVLayer, batch: int, tokens: int, queries: int) -> torch.Tensor:
    """Stores a prompt and then the states of some queries, as the handover of fused attention does."""
    generator = torch.Generator().manual_seed(7)
    keys, values = (torch.randn(batch, 2, tokens + queries, 64, generator=generator) for _ in range(2))
    layer.update(keys[:, :, :tokens], values[:, :, :tokens])
    layer.recent.append({"keys": keys[:, :, tokens:], "values": values[:, :, tokens:]})
    layer.cumulative_length += queries
    return torch.randn(batch, 6, queries, 64, generator=generator)


@pytest.fixture
def kernel():
    pytest.importorskip("numba")
    from hf_kvplus.attention.cpu import CPUKernel

    return CPUKernel()


@pytest.mark.parametrize("offload", TIERS, ids=lambda offload: f"{offload.tier}-{offload.prefetch_layers}")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_give_the_bits_of_the_whole(kernel, monkeypatch, width, offload, threads):
    """Runs of three blocks, so that pieces end inside the shares that threads work on."""
    monkeypatch.setattr(offloaded.OffloadedStore, "run_blocks", lambda self, batch: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for batch, tokens, queries in ((1, 1900, 1), (2, 1000, 5)):
        outputs = []
        for place in (Offload(MEMORY), offload):
            layer = make_layer(width, place)
            query = fill(layer, batch, tokens, queries)
            outputs.append(kernel.attend(layer, query, Scoring(0.125), None, 0))
        assert layer.packed_blocks > 6
        assert torch.equal(*outputs)


def test_an_unquantized_layer_reads_as_one_that_was_never_cut_into_blocks(kernel):
    """Blocks of 64 tokens are the tiles in which recent tokens are read."""
    plain, layer = KVLayer(), make_layer("fp", TIERS[1])
    outputs = [kernel.attend(one, fill(one, 1, 1900, 1), Scoring(0.125), None, 0) for one in (plain, layer)]
    assert plain.packed_blocks == 0
    assert layer.packed_blocks > 20
    assert torch.equal(*outputs)


def test_pieces_fit_masks_and_windows(kernel, monkeypatch):
    monkeypatch.setattr(offloaded.OffloadedStore, "run_blocks", lambda self, batch: 3)
    mask = torch.rand(2, 1, 5, 805, generator=torch.Generator().manual_seed(3)) < 0.7
    outputs = []
    for place in (Offload(MEMORY), TIERS[1]):
        layer = make_layer("int4", place)
        outputs.append(kernel.attend(layer, fill(layer, 2, 1000, 5), Scoring(0.125, softcap=20.0), mask, 200))
    assert torch.equal(*outputs)


def test_the_reference_kernel_reads_offloaded_blocks(monkeypatch):
    monkeypatch.setattr(packed, "SLAB_ELEMENTS", 1 << 14)
    outputs = []
    for place in (Offload(MEMORY), TIERS[0], TIERS[1]):
        layer = make_layer("int4", place)
        outputs.append(ReferenceKernel().attend(layer, fill(layer, 1, 1500, 1), Scoring(0.125), None, 0))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_scratch_is_all_that_a_long_layer_takes(kernel):
    """Beside scratch, only runs that are on their way are in memory, however many there are."""
    layer = make_layer("fp", TIERS[1])
    query = fill(layer, 1, 40_000, 1)
    kernel.attend(layer, query, Scoring(0.125), None, 0)
    store, shelves = layer.packed["keys"], layer.shelf.shelves
    assert store.used_bytes == 0
    scratch = sum(tensor.nbytes for tensor in shelves.scratch.values())
    assert scratch <= 2 * (store.run_blocks(1) * layer.block_tokens * 2 * 64 * 4 + 64)
    assert store.disk_bytes > 4 * scratch


def test_pieces_of_latents_give_the_bits_of_the_whole(kernel, monkeypatch):
    monkeypatch.setattr(offloaded.OffloadedStore, "run_blocks", lambda self, batch: 3)
    directions = torch.linalg.qr(torch.randn(128, 96, generator=torch.Generator().manual_seed(5)))[0]
    projection = HeadProjection(directions, directions.T, torch.zeros(128), heads=2)
    outputs = []
    for offload in (Offload(MEMORY), *TIERS):
        layer = KVLayer(*(LatentCodec(codec, projection) for codec in Quantization(4, 4).codecs()))
        layer.shelve(None if offload.tier == MEMORY else Shelf(Shelves(Space(offload)), 0))
        query = fill(layer, 2, 1000, 3)
        outputs.append(kernel.attend(layer, query, Scoring(0.125), None, 0))
        assert layer.packed_blocks > 6
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])
