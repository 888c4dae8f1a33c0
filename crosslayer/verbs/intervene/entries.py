"""Lists of interventions in files, JSON or YAML, which are hostile until they are checked."""

import json
from pathlib import Path

import yaml

from crosslayer.verbs.intervene.kinds import Kind, load_intervention

FILE_LIMIT = 16_000_000  # bytes of a file of interventions; a record has some 300 kB


def read_interventions(path: Path) -> list[Kind]:
    """Read a list of interventions from JSON or YAML; a record of `crosslayer intervene` holds such a list too.

    Raises:
        ValueError: the file is missing, larger than `FILE_LIMIT` bytes, or holds no such list.

    """
    if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
        raise ValueError(f"interventions {path.name!r}: needed is a .json, .yaml or .yml file that exists")
    if path.stat().st_size > FILE_LIMIT:
        raise ValueError(f"interventions {path.name!r}: the file has over {FILE_LIMIT} bytes")
    try:
        read = json.loads if path.suffix == ".json" else yaml.safe_load
        entries = read(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"interventions {path.name!r}{_place(error)}") from None
    entries = entries.get("interventions") if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f'interventions {path.name!r}: write a list such as [{{"kind": "waiver", "positions": [255]}}]'
        )
    return [load_intervention(entry) for entry in entries]


def _place(error: Exception) -> str:
    """Return what is wrong with a file, and in which line if the error knows it."""
    if isinstance(error, json.JSONDecodeError):
        return f", line {error.lineno}: {error.msg}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f", line {error.problem_mark.line + 1}: {error.problem}"
    return f": {str(error).splitlines()[0]}"
