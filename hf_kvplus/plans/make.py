"""From a model, some text and a budget to a layer plan: candidates, sizes, losses, the choice and its proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from hf_kvplus.caches import KVPlusCache, text_config
from hf_kvplus.estimate import estimate_memory, states_dtype
from hf_kvplus.fingerprint import config_fields, fingerprint_model
from hf_kvplus.layer_plan import LayerPlan
from hf_kvplus.plans.budget import Budget
from hf_kvplus.plans.measure import PARTS, layer_losses
from hf_kvplus.plans.onepass import OnePass
from hf_kvplus.plans.solve import BudgetError, Choice, solve
from hf_kvplus.probe import profile_model
from hf_kvplus.recipes import FULL_PRECISION, FULL_PRECISION_AT_2_BITS, Quantization

KEY_WIDTHS = (2, 3, 4, 5, 6, 8)
VALUE_WIDTHS = (2, 3, 4, 5, 6, 8)
# Tokens of a block: short ones lose less, long ones spend fewer bits on scales.
GROUPS = (48, 96, 128)
# Widths further than this from what the budget buys on average aren't worth measuring.
REACH = 2


@dataclass(frozen=True)
class Made:
    """A plan and what it costs.

    Args:
        plan: The plan.
        stored_bits: Bits per element of its packed part, on average.
        predicted_kl: Sum of its layers' predicted losses, in nats.
        measured_kl: Mean divergence with all layers quantized, on text that nothing was measured on before.
        uniform: The best candidate that gives every layer the same and meets the budget, as a strategy.
        uniform_kl: Its mean divergence on the same text; `None` if no uniform candidate meets the budget.
    """

    plan: LayerPlan
    stored_bits: float
    predicted_kl: float
    measured_kl: float
    uniform: str | None
    uniform_kl: float | None


def candidates(bits: float, calibration: str | None, groups: Sequence[int] = GROUPS) -> list[Quantization]:
    """Returns ways to quantize a layer whose widths lie around an average.

    Args:
        bits: Stored bits per element that are to be spent on average.
        calibration: File with metrics, or `None`.
        groups: Tokens of a block.

    Returns:
        Every pair of widths with every group; at 2.5 bits and below more tokens stay at full precision.
    """
    recent, sinks = FULL_PRECISION_AT_2_BITS if bits <= 2.5 else FULL_PRECISION
    keys, values = (
        [nbits for nbits in widths if bits - REACH - 0.5 <= nbits <= bits + REACH]
        for widths in (KEY_WIDTHS, VALUE_WIDTHS)
    )
    return [
        Quantization(key, value, group, recent, sinks, calibration=calibration)
        for group in groups
        for key in keys
        for value in values
    ]


def make_plan(
    run: OnePass,
    windows: Sequence[torch.Tensor],
    budget: Budget,
    *,
    calibration: str | None = None,
    groups: Sequence[int] = GROUPS,
    advance: Callable[[], None] = lambda: None,
) -> Made:
    """Measures, solves and measures again.

    Args:
        run: The model, entered.
        windows: Token ids, each `(tokens,)`; losses are measured on all but the last, the plan on the last.
        budget: What it may take.
        calibration: File with metrics that keys are encoded with.
        groups: Tokens of a block that are tried.
        advance: Called after each layer of each window that is measured.

    Returns:
        The plan and its figures.

    Raises:
        BudgetError: If no plan meets the budget.
        ValueError: If there are fewer than two windows.
    """
    if len(windows) < 2:
        raise ValueError(f"`windows` must be at least 2, one of them to check the plan on, got {len(windows)}")
    config = text_config(run.model.config)
    options = candidates(_average_bits(config, budget), calibration, groups)
    sizes = layer_sizes(config, options, budget)
    losses = pair_losses(layer_losses(run, windows[:-1], single_parts(options), advance), options)
    rows = [layer for layer in range(len(losses)) if not losses[layer].isnan().any()]
    choices = [
        [Choice(_name(option), float(sizes[row, i]), float(losses[row, i])) for i, option in enumerate(options)]
        for row in rows
    ]
    limit = float(budget.bits if budget.bits is not None else budget.bytes)
    try:
        picked = solve(choices, limit)
    except BudgetError as error:
        raise BudgetError(f"`budget` of {budget} can't be met: {error}") from error
    layers: list[Quantization | None] = [None] * len(losses)
    for row, index in zip(rows, picked, strict=True):
        layers[row] = options[index]
    fingerprint = fingerprint_model(run.model).as_fields()
    plan = LayerPlan(tuple(layers), {"config": config_fields(config), **fingerprint})
    best = _best_uniform(choices, limit)
    uniform = None if best is None else [options[best] if layer else None for layer in layers]
    plan_kl, uniform_kl = _check(run, windows[-1], [plan, uniform])
    bits = layer_sizes(config, options, Budget(bits=1.0))
    return Made(
        plan=plan,
        stored_bits=float(sum(bits[row, index] for row, index in zip(rows, picked, strict=True))),
        predicted_kl=sum(choices[i][index].loss for i, index in enumerate(picked)),
        measured_kl=plan_kl,
        uniform=None if best is None else _name(options[best]),
        uniform_kl=uniform_kl,
    )


def single_parts(options: Sequence[Quantization]) -> list[Quantization]:
    """Returns one candidate for each width and group, since keys and values are measured one at a time."""
    found: dict[tuple[int, int | None], Quantization] = {}
    for option in options:
        for nbits in (option.key_nbits, option.value_nbits):
            key = (nbits, option.group_size)
            found.setdefault(key, replace(option, key_nbits=nbits, value_nbits=nbits))
    return list(found.values())


def pair_losses(single: torch.Tensor, options: Sequence[Quantization]) -> torch.Tensor:
    """Adds up the losses of keys and values.

    Args:
        single: `(layers, widths and groups, 2)`, for what `single_parts` returned.
        options: The pairs.

    Returns:
        `(layers, options)`.
    """
    places = {(part.key_nbits, part.group_size): index for index, part in enumerate(single_parts(options))}
    columns = [
        single[:, places[option.key_nbits, option.group_size], PARTS.index("keys")]
        + single[:, places[option.value_nbits, option.group_size], PARTS.index("values")]
        for option in options
    ]
    return torch.stack(columns, dim=1)


def layer_sizes(config: PretrainedConfig, options: Sequence[Quantization], budget: Budget) -> torch.Tensor:
    """Returns what each option takes in each layer, in the budget's unit, `(layers, options)` float64.

    In bits a layer counts by its share of all elements, so that the sum over layers is the average.
    """
    if budget.bits is None:
        columns = []
        for option in options:
            estimate = estimate_memory(config, budget.tokens, strategy=_name(replace(option, calibration=None)))
            columns.append([layer.total_bytes for layer in estimate.layers])
        return torch.tensor(columns, dtype=torch.float64).T
    states = [(layer.keys, layer.values) for layer in profile_model(config).layers]
    weights = [[part.shape[0] * part.shape[1] if part else 0 for part in pair] for pair in states]
    total = sum(map(sum, weights))
    sizes = torch.zeros(len(states), len(options), dtype=torch.float64)
    for index, option in enumerate(options):
        codecs = replace(option, calibration=None).codecs()
        for layer, (pair, weight) in enumerate(zip(states, weights, strict=True)):
            for codec, part, elements in zip(codecs, pair, weight, strict=True):
                sizes[layer, index] += codec.bits_per_element(part.shape[1]) * elements / total if part else 0.0
    return sizes


def _average_bits(config: PretrainedConfig, budget: Budget) -> float:
    """Returns the stored bits per packed element that a budget buys, about."""
    if budget.bits is not None:
        return budget.bits
    full_bits = 8 * states_dtype(config).itemsize
    share = budget.bytes / estimate_memory(config, budget.tokens, strategy="dynamic").cache_bytes
    kept = min(0.9, (sum(FULL_PRECISION) + min(GROUPS) / 2) / budget.tokens)
    return full_bits * max(0.0, share - kept) / (1 - kept)


def _name(option: Quantization) -> str:
    """Returns the strategy string of an option."""
    name = f"k{option.key_nbits}v{option.value_nbits},group={option.group_size},recent={option.residual_length}"
    name += f",sinks={option.num_sink_tokens}"
    return name + (f",calibration={option.calibration}" if option.calibration else "")


def _best_uniform(choices: Sequence[Sequence[Choice]], budget: float) -> int | None:
    """Returns the option that loses least when all layers take it, within the budget."""
    sizes = [sum(group[index].size for group in choices) for index in range(len(choices[0]))]
    losses = [sum(group[index].loss for group in choices) for index in range(len(choices[0]))]
    fitting = [index for index, size in enumerate(sizes) if size <= budget * (1 + 1e-9)]
    return min(fitting, key=lambda index: losses[index]) if fitting else None


def _check(run: OnePass, token_ids: torch.Tensor, quantizations: Sequence[object]) -> list[float | None]:
    """Measures the mean divergence of caches on a window."""
    with torch.inference_mode():
        reference = run.reference(token_ids, torch.arange(run.chunk_tokens, len(token_ids)))
        found: list[float | None] = []
        for quantization in quantizations:
            cache = None if quantization is None else KVPlusCache(run.model.config, quantization=quantization)
            found.append(None if cache is None else float(run.divergences(reference, cache).mean()))
    return found
