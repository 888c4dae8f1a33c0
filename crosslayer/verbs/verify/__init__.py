"""Checks that every way to run a model gives the same numbers."""

GROUP = "Convert"
NEXT = "crosslayer generate {model} 'Once upon a time'"
