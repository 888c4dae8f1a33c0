"""Methods in words: the list, and one method's diagram with what its cache costs."""

import importlib
import inspect
import re
import sys

from crosslayer.methods import method_class, method_names


def method_table(layers: int = 32) -> list[dict[str, str]]:
    """Return a row for each method: name, one line, what flows, cache share at `layers` layers, source."""
    rows = []
    for name in method_names():
        method = method_class(name).example(layers)
        text = inspect.getdoc(inspect.getmodule(method_class(name))) or ""
        rows.append(
            {
                "method": name,
                "what": text.splitlines()[0].rstrip("."),
                "flows": _field(text, "Flows"),
                "cache": f"{method.plan(layers).cached_fraction():.2%}",
                "source": _field(text, "Source"),
            }
        )
    return rows


def markdown(layers: int = 32) -> str:
    """Return the table for the documents."""
    rows = method_table(layers)
    head = f"| method | what | what flows | KV cache at {layers} layers | source |\n|---|---|---|---|---|"
    return "\n".join(
        [head, *(f"| `{r['method']}` | {r['what']} | {r['flows']} | {r['cache']} | {r['source']} |" for r in rows)]
    )


def show(module: str, layers: int = 8) -> None:
    """Print a method's description, its diagram at `layers` layers and the bytes of its cache.

    `module` is the `__name__` of the module that calls this, however it is run: as `python scaled.py`, or by its own
    name as `python -m my_methods.scaled`. From elsewhere, give that name.
    """
    from crosslayer.decoder.configuration import CrossLayerConfig  # the table of methods does without

    if module == "__main__" and (spec := sys.modules[module].__spec__) is not None:
        module = spec.name
    name = module.removeprefix("crosslayer.methods.")
    if name == module:
        importlib.import_module(module)  # a config finds only what is imported
    method = method_class(name).example(layers)
    config = CrossLayerConfig(num_hidden_layers=layers, cross_layer=[method])
    print(inspect.getdoc(inspect.getmodule(method_class(name))))
    print(f"\n{method}\n\n{config.plan.diagram()}")
    assert config.num_key_value_heads is not None and config.head_dim is not None
    stored, read = config.plan.bytes_per_token(2 * config.num_key_value_heads * config.head_dim)
    heads = f"{config.num_key_value_heads} heads of {config.head_dim}"
    print(f"KV bytes per token in bf16 ({heads}): {stored} stored, {read} read")


def _field(text: str, name: str) -> str:
    found = re.search(rf"{name}: (.+?)(?:\.\s+[A-Z][a-z]+:|\.?\s*\Z|\n\n)", text, re.S)
    return " ".join(found.group(1).split()).rstrip(".") if found else ""


if __name__ == "__main__":
    print(markdown())
