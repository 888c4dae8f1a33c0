"""Interventions on a model that is left as it is: move, make and remove attention sinks, then put everything back.

    waiver: row k of the mask holds only k, −∞ before the softmax (Yan et al. 2024, Eq. 11)

Token k is then not mixed with others and may become a sink. Masks are edited inside the attention calls, layer by
layer, so that sliding windows stay and generate() can grow its cache. Positions count tokens: left padding is not.

Source: "Unveiling and Controlling Anomalous Attention Distribution in Transformers".
Shapes: B batch, T new tokens, S cached + new tokens, C hidden.
"""

import dataclasses
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers import PreTrainedModel

from crosslayer.probe.tokens import position_embedding, position_limit
from crosslayer.probe.visit import AttentionCall, intercepted, layer_stack

Position = Annotated[int, Field(ge=0)]
Layers = tuple[int, ...] | Literal["all"]
STRICT = ConfigDict(extra="forbid")
FLEX_BLOCK = 128


class Running:
    """Where the tokens of the running forward pass stand; `acted` holds the interventions that found their token."""

    def __init__(self):
        self.seen, self.offsets, self.passes = 0, None, 0
        self.acted: set[int] = set()

    def begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Read from the body's arguments how many tokens are cached and how far each row is padded on the left."""
        cache, mask, positions = (kwargs.get(k) for k in ("past_key_values", "attention_mask", "position_ids"))
        self.seen = 0 if cache is None else int(cache.get_seq_length())
        self.offsets, self.passes = None, self.passes + 1
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.offsets = (mask.cumsum(-1) == 0).sum(-1).tolist()
        elif isinstance(positions, Tensor) and positions.dim() == 2:
            self.offsets = (self.seen - positions[:, 0]).tolist()

    def places(self, position: int, batch: int, new: int) -> list[tuple[int, int]]:
        """Return (row of the batch, index among the new tokens) of each row that is running this position now."""
        offsets = self.offsets or [0] * batch
        offsets = offsets * batch if len(offsets) == 1 else offsets
        found = [(row, position + offset - self.seen) for row, offset in enumerate(offsets)]
        return [(row, index) for row, index in found if 0 <= index < new]

    def columns(self, position: int, call: AttentionCall) -> list[tuple[int, int]]:
        """Return (row of the batch, index among the keys) of a position; a sliding cache has dropped its oldest."""
        batch, _, new, _ = call.query.shape
        size = call.key.shape[2]
        dropped = max(0, self.seen + new - size)
        offsets = self.offsets or [0] * batch
        offsets = offsets * batch if len(offsets) == 1 else offsets
        found = [(row, position + offset - dropped) for row, offset in enumerate(offsets)]
        return [(row, index) for row, index in found if 0 <= index < size and position + offsets[row] < self.seen + new]


class Intervention:
    """One change; entered on a model by `intervene`."""

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Make the change; `stack` undoes it."""
        raise NotImplementedError


@dataclass(frozen=True, config=STRICT)
class Waiver(Intervention):
    """These positions attend only to themselves, in `layers`."""

    positions: tuple[Position, ...]
    layers: Layers = "all"
    kind: Literal["waiver"] = "waiver"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Edit the rows of the mask."""
        chosen = _chosen(model, self.layers)

        def handler(call: AttentionCall) -> AttentionCall:
            if call.layer not in chosen:
                return call
            places = [p for k in self.positions for p in running.places(k, call.query.shape[0], call.query.shape[2])]
            if not places:
                return call
            running.acted.add(id(self))
            dropped = max(0, running.seen + call.query.shape[2] - call.key.shape[2])
            mask = _mask(call, running)
            for row, index in places:
                mask[row, :, index] = torch.finfo(mask.dtype).min
                mask[row, :, index, index + running.seen - dropped] = 0
            return dataclasses.replace(call, mask=_like(call, mask))

        stack.enter_context(intercepted(model, handler))


