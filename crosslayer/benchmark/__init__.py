"""Measure two models in turns: cache, times, memory."""
