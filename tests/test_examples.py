"""Every example runs, on tiny random models, and shows what it is for."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from checkpoints import WORDS, one_thread, save_tiny_checkpoint, write_words
from hf_kvplus import estimate_memory
from hf_kvplus.loading import load_config
from hf_kvplus.units import parse_bytes
from test_model_card import ROWS

EXAMPLES = Path(__file__).parent.parent / "examples"
CHAT = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}w0 "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with one_thread():
        folder = save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT}))
        yield str(folder)


@pytest.fixture
def text(tmp_path):
    return str(write_words(tmp_path / "text.txt", 600))


def run(name: str, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(arguments))


def test_chat_reads_only_what_is_new(checkpoint, capsys):
    turns = ["--turn", "w1 w2 w3", "--turn", "w4 w5"]
    run("chat", "--model", checkpoint, "--max-new-tokens", "8", *turns)
    out = capsys.readouterr().out
    assert "[a new cache; " in out
    kept, left = map(int, re.search(r"kept (\d+) tokens, dropped \d+, (\d+) left to read", out).groups())
    assert kept >= 4
    assert left >= 2


def test_batch_summarization_takes_less_than_full_precision(checkpoint, text, tmp_path, capsys):
    short = str(write_words(tmp_path / "short.txt", 40))
    run("batch_summarization", "--model", checkpoint, "--max-new-tokens", "4", text, short)
    out = capsys.readouterr().out
    held, full = map(parse_bytes, re.search(r"2 rows: (.*?) instead of (.*?)\]", out).groups())
    assert held < 0.5 * full


def test_long_document_takes_constant_memory(checkpoint, text, capsys):
    run("long_document", "--model", checkpoint, "--text", text, "--window", "100", "--max-new-tokens", "4")
    out = capsys.readouterr().out
    sizes = dict(re.findall(r"\[after (\d+) tokens (.*?)\]", out))
    assert set(sizes) == {"600", "603"}
    full = estimate_memory(load_config(checkpoint), 603).cache_bytes
    assert parse_bytes(sizes["600"]) <= parse_bytes(sizes["603"]) < full / 2


def test_offload_gives_the_same_text_from_the_disk(checkpoint, text, capsys):
    for strategy in ("fp", "int4"):
        run("offload", "--model", checkpoint, "--text", text, "--strategy", strategy, "--max-new-tokens", "8")
        out = capsys.readouterr().out
        assert "[the same text]" in out
        on_disk, estimated = map(
            parse_bytes, re.search(r"memory, ([1-9].*?) on disk; estimated (.*?) on", out).groups()
        )
        assert abs(on_disk - estimated) < 0.1 * estimated


def test_streaming_chat_runs_turn_after_turn(checkpoint, capsys):
    run("streaming_chat", "--model", checkpoint, "--turns", "3", "--window", "32", "--max-new-tokens", "8")
    assert len(capsys.readouterr().out.strip().splitlines()) >= 3


def test_assisted_decoding_gives_the_same_text(checkpoint, capsys):
    prompt = "w1 w2 w3 " * 30
    run("assisted_decoding", "--model", checkpoint, "--prompt", prompt, "--strategy", "fp", "--max-new-tokens", "16")
    assert "[the same text]" in capsys.readouterr().out


def test_encoder_decoder_quantizes_both_halves(tmp_path, capsys):
    torch.manual_seed(0)
    shapes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    tokens = {"vocab_size": len(WORDS), "decoder_start_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    T5ForConditionalGeneration(T5Config(**shapes, **tokens)).save_pretrained(tmp_path)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    words = "w1 w2 w3 w4 " * 60
    run("encoder_decoder", "--model", str(tmp_path), "--text", words, "--max-new-tokens", "8")
    out = capsys.readouterr().out
    assert "decoder layer 0" in out
    assert "encoder layer 1" in out
    held, full = map(parse_bytes, re.search(r"240 of the encoder: (.*?), full precision (.*?)\]", out).groups())
    assert held < 0.7 * full


def test_prefix_cache_is_read_once_and_loaded_later(checkpoint, text, tmp_path, capsys):
    common = ["--model", checkpoint, "--text", text, "--file", str(tmp_path / "document.kvplus")]
    answers = []
    for state in ("600 tokens read and saved", "600 tokens loaded"):
        run("prefix_cache", *common, "--question", "w7 w8", "--question", "w9", "--max-new-tokens", "4")
        out = capsys.readouterr().out
        assert f"[{state}]" in out
        assert "kept 600 tokens, dropped 0, 2 left to read" in out
        answers.append(out.split("]", 1)[1])
    assert answers[0] == answers[1]


def test_model_card_is_written_once(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results, card = tmp_path / "results.jsonl", tmp_path / "README.md"
    results.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for state in ("updated", "up to date"):
        run("model_card", "--results", str(results), "--card", str(card), "--model", checkpoint)
        assert f"{state}, 6 results in its metadata" in capsys.readouterr().out
    assert "Estimated from the configuration" in card.read_text()


def test_a_cache_of_another_package_takes_what_it_says(checkpoint, capsys):
    run("other_cache", "--model", checkpoint)
    sizes = dict(re.findall(r"\[(\w+): (\d+) bytes\]", capsys.readouterr().out))
    # Keys as they are in 4 bytes, values in 2
    assert int(sizes["adapter"]) == int(sizes["dynamic"]) * 6 / 8


def test_every_example_is_run_by_a_test_and_short():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert re.search(rf'"{path.stem}(\.py)?"', tests), path.name
        assert len(path.read_text().splitlines()) < 60


def test_gqa_conversion_stores_less_in_both_ways(checkpoint, text, tmp_path, capsys):
    sizes = ["--num-key-value-heads", "1", "--windows", "2", "--window-tokens", "256"]
    run("gqa_conversion", "--model", checkpoint, "--text", text, "--out", str(tmp_path / "converted"), *sizes)
    out = capsys.readouterr().out
    held = {name: parse_bytes(size) for name, size in re.findall(r"^(.*?): (.*?) for 263 tokens", out, re.MULTILINE)}
    assert held["converted, 4 bits"] < held["converted"] < 0.6 * held["as it is"]
    assert held["latents in the cache"] < 0.8 * held["as it is"]
    assert load_config(str(tmp_path / "converted")).num_key_value_heads == 1
