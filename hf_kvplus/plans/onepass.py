"""A window of text in one forward pass, with what a pass in chunks would have read from a cache.

In a chunked pass a query reads packed states of the tokens that were packed before its chunk came, and the others as
they are. Which those are depends on lengths alone, and within a layer every token's states are known before the first
query attends. So one pass over the whole window gives the same result, several times faster: large matrix products,
every block decoded once, and, where a single layer is quantized, the layers before it left out.

    chunk c begins at column s    packed before it: floor((s - residual_length) / block_tokens) blocks

Left out: padding, and layers whose states don't come from the model's own attention (recurrent ones).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hf_kvplus.attention.dense import dense_attention
from hf_kvplus.attention.integration import implementations
from hf_kvplus.caches import KVPlusCache
from hf_kvplus.checks import require_at_least
from hf_kvplus.layer import KVLayer

NAME = "kvplus_one_pass"
ACTIVE: WeakKeyDictionary[torch.nn.Module, OnePass] = WeakKeyDictionary()


@dataclass(frozen=True)
class Reference:
    """A window as the model without quantization sees it.

    Args:
        token_ids: `(tokens,)`.
        positions: `(n,)` positions whose predictions are compared.
        log_probs: `(n, vocab)` float32.
        inputs: Hidden states before each layer, `(1, tokens, hidden)`; empty where they weren't kept.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    log_probs: torch.Tensor
    inputs: tuple[torch.Tensor, ...] = ()


class OnePass:
    """A model whose attention reads what a cache would have held; a context manager that undoes it.

    Args:
        model: A model that takes its attention from transformers' `AttentionInterface`.
        chunk_tokens: Tokens of a chunk.

    Raises:
        ValueError: If the model doesn't let its attention be chosen.
    """

    def __init__(self, model: PreTrainedModel, chunk_tokens: int = 64) -> None:
        require_at_least("chunk_tokens", chunk_tokens, 1)
        self.model, self.chunk_tokens = model, chunk_tokens
        self.cache: KVPlusCache | None = None
        # Called with a layer's index, its call and its output, of which it returns what the model goes on with.
        self.observe: Callable[[int, AttentionCall, torch.Tensor], torch.Tensor] | None = None
        self.before: Any = None

    def __enter__(self) -> OnePass:
        """Selects the attention."""
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _whole_mask)
        self.before = implementations(self.model.config)
        self.model.set_attn_implementation(NAME)
        if self.model.config.get_text_config(decoder=True)._attn_implementation != NAME:
            self.model.set_attn_implementation(self.before)
            raise ValueError(
                f"{type(self.model).__name__} doesn't let its attention be chosen (it doesn't use transformers' "
                "AttentionInterface), so windows can't be run in one pass; use `kvplus eval`"
            )
        for module in self.model.modules():
            ACTIVE[module] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Selects the attention of before."""
        for module in self.model.modules():
            ACTIVE.pop(module, None)
        self.model.set_attn_implementation(self.before)

    def reference(self, token_ids: torch.Tensor, positions: torch.Tensor, *, keep_inputs: bool = False) -> Reference:
        """Runs a window without quantization.

        Args:
            token_ids: `(tokens,)` int64.
            positions: `(n,)` positions whose predictions will be compared.
            keep_inputs: Whether to keep every layer's input, so that later passes can start at a layer.

        Returns:
            The reference.
        """
        inputs: list[torch.Tensor] = []
        with ExitStack() as stack:
            for layer in decoder_layers(self.model) if keep_inputs else ():
                hook = layer.register_forward_pre_hook(
                    lambda _, args, options: inputs.append(args[0] if args else options["hidden_states"]),
                    with_kwargs=True,
                )
                stack.callback(hook.remove)
            log_probs = self._forward(token_ids, positions)
        return Reference(token_ids, positions, log_probs, tuple(inputs))

    def log_probs(self, reference: Reference, cache: KVPlusCache, *, first_layer: int = 0) -> torch.Tensor:
        """Runs a window as if it came in chunks through `cache`, of which only the options are used.

        Args:
            reference: The window.
            cache: Any cache; layers without codecs count as full precision.
            first_layer: Layers before it are full precision and are skipped, if the reference kept its inputs.

        Returns:
            Log-probabilities at the reference's positions, `(n, vocab)` float32.
        """
        self.cache = cache
        try:
            with _skipped(self.model, reference.inputs, first_layer):
                return self._forward(reference.token_ids, reference.positions)
        finally:
            self.cache = None

    def divergences(self, reference: Reference, cache: KVPlusCache, *, first_layer: int = 0) -> torch.Tensor:
        """Returns KL(reference || cache) in nats at each position, `(n,)`; arguments as for `log_probs`."""
        found = self.log_probs(reference, cache, first_layer=first_layer)
        return (reference.log_probs.exp() * (reference.log_probs - found)).sum(-1, dtype=torch.float64)

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        kept = positions.to(self.model.device)
        selects = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        options = {"logits_to_keep": kept} if selects else {}
        output = self.model(input_ids=token_ids[None].to(self.model.device), use_cache=False, **options)
        logits = output.logits[0] if selects else output.logits[0, kept]
        return torch.log_softmax(logits.float(), dim=-1)


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Returns the decoder's layers, an empty list where the model keeps them under another name."""
    layers = getattr(model.get_decoder(), "layers", None)
    return layers if isinstance(layers, torch.nn.ModuleList) else torch.nn.ModuleList()


