"""Generates text from a prompt."""

GROUP = "Ship"
ARGUMENTS = 2  # model, prompt
