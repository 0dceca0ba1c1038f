"""What a task is: a function that makes one sample for a length and a depth, and how a sample is answered.

An answer counts when greedy decoding would give all of it. Feeding the right answer and looking at each prediction
says the same in one pass: decoding leaves the right answer at the first prediction that differs. Context, question and
answer are fed one after the other, so that question and answer read what was stored of the context.

The kinds of task are those of RULER (arXiv 2404.06654); texts and numbers are made here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from hf_kvplus.registry import Registry
from kvplus_eval.guards import refuse_miscounted
from kvplus_eval.stepping import step

# hqq packs several rows into a byte and fails on a number of tokens that doesn't divide; fair questions spare it that
CONTEXT_MULTIPLE = 16


@dataclass(frozen=True)
class Sample:
    """A planted fact and its question.

    Args:
        context: Tokens with the fact among them.
        question: Tokens that follow.
        answer: The tokens that should come then.
    """

    context: list[int]
    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Haystack:
    """What samples are made of.

    Args:
        tokenizer: The model's tokenizer.
        token_ids: Tokens of the evaluated text, the hay.
        prefix: Tokens that every text of this model begins with.
    """

    tokenizer: PreTrainedTokenizerBase
    token_ids: Sequence[int]
    prefix: Sequence[int] = ()

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without the ones that begin it.

        Raises:
            ValueError: If the tokenizer doesn't know all of it, as that of a protein model.
        """
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in token_ids:
            raise ValueError(f"this model's tokenizer doesn't know the words of {text!r}; use the task `copy`")
        return list(token_ids)

    def bury(self, fact: list[int], depth: float, tokens: int, begin: int = 0) -> list[int]:
        """Returns `tokens` tokens of hay with a fact at a depth.

        Raises:
            ValueError: If the text is too short.
        """
        hay_tokens = tokens - len(fact) - len(self.prefix)
        if len(self.token_ids) < hay_tokens:
            raise ValueError(
                f"the text has {len(self.token_ids)} tokens, fewer than the {hay_tokens} that this task needs; use "
                "smaller --task-lengths"
            )
        begin = begin % (len(self.token_ids) - hay_tokens + 1)
        hay = list(self.token_ids[begin : begin + hay_tokens])
        place = round(depth * len(hay))
        return [*self.prefix, *hay[:place], *fact, *hay[place:]]


def context_tokens(length: int, question: list[int]) -> int:
    """Returns the length of a context that leaves room for its question, rounded down to `CONTEXT_MULTIPLE`."""
    return (length - len(question)) // CONTEXT_MULTIPLE * CONTEXT_MULTIPLE


TaskFunction = Callable[[Haystack, int, float, random.Random], Sample]
TASKS: Registry[TaskFunction] = Registry("task")


def make_samples(
    task: str, haystack: Haystack, lengths: Sequence[int], depths: Sequence[float], count: int
) -> list[tuple[dict[str, Any], Sample]]:
    """Makes all samples of a task; the same arguments always give the same samples.

    Args:
        task: Name of the task.
        haystack: What they are made of.
        lengths: Lengths of context and question together, in tokens; the context is rounded down to whole 16 tokens.
        depths: Where the fact lies, from 0 to 1.
        count: Samples at each length and depth.

    Returns:
        For each sample its place (task, length_tokens, depth, sample) and itself.
    """
    make = TASKS.get(task)
    places = [
        {"task": task, "length_tokens": length, "depth": depth, "sample": number}
        for length in lengths
        for depth in depths
        for number in range(count)
    ]
    return [
        (place, make(haystack, place["length_tokens"], place["depth"], random.Random(str(place)))) for place in places
    ]


def answer_sample(model: PreTrainedModel, cache: Cache, sample: Sample, chunk_tokens: int) -> dict[str, float]:
    """Puts one question to a model.

    Args:
        model: The model.
        cache: An empty cache.
        sample: The question.
        chunk_tokens: Tokens in one forward pass over the context.

    Returns:
        `exact`, 1 where greedy decoding gives the whole answer and else 0, and `nats`, the mean loss of its tokens.
    """
    answer = torch.tensor(sample.answer)
    with torch.inference_mode():
        for piece in torch.tensor(sample.context).split(chunk_tokens):
            step(model, cache, piece, last_only=True)
        first = step(model, cache, torch.tensor(sample.question), last_only=True)
        logits = torch.cat([first, step(model, cache, answer[:-1])]) if len(answer) > 1 else first
    refuse_miscounted(int(cache.get_seq_length()), len(sample.context) + len(sample.question) + len(answer) - 1)
    log_probs = torch.log_softmax(logits.float().double().cpu(), dim=1)
    picked = log_probs.gather(1, answer[:, None])
    return {"exact": float((log_probs.argmax(dim=1) == answer).all()), "nats": -float(picked.mean())}
