"""The cache with latent heads: exact where heads are redundant, and in all else a cache like the others."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from planted import planted, windows
from transformers import DynamicCache, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from conftest import tiny_llama, tiny_llama_config
from hf_kvplus import (
    CacheFileError,
    GQACache,
    GQAProjection,
    build_cache,
    calibrate_gqa,
    estimate_memory,
    load_cache,
    measure_memory,
    save_cache,
    use_fused_attention,
)
from hf_kvplus.cli import build_app
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.codecs.metric import save_metrics
from hf_kvplus.compat import cache_keyword
from hf_kvplus.layer_plan import LayerPlan
from hf_kvplus.recipes import Quantization
from kvplus_eval.runner import make_cache

KINDS = ("rope", "partial", "none")


@pytest.fixture(scope="module")
def redundant():
    """Models of each kind whose 4 heads lie in 2 directions, with their projections."""
    models = {kind: planted(kind, 2) for kind in KINDS}
    return {kind: (model, calibrate_gqa(model, windows(), 2)) for kind, model in models.items()}


@pytest.fixture(scope="module")
def llama():
    return tiny_llama(num_key_value_heads=4)


@pytest.fixture(scope="module")
def path(llama, tmp_path_factory):
    found = tmp_path_factory.mktemp("projection") / "two.safetensors"
    calibrate_gqa(llama, windows(), 2).save(found)
    return found


@torch.no_grad()
def logits(model, cache, ids, chunk: int = 25) -> torch.Tensor:
    return torch.cat([model(part, **{cache_keyword(model): cache}).logits for part in ids.split(chunk, 1)], 1)


def text(rows: int = 2, tokens: int = 300, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", ["solved", "equal"])
def test_redundant_heads_are_stored_without_loss(redundant, kind, ranks):
    """At positions far from those calibrated on, too."""
    model, projection = redundant[kind]
    if ranks == "equal":
        projection = calibrate_gqa(model, windows(), 2, ranks="equal")
    cache = GQACache(model.config, 2, projection, residual_length=0, num_sink_tokens=0)
    ids = text()
    found = logits(model, cache, ids)
    assert cache.layers[0].packed_blocks >= 8
    expected = logits(model, DynamicCache(config=model.config), ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert projection.latent_share() == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_directions_lose_something(redundant, kind):
    model, _ = redundant[kind]
    projection = calibrate_gqa(model, windows(), 1)
    cache = GQACache(model.config, 1, projection, residual_length=0, num_sink_tokens=0)
    expected = logits(model, DynamicCache(config=model.config), text())
    assert (logits(model, cache, text()) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_fused_attention_reads_latents_as_decoding_does(redundant, kind, kernel):
    """With padding, and several queries at once."""
    model, _ = redundant[kind]
    projection = calibrate_gqa(model, windows(), 1)
    ids, mask = text(), torch.ones(2, 300, dtype=torch.long)
    mask[1, :70] = 0
    states = []
    for fused in (False, True):
        cache = GQACache(model.config, 1, projection, residual_length=20, num_sink_tokens=3)
        use_fused_attention(model, fused, kernel=kernel)
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            options = {cache_keyword(model): cache}
            model(ids[:, :280], attention_mask=mask[:, :280], position_ids=positions[:, :280], **options)
            parts = [(280, 281), (281, 288), (288, 300)]
            for first, last in parts:
                placed = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
                output = model(ids[:, first:last], **placed, **options).logits
        states.append(output)
    use_fused_attention(model, enabled=False)
    torch.testing.assert_close(states[1], states[0], atol=2e-4, rtol=0)


@pytest.mark.parametrize("parts", ["+int4,recent=16", "+window:120,sinks=4", "+int4,recent=16+window:150,sinks=4"])
def test_fused_attention_reads_what_other_strategies_add(llama, path, parts):
    ids, states = text(tokens=260), []
    for fused in (False, True):
        cache = build_cache(f"gqa:2,projection={path}{parts}", llama.config)
        use_fused_attention(llama, fused)
        with torch.no_grad():
            for part in ids.split([240, 1, 19], 1):
                output = llama(part, **{cache_keyword(llama): cache}).logits
        states.append(output)
    use_fused_attention(llama, enabled=False)
    torch.testing.assert_close(states[1], states[0], atol=2e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_what_is_stored_does_not_depend_on_chunks(llama, path, chunk):
    ids, held = text(tokens=300), []
    for size in (chunk, 64):
        cache = build_cache(f"gqa:2,projection={path}", llama.config)
        # The states of later layers depend on what their queries read; those of the first don't.
        logits(llama, cache, ids, size)
        held.append(cache.layers[0])
    assert held[0].packed_blocks == held[1].packed_blocks == (300 - 64) // 32
    for name in ("keys", "values"):
        torch.testing.assert_close(held[0].packed[name].get("states"), held[1].packed[name].get("states"))


@pytest.mark.parametrize(
    "parts", ["", "+int8", "+int4,recent=16", "+k8v4", "+window:120,sinks=4", "+int4,recent=16+window:150,sinks=4"]
)
def test_it_joins_other_strategies(llama, path, parts):
    """Each pair of rows answers as each row alone, crops come back, beams and copies run, and bytes are told."""
    strategy = f"gqa:2,projection={path}{parts}"
    ids = text(tokens=260)
    with torch.no_grad():
        cache = build_cache(strategy, llama.config)
        both = logits(llama, cache, ids, 65)
        alone = logits(llama, build_cache(strategy, llama.config), ids[1:], 65)
        torch.testing.assert_close(both[1:], alone, atol=2e-3, rtol=0)
        twin = copy.deepcopy(cache)
        token = text(tokens=1)
        expected = logits(llama, twin, token)
        if "window" not in parts:
            logits(llama, cache, token[:, :1])
            cache.crop(-1)
        torch.testing.assert_close(logits(llama, cache, token), expected, atol=1e-4, rtol=0)
        beams = llama.generate(
            ids[:1],
            past_key_values=build_cache(strategy, llama.config),
            num_beams=3,
            max_new_tokens=4,
            do_sample=False,
        )
        assert beams.shape[1] == 264
    assert any(isinstance(codec, LatentCodec) for codec in cache.layers[0].codecs.values())


@pytest.mark.parametrize("parts", ["", "+int4", "+int4+window:150,sinks=4"])
@pytest.mark.parametrize("tier", ["offload:cpu", "offload:disk,dir={}"])
@pytest.mark.parametrize("fused", [False, True], ids=["decoded", "fused"])
def test_offloaded_latents_answer_as_those_in_memory_do(llama, path, parts, tier, fused, tmp_path):
    ids, found = text(tokens=420), []
    for offload in ("", f"+{tier.format(tmp_path)}"):
        cache = build_cache(f"gqa:2,projection={path}{parts}{offload}", llama.config)
        use_fused_attention(llama, fused)
        with torch.no_grad():
            for part in ids.split([400, 1, 19], 1):
                output = llama(part, **{cache_keyword(llama): cache}).logits
        found.append(output)
    use_fused_attention(llama, enabled=False)
    assert cache.layers[0].packed_blocks > 0
    assert cache.layers[0].shelf is not None
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", ["", "+int4,recent=16", "+k16v4", "+window:120,sinks=4"])
def test_bytes_are_told_beforehand(llama, path, parts):
    """Those of the matrices apart: all caches of a model share them."""
    strategy = f"gqa:2,projection={path}{parts}"
    cache = build_cache(strategy, llama.config)
    for part in (text(tokens=260), text(tokens=1)):
        logits(llama, cache, part, chunk=260)
    measured = measure_memory(cache)
    told = estimate_memory(llama.config, 261, 2, strategy, "float32")
    assert told.cache_bytes == pytest.approx(measured.total_bytes, rel=0.001)
    assert measured.packed_bytes > 0
    assert measured.shared_bytes == cache.projection.nbytes > 0


def test_left_padded_rows_answer_as_they_do_alone(llama, path):
    cache = build_cache(f"gqa:2,projection={path}", llama.config)
    ids = text(tokens=200)
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, :64] = 0  # whole blocks, so that both runs project the same tokens
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    padded = llama.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert [layer.padding.counts for layer in cache.layers] == [[0, 64]] * 2
    alone = llama.generate(
        ids[1:, 64:], past_key_values=build_cache(f"gqa:2,projection={path}", llama.config), **options
    )
    for ours, theirs in zip(padded.logits, alone.logits, strict=True):
        torch.testing.assert_close(ours[1:], theirs, atol=1e-4, rtol=0)


def test_sinks_and_recent_tokens_are_stored_as_they_are(llama, path):
    plain, cache = DynamicCache(config=llama.config), build_cache(f"gqa:2,projection={path}", llama.config)
    for each in (plain, cache):
        with torch.no_grad():
            llama(text(1), **{cache_keyword(llama): each})
    keys, latent = plain.layers[0].keys, cache.layers[0].dense()[0]
    recent = len(cache.layers[0].recent)
    assert torch.equal(keys[:, :, :4], latent[:, :, :4])
    assert torch.equal(keys[:, :, -recent:], latent[:, :, -recent:])
    assert not torch.allclose(keys[:, :, 4:-recent], latent[:, :, 4:-recent], atol=1e-3)


def test_the_better_channels_cost_less(llama):
    """Solved ranks keep as many channels, and svd beats the mean in the metric by construction."""
    equal, solved = (calibrate_gqa(llama, windows(), 2, ranks=ranks) for ranks in ("equal", "solved"))
    assert equal.latent_share() == solved.latent_share() == 0.5
    ids = text(tokens=500)
    expected = logits(llama, DynamicCache(config=llama.config), ids).log_softmax(-1)
    losses = {}
    for name, projection in {"svd": equal, "mean": calibrate_gqa(llama, windows(), 2, method="mean")}.items():
        assert projection.latent_share() == 0.5
        found = logits(llama, GQACache(llama.config, 2, projection), ids).log_softmax(-1)
        losses[name] = (expected.exp() * (expected - found)).sum(-1).mean().item()
    assert losses["svd"] < 0.5 * losses["mean"]


@pytest.mark.parametrize("ranks", ["solved", "equal"])
def test_a_share_of_the_channels_is_kept_in_whole_runs(llama, ranks):
    """Of 64 channels in runs of 16; what is rounded down isn't given to others."""
    kept = {share: calibrate_gqa(llama, windows(2), 2, ranks=ranks, latent_share=share) for share in (0.76, 0.5, 0.01)}
    assert [projection.latent_share() for projection in kept.values()] == [0.75, 0.5, 0.25]
    assert kept[0.5].layers == calibrate_gqa(llama, windows(2), 2, ranks=ranks).layers
    assert logits(llama, GQACache(llama.config, 2, kept[0.01]), text()).isfinite().all()


