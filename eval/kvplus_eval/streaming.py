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
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_kvplus import build_cache, estimate_memory, measure_memory
from hf_kvplus.compat import cache_keyword
from hf_kvplus.loading import load_model
from kvplus_eval.data import load_text
from kvplus_eval.results import append_rows, read_rows, run_facts

Row = dict[str, Any]
# Tokens whose mean loss is published, and those that a comparison takes for one sample of the text.
BLOCK_TOKENS, SAMPLE_TOKENS = 64, 128
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


def compare(row: Row, yardstick: Row, boundary: int) -> Iterator[Row]:
    """Compares two rows token by token, before and from `boundary` on.

    Yields:
        The perplexities over the tokens that both scored, their difference in percent, and its standard error, with
        `SAMPLE_TOKENS` tokens next to each other taken for one sample.
    """
    losses = [dict(zip(places(one), one["losses"], strict=True)) for one in (row, yardstick)]
    shared = sorted(losses[0].keys() & losses[1].keys())
    for name, chosen in (
        (f"tokens before {boundary}", [place for place in shared if place < boundary]),
        (f"tokens from {boundary} on", [place for place in shared if place >= boundary]),
    ):
        if not chosen:
            continue
        own, other = (torch.tensor([values[place] for place in chosen], dtype=torch.float64) for values in losses)
        size = SAMPLE_TOKENS if "positions" not in yardstick else 1
        samples = [part.mean().item() for part in (own - other).split(size) if len(part) == size]
        yield {
            "strategy": row["strategy"],
            "against": f"{yardstick['strategy']}, stride {yardstick['stride']}",
            "where": name,
            "tokens": len(chosen),
            "perplexity": own.mean().exp().item(),
            "yardstick": other.mean().exp().item(),
            "percent": 100 * torch.expm1((own - other).mean()).item(),
            "standard_error": 100 * statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else None,
        }


def pool(rows: Sequence[Row]) -> Iterator[Row]:
    """Compares strategies with the yardstick over all pieces of a text that rows are of.

    Args:
        rows: As published; a piece is told by its text, `skip`, `tokens` and `bos`, and its latest rows count.

    Yields:
        For each strategy a comparison of each piece, as of `compare`, then one over all of them, with the standard
        error that the spread of the pieces gives beside that of their samples.
    """
    pieces: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["kind"] == "streaming" and "block_losses" in row:
            piece = (row["text"]["sha256"], row["bos"], row["tokens"], row["skip"])
            pieces.setdefault(piece, {})[row["strategy"]] = row
    for strategy in sorted({name for piece in pieces.values() for name, row in piece.items() if "stride" not in row}):
        found = []
        for key in sorted(pieces):
            yardstick = next((row for row in pieces[key].values() if "stride" in row), None)
            if yardstick is not None and strategy in pieces[key]:
                samples = _shared_samples(pieces[key][strategy], yardstick)
                if not len(samples[0]):
                    continue
                found.append(samples)
                yield {"strategy": strategy, "skip": key[-1]} | _difference(*found[-1])
        if len(found) > 1:
            whole = _difference(*(torch.cat(samples) for samples in zip(*found, strict=True)))
            means = [(own - other).mean().item() for own, other in found]
            by_piece = 100 * statistics.stdev(means) / math.sqrt(len(means))
            yield {"strategy": strategy, "pieces": len(found)} | whole | {"standard_error_by_piece": by_piece}


