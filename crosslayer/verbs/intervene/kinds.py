"""The kinds of interventions: each is plain data that knows how to change a running model, and how to undo that.

    with intervening(model, waiver(255), PositionSwap(0, 100)): …

    waiver: row k of the mask holds only k, −∞ elsewhere before the softmax (Eq. 11)

Token k is then not mixed with others and may become a sink. Masks are edited inside the attention calls, layer by
layer, so that sliding windows stay and generate() can grow its cache. Positions count tokens: left padding is not.

Source: "Unveiling and Controlling Anomalous Attention Distribution in Transformers" (arXiv 2407.01601).
Shapes: B batch, H heads, T new tokens, S keys, C hidden.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.environment import check_flex
from crosslayer.output.record import fault_of
from crosslayer.probe.intercept import AttentionCall, attention_layers, intercepted, layer_stack, plan_of
from crosslayer.probe.tokens import position_embedding, position_limit
from crosslayer.verbs.intervene.running import Running, added_mask, as_taken


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


class Intervention:
    """A change of a running model; `intervening` enters it."""

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Make the change; `stack` undoes it."""
        raise NotImplementedError


class InAttention(Intervention):
    """Changes the attention calls of some layers at some positions."""

    positions: tuple[int, ...]
    layers: tuple[int, ...] | Literal["all"]

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change the calls of the layers, all of which must have attention."""
        attending = attention_layers(model.config)
        chosen = attending if self.layers == "all" else self.layers
        check_layers(model, tuple(chosen))
        for layer in chosen:
            if layer not in attending:
                raise ValueError(f"layer {layer} has no softmax attention; layers {attending} have")

        def handler(call: AttentionCall) -> AttentionCall:
            return self.changed(call, running) if call.layer in chosen else call

        stack.enter_context(intercepted(model, handler))

    def changed(self, call: AttentionCall, running: Running) -> AttentionCall:
        """Return a call with the change."""
        raise NotImplementedError


@dataclass(frozen=True, config=STRICT)
class Waiver(InAttention):
    """These positions attend only to themselves, in `layers` (Eq. 11 of arXiv 2407.01601)."""

    positions: Positions
    layers: Layers = "all"
    kind: Literal["waiver"] = "waiver"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Edit the rows of the mask."""
        planned = plan_of(model.config) is not None  # its layers mix by attention alone
        others = sorted(set(range(len(layer_stack(model)))) - set(attention_layers(model.config)))
        if self.layers == "all" and others and not planned:
            raise ValueError(
                f"layers {others} mix tokens without softmax attention, so no waiver isolates a token there; name the "
                "layers"
            )
        super().enter(model, running, stack)

    def changed(self, call: AttentionCall, running: Running) -> AttentionCall:
        """Let the rows of the positions see nothing but their own keys."""
        batch, _, new, _ = call.query.shape
        places = [place for p in self.positions for place in running.new_tokens(self, p, batch, new)]
        if not places:
            return call
        mask = added_mask(call, running)  # (B, 1 or H, T, S)
        least, own = torch.finfo(mask.dtype).min, running.cached - running.gone(call)  # keys stand `own` behind tokens
        for row, index in running.new_tokens(self, 0, batch, new) if 0 in self.positions else []:
            if int((mask[row, 0, index] > least / 2).sum()) <= 1:
                raise ValueError(
                    "a waiver of position 0 changes nothing: behind a causal mask the first token attends only to "
                    "itself anyway; name a later position"
                )
        for row, index in places:
            mask[row, :, index] = least
            mask[row, :, index, index + own] = 0
        return dataclasses.replace(call, mask=as_taken(call, mask))


@dataclass(frozen=True, config=STRICT)
class Forbid(InAttention):
    """No other token may attend to these positions, in `layers`: what stands there can be no sink."""

    positions: Positions
    layers: Layers = "all"
    kind: Literal["forbid"] = "forbid"

    def changed(self, call: AttentionCall, running: Running) -> AttentionCall:
        """Hide the keys of the positions from all tokens but themselves."""
        places = [place for position in self.positions for place in running.keys(self, position, call)]
        if not places:
            return call
        mask, own = added_mask(call, running), running.cached - running.gone(call)  # (B, 1 or H, T, S)
        for row, column in places:
            mask[row, :, :, column] = torch.finfo(mask.dtype).min
            if 0 <= column - own < call.query.shape[2]:
                mask[row, :, column - own, column] = 0
        return dataclasses.replace(call, mask=as_taken(call, mask))


