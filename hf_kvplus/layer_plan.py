"""Layer plans: how each layer of one model is quantized, and the file that says so.

Layers differ: a few lose ten times as much as the rest at the same width. A plan gives each its own widths under one
budget. `kvplus plan` makes it by measurement (see `hf_kvplus.plans`); `QuantizedCache(layer_plan=...)` and the
strategy `plan:PATH` follow it. It says nothing about a model that it wasn't measured on, so another one is refused.

    plan.json         layers, each the fields of a `Quantization` or null; the model; what was measured
    plan.safetensors  where the plan is calibrated: the metrics of each layer's queries, see `codecs.metric`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_kvplus.codecs.metric import metrics_origin
from hf_kvplus.fingerprint import config_fields, find_differences
from hf_kvplus.origin import require_weights, require_weights_once
from hf_kvplus.recipes import Quantization

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FILE_FORMAT = "hf_kvplus layer plan"
FORMAT_VERSION = 1
COMMAND = "kvplus plan"


@dataclass(frozen=True)
class LayerPlan:
    """How each decoder layer is quantized.

    Args:
        layers: One entry a decoder layer; `None` leaves it at full precision.
        model: What the plan was made for: `config` (its fields), and what `describe_weights` returned where known.
        facts: What was measured, for people: budget, predicted and measured loss, text.

    Raises:
        ValueError: If there are no layers.
    """

    layers: tuple[Quantization | None, ...]
    model: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that there is something to follow."""
        if not self.layers:
            raise ValueError("`layers` of a layer plan must name every decoder layer, got none")

    def check(self, config: PretrainedConfig) -> None:
        """Refuses the configuration of another model.

        Args:
            config: The text decoder's configuration.

        Raises:
            ValueError: If it differs from the one that the plan was made for; the message names what differs.
        """
        if len(self.layers) != config.num_hidden_layers:
            raise ValueError(
                f"`layer_plan` is for {len(self.layers)} layers, this model has {config.num_hidden_layers}; make one "
                "for it with `kvplus plan`"
            )
        different = find_differences(self.model.get("config", {}), config_fields(config), "config")
        if self.model.get("config") and different:
            raise ValueError(
                f"`layer_plan` was made for another model: {'; '.join(different[:4])}; make one for this model with "
                "`kvplus plan`"
            )

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuses a model with other weights, too, reading all of them; `build_cache(model=...)` does it once.

        Where weights can't be read, the configuration decides alone; see `hf_kvplus.origin`.

        Raises:
            ValueError: If the configuration or the weights differ from those that the plan was made for.
        """
        self.check(model.config.get_text_config(decoder=True))
        require_weights(self.model, model, "`layer_plan`", COMMAND)

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        layers = [asdict(layer) if layer else None for layer in self.layers]
        return {
            "format": FILE_FORMAT,
            "version": FORMAT_VERSION,
            "model": self.model,
            "facts": self.facts,
            "layers": layers,
        }

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, one layer a line.

        Raises:
            OSError: If the file can't be written.
        """
        fields = self.as_dict()
        layers = ",\n    ".join(json.dumps(layer) for layer in fields.pop("layers"))
        head = json.dumps(fields, indent=2)[:-2]
        Path(path).write_text(f'{head},\n  "layers": [\n    {layers}\n  ]\n}}\n', encoding="utf-8")


def check_origin(quantization: LayerPlan | Quantization, model: PreTrainedModel) -> None:
    """Refuses a plan or a calibration that was made for other weights.

    Weights are read once: a model that is trained after it was found to fit isn't looked at again.

    Raises:
        ValueError: If they differ, or the configuration does.
    """
    if isinstance(quantization, LayerPlan):
        quantization.check(model.config.get_text_config(decoder=True))
        made_for, what = quantization.model, "`layer_plan`"
    elif quantization.calibration:
        made_for, what = metrics_origin(quantization.calibration), f"`calibration` {quantization.calibration}"
    else:
        return
    require_weights_once(made_for, model, what, COMMAND)


def load_plan(source: LayerPlan | Mapping[str, Any] | str | Path) -> LayerPlan:
    """Reads a plan.

    Args:
        source: A plan, what its `as_dict` returned, or a file by `LayerPlan.save`.

    Returns:
        The plan.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it isn't a plan, or one of another version.
        TypeError: If `source` is of another kind.
    """
    if isinstance(source, LayerPlan):
        return source
    if not isinstance(source, (str, Path, Mapping)):
        raise TypeError(f"`layer_plan` must be a path, a dictionary or a LayerPlan, got {type(source).__name__}")
    fields, where = source, "`layer_plan`"
    if not isinstance(source, Mapping):
        where = f"`layer_plan` {source}"
        fields = _read_json(Path(source), where)
    if not isinstance(fields, Mapping) or fields.get("format") != FILE_FORMAT:
        raise ValueError(f"{where} isn't a layer plan; make one with `kvplus plan`")
    if fields.get("version") != FORMAT_VERSION:
        raise ValueError(f"{where} has version {fields.get('version')}, this package reads {FORMAT_VERSION}")
    folder = None if isinstance(source, Mapping) else Path(source).parent
    try:
        layers = tuple(_read_layer(layer, folder) for layer in fields["layers"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} has a layer that this version can't read: {error}") from error
    return LayerPlan(layers, dict(fields.get("model", {})), dict(fields.get("facts", {})))


def _read_json(path: Path, where: str) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{where}: no such file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} isn't JSON: {error}") from error


def _read_layer(fields: Mapping[str, Any] | None, folder: Path | None) -> Quantization | None:
    """Reads one layer; a calibration file is named relative to the plan's folder."""
    if fields is None:
        return None
    fields = dict(fields)
    calibration = fields.get("calibration")
    if calibration and folder is not None and not Path(calibration).is_absolute():
        fields["calibration"] = str(folder / calibration)
    return Quantization(**fields)
