"""Converted checkpoints: exact where heads are redundant, plain transformers models, clear refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers
from planted import HEAD_DIM, planted, windows
from test_gqa_cache import text

from conftest import tiny_llama
from hf_kvplus import build_cache, convert_to_gqa, measure_memory
from hf_kvplus.compat import cache_keyword
from hf_kvplus.gqa.convert import CONVERTIBLE, rotary_layouts
from hf_kvplus.gqa.factors import Layout

BASE = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
CLASSES = {
    "arcee": "Arcee",
    "gemma": "Gemma",
    "granite": "Granite",
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}
EXTRA = {
    "granite": {"attention_multiplier": 0.25},  # as initialized, scores are so large that rounding shows
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"hidden_size": 64},
}
NORMED = ("qwen3", "qwen3_moe")


def build(model_type: str, **changes) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    name = CLASSES[model_type]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **EXTRA.get(model_type, {}), **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for layer in model.model.layers:
        for projection in ("q_proj", "k_proj", "v_proj"):
            bias = getattr(layer.self_attn, projection).bias
            if bias is not None:
                torch.nn.init.normal_(bias, std=0.3)
    return model


def plant(model: transformers.PreTrainedModel, groups: list[tuple[int, ...]]) -> None:
    """Makes the heads of each group images of its first one: complex multiples of keys, any maps of values."""
    for layer, layout in zip(model.model.layers, rotary_layouts(model), strict=True):
        attention = layer.self_attn
        for name, pairs in (("k_proj", layout.pairs), ("v_proj", 0)):
            projection = getattr(attention, name)
            rows = [projection.weight.data] + ([] if projection.bias is None else [projection.bias.data[:, None]])
            heads = torch.cat(rows, 1).unflatten(0, (-1, HEAD_DIM))
            for first, *others in groups:
                for head in others:
                    image = torch.zeros(HEAD_DIM, HEAD_DIM)
                    for pair in range(pairs):
                        real, imaginary = torch.randn(2)
                        image[pair, pair] = image[pair + pairs, pair + pairs] = real
                        image[pair, pair + pairs], image[pair + pairs, pair] = -imaginary, imaginary
                    rest = HEAD_DIM - 2 * pairs
                    image[2 * pairs :, 2 * pairs :] = torch.randn(rest, rest) / max(1, rest) ** 0.5
                    heads[head] = image @ heads[first]
            joined = heads.flatten(0, 1)
            projection.weight.data = joined[:, : projection.in_features].contiguous()
            if projection.bias is not None:
                projection.bias.data = joined[:, -1].contiguous()


@torch.no_grad()
def difference(one, other) -> float:
    return (one(text()).logits - other(text()).logits).abs().max().item()


def test_every_verified_type_has_a_test():
    assert set(CLASSES) == CONVERTIBLE


@pytest.mark.parametrize("model_type", sorted(CLASSES))
def test_redundant_heads_convert_without_loss(model_type):
    """The groups aren't neighbours: they have to be found."""
    model = build(model_type)
    if model_type in NORMED:
        with pytest.raises(NotImplementedError, match="normalizes the keys of each head"):
            convert_to_gqa(model, 2, "svd", windows())
        for layer in model.model.layers:  # heads that are equal survive the mean
            for name in ("k_proj", "v_proj"):
                heads = getattr(layer.self_attn, name).weight.data.unflatten(0, (4, HEAD_DIM))
                heads[2], heads[3] = heads[0], heads[1]
        converted = convert_to_gqa(model, 2, "mean", windows())
    else:
        plant(model, [(0, 2), (1, 3)])
        converted = convert_to_gqa(model, 2, "svd", windows())
    assert (converted.config.num_key_value_heads, converted.config.num_attention_heads) == (2, 4)
    assert difference(model, converted) < 1e-4 * model(text()).logits.std().item() + 1e-4


def test_heads_that_are_turned_are_aligned():
    """Orthogonal images are all that `aligned` needs; the mean of them is wrong."""
    model = build("llama")
    for layer in model.model.layers:
        attention, half = layer.self_attn, HEAD_DIM // 2
        keys, values = (
            getattr(attention, name).weight.data.unflatten(0, (4, HEAD_DIM)) for name in ("k_proj", "v_proj")
        )
        for head, source in ((1, 0), (3, 2)):
            angle = torch.rand(half, 1) * 6.28
            x, y = keys[source, :half], keys[source, half:]
            keys[head] = torch.cat([angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y])
            values[head] = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM))[0] @ values[source]
    assert difference(model, convert_to_gqa(model, 2, "aligned", windows())) < 1e-3
    assert difference(model, convert_to_gqa(model, 2, "mean", windows())) > 0.1


