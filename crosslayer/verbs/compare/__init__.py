"""Compares training runs: paired seeds, confidence intervals, curves relative to a baseline, scaling laws."""

GROUP = "Train"
