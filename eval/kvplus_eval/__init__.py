"""Evaluation harness of hf_kvplus: what a cache costs in quality, and saves in memory and time, on a real model."""
