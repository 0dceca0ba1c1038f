"""Every way to use a cache, each a function that runs one case and compares it with what must come out.

`@mode(name, unless=...)` registers one. `unless` returns the reason why a case doesn't apply, in words for a user, or
`None`; the suite then shows that transformers' own cache is no better there.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import zoo
from case import LEARNABLE, NEW, PROMPT, Case, additive, attention_layers, copied, fingerprint
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
    if case.architecture.recurrent:
        return "a recurrent state holds all tokens at once and can't give the last ones back, whichever cache"
    return None


def maskless(case: Case) -> str | None:
    """Tells models of which a part mixes tokens that a mask keeps apart."""
    if case.architecture.recurrent:
        return "its recurrence takes in every token that follows a cache, whatever the mask, whichever cache"
    convolves = case.architecture.convolves
    return "its convolutions mix neighbours, whatever the mask, whichever cache" if convolves else None


def unguided(case: Case) -> str | None:
    if case.has_encoder:
        return "transformers' guidance runs its second half without an encoder's input, whichever cache"
    if case.architecture.kind == "vision":
        return "transformers' guidance passes no positions, and the model counts those of all tokens, whichever cache"
    return None


def restarting(case: Case) -> str | None:
    restarts = case.architecture.restarts
    return "its recurrence starts anew where several tokens follow a cache, whichever cache" if restarts else None


def windowed_alone(case: Case) -> str | None:
    if case.strategy.window:
        return "sinks and a window give each query a mask; another one for several at once is refused with an error"
    return None


def text_alone(case: Case) -> Case:
    """Returns the case without images."""
    return replace(case, images=False)


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


@mode("assisted (draft model)", recurrent)
def assisted(case: Case) -> None:
    check_assisted(case, case.tokens(), assistant_model=draft_model(case.architecture.name))


@mode("prompt lookup", recurrent)
def prompt_lookup(case: Case) -> None:
    case = text_alone(case)
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


@mode("chunked prefill", restarting)
def chunked_prefill(case: Case) -> None:
    """By `prefill_chunk_size`; a decoder with an encoder, which that option isn't for, by several calls."""
    case = text_alone(case)
    for chunk in (48, 150):
        tokens, cache = case.tokens(2), case.cache()
        if case.has_encoder:
            with torch.no_grad():
                for part in tokens[:, :-1].split(chunk, dim=1):
                    case.forward(part, cache)
            output = case.go_on(tokens, cache)
        else:
            output = case.generate(tokens, cache, prefill_chunk_size=chunk)
        case.check_steps(output, PROMPT)
        case.check_packed(cache)


@mode("classifier-free guidance", unguided)
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


@mode("padded batch")
def padded_batch(case: Case) -> None:
    """Rows padded on the left, and of an encoder's input on the right; each says what it says alone."""
    lengths, encoder_lengths = [PROMPT, 120, 65], None
    if case.architecture.kind == "seq2seq":
        encoder_lengths = [zoo.ENCODER_TOKENS, 70, 110]
    if case.has_encoder and case.architecture.name == "BART":  # counts positions from the first column
        lengths = [PROMPT] * 3
    tokens, mask = torch.zeros(3, PROMPT, dtype=torch.long), torch.zeros(3, PROMPT, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, PROMPT - length :], mask[row, PROMPT - length :] = case.tokens(3, length)[row], 1
    chunked = not (case.architecture.restarts or case.has_encoder or case.has_images)
    for options in ({}, {"prefill_chunk_size": 60}) if chunked else ({},):
        cache = case.cache()
        output = case.generate(tokens, cache, mask, encoder_lengths, **options)
        case.check_steps(output, PROMPT, lengths, encoder_lengths)
        case.check_packed(cache)


@mode("right continuation, 2D mask", maskless)
def right_continuation(case: Case) -> None:
    """Two rows share a prompt; their continuations differ in length and are padded on the right.

    A row says what it says alone; where padding between tokens shifts a window or a column that is the position, what
    the model says without a cache to the same padded row.
    """
    case = text_alone(case)
    parts = [case.tokens(2, length, seed) for length, seed in ((150, 0), (40, 2), (20, 4))]
    cache, tokens, mask = case.cache(), torch.cat(parts, dim=1), torch.ones(2, 210, dtype=torch.long)
    mask[1, 170:190] = 0
    positions = torch.stack([torch.arange(210), torch.cat([torch.arange(190), torch.arange(170, 190)])])
    for begin, end in ((0, 150), (150, 190), (190, 210)):
        options = {case.mask_name: mask[:, :end], **case.positions(positions[:, begin:end])}
        logits = case.forward(tokens[:, begin:end], cache, **options)
    case.check_packed(cache)
    case.check(logits[0], tokens[0], 190)
    if case.architecture.window or case.strategy.window or case.architecture.counts_columns:
        case.check(logits[1], tokens[1], 190, **{case.mask_name: mask[1:]}, **case.positions(positions[1:]))
    else:
        case.check(logits[1], tokens[1, mask[1].bool()], 170)


