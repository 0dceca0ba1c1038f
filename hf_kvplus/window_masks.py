"""Masks for sinks and windows, handed to transformers through the sizes that it asks the cache for.

transformers builds one mask per kind of layer from `(kv_length, kv_offset)`, two integers, and means one contiguous
span with it. Sinks and a window that moves with each query are no such span. The offset returned here is an integer
that also knows the answer: `arange(kv_length) + kv_offset`, the columns of all slots, becomes a `Slots` object, and
where the mask function compares it with the queries' columns and looks up the padding, it gives the mask of the
window. This uses torch's `__torch_function__` protocol; nothing is registered or patched, and it serves `sdpa` and
`eager` alike.

Whoever builds masks in another way (flash and flex attention, 4-dimensional masks) never asks, or is refused; the
layer notices that no mask was made and says so. Code that registers a mask function of its own finds the same mask by
`kv_offset.plan.build(padding_mask, batch_size, device)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

REMEDY = (
    'use `attn_implementation="sdpa"` or "eager" without a 4-dimensional mask, feed one token at a time, or build the '
    'cache with `prefill="dense"`'
)


@dataclass
class MaskPlan:
    """Which slots the queries of one forward pass see, and whether a mask was made of it.

    Args:
        seq_length: Tokens stored before.
        query_length: Queries.
        first_column: Column of the first slot of the window.
        lead: Slots before the window. In a rectangle they are columns too; otherwise they hold `copies` times the
            sinks.
        sliding_window: Tokens that a query sees, itself included; 0 for a rectangle, where only causality counts.
        num_sink_tokens: Sinks of each row.
        copies: How often the sinks are there: once for all queries, or once per query.
    """

    seq_length: int
    query_length: int
    first_column: int
    lead: int
    sliding_window: int = 0
    num_sink_tokens: int = 0
    copies: int = 0
    built: bool = field(default=False, init=False)
    left_padding: torch.Tensor | None = field(default=None, init=False)

    @property
    def kv_length(self) -> int:
        """Number of slots."""
        return self.lead + self.seq_length + self.query_length - self.first_column

    def sizes(self) -> tuple[int, int]:
        """Returns `(kv_length, kv_offset)` for transformers, which end in the column of the last query."""
        return Uncomparable(self.kv_length), SlotOffset(self)

    def build(self, padding_mask: torch.Tensor | None, batch_size: int, device: torch.device) -> torch.Tensor:
        """Makes the mask.

        Args:
            padding_mask: `(batch, columns)` bool, `False` where a column is padding; `None` for none at all.
            batch_size: Rows of the mask.
            device: Where it lives.

        Returns:
            `(batch, 1, query_length, kv_length)` bool, `True` where the slot is seen.
        """
        total = self.seq_length + self.query_length
        queries = torch.arange(self.seq_length, total, device=device)[:, None]
        first = self.first_column if self.copies else self.first_column - self.lead
        columns = torch.arange(first, total, device=device)
        seen = columns <= queries
        if self.sliding_window:
            seen &= columns > queries - self.sliding_window
        seen = seen[None]  # (1, queries, columns)
        padding = torch.zeros(batch_size, dtype=torch.long, device=device)
        if padding_mask is not None:
            padding = (padding_mask.cumsum(-1) == 0).sum(-1)
            seen = seen & padding_mask[:, None, first:total]
        self.left_padding, self.built = padding, True
        if self.copies:
            seen = torch.cat([self._sinks_seen(queries, padding, padding_mask), seen.expand(batch_size, -1, -1)], -1)
        return seen.expand(batch_size, -1, -1)[:, None]

    def _sinks_seen(
        self, queries: torch.Tensor, padding: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns which slots of sinks are seen, `(batch, queries, lead)`: those that lie before the window."""
        sinks = padding[:, None] + torch.arange(self.num_sink_tokens, device=queries.device)  # columns, (batch, sinks)
        seen = sinks[:, None] <= queries - self.sliding_window
        if padding_mask is not None:
            seen &= padding_mask.gather(1, sinks.clamp(max=padding_mask.shape[1] - 1))[:, None]
        if self.copies > 1:
            own = torch.eye(self.query_length, dtype=torch.bool, device=queries.device)
            seen = (seen[:, :, None] & own[..., None]).flatten(2)
        return seen


