"""Peak memory while tokens are decoded, one strategy in a process of its own: what a step needs beside its cache.

The process loads the model and decodes some tokens with a short cache, which tells the model's own working memory;
then it fills a cache with a long context (random states, see `kvplus_eval.fill`, or a prompt that the model computes),
gives back what that left, and decodes the same number of tokens. Memory is what the system counts as resident (Linux);
it counts pages in batches, so some hundred KiB are within its error. What reading a cache needs on the way is the
difference, less what the cache holds:

    beside = peak of the long run - peak of the short run - (bytes of the long cache - bytes of the short one)

    python -m kvplus_eval.decode_peak '{"model": "smollm2-135m", "strategy": "int4", ...}'   see `PeakJob`
    python -m kvplus_eval.decode_peaks --strategies dynamic,int4 --context 8192              a row for each
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import Cache, PreTrainedModel

from hf_kvplus import KVPlusCache, measure_memory, use_fused_attention
from hf_kvplus.loading import load_model
from hf_kvplus.units import format_bytes
from kvplus_eval.fill import fill_cache
from kvplus_eval.guards import RefusedError
from kvplus_eval.peak import LAUNCHED, RESET, RESET_PEAK, can_watch, status_bytes
from kvplus_eval.results import Row
from kvplus_eval.runner import make_cache
from kvplus_eval.stepping import step

# A prompt that is packed and then decoded beyond a block, so that all code has run and all libraries are awake.
AWAKE_TOKENS, AWAKE_DECODED = 320, 80
SHORT_TOKENS = 16


@dataclass(frozen=True)
class PeakJob:
    """What one process does.

    Args:
        model: As for `kvplus bench`.
        strategy: A strategy string.
        context: Tokens of the context.
        decoded: Tokens decoded after it.
        prefill_chunk_tokens: Tokens in one forward pass of the prompt.
        fused: Whether caches of this package are read by `use_fused_attention`.
        dtype: Of the weights, as for `kvplus bench`.
        computed: Whether the model computes the context; otherwise the cache is filled with random states.
    """

    model: str
    strategy: str
    context: int
    decoded: int
    prefill_chunk_tokens: int = 512
    fused: bool = False
    dtype: str = "auto"
    computed: bool = False


def watch_decoding(job: PeakJob) -> dict[str, int]:
    """Runs a job in a process of its own.

    Returns:
        `decode_peak_bytes` above the loaded model, of which `decode_working_bytes` are needed without a context too,
        `decode_cache_bytes` are held and `decode_beside_bytes` are neither.

    Raises:
        RefusedError: If this system doesn't tell a process's peak memory.
        RuntimeError: If the process fails; the message ends as its did.
    """
    if not can_watch():
        raise RefusedError("peak memory is told by Linux only, by /proc/self/status and clear_refs")
    done = subprocess.run(
        [sys.executable, "-m", "kvplus_eval.decode_peak", json.dumps(asdict(job))],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name not in LAUNCHED},
    )
    if done.returncode != 0:
        raise RuntimeError(f"watching `{job.strategy}` decode failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_job(job: PeakJob) -> dict[str, int]:
    """Runs a job in this process; the result is that of `watch_decoding`."""
    model, tokenizer, _ = load_model(job.model, "cpu", job.dtype)
    return measure_decoding(model, len(tokenizer), job)


def measure_decoding(model: PreTrainedModel, vocab: int, job: PeakJob) -> dict[str, int]:
    """Measures with a model that is loaded, whose token ids are below `vocab`."""
    text = torch.randint(0, vocab, (job.context + job.decoded,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        _decode(model, job, text, min(AWAKE_TOKENS, job.context), AWAKE_DECODED)
        _tidy()
        before = status_bytes("VmRSS")
        short_bytes, short_peak = _decode(model, job, text, SHORT_TOKENS, job.decoded)
        _tidy()
        cache_bytes, peak = _decode(model, job, text, job.context, job.decoded)
    # A short run may find room in what the process has already; it needs nothing then.
    working = max(0, short_peak - before - short_bytes)
    return {
        "decode_peak_bytes": peak - before,
        "decode_working_bytes": working,
        "decode_cache_bytes": cache_bytes,
        "decode_beside_bytes": peak - before - working - cache_bytes,
    }


def _decode(model: PreTrainedModel, job: PeakJob, text: torch.Tensor, tokens: int, decoded: int) -> tuple[int, int]:
    """Makes a context and decodes; returns the bytes that the cache holds at the end, and the peak while decoding."""
    cache = make_cache(job.strategy, model, job.context + job.decoded)
    with _reading(model, cache, job.fused):
        if job.computed:
            for piece in text[:tokens].split(job.prefill_chunk_tokens):
                step(model, cache, piece, last_only=True)
        else:
            fill_cache(model, cache, tokens)
        _tidy()
        RESET.write_text(RESET_PEAK)
        for token in text[tokens : tokens + decoded].split(1):
            step(model, cache, token, last_only=True)
    peak = status_bytes("VmHWM")
    return measure_memory(cache).total_bytes, peak


def _reading(model: PreTrainedModel, cache: Cache, fused: bool) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which a cache is read, as `kvplus bench` reads it."""
    return use_fused_attention(model) if fused and isinstance(cache, KVPlusCache) else contextlib.nullcontext()


def _tidy() -> None:
    """Gives freed memory back to the system, so that what an earlier phase left isn't counted."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def watch_rows(rows: Sequence[Row], jobs: dict[str, PeakJob]) -> list[str]:
    """Adds what `watch_decoding` finds to the `bench` part of rows.

    Args:
        rows: Rows of one run of `kvplus bench`; those at the longest context that have times are watched.
        jobs: What to run for each strategy.

    Returns:
        A line for each strategy that could not be watched.
    """
    complaints = []
    longest = max(row["bench"]["context_tokens"] for row in rows)
    for row in rows:
        if row["status"] == "ok" and row["bench"]["context_tokens"] == longest:
            try:
                row["bench"].update(watch_decoding(jobs[row["strategy"]]))
            except RuntimeError as error:
                complaints.append(f"{row['strategy']}: {error}")
    return complaints


def peak_table(rows: Sequence[Row]) -> Table:
    """Makes the table of memory while decoding, from rows of `kvplus bench` that have it."""
    watched = [row for row in rows if "decode_peak_bytes" in row["bench"]]
    context = watched[0]["bench"]["context_tokens"] if watched else "?"
    title = f"Memory while decoding at {context} tokens, above the loaded model"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    for head in ("peak", "cache", "model's own", "beside both"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in watched:
        sizes = [row["bench"][f"decode_{name}_bytes"] for name in ("peak", "cache", "working", "beside")]
        table.add_row(row["strategy"], *map(_signed, sizes))
    return table


def _signed(size: int) -> str:
    """Writes bytes; differences of two measurements may be negative."""
    return format_bytes(size) if size >= 0 else f"-{format_bytes(-size)}"


if __name__ == "__main__":
    print(json.dumps(run_job(PeakJob(**json.loads(sys.argv[1])))))
