"""Measures every layer of a model, a forward pass for each sequence, and says what that means."""

GROUP = "Inspect"
OUT = "diagnosis"
