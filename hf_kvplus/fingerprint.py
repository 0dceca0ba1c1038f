"""What a stored cache belongs to: the model's configuration, its weights, the tokenizer.

A cache fits one model only, and with another one nothing breaks: the text just gets worse. So everything that tells
models apart is compared by name. Left out: fields that don't touch the states (token ids, labels, names, the attention
implementation) and rotary buffers, which models with dynamic RoPE change while they run; their settings are compared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_kvplus.cachefile import tensor_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HASHED_ELEMENTS = 1 << 24
SAMPLED_MATRICES = 64
UNRELATED_FIELDS = frozenset(
    {
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "experts_implementation",
        "finetuning_task",
        "id2label",
        "is_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True)
class ModelFingerprint:
    """What tells a model from others; made once by `fingerprint_model` and used for many files.

    Args:
        weights: SHA-256 of all weights with names, shapes and dtypes, or `None` where they weren't read.
        revision: Commit of the hub repository that the configuration came from, or `None`.
    """

    weights: str | None
    revision: str | None

    def as_fields(self) -> dict[str, str]:
        """Returns what is known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def fingerprint_model(model: PreTrainedModel, *, read_weights: bool = True) -> ModelFingerprint:
    """Identifies a model by its weights, or by its hub revision alone, which costs nothing.

    Args:
        model: The model, on any device.
        read_weights: Whether to read every weight (about a second per GB). Without, weights that were changed after
            they came from the hub aren't noticed.

    Returns:
        The fingerprint.

    Raises:
        ValueError: If the weights aren't to be read and no revision is known, or they have no data (device `meta`).
    """
    revision = getattr(model.config, "_commit_hash", None)
    if not read_weights and revision is None:
        raise ValueError(
            "`read_weights=False` needs a model from the hub, but its configuration names no commit; let the "
            "weights be read"
        )
    return ModelFingerprint(_hash_weights(model) if read_weights else None, revision)


def _hash_weights(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue  # a quantizer's own entry; its tensors have entries of their own
        if tensor.device.type == "meta":
            raise ValueError(f"`model` has no weights to read: {name} is on the device `meta`; load them first")
        digest.update(f"{name.replace('_orig_mod.', '')} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # Pieces, so that a weight on a device is never copied to the host as a whole.
        for piece in tensor.detach().reshape(-1).split(HASHED_ELEMENTS):
            digest.update(tensor_bytes(piece))
    return digest.hexdigest()


def sample_weights(model: PreTrainedModel) -> list[float]:
    """Returns a few weights, taken from the same places in any dtype: other models differ, light fine-tuning may not.

    Returns:
        One element of each of up to `SAMPLED_MATRICES` matrices, spread evenly over the sorted names.

    Raises:
        NotImplementedError: If one has no data (device `meta`).
    """
    matrices = [
        tensor
        for _, tensor in sorted(model.state_dict().items())
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dim() > 1
    ]
    count = min(len(matrices), SAMPLED_MATRICES)
    places = [index * len(matrices) // count for index in range(count)]
    return [float(matrices[place].detach().reshape(-1)[matrices[place].numel() // 3]) for place in places]


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a SHA-256 of what decides which ids a text becomes: vocabulary, merges, special tokens, template."""
    fields = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        described = json.loads(backend.to_str())
        # A call with padding or truncation leaves these two behind.
        fields["backend"] = {key: value for key, value in described.items() if key not in ("padding", "truncation")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def config_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields of a configuration that may change the states, RoPE settings among them, as JSON values."""
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in UNRELATED_FIELDS
    }
    return plain_json(fields)


def plain_json(value: Any) -> Any:
    """Returns `value` as it comes back from JSON; what JSON doesn't know becomes text."""
    return json.loads(json.dumps(value, default=str))


def find_differences(saved: Any, here: Any, name: str) -> list[str]:
    """Compares two trees of JSON values.

    Args:
        saved: What the file says.
        here: What it is loaded for.
        name: What both are called.

    Returns:
        One line per difference: its dotted name and both values.
    """
    if isinstance(saved, dict) and isinstance(here, dict):
        keys = [*saved, *(key for key in here if key not in saved)]
        triples = [(saved.get(key), here.get(key), f"{name}.{key}".strip(".")) for key in keys]
        return [line for triple in triples for line in find_differences(*triple)]
    if isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        pairs = enumerate(zip(saved, here, strict=True))
        return [line for index, (old, new) in pairs for line in find_differences(old, new, f"{name}[{index}]")]
    return [] if saved == here else [f"`{name}` is {_brief(saved)} in the file and {_brief(here)} here"]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
