"""Turning keys further along RoPE: what moves attention sinks up to a window that has left them behind.

Rotary positions turn each pair of channels by `position * inv_freq`, so a stored key moves `n` tokens forward by one
more turn of `n * inv_freq`. That needs the model's frequencies and its pairing of channels, both of which are asked
of the model's own code: its rotary embedding class gives the frequencies (scaled and partial ones included), its
`rotate_half` shows which channels belong together. Any scaling of keys stays as it is.

Left out, and refused by name: frequencies that change with the length (dynamic, LongRoPE: keys of one window disagree
about them), several axes (vision-language models), positions that aren't rotary, and models that nobody has verified:
some leave a few layers without positions, which no configuration tells.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch
from transformers import PretrainedConfig

from hf_kvplus.codecs.turns import ChannelTurns

FULL = "full_attention"
CHANGING = ("dynamic", "longrope")
# Model types whose keys were seen to turn as computed here, in every layer with full attention; a test goes over them.
# Others may keep some layers without positions (Cohere 2, EXAONE 4) or rotate other channels (latent attention).
_VERIFIED_TYPES = """
    apertus arcee bitnet cohere diffllama ernie4_5 ernie4_5_moe falcon flex_olmo gemma gemma2 gemma3_text
    gemma4_text glm glm4 glm4_moe gpt_neox gpt_oss granite granitemoe granitemoeshared hy_v3 laguna lfm2 llama
    mellum mimo_v2_flash minimax_m2 ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
    """
VERIFIED = frozenset(_VERIFIED_TYPES.split())
REMEDY = 'use positions="original"'


class KeyRotation:
    """Moves keys forward by whole tokens.

    Args:
        inv_freq: Radians per token of each pair of channels, `(pairs,)`; further channels carry no position.
        interleaved: Whether channels 2i and 2i + 1 form a pair, rather than i and i + pairs.
    """

    def __init__(self, inv_freq: torch.Tensor, interleaved: bool) -> None:
        self.inv_freq = inv_freq.detach().double().cpu()
        self.interleaved = interleaved
        self._latest: tuple[Any, tuple[torch.Tensor, torch.Tensor]] | None = None

    def forward(self, keys: torch.Tensor, tokens: list[list[int]]) -> torch.Tensor:
        """Returns keys moved forward.

        Args:
            keys: `(batch, kv_heads, n, head_dim)`, rotated to the positions they come from.
            tokens: For each row (or once for all) how far it moves, once per copy to be made.

        Returns:
            `(batch, kv_heads, copies * n, head_dim)`, the copies one after another, in the dtype of `keys`.
        """
        cos, sin = self._turns(tokens, keys.device)  # (rows, 1, copies, 1, pairs)
        copies = keys.float()[:, :, None]
        pairs = len(self.inv_freq)
        rotated, rest = copies[..., : 2 * pairs], copies[..., 2 * pairs :]
        if self.interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated[..., :pairs], rotated[..., pairs:]
        turned = first * cos - second * sin, second * cos + first * sin
        joined = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        if rest.shape[-1]:
            joined = torch.cat([joined, rest.expand(*joined.shape[:-1], -1)], dim=-1)
        return joined.flatten(2, 3).to(keys.dtype)

    def _turns(self, tokens: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines; the layers of a forward pass ask for the same ones."""
        key = (tokens, device)
        if self._latest is None or self._latest[0] != key:
            # Double precision: a million tokens times one radian leaves float32 two digits of the angle.
            angles = torch.tensor(tokens, dtype=torch.float64)[:, None, :, None, None] * self.inv_freq
            self._latest = key, (angles.cos().float().to(device), angles.sin().float().to(device))
        return self._latest[1]


