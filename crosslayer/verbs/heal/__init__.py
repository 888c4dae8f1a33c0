"""Trains a retrofit until it recovers, and measures it after every stage."""

GROUP = "Convert"
