"""The cross-layer methods in words: the table of all, one of them, and which combine."""

GROUP = "Inspect"
