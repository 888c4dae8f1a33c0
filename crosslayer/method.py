"""What a cross-layer method answers, and how methods are found and combined.

A method is a frozen dataclass in one file; each question that it leaves open means "like Llama".

Shapes: B batch, T new tokens, C hidden, H heads, D head size.
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

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.plan import DepthPlan

if TYPE_CHECKING:
    from crosslayer.decoder.configuration import CrossLayerConfig

TARGETS = ("attention", "heads", "mlp")  # W_c adds after W_o, before W_o, or to the MLP's update
Carry = dict[str, Any]  # what layers hand upward: replaced, never mutated


class Mixing(nn.Module):
    """Parameters of a method; `reset` gives them their first values, so that a zero init survives loading."""

    def reset(self) -> None:
        """Initialise own parameters with the functions of `transformers.initialization`."""


class HeadMixer(Mixing):
    """Changes a layer's states; None stands for a state that the layer borrows."""

    def forward(
        self, q: Tensor | None, k: Tensor | None, v: Tensor | None, carry: Carry
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Carry]:
        """Call `before`; as a module's forward, so that what wraps modules (tensor parallelism) reaches it."""
        return self.before(q, k, v, carry)

    def before(
        self, q: Tensor | None, k: Tensor | None, v: Tensor | None, carry: Carry
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Carry]:
        """Change q (B, H, T, D), k and v (B, H_kv, T, D): new tokens, after RoPE and qk-norm, before the cache."""
        return q, k, v, carry

    def after(self, out: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Change the output of attention (B, T, H, D), before W_o."""
        return out, carry


class Residual(Mixing):
    """What one sublayer reads from the stream and how its update is written; the default is the plain sum."""

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the sublayer's input (B, T, C)."""
        return stream, carry

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the stream with the update (B, T, C) of the sublayer."""
        return stream + update, carry


class Compensation(nn.Linear, Mixing):
    """The linear map W_c: adds `normed @ W_c` to an update, where `target` (one of `TARGETS`) says; begins at zero."""

    def __init__(self, config: "CrossLayerConfig", target: str):
        assert config.head_dim is not None
        self.target, inputs = target, config.hidden_size
        outputs = config.num_attention_heads * config.head_dim if target == "heads" else inputs
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Set W_c to zero when it is built."""
        nn.init.zeros_(self.weight)

    def reset(self) -> None:
        """Set W_c to zero, unless a checkpoint has filled it."""
        init.zeros_(self.weight)


class Method:
    """The questions; subclasses are frozen dataclasses whose fields are the options."""

    def plan(self, layers: int) -> DepthPlan:
        """Answer who owns and who reads."""
        return DepthPlan.identity(layers)

    def heads(self, config: "CrossLayerConfig", layer: int) -> HeadMixer | None:
        """Answer how a layer's own states are mixed."""
        return None

    def residual(self, config: "CrossLayerConfig", layer: int, site: str) -> Residual | None:
        """Answer what a sublayer (`site` "attn" or "mlp") reads, and where its update goes."""
        return None

    def final(self, config: "CrossLayerConfig") -> Residual | None:
        """Answer what the final norm reads."""
        return None

    def compensate(self, layers: int, layer: int) -> str | None:
        """Answer where W_c makes up for what a layer lost (one of `TARGETS`), if it does."""
        return None

    @classmethod
    def name(cls) -> str:
        """Return the name that a config uses: the file's, or the dotted module of a user's own method."""
        return cls.__module__.removeprefix("crosslayer.methods.")


_allowed: set[str] = set()  # modules of users' own methods that a config may have imported


def allow_methods(*names: str) -> None:
    """Let configs name methods of your own: each name allows a module and all that lies below it.

    A config may come from anyone, and importing a module runs its code: a name that it gives is imported only if it is
    allowed here. Modules that are imported already, and `Method` objects and classes, need no permission.

    Raises:
        ValueError: a name is not that of a module.

    """
    for name in names:
        if not _names_a_module(name):
            raise ValueError(f"{name!r} is not the name of a module; write for example my_methods or my_methods.scaled")
    _allowed.update(names)


def method_names() -> list[str]:
    """Return the names of the methods that come with the package: the files of `crosslayer/methods`."""
    import crosslayer.methods as folder

    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__))


