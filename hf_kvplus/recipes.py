"""From a bit width to codecs: what `recipe="auto"` and the named recipes stand for.

A recipe is a function `(nbits, group_size, block_tokens, head_dim)` that returns a codec for keys and one for values.
The choice behind `auto` is made by measurement, see docs/log/recipes.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from hf_kvplus.checks import require_at_least, require_choice, require_multiple
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN, AffineCodec
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.float8 import Float8Codec
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.levels import LLOYD_MAX, UNIFORM
from hf_kvplus.codecs.metric import KeyMetric
from hf_kvplus.key_bias import KeyTurns
from hf_kvplus.registry import Registry

SUPPORTED_NBITS = (2, 3, 4, 5, 6, 8, 16)
AUTO_RECIPE = "dual_scale"
DEFAULT_GROUP_SIZE = 64
# The shorter a block, the narrower its channels' ranges; 48 tokens are what 4.5 stored bits have room for at 4 bits.
DUAL_SCALE_BLOCK_TOKENS = 48
# Heads above this size lose less at 2 bits with equal steps and several ranges tried, those up to it with one range
# and Gaussian levels, and at 2 and 3 bits with turning means taken out; measured at 256 and at 64 channels.
SMALL_HEAD_DIM = 64
# Keys of so few bits are those that turning means pay for without biases.
NARROW_NBITS = 3
# Tokens at full precision, recent ones and sinks; with keys and values of 2 bits they matter most.
FULL_PRECISION, FULL_PRECISION_AT_2_BITS = (64, 4), (128, 8)

RecipeFunction = Callable[[int, "int | None", int, "int | None"], tuple[Codec, Codec]]
recipes: Registry[RecipeFunction] = Registry("recipe")


@recipes.register("affine")
def affine(nbits: int, group_size: int | None, block_tokens: int, head_dim: int | None) -> tuple[Codec, Codec]:
    """Returns a per-channel codec for keys and a per-token codec for values, both asymmetric and uniform."""
    keys = AffineCodec(block_tokens=block_tokens, nbits=nbits, axis=PER_CHANNEL, group_size=group_size)
    values = AffineCodec(block_tokens=block_tokens, nbits=nbits, axis=PER_TOKEN, group_size=group_size)
    return keys, values


@recipes.register("dual_scale")
def dual_scale(nbits: int, group_size: int | None, block_tokens: int, head_dim: int | None) -> tuple[Codec, Codec]:
    """Returns codecs of rotated states with a scale per token and a scale and an offset per channel.

    Only keys have their token scales corrected: it helps scores and does nothing for outputs. Gaussian levels pay up
    to 3 bits, narrower ranges at 3, and at 2 the one or the other by the size of heads; 8 bits cover the whole range
    and need no token scales.
    """
    large = nbits == 2 and (head_dim or 0) > SMALL_HEAD_DIM
    iterations, clips, refinements = (0, 1, 0) if nbits == 8 else (4, 3 if nbits == 3 or large else 1, 2)
    build = partial(
        DualScaleCodec,
        block_tokens=block_tokens,
        nbits=nbits,
        iterations=iterations,
        clips=clips,
        refinements=refinements,
        levels=LLOYD_MAX if nbits <= 3 and not large else UNIFORM,
    )
    return build(axis=PER_CHANNEL, correct_tokens=iterations > 0), build(axis=PER_TOKEN)


@recipes.register("float8")
def float8(nbits: int, group_size: int | None, block_tokens: int, head_dim: int | None) -> tuple[Codec, Codec]:
    """Returns e4m3 codecs with a scale per token, for 8 bits only.

    Raises:
        ValueError: If another width is asked for.
    """
    if nbits != 8:
        raise ValueError(f"`recipe` 'float8' has 8 bits, got {nbits}; use 'dual_scale' for fewer")
    return Float8Codec(block_tokens=block_tokens), Float8Codec(block_tokens=block_tokens)


@dataclass(frozen=True)
class Quantization:
    """How the keys and values of a layer are quantized.

    Args:
        key_nbits: Bits of key codes: 2, 3, 4, 5, 6, 8, or 16 for none.
        value_nbits: Bits of value codes, likewise.
        group_size: Elements that share a scale. For the recipe `"dual_scale"` (which `"auto"` takes) the tokens of a
            block, 48 by default (64 at 8 bits). For `"affine"` tokens for keys and channels for values, by default 64
            or, of channels, the largest divisor of `head_dim` below.
        residual_length: Most recent tokens that stay at full precision; `None` takes 64, and 128 where keys and values
            have 2 bits.
        num_sink_tokens: First tokens of each row that stay at full precision; `None` takes 4, and 8 at 2 bits.
        recipe: A name from `recipes`, or `"auto"`.
        calibration: File with the metrics of the model's queries, made by `kvplus plan --calibrate`; keys of
            `"dual_scale"` are then encoded with it, see `hf_kvplus.codecs.metric`.
        rotary_means: Pairs of channels per head whose mean is taken out of every block of keys, turned along RoPE, and
            added back when they are read; see `hf_kvplus.codecs.rotary_mean`. `None` takes one for 16 channels where
            the model's keys have a bias that RoPE turns, and in keys of 2 and 3 bits where heads have at most 64
            channels; none elsewhere.

    Raises:
        ValueError: If an option is out of range; the message says what to use.
    """

    key_nbits: int = 4
    value_nbits: int = 4
    group_size: int | None = None
    residual_length: int | None = None
    num_sink_tokens: int | None = None
    recipe: str = "auto"
    calibration: str | None = None
    rotary_means: int | None = None

    def __post_init__(self) -> None:
        """Checks the options once and decides what was left open."""
        kept = FULL_PRECISION_AT_2_BITS if self.key_nbits == self.value_nbits == 2 else FULL_PRECISION
        for name, default in zip(("residual_length", "num_sink_tokens"), kept, strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        require_choice("key_nbits", self.key_nbits, SUPPORTED_NBITS)
        require_choice("value_nbits", self.value_nbits, SUPPORTED_NBITS)
        require_at_least("residual_length", self.residual_length, 0)
        require_at_least("num_sink_tokens", self.num_sink_tokens, 0)
        if self.group_size is not None:
            require_multiple("group_size", self.group_size, 8)
        if self.rotary_means is not None:
            require_at_least("rotary_means", self.rotary_means, 0)
        if self.recipe != "auto":
            recipes.get(self.recipe)
        if self.calibration is not None and self.recipe_name != "dual_scale":
            raise ValueError(
                f"`calibration` goes with the recipe 'dual_scale', not {self.recipe!r}; leave one of them out"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens in a block.

        Of `dual_scale` the group, by default 48 (64 at 8 bits, where range matters less than the scales' bits); of
        other recipes the smallest multiple of the group from 64 up.
        """
        if self.recipe_name != "dual_scale":
            group = self.group_size or DEFAULT_GROUP_SIZE
            return group * math.ceil(DEFAULT_GROUP_SIZE / group)
        narrow = min(self.key_nbits, self.value_nbits) < 8
        return self.group_size or (DUAL_SCALE_BLOCK_TOKENS if narrow else DEFAULT_GROUP_SIZE)

    @property
    def recipe_name(self) -> str:
        """The recipe that is used, after `"auto"` was decided."""
        return AUTO_RECIPE if self.recipe == "auto" else self.recipe

    def codecs(
        self, layer: int = 0, head_dim: int | None = None, key_turns: KeyTurns | None = None
    ) -> tuple[Codec, Codec]:
        """Returns the key codec and the value codec.

        Args:
            layer: Index of the decoder layer; only a calibration depends on it.
            head_dim: Channels of a head, which the recipe of 2 bits goes by; `None` where they aren't known.
            key_turns: What the model's configuration tells of the layer's keys; `None` for nothing.

        Raises:
            FileNotFoundError: If the calibration's file is missing.
            ValueError: If it doesn't know the layer, or turning means can't be had.
        """
        build = recipes.get(self.recipe_name)
        identity = IdentityCodec(block_tokens=self.block_tokens)
        keys, values = identity, identity
        if self.key_nbits < 16:
            keys, _ = build(self.key_nbits, self.group_size, self.block_tokens, head_dim)
            if self.calibration is not None:
                keys = replace(keys, metric=KeyMetric(self.calibration, layer))
            known = key_turns or KeyTurns()
            keys = known.wrap(keys, self.means_per_block(head_dim, known))
        if self.value_nbits < 16:
            _, values = build(self.value_nbits, self.group_size, self.block_tokens, head_dim)
        return keys, values

    def means_per_block(self, head_dim: int | None, key_turns: KeyTurns) -> int:
        """Returns how many turning means a block of keys stores per head; arguments as of `codecs`."""
        if self.rotary_means is not None or self.key_nbits == 16:
            return self.rotary_means or 0
        channels = head_dim or SMALL_HEAD_DIM
        narrow = self.recipe_name == AUTO_RECIPE and self.key_nbits <= NARROW_NBITS and channels <= SMALL_HEAD_DIM
        return key_turns.default_means(channels, narrow)

    @property
    def packs(self) -> bool:
        """Whether anything is quantized at all."""
        return min(self.key_nbits, self.value_nbits) < 16
