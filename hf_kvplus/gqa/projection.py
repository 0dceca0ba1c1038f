"""The projections of all layers of a model, in a file, and how a cache is told of them.

The file is a safetensors file with a digest of everything in it (see `hf_kvplus.cachefile`). It names the model's
configuration, a digest of its weights, the text it was calibrated on and the method, and it fits that model only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from hf_kvplus.cachefile import CacheFileError, read_metadata, write_file
from hf_kvplus.checks import require_at_least
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.fingerprint import config_fields, find_differences
from hf_kvplus.origin import require_weights_once
from hf_kvplus.projections import HeadProjection

FILE_FORMAT = "hf_kvplus head projection"
FORMAT_VERSION = "1"
# Without quantization nothing asks for long blocks, and short ones leave fewer tokens waiting unprojected.
BLOCK_TOKENS = 32
DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS = 64, 4

LayerProjection = dict[str, HeadProjection]  # "keys" and "values"; a part that is missing is stored as it is


@dataclass(frozen=True)
class GQAProjection:
    """The projections of a model's layers.

    Args:
        layers: For each layer the projections of "keys" and "values"; empty for a layer that isn't compressed.
        num_key_value_heads: Heads' worth of channels that a layer stores on average.
        facts: What is known of its origin, as JSON values: `config`, what `describe_weights` tells (`weights` and
            more), `method`, `text` and more.
        path: The file it was loaded from or saved to.
    """

    layers: tuple[LayerProjection, ...]
    num_key_value_heads: int
    facts: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, which every cache of the model shares."""
        return sum(projection.nbytes for layer in self.layers for projection in layer.values())

    def latent_share(self) -> float:
        """Returns the stored channels in parts of those that the model gives, over what is compressed."""
        parts = [projection for layer in self.layers for projection in layer.values()]
        return sum(part.latents for part in parts) / max(1, sum(part.heads * part.channels for part in parts))

    def check(self, config: PretrainedConfig) -> None:
        """Refuses another model's configuration.

        Args:
            config: Configuration of a text decoder.

        Raises:
            ValueError: If it differs from that of the calibrated model; the message names what does.
        """
        here = config_fields(config)
        different = find_differences(self.facts.get("config", here), here, "config")
        if different:
            raise ValueError(
                f"the head projection {self.path or ''} was calibrated for another model: {'; '.join(different[:6])}; "
                "make one for this model with `kvplus calibrate-gqa`"
            )

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuses a model with other weights, too, which are read once; see `hf_kvplus.origin`.

        Args:
            model: The model that fills the cache.

        Raises:
            ValueError: If the configuration or the weights differ from those that it was calibrated for.
        """
        self.check(model.config.get_text_config(decoder=True))
        require_weights_once(
            self.facts, model, f"the head projection {self.path or ''}".strip(), "kvplus calibrate-gqa"
        )

    def codecs(self, layer: int, codecs: Sequence[Codec]) -> tuple[Codec, ...]:
        """Returns key and value codec of a layer, with its projections before `codecs` or before none."""
        plain = tuple(codecs) or (IdentityCodec(block_tokens=BLOCK_TOKENS),) * 2
        projections = self.layers[layer] if layer < len(self.layers) else {}
        if not projections:
            return tuple(codecs)
        return tuple(
            LatentCodec(codec, projections[name]) if name in projections else codec
            for name, codec in zip(("keys", "values"), plain, strict=True)
        )

    def save(self, path: str | Path) -> GQAProjection:
        """Writes the file, whole or not at all, and returns the projection with its path.

        Raises:
            OSError: If it can't be written.
        """
        tensors, heads = {}, []
        for index, layer in enumerate(self.layers):
            heads.append({name: projection.heads for name, projection in layer.items()})
            for name, projection in layer.items():
                parts = zip(("encoder", "decoder", "mean"), projection.tensors(), strict=True)
                tensors |= {f"layers.{index}.{name}.{part}": tensor for part, tensor in parts}
        described = {"heads": heads, "num_key_value_heads": self.num_key_value_heads, "facts": self.facts}
        metadata = {name: json.dumps(value) for name, value in described.items()}
        write_file(Path(path), tensors, metadata | {"format": FILE_FORMAT, "format_version": FORMAT_VERSION})
        return GQAProjection(self.layers, self.num_key_value_heads, self.facts, Path(path).resolve())

    @classmethod
    def load(cls, path: str | Path) -> GQAProjection:
        """Reads a file; one that hasn't changed since is read once.

        Raises:
            FileNotFoundError: If there is none.
            CacheFileError: If it is damaged or no head projection.
        """
        path = Path(path).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(
                f"head projection `{path}`: no such file; make one with `kvplus calibrate-gqa --out {path}`"
            )
        return _load(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _load(path: Path, changed_ns: int) -> GQAProjection:
    from safetensors import safe_open

    metadata = read_metadata(path, FILE_FORMAT)
    if metadata["format_version"] != FORMAT_VERSION:
        raise CacheFileError(
            f"{path}: `format_version` is {metadata['format_version']}, this version reads {FORMAT_VERSION}; "
            "calibrate again"
        )
    layers = []
    with safe_open(path, framework="pt") as file:
        for index, heads in enumerate(json.loads(metadata["heads"])):
            layer = {}
            for name, count in heads.items():
                parts = [file.get_tensor(f"layers.{index}.{name}.{part}") for part in ("encoder", "decoder", "mean")]
                layer[name] = HeadProjection(*parts, heads=count)
            layers.append(layer)
    return GQAProjection(
        tuple(layers), json.loads(metadata["num_key_value_heads"]), json.loads(metadata["facts"]), path
    )


@dataclass(frozen=True)
class GQA:
    """How a cache stores fewer heads.

    Args:
        num_key_value_heads: Heads' worth of channels that a layer stores on average; must be the projection's.
        projection: A `GQAProjection` or the path of one; `None` looks for `kvplus-gqa-N.safetensors` in the folder
            that the model was loaded from.
        residual_length: Most recent tokens that aren't projected; `None` for 64, or what a quantization says.
        num_sink_tokens: First tokens of each row that aren't; `None` for 4, or what a quantization says.

    Raises:
        ValueError: If a number is out of range.
    """

    num_key_value_heads: int
    projection: GQAProjection | str | Path | None = None
    residual_length: int | None = None
    num_sink_tokens: int | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        require_at_least("num_key_value_heads", self.num_key_value_heads, 1)
        for name in ("residual_length", "num_sink_tokens"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 0)

    def resolve(self, config: PretrainedConfig) -> GQAProjection:
        """Returns the projection, checked against a configuration.

        Raises:
            FileNotFoundError: If its file is missing.
            ValueError: If none is given or found, or it doesn't fit.
        """
        found = self.projection
        if found is None:
            found = Path(getattr(config, "_name_or_path", "") or ".") / default_name(self.num_key_value_heads)
            if not found.is_file():
                raise ValueError(
                    f"`gqa:{self.num_key_value_heads}` needs a head projection, and there is none at {found}; make "
                    "one with `kvplus calibrate-gqa` and write "
                    f"`gqa:{self.num_key_value_heads},projection=PATH`"
                )
        if not isinstance(found, GQAProjection):
            found = GQAProjection.load(found)
        if found.num_key_value_heads != self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` is {self.num_key_value_heads}, but the head projection {found.path or ''} was "
                f"made for {found.num_key_value_heads}; use that number or calibrate another"
            )
        found.check(config)
        return found

    def options(self, projection: GQAProjection) -> dict[str, Any]:
        """Returns plain values that make this again; `projection` is what `resolve` found."""
        return {
            "num_key_value_heads": self.num_key_value_heads,
            "projection": None if projection.path is None else str(projection.path),
            "residual_length": self.residual_length,
            "num_sink_tokens": self.num_sink_tokens,
        }


def default_name(num_key_value_heads: int) -> str:
    """Returns the name of a projection's file where none is given."""
    return f"kvplus-gqa-{num_key_value_heads}.safetensors"
