"""Integer codes: `intN` for keys and values alike, `kAvB` where they differ."""

from __future__ import annotations

import re

from hf_kvplus.recipes import SUPPORTED_NBITS, Quantization
from hf_kvplus.strategies.base import Options, composable
from hf_kvplus.strategies.grammar import Part

OPTIONS = ("group", "recent", "sinks", "recipe", "calibration", "means")
WIDTHS = "|".join(str(nbits) for nbits in SUPPORTED_NBITS)


def quantization(part: Part, key_nbits: int, value_nbits: int) -> Options:
    """Returns the `Quantization` of a part with its options, see `Quantization`."""
    part.require_no_value()
    part.require_options(*OPTIONS)
    return {
        "quantization": Quantization(
            key_nbits=key_nbits,
            value_nbits=value_nbits,
            group_size=part.integer("group"),
            residual_length=part.integer("recent"),
            num_sink_tokens=part.integer("sinks"),
            recipe=part.options.get("recipe", "auto"),
            calibration=part.options.get("calibration"),
            rotary_means=part.integer("means"),
        )
    }


def _register(nbits: int, meaning: str) -> None:
    info = f"keys and values in {nbits} bits: {meaning}"

    @composable(f"int{nbits}", info, _stored_bits(nbits, nbits))
    def integer(part: Part) -> Options:
        return quantization(part, nbits, nbits)


def _stored_bits(key_nbits: int, value_nbits: int) -> float:
    keys, values = Quantization(key_nbits, value_nbits).codecs()
    return (keys.bits_per_element(64) + values.bits_per_element(64)) / 2


_register(8, "as good as full precision")
_register(4, "the usual choice")
_register(3, "for long contexts")
_register(2, "smallest; measure before use")


@composable("kAvB", "keys in A bits, values in B, each 2, 3, 4, 5, 6, 8 or 16", None, rf"k({WIDTHS})v({WIDTHS})")
def pair(part: Part) -> Options:
    """Returns the quantization of a pair such as `k8v4`."""
    key_nbits, value_nbits = (int(digits) for digits in re.findall(r"\d+", part.name))
    return quantization(part, key_nbits, value_nbits)
