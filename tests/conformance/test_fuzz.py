"""Random sequences of operations on one cache against a list of full-precision tokens that goes through the same.

The list knows one rule of the cache, when a block is packed, and asks the codec what that block then reads as. All
else it does naively: it keeps every token, appends, cuts and indexes. What the cache returns must be equal bit for
bit, with the default recipe as with the affine codec; with that, each element besides within half a step of the truth
for every time that it was packed.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from case import fingerprint
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conftest import tiny_llama_config
from hf_kvplus import KVPlusCache, load_cache, save_cache
from hf_kvplus.key_bias import KeyTurns, layer_key_turns
from hf_kvplus.recipes import Quantization

HEADS, CHANNELS = 2, 16
NAMES = ("keys", "values")
EXAMPLES = 250  # for each of the two machines


class PlainTokens:
    """Every token of every row, as given and as it must read back.

    Args:
        quantization: As of the cache, or `None`.
        key_turns: As of the cache's layer.
        padding: Padding tokens of each row.
    """

    def __init__(self, quantization: Quantization | None, key_turns: KeyTurns, padding: list[int]) -> None:
        self.quantization, self.key_turns, self.padding = quantization, key_turns, padding
        empty = torch.zeros(len(padding), HEADS, 0, CHANNELS)
        self.given = dict.fromkeys(NAMES, empty)
        self.read = dict.fromkeys(NAMES, empty)
        self.error = dict.fromkeys(NAMES, empty)
        self.packed = 0

    @property
    def length(self) -> int:
        return self.given["keys"].shape[2]

    def append(self, new: dict[str, torch.Tensor]) -> None:
        for name in NAMES:
            self.given[name] = torch.cat([self.given[name], new[name]], dim=2)
            self.read[name] = torch.cat([self.read[name], new[name]], dim=2)
            self.error[name] = torch.cat([self.error[name], torch.zeros_like(new[name])], dim=2)
        if self.quantization is None:
            return
        size = self.quantization.block_tokens
        while self.length - self.packed >= self.quantization.residual_length + size:
            self._pack(slice(self.packed, self.packed + size))
            self.packed += size

    def _pack(self, columns: slice) -> None:
        begins = torch.tensor(self.padding)[:, None] + self.quantization.num_sink_tokens
        kept = (torch.arange(columns.start, columns.stop) < begins) & (
            torch.arange(columns.start, columns.stop) >= torch.tensor(self.padding)[:, None]
        )
        valid = torch.arange(columns.start, columns.stop) >= begins
        for name, codec in zip(NAMES, self.quantization.codecs(0, CHANNELS, self.key_turns), strict=True):
            block = self.read[name][:, :, columns].clone()
            decoded = torch.empty_like(block[:, :, None])
            codec.decode(codec.encode(block[:, :, None], valid[:, None]), CHANNELS, decoded)
            sinks = kept[:, None, :, None]
            self.read[name] = self.read[name].clone()
            self.read[name][:, :, columns] = torch.where(sinks, block, decoded[:, :, 0])
            self.error[name] = self.error[name].clone()
            self.error[name][:, :, columns] += torch.where(sinks, 0.0, self._half_step(name, block, valid))

    def _half_step(self, name: str, block: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Returns the largest error of the affine codec: half a step, with room for half-precision scales.

        The default recipe has none that holds for every element: what it reads as is compared, nothing else.
        """
        if self.quantization.recipe_name != "affine":
            return torch.full_like(block, torch.inf)
        nbits = self.quantization.key_nbits if name == "keys" else self.quantization.value_nbits
        if name == "keys":
            hidden = ~valid[:, None, :, None]
            low = block.masked_fill(hidden, torch.inf).amin(2, keepdim=True)
            high = block.masked_fill(hidden, -torch.inf).amax(2, keepdim=True)
        else:
            low, high = block.amin(3, keepdim=True), block.amax(3, keepdim=True)
        return (0.51 * (high - low) / (2**nbits - 1) + 0.01).expand_as(block)

    def crop(self, count: int) -> None:
        keep = self.length - count
        for store in (self.given, self.read, self.error):
            store.update({name: tensor[:, :, :keep] for name, tensor in store.items()})
        if self.quantization and keep < self.packed:
            self.packed = keep // self.quantization.block_tokens * self.quantization.block_tokens

    def select(self, rows: list[int]) -> None:
        for store in (self.given, self.read, self.error):
            store.update({name: tensor[rows] for name, tensor in store.items()})
        self.padding = [self.padding[row] for row in rows]