@dataclass(frozen=True, config=STRICT)
class Forbid(Intervention):
    """No other token may attend to these positions, in `layers`: what stands there can be no sink."""

    positions: tuple[Position, ...]
    layers: Layers = "all"
    kind: Literal["forbid"] = "forbid"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Edit the columns of the mask; a token may still attend to itself."""
        chosen = _chosen(model, self.layers)

        def handler(call: AttentionCall) -> AttentionCall:
            columns = _columns(self, call, running) if call.layer in chosen else []
            if not columns:
                return call
            dropped = max(0, running.seen + call.query.shape[2] - call.key.shape[2])
            mask = _mask(call, running)
            for row, column in columns:
                mask[row, :, :, column] = torch.finfo(mask.dtype).min
                own = column + dropped - running.seen
                if 0 <= own < call.query.shape[2]:
                    mask[row, :, own, column] = 0
            return dataclasses.replace(call, mask=_like(call, mask))

        stack.enter_context(intercepted(model, handler))


@dataclass(frozen=True, config=STRICT)
class ScaleValues(Intervention):
    """The value states of these positions are multiplied by `factor`, in `layers`."""

    positions: tuple[Position, ...]
    factor: float
    layers: Layers = "all"
    kind: Literal["scale_values"] = "scale_values"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change what attention reads, never what the cache holds."""
        chosen = _chosen(model, self.layers)

        def handler(call: AttentionCall) -> AttentionCall:
            columns = _columns(self, call, running) if call.layer in chosen else []
            if not columns:
                return call
            value = call.value.clone()
            for row, column in columns:
                value[row, :, column] *= self.factor
            return dataclasses.replace(call, value=value)

        stack.enter_context(intercepted(model, handler))


@dataclass(frozen=True, config=STRICT)
class PositionSwap(Intervention):
    """Position `position` gets row `source` of a learned position table (BERT, GPT-2), or the vector `source` (C)."""

    position: Position
    source: int | tuple[float, ...]
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
        if isinstance(self.source, int):
            row = weight.detach()[self.source + shift].clone()
        else:
            row = torch.tensor(self.source, dtype=weight.dtype, device=weight.device)
            if row.shape != weight.shape[1:]:
                raise ValueError(f"the vector has {len(row)} entries; a row of the table has {weight.shape[1]}")
        before = weight.detach()[self.position + shift].clone()
        stack.callback(_write_row, weight, self.position + shift, before)
        _write_row(weight, self.position + shift, row)
        running.acted.add(id(self))


@dataclass(frozen=True, config=STRICT)
class TokenSwap(Intervention):
    """The token at `position` becomes another: an id, "bos", or a random one drawn with `seed`."""

    position: Position
    token: int | Literal["bos", "random"]
    seed: int = 0
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
            for row, index in running.places(self.position, *ids.shape):
                ids[row, index] = token
                running.acted.add(id(self))
            return (ids, *args[1:])

        stack.callback(model.get_input_embeddings().register_forward_pre_hook(hook).remove)


@dataclass(frozen=True, config=STRICT)
class Ablate(Intervention):
    """The hidden state that leaves `layer` at `position` becomes zero, or the mean of the other new tokens.

    The mean sees tokens behind the position too: it is for comparing full forward passes, not for decoding.
    """

    layer: int
    position: Position
    value: Literal["zero", "mean"] = "zero"
    kind: Literal["ablate"] = "ablate"

    def enter(self, model: PreTrainedModel, running: Running, stack: ExitStack) -> None:
        """Change the output of one layer."""
        _chosen(model, (self.layer,))

        def hook(module: Any, args: Any, output: Any) -> Any:
            hidden = (output[0] if isinstance(output, tuple) else output).clone()  # (B, T, C)
            for row, index in running.places(self.position, *hidden.shape[:2]):
                others = torch.cat([hidden[row, :index], hidden[row, index + 1 :]])
                if self.value == "mean" and not len(others):
                    raise ValueError("the mean of other tokens needs more than one new token; use zero when decoding")
                hidden[row, index] = 0 if self.value == "zero" else others.mean(0)
                running.acted.add(id(self))
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        stack.callback(layer_stack(model)[self.layer].register_forward_hook(hook).remove)


def _chosen(model: PreTrainedModel, layers: Layers) -> set[int]:
    count = len(layer_stack(model))
    wrong = [] if layers == "all" else [layer for layer in layers if not 0 <= int(layer) < count]
    if wrong:
        raise ValueError(f"layer {wrong[0]} does not exist; layers go from 0 to {count - 1}")
    return set(range(count)) if layers == "all" else {int(layer) for layer in layers}


def _columns(one: Forbid | ScaleValues, call: AttentionCall, running: Running) -> list[tuple[int, int]]:
    """Return the keys that an intervention is about, and note that it acts where there are any."""
    columns = [place for position in one.positions for place in running.columns(position, call)]
    running.acted |= {id(one)} if columns else set()
    return columns


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
