"""Chooses a strategy: by arithmetic for the bytes, by measured results for the loss where there are some.

Candidates stand in order of their loss, behind all others those that leave the device, since each token brings back
all that they store. With a budget the first one that fits is taken; with a bound on the loss the smallest one that is
known to keep it. Without either, rules of thumb decide, and say so. Left out: speed, which depends on the machine;
`kvplus bench` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from hf_kvplus.checks import require_at_least
from hf_kvplus.configs import text_config
from hf_kvplus.devices import Device, find_device
from hf_kvplus.estimate import MemoryEstimate, estimate_memory
from hf_kvplus.probe import profile_model
from hf_kvplus.units import format_bytes, format_number

Row = Mapping[str, Any]

PLAIN = "dynamic"
EXACT = (PLAIN, "fp")
# In order of their loss, least first; which bit widths come before which is measured, see docs/LOG.md.
LADDER = (PLAIN, "int8", "k8v4", "int4", "int3", "int2")
# Part of a device's memory that activations, the runtime and fragmentation are left.
HEADROOM = 0.1
# The last tokens of the context are decoded, so that buffers have grown as they do in use.
DECODED_TOKENS = 128
# A rule holds up to so many tokens.
RULES = (
    (2048, PLAIN, "under 2k tokens the plain cache is small"),
    (8192, "int8", "from 2k to 8k tokens 8 bits halve the cache at next to no loss (fewer KV heads would do as well)"),
    (32768, "int4", "from 8k to 32k tokens 4 bits are the usual choice, or a window where only recent text matters"),
)
BEYOND = (
    "beyond 32k tokens the cache also has to forget what is old (a window) or leave the device (`offload:cpu` beside "
    "an accelerator, `offload:disk` without one)"
)


@dataclass(frozen=True)
class Candidate:
    """One strategy that was looked at.

    Args:
        strategy: The strategy.
        estimate: What it takes.
        kl_nats: Its measured KL divergence to the full cache, `None` where nobody measured it.
        measured_with: The model of that measurement.
        verdict: Why it can't be taken, or an empty string.
    """

    strategy: str
    estimate: MemoryEstimate
    kl_nats: float | None
    measured_with: str
    verdict: str


@dataclass(frozen=True)
class Recommendation:
    """What to use.

    Args:
        strategy: The strategy, or `None` if none meets the wishes.
        code: Lines to paste, empty if there is no strategy.
        reasons: Sentences.
        estimate: What it takes, of no strategy what the smallest candidate takes.
        candidates: Everything that was looked at, in order of loss.
    """

    strategy: str | None
    code: str
    reasons: tuple[str, ...]
    estimate: MemoryEstimate
    candidates: tuple[Candidate, ...]


def recommend(
    config: PretrainedConfig,
    context_length: int,
    budget_bytes: int | None = None,
    max_kl: float | None = None,
    device: Device | str | None = None,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | str | None = None,
    results: Iterable[Row] = (),
    recent_tokens: int | None = None,
) -> Recommendation:
    """Recommends a strategy for a model, a context length and what may be spent.

    Args:
        config: The model's configuration.
        context_length: Tokens, prompt and answer together.
        budget_bytes: What the cache may take; `None` takes what `device` leaves beside the weights, if one is named.
        max_kl: Largest mean KL divergence to the full cache, in nats; only strategies measured to keep it are taken.
        device: Where the model runs; a name from `hf_kvplus.devices`, `"here"`, or a `Device`.
        batch_size: Rows, beams included.
        dtype: Type of the model's states; see `estimate_memory`.
        results: Rows of `results.jsonl`, of this model or others.
        recent_tokens: Tell it if only that many recent tokens matter; then windows are candidates, with sinks that
            move along where the context is longer than the trained length.

    Returns:
        The recommendation; its `strategy` is `None` if nothing meets the wishes.

    Raises:
        TypeError: If `config` isn't a transformers configuration or a number isn't an integer.
        ValueError: If a number is out of range or the device is unknown.
    """
    require_at_least("context_length", context_length, 1)
    if budget_bytes is not None:
        require_at_least("budget_bytes", budget_bytes, 1)
    if recent_tokens is not None:
        require_at_least("recent_tokens", recent_tokens, 1)
    device = find_device(device) if isinstance(device, str) else device
    prompt = max(1, context_length - DECODED_TOKENS)
    window = _window(config, context_length, recent_tokens)
    by_rule = budget_bytes is None and max_kl is None and device is None
    candidates = [
        Candidate(
            name, estimate_memory(config, context_length, batch_size, name, dtype, prompt_tokens=prompt), None, "", ""
        )
        for name in _names(context_length, window, device, by_rule)
        if _fits_model(name, config, dtype)
    ]
    candidates = _with_results(candidates, list(results), profile_model(config).parameters)
    budget, where = _budget(candidates[0].estimate, budget_bytes, device)
    judged = tuple(replace(one, verdict=_verdict(one, budget, max_kl)) for one in candidates)
    if by_rule:
        return _by_rule(judged, context_length, window)
    return _by_wishes(judged, budget, where, max_kl)


def _window(config: PretrainedConfig, context_length: int, recent_tokens: int | None) -> str | None:
    """Returns the window for someone who says that older text doesn't matter, `None` if all of it does.

    Beyond the trained length sinks have to move along: at distances that a model was never trained for they harm it.
    """
    if recent_tokens is None or recent_tokens >= context_length:
        return None
    trained = getattr(text_config(config), "max_position_embeddings", None)
    return f"window:{recent_tokens}" + (",positions=shifted" if trained and context_length > trained else "")


def _names(context_length: int, window: str | None, device: Device | None, by_rule: bool) -> list[str]:
    """Returns the strategies worth a look, in order of loss."""
    names = list(LADDER)
    if window is not None:
        # To someone who says that older text doesn't matter, a window loses nothing.
        for beside, joined in ((PLAIN, ""), ("int8", "int8+"), ("int4", "int4+")):
            names.insert(names.index(beside) + 1, joined + window)
    beside_host = device is not None and device.name != "cpu"
    if beside_host or (by_rule and context_length > RULES[-1][0]):
        names += ["offload:cpu", "int8+offload:cpu", "int4+offload:cpu"]
    return names


def _fits_model(name: str, config: PretrainedConfig, dtype: torch.dtype | str | None) -> bool:
    """Whether the model can have a strategy; the plain cache always fits, so that bad input is told."""
    if name == PLAIN:
        return True
    try:
        estimate_memory(config, 1, strategy=name, dtype=dtype)
    except ValueError:
        return False
    return True


def _with_results(candidates: list[Candidate], rows: list[Row], parameters: int) -> list[Candidate]:
    """Gives candidates the loss last measured with this model, else with the one nearest in size.

    Rows that compare with another model tell what that model's conversion loses, too, and say nothing of a cache.
    """
    good = [
        row
        for row in reversed(rows)
        if row.get("status") == "ok"
        and row.get("metrics", {}).get("kl_mean_nats") is not None
        and not row.get("reference_model")
    ]
    good.sort(key=lambda row: abs(math.log(max(1, row["model"]["parameters"]) / parameters)))
    found = []
    for one in candidates:
        stored = _stored(one.strategy)
        row = next((row for row in good if row["strategy"] == stored), None)
        if row is not None:
            name = row["model"]["name"] + ("" if row["model"]["parameters"] == parameters else ", another model")
            one = replace(one, kl_nats=row["metrics"]["kl_mean_nats"], measured_with=name)
        elif stored in EXACT:
            one = replace(one, kl_nats=0.0, measured_with="exact by construction")
        found.append(one)
    return found


def _stored(strategy: str) -> str:
    """Returns a strategy without what only says where bytes live, which loses nothing."""
    return "+".join(part for part in strategy.split("+") if not part.startswith("offload")) or "fp"


def _budget(plain: MemoryEstimate, budget_bytes: int | None, device: Device | None) -> tuple[int | None, str]:
    """Returns what the cache may take, and where the figure comes from."""
    if budget_bytes is not None:
        return budget_bytes, f"the budget of {format_bytes(budget_bytes)}"
    if device is None:
        return None, ""
    left = int(device.memory_bytes * (1 - HEADROOM)) - plain.weight_bytes
    words = f"{format_bytes(max(0, left))} that {device.name} leaves beside the weights and {HEADROOM:.0%} headroom"
    return max(1, left), words


def _verdict(one: Candidate, budget: int | None, max_kl: float | None) -> str:
    """Tells why a candidate can't be taken."""
    if budget is not None and one.estimate.device_bytes > budget:
        return f"takes {format_bytes(one.estimate.device_bytes)}"
    if max_kl is not None and one.kl_nats is None:
        return "its loss isn't measured"
    if max_kl is not None and one.kl_nats > max_kl:
        return f"its KL is {format_number(one.kl_nats)}"
    return ""


