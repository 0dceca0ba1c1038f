"""How a layer reaches the attention function that reads it, when nothing dense is built.

`update` must return tensors, and models hand them to their attention function. Within a forward pass of a model with
fused attention a layer returns stand-ins: tensors of the right shape that are one NaN, repeated without memory. The
attention function recognizes them by address and takes the layer instead. Whatever else a model does with them shows:
it meets NaN, and the next layer finds that the last one was never taken.

Nothing is known here of attention itself, and nothing happens outside such a forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Reader(Protocol):
    """Decides whether a layer's states are read packed."""

    def accepts(self, layer: Any, key_states: torch.Tensor) -> bool:
        """Returns whether the queries of these new states can be answered from `layer` itself."""
        ...

    def accepts_chunk(self, layer: Any, key_states: torch.Tensor) -> bool:
        """Returns whether a chunk of a prompt can be answered from `layer` and these new states beside it."""
        ...

    def encoder(self, codec: Any, channels: int, device: torch.device) -> Encode | None:
        """Returns what encodes blocks in the place of `codec.encode`, or `None`."""
        ...


Encode = Callable[..., "dict[str, torch.Tensor]"]


class Handover(threading.local):
    """What a layer and an attention function exchange within one thread."""

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self._outer: list[Reader | None] = []
        self.layer: Any = None
        self.visible = 0
        self._address = 0
        self._nan: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def encoder(self, codec: Any, states: torch.Tensor) -> Encode | None:
        """Returns what encodes blocks of such states instead of `codec.encode`; `None` outside of a fused pass."""
        return None if self.reader is None else self.reader.encoder(codec, states.shape[-1], states.device)

    def mover(self) -> Any:
        """Returns what copies new states into a store's buffers, see `GrowingStore`; `None` for PyTorch."""
        return None if self.reader is None else getattr(self.reader, "mover", None)

    def begin(self, reader: Reader) -> None:
        """Begins a forward pass whose states `reader` reads; passes may be nested."""
        self._outer.append(self.reader)
        self.reader = reader

    def end(self) -> None:
        """Ends the innermost forward pass.

        Raises:
            RuntimeError: If it was the outermost and an offered layer is left.
        """
        self.reader = self._outer.pop()
        if self.reader is None:
            self.check()

    def offer(self, layer: Any, shapes: list[tuple[int, ...]], visible: int) -> list[torch.Tensor]:
        """Offers a layer that has taken in new states; returns stand-ins of these shapes.

        Args:
            layer: A `KVLayer`.
            shapes: Of keys and of values.
            visible: First column that its new queries see.
        """
        self.check()
        key = (layer.dtype, layer.device)
        if key not in self._nan:
            self._nan[key] = torch.full((1, 1, 1, 1), float("nan"), dtype=layer.dtype, device=layer.device)
        nan = self._nan[key]
        self.layer, self.visible, self._address = layer, visible, nan.data_ptr()
        return [nan.expand(shape) for shape in shapes]

    def take(self, keys: torch.Tensor) -> Any:
        """Returns the layer that `keys` stand for, or `None` if they are real.

        Raises:
            RuntimeError: If a layer was offered, but these aren't its stand-ins, or if these were taken before.
        """
        address = keys.data_ptr()
        if self.layer is None:
            if any(nan.data_ptr() == address for nan in self._nan.values()):
                raise RuntimeError(
                    "this model reads the keys that its cache returned more than once, so they can't be read packed; "
                    "call `use_fused_attention(model, enabled=False)` and start again with a new cache"
                )
            return None
        if address != self._address:
            self.check()
        layer, self.layer = self.layer, None
        return layer

    def check(self) -> None:
        """Checks that no offered layer is left.

        Raises:
            RuntimeError: If one is.
        """
        if self.layer is not None:
            layer, self.layer = self.layer, None
            layer.finish_update()
            raise RuntimeError(
                "this model doesn't hand the keys that its cache returns to the attention function, so they can't be "
                "read packed; call `use_fused_attention(model, enabled=False)` and start again with a new cache"
            )


handover = Handover()