class CacheMachine(RuleBasedStateMachine):
    """The operations, on a layer that keeps everything."""

    window: int | None = None

    @initialize(
        bits=st.sampled_from([None, (8, 8), (4, 4), (2, 3), (16, 4)]),
        recipe=st.sampled_from(["affine", "auto"]),
        residual=st.sampled_from([0, 5, 32]),
        sinks=st.sampled_from([0, 4]),
        padding=st.lists(st.integers(0, 70), min_size=1, max_size=3),
        seed=st.integers(0, 2**16),
    )
    def start(self, bits, recipe, residual, sinks, padding, seed):
        padding = [pads - min(padding) for pads in padding]  # some row is full
        quantization = bits and Quantization(
            *bits, residual_length=residual, num_sink_tokens=0 if self.window else sinks, recipe=recipe
        )
        options = {"sliding_window": self.window, "layer_types": ["sliding_attention"]} if self.window else {}
        self.config = self.configuration(**options)
        self.cache = KVPlusCache(self.config, quantization=quantization)
        assert bool(self.cache.layers[0].codecs) == bool(bits)
        self.cache.activate_past_recording()
        self.plain = PlainTokens(quantization, layer_key_turns(self.config)[0], padding)
        self.generator = torch.Generator().manual_seed(seed)
        self.since_crop = 0
        self.first_prompt = True
        self.update(max(padding) + 1)

    def configuration(self, **options):
        return tiny_llama_config(num_hidden_layers=1, **options)

    @property
    def layer(self):
        return self.cache.layers[0]

    def random_states(self, count: int) -> dict[str, torch.Tensor]:
        shape = (len(self.plain.padding), HEADS, count, CHANNELS)
        return {name: torch.randn(shape, generator=self.generator) for name in NAMES}

    def positions(self, count: int) -> torch.Tensor:
        columns = torch.arange(self.plain.length, self.plain.length + count)
        return (columns - torch.tensor(self.plain.padding)[:, None]).clamp_min(0)

    @rule(count=st.one_of(st.integers(1, 9), st.integers(10, 150)))
    def update(self, count):
        new, past = self.random_states(count), self.plain.length
        first = max(0, past - self.window + 1) if self.window else 0
        sizes = self.cache.get_mask_sizes(count, 0)
        arguments = {"position_ids": self.positions(count)}
        returned = self.cache.update(new["keys"], new["values"], 0, kwargs=arguments)
        for name, states in zip(NAMES, returned, strict=True):
            before = self.plain.read[name][:, :, first:]
            self.compare(states, torch.cat([before, new[name]], dim=2), first)
            assert sizes == (states.shape[2], first)
        self.plain.append(new)
        self.since_crop += count

    def compare(self, states: torch.Tensor, expected: torch.Tensor, first: int) -> None:
        assert states.shape == expected.shape
        columns = torch.arange(first, first + states.shape[2])
        real = (columns >= torch.tensor(self.plain.padding)[:, None])[:, None, :, None].expand_as(states)
        assert torch.equal(states[real], expected[real])
        assert torch.isfinite(states).all()

    @rule(share=st.floats(0, 1))
    def crop(self, share):
        most = self.plain.length - max(self.plain.padding) - 1
        if self.window:  # what left the window before the last crop is gone
            most = min(most, self.since_crop)
        count = round(share * most)
        self.cache.crop(-count)
        self.plain.crop(count)
        self.since_crop = 0

    @rule()
    def crop_nothing(self):
        self.cache.crop(0)
        self.since_crop = 0

    @rule(data=st.data())
    def select(self, data):
        rows = len(self.plain.padding)
        chosen = data.draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=4))
        self.cache.batch_select_indices(torch.tensor(chosen))
        self.plain.select(chosen)

    @rule(data=st.data())
    def reorder(self, data):
        order = data.draw(st.permutations(range(len(self.plain.padding))))
        self.cache.reorder_cache(torch.tensor(order))
        self.plain.select(list(order))

    @precondition(lambda self: len(self.plain.padding) <= 3)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.plain.select([row for row in range(len(self.plain.padding)) for _ in range(repeats)])

    @rule()
    def leave_a_copy_behind(self):
        """Goes on with a copy; what happened to it must not show in the original, or the other way round."""
        original, self.cache = self.cache, copy.deepcopy(self.cache)
        before = fingerprint(original)
        self.update(3)
        assert fingerprint(original) == before

    @rule(through_file=st.booleans())
    def put_away_and_take_out(self, through_file):
        before = fingerprint(self.cache)
        if through_file:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "cache.safetensors"
                save_cache(self.cache, path)
                self.cache = load_cache(path, self.config)
        else:
            self.cache = pickle.loads(pickle.dumps(self.cache))
        self.cache.activate_past_recording()
        assert fingerprint(self.cache) == before

    @rule()
    def begin_again(self):
        self.cache.reset()
        self.cache.activate_past_recording()
        self.plain = PlainTokens(self.plain.quantization, self.plain.key_turns, [0, 2])
        self.since_crop = 0
        self.update(5)

    @invariant()
    def reads_as_it_must(self):
        if not hasattr(self, "cache"):
            return
        first = max(0, self.plain.length - self.window + 1) if self.window else 0
        assert self.cache.get_seq_length() == self.plain.length
        assert self.cache.batch_size == len(self.plain.padding)
        columns = torch.arange(first, self.plain.length)
        real = (columns >= torch.tensor(self.plain.padding)[:, None])[:, None, :, None]
        for name, states in zip(NAMES, self.layer.dense(), strict=True):
            self.compare(states, self.plain.read[name][:, :, first:], first)
            off = (states - self.plain.given[name][:, :, first:]).abs() - self.plain.error[name][:, :, first:]
            assert (off.masked_fill(~real, -1.0) <= 0).all()

    @invariant()
    def packs_what_is_due(self):
        if hasattr(self, "cache") and self.plain.quantization:
            assert self.layer.packed_tokens == self.plain.packed


class WindowMachine(CacheMachine):
    """The same on a layer with a window, whose old blocks are dropped."""

    window = 100


SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=14,
    deadline=None,
    derandomize="KVPLUS_FUZZ_RANDOM" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.mark.parametrize("machine", [CacheMachine, WindowMachine], ids=["full attention", "window"])
def test_random_operations_leave_what_a_plain_list_has(machine):
    run_state_machine_as_test(machine, settings=SETTINGS)
