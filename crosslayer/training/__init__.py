"""Trains a decoder with any method from a recipe."""
