"""Compares training runs fairly: paired seeds, intervals, curves beside a baseline, scaling fits."""

GROUP = "Train"
