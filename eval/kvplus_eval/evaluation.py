"""One evaluation from start to end: reference, gate, read-back, quality, planted facts, times in turns, then rows.

Strategies fail alone. Every finished piece of work is kept in a journal, so that a run that was stopped goes on where
it was; of several processes each does its part of windows and facts, and the first one alone does what must not be
disturbed. Left out: timing in several processes, which would compete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_kvplus.loading import ModelSource
from hf_kvplus.units import format_bytes
from kvplus_eval.data import EvalText
from kvplus_eval.gate import check_gate
from kvplus_eval.guards import RefusedError, refuse_unread
from kvplus_eval.journal import Journal, code_digest, fingerprint
from kvplus_eval.measured import WindowScores
from kvplus_eval.noise import measure_noise
from kvplus_eval.outcome import Outcome
from kvplus_eval.passes import answer_tasks, measure_layers, time_all, watch_memory
from kvplus_eval.processes import Processes
from kvplus_eval.progress import Bars
from kvplus_eval.protocol import Protocol, is_ours, keeps_every_token
from kvplus_eval.readback import read_back, record_states
from kvplus_eval.reference import ReferenceStore
from kvplus_eval.results import Row, eval_row, run_facts
from kvplus_eval.runner import make_cache, record_reference, score_window
from kvplus_eval.work import count_work

if TYPE_CHECKING:
    from kvplus_eval.reference_model import ReferenceModel


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
        folder: Where the reference and unfinished work are kept.
        tokenizer: The model's tokenizer, which planted facts need.
        suite: Name of the suite that the protocol came from, None without one.
        fresh: Whether to throw away what an interrupted run left.
        reference: The model whose full cache the figures compare with; None for this model's own.
    """

    model: PreTrainedModel
    source: ModelSource
    text: EvalText
    windows: Sequence[torch.Tensor]
    strategies: Sequence[str]
    protocol: Protocol
    folder: Path
    tokenizer: PreTrainedTokenizerBase | None = None
    suite: str | None = None
    fresh: bool = False
    reference: ReferenceModel | None = None


@dataclass(frozen=True)
class Finished:
    """An evaluation that came to its end.

    Args:
        rows: One row a strategy, in order, whatever became of it.
        journal: What it kept on the way, to be closed once the rows are written.
    """

    rows: list[Row]
    journal: Journal | None


def run_evaluation(job: Job, console: Console, processes: Processes | None = None) -> Finished:
    """Evaluates all strategies of a job.

    Args:
        job: What to evaluate.
        console: Where progress is shown.
        processes: This process among those that share the work; alone if None.

    Returns:
        The rows, which every process gets, and the journal.
    """
    processes = processes or Processes()
    facts = {**run_facts(job.model, job.source, processes.count), "question": fingerprint(asked(job))}
    facts["reference_model"] = job.reference and job.reference.facts
    outcomes = [Outcome(strategy) for strategy in job.strategies]
    refuse_all(outcomes, job.protocol)
    journal = None
    if any(outcome.status == "ok" for outcome in outcomes):
        journal = _open_journal(job, processes, console)
        facts = {**facts, "run": journal.run, "date": journal.date}
        work = count_work(job.protocol, job.strategies, processes, has_reference=job.reference is not None)
        with Bars(console, work) as bars:
            store = _reference(job, processes, bars)
            _gate(job, outcomes, store, processes)
            _read_back(job, outcomes, processes, bars)
            _quality(job, outcomes, store, journal, processes, bars)
            _noise(job, outcomes, store, journal, processes, bars)
            measure_layers(job, outcomes, store, journal, processes, bars)
            answer_tasks(job, outcomes, journal, processes, bars)
            if processes.is_first:
                time_all(job, outcomes, journal, bars)
                watch_memory(job, outcomes, journal, bars)
            for outcome in outcomes:
                outcome.agree(processes)
    return Finished([eval_row(facts, outcome, job.text, job.protocol, job.suite) for outcome in outcomes], journal)


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


def asked(job: Job) -> dict[str, object]:
    """Returns all that the rows of an evaluation depend on, apart from the strategies that it names."""
    reference = job.reference and job.reference.question
    facts = {"protocol": asdict(job.protocol), "reference": reference, "code": code_digest(), "kind": "eval"}
    return {**question(job), **facts}


def _open_journal(job: Job, processes: Processes, console: Console) -> Journal:
    """Finds what an interrupted run left, and says so; the first process opens before the others do."""
    open_it = partial(Journal.open, job.folder, asked(job))
    journal = open_it(fresh=job.fresh) if processes.is_first else None
    processes.gather(None)
    journal = journal or open_it()
    # Machines without a common disk each have a journal of their own; the run is the first one's
    run, date, found = processes.from_first((journal.run, journal.date, journal.count()))
    if found:
        console.print(f"going on with run {run}, begun {date}: {found} pieces of work are there", soft_wrap=True)
    return Journal(journal.folder, run, date)


def _reference(job: Job, processes: Processes, bars: Bars) -> ReferenceStore:
    """Returns what strategies are compared with; of the model's own full cache the first window at least."""
    if job.reference is None:
        return prepare_reference(job, processes, bars)
    own = _open_store(job)
    if processes.is_first:
        with bars.task("own full cache", len(job.windows[0])):
            record_reference(0, job.model, job.windows[0], job.protocol, own)
    processes.gather(None)
    return replace(job.reference.store, own=own)


