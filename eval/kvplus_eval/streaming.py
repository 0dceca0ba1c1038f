"""Endless text through a window: what sinks and shifted positions are for, against recomputing the window.

One text goes through each cache in chunks, each token scored by what the model says before it sees it. Copies of the
cache taken on the way decode some tokens in turns at the end, so times at all lengths see the same machine. The
yardstick recomputes: for each `stride` tokens the model reads the latest `window` tokens anew, positions from 0, and
only the new ones are scored. In its purest form (`--single`) each of some tokens gets a reading of its own.

Rows are JSON lines of kind `streaming`, with the shared part of `kvplus_eval.results` and

    text, skip, tokens, bos   the text; tokens of it left out at the beginning, and taken; whether BOS came first
    trained_tokens, bytes_per_token  the model's trained length, and what a cache of every token takes
    chunk                     tokens fed at once
    block_losses, first       mean loss in nats of each block of `block_tokens`, of which the first begins at `first`
    cache_bytes, ms_per_token  by the number of tokens held, times as medians over turns
    recompute_ms              one reading of the yardstick in the same turns
    cpu_ms_per_token, recompute_cpu_ms  the same as processor time
    stride, positions         of the yardstick: tokens scored per reading; those scored one by one, with `losses`

    python -m kvplus_eval.streaming --model smollm2-135m --text wiki.txt --out streaming.jsonl
    python -m kvplus_eval.streaming --plot streaming.jsonl --image docs/streaming.png
    python -m kvplus_eval.streaming --pool pieces.jsonl        several pieces of a text (`--skip`) taken together
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import Cache, PreTrainedModel

from hf_kvplus import build_cache, estimate_memory, measure_memory
from hf_kvplus.compat import cache_keyword
from hf_kvplus.loading import load_model
from kvplus_eval.data import load_text
from kvplus_eval.results import append_rows, read_rows, run_facts
from kvplus_eval.streaming_rows import SAMPLE_TOKENS, Row, compare, plot, pool, published, summarize

STRATEGIES = (
    "window:1020,sinks=4,positions=shifted",
    "window:1020,sinks=4",
    "window:1024,sinks=0",
    "int4+window:1020,sinks=4,positions=shifted",
)


def stream(model: PreTrainedModel, token_ids: torch.Tensor, strategy: str, chunk: int, every: int) -> tuple[Row, dict]:
    """Feeds a text through a cache.

    Args:
        model: A causal language model.
        token_ids: `(tokens,)`.
        strategy: The cache.
        chunk: Tokens fed at once, a divisor of `every`.
        every: Tokens between two copies of the cache.

    Returns:
        A row with `losses` per token (nats, the first token has none) and `cache_bytes` by position, and the copies.
    """
    cache = build_cache(strategy, model.config, model=model)
    losses, copies, last = [], {}, None
    for first in range(0, len(token_ids), chunk):
        piece = token_ids[None, first : first + chunk]
        logits = model(input_ids=piece, **{cache_keyword(model): cache}).logits[0].float()
        before = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        losses += torch.nn.functional.cross_entropy(before, piece[0, -len(before) :], reduction="none").tolist()
        last = logits[-1:]
        if (first + chunk) % every == 0:
            copies[first + chunk] = copy.deepcopy(cache)
    sizes = {position: measure_memory(held).total_bytes for position, held in copies.items()}
    return {"strategy": strategy, "chunk": chunk, "first": 1, "losses": losses, "cache_bytes": sizes}, copies


def time_steps(
    model: PreTrainedModel, token_ids: torch.Tensor, copies: dict[int, Cache], window: int, rounds: int
) -> Row:
    """Times one decoded token at each position, and one reading of the window, in turns.

    Args:
        model: A causal language model.
        token_ids: `(tokens,)`, any text.
        copies: Caches by position; each grows by `rounds` tokens.
        window: Tokens that a reading without cache takes.
        rounds: Repetitions.

    Returns:
        Medians `ms_per_token` by position, and `recompute_ms`; both also as processor time of all threads, which other
        work on the machine hardly changes, `cpu_ms_per_token` and `recompute_cpu_ms`.
    """
    times: dict[int, list[tuple[float, float]]] = {position: [] for position in copies}
    readings = []
    for turn in range(rounds):
        for position, cache in copies.items():
            begin = _clocks_ms()
            model(input_ids=token_ids[None, turn : turn + 1], **{cache_keyword(model): cache})
            times[position].append(_since(begin))
        if turn % 8 == 0:
            begin = _clocks_ms()
            model(input_ids=token_ids[None, :window], use_cache=False, logits_to_keep=1)
            readings.append(_since(begin))
    found: Row = {}
    for clock, name in enumerate(("", "cpu_")):
        found[f"{name}ms_per_token"] = {
            position: statistics.median(pair[clock] for pair in pairs) for position, pairs in times.items()
        }
        found[f"recompute_{name}ms"] = statistics.median(pair[clock] for pair in readings)
    return found


def _clocks_ms() -> tuple[float, float]:
    """Returns wall time and processor time."""
    return 1000 * time.perf_counter(), 1000 * time.process_time()


def _since(begin: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = _clocks_ms()
    return wall - begin[0], cpu - begin[1]


def recompute(model: PreTrainedModel, token_ids: torch.Tensor, window: int, stride: int, first: int, lead: int) -> Row:
    """Scores tokens from `first` on with a window that is read anew for every `stride` tokens.

    Args:
        model: A causal language model.
        token_ids: `(tokens,)`.
        window: Tokens read each time.
        stride: Of which this many are scored; a step that decodes one token would cost a whole reading.
        first: First token to score.
        lead: Tokens at the beginning of the text that begin each reading too.

    Returns:
        `losses` per token from `first` on.
    """
    losses: list[float] = []
    for start in range(first, len(token_ids), stride):
        end = min(start + stride, len(token_ids))
        piece = torch.cat([token_ids[:lead], token_ids[end - window + lead : end]])[None]
        logits = model(input_ids=piece, use_cache=False, logits_to_keep=end - start + 1).logits[0].float()
        scored = logits[-(end - start) - 1 : -1]
        losses += torch.nn.functional.cross_entropy(scored, token_ids[start:end], reduction="none").tolist()
    return {"strategy": f"recompute:{window}", "stride": stride, "first": first, "losses": losses}


def recompute_single(model: PreTrainedModel, token_ids: torch.Tensor, window: int, positions: Sequence[int]) -> Row:
    """Scores single tokens, each after a reading of the `window` tokens before it.

    Args:
        model: A causal language model.
        token_ids: `(tokens,)`.
        window: Tokens read each time.
        positions: Tokens to score.

    Returns:
        `losses`, one per position.
    """
    losses = []
    for position in positions:
        piece = token_ids[None, max(0, position - window) : position]
        logits = model(input_ids=piece, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, token_ids[position]).item())
    return {"strategy": f"recompute:{window}", "stride": 1, "positions": list(positions), "losses": losses}


def divergence(
    model: PreTrainedModel, token_ids: torch.Tensor, strategy: str, against: str, chunk: int, last: int
) -> Row:
    """Returns the mean KL divergence in nats of one cache from another over the last tokens of a text."""
    caches = [build_cache(name, model.config, model=model) for name in (against, strategy)]
    values = []
    for first in range(0, len(token_ids), chunk):
        piece = token_ids[None, first : first + chunk]
        reference, got = (
            model(input_ids=piece, **{cache_keyword(model): cache}).logits[0].float().log_softmax(-1)
            for cache in caches
        )
        values.append((reference.exp() * (reference - got)).sum(-1))
    tail = torch.cat(values)[-last:]
    return {"strategy": strategy, "against": against, "tokens": len(tail), "kl_nats": tail.mean().item()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the measurement and prints its summary as JSON lines, or draws one that was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--skip", type=int, default=0, help="tokens of the text that are left out at its beginning")
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--every", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=24, help="tokens timed at each length; 0 for none")
    parser.add_argument("--last", type=int, default=8192, help="tokens whose perplexity is reported")
    parser.add_argument("--window", type=int, default=1024, help="tokens that the yardstick reads anew")
    parser.add_argument("--recompute", action="store_true", help="also score by the yardstick; takes longest")
    parser.add_argument("--single", type=int, default=0, help="tokens that get a reading of their own, evenly spread")
    parser.add_argument("--bos", action="store_true", help="begin the text, and each reading, with BOS")
    parser.add_argument("--stride", type=int, default=64)
    parser.add_argument("--against", help="only print the KL divergence from this strategy")
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    parser.add_argument("--plot", type=Path, help="draw this file instead of measuring")
    parser.add_argument("--pool", type=Path, help="compare all pieces in this file instead of measuring")
    parser.add_argument("--image", type=Path, default=Path("streaming.png"))
    options = parser.parse_args(arguments)
    if options.plot:
        plot(read_rows(options.plot), options.image)
        return
    if options.pool:
        comparisons = list(pool(read_rows(options.pool)))
        if not comparisons:
            raise ValueError(
                f"`--pool` needs rows of a strategy and of its yardstick (`--recompute`) that share {SAMPLE_TOKENS} "
                f"tokens, found none in {options.pool}"
            )
        for comparison in comparisons:
            print(json.dumps(comparison))
        return
    if options.recompute and options.stride >= options.window:
        raise ValueError(f"`--stride` must be less than `--window` {options.window}, got {options.stride}")
    model, tokenizer, source = load_model(options.model)
    text = load_text(options.text)
    options.lead = int(options.bos)
    words = tokenizer(text.text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    words = words[options.skip :]
    token_ids = torch.cat([torch.tensor([tokenizer.bos_token_id] * options.lead, dtype=torch.long), words])
    token_ids = token_ids[: options.tokens].to(model.device)
    if len(token_ids) < options.tokens:
        raise ValueError(
            f"{text.name} has {len(token_ids)} tokens after `--skip` {options.skip}, "
            f"`--tokens` asks for {options.tokens}"
        )
    facts = run_facts(model, source) | {
        "kind": "streaming",
        "text": text.facts(),
        "skip": options.skip,
        "tokens": options.tokens,
        "bos": bool(options.lead),
        "trained_tokens": model.config.get_text_config(decoder=True).max_position_embeddings,
        "bytes_per_token": estimate_memory(model.config, 1, dtype=model.dtype).bytes_per_token,
    }
    rows: list[Row] = []
    with torch.inference_mode():
        for strategy in options.strategies if options.against else ():
            row = divergence(model, token_ids, strategy, options.against, options.chunk, options.last)
            print(json.dumps(row), flush=True)
        for row in () if options.against else _measure(model, token_ids, options):
            rows.append(row)
            if options.out:
                append_rows(options.out, [facts | published(row)])
            print(json.dumps(summarize([row], options.last)[0]), flush=True)
    for yardstick in (row for row in rows if "stride" in row):
        for row in (row for row in rows if "stride" not in row):
            for comparison in compare(row, yardstick, facts["trained_tokens"]):
                print(json.dumps(comparison), flush=True)


def _measure(model: PreTrainedModel, token_ids: torch.Tensor, options: argparse.Namespace) -> Iterator[Row]:
    for strategy in options.strategies:
        row, copies = stream(model, token_ids, strategy, options.chunk, options.every)
        if options.rounds:
            row |= time_steps(model, token_ids, copies, options.window, options.rounds)
        yield row
    if options.recompute:
        first = len(token_ids) - options.last
        yield recompute(model, token_ids, options.window, options.stride, first, options.lead)
    if options.single:
        spread = torch.linspace(len(token_ids) - options.last, len(token_ids) - 1, options.single)
        yield recompute_single(model, token_ids, options.window, spread.long().tolist())


if __name__ == "__main__":
    main()
