"""The variants of the default recipe that the ablation measures: one part changed at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hf_kvplus.caches import KVPlusCache
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.levels import LLOYD_MAX, UNIFORM
from hf_kvplus.codecs.rotary_mean import RotaryMeanCodec, without_means
from hf_kvplus.layer import KVLayer
from hf_kvplus.recipes import Quantization
from kvplus_eval.without_offsets import WithoutOffsets

RECIPE = "recipe"


@dataclass(frozen=True)
class Variant:
    """The recipe with one part changed.

    Args:
        name: What is changed.
        quantization: Changes of the options of `Quantization`.
        codec: Changes of the options of both codecs.
        widths: Widths at which it differs from the recipe.
        kind: What both codecs are.
        far: Least length of a turning mean, see `RotaryMeanCodec`; `None` for the recipe's.
    """

    name: str
    quantization: dict[str, Any]
    codec: Callable[[DualScaleCodec], dict[str, Any]]
    widths: tuple[int, ...] = (8, 4, 3, 2)
    kind: type[DualScaleCodec] = DualScaleCodec
    far: float | None = None


def same(codec: DualScaleCodec) -> dict[str, Any]:
    """Changes nothing."""
    return {}


NARROW = (4, 3, 2)
VARIANTS = (
    Variant(RECIPE, {}, same),
    Variant("no rotation", {}, lambda codec: {"rotate": False}),
    Variant("no token scales", {}, lambda codec: {"iterations": 0, "correct_tokens": False}, NARROW),
    Variant("no correction of token scales", {}, lambda codec: {"correct_tokens": False}, NARROW),
    Variant("no offsets of channels", {}, same, kind=WithoutOffsets),
    Variant("no turning means", {"rotary_means": 0}, same, (3, 2)),
    Variant("four turning means", {"rotary_means": 4}, same, (8, 4)),
    Variant("one clip", {}, lambda codec: {"clips": 1}, (3,)),
    Variant("three clips", {}, lambda codec: {"clips": 3}, (4, 2)),
    Variant("no least squares", {}, lambda codec: {"clips": 1, "refinements": 0}, NARROW),
    Variant(
        "the other levels",
        {},
        lambda codec: {"levels": UNIFORM if codec.levels == LLOYD_MAX else LLOYD_MAX, "refinements": 2},
    ),
    Variant("no sinks", {"num_sink_tokens": 0}, same),
    Variant("16 recent tokens", {"residual_length": 16}, same),
    Variant("blocks of 96", {"group_size": 96}, same),
    Variant("half-precision scales, groups of 64 (affine)", {"recipe": "affine"}, same),
    Variant("float8", {"recipe": "float8"}, same, (8,)),
)


# How many turning means, and how long they must be. With eight, 2 bits would take more than 2.5 (heads of 64).
MEANS_VARIANTS = (
    Variant(RECIPE, {}, same),
    Variant("no turning means", {"rotary_means": 0}, same),
    *(
        Variant(f"{count} of {far} deviations", {"rotary_means": count}, same, far=far)
        for count in (1, 2, 4)
        for far in (3, 4, 6, 8, 10, 14, 20)
        if count > 1 or far >= 6
    ),
)


def variant_cache(config: Any, nbits: int, variant: Variant, calibration: str | None = None) -> KVPlusCache:
    """Builds a cache of the recipe with one part changed.

    Args:
        config: The model's configuration.
        nbits: Width of keys and values.
        variant: What is changed.
        calibration: File with metrics for the keys, or `None`.

    Returns:
        The cache.
    """
    changes = {"calibration": calibration, **variant.quantization}
    cache = KVPlusCache(config, quantization=Quantization(nbits, nbits, **changes))
    for layer in cache.layers:
        if isinstance(layer, KVLayer):
            for name, codec in layer.codecs.items():
                inner = without_means(codec)
                if isinstance(inner, DualScaleCodec):
                    changed = variant.codec(inner)
                    if name == "values":
                        changed.pop("correct_tokens", None)
                    options = {field.name: getattr(inner, field.name) for field in fields(inner)}
                    inner = variant.kind(**{**options, **changed})
                    if isinstance(codec, RotaryMeanCodec):
                        far = codec.far if variant.far is None else variant.far
                        inner = RotaryMeanCodec(inner, codec.turns, codec.means, far)
                    layer.codecs[name] = inner
    return cache
