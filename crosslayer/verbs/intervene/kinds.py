"""The interventions: each is plain data that knows how to change a running model and how to undo the change.

    with intervening(model, waiver(255), PositionSwap(0, 100)): …

    waiver: row k of the mask holds only k, −∞ elsewhere before the softmax (Eq. 11)

Token k is then not mixed with others and may become a sink. Masks are edited inside the attention calls, layer by
layer, so that sliding windows stay and generate() can grow its cache. Positions count tokens, without left padding.

Source: "Unveiling and Controlling Anomalous Attention Distribution in Transformers" (arXiv 2407.01601).
Shapes: B batch, H heads, T new tokens, S keys, C hidden.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from crosslayer.output.record import validation_message
from crosslayer.probe.intercept import AttentionCall, intercepted
from crosslayer.probe.model import (
    attention_layers,
    check_masks,
    layer_stack,
    plan_of,
    position_embedding,
    position_limit,
    unwrapped,
)
from crosslayer.verbs.intervene.running import Running, added_mask


def _no_boolean(value: Any) -> Any:
    """Reject booleans, which Python treats as 0 and 1: `true` in a file is not a position."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {str(value).lower()}")
    return value


def _token(value: Any) -> Any:
    """Say what a token may be: the message of a union names only its last form."""
    if isinstance(value, str) and value not in ("bos", "random") and not value.isdecimal():
        raise ValueError(f"must be an id, bos or random, got {value!r}")
    return value


Whole = Annotated[int, BeforeValidator(_no_boolean)]
Position = Annotated[Whole, Field(ge=0)]
# one position need not be in a tuple
Positions = Annotated[
    tuple[Position, ...], Field(min_length=1), BeforeValidator(lambda p: (p,) if type(p) is int else p)
]
Layers = Annotated[tuple[Whole, ...], Field(min_length=1)] | Literal["all"]
STRICT = ConfigDict(extra="forbid")


class Intervention:
    """A change to a running model; `intervening` applies it."""

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Apply the change; `stack` undoes it."""
        raise NotImplementedError


class InAttention(Intervention):
    """A change to the attention calls of some layers at some positions."""

    positions: tuple[int, ...]
    layers: tuple[int, ...] | Literal["all"]

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Intercept the calls of the layers, all of which must have attention."""
        attending = attention_layers(model.config)
        chosen = attending if self.layers == "all" else self.layers
        for layer in chosen:
            if layer not in attending:
                raise ValueError(f"layer {layer} has no softmax attention, only layers {attending} do")

        def handler(call: AttentionCall) -> AttentionCall:
            return self.changed(call, running) if call.layer in chosen else call

        stack.enter_context(intercepted(model, handler))

    def changed(self, call: AttentionCall, running: Running) -> AttentionCall:
        """Return a call with the change applied."""
        raise NotImplementedError