def load_method(entry: "str | Mapping[str, Any] | Method | type[Method]") -> Method:
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
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for option in options:
        if option not in fields:
            close = difflib.get_close_matches(option, fields, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(fields) or 'none'}"
            raise ValueError(f"method {name!r} has no option {option!r}; {hint}")
        _check_type(cls, option, options[option])
    return cls(**{key: _frozen(value) for key, value in options.items()})


def method_class(name: str) -> type[Method]:
    """Return the one `Method` of a file in `methods/`, or of a user's module that is imported or allowed.

    Raises:
        ValueError: the name is neither, or its module does not define exactly one method.

    """
    packaged = name.removeprefix("crosslayer.methods.")
    if packaged in method_names():
        module = importlib.import_module(f"crosslayer.methods.{packaged}")
    else:
        module = _own_module(name)
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    classes = [cls for cls in own if issubclass(cls, Method) and dataclasses.is_dataclass(cls)]
    if len(classes) != 1:
        raise ValueError(
            f"module {name!r} defines {len(classes)} methods; it must define exactly one dataclass that is a Method"
        )
    return classes[0]


def _own_module(name: str) -> ModuleType:
    """Return a user's module if it is imported, or import it if it is allowed; nothing else is ever imported."""
    module = sys.modules.get(name)
    if isinstance(module, ModuleType):
        return module
    if any(name == allowed or name.startswith(f"{allowed}.") for allowed in _allowed):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"method {name!r}: its module cannot be imported ({error}); install it, or name its folder in "
                "PYTHONPATH"
            ) from error
    close = difflib.get_close_matches(name, method_names(), 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(method_names())}."
    if _names_a_module(name):
        hint += (
            " A module of your own counts once it is imported, or if it is allowed: by "
            f"crosslayer.allow_methods({name!r}), on the command line by --allow-methods {name}"
        )
    raise ValueError(f"method {name!r} is not known; {hint}")


def _names_a_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def mixes(method: Method) -> bool:
    """Return whether a method has modules of its own that mix states or streams, beside its plan."""
    kind = type(method)
    own = (kind.heads is not Method.heads, kind.residual is not Method.residual, kind.final is not Method.final)
    return any(own)


def to_entry(method: Method) -> dict[str, Any]:
    """Return the plain data that a config holds for a method; `load_method` undoes it."""
    return {"name": method.name(), **dataclasses.asdict(method)}  # type: ignore[call-overload]


def merge_plans(methods: Sequence[Method], layers: int) -> DepthPlan:
    """Return the plan of several methods together."""
    plan, names = DepthPlan.identity(layers), "the plain decoder"
    for method in methods:
        plan = plan.merge(method.plan(layers), (names, method.name()))
        names = method.name() if names == "the plain decoder" else f"{names} + {method.name()}"
    return plan


def check_layers(name: str, option: str, layers: Sequence[int], count: int) -> None:
    """Refuse layers that do not exist or stand twice."""
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise ValueError(f"{name}: {option} holds {layer!r}; layers go from 0 to {count - 1}")
    if len(set(layers)) != len(layers):
        raise ValueError(f"{name}: {option} names a layer twice: {list(layers)}")


def leaders(name: str, option: str, groups: Sequence[Sequence[int]], layers: int) -> tuple[int, ...]:
    """Return the first layer of each layer's group; groups are runs of consecutive layers, the rest stand alone."""
    check_layers(name, option, [layer for group in groups for layer in group], layers)
    source = list(range(layers))
    for group in groups:
        if not group or list(group) != list(range(group[0], group[0] + len(group))):
            raise ValueError(f"{name}: {option} holds {list(group)}, which is not a run of consecutive layers")
        for layer in group:
            source[layer] = group[0]
    return tuple(source)


def check_choice(name: str, option: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is not among `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: {option} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def _check_type(cls: type[Method], option: str, value: Any) -> None:
    try:
        _type_of(cls, option).validate_json(json.dumps(value), strict=True)
    except (TypeError, ValidationError):
        kind = get_type_hints(cls)[option]
        words = kind.__name__ if isinstance(kind, type) else str(kind)
        raise ValueError(f"{cls.name()}: {option} is {reprlib.repr(value)}; it must be {words}") from None


@functools.cache
def _type_of(cls: type[Method], option: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(cls)[option])


def _frozen(value: Any) -> Any:
    """Turn JSON lists into tuples, so that options are hashable."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
