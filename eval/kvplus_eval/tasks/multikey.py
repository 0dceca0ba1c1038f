"""Four sentences alike but for city and number, spread over the text; one of them is asked for."""

from __future__ import annotations

import random

from kvplus_eval.tasks.base import TASKS, Haystack, Sample, context_tokens
from kvplus_eval.tasks.needle import CITIES, secret

KEYS = 4


@TASKS.register("multikey")
def multikey(haystack: Haystack, length: int, depth: float, generator: random.Random) -> Sample:
    """Hides four numbers under four keys and asks for one of them; arguments as in `make_samples`."""
    numbers = {city: secret(generator) for city in generator.sample(CITIES, KEYS)}
    wanted, *others = numbers
    facts = {
        city: haystack.encode(f"\nThe secret number of {city} is {number}.\n") for city, number in numbers.items()
    }
    question = haystack.encode(f"\nThe secret number of {wanted} is")
    added = sum(len(facts[city]) for city in others)
    context = haystack.bury(facts[wanted], depth, context_tokens(length, question) - added, generator.randrange(10**6))
    # The others go to places that don't cut the wanted fact in two: before it or behind it
    begin = len(haystack.prefix) + round(depth * (len(context) - len(haystack.prefix) - len(facts[wanted])))
    free = [*range(len(haystack.prefix), begin + 1), *range(begin + len(facts[wanted]), len(context) + 1)]
    for place, city in sorted(((generator.choice(free), city) for city in others), reverse=True):
        context[place:place] = facts[city]
    return Sample(context, question, haystack.encode(f" {numbers[wanted]}"))
