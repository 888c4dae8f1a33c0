"""The methods: one file each, whose name is the method's name in configs and on the command line.

This module finds methods, builds them from plain data and combines them. Only a method's own file contains its name.
"""

import dataclasses
import difflib
import functools
import importlib
import json
import pkgutil
import reprlib
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from crosslayer.core.method import FROM_VALUES, Compensated, Config, Method, StateReader, Wiring, options_of
from crosslayer.core.options import check_choice
from crosslayer.core.plan import STATES, DepthPlan

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Entry = str | Mapping[str, Any] | Method | type[Method]
# options that methods had once: committed records and saved configs name them, and load where they are off
RETIRED = ("by_head", "compensation", "compensation_bias", "two_phase")
_allowed: set[str] = set()  # users' modules that a config may import


def allow_methods(*names: str) -> None:
    """Allow configs and evictions to import your own modules; each name allows a module and its submodules.

    A config may come from anyone, and importing a module runs its code: a name in a config is imported only if it is
    allowed here. Modules that are imported already, and `Method` objects and classes, need no permission.

    Raises:
        ValueError: a name is not a valid module name.
    """
    for name in names:
        if not all(word.isidentifier() for word in name.split(".")):
            raise ValueError(f"{name!r} is not a module name; write, for example, my_methods or my_methods.mine")
    _allowed.update(names)


def allowed_modules() -> tuple[str, ...]:
    """Return the modules that `allow_methods` has allowed, for example to allow them in child processes."""
    return tuple(sorted(_allowed))


def method_names() -> list[str]:
    """Return the names of the methods that come with the package: the files here without a leading _."""
    return list(_files())


@functools.cache
def _files() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def load_method(entry: Entry) -> Method:
    """Build a method from its name, from {"name": …, option: …} or from its class, or return it as it is.

    Raises:
        ValueError: the name or an option is unknown, or an option's value is refused.
    """
    if isinstance(entry, Method):
        return entry
    if isinstance(entry, type) and issubclass(entry, Method):
        return entry()
    options = {"name": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, Mapping) else {}
    name = options.pop("name", None)
    if not isinstance(name, str):
        known = ", ".join(method_names())
        raise ValueError(f"cross_layer: each entry needs a name, got {entry!r}; known methods: {known}")
    cls = method_class(name)
    fields = [option.name for option in options_of(cls)]
    for option in RETIRED:
        if option not in fields and not options.get(option, True):
            del options[option]
    for option in options:
        if option not in fields:
            close = difflib.get_close_matches(option, fields, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(fields) or 'none'}"
            raise ValueError(f"method {name!r} has no option {option!r}; {hint}")

    # each value in exactly the type of its field: lists become tuples, a whole number a float
    values = {}
    for option, value in options.items():
        # as JSON, which has no tuples: there pydantic takes a list for one even if it is strict
        try:
            read = _type_of(cls, option).validate_json(json.dumps(value, allow_nan=False), strict=True)
        except (TypeError, ValueError):
            annotation = get_type_hints(cls)[option]
            expected = annotation.__name__ if isinstance(annotation, type) else str(annotation)
            expected = "a finite number" if annotation is float else expected
            raise ValueError(f"{cls.name()}: {option} must be {expected}, got {reprlib.repr(value)}") from None
        values[option] = _frozen(read)
    return cls(**values)


def load_methods(entries: Entry | Sequence[Entry]) -> list[Method]:
    """Return a list of methods, from one entry or a sequence of them; see `load_method`."""
    is_single = isinstance(entries, str | Mapping | Method | type)
    return [load_method(entry) for entry in ([entries] if is_single else entries)]


