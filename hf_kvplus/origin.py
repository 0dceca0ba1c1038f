"""Refuses what was made for other weights: layer plans, calibrations, head projections.

Such a file follows from a model's weights, and with others nothing breaks: the text just gets worse. So it carries
what `describe_weights` tells of them, and wherever the model is at hand that is compared before the file is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hf_kvplus.fingerprint import fingerprint_model, sample_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Weights rounded to bfloat16 and back are this close.
DTYPE_ROUNDING = 2.0**-7

# Digests of weights that a model was found to have.
_FITTING: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


def describe_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Returns what tells a model's weights from others: digest, dtype and a sample, and the revision where known.

    Raises:
        ValueError: If the weights have no data (device `meta`).
    """
    fields: dict[str, Any] = dict(fingerprint_model(model).as_fields())
    return {**fields, "dtype": str(model.dtype), "sample": sample_weights(model)}


def require_weights(made_for: Mapping[str, Any], model: PreTrainedModel, what: str, command: str) -> None:
    """Refuses what was made for other weights, reading all of the model's.

    In another dtype weights aren't the same to the bit, so a few of them are compared with that tolerance. Where
    weights can't be read (accelerate has put some on the device `meta`), or the file names none, nothing is refused.

    Args:
        made_for: What `describe_weights` returned where it was made.
        model: The model at hand.
        what: The file or argument, as the message names it.
        command: What makes another one.

    Raises:
        ValueError: If they differ.
    """
    if not _same_weights(made_for, model):
        raise ValueError(
            f"{what} was made for other weights than this model has; make one for this model with `{command}`"
        )


def require_weights_once(made_for: Mapping[str, Any], model: PreTrainedModel, what: str, command: str) -> None:
    """As `require_weights`, but reads a model's weights once.

    A model that is trained after it was found to fit isn't looked at again.

    Raises:
        ValueError: If they differ.
    """
    known = made_for.get("weights", "")
    if known not in _FITTING.get(model, ()):
        require_weights(made_for, model, what, command)
        _FITTING.setdefault(model, set()).add(known)


def _same_weights(made_for: Mapping[str, Any], model: PreTrainedModel) -> bool:
    """Whether a model has the weights that something was made for, as far as both are known."""
    known = made_for.get("weights")
    if known is None or any(tensor.device.type == "meta" for tensor in model.parameters()):
        return True
    if made_for.get("dtype", str(model.dtype)) == str(model.dtype):
        return fingerprint_model(model).weights == known
    here, there = sample_weights(model), made_for.get("sample", [])
    pairs = zip(here, there, strict=False)
    return len(here) == len(there) and all(math.isclose(*pair, rel_tol=DTYPE_ROUNDING, abs_tol=1e-5) for pair in pairs)
