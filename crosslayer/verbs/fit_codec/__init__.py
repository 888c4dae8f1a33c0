"""Fits a codec that stores finished caches of a model in an eighth of their bytes, and measures what it costs."""

GROUP = "Store"
OUT = "codec"
NEXT = "crosslayer serve {model} --codec {out} --prompt-store prompts"
