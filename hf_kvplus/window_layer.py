"""A layer that keeps the sinks of each row and a window of the latest tokens.

    buffer   [ free | sinks | window ............ | reserved ]      one query: a view, nothing is copied but the sinks
                    ^ written anew each step, moved forward along RoPE if positions are shifted

One query sees one contiguous span of slots, with each row's sinks standing directly before the window. Several
queries each have their own window, and with shifted positions their own distance to the sinks, so they get the sinks
once (or once per query) and a mask that `hf_kvplus.window_masks` hands to transformers.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvplus.codecs import Codec
from hf_kvplus.handover import handover
from hf_kvplus.layer import KVLayer, States
from hf_kvplus.policies.padding import RowPadding
from hf_kvplus.policies.sink_window import DENSE, SHIFTED, SinkWindowPolicy
from hf_kvplus.rope import KeyRotation
from hf_kvplus.stores import GrowingStore, SinkStore
from hf_kvplus.window_masks import REMEDY, MaskPlan, WindowMasks


class SinkWindowLayer(KVLayer):
    """Stores sinks and a window, packed or not.

    Args:
        key_codec: How blocks of keys are packed; `None` together with `value_codec=None` packs nothing.
        value_codec: How blocks of values are packed.
        policy: The window.
        masks: The plans of forward passes, shared by all layers of the cache.
        rotation: How sinks are moved along; needed if positions are shifted and this layer has RoPE.
        residual_length: Most recent tokens that always stay at full precision.
        num_sink_tokens: First tokens that the quantizer exempts; the window's own sinks always are.
    """

    policy: SinkWindowPolicy

    def __init__(
        self,
        key_codec: Codec | None = None,
        value_codec: Codec | None = None,
        *,
        policy: SinkWindowPolicy,
        masks: WindowMasks,
        rotation: KeyRotation | None = None,
        residual_length: int = 64,
        num_sink_tokens: int = 0,
    ) -> None:
        self.masks = masks
        self.rotation = rotation if policy.positions == SHIFTED else None
        super().__init__(
            key_codec,
            value_codec,
            policy=policy,
            residual_length=residual_length,
            num_sink_tokens=max(num_sink_tokens, policy.num_sink_tokens),
        )

    def _clear(self) -> None:
        """Sets up empty stores with room for a window and what comes in between two moves of it."""
        super()._clear()
        held = self.policy.sliding_window + self.policy.rollback_tokens
        if self.codecs:
            blocks = -(-held // self.block_tokens) + 1
            self.packed = {
                name: self._make_store(name, codec, blocks + max(1, blocks // 8))
                for name, codec in self.codecs.items()
            }
        else:
            lead = self.policy.num_sink_tokens
            self.recent = GrowingStore(minimum=16, bound=lead + held + max(64, held // 8), lead=lead)
        self.sinks = SinkStore(self.num_sink_tokens)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learns shapes from the first states and takes room for the sinks, which may come later than padding."""
        super().lazy_initialization(key_states, value_states)
        self.sinks.append(
            {
                name: tensor.new_zeros((*tensor.shape[:2], self.num_sink_tokens, tensor.shape[3]))
                for name, tensor in (("keys", key_states), ("values", value_states))
            }
        )

    # What the mask must know

    def _plan(self, query_length: int) -> MaskPlan:
        """Returns what the next `query_length` queries see."""
        seen, policy = self.cumulative_length, self.policy
        first = policy.first_visible(seen)
        exact = policy.prefill != DENSE or self.record_past
        if query_length == 1 or not exact or not policy.evicts(seen, query_length):
            return MaskPlan(seen, query_length, first, policy.lead(seen))
        # One mask serves all layers, those without RoPE too.
        copies = query_length if policy.positions == SHIFTED else 1
        return MaskPlan(
            seen,
            query_length,
            first,
            copies * policy.num_sink_tokens,
            policy.sliding_window,
            policy.num_sink_tokens,
            copies,
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns `(kv_length, kv_offset)` for the mask of the next `query_length` tokens; see `window_masks`."""
        plan = self._plan(query_length)
        self.masks.plan = plan
        if query_length == 1 and self._rows_known():
            return self.policy.mask_sizes(self.cumulative_length, 1)
        return plan.sizes()

    def _rows_known(self) -> bool:
        """Whether every row's first real token has been stored."""
        return self.is_initialized and max(self.padding.counts, default=0) < self.cumulative_length

    # Storing

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states and returns sinks, window and new states; see `KVLayer.update`.

        Raises:
            ValueError: If batch, heads, channels or dtype differ from earlier calls.
            RuntimeError: If several queries need their own windows and the model built a mask that doesn't tell them.
        """
        if self.shelf:
            self.shelf.check()
        new = {"keys": key_states, "values": value_states}
        query_length = key_states.shape[2]
        plan = self._plan(query_length)
        asked = self.masks.find(self.cumulative_length, query_length)
        if plan.copies and self.masks.by_slots:
            raise RuntimeError(
                f"{query_length} drafts at once reach beyond the window of {self.policy.sliding_window} tokens, and "
                "this model takes distances from slots (ALiBi), which fit one query only; feed one token at a time, "
                "without an assistant or `prompt_lookup_num_tokens`"
            )
        if plan.copies and (asked is None or not asked.built):
            raise RuntimeError(
                f"{query_length} tokens at once reach beyond the window of {self.policy.sliding_window} tokens, and "
                f"this model's mask wasn't built with the cache's windows; {REMEDY}"
            )
        if self.cumulative_length == 0:
            self.lazy_initialization(key_states, value_states)
        self._check_states(new)
        self._observe_rows(asked, kwargs.get("kwargs"), query_length)
        self.sinks.capture(
            {name: tensor.detach() for name, tensor in new.items()}, self.padding.counts, plan.seq_length
        )
        if handover.reader is not None and self.cumulative_length and handover.reader.accepts(self, key_states):
            self.lead = self._lead_states(plan) if plan.lead else None
            return self._hand_over(new, plan.first_column)
        window = self._append(new, plan.first_column)
        states = self._with_sinks(window, plan)
        self._settle()
        return states["keys"], states["values"]

    def finish_update(self) -> None:
        """Packs and evicts what is due once the queries have been answered, see `KVLayer.finish_update`."""
        self.lead = None
        super().finish_update()

    def _observe_rows(self, asked: MaskPlan | None, attention_kwargs: Any, query_length: int) -> None:
        """Finds each row's first real token, from the padding mask if transformers looked it up, else by positions."""
        if self._rows_known():
            return
        if asked is None or asked.left_padding is None:
            self._observe_padding(attention_kwargs, query_length)
            return
        counts = asked.left_padding.tolist()
        end = self.cumulative_length + query_length
        self.padding = RowPadding(counts, [count >= end for count in counts])

    def _append(self, new: States, visible: int) -> States:
        """Stores new states; returns all from column `visible` on."""
        held, added = self.cumulative_length, new["keys"].shape[2]
        if self.codecs:
            states, first = (new, 0) if held == 0 else self._dense(new, visible)
            self._store(states, first, added)
        elif added > 1 and not self.record_past and self.policy.first_kept(held + added) > self.first_stored:
            states, first = self._replace_window(new)
        else:
            states, first = self._append_unpacked(new)
        return {name: tensor[:, :, visible - first :] for name, tensor in states.items()}

    def _replace_window(self, new: States) -> tuple[States, int]:
        """Appends several tokens of which not all stay; returns everything, from the first stored column on."""
        first = self.first_stored
        states = new
        if len(self.recent):
            states = {name: torch.cat([self.recent.get(name), tensor], dim=2) for name, tensor in new.items()}
        self.cumulative_length += new["keys"].shape[2]
        kept = self.policy.first_kept(self.cumulative_length) - first
        self.recent.replace({name: tensor[:, :, kept:].detach() for name, tensor in states.items()})
        return states, first

    def _with_sinks(self, window: States, plan: MaskPlan) -> States:
        """Puts each row's sinks before the window."""
        if not plan.lead:
            return window
        sinks = self._lead_states(plan)
        whole = not self.codecs and window["keys"].shape[2] == len(self.recent) and plan.lead <= self.recent.lead
        if whole and not self.record_past and not torch.is_grad_enabled():
            return self.recent.prefixed(sinks)
        return {name: torch.cat([sinks[name], tensor], dim=2) for name, tensor in window.items()}

    def _lead_states(self, plan: MaskPlan) -> States:
        """Returns the sinks as the `plan.lead` slots before the window."""
        return self._repeated_sinks(plan) if plan.copies else self._right_aligned_sinks(plan)

    def _repeated_sinks(self, plan: MaskPlan) -> States:
        """Returns the sinks once, or once per query at the distance that query sees them, `copies * sinks` slots."""
        count = self.policy.num_sink_tokens
        sinks = {name: tensor[:, :, :count] for name, tensor in self.sinks.fields().items()}
        if plan.copies == 1:
            return sinks
        repeated = {name: tensor.repeat(1, 1, plan.copies, 1) for name, tensor in sinks.items()}
        if not self.rotation:
            return repeated
        begins = self.padding.counts[:1] if self.padding.uniform else self.padding.counts
        seen = range(plan.seq_length + 1, plan.seq_length + plan.query_length + 1)
        evicted = [[max(0, end - begin - self.policy.most_visible) for end in seen] for begin in begins]
        return {"keys": self.rotation.forward(sinks["keys"], evicted), "values": repeated["values"]}

    def _right_aligned_sinks(self, plan: MaskPlan) -> States:
        """Returns the sinks before the window, in the last of each row's `plan.lead` slots; the mask hides others."""
        uniform = self.padding.uniform
        begins = self.padding.counts[:1] if uniform else self.padding.counts
        present = [min(max(plan.first_column - begin, 0), self.policy.num_sink_tokens) for begin in begins]
        if uniform and present[0] == plan.lead:
            sinks = {name: tensor[:, :, : plan.lead] for name, tensor in self.sinks.fields().items()}
        else:
            slots = [[max(0, slot - plan.lead + count) for slot in range(plan.lead)] for count in present]
            index = torch.tensor(slots, device=self.device).expand(self.batch_size, -1)[:, None, :, None]
            sinks = {
                name: tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[3]))
                for name, tensor in self.sinks.fields().items()
            }
        if self.rotation:
            gaps = [[max(0, plan.first_column - begin - count)] for begin, count in zip(begins, present, strict=True)]
            if any(gap != [0] for gap in gaps):
                sinks["keys"] = self.rotation.forward(sinks["keys"], gaps)
        return sinks

    # Reading

    def dense(self, visible: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the next query will see, sinks first, each `(batch, kv_heads, held, head_dim)`.

        Args:
            visible: First column of the window; by default that of the next query.

        Raises:
            RuntimeError: If nothing was stored yet.
        """
        first = self.policy.first_visible(self.cumulative_length) if visible is None else visible
        window = dict(zip(("keys", "values"), super().dense(first), strict=True))
        sinks = self.lead  # of the queries that are being answered, if there are any
        plan = MaskPlan(self.cumulative_length, 0, first, min(first, self.policy.num_sink_tokens))
        if sinks is None and plan.lead:
            sinks = self._right_aligned_sinks(plan)
        if sinks:
            window = {name: torch.cat([sinks[name], tensor], dim=2) for name, tensor in window.items()}
        return window["keys"], window["values"]

    def describe(self) -> str:
        """Returns what this layer does with its states, in a few words."""
        policy = self.policy
        window = (
            f"window of {policy.sliding_window} tokens, {policy.num_sink_tokens} sinks, {policy.positions} positions"
        )
        return f"{window}; {super().describe()}"
