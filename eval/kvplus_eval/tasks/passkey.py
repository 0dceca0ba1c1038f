"""A key among sentences that say nothing, over and over: the easiest task, where repetition tempts most."""

from __future__ import annotations

import random

from kvplus_eval.tasks.base import TASKS, Haystack, Sample, context_tokens
from kvplus_eval.tasks.needle import secret

NOTHING = "\nThe road goes on. The rain comes and goes. A bird sits on the wall. Nobody is in a hurry."


@TASKS.register("passkey")
def passkey(haystack: Haystack, length: int, depth: float, generator: random.Random) -> Sample:
    """Hides a key in repeated sentences and asks for it; arguments as in `make_samples`."""
    key = secret(generator)
    fact = haystack.encode(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
    question = haystack.encode("\nWhat is the pass key? The pass key is")
    nothing = haystack.encode(NOTHING)
    dull = Haystack(haystack.tokenizer, nothing * (1 + length // len(nothing)), haystack.prefix)
    return Sample(dull.bury(fact, depth, context_tokens(length, question)), question, haystack.encode(f" {key}"))
