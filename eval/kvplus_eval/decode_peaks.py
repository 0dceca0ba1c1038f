"""What decoding takes in memory, a row for each strategy, each in a process of its own.

`python -m kvplus_eval.decode_peaks --strategies dynamic,int4 --context 8192` appends rows to a file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hf_kvplus.loading import load_model
from kvplus_eval.decode_peak import PeakJob, peak_table, watch_rows
from kvplus_eval.protocol import choose_strategies
from kvplus_eval.results import Row, append_rows, run_facts
from kvplus_eval.tables import make_console


def decode_peaks(
    strategies: Annotated[str, typer.Option(help="Comma-separated strategies.")] = "dynamic,int4",
    model: Annotated[str, typer.Option(help="Model, as for `kvplus eval`.")] = "smollm2-135m",
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 8192,
    decoded: Annotated[int, typer.Option(min=1, help="Tokens decoded behind them.")] = 64,
    fused: Annotated[bool, typer.Option(help="Read packed states directly, as `use_fused_attention` does.")] = True,
    computed: Annotated[bool, typer.Option(help="Compute the context instead of filling in random states.")] = False,
    rows: Annotated[Path | None, typer.Option(help="File to append rows to.")] = None,
) -> None:
    """Tell what decoding takes in memory beside the model and its cache."""
    names = choose_strategies(strategies)
    loaded, _, source = load_model(model, "cpu")
    facts = {**run_facts(loaded, source), "kind": "decode-peak"}
    del loaded
    job = PeakJob(model, "", context, decoded, fused=fused, computed=computed)
    jobs = {name: replace(job, strategy=name) for name in names}
    asked = {"context_tokens": context, "decoded_tokens": decoded, "fused": fused, "computed": computed}
    found: list[Row] = [{**facts, "strategy": name, "status": "ok", "bench": dict(asked)} for name in names]
    told, done = [], []
    for row in found:
        told += watch_rows([row], jobs)
        if "decode_peak_bytes" in row["bench"]:
            done.append(row)
            if rows is not None:
                append_rows(rows, [row])
    console = make_console()
    console.print(peak_table(found))
    for line in told:
        console.print(line, soft_wrap=True, markup=False)
    typer.echo(json.dumps(done))
    if told:
        raise typer.Exit(1)


def main() -> None:
    """Runs the command."""
    typer.run(decode_peaks)


if __name__ == "__main__":
    main()
