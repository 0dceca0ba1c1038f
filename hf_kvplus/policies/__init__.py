"""Policies: which tokens a layer keeps, in integers only."""

from hf_kvplus.policies.base import Policy
from hf_kvplus.policies.full import FullPolicy
from hf_kvplus.policies.native_window import NativeWindowPolicy

__all__ = ["FullPolicy", "NativeWindowPolicy", "Policy"]
