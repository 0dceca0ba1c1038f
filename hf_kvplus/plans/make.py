"""From a model, some text and budgets to layer plans: candidates, sizes, losses, the choice and its proof.

Measuring takes nearly all the time and solving none, so several budgets share what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from hf_kvplus.caches import KVPlusCache, text_config
from hf_kvplus.configs import config_head_dims
from hf_kvplus.estimate import estimate_memory, states_dtype
from hf_kvplus.fingerprint import config_fields
from hf_kvplus.key_bias import layer_key_turns
from hf_kvplus.layer_plan import LayerPlan
from hf_kvplus.origin import describe_weights
from hf_kvplus.plans.budget import Budget
from hf_kvplus.plans.measure import PARTS, layer_losses
from hf_kvplus.plans.onepass import OnePass, Reference
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


def candidates(
    bits: float,
    calibration: str | None,
    groups: Sequence[int] = GROUPS,
    takes_means: Callable[[Quantization], bool] = lambda option: False,
) -> list[Quantization]:
    """Returns ways to quantize a layer whose widths lie around an average.

    Args:
        bits: Stored bits per element that are to be spent on average.
        calibration: File with metrics, or `None`.
        groups: Tokens of a block.
        takes_means: Whether turning means are taken out of an option's keys by default; then it is tried without, too.

    Returns:
        Every pair of widths with every group; at 2.5 bits and below more tokens stay at full precision.
    """
    recent, sinks = FULL_PRECISION_AT_2_BITS if bits <= 2.5 else FULL_PRECISION
    bits = min(bits, max(*KEY_WIDTHS, *VALUE_WIDTHS))
    keys, values = (
        [nbits for nbits in widths if bits - REACH - 0.5 <= nbits <= bits + REACH]
        for widths in (KEY_WIDTHS, VALUE_WIDTHS)
    )
    options = [
        Quantization(key, value, group, recent, sinks, calibration=calibration)
        for group in groups
        for key in keys
        for value in values
    ]
    return options + [replace(option, rotary_means=0) for option in options if takes_means(option)]


def make_plans(
    run: OnePass,
    windows: Sequence[torch.Tensor],
    budgets: Sequence[Budget],
    *,
    calibration: str | None = None,
    groups: Sequence[int] = GROUPS,
    advance: Callable[[], None] = lambda: None,
) -> list[Made]:
    """Measures once, then solves and measures again for each budget.

    Args:
        run: The model, entered.
        windows: Token ids, each `(tokens,)`; losses are measured on all but the last, the plans on the last.
        budgets: What each plan may take.
        calibration: File with metrics that keys are encoded with.
        groups: Tokens of a block that are tried.
        advance: Called after each layer of each window that is measured.

    Returns:
        The plan of each budget, with its figures.

    Raises:
        BudgetError: If no plan meets one of them; before anything is measured.
        ValueError: If there are fewer than two windows.
    """
    if len(windows) < 2:
        raise ValueError(f"`windows` must be at least 2, one of them to check the plan on, got {len(windows)}")
    config = text_config(run.model.config)
    turns, head_dims = layer_key_turns(config), config_head_dims(config)

    def takes_means(option: Quantization) -> bool:
        return any(option.means_per_block(head_dim, known) for head_dim in head_dims for known in turns)

    tasks = [
        _Task.of(config, budget, candidates(_average_bits(config, budget), calibration, groups, takes_means))
        for budget in budgets
    ]
    parts = single_parts([option for task in tasks for option in task.options])
    single = layer_losses(run, windows[:-1], parts, advance)
    facts = {"config": config_fields(config), **describe_weights(run.model)}
    with torch.inference_mode():
        reference = run.reference(windows[-1], torch.arange(run.chunk_tokens, len(windows[-1])))
    return [_make(run, task, pair_losses(single, parts, task.options), facts, reference) for task in tasks]


@dataclass(frozen=True)
class _Task:
    """One budget, the candidates for it and what they take.

    Args:
        budget: The budget.
        options: The candidates.
        sizes: `(layers, options)` float64, in the budget's unit.
        bits: The same in stored bits, a layer by its share of all elements.
    """

    budget: Budget
    options: list[Quantization]
    sizes: torch.Tensor
    bits: torch.Tensor

    @classmethod
    def of(cls, config: PretrainedConfig, budget: Budget, options: list[Quantization]) -> _Task:
        """Sizes the candidates.

        Raises:
            BudgetError: If the smallest are too large.
        """
        task = cls(
            budget, options, layer_sizes(config, options, budget), layer_sizes(config, options, Budget(bits=1.0))
        )
        smallest = float(task.sizes.amin(1).sum())
        if smallest > task.limit * (1 + 1e-9):
            raise BudgetError(
                f"`budget` of {budget} can't be met: the smallest choices take {smallest:.6g}, more than the budget "
                f"of {task.limit:.6g}"
            )
        return task

    @property
    def limit(self) -> float:
        """The budget as a number."""
        return float(self.budget.bits if self.budget.bits is not None else self.budget.bytes or 0)


def _make(run: OnePass, task: _Task, losses: torch.Tensor, facts: dict[str, Any], reference: Reference) -> Made:
    """Solves for one budget and measures what was found."""
    options = task.options
    rows = [layer for layer in range(len(losses)) if not losses[layer].isnan().any()]
    choices = [
        [Choice(_name(option), float(task.sizes[row, i]), float(losses[row, i])) for i, option in enumerate(options)]
        for row in rows
    ]
    # States of a fixed size are in the cache too, and leave less for the rest.
    limit = task.limit - float(sum(task.sizes[layer].min() for layer in range(len(losses)) if layer not in rows))
    picked = solve(choices, limit)
    layers: list[Quantization | None] = [None] * len(losses)
    for row, index in zip(rows, picked, strict=True):
        layers[row] = options[index]
    best = _best_uniform(choices, limit)
    uniform = None if best is None else [options[best] if layer else None for layer in layers]
    plan = LayerPlan(tuple(layers), facts)
    return Made(
        plan=plan,
        stored_bits=float(sum(task.bits[row, index] for row, index in zip(rows, picked, strict=True))),
        predicted_kl=sum(choices[i][index].loss for i, index in enumerate(picked)),
        measured_kl=_check(run, reference, plan),
        uniform=None if best is None else _name(options[best]),
        uniform_kl=None if uniform is None else _check(run, reference, uniform),
    )


def single_parts(options: Sequence[Quantization]) -> list[Quantization]:
    """Returns one candidate for each width and group, since keys and values are measured one at a time.

    All keep as many tokens at full precision as the option that keeps fewest, so that their losses compare.
    """
    recent = min(option.residual_length or 0 for option in options)
    sinks = min(option.num_sink_tokens or 0 for option in options)
    found: dict[tuple[int, int | None, int | None], Quantization] = {}
    for option in (replace(option, residual_length=recent, num_sink_tokens=sinks) for option in options):
        keys = replace(option, value_nbits=option.key_nbits)
        values = replace(option, key_nbits=option.value_nbits, rotary_means=None)
        found.setdefault(_key_place(option), keys)
        found.setdefault(_value_place(option), values)
    return list(found.values())


def _key_place(option: Quantization) -> tuple[int, int | None, int | None]:
    """Returns what the loss of an option's keys depends on."""
    return option.key_nbits, option.group_size, option.rotary_means


