"""Trains retrofits until they recover, and measures them after every stage."""

GROUP = "Convert"
