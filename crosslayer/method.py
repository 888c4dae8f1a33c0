"""What a cross-layer method answers, and what it builds its answers from.

A method is a frozen dataclass in a file of its own. Its fields are its options; each question that it leaves open means
"like Llama". `crosslayer.methods` finds and combines methods, docs/YOUR_METHOD.md shows how to write them.

Shapes: B batch, T new tokens, C hidden, H heads, H_kv key-value heads, D head size, L layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.plan import STATES, DepthPlan

if TYPE_CHECKING:
    from transformers import LlamaConfig

TARGETS = ("attention", "heads", "mlp")  # W_c adds after W_o, before W_o, or to the MLP's update
Carry = dict[str, Any]  # what layers hand upward: replaced, never mutated


class Mixing(nn.Module):
    """Parameters of a method; `reset` sets their first values, so that a zero init survives loading.

    Modules inside of it get their own first values before, as they would anywhere in the decoder.
    """

    def reset(self) -> None:
        """Initialise own parameters, and buffers that are not saved, with functions of `transformers.initialization`.

        They leave alone what a checkpoint has filled; `torch.nn.init` would overwrite it.
        """


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
    """What a sublayer reads from the stream and how its update is written; the default is the plain sum."""

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the sublayer's input (B, T, C)."""
        return stream, carry

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the stream with the update (B, T, C) of the sublayer."""
        return stream + update, carry


class Compensation(nn.Linear, Mixing):
    """The linear map W_c: adds `normed @ W_c` to an update, where `target` (of `TARGETS`) says; begins at zero.

    It maps (B, T, C) to (B, T, C), or to (B, T, H·D) before W_o.
    """

    def __init__(self, config: "LlamaConfig", target: str):
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


@dataclass(frozen=True)
class Wiring:
    """What the methods of a config say together, computed once per config.

    Attributes:
        methods: the methods, in list order.
        plan: who owns and who reads, all methods merged.
        compensation: (L,), where W_c of a layer writes (of `TARGETS`), None without it.

    """

    methods: tuple["Method", ...]
    plan: DepthPlan
    compensation: tuple[str | None, ...]

    @cached_property
    def reads_input(self) -> tuple[bool, ...]:
        """(L,), whether a layer's attention reads its own input: it owns a state, or something compensates it."""
        vectors = [self.plan.sources(state) for state in STATES]
        return tuple(
            target is not None or any(vector[layer] == layer for vector in vectors)
            for layer, target in enumerate(self.compensation)
        )

    @cached_property
    def sublayers(self) -> tuple[tuple[int, str], ...]:
        """The sublayers that exist, in order: (layer, "attn" or "mlp"); W_c alone is an "attn" too."""
        sites = []
        for layer, target in enumerate(self.compensation):
            if self.plan.attends(layer) or target is not None:
                sites.append((layer, "attn"))
            if self.plan.mlps[layer] is not None:
                sites.append((layer, "mlp"))
        return tuple(sites)

    @cached_property
    def stored(self) -> tuple[tuple[str, ...], ...]:
        """(L,), what the cache holds at each layer: of "keys" and "values" those that the layer owns."""
        return tuple(self.plan.stored(layer) for layer in range(self.plan.layers))

    @cached_property
    def borrows(self) -> tuple[Mapping[int, str], ...]:
        """(L,), the states (by their place in `STATES`) that a layer borrows, and their names in the carry."""
        return tuple(
            {
                number: f"{state}.{slots[source]}"
                for number, (state, slots) in enumerate(self._slots.items())
                if (source := self.plan.sources(state)[layer]) not in (None, layer)
            }
            for layer in range(self.plan.layers)
        )

    @cached_property
    def lends(self) -> tuple[Mapping[int, str], ...]:
        """(L,), the states (by their place in `STATES`) that later layers read, and their names in the carry."""
        return tuple(
            {
                number: f"{state}.{slots[layer]}"
                for number, (state, slots) in enumerate(self._slots.items())
                if slots[layer] is not None
            }
            for layer in range(self.plan.layers)
        )

    @cached_property
    def _slots(self) -> dict[str, tuple[int | None, ...]]:
        return {state: self.plan.slots(state) for state in STATES}


