"""A pytest plugin that gives transformers' generation tests tiny models without the hub.

`tests/generation/test_utils.py` loads tiny random models and their tokenizers by name. Here they are built from
configurations, with seeded weights, and a tokenizer learns its 1000 tokens from the docstrings of Python's own
modules. What a test expects of particular weights can't come out, with any cache; run it with the strategy `none` to
see that. Steps: docs/transformers-tests.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import typing
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

VOCABULARY = 1000
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
BART = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 512,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {"d_model": 32, "d_ff": 37, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "hf-internal-testing/tiny-random-gpt2": ("gpt2", GPT2),
    "distilbert/distilgpt2": ("gpt2", GPT2),
    "EleutherAI/pythia-160m-deduped": ("gpt_neox", DECODER),
    "hf-internal-testing/tiny-random-MistralForCausalLM": ("mistral", {**DECODER, "num_key_value_heads": 2}),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("llama", {**DECODER, "num_key_value_heads": 4}),
    "hf-internal-testing/tiny-random-bart": ("bart", BART),
    "sshleifer/bart-tiny-random": ("bart", BART),
    "hf-internal-testing/tiny-random-t5": ("t5", T5),
}
asked: set[str] = set()


def local_config(name: str) -> PretrainedConfig:
    """Returns the configuration of a local model."""
    kind, options = LOCAL[name]
    return AutoConfig.for_model(kind, **{**TOKENS, **options})


@functools.cache
def tokenizer_file() -> str:
    """Returns a tokenizer that has learned from docstrings, as JSON."""
    tokenizer = ByteLevelBPETokenizer()
    texts = [str(module.__doc__) + str(vars(module)) for module in (argparse, functools, json, typing)]
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    return tokenizer._tokenizer.to_str()


def local_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Returns a fresh tokenizer."""
    from tokenizers import Tokenizer

    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    options = {name: value for name, value in options.items() if name in ("padding_side", "truncation_side")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_file()), **names, **options)


def local_model(kind: Any, name: str, options: dict[str, Any]) -> PreTrainedModel:
    """Returns a model with the same random weights each time."""
    config = local_config(name)
    for option in [option for option in options if hasattr(config, option) and option != "dtype"]:
        setattr(config, option, options[option])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind.from_config(config) if issubclass(kind, _BaseAutoModelClass) else kind(config)
    dtype = options.get("dtype", options.get("torch_dtype"))
    return model.eval().to(dtype) if isinstance(dtype, torch.dtype) else model.eval()


def answer_locally(owner: Any, build: Any) -> None:
    """Lets `owner.from_pretrained` answer the names in `LOCAL`; all others go to the hub as ever."""
    original = vars(owner)["from_pretrained"].__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, name: Any = None, *arguments: Any, **options: Any) -> Any:
        if name in LOCAL:
            return build(cls, name, options)
        asked.add(str(name))
        return original(cls, name, *arguments, **options)

    owner.from_pretrained = classmethod(from_pretrained)


def pytest_configure(config: Any) -> None:
    """Puts the models in place before tests are run."""
    for kind in _BaseAutoModelClass.__subclasses__():
        if "from_pretrained" in vars(kind):
            answer_locally(kind, local_model)
    answer_locally(PreTrainedModel, local_model)
    answer_locally(AutoTokenizer, lambda cls, name, options: local_tokenizer(**options))
    answer_locally(GenerationConfig, lambda cls, name, options: cls.from_model_config(local_config(name)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tells which models were asked of the hub."""
    terminalreporter.write_line(f"asked of the hub: {', '.join(sorted(asked)) or 'nothing'}")
