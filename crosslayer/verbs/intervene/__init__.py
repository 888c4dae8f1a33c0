"""Changes attention inside a running model, and measures the effect."""

GROUP = "Inspect"
OUT = "intervention"
NEXT = "crosslayer diagnose {model} --out diagnosis"
