"""Lists and describes the cross-layer methods, and which of them combine."""

GROUP = "Inspect"
