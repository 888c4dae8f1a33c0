"""The kinds of interventions: each is plain data that knows how to change a running model, and how to undo that.

    waiver: row k of the mask holds only k, −∞ elsewhere before the softmax (Eq. 11)

Token k is then not mixed with others and may become a sink. Masks are edited inside the attention calls, layer by
layer, so that sliding windows stay and generate() can grow its cache. Positions count tokens: left padding is not.

Source: "Unveiling and Controlling Anomalous Attention Distribution in Transformers" (arXiv 2407.01601).
Shapes: B batch, H heads, T new tokens, S keys, C hidden.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.probe.intercept import AttentionCall, attention_layers, intercepted, layer_stack
from crosslayer.probe.tokens import position_embedding, position_limit
from crosslayer.verbs.intervene.masks import added_mask, as_taken, check_first
from crosslayer.verbs.intervene.running import Running


def _no_boolean(value: Any) -> Any:
    """Refuse what Python takes for 0 and 1: `true` in a file is no position."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number")
    return value


Whole = Annotated[int, BeforeValidator(_no_boolean)]
Position = Annotated[Whole, Field(ge=0)]
Positions = Annotated[tuple[Position, ...], Field(min_length=1)]
Layers = Annotated[tuple[Whole, ...], Field(min_length=1)] | Literal["all"]
STRICT = ConfigDict(extra="forbid")
Places = list[tuple[int, int]]  # row of the batch, index among the call's keys


class Intervention:
    """A change of a running model; `intervene` enters it."""

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Make the change; `stack` undoes it."""
        raise NotImplementedError


@dataclass(frozen=True, config=STRICT)
class Waiver(Intervention):
    """These positions attend only to themselves, in `layers` (Eq. 11 of arXiv 2407.01601)."""

    positions: Positions
    layers: Layers = "all"
    kind: Literal["waiver"] = "waiver"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Edit the rows of the mask."""
        chosen = _attending(model, self.layers)
        others = mixing_otherwise(model)
        if self.layers == "all" and others:
            raise ValueError(
                f"layers {others} mix tokens without softmax attention, so no waiver isolates a token there; name the "
                "layers"
            )

        def handler(call: AttentionCall) -> AttentionCall:
            return self._isolate(call, running) if call.layer in chosen else call

        stack.enter_context(intercepted(model, handler))

    def _isolate(self, call: AttentionCall, running: Running) -> AttentionCall:
        batch, _, new, _ = call.query.shape
        tokens = {position: running.new_tokens(self, position, batch, new) for position in self.positions}
        if not any(tokens.values()):
            return call
        mask = added_mask(call, running)  # (B, 1 or H, T, S)
        check_first(mask, tokens.get(0, []))
        own = running.cached - running.gone(call)  # how far keys stand behind new tokens
        for places in tokens.values():
            for row, index in places:
                mask[row, :, index] = torch.finfo(mask.dtype).min
                mask[row, :, index, index + own] = 0
        return dataclasses.replace(call, mask=as_taken(call, mask))


@dataclass(frozen=True, config=STRICT)
class Forbid(Intervention):
    """No other token may attend to these positions, in `layers`: what stands there can be no sink."""

    positions: Positions
    layers: Layers = "all"
    kind: Literal["forbid"] = "forbid"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Edit the columns of the mask; a token may still attend to itself."""

        def hide(call: AttentionCall, places: Places) -> AttentionCall:
            own = running.cached - running.gone(call)  # how far keys stand behind new tokens
            mask = added_mask(call, running)  # (B, 1 or H, T, S)
            for row, column in places:
                mask[row, :, :, column] = torch.finfo(mask.dtype).min
                if 0 <= column - own < call.query.shape[2]:
                    mask[row, :, column - own, column] = 0
            return dataclasses.replace(call, mask=as_taken(call, mask))

        stack.enter_context(intercepted(model, _on_keys(self, model, running, hide)))


@dataclass(frozen=True, config=STRICT)
class ScaleValues(Intervention):
    """The value states of these positions are multiplied by `factor`, in `layers`."""

    positions: Positions
    factor: Annotated[FiniteFloat, BeforeValidator(_no_boolean)]
    layers: Layers = "all"
    kind: Literal["scale_values"] = "scale_values"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change what attention reads, never what the cache holds."""

        def scale(call: AttentionCall, places: Places) -> AttentionCall:
            value = call.value.clone()  # (B, H, S, D)
            for row, index in places:
                value[row, :, index] *= self.factor
            return dataclasses.replace(call, value=value)

        stack.enter_context(intercepted(model, _on_keys(self, model, running, scale)))


