"""Another model's full cache as the yardstick: what a converted or a healed checkpoint costs against its original.

Its log-probabilities for the same windows and chunks are written to disk first, as those of any reference are, and the
same files serve a plain evaluation of that model. Then it makes room: no two models are held at a time. What compares
a model with itself stays with its own full cache, of the first window: the gate, the guards, noise, single layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from kvplus_eval.evaluation import Job, prepare_reference, question
from kvplus_eval.processes import Processes
from kvplus_eval.progress import Bars
from kvplus_eval.protocol import REFERENCE_STRATEGY
from kvplus_eval.reference import ReferenceStore
from kvplus_eval.results import model_facts
from kvplus_eval.timing import time_once


@dataclass(frozen=True)
class ReferenceModel:
    """What is kept of a reference model once it was run.

    Args:
        facts: What rows say of it: name, how, revision, dtype, parameters, attention.
        question: All that its log-probabilities depend on.
        store: They themselves, for the windows of this process.
        greedy_ids: Its greedy text after the first window, known to the first process; empty where none is compared.
    """

    facts: dict[str, Any]
    question: dict[str, object]
    store: ReferenceStore
    greedy_ids: list[int]


def record_reference_model(job: Job, console: Console, processes: Processes) -> ReferenceModel:
    """Runs the reference model over all windows, or finds what an earlier run left.

    Args:
        job: What would evaluate the reference model itself; its strategies don't matter.
        console: Where progress is shown.
        processes: This process among those that share the windows.

    Returns:
        What is kept of it.
    """
    mine = processes.mine(job.windows)
    with Bars(console, len(mine) * job.protocol.window_tokens) as bars:
        store = prepare_reference(job, processes, bars)
    greedy_ids: list[int] = []
    if processes.is_first and job.protocol.timing_rounds and job.protocol.greedy_tokens:
        times = time_once(
            REFERENCE_STRATEGY, job.model, job.windows[0], job.protocol, decoded_tokens=job.protocol.greedy_tokens
        )
        greedy_ids = times.greedy_ids
    return ReferenceModel(model_facts(job.model, job.source), question(job), store, greedy_ids)


def require_same_vocabulary(
    names: tuple[str, str],
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase],
    configs: tuple[PreTrainedConfig, PreTrainedConfig],
) -> None:
    """Checks that two models predict over the same tokens.

    Args:
        names: Name of the reference model, name of the model under test.
        tokenizers: Theirs, in that order.
        configs: Their configurations.

    Raises:
        ValueError: If vocabularies or numbers of logits differ.
    """
    vocabularies = [tokenizer.get_vocab() for tokenizer in tokenizers]
    different = len(set(vocabularies[0].items()) ^ set(vocabularies[1].items()))
    if different:
        raise _incomparable(names, f"their vocabularies differ in {different} entries")
    sizes = [config.get_text_config(decoder=True).vocab_size for config in configs]
    if sizes[0] != sizes[1]:
        raise _incomparable(names, f"they predict over {sizes[0]} and {sizes[1]} tokens")


def require_same_windows(
    names: tuple[str, str], windows: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
) -> None:
    """Checks that two tokenizers cut a text into the same tokens; arguments as of `require_same_vocabulary`.

    Raises:
        ValueError: If they don't.
    """
    if not all(torch.equal(theirs, ours) for theirs, ours in zip(*windows, strict=True)):
        raise _incomparable(names, "their tokenizers cut this text into other tokens")


def _incomparable(names: tuple[str, str], reason: str) -> ValueError:
    return ValueError(
        f"`reference_model` {names[0]} can't be compared with {names[1]}: {reason}; choose a reference with the same "
        "tokenizer, such as the checkpoint that this one was made from"
    )
