"""Switches a model to fused attention and back, through transformers' own registries.

`use_fused_attention(model)` registers an attention function and a mask function named "kvplus", selects them for the
model, and marks the model's forward passes with hooks. Within such a pass a cache layer hands itself over (see
`hf_kvplus.handover`) instead of decoding its states, and the attention function gives it to a kernel. Later
chunks of a prompt are answered some of the history at a time (see `chunks`). Prompts, other caches and everything that
no kernel reads go through PyTorch's attention. No code of the model is touched.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import lru_cache, partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hf_kvplus.attention.base import Kernel, Scoring, say_decoded, say_uncompiled
from hf_kvplus.attention.chunks import CausalMasks, attend_chunk, reads_in_chunks
from hf_kvplus.attention.dense import dense_attention
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.checks import require_choice
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.rotary_mean import without_means
from hf_kvplus.handover import Encode, handover
from hf_kvplus.layer import KVLayer
from hf_kvplus.window_layer import SinkWindowLayer

NAME = "kvplus"
# Where a model keeps what undoes this; it goes along when a model is copied.
ATTRIBUTE = "_kvplus_fused_attention"
KERNELS = ("auto", "reference")
# With more queries at once decoding pays: it is shared by all of them.
MOST_QUERIES = 32

# A model's own code that asks whether its attention is called "sdpa".
DEPENDS_ON_NAME = re.compile(r"_attn_implementation\s*(?:==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"'][^\n:]*")


class FusedAttention:
    """A model whose cache is read packed; also a context manager that ends it.

    Args:
        model: The model.
        kernel: `"auto"`, the fastest for the device, or `"reference"`, plain PyTorch for every codec and device.
    """

    def __init__(self, model: PreTrainedModel, kernel: str) -> None:
        require_nameless(model)
        self.model = model
        self.reader = KernelReader(kernel, model)
        self.before = implementations(model.config)
        AttentionInterface.register(NAME, fused_attention_forward)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
        if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
            model.set_attn_implementation(self.before)
            raise ValueError(
                f"{type(model).__name__} doesn't let its attention be chosen (it doesn't use transformers' "
                "AttentionInterface), so it can't be fused; leave out `use_fused_attention`"
            )
        self.hooks: list[Any] = []
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self.hooks.append(module.register_forward_pre_hook(self._begin))
                self.hooks.append(module.register_forward_hook(self._end, always_call=True))

    def _begin(self, module: torch.nn.Module, inputs: Any) -> None:
        """Marks the beginning of a forward pass."""
        handover.begin(self.reader)

    def _end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Marks its end."""
        handover.end()

    def undo(self) -> None:
        """Restores the model's own attention."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.model.set_attn_implementation(self.before)

    def __enter__(self) -> FusedAttention:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        switch(self.model, enabled=False, kernel="auto")


class KernelReader:
    """Decides which layers are read packed, and reads them.

    Args:
        kernel: Name of the kernel.
        model: The model that reads.
    """

    def __init__(self, kernel: str, model: PreTrainedModel) -> None:
        self.kernel = make_kernel(kernel, model.device)
        # What `update` returns is read by later layers too.
        self.shares = bool(getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", None))
        self.answers: WeakKeyDictionary[KVLayer, tuple[Any, ...]] = WeakKeyDictionary()
        self.masks = CausalMasks()

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelReader:
        """A copied model reads with the same kernel."""
        return self

    def accepts(self, layer: KVLayer, key_states: torch.Tensor) -> bool:
        """Whether a kernel answers these queries from the layer itself."""
        if key_states.shape[2] > MOST_QUERIES or key_states.shape[2] == 0:
            return False
        if torch.compiler.is_compiling():
            say_decoded("the model runs under torch.compile")
            return False
        if torch.is_grad_enabled() and key_states.requires_grad:
            say_decoded("gradients are enabled; wrap the call in `torch.no_grad()`")
            return False
        known = self.answers.get(layer)
        if known is None or known[:2] != (layer.dtype, layer.device):
            known = self.answers[layer] = (layer.dtype, layer.device, self._decide(layer))
        return known[2]

    def accepts_chunk(self, layer: KVLayer, key_states: torch.Tensor) -> bool:
        """Whether many queries, of a prompt's later chunk, are answered without all states side by side."""
        if key_states.shape[2] <= MOST_QUERIES or torch.compiler.is_compiling() or self.shares:
            return False
        if torch.is_grad_enabled() and key_states.requires_grad:
            return False
        return reads_in_chunks(layer)

    def encoder(self, codec: Codec, channels: int, device: torch.device) -> Encode | None:
        """Returns what encodes blocks in the place of `codec`, if the kernel brings something that can."""
        found, inner = getattr(self.kernel, "encoder", None), without_means(codec)
        if found is None or found.refuses(inner, channels, device):
            return None
        return found.bind(inner) if inner is codec else partial(codec.encode, encode_rest=found.bind(inner))

    @property
    def mover(self) -> Any:
        """What copies new states into a layer's buffers, if the kernel brings something."""
        return getattr(self.kernel, "mover", None)

    def kernel_for(self, layer: KVLayer) -> Kernel:
        """Returns the kernel that reads a layer: offloaded blocks need one that takes them piece by piece."""
        pieces = layer.shelf is None or getattr(self.kernel, "reads_pieces", False)
        return self.kernel if pieces else ReferenceKernel()

    def _decide(self, layer: KVLayer) -> bool:
        """Whether the kernel reads this layer; says why not."""
        if self.shares:
            reason = "layers of this model read each other's states"
        elif type(layer).update not in (KVLayer.update, SinkWindowLayer.update):
            reason = f"{type(layer).__name__} is read in its own way"
        else:
            reason = self.kernel_for(layer).refuses(layer)
        if reason:
            say_decoded(reason)
        elif self.kernel_for(layer) is not self.kernel:
            name = type(self.kernel).__name__
            say_uncompiled("offloaded blocks", f"they come some at a time, which {name} doesn't take")
        return reason is None


