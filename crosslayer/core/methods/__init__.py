"""The methods: a file each, whose name is the method's name in configs and on the command line.

Here they are looked up, loaded from plain data and combined. No file but a method's own knows its name.
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
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from crosslayer.core.method import Compensated, Method, Wiring, options_of
from crosslayer.core.plan import STATES, DepthPlan

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Entry = str | Mapping[str, Any] | Method | type[Method]
_allowed: set[str] = set()  # modules of users' own methods that a config may have imported


def allow_methods(*names: str) -> None:
    """Let configs and evictions name modules of your own: each name allows a module and all that lies below it.

    A config may come from anyone, and importing a module runs its code: a name in a config is imported only if it is
    allowed here. Modules that are imported already, and `Method` objects and classes, need no permission.

    Raises:
        ValueError: a name is not that of a module.

    """
    for name in names:
        if not _names_a_module(name):
            raise ValueError(f"{name!r} is not the name of a module; write for example my_methods or my_methods.mine")
    _allowed.update(names)


def allowed_modules() -> tuple[str, ...]:
    """Return the modules that `allow_methods` was told of, for processes of this one that are to allow them too."""
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
        raise ValueError(f"cross_layer entry {entry!r} has no name; it needs one of {', '.join(method_names())}")
    cls = method_class(name)
    fields = [option.name for option in options_of(cls)]
    for option in options:
        if option not in fields:
            close = difflib.get_close_matches(option, fields, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(fields) or 'none'}"
            raise ValueError(f"method {name!r} has no option {option!r}; {hint}")
    return cls(**{option: _read_option(cls, option, value) for option, value in options.items()})


def load_methods(entries: Entry | Sequence[Entry]) -> list[Method]:
    """Build a method, or each of several; see `load_method`."""
    alone = isinstance(entries, str | Mapping | Method | type)
    return [load_method(entry) for entry in ([entries] if alone else entries)]


def method_class(name: str) -> type[Method]:
    """Return the `Method` of a file in this folder, or of a user's module that is imported or allowed.

    Raises:
        ValueError: the name is neither, or its module does not define a single method.

    """
    packaged = name.removeprefix(f"{__name__}.")
    module = importlib.import_module(f"{__name__}.{packaged}") if packaged in _files() else None
    module = module or users_module(f"method {name!r}", name)
    if module is None:
        raise ValueError(f"method {name!r} is not known; {hint(name, method_names())}")
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    classes = [
        cls for cls in own if issubclass(cls, Method) and dataclasses.is_dataclass(cls) and cls is not Compensated
    ]
    if len(classes) != 1:
        raise ValueError(
            f"module {name!r} defines {len(classes)} methods; it must define exactly one dataclass that is a Method"
        )
    return classes[0]


def users_module(what: str, name: str) -> ModuleType | None:
    """Return a user's module if it is imported, or import it if it is allowed; nothing else is ever imported.

    Raises:
        ValueError: it is allowed and cannot be imported; the message begins with `what`.

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
    """Return what is said to a name that is not among those that are known, and is no module that may be imported."""
    close = difflib.get_close_matches(name, known, 1)
    said = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}."
    if _names_a_module(name):
        said += (
            " A module of your own counts once it is imported, or if it is allowed: by "
            f"crosslayer.allow_methods({name!r}), on the command line by --allow-methods {name}"
        )
    return said


def _names_a_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def to_entry(method: Method) -> dict[str, Any]:
    """Return the plain data that a config holds for a method; `load_method` undoes it."""
    return {"name": method.name(), **{option.name: getattr(method, option.name) for option in options_of(method)}}


def merge_plans(methods: Sequence[Method], layers: int) -> DepthPlan:
    """Return the plan of several methods together."""
    return _merged(methods, [method.plan(layers) for method in methods], layers)


