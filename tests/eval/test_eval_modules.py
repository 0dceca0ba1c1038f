"""The metrics that other programs load through `evaluate`, offline and from the checkout."""

from pathlib import Path

import pytest
import torch

from kvplus_eval import metrics
from kvplus_eval.measured import Measured
from kvplus_eval.metrics import METRICS, score_positions

evaluate = pytest.importorskip("evaluate")
FOLDER = Path(metrics.__file__).parent


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
        patch.setattr("evaluate.config.HF_MODULES_CACHE", str(folder / "modules"))
        yield lambda name: evaluate.load(str(FOLDER / name), cache_dir=str(folder / "cache"))


def test_kl_is_the_harness_own(load):
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (torch.randn(40, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    found = load("cache_kl").compute(predictions=mine.tolist(), references=theirs.tolist())
    scores = score_positions(mine.log_softmax(1), theirs.log_softmax(1), torch.zeros(40, dtype=torch.long))
    wanted = METRICS.get("kl").summarize(Measured(positions={"kl_nats": [scores["kl_nats"]]}))
    assert found == pytest.approx(wanted)


def test_kl_takes_batches(load):
    module = load("cache_kl")
    for row in ([0.1, 0.9], [2.0, 1.0]):
        module.add_batch(predictions=[row], references=[[0.5, 0.5]])
    assert module.compute()["kl_mean_nats"] > 0


def test_perplexity_comes_with_its_interval(load):
    found = load("cache_perplexity").compute(
        predictions=[[2.0, 2.2], [1.9, 2.3], [2.5, 2.4]], references=[[2.0, 2.0], [1.8, 2.0], [2.1, 2.3]]
    )
    assert found["perplexity"] == pytest.approx(9.17, abs=0.01)
    assert found["perplexity_change_low_percent"] < found["perplexity_change_percent"]
    assert found["perplexity_change_percent"] < found["perplexity_change_high_percent"]