@pytest.mark.parametrize(("held", "kept", "query_heads"), [(4, 3, 6), (4, 1, 4), (2, 1, 4), (3, 2, 8)])
def test_any_number_of_heads_is_reached(held, kept, query_heads):
    """Where heads don't divide, query heads of zeros fill the groups up; in another order nothing would change."""
    query = {4: 4, 2: 4, 3: 6}[held]
    model = build("llama", num_attention_heads=query, num_key_value_heads=held)
    group = tuple(range(held - kept + 1))
    plant(model, [group])
    converted = convert_to_gqa(model, kept, "svd", windows())
    assert converted.config.num_key_value_heads == kept
    assert converted.config.num_attention_heads == query_heads
    if -(-held // kept) >= len(group):  # the group that was planted fits into one of the result's
        assert difference(model, converted) < 1e-3


def test_layouts_are_learned_from_the_model():
    assert rotary_layouts(tiny_llama()) == [Layout(8, False)] * 2
    assert rotary_layouts(build("smollm3")) == [Layout(8, False), Layout()]
    assert rotary_layouts(planted("partial", 4))[0].pairs == HEAD_DIM // 8
    config = transformers.CohereConfig(**{**BASE, "hidden_size": 64})
    assert rotary_layouts(transformers.CohereForCausalLM(config).eval())[0] == Layout(8, True)


def test_the_folder_loads_where_this_package_is_unknown(tmp_path):
    model = build("qwen2")
    converted = convert_to_gqa(model, 3, "svd", windows())
    converted.save_pretrained(tmp_path)
    torch.save(text(), tmp_path / "ids")
    torch.save(converted(text()).logits, tmp_path / "logits")
    program = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).eval()\n"
        f"ids, expected = torch.load({str(tmp_path / 'ids')!r}), torch.load({str(tmp_path / 'logits')!r})\n"
        "torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)\n"
        "assert model.generate(ids[:, :20], max_new_tokens=4, do_sample=False).shape == (2, 24)\n"
        "assert not [name for name in sys.modules if name.startswith('hf_kvplus')]\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_converted_model_takes_a_quantized_cache():
    """Both savings in one report: half the heads, and 4 bits of those."""
    model = build("llama")
    converted = convert_to_gqa(model, 2, "svd", windows())
    sizes = {}
    for name, each in (("whole", model), ("converted", converted)):
        for strategy in ("dynamic", "int4"):
            cache = build_cache(strategy, each.config)
            with torch.no_grad():
                each(torch.randint(1, 128, (1, 2000)), **{cache_keyword(each): cache})
            sizes[name, strategy] = measure_memory(cache).total_bytes
    assert sizes["converted", "dynamic"] == sizes["whole", "dynamic"] / 2
    assert sizes["converted", "int4"] == pytest.approx(sizes["whole", "int4"] / 2, rel=0.02)
    assert sizes["converted", "int4"] < 0.12 * sizes["whole", "dynamic"]


def test_the_original_stays_as_it_is():
    model = build("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    convert_to_gqa(model, 2, "svd", windows())
    assert model.config.num_key_value_heads == 4
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_what_a_loader_dequantized_is_saved_and_loaded_as_any_checkpoint(tmp_path):
    """A model from a GGUF file names its quantization, which a saved folder must not."""
    model = build("llama")
    model.config.quantization_config = {"quant_method": "gguf"}
    converted = convert_to_gqa(model, 2, "mean")
    converted.save_pretrained(tmp_path / "first")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    assert "quantization_config" not in (tmp_path / "second" / "config.json").read_text()


def test_layers_of_a_quantizer_are_refused():
    class Packed(torch.nn.Linear):
        """As quantizers' layers are: linear by class, with codes for weights."""

    model = build("llama")
    model.model.layers[1].self_attn.k_proj = Packed(96, 64, bias=False)
    with pytest.raises(NotImplementedError, match="of which 1 have attention made of q_proj"):
        convert_to_gqa(model, 2, "mean")


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: planted("none", 4), {}, NotImplementedError, "'gpt2' can't be converted: .*GQACache"),
        (lambda: build("llama"), {"num_key_value_heads": 4}, ValueError, "must be below the model's 4, got 4"),
        (lambda: build("llama"), {"calibration": None}, ValueError, "`calibration` must be given"),
        (lambda: build("llama"), {"method": "sum"}, ValueError, "`method` must be one of mean, aligned, svd"),
        (lambda: build("llama"), {"num_key_value_heads": 0}, ValueError, "must be at least 1, got 0"),
        (lambda: build("stablelm"), {"num_key_value_heads": 3}, NotImplementedError, "can become 1, 2 in a plain"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, options, error, message):
    arguments = {"num_key_value_heads": 2, "method": "svd", "calibration": windows(2), **options}
    with pytest.raises(error, match=message):
        convert_to_gqa(make(), **arguments)


def test_a_thing_that_is_no_model_is_refused():
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel, got Linear"):
        convert_to_gqa(torch.nn.Linear(2, 2), 1)