@dataclass(frozen=True, config=STRICT)
class ScaleValues(InAttention):
    """The value states of these positions are multiplied by `factor`, in `layers`."""

    positions: Positions
    factor: Annotated[FiniteFloat, BeforeValidator(_no_boolean)]
    layers: Layers = "all"
    kind: Literal["scale_values"] = "scale_values"

    def changed(self, call: AttentionCall, running: Running) -> AttentionCall:
        """Change what attention reads, never what the cache holds."""
        places = [place for position in self.positions for place in running.keys(self, position, call)]
        if not places:
            return call
        value = call.value.clone()  # (B, H, S, D)
        for row, index in places:
            value[row, :, index] *= self.factor
        return dataclasses.replace(call, value=value)


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
        if self.source == self.position:
            raise ValueError(f"position {self.position} has its own row already; name another")
        _, table = embedding
        weight, limit = table.weight, position_limit(model)
        assert limit is not None
        for position in (self.position, self.source) if isinstance(self.source, int) else (self.position,):
            if not 0 <= position < limit:
                raise ValueError(f"position {position} is not in the table; it has rows 0 to {limit - 1}")
        # rows before that of position 0 stand for padding
        first = table.num_embeddings - limit if table.padding_idx is None else table.padding_idx + 1
        index = self.position + first
        before = weight.detach()[index].clone()  # (C,)
        running.rows.setdefault(index, before)
        if isinstance(self.source, int):  # as the row was before any swap
            row = running.rows.get(self.source + first, weight.detach()[self.source + first]).clone()
        else:
            row = torch.tensor(self.source, dtype=weight.dtype, device=weight.device)
            if row.shape != before.shape:
                raise ValueError(f"the vector has {len(row)} entries; a row of the table has {weight.shape[1]}")

        def write(state: Tensor) -> None:
            with torch.no_grad():
                weight[index] = state

        def watch(module: Any, args: tuple) -> None:
            running.new_tokens(self, self.position, *args[0].shape[:2])

        stack.callback(write, before)
        write(row)
        stack.callback(layer_stack(model)[0].register_forward_pre_hook(watch).remove)


@dataclass(frozen=True, config=STRICT)
class TokenSwap(Intervention):
    """The token at `position` becomes another: an id, "bos", or a random token drawn with `seed`."""

    position: Position
    token: Whole | Literal["bos", "random"]
    seed: Whole = 0
    kind: Literal["token_swap"] = "token_swap"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change what the embedding is asked for."""
        config = model.config.get_text_config()
        token: Any = self.token
        if token == "random":
            token = int(torch.randint(config.vocab_size, (), generator=torch.Generator().manual_seed(self.seed)))
        elif token == "bos":
            token = config.bos_token_id
        if token is None or not 0 <= token < config.vocab_size:
            raise ValueError(f"token {self.token!r} is not in the vocabulary of {config.vocab_size}; give another id")

        def swap(module: Any, args: tuple) -> tuple:
            ids = args[0].clone()  # (B, T)
            for row, index in running.new_tokens(self, self.position, *ids.shape):
                ids[row, index] = token
            return (ids, *args[1:])

        stack.callback(model.get_input_embeddings().register_forward_pre_hook(swap).remove)


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


Kind = Waiver | Forbid | ScaleValues | PositionSwap | TokenSwap | Ablate
Entry = Annotated[Kind, Field(discriminator="kind")]  # as records and files hold it


def load_intervention(entry: Mapping[str, Any]) -> Kind:
    """Build an intervention from plain data such as {"kind": "waiver", "positions": [255]}; `to_entry` undoes it."""
    kinds = {cls.__dataclass_fields__["kind"].default: cls for cls in Kind.__args__}
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"intervention {kind!r} is not known; use one of {', '.join(kinds)}")
    try:
        return TypeAdapter(kinds[kind]).validate_python({str(name): option for name, option in entry.items()})
    except ValidationError as error:
        raise ValueError(f"{kind}: {fault_of(error)}") from None


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
    return intervention.positions if isinstance(intervention, InAttention) else (intervention.position,)


def acting_layers(model: PreTrainedModel, intervention: Kind) -> tuple[int, ...]:
    """Return the layers in which an intervention acts, none if it does not act by layer."""
    if not isinstance(intervention, InAttention):
        return ()
    return tuple(attention_layers(model.config)) if intervention.layers == "all" else intervention.layers


def check_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Refuse layers that the model does not have."""
    count = len(layer_stack(model))
    for layer in layers:
        if not 0 <= layer < count:
            raise ValueError(f"layer {layer} does not exist; layers go from 0 to {count - 1}")


@contextmanager
def intervening(model: PreTrainedModel, *interventions: Kind) -> Iterator[None]:
    """Run `model` with all `interventions`, the first outermost; it is bit-equal again on exit, whatever happened.

    Args:
        model: any causal or bidirectional Hugging Face model whose attention goes through the attention interface.
        interventions: what to change; positions count tokens from 0, without padding on the left.

    Raises:
        ValueError: the model would ignore an edited mask (FlashAttention), a layer, position or table does not exist,
            or, on a clean exit, a position was outside of every sequence that was run.

    """
    attention = model.config.get_text_config()._attn_implementation or "eager"
    if "flash" in attention:
        raise ValueError(f"{attention} takes no edited mask; load the model with sdpa, eager or flex attention")
    check_flex(attention, model.device)
    running = Running()
    with ExitStack() as stack:
        layers = layer_stack(model)
        for module in model.modules():  # OPT's head skips the body and calls its decoder
            if isinstance(module, PreTrainedModel) and layers in module.modules():
                stack.callback(module.register_forward_pre_hook(running.begin, with_kwargs=True).remove)
        for intervention in interventions:
            intervention.enter(model, running, stack)
        yield
    for intervention in interventions:
        for position in positions_of(intervention):
            if running.passes and (id(intervention), position) not in running.reached:
                raise ValueError(
                    f"{intervention.kind} did nothing: position {position} was outside of every sequence that was run"
                )
