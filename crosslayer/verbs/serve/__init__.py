"""Serving with vLLM: a plugin for its Transformers backend, and what starts its server."""

GROUP = "Ship"
ARGUMENTS = 2  # model, vLLM's own flags
