"""Stores: where the bytes of a layer live and how they grow."""

from hf_kvplus.stores.growing import GrowingStore
from hf_kvplus.stores.packed import PackedStore
from hf_kvplus.stores.sinks import SinkStore

__all__ = ["GrowingStore", "PackedStore", "SinkStore"]
