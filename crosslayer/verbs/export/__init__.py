"""Exports models to formats that other programs open without this package."""

GROUP = "Ship"
