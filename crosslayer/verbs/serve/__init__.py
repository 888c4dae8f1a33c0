"""Serves models with vLLM: a plugin for its Transformers backend, and the command that starts its server."""

GROUP = "Ship"
ARGUMENTS = 2  # model, vLLM's own flags
