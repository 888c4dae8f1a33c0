"""Trains models from a recipe."""

GROUP = "Train"
