"""One layer's cache: two codecs, stores and a policy, behind the contract of transformers' `CacheLayerMixin`.

    columns   0 ............................ packed_tokens ............. seq_length
              [ whole blocks, packed once  ][ recent, full precision    ]
              sinks of a row are kept beside the blocks and replace what the codes say

A block is packed when `residual_length` tokens lie behind it, and never again. Padding and sinks are inside the blocks
(they keep columns aligned for every row) but have no influence on scales. Without codecs nothing is ever packed: the
layer is a buffer that grows, and `update` returns a view of it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_kvplus.checks import require_at_least, require_states
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.handover import handover
from hf_kvplus.layer_rows import LayerRows
from hf_kvplus.layer_state import LayerState
from hf_kvplus.policies import FullPolicy, Policy
from hf_kvplus.policies.padding import RowPadding
from hf_kvplus.rollback import Rollback
from hf_kvplus.shown_states import ShownStates
from hf_kvplus.stores import GrowingStore, PackedStore, SinkStore
from hf_kvplus.stores.hostmemory import DensePool
from hf_kvplus.stores.space import Shelf

States = dict[str, torch.Tensor]  # "keys" and "values", each (batch, kv_heads, seq, head_dim)

# Blocks of an offloaded layer that isn't quantized, as long as the tiles in which a kernel reads recent tokens.
OFFLOADED_BLOCK_TOKENS = OFFLOADED_RECENT_TOKENS = 64


class KVLayer(ShownStates, Rollback, LayerRows, LayerState, CacheLayerMixin):
    """Stores the keys and values of one attention layer.

    Args:
        key_codec: How blocks of keys are packed; `None` together with `value_codec=None` packs nothing.
        value_codec: How blocks of values are packed.
        policy: Which tokens are kept; all of them by default.
        residual_length: Most recent tokens that always stay at full precision.
        num_sink_tokens: First real tokens of each row that always stay at full precision.

    Raises:
        ValueError: If only one codec is given, they disagree on the block length, or a count is negative.
    """

    is_compileable = False
    is_croppable = True
    # What queries see before column `visible` while they are answered from the layer itself; see `SinkWindowLayer`.
    lead: States | None = None
    # States of a chunk whose queries are being answered and that isn't stored yet; see `hf_kvplus.handover`.
    incoming: States | None = None

    def __init__(
        self,
        key_codec: Codec | None = None,
        value_codec: Codec | None = None,
        *,
        policy: Policy | None = None,
        residual_length: int = 64,
        num_sink_tokens: int = 4,
    ) -> None:
        require_at_least("residual_length", residual_length, 0)
        require_at_least("num_sink_tokens", num_sink_tokens, 0)
        if (key_codec is None) != (value_codec is None):
            raise ValueError("`key_codec` and `value_codec` go together; use IdentityCodec for the one left unpacked")
        if key_codec and value_codec and key_codec.block_tokens != value_codec.block_tokens:
            raise ValueError(
                "`key_codec` and `value_codec` must have the same block_tokens, got "
                f"{key_codec.block_tokens} and {value_codec.block_tokens}"
            )
        self.codecs = {"keys": key_codec, "values": value_codec} if key_codec and value_codec else {}
        self.block_tokens = key_codec.block_tokens if key_codec else 0
        self.policy = policy or FullPolicy()
        self.residual_length, self.num_sink_tokens = residual_length, num_sink_tokens
        self.is_sliding = self.policy.is_sliding
        if self.is_sliding:  # transformers' layers have it where they have a window, and only there
            self.sliding_window = self.policy.sliding_window
        self.record_past = False
        self.shelf: Shelf | None = None
        # Buffers that the layers of a cache take turns with, and whether this layer is the last to read in a pass.
        self.dense_pool: DensePool | None = None
        self.is_last = False
        self._clear()

    def shelve(self, shelf: Shelf | None) -> None:
        """Lets blocks live elsewhere, before anything was stored; without codecs, blocks of states as they are.

        Args:
            shelf: The layer's place there; `None` forms the same blocks and leaves them here.
        """
        if not self.codecs:
            identity = IdentityCodec(block_tokens=OFFLOADED_BLOCK_TOKENS)
            self.codecs = {"keys": identity, "values": identity}
            self.block_tokens, self.residual_length = OFFLOADED_BLOCK_TOKENS, OFFLOADED_RECENT_TOKENS
            # What is stored exactly needs no exemption.
            self.num_sink_tokens = getattr(self.policy, "num_sink_tokens", 0)
        self.shelf = shelf
        self._clear()

    def _make_store(self, name: str, codec: Codec, bound: int = 0) -> PackedStore:
        """Returns an empty store for blocks of keys or values."""
        return self.shelf.store(name, codec, bound) if self.shelf else PackedStore(codec, bound)

    def _clear(self) -> None:
        """Sets up empty stores."""
        self.is_initialized = False
        self.cumulative_length = 0
        self.assigned = {}
        if self.shelf:
            self.shelf.packed_tokens = 0
        self.incoming = None
        self.packed = {name: self._make_store(name, codec) for name, codec in self.codecs.items()}
        self.sinks = SinkStore(self.num_sink_tokens)
        # Packing keeps the recent tokens below one block more than `residual_length`.
        self.recent = GrowingStore(minimum=16, ceiling=self.residual_length + self.block_tokens if self.codecs else 0)
        self.padding = RowPadding([])

    def reset(self) -> None:
        """Forgets everything and gives the memory back; the next `update` may have another batch size."""
        self._clear()
        if self.shelf:
            self.shelf.forget()
        self.record_past = False
        self.__dict__.pop("batch_size", None)

    def _stores(self) -> tuple[GrowingStore, ...]:
        return *self.packed.values(), self.sinks, self.recent

    # Sizes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learns batch, heads, channels, dtype and device from the first states, possibly of length 0.

        Raises:
            ValueError: If the shapes don't fit or a codec can't take the channels.
            TypeError: If the states aren't floating-point tensors.
        """
        require_states(key_states, value_states)
        states = {"keys": key_states, "values": value_states}
        for name, codec in self.codecs.items():
            codec.check(states[name].shape[3])
        self.batch_size = key_states.shape[0]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.shapes = {name: (tensor.shape[1], tensor.shape[3]) for name, tensor in states.items()}
        for store in self._stores():
            store.clear()
        self.recent.append({name: tensor[:, :, :0].detach() for name, tensor in states.items()})
        self.padding = RowPadding.unknown(self.batch_size)
        self.is_initialized = True

    @property
    def packed_blocks(self) -> int:
        """Blocks that are held packed."""
        return len(self.packed["keys"]) if self.packed else 0

    @property
    def packed_tokens(self) -> int:
        """Column behind the last packed block, where the recent tokens begin."""
        return self.cumulative_length - len(self.recent)

    @property
    def first_stored(self) -> int:
        """Column of the first token that is still held (sinks aside)."""
        return self.packed_tokens - self.packed_blocks * self.block_tokens

    @property
    def lead_tokens(self) -> int:
        """Slots of `lead`."""
        return self.lead["keys"].shape[2] if self.lead else 0

    def get_seq_length(self) -> int:
        """Returns the tokens seen, whether or not all are still held."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Returns the most tokens ever visible, or -1 without a bound."""
        return self.policy.max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns `(kv_length, kv_offset)` of what the next `update` of `query_length` tokens returns."""
        return self.policy.mask_sizes(self.cumulative_length, query_length)

    # Storing

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states and returns all that the queries of this call may see.

        Args:
            key_states: `(batch, kv_heads, seq, head_dim)`, after RoPE.
            value_states: `(batch, kv_heads, seq, value_head_dim)`.
            *args: Ignored.
            **kwargs: `kwargs` may hold the attention's keyword arguments; `position_ids` in it tell padding.

        Returns:
            Keys and values `(batch, kv_heads, kv_length, ...)` in the dtype of the input. A prompt attends to its own
            unpacked states; later calls read packed ones.

        Raises:
            ValueError: If batch, heads, channels or dtype differ from earlier calls.
        """
        if self.shelf:
            self.shelf.check()
        if self.cumulative_length == 0:  # an empty layer takes any states, also after `early_initialization` or a crop
            self.lazy_initialization(key_states, value_states)
        new = {"keys": key_states, "values": value_states}
        self._check_states(new)
        self._observe_padding(kwargs.get("kwargs"), key_states.shape[2])
        visible = self.policy.first_visible(self.cumulative_length)
        if handover.reader is not None and self.cumulative_length:
            if handover.reader.accepts(self, key_states):
                return self._hand_over(new, visible)
            if handover.reader.accepts_chunk(self, key_states):
                return self._hand_over_chunk(new, visible)
        if not self.codecs:
            states, first = self._append_unpacked(new)
        else:
            states, first = (new, 0) if self.cumulative_length == 0 else self._dense(new, visible)
            self._store(states, first, key_states.shape[2])
        self._settle()
        return states["keys"][:, :, visible - first :], states["values"][:, :, visible - first :]

    def _hand_over(self, new: States, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states and returns stand-ins; whoever reads this layer for them calls `finish_update` then."""
        self.recent.append({name: tensor.detach() for name, tensor in new.items()}, mover=handover.mover())
        self.cumulative_length += new["keys"].shape[2]
        length = self.lead_tokens + self.cumulative_length - visible
        shapes = [(self.batch_size, heads, length, channels) for heads, channels in self.shapes.values()]
        keys, values = handover.offer(self, shapes, visible)
        return keys, values

    def _hand_over_chunk(self, new: States, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns stand-ins for all that is held and new states, which `finish_update` stores."""
        self.incoming = {name: tensor.detach() for name, tensor in new.items()}
        length = self.cumulative_length + new["keys"].shape[2] - visible
        shapes = [(self.batch_size, heads, length, channels) for heads, channels in self.shapes.values()]
        keys, values = handover.offer(self, shapes, visible)
        return keys, values

    def _take_in(self, new: States) -> None:
        """Stores a chunk that nothing dense was built for."""
        added = new["keys"].shape[2]
        if self.codecs:
            held = self.recent.fields()
            states = {name: torch.cat([held[name], tensor], dim=2) for name, tensor in new.items()}
            self._store(states, self.packed_tokens, added)
        else:
            self.recent.append(new)
            self.cumulative_length += added

    def finish_update(self) -> None:
        """Packs and evicts what an update has made due, once its queries have been answered from this layer."""
        if self.incoming is not None:
            new, self.incoming = self.incoming, None
            self._take_in(new)
            self._settle()
            return
        blocks = max(0, len(self.recent) - self.residual_length) // self.block_tokens if self.codecs else 0
        if blocks:
            tokens, begin = blocks * self.block_tokens, self.packed_tokens
            due = self.recent.fields(0, tokens)
            self.sinks.capture(due, self.padding.counts, begin)
            self._pack(due, begin)
            self.recent.shift(tokens, handover.mover())
        self._settle()

    def _settle(self) -> None:
        """Drops what no later query can see, once new states have been stored, and tells where blocks live."""
        if not self.record_past:
            self._evict()
        if self.shelf:
            self.shelf.changed(self.packed_tokens)

    def _check_states(self, new: States) -> None:
        """Refuses states that don't continue the ones held."""
        self.check_both_assigned()
        got = {"batch size": new["keys"].shape[0], "dtype": new["keys"].dtype}
        held = {"batch size": self.batch_size, "dtype": self.dtype}
        for name, tensor in new.items():
            got[f"(kv_heads, head_dim) of {name}"] = (tensor.shape[1], tensor.shape[3])
            held[f"(kv_heads, head_dim) of {name}"] = self.shapes[name]
        different = [f"{name} {held[name]}, got {got[name]}" for name in held if held[name] != got[name]]
        if different:
            rows = got["batch size"] / held["batch size"]
            repeat = f", or `batch_repeat_interleave({int(rows)})`" if rows > 1 and rows.is_integer() else ""
            raise ValueError(
                f"this cache holds states with {'; '.join(different)}. Use a new cache, or `reset()` this one{repeat}"
            )

    def _observe_padding(self, attention_kwargs: Any, query_length: int) -> None:
        """Finds each row's first real token while the prompt comes in."""
        if self.padding.settled or query_length == 0:
            return
        positions = attention_kwargs.get("position_ids") if isinstance(attention_kwargs, dict) else None
        if positions is None or positions.dim() != 2 or positions.shape[-1] != query_length:
            self.padding.settle()
            return
        # Padding has position 0 (1 in older releases, -1 in some models), and only the row's beginning tells of it.
        beginning = (positions <= 1).cumprod(-1).expand(self.batch_size, -1)
        columns = torch.arange(query_length, device=positions.device)
        last_zero = torch.where((positions == 0) & (beginning == 1), columns, -1).amax(-1)
        self.padding.observe(self.cumulative_length, last_zero.tolist(), beginning.all(-1).tolist())

    def _append_unpacked(self, new: States) -> tuple[States, int]:
        """Appends to the buffer; returns a view of it, or a copy that carries gradients where they're enabled."""
        first = self.first_stored
        held = self.recent.fields()
        self.recent.append({name: tensor.detach() for name, tensor in new.items()})
        self.cumulative_length += new["keys"].shape[2]
        if torch.is_grad_enabled():
            return {name: torch.cat([held[name], tensor], dim=2) for name, tensor in new.items()}, first
        return self.recent.fields(), first

    def _store(self, states: States, first: int, added: int) -> None:
        """Packs the blocks that `residual_length` newer tokens have made due; the rest is recent.

        Args:
            states: Dense states from column `first` on, up to and including the `added` new ones.
            first: A column of a token that isn't packed, or an earlier one.
            added: Number of new tokens at the end of `states`.
        """
        begin = self.packed_tokens
        pending = {name: tensor[:, :, begin - first :].detach() for name, tensor in states.items()}
        length = pending["keys"].shape[2]
        self.cumulative_length += added
        blocks = max(0, length - self.residual_length) // self.block_tokens
        if blocks:
            due = {name: tensor[:, :, : blocks * self.block_tokens] for name, tensor in pending.items()}
            self.sinks.capture(due, self.padding.counts, begin)
            self._pack(due, begin)
            self.recent.replace({name: tensor[:, :, blocks * self.block_tokens :] for name, tensor in pending.items()})
        elif added:
            self.recent.append({name: tensor[:, :, length - added :] for name, tensor in pending.items()})

    def _pack(self, due: States, begin: int) -> None:
        """Encodes whole blocks that start at column `begin`, but those that no later query will see."""
        tokens = next(iter(due.values())).shape[2]
        gone = 0 if self.record_past else self.policy.first_kept(self._last_seen(begin + tokens)) - begin
        skipped = min(max(0, gone) // self.block_tokens, tokens // self.block_tokens) * self.block_tokens
        if skipped:
            for store in self.packed.values():
                store.clear()
        first = begin + skipped
        protected = max(self.padding.counts) + self.num_sink_tokens - first
        masked = min(-(-protected // self.block_tokens) * self.block_tokens, tokens - skipped)
        valid = self._valid(first, masked) if masked > 0 else None
        for name, states in due.items():
            store = self.packed[name]
            store.append_states(states[:, :, skipped:], valid, handover.encoder(store.codec, states))

    def _valid(self, first: int, tokens: int) -> torch.Tensor:
        """Returns which of `tokens` columns from `first` on are neither padding nor sinks, `(batch, tokens)`."""
        columns = torch.arange(first, first + tokens, device=self.device)
        begins = torch.tensor(self.padding.counts, device=self.device) + self.num_sink_tokens
        return columns >= begins[:, None]

    def _evict(self) -> None:
        """Drops what no later query can see; packed blocks go whole."""
        surplus = self.policy.first_kept(self._last_seen(self.packed_tokens)) - self.first_stored
        if surplus <= 0:
            return
        if not self.codecs:
            self.recent.drop_front(surplus)
        for store in self.packed.values():
            store.drop_front(surplus // self.block_tokens)

    def _last_seen(self, packed_tokens: int) -> int:
        """Returns the length from which what is out of sight is told.

        If blocks outlive the process, a later one goes on behind the last of them, so its window counts.
        """
        return packed_tokens if self.shelf and self.shelf.outlives else self.cumulative_length

    # Reading

    def _dense(self, new: States, visible: int) -> tuple[States, int]:
        """Decodes what is held, from column `visible` or a little earlier, and puts `new` behind it.

        Returns:
            The states and the column of their first token, at most `min(visible, packed_tokens)`.
        """
        block = visible // self.block_tokens * self.block_tokens
        first = min(max(self.first_stored, block), self.packed_tokens)
        packed, total = self.packed_tokens - first, self.cumulative_length - first
        states = {
            name: self._dense_like(new[name], (*new[name].shape[:2], total + new[name].shape[2], new[name].shape[3]))
            for name in self.packed
        }
        if self.dense_pool is not None and self.is_last:
            self.dense_pool.let_go()
        self._decode(states, (first - self.first_stored) // self.block_tokens)
        for name, out in states.items():
            tensor = new[name]
            self.sinks.restore(name, out, self.padding.counts, first, self.packed_tokens)
            out[:, :, packed:total] = self.recent.get(name)
            out[:, :, total:] = tensor
        return states, first

    def _decode(self, outs: States, first_block: int) -> None:
        """Decodes keys and values from a block on into the front of `outs`."""
        if self.shelf:
            self.shelf.decode(self.packed, outs, first_block)
            return
        for name, store in self.packed.items():
            store.decode(outs[name], first_block)

    def _dense_like(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns room for dense states that end in `tensor`, if possible some that nobody reads any more."""
        if self.shelf:
            return self.shelf.shelves.dense.empty_like(tensor, shape)
        if self.dense_pool is None or not tensor.shape[2]:  # nobody's pass, such as a look at `keys`
            return tensor.new_empty(shape)
        return self.dense_pool.empty_like(tensor, shape)

    def dense(self, visible: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all visible keys and values at full precision, each `(batch, kv_heads, held, head_dim)`.

        Those of a chunk that is being answered are among them.

        Args:
            visible: First column to return; by default the first that the next query sees.

        Raises:
            RuntimeError: If nothing was stored yet.
        """
        if not self.is_initialized:
            raise RuntimeError("this layer holds nothing yet; run a forward pass with the cache first")
        visible = self.policy.first_visible(self.cumulative_length) if visible is None else visible
        first, states = self.first_stored, self.recent.fields()
        if self.packed_blocks:
            new = self.incoming or {name: tensor[:, :, :0] for name, tensor in states.items()}
            states, first = self._dense(new, visible)
        elif self.incoming:
            states = {name: torch.cat([states[name], tensor], dim=2) for name, tensor in self.incoming.items()}
        return states["keys"][:, :, visible - first :], states["values"][:, :, visible - first :]

    def describe(self) -> str:
        """Returns what this layer does with its states, in a few words."""
        if not self.codecs:
            return "full precision"
        parts = ", ".join(f"{name} {codec.describe()}" for name, codec in self.codecs.items())
        place = f"; {self.shelf.describe()}" if self.shelf else ""
        return f"{parts}; full precision: {self.num_sink_tokens} sinks, last {self.residual_length} tokens{place}"
