"""The measurement of endless text and the chat without an end, on tiny models."""

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from window_oracle import oracle_logits

from checkpoints import one_thread, save_tiny_checkpoint, write_words
from conftest import tiny_llama
from kvplus_eval import streaming, streaming_rows
from kvplus_eval.results import SCHEMA, append_rows, read_rows

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
    for name in ("", "cpu_"):
        assert list(times[f"{name}ms_per_token"]) == [32, 64]
        assert min(*times[f"{name}ms_per_token"].values(), times[f"recompute_{name}ms"]) > 0
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
def test_a_reading_of_its_own_predicts_one_token_from_the_window_before_it(model):
    ids = torch.randint(1, 128, (40,))
    row = streaming.recompute_single(model, ids, window=10, positions=[7, 39])
    for position, loss in zip([7, 39], row["losses"], strict=True):
        logits = model(input_ids=ids[None, max(0, position - 10) : position]).logits[0, -1]
        assert loss == pytest.approx(-logits.log_softmax(-1)[ids[position]].item(), abs=1e-5)


def test_a_comparison_splits_at_the_trained_length():
    row = {"strategy": "a", "first": 1, "losses": [1.0, 2.0, 3.0, 4.0]}
    yardstick = {"strategy": "b", "stride": 2, "first": 3, "losses": [2.5, 4.5]}
    before, after = streaming_rows.compare(row, yardstick, boundary=4)
    assert (before["tokens"], after["tokens"]) == (1, 1)
    assert before["percent"] == pytest.approx(100 * (math.exp(0.5) - 1))
    assert after["percent"] == pytest.approx(100 * (math.exp(-0.5) - 1))


def piece(skip: int, gap: float, first: int = 1, **row):
    """Returns published rows of a piece: one that is `gap` nats behind its yardstick from token 513 on."""
    losses = [2.0 + 0.1 * (index % 3) for index in range(16)]
    shared = {
        "kind": "streaming",
        "text": {"sha256": "a", "name": "t"},
        "bos": False,
        "tokens": 1024,
        "skip": skip,
        **row,
    }
    behind = {
        "strategy": "window:9",
        "first": first,
        "block_tokens": 64,
        "block_losses": [loss + gap for loss in losses],
    }
    anew = {
        "strategy": "recompute:9",
        "stride": 8,
        "first": first + 512,
        "block_tokens": 64,
        "block_losses": losses[8:],
    }
    return [shared | behind, shared | anew]


def test_pieces_of_a_text_are_taken_together(tmp_path, capsys):
    rows = [
        *piece(0, 0.01),
        *piece(1024, 0.03),
        *piece(1024, 0.02),
    ]  # a piece measured again takes the place of itself
    first, second, whole = streaming_rows.pool(rows)
    assert [row["skip"] for row in (first, second)] == [0, 1024]
    for row, gap in ((first, 0.01), (second, 0.02), (whole, 0.015)):
        assert row["percent"] == pytest.approx(100 * math.expm1(gap))
    assert (first["tokens"], whole["tokens"], whole["pieces"]) == (512, 1024, 2)
    assert first["standard_error"] == pytest.approx(0, abs=1e-9)
    assert whole["standard_error"] == pytest.approx(
        100 * torch.tensor([0.01, 0.02] * 4).std().item() / 8**0.5, rel=1e-6
    )
    assert whole["standard_error_by_piece"] == pytest.approx(0.5)
    assert not list(streaming_rows.pool(piece(0, 0.01)[:1]))
    file = tmp_path / "pieces.jsonl"
    append_rows(file, [row | {"schema": SCHEMA} for row in rows])
    streaming.main(["--pool", str(file)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == whole


def test_a_picture_is_of_one_piece_with_the_latest_row_of_each_strategy():
    rows = streaming_rows.latest_rows([*piece(0, 0.01), {"kind": "eval"}, *piece(0, 0.02)])
    assert [row["strategy"] for row in rows] == ["window:9", "recompute:9"]
    assert rows[0]["block_losses"][0] == 2.02
    with pytest.raises(ValueError, match="rows of one piece"):
        streaming_rows.latest_rows([*piece(0, 0.01), *piece(1024, 0.01)])


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
        + ["--recompute", "--single", "5", "--out", rows]
    )
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    summaries, comparisons = printed[:4], printed[4:]
    assert [row["strategy"] for row in summaries] == [
        "window:28,sinks=4", "window:32,sinks=0", "recompute:32", "recompute:32",
    ]  # fmt: skip
    assert [row["tokens"] for row in summaries] == [64, 64, 64, 5]
    assert all(row["finite"] and row["perplexity"] < math.inf for row in summaries)
    assert len(summaries[0]["cache_bytes"]) == 1
    assert [row["tokens"] for row in comparisons] == [64, 64, 5, 5]
    own, yardstick = (comparisons[0][name] for name in ("perplexity", "yardstick"))
    assert own == pytest.approx(summaries[0]["perplexity"])
    assert comparisons[0]["percent"] == pytest.approx(100 * (own / yardstick - 1))
    published = read_rows(Path(rows))
    assert [row["kind"] for row in published] == ["streaming"] * 4
    assert [len(row["block_losses"]) for row in published[:3]] == [3, 3, 1]
    assert [row["first"] for row in published[:3]] == [64, 64, 192]
    assert published[3]["positions"][0] == 192
    assert published[3]["positions"][-1] == 255
    assert math.exp(published[0]["block_losses"][-1]) == pytest.approx(own, rel=1e-4)
    pytest.importorskip("matplotlib")
    streaming.main(["--plot", rows, "--image", image])
    assert Path(image).read_bytes().startswith(b"\x89PNG")
    config = AutoConfig.from_pretrained(checkpoint)
    assert published[0]["trained_tokens"] == config.max_position_embeddings
    states = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert published[0]["bytes_per_token"] == 4 * states
    with pytest.raises(ValueError, match="`--pool` needs rows"):  # the yardstick read half a sample
        streaming.main(["--pool", rows])
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
