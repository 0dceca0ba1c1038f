import pytest
import torch
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from conftest import tiny_llama
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


@pytest.mark.parametrize("channel", [SLOW, FAST])
def test_planted_biases_are_found_where_they_are_and_taken_out(channel):
    token_ids = torch.randint(128, (400,))
    with OnePass(biased_llama(channel, 200.0)) as run:
        plain, biased = key_biases(run, [token_ids])
    assert not plain.is_far
    assert "no channel far above" in plain.describe()
    assert biased.taken.times > 50
    assert (biased.taken.head, biased.taken.channel) == (0, channel % 8)
    assert max(biased.offset.times, biased.spread.times) < 20
    assert "turns with position" in biased.describe()
    assert "stored exactly" in biased.describe()


def test_what_a_configuration_doesnt_tell_of_is_reported_with_a_remedy():
    token_ids = torch.randint(128, (400,))
    for channel, word in ((SLOW, "offset"), (FAST, "deviates")):
        model = tiny_llama(initializer_range=0.2)
        keys = model.model.layers[1].self_attn.k_proj
        keys.bias = torch.nn.Parameter(torch.zeros(keys.out_features))
        with torch.no_grad():
            keys.bias[channel] = 200.0
        with OnePass(model) as run:
            _, found = key_biases(run, [token_ids])
        assert found.taken.times == 0
        assert word in found.describe()
        assert ("give `means=1`" in found.describe()) == (channel == FAST)


def test_more_biases_than_means_are_reported_with_as_many_as_they_need():
    model = biased_llama(FAST, 200.0)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[1] = -200.0
    with OnePass(model) as run:
        _, found = key_biases(run, [torch.randint(128, (400,))])
    assert found.taken.times > 50
    assert "give `means=2`" in found.describe()


def test_what_nothing_takes_out_needs_more_bits():
    model = tiny_llama(initializer_range=0.2)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[5] *= 50
    with OnePass(model) as run:
        _, found = key_biases(run, [torch.randint(128, (400,))])
    assert "give keys more bits" in found.describe()


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
