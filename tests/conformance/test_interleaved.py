"""Many conversations at once over copies of one prefilled prompt: none hears another."""

from __future__ import annotations

import pytest
import torch
import zoo
from case import PROMPT, Case, Strategy, attention_layers, copied, fingerprint

CONVERSATIONS = 100


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
@pytest.mark.parametrize("strategy", ["fp", "int4,recent=0"])
def test_a_hundred_conversations_take_turns(name, strategy):
    """Conversation i gets bursts of its own tokens, in a random order among the others; alone, it says the same."""
    case = Case(zoo.ZOO[name], Strategy(strategy, 1))
    with torch.no_grad():
        original = case.cache()
        case.forward(case.tokens(), original)
        before = fingerprint(original)
        said = case.tokens(CONVERSATIONS, 75, seed=3)
        bursts = [said[row : row + 1].split([1, 9, 40, 1, 24], dim=1) for row in range(CONVERSATIONS)]
        caches = [copied(original) for _ in range(CONVERSATIONS)]
        turns = [row for row in range(CONVERSATIONS) for _ in range(5)]
        order = torch.randperm(len(turns), generator=torch.Generator().manual_seed(1)).tolist()
        turn, heard = [0] * CONVERSATIONS, [[] for _ in range(CONVERSATIONS)]
        for row in (turns[index] for index in order):
            heard[row].append(case.forward(bursts[row][turn[row]], caches[row]))
            turn[row] += 1
        assert fingerprint(original) == before
        if strategy != "fp":
            assert min(layer.packed_blocks for layer in attention_layers(caches[0])) >= 2
        assert {cache.get_seq_length() for cache in caches} == {PROMPT + 75}
        for row in range(CONVERSATIONS):
            alone = copied(original)
            expected = [case.forward(burst, alone) for burst in bursts[row]]
            assert all(map(torch.equal, heard[row], expected))
            assert fingerprint(alone) == fingerprint(caches[row])
