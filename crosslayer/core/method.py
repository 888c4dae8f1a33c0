"""What a cross-layer method answers, and what it builds its answers from.

A method is a frozen dataclass in a file of its own. Its fields are its options; each question that it leaves open means
"like Llama". `crosslayer.core.methods` finds and combines methods, docs/methods/your_own.md shows how to write them.

Shapes: B batch, T new tokens, C hidden, H heads, H_kv key-value heads, D head size, L layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from transformers import initialization as init

from crosslayer.core.options import check_choice
from crosslayer.core.plan import STATES, DepthPlan

if TYPE_CHECKING:
    from transformers import LlamaConfig as Config
else:
    Config = Any  # a second to load, which the table of methods does without

TARGETS = ("attention", "heads", "mlp")  # W_c adds after W_o, before W_o, or to the MLP's update
Carry = dict[str, Any]  # what layers hand upward: replaced, never mutated
State = Tensor | None  # queries, keys or values; None for those that a layer borrows
Mixed = tuple[State, State, State, Carry]
Several = tuple[Tensor, ...]  # a state of each of several layers
Combined = tuple[Tensor, Tensor, Tensor | None]  # keys, values and the mask that attention gets
TOKENS = "tokens"  # in the carry: ids of the new tokens (B, T), for methods that read them
INPUT = "input"  # in the carry that mixers get: what the values are made of (B, T, C), for mixers that read it


class Mixing(nn.Module):
    """Parameters of a method, whose first values survive loading (`reset`).

    `split_by_head` names the parameters that hold a piece for each key-value head, and the dimension of the heads; a
    module has only such parameters, or none. Where heads are split over ranks, each rank has the pieces of its own.
    """

    split_by_head: ClassVar[Mapping[str, int]] = {}

    def reset(self) -> None:
        """Set first values of own parameters, and of buffers that are not saved, by `transformers.initialization`.

        Its functions leave alone what a checkpoint has filled; `torch.nn.init` would overwrite it.
        """

    def resize_tokens(self, count: int) -> None:
        """Follow the vocabulary, which has `count` tokens now: parameters with a row for each of them do."""


class HeadMixer(Mixing):
    """Changes a layer's states.

    `reads_input` says that `before` finds the layer's normed input (B, T, C), of which its values are made, in
    `carry[INPUT]`; attention takes it out of the carry afterwards.
    """

    reads_input: ClassVar[bool] = False

    def forward(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        """Call `before`, where hooks on modules (offloading, say) reach it."""
        return self.before(q, k, v, carry)

    def before(self, q: State, k: State, v: State, carry: Carry) -> Mixed:
        """Change q (B, H, T, D), k and v (B, H_kv, T, D): new tokens, after RoPE and qk-norm, before the cache."""
        return q, k, v, carry

    def after(self, out: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Change the output of attention (B, T, H, D), before W_o, without parameters: hooks act on `before` alone."""
        return out, carry


