"""Trains models by a recipe: weights, data, steps, checkpoints."""

GROUP = "Train"
