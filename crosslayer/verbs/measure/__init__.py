"""Judges any candidate for a smaller cache against the original: bytes, KL, retrieval, time, in one table."""

GROUP = "Measure"
OUT = "measured"
NEXT = "crosslayer generate {model} 'Once upon a time' --kv-bits 4"