def test_a_saved_cache_goes_on(llama, path, tmp_path):
    cache = build_cache(f"gqa:2,projection={path}+int8", llama.config)
    logits(llama, cache, text())
    save_cache(cache, tmp_path / "cache.safetensors", model=llama)
    loaded = load_cache(tmp_path / "cache.safetensors", llama)
    assert torch.equal(logits(llama, loaded, text(tokens=3)), logits(llama, cache, text(tokens=3)))
    other = tmp_path / "other.safetensors"
    calibrate_gqa(llama, windows(seed=9), 2).save(other)
    with pytest.raises(CacheFileError, match="projection"):
        load_cache(tmp_path / "cache.safetensors", build_cache(f"gqa:2,projection={other}+int8", llama.config))


def test_a_projection_that_was_never_saved_must_be_given_again(llama, tmp_path):
    projection = calibrate_gqa(llama, windows(), 2)
    cache = GQACache(llama.config, 2, projection)
    logits(llama, cache, text())
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", GQACache(llama.config, 2, projection))
    assert torch.equal(logits(llama, loaded, text(tokens=3)), logits(llama, cache, text(tokens=3)))


def test_a_projection_file_comes_back_as_it_was(llama, path):
    loaded = GQAProjection.load(path)
    assert loaded.num_key_value_heads == 2
    assert loaded.facts["method"] == "svd"
    assert loaded.layers == calibrate_gqa(llama, windows(), 2).layers
    assert GQAProjection.load(path) is loaded


