"""Compares the KV cache, latency and memory of two models."""

GROUP = "Measure"
NEXT = "crosslayer verify {model}"
