"""Tasks of lm-eval: loading them, scoring with them, and comparing two models item by item."""
