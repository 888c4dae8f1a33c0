"""The interface of a cross-layer method, and the classes that methods build modules from.

A method is a frozen dataclass in a file of its own, whose fields are its options. Each `Method` function that it does
not override keeps what a plain decoder does. `crosslayer.core.methods` finds and combines methods;
docs/methods/your_own.md shows how to write one.

Shapes: B batch, T new tokens, C hidden, H heads, H_kv key-value heads, D head size, L layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.core.plan import PASSED, STATES, DepthPlan

if TYPE_CHECKING:
    from transformers import LlamaConfig as Config
else:
    # importing it takes a second, which the table of methods should not need
    Config = Any

# a linear compensation (W_c) adds after W_o, before W_o, or to the MLP's update
TARGETS = ("attention", "heads", "mlp")
FROM_VALUES = "heads-from-values"  # before W_o, too, but of the output of W_v instead of the layer's input
ON_HEADS = ("heads", FROM_VALUES)
Carry = dict[str, Any]  # what earlier layers pass to later ones: replaced, never mutated
State = Tensor | None  # queries, keys or values; None if the layer reads another layer's
Mixed = tuple[State, State, State, Carry]
PerSource = tuple[Tensor, ...]  # a state of each source layer
Combined = tuple[Tensor, Tensor, Tensor | None]  # keys, values and mask for attention


class Mixing(nn.Module):
    """A module with parameters of a method; `reset` initializes parameters that a checkpoint has not filled.

    `split_by_head` names the parameters with a slice per key-value head, and the dimension of the heads; either all or
    none of a module's parameters are of this form. Under tensor parallelism each rank has the slices of its own heads.
    """

    split_by_head: ClassVar[Mapping[str, int]] = {}
    needs_mask: ClassVar[bool] = False  # it changes the mask, for which attention must take one as a tensor

    def reset(self) -> None:
        """Initialise the module's parameters, and buffers that are not saved, with `transformers.initialization`.

        Its functions skip what a checkpoint has filled; `torch.nn.init` would overwrite it.
        """


class HeadMixer(Mixing):
    """Changes a layer's states."""

    def forward(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        """Call `before`, so that hooks on modules (for example of offloading) act."""
        return self.before(q, k, v, carry)

    def before(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        """Change q (B, H, T, D), k and v (B, H_kv, T, D): new tokens, after RoPE and qk-norm, before the cache."""
        return q, k, v, carry

    def after(self, out: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Change the output of attention (B, T, H, D), before W_o; no parameters here: hooks act on `before` alone."""
        return out, carry


class ValueAdder(HeadMixer):
    """Adds the values (B, H_kv, T, D) that `before` put into the carry as `added`, if any, to attention's output.

    Each query head gets the values of the key-value head that it reads.
    """

    def __init__(self, name: str):
        super().__init__()
        self.added = f"{name}.added"

    def after(self, out: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the output (B, T, H, D) with the values added."""
        if self.added not in carry:
            return out, carry
        values = carry[self.added].transpose(1, 2).unsqueeze(3)  # (B, T, H_kv, 1, D)
        groups = out.unflatten(2, (values.shape[2], -1)) + values  # (B, T, H_kv, H / H_kv, D)
        return groups.flatten(2, 3), {name: value for name, value in carry.items() if name != self.added}


class StateReader(Mixing):
    """Combines the cached states of several layers into the keys and values that a layer attends over.

    It runs after the cache: the cache, and what later layers read, keep each layer's own states.
    """

    def forward(self, keys: PerSource, values: PerSource, mask: Tensor | None, new: int) -> Combined:
        """Return the keys, the values and the mask for attention.

        Args:
            keys: (B, H_kv, S, D) of each source in the plan's order; cached and new tokens.
            values: the same.
            mask: (B or 1, 1, T, S), True or 0 where attention is allowed; None: one new token attends to all tokens,
                several are the first of the sequence and attend causally.
            new: T, the number of new tokens.
        """
        raise NotImplementedError


class Residual(Mixing):
    """How a sublayer reads from the residual stream and writes its update; the default is the plain sum.

    The decoder calls the module itself, so that hooks act; `inputs`, which has no parameters, is called directly.
    """

    def forward(self, stream: Tensor, carry: Carry, update: Tensor | None = None) -> tuple[Tensor, Carry]:
        """Call `read`, or `write` if there is an update."""
        return self.read(stream, carry) if update is None else self.write(stream, update, carry)

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the sublayer's input (B, T, C)."""
        return stream, carry

    def inputs(self, read: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the query, key and value projections, (B, T, C) each, before the norm.

        Called for attention alone. The argument is the result of `read`, which is also what W_c and probes read.
        """
        return read, read, read

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the stream after adding the sublayer's update (B, T, C)."""
        return stream + update, carry


class Compensation(nn.Linear, Mixing):
    """A linear compensation (W_c): adds `normed @ W_c` to the update that `target` (of `TARGETS`) names.

    It begins at zero, and maps (B, T, C) to (B, T, C), or to (B, T, H·D) before W_o; with the target `FROM_VALUES` it
    maps the layer's own values (B, T, H_kv·D) instead.
    """

    def __init__(self, config: Config, target: str):
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.target, self.reads_values, size = target, target == FROM_VALUES, config.head_dim
        inputs = config.num_key_value_heads * size if self.reads_values else config.hidden_size
        outputs = config.num_attention_heads * size if target in ON_HEADS else config.hidden_size
        super().__init__(inputs, outputs, bias=False)

    def reset(self) -> None:
        """Set W_c to zero, unless a checkpoint has filled it."""
        init.zeros_(self.weight)

    # nn.Linear.__init__ calls it, and would otherwise fill W_c at random
    reset_parameters = reset


@dataclass(frozen=True)
class Wiring:
    """The combined plan and compensation of all methods of a config, computed once per config.

    Attributes:
        methods: the methods, in list order.
        plan: which layer reads which states, all methods merged.
        compensation: (L,), the target of a layer's W_c (of `TARGETS`), None without W_c.
        linear: layers with linear attention; in the plan they have no attention, since they have nothing to share.
    """

    methods: tuple["Method", ...]
    plan: DepthPlan
    compensation: tuple[str | None, ...]
    linear: tuple[int, ...] = ()

    @cached_property
    def reads_input(self) -> tuple[bool, ...]:
        """(L,), whether a layer's attention uses the layer's input: for a state of its own, or for W_c."""
        own_layers = {layer for state in STATES for layer in self.plan.own_layers(state)}
        return tuple(
            target is not None or layer in own_layers or layer in self.linear
            for layer, target in enumerate(self.compensation)
        )

    @cached_property
    def sublayers(self) -> tuple[tuple[int, str], ...]:
        """The existing sublayers in order: (layer, "attn" or "mlp"); a W_c instead of attention counts as "attn"."""
        sites = []
        for layer, target in enumerate(self.compensation):
            if self.plan.attends(layer) or layer in self.linear or target is not None:
                sites.append((layer, "attn"))
            if self.plan.mlps[layer] is not None:
                sites.append((layer, "mlp"))
        return tuple(sites)

    def residual(self, config: Config, layer: int, site: str) -> "Residual | None":
        """Return the residual connection of a sublayer (`site` "attn" or "mlp"); None: the plain sum."""
        residuals = (method.residual(config, self, layer, site) for method in self.methods)
        return next((residual for residual in residuals if residual is not None), None)

    @cached_property
    def sources(self) -> tuple[Mapping[int, tuple[str | None, ...]], ...]:
        """(L,), for each state (index in `PASSED`) that is not just the layer's own, the carry names of its sources.

        A name is None where the source is the layer itself.
        """
        result: list[dict[int, tuple[str | None, ...]]] = [{} for _ in range(self.plan.layers)]
        for index, state in enumerate(PASSED):
            for layer, names in enumerate(result):
                sources = self.plan.reads(state, layer)
                if sources not in ((), (layer,)):
                    names[index] = tuple(None if source == layer else self.carried[source][index] for source in sources)
        return tuple(result)

    @cached_property
    def carried(self) -> tuple[Mapping[int, str], ...]:
        """(L,), for each state (index in `PASSED`) that later layers read, its name in the carry."""
        carried: list[dict[int, str]] = [{} for _ in range(self.plan.layers)]
        for index, state in enumerate(PASSED):
            for layer, slot in enumerate(self.plan.slots(state)):
                if slot is not None:
                    carried[layer][index] = f"{state}.{slot}"
        return tuple(carried)

    @cached_property
    def reads_several(self) -> tuple[bool, ...]:
        """(L,), whether a layer reads several layers' cached states, which a `StateReader` combines."""
        pairs = zip(self.plan.keys, self.plan.values, strict=True)
        return tuple(isinstance(keys, tuple) or isinstance(values, tuple) for keys, values in pairs)


class Method:
    """Base class of methods; subclasses are frozen dataclasses whose fields are the options.

    Class attributes tell the commands what a method can do:

    - `targets`: what a linear compensation (W_c) may add to, see `TARGETS`; only a `Compensated` has some.
    - `saves`: which of "keys" and "values" each reader no longer stores; if not empty, a budget can choose its layers.
    - `grouped`: layers form groups that share the states of a source; False: the method acts on single layers.
    - `parts`: which sublayers the method can act on (`--part`), if there is a choice; the first is the default.
    - `needs_long_text`: only long texts show what it costs.
    - `reads_sources`: its residuals read outputs of earlier sublayers, token by token, and write nothing else.
    """

    targets: ClassVar[tuple[str, ...]] = ()
    saves: ClassVar[tuple[str, ...]] = ()
    grouped: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ()
    needs_long_text: ClassVar[bool] = False
    reads_sources: ClassVar[bool] = False

    def plan(self, layers: int) -> DepthPlan:
        """Return which layer reads which states."""
        return DepthPlan.identity(layers)

    def heads(self, config: Config, wiring: Wiring, layer: int) -> HeadMixer | None:
        """Return a module that changes a layer's own states; called for each layer with attention."""
        return None

    def reader(self, config: Config, wiring: Wiring, layer: int) -> StateReader | None:
        """Return the module that combines states of several sources; called only for layers that read several."""
        return None

    def choice(self, config: Config, wiring: Wiring, layer: int) -> Any | None:
        """Return the module with which a layer chooses tokens, or attends to chosen ones (core/choice)."""
        return None

    def windows(self, layers: int) -> tuple[int | None, ...] | None:
        """Return the attention window of each layer in tokens, None in it for all tokens; None: as the config says."""
        return None

    def residual(self, config: Config, wiring: Wiring, layer: int, site: str) -> Residual | None:
        """Return the residual connection of a sublayer (`site` "attn" or "mlp"); None: the plain sum."""
        return None

    def final(self, config: Config, wiring: Wiring) -> Residual | None:
        """Return a module whose `read` gives the final norm's input; None: the stream."""
        return None

    def connect(self, model: nn.Module) -> None:
        """Let the method's modules in a complete decoder know one another."""

    def inherit(self, weights: dict[str, Tensor], config: Config, wiring: Wiring) -> list[str]:
        """Adapt pretrained weights in `weights`; projections that readers do not need are removed by the caller.

        Args:
            weights: tensors by their names in the decoder; replace entries, never write into a tensor.
            config: of the decoder that loads them.
            wiring: the combined methods of that decoder.

        Returns:
            the names of the changed weights.
        """
        return []

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Return the method for groups of layers, without W_c.

        A method with `parts` takes a further argument `part`, by default the first of them.

        Args:
            groups: 0-based layers in rising order, source first; where `grouped` is False, any lists of layers.
            layers: number of layers of the model.

        Raises:
            ValueError: the method does not act on groups, or the groups would share nothing.
        """
        raise ValueError(f"{cls.name()} does not take groups of layers; set its options as JSON")

    @classmethod
    def takes_groups(cls) -> bool:
        """Return whether the method has its own `from_groups`, so that it converts pretrained models."""
        return cls.from_groups.__func__ is not Method.from_groups.__func__  # type: ignore[attr-defined]

    @classmethod
    def search_space(cls) -> str | None:
        """Return what a budget can choose: "layers", or "choosers" of tokens; None: nothing."""
        return "layers" if cls.saves else None

    def check_text(self, length: int) -> None:
        """Refuse windows of `length` tokens that would not show what the method costs."""

    @classmethod
    def example(cls, layers: int) -> Self:
        """Return a typical instance for a number of layers, for tables and tests; by default with default options."""
        return cls()

    @classmethod
    def name(cls) -> str:
        """Return the name in configs and on the command line: the file's, or a user's dotted module."""
        return cls.__module__.removeprefix("crosslayer.core.methods.")

    @classmethod
    def title(cls) -> str:
        """Return the name in sentences and tables, as papers write it: the name of the class."""
        return cls.__name__


@dataclass(frozen=True, kw_only=True)
class Compensated(Method):
    """A method whose layers read other layers' states or lose attention, with an optional linear compensation (W_c)."""

    targets = TARGETS

    compensation: str | None = None
    """What the linear compensation (W_c) of these layers adds to: "attention" (after W_o), "heads" (before W_o), "mlp"
    (the MLP's update), None: no W_c. An extension if the paper has none."""

    def compensates(self, plan: DepthPlan, layer: int) -> bool:
        """Return whether a layer gets a W_c, by the method's own `plan`: if any of its states is not its own."""
        return any(plan.sources(state)[layer] != layer for state in STATES)


def options_of(method: Method | type[Method]) -> list[dataclasses.Field]:
    """Return the options of a method: its own in their order, then those of W_c."""
    of_compensation = {option.name for option in dataclasses.fields(Compensated)}
    fields = dataclasses.fields(method)  # type: ignore[bad-argument-type]  # every subclass is a dataclass
    return sorted(fields, key=lambda option: option.name in of_compensation)
