"""A complete checkpoint folder, model and tokenizer, small enough to be made anew for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ("<unk>", *(f"w{number}" for number in range(63)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs on one thread: work this small only waits for others, and on a busy machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save_tiny_checkpoint(folder: Path, *, seed: int = 0, **changes: int) -> Path:
    """Saves a seeded random Llama (2 layers, 4 query and 2 KV heads of 64) and a tokenizer of 64 words."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = LlamaConfig(**{**options, **changes})
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def write_words(path: Path, count: int) -> Path:
    """Writes a text of `count` words that the tokenizer above knows, each one token."""
    generator = torch.Generator().manual_seed(7)
    picks = torch.randint(1, len(WORDS), (count,), generator=generator).tolist()
    path.write_text(" ".join(WORDS[pick] for pick in picks), encoding="utf-8")
    return path