def make_kernel(name: str, device: torch.device) -> Kernel:
    """Returns a kernel.

    Raises:
        ImportError: If Numba (on a CPU) or Triton (on a GPU) is missing.
    """
    if name == "auto" and device.type == "cpu":
        from hf_kvplus.attention.cpu import CPUKernel

        return CPUKernel()
    if name == "auto" and device.type == "cuda":
        from hf_kvplus.attention.triton import TritonKernel

        return TritonKernel()
    if name == "auto":
        say_uncompiled("packed states", f"the device is {device.type}, for which there is no kernel")
    return ReferenceKernel()


def switch(model: PreTrainedModel, enabled: bool, kernel: str) -> FusedAttention | None:
    """Switches fused attention on or off; see `hf_kvplus.attention.use_fused_attention`."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"`model` must be a transformers PreTrainedModel, got {type(model).__name__}")
    require_choice("kernel", kernel, KERNELS)
    previous = vars(model).pop(ATTRIBUTE, None)
    if previous is not None:
        previous.undo()
    if not enabled:
        return None
    fused = FusedAttention(model, kernel)
    vars(model)[ATTRIBUTE] = fused
    return fused


def require_nameless(model: PreTrainedModel) -> None:
    """Checks that no code of the model does something else for an attention that isn't called "sdpa".

    Some models cut their queries or apply a sparse mask only under that name (Gemma 4, DeepSeek-V3.2); under another
    one they compute something else without a word, whatever the cache.

    Raises:
        ValueError: If there is such code.
    """
    for name in sorted({type(module).__module__ for module in model.modules()}):
        found = DEPENDS_ON_NAME.search(_source(name))
        if found:
            raise ValueError(
                f"{type(model).__name__} decides by the name of its attention (`{found[0].strip()}` in {name}), so "
                "another attention changes what it computes and it can't be fused; leave out `use_fused_attention`"
            )


@lru_cache(maxsize=64)
def _source(module_name: str) -> str:
    """Returns the source of a model's module; nothing for PyTorch's own and for code that was typed in."""
    module = sys.modules[module_name]
    if module_name.partition(".")[0] == "torch" or getattr(module, "__file__", None) is None:
        return ""
    return inspect.getsource(module)


def implementations(config: Any) -> dict[str, Any]:
    """Returns the attention of a model and of its parts, in the form that `set_attn_implementation` takes."""
    found: dict[str, Any] = {"": config._attn_implementation}
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            found[name] = implementations(getattr(config, name))
    return found


def fused_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends to the cache layer that `key` stands for, or to dense states; arguments as of `dense_attention`."""
    layer = handover.take(key)
    if layer is None:
        return dense_attention(module, query, key, value, attention_mask, **options)
    try:
        reason = _obstacle(module, layer, query, key, attention_mask, options)
        if layer.incoming is not None:
            return _answer_chunk(module, layer, query, attention_mask, reason, options)
        if reason:
            say_decoded(reason)
            keys, values = layer.dense(handover.visible)
            return dense_attention(module, query, keys, values, attention_mask, **options)
        scaling = options.get("scaling")
        scoring = Scoring(
            query.shape[3] ** -0.5 if scaling is None else scaling, options.get("softcap"), options.get("s_aux")
        )
        kernel = handover.reader.kernel_for(layer)
        return kernel.attend(layer, query, scoring, attention_mask, handover.visible), None
    finally:
        layer.finish_update()


def _answer_chunk(
    module: torch.nn.Module,
    layer: KVLayer,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    reason: str | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Answers a prompt's later chunk; over dense states, as other prompts, where anything but its order is special."""
    special = reason is not None or options.get("softcap") is not None or options.get("s_aux") is not None
    if special or not handover.reader.masks.is_plain(mask):
        keys, values = layer.dense(handover.visible)
        return dense_attention(module, query, keys, values, mask, **options)
    scaling = options.get("scaling")
    return attend_chunk(layer, query, query.shape[3] ** -0.5 if scaling is None else scaling), None


def _obstacle(
    module: torch.nn.Module,
    layer: KVLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> str | None:
    """Returns why a call can't be answered by a kernel, or `None`."""
    if options.get("output_attentions"):
        return "attention weights were asked for"
    if module.training and options.get("dropout"):
        return "attention has dropout"
    if options.get("position_bias") is not None:
        return "the model adds a bias to each pair of positions"
    if query.dtype != layer.dtype:
        return f"queries are {query.dtype}, the cache holds {layer.dtype}"
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1):
        return "the mask isn't boolean or differs between heads"
    if mask is not None and tuple(mask.shape[2:]) != (query.shape[2], key.shape[2]):
        return "the mask isn't for the pairs of queries and tokens that the cache holds"
    return None
