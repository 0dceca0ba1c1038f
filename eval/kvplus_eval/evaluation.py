"""One evaluation from start to end: reference, quality of every strategy, then times in turns, then rows.

Strategies fail alone. Left out: resuming in the middle of a strategy; the reference, which costs most, is resumed
window by window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from hf_kvplus.loading import ModelSource
from hf_kvplus.units import format_bytes
from kvplus_eval.data import EvalText
from kvplus_eval.guards import refuse_unread
from kvplus_eval.outcome import Outcome
from kvplus_eval.protocol import REFERENCE_STRATEGY, Protocol
from kvplus_eval.reference import ReferenceStore
from kvplus_eval.results import Row, eval_row, run_facts
from kvplus_eval.runner import measure_quality, record_reference
from kvplus_eval.timing import add_times, rotated, share_reference_text, time_once


@dataclass(frozen=True)
class Job:
    """What is evaluated.

    Args:
        model: The model, in evaluation mode.
        source: Where it came from.
        text: The text that the windows were cut from.
        windows: Token ids, each of shape (window_tokens,).
        strategies: Strategy strings.
        protocol: How to feed and time.
        folder: Where the reference is kept.
    """

    model: PreTrainedModel
    source: ModelSource
    text: EvalText
    windows: Sequence[torch.Tensor]
    strategies: Sequence[str]
    protocol: Protocol
    folder: Path


def run_evaluation(job: Job, console: Console) -> list[Row]:
    """Evaluates all strategies of a job.

    Args:
        job: What to evaluate.
        console: Where progress is shown.

    Returns:
        One row a strategy, in order, whatever became of it.
    """
    facts = run_facts(job.model, job.source)
    outcomes = [Outcome(strategy) for strategy in job.strategies]
    refuse_all(outcomes, job.protocol)
    if any(outcome.status == "ok" for outcome in outcomes):
        with _progress(console) as progress:
            store = _reference(job, progress)
            _quality(job, outcomes, store, progress)
            _times(job, outcomes, progress)
    return [eval_row(facts, outcome, job.text, job.protocol) for outcome in outcomes]


def refuse_all(outcomes: Sequence[Outcome], protocol: Protocol) -> None:
    """Marks every strategy as refused when the protocol never reads a cache, before any work is done."""
    for outcome in outcomes:
        outcome.attempt(lambda: refuse_unread(protocol))


def question(job: Job) -> dict[str, object]:
    """Returns all that the reference's log-probabilities depend on, which becomes their fingerprint."""
    return {
        "model": asdict(job.source),
        "dtype": str(job.model.dtype),
        "attention": job.model.config._attn_implementation,
        "device": job.model.device.type,
        "text": job.text.sha256,
        "first_tokens": job.windows[0].tolist(),
        "window_tokens": job.protocol.window_tokens,
        "chunk_tokens": job.protocol.chunk_tokens,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _progress(console: Console) -> Progress:
    """Makes progress bars; they stay on screen as a record of what ran."""
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _reference(job: Job, progress: Progress) -> ReferenceStore:
    """Computes the reference, or finds what an earlier run left, and says where it lies and how large it is."""
    store = ReferenceStore.open(job.folder / "reference", question(job), job.protocol.predicted_tokens)
    reused = sum(store.has(index) for index in range(len(job.windows)))
    task = progress.add_task("reference", total=_total_tokens(job))
    record_reference(job.model, job.windows, job.protocol, store, lambda done: progress.advance(task, done))
    progress.console.print(
        f"reference log-probabilities: {format_bytes(store.stored_bytes())} in {store.folder} "
        f"({reused} of {len(job.windows)} windows reused from an earlier run)",
        soft_wrap=True,
    )
    return store


def _quality(job: Job, outcomes: Sequence[Outcome], store: ReferenceStore, progress: Progress) -> None:
    """Runs the quality pass of every strategy; a log that shows no bars gets a line for each."""
    for outcome in outcomes:
        task = progress.add_task(outcome.strategy, total=_total_tokens(job))
        began_s = time.perf_counter()
        outcome.attempt(partial(_quality_of, outcome, job, store, partial(progress.advance, task)))
        if not progress.console.is_terminal:
            progress.console.print(f"{outcome.strategy}: {outcome.status}, {time.perf_counter() - began_s:.0f} s")


def _quality_of(outcome: Outcome, job: Job, store: ReferenceStore, advance: Callable[[int], None]) -> None:
    """Runs the quality pass of one strategy and keeps what was measured."""
    outcome.measured = measure_quality(outcome.strategy, job.model, job.windows, job.protocol, store, advance)


def _times(job: Job, outcomes: Sequence[Outcome], progress: Progress) -> None:
    """Times all strategies that are still in the run, in turns, and compares their greedy text."""
    rounds, token_ids = job.protocol.timing_rounds, job.windows[0]
    by_name = {outcome.strategy: outcome for outcome in outcomes if outcome.status == "ok"}
    if not rounds or not by_name:
        return
    task = progress.add_task("timing, in turns", total=rounds * len(by_name))
    for turn in range(rounds):
        for strategy in rotated(list(by_name), turn):
            outcome = by_name[strategy]
            outcome.attempt(partial(add_times, turn, strategy, outcome.measured, job.model, token_ids, job.protocol))
            progress.advance(task)
    share_reference_text((outcome.measured for outcome in by_name.values()), _reference_text(job, by_name))


def _reference_text(job: Job, by_name: dict[str, Outcome]) -> list[int]:
    """Returns the reference's greedy text, decoding it where the reference isn't among the strategies."""
    if REFERENCE_STRATEGY in by_name and by_name[REFERENCE_STRATEGY].status == "ok":
        return by_name[REFERENCE_STRATEGY].measured.greedy_ids
    _, _, greedy_ids = time_once(
        REFERENCE_STRATEGY, job.model, job.windows[0], job.protocol, decoded_tokens=job.protocol.greedy_tokens
    )
    return greedy_ids


def _total_tokens(job: Job) -> int:
    return len(job.windows) * job.protocol.window_tokens
