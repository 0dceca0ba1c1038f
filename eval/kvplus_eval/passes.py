"""The passes after quality: single layers, planted facts, times, memory. Each takes from the journal what is there."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplus_eval.contexts import time_contexts
from kvplus_eval.journal import Journal
from kvplus_eval.outcome import Outcome
from kvplus_eval.peak import can_watch, watch_peak
from kvplus_eval.processes import Processes
from kvplus_eval.progress import Bars
from kvplus_eval.protocol import REFERENCE_STRATEGY
from kvplus_eval.reference import ReferenceStore
from kvplus_eval.runner import make_cache, record_reference
from kvplus_eval.sensitivity import has_sensitivity, layer_loss, lossy_layers
from kvplus_eval.tasks import Haystack, Sample, answer_sample, make_samples
from kvplus_eval.timing import Times, add_times, rotated, share_reference_text, time_once, warm_up

if TYPE_CHECKING:
    from kvplus_eval.evaluation import Job

ANSWER_ROOM_TOKENS = 64


def measure_layers(
    job: Job, outcomes: Sequence[Outcome], store: ReferenceStore, journal: Journal, processes: Processes, bars: Bars
) -> None:
    """Quantizes this process's part of the layers one by one, then puts the losses together."""
    if not job.protocol.sensitivity_tokens:
        return
    # Machines without a common disk have the reference of their own windows only
    store = store.itself
    record_reference(0, job.model, job.windows[0], job.protocol, store)
    for outcome in outcomes:
        if outcome.status != "ok" or not has_sensitivity(outcome.strategy):
            continue
        losses: dict[int, float] = {}
        mine = [layer for _, layer in processes.mine(lossy_layers(outcome.strategy, job.model, job.protocol))]
        with bars.task(f"{outcome.strategy}: layers", len(mine), counted=False) as advance:
            for layer in mine:
                outcome.attempt(partial(_measure_layer, job, outcome, layer, store, journal, losses))
                advance(1)
        losses = outcome.agree(processes, losses)
        outcome.measured.sensitivity = [{"layer": layer, "kl_nats": losses[layer]} for layer in sorted(losses)]


def _measure_layer(
    job: Job, outcome: Outcome, layer: int, store: ReferenceStore, journal: Journal, losses: dict[int, float]
) -> None:
    """Measures one layer, or takes its loss from the journal."""
    key = ("layer", outcome.strategy, layer)
    if not journal.has(*key):
        strategy, protocol = outcome.strategy, job.protocol
        journal.save(layer_loss(strategy, layer, job.model, job.windows[0], protocol, store), *key)
    losses[layer] = journal.load(*key)


def answer_tasks(job: Job, outcomes: Sequence[Outcome], journal: Journal, processes: Processes, bars: Bars) -> None:
    """Puts this process's part of the planted questions to every strategy, then puts the answers together."""
    protocol = job.protocol
    if not protocol.tasks:
        return
    samples = [
        sample
        for task in protocol.tasks
        for sample in make_samples(
            task, make_haystack(job), protocol.task_lengths, protocol.task_depths, protocol.task_samples
        )
    ]
    mine = processes.mine(samples)
    for outcome in outcomes:
        answers: dict[int, dict[str, Any]] = {}
        total = sum(place["length_tokens"] for _, (place, _) in mine)
        with bars.task(f"{outcome.strategy}: facts", total) as advance:
            for number, (place, sample) in mine:
                outcome.attempt(partial(_answer, job, outcome, place, sample, journal, answers, number))
                advance(place["length_tokens"])
        answers = outcome.agree(processes, answers)
        outcome.measured.answers = [answers[number] for number in sorted(answers)]


def make_haystack(job: Job) -> Haystack:
    """Makes what samples are made of: the evaluated windows, without the tokens that each begins with.

    Raises:
        ValueError: If the job has no tokenizer.
    """
    if job.tokenizer is None:
        raise ValueError("planted facts need the model's tokenizer; give the job one, or no tasks")
    first = job.windows[0][:1].tolist()
    prefix = first if first == [job.tokenizer.bos_token_id] else []
    return Haystack(job.tokenizer, [token for one in job.windows for token in one[len(prefix) :].tolist()], prefix)


def _answer(
    job: Job,
    outcome: Outcome,
    place: dict[str, Any],
    sample: Sample,
    journal: Journal,
    answers: dict[int, dict[str, Any]],
    number: int,
) -> None:
    """Puts one question, or takes its answer from the journal."""
    key = ("fact", outcome.strategy, *place.values())
    if not journal.has(*key):
        cache = make_cache(outcome.strategy, job.model, place["length_tokens"] + ANSWER_ROOM_TOKENS)
        journal.save(answer_sample(job.model, cache, sample, job.protocol.prefill_chunk_tokens), *key)
    answers[number] = {**place, **journal.load(*key)}


