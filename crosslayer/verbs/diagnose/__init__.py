"""Measures every layer of a model, in one forward pass per sequence, and explains the results."""

GROUP = "Inspect"
OUT = "diagnosis"