def _open_store(job: Job) -> ReferenceStore:
    return ReferenceStore.open(job.folder / "reference", question(job), job.protocol.predicted_tokens)


def prepare_reference(job: Job, processes: Processes, bars: Bars) -> ReferenceStore:
    """Computes a model's reference, or finds what an earlier run left, and says where it lies and how large it is.

    Args:
        job: What is evaluated.
        processes: This process among those that share the windows.
        bars: Where progress is shown.

    Returns:
        The store, with the windows of this process.
    """
    store = _open_store(job)
    mine = processes.mine(job.windows)
    reused = sum(processes.gather(sum(store.has(index) for index, _ in mine)))
    with bars.task("reference", len(mine) * job.protocol.window_tokens) as advance:
        for index, token_ids in mine:
            record_reference(index, job.model, token_ids, job.protocol, store)
            advance(len(token_ids))
    processes.gather(None)
    bars.say(
        f"reference log-probabilities: {format_bytes(store.stored_bytes())} in {store.folder} "
        f"({reused} of {len(job.windows)} windows reused from an earlier run)"
    )
    return store


def _gate(job: Job, outcomes: Sequence[Outcome], store: ReferenceStore, processes: Processes) -> None:
    """Refuses all caches of this package where `fp` isn't what `dynamic` is."""
    reason = None
    if processes.is_first and any(is_ours(outcome.strategy) for outcome in outcomes):
        gate = Outcome("gate")
        gate.attempt(lambda: check_gate(job.model, job.windows[0], job.protocol, store.itself) and None)
        reason = gate.reason
    reason = processes.from_first(reason)
    for outcome in outcomes:
        if reason is not None and is_ours(outcome.strategy):
            outcome.attempt(partial(_refuse, reason))


def _refuse(reason: str) -> None:
    raise RefusedError(reason)


def _read_back(job: Job, outcomes: Sequence[Outcome], processes: Processes, bars: Bars) -> None:
    """Feeds every cache known states and refuses those that give back other ones."""
    if processes.is_first:
        states = record_states(job.model, job.windows[0])
        with bars.task("reading back", len(outcomes), counted=False) as advance:
            for outcome in outcomes:
                build = partial(make_cache, outcome.strategy, job.model, job.protocol.longest_tokens)
                outcome.attempt(partial(_read_back_one, outcome, build, states))
                advance(1)
    for outcome in outcomes:
        outcome.agree(processes)


def _read_back_one(outcome: Outcome, build: partial, states: dict) -> None:
    found = read_back(build, states, keeps_all=keeps_every_token(outcome.strategy))
    outcome.measured.layers, outcome.measured.findings = found.layers, found.findings


def _quality(
    job: Job,
    outcomes: Sequence[Outcome],
    store: ReferenceStore,
    journal: Journal,
    processes: Processes,
    bars: Bars,
) -> None:
    """Runs this process's windows through every strategy, then puts those of all processes together."""
    for outcome in outcomes:
        began_s = time.perf_counter()
        pieces: dict[int, dict] = {}
        mine = processes.mine(job.windows)
        with bars.task(outcome.strategy, len(mine) * job.protocol.window_tokens) as advance:
            for index, token_ids in mine:
                outcome.attempt(partial(_score, outcome, index, token_ids, job, store, journal, pieces, advance))
        pieces = outcome.agree(processes, pieces)
        if outcome.status == "ok":
            for index in sorted(pieces):
                outcome.measured.add_window(WindowScores.unpack(pieces[index]))
        bars.log(f"{outcome.strategy}: {outcome.status}, {time.perf_counter() - began_s:.0f} s")


def _score(outcome, index, token_ids, job, store, journal, pieces, advance) -> None:
    """Scores one window, or takes it from the journal."""
    key = ("window", outcome.strategy, index)
    if journal.has(*key):
        pieces[index] = journal.load(*key)
        advance(len(token_ids))
        return
    scores = score_window(outcome.strategy, index, job.model, token_ids, job.protocol, store, advance)
    outcome.is_warm = True
    pieces[index] = scores.pack()
    journal.save(pieces[index], *key)


def _noise(job, outcomes, store, journal, processes, bars) -> None:
    """Measures how far the reference is from itself, which is then beside every strategy's loss."""
    noise: dict[str, float] = {}
    if processes.is_first:
        chosen = list(enumerate(job.windows))[: job.protocol.noise_windows]
        for kind in job.protocol.noise:
            values = []
            with bars.task(f"noise: {kind}", len(chosen) * job.protocol.window_tokens) as advance:
                for index, token_ids in chosen:
                    # Machines without a common disk have the reference of their own windows only
                    record_reference(index, job.model, token_ids, job.protocol, store.itself)
                    key = ("noise", kind, index)
                    if not journal.has(*key):
                        value = measure_noise(kind, index, job.model, token_ids, job.protocol, store.itself, advance)
                        journal.save(value, *key)
                    values.append(journal.load(*key))
            noise[kind] = sum(values) / len(values)
    noise = processes.from_first(noise)
    for outcome in outcomes:
        outcome.measured.noise = noise