class Uncomparable(int):
    """An integer that equals none: keeps transformers from replacing the mask by `is_causal` after comparing sizes."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class SlotOffset(int):
    """A `kv_offset` whose sum with `arange(kv_length)` isn't contiguous columns but the slots of a `MaskPlan`."""

    plan: MaskPlan

    def __new__(cls, plan: MaskPlan) -> SlotOffset:
        """Returns the offset at which the slots end in the column of the last query."""
        offset = super().__new__(cls, plan.seq_length + plan.query_length - plan.kv_length)
        offset.plan = plan
        return offset

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Slots:
        """Turns `arange(kv_length) + offset` into slots."""
        offset = next((arg for arg in args if isinstance(arg, SlotOffset)), None)
        tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if func.__name__ not in ("add", "__add__", "__radd__") or offset is None or tensor is None:
            raise _refusal(func)
        if tensor.dim() != 1 or len(tensor) != offset.plan.kv_length:
            raise _refusal(func)
        return Slots(offset.plan, tensor.device)


class Slots:
    """Stands for the columns of all slots while transformers evaluates its mask function."""

    def __init__(self, plan: MaskPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device

    def __getitem__(self, index: Any) -> Slots:
        """Takes part in broadcasting, `slots[None, None, None, :]`."""
        return self

    def __le__(self, queries: torch.Tensor) -> CausalAnswer:
        """Answers `kv_idx <= q_idx`."""
        return CausalAnswer(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        """Answers the look-up of the padding mask, `padding_mask[batch_idx, kv_idx]`."""
        index = args[1] if len(args) == 2 and isinstance(args[1], tuple) else ()
        padding_mask = args[0] if args else None
        if func.__name__ != "__getitem__" or len(index) != 2 or not isinstance(index[1], Slots):
            raise _refusal(func)
        if not isinstance(padding_mask, torch.Tensor) or padding_mask.dtype != torch.bool or padding_mask.dim() != 2:
            raise _refusal(func)
        if isinstance(index[0], slice):
            return padding_mask.new_zeros(1, 1)  # asked whether the mask can be left out: no
        return index[1].plan.build(padding_mask, len(padding_mask), padding_mask.device)


class CausalAnswer:
    """The causal half of a mask: complete if there is no padding, left to the padding's look-up if there is."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    def to(self, device: torch.device) -> torch.Tensor:
        """Returns all of it, to be joined with the padding, whose look-up brings the whole mask."""
        return torch.ones((), dtype=torch.bool, device=device)

    def expand(self, batch_size: int, *sizes: int) -> torch.Tensor:
        """Returns the mask of a batch without padding."""
        return self.slots.plan.build(None, batch_size, self.slots.device)


def _refusal(func: Any) -> NotImplementedError:
    """Returns the error for a mask that is built in a way that isn't known here."""
    return NotImplementedError(
        f"this model's mask can't be built for a window with sinks (it calls `{func.__name__}` on columns); {REMEDY}"
    )


@dataclass
class WindowMasks:
    """The plan of the running forward pass, shared by the layers that one mask serves.

    Args:
        plan: The plan.
        by_slots: Whether the model takes distances from slots, so that sinks can only stand once, before the window.
    """

    plan: MaskPlan | None = None
    by_slots: bool = False

    def find(self, seq_length: int, query_length: int) -> MaskPlan | None:
        """Returns the plan made for these queries, or `None`."""
        plan = self.plan
        fits = plan is not None and (plan.seq_length, plan.query_length) == (seq_length, query_length)
        return plan if fits else None
