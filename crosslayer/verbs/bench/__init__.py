"""Measures two models in turns: cache, times, memory."""

GROUP = "Measure"
