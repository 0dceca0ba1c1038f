"""What errors in keys cost: the second moment of the queries that read them, measured once for a model.

An error e in a key changes the score of a query q by q e, and on average over queries the squared change is e M e with
M = E[q q]. Queries of a model are far from evenly spread, so an error along a quiet direction costs next to nothing.
`kvplus plan --calibrate` measures M for every layer and KV head; a codec that knows it pushes errors into quiet
directions (see `feedback`). What is stored and how it is read doesn't change.

A codec names its metric by file and layer and holds no tensor: metrics belong to a model, like weights, and are shared
by all its caches. Files are told apart by content: one may be moved, and one that is written anew is another.

    layer.3    (kv_heads, head_dim, head_dim) float16, of mean diagonal 1, in the model's own channels
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hf_kvplus.codecs.rotation import hadamard

# Part of the mean diagonal that is added to it: rarely seen directions aren't free.
DAMPING = 0.03


class KeyMetric:
    """The metric of one layer, by file.

    Args:
        path: A file by `save_metrics`.
        layer: Which layer's.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has no metric of that layer.
    """

    def __init__(self, path: str | Path, layer: int) -> None:
        self.path, self.layer = str(path), layer
        self.digest, layers = _inspect(self.path)
        if layer not in layers:
            raise ValueError(f"`calibration` {path} has no layer {layer}; make one for this model with `kvplus plan`")

    def factor(self, rotate: bool, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns what `feedback` needs.

        Args:
            rotate: Whether the states that are quantized are rotated.
            device: Where it is needed.

        Returns:
            `(kv_heads, head_dim, head_dim)` float32, unit upper triangular W with M = W^T diag W.

        Raises:
            FileNotFoundError: If the file is gone.
            ValueError: If it was written anew since.
        """
        return _factor(self.path, self.digest, self.layer, rotate, str(device))

    def moment(self, rotate: bool, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns M of rotated or unrotated channels, damped, `(kv_heads, head_dim, head_dim)` float32."""
        return _moment(self.path, self.digest, self.layer, rotate, str(device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyMetric) and (self.digest, self.layer) == (other.digest, other.layer)

    def __hash__(self) -> int:
        return hash((self.digest, self.layer))

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyMetric:
        return self

    def __repr__(self) -> str:
        return f"KeyMetric(layer={self.layer}, sha256={self.digest[:12]})"


def save_metrics(
    path: str | Path, moments: list[torch.Tensor | None], origin: Mapping[str, Any] | None = None
) -> None:
    """Writes the metrics of a model.

    Args:
        path: The file.
        moments: `(kv_heads, head_dim, head_dim)` second moment of the queries of each layer, `None` for layers that
            have none.
        origin: What `hf_kvplus.origin.describe_weights` tells of the model, so that another one is refused.

    Raises:
        OSError: If the file can't be written.
    """
    from safetensors.torch import save_file

    tensors = {}
    for layer, moment in enumerate(moments):
        if moment is not None:
            # Half precision has no room for large queries, and only directions matter.
            size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30)
            tensors[f"layer.{layer}"] = (moment / size).half().contiguous()
    metadata = {"format": "hf_kvplus key metrics", "origin": json.dumps(dict(origin or {}))}
    save_file(tensors, str(path), metadata=metadata)


def metrics_origin(path: str | Path) -> dict[str, Any]:
    """Returns what a file by `save_metrics` tells of its model, nothing if that wasn't known.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    from safetensors import safe_open

    _inspect(str(path))
    with safe_open(str(path), framework="pt") as file:
        return json.loads((file.metadata() or {}).get("origin", "{}"))


def _inspect(path: str) -> tuple[str, frozenset[int]]:
    """Returns a digest of a file's matrices and the layers that they belong to; an unchanged file is read once."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"`calibration` {path}: no such file; make one with `kvplus plan --calibrate`")
    found = Path(path).stat()
    return _read_names(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=16)
def _read_names(path: str, changed_ns: int, size: int) -> tuple[str, frozenset[int]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        layers = frozenset(int(name.partition(".")[2]) for name in file.keys())  # noqa: SIM118, not a dictionary
    # Without the header, which has its metadata in no fixed order.
    content = Path(path).read_bytes()
    return hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest(), layers


@lru_cache(maxsize=512)
def _moment(path: str, digest: str, layer: int, rotate: bool, device: str) -> torch.Tensor:
    from safetensors import safe_open

    if _inspect(path)[0] != digest:
        raise ValueError(f"`calibration` {path} was written anew since this cache was made; make a new cache")
    with safe_open(path, framework="pt") as file:
        moment = file.get_tensor(f"layer.{layer}").float()
    channels = moment.shape[-1]
    moment = moment + DAMPING * torch.eye(channels)
    if rotate:
        rotation = hadamard(channels)
        moment = rotation @ moment @ rotation
    return moment.to(device)


@lru_cache(maxsize=512)
def _factor(path: str, digest: str, layer: int, rotate: bool, device: str) -> torch.Tensor:
    lower = torch.linalg.cholesky(_moment(path, digest, layer, rotate, "cpu").double())
    return (lower / lower.diagonal(dim1=-2, dim2=-1)[:, None, :]).transpose(-1, -2).float().contiguous().to(device)