def test_the_folder_of_the_checkpoint_is_looked_in(llama, path, tmp_path):
    llama.save_pretrained(tmp_path)
    (tmp_path / "kvplus-gqa-2.safetensors").write_bytes(path.read_bytes())
    loaded = type(llama).from_pretrained(tmp_path)
    assert build_cache("gqa:2", loaded.config).projection.latent_share() == 0.5


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        ("gqa", ValueError, "needs the number of heads; write `gqa:2,projection=PATH`"),
        ("gqa:2", ValueError, "needs a head projection, and there is none at .*kvplus calibrate-gqa"),
        ("gqa:2,projection=/no/such", FileNotFoundError, "no such file; make one with `kvplus calibrate-gqa"),
        ("gqa:3,projection={path}", ValueError, "was made for 2"),
        ("gqa:0,projection={path}", ValueError, "`num_key_value_heads` must be at least 1, got 0"),
        ("gqa:2,file={path}", ValueError, "unknown option file; it takes projection, recent, sinks"),
        ("gqa:2,projection={path},recent=8+int4", ValueError, "give them there only"),
        ("gqa:2,projection={path}+int4,means=2", ValueError, "`rotary_means`=2 can't be had: `gqa` stores latents"),
    ],
)
def test_a_wrong_string_gets_one_clear_error(llama, path, strategy, error, message):
    with pytest.raises(error, match=message):
        build_cache(strategy.format(path=path), llama.config)