def _merged(methods: Sequence[Method], plans: Sequence[DepthPlan], layers: int) -> DepthPlan:
    merged = DepthPlan.identity(layers)
    for number, (method, plan) in enumerate(zip(methods, plans, strict=True)):
        before = " + ".join(earlier.name() for earlier in methods[:number]) or "the plain decoder"
        merged = merged.merge(plan, (before, method.name()))
    return merged


def wire(methods: Sequence[Method], layers: int, linear: tuple[int, ...] = ()) -> Wiring:
    """Return what methods say together about a number of layers; the same methods are computed once.

    Layers in `linear` have linear attention, in which no method shares or drops anything.

    Raises:
        ValueError: two methods exclude one another.

    """
    for method in methods:
        try:
            hash(method)
        except TypeError as error:
            raise ValueError(
                f"{method.name()} cannot be hashed ({error}); a method is a frozen dataclass, its options are tuples "
                "rather than lists or dicts"
            ) from None
    return _wire(tuple(methods), layers, linear)


@functools.lru_cache(maxsize=256)
def _wire(methods: tuple[Method, ...], layers: int, linear: tuple[int, ...]) -> Wiring:
    for method in methods:  # here, since a subclass may have a `__post_init__` of its own
        if isinstance(method, Compensated):
            method.check_compensation()
        elif method.targets or hasattr(method, "compensation"):
            raise ValueError(f"{method.name()}: a method with `targets` or `compensation` is a subclass of Compensated")
    plans = [method.plan(layers) for method in methods]
    for method, own in zip(methods, plans, strict=True):
        _leave_alone(method.name(), own, linear)
    plan = _merged(methods, plans, layers)
    softmax = tuple(None if layer in linear else layer for layer in range(layers))
    every = tuple(range(layers))
    plan = plan.merge(DepthPlan(softmax, softmax, softmax, every), ("the methods", "linear attention"))
    compensated: dict[int, Compensated] = {}  # by layer
    for method, own in zip(methods, plans, strict=True):
        if not isinstance(method, Compensated) or method.compensation is None:
            continue
        for layer in every:
            # what compensates for borrowing goes with an attention that another method takes away
            if own.attends(layer) != plan.attends(layer) or not method.compensates(own, layer):
                continue
            if layer in compensated:
                both = f"{compensated[layer].name()} and {method.name()}"
                raise ValueError(f"layer {layer}: {both} both compensate it; only one may")
            if method.compensation == "mlp" and plan.mlps[layer] is None:
                raise ValueError(f"layer {layer}: {method.name()} compensates on the MLP's update, but it has no MLP")
            compensated[layer] = method
    places = tuple(compensated[layer].compensation if layer in compensated else None for layer in every)
    biased = tuple(layer in compensated and compensated[layer].compensation_bias for layer in every)
    return Wiring(methods, plan, places, biased, linear)


def _leave_alone(name: str, plan: DepthPlan, linear: tuple[int, ...]) -> None:
    """Refuse a method whose own plan changes layers with linear attention, or reads them."""
    for layer in linear:
        for state in STATES:
            readers = [reader for reader in range(plan.layers) if layer in plan.reads(state, reader)]
            if readers != [layer] or plan.reads(state, layer) != (layer,):
                raise ValueError(
                    f"{name}: layer {layer} has linear attention, whose state is its own: it lends and borrows no "
                    f"{state} and is not dropped; leave it out"
                )


def _read_option(cls: type[Method], option: str, value: Any) -> Any:
    """Return an option's value in the very type of its field: lists as tuples, a whole number as a float."""
    try:
        return _frozen(_type_of(cls, option).validate_json(json.dumps(value, allow_nan=False), strict=True))
    except (TypeError, ValueError):
        kind = get_type_hints(cls)[option]
        words = "a finite number" if kind is float else kind.__name__ if isinstance(kind, type) else str(kind)
        raise ValueError(f"{cls.name()}: {option} is {reprlib.repr(value)}; it must be {words}") from None


@functools.cache
def _type_of(cls: type[Method], option: str) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # first needed here: `import crosslayer` does without

    return TypeAdapter(get_type_hints(cls)[option])


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, so that options are hashable."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
