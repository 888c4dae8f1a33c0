"""Softmax maps of all layers over a sequence, a block of rows at a time.

For a block of R rows and a single head, all layers' scores go into an (L, R, S) buffer; softmax, sums and inner
products across layers are taken there and the buffer is used again. Nothing of size S × S exists; memory is two such
buffers (linear in S, bounded by a choice of R) in addition to the queries and keys.

Compressed attention (DeepSeek-V4) appends entries to the keys; each stands for several tokens. The map over tokens
excludes the attention on these entries, as it excludes that on a learned sink: the softmax has one further logit, the
log-sum-exp of their scores.

Shapes: L layers, H heads, S tokens (queries and keys of a sequence), R rows of a block, D head size, E entries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crosslayer.core.choice import TokenChoice, attention_weights, mask_of
from crosslayer.probe.intercept import AttentionCall
from crosslayer.probe.measures import working

# Finite, so that a row without any allowed key gives no NaN.
BLOCKED = -1e30
# 32 MB in float32: large enough for full-speed products, small beside a forward pass. Half or twice as much changed
# nothing.
BUFFER_ELEMENTS = 8_000_000


@dataclass(frozen=True)
class MapSums:
    """What the measures need of the maps of a sequence, for the L visited layers.

    Of each head's map, NaN where a layer has fewer heads: `columns_by_head` (L, H, S), sums over rows, and
    `diagonal_by_head` (L, H, S), and `last_by_head` (L, H, S), the last row. `columns` and `last` (L, S): the same of
    the head-averaged map. `gram`, `gram_without_first` (L, L): inner products of head-averaged maps, flattened, with
    and without column 0. `gram_by_head` (H, L, L): the same of single heads. `contribution` (L, 2): the map times the
    norms of values, summed over rows and heads, in column 0 and in all. `gated` (L, S): what each column receives of
    all heads, each row times its output gate, over the sum of the gates; NaN in a layer without one.
    """

    columns_by_head: Tensor
    diagonal_by_head: Tensor
    last_by_head: Tensor
    columns: Tensor
    last: Tensor
    gram: Tensor
    gram_without_first: Tensor
    gram_by_head: Tensor
    contribution: Tensor
    gated: Tensor


@torch.no_grad()
def map_sums(
    calls: list[AttentionCall], norms: Sequence[Tensor] = (), gates: Mapping[int, Tensor] | None = None
) -> MapSums:
    """Return the sums over the maps of all `calls` (a call for each layer, batch 1, as many queries as keys).

    `norms` are those of the layers' values, (H_kv, S) each; without them `contribution` is zero. `gates` are the output
    gates of layers, (S, H) each.
    """
    blocks = _Blocks(calls, gates or {})
    for start in range(0, blocks.size, blocks.rows):
        blocks.add(start, min(start + blocks.rows, blocks.size))

    contribution = blocks.columns.new_zeros(len(calls), 2)
    for layer, heads in enumerate(blocks.heads):
        for of_heads in (blocks.columns, blocks.diagonal, blocks.last):
            of_heads[layer, heads:] = torch.nan
        if norms:
            of_values = working(norms[layer]).double()  # (H_kv, S)
            of_values = of_values.repeat_interleave(heads // len(of_values), dim=0)  # (H, S)
            parts = blocks.columns[layer, :heads] * of_values
            contribution[layer] = torch.stack([parts[:, 0].sum(), parts.sum()])
    for layer, gate in blocks.gates.items():
        blocks.gated[layer] /= gate.sum()
    return MapSums(
        columns_by_head=blocks.columns,
        diagonal_by_head=blocks.diagonal,
        last_by_head=blocks.last,
        columns=blocks.columns.nanmean(dim=1),
        last=blocks.last.nanmean(dim=1),
        gram=blocks.gram,
        gram_without_first=blocks.rest,
        gram_by_head=blocks.by_head,
        contribution=contribution,
        gated=blocks.gated,
    )


class _Blocks:
    """Sums over the row blocks of a sequence; `scores` and `mean` are the two buffers.

    What masks add to the scores is built once for each block and distinct mask: many layers share one.
    """

    def __init__(self, calls: list[AttentionCall], gates: Mapping[int, Tensor]):
        self.calls, self.size = calls, calls[0].key.shape[2]
        self.heads = [call.query.shape[1] for call in calls]
        self.query = [working(call.query[0]) for call in calls]  # (H, S, D)
        self.key = [working(call.key[0]).transpose(1, 2) for call in calls]  # (H_kv, D, S)

        # a missing mask is told by what decides instead
        self.mask_of_layer = [
            (id(call.mask), call.causal, call.window) if call.mask is None else id(call.mask) for call in calls
        ]
        self.masks = dict(zip(self.mask_of_layer, calls, strict=True))  # a call that has it
        self.all_causal = all(is_causal(call) for call in self.masks.values())

        like, layers = self.query[0], len(calls)
        self.rows = max(16, min(256, self.size, BUFFER_ELEMENTS // (layers * self.size)))
        self.scores = like.new_empty(layers * self.rows * self.size)
        self.mean = like.new_empty(layers * self.rows * self.size)

        # sums over thousands of rows in float64; a block's own products stay in the type of the scores
        double = {"dtype": torch.float64, "device": like.device}
        self.columns = torch.zeros(layers, max(self.heads), self.size, **double)
        self.diagonal, self.last = torch.zeros_like(self.columns), torch.zeros_like(self.columns)
        self.gram = torch.zeros(layers, layers, **double)
        self.rest = torch.zeros(layers, layers, **double)
        self.by_head = torch.zeros(max(self.heads), layers, layers, **double)
        self.gates = {index: gates[call.layer].to(like) for index, call in enumerate(calls) if call.layer in gates}
        self.gated = torch.full((layers, self.size), torch.nan, **double)
        self.gated[list(self.gates)] = 0

    def add(self, start: int, stop: int) -> None:
        """Add the rows from `start` to `stop` of all layers, head by head."""
        width = stop if self.all_causal else self.size  # how many keys these rows can see
        shape = (len(self.calls), stop - start, width)
        count = shape[0] * shape[1] * shape[2]
        scores, mean = self.scores[:count].view(shape), self.mean[:count].view(shape)
        biases = self._biases(start, stop, width)
        mean.zero_()
        for head in range(max(self.heads)):
            self._probabilities(scores, head, start, stop, biases)
            self.columns[:, head, :width] += scores.sum(dim=1)
            self.diagonal[:, head, start:stop] = scores.diagonal(offset=start, dim1=1, dim2=2)
            self.last[:, head, :width] = scores[:, -1]  # in the end that of the last block
            self.by_head[head] += _inner_products(scores)
            for layer, gate in self.gates.items():
                if head < self.heads[layer]:
                    self.gated[layer, :width] += gate[start:stop, head] @ scores[layer]
            if min(self.heads) == max(self.heads):
                mean.add_(scores, alpha=1 / self.heads[0])
            else:
                mean.add_(scores / torch.tensor(self.heads, device=scores.device).view(-1, 1, 1))

        # Summed without column 0, not subtracted from the whole: where a sink holds nearly all, no digits would be
        # left. A clone, since a view of the column would be erased too.
        first = mean[:, :, 0].clone().double()  # (L, R)
        mean[:, :, 0] = 0
        rest = _inner_products(mean)
        self.rest += rest
        self.gram += rest + first @ first.T

    def _probabilities(self, scores: Tensor, head: int, start: int, stop: int, biases: list[Tensor | None]) -> None:
        """Fill `scores` (L, R, width) with the softmax rows of a head; zeros where a layer lacks it."""
        width = scores.shape[-1]
        for i, call in enumerate(self.calls):
            out = scores[i]
            if head >= self.heads[i]:
                out.fill_(BLOCKED)
                continue
            kv_head = head * call.key.shape[1] // self.heads[i]
            query, key = self.query[i][head, start:stop], self.key[i][kv_head, :, :width]
            # the scaling inside the product: 4,300 small multiplications less on SmolLM2 at 2048 tokens
            torch.addmm(out, query, key, beta=0, alpha=call.scaling, out=out)
            if call.position_bias is not None:
                bias = call.position_bias
                out += bias[0, head % bias.shape[1], start:stop, :width]
            if call.softcap is not None:
                out.div_(call.softcap).tanh_().mul_(call.softcap)

        # behind the soft cap, which would bound what blocks a key; at once for all layers if they share a mask
        masked = [(scores, biases[0])] if len(self.masks) == 1 else zip(scores, biases, strict=True)
        for out, bias in masked:
            if bias is not None:
                out[..., width - bias.shape[-1] :] += bias[head % len(bias)]
        totals = {i: scores[i].logsumexp(-1) for i, call in enumerate(self.calls) if call.sinks is not None}
        torch.softmax(scores, dim=-1, out=scores)
        for i, call in enumerate(self.calls):
            if head >= self.heads[i]:
                scores[i].zero_()
            elif call.sinks is not None:  # softmax with a further logit: p·e^t / (e^t + e^sink)
                sink = working(call.sinks)[0, head, :, 0]  # (1 or S,)
                sink = sink if len(sink) == 1 else sink[start:stop]
                scores[i] *= torch.sigmoid(totals[i] - sink).unsqueeze(-1)

    def _biases(self, start: int, stop: int, width: int) -> list[Tensor | None]:
        """Return, per layer, what to add to the last columns of the scores: (1 or H, R, ≤ width) or None."""
        biases: dict[object, Tensor | None] = {}
        like = self.query[0]
        for key, call in self.masks.items():
            if call.mask is not None:
                block = call.mask[0, :, start:stop, :width]
                if block.dtype == torch.bool:
                    biases[key] = like.new_zeros(block.shape).masked_fill_(~block, BLOCKED)
                else:
                    biases[key] = block.to(like.dtype).clamp_min(BLOCKED)  # −∞ would give NaN in a row of nothing else
                continue
            if not call.causal:
                biases[key] = None
                continue
            window = call.window if call.window is not None and call.window < self.size else None
            left = start if window is None and width == stop else 0  # keys before `start` are seen by every row
            rows = torch.arange(start, stop, device=like.device)[:, None]
            keys = torch.arange(left, width, device=like.device)
            blocked = keys > rows
            if window is not None:
                blocked |= keys <= rows - window
            biases[key] = like.new_zeros(1, *blocked.shape).masked_fill_(blocked, BLOCKED)
        return [biases[key] for key in self.mask_of_layer]


def is_causal(call: AttentionCall) -> bool:
    """Return whether no row sees a later key, looking at the mask itself, if any."""
    tensor = call.tensor_mask
    if tensor is None:
        return call.causal
    # Rows in blocks from the diagonal on: a comparison of the whole mask would take S × S numbers more.
    mask, step = tensor[0], 256
    for start in range(0, mask.shape[1], step):
        block = mask[:, start : start + step, start:]
        seen = block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2
        if seen.triu(1).any():
            return False
    return True


def rows_that_see(call: AttentionCall) -> Tensor:
    """Return how many rows other than its own may attend to each key, (S,); batch 1, as many queries as keys."""
    size, tensor = call.key.shape[2], call.tensor_mask
    if tensor is not None:
        mask = tensor[0]  # (1 or H, S, S)
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return (seen.sum(dim=1) - seen.diagonal(dim1=1, dim2=2).long()).double().mean(dim=0)
    below = torch.arange(size - 1, -1, -1, device=call.key.device).double()
    if not call.causal:
        return torch.full_like(below, size - 1)
    return below if call.window is None else below.clamp(max=call.window - 1)


def _inner_products(rows: Tensor) -> Tensor:
    """Return all inner products between layers, (L, R, S) → (L, L)."""
    # A small product per row takes 0.38-0.40 s at 2048 tokens of SmolLM2, a single one of (L, R·S) and (R·S, L) 0.45 s.
    by_row = rows.transpose(0, 1)  # (R, L, S)
    return torch.bmm(by_row, by_row.transpose(1, 2)).double().sum(dim=0)


def over_tokens(call: AttentionCall) -> AttentionCall:
    """Return a call of a single sequence whose keys are its tokens; entries become a further logit of each row."""
    tokens = call.query.shape[2]
    if call.key.shape[2] <= tokens:
        return call
    by_head = []
    for head in range(call.query.shape[1]):
        kv_head = head * call.key.shape[1] // call.query.shape[1]
        query, key = working(call.query[0, head]), working(call.key[0, kv_head, tokens:])  # (T, D), (E, D)
        scores = query @ key.T * call.scaling  # (T, E)
        if call.mask is not None:
            mask = call.mask[0, head % call.mask.shape[1], :, tokens:]  # (T, E)
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + working(mask)
        by_head.append(scores.logsumexp(dim=-1))  # (T,)
    outside = torch.stack(by_head)[None, :, :, None]  # (1, H, T, 1)
    if call.sinks is not None:
        outside = torch.logaddexp(outside, working(call.sinks))

    # a learned sink of the model is now part of `sinks`
    options = {name: option for name, option in call.options.items() if name != "s_aux"}
    return replace(
        call,
        key=call.key[:, :, :tokens],
        value=call.value[:, :, :tokens],
        mask=call.mask if call.mask is None else call.mask[..., :tokens],
        options={**options, "sinks": outside, "entries": True},
    )


@dataclass(frozen=True)
class ChoiceSums:
    """Sums over rows of a sequence, for one way to choose tokens.

    `recovered` (N, H, N, H): attention of the second layer's head to the tokens that the first layer's head chooses.
    `rows`: the rows that do not see all tokens chosen.
    """

    recovered: Tensor
    rows: int


@torch.no_grad()
def choice_sums(calls: Sequence[AttentionCall], choice: TokenChoice) -> ChoiceSums:
    """Return the sums over the rows in which `choice` leaves tokens out.

    `calls` are of layers with full causal attention and equal key-value heads: batch 1, as many queries as keys.
    """
    size, heads = calls[0].key.shape[2], calls[0].key.shape[1]
    many = len(calls) * heads
    recovered, rows = torch.zeros(many, many, dtype=torch.float64, device=calls[0].key.device), 0
    # rows before this one see all their tokens chosen, and would count as recovered whatever is chosen
    start = next((row for row in range(size) if choice.count.of(row + 1) < row + 1), size)
    step = max(1, BUFFER_ELEMENTS // (many * size))
    for block in (range(row, min(row + step, size)) for row in range(start, size, step)):
        columns = torch.arange(block.stop, device=calls[0].key.device)
        allowed = (columns <= columns[block.start :, None])[None, None]  # (1, 1, R, S)
        masses, chosen = [], []
        for call in calls:
            query, key = working(call.query[:, :, block.start : block.stop]), working(call.key[:, :, : block.stop])
            mass = attention_weights(query, key, allowed, call.scaling, call.softcap).sum(2)[0]  # (H, R, S)
            masses.append(mass * heads / query.shape[1])
            indices = choice.largest(mass[None], allowed, choice.count.of(block.stop))
            chosen.append(mask_of(indices, block.stop, 1, None)[0].to(mass.dtype))
        mass, mask = torch.stack(masses), torch.stack(chosen)  # (N, H, R, S)
        recovered += (mask.view(many, -1) @ mass.view(many, -1).T).double()
        rows += len(block)
    shape = (len(calls), heads)
    return ChoiceSums(recovered.view(*shape, *shape), rows)