@dataclass(frozen=True, config=STRICT)
class Waiver(InAttention):
    """These positions attend only to themselves, in `layers` (Eq. 11 of arXiv 2407.01601)."""

    positions: Positions  # type: ignore[bad-override]
    layers: Layers = "all"  # type: ignore[bad-override]
    kind: Literal["waiver"] = "waiver"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Edit the rows of the mask."""
        # in our own models only attention mixes tokens
        planned = plan_of(model.config) is not None
        others = sorted(set(range(len(layer_stack(model)))) - set(attention_layers(model.config)))
        if self.layers == "all" and others and not planned:
            raise ValueError(
                f"layers {others} mix tokens without softmax attention, where a waiver cannot isolate a token; choose "
                "other layers"
            )
        super().enter(model, running, stack)

    def changed(self, call: AttentionCall, running: Running) -> AttentionCall:
        """Mask everything but their own keys in the rows of the positions."""
        batch, _, new, _ = call.query.shape
        isolated = [pair for p in self.positions for pair in running.new_tokens(self, p, batch, new)]
        if not isolated:
            return call
        mask = added_mask(call, running)  # (B, 1 or H, T, S)
        least, offset = torch.finfo(mask.dtype).min, running.offset(call)
        for row, index in running.new_tokens(self, 0, batch, new) if 0 in self.positions else []:
            if int((mask[row, 0, index] > least / 2).sum()) <= 1:
                raise ValueError(
                    "a waiver of position 0 changes nothing: under a causal mask the first token attends only to "
                    "itself anyway; choose a later position"
                )
        for row, index in isolated:
            mask[row, :, index] = least
            mask[row, :, index, index + offset] = 0
        return dataclasses.replace(call, mask=mask)


@dataclass(frozen=True, config=STRICT)
class Forbid(InAttention):
    """No other token may attend to these positions, in `layers`: they cannot be sinks."""

    positions: Positions  # type: ignore[bad-override]
    layers: Layers = "all"  # type: ignore[bad-override]
    kind: Literal["forbid"] = "forbid"

    def changed(self, call: AttentionCall, running: Running) -> AttentionCall:
        """Mask the keys of the positions for all other tokens."""
        columns = [pair for position in self.positions for pair in running.keys(self, position, call)]
        if not columns:
            return call
        mask, offset = added_mask(call, running), running.offset(call)  # (B, 1 or H, T, S)
        for row, column in columns:
            mask[row, :, :, column] = torch.finfo(mask.dtype).min
            if 0 <= column - offset < call.query.shape[2]:
                mask[row, :, column - offset, column] = 0
        return dataclasses.replace(call, mask=mask)


@dataclass(frozen=True, config=STRICT)
class ScaleValues(InAttention):
    """The value states of these positions are multiplied by `factor`, in `layers`."""

    positions: Positions  # type: ignore[bad-override]
    factor: Annotated[FiniteFloat, BeforeValidator(_no_boolean)]
    layers: Layers = "all"  # type: ignore[bad-override]
    kind: Literal["scale_values"] = "scale_values"

    def changed(self, call: AttentionCall, running: Running) -> AttentionCall:
        """Scale a copy of the values that attention reads; the cache keeps the original."""
        columns = [pair for position in self.positions for pair in running.keys(self, position, call)]
        if not columns:
            return call
        value = call.value.clone()  # (B, H, S, D)
        for row, column in columns:
            value[row, :, column] *= self.factor
        return dataclasses.replace(call, value=value)


@dataclass(frozen=True, config=STRICT)
class PositionSwap(Intervention):
    """`position` gets row `source` of a learned position table (BERT, GPT-2), scaled to a norm."""

    position: Position
    source: Whole
    norm: Annotated[FiniteFloat, Field(gt=0), BeforeValidator(_no_boolean)] | None = None
    kind: Literal["position_swap"] = "position_swap"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Overwrite a row of the table; the original is restored bit for bit."""
        embedding = position_embedding(model)
        if embedding is None:
            raise ValueError(f"position_swap needs a learned position table, and {type(model).__name__} has none")
        if self.source == self.position and self.norm is None:
            raise ValueError(f"position {self.position} has its own row already; choose another row")
        _, table = embedding
        weight, limit = table.weight, position_limit(model)
        assert limit is not None
        for position in (self.position, self.source):
            if not 0 <= position < limit:
                raise ValueError(f"position {position} is not in the position table, which has rows 0 to {limit - 1}")
        # rows before that of position 0 are padding (RoBERTa)
        first = table.num_embeddings - limit if table.padding_idx is None else table.padding_idx + 1
        rows = weight.detach()
        index, source = self.position + first, self.source + first
        before = rows[index].clone()  # (C,)
        running.rows.setdefault(index, before)
        # the table's own row, also where an earlier swap has overwritten it: two swaps may exchange rows
        row = running.rows.get(source, rows[source]).clone()
        if self.norm is not None:
            row = torch.nn.functional.normalize(row, dim=0) * self.norm

        def mark_reached(module: Any, args: tuple) -> None:
            running.new_tokens(self, self.position, *args[0].shape[:2])

        stack.callback(rows[index].copy_, before)
        rows[index].copy_(row)
        stack.callback(layer_stack(model)[0].register_forward_pre_hook(mark_reached).remove)


