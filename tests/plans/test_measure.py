import torch

from conftest import tiny_llama
from hf_kvplus.caches import KVPlusCache
from hf_kvplus.codecs.metric import KeyMetric, save_metrics
from hf_kvplus.plans.calibrate import FIRST_QUERY, query_moments
from hf_kvplus.plans.measure import layer_losses
from hf_kvplus.plans.onepass import OnePass
from hf_kvplus.recipes import Quantization

TOKENS = 400


def test_predicted_losses_add_up_to_about_the_measured_one():
    model = tiny_llama(initializer_range=0.2, num_hidden_layers=3)
    windows = [torch.randint(128, (TOKENS,)) for _ in range(3)]
    options = [Quantization(nbits, nbits, 48, 32, 4) for nbits in (2, 4)]
    with OnePass(model, 32) as run:
        losses = layer_losses(run, windows, options)
        measured = []
        for option in options:
            cache = KVPlusCache(model.config, quantization=option)
            with torch.inference_mode():
                found = [run.divergences(run.reference(ids, torch.arange(TOKENS)), cache).mean() for ids in windows]
            measured.append(float(torch.stack(found).mean()))
    assert losses.shape == (3, 2, 2)
    assert (losses > 0).all()
    # Four bits lose far less than two, in every layer and part.
    assert (losses[:, 0] > 3 * losses[:, 1]).all()
    for predicted, real in zip(losses.sum((0, 2)).tolist(), measured, strict=True):
        assert 0.4 < predicted / real < 2.5


def test_moments_are_those_of_the_queries(tmp_path):
    model = tiny_llama(num_hidden_layers=2)
    token_ids = torch.randint(128, (100,))
    queries = {}
    with OnePass(model, 32) as run:
        moments = query_moments(run, [token_ids])
        run.observe = lambda layer, call, output: (queries.__setitem__(layer, call.query), output)[1]
        with torch.no_grad():
            run.reference(token_ids, torch.tensor([0]))
    for layer, moment in enumerate(moments):
        for head in range(2):
            # Query heads 2h and 2h + 1 read KV head h.
            seen = queries[layer][0, 2 * head : 2 * head + 2, FIRST_QUERY:].reshape(-1, 16)
            torch.testing.assert_close(moment[head], seen.T @ seen / len(seen), rtol=1e-4, atol=1e-6)
    save_metrics(tmp_path / "m.safetensors", moments)
    factor = KeyMetric(tmp_path / "m.safetensors", 1).factor(rotate=True)
    assert torch.equal(factor, factor.triu())
    assert torch.equal(factor.diagonal(dim1=1, dim2=2), torch.ones(2, 16))
