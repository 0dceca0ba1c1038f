"""Fewer key-value heads: calibrated projections for caches, converted checkpoints, and healing.

`projection` is what a cache needs; `calibrate`, `convert` and `heal` run models and are imported where they're used.
"""