def _value_place(option: Quantization) -> tuple[int, int | None, int | None]:
    """Likewise of its values."""
    return option.value_nbits, option.group_size, None


def pair_losses(single: torch.Tensor, parts: Sequence[Quantization], options: Sequence[Quantization]) -> torch.Tensor:
    """Adds up the losses of keys and values.

    Args:
        single: `(layers, widths and groups, 2)`.
        parts: What these were measured for, from `single_parts`.
        options: The pairs.

    Returns:
        `(layers, options)`.
    """
    places = {_key_place(part): index for index, part in enumerate(parts)}
    columns = [
        single[:, places[_key_place(option)], PARTS.index("keys")]
        + single[:, places[_value_place(option)], PARTS.index("values")]
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
    turns = layer_key_turns(config)
    for index, option in enumerate(options):
        for layer, (pair, weight) in enumerate(zip(states, weights, strict=True)):
            channels = pair[0].shape[1] if pair[0] else None
            codecs = replace(option, calibration=None).codecs(layer, channels, turns[layer])
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
    name += f",means={option.rotary_means}" if option.rotary_means is not None else ""
    return name + (f",calibration={option.calibration}" if option.calibration else "")


def _best_uniform(choices: Sequence[Sequence[Choice]], budget: float) -> int | None:
    """Returns the option that loses least when all layers take it, within the budget."""
    sizes = [sum(group[index].size for group in choices) for index in range(len(choices[0]))]
    losses = [sum(group[index].loss for group in choices) for index in range(len(choices[0]))]
    fitting = [index for index, size in enumerate(sizes) if size <= budget * (1 + 1e-9)]
    return min(fitting, key=lambda index: losses[index]) if fitting else None


def _check(run: OnePass, reference: Reference, quantization: LayerPlan | Sequence[Quantization | None]) -> float:
    """Measures the mean divergence of a cache on a window."""
    cache = KVPlusCache(run.model.config, quantization=quantization)
    with torch.inference_mode():
        return float(run.divergences(reference, cache).mean())
