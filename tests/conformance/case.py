"""One cell of the suite: a model, a strategy, the inputs, and what the result is compared with.

The reference is the model itself without any cache: a forward pass over the finished sequence. Every step's logits
must be those of that pass, up to what the strategy's codes lose. So a wrong row, position, mask or order shows in any
mode, without assuming that another cache is right. A strategy that is exact must also equal `DynamicCache` token for
token.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
import zoo
from mixed_plans import plan_file
from rotated_heads import projection_file
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_kvplus import build_cache
from hf_kvplus.compat import cache_keyword
from hf_kvplus.layer import KVLayer
from hf_kvplus.memory import find_tensors

torch.set_num_threads(1)  # the models are tiny, and the suite runs in as many processes as there are cores

PROMPT = 190  # with 16 recent tokens kept, two blocks of 64 are packed at once, a third 18 steps later
NEW = 24
LEARNABLE = 118  # tokens from here up have a meaning to some model


@dataclass(frozen=True)
class Strategy:
    """A strategy string, and how exact it is.

    Args:
        text: What `build_cache` gets; ROTATED stands for the model's file of `rotated_heads`, MIXED for that of
            `mixed_plans`.
        loss: Largest root mean square of the error of a sequence's logits, in parts of their standard deviation; the
            logits of an unrelated context are off by 1 and more.
        architectures: Those that it runs with, all of them by default.
        window: Tokens and sinks that are attended to, where a strategy limits them; the reference is then the model
            with a mask that does the same.
    """

    text: str
    loss: float
    architectures: tuple[str, ...] = tuple(zoo.ZOO)
    window: tuple[int, int] | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing is lost, so that `DynamicCache` says the same."""
        return self.loss < 1e-4 and self.window is None

    @property
    def packs(self) -> bool:
        """Whether blocks are packed."""
        return self.loss >= 1e-4


