"""Key/value caches for Hugging Face Transformers that store less, and say what it costs.

Importing this package starts no accelerator, patches nothing and needs torch and transformers only.
"""

from hf_kvplus import compat as _compat  # noqa: F401, before all else: it checks the versions

# isort: split
from hf_kvplus.attention import use_fused_attention
from hf_kvplus.cachefile import CacheFileError
from hf_kvplus.caches import KVPlusCache
from hf_kvplus.encoder_decoder import KVPlusEncoderDecoderCache
from hf_kvplus.estimate import MemoryEstimate, estimate_memory
from hf_kvplus.fingerprint import ModelFingerprint, fingerprint_model
from hf_kvplus.gqa.calibrate import calibrate_gqa
from hf_kvplus.gqa.convert import convert_to_gqa
from hf_kvplus.gqa.projection import GQAProjection
from hf_kvplus.gqa_cache import GQACache
from hf_kvplus.live import MemoryRecorder
from hf_kvplus.memory import MemoryBreakdown, measure_memory
from hf_kvplus.offloaded import OffloadedCache
from hf_kvplus.presets import QuantizedCache, SlidingWindowCache
from hf_kvplus.recipes import Quantization
from hf_kvplus.recommend import Recommendation, recommend
from hf_kvplus.reuse import PrefixCache, ReusedPrefix, reuse_prefix
from hf_kvplus.saving import load_cache, save_cache
from hf_kvplus.stores.blockfile import OffloadError
from hf_kvplus.stores.space import Offload
from hf_kvplus.strategies import StrategyInfo, available_strategies, build_cache

__version__ = "0.1.0"

__all__ = [
    "CacheFileError",
    "GQACache",
    "GQAProjection",
    "KVPlusCache",
    "KVPlusEncoderDecoderCache",
    "MemoryBreakdown",
    "MemoryEstimate",
    "MemoryRecorder",
    "ModelFingerprint",
    "Offload",
    "OffloadError",
    "OffloadedCache",
    "PrefixCache",
    "Quantization",
    "QuantizedCache",
    "Recommendation",
    "ReusedPrefix",
    "SlidingWindowCache",
    "StrategyInfo",
    "available_strategies",
    "build_cache",
    "calibrate_gqa",
    "convert_to_gqa",
    "estimate_memory",
    "fingerprint_model",
    "load_cache",
    "measure_memory",
    "recommend",
    "reuse_prefix",
    "save_cache",
    "use_fused_attention",
]
