import pytest
import torch
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from conftest import tiny_llama
from hf_kvplus import build_cache
from hf_kvplus.cli import build_app
from hf_kvplus.plans.keys import key_biases
from hf_kvplus.plans.onepass import OnePass

SLOW, FAST = 15, 0  # of 16 channels: RoPE turns pair (7, 15) slowest and (0, 8) fastest


def biased_llama(channel, size):
    """A tiny Llama whose second layer's keys have a bias in one channel of their first head, as Qwen2's have."""
    model = tiny_llama(attention_bias=True, initializer_range=0.2)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[channel] = size
    return model


def test_planted_biases_are_found_where_they_are():
    token_ids = torch.randint(128, (400,))
    with OnePass(biased_llama(SLOW, 200.0)) as run:
        plain, slow = key_biases(run, [token_ids])
    with OnePass(biased_llama(FAST, 200.0)) as run:
        _, fast = key_biases(run, [token_ids])
    assert max(plain.offset, plain.spread) < 20
    assert slow.offset > 50
    assert slow.offset_at == (0, SLOW)
    assert "offset" in slow.describe()
    assert "stored exactly" in slow.describe()
    assert fast.spread > 50
    assert fast.spread_at[0] == 0
    assert fast.spread_at[1] in (FAST, FAST + 8)
    assert "turns with position" in fast.describe()


@pytest.mark.parametrize("strategy", ["int8", "int4", "int2"])
def test_a_bias_in_a_slow_channel_costs_next_to_nothing(strategy):
    token_ids = torch.randint(128, (500,))
    losses = []
    for size in (0.0, 50.0):
        with torch.inference_mode(), OnePass(biased_llama(SLOW, size)) as run:
            reference = run.reference(token_ids, torch.arange(250, 500))
            losses.append(float(run.divergences(reference, build_cache(strategy, run.model.config)).mean()))
    assert losses[1] < 3 * losses[0] + 1e-5


def test_doctor_tells_of_keys(tmp_path):
    save_tiny_checkpoint(tmp_path / "model")
    write_words(tmp_path / "text.txt", 700)
    options = ["doctor", "--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    result = CliRunner().invoke(build_app(), options)
    assert result.exit_code == 0, result.output
    assert "key biases: 0 of 2 layers" in result.output
    result = CliRunner().invoke(build_app(), ["doctor", "--text", "text.txt"])
    assert result.exit_code == 2
    assert "give --model too" in result.stderr