@dataclass(frozen=True, config=STRICT)
class PositionSwap(Intervention):
    """Position `position` gets row `source` of a learned position table (BERT, GPT-2), or the vector `source` (C,)."""

    position: Position
    source: Whole | tuple[float, ...]
    kind: Literal["position_swap"] = "position_swap"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Overwrite a row of the table; the old row comes back bit for bit."""
        embedding = position_embedding(model)
        if embedding is None:
            raise ValueError(f"{type(model).__name__} has no learned position table, so positions cannot be swapped")
        _, table = embedding
        weight, first = table.weight, self._first_row(model, table)
        if self.source == self.position:
            raise ValueError(f"position {self.position} has its own row already; name another")
        index = self.position + first
        before = weight.detach()[index].clone()  # (C,)
        running.rows.setdefault(index, before)
        row = self._row(weight, first, running)
        stack.callback(_write_row, weight, index, before)
        _write_row(weight, index, row)

        def watch(module: Any, args: tuple) -> None:
            running.new_tokens(self, self.position, *args[0].shape[:2])

        stack.callback(layer_stack(model)[0].register_forward_pre_hook(watch).remove)

    def _first_row(self, model: PreTrainedModel, table: torch.nn.Embedding) -> int:
        """Return which row of the table belongs to position 0; rows before it stand for padding."""
        limit = position_limit(model)
        assert limit is not None
        rows = (self.position, self.source) if isinstance(self.source, int) else (self.position,)
        for position in rows:
            if not 0 <= position < limit:
                raise ValueError(f"position {position} is not in the table; it has rows 0 to {limit - 1}")
        return table.num_embeddings - limit if table.padding_idx is None else table.padding_idx + 1

    def _row(self, weight: Tensor, first: int, running: Running) -> Tensor:
        """Return what the position gets, (C,): a row as it was before any swap, or the vector itself."""
        if isinstance(self.source, int):
            index = self.source + first
            return running.rows.get(index, weight.detach()[index]).clone()
        vector = torch.tensor(self.source, dtype=weight.dtype, device=weight.device)
        if vector.shape != weight.shape[1:]:
            raise ValueError(f"the vector has {len(vector)} entries; a row of the table has {weight.shape[1]}")
        return vector


@dataclass(frozen=True, config=STRICT)
class TokenSwap(Intervention):
    """The token at `position` becomes another: an id, "bos", or a random token drawn with `seed`."""

    position: Position
    token: Whole | Literal["bos", "random"]
    seed: Whole = 0
    kind: Literal["token_swap"] = "token_swap"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change what the embedding is asked for."""
        token = self._id(model)

        def swap(module: Any, args: tuple) -> tuple:
            ids = args[0].clone()  # (B, T)
            for row, index in running.new_tokens(self, self.position, *ids.shape):
                ids[row, index] = token
            return (ids, *args[1:])

        stack.callback(model.get_input_embeddings().register_forward_pre_hook(swap).remove)

    def _id(self, model: PreTrainedModel) -> int:
        config = model.config.get_text_config()
        token: Any = self.token
        if token == "random":
            token = int(torch.randint(config.vocab_size, (), generator=torch.Generator().manual_seed(self.seed)))
        elif token == "bos":
            token = config.bos_token_id
        if token is None or not 0 <= token < config.vocab_size:
            raise ValueError(f"token {self.token!r} is not in the vocabulary of {config.vocab_size}; give another id")
        return token