def method_class(name: str) -> type[Method]:
    """Return the `Method` class of a file in this folder, or of a user's module that is imported or allowed.

    A class in an allowed module may also be named as in Python, with or without its module.

    Raises:
        ValueError: the name is neither, or its module does not define exactly one method.
    """
    packaged = name.removeprefix(f"{__name__}.")
    module = importlib.import_module(f"{__name__}.{packaged}") if packaged in _files() else None
    module = module or _module_of_class(name) or users_module(f"method {name!r}", name)
    if module is None:
        raise ValueError(f"method {name!r} is not known; {hint(name, method_names())}")
    # the classes that the module defines: it also imports base classes, and may be the module of `Compensated` itself
    defined = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    methods = [cls for cls in defined if issubclass(cls, Method) and dataclasses.is_dataclass(cls)]
    classes = [cls for cls in methods if cls is not Compensated]
    if len(classes) != 1:
        raise ValueError(f"module {name!r} must define exactly one dataclass that is a Method, got {len(classes)}")
    return classes[0]


def _module_of_class(name: str) -> ModuleType | None:
    """Return the allowed module that defines a method by its class's name, with or without the module before it."""
    owner, _, last = name.rpartition(".")
    for allowed in allowed_modules():
        # a capital begins a class, so that no module is imported in vain for the name of another one
        if last[:1].isupper() and owner in ("", allowed):
            module = users_module(f"method {name!r}", allowed)
            defined = getattr(module, last, None)
            if isinstance(defined, type) and issubclass(defined, Method) and defined.__module__ == allowed:
                return module
    return None


def users_module(what: str, name: str) -> ModuleType | None:
    """Return a user's module if it is imported, or import it if it is allowed; otherwise return None.

    Raises:
        ValueError: it is allowed but cannot be imported; the message begins with `what`.
    """
    module = sys.modules.get(name)
    if isinstance(module, ModuleType):
        return module
    if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in _allowed):
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{what}: its module cannot be imported ({error}); install it, or name its folder in PYTHONPATH"
        ) from error


