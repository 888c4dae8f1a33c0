"""Needle in a haystack: hides numbers in long texts, asks for them, and scores answers by length and depth."""

GROUP = "Measure"
NEXT = "crosslayer verify {model}"
