"""All that a layer holds, as plain numbers and tensors, for `save_cache` and `load_cache`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from hf_kvplus.policies.padding import RowPadding


class LayerState:
    """The part of a `KVLayer` that hands out what it holds and takes it back."""

    def state_dict(self: Any) -> dict[str, Any]:
        """Returns all that is held: numbers, and views of the tensors by part; nothing before the first update."""
        if not self.is_initialized:
            return {}
        self.check_both_assigned()
        stores = {**{f"packed_{name}": store for name, store in self.packed.items()}, "sinks": self.sinks}
        return {
            "batch_size": self.batch_size,
            "cumulative_length": self.cumulative_length,
            "record_past": self.record_past,
            "dtype": self.dtype,
            "shapes": self.shapes,
            "padding": asdict(self.padding),
            **{name: store.fields() for name, store in stores.items()},
            "recent": self.recent.fields(),
        }

    def load_state_dict(self: Any, state: dict[str, Any], device: torch.device) -> None:
        """Holds copies of what `state_dict` of a layer with the same codecs and policy returned.

        Args:
            state: What `state_dict` returned, its tensors on `device`.
            device: Where later states will come from.
        """
        self.reset()
        if not state:
            return
        self.batch_size, self.cumulative_length = state["batch_size"], state["cumulative_length"]
        self.record_past, self.dtype, self.device = state["record_past"], state["dtype"], device
        self.shapes, self.padding = state["shapes"], RowPadding(**state["padding"])
        for name, store in self.packed.items():
            if state[f"packed_{name}"]:
                store.replace(state[f"packed_{name}"])
        if state["sinks"]:
            self.sinks.replace(state["sinks"])
        self.recent.replace(state["recent"])
        self.is_initialized = True