@dataclass(frozen=True)
class Case:
    """An architecture with a strategy.

    Args:
        architecture: The model.
        strategy: The cache.
        images: Whether a vision model's tokens hold an image.
    """

    architecture: zoo.Architecture
    strategy: Strategy
    images: bool = True

    @cached_property
    def model(self) -> PreTrainedModel:
        """The random model, shared by all cases of this process."""
        return zoo.model(self.architecture.name)

    @property
    def has_encoder(self) -> bool:
        """Whether the tokens are a decoder's, beside an encoder's input."""
        return self.architecture.kind in ("seq2seq", "speech")

    @property
    def has_images(self) -> bool:
        """Whether some tokens stand for an image."""
        return self.architecture.kind == "vision" and self.images

    @property
    def tokens_name(self) -> str:
        """The argument that takes the tokens."""
        return "decoder_input_ids" if self.has_encoder else "input_ids"

    @property
    def mask_name(self) -> str:
        """The argument that takes their mask."""
        return "decoder_attention_mask" if self.has_encoder else "attention_mask"

    def positions(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the argument that takes the tokens' positions, nothing for a model that counts columns instead."""
        if self.architecture.counts_columns:
            return {}
        return {"decoder_position_ids" if self.has_encoder else "position_ids": positions}

    def cache(self, strategy: str | None = None) -> Cache:
        """Returns a new cache."""
        text = strategy or self.strategy.text
        if "ROTATED" in text:
            text = text.replace("ROTATED", str(projection_file(self.architecture.name)))
        if "MIXED" in text:
            text = text.replace("MIXED", str(plan_file(self.architecture.name)))
        return build_cache(text, self.model.config)

    # Inputs

    def tokens(self, batch: int = 1, length: int = PROMPT, seed: int = 0) -> torch.Tensor:
        """Returns random tokens; in a vision model some of them stand for an image."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, LEARNABLE, (batch, length), generator=generator)
        if self.has_encoder:
            ids[:, 0] = 1  # the token that decoding starts with, or else `generate` would put it in front
        if self.has_images and length > 40:
            place = zoo.VISION_PLACES
            image = [place["vision_start_token_id"], *[place["image_token_id"]] * 16, place["vision_end_token_id"]]
            ids[:, 8 : 8 + len(image)] = torch.tensor(image)
        return ids

    def context(self, batch: int = 1, lengths: list[int] | None = None) -> dict[str, torch.Tensor]:
        """Returns what the model is given beside tokens: an encoder's input or an image.

        Args:
            batch: Number of rows.
            lengths: Tokens of the encoder's input in each row, which is padded on the right; all by default.
        """
        generator = torch.Generator().manual_seed(7)
        if self.architecture.kind == "seq2seq":
            ids = torch.randint(2, LEARNABLE, (1, zoo.ENCODER_TOKENS), generator=generator).repeat(batch, 1)
            mask = torch.ones_like(ids)
            for row, length in enumerate(lengths or ()):
                ids[row, length:], mask[row, length:] = 0, 0
            return {"input_ids": ids, "attention_mask": mask}
        if self.architecture.kind == "speech":
            return {
                "input_features": torch.randn(1, 8, 2 * zoo.ENCODER_TOKENS, generator=generator).repeat(batch, 1, 1)
            }
        if self.has_images:
            patches = torch.randn(64, 3 * 2 * 4 * 4, generator=generator).repeat(batch, 1)
            return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 8, 8]] * batch)}
        return {}

    def inputs(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, encoder_lengths: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns the arguments of `generate` for `tokens`."""
        arguments = {**self.context(tokens.shape[0], encoder_lengths), self.tokens_name: tokens}
        if mask is not None or not self.has_encoder:
            arguments[self.mask_name] = torch.ones_like(tokens) if mask is None else mask
        return arguments | self._token_types(tokens)

    def _token_types(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.has_images:
            return {}
        return {"mm_token_type_ids": (tokens == zoo.VISION_PLACES["image_token_id"]).int()}

    # Running

    def generate(
        self,
        tokens: torch.Tensor,
        cache: Cache,
        mask: torch.Tensor | None = None,
        encoder_lengths: list[int] | None = None,
        **options: Any,
    ) -> Any:
        """Generates with logits, scores and the cache in the result."""
        plain = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
        if self.architecture.kind == "vision":
            plain["suppress_tokens"] = list(zoo.VISION_PLACES.values())
        inputs = self.inputs(tokens, mask, encoder_lengths)
        if self.has_images and cache.get_seq_length() > 0:
            del inputs["pixel_values"]  # the image is in the cache already
        options = {**plain, "output_logits": True, **inputs, **options}
        # Whisper's own `generate` wraps this one and takes other options; it has a test of its own.
        return GenerationMixin.generate(self.model, past_key_values=cache, **options)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None, **options: Any) -> torch.Tensor:
        """Runs the model on `tokens` and returns the logits, `(batch, seq, vocabulary)`."""
        arguments: dict[str, Any] = {self.tokens_name: tokens, "use_cache": cache is not None, **options}
        if self.has_encoder:
            arguments["encoder_outputs"] = self.encode(tokens.shape[0], arguments.pop("encoder_length", None))
        elif cache is None or cache.get_seq_length() == 0:
            if self.architecture.kind == "vision":
                self.model.model.rope_deltas = None  # of another image
            arguments.update(self.context(tokens.shape[0]), **self._token_types(tokens))
        if cache is not None:
            arguments[cache_keyword(self.model)] = cache
        return self.model(**arguments).logits

    def extend(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Runs the model on tokens that follow those in the cache and returns the logits.

        One by one where the model's recurrence would start anew, else all at once.
        """
        parts = tokens.split(1 if self.architecture.restarts else tokens.shape[1], dim=1)
        return torch.cat([self.forward(part, cache) for part in parts], dim=1)

    def go_on(self, tokens: torch.Tensor, cache: Cache, **options: Any) -> Any:
        """Generates from a cache that holds the beginning of `tokens`.

        transformers' `generate` stores all tokens of a decoder with an encoder again, whatever the cache holds; for
        such a model this is a loop of forward passes.
        """
        held = cache.get_seq_length()
        if self.architecture.restarts and 0 < held < tokens.shape[1] - 1:
            with torch.no_grad():
                self.extend(tokens[:, held:-1], cache)
        if not self.has_encoder:
            return self.generate(tokens, cache, **options)
        logits = []
        with torch.no_grad():
            for _ in range(options.get("max_new_tokens", NEW)):
                logits.append(self.forward(tokens[:, cache.get_seq_length() :], cache)[:, -1])
                tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], dim=1)
        return SimpleNamespace(sequences=tokens, logits=logits)

    def encode(self, batch: int, length: int | None = None) -> BaseModelOutput:
        """Returns what the encoder makes of the context, or of its first `length` tokens alone, in every row."""
        given = {name: inputs for name, inputs in self.context().items() if name in ("input_ids", "input_features")}
        if length is not None:
            given = {name: inputs[:, :length] for name, inputs in given.items()}
        with torch.no_grad():
            states = self.model.get_encoder()(**given).last_hidden_state
        return BaseModelOutput(last_hidden_state=states.expand(batch, -1, -1))

    # Oracles

    @torch.no_grad()
    def reference(self, row: torch.Tensor, **options: Any) -> torch.Tensor:
        """Returns the logits of one row of tokens `(seq,)` as they must be, `(seq, vocabulary)`.

        Args:
            row: Tokens, without padding unless a mask in `options` tells it.
            **options: Arguments of `forward`.
        """
        if self.strategy.window:
            tokens, sinks = self.strategy.window
            query, key = torch.arange(len(row))[:, None], torch.arange(len(row))[None]
            known = options[self.mask_name].bool() if self.mask_name in options else key >= 0
            seen = {"full_attention": (key < sinks) | (query - key < tokens)}
            if self.architecture.window == "some":  # which keeps its own window
                seen["sliding_attention"] = query - key < zoo.WINDOW
            masks = {kind: additive(part & (key <= query) & known) for kind, part in seen.items()}
            mask = masks if len(masks) > 1 else masks["full_attention"]
            options = {**self.positions(key), **options, self.mask_name: mask}
        return self.forward(row[None], **options)[0]

    def check(self, logits: torch.Tensor, row: torch.Tensor, first: int, **options: Any) -> None:
        """Compares `logits` `(steps, vocabulary)` with those of `row` from its token `first` on; see `reference`."""
        expected = self.reference(row, **options)[first : first + logits.shape[0]]
        error, spread = (logits - expected).float().pow(2).mean().sqrt(), expected.float().std(-1).mean()
        loss = (error / spread).item()
        # A token that goes to another expert changes more than the error that sent it there.
        allowed = self.strategy.loss * (3 if self.architecture.experts and self.strategy.packs else 1)
        assert loss <= allowed, f"logits are off by {loss:.2g} of their spread, at most {allowed}"

    def check_steps(
        self,
        output: Any,
        prompt: int,
        lengths: list[int] | None = None,
        encoder_lengths: list[int] | None = None,
    ) -> None:
        """Compares the logits of every step of every row, each alone.

        Args:
            output: What `generate` returned.
            prompt: Columns of the prompt.
            lengths: Real tokens of left-padded rows.
            encoder_lengths: Real tokens of the encoder's input.
        """
        logits = torch.stack(output.logits, dim=1)
        for row, sequence in enumerate(output.sequences):
            pads = 0 if lengths is None else prompt - lengths[row]
            options = {"encoder_length": encoder_lengths[row]} if encoder_lengths else {}
            self.check(logits[row], sequence[pads:], prompt - pads - 1, **options)

    def check_scores(self, output: Any, prompt: int) -> None:
        """Compares the scores of beams with the log-probabilities of their tokens."""
        for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
            logprobs = self.reference(sequence).log_softmax(-1)[prompt - 1 : -1]
            expected = logprobs.gather(1, sequence[prompt:, None]).mean()
            # An error of `loss` in each logit moves the mean log-probability by about as much.
            assert abs(score - expected) <= max(3 * self.strategy.loss, 1e-5), (score.item(), expected.item())

    def check_against_dynamic(self, output: Any, tokens: torch.Tensor, **options: Any) -> None:
        """An exact strategy must equal `DynamicCache` token for token, and in its logits up to the last bits."""
        if not self.strategy.exact:
            return
        expected = self.generate(tokens, self.cache("dynamic"), **options)
        assert torch.equal(output.sequences, expected.sequences)
        for ours, theirs in zip(output.logits or (), expected.logits or (), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def check_packed(self, cache: Cache, blocks: int = 2) -> None:
        """Asserts that a lossy strategy has packed at least `blocks` blocks somewhere."""
        if self.strategy.packs and self.architecture.packs:
            blocks = 1 if self.strategy.window else blocks
            assert max(layer.packed_blocks for layer in attention_layers(cache)) >= blocks


def additive(seen: torch.Tensor) -> torch.Tensor:
    """Returns the mask that is added to scores, `(1, 1, queries, keys)`, of one that is true where a key is seen."""
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def attention_layers(cache: Cache) -> list[KVLayer]:
    """Returns our layers of a cache, of its decoder's half where there are two."""
    return [layer for layer in getattr(cache, "self_attention_cache", cache).layers if isinstance(layer, KVLayer)]


def fingerprint(cache: Cache) -> str:
    """Returns a digest of everything that is stored and of all lengths; room for growth isn't part of it."""
    digest = hashlib.sha256()
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        held: list[tuple[str, torch.Tensor]] = []
        if isinstance(layer, KVLayer):
            digest.update(f"{layer.cumulative_length} {layer.padding}".encode())
            for store in (*layer.packed.values(), layer.sinks, layer.recent):
                held += store.fields().items()
        recurrent = [vars(layer).get("conv_states"), vars(layer).get("recurrent_states")]
        held += [("recurrent", tensor) for tensor in find_tensors(recurrent)]
        for name, tensor in held:
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def copied(cache: Cache) -> Cache:
    """Returns a deep copy."""
    return copy.deepcopy(cache)