def _shared_samples(row: Row, yardstick: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean losses of the samples of `SAMPLE_TOKENS` that two published rows share."""
    losses = []
    for one in (row, yardstick):
        begins = (one["first"] + one["block_tokens"] * index for index in range(len(one["block_losses"])))
        losses.append(dict(zip(begins, one["block_losses"], strict=True)))
    size = SAMPLE_TOKENS // row["block_tokens"]
    shared = sorted(losses[0].keys() & losses[1].keys())
    shared = shared[len(shared) % size :]
    own, other = (torch.tensor([values[begin] for begin in shared], dtype=torch.float64) for values in losses)
    return own.unflatten(0, (-1, size)).mean(1), other.unflatten(0, (-1, size)).mean(1)


def _difference(own: torch.Tensor, other: torch.Tensor) -> Row:
    """Returns how two lists of samples differ."""
    return {
        "tokens": SAMPLE_TOKENS * len(own),
        "perplexity": own.mean().exp().item(),
        "yardstick": other.mean().exp().item(),
        "percent": 100 * torch.expm1((own - other).mean()).item(),
        "standard_error": 100 * (own - other).std().item() / math.sqrt(len(own)) if len(own) > 1 else None,
    }


def places(row: Row) -> Sequence[int]:
    """Returns the tokens that a row's `losses` are of."""
    return row.get("positions") or range(row["first"], row["first"] + len(row["losses"]))


def published(row: Row, tokens: int = BLOCK_TOKENS) -> Row:
    """Returns a row with mean losses of blocks of tokens in place of each token's; the last block ends the text."""
    if "positions" in row:
        return row | {"losses": [round(loss, 4) for loss in row["losses"]]}
    rest = len(row["losses"]) % tokens
    means = torch.tensor(row["losses"][rest:], dtype=torch.float64).unflatten(0, (-1, tokens)).mean(1)
    kept = {name: value for name, value in row.items() if name != "losses"}
    losses = [round(mean, 5) for mean in means.tolist()]
    return kept | {"first": row["first"] + rest, "block_tokens": tokens, "block_losses": losses}


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


def summarize(rows: Sequence[Row], last_tokens: int) -> list[Row]:
    """Returns per row the perplexity of the last tokens, the largest loss and the figures of time and bytes."""
    figures = []
    for row in rows:
        tail = row["losses"][-last_tokens:]
        times = {
            f"{name}ms_per_token": {place: round(value, 1) for place, value in row[f"{name}ms_per_token"].items()}
            for name in ("", "cpu_")
            if "ms_per_token" in row
        }
        figures.append(
            {
                "strategy": row["strategy"],
                "perplexity": math.exp(statistics.fmean(tail)),
                "tokens": len(tail),
                "finite": all(map(math.isfinite, row["losses"])),
                **times,
                "recompute_ms": row.get("recompute_ms"),
                "recompute_cpu_ms": row.get("recompute_cpu_ms"),
                "cache_bytes": sorted(set(row.get("cache_bytes", {}).values())),
            }
        )
    return figures


def plot(rows: Sequence[Row], path: Path, smooth: int = 512) -> None:
    """Draws perplexity along the text, and the bytes of the cache beside those of one that keeps every token.

    Raises:
        ValueError: If the rows are of several pieces or texts; one picture shows one.
        ImportError: If matplotlib isn't installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    rows = latest_rows(rows)
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1.3))
    for row in rows:
        blocks = smooth // row["block_tokens"]
        losses = torch.tensor(row["block_losses"])
        losses = losses[len(losses) % blocks :]
        means = losses.unflatten(0, (-1, blocks)).mean(1)
        end = row["first"] + row["block_tokens"] * len(row["block_losses"])
        ends = end - smooth * torch.arange(len(means) - 1, -1, -1)
        recomputed = "stride" in row
        (line,) = above.plot(
            ends, means.exp(), "k:" if recomputed else "-", label=_meaning(row), zorder=2 + recomputed
        )
        if not recomputed:
            sizes = {int(place): size / 2**20 for place, size in row["cache_bytes"].items()}
            below.plot(list(sizes), list(sizes.values()), marker=".", color=line.get_color())
    above.set(ylabel=f"perplexity, {smooth} tokens at a time", yscale="log")
    above.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    above.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    above.yaxis.set_minor_formatter(ticker.NullFormatter())
    tokens, trained = rows[0]["tokens"], rows[0].get("trained_tokens")
    if trained and trained < tokens:
        for axes in (above, below):
            axes.axvline(trained, color="gray", linestyle="--", linewidth=1)
        above.annotate("trained length", (trained, 0.02), xycoords=("data", "axes fraction"), color="gray",
                       xytext=(4, 0), textcoords="offset points")  # fmt: skip
    if "bytes_per_token" in rows[0]:
        full = rows[0]["bytes_per_token"] * tokens / 2**20
        below.plot([0, tokens], [0, full], "--", color="gray", label="a cache of every token")
        below.legend(fontsize="small")
    above.set_title(f"{rows[0]['model']['name']}: {tokens:,} tokens of {rows[0]['text']['name']}", fontsize="medium")
    above.legend(fontsize="small")
    below.set(ylabel="cache, MiB", xlabel="tokens read")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def latest_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the latest row of each strategy that can be drawn, the first strategy that was measured first.

    Raises:
        ValueError: If they are of several pieces or texts.
    """
    rows = [row for row in rows if row["kind"] == "streaming" and "block_losses" in row]
    found = {(row["text"]["sha256"], row["skip"], row["tokens"], row["bos"]) for row in rows}
    if len(found) != 1:
        raise ValueError(
            f"`--plot` needs a file with rows of one piece of one text, got {len(found)}; draw them from files of "
            "their own"
        )
    return list({row["strategy"]: row for row in rows}.values())


def _meaning(row: Row) -> str:
    """Returns a row's strategy and what it stands for."""
    name = row["strategy"]
    if "stride" in row:
        return f"{name}: the latest tokens read anew, without cache"
    if "sinks=0" in name:
        return f"{name}: no sinks"
    place = "moved up to the window" if "positions=shifted" in name else "left where they were"
    return f"{name}: sinks {place}"


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
