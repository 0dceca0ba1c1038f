"""Merging the heads of a group into one, in a form that folds into a model's weights.

For the heads `a` of a group a merger gives one encoder E and decoders D_a, so that `x_a` is rebuilt as `D_a E x`:

    mean       E averages, every D_a is the identity
    aligned    D_a turns the merged head into head a (a phase for each pair of rotary channels, otherwise an
               orthogonal matrix), E averages what is turned back, weighted by what the errors of each head cost
    svd        the best E and D_a of all, in the metric of errors (see `hf_kvplus.gqa.calibrate`)

Keys are mixed within pairs of rotary channels only, as complex numbers, which commutes with RoPE at any position.

Source: recipes of orthogonal Procrustes alignment before merging heads (Align Attention Heads Before Merging Them,
https://arxiv.org/abs/2412.20677); differs in the metric from gradients and in the best factors in place of a mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvplus.gqa.grouping import Group
from hf_kvplus.gqa.moments import Moments

METHODS = ("mean", "aligned", "svd")
ALIGNMENT_ROUNDS = 8
METRIC_FLOOR = 1e-3


@dataclass(frozen=True)
class Layout:
    """Which channels of a head turn with positions.

    Args:
        pairs: Pairs of rotary channels; 0 without RoPE. The channels behind them don't turn.
        interleaved: Whether channels 2i and 2i + 1 form a pair, rather than i and i + pairs.
    """

    pairs: int = 0
    interleaved: bool = False

    def indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first and the second channels of all pairs, both `(pairs,)`."""
        counts = torch.arange(self.pairs)
        return (2 * counts, 2 * counts + 1) if self.interleaved else (counts, counts + self.pairs)


@dataclass(frozen=True)
class Factors:
    """How a group of heads becomes one.

    Args:
        encoder: `(channels, group * channels)`: from all heads of the group to the merged one.
        decoders: `(group, channels, channels)`: from the merged head to each.
    """

    encoder: torch.Tensor
    decoders: torch.Tensor

    def loss(self, moments: Moments, group: Group) -> float:
        """Returns what is lost, in the metric."""
        covariance, metric = restricted(moments, group)
        rest = torch.eye(len(covariance), dtype=torch.float64) - self.decoders.flatten(0, 1) @ self.encoder
        return torch.einsum("ij,ji->", metric, rest @ covariance @ rest.T).item()


def restricted(moments: Moments, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns second moments and metric of the heads of a group, both `(group * channels,) * 2`."""
    channels = torch.arange(moments.channels)
    rows = torch.cat([head * moments.channels + channels for head in group])
    metric = moments.metric()[rows][:, rows]
    floor = METRIC_FLOOR * metric.diagonal().mean()
    metric = metric + (floor if floor > 0 else 1.0) * torch.eye(len(rows), dtype=torch.float64)
    return moments.covariance(False)[rows][:, rows], metric


def merge_heads(moments: Moments, group: Group, layout: Layout, method: str) -> Factors:
    """Finds the factors of a group.

    Args:
        moments: Of the keys or the values of a layer.
        group: Its heads.
        layout: The rotary channels, for keys; no pairs for values.
        method: One of `METHODS`.

    Returns:
        The factors, in float64.
    """
    size, channels = len(group), moments.channels
    encoder = torch.zeros(channels, size, channels, dtype=torch.float64)
    decoders = torch.zeros(size, channels, channels, dtype=torch.float64)
    if method == "mean" or size == 1:
        eye = torch.eye(channels, dtype=torch.float64)
        encoder += (eye / size)[:, None]
        decoders += eye
        return Factors(encoder.flatten(1), decoders)
    covariance, metric = (
        matrix.view(size, channels, size, channels) for matrix in restricted(moments, group)
    )  # both (size, channels, size, channels)
    if layout.pairs:
        first, second = layout.indices()
        states, errors = _complex_moments(covariance, first, second), _complex_moments(metric, first, second)
        solved = _best_factors(states, errors, 1) if method == "svd" else _aligned(states, errors)
        _write_complex(encoder, decoders, first, second, *solved)
    rest = torch.arange(2 * layout.pairs, channels)
    if len(rest):
        states, errors = (matrix[:, rest][:, :, :, rest].flatten(2).flatten(0, 1) for matrix in (covariance, metric))
        blocks = (states.view(1, *(len(rest) * size,) * 2), errors.view(1, *(len(rest) * size,) * 2))
        solved = _best_factors(*blocks, len(rest)) if method == "svd" else _aligned(*blocks, channels=len(rest))
        down, up = solved[0][0], solved[1][0]  # (rest, size * rest), (size * rest, rest)
        encoder[rest[:, None, None], torch.arange(size)[:, None], rest] = down.view(len(rest), size, len(rest))
        decoders[:, rest[:, None], rest] = up.view(size, len(rest), len(rest))
    return Factors(encoder.flatten(1), decoders)


def _complex_moments(matrix: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns `E[z_a conj(z_b)]` of each pair, `(pairs, size, size)` complex, from moments of its two channels."""

    def of(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return matrix[:, one, :, other]

    return torch.complex(of(first, first) + of(second, second), of(second, first) - of(first, second))


def _best_factors(states: torch.Tensor, errors: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the encoder `(n, rank, width)` and decoder `(n, width, rank)` that lose least.

    Args:
        states: `(n, width, width)`, Hermitian: second moments.
        errors: Likewise, the metric.
        rank: Channels kept.
    """
    values, vectors = torch.linalg.eigh(errors)
    floor = METRIC_FLOOR * values.mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    scale = (values.clamp_min(0) + floor).sqrt().to(vectors.dtype)
    root = (vectors * scale[:, None]) @ vectors.mH
    inverse = (vectors / scale[:, None]) @ vectors.mH
    kept = torch.linalg.eigh(root @ states @ root)[1][:, :, -rank:]
    # Any basis of the merged head will do; this one keeps the length of queries and the size of outputs.
    up, triangle = torch.linalg.qr(inverse @ kept)
    length = (up.shape[1] / rank) ** 0.5
    return triangle @ kept.mH @ root / length, up * length


def _aligned(states: torch.Tensor, errors: torch.Tensor, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns encoder and decoder that turn heads into a common one; arguments as of `_best_factors`."""
    count, width = states.shape[:2]
    size = width // channels
    turns = torch.eye(channels, dtype=states.dtype).repeat(count, size, 1)  # (n, size * channels, channels)
    cost = errors.diagonal(dim1=1, dim2=2).real.view(count, size, channels).sum(-1)
    weight = (cost / cost.sum(-1, keepdim=True)).repeat_interleave(channels, 1)[:, :, None].to(states.dtype)
    for _ in range(ALIGNMENT_ROUNDS):
        crossed = states @ (turns * weight)  # products of each head with the common one
        left, _, right = torch.linalg.svd(crossed.view(count, size, channels, channels))
        turns = (left @ right).view(count, width, channels)
    return (turns * weight).mH, turns


def _write_complex(
    encoder: torch.Tensor,
    decoders: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
) -> None:
    """Writes complex factors `(pairs, 1, size)` and `(pairs, size, 1)` as real matrices on pairs of channels."""
    down, up = down[:, 0], up[:, :, 0]  # (pairs, size)
    for row, row_other, sign in ((first, second, -1), (second, first, 1)):
        encoder[row, :, row], encoder[row, :, row_other] = down.real, sign * down.imag
        decoders[:, row, row], decoders[:, row, row_other] = up.real.T, sign * up.imag.T
