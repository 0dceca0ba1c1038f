"""A layer plan by its file: every layer with its own widths."""

from __future__ import annotations

from hf_kvplus.layer_plan import load_plan
from hf_kvplus.strategies.base import Options, composable
from hf_kvplus.strategies.grammar import Part


@composable("plan", "plan:PATH: each layer with the widths that `kvplus plan` found for this model")
def plan(part: Part) -> Options:
    """Returns the quantization of a plan; the path may not contain a comma or a plus sign.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the path is missing or isn't that of a plan.
    """
    part.require_options()
    if not part.value:
        raise ValueError(f"strategy part `{part.text}` needs the file of a plan; write `plan:PATH`")
    return {"quantization": load_plan(part.value)}
