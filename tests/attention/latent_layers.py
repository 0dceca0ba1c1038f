"""Layers that store latent heads, and how a kernel's answer about them is checked."""

from __future__ import annotations

import torch
from layers import padding_mask, poison
from torch.nn.functional import scaled_dot_product_attention

from hf_kvplus.attention.base import Scoring
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.layer import KVLayer
from hf_kvplus.projections import HeadProjection
from hf_kvplus.recipes import Quantization

# Rounding of the inputs of a float32 product, relative to the largest value.
FLOOR = 1e-6


def make_projection(heads: int, channels: int, latents: int, mean: bool) -> HeadProjection:
    """Returns a random projection with orthonormal directions."""
    directions = torch.linalg.qr(torch.randn(heads * channels, latents))[0]
    return HeadProjection(directions, directions.T, mean * torch.randn(heads * channels), heads)


def make_latent_layer(
    length: int,
    *,
    latents: tuple[int | None, int | None] = (128, 96),
    means: tuple[bool, bool] = (False, True),
    kv_heads: int = 3,
    head_dim: int = 64,
    padding: tuple[int, ...] = (0,),
    dtype: torch.dtype = torch.float32,
    policy=None,
    quantized: bool = False,
    num_sink_tokens: int = 4,
    residual_length: int = 20,
    **quantization,
) -> KVLayer:
    """Returns a layer that has taken in random tokens, its reserves poisoned; `None` latents: not projected."""
    inner = (
        Quantization(**quantization).codecs()
        if quantized or quantization
        else (IdentityCodec(block_tokens=32), IdentityCodec(block_tokens=32))
    )
    codecs = tuple(
        codec if count is None else LatentCodec(codec, make_projection(kv_heads, head_dim, count, mean))
        for codec, count, mean in zip(inner, latents, means, strict=True)
    )
    layer = KVLayer(*codecs, policy=policy, num_sink_tokens=num_sink_tokens, residual_length=residual_length)
    shape = (len(padding), kv_heads, length, head_dim)
    keys = torch.randn(shape) * torch.linspace(0.3, 2.0, head_dim) + torch.randn(head_dim)
    values = torch.randn(shape) + 0.2
    positions = torch.stack([(torch.arange(length) - count).clamp(min=0) for count in padding])
    with torch.no_grad():
        layer.update(keys.to(dtype), values.to(dtype), kwargs={"position_ids": positions})
    poison(layer)
    return layer


def check(kernel, layer, query, *, scoring=None, mask=None, visible=0, times=2):
    """Compares with the reference in double precision, and with what PyTorch makes of the decoded states."""
    assert kernel.refuses(layer) is None
    scoring = scoring or Scoring(query.shape[3] ** -0.5)
    kernel.latents.reference = None  # so that nothing else answers
    try:
        output = kernel.attend(layer, query, scoring, mask, visible)
    finally:
        kernel.latents.reference = ReferenceKernel()
    truth = ReferenceKernel(torch.float64).attend(layer, query.double(), scoring, mask, visible)
    assert output.dtype == query.dtype
    assert output.shape == truth.shape
    keys, values = layer.dense(visible)
    if scoring.softcap is None and scoring.sink_logits is None:
        shown = padding_mask(layer, query.shape[2], visible) if mask is None else mask
        theirs = scaled_dot_product_attention(query, keys, values, shown, scale=scoring.scaling, enable_gqa=True)
        own = theirs.transpose(1, 2)
    else:
        own = ReferenceKernel().attend(layer, query, scoring, mask, visible)
    error, own_error = ((result.double() - truth).abs().max().item() for result in (output, own))
    assert error <= times * own_error + FLOOR * values.double().abs().max().item()