def key_rotation(config: PretrainedConfig) -> KeyRotation:
    """Returns how the full-attention layers of a model rotate their keys.

    Args:
        config: The configuration of a text decoder.

    Raises:
        ValueError: If they don't, or not in a way that can be continued; the message names the reason.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise ValueError(refusal(config, "it has no rotary positions that its configuration describes"))
    layered = _is_layered(config)
    parameters = parameters[FULL] if layered else parameters
    rope_type = parameters.get("rope_type", "default")
    if "mrope_section" in parameters or "mrope_interleaved" in parameters:
        raise ValueError(refusal(config, "its positions have several axes (mRoPE)"))
    if rope_type in CHANGING:
        raise ValueError(refusal(config, f"its RoPE type {rope_type!r} changes the frequencies with the length"))
    if config.model_type not in VERIFIED:
        raise ValueError(
            refusal(config, f"how it rotates keys wasn't verified, only for {', '.join(sorted(VERIFIED))}")
        )
    try:
        module = modeling_module(config)
        return KeyRotation(_frequencies(config, module, FULL), _is_interleaved(module))
    except ValueError as error:
        raise ValueError(refusal(config, str(error))) from None


def channel_turns(config: PretrainedConfig, layer_type: str = FULL) -> ChannelTurns:
    """Returns how the keys of a layer turn from one token to the next, as far as the configuration tells.

    Unlike `key_rotation` this is for a codec that is exact whatever it's told, so no model is refused for being
    unverified, for having several axes (they agree in text) or for frequencies that change with the length.

    Args:
        config: The configuration of a text decoder.
        layer_type: As transformers calls it; layers with windows may have frequencies of their own.

    Raises:
        ValueError: If keys aren't rotated, or the model's code doesn't tell how; the message names the reason.
    """
    if not getattr(config, "rope_parameters", None):
        raise ValueError(f"model type {config.model_type!r} has no rotary positions that its configuration describes")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"model type {config.model_type!r} turns some channels of latent attention only")
    try:
        module = modeling_module(config)
        inv_freq = _frequencies(config, module, layer_type)
        return ChannelTurns(tuple(inv_freq.double().tolist()), _is_interleaved(module))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"how model type {config.model_type!r} turns keys isn't known: {error}") from error


def _is_layered(config: PretrainedConfig) -> bool:
    """Whether layers of several types have RoPE settings of their own."""
    return isinstance((getattr(config, "rope_parameters", None) or {}).get(FULL), dict)


def refusal(config: PretrainedConfig, reason: str) -> str:
    """Returns the message that shifted positions can't be had, and what can."""
    return f'positions="shifted" can\'t be right for model type {config.model_type!r}: {reason}; {REMEDY}'


def modeling_module(config: PretrainedConfig) -> ModuleType:
    """Returns the module with the model's code, which stands beside that of its configuration.

    Raises:
        ValueError: If it doesn't.
    """
    name = type(config).__module__
    try:
        return importlib.import_module(name.replace("configuration_", "modeling_"))
    except ImportError:
        raise ValueError(f"its code isn't found beside {name}") from None


def _frequencies(config: PretrainedConfig, module: ModuleType, layer_type: str) -> torch.Tensor:
    """Returns what the model's own rotary embedding computes as `inv_freq`."""
    found = [
        entry
        for name, entry in vars(module).items()
        if inspect.isclass(entry)
        and name.endswith("RotaryEmbedding")
        and hasattr(entry, "compute_default_rope_parameters")
        and entry.__module__ == module.__name__
        and "Vision" not in name
    ]
    if len(found) != 1:
        raise ValueError(f"its code has {len(found)} rotary embeddings to choose from")
    rotary = found[0](config)
    return getattr(rotary, f"{layer_type}_inv_freq" if _is_layered(config) else "inv_freq")


def _is_interleaved(module: ModuleType) -> bool:
    """Finds out from the model's own functions which channels form a pair."""
    probe = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    if hasattr(module, "rotate_half"):
        turned = module.rotate_half(probe)
    elif hasattr(module, "_apply_rotary_emb"):
        turned = module._apply_rotary_emb(probe, torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    else:
        raise ValueError("its code has no `rotate_half` to learn the pairing of channels from")
    for interleaved, expected in ((False, [-3.0, -4.0, 1.0, 2.0]), (True, [-2.0, 1.0, -4.0, 3.0])):
        if turned.flatten().tolist() == expected:
            return interleaved
    raise ValueError("its code rotates channels in a way that isn't known here")
