"""A stretch of shuffled tokens comes again at the end, and its second half is asked for: needs no language at all."""

from __future__ import annotations

import random

from kvplus_eval.tasks.base import TASKS, Haystack, Sample, context_tokens

GIVEN_TOKENS, ASKED_TOKENS = 16, 8


@TASKS.register("copy")
def copy(haystack: Haystack, length: int, depth: float, generator: random.Random) -> Sample:
    """Hides shuffled tokens of the text, gives their first half again and asks for the second.

    Args:
        haystack: What samples are made of.
        length: Tokens of context and question.
        depth: Where the stretch lies.
        generator: Draws tokens and hay.

    Returns:
        The sample. Where the vocabulary allows no token comes twice in the stretch, so that each names its place.
    """
    known = sorted(set(haystack.token_ids))
    wanted = GIVEN_TOKENS + ASKED_TOKENS
    draw = generator.sample(known, wanted) if len(known) >= wanted else generator.choices(known, k=wanted)
    context = haystack.bury(draw, depth, context_tokens(length, draw[:GIVEN_TOKENS]), generator.randrange(10**6))
    return Sample(context, draw[:GIVEN_TOKENS], draw[GIVEN_TOKENS:])
