"""Serving with vLLM: a plugin for its Transformers backend, what starts its server, throughput beside a baseline."""
