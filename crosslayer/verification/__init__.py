"""Prove that every way to run a model gives the same numbers."""
