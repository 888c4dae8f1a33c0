"""The table of the methods, or the description of one of them, read from their own files."""

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

from crosslayer.core.method import Method, options_of
from crosslayer.core.methods import method_class, method_names
from crosslayer.output.formatting import Shown, Table


@dataclasses.dataclass(frozen=True)
class Catalogue(Shown):
    """A row of texts by column for each method, at a number of layers; for a single method its description too."""

    rows: list[dict[str, str]]
    layers: int
    description: str | None = None

    def tables(self) -> list[Table]:
        """Return the table of all methods, narrow enough for a line each in a terminal."""
        if self.description is not None:
            return []
        rows = [[row["method"], row["cache"], row["flows"]] for row in self.rows]
        return [("", ["method", "KV cache", "what flows between layers"], rows)]

    def sentences(self) -> list[str]:
        """Return the description of a single method, or how to get one."""
        hint = f"KV cache: share kept with {self.layers} layers. `crosslayer methods NAME` describes a method."
        return [self.description or hint]

    def headline(self) -> dict[str, Any]:
        """Return the share of the KV cache that each method keeps."""
        if self.description is not None:
            return dict(self.rows[0])
        return {row["method"]: row["cache"] for row in self.rows}


def methods(name: str | None = None, *, layers: int | None = None) -> Catalogue:
    """List the cross-layer methods, or describe one: what flows between layers, and how much KV cache remains.

    Args:
        name: the method to describe, with options, diagram and cache; default: a table of all.
        layers: number of layers in the example, 2 to 10,000; default: 32 for the table, 8 for one method.

    Raises:
        ValueError: the method does not exist, or `layers` is out of range.
    """
    if layers is not None and not 2 <= layers <= 10_000:
        raise ValueError(f"`layers` must be 2 to 10,000, got {layers}")
    layers = layers or (32 if name is None else 8)
    if name is not None:
        cls = method_class(name)
        share = f"{cls.example(layers).plan(layers).cached_fraction():.2%}"
        return Catalogue([{"method": cls.name(), "cache": share}], layers, describe(cls, layers))
    rows = []
    for known in method_names():
        cls = method_class(known)
        text = description(cls)
        share = cls.example(layers).plan(layers).cached_fraction()
        what = text.partition("\n")[0].rstrip(".")
        fields = {}
        for field in ("Flows", "Source"):
            match = re.search(rf"{field}: (.+?)(?:\.\s+[A-Z][a-z]+:|\.?\s*\Z|\n\n)", text, re.S)
            fields[field] = " ".join(match[1].split()).rstrip(".") if match else ""
        row = {"method": known, "what": what, "flows": fields["Flows"], "cache": f"{share:.2%}"}
        rows.append({**row, "source": fields["Source"]})
    return Catalogue(rows, layers)


def description(cls: type[Method]) -> str:
    """Return the description of a method: its module's docstring, else its own, else nothing."""
    return inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or ""


def describe(cls: type[Method], layers: int = 8) -> str:
    """Return a method's description and options, and the diagram and cache of an example at `layers` layers."""
    from crosslayer.core.decoder.configuration import CrossLayerConfig  # takes seconds; the table does not need it

    # Options are read from their source, because the docstring below a field is not an attribute. Base classes come
    # first, since a subclass may describe a field again.
    documented = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for line, below in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(line, ast.AnnAssign) or line.value is None:
                continue
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            written = " ".join(text.split()) if isinstance(text, str) else ""
            documented[ast.unparse(line.target)] = f"  {ast.unparse(line)}\n      {written}".rstrip()
    rows = [documented[option.name] for option in options_of(cls) if option.name in documented]

    method = cls.example(layers)
    config = CrossLayerConfig(num_hidden_layers=layers, cross_layer=[method])
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
