"""Lets cached tokens go: which, when, and how a model runs meanwhile."""
