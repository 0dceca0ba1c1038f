"""Every way to use a cache, each a function that runs one case and compares it with what must come out.

`@mode(name, unless=...)` registers one. `unless` returns the reason why a case doesn't apply, in words for a user, or
`None`; the suite then shows that transformers' own cache is no better there.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import zoo
from case import LEARNABLE, NEW, PROMPT, Case, attention_layers, copied, fingerprint
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_kvplus.compat import cache_keyword
from hf_kvplus.memory import find_tensors


@dataclass(frozen=True)
class Mode:
    """One way to use a cache.

    Args:
        name: Name in the table.
        run: Runs a case; fails where the oracle does.
        unless: Returns why a case doesn't apply, or `None`.
    """

    name: str
    run: Callable[[Case], None]
    unless: Callable[[Case], str | None]


MODES: dict[str, Mode] = {}


def mode(name: str, *unless: Callable[[Case], str | None]) -> Callable:
    """Registers a function as a mode."""

    def decorate(function: Callable[[Case], None]) -> Callable[[Case], None]:
        MODES[name] = Mode(name, function, lambda case: next(filter(None, (rule(case) for rule in unless)), None))
        return function

    return decorate


def recurrent(case: Case) -> str | None:
    return "a recurrent state can't be rolled back" if case.architecture.recurrent else None


def encoder(case: Case) -> str | None:
    return "an encoder-decoder model takes no such input" if case.has_encoder else None


def vision(case: Case) -> str | None:
    return "needs text without images" if case.architecture.kind == "vision" else None


def token_bound(case: Case) -> str | None:
    if case.architecture.name in ("Gemma 3n", "Gemma 4"):
        return "the model looks up token ids in every layer, so it needs them"
    return "the model's `generate` takes token ids only" if case.architecture.name == "Falcon-H1" else None


def restarting(case: Case) -> str | None:
    restarts = case.architecture.restarts
    return "its recurrence starts anew where several tokens follow a cache, whichever cache" if restarts else None


def convolving(case: Case) -> str | None:
    return "its convolutions mix neighbours, whatever the mask" if case.architecture.convolves else None


def counting_window(case: Case) -> str | None:
    windowed = case.architecture.window or case.strategy.window
    return "its window counts padding between tokens, whichever cache" if windowed else None


def remembering_rows(case: Case) -> str | None:
    return "the model itself remembers an offset for each row" if case.architecture.kind == "vision" else None


def windowed(case: Case) -> str | None:
    if case.strategy.window:
        return "a mask with a column for every token can't fit a cache that has let tokens go"
    return "one mask can't fit layers that hold different tokens" if case.architecture.window else None


def counted_positions(case: Case) -> str | None:
    """Tells models that number tokens by the length of the cache, and hence can't be given positions."""
    name = case.architecture.name
    if case.has_encoder or name == "OPT":
        return "the model takes no positions"
    return None


# Decoding


@mode("greedy")
def greedy(case: Case) -> None:
    tokens, cache = case.tokens(), case.cache()
    output = case.generate(tokens, cache)
    case.check_steps(output, PROMPT)
    case.check_packed(cache, 2 if case.architecture.window == "all" else 3)
    case.check_against_dynamic(output, tokens)
    assert cache.get_seq_length() == output.sequences.shape[1] - 1


def seeded(case: Case, tokens: torch.Tensor, cache, **options):
    torch.manual_seed(11)
    return case.generate(tokens, cache, **options)


def check_seeded_against_dynamic(case: Case, output, tokens: torch.Tensor, **options) -> None:
    if case.strategy.exact:
        expected = seeded(case, tokens, case.cache("dynamic"), **options)
        assert torch.equal(output.sequences, expected.sequences)


@mode("sampling")
def sampling(case: Case) -> None:
    tokens, options = case.tokens(2), {"do_sample": True, "top_k": 20, "temperature": 0.8}
    output = seeded(case, tokens, case.cache(), **options)
    case.check_steps(output, PROMPT)
    check_seeded_against_dynamic(case, output, tokens, **options)


