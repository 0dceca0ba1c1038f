"""Key/value caches for Hugging Face Transformers that store less, and say what it costs.

Importing this package starts no accelerator, patches nothing and needs torch and transformers only.
"""

from hf_kvplus.caches import KVPlusCache, QuantizedCache, SlidingWindowCache
from hf_kvplus.encoder_decoder import KVPlusEncoderDecoderCache
from hf_kvplus.memory import MemoryBreakdown, measure_memory
from hf_kvplus.recipes import Quantization
from hf_kvplus.strategies import StrategyInfo, available_strategies, build_cache

__version__ = "0.1.0"

__all__ = [
    "KVPlusCache",
    "KVPlusEncoderDecoderCache",
    "MemoryBreakdown",
    "Quantization",
    "QuantizedCache",
    "SlidingWindowCache",
    "StrategyInfo",
    "available_strategies",
    "build_cache",
    "measure_memory",
]
