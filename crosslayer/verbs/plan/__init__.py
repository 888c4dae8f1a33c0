"""Shows which layers share keys, values or attention, from the config alone."""

GROUP = "Inspect"
