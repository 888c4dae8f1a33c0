"""The cross-layer decoder, its methods, and the plan of which layer reads which attention states."""