def test_a_calibration_of_the_heads_is_refused_for_latents(llama, path, tmp_path):
    """Before anything is stored, as is a calibrated plan; an uncalibrated one is joined."""
    queries = [torch.eye(16).expand(4, 16, 16)] * 2
    save_metrics(tmp_path / "metrics.safetensors", queries)
    calibration = str(tmp_path / "metrics.safetensors")
    with pytest.raises(ValueError, match="`calibration` is for the model's own heads, and `gqa` stores latents"):
        build_cache(f"gqa:2,projection={path}+int3,calibration={calibration}", llama.config)
    for name, found in (("with", calibration), ("without", None)):
        LayerPlan((Quantization(3, 3, calibration=found),) * 2).save(tmp_path / f"{name}.json")
    with pytest.raises(ValueError, match="leave one of the two out"):
        build_cache(f"gqa:2,projection={path}+plan:{tmp_path / 'with.json'}", llama.config)
    logits(llama, build_cache(f"gqa:2,projection={path}+plan:{tmp_path / 'without.json'}", llama.config), text())


def test_another_model_is_refused(path):
    with pytest.raises(
        ValueError, match="calibrated for another model: `config.hidden_size` is 64 in the file and 32"
    ):
        build_cache(f"gqa:2,projection={path}", tiny_llama(num_key_value_heads=4, hidden_size=32).config)


def other_weights():
    """A model of the same configuration as `llama`, with other weights."""
    torch.manual_seed(1)
    return LlamaForCausalLM(tiny_llama_config(num_key_value_heads=4)).eval()


@pytest.mark.parametrize("parts", ["", "+int4", "+window:120,sinks=4"])
def test_where_the_model_is_at_hand_its_weights_are_compared(llama, path, parts):
    other, strategy = other_weights(), f"gqa:2,projection={path}{parts}"
    # Twice each: what was found once is remembered for that model only.
    for _ in range(2):
        build_cache(strategy, llama.config, model=llama)
        make_cache(strategy, llama, 100)
        for build in (
            partial(build_cache, strategy, other.config, model=other),
            partial(make_cache, strategy, other, 9),
        ):
            with pytest.raises(ValueError, match="was made for other weights .* with `kvplus calibrate-gqa`"):
                build()
    # The configuration alone can't tell.
    build_cache(strategy, other.config)


