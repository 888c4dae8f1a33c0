"""Scores models on lm-eval tasks, and compares two of them item by item."""

GROUP = "Measure"
NEXT = "crosslayer generate {model} 'Once upon a time'"
