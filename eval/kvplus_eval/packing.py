"""What packing a prompt costs, as a share of its prefill: `python -m kvplus_eval.packing`.

Both are timed in turns in one process, on process time, so that a ratio means something on a busy machine too; the
prefill is one forward pass without a cache, packing is what every layer of a cache does with the prompt's states.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_kvplus import build_cache
from hf_kvplus.loading import load_model
from hf_kvplus.plans.onepass import AttentionCall, OnePass
from kvplus_eval.protocol import choose_strategies
from kvplus_eval.results import append_rows, run_facts

SCHEMA = "kvplus-packing/1"


def packing_shares(model: Any, token_ids: torch.Tensor, strategies: Sequence[str], rounds: int) -> dict[str, float]:
    """Times prefill and packing in turns.

    Args:
        model: The model, on a CPU.
        token_ids: The prompt, `(tokens,)`.
        strategies: Strategy strings.
        rounds: How often.

    Returns:
        Strategy -> median over rounds of the process time of packing over that of the prefill.
    """
    shares: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def observe(layer: int, call: AttentionCall, output: torch.Tensor) -> torch.Tensor:
        states[layer] = call.key, call.value
        return output

    last = torch.tensor([len(token_ids) - 1])
    with torch.inference_mode(), OnePass(model) as run:
        run.observe = observe
        for _ in range(rounds + 1):
            began_s = time.process_time()
            run.reference(token_ids, last)
            prefill_s = time.process_time() - began_s
            for strategy in strategies:
                cache = build_cache(strategy, model.config, model=model)
                shares[strategy].append(_packing_s(cache, states) / prefill_s)
    # The first round also compiles and allocates.
    return {strategy: statistics.median(found[1:]) for strategy, found in shares.items()}


def _packing_s(cache: Any, states: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Returns the process time of storing a prompt in every layer, in seconds."""
    began_s = time.process_time()
    for layer, (keys, values) in states.items():
        cache.layers[layer].update(keys, values)
    return time.process_time() - began_s


def packing(
    strategies: Annotated[str, typer.Option(help="Comma-separated strategies.")] = "int8,int4,int3,int2",
    model: Annotated[str, typer.Option(help="Model, as for `kvplus eval`.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt, drawn at random.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after a first one that isn't counted.")] = 3,
    rows: Annotated[Path | None, typer.Option(help="File to append a row to.")] = None,
) -> None:
    """Tell what packing a prompt costs beside its prefill."""
    names = choose_strategies(strategies)
    loaded, tokenizer, source = load_model(model, "cpu")
    prompt = torch.randint(len(tokenizer), (tokens,), generator=torch.Generator().manual_seed(0))
    shares = packing_shares(loaded, prompt, names, rounds)
    for name, share in shares.items():
        typer.echo(f"{name}: {100 * share:.1f} % of the prefill of {tokens} tokens", err=True)
    facts = {**run_facts(loaded, source), "schema": SCHEMA, "tokens": tokens, "rounds": rounds, "shares": shares}
    if rows is not None:
        append_rows(rows, [facts])
    typer.echo(json.dumps(facts))


def main() -> None:
    """Runs the command."""
    typer.run(packing)


if __name__ == "__main__":
    main()
