"""Converts a pretrained model so that layers share or drop attention, and measures what that costs."""

GROUP = "Convert"
OUT = ""