def _by_wishes(
    candidates: tuple[Candidate, ...], budget: int | None, where: str, max_kl: float | None
) -> Recommendation:
    """Takes the least lossy candidate that meets a budget, or without one the smallest that keeps the loss."""
    meeting = [one for one in candidates if not one.verdict]
    if not meeting:
        return _nothing(candidates, where, max_kl)
    chosen = meeting[0] if budget is not None else min(meeting, key=lambda one: one.estimate.device_bytes)
    reasons = [_size_sentence(chosen)]
    if budget is not None:
        reasons.append(f"It is the {_rank(candidates, chosen)} within {where}{_refused(candidates, chosen)}.")
    if max_kl is not None:
        reasons.append(f"Its KL is at most {format_number(max_kl)} nats.")
    reasons.append(_loss_sentence(chosen))
    return Recommendation(chosen.strategy, _code(chosen), tuple(reasons), chosen.estimate, candidates)


def _rank(candidates: tuple[Candidate, ...], chosen: Candidate) -> str:
    """Tells what the chosen candidate is the first of."""
    if chosen.estimate.tier is not None:
        return "least lossy candidate that leaves the device, as none that stays there will do,"
    stays = any(one.estimate.tier is not None for one in candidates)
    return "least lossy candidate" + (" that stays on the device" if stays else "")


