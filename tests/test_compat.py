"""What differs between versions of transformers and torch is known in one place, and the rest is refused."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import tiny_llama_config
from hf_kvplus import compat


@pytest.mark.parametrize("version", ["5.14", "5.14.0", "5.14.0.dev0", "5.24.0", "5.99.1"])
def test_supported_versions_of_transformers(version):
    compat.check_version("transformers", version)


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.13.1", "6.0.0", "6.0.0.dev0"])
def test_other_versions_of_transformers_are_refused(version):
    match = rf"transformers from 5\.14 up to, but not including, 6, found {version}; pip install"
    with pytest.raises(ImportError, match=match):
        compat.check_version("transformers", version)


@pytest.mark.parametrize(("version", "good"), [("2.5.1", False), ("2.6.0+cu124", True), ("2.13.0+cpu", True)])
def test_versions_of_torch(version, good):
    if good:
        compat.check_version("torch", version)
        return
    with pytest.raises(ImportError, match=r"pip install 'torch>=2\.6,<3'"):
        compat.check_version("torch", version)


def test_importing_the_package_checks_before_anything_else_fails():
    script = (
        "import transformers, transformers.cache_utils\n"
        "transformers.__version__ = '5.8.0'\n"
        "del transformers.cache_utils.get_layer_types_and_kwargs\n"
        "import hf_kvplus\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: hf_kvplus runs with transformers from 5.14" in done.stderr


def test_arguments_shared_by_all_layers_become_one_set_per_layer(monkeypatch):
    shared = {"sliding_window": 7}
    types = ("sliding_attention", "full_attention")
    monkeypatch.setattr(compat, "get_layer_types_and_kwargs", lambda config: (types, shared))
    layer_types, options = compat.layer_types_and_options(tiny_llama_config())
    assert layer_types == list(types)
    assert options == [shared, shared]
    options[0]["sliding_window"] = 3
    assert options[1] == shared == {"sliding_window": 7}


def test_layers_of_a_configuration():
    config = tiny_llama_config()
    assert len(compat.layer_types_and_options(config)[0]) == 2
    alike = SimpleNamespace(per_layer_config=None)
    assert compat.layer_configs(alike) == [alike]
    differing = SimpleNamespace(per_layer_config=[1, 2])
    assert compat.layer_configs(differing) == [1, 2]


def test_layers_that_do_not_say_whether_they_can_be_cropped():
    class Attention:
        def crop(self, tokens_to_remove):
            raise NotImplementedError

    class Recurrent(Attention):
        recurrent_states = {0: None, 1: torch.zeros(1)}

    class Convolution(Attention):
        recurrent_states = {0: None}

    class Frozen(Attention):
        is_croppable = False

    assert [compat.is_croppable(kind()) for kind in (Attention, Recurrent, Convolution, Frozen)] == [
        True,
        False,
        True,
        False,
    ]
    assert not compat.is_croppable(object())


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_keyword_is_what_the_forward_has(name):
    forward = {"cache": lambda input_ids, cache: None, "past_key_values": lambda input_ids, past_key_values: None}[
        name
    ]
    assert compat.cache_keyword(SimpleNamespace(forward=forward)) == name
