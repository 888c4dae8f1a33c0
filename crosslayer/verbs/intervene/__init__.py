"""Changes what attention sees, and measures what follows."""

GROUP = "Inspect"
OUT = "intervention"
