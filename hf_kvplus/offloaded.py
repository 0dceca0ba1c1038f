"""A cache whose blocks live in host memory or on disk, and how to go on from what a killed process left on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from hf_kvplus.cachefile import CacheFileError, read_metadata
from hf_kvplus.caches import KVPlusCache, text_config
from hf_kvplus.checks import require_choice
from hf_kvplus.fingerprint import config_fields, find_differences
from hf_kvplus.offload_index import INDEX_FORMAT, INDEX_VERSION, restore_store
from hf_kvplus.recipes import SUPPORTED_NBITS, Quantization
from hf_kvplus.saving import layer_devices
from hf_kvplus.stores.blockfile import BlockFile, OffloadError
from hf_kvplus.stores.directory import BLOCKS_PATTERN
from hf_kvplus.stores.offloaded import OffloadedStore
from hf_kvplus.stores.space import CPU, DISK, Offload, Space

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OffloadedCache(KVPlusCache):
    """Blocks of keys and values in host memory or on disk, exact or quantized; sinks and recent tokens on the device.

    What is stored is what the same cache without offloading stores, bit for bit. Reading brings one layer after the
    other back, the next ones ahead of time.

    Args:
        config: The model's configuration.
        tier: `"cpu"`, `"disk"` or `"auto"`; see `Offload`.
        directory: Folder of the files of tier `"disk"` or `"auto"`, for this cache alone. By default one of its own
            under the system's temporary folder, which may itself be memory.
        nbits: Bits per code: 2, 3, 4, 5, 6, 8, or 16 for states as they are.
        prefetch_layers: Layers that are fetched ahead of the one that is read.
        budget_bytes: Tier `"disk"`: most bytes of blocks that are also kept in memory; `"auto"`: on the device.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If an option is out of range or doesn't fit the model.
        OffloadError: If the folder can't be used.
        ImportError: If tier `"disk"` lacks xxhash, which the extra `disk` installs.

    Example:
        >>> cache = OffloadedCache(model.config, tier="disk", directory="/scratch/run-7", nbits=4)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=1000)
        >>> cache.close()
    """

    def __init__(
        self,
        config: PretrainedConfig,
        tier: str = CPU,
        directory: str | Path | None = None,
        nbits: int = 16,
        prefetch_layers: int = 1,
        *,
        budget_bytes: int | None = None,
    ) -> None:
        require_choice("nbits", nbits, SUPPORTED_NBITS)
        options = Offload(tier, directory, budget_bytes, prefetch_layers=prefetch_layers)
        super().__init__(config, quantization=Quantization(nbits, nbits), offload=options)

    @classmethod
    @torch.no_grad()
    def reopen(
        cls, config_or_model: PretrainedConfig | PreTrainedModel, directory: str | Path
    ) -> tuple[KVPlusCache, int]:
        """Goes on from the folder of a cache of tier `"disk"` whose process ended without closing it.

        Everything up to the last flush that was completed is there, the same number of tokens in every layer and row.
        The recent tokens, which were in memory only, are gone: give the model the prompt's tokens from the returned
        number on (`generate` does so by itself when it gets all of them). Every block is checked.

        Args:
            config_or_model: The model that filled it (its layers' devices are taken), or its configuration.
            directory: The folder.

        Returns:
            The cache, and how many tokens it holds.

        Raises:
            OffloadError: If the folder is in use, has nothing to reopen, or a block is missing or damaged.
            CacheFileError: If its index is damaged or belongs to another model.
        """
        config = config_or_model.config if isinstance(config_or_model, torch.nn.Module) else config_or_model
        decoder = text_config(config)
        if not Path(directory).is_dir():
            raise OffloadError(f"`directory`: there is no folder {directory}")
        space = Space(Offload(DISK, directory), reopen=True)
        try:
            content, tensors = _read_index(space, decoder)
            options = content["options"]
            space.options = Offload(**options["offload"] | {"directory": str(directory)})
            space.in_host.budget_bytes = space.options.budget_bytes
            built = KVPlusCache.from_options(config, options, space=space)
            tokens = _fill(built, content, tensors, layer_devices(config_or_model, len(built.layers), None))
        except BaseException:
            space.directory.give_up()
            raise
        return built, tokens


def _read_index(space: Space, decoder: PretrainedConfig) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns what the index tells, and its tensors.

    Raises:
        OffloadError: If there is none.
        CacheFileError: If it is damaged, of another version or of another model.
    """
    from safetensors.torch import load_file

    path = space.directory.index_path
    if not path.exists():
        raise OffloadError(
            f"{space.directory.path} has nothing to reopen: no flush was completed, the cache was closed, or the "
            "model has layers that aren't on disk (`cache.plan` tells)"
        )
    metadata = read_metadata(path, INDEX_FORMAT)
    if metadata["format_version"] != INDEX_VERSION:
        raise CacheFileError(
            f"{path}: `format_version` is {metadata['format_version']}, this version reads {INDEX_VERSION}"
        )
    content = json.loads(metadata["content"])
    different = find_differences(content["config"], config_fields(decoder), "config")
    if different:
        raise CacheFileError(f"{path} was written with another model: {'; '.join(different[:8])}")
    return content, load_file(path)


def _fill(
    cache: KVPlusCache, content: dict[str, Any], tensors: dict[str, torch.Tensor], devices: list[torch.device]
) -> int:
    """Fills the layers of an empty cache and returns how many tokens all of them hold.

    Raises:
        OffloadError: If a block is missing or damaged.
    """
    files: dict[int, BlockFile] = {}
    for index, (layer, saved) in enumerate(zip(cache.layers, content["layers"], strict=True)):
        layer.load_state_dict(_layer_state(saved, tensors, devices[index]), devices[index])
        for name, store in layer.packed.items():
            store.device = devices[index]
            restore_store(store, saved["stores"][name], files)
            _check_blocks(store)
        layer.shelf.packed_tokens = layer.packed_tokens
    named = {file.path for file in files.values()}
    for path in cache.space.directory.path.glob(BLOCKS_PATTERN):
        if path not in named:
            path.unlink()
    tokens = min(layer.packed_tokens for layer in cache.layers)
    for layer in cache.layers:
        layer.crop(tokens - layer.cumulative_length)
    return tokens


def _layer_state(saved: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Returns what `load_state_dict` of a layer takes, without blocks and recent tokens."""
    dtype, batch = getattr(torch, saved["dtype"]), saved["batch_size"]
    shapes = {name: tuple(shape) for name, shape in saved["shapes"].items()}
    return {
        "batch_size": batch,
        "cumulative_length": saved["packed_tokens"],
        "record_past": False,
        "dtype": dtype,
        "shapes": shapes,
        "padding": saved["padding"],
        **{f"packed_{name}": {} for name in shapes},
        "sinks": {name.rpartition(".")[2]: tensors[name].to(device) for name in saved["sinks"]},
        "recent": {
            name: torch.empty(batch, heads, 0, channels, dtype=dtype, device=device)
            for name, (heads, channels) in shapes.items()
        },
    }


def _check_blocks(store: OffloadedStore) -> None:
    """Reads every block once.

    Raises:
        OffloadError: If one is missing or damaged.
    """
    for first, last in store.boundaries(0, len(store)):
        store.fields(first, last)