def test_the_preset_compares_weights_where_it_gets_the_model(llama, path):
    other = other_weights()
    GQACache(llama.config, 2, path, model=llama)
    with pytest.raises(ValueError, match="was made for other weights than this model has"):
        GQACache(other.config, 2, path, model=other)
    with pytest.raises(ValueError, match="was made for other weights than this model has"):
        GQAProjection.load(path).check_model(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_projection_holds_in_another_dtype_of_the_same_weights(llama, path, dtype):
    strategy = f"gqa:2,projection={path}"
    rounded = copy.deepcopy(llama).to(dtype)
    build_cache(strategy, rounded.config, model=rounded)
    other = other_weights().to(dtype)
    with pytest.raises(ValueError, match="made for other weights"):
        build_cache(strategy, other.config, model=other)


def test_commands_refuse_a_projection_of_other_weights(tmp_path):
    folders = [str(save_tiny_checkpoint(tmp_path / name, seed=seed)) for seed, name in enumerate(("one", "two"))]
    text, found = str(write_words(tmp_path / "text.txt", 700)), str(tmp_path / "one.safetensors")
    small = ["--num-key-value-heads", "1", "--windows", "2", "--window-tokens", "96", "--text", text, "--out", found]

    def run(*arguments):
        return CliRunner().invoke(build_app(), [*arguments, "--device", "cpu"])

    assert run("calibrate-gqa", "--model", folders[0], *small).exit_code == 0
    strategy = f"gqa:1,projection={found}"
    asked = ["--prompt", "w1 w2", "--max-new-tokens", "2", "--strategy", strategy]
    assert run("generate", "--model", folders[0], *asked).exit_code == 0
    refused = run("generate", "--model", folders[1], *asked)
    assert refused.exit_code == 2
    assert "was made for other weights" in refused.stderr
    common = ["--model", folders[1], "--strategies", f"dynamic,{strategy}", "--text", text, "--out", str(tmp_path)]
    sizes = ["--windows", "1", "--window-tokens", "200", "--timing-rounds", "0"]
    for arguments in (["eval", *sizes], ["bench", "--context", "200", "--tokens", "2", "--rounds", "1"]):
        done = run(*arguments, *common)
        assert done.exit_code == 1
        assert "failed: ValueError: the head projection" in done.stdout
        assert "was made for other weights" in done.stdout


def test_a_file_that_is_no_projection_is_refused(tmp_path, llama):
    (tmp_path / "text").write_text("no projection")
    with pytest.raises(CacheFileError, match="isn't a safetensors file"):
        build_cache(f"gqa:2,projection={tmp_path / 'text'}", llama.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 4}, "must be below the 4 key-value heads"),
        ({"method": "average"}, "`method` must be one of svd, mean"),
        ({"ranks": "best"}, "`ranks` must be one of solved, equal"),
        ({"latent_share": 1.0}, "`latent_share` must be between 0 and 1, got 1.0"),
        ({"latent_share": 0.5, "method": "mean"}, "`latent_share` must be None with method=.mean."),
        ({"windows": []}, "`windows` must be longer than"),
        ({"context_tokens": 96}, "`windows` must be longer than context_tokens=96"),
    ],
)
def test_calibration_refuses_what_cannot_be(llama, change, message):
    arguments = {"windows": windows(2), "num_key_value_heads": 2, **change}
    with pytest.raises(ValueError, match=message):
        calibrate_gqa(llama, **arguments)


def test_what_cannot_be_calibrated_is_refused_by_name():
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(
        ValueError, match="must be a decoder, T5ForConditionalGeneration has an encoder; use a quantized"
    ):
        calibrate_gqa(model, windows(2), 1)
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel, got Linear"):
        calibrate_gqa(torch.nn.Linear(2, 2), windows(2), 1)


def test_calibration_leaves_the_model_as_it_was(llama):
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    calibrate_gqa(llama, windows(2), 2)
    assert all(torch.equal(before[name], weight) for name, weight in llama.state_dict().items())
    assert all(weight.requires_grad and weight.grad is None for weight in llama.parameters())
