"""What crosslayer runs with, for a bug report."""

GROUP = "Inspect"
ARGUMENTS = 0
