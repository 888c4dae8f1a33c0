"""Measure every layer of a model in one forward pass a sequence."""
