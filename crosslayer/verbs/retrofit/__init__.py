"""Converts a pretrained model to share or leave out attention, and measures what that costs."""

GROUP = "Convert"
OUT = ""
