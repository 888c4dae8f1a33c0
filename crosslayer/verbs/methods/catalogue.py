"""Methods in words, out of their own files: the table of all, and what a single method is, takes and costs.

`python -m crosslayer.verbs.methods.catalogue docs/METHODS.md` writes the table into a page.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from crosslayer.core.method import Method
from crosslayer.core.methods import method_class, method_names


@dataclass(frozen=True)
class Option:
    """A field of a method: its name, type and default as they are written, and what it does."""

    name: str
    kind: str
    default: str
    text: str


def method_table(layers: int = 32) -> list[dict[str, str]]:
    """Return a row for each method: name, a line, what flows, cache share at `layers` layers, source."""
    rows = []
    for name in method_names():
        cls = method_class(name)
        text = description(cls)
        rows.append(
            {
                "method": name,
                "what": text.splitlines()[0].rstrip("."),
                "flows": _part(text, "Flows"),
                "cache": f"{cls.example(layers).plan(layers).cached_fraction():.2%}",
                "source": _part(text, "Source"),
            }
        )
    return rows


def markdown(layers: int = 32) -> str:
    """Return the table for the documents."""
    head = f"| method | what | what flows | KV cache at {layers} layers | source |\n|---|---|---|---|---|"
    lines = [
        f"| `{row['method']}` | {row['what']} | {row['flows']} | {row['cache']} | {row['source']} |"
        for row in method_table(layers)
    ]
    return "\n".join([head, *lines])


def description(cls: type[Method]) -> str:
    """Return the description of a method: its module's docstring."""
    return inspect.getdoc(inspect.getmodule(cls)) or ""


def options(cls: type[Method]) -> list[Option]:
    """Return the options of a method in the order of its fields; what each does is the string below the field."""
    documented = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            documented |= {option.name: option for option in _written(base)}
    return [documented[field.name] for field in dataclasses.fields(cls) if field.name in documented]  # type: ignore[arg-type]


def _written(cls: type) -> list[Option]:
    """Return the fields that stand in a class's own source."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    rows = []
    for place, line in enumerate(node.body):
        if not isinstance(line, ast.AnnAssign) or line.value is None:
            continue
        below = node.body[place + 1] if place + 1 < len(node.body) else None
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        rows.append(
            Option(ast.unparse(line.target), ast.unparse(line.annotation), ast.unparse(line.value), _line(str(text)))
        )
    return rows


def describe(cls: type[Method], layers: int = 8) -> str:
    """Return a method's description, its options, and of an example at `layers` layers the diagram and the cache."""
    from crosslayer.core.decoder.configuration import CrossLayerConfig  # seconds, which the table does without

    method = cls.example(layers)
    config = CrossLayerConfig(num_hidden_layers=layers, cross_layer=[method])
    rows = [f"  {option.name}: {option.kind} = {option.default}\n      {option.text}" for option in options(cls)]
    assert config.num_key_value_heads is not None and config.head_dim is not None
    stored, read = config.plan.bytes_per_token(2 * config.num_key_value_heads * config.head_dim)
    heads = f"{config.num_key_value_heads} heads of {config.head_dim}"
    parts = [
        description(cls),
        (cls.__doc__ or "").strip(),
        "\n".join(["Options:", *rows]) if rows else "It has no options.",
        f"{method}\n\n{config.plan.diagram()}\nKV bytes per token in bf16 ({heads}): {stored} stored, {read} read",
    ]
    return "\n\n".join(parts)


def _part(text: str, name: str) -> str:
    match = re.search(rf"{name}: (.+?)(?:\.\s+[A-Z][a-z]+:|\.?\s*\Z|\n\n)", text, re.S)
    return _line(match.group(1)).rstrip(".") if match else ""


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    page = Path(sys.argv[1])
    found = re.compile(r"(?m)^\| method \|.*\n(?:\|.*\n)*")
    page.write_text(found.sub(lambda _: markdown() + "\n", page.read_text(encoding="utf-8"), count=1), encoding="utf-8")
