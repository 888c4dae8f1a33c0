"""Needles in a haystack: made from a seed, asked, and scored by length and depth."""

GROUP = "Measure"
