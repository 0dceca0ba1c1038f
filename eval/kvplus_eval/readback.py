"""Does a cache give back what it was given? Known states go in, what comes back is compared, faults are named.

Loss alone tells a bad cache from a good one, not what is wrong with it: swapped heads and a coarse quantizer both move
the output. Here the model's own states of a piece of text are recorded, fed to the cache under test in chunks, and
compared column by column. A fault is named when another explanation fits better than honest rounding: the states of
another head, of the token before, of nothing at all. Values are compared for places, since windows may rotate keys.

Two kinds of result: a fault that voids the figures is raised as a refusal, `quantizes the padding` is only noted, as
the evaluation itself pads nothing. Left out: caches of layers that hold no keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvplus_eval.guards import RefusedError
from kvplus_eval.stepping import step

READ_TOKENS = 320
CHUNK_TOKENS = 32
# A pad's states are made this much larger, so that scales that see them are useless for their neighbours
POISON = 1000.0
PADDED_TOKENS = 40
# Another explanation must leave less than this share of the error, so that chance names no fault
CLEARLY_BETTER = 0.5
# Share of a column's energy beyond which it is lost: what is left of a column of zeros or of another token
LOST = 0.9
# Least cosine between what a token has of its own and what is returned that counts as a trace of it
TRACE = 0.3
LOST_RUN_TOKENS = 8
MOVED_BY_PADDING = 1e-3

States = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ReadBack:
    """What was found.

    Args:
        layers: For each layer the relative error of its keys and values; none of a window, which returns a part.
        findings: Faults that don't void the figures.
    """

    layers: list[dict[str, Any]]
    findings: list[str]


def record_states(model: PreTrainedModel, token_ids: torch.Tensor) -> dict[int, States]:
    """Runs a text through a model and keeps the states of each layer.

    Args:
        model: The model.
        token_ids: The text, shape (tokens,).

    Returns:
        Layer -> keys and values, each of shape (1, kv_heads, tokens, head_dim).
    """
    recorded: dict[int, list[States]] = {}

    class Recorder(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any):
            recorded.setdefault(layer_idx, []).append((key_states.clone(), value_states.clone()))
            return super().update(key_states, value_states, layer_idx, *args, **kw)

    with torch.inference_mode():
        step(model, Recorder(config=model.config), token_ids[:READ_TOKENS], last_only=True)
    return {layer: (pieces[0][0], pieces[0][1]) for layer, pieces in recorded.items() if len(pieces) == 1}


def read_back(build: Callable[[], Cache], states: dict[int, States], *, keeps_all: bool) -> ReadBack:
    """Feeds recorded states to a cache and compares what comes back.

    Args:
        build: Makes an empty cache.
        states: What `record_states` returned.
        keeps_all: Whether the strategy promises to keep every token; a window doesn't.

    Returns:
        Errors by layer, and faults that don't void the figures.

    Raises:
        RefusedError: If the cache swaps heads, drops tokens, or puts them at other places.
    """
    with torch.inference_mode():
        layers = [
            _check_layer(layer, *pair, _feed(build, states, layer))
            for layer, pair in _feedable(build, states)
            if keeps_all
        ]
        findings = _padding_finding(build, states) if layers else []
    return ReadBack(layers, findings)


@dataclass(frozen=True)
class _Fed:
    """What the last update returned, and the mask sizes that were promised for it."""

    keys: torch.Tensor
    values: torch.Tensor
    promised: tuple[int, int] | None


def _feedable(build: Callable[[], Cache], states: dict[int, States]) -> list[tuple[int, States]]:
    """Leaves out layers that keep a window of their own, where not every token comes back."""
    cache = build()
    sliding = list(getattr(cache, "is_sliding", []))
    return [(layer, pair) for layer, pair in states.items() if not (layer < len(sliding) and sliding[layer])]


def _feed(
    build: Callable[[], Cache],
    states: dict[int, States],
    wanted: int,
    positions: torch.Tensor | None = None,
) -> _Fed:
    """Feeds one layer of a fresh cache in chunks, as a model would, and returns what it gave last."""
    cache = build()
    tokens = states[wanted][0].shape[2]
    for start in range(0, tokens, CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        length = min(tokens, start + CHUNK_TOKENS) - start
        promised = _mask_sizes(cache, length, wanted)
        extra = {} if positions is None else {"kwargs": {"position_ids": positions[:, chunk]}}
        keys, values = (tensor[:, :, chunk] for tensor in states[wanted])
        keys, values = cache.update(keys.clone(), values.clone(), wanted, **extra)
        fed = _Fed(keys, values, promised)
    return fed


def _mask_sizes(cache: Cache, query_length: int, layer: int) -> tuple[int, int] | None:
    """Returns what the cache promises of its next answer, None where it doesn't say."""
    if not hasattr(cache, "get_mask_sizes"):
        return None
    length, offset = cache.get_mask_sizes(query_length, layer)
    return int(length), int(offset)


