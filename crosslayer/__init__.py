"""crosslayer: attention across depth. Importing it registers its model with transformers' Auto classes.

Only that model is loaded with the package; every verb is loaded when its name is first used.
"""

from crosslayer._path import IS_COMMAND  # before any other import
from crosslayer._start import hide_bars, interrupts, keep_memory, open_streams

_HOMES: dict[str, str] = {}  # where each public name is defined, by the stub beside this file


def _homes() -> dict[str, str]:
    """Return the module of each public name: the imports of the stub, and the call of every verb."""
    if not _HOMES:
        # here, since a command needs no public names
        import re
        from pathlib import Path

        folder = Path(__file__).parent
        stub = (folder / "__init__.pyi").read_text(encoding="utf-8")
        _HOMES.update((name, home) for home, name in re.findall(r"(?m)^from (\S+) import (\w+) as", stub))
        for path in folder.glob("verbs/*/run.py"):
            _HOMES[path.parent.name] = f"crosslayer.verbs.{path.parent.name}.run"
    return _HOMES


def __getattr__(name: str):
    """Load a public name when it is first used (PEP 562), and keep it."""
    if name == "__version__":
        return _version()
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("_") or name not in _homes():
        raise AttributeError(f"module 'crosslayer' has no attribute {name!r}")
    from importlib import import_module

    public = getattr(import_module(_homes()[name]), name)
    # the next use finds it without this function
    globals()[name] = public
    return public


def _version() -> str:
    """Return the installed version, or in a source tree that is not installed, pyproject.toml's fallback."""
    import importlib.metadata

    try:
        return importlib.metadata.version("crosslayer")
    except importlib.metadata.PackageNotFoundError:
        return "0.1.0.dev0"


def __dir__() -> list[str]:
    """Name also what is not loaded yet, for completion in editors and notebooks."""
    return sorted({*globals(), *_homes()})


if IS_COMMAND:
    # The streams come first, because the other three calls may write to them.
    open_streams()
    interrupts.watch()
    keep_memory()
    hide_bars()
else:
    import crosslayer.core.decoder.modeling  # noqa: F401  registers the model
