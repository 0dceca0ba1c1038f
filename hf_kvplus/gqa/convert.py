"""From a checkpoint to one with fewer key-value heads, which plain transformers loads.

Groups of KV heads are merged (see `factors`), and what rebuilds a head is folded into the weights around it:

    k_proj   E_k W_k             q_proj   D_k,a^T W_q of the queries that read head a
    v_proj   E_v W_v             o_proj   W_o D_v,a, the columns of those queries

A plain checkpoint gives every KV head the same number of queries. Where the heads don't divide (3 into 2), smaller
groups get queries with zero weights, which add nothing to the output: SmolLM2's 9 query heads become 12. That needs a
model whose head size is apart from its width.

Left out, and refused by name: models whose attention isn't made of the four projections above (GPT-2, Phi-3), and
other mergers than the mean for models that normalize each head's keys (Qwen 3). `GQACache` takes all of these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from hf_kvplus.caches import text_config
from hf_kvplus.checks import require_at_least, require_choice
from hf_kvplus.compat import cache_keyword
from hf_kvplus.gqa.factors import METHODS, Factors, Layout, merge_heads
from hf_kvplus.gqa.grouping import Group, search_groups
from hf_kvplus.gqa.moments import LayerMoments, collect_moments

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
KEY_NORMS = ("k_norm", "q_norm", "k_layernorm", "q_layernorm")
# Model types whose attention is these projections, RoPE and nothing else that touches heads; a test goes over them.
_CONVERTIBLE_TYPES = """
    arcee gemma granite llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
    """
CONVERTIBLE = frozenset(_CONVERTIBLE_TYPES.split())
REMEDY = "use GQACache, which leaves the model as it is (`kvplus calibrate-gqa`)"
# How far apart the two positions are at which keys are compared to learn the layout of RoPE.
PROBE_SHIFT = 1000


def convert_to_gqa(
    model: PreTrainedModel,
    num_key_value_heads: int,
    method: str = "svd",
    calibration: Sequence[torch.Tensor] | None = None,
    *,
    context_tokens: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """Merges key-value heads and folds the mergers into the weights.

    Source: GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints,
    https://arxiv.org/abs/2305.13245, whose mean pooling is `method="mean"`; differs in that groups are searched and
    heads aligned or factored before they're merged.

    Args:
        model: A causal language model; it stays as it is.
        num_key_value_heads: KV heads of the result.
        method: `"mean"`, `"aligned"` or `"svd"`; see `hf_kvplus.gqa.factors`.
        calibration: Token ids, each `(tokens,)`, a few thousand in all. Only `"mean"` does without, and then merges
            neighbours.
        context_tokens: Tokens of each window whose states are looked at; the others read them. `None`: half.
        advance: Called after each window, for a progress bar.

    Returns:
        A new model of the same class on the same device, with the same tokenizer and generation settings.

    Raises:
        TypeError: If `model` isn't a transformers model.
        ValueError: If the number of heads doesn't fit, or a choice or the calibration is missing.
        NotImplementedError: If the architecture can't say it; the message names what can.
    """
    require_convertible(model, num_key_value_heads, method)
    moments = None
    if calibration is not None:
        context = context_tokens or min(map(len, calibration), default=0) // 2
        moments = collect_moments(model, calibration, context_tokens=context, num_sink_tokens=0, advance=advance)
    elif method != "mean":
        raise ValueError(f'`calibration` must be given for method="{method}": windows of token ids; or use "mean"')
    plan = _Plan.of(model, num_key_value_heads)
    config = converted_config(model.config, num_key_value_heads, plan.query_heads)
    layouts = [Layout()] * len(plan.modules) if moments is None else rotary_layouts(model)
    weights = dict(model.state_dict())
    for index, name in enumerate(plan.modules):
        layer = moments[index] if moments is not None else None
        groups = plan.groups(layer, layouts[index], method)
        _convert_layer(weights, name, plan, groups, layer, layouts[index], method)
    converted = type(model)._from_config(config, dtype=model.dtype).to(model.device)
    converted.load_state_dict(weights)
    converted.generation_config = copy.deepcopy(model.generation_config)
    return converted.train(model.training)


def require_convertible(model: PreTrainedModel, num_key_value_heads: int, method: str) -> None:
    """Checks that a plain checkpoint can hold the result.

    Raises:
        TypeError: If `model` isn't a transformers model.
        ValueError: If a choice is unknown or the number of heads doesn't fit.
        NotImplementedError: If the architecture can't; the message names the reason and the remedy.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"`model` must be a transformers PreTrainedModel, got {type(model).__name__}")
    require_choice("method", method, METHODS)
    require_at_least("num_key_value_heads", num_key_value_heads, 1)
    config = model.config
    if config.model_type not in CONVERTIBLE:
        why = "its configuration has no `num_key_value_heads`"
        if getattr(config, "num_key_value_heads", None):
            why = f"only {', '.join(sorted(CONVERTIBLE))} were verified"
        raise NotImplementedError(f"model type {config.model_type!r} can't be converted: {why}; {REMEDY}")
    held = config.num_key_value_heads
    if num_key_value_heads >= held:
        raise ValueError(f"`num_key_value_heads` must be below the model's {held}, got {num_key_value_heads}")
    for module in attention_modules(model).values():
        if any(getattr(module, name, None) is not None for name in KEY_NORMS) and method != "mean":
            raise NotImplementedError(
                f"model type {config.model_type!r} normalizes the keys of each head, so heads can't be mixed in its "
                f'weights: use method="mean" and heal it, or {REMEDY}'
            )


