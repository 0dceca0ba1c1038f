"""A set of named tensors that grow, shrink and are re-indexed together.

Axis 2 counts tokens or blocks. Appending writes into reserved room; only when it runs out is a larger buffer taken,
a fixed fraction larger, so that the copying per appended token stays constant on average. Dropping from the front
moves an offset, and the room is reused when the buffer is next replaced: a window has constant memory. A store with a
`bound` never grows beyond it while its content fits: what is held moves to the front, in place, when room runs out.

    buffer  [ lead, dropped | held ......... | reserved ]
              0               start            start + length, up to capacity
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hf_kvplus.stores.hostmemory import empty_buffer


class Mover(Protocol):
    """Writes into all buffers of a store in one step, where a device does that faster than one by one."""

    def write(self, buffers: dict[str, torch.Tensor], fields: dict[str, torch.Tensor], place: int) -> None:
        """Copies `fields` into the buffers, to entries from `place` on."""
        ...

    def move(self, buffers: dict[str, torch.Tensor], source: int, target: int, count: int) -> None:
        """Moves `count` entries from `source` on to `target` and behind; the places may overlap."""
        ...


class GrowingStore:
    """Holds tensors of shape `(batch, kv_heads, n, ...)` that share `n`.

    Args:
        growth: When room runs out, the new capacity is what's needed plus `1 / growth` of it.
        minimum: Smallest room reserved by a growth, in entries.
        ceiling: Longest that the store is known to get, or 0; below it room doubles and never goes beyond.
        bound: Capacity that suffices for a window, or 0. Choose it larger than the window by the entries that may be
            appended between two moves to the front.
        lead: Entries before those held that stay free, see `prefixed`.
    """

    def __init__(self, growth: int = 32, minimum: int = 1, ceiling: int = 0, bound: int = 0, lead: int = 0) -> None:
        self.growth = growth
        self.minimum = minimum
        self.ceiling = ceiling
        self.bound = bound
        self.lead = lead
        self.start = 0
        self.length = 0
        self._buffers: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.length

    @property
    def names(self) -> list[str]:
        """The names of the tensors held."""
        return list(self._buffers)

    def get(self, name: str) -> torch.Tensor:
        """Returns what is held under `name`, a view `(batch, kv_heads, length, ...)`."""
        return self._buffers[name].narrow(2, self.start, self.length)

    def fields(self, first: int = 0, last: int | None = None) -> dict[str, torch.Tensor]:
        """Returns views of entries `first` to `last` (exclusive) of every tensor."""
        last = self.length if last is None else last
        return {name: buffer.narrow(2, self.start + first, last - first) for name, buffer in self._buffers.items()}

    def append(self, fields: dict[str, torch.Tensor], upcoming: int = 0, mover: Mover | None = None) -> None:
        """Writes entries behind those held.

        Args:
            fields: Tensors `(batch, kv_heads, added, ...)`, the same names on every call.
            upcoming: Entries that are known to follow at once; room for them is taken in the same step.
            mover: What copies instead of PyTorch.
        """
        added = next(iter(fields.values())).shape[2]
        buffers, place = self.make_room(fields, added, upcoming)
        if mover is not None:
            mover.write(buffers, fields, place)
        else:
            for name, tensor in fields.items():
                buffers[name].narrow(2, place, added).copy_(tensor)
        self.length += added

    def make_room(
        self, fields: dict[str, torch.Tensor], added: int, upcoming: int = 0
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Makes room for entries that whoever asks writes before `grow` counts them.

        Args:
            fields: Tensors of their shapes but for their number, and dtypes.
            added: How many entries.
            upcoming: As of `append`.

        Returns:
            The buffers, and the first entry's place in them.
        """
        short = self.start + self.length + added > self.capacity
        if not self._buffers or self._is_frozen() or (short and not self._move_to_front(added)):
            self._reallocate(fields, added + upcoming)
        return self._buffers, self.start + self.length

    def grow(self, added: int) -> None:
        """Counts entries that were written into the room of `make_room`."""
        self.length += added

    @property
    def capacity(self) -> int:
        """Entries that fit into the buffers."""
        return next(iter(self._buffers.values())).shape[2] if self._buffers else 0

    def _is_frozen(self) -> bool:
        """Whether the buffers were made in inference mode and may not be written to outside of it."""
        return not torch.is_inference_mode_enabled() and any(map(torch.is_inference, self._buffers.values()))

    def _reallocate(self, fields: dict[str, torch.Tensor], added: int) -> None:
        """Takes buffers with room for `added` more and moves what is held to their front."""
        needed = self.length + added
        # The first append of a prompt takes exactly what it needs: the prompt is known, its continuation isn't.
        room = max(self.minimum, needed // self.growth) if self.length else 0
        if self.length and needed <= self.ceiling:
            room = min(self.ceiling - needed, max(self.minimum, needed))
        capacity = self.lead + needed + room
        if self.lead + needed <= self.bound:
            # Once entries are dropped the store is a window that stays as long as it is.
            capacity = self.bound if self.start > self.lead else min(capacity, self.bound)
        for name, tensor in fields.items():
            shape = (*tensor.shape[:2], capacity, *tensor.shape[3:])
            buffer = empty_buffer(tensor, shape)
            if self.length:
                buffer.narrow(2, self.lead, self.length).copy_(self.get(name))
            self._buffers[name] = buffer
        self.start = self.lead

    def _move_to_front(self, added: int) -> bool:
        """Makes room at the end of a bounded store by moving what is held, in pieces that don't overlap."""
        shift = self.start - self.lead
        if shift < 1 or self.capacity != self.bound or self.lead + self.length + added > self.bound:
            return False
        for buffer in self._buffers.values():
            for first in range(0, self.length, shift):
                count = min(shift, self.length - first)
                buffer.narrow(2, self.lead + first, count).copy_(buffer.narrow(2, self.start + first, count))
        self.start = self.lead
        return True

    def prefixed(self, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Writes entries into the free room before those held and returns views of both.

        Args:
            fields: Tensors `(batch, kv_heads, n, ...)` with `n` up to `lead`; the next `prefixed` or `append` may
                overwrite them.
        """
        count = next(iter(fields.values())).shape[2]
        for name, tensor in fields.items():
            self._buffers[name].narrow(2, self.start - count, count).copy_(tensor)
        return self.fields(-count)

    def replace(self, fields: dict[str, torch.Tensor]) -> None:
        """Forgets what is held and holds copies of `fields` instead, in the same buffers where they fit."""
        self.start, self.length = self.lead, 0
        self.append(fields)

    def shift(self, count: int, mover: Mover | None = None) -> None:
        """Forgets the first `count` entries and moves the others to the front of the same buffers.

        Args:
            count: How many.
            mover: What moves them instead of PyTorch.
        """
        kept = self.length - count
        if mover is None or self._is_frozen():
            self.replace({name: tensor.clone() for name, tensor in self.fields(count).items()})
            return
        mover.move(self._buffers, self.start + count, self.lead, kept)
        self.start, self.length = self.lead, kept

    def drop_front(self, count: int) -> None:
        """Forgets the first `count` entries; once they are the larger part of the buffers, gives their memory back."""
        count = min(count, self.length)
        self.start += count
        self.length -= count
        if self.bound:
            wasteful = self.capacity > self.bound >= self.lead + self.length
        else:
            wasteful = self.start > max(self.length, 4 * self.minimum)
        if wasteful:
            self._reallocate(self.fields(), 0)

    def drop_back(self, count: int) -> None:
        """Forgets the last `count` entries."""
        self.length -= min(count, self.length)

    def clear(self) -> None:
        """Forgets everything and gives the memory back."""
        self._buffers = {}
        self.start = self.length = 0

    def select(self, indices: torch.Tensor) -> None:
        """Keeps the batch rows `indices`, in that order; rows may repeat."""
        self._map(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def repeat_interleave(self, repeats: int) -> None:
        """Repeats every batch row `repeats` times in place."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device) -> None:
        """Moves the buffers to `device`."""
        self._buffers = {name: buffer.to(device) for name, buffer in self._buffers.items()}

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every buffer by what `function` makes of the part that is held."""
        for name, buffer in self._buffers.items():
            held = function(self.get(name))
            if not self.bound:
                self._buffers[name] = held.contiguous()
                continue
            moved = held.new_empty((*held.shape[:2], buffer.shape[2], *held.shape[3:]))
            moved.narrow(2, self.lead, self.length).copy_(held)
            self._buffers[name] = moved
        self.start = self.lead

    @property
    def used_bytes(self) -> int:
        """Bytes of the entries held."""
        return sum(self.get(name).numel() * buffer.element_size() for name, buffer in self._buffers.items())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers, with the room reserved for growth."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
