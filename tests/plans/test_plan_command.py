import json

import pytest
import torch
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from conftest import tiny_llama
from hf_kvplus import QuantizedCache, build_cache
from hf_kvplus.cli import build_app
from hf_kvplus.codecs.rotary_mean import without_means
from hf_kvplus.layer_plan import load_plan
from hf_kvplus.loading import load_model
from hf_kvplus.plans.budget import Budget
from hf_kvplus.plans.make import candidates, make_plans, pair_losses, single_parts
from hf_kvplus.plans.onepass import OnePass
from hf_kvplus.plans.solve import BudgetError
from hf_kvplus.saving import load_cache, save_cache
from kvplus_eval.runner import make_cache


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A calibrated plan of a tiny model, made by the command."""
    folder = tmp_path_factory.mktemp("plan")
    save_tiny_checkpoint(folder / "model")
    write_words(folder / "text.txt", 1200)
    options = [
        "plan",
        "--model",
        folder / "model",
        "--text",
        folder / "text.txt",
        "--budget",
        "3.5bits",
        "--calibrate",
    ]
    options += ["--window-tokens", "320", "--out", folder / "plan.json"]
    result = CliRunner().invoke(build_app(), [str(option) for option in options])
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout.splitlines()[-1])


def test_the_plan_keeps_its_budget_and_tells_what_it_costs(made):
    folder, facts = made
    plan = load_plan(folder / "plan.json")
    assert 3.0 < facts["stored_bits"] <= 3.5
    assert 0 < facts["measured_kl"] < 10
    assert facts["uniform_kl"] is not None
    assert len(plan.layers) == 2
    assert all(layer.calibration.endswith("plan.safetensors") for layer in plan.layers)
    assert plan.facts["budget"] == "3.5bits"


def test_cache_and_strategy_follow_the_plan(made):
    folder, _ = made
    model, _, _ = load_model(str(folder / "model"))
    plan = load_plan(folder / "plan.json")
    plan.check_model(model)
    for cache in (
        QuantizedCache(model.config, layer_plan=folder / "plan.json"),
        build_cache(f"plan:{folder / 'plan.json'}", model.config),
    ):
        for layer, wanted in zip(cache.layers, plan.layers, strict=True):
            keys = without_means(layer.codecs["keys"])
            assert keys.nbits == wanted.key_nbits
            assert layer.codecs["values"].nbits == wanted.value_nbits
            assert layer.block_tokens == wanted.group_size
            assert keys.metric is not None
        model(torch.randint(60, (1, 200)), past_key_values=cache)
        assert cache.layers[0].packed_blocks > 0


def test_a_saved_cache_goes_on_by_its_plan(made, tmp_path):
    folder, _ = made
    model, _, _ = load_model(str(folder / "model"))
    cache = QuantizedCache(model.config, layer_plan=folder / "plan.json")
    model(torch.randint(60, (1, 200)), past_key_values=cache)
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model.config)
    assert [layer.describe() for layer in loaded.layers] == [layer.describe() for layer in cache.layers]
    token = torch.tensor([[5]])
    assert torch.equal(model(token, past_key_values=loaded).logits, model(token, past_key_values=cache).logits)


def test_a_plan_of_another_model_is_refused(made, tmp_path):
    folder, _ = made
    plan = load_plan(folder / "plan.json")
    other, _, _ = load_model(str(save_tiny_checkpoint(tmp_path / "other", seed=1)))
    with pytest.raises(ValueError, match="made for other weights"):
        plan.check_model(other)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
    with pytest.raises(ValueError, match="`layer_plan` was made for another model: `config.rope_parameters"):
        QuantizedCache(other.config, layer_plan=plan)
    other.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="`layer_plan` is for 2 layers, this model has 3"):
        QuantizedCache(other.config, layer_plan=plan)


@pytest.mark.parametrize("kind", ["plan:{}.json", "int3,calibration={}.safetensors"])
def test_where_the_model_is_at_hand_its_weights_are_compared(made, tmp_path, kind):
    folder, _ = made
    strategy = kind.format(folder / "plan")
    model, _, _ = load_model(str(folder / "model"))
    other, _, _ = load_model(str(save_tiny_checkpoint(tmp_path / "other", seed=1)))
    # Twice each: what was found once is remembered for that model only.
    for _ in range(2):
        build_cache(strategy, model.config, model=model)
        make_cache(strategy, model, 100)
        for refused in (
            lambda: build_cache(strategy, other.config, model=other),
            lambda: make_cache(strategy, other, 9),
        ):
            with pytest.raises(ValueError, match="made for other weights"):
                refused()
    # The configuration alone can't tell.
    build_cache(strategy, other.config)


def test_generate_refuses_a_plan_of_other_weights(made, tmp_path):
    folder, _ = made
    save_tiny_checkpoint(tmp_path / "other", seed=1)
    arguments = [
        "generate",
        "--strategy",
        f"plan:{folder / 'plan.json'}",
        "--prompt",
        "w1 w2",
        "--max-new-tokens",
        "2",
    ]
    refused = CliRunner().invoke(build_app(), [*arguments, "--model", str(tmp_path / "other")])
    assert refused.exit_code == 2
    assert "other weights" in refused.stderr
    assert CliRunner().invoke(build_app(), [*arguments, "--model", str(folder / "model")]).exit_code == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_plan_holds_in_another_dtype_of_the_same_weights(made, tmp_path, dtype):
    folder, _ = made
    plan = load_plan(folder / "plan.json")
    rounded, _, _ = load_model(str(folder / "model"), dtype=dtype)
    plan.check_model(rounded)
    other, _, _ = load_model(str(save_tiny_checkpoint(tmp_path / "other", seed=1)), dtype=dtype)
    with pytest.raises(ValueError, match="other weights"):
        plan.check_model(other)


def test_several_budgets_share_one_measurement(made, tmp_path):
    folder, _ = made
    common = ["--model", folder / "model", "--text", folder / "text.txt", "--window-tokens", "320", "--windows", "2"]
    arguments = ["plan", *common, "--calibrate", "--out", tmp_path / "p.json", "--budget", "2.5bits,3.5bits,5bits"]
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    facts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [fact["plan"] for fact in facts] == [str(tmp_path / f"p-{bits}bits.json") for bits in ("2.5", "3.5", "5")]
    for fact, bits in zip(facts, (2.5, 3.5, 5), strict=True):
        plan = load_plan(fact["plan"])
        assert bits - 0.5 < fact["stored_bits"] <= bits
        assert {layer.calibration for layer in plan.layers} == {str(tmp_path / "p.safetensors")}
        assert {layer.residual_length for layer in plan.layers} == ({128} if bits == 2.5 else {64})
    predicted = [fact["predicted_kl"] for fact in facts]
    assert predicted == sorted(predicted, reverse=True)
    assert facts[0]["measured_kl"] > facts[2]["measured_kl"]


def test_a_budget_that_can_t_be_met_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("hf_kvplus.plans.make.layer_losses", lambda *_: pytest.fail("measured"))
    budgets = [Budget(bits=3.5), Budget(bits=1.5)]
    with OnePass(tiny_llama()) as run, pytest.raises(BudgetError, match=r"`budget` of 1\.5 bits can't be met"):
        make_plans(run, [torch.arange(100), torch.arange(100)], budgets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "1.5bits"], "`budget` of 1.5 bits can't be met"),
        (["--budget", "3.5bits", "--max-kl", "0.0000001"], "can't be met with `max_kl` 1e-07"),
        (["--budget", "much"], "`budget` must be like 3.0bits"),
    ],
)
def test_what_can_t_be_met_is_said(made, tmp_path, options, message):
    folder, _ = made
    common = ["--model", folder / "model", "--text", folder / "text.txt", "--window-tokens", "320"]
    arguments = ["plan", *common, "--windows", "2", "--out", tmp_path / "plan.json", *options]
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_budget_in_bytes_is_kept(made, tmp_path):
    folder, _ = made
    common = ["--model", folder / "model", "--text", folder / "text.txt", "--window-tokens", "320", "--windows", "2"]
    arguments = ["plan", *common, "--out", tmp_path / "plan.json", "--budget", "400KiB@1k"]
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    from hf_kvplus import estimate_memory

    model, _, _ = load_model(str(folder / "model"))
    assert estimate_memory(model.config, 1024, strategy=f"plan:{tmp_path / 'plan.json'}").cache_bytes <= 400 * 1024


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "x"}'])
def test_what_isn_t_a_plan_is_refused(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match="isn't"):
        load_plan(tmp_path / "plan.json")


def test_a_missing_plan_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(TypeError, match="`layer_plan` must be a path"):
        load_plan(3)


def test_means_are_taken_out_where_they_pay():
    model = tiny_llama(attention_bias=True, initializer_range=0.2)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[0] = 300.0
    windows = torch.randint(128, (2, 320)).unbind()
    with OnePass(model) as run:
        (made,) = make_plans(run, windows, [Budget(bits=5.0)], groups=(48,))
    assert made.plan.layers[1].rotary_means is None
    assert "turning means" in QuantizedCache(model.config, layer_plan=made.plan.as_dict()).plan[1]
    assert made.stored_bits <= 5.0


def test_options_are_tried_without_means_where_they_have_any_by_default():
    options = candidates(3.0, None, (48,), lambda option: option.key_nbits <= 3)
    without = [option for option in options if option.rotary_means == 0]
    assert {option.key_nbits for option in without} == {2, 3}
    parts = single_parts(options)
    assert len({(part.key_nbits, part.rotary_means) for part in parts}) == len(parts)
    # A loss for each part: keys with means 1, without 2, values 0.5.
    single = torch.tensor([[[2.0 if part.rotary_means == 0 else 1.0, 0.5] for part in parts]])
    losses = pair_losses(single, parts, options)[0].tolist()
    assert losses == [2.5 if option.rotary_means == 0 else 1.5 for option in options]