class Method:
    """The questions; subclasses are frozen dataclasses whose fields are the options.

    Class attributes say what a method is for the commands:

    - `targets`: where W_c may write; the values that the option `compensation` may take beside None.
    - `compensation`: where W_c writes, None without it; an option of those methods that have targets.
    - `saves`: of "keys" and "values" those that each further layer under the method saves; where it is not empty, the
      search by damage tries the method.
    - `grouped`: layers act in groups behind a leader; False: each named layer by itself.
    - `parts`: what of a layer is acted on, where there is a choice; the first is the default.
    - `merges`: how pretrained weights of a group may be merged; the first, "first", leaves them as they are.
    """

    targets: ClassVar[tuple[str, ...]] = ()
    saves: ClassVar[tuple[str, ...]] = ()
    grouped: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ()
    merges: ClassVar[tuple[str, ...]] = ("first",)
    compensation: str | None = None

    def plan(self, layers: int) -> DepthPlan:
        """Answer who owns and who reads."""
        return DepthPlan.identity(layers)

    def heads(self, config: "LlamaConfig", wiring: Wiring, layer: int) -> HeadMixer | None:
        """Answer how a layer's own states are mixed; asked of each layer that has attention."""
        return None

    def residual(self, config: "LlamaConfig", wiring: Wiring, layer: int, site: str) -> Residual | None:
        """Answer what a sublayer (`site` "attn" or "mlp") reads, and where its update goes."""
        return None

    def final(self, config: "LlamaConfig", wiring: Wiring) -> Residual | None:
        """Answer what the final norm reads."""
        return None

    def compensates(self, plan: DepthPlan, layer: int) -> bool:
        """Answer whether W_c makes up for what a layer loses by the method's own `plan`: here, any state.

        Asked only where `compensation` says where W_c writes.
        """
        return any(plan.sources(state)[layer] != layer for state in STATES)

    def inherit(self, weights: dict[str, Tensor], config: "LlamaConfig", wiring: Wiring, merge: str) -> list[str]:
        """Answer what becomes of pretrained weights, beyond that a borrowed projection goes.

        Args:
            weights: by their names in the decoder; entries may be replaced, but no tensor may be written into.
            config: of the decoder that gets them.
            wiring: all methods of that decoder together.
            merge: a rule of `merges`.

        Returns:
            the names of the weights that changed.

        Raises:
            ValueError: the rule does not apply to these weights.

        """
        return []

    @classmethod
    def from_groups(
        cls, groups: Sequence[Sequence[int]], layers: int, compensation: str | None = None, part: str | None = None
    ) -> Self:
        """Build the method that acts on groups of layers.

        Args:
            groups: runs of consecutive 0-based layers; where `grouped` is False, just layers.
            layers: how many layers the model has.
            compensation: where W_c writes (of `targets`), None for no W_c.
            part: what of a layer is acted on (of `parts`), None for the default.

        Raises:
            ValueError: the method has no such options, or the groups do nothing.

        """
        raise ValueError(f"{cls.name()} has no groups of layers; give its options as JSON")

    @classmethod
    def example(cls, layers: int) -> Self:
        """Return options that show the method at a number of layers, for tables and tests; its defaults here."""
        return cls()

    @classmethod
    def name(cls) -> str:
        """Return the name that a config uses: the file's, or the dotted module of a user's own method."""
        return cls.__module__.removeprefix("crosslayer.methods.")


def mixes(method: Method) -> bool:
    """Return whether a method has modules of its own that mix states or streams, beside its plan."""
    kind = type(method)
    own = (kind.heads is not Method.heads, kind.residual is not Method.residual, kind.final is not Method.final)
    return any(own)


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


def sharing_groups(name: str, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups as tuples; refuse groups without a second layer, in which nothing would be shared."""
    alone = [list(group) for group in groups if len(group) < 2]
    if alone or not groups:
        raise ValueError(
            f"{name}: groups {alone} have no second layer, so nothing would be shared there; write for example 18-21"
        )
    return tuple(tuple(group) for group in groups)


def check_choice(name: str, option: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is not among `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: {option} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
