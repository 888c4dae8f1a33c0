"""Any result, out of the folder that it was saved in."""

from importlib import import_module
from pathlib import Path

from crosslayer import verbs
from crosslayer.output.result import Result, load_as


def result_types() -> list[type[Result]]:
    """Return the types of results: those that files named result.py of the verbs define."""
    types = []
    for path in sorted(Path(verbs.__file__).parent.glob("*/*result.py")):
        module = import_module(f"{verbs.__name__}.{path.parent.name}.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Result) and value.__module__ == module.__name__:
                types.append(value)
    return types


def load_result(folder: str | Path) -> Result:
    """Load the result that `save`, or the command line, wrote into a folder; it equals the result that was saved.

    The record may come from anyone: it is checked as a whole before anything of it is used.

    Args:
        folder: the folder of record.json.

    Raises:
        ValueError: there is no record, it is damaged, or this release reads another version of it.

    """
    return load_as(result_types(), Path(folder))
