"""Shows how large the KV cache is and which layers share it, from the config alone."""

GROUP = "Inspect"
NEXT = "crosslayer diagnose {model} --out diagnosis"
