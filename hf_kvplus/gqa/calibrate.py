"""Finds the head projections of a model: which latent channels to keep, and how many in each layer.

Each part of a layer (keys, values) has a covariance of states C and a metric F of errors that matter (see `moments`).
The best projection to r channels under `trace(F (1 - P) C (1 - P)^T)` is a principal component analysis in the metric:
the leading eigenvectors of `F^(1/2) C F^(1/2)`. Its eigenvalues are losses in nats, in the same unit for keys, values
and all layers, so that one sorted list of them tells where channels are worth most.

Source: Palu: Compressing KV-Cache with Low-Rank Projection, https://arxiv.org/abs/2407.21118, for ranks by Fisher
information; differs in that states are compressed and not weights, keys after RoPE across all heads, and in the
metric.

Keys with RoPE need no structure imposed: rotations average out what would mix pairs of channels that turn fast, so the
components are those of each pair as a complex number across heads; pairs that hardly turn may be mixed, which gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from hf_kvplus.caches import text_config
from hf_kvplus.checks import require_at_least, require_choice
from hf_kvplus.fingerprint import config_fields
from hf_kvplus.gqa.grouping import search_groups
from hf_kvplus.gqa.moments import LayerMoments, Moments, collect_moments
from hf_kvplus.gqa.projection import GQAProjection, LayerProjection
from hf_kvplus.origin import describe_weights
from hf_kvplus.projections import HeadProjection

METHODS = ("svd", "mean")
RANKS = ("solved", "equal")
# Channels are given out in runs of this many, which codecs and kernels like.
RUN_CHANNELS = 16
# Part of a metric's mean that is added to its diagonal: directions that no gradient was seen in still count a little.
METRIC_FLOOR = 1e-3


def calibrate_gqa(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    num_key_value_heads: int,
    *,
    method: str = "svd",
    ranks: str = "solved",
    latent_share: float | None = None,
    context_tokens: int | None = None,
    num_sink_tokens: int = 4,
    text: str = "",
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> GQAProjection:
    """Calibrates the projections that a `GQACache` of a model needs.

    Args:
        model: The model, in float32 or a half type; a forward and a backward pass are run for each window.
        windows: Token ids of text, each `(tokens,)`; a few thousand tokens in all suffice.
        num_key_value_heads: Heads' worth of channels that a layer stores on average.
        method: `"svd"`, or `"mean"`: heads of a group are averaged, the classical conversion to compare with.
        ranks: `"solved"`: layers, keys and values get channels where they are worth most, as many in all as with
            `"equal"`, where each part gets the same.
        latent_share: Channels that are stored, in parts of those that the model gives, over all layers that have more
            heads than `num_key_value_heads`; rounded down to whole runs of channels. `None`: as many as
            `num_key_value_heads` heads have. Give less where the tokens that a cache keeps whole have to fit in, too.
        context_tokens: Tokens of each window that are stored; the others read them. `None`: three quarters.
        num_sink_tokens: First tokens of each window that are left out. They are unlike all others, so give what the
            cache will keep whole of them, and 0 if it will project them too.
        text: What the windows were cut from, to be written into the file.
        seed: Of the random directions along which gradients are taken.
        advance: Called after each window, for a progress bar.

    Returns:
        The projection, not yet saved.

    Raises:
        TypeError: If `model` isn't a transformers model.
        ValueError: If no layer has more heads than wanted, the model has an encoder, or a choice, a share or a window
            doesn't fit.
    """
    require_at_least("num_key_value_heads", num_key_value_heads, 1)
    require_choice("method", method, METHODS)
    require_choice("ranks", ranks, RANKS)
    require_share(latent_share, method)
    context = context_tokens or (3 * min(map(len, windows), default=0)) // 4
    moments = collect_moments(
        model, windows, context_tokens=context, num_sink_tokens=num_sink_tokens, seed=seed, advance=advance
    )
    require_fewer_heads(moments, num_key_value_heads)
    rotary = bool(getattr(text_config(model.config), "rope_parameters", None))
    layers = solve(moments, num_key_value_heads, method=method, ranks=ranks, share=latent_share, rotary=rotary)
    facts = {
        "config": config_fields(text_config(model.config)),
        **describe_weights(model),
        "method": method,
        "ranks": ranks,
        "latent_share": latent_share,
        "text": text,
        "tokens": sum(map(len, windows)),
        "context_tokens": context,
        "num_sink_tokens": num_sink_tokens,
        "seed": seed,
    }
    return GQAProjection(tuple(layers), num_key_value_heads, facts)


def require_share(latent_share: float | None, method: str) -> None:
    """Checks the part of the channels that is to be stored.

    Raises:
        ValueError: If it isn't between 0 and 1, or the method keeps whole heads.
    """
    if latent_share is None:
        return
    if not 0 < latent_share < 1:
        raise ValueError(f"`latent_share` must be between 0 and 1, got {latent_share}")
    if method == "mean":
        raise ValueError(f"`latent_share` must be None with method='mean' (it keeps whole heads), got {latent_share}")


def require_fewer_heads(moments: Sequence[LayerMoments], num_key_value_heads: int) -> None:
    """Checks that some layer has more heads than wanted.

    Raises:
        ValueError: If none has.
    """
    most = max((part.heads for layer in moments for part in layer.values()), default=0)
    if num_key_value_heads >= most:
        raise ValueError(
            f"`num_key_value_heads` must be below the {most} key-value heads that the model stores, got "
            f"{num_key_value_heads}"
        )


def solve(
    moments: Sequence[LayerMoments],
    num_key_value_heads: int,
    *,
    method: str,
    ranks: str,
    rotary: bool,
    share: float | None = None,
) -> list[LayerProjection]:
    """Turns moments into projections; `rotary` tells that keys turn with positions, the rest as `calibrate_gqa`."""
    if method == "mean":
        return [mean_projections(layer, num_key_value_heads) for layer in moments]
    spectra = {
        (index, name): _Spectrum(part, centered=not (rotary and name == "keys"))
        for index, layer in enumerate(moments)
        for name, part in layer.items()
        if part.heads > num_key_value_heads
    }
    counts = share_channels(spectra, num_key_value_heads, ranks, share)
    layers: list[LayerProjection] = [{} for _ in moments]
    for (index, name), count in counts.items():
        spectrum = spectra[index, name]
        if count < spectrum.width:
            layers[index][name] = spectrum.projection(count)
    return layers


class _Spectrum:
    """The principal components of one part of a layer in its metric."""

    def __init__(self, moments: Moments, *, centered: bool) -> None:
        self.moments = moments
        self.width = moments.heads * moments.channels
        self.run = math.gcd(RUN_CHANNELS, moments.channels)
        self.mean = moments.total / moments.tokens if centered else torch.zeros_like(moments.total)
        metric = moments.metric()
        floor = METRIC_FLOOR * metric.diagonal().mean()
        if not floor > 0:  # nothing reads this part: any direction is as good
            floor = 1.0
        values, vectors = torch.linalg.eigh(metric)
        scale = (values.clamp_min(0) + floor).sqrt()
        self.root = (vectors * scale) @ vectors.T
        self.inverse = (vectors / scale) @ vectors.T
        losses, vectors = torch.linalg.eigh(self.root @ moments.covariance(centered) @ self.root)
        self.losses, self.vectors = losses.flip(0).clamp_min(0), vectors.flip(1)

    def projection(self, count: int) -> HeadProjection:
        """Returns the projection to the `count` leading components; unit errors of all latents weigh the same."""
        kept = self.vectors[:, :count]
        return HeadProjection(self.root @ kept, kept.T @ self.inverse, self.mean, self.moments.heads)


def share_channels(
    spectra: dict[tuple[int, str], _Spectrum], num_key_value_heads: int, ranks: str, share: float | None = None
) -> dict[tuple[int, str], int]:
    """Returns how many channels each part gets, all together as many as `num_key_value_heads` heads of each take.

    With `share`, that part of all channels instead; every part keeps at least one run.
    """
    equal = {key: num_key_value_heads * spectrum.moments.channels for key, spectrum in spectra.items()}
    if share is not None:
        equal = {key: share * spectrum.width for key, spectrum in spectra.items()}
    if ranks == "equal":
        return {key: max(1, int(equal[key] // one.run)) * one.run for key, one in spectra.items()}
    counts = dict.fromkeys(spectra, 0)
    runs = []
    for key, spectrum in spectra.items():
        for first in range(0, spectrum.width, spectrum.run):
            gain = spectrum.losses[first : first + spectrum.run].mean().item()
            # Every part keeps one run, so that something is stored of it.
            runs.append((first == 0, gain, key, spectrum.run))
    left = max(sum(equal.values()), sum(spectrum.run for spectrum in spectra.values()))
    for _, _, key, run in sorted(runs, key=lambda item: item[:2], reverse=True):
        if run <= left:
            counts[key] += run
            left -= run
    return counts


def mean_projections(layer: LayerMoments, num_key_value_heads: int) -> LayerProjection:
    """Returns the projections that average the heads of each group; the grouping is searched."""
    heads = max((part.heads for part in layer.values()), default=0)
    if heads <= num_key_value_heads:
        return {}

    def cost(group: tuple[int, ...]) -> float:
        return sum(_mean_loss(part, group) for part in layer.values())

    groups = search_groups(heads, num_key_value_heads, cost)
    found = {}
    for name, part in layer.items():
        mixing = torch.zeros(heads, num_key_value_heads, dtype=torch.float64)
        for column, group in enumerate(groups):
            mixing[list(group), column] = 1
        copies = torch.kron(mixing, torch.eye(part.channels, dtype=torch.float64))
        found[name] = HeadProjection(copies / copies.sum(0), copies.T, torch.zeros(len(copies)), heads)
    return found


def _mean_loss(part: Moments, group: tuple[int, ...]) -> float:
    """Returns what averaging the heads of a group loses, in the metric."""
    rows = torch.cat([torch.arange(head * part.channels, (head + 1) * part.channels) for head in group])
    covariance, metric = part.covariance(False)[rows][:, rows], part.metric()[rows][:, rows]
    size = len(group)
    average = torch.kron(
        torch.full((size, size), 1 / size, dtype=torch.float64), torch.eye(part.channels, dtype=torch.float64)
    )
    rest = torch.eye(len(rows), dtype=torch.float64) - average
    return torch.einsum("ij,ij->", metric, rest @ covariance @ rest.T).item()
