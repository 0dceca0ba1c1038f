"""What `layer.keys` and `layer.values` show, and what it means to assign them, as code for transformers' layers does.

Such code clones a cache by assigning copies, changes states in place of others, or keeps a part of the tokens of a
layer, in every head as many. Assigned states are what is stored from then on: at full precision where nothing is
packed, else encoded as if they had just come in. Left out: layers that have let tokens go (windows) or keep their
blocks elsewhere, since what is shown of them isn't all that they hold.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvplus.policies import FullPolicy
from hf_kvplus.policies.padding import RowPadding


class ShownStates:
    """The part of a `KVLayer` that shows its states and takes others for them."""

    # Keys or values that were assigned and wait for the other half, since their tokens or rows are others than before.
    assigned: dict[str, torch.Tensor] = {}

    @property
    def keys(self: Any) -> torch.Tensor | None:
        """All visible keys at full precision, decoded on access; `None` before the first update.

        While the past is recorded (`activate_past_recording`), a window also shows what it keeps for a `crop`.

        Assigning `(batch, kv_heads, seq, head_dim)` stores these keys instead, in a layer that keeps every token. For
        another number of tokens or rows than before, assign the values as well; the layer is as long as both then.

        Raises:
            NotImplementedError: On assigning, if the layer has a window or its blocks are offloaded.
            RuntimeError: On assigning, if nothing was stored yet.
            ValueError: On assigning, if heads, channels or dtype differ from those stored.
        """
        return self._shown("keys", 0)

    @keys.setter
    def keys(self, states: torch.Tensor) -> None:
        self._assign("keys", states)

    @property
    def values(self: Any) -> torch.Tensor | None:
        """All visible values, as `keys`."""
        return self._shown("values", 1)

    @values.setter
    def values(self, states: torch.Tensor) -> None:
        self._assign("values", states)

    def _shown(self: Any, name: str, index: int) -> torch.Tensor | None:
        """Returns keys or values as they are shown."""
        if not self.is_initialized:
            return None
        if name in self.assigned:
            return self.assigned[name]
        recorded = self.record_past and self.policy.is_sliding
        return self.dense(self.first_stored if recorded else None)[index]

    def _assign(self: Any, name: str, states: torch.Tensor) -> None:
        """Stores `states` as all keys or values, or keeps them until the other half has come."""
        self._check_assigned(name, states)
        given = {**self.assigned, name: states.detach()}
        if len({(tensor.shape[0], tensor.shape[2]) for tensor in given.values()}) == 2:
            given = {name: states.detach()}
        unchanged = states.shape[0] == self.batch_size and states.shape[2] == self.cumulative_length
        self.assigned = {}
        if len(given) == 2:
            self._store_anew(given)
        elif unchanged:
            self._store_half(name, states.detach())
        else:
            self.assigned = given

    def _check_assigned(self: Any, name: str, states: torch.Tensor) -> None:
        """Refuses states that can't take the place of those stored."""
        if not self.is_initialized:
            raise RuntimeError(f"`{name}` can't be assigned before the first `update`, which tells heads and channels")
        if not isinstance(self.policy, FullPolicy) or self.shelf:
            kind = "offloads its blocks" if self.shelf else "has a window"
            raise NotImplementedError(
                f"`{name}` can't be assigned to a layer that {kind}; change the states that `update` is given, "
                "or crop the cache and run the tokens again"
            )
        heads, channels = self.shapes[name]
        if states.dim() != 4 or (states.shape[1], states.shape[3]) != (heads, channels) or states.dtype != self.dtype:
            raise ValueError(
                f"`{name}` must have shape (batch, {heads}, seq, {channels}) and dtype {self.dtype}, got "
                f"{tuple(states.shape)} and {states.dtype}"
            )

    def check_both_assigned(self) -> None:
        """Refuses to go on while one half waits for the other.

        Raises:
            ValueError: If keys were assigned for other tokens or rows than the values hold, or the other way round.
        """
        for name, states in self.assigned.items():
            other = "values" if name == "keys" else "keys"
            raise ValueError(
                f"`{name}` were assigned with shape {tuple(states.shape)}, but `{other}` still hold other tokens or "
                f"rows; assign `{other}` too"
            )

    def _store_anew(self: Any, given: dict[str, torch.Tensor]) -> None:
        """Forgets what is stored and stores both halves."""
        rows, tokens = given["keys"].shape[0], given["keys"].shape[2]
        same = (rows, tokens) == (self.batch_size, self.cumulative_length)
        padding = self.padding if same else RowPadding([0] * rows, [False] * rows)
        self.lazy_initialization(given["keys"], given["values"])
        self.padding, self.cumulative_length = padding, 0
        if self.codecs:
            self._store(given, 0, tokens)
        else:
            self.recent.append(given)
            self.cumulative_length = tokens

    def _store_half(self: Any, name: str, states: torch.Tensor) -> None:
        """Stores keys or values of the same tokens; the other half stays as it is."""
        packed = self.packed_tokens
        if packed:
            due = {name: states[:, :, :packed]}
            self.packed[name].clear()
            self.sinks.capture(due, self.padding.counts, 0)
            self._pack(due, 0)
        self.recent.replace({**self.recent.fields(), name: states[:, :, packed:]})
