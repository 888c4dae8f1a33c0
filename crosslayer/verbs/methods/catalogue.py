"""The methods as their own files document them: a table of all, and a description of each with options and cost.

`python -m crosslayer.verbs.methods.catalogue docs/methods/overview.md` updates the table of that page.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path

from crosslayer.core.method import Method, options_of
from crosslayer.core.methods import method_class, method_names


def method_table(layers: int = 32) -> list[dict[str, str]]:
    """Return a row for each method: name, one-line description, what flows, cache kept at `layers` layers, source."""
    rows = []
    for name in method_names():
        cls = method_class(name)
        text = description(cls)
        share = cls.example(layers).plan(layers).cached_fraction()
        summary = text.splitlines()[0].rstrip(".")
        row = {"method": name, "what": summary, "flows": _entry(text, "Flows"), "cache": f"{share:.2%}"}
        rows.append({**row, "source": _entry(text, "Source")})
    return rows


def markdown(layers: int = 32) -> str:
    """Return the table in Markdown."""
    head = f"| method | what | what flows | KV cache at {layers} layers | source |\n|---|---|---|---|---|"
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in (row.values() for row in method_table(layers))]
    return "\n".join([head, *lines])


def description(cls: type[Method]) -> str:
    """Return the description of a method: its module's docstring."""
    return inspect.getdoc(inspect.getmodule(cls)) or ""


def options(cls: type[Method]) -> list[str]:
    """Return the options of a method in the order of its fields, each as written in the source with its docstring."""
    documented = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            documented |= _written(base)
    return [documented[option.name] for option in options_of(cls) if option.name in documented]


def _written(cls: type) -> dict[str, str]:
    """Return the fields in the source of a class, by name."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    rows = {}
    for line, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and line.value is not None:
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            rows[ast.unparse(line.target)] = f"  {ast.unparse(line)}\n      {_line(str(text))}"
    return rows


def describe(cls: type[Method], layers: int = 8) -> str:
    """Return the description of a method, its options, and the diagram and cache of an example with `layers` layers."""
    from crosslayer.core.decoder.configuration import (
        CrossLayerConfig,
    )  # imported late: it takes seconds, and the table does not need it

    method = cls.example(layers)
    config = CrossLayerConfig(num_hidden_layers=layers, cross_layer=[method])
    rows = options(cls)
    assert config.num_key_value_heads is not None and config.head_dim is not None
    stored, read = config.plan.bytes_per_token(2 * config.num_key_value_heads * config.head_dim)
    shown = ", ".join(f"{option.name}={getattr(method, option.name)!r}" for option in options_of(cls))
    heads = f"{config.num_key_value_heads} heads of {config.head_dim}"
    paragraphs = [
        description(cls),
        (cls.__doc__ or "").strip(),
        "\n".join(["Options:", *rows]) if rows else "No options.",
        f"{cls.__name__}({shown})",
        f"{config.plan.diagram()}\nKV bytes per token in bf16 ({heads}): {stored} stored, {read} read",
    ]
    return "\n\n".join(paragraphs)


def _entry(text: str, name: str) -> str:
    match = re.search(rf"{name}: (.+?)(?:\.\s+[A-Z][a-z]+:|\.?\s*\Z|\n\n)", text, re.S)
    return _line(match.group(1)).rstrip(".") if match else ""


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    page = Path(sys.argv[1])
    table = re.compile(r"(?m)^\| method \|.*\n(?:\|.*\n)*")
    page.write_text(table.sub(lambda _: markdown() + "\n", page.read_text(encoding="utf-8"), count=1), encoding="utf-8")