@dataclass(frozen=True, config=STRICT)
class Ablate(Intervention):
    """The hidden state that leaves `layer` at `position` becomes zero, or the mean of the other new tokens.

    The mean sees tokens behind the position too: it is for comparing full forward passes, not for decoding.
    """

    layer: Whole
    position: Position
    value: Literal["zero", "mean"] = "zero"
    kind: Literal["ablate"] = "ablate"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change the output of the layer."""
        check_layers(model, (self.layer,))

        def replace(module: Any, args: Any, output: Any) -> Any:
            hidden = (output[0] if isinstance(output, tuple) else output).clone()  # (B, T, C)
            for row, index in running.new_tokens(self, self.position, *hidden.shape[:2]):
                others = running.real(row, hidden.shape[1])  # (T,)
                others[index] = False
                if self.value == "mean" and not others.any():
                    raise ValueError("the mean of other tokens needs other new tokens; use zero when decoding")
                hidden[row, index] = 0 if self.value == "zero" else hidden[row, others].mean(0)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        # first of all hooks, so that whoever collects hidden states sees it
        stack.callback(layer_stack(model)[self.layer].register_forward_hook(replace, prepend=True).remove)


ByLayer = Waiver | Forbid | ScaleValues  # act in the layers that they name, at several positions
Kind = ByLayer | PositionSwap | TokenSwap | Ablate
Entry = Annotated[Kind, Field(discriminator="kind")]  # as records and files hold it


def load_intervention(entry: Mapping[str, Any]) -> Kind:
    """Build an intervention from plain data such as {"kind": "waiver", "positions": [255]}; `to_entry` undoes it.

    Raises:
        ValueError: the kind, an option or a value is not known.

    """
    kinds = {cls.__dataclass_fields__["kind"].default: cls for cls in Kind.__args__}
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"intervention {kind!r} is not known; use one of {', '.join(kinds)}")
    try:
        return TypeAdapter(kinds[kind]).validate_python({str(name): option for name, option in entry.items()})
    except ValidationError as error:
        raise ValueError(f"{kind}: {first_reason(error)}") from None


def first_reason(error: ValidationError) -> str:
    """Return what the first error of a validation says, and of which option, in a single line."""
    first = error.errors()[0]
    place, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{place}: {reason}" if place else reason


def to_entry(intervention: Kind) -> dict[str, Any]:
    """Return plain data for JSON or YAML."""
    return dataclasses.asdict(intervention)


def waiver(*positions: int, layers: Sequence[int] | None = None) -> Waiver:
    """Return the waiver of these positions, in all layers or in some.

    Raises:
        ValueError: there is no position, or a position is negative.

    """
    chosen = "all" if layers is None else tuple(layers)
    isolated = load_intervention({"kind": "waiver", "positions": positions, "layers": chosen})
    assert isinstance(isolated, Waiver)
    return isolated


def positions_of(intervention: Kind) -> tuple[int, ...]:
    """Return the positions that an intervention is about."""
    return intervention.positions if isinstance(intervention, ByLayer) else (intervention.position,)


def layers_of(model: PreTrainedModel, intervention: Kind) -> tuple[int, ...]:
    """Return the layers in which an intervention acts, none if it does not act by layer."""
    if not isinstance(intervention, ByLayer):
        return ()
    return tuple(attention_layers(model.config)) if intervention.layers == "all" else intervention.layers


def mixing_otherwise(model: PreTrainedModel) -> list[int]:
    """Return the layers that mix tokens without softmax attention (of hybrids); where a plan has none, none does."""
    config = model.config.get_text_config()
    if getattr(config, "plan", None) is not None:
        return []
    return sorted(set(range(len(layer_stack(model)))) - set(attention_layers(model.config)))


def check_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Refuse layers that the model does not have."""
    count = len(layer_stack(model))
    for layer in layers:
        if not 0 <= layer < count:
            raise ValueError(f"layer {layer} does not exist; layers go from 0 to {count - 1}")


def _attending(model: PreTrainedModel, layers: Layers) -> set[int]:
    """Return the layers whose attention is meant; all of them must have it."""
    attending = attention_layers(model.config)
    if layers == "all":
        return set(attending)
    check_layers(model, layers)
    for layer in layers:
        if layer not in attending:
            raise ValueError(f"layer {layer} has no softmax attention; layers {attending} have")
    return set(layers)


def _on_keys(
    intervention: Forbid | ScaleValues,
    model: PreTrainedModel,
    running: Running,
    change: Callable[[AttentionCall, Places], AttentionCall],
) -> Callable[[AttentionCall], AttentionCall]:
    """Return a handler that applies `change` wherever the keys of the positions are at hand."""
    chosen = _attending(model, intervention.layers)

    def handler(call: AttentionCall) -> AttentionCall:
        if call.layer not in chosen:
            return call
        places = []
        for position in intervention.positions:
            places += running.keys(intervention, position, call)
        return change(call, places) if places else call

    return handler


def _write_row(weight: Tensor, row: int, state: Tensor) -> None:
    """Write a row of a table, (C,)."""
    with torch.no_grad():
        weight[row] = state
