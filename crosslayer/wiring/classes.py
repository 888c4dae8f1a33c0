"""Which fields a config class and the code of its model read; the code is read as text, and never imported."""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# transformers' caches read these fields of any config, even where its class and its model do not name them.
OF_CACHES = ("layer_types", "sliding_window", "attention_chunk_size", "number_of_conv_states")


def reads(config: Any, name: str) -> bool:
    """Return whether a field of a config means anything to its class, model or cache; others have no effect."""
    # Imported here, since commands read this module at their start; a config exists by now, so this takes no time.
    from transformers import PreTrainedConfig

    kind = type(config)
    # A config keeps every field of its file as an attribute: a GPT-2 with `multi_query` says nothing about its cache.
    if not isinstance(config, PreTrainedConfig) or name in OF_CACHES or name in dir(kind):
        return True
    try:
        return name in declared(kind) or in_model_code(kind, name)
    except (OSError, TypeError):  # a class without a file, such as one typed into a notebook
        return True


@functools.cache
def declared(kind: "type[PreTrainedConfig]") -> frozenset[str]:
    """Return the fields of a config class: those it declares, other names of these, and all that its methods name."""
    from transformers import PreTrainedConfig

    names = {declaration.name for declaration in dataclasses.fields(kind)} | kind.attribute_map.keys()
    # Only the bodies of methods count: there a class uses a field. Its tables of tensor parallelism hold other names.
    for base in kind.__mro__[: kind.__mro__.index(PreTrainedConfig)]:
        for part in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            for node in ast.walk(part) if isinstance(part, ast.FunctionDef) else ():
                if isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
    return frozenset(names)


@functools.cache
def in_model_code(kind: "type[PreTrainedConfig]", name: str) -> bool:
    """Return whether the model of a config class reads a field, as an attribute or by its name as text."""
    files = sorted(Path(inspect.getfile(kind)).parent.glob("modeling_*.py"))
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    # `getattr(config, "name", …)` counts like `config.name`: some models read optional fields in this way.
    return bool(re.search(rf"(config\.|[\"']){re.escape(name)}\b", code))
