"""Trains retrofits until they recover, and measures them after every stage."""

GROUP = "Convert"
OUT = "healed"
NEXT = "crosslayer verify {out}/BEST/model"  # the retrofit with the lowest KL
