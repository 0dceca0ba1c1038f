"""What a layer forgets again: the newest tokens, for assisted decoding and for conversations that go another way.

A cut among recent tokens moves nothing. A cut inside a packed block makes what remains of that block recent, as it was
decoded; it is packed again, with others behind it, when its turn comes.
"""

from __future__ import annotations

from typing import Any


class Rollback:
    """The part of a `KVLayer` that drops its newest tokens."""

    def activate_past_recording(self: Any) -> None:
        """Keeps tokens that have left a window until the next `crop`, so that it can bring them back."""
        self.record_past = True

    def check_crop(self: Any, tokens_to_remove: int) -> None:
        """Refuses a `crop` that this layer can't do, so that a cache can ask all its layers before it cuts any.

        Raises:
            ValueError: If positive (the meaning before transformers 5.17).
            RuntimeError: If a window has already dropped tokens that would become visible again.
        """
        self.check_both_assigned()
        length = self.cumulative_length + tokens_to_remove
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove` must be negative or 0, got {tokens_to_remove}; crop(-n) removes the last n tokens"
            )
        needed = self.policy.first_visible(length)
        # Nothing of what a window has dropped is needed where nothing is left.
        if self.is_initialized and tokens_to_remove and length > 0 and needed < self.first_stored:
            raise RuntimeError(
                f"cropping to {length} tokens needs token {needed}, which has left the "
                "window; call `activate_past_recording()` before the tokens that are to be removed"
            )

    def crop(self: Any, tokens_to_remove: int) -> None:
        """Forgets the newest tokens.

        A cut inside a packed block moves what remains of that block, as decoded, into the recent buffer.

        Args:
            tokens_to_remove: Minus the number of tokens; 0 removes none (a window drops what it no longer needs). As
                with transformers' own layers, more than were seen leave nothing.

        Raises:
            ValueError: If positive (the meaning before transformers 5.17).
            RuntimeError: If a window has already dropped tokens that would become visible again.
        """
        self.check_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        length = max(0, self.cumulative_length + tokens_to_remove)
        if length == 0:
            for store in (*self.packed.values(), self.recent):
                store.drop_back(len(store))
        elif length >= self.packed_tokens:
            self.recent.drop_back(self.cumulative_length - length)
        else:
            self._crop_packed(length)
        self.cumulative_length = length
        self.padding.reopen(length)
        self._evict()
        if self.shelf:
            self.shelf.changed(self.packed_tokens)

    def _crop_packed(self: Any, length: int) -> None:
        """Drops packed blocks from the one that holds column `length` on; its beginning becomes recent."""
        keep, rest = divmod(length - self.first_stored, self.block_tokens)
        first = length - rest
        remainder = {}
        for name, store in self.packed.items():
            held = self.recent.get(name)
            block = held.new_empty((*held.shape[:2], self.block_tokens, held.shape[3]))
            store.decode(block, keep, keep + 1)
            self.sinks.restore(name, block, self.padding.counts, first, first + self.block_tokens)
            store.drop_back(len(store) - keep)
            remainder[name] = block[:, :, :rest]
        self.recent.replace(remainder)
