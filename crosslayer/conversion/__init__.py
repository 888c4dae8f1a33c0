"""Rewire a pretrained model, make up for what it loses, and say what it costs."""
