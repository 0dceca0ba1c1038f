"""Turning means of keys on a CPU by compiled functions, where Numba is installed (the extra `cpu`).

PyTorch's operators take six times as long as all the rest of encoding. Sums are added in another order here, so a mean
may differ in its last bit.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from hf_kvplus.codecs.compiled import TASKS_PER_THREAD, Arguments
from hf_kvplus.codecs.turns import ChannelTurns, kernel_tables, turn_tables
from hf_kvplus.threads import find_runner


class MeanTaker:
    """Finds and takes out turning means on as many threads as PyTorch uses."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.run = find_runner()
        self.arguments = Arguments(kernel.COUNT)

    def sums(self, states: torch.Tensor, turns: ChannelTurns) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies states and adds up what their pairs hold.

        Args:
            states: `(batch, kv_heads, blocks, block_tokens, head_dim)`.
            turns: How channels turn.

        Returns:
            A finite float32 copy, and sums over the tokens of each block, `(batch, kv_heads, blocks, 5, pairs)`: of
            both coordinates turned back to the first token, of their squares, and of both as they are.
        """
        states = states.detach().float()
        states = states if states.stride(4) == 1 else states.contiguous()
        batch, heads, blocks, tokens, channels = states.shape
        _, _, cosines, sines = turn_tables(turns, tokens, channels, "cpu")
        rest, sums = torch.empty(states.shape), torch.empty(batch, heads, blocks, 5, cosines.shape[1])
        k, a = self.kernel, self.arguments.numbers
        for slot, stride in zip((k.STATES_B, k.STATES_H, k.STATES_N, k.STATES_T), states.stride()[:4], strict=True):
            a[slot] = 4 * stride
        a[k.STATES], a[k.SUMS] = states.data_ptr(), sums.data_ptr()
        a[k.COSINES], a[k.SINES], a[k.PAIRS] = cosines.data_ptr(), sines.data_ptr(), cosines.shape[1]
        self._run(k.sum_turned, rest, turns)
        return rest, sums

    def take_out(self, rest: torch.Tensor, turns: ChannelTurns, pairs: torch.Tensor, means: torch.Tensor) -> None:
        """Takes means out of a copy that `sums` made, in place.

        Args:
            rest: The copy.
            turns: How channels turn.
            pairs: `(batch, kv_heads, blocks, means)` uint8.
            means: `(batch, kv_heads, blocks, means, 2)`.
        """
        k, a = self.kernel, self.arguments.numbers
        pairs, added = pairs.contiguous(), -means.float().contiguous()
        a[k.CHOSEN], a[k.ADDED], a[k.MEANS] = pairs.data_ptr(), added.data_ptr(), pairs.shape[3]
        self._run(k.take_out, rest, turns)

    def _run(self, function: Any, rest: torch.Tensor, turns: ChannelTurns) -> None:
        """Runs a compiled function over all blocks."""
        k, a = self.kernel, self.arguments.numbers
        batch, heads, blocks, tokens, channels = rest.shape
        threads = torch.get_num_threads()
        per_task = max(1, batch * heads * blocks // (TASKS_PER_THREAD * threads))
        places, turned = kernel_tables(turns, tokens, channels, "cpu")
        self.arguments.counter.value = 0
        a[k.COUNTER] = ctypes.addressof(self.arguments.counter)
        a[k.TASKS], a[k.HEADS] = batch * heads * -(-blocks // per_task), heads
        a[k.BLOCKS], a[k.BLOCKS_PER_TASK], a[k.TOKENS], a[k.CHANNELS] = blocks, per_task, tokens, channels
        a[k.REST], a[k.TURN_CHANNELS], a[k.TURNS] = rest.data_ptr(), places.data_ptr(), turned.data_ptr()
        self.run(function.address, ctypes.addressof(a), min(threads, a[k.TASKS]))


@cache
def find_mean_taker() -> MeanTaker | None:
    """Returns what takes means out, or `None` where Numba isn't installed."""
    try:
        from hf_kvplus.compiled_kernels import turning_means
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        return None
    return MeanTaker(turning_means)
