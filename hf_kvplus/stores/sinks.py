"""The first real tokens of each row, kept at full precision beside the blocks that contain their columns.

Rows of a left-padded batch begin at different columns, so each row has its own span. The blocks hold codes for these
columns too (that keeps every row aligned); reading replaces them by what is kept here.

Source: Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453, for why these
tokens matter; here they are exempt from quantization.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvplus.stores.growing import GrowingStore


class SinkStore(GrowingStore):
    """Holds `num_sink_tokens` keys and values per row, `(batch, kv_heads, num_sink_tokens, head_dim)`.

    Args:
        num_sink_tokens: Sinks per row; 0 keeps none.
    """

    def __init__(self, num_sink_tokens: int) -> None:
        super().__init__()
        self.num_sink_tokens = num_sink_tokens

    def spans(self, begins: Sequence[int], first: int, last: int) -> list[tuple[slice, slice, slice]]:
        """Finds the sinks in columns `first` to `last` (exclusive).

        Args:
            begins: Column of each row's first real token.
            first: First column.
            last: Column behind the last.

        Returns:
            Triples (rows, sinks, columns relative to `first`).
        """
        uniform = len(set(begins)) == 1
        rows = [slice(None)] if uniform else [slice(row, row + 1) for row in range(len(begins))]
        spans = []
        for row in rows:
            begin = begins[row.start or 0]
            low, high = max(first, begin), min(last, begin + self.num_sink_tokens)
            if low < high:
                spans.append((row, slice(low - begin, high - begin), slice(low - first, high - first)))
        return spans

    def capture(self, states: dict[str, torch.Tensor], begins: Sequence[int], first: int) -> None:
        """Copies the sinks out of `states`, which start at column `first`."""
        spans = self.spans(begins, first, first + next(iter(states.values())).shape[2])
        if spans and not len(self):
            self.append(
                {
                    name: tensor.new_zeros((*tensor.shape[:2], self.num_sink_tokens, tensor.shape[3]))
                    for name, tensor in states.items()
                }
            )
        for rows, sinks, columns in spans:
            for name, tensor in states.items():
                self.get(name)[rows, :, sinks] = tensor[rows, :, columns]

    def restore(self, name: str, out: torch.Tensor, begins: Sequence[int], first: int, last: int) -> None:
        """Writes the sinks of columns `first` to `last` into `out`, which starts at column `first`."""
        if len(self):
            for rows, sinks, columns in self.spans(begins, first, last):
                out[rows, :, columns] = self.get(name)[rows, :, sinks]
