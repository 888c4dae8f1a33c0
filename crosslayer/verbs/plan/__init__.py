"""The wiring of a model, from its config alone."""

GROUP = "Inspect"
