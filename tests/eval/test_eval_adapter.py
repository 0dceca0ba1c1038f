"""Caches of other packages as strategies."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache

from checkpoints import one_thread, save_tiny_checkpoint
from conftest import tiny_llama_config
from hf_kvplus import build_cache
from hf_kvplus.loading import load_model
from hf_kvplus.report import write_report
from kvplus_eval.data import EvalText
from kvplus_eval.evaluation import Job, run_evaluation
from kvplus_eval.guards import claimed_stored_bits
from kvplus_eval.html import render_page
from kvplus_eval.protocol import Protocol, choose_strategies

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "other_cache.py"


@pytest.fixture
def config():
    return tiny_llama_config()


def module(tmp_path, text):
    path = tmp_path / "theirs.py"
    path.write_text(text)
    return path


def test_a_file_or_a_module_makes_the_cache(config, tmp_path, monkeypatch):
    path = module(
        tmp_path, "from transformers import DynamicCache\ndef make_cache(c, n): return DynamicCache(config=c)\n"
    )
    assert type(build_cache(f"adapter:{path}", config)) is DynamicCache
    monkeypatch.syspath_prepend(tmp_path)
    assert type(build_cache("adapter:theirs", config, max_length=9)) is DynamicCache


@pytest.mark.parametrize(
    ("strategy", "kind", "words"),
    [
        ("adapter", ValueError, "needs a module or a .py file: write `adapter:my_caches`"),
        ("adapter:no_such_module_here", ValueError, "there is no module `no_such_module_here`"),
        ("adapter:gone/theirs.py", ValueError, "there is no file `gone/theirs.py`"),
        ("adapter:json", ValueError, "`json` has no function `make_cache`"),
        ("adapter:json,function=loads,color=red", ValueError, "unknown option color; it takes function, bits, evicts"),
        ("adapter:json,evicts=perhaps", ValueError, "`evicts` must be yes or no, got 'perhaps'"),
        ("adapter:operator,function=eq", TypeError, "`eq` must return a transformers Cache, got bool"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_told(config, strategy, kind, words):
    with pytest.raises(kind, match=words):
        build_cache(strategy, config)


def test_claims_of_an_adapter_are_its_own():
    with pytest.raises(ValueError, match="`bits` must be a number, got 'few'"):
        claimed_stored_bits("adapter:theirs,bits=few")
    assert claimed_stored_bits("adapter:theirs") is None
    assert claimed_stored_bits("adapter:theirs,bits=4.5") == 4.5
    assert choose_strategies("fp,adapter:theirs,bits=4.5,evicts=yes") == ["fp", "adapter:theirs,bits=4.5,evicts=yes"]


PACKED = """
import torch
from transformers import Cache, DynamicCache


def quantize(states):
    scale = states.abs().amax(-1, keepdim=True) / 127
    return (states / scale).round().to(torch.int8), scale


class Theirs(DynamicCache):
    "Keeps its codes where only it knows."

    def __init__(self, config):
        super().__init__(config=config)
        self.held = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.held.setdefault(layer_idx, []).append((quantize(key_states), quantize(value_states)))
        columns = zip(*self.held[layer_idx])
        return tuple(torch.cat([codes * scale for codes, scale in column], 2) for column in columns)

    def get_seq_length(self, layer_idx=0):
        return sum(keys[0].shape[2] for keys, _ in self.held.get(layer_idx, []))

    def get_mask_sizes(self, query_length, layer_idx=0):
        return self.get_seq_length(layer_idx) + query_length, 0


def make_cache(config, max_length):
    return Theirs(config)
"""


def evaluate(folder, strategies):
    with one_thread():
        model, _, source = load_model(str(save_tiny_checkpoint(folder / "model")), device="cpu")
        protocol = Protocol(windows=1, window_tokens=320, chunk_tokens=32, timing_rounds=0)
        text = EvalText("numbers", "numbers")
        job = Job(model, source, text, [torch.arange(320) * 7 % 63], strategies, protocol, folder)
        return run_evaluation(job, Console(quiet=True)).rows


def test_a_cache_that_packs_in_a_way_of_its_own_is_measured_by_its_size(tmp_path):
    """Its bits are those of all tokens; what it claims is held against its bytes."""
    path = module(tmp_path, PACKED)
    plain, claiming, forgetful = evaluate(
        tmp_path, [f"adapter:{path}", f"adapter:{path},bits=8", f"adapter:{path},evicts=yes"]
    )
    for row in (plain, claiming):
        assert row["status"] == "ok"
        assert row["metrics"]["stored_bits_per_element"] == pytest.approx(8 + 32 / 64)
        assert 0 < row["metrics"]["kl_mean_nats"] < 0.1
    assert forgetful["metrics"]["stored_bits_per_element"] is None
    write_report([plain, claiming, forgetful], tmp_path)
    assert "Pareto front" in render_page([plain, claiming, forgetful])


def test_a_cache_that_claims_bits_and_hides_everything_in_full_is_refused(tmp_path):
    path = module(tmp_path, PACKED.replace("(states / scale).round().to(torch.int8), scale", "states, 0 * scale + 1"))
    (row,) = evaluate(tmp_path, [f"adapter:{path},bits=8"])
    assert row["status"] == "refused"
    assert "claims 8 bits an element, but its cache takes" in row["reason"]


def test_the_example_is_measured_beside_the_others(tmp_path):
    honest, boasting = evaluate(tmp_path, [f"adapter:{EXAMPLE},bits=24", f"adapter:{EXAMPLE},bits=8"])
    assert honest["status"] == "ok"
    assert honest["metrics"]["stored_bits_per_element"] == 24
    assert 0 < honest["metrics"]["kl_mean_nats"] < 0.1
    assert [one["key_error"] for one in honest["layers"]] == [0, 0]
    assert boasting["status"] == "refused"
    assert "claims 8 bits an element, but nothing was packed" in boasting["reason"]
