"""The options of a verb, read from the source of its Python function, since importing it would take seconds."""

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent
REQUIRED = object()
TEXTS = ("Text", "DomainTexts")  # annotations of text: from one source, and by domain
OUTPUT = ("out", "force")  # options of a panel of their own
SPELLED = {"settings": "--set", "candidates": "--candidate"}  # each adds one; other config tools call it --set too


@dataclass(frozen=True)
class Option:
    """A parameter: its annotation as source text, its default or `REQUIRED`, and its help text."""

    name: str
    annotation: str
    default: Any
    text: str

    @property
    def kind(self) -> str:
        """The annotation without None, and of "several or one" the first."""
        return self.annotation.replace(" | None", "").removesuffix(" | int").strip("'\"")

    @property
    def has_commas(self) -> bool:
        """Whether it takes several values and has a default; in a shell they are separated by commas."""
        return self.kind.startswith("Sequence[") and isinstance(self.default, tuple) and bool(self.default)

    @property
    def is_list(self) -> bool:
        """Whether it takes several values; in a shell the option is repeated for each."""
        return self.kind == "DomainTexts" or self.kind.startswith("Sequence[") and not self.has_commas

    @property
    def flag(self) -> str:
        """How it is typed, such as "--new-tokens"."""
        return SPELLED.get(self.name, "--" + self.name.replace("_", "-"))


FORCE = Option("force", "bool", False, "replace the output folder if it exists.")
EVERYWHERE = (
    Option("allow_methods", "Sequence[str] | None", None, "your own Python module to import; repeatable."),
    Option("json", "bool", False, "print only one line of JSON on stdout."),
    Option("debug", "bool", False, "show the traceback of an error."),
)


@dataclass(frozen=True)
class Call:
    """A function: the summary of its docstring, the text from there to Args, and its parameters."""

    about: str
    text: str
    parameters: tuple[Option, ...]


@dataclass(frozen=True)
class Verb:
    """A verb as its folder declares it (see `crosslayer.verbs`), and its functions for the command line alone.

    `beside` has these functions, from `cli/<verb>.py`. Their parameters with a default are further options; the others
    receive the verb's own options of that name. A function with the name of a parameter of the call returns its value.
    `then` returns a function that runs after the result is printed.
    """

    name: str
    group: str
    call: Call
    beside: dict[str, Call]
    arguments: tuple[Option, ...]  # the positional ones
    named: tuple[Option, ...]  # the other parameters of the call that a shell has
    out: str | None  # the default output folder; None: nothing is saved, "": --out is required
    needs_torch: bool = True
    panels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of the help: names of options in their order

    @property
    def command(self) -> str:
        """How it is typed."""
        return self.name.replace("_", "-")

    @property
    def is_saved(self) -> bool:
        """Whether it returns a result that the call itself does not save."""
        has_result = (PACKAGE / "verbs" / self.name / "result.py").is_file()
        return has_result and all(option.name != "out" for option in self.call.parameters)

    @property
    def options(self) -> tuple[Option, ...]:
        """The options, in the order of panels: those of the call, of the command line alone, and of all verbs."""
        own = [option for call in self.beside.values() for option in call.parameters if option.default is not REQUIRED]
        options = [*self.named, *own]
        if self.is_saved:
            default = REQUIRED if self.out == "" else self.out
            text = "output folder for report.html, record.json and figures"
            text += "; if it exists, the default gets a number." if self.out else "."
            options += [Option("out", "str", default, text), FORCE]
        order = [name for names in self.panels.values() for name in names]
        return tuple(sorted((*options, *EVERYWHERE), key=lambda option: (*order, option.name).index(option.name)))


def read_verb(name: str) -> Verb:
    """Return the verb that a folder declares."""
    folder = import_module(f"crosslayer.verbs.{name}")
    call = read_calls(PACKAGE / "verbs" / name / "run.py")[name]
    beside = read_calls(Path(__file__).with_name(f"{name}.py"))
    shown = tuple(
        replace(option, text=option.text.partition(" In Python")[0])
        for option in call.parameters
        if option.name not in beside and not option.text.startswith("in Python")
    )
    count = getattr(folder, "ARGUMENTS", 1)
    return Verb(
        name,
        folder.GROUP,
        call,
        beside,
        shown[:count],
        shown[count:],
        getattr(folder, "OUT", None),
        getattr(folder, "NEEDS_TORCH", True),
        getattr(folder, "PANELS", {}),
    )


def read_calls(path: Path) -> dict[str, Call]:
    """Return the public functions of a file by name; an empty dictionary if there is no file."""
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        lead, _, behind = inspect.cleandoc(ast.get_docstring(node) or "").partition("\nArgs:\n")
        about, _, rest = lead.partition("\n\n")
        section = re.split(r"\n(?=\S)", behind)[0]
        entries = [entry.partition(":") for entry in re.split(r"\n(?=    \w+: )", "\n" + section)[1:]]
        texts = {name.strip(): " ".join(words.split()) for name, _, words in entries}

        positional = [*node.args.posonlyargs, *node.args.args]
        missing = [None] * (len(positional) - len(node.args.defaults))
        defaults = [*missing, *node.args.defaults, *node.args.kw_defaults]
        parameters = []
        for argument, default in zip([*positional, *node.args.kwonlyargs], defaults, strict=True):
            kind = "str" if argument.annotation is None else ast.unparse(argument.annotation)
            value = REQUIRED if default is None else ast.literal_eval(default)
            parameters.append(Option(argument.arg, kind, value, texts.get(argument.arg, "")))
        calls[node.name] = Call(" ".join(about.split()), rest.strip(), tuple(parameters))
    return calls