@mode("num_return_sequences")
def several_continuations(case: Case) -> None:
    tokens, options = case.tokens(2, 150), {"do_sample": True, "num_return_sequences": 3}
    cache = case.cache()
    output = seeded(case, tokens, cache, **options)
    assert len({tuple(row.tolist()) for row in output.sequences}) > 2
    case.check_steps(output, 150)
    check_seeded_against_dynamic(case, output, tokens, **options)


BEAMS = {"num_beams": 3, "output_logits": False, "output_scores": True, "length_penalty": 1.0}


@mode("beam search")
def beams(case: Case) -> None:
    tokens, cache = case.tokens(2), case.cache()
    options = {**BEAMS, "num_return_sequences": 3}
    output = case.generate(tokens, cache, **options)
    case.check_scores(output, PROMPT)
    case.check_packed(cache)
    case.check_against_dynamic(output, tokens, **options)


@mode("beam sampling")
def beam_sampling(case: Case) -> None:
    tokens, options = case.tokens(1), {**BEAMS, "do_sample": True, "top_k": 0}
    output = seeded(case, tokens, case.cache(), **options)
    case.check_scores(output, PROMPT)
    check_seeded_against_dynamic(case, output, tokens, **options)


@functools.cache
def draft_model(name: str):
    """Returns the model with some noise in its weights, so that it guesses right now and then."""
    draft = copied(zoo.model(name))
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(1 + 0.03 * torch.randn_like(weight))
    return draft


def check_assisted(case: Case, tokens: torch.Tensor, **options) -> None:
    cache, removed = case.cache(), []
    crop = cache.crop

    @functools.wraps(crop)
    def counted(count: int) -> None:
        removed.append(-count)
        crop(count)

    cache.crop = counted
    output = case.generate(tokens, cache, **options)
    del cache.crop
    case.check_steps(output, tokens.shape[1])
    assert sum(removed) > 0, "nothing was rolled back"
    assert len(removed) < NEW, "no guess was accepted"
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    case.check_packed(cache)
    if case.strategy.exact:
        plain = case.generate(tokens, case.cache())
        assert torch.equal(output.sequences, plain.sequences)


@mode("assisted (draft model)", recurrent, vision)
def assisted(case: Case) -> None:
    check_assisted(case, case.tokens(), assistant_model=draft_model(case.architecture.name))


@mode("prompt lookup", recurrent, vision)
def prompt_lookup(case: Case) -> None:
    # What the model says is said in the prompt, so that looking it up succeeds.
    said = case.generate(case.tokens(length=PROMPT - 10), case.cache("dynamic"), max_new_tokens=10).sequences
    again = torch.cat([said[:, :1], said[:, 12:], said[:, 1:12]], dim=1)
    cycle = torch.cat([again[:, :120], again[:, -30:], again[:, 10:50]], dim=1)
    check_lookup(case, cycle)


