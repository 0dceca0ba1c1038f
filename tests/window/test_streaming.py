"""The measurement of endless text and the chat without an end, on tiny models."""

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch
from window_oracle import oracle_logits

from checkpoints import one_thread, save_tiny_checkpoint, write_words
from conftest import tiny_llama
from kvplus_eval import streaming

EXAMPLE = Path(__file__).parents[2] / "examples" / "streaming_chat.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with one_thread():
        yield str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def model():
    return tiny_llama(initializer_range=0.15)


@torch.inference_mode()
def test_streamed_losses_are_those_of_the_oracle(model):
    ids = torch.randint(1, 128, (96,))
    row, copies = streaming.stream(model, ids, "window:20,sinks=4", chunk=16, every=32)
    logits = oracle_logits(model, ids[None], torch.ones(1, 96, dtype=torch.long), 20, 4)[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    assert torch.tensor(row["losses"]).sub(expected).abs().max() < 1e-4
    assert list(copies) == list(row["cache_bytes"]) == [32, 64, 96]
    assert [cache.get_seq_length() for cache in copies.values()] == [32, 64, 96]


@torch.inference_mode()
def test_times_come_from_copies_of_every_length(model):
    ids = torch.randint(1, 128, (64,))
    _, copies = streaming.stream(model, ids, "window:20,sinks=4", chunk=16, every=32)
    times = streaming.time_steps(model, ids, copies, window=24, rounds=3)
    assert list(times["ms_per_token"]) == [32, 64]
    assert min(*times["ms_per_token"].values(), times["recompute_ms"]) > 0
    assert [cache.get_seq_length() for cache in copies.values()] == [35, 67]


@torch.inference_mode()
@pytest.mark.parametrize("lead", [0, 1])
def test_the_yardstick_reads_the_latest_tokens_and_scores_new_ones(model, lead):
    ids = torch.randint(1, 128, (40,))
    row = streaming.recompute(model, ids, window=10, stride=4, first=32, lead=lead)
    assert len(row["losses"]) == 8
    read = torch.cat([ids[:lead], ids[26 + lead : 36]])
    logits = model(input_ids=read[None]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[5:9], ids[32:36], reduction="none")
    assert torch.tensor(row["losses"][:4]).sub(expected).abs().max() < 1e-5


@torch.inference_mode()
def test_a_cache_diverges_from_another_but_not_from_itself(model):
    ids = torch.randint(1, 128, (300,))
    same, other = (
        streaming.divergence(model, ids, strategy, "window:200,sinks=4", chunk=20, last=50)
        for strategy in ("window:200,sinks=4", "int2+window:200,sinks=4")
    )
    assert abs(same["kl_nats"]) < 1e-7
    assert other["kl_nats"] > 1e-4
    assert same["tokens"] == 50


def test_the_command_writes_rows_and_draws_them(checkpoint, tmp_path, capsys):
    text, rows, image = (str(tmp_path / name) for name in ("text.txt", "rows.jsonl", "plot.png"))
    write_words(Path(text), 600)
    shared = ["--model", checkpoint, "--text", text, "--tokens", "256", "--last", "64"]
    strategies = ["--strategies", "window:28,sinks=4", "window:32,sinks=0"]
    streaming.main(
        [*shared, *strategies, "--chunk", "16", "--every", "64", "--rounds", "2", "--window", "32", "--stride", "16"]
        + ["--recompute", "--out", rows]
    )
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["strategy"] for row in printed] == ["window:28,sinks=4", "window:32,sinks=0", "recompute:32"]
    assert all(row["finite"] and row["perplexity"] < math.inf and row["tokens"] == 64 for row in printed)
    assert len(printed[0]["cache_bytes"]) == 1
    assert len(Path(rows).read_text().splitlines()) == 3
    pytest.importorskip("matplotlib")
    streaming.main(["--plot", rows, "--image", image])
    assert Path(image).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="`--stride` must be less"):
        streaming.main([*shared, "--recompute", "--window", "32", "--stride", "32"])
    with pytest.raises(ValueError, match="has .* tokens"):
        streaming.main([*shared[:4], "--tokens", "100000"])


def test_the_endless_chat_holds_as_many_bytes_at_its_end_as_before(checkpoint, capsys):
    spec = importlib.util.spec_from_file_location("streaming_chat", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["--model", checkpoint, "--window", "32", "--turns", "8", "--max-new-tokens", "24"])
    tokens, bytes_held = zip(
        *re.findall(r"\[(\d+) tokens, .*? cache (\S+ \S+) of", capsys.readouterr().out), strict=True
    )
    assert [int(count) for count in tokens] == sorted({int(count) for count in tokens})
    assert len(tokens) == 8
    assert int(tokens[-1]) > 200
    assert len(set(bytes_held[-4:])) == 1
