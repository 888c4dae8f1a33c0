"""Eager attention in float64: transformers computes its softmax in float32 whatever the dtype."""

from torch.nn import functional


def use_float64_softmax(monkeypatch):
    """Let softmax keep the dtype of the scores."""
    softmax = functional.softmax
    monkeypatch.setattr(functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim=dim))