def time_all(job: Job, outcomes: Sequence[Outcome], journal: Journal, bars: Bars) -> None:
    """Times all strategies that are still in the run, in turns, and compares their greedy text."""
    by_name = {outcome.strategy: outcome for outcome in outcomes if outcome.status == "ok"}
    rounds, protocol = job.protocol.timing_rounds, job.protocol
    if by_name and rounds:
        decoded = rounds * protocol.decode_tokens + max(0, protocol.greedy_tokens - protocol.decode_tokens)
        total = len(by_name) * (rounds * protocol.window_tokens + decoded)
        with bars.task("timing, in turns", total) as advance:
            for turn in range(rounds):
                for strategy in rotated(list(by_name), turn):
                    by_name[strategy].attempt(partial(_time_round, job, by_name[strategy], turn, journal))
                    advance(total // (rounds * len(by_name)))
        share_reference_text(
            (outcome.measured for outcome in by_name.values()), _reference_text(job, by_name, journal)
        )
    by_name = {name: outcome for name, outcome in by_name.items() if outcome.status == "ok"}
    if by_name and protocol.contexts:
        _time_contexts(job, by_name, journal, bars)


def _time_round(job: Job, outcome: Outcome, turn: int, journal: Journal) -> None:
    """Times one strategy once, or takes the times from the journal."""
    key = ("times", outcome.strategy, turn)
    if not journal.has(*key):
        protocol = job.protocol
        if not outcome.is_warm:
            warm_up(outcome.strategy, job.model, job.windows[0], protocol)
            outcome.is_warm = True
        longest = max(protocol.decode_tokens, protocol.greedy_tokens) if turn == 0 else protocol.decode_tokens
        times = time_once(outcome.strategy, job.model, job.windows[0], protocol, decoded_tokens=longest)
        journal.save(vars(times), *key)
    add_times(outcome.measured, Times(**journal.load(*key)), turn, job.protocol)


def _reference_text(job: Job, by_name: dict[str, Outcome], journal: Journal) -> list[int]:
    """Returns the reference's greedy text, decoding it where the reference isn't among the strategies."""
    if job.reference is not None:
        return job.reference.greedy_ids
    if REFERENCE_STRATEGY in by_name and by_name[REFERENCE_STRATEGY].status == "ok":
        return by_name[REFERENCE_STRATEGY].measured.greedy_ids
    if not journal.has("reference text"):
        greedy_tokens = job.protocol.greedy_tokens
        times = time_once(REFERENCE_STRATEGY, job.model, job.windows[0], job.protocol, decoded_tokens=greedy_tokens)
        journal.save(times.greedy_ids, "reference text")
    return journal.load("reference text")


def _time_contexts(job: Job, by_name: dict[str, Outcome], journal: Journal, bars: Bars) -> None:
    """Takes the time of a token at each context length."""
    key = ("contexts", *by_name)
    if not journal.has(*key):
        contexts, chunk = job.protocol.contexts, job.protocol.prefill_chunk_tokens
        total = len(by_name) * max(contexts)
        with bars.task("times by context", total) as advance:
            each = total // (len(contexts) * len(by_name) * 3)
            found = time_contexts(job.model, job.windows[0], list(by_name), contexts, chunk, lambda: advance(each))
        journal.save(found, *key)
    curves, failures = journal.load(*key)
    for strategy, curve in curves.items():
        by_name[strategy].measured.contexts = curve
    for strategy, reason in failures.items():
        by_name[strategy].measured.findings.append(f"has no time of a token from some length on: {reason}")


def watch_memory(job: Job, outcomes: Sequence[Outcome], journal: Journal, bars: Bars) -> None:
    """Runs every strategy that is still in the run in a process of its own and notes its peak memory."""
    good = [outcome for outcome in outcomes if outcome.status == "ok"]
    if not job.protocol.peak_memory or not good or job.model.device.type == "cuda":
        return
    if not can_watch():
        bars.say("peak memory: this system doesn't tell it, so it is left out")
        return
    with tempfile.TemporaryDirectory() as folder, bars.task("peak memory", len(good), counted=False) as advance:
        job.model.save_pretrained(folder)
        for outcome in good:
            outcome.attempt(partial(_watch, job, outcome, Path(folder), journal))
            advance(1)


def _watch(job: Job, outcome: Outcome, folder: Path, journal: Journal) -> None:
    key = ("peak", outcome.strategy)
    if not journal.has(*key):
        protocol = job.protocol
        peak = watch_peak(
            folder, outcome.strategy, protocol.window_tokens, protocol.decode_tokens, protocol.prefill_chunk_tokens
        )
        journal.save(peak, *key)
    outcome.measured.peak_host_bytes = journal.load(*key)