@mode("custom 4D mask", maskless, windowed_alone)
def custom_mask(case: Case) -> None:
    """Two branches behind one prompt in one call; neither may see the other.

    A branch says what it says alone; where a column is the position, what the model says without a cache under the
    same mask.
    """
    case = text_alone(case)
    cache, prefix, branches = case.cache(), case.tokens(1), case.tokens(2, 12, seed=6)
    case.forward(prefix, cache)
    whole = torch.cat([prefix, branches.reshape(1, -1)], dim=1)
    seen = torch.ones(PROMPT + 24, PROMPT + 24, dtype=torch.bool).tril()
    seen[PROMPT + 12 :, PROMPT : PROMPT + 12] = False
    positions = torch.cat([torch.arange(PROMPT), torch.arange(PROMPT, PROMPT + 12).repeat(2)])
    masks = masks_by_layer_type(case, cache, seen, positions)
    options = {case.mask_name: masks, **case.positions(positions[None, PROMPT:])}
    logits = case.forward(whole[:, PROMPT:], cache, **options)[0]
    if case.architecture.counts_columns:
        case.check(logits, whole[0], PROMPT, **{case.mask_name: additive(seen)})
        return
    for branch, part in zip(branches, logits.split(12), strict=True):
        case.check(part, torch.cat([prefix[0], branch]), PROMPT)


def masks_by_layer_type(case: Case, cache, seen: torch.Tensor, positions: torch.Tensor):
    """Returns the mask of the new tokens, one for each type of layer where layers hold different tokens."""
    if not case.architecture.window:
        return additive(seen[PROMPT:])
    config, masks = case.model.config, {}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    for kind in dict.fromkeys(kinds):
        visible = seen
        if kind == "chunked_attention":
            visible = seen & (positions[:, None] // zoo.WINDOW == positions // zoo.WINDOW)
        elif kind == "sliding_attention":
            visible = seen & (positions[:, None] - positions < config.sliding_window)
        _, first = cache.get_mask_sizes(len(seen) - PROMPT, kinds.index(kind))
        masks[kind] = additive(visible[PROMPT:, first:])
    return masks if case.architecture.window == "some" else masks["sliding_attention"]


@mode("inputs_embeds")
def embeddings(case: Case) -> None:
    """The prompt as vectors, to `generate` where it takes them, else to the model itself."""
    case = text_alone(case)
    tokens, cache = case.tokens(2), case.cache()
    if case.has_encoder or case.architecture.name in ("Gemma 3n", "Falcon-H1"):
        with torch.no_grad():
            case.forward(tokens, cache, **embedded_alone(case, tokens))
        tokens = torch.cat([tokens, case_suffix(case, 1, 31, batch=2)], dim=1)
        output = case.go_on(tokens, cache)
    else:
        options = {case.tokens_name: None, "inputs_embeds": case.model.get_input_embeddings()(tokens)}
        output = case.generate(tokens, cache, **options)
        output.sequences = torch.cat([tokens, output.sequences], dim=1)
    case.check_steps(output, tokens.shape[1])
    case.check_packed(cache)


def embedded_alone(case: Case, tokens: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Returns the arguments of `forward` that give it vectors instead of tokens."""
    if case.has_encoder:
        return {"decoder_input_ids": None, "decoder_inputs_embeds": case.model.get_decoder().embed_tokens(tokens)}
    given = {"input_ids": None, "inputs_embeds": case.model.get_input_embeddings()(tokens)}
    if case.architecture.name == "Gemma 3n":
        given["per_layer_inputs"] = case.model.model.get_per_layer_inputs(tokens)
    return given


# Using a cache again


@mode("prefix reuse by deepcopy")
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


@mode("multi-turn chat")
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


@mode("forward with gradients")
def gradients(case: Case) -> None:
    """A prompt and what follows, each with its gradients; what is stored of them has none.

    A model that takes one token at a time behind a prompt overwrites its state in place then, gradients or not: it has
    them for the prompt alone.
    """
    tokens, cache = case.tokens(length=PROMPT + 20), case.cache()
    parameters = [weight for weight in case.model.parameters() if weight.requires_grad]
    for part in tokens.split([PROMPT, 20], dim=1)[: 1 if case.architecture.restarts else 2]:
        with torch.enable_grad():
            logits = case.forward(part, cache)
            gradients = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
        assert sum(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients) > len(parameters) // 2
    assert not any(tensor.requires_grad for layer in attention_layers(cache) for tensor in layer.dense())
    assert not any(tensor.requires_grad for tensor in find_tensors(cache))
    copied(cache)
    with torch.no_grad():
        logits = case.extend(tokens[:, PROMPT:], cache) if case.architecture.restarts else logits
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


@mode("row operations")
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
        logits = torch.cat(
            [
                case.forward(part, cache, **known_positions(case, cache, part))
                for part in rest.split(1 if case.architecture.restarts else 10, dim=1)
            ],
            dim=1,
        )
    for row, source in enumerate(rows):
        case.check(logits[row], torch.cat([tokens[source], rest[row]]), PROMPT)


def known_positions(case: Case, cache, part: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the positions of tokens behind an image, whose offset the model remembers for the rows that it saw."""
    if not case.has_images:
        return {}
    first = cache.get_seq_length() + int(case.model.model.rope_deltas[0])
    return {"position_ids": (first + torch.arange(part.shape[1])).expand(3, *part.shape)}


@mode("pickle, reset, move")
def pickled(case: Case) -> None:
    """A cache survives pickling in use, and after `reset` takes another batch size."""
    tokens, cache = case.tokens(length=PROMPT + 20), case.cache()
    with torch.no_grad():
        case.forward(tokens[:, :PROMPT], cache)
        again = pickle.loads(pickle.dumps(cache)).to("cpu")
        assert fingerprint(again) == fingerprint(cache)
        case.check(case.extend(tokens[:, PROMPT:], again)[0], tokens[0], PROMPT)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    output = case.generate(case.tokens(2, 150, seed=4), cache)
    case.check_steps(output, 150)