def hint(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the closest known name or all of them, and how to allow a module."""
    close = difflib.get_close_matches(name, known, 1) or _described_as(name, known)
    message = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}."
    names_a_module = all(word.isidentifier() for word in name.split("."))
    if names_a_module and (not close or "." in name):
        message += (
            " A module of your own must be imported or allowed first: "
            f"crosslayer.allow_methods({name!r}), or --allow-methods {name} on the command line"
        )
    return message


def _described_as(name: str, known: Sequence[str]) -> list[str]:
    """Return the only method among the known names whose summary has this name, such as mhc or value_residual."""
    words, folder = name.lower().replace("_", " ").replace("-", " "), Path(__file__).parent
    first_lines = {
        method: (folder / f"{method}.py").read_text("utf-8").partition("\n")[0]
        for method in _files()
        if method in known
    }
    found = [method for method, line in first_lines.items() if words in line.lower()]
    return found if len(found) == 1 else []


def to_entry(method: Method) -> dict[str, Any]:
    """Return the plain data that a config stores for a method; `load_method` is the inverse."""
    return {"name": method.name(), **{option.name: getattr(method, option.name) for option in options_of(method)}}


def dropping(attention: Sequence[int], mlps: Sequence[int]) -> list[Method]:
    """Return the methods of a model without attention, or without an MLP, in some layers; none if none is missing."""
    missing = {"name": "drop", "attention": list(attention), "mlp": list(mlps)}
    return [load_method(missing)] if attention or mlps else []


def mixes(method: Method) -> bool:
    """Return whether a method adds modules that mix states or streams, in addition to its plan."""
    names = ("heads", "reader", "residual", "final")
    return any(getattr(type(method), name) is not getattr(Method, name) for name in names)


def state_reader(config: Config, wiring: Wiring, layer: int) -> StateReader:
    """Return the module that combines states of several sources at a layer.

    Raises:
        ValueError: no method has one for this layer, or two do.
    """
    readers = {m.name(): reader for m in wiring.methods if (reader := m.reader(config, wiring, layer)) is not None}
    if len(readers) != 1:
        names = " and ".join(readers) or "none"
        raise ValueError(f"layer {layer} reads several layers, which one method must combine, got {names}")
    return next(iter(readers.values()))


def merge_plans(methods: Sequence[Method], layers: int, plans: Sequence[DepthPlan] | None = None) -> DepthPlan:
    """Return the combined plan of several methods; `plans` are their own, where these are made already."""
    plans = [method.plan(layers) for method in methods] if plans is None else plans
    # each two must combine, in whichever order: a third one that drops the layer would hide their conflict
    for (first, plan), (second, second_plan) in combinations(zip(methods, plans, strict=True), 2):
        plan.merge(second_plan, (first.name(), second.name()))
    merged = DepthPlan.identity(layers)
    for plan in plans:
        merged = merged.merge(plan, ("the methods", "the last"))
    if all(source is None for source in merged.keys):
        raise ValueError("no layer has attention; at least one needs it")
    return merged


def wire(methods: Sequence[Method], layers: int, linear: tuple[int, ...] = ()) -> Wiring:
    """Return the combined wiring of methods for a number of layers; results are cached.

    Layers in `linear` have linear attention, which methods can neither share nor drop.

    Raises:
        ValueError: two methods conflict.
    """
    for method in methods:
        try:
            hash(method)
        except TypeError as error:
            raise ValueError(
                f"{method.name()} cannot be hashed ({error}); make it a frozen dataclass whose options are tuples, not "
                "lists or dicts"
            ) from None
    return _wire(tuple(methods), layers, linear)


@functools.lru_cache(maxsize=256)
def _wire(methods: tuple[Method, ...], layers: int, linear: tuple[int, ...]) -> Wiring:
    # checked here, since a subclass may override `__post_init__`
    for method in methods:
        if isinstance(method, Compensated):
            check_choice(method.name(), "compensation", method.compensation, (*method.targets, None))
        elif method.targets or hasattr(method, "compensation"):
            raise ValueError(f"{method.name()} has `targets` or `compensation`, which needs a subclass of Compensated")
    plans = [method.plan(layers) for method in methods]
    for method, own_plan in zip(methods, plans, strict=True):
        for layer, state in product(linear, STATES):
            readers = [reader for reader in range(layers) if layer in own_plan.reads(state, reader)]
            if readers != [layer] or own_plan.reads(state, layer) != (layer,):
                raise ValueError(
                    f"{method.name()}: layer {layer} has linear attention, so it cannot share {state} or be dropped; "
                    "leave it out"
                )

    # to the plan a layer with linear attention is one without attention: it has no queries, keys or values to share
    plan = merge_plans(methods, layers, plans)
    softmax = tuple(None if layer in linear else layer for layer in range(layers))
    every = tuple(range(layers))
    plan = plan.merge(DepthPlan(softmax, softmax, softmax, every), ("the methods", "linear attention"))

    compensated: dict[int, Compensated] = {}  # by layer
    for method, own_plan in zip(methods, plans, strict=True):
        if not isinstance(method, Compensated) or method.compensation is None:
            continue
        for layer in every:
            # where another method drops the attention, there is nothing left to compensate
            if own_plan.attends(layer) != plan.attends(layer) or not method.compensates(own_plan, layer):
                continue
            if layer in compensated:
                both = f"{compensated[layer].name()} and {method.name()}"
                raise ValueError(f"layer {layer}: {both} both compensate it; only one method may")
            if method.compensation == "mlp" and plan.mlps[layer] is None:
                raise ValueError(f"layer {layer}: {method.name()} adds its W_c to an MLP that the layer does not have")
            if method.compensation == FROM_VALUES and plan.values[layer] != layer:
                raise ValueError(f"layer {layer}: {method.name()} needs the layer's W_v; use compensation 'heads'")
            compensated[layer] = method
    targets = tuple(compensated[layer].compensation if layer in compensated else None for layer in every)
    return Wiring(methods, plan, targets, linear)


@functools.cache
def _type_of(cls: type[Method], option: str) -> "TypeAdapter[Any]":
    # imported here, since it takes 0.17 s, and `import crosslayer` needs no options
    from pydantic import TypeAdapter

    return TypeAdapter(get_type_hints(cls)[option])


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, so that options are hashable."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
