"""A window over the latest tokens plus the first tokens of each row: memory that doesn't grow with the text.

A query at column t sees the sinks of its row and the last `sliding_window` tokens, itself included:

    column      0 1 2 3 | 4 5 6 7 8 9
    query 9     ■ ■ ⬚ ⬚ | ⬚ ⬚ ⬚ ■ ■ ■      two sinks, a window of three

Source: Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453; differs in that the
sinks are each row's own first real tokens, and that a prompt fed at once gives the same as one fed token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvplus.checks import require_at_least, require_choice
from hf_kvplus.policies.base import Policy

ORIGINAL, SHIFTED = "original", "shifted"
WINDOWED, DENSE = "windowed", "dense"


@dataclass(frozen=True)
class SinkWindowPolicy(Policy):
    """Keeps the first real tokens of each row and the last `sliding_window` tokens.

    Args:
        sliding_window: Latest tokens that a query sees, itself included.
        num_sink_tokens: First real tokens of each row that every later query sees.
        positions: `"original"` leaves the sinks where they are; `"shifted"` moves them along so that they directly
            precede the window, which keeps all distances below `num_sink_tokens + sliding_window` (needs RoPE).
        prefill: What the tokens of a prompt see. `"windowed"`: their own sinks and window, whatever the chunking.
            `"dense"`: all that is held when their chunk comes in, and the whole chunk before them.
        rollback_tokens: Tokens kept beyond the window so that as many can be cropped at any time; assisted decoding
            records the past by itself and needs none.

    Raises:
        ValueError: If a count is too small or a choice unknown.
    """

    sliding_window: int
    num_sink_tokens: int = 4
    positions: str = ORIGINAL
    prefill: str = WINDOWED
    rollback_tokens: int = 0

    def __post_init__(self) -> None:
        """Checks the options once."""
        require_at_least("sliding_window", self.sliding_window, 1)
        require_at_least("num_sink_tokens", self.num_sink_tokens, 0)
        require_at_least("rollback_tokens", self.rollback_tokens, 0)
        require_choice("positions", self.positions, (ORIGINAL, SHIFTED))
        require_choice("prefill", self.prefill, (WINDOWED, DENSE))

    @property
    def is_sliding(self) -> bool:
        """False: to transformers these layers are full attention; "sliding" is a window that the model has itself."""
        return False

    @property
    def most_visible(self) -> int:
        """The most tokens that one query sees."""
        return self.sliding_window + self.num_sink_tokens

    def first_visible(self, seq_length: int) -> int:
        """Returns the column where the window of the next query begins; its sinks may lie before."""
        return max(0, seq_length - self.sliding_window + 1)

    def first_kept(self, seq_length: int) -> int:
        """Returns the first column that stays when `seq_length` tokens are held."""
        return max(0, self.first_visible(seq_length) - self.rollback_tokens)

    def max_length(self) -> int:
        """Returns the most tokens that one query sees."""
        return self.most_visible

    def evicts(self, seq_length: int, query_length: int) -> bool:
        """Whether some of these queries no longer see everything before them, in a row without padding."""
        return seq_length + query_length > self.most_visible

    def lead(self, seq_length: int) -> int:
        """Returns how many sinks stand before the window that the next query sees."""
        return min(self.first_visible(seq_length), self.num_sink_tokens)

    def mask_sizes(self, seq_length: int, query_length: int) -> tuple[int, int]:
        """Returns `(kv_length, kv_offset)` of sinks, window and new tokens, as if they were contiguous.

        A row's padding hides the slots before its first column. Where a row is padded, that leaves exactly as many
        slots as it has sinks and window tokens, so each row's sinks stand to the right in the slots before the window.
        """
        kv_length = self.lead(seq_length) + seq_length - self.first_visible(seq_length) + query_length
        return kv_length, seq_length + query_length - kv_length
