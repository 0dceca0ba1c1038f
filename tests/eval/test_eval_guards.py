import re

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache

import hf_kvplus
from checkpoints import one_thread, save_tiny_checkpoint
from hf_kvplus import MemoryBreakdown, available_strategies
from hf_kvplus.loading import load_model
from kvplus_eval import passes, runner
from kvplus_eval.data import EvalText
from kvplus_eval.evaluation import Job, run_evaluation
from kvplus_eval.guards import RefusedError, claimed_stored_bits, refuse_unpacked
from kvplus_eval.protocol import Protocol


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    model, _, source = load_model(str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))), device="cpu")
    with one_thread():
        yield model, source


def evaluate(loaded, folder, strategies, **changes):
    protocol = Protocol(**{"windows": 1, "window_tokens": 320, "chunk_tokens": 32, "timing_rounds": 0, **changes})
    model, source = loaded
    windows = [torch.arange(protocol.window_tokens) * 7 % 63 for _ in range(protocol.windows)]
    job = Job(model, source, EvalText("numbers", "numbers"), windows, strategies, protocol, folder)
    finished = run_evaluation(job, Console(quiet=True))
    return {row["strategy"]: row for row in finished.rows}


def swap_cache(monkeypatch, build):
    """Makes every strategy but the reference get the cache that `build` returns."""

    def build_cache(strategy, config, **options):
        return build(config) if strategy != "dynamic" else hf_kvplus.build_cache(strategy, config, **options)

    monkeypatch.setattr(runner, "build_cache", build_cache)


@pytest.mark.parametrize("chunk_tokens", [320, 1000])
def test_one_pass_over_a_window_is_refused_for_every_strategy(loaded, tmp_path, chunk_tokens):
    rows = evaluate(loaded, tmp_path, ["dynamic", "int4"], chunk_tokens=chunk_tokens)
    for row in rows.values():
        assert row["status"] == "refused"
        assert "never read" in row["reason"]
        assert row["metrics"] == {}
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_is_read_is_not_refused(loaded, tmp_path):
    assert evaluate(loaded, tmp_path, ["fp"], chunk_tokens=319)["fp"]["status"] == "ok"


def test_a_cache_that_claims_bits_and_stores_full_precision_is_refused(loaded, tmp_path, monkeypatch):
    swap_cache(monkeypatch, lambda config: DynamicCache(config=config))
    row = evaluate(loaded, tmp_path, ["int4"])["int4"]
    assert (row["status"], row["metrics"]) == ("refused", {})
    assert re.search(r"claims 4\.\d+ bits", row["reason"])


def test_a_cache_that_doesnt_claim_bits_is_shown_with_its_true_bytes(loaded, tmp_path, monkeypatch):
    class Hoarder(DynamicCache):
        def __init__(self, config):
            super().__init__(config=config)
            self.hidden = torch.zeros(1_000_000)

    swap_cache(monkeypatch, Hoarder)
    row = evaluate(loaded, tmp_path, ["fp"])["fp"]
    assert row["metrics"]["cache_bytes"] > 4_000_000
    assert row["metrics"]["share_of_full_cache"] > 5


def test_a_window_too_short_to_pack_anything_is_refused(loaded, tmp_path):
    row = evaluate(loaded, tmp_path, ["int4"], window_tokens=100)["int4"]
    assert row["status"] == "refused"
    assert "nothing was packed" in row["reason"]


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_cache_that_miscounts_its_tokens_is_refused(loaded, tmp_path, monkeypatch, wrong):
    class Miscounting(DynamicCache):
        def get_seq_length(self, layer_idx=0):
            length = super().get_seq_length(layer_idx)
            return length + wrong if length > 100 else length

    swap_cache(monkeypatch, lambda config: Miscounting(config=config))
    row = evaluate(loaded, tmp_path, ["fp"])["fp"]
    assert row["status"] == "refused"
    assert "tokens after 128 were fed" in row["reason"]


def test_packing_that_saves_nothing_is_refused():
    memory = MemoryBreakdown(
        packed_bytes=10, full_precision_bytes=990, reserved_bytes=0, other_bytes=0, elements=250, packed_elements=10
    )
    with pytest.raises(RefusedError, match="takes 1000 bytes and the full cache 1000"):
        refuse_unpacked("k8v4", memory, full_bytes=1000)
    refuse_unpacked("k8v4", memory, full_bytes=1001)


def test_output_that_isnt_finite_fails_the_strategy_and_no_other(loaded, tmp_path, monkeypatch):
    class Poisoned(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            return super().update(key_states, value_states * float("nan"), layer_idx, *args, **kwargs)

    swap_cache(monkeypatch, lambda config: Poisoned(config=config))
    rows = evaluate(loaded, tmp_path, ["fp", "dynamic"])
    assert rows["fp"]["status"] == "failed"
    assert "isn't finite" in rows["fp"]["reason"]
    assert "Traceback" in rows["fp"]["traceback"]
    assert rows["dynamic"]["status"] == "ok"


@pytest.mark.parametrize(("strategy", "bits"), [("dynamic", None), ("fp", None), ("k8v4", 6)])
def test_claims_are_read_from_the_strategy(strategy, bits):
    assert claimed_stored_bits(strategy) == bits
    assert claimed_stored_bits("int4") == next(s.stored_bits for s in available_strategies() if s.name == "int4") > 4


def test_offloaded_blocks_count_as_packed_wherever_they_are(loaded, tmp_path):
    # Long enough that two layers hold more than the buffers that they are decoded into
    rows = evaluate(loaded, tmp_path, ["int4", "int4+offload:disk,budget=0"], window_tokens=1280)
    plain, away = (row["metrics"] for row in rows.values())
    assert [row["status"] for row in rows.values()] == ["ok", "ok"]
    assert away["packed_bytes"] == 0 < away["disk_bytes"]
    assert away["packed_bits_per_element"] == plain["packed_bits_per_element"]
    assert away["kl_mean_nats"] == plain["kl_mean_nats"]
    assert plain["disk_bytes"] == plain["host_bytes"] == 0


def test_a_strategy_that_only_an_earlier_process_ran_is_warmed_up_before_its_times(loaded, tmp_path, monkeypatch):
    warmed = []
    monkeypatch.setattr(passes, "warm_up", lambda strategy, *rest: warmed.append(strategy))
    timed = {"timing_rounds": 2, "decode_tokens": 2, "greedy_tokens": 2}
    evaluate(loaded, tmp_path, ["dynamic", "int4"], **timed)
    assert warmed == []
    for piece in tmp_path.glob("unfinished/*/times-int4*.piece"):
        piece.unlink()
    evaluate(loaded, tmp_path, ["dynamic", "int4"], **timed)
    assert warmed == ["int4"]


def test_a_cache_that_fails_at_a_longer_context_is_told_beside_its_figures(loaded, tmp_path, monkeypatch):
    class Limited(DynamicCache):
        def update(self, key_states, *args, **kwargs):
            if self.get_seq_length() > 340:
                raise RuntimeError("no room for more")
            return super().update(key_states, *args, **kwargs)

    swap_cache(monkeypatch, lambda config: Limited(config=config))
    rows = evaluate(loaded, tmp_path, ["dynamic", "fp"], contexts=(200, 360))
    assert [one["context_tokens"] for one in rows["dynamic"]["contexts"]] == [200, 360]
    assert [one["context_tokens"] for one in rows["fp"]["contexts"]] == [200]
    assert (rows["fp"]["status"], rows["dynamic"]["findings"]) == ("ok", [])
    (finding,) = rows["fp"]["findings"]
    assert "from some length on: at 360 tokens: RuntimeError: no room for more" in finding