@dataclass(frozen=True, config=STRICT)
class TokenSwap(Intervention):
    """The token at `position` is replaced by an id, "bos", or a random token drawn with `seed`."""

    position: Position
    token: Annotated[Whole | Literal["bos", "random"], BeforeValidator(_token)]
    seed: Whole = 0
    kind: Literal["token_swap"] = "token_swap"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Replace the id before the embedding."""
        config = model.config.get_text_config()
        token: Any = self.token
        if token == "random":
            token = int(torch.randint(config.vocab_size, (), generator=torch.Generator().manual_seed(self.seed)))
        elif token == "bos":
            token = config.bos_token_id
        if token is None or not 0 <= token < config.vocab_size:
            raise ValueError(f"token_swap: token {self.token!r} is not in the vocabulary of {config.vocab_size} ids")

        def swap(module: Any, args: tuple) -> tuple:
            ids = args[0].clone()  # (B, T)
            for row, index in running.new_tokens(self, self.position, *ids.shape):
                ids[row, index] = token
            return (ids, *args[1:])

        stack.callback(model.get_input_embeddings().register_forward_pre_hook(swap).remove)


@dataclass(frozen=True, config=STRICT)
class Ablate(Intervention):
    """The output of `layer` at `position` becomes zero, or the mean of the other new tokens.

    The mean includes later tokens: use it to compare full forward passes, not in decoding.
    """

    layer: Whole
    position: Position
    value: Literal["zero", "mean"] = "zero"
    kind: Literal["ablate"] = "ablate"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change the output of the layer."""

        def replace(module: Any, args: Any, output: Any) -> Any:
            hidden = (output[0] if isinstance(output, tuple) else output).clone()  # (B, T, C)
            for row, index in running.new_tokens(self, self.position, *hidden.shape[:2]):
                others = torch.ones(hidden.shape[1], dtype=torch.bool)  # (T,), without padding
                if running.mask is not None:
                    new = slice(running.cached, running.cached + hidden.shape[1])
                    others = running.mask[row % len(running.mask), new].cpu()
                others[index] = False
                if self.value == "mean" and not others.any():
                    raise ValueError("ablate with mean needs other new tokens; use zero when decoding")
                hidden[row, index] = 0 if self.value == "zero" else hidden[row, others].mean(0)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        # the first of all hooks: transformers collects hidden states by hooks of its own, which must see the change
        stack.callback(layer_stack(model)[self.layer].register_forward_hook(replace, prepend=True).remove)


Kind = Waiver | Forbid | ScaleValues | PositionSwap | TokenSwap | Ablate
Entry = Annotated[Kind, Field(discriminator="kind")]  # an intervention as plain data, in records and files


def load_intervention(entry: Mapping[str, Any]) -> Kind:
    """Build an intervention from plain data such as {"kind": "waiver", "positions": [255]}; inverse of `to_entry`."""
    kinds = {cls.kind: cls for cls in get_args(Kind)}
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"the kind of an intervention must be one of {', '.join(kinds)}, got {kind!r}")
    try:
        return TypeAdapter(kinds[kind]).validate_python({str(name): option for name, option in entry.items()})
    except ValidationError as error:
        raise ValueError(f"{kind}: {validation_message(error)}") from None


def to_entry(intervention: Kind) -> dict[str, Any]:
    """Return an intervention as plain data for JSON or YAML."""
    return dataclasses.asdict(intervention)


def waiver(*positions: int, layers: Sequence[int] | None = None) -> Waiver:
    """Return a waiver of these positions, in all layers or in some.

    Raises:
        ValueError: no position is given, or one is negative.
    """
    chosen = "all" if layers is None else tuple(layers)
    isolated = load_intervention({"kind": "waiver", "positions": positions, "layers": chosen})
    assert isinstance(isolated, Waiver)
    return isolated


def positions_of(intervention: Kind) -> tuple[int, ...]:
    """Return the positions that an intervention changes."""
    return intervention.positions if isinstance(intervention, InAttention) else (intervention.position,)


def acting_layers(model: PreTrainedModel, intervention: Kind) -> tuple[int, ...]:
    """Return the layers in which an intervention acts; empty if it does not act by layer."""
    if not isinstance(intervention, InAttention):
        return ()
    return tuple(attention_layers(model.config)) if intervention.layers == "all" else intervention.layers


@contextmanager
def intervening(model: PreTrainedModel, *interventions: Kind) -> Iterator[None]:
    """Run `model` under all `interventions`, the first outermost; on exit the model is restored bit for bit.

    Args:
        model: any causal or bidirectional Hugging Face model whose attention goes through the attention interface.
        interventions: what to change; positions count tokens from 0, without left padding.

    Raises:
        ValueError: the model's attention takes no edited masks (FlashAttention, FlexAttention), a layer, position or
            table does not exist, or, on exit without another error, no sequence had a token at one of the positions.
    """
    model = unwrapped(model)
    check_masks(model, "flash", "flex")
    running = Running()
    with ExitStack() as stack:
        layers = layer_stack(model)
        # Positions are read wherever a pretrained module around the layers is entered: OPT's head skips the body and
        # calls its decoder.
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and layers in module.modules():
                stack.callback(module.register_forward_pre_hook(running.begin, with_kwargs=True).remove)
        for intervention in interventions:
            named = (intervention.layer,) if isinstance(intervention, Ablate) else acting_layers(model, intervention)
            for layer in named:
                if not 0 <= layer < len(layers):
                    raise ValueError(f"layer {layer} does not exist: the model has layers 0 to {len(layers) - 1}")
            intervention.enter(model, running, stack)
        yield
    for intervention in interventions:
        for position in positions_of(intervention):
            if running.passes and (id(intervention), position) not in running.reached:
                raise ValueError(f"{intervention.kind} did nothing: no sequence had a token at position {position}")
