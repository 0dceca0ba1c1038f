"""Attention that reads packed keys and values: a reference, a CPU kernel, and how a model is switched to them."""

from hf_kvplus.attention.integration import use_fused_attention

__all__ = ["use_fused_attention"]
