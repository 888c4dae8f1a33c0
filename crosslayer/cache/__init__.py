"""Smaller KV caches: quantized, evicting, or both; how a model runs with them, and the bytes that they hold."""
