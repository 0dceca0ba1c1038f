"""Policies: which tokens a layer keeps, in integers only."""

from hf_kvplus.policies.base import Policy
from hf_kvplus.policies.full import FullPolicy
from hf_kvplus.policies.native_window import NativeWindowPolicy
from hf_kvplus.policies.sink_window import SinkWindowPolicy

__all__ = ["FullPolicy", "NativeWindowPolicy", "Policy", "SinkWindowPolicy"]
