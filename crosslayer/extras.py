"""The packages of an extra of crosslayer, such as `eval`, and how to install them."""

import importlib.util


def install(extra: str | None = None) -> str:
    """Return the command that installs crosslayer with an extra, run in a clone: no package index has crosslayer."""
    return "pip install ." if extra is None else f"pip install '.[{extra}]'"


def remedy(extra: str) -> str:
    """Return the end of a message about missing packages: what to run, and where."""
    return f"run {install(extra)} in a clone of crosslayer"


def check_extra(extra: str, what: str, *packages: str) -> None:
    """Raise a ValueError with the remedy where `what` needs packages of an extra that are not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}: {remedy(extra)}")
