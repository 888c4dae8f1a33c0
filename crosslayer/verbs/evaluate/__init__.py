"""Scores models on tasks of lm-eval, and says item by item whether two differ."""

GROUP = "Measure"