def attention_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Returns the attention module of each decoder layer by its name in the model.

    Raises:
        NotImplementedError: If a layer has none made of plain projections.
    """
    found = {}
    for name, module in model.named_modules():
        # Not subclasses: quantizers' own layers are, and hold codes.
        if all(type(getattr(module, projection, None)) is torch.nn.Linear for projection in PROJECTIONS):
            found[name] = module
    layers = text_config(model.config).num_hidden_layers
    if len(found) != layers:
        raise NotImplementedError(
            f"{type(model).__name__} has {layers} layers, of which {len(found)} have attention made of "
            f"{', '.join(PROJECTIONS)} as plain linear layers; {REMEDY}"
        )
    return found


def converted_config(config: PretrainedConfig, kv_heads: int, query_heads: int) -> PretrainedConfig:
    """Returns the configuration of the result.

    Raises:
        NotImplementedError: If query heads must be added and the configuration can't tell the head size apart.
    """
    changed = copy.deepcopy(config)
    if getattr(changed, "quantization_config", None) is not None:
        del changed.quantization_config  # of a file that was dequantized when it was loaded (GGUF)
    changed.num_key_value_heads = kv_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if query_heads != config.num_attention_heads:
        if config.hidden_size % query_heads or config.model_type == "stablelm":
            raise NotImplementedError(
                f"{config.num_key_value_heads} key-value heads can become {_divisors(config)} in a plain checkpoint "
                f"of this model, not {kv_heads}: {config.num_attention_heads} query heads would have to be padded to "
                f"{query_heads}, which its width of {config.hidden_size} doesn't allow; {REMEDY}"
            )
        changed.num_attention_heads, changed.head_dim = query_heads, head_dim
    return changed


def _divisors(config: PretrainedConfig) -> str:
    """Returns the numbers of KV heads that need no padding."""
    held = config.num_key_value_heads
    return ", ".join(str(count) for count in range(1, held) if held % count == 0)


@dataclass(frozen=True)
class _Plan:
    """Sizes of a conversion.

    Args:
        modules: Names of the attention modules, by layer.
        heads: KV heads of the model.
        kept: KV heads of the result.
        sharing: Query heads that share a KV head of the model.
        head_dim: Channels of a head.
    """

    modules: tuple[str, ...]
    heads: int
    kept: int
    sharing: int
    head_dim: int

    @classmethod
    def of(cls, model: PreTrainedModel, kept: int) -> _Plan:
        """Reads the sizes off a model."""
        config, modules = model.config, attention_modules(model)
        heads = config.num_key_value_heads
        rows = next(iter(modules.values())).k_proj.weight.shape[0]
        return cls(tuple(modules), heads, kept, config.num_attention_heads // heads, rows // heads)

    @property
    def largest(self) -> int:
        """Most KV heads in a group."""
        return -(-self.heads // self.kept)

    @property
    def query_heads(self) -> int:
        """Query heads of the result."""
        return self.kept * self.largest * self.sharing

    def groups(self, layer: LayerMoments | None, layout: Layout, method: str) -> list[Group]:
        """Returns which heads of a layer are merged: neighbours if nothing is known of them."""
        if layer is None:
            cut = torch.arange(self.heads).tensor_split(self.kept)
            return [tuple(group.tolist()) for group in cut]

        def cost(group: Group) -> float:
            if len(group) == 1:
                return 0.0
            parts = ((layer["keys"], layout), (layer["values"], Layout()))
            return sum(merge_heads(part, group, how, method).loss(part, group) for part, how in parts)

        return search_groups(self.heads, self.kept, cost, largest=self.largest)


def _convert_layer(
    weights: dict[str, torch.Tensor],
    name: str,
    plan: _Plan,
    groups: Sequence[Group],
    layer: LayerMoments | None,
    layout: Layout,
    method: str,
) -> None:
    """Replaces the projections of one layer in `weights`."""
    merged: dict[str, list[Factors]] = {"keys": [], "values": []}
    for group in groups:
        for part, how in (("keys", layout), ("values", Layout())):
            if layer is None:
                eye = torch.eye(plan.head_dim, dtype=torch.float64)
                merged[part].append(Factors(eye.repeat(1, len(group)) / len(group), eye.expand(len(group), -1, -1)))
            else:
                merged[part].append(merge_heads(layer[part], group, how, method))
    for kind in ("weight", "bias"):
        for part, projection in (("keys", "k_proj"), ("values", "v_proj")):
            key = f"{name}.{projection}.{kind}"
            if key in weights:
                weights[key] = _fold_encoders(weights[key], groups, merged[part], plan)
        if f"{name}.q_proj.{kind}" in weights:
            key = f"{name}.q_proj.{kind}"
            weights[key] = _fold_decoders(weights[key], groups, merged["keys"], plan)
    key = f"{name}.o_proj.weight"
    weights[key] = _fold_decoders(weights[key].T, groups, merged["values"], plan).T.contiguous()


def _fold_encoders(
    weight: torch.Tensor, groups: Sequence[Group], factors: Sequence[Factors], plan: _Plan
) -> torch.Tensor:
    """Returns rows `(kept * head_dim, ...)` from rows `(heads * head_dim, ...)`."""
    by_head = weight.double().unflatten(0, (plan.heads, plan.head_dim))
    rows = [
        one.encoder.to(weight.device) @ by_head[list(group)].flatten(0, 1)
        for group, one in zip(groups, factors, strict=True)
    ]
    return torch.cat(rows).to(weight.dtype)


def _fold_decoders(
    weight: torch.Tensor, groups: Sequence[Group], factors: Sequence[Factors], plan: _Plan
) -> torch.Tensor:
    """Returns rows of query heads, decoders transposed before them, zeros where a group is smaller than the others."""
    by_head = weight.double().unflatten(0, (plan.heads, plan.sharing, plan.head_dim))
    rows = []
    for group, one in zip(groups, factors, strict=True):
        for head, decoder in zip(group, one.decoders.to(weight.device), strict=True):
            rows.append(torch.tensordot(by_head[head], decoder, dims=([1], [0])).movedim(-1, 1).flatten(0, 1))
        missing = (plan.largest - len(group)) * plan.sharing * plan.head_dim
        rows.append(by_head.new_zeros(missing, *weight.shape[1:]))
    return torch.cat(rows).to(weight.dtype)


def rotary_layouts(model: PreTrainedModel) -> list[Layout]:
    """Finds out which channels of each layer's keys turn with positions, and in which pairs, by moving a few tokens.

    Raises:
        NotImplementedError: If keys change in another way than by turning pairs of channels.
    """
    config = text_config(model.config)
    ids = torch.arange(2, 10, device=model.device)[None] % config.vocab_size
    kept = []
    with torch.no_grad():
        for begin in (0, PROBE_SHIFT):
            cache = DynamicCache(config=config)
            places = torch.arange(begin, begin + ids.shape[1], device=model.device)[None]
            arguments: dict[str, Any] = {cache_keyword(model): cache, "position_ids": places}
            model(input_ids=ids, use_cache=True, **arguments)
            kept.append([layer.keys.double() for layer in cache.layers])
    head_dim = kept[0][0].shape[3]
    parameters = getattr(config, "rope_parameters", None) or {}
    factor = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    pairs = int(head_dim * factor) // 2
    exact = 1e-3 if model.dtype == torch.float32 else 5e-2
    return [_layout(here, there, pairs, exact, index) for index, (here, there) in enumerate(zip(*kept, strict=True))]


def _layout(here: torch.Tensor, there: torch.Tensor, pairs: int, exact: float, index: int) -> Layout:
    """Compares one layer's keys at two positions."""
    size = here.abs().amax()
    if (here - there).abs().amax() <= exact * size:
        return Layout()
    for interleaved in (False, True):
        layout = Layout(pairs, interleaved)
        first, second = layout.indices()
        lengths = [torch.hypot(keys[..., first], keys[..., second]) for keys in (here, there)]
        still = (here - there)[..., 2 * pairs :]
        if (lengths[0] - lengths[1]).abs().amax() <= exact * size and not (still.abs() > exact * size).any():
            return layout
    raise NotImplementedError(
        f"layer {index} doesn't turn its keys in pairs of channels, as RoPE does, so they can't be merged in its "
        f"weights; {REMEDY}"
    )
