"""Interventions on a model that is left as it is: move, make and remove attention sinks, then put everything back.

    waiver: row k of the mask holds only k, −∞ before the softmax (Yan et al. 2024, Eq. 11)

Token k is then not mixed with others and may become a sink. Masks are edited inside the attention calls, layer by
layer, so that sliding windows stay and generate() can grow its cache. Positions count tokens: left padding is not.

Source: "Unveiling and Controlling Anomalous Attention Distribution in Transformers".
Shapes: B batch, T new tokens, S cached + new tokens, C hidden.
"""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from inspect import signature
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers import PreTrainedModel

from crosslayer.probe.intercept import AttentionCall, attention_layers, intercepted, layer_stack
from crosslayer.probe.tokens import position_embedding, position_limit


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
FLEX_BLOCK = 128


class Running:
    """Where the tokens of the running forward pass stand, and which interventions found their positions."""

    def __init__(self):
        self.seen, self.passes = 0, 0
        self.mask: Tensor | None = None  # (B, S), 0 where a token is padding
        self.offsets: list[int] = [0]  # tokens of padding on the left, one for each row or one for all
        self.acted: set[tuple[int, int]] = set()  # identity of the intervention, position
        self.rows: dict[int, Tensor] = {}  # of the position table, as they were

    def begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Read from the body's arguments how many tokens are cached and how far each row is padded on the left."""
        given = signature(module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        cache, mask, positions = (given.get(k) for k in ("past_key_values", "attention_mask", "position_ids"))
        self.seen = 0 if cache is None else int(cache.get_seq_length())
        self.mask, self.offsets, self.passes = None, [0], self.passes + 1
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.mask, self.offsets = mask != 0, (mask.cumsum(-1) == 0).sum(-1).tolist()
        elif isinstance(positions, Tensor) and positions.dim() == 2:  # padding clamps the first ones
            self.offsets = (self.seen + positions.shape[1] - 1 - positions[:, -1]).tolist()

    def columns(self, position: int, batch: int) -> list[tuple[int, int]]:
        """Return (row of the batch, index among cached and new tokens) of a position wherever it is a real token."""
        if not self.passes:
            raise ValueError("this model runs its layers without its body, so positions are not known; use the body")
        offsets = self.offsets * batch if len(self.offsets) == 1 else self.offsets
        found = [(row, position + offset) for row, offset in enumerate(offsets)]
        if self.mask is not None:
            found = [(row, i) for row, i in found if i < self.mask.shape[1] and self.mask[row % len(self.mask), i]]
        return found

    def places(self, one: "Intervention", position: int, batch: int, new: int) -> list[tuple[int, int]]:
        """Return (row of the batch, index among the new tokens) of each row that is running this position now."""
        found = [(row, index - self.seen) for row, index in self.columns(position, batch)]
        found = [(row, index) for row, index in found if 0 <= index < new]
        self.acted |= {(id(one), position)} if found else set()
        return found

    def keys(self, one: "Intervention", position: int, call: AttentionCall) -> list[tuple[int, int]]:
        """Return (row of the batch, index among the call's keys) of a position."""
        dropped, end = self.dropped(call), self.seen + call.query.shape[2]
        found = [(row, i - dropped) for row, i in self.columns(position, call.query.shape[0]) if dropped <= i < end]
        self.acted |= {(id(one), position)} if found else set()
        return found

    def dropped(self, call: AttentionCall) -> int:
        """Return how many of the oldest keys a sliding cache has dropped."""
        return max(0, self.seen + call.query.shape[2] - call.key.shape[2])

    def real(self, row: int, new: int) -> Tensor:
        """Return which of a row's new tokens are no padding, (T,)."""
        if self.mask is None:
            return torch.ones(new, dtype=torch.bool)
        return self.mask[row % len(self.mask), self.seen : self.seen + new].cpu()


class Intervention:
    """One change; entered on a model by `intervene`."""

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Make the change; `stack` undoes it."""
        raise NotImplementedError


@dataclass(frozen=True, config=STRICT)
class Waiver(Intervention):
    """These positions attend only to themselves, in `layers`."""

    positions: Positions
    layers: Layers = "all"
    kind: Literal["waiver"] = "waiver"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Edit the rows of the mask."""
        chosen = _chosen(model, self.layers)
        if self.layers == "all" and mixes_otherwise(model):
            raise ValueError(
                f"layers {mixes_otherwise(model)} mix tokens without softmax attention, so no waiver isolates a token "
                "there; name the layers"
            )

        def handler(call: AttentionCall) -> AttentionCall:
            if call.layer not in chosen:
                return call
            batch, _, new, _ = call.query.shape
            places = [place for k in self.positions for place in running.places(self, k, batch, new)]
            if not places:
                return call
            dropped = running.dropped(call)
            mask = _mask(call, running)
            if 0 in self.positions:
                _check_first(mask, running.places(self, 0, batch, new))
            for row, index in places:
                mask[row, :, index] = torch.finfo(mask.dtype).min
                mask[row, :, index, index + running.seen - dropped] = 0
            return dataclasses.replace(call, mask=_like(call, mask))

        stack.enter_context(intercepted(model, handler))


@dataclass(frozen=True, config=STRICT)
class Forbid(Intervention):
    """No other token may attend to these positions, in `layers`: what stands there can be no sink."""

    positions: Positions
    layers: Layers = "all"
    kind: Literal["forbid"] = "forbid"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Edit the columns of the mask; a token may still attend to itself."""

        def change(call: AttentionCall, columns: list[tuple[int, int]]) -> AttentionCall:
            dropped = running.dropped(call)
            mask = _mask(call, running)
            for row, column in columns:
                mask[row, :, :, column] = torch.finfo(mask.dtype).min
                own = column + dropped - running.seen
                if 0 <= own < call.query.shape[2]:
                    mask[row, :, own, column] = 0
            return dataclasses.replace(call, mask=_like(call, mask))

        stack.enter_context(intercepted(model, _on_keys(self, model, running, change)))


@dataclass(frozen=True, config=STRICT)
class ScaleValues(Intervention):
    """The value states of these positions are multiplied by `factor`, in `layers`."""

    positions: Positions
    factor: Annotated[FiniteFloat, BeforeValidator(_no_boolean)]
    layers: Layers = "all"
    kind: Literal["scale_values"] = "scale_values"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change what attention reads, never what the cache holds."""

        def change(call: AttentionCall, columns: list[tuple[int, int]]) -> AttentionCall:
            value = call.value.clone()
            for row, column in columns:
                value[row, :, column] *= self.factor
            return dataclasses.replace(call, value=value)

        stack.enter_context(intercepted(model, _on_keys(self, model, running, change)))


@dataclass(frozen=True, config=STRICT)
class PositionSwap(Intervention):
    """Position `position` gets row `source` of a learned position table (BERT, GPT-2), or the vector `source` (C)."""

    position: Position
    source: Whole | tuple[float, ...]
    kind: Literal["position_swap"] = "position_swap"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Overwrite one row of the table; the old one comes back bit for bit."""
        found = position_embedding(model)
        if found is None:
            raise ValueError(f"{type(model).__name__} has no learned position table, so positions cannot be swapped")
        table, limit = found[1], position_limit(model)
        assert limit is not None
        shift = table.num_embeddings - limit if table.padding_idx is None else table.padding_idx + 1
        for position in (self.position, *((self.source,) if isinstance(self.source, int) else ())):
            if not 0 <= position < limit:
                raise ValueError(f"position {position} is not in the table; it has rows 0 to {limit - 1}")
        weight = table.weight
        if self.source == self.position:
            raise ValueError(f"position {self.position} has its own row already; name another")
        index = self.position + shift
        before = weight.detach()[index].clone()
        running.rows.setdefault(index, before)
        if isinstance(self.source, int):
            row = running.rows.get(self.source + shift, weight.detach()[self.source + shift]).clone()
        else:
            row = torch.tensor(self.source, dtype=weight.dtype, device=weight.device)
            if row.shape != weight.shape[1:]:
                raise ValueError(f"the vector has {len(row)} entries; a row of the table has {weight.shape[1]}")
        stack.callback(_write_row, weight, index, before)
        _write_row(weight, index, row)

        def watch(module: Any, args: tuple) -> None:
            running.places(self, self.position, *args[0].shape[:2])

        stack.callback(layer_stack(model)[0].register_forward_pre_hook(watch).remove)


@dataclass(frozen=True, config=STRICT)
class TokenSwap(Intervention):
    """The token at `position` becomes another: an id, "bos", or a random one drawn with `seed`."""

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

        def hook(module: Any, args: tuple) -> tuple:
            ids = args[0].clone()
            for row, index in running.places(self, self.position, *ids.shape):
                ids[row, index] = token
            return (ids, *args[1:])

        stack.callback(model.get_input_embeddings().register_forward_pre_hook(hook).remove)


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
        """Change the output of one layer."""
        _check_layers(model, (self.layer,))

        def hook(module: Any, args: Any, output: Any) -> Any:
            hidden = (output[0] if isinstance(output, tuple) else output).clone()  # (B, T, C)
            for row, index in running.places(self, self.position, *hidden.shape[:2]):
                others = running.real(row, hidden.shape[1])
                others[index] = False
                if self.value == "mean" and not others.any():
                    raise ValueError("the mean of other tokens needs more than one new token; use zero when decoding")
                hidden[row, index] = 0 if self.value == "zero" else hidden[row, others].mean(0)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        # first of all hooks, so that whoever collects hidden states sees it
        stack.callback(layer_stack(model)[self.layer].register_forward_hook(hook, prepend=True).remove)


def mixes_otherwise(model: PreTrainedModel) -> list[int]:
    """Return the layers that mix tokens without softmax attention (of hybrids); a plan's dropped attention is none."""
    config = model.config.get_text_config()
    own = getattr(config, "plan", None) is not None
    return [] if own else sorted(set(range(len(layer_stack(model)))) - set(attention_layers(model.config)))


def _check_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    count = len(layer_stack(model))
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ValueError(f"layer {wrong[0]} does not exist; layers go from 0 to {count - 1}")


def _chosen(model: PreTrainedModel, layers: Layers) -> set[int]:
    """Return the layers whose attention is meant; all of them must have one."""
    have = attention_layers(model.config)
    if layers == "all":
        return set(have)
    _check_layers(model, layers)
    without = [layer for layer in layers if layer not in have]
    if without:
        raise ValueError(f"layer {without[0]} has no softmax attention; layers {have} have")
    return set(layers)


def _on_keys(
    one: Forbid | ScaleValues,
    model: PreTrainedModel,
    running: Running,
    change: Callable[[AttentionCall, list[tuple[int, int]]], AttentionCall],
) -> Callable[[AttentionCall], AttentionCall]:
    """Return a handler that applies `change` wherever the keys of the positions are at hand."""
    chosen = _chosen(model, one.layers)

    def handler(call: AttentionCall) -> AttentionCall:
        if call.layer not in chosen:
            return call
        columns = [place for position in one.positions for place in running.keys(one, position, call)]
        return change(call, columns) if columns else call

    return handler


def _mask(call: AttentionCall, running: Running) -> Tensor:
    """Return a copy of the call's mask that may be edited, as what is added to the scores: (B, 1 or H, T, S)."""
    batch, _, new, _ = call.query.shape
    size, device = call.key.shape[2], call.query.device
    mask: Any = call.mask
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, batch, None, new, size, device=str(device))
    elif mask is None:
        mask = torch.ones(1, 1, new, size, dtype=torch.bool, device=device)
        mask = mask.tril(max(0, min(running.seen, size - new))) if call.causal else mask
    if mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, dtype=call.query.dtype, device=device)
        mask = added.masked_fill_(~mask, torch.finfo(added.dtype).min)
    return mask.expand(batch, *mask.shape[1:]).clone()


def _check_first(mask: Tensor, places: list[tuple[int, int]]) -> None:
    """Refuse to isolate the first token where it sees nothing but itself already; mask (B, 1 or H, T, S)."""
    for row, index in places:
        if int((mask[row, 0, index] > torch.finfo(mask.dtype).min / 2).sum()) <= 1:
            raise ValueError(
                "a waiver of position 0 changes nothing: behind a causal mask the first token attends only to itself "
                "anyway; name a later position"
            )


def _like(call: AttentionCall, mask: Tensor) -> Any:
    """Return an edited mask as the call's attention takes it: SDPA and eager add it, flex has a kind of its own."""
    if "flex" not in call.implementation:
        return mask
    batch, _, new, size = mask.shape
    # flex attention's kernels look at whole blocks, also beyond the last row and key
    allowed = torch.nn.functional.pad(mask[:, 0] == 0, (0, -size % FLEX_BLOCK, 0, -new % FLEX_BLOCK))

    def may_see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return allowed[row, query, key]

    return create_block_mask(may_see, batch, None, new, size, device=str(mask.device))


def _write_row(weight: Tensor, row: int, value: Tensor) -> None:
    with torch.no_grad():
        weight[row] = value
