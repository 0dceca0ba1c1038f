"""What `--dry-run` prints: parts of the work, tokens, and an estimate of time and memory before any weight is loaded.

Time is arithmetic: operations of the model for the tokens that would be fed, over the speed of a large matrix product
measured here a moment ago. Passes over few tokens reach less than that, so each pass also reads all weights once. The
estimate leaves out what strategies add, and is good to a factor of two or so, enough to tell minutes from days.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import PretrainedConfig

from hf_kvplus import estimate_memory
from hf_kvplus.compute import attention_flops
from hf_kvplus.devices import Device
from hf_kvplus.estimate import states_dtype
from hf_kvplus.probe import profile_model
from hf_kvplus.units import format_bytes
from kvplus_eval.protocol import REFERENCE_STRATEGY, Protocol
from kvplus_eval.results import SCHEMA
from kvplus_eval.work import Work, list_work

# Of a matrix product's speed, what a whole model reaches in chunks; see docs/log/evaluation.md
REACHED_SHARE = 0.35
REFERENCE_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Plan:
    """What an evaluation would take.

    Args:
        parts: Name, tokens and seconds of each part.
        seconds: Their sum, for the processes there are.
        weight_bytes: Bytes of the weights.
        cache_bytes: Bytes of the largest cache, at the most positions asked for.
        reference_bytes: Disk that the reference's log-probabilities take.
    """

    parts: tuple[tuple[str, int, float], ...]
    seconds: float
    weight_bytes: int
    cache_bytes: int
    reference_bytes: int

    def summary(self, strategies: Sequence[str]) -> str:
        """Returns one JSON line."""
        return json.dumps({"schema": SCHEMA, "kind": "plan", "strategies": list(strategies), **asdict(self)})

    def tables(self) -> list[Table]:
        """Returns the plan for people."""
        table = Table(title="What would be done (estimates)", title_justify="left", box=SIMPLE_HEAD)
        for head, side in (("part", "left"), ("tokens", "right"), ("about", "right")):
            table.add_column(head, justify=side)  # type: ignore[arg-type]
        for name, tokens, seconds in self.parts:
            table.add_row(name, f"{tokens:,}", format_time(seconds))
        table.add_row("in all", f"{sum(tokens for _, tokens, _ in self.parts):,}", format_time(self.seconds))
        return [table]

    def memory_line(self) -> str:
        """Returns what memory and disk it would take."""
        return (
            f"memory: weights {format_bytes(self.weight_bytes)}, largest cache {format_bytes(self.cache_bytes)}; "
            f"disk: reference {format_bytes(self.reference_bytes)}"
        )


def make_plan(
    config: PretrainedConfig,
    protocol: Protocol,
    strategies: Sequence[str],
    device: Device,
    dtype: str | None = None,
    processes: int = 1,
    *,
    reference: PretrainedConfig | None = None,
) -> Plan:
    """Estimates what an evaluation would take.

    Args:
        config: The model's configuration.
        protocol: What would be done.
        strategies: With which strategies.
        device: The device, as `measure_device` describes it.
        dtype: Type of weights and states, None for the configuration's own.
        processes: How many processes would share it.
        reference: Configuration of the model whose full cache is compared with; None for the model's own.

    Returns:
        The plan.
    """
    kind = states_dtype(config, dtype)
    costs = _step_costs(config, protocol, kind)
    others = costs if reference is None else _step_costs(reference, protocol, kind)
    load_s = 0.0
    parts = []
    layers = config.get_text_config(decoder=True).num_hidden_layers
    for work in list_work(protocol, strategies, layers):
        if work.tokens:
            share = processes if work.shared else 1
            needed = others if work.name == "reference" else costs
            parts.append((work.name, work.tokens, load_s + _seconds(work, *needed, device) / share))
    full_bytes = max(
        estimate_memory(one, protocol.most_positions, strategy=REFERENCE_STRATEGY, dtype=kind).cache_bytes
        for one in (config, reference or config)
    )
    vocab = config.get_text_config().vocab_size
    reference_bytes = protocol.windows * protocol.predicted_tokens * vocab * REFERENCE_ELEMENT_BYTES
    # No two models are held at a time
    weight_bytes = max(costs[1], others[1])
    return Plan(tuple(parts), sum(part[2] for part in parts), weight_bytes, full_bytes, reference_bytes)


def _step_costs(config: PretrainedConfig, protocol: Protocol, kind: torch.dtype) -> tuple[int, int]:
    """Returns the operations of a model for a token, and the bytes of its weights."""
    profile = profile_model(config)
    flops = 2 * profile.active_parameters + attention_flops(config, max(1, protocol.window_tokens // 2))
    return flops, profile.active_parameters * kind.itemsize


def _seconds(work: Work, flops: int, weight_bytes: int, device: Device) -> float:
    """Returns the time of one part on one process."""
    computing = work.tokens * flops / (REACHED_SHARE * device.flops_per_s)
    reading = work.passes * weight_bytes / device.bytes_per_s
    return computing + reading


def format_time(seconds: float) -> str:
    """Writes a time as seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