def check_lookup(case: Case, tokens: torch.Tensor) -> None:
    cache = case.cache()
    output = case.generate(tokens, cache, prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
    case.check_steps(output, tokens.shape[1])
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    if case.strategy.exact:
        assert torch.equal(output.sequences, case.generate(tokens, case.cache()).sequences)


@mode("chunked prefill", encoder, vision, restarting)
def chunked_prefill(case: Case) -> None:
    for chunk in (48, 150):
        tokens, cache = case.tokens(2), case.cache()
        output = case.generate(tokens, cache, prefill_chunk_size=chunk)
        case.check_steps(output, PROMPT)
        case.check_packed(cache)


@mode("classifier-free guidance", encoder, vision)
def guidance(case: Case) -> None:
    tokens, options = case.tokens(), {"guidance_scale": 1.5, "negative_prompt_ids": case.tokens(length=40, seed=3)}
    output = case.generate(tokens, case.cache(), **options)
    case.check_steps(output, PROMPT)
    case.check_against_dynamic(output, tokens, **options)


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@mode("streaming")
def streaming(case: Case) -> None:
    streamer = Collector()
    output = case.generate(case.tokens(), case.cache(), streamer=streamer)
    case.check_steps(output, PROMPT)
    assert streamer.ended
    assert streamer.tokens == output.sequences[0].tolist()


@mode("return_dict_in_generate")
def returned_cache(case: Case) -> None:
    cache = case.cache()
    output = case.generate(case.tokens(), cache, output_scores=True)
    assert output[cache_keyword(case.model)] is cache
    assert len(output.scores) == len(output.logits) == NEW
    case.check_steps(output, PROMPT)


# Inputs


@mode("left padding", encoder, vision)
def left_padding(case: Case) -> None:
    lengths = [PROMPT, 120, 65]
    tokens, mask = case.tokens(3), torch.ones(3, PROMPT, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, : PROMPT - length], mask[row, : PROMPT - length] = 0, 0
    for options in ({},) if case.architecture.restarts else ({}, {"prefill_chunk_size": 60}):
        cache = case.cache()
        output = case.generate(tokens, cache, mask, **options)
        case.check_steps(output, PROMPT, lengths)
        case.check_packed(cache)


@mode("right continuation, 2D mask", encoder, vision, recurrent, convolving, counting_window, counted_positions)
def right_continuation(case: Case) -> None:
    """Two rows share a prompt; their continuations differ in length and are padded on the right."""
    cache, prefix, rest = case.cache(), case.tokens(2, 150), case.tokens(2, 40, seed=2)
    mask = torch.ones(2, 190, dtype=torch.long)
    mask[1, 170:] = 0
    case.forward(prefix, cache)
    case.forward(rest, cache, attention_mask=mask, position_ids=torch.arange(150, 190).repeat(2, 1))
    last = case.tokens(2, 20, seed=4)
    positions = torch.stack([torch.arange(190, 210), torch.arange(170, 190)])
    mask = torch.cat([mask, torch.ones_like(last)], dim=1)
    logits = case.forward(last, cache, attention_mask=mask, position_ids=positions)
    case.check_packed(cache)
    for row, stop in enumerate((190, 170)):
        whole = torch.cat([prefix[row], rest[row], last[row]])[mask[row].bool()]
        case.check(logits[row], whole, stop)


@mode("custom 4D mask", encoder, vision, recurrent, convolving, windowed, counted_positions)
def custom_mask(case: Case) -> None:
    """Two branches behind one prompt in one call; neither may see the other."""
    cache, prefix, branches = case.cache(), case.tokens(1), case.tokens(2, 12, seed=6)
    case.forward(prefix, cache)
    mask = torch.zeros(24, PROMPT + 24, dtype=torch.bool)
    mask[:, :PROMPT] = True
    for start in (0, 12):
        mask[start : start + 12, PROMPT + start : PROMPT + start + 12] = torch.ones(12, 12, dtype=torch.bool).tril()
    positions = torch.arange(PROMPT, PROMPT + 12).repeat(2)[None]
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    logits = case.forward(branches.reshape(1, -1), cache, attention_mask=additive, position_ids=positions)
    for branch, part in zip(branches, logits[0].split(12), strict=True):
        case.check(part, torch.cat([prefix[0], branch]), PROMPT)


@mode("inputs_embeds", encoder, vision, token_bound)
def embeddings(case: Case) -> None:
    tokens, cache = case.tokens(2), case.cache()
    embedded = case.model.get_input_embeddings()(tokens)
    output = case.model.generate(
        inputs_embeds=embedded,
        attention_mask=torch.ones_like(tokens),
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    output.sequences = torch.cat([tokens, output.sequences], dim=1)
    case.check_steps(output, PROMPT)
    case.check_packed(cache)


# Using a cache again


@mode("prefix reuse by deepcopy", restarting)
def prefix_reuse(case: Case) -> None:
    prefix, original = case.tokens(), case.cache()
    with torch.no_grad():
        case.forward(prefix, original)
    before = fingerprint(original)
    for length, seed in ((1, 21), (30, 22), (70, 23)):
        tokens = torch.cat([prefix, case_suffix(case, length, seed)], dim=1)
        output = case.go_on(tokens, copied(original))
        case.check_steps(output, tokens.shape[1])
    assert fingerprint(original) == before


def case_suffix(case: Case, length: int, seed: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, LEARNABLE, (batch, length), generator=generator)


@mode("multi-turn chat", restarting)
def multi_turn(case: Case) -> None:
    tokens, cache = case.tokens(length=100), case.cache()
    for turn in range(3):
        output = case.go_on(tokens, cache, max_new_tokens=40)
        case.check_steps(output, tokens.shape[1])
        tokens = torch.cat([output.sequences, case_suffix(case, 9, turn)], dim=1)
    case.check_packed(cache, 1 if case.architecture.window == "all" else 3)


class Interrupted(RuntimeError):
    pass


class Interruption(StoppingCriteria):
    def __init__(self, after: int) -> None:
        self.after, self.sequences = after, None

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        if input_ids.shape[1] >= self.after:
            self.sequences = input_ids.clone()
            raise Interrupted
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@mode("interrupted call")
def interrupted(case: Case) -> None:
    """The caller goes on from the cache with the tokens that it had seen."""
    tokens, cache, stop = case.tokens(), case.cache(), Interruption(PROMPT + 20)
    with pytest.raises(Interrupted):
        case.generate(tokens, cache, stopping_criteria=StoppingCriteriaList([stop]))
    output = case.go_on(stop.sequences, cache)
    case.check_steps(output, PROMPT + 20)
    if case.strategy.exact:
        assert torch.equal(output.sequences, case.generate(tokens, case.cache(), max_new_tokens=20 + NEW).sequences)


@mode("forward with gradients", restarting)
def gradients(case: Case) -> None:
    tokens, cache = case.tokens(length=PROMPT + 20), case.cache()
    parameters = [weight for weight in case.model.parameters() if weight.requires_grad]
    for part in tokens.split([PROMPT, 20], dim=1):
        with torch.enable_grad():
            logits = case.forward(part, cache)
            gradients = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
        assert sum(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients) > len(parameters) // 2
    assert not any(tensor.requires_grad for layer in attention_layers(cache) for tensor in layer.dense())
    assert not any(tensor.requires_grad for tensor in find_tensors(cache))
    copied(cache)
    case.check(logits.detach()[0], tokens[0], PROMPT)


@mode("crop, then continue", recurrent)
def crop_and_continue(case: Case) -> None:
    tokens, wrong = case.tokens(length=240), case_suffix(case, 90, 8)
    for kept in (PROMPT, 150, 128, 70):
        cache = case.cache()
        cache.activate_past_recording()
        with torch.no_grad():
            case.forward(tokens[:, :kept], cache)
            case.forward(wrong, cache)
            cache.crop(-90)
            assert cache.get_seq_length() == kept
            cache.crop(0)
            logits = case.forward(tokens[:, kept:], cache)
        case.check(logits[0], tokens[0], kept)


@mode("row operations", restarting, remembering_rows)
def row_operations(case: Case) -> None:
    """Selects, repeats and reorders rows between two forward passes."""
    tokens, cache = case.tokens(2), case.cache()
    with torch.no_grad():
        case.forward(tokens, cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 2, 1]))
        cache.batch_select_indices(torch.tensor([0, 1, 2]))
        rows = [1, 0, 1]
        rest = case_suffix(case, 30, 9, batch=3)
        logits = torch.cat([case.forward(part, cache) for part in rest.split(10, dim=1)], dim=1)
    for row, source in enumerate(rows):
        case.check(logits[row], torch.cat([tokens[source], rest[row]]), PROMPT)


@mode("pickle, reset, move", restarting)
def pickled(case: Case) -> None:
    """A cache survives pickling in use, and after `reset` takes another batch size."""
    tokens, cache = case.tokens(length=PROMPT + 20), case.cache()
    with torch.no_grad():
        case.forward(tokens[:, :PROMPT], cache)
        again = pickle.loads(pickle.dumps(cache)).to("cpu")
        assert fingerprint(again) == fingerprint(cache)
        case.check(case.forward(tokens[:, PROMPT:], again)[0], tokens[0], PROMPT)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    output = case.generate(case.tokens(2, 150, seed=4), cache)
    case.check_steps(output, 150)
