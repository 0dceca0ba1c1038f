"""Head projections: the states of h heads as fewer numbers, and back."""

from hf_kvplus.projections.head import HeadProjection

__all__ = ["HeadProjection"]