def _refused(candidates: tuple[Candidate, ...], chosen: Candidate) -> str:
    """Lists the less lossy candidates that weren't taken."""
    before = candidates[: candidates.index(chosen)]
    return "".join(f"; `{one.strategy}` {one.verdict}" for one in before)


def _nothing(candidates: tuple[Candidate, ...], where: str, max_kl: float | None) -> Recommendation:
    """Says that no candidate will do, and what would change that."""
    known = [one for one in candidates if max_kl is None or (one.kl_nats is not None and one.kl_nats <= max_kl)]
    smallest = min(known or candidates, key=lambda one: one.estimate.device_bytes)
    wishes = " and ".join(filter(None, [where, "" if max_kl is None else f"a KL of at most {format_number(max_kl)}"]))
    reasons = [
        f"No strategy meets {wishes}.",
        f"`{smallest.strategy}` comes nearest and takes {format_bytes(smallest.estimate.device_bytes)}.",
    ]
    unmeasured = [one.strategy for one in candidates if one.verdict == "its loss isn't measured"]
    if unmeasured:
        reasons.append(f"Measure {', '.join(unmeasured)} with `kvplus eval`; their loss isn't known for this model.")
    less = "A shorter context, fewer rows, or a window (`recent_tokens`) takes less"
    offloaded = any(one.estimate.tier is not None for one in candidates)
    reasons.append(f"{less}." if offloaded else f"{less}; with a `device` named, offloading is looked at too.")
    return Recommendation(None, "", tuple(reasons), smallest.estimate, candidates)


def _by_rule(candidates: tuple[Candidate, ...], context_length: int, window: str | None) -> Recommendation:
    """Decides by rules of thumb, by nothing but the context length."""
    name, rule = next(((name, rule) for limit, name, rule in RULES if context_length <= limit), ("int4", BEYOND))
    by_name = {one.strategy: one for one in candidates}
    if context_length > RULES[1][0] and f"int4+{window}" in by_name:
        name = f"int4+{window}"
    elif context_length > RULES[-1][0] and "int4+offload:cpu" in by_name:
        name = "int4+offload:cpu"
    chosen = by_name.get(name, candidates[0])
    reasons = [_size_sentence(chosen), f"A rule of thumb, not a measurement: {rule}.", _loss_sentence(chosen)]
    if chosen.strategy != name:
        reasons.insert(1, f"`{name}` doesn't fit this model.")
    return Recommendation(chosen.strategy, _code(chosen), tuple(reasons), chosen.estimate, candidates)


def _size_sentence(one: Candidate) -> str:
    """Tells the bytes."""
    estimate = one.estimate
    dtype = str(estimate.dtype).removeprefix("torch.")
    place = "" if estimate.tier is None else f", {format_bytes(estimate.device_bytes)} of it on the device"
    return (
        f"`{one.strategy}` takes {format_bytes(estimate.cache_bytes)}{place} for {estimate.batch_size} x "
        f"{estimate.seq_len} tokens of a model in {dtype}."
    )


def _loss_sentence(one: Candidate) -> str:
    """Tells the loss, or that it isn't known."""
    if one.kl_nats is None:
        return f"What `{one.strategy}` loses with this model isn't measured; `kvplus eval` does it."
    if _stored(one.strategy) in EXACT:
        return "It loses nothing."
    return f"Its KL to the full cache is {format_number(one.kl_nats)} nats, measured with {one.measured_with}."


def _code(one: Candidate) -> str:
    """Returns the lines to paste."""
    return f'from hf_kvplus import build_cache\ncache = build_cache("{one.strategy}", model.config)'
