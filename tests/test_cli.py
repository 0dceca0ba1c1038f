import importlib.metadata
import re
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from checkpoints import WORDS, one_thread, save_tiny_checkpoint
from hf_kvplus import available_strategies
from hf_kvplus.cli import build_app
from hf_kvplus.commands import EXTRAS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with one_thread():
        yield str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def run(*arguments):
    return CliRunner().invoke(build_app(), list(arguments))


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_all_commands_are_there():
    names = {command.name for command in build_app().registered_commands}
    assert names >= {"generate", "strategies", "doctor", "eval", "bench"}


def test_strategies_lists_every_one():
    result = run("strategies")
    assert result.exit_code == 0
    assert all(info.name in result.stdout for info in available_strategies())


def test_generate_prints_text_then_bytes_and_speed(checkpoint):
    result = run(
        "generate", "--model", checkpoint, "--prompt", "w1 w2 w3", "--strategy", "fp", "--max-new-tokens", "5"
    )
    assert result.exit_code == 0, result.stderr
    text, cache_line, speed_line = result.stdout.strip().splitlines()[-3:]
    assert set(text.split()) <= {f"w{number}" for number in range(63)} | {"<unk>"}
    assert cache_line.startswith("cache: ")
    assert "7 tokens" in cache_line
    assert speed_line.startswith("speed: 5 tokens")


def test_generate_says_the_same_with_fp_and_dynamic(checkpoint):
    texts = [
        run("generate", "--model", checkpoint, "--prompt", "w5 w6", "--strategy", strategy, "--max-new-tokens", "40")
        .stdout.strip()
        .splitlines()[0]
        for strategy in ("fp", "dynamic")
    ]
    assert texts[0] == texts[1]


def test_an_unknown_strategy_is_one_clear_line_and_status_2():
    result = run("generate", "--model", "anything", "--prompt", "hello", "--strategy", "itn4")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "unknown strategy `itn4`: did you mean `int4`" in result.stderr


def test_an_empty_prompt_is_refused(checkpoint):
    result = run("generate", "--model", checkpoint, "--prompt", "", "--strategy", "fp")
    assert result.exit_code == 2
    assert "`prompt`" in result.stderr


COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": len(WORDS),
    "eos_token_id": None,
}
MODELS = {
    "Gemma3Text": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Falcon": {"multi_query": True, "alibi": False},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "first_k_dense_replace": 2,
    },
    "Lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"], "block_ff_dim": 32},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_full_cache_is_what_transformers_own_cache_holds(name, tmp_path):
    """Windows, one KV head, latent attention, convolutions: each layer by its own rule."""
    save_tiny_checkpoint(tmp_path)  # for its tokenizer
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name]})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--prompt", "w1 w2 w3 w4", "--max-new-tokens", "20"]
    result = run("generate", *arguments, "--strategy", "dynamic")
    assert result.exit_code == 0, result.stderr
    assert "unquantized (100.0 %), 23 tokens" in result.stdout


def test_chat_without_a_template_is_refused(checkpoint):
    result = run("generate", "--model", checkpoint, "--prompt", "w1", "--strategy", "fp", "--chat")
    assert result.exit_code == 2
    assert "chat template" in result.stderr


def test_doctor_tells_versions_and_what_each_layer_would_get(checkpoint):
    result = run("doctor", "--model", checkpoint, "--strategy", "int4")
    assert result.exit_code == 0, result.stderr
    assert "transformers" in result.stdout
    assert "layer 0" in result.stdout
    assert "layer 1" in result.stdout


def test_doctor_tells_every_extra_that_the_package_has():
    result = run("doctor")
    told = re.findall(r"\[(\w+)\] +│ +(?:complete|missing)", result.stdout)
    offered = set(importlib.metadata.metadata("hf_kvplus").get_all("Provides-Extra"))
    assert set(told) == set(EXTRAS) == offered - {"all", "dev"}


def test_a_model_that_is_nowhere_is_status_2():
    result = run("doctor", "--model", "nowhere/at/all")
    assert result.exit_code == 2
    assert "nowhere/at/all" in result.stderr


def test_defects_keep_their_traceback(monkeypatch):
    def broken():
        raise KeyError("a defect")

    monkeypatch.setattr("hf_kvplus.commands.available_strategies", broken)
    result = run("strategies")
    assert isinstance(result.exception, KeyError)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_names_it(missing):
    done = run_python(f"import sys; sys.modules[{missing!r}] = None; from hf_kvplus.cli import main; main()")
    assert done.returncode == 2
    assert done.stderr.strip() == 'kvplus: the command line needs typer and rich: pip install "hf_kvplus[eval]"'


def test_importing_the_package_and_the_cli_imports_no_extra():
    extras = ("typer", "matplotlib", "datasets", "evaluate", "kvplus_eval", "gguf")
    done = run_python(
        "import sys; import hf_kvplus, hf_kvplus.cli, hf_kvplus.loading, hf_kvplus.report, hf_kvplus.plots;"
        f"print([name for name in {extras!r} if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr
