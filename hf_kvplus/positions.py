"""How models tell positions, and what a window with sinks can do about each way.

A window takes tokens out between the sinks and the latest ones. Whether that is right, and whether the gap can be
closed (`positions="shifted"`), depends on where a position comes in:

    rotary, in the keys              both; the sinks' keys are turned forward (`hf_kvplus.rope`)
    none, in the windowed layers     both, which are the same there; nothing is to be moved
    ALiBi by slots (MPT)             shifted only: its bias counts the slots given, so the gap is closed anyway
    ALiBi by the padding mask        neither: the bias is as long as the whole text
    relative buckets (T5)            neither: distances are taken between slots and the true position
    absolute, added to embeddings    original only, to the end of the table; keys hold more than can be moved
    scaled queries (Ministral 3)     original only: scores depend on how far into the text a query stands

Nothing is guessed: a model of a kind that isn't known here gets original positions, which change nothing that the
model itself computes, and shifted ones are refused.
"""

from __future__ import annotations

import inspect
import re

from transformers import PretrainedConfig

from hf_kvplus.policies.sink_window import DENSE, SHIFTED, SinkWindowPolicy
from hf_kvplus.rope import FULL, KeyRotation, key_rotation, modeling_module, refusal

# Bias of slots counted from the last one, whatever columns they hold.
SLOT_ALIBI = frozenset({"mpt"})
# Bias by buckets of distances: of slots, numbered from 0, to the query's true position.
_BUCKET_TYPES = """
    cpmant longt5 mt5 pix2struct pix2struct_text_model pop2piano prophetnet switch_transformers t5 udop umt5
    """
BUCKETS = frozenset(_BUCKET_TYPES.split())
# Layers with full attention have no positions where others, with windows, have RoPE.
UNROTATED = frozenset({"cohere2", "exaone4", "exaone_moe", "flint", "kolibri1"})
# Of these, models without any window have RoPE in all layers.
UNROTATED_BESIDE_WINDOWS = frozenset({"exaone4", "exaone_moe", "kolibri1"})
# No layer has positions: recurrent layers beside attention tell them.
POSITIONLESS = frozenset({"jamba", "nemotron_h"})
# Where positions are added to embeddings, by what their code calls it.
ABSOLUTE = (
    ("rotary positions from a table", re.compile(r"def create_sinusoidal_positions")),
    ("sinusoidal positions", re.compile(r"Sinusoidal\w*Embedding|def positional_encoding")),
    (
        "learned positions",
        re.compile(r"LearnedPositionalEmbedding|nn\.Embedding\(\s*config\.\w*position\w*|self\.wpe\b"),
    ),
)
LIMITS = ("max_position_embeddings", "max_target_positions", "n_positions")


def check_window(config: PretrainedConfig, policy: SinkWindowPolicy) -> None:
    """Refuses a window that a model would read wrongly.

    Args:
        config: The configuration of a text decoder.
        policy: The window.

    Raises:
        ValueError: If positions don't stay right once tokens leave the middle; the message names how the model tells
            them.
    """
    kind = config.model_type
    if kind in SLOT_ALIBI:
        _check_slot_alibi(config, policy)
    elif kind == "bloom" or getattr(config, "alibi", False):
        raise ValueError(
            f"`window` doesn't fit model type {kind!r}: it adds a bias for every token of the padding mask (ALiBi), "
            "also for those that have left; leave it out"
        )
    elif kind in BUCKETS:
        raise ValueError(
            f"`window` doesn't fit model type {kind!r}: its relative positions are distances from the first slot that "
            "it is given to the true position, wrong by all tokens that have left; leave it out"
        )
    elif kind == "gpt_neo" and "local" in config.attention_layers and policy.sliding_window < config.window_size:
        raise ValueError(
            f"`sliding_window` must be at least {config.window_size} for this model, whose local layers count so "
            f"many slots back, got {policy.sliding_window}"
        )


def _check_slot_alibi(config: PretrainedConfig, policy: SinkWindowPolicy) -> None:
    """Refuses what a bias by slots can't express: sinks elsewhere, or several queries with windows of their own."""
    if (policy.positions, policy.prefill) != (SHIFTED, DENSE):
        raise ValueError(
            f"model type {config.model_type!r} takes distances from the slots that it is given (ALiBi), so a window "
            f'needs positions="shifted" and prefill="dense", got {policy.positions!r} and {policy.prefill!r}; write '
            f"`window:{policy.sliding_window},sinks={policy.num_sink_tokens},positions=shifted,prefill=dense`"
        )
    if policy.most_visible > config.max_seq_len:
        raise ValueError(
            f"`sliding_window` and `num_sink_tokens` together must be at most {config.max_seq_len}, the longest that "
            f"this model has a bias for, got {policy.most_visible}"
        )


def sink_rotations(config: PretrainedConfig) -> list[KeyRotation | None]:
    """Returns for each layer how sinks move along, `None` where there is nothing to move.

    Args:
        config: The configuration of a text decoder.

    Raises:
        ValueError: If they can't be moved; the message names how the model tells positions, why that can't be
            shifted, and what to do.
    """
    _check_scaled_queries(config)
    rotated = rotated_layers(config)
    if not any(rotated):
        return [None] * len(rotated)
    if not getattr(config, "rope_parameters", None):
        raise ValueError(_absolute(config))
    rotation = key_rotation(config)
    return [rotation if turns else None for turns in rotated]


def rotated_layers(config: PretrainedConfig) -> list[bool]:
    """Returns for each layer with full attention whether its keys tell positions; others aren't windowed."""
    kind = config.model_type
    layers = len(getattr(config, "layer_types", None) or ()) or config.num_hidden_layers
    if kind in SLOT_ALIBI or kind in POSITIONLESS:
        return [False] * layers
    if kind == "granitemoehybrid" and config.position_embedding_type != "rope":
        return [False] * layers
    if kind in UNROTATED and (kind not in UNROTATED_BESIDE_WINDOWS or config.sliding_window is not None):
        return [False] * layers
    flags = getattr(config, "no_rope_layers", None)  # 1 where there is RoPE, for all its name
    return [bool(flag) for flag in flags] if flags else [True] * layers


def _check_scaled_queries(config: PretrainedConfig) -> None:
    """Refuses models whose scores grow with the position of the query, which no key can undo."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(FULL, parameters)
    scaled = (
        parameters.get("llama_4_scaling_beta")
        or (config.model_type == "llama4_text" and config.attn_temperature_tuning)
        or getattr(config, "log_scaling_n_floor", None)
    )
    if scaled:
        raise ValueError(refusal(config, "it scales queries by how far into the text they stand"))


def _absolute(config: PretrainedConfig) -> str:
    """Returns why positions that were added to embeddings can't be shifted, and how far original ones go."""
    try:
        source = inspect.getsource(modeling_module(config))
    except ValueError as error:
        return refusal(config, str(error))
    kind = next((name for name, pattern in ABSOLUTE if pattern.search(source)), None)
    if kind is None:
        return refusal(config, "it has no rotary positions that its configuration describes")
    limit = next((number for name in LIMITS if (number := getattr(config, name, None))), None)
    reach = f", for texts of up to {limit} tokens, and a new cache for what is longer" if limit else ""
    where = (
        "end with it" if kind.startswith("rotary") else "were added to embeddings, so no key can be moved elsewhere"
    )
    return refusal(config, f"its {kind} {where}") + reach


def distances_by_slots(config: PretrainedConfig) -> bool:
    """Whether a model takes distances from the slots that it is given, whatever columns they hold."""
    return config.model_type in SLOT_ALIBI
