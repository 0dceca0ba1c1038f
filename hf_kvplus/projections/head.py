"""A linear map from the channels of all heads of a token to fewer latent channels, and back.

    (batch, heads, ..., tokens, channels)  --encode-->  (batch, 1, ..., tokens, latents)  --decode-->  as before

Attention can read latents without decoding them: a score is `query . (latent D + mean)`, so a query is multiplied with
`D` once, and an output `weights . latents` once. Queries of all heads then read one wide latent head.

Left out: how a projection is found (`hf_kvplus.gqa.calibrate`), and the structure it may have (for keys with RoPE
mostly a mixing of heads for each pair of channels): it is stored as a matrix, which is one product either way.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class HeadProjection:
    """The projection of the keys or of the values of one layer. Immutable, and equal if the numbers are.

    Args:
        encoder: `(heads * channels, latents)`.
        decoder: `(latents, heads * channels)`.
        mean: `(heads * channels,)`, taken off before encoding and put back after decoding.
        heads: Heads that the model gives.

    Raises:
        ValueError: If shapes don't fit.
    """

    def __init__(self, encoder: torch.Tensor, decoder: torch.Tensor, mean: torch.Tensor, heads: int) -> None:
        width = encoder.shape[0]
        if heads < 1 or width % heads or decoder.shape != encoder.shape[::-1] or mean.shape != (width,):
            raise ValueError(
                f"a projection of {heads} heads needs an encoder (heads * channels, latents), a decoder (latents, "
                f"heads * channels) and a mean, got {tuple(encoder.shape)}, {tuple(decoder.shape)} and "
                f"{tuple(mean.shape)}"
            )
        self.heads, self.channels, self.latents = heads, width // heads, encoder.shape[1]
        tensors = tuple(tensor.detach().float().cpu().contiguous() for tensor in (encoder, decoder, mean))
        self._tensors = {torch.device("cpu"): tensors}
        self._by_head: dict[tuple[torch.device, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        self.has_mean = bool(tensors[2].any())
        digest = hashlib.sha256(f"{heads} {tuple(encoder.shape)}".encode())
        for tensor in tensors:
            digest.update(tensor.numpy().tobytes())
        self.digest = digest.hexdigest()

    def tensors(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns encoder, decoder and mean in float32; copies on a device are made once. Don't write to them."""
        device = torch.device(device)
        if device not in self._tensors:
            self._tensors[device] = tuple(tensor.to(device) for tensor in self._tensors[torch.device("cpu")])
        return self._tensors[device]

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors, and of a decoder for rotated latents once attention has made one."""
        held = self._tensors[torch.device("cpu")]
        rotated = any(is_rotated for _, is_rotated in self._by_head)
        return sum(tensor.nbytes for tensor in held) + (held[1].nbytes if rotated else 0)

    def by_head(self, rotation: torch.Tensor | None, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the decoder and the mean as attention multiplies with them; made once, don't write to them.

        Args:
            rotation: `(latents, latents)`, its own inverse, that stored latents were multiplied with; always the same.
            device: Where.

        Returns:
            `(heads, latents, channels)` and `(heads, 1, channels)`, float32.
        """
        key = torch.device(device), rotation is not None
        if key not in self._by_head:
            _, decoder, mean = self.tensors(device)
            if rotation is not None:
                decoder = rotation.to(decoder.device) @ decoder
            matrices = decoder.unflatten(1, (self.heads, self.channels)).movedim(1, 0)
            self._by_head[key] = matrices, mean.view(self.heads, 1, self.channels)
        return self._by_head[key]

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Projects states.

        Args:
            states: `(batch, heads, ..., tokens, channels)`.

        Returns:
            `(batch, 1, ..., tokens, latents)` float32.

        Raises:
            ValueError: If heads or channels are others than those the projection is for.
        """
        if (states.shape[1], states.shape[-1]) != (self.heads, self.channels):
            raise ValueError(
                f"the projection is for {self.heads} heads of {self.channels} channels, got states with "
                f"{states.shape[1]} heads of {states.shape[-1]}; calibrate one for this model"
            )
        encoder, _, mean = self.tensors(states.device)
        joined = states.float().movedim(1, -2).flatten(-2)  # (batch, ..., tokens, heads * channels)
        return ((joined - mean) @ encoder).unsqueeze(1)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Rebuilds states from latents.

        Args:
            latents: `(batch, 1, ..., tokens, latents)`.

        Returns:
            `(batch, heads, ..., tokens, channels)` float32, a view with other strides.
        """
        _, decoder, mean = self.tensors(latents.device)
        joined = latents.squeeze(1).float() @ decoder + mean
        return joined.unflatten(-1, (self.heads, self.channels)).movedim(-2, 1)

    def absorb(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turns queries of states into queries of latents.

        Args:
            query: `(batch, query_heads, queries, channels)`; consecutive query heads share a head.

        Returns:
            `(batch, query_heads, queries, latents)`, and what the mean adds to every score,
            `(batch, query_heads, queries, 1)`.
        """
        _, decoder, mean = self.tensors(query.device)
        batch, query_heads, queries, _ = query.shape
        # The queries of a head in one product, which broadcasting over them would copy the matrix for.
        grouped = query.reshape(batch, self.heads, -1, self.channels)
        wide = decoder.to(query.dtype).unflatten(1, (self.heads, self.channels)).movedim(0, 2)  # (heads, channels, m)
        offset = grouped @ mean.to(query.dtype).view(self.heads, self.channels, 1)
        return (grouped @ wide).view(batch, query_heads, queries, -1), offset.view(batch, query_heads, queries, 1)

    def expand(self, output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Turns sums of latents into sums of states.

        Args:
            output: `(batch, query_heads, queries, latents)`, a weighted sum of latents for each query.
            weight: `(batch, query_heads, queries, 1)`, the sum of its weights.

        Returns:
            `(batch, query_heads, queries, channels)`.
        """
        _, decoder, mean = self.tensors(output.device)
        batch, query_heads, queries, _ = output.shape
        grouped, weights = (
            tensor.reshape(batch, self.heads, -1, tensor.shape[3]) for tensor in (output, weight)
        )  # (b, heads, n * q, ...)
        wide = decoder.to(output.dtype).unflatten(1, (self.heads, self.channels)).movedim(1, 0)  # (heads, m, channels)
        offset = mean.to(output.dtype).view(self.heads, 1, self.channels) * weights
        return (grouped @ wide + offset).view(batch, query_heads, queries, self.channels)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadProjection:
        """Copies of a cache share their projections, as copies of a tensor's view share a storage."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadProjection) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{self.heads} heads of {self.channels} as {self.latents} channels, SHA-256 {self.digest[:16]}"
