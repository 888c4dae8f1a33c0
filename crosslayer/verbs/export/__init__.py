"""A model in forms that other programs open without this package, and refusals of what has no such form."""

GROUP = "Ship"
