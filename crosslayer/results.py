"""Any result, out of the folder that it was saved in."""

import re
from importlib import import_module
from pathlib import Path

from crosslayer import verbs
from crosslayer.output.record import read_record
from crosslayer.output.result import Result, load_as

# Verb, perhaps a kind of its results, version. The schema is untrusted, and the verb names a folder to import from, so
# it is letters only.
SCHEMA = re.compile(r"crosslayer/([a-z_]+)(?:-[a-z]+)?/\d+")


def load_result(folder: str | Path) -> Result:
    """Load the result that `save`, or the command line, wrote into a folder; it equals the saved result.

    The record may come from anyone: it is validated completely before any part is used.

    Args:
        folder: the folder of record.json.

    Raises:
        ValueError: there is no record, it is damaged, or it has a version that this release does not read.
    """
    schema = str(read_record(Path(folder)).get("schema"))
    match = SCHEMA.fullmatch(schema)
    types: list[type[Result]] = []
    # only the verb's own modules are imported: all of them would take seconds
    for path in sorted(Path(verbs.__file__).parent.glob(f"{match[1]}/*result.py")) if match is not None else ():
        module = import_module(f"{verbs.__name__}.{path.parent.name}.{path.stem}")
        for value in vars(module).values():
            # not those that it imports from another module
            if isinstance(value, type) and issubclass(value, Result) and value.__module__ == module.__name__:
                types.append(value)
    if not types:
        raise ValueError(f"record.json is {schema[:60]!r}; this release does not read it")
    return load_as(types, Path(folder))
