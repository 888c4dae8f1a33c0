"""Quantised KV caches: how states are stored, the cache, and how a model runs with it."""
