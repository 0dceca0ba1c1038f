"""One sentence with a number, hidden in the evaluated text."""

from __future__ import annotations

import random

from kvplus_eval.tasks.base import TASKS, Haystack, Sample, context_tokens

CITIES = ("Lisbon", "Oslo", "Vienna", "Madrid", "Dublin", "Prague", "Athens", "Warsaw", "Cairo", "Lima")
DIGITS = 5


def secret(generator: random.Random) -> str:
    """Returns a number of five digits, all different, so that none can be had by repeating another."""
    return "".join(generator.sample("123456789", DIGITS))


@TASKS.register("needle")
def needle(haystack: Haystack, length: int, depth: float, generator: random.Random) -> Sample:
    """Hides one number and asks for it; arguments as in `make_samples`."""
    city, number = generator.choice(CITIES), secret(generator)
    fact = haystack.encode(f"\nThe secret number of {city} is {number}.\n")
    question = haystack.encode(f"\nThe secret number of {city} is")
    context = haystack.bury(fact, depth, context_tokens(length, question), generator.randrange(10**6))
    return Sample(context, question, haystack.encode(f" {number}"))
