"""Measured rows of `kvplus eval` become a section of a model card, with results in its metadata and two pictures.

kvplus eval --model smollm2-135m --strategies dynamic,int8,int4 --out runs/eval
python examples/model_card.py --results runs/eval/results.jsonl --card README.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from huggingface_hub import ModelCard

from hf_kvplus.loading import load_config
from hf_kvplus.memory_commands import read_results
from hf_kvplus.model_card import MemoryReport, update_card


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--card", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m", help="whose config gives the estimates at other lengths")
    options = parser.parse_args(arguments)

    report = MemoryReport.from_rows(read_results(options.results))
    report = report.with_estimates(load_config(options.model), [8192, 32768])
    changed = update_card(options.card, report)
    results = ModelCard.load(options.card).data.eval_results
    print(f"{options.card}: {'updated' if changed else 'up to date'}, {len(results)} results in its metadata")


if __name__ == "__main__":
    main()