class ValueAdder(HeadMixer):
    """Adds values (B, H_kv, T, D) to the output of attention: what `before` leaves in the carry as `added`, if it does.

    Each head gets those that it reads.
    """

    def __init__(self, name: str):
        super().__init__()
        self.added = f"{name}.added"

    def after(self, out: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the output (B, T, H, D) with the values."""
        if self.added not in carry:
            return out, carry
        values = carry[self.added].transpose(1, 2).unsqueeze(3)  # (B, T, H_kv, 1, D)
        groups = out.unflatten(2, (values.shape[2], -1)) + values  # (B, T, H_kv, H / H_kv, D)
        return groups.flatten(2, 3), {name: value for name, value in carry.items() if name != self.added}


class StateReader(Mixing):
    """Makes what attention reads of the cached states of several layers, where the plan names several.

    It acts at the moment of reading: what the cache holds, and what is lent upward, stays as each layer made it.

    `needs_mask` says that it changes the mask, which only attention that takes a mask as a tensor can follow.
    """

    needs_mask = False

    def forward(self, keys: Several, values: Several, mask: Tensor | None, new: int) -> Combined:
        """Return the keys, the values and the mask that attention gets.

        Args:
            keys: (B, H_kv, S, D) of each layer that the plan names, in its order; cached and new tokens.
            values: the same; of a layer that owns a share of the value heads, those heads alone.
            mask: (B or 1, 1, T, S), True or 0 where a token may be seen; None: a single new token sees all, several
                are the first ones and see what is not after them.
            new: T, the number of new tokens.

        """
        raise NotImplementedError


class Residual(Mixing):
    """What a sublayer reads from the stream and how its update is written; the default is the plain sum.

    The decoder calls the module, so that hooks act, but for `inputs`, which has no parameters.
    """

    def forward(self, stream: Tensor, carry: Carry, update: Tensor | None = None) -> tuple[Tensor, Carry]:
        """Call `read`, or `write` where there is an update."""
        return self.read(stream, carry) if update is None else self.write(stream, update, carry)

    def read(self, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the sublayer's input (B, T, C)."""
        return stream, carry

    def inputs(self, read: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor]:
        """Return what queries, keys and values are made of, (B, T, C) each, before the norm; asked of attention.

        `read` is what `read` returned; W_c and those who look into the model see it alone.
        """
        return read, read, read

    def write(self, stream: Tensor, update: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the stream with the update (B, T, C) of the sublayer."""
        return stream + update, carry

    def depth_weights(self, stream: Tensor, carry: Carry) -> Tensor | None:
        """Return the weight of each source in what `read` returns, (N, B, T), the embedding first; None: no such."""
        return None


class Compensation(nn.Linear, Mixing):
    """The linear map W_c: adds `normed @ W_c [+ b]` to an update, where `target` (of `TARGETS`) says; begins at zero.

    It maps (B, T, C) to (B, T, C), or to (B, T, H·D) before W_o.
    """

    def __init__(self, config: Config, target: str, bias: bool = False):
        assert config.head_dim is not None
        self.target, inputs = target, config.hidden_size
        outputs = config.num_attention_heads * config.head_dim if target == "heads" else inputs
        super().__init__(inputs, outputs, bias=bias)

    def reset(self) -> None:
        """Set W_c to zero, unless a checkpoint has filled it."""
        for parameter in self.parameters():
            init.zeros_(parameter)

    reset_parameters = reset  # when it is built


@dataclass(frozen=True)
class Wiring:
    """What the methods of a config say together, computed once per config.

    Attributes:
        methods: the methods, in list order.
        plan: who owns and who reads, all methods merged.
        compensation: (L,), where W_c of a layer writes (of `TARGETS`), None without it.
        compensation_bias: (L,), whether W_c of a layer has a bias.
        linear: layers with linear attention: for the plan they have no attention, since there is nothing to share.

    """

    methods: tuple["Method", ...]
    plan: DepthPlan
    compensation: tuple[str | None, ...]
    compensation_bias: tuple[bool, ...]
    linear: tuple[int, ...] = ()

    @cached_property
    def reads_input(self) -> tuple[bool, ...]:
        """(L,), whether a layer's attention reads its own input: it owns a state, or something compensates it."""
        own_layers = {layer for state in STATES for layer in self.plan.own_layers(state)}
        return tuple(
            target is not None or layer in own_layers or layer in self.linear
            for layer, target in enumerate(self.compensation)
        )

    @cached_property
    def sublayers(self) -> tuple[tuple[int, str], ...]:
        """The sublayers that exist, in order: (layer, "attn" or "mlp"); W_c alone is an "attn" too."""
        sites = []
        for layer, target in enumerate(self.compensation):
            if self.plan.attends(layer) or layer in self.linear or target is not None:
                sites.append((layer, "attn"))
            if self.plan.mlps[layer] is not None:
                sites.append((layer, "mlp"))
        return tuple(sites)

    @cached_property
    def sources(self) -> tuple[Mapping[int, tuple[str | None, ...]], ...]:
        """(L,), the states (by their place in `STATES`) that do not just come from the layer itself.

        Each with the names in the carry under which its sources lend it; None in the place of the layer itself.
        """
        result: list[dict[int, tuple[str | None, ...]]] = [{} for _ in range(self.plan.layers)]
        for number, state in enumerate(STATES):
            for layer, sources in enumerate(result):
                read = self.plan.reads(state, layer)
                if read not in ((), (layer,)):
                    sources[number] = tuple(None if i == layer else self.lends[i][number] for i in read)
        return tuple(result)

    @cached_property
    def lends(self) -> tuple[Mapping[int, str], ...]:
        """(L,), the states (by their place in `STATES`) that later layers read, and their names in the carry."""
        slots = [self.plan.slots(state) for state in STATES]
        return tuple(
            {n: f"{state}.{slots[n][layer]}" for n, state in enumerate(STATES) if slots[n][layer] is not None}
            for layer in range(self.plan.layers)
        )

    @cached_property
    def several(self) -> tuple[bool, ...]:
        """(L,), whether a layer reads the cached states of several layers, which a `StateReader` combines."""
        pairs = zip(self.plan.keys, self.plan.values, strict=True)
        return tuple(isinstance(keys, tuple) or isinstance(values, tuple) for keys, values in pairs)


class Method:
    """The questions; subclasses are frozen dataclasses whose fields are the options.

    Class attributes say what a method is for the commands:

    - `targets`: where a linear map W_c may write that makes up for what layers lose; a `Compensated` has some.
    - `saves`: of "keys" and "values" those that each further layer under the method saves; where it is not empty, the
      search by damage tries the method.
    - `grouped`: layers act in groups behind a source; False: each named layer by itself.
    - `consecutive`: the layers of a group are neighbours; False: any layers, the lowest of which leads.
    - `parts`: what of a layer is acted on, where there is a choice; the first is the default.
    - `reads_tokens`: its modules find the ids of the new tokens (B, T) in `carry[TOKENS]`; the model then needs
      `input_ids` and refuses `inputs_embeds`.
    - `merges`: how pretrained weights of a group may be merged; the first, "first", leaves them as they are.
    """

    targets: ClassVar[tuple[str, ...]] = ()
    saves: ClassVar[tuple[str, ...]] = ()
    grouped: ClassVar[bool] = True
    consecutive: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ()
    merges: ClassVar[tuple[str, ...]] = ("first",)
    reads_tokens: ClassVar[bool] = False

    def plan(self, layers: int) -> DepthPlan:
        """Answer who owns and who reads."""
        return DepthPlan.identity(layers)

    def heads(self, config: Config, wiring: Wiring, layer: int) -> HeadMixer | None:
        """Answer how a layer's own states are mixed; asked of each layer that has attention."""
        return None

    def reader(self, config: Config, wiring: Wiring, layer: int) -> StateReader | None:
        """Answer what a layer reads where the plan names several sources; asked of those layers alone."""
        return None

    def windows(self, layers: int) -> tuple[int | None, ...] | None:
        """Answer how many tokens each layer sees, None in it for all; None: the method leaves that to the config."""
        return None

    def residual(self, config: Config, wiring: Wiring, layer: int, site: str) -> Residual | None:
        """Answer what a sublayer (`site` "attn" or "mlp") reads, and where its update goes."""
        return None

    def final(self, config: Config, wiring: Wiring) -> Residual | None:
        """Answer what the final norm reads."""
        return None

    def inherit(self, weights: dict[str, Tensor], config: Config, wiring: Wiring, merge: str) -> list[str]:
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
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Build the method that acts on groups of layers, without W_c.

        A method with `parts` takes a further argument: `part`, by default the first of them.

        Args:
            groups: 0-based layers in rising order, source first; where `grouped` is False, just layers.
            layers: how many layers the model has.

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
        return cls.__module__.removeprefix("crosslayer.core.methods.")


@dataclass(frozen=True, kw_only=True)
class Compensated(Method):
    """A method whose layers borrow or lose states, for which a W_c may make up."""

    targets = TARGETS

    compensation: str | None = None
    """Where a W_c of these layers writes ("attention", "heads", "mlp"): an extension, where the paper has none."""
    compensation_bias: bool = False
    """Whether W_c has a bias."""

    def check_compensation(self) -> None:
        """Refuse a W_c in a place that the method has not, or a bias of none."""
        check_choice(self.name(), "compensation", self.compensation, (*self.targets, None))
        if self.compensation_bias and self.compensation is None:
            raise ValueError(
                f"{self.name()}: compensation_bias is a bias of W_c, and there is no W_c; set compensation to "
                f"{' or '.join(map(repr, self.targets))}"
            )

    def compensates(self, plan: DepthPlan, layer: int) -> bool:
        """Answer whether W_c makes up for what a layer loses by the method's own `plan`: here, any state."""
        return any(plan.sources(state)[layer] != layer for state in STATES)


def options_of(method: Method | type[Method]) -> list[dataclasses.Field]:
    """Return the options of a method: its own in their order, and then those of W_c."""
    of_compensation = {option.name for option in dataclasses.fields(Compensated)}
    fields = dataclasses.fields(method)  # pyright: ignore[reportArgumentType]
    return sorted(fields, key=lambda option: option.name in of_compensation)


def mixes(method: Method) -> bool:
    """Return whether a method has modules of its own that mix states or streams, beside its plan."""
    kind = type(method)
    return any(getattr(kind, name) is not getattr(Method, name) for name in ("heads", "reader", "residual", "final"))


def state_reader(config: Config, wiring: Wiring, layer: int) -> StateReader:
    """Return what combines the states of several layers at a layer that reads several.

    Raises:
        ValueError: no method answers, or two do.

    """
    readers = {m.name(): reader for m in wiring.methods if (reader := m.reader(config, wiring, layer)) is not None}
    if len(readers) != 1:
        raise ValueError(
            f"layer {layer} reads the states of several layers; exactly one method must combine them, not "
            f"{' and '.join(readers) or 'none'}"
        )
    return next(iter(readers.values()))
