"""Rewires a pretrained model, makes up for what it loses, and says what it costs."""

GROUP = "Convert"
OUT = ""
