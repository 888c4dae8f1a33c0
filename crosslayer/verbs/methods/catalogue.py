"""Descriptions of the methods, read from their own files: the table of all, and the details of one."""

import ast
import dataclasses
import inspect
import re
import textwrap

from crosslayer.core.method import Method, options_of
from crosslayer.core.methods import method_class, method_names


def method_table(layers: int = 32) -> list[dict[str, str]]:
    """Return a row for each method: name, a line, what flows, cache share at `layers` layers, source."""
    rows = []
    for name in method_names():
        cls = method_class(name)
        text = description(cls)
        share = cls.example(layers).plan(layers).cached_fraction()
        what = text.partition("\n")[0].rstrip(".")
        row = {"method": name, "what": what, "flows": _field(text, "Flows"), "cache": f"{share:.2%}"}
        rows.append({**row, "source": _field(text, "Source")})
    return rows


def description(cls: type[Method]) -> str:
    """Return the description of a method: its module's docstring, else its own, else nothing."""
    return inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or ""


def options(cls: type[Method]) -> list[str]:
    """Return the options of a method in the order of its fields: each as written in its source, with its docstring."""
    documented = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            documented |= _written(base)
    return [documented[option.name] for option in options_of(cls) if option.name in documented]


def _written(cls: type) -> dict[str, str]:
    """Return the fields in a class's own source, by name."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    rows = {}
    for line, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and line.value is not None:
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            written = _line(text) if isinstance(text, str) else ""
            rows[ast.unparse(line.target)] = f"  {ast.unparse(line)}\n      {written}".rstrip()
    return rows


def describe(cls: type[Method], layers: int = 8) -> str:
    """Return a method's description and options, and the diagram and cache of an example at `layers` layers."""
    from crosslayer.core.decoder.configuration import CrossLayerConfig  # takes seconds; the table does not need it

    method = cls.example(layers)
    config = CrossLayerConfig(num_hidden_layers=layers, cross_layer=[method])
    rows = options(cls)
    assert config.num_key_value_heads is not None and config.head_dim is not None
    stored, read = config.plan.bytes_per_token(2 * config.num_key_value_heads * config.head_dim)
    shown = ", ".join(f"{option.name}={getattr(method, option.name)!r}" for option in options_of(cls))
    heads = f"{config.num_key_value_heads} heads of {config.head_dim}"
    sections = [
        description(cls),
        inspect.getdoc(cls) or "",
        "\n".join(["Options:", *rows]) if rows else "It has no options.",
        f"{cls.__name__}({shown})",
        f"{config.plan.diagram()}\nKV bytes per token in bf16 ({heads}): {stored} stored, {read} read",
    ]
    return "\n\n".join(dict.fromkeys(filter(None, sections)))


def _field(text: str, name: str) -> str:
    match = re.search(rf"{name}: (.+?)(?:\.\s+[A-Z][a-z]+:|\.?\s*\Z|\n\n)", text, re.S)
    return _line(match.group(1)).rstrip(".") if match else ""


def _line(text: str) -> str:
    return " ".join(text.split())