def _check_layer(layer: int, keys: torch.Tensor, values: torch.Tensor, fed: _Fed) -> dict[str, Any]:
    """Compares one layer, and names what is wrong with it."""
    where = f"layer {layer}"
    tokens, returned = keys.shape[2], min(fed.keys.shape[2], fed.values.shape[2])
    if returned < tokens:
        raise RefusedError(f"drops tokens: {where} returns {returned} of {tokens} tokens")
    if fed.promised is not None and fed.promised != (returned, 0):
        raise RefusedError(
            f"off by one position: {where} says that the mask covers {fed.promised[0]} tokens from {fed.promised[1]} "
            f"on, and returns {returned}"
        )
    errors = {}
    for kind, given, got in (("key", keys, fed.keys), ("value", values, fed.values)):
        # A cache of fixed size returns all its columns, the ones to come last
        got = got[:, :, :tokens].to(given.device)
        _name_shift(where, f"{kind}s", given, got)
        _name_swap(where, f"{kind}s", given, got)
        _name_loss(where, f"{kind}s", given, got)
        errors[f"{kind}_error"] = float(_error(given, got))
    return {"layer": layer, **errors}


def _error(given: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Returns the relative root mean square error; what all tokens share is left out, since it hides every fault."""
    centre = given.float().mean(dim=2, keepdim=True)
    return (got.float() - given.float()).norm() / (given.float() - centre).norm().clamp_min(1e-12)


def _name_shift(where: str, kind: str, given: torch.Tensor, got: torch.Tensor) -> None:
    """Raises if the states of neighbouring tokens fit clearly better."""
    honest = _error(given[:, :, 1:-1], got[:, :, 1:-1])
    for shift, word in ((-1, "before"), (1, "after")):
        neighbour = given[:, :, 1 + shift : given.shape[2] - 1 + shift]
        if _error(neighbour, got[:, :, 1:-1]) < CLEARLY_BETTER * honest:
            raise RefusedError(f"off by one position: {where} returns the {kind} of the token {word} each")


def _name_swap(where: str, kind: str, given: torch.Tensor, got: torch.Tensor) -> None:
    """Raises if a head's states are clearly another head's."""
    heads = given.shape[1]
    for head in range(heads):
        errors = torch.stack([_error(given[:, [other]], got[:, [head]]) for other in range(heads)])
        best = int(errors.argmin())
        if best != head and errors[best] < CLEARLY_BETTER * errors[head]:
            raise RefusedError(f"swaps heads: {where} returns the {kind} of head {best} as those of head {head}")


def _name_loss(where: str, kind: str, given: torch.Tensor, got: torch.Tensor) -> None:
    """Raises if a run of tokens has nothing left of its own, while others have."""
    centre = given.float().mean(dim=2, keepdim=True)
    wrong = (got.float() - given.float()).square().sum(dim=(0, 1, 3))
    energy = (given.float() - centre).square().sum(dim=(0, 1, 3))
    # Two bits can be as far off as nothing at all, but not in any direction.
    own, returned = given.float() - centre, got.float() - centre
    likeness = torch.nn.functional.cosine_similarity(
        own.transpose(1, 2).flatten(2), returned.transpose(1, 2).flatten(2), -1
    )
    lost = (wrong > LOST * energy) & (likeness.amax(0) < TRACE)
    if lost.float().mean() > 0.5:
        return
    run, longest, end = 0, 0, 0
    for column, gone in enumerate(lost.tolist()):
        run = run + 1 if gone else 0
        if run > longest:
            longest, end = run, column + 1
    if longest >= LOST_RUN_TOKENS:
        raise RefusedError(
            f"drops tokens: {where} returns no trace of the {kind} of tokens {end - longest} to {end - 1}"
        )


def _padding_finding(build: Callable[[], Cache], states: dict[int, States]) -> list[str]:
    """Compares a padded row whose pads have huge states with one whose pads have ordinary ones.

    What a cache returns of the real tokens may not depend on the pads at all.
    """
    layer = max(states)
    ordinary, huge = (_real_tokens(build, states, layer, factor) for factor in (1.0, POISON))
    moved = max(
        float(_error(*(tensor[:, :, PADDED_TOKENS:] for tensor in (one, other))))
        for one, other in zip(ordinary, huge, strict=True)
    )
    if moved > MOVED_BY_PADDING:
        return [
            f"quantizes the padding: what layer {layer} returns of real tokens moves by {moved:.2g} of their spread "
            f"when pads grow {POISON:g} times as large"
        ]
    return []


def _real_tokens(build: Callable[[], Cache], states: dict[int, States], layer: int, factor: float) -> States:
    """Returns what a cache gives back of a row whose first tokens are padding, multiplied by a factor."""
    keys, values = (_enlarge(tensor, factor) for tensor in states[layer])
    tokens = keys.shape[2]
    positions = (torch.arange(tokens, device=keys.device) - PADDED_TOKENS).clamp_min(0)
    fed = _feed(build, {layer: (keys, values)}, layer, positions[None])
    return fed.keys[:, :, :tokens], fed.values[:, :, :tokens]


def _enlarge(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns states whose first tokens are multiplied."""
    return torch.cat([tensor[:, :, :PADDED_TOKENS] * factor, tensor[:, :, PADDED_TOKENS:]], dim=2)
