"""Continues a text."""

GROUP = "Ship"
ARGUMENTS = 2  # model, prompt