@contextmanager
def _skipped(model: PreTrainedModel, inputs: tuple[torch.Tensor, ...], first_layer: int) -> Iterator[None]:
    """Lets a forward pass begin at a layer, with that layer's known input."""
    count = first_layer if inputs else 0
    layers = list(decoder_layers(model))[:count]
    try:
        for layer in layers:
            # Each replaced layer hands on what the next one is known to get.
            layer.forward = lambda *args, **options: inputs[count]
        yield
    finally:
        for layer in layers:
            del layer.forward


def _whole_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """Returns the mask, also where it could be left out."""
    return sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})


@dataclass(frozen=True)
class AttentionCall:
    """What transformers calls an attention function with.

    Args:
        module: The attention layer.
        query: `(1, heads, tokens, head_dim)`.
        key: `(1, kv_heads, tokens, head_dim)`.
        value: `(1, kv_heads, tokens, value_head_dim)`.
        mask: `(1, 1, tokens, tokens)` bool, or additive.
        options: The other arguments.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]

    def plain(self) -> torch.Tensor:
        """Attends to the states as they are, `(1, tokens, heads, value_head_dim)`."""
        return dense_attention(self.module, self.query, self.key, self.value, self.mask, **self.options)[0]

    def stored(self, held: KVLayer, chunk_tokens: int, parts: Sequence[str] = ("keys", "values")) -> torch.Tensor:
        """Attends, chunk by chunk, to what a layer would have held when the chunk came.

        Args:
            held: A layer with codecs; only its options are used.
            chunk_tokens: Tokens of a chunk.
            parts: Which of keys and values are read as stored.

        Returns:
            `(1, tokens, heads, value_head_dim)`.
        """
        # A layer of its own: windows are up to the mask, and nothing may be evicted.
        layer = KVLayer(
            *held.codecs.values(), residual_length=held.residual_length, num_sink_tokens=held.num_sink_tokens
        )
        layer.update(self.key, self.value)
        states = {"keys": self.key, "values": self.value}
        read = dict(zip(states, layer.dense(), strict=True))
        seen = {name: states[name].detach().clone() for name in parts}
        outputs, packed = [], 0
        for start in range(0, self.query.shape[2], chunk_tokens):
            stop = min(start + chunk_tokens, self.query.shape[2])
            due = max(0, start - held.residual_length) // layer.block_tokens * layer.block_tokens
            for name, tensor in seen.items():
                tensor[:, :, packed:due] = read[name][:, :, packed:due]
            packed = due
            keys, values = (seen.get(name, states[name])[:, :, :stop] for name in states)
            mask = None if self.mask is None else self.mask[:, :, start:stop, :stop]
            query = self.query[:, :, start:stop]
            outputs.append(dense_attention(self.module, query, keys, values, mask, **self.options)[0])
        return torch.cat(outputs, dim=1)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends chunk by chunk; arguments and results are those of transformers' attention functions."""
    run = ACTIVE[module]
    call = AttentionCall(module, query, key, value, attention_mask, options)
    held = run.cache.layers[module.layer_idx] if run.cache is not None else None
    stored = isinstance(held, KVLayer) and bool(held.codecs)
    output = call.stored(held, run.chunk_tokens) if stored else call.plain()
    return output if run.observe is None else run.observe(module.layer_idx, call, output), None
