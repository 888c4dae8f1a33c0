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

BLOCKED = -1e30  # finite, so that a row without any allowed key gives no NaN
BUFFER_ELEMENTS = 8_000_000  # 32 MB in float32: large enough for full-speed products, small beside a forward pass


@dataclass(frozen=True)
class MapSums:
    """What the measures need of the maps of a sequence, for the L visited layers.

    Of each head's map, NaN where a layer has fewer heads: `columns_by_head` (L, H, S), sums over rows, and
    `diagonal_by_head` (L, H, S), and `last_by_head` (L, H, S), the last row. `gram`, `gram_without_first`
    (L, L): inner products of head-averaged maps, flattened, with and without column 0. `gram_by_head` (H, L, L): the
    same of single heads. `contribution` (L, 2): the map times the norms of values, summed over rows and heads, in
    column 0 and in all. `gated` (L, S): what each column receives of all heads, each row times its output gate, over
    the sum of the gates; NaN in a layer without one.
    """

    columns_by_head: Tensor
    diagonal_by_head: Tensor
    last_by_head: Tensor
    gram: Tensor
    gram_without_first: Tensor
    gram_by_head: Tensor
    contribution: Tensor
    gated: Tensor

    @property
    def columns(self) -> Tensor:
        """Sums over rows of the head-averaged map, (L, S)."""
        return self.columns_by_head.nanmean(dim=1)

    @property
    def last(self) -> Tensor:
        """The last row of the head-averaged map, (L, S)."""
        return self.last_by_head.nanmean(dim=1)


@torch.no_grad()
def map_sums(
    calls: list[AttentionCall], norms: Sequence[Tensor] = (), gates: Mapping[int, Tensor] | None = None
) -> MapSums:
    """Return the sums over the maps of all `calls` (a call for each layer, batch 1, as many queries as keys).

    `norms` are those of the layers' values, (H_kv, S) each; without them `contribution` is zero. `gates` are the output
    gates of layers, (S, H) each.
    """
    return _Blocks(calls, norms, gates or {}).run()


class _Blocks:
    """Walks over the row blocks of a sequence; `scores` and `mean` are the two buffers."""

    def __init__(self, calls: list[AttentionCall], norms: Sequence[Tensor], gates: Mapping[int, Tensor]):
        self.calls, self.norms = calls, [working(each) for each in norms]
        self.layers, self.size = len(calls), calls[0].key.shape[2]
        self.heads = [call.query.shape[1] for call in calls]
        self.query = [working(call.query[0]) for call in calls]  # (H, S, D)
        self.key = [working(call.key[0]).transpose(1, 2) for call in calls]  # (H_kv, D, S)
        self.masks = _Masks(calls)
        like = self.query[0]
        self.rows = max(16, min(256, self.size, BUFFER_ELEMENTS // (self.layers * self.size)))
        self.scores = like.new_empty(self.layers * self.rows * self.size)
        self.mean = like.new_empty(self.layers * self.rows * self.size)
        double = {"dtype": torch.float64, "device": like.device}
        self.columns = torch.zeros(self.layers, max(self.heads), self.size, **double)
        self.diagonal, self.last = torch.zeros_like(self.columns), torch.zeros_like(self.columns)
        self.gram = torch.zeros(self.layers, self.layers, **double)
        self.rest = torch.zeros(self.layers, self.layers, **double)
        self.by_head = torch.zeros(max(self.heads), self.layers, self.layers, **double)
        self.gates = {number: gates[call.layer].to(like) for number, call in enumerate(calls) if call.layer in gates}
        self.gated = torch.full((self.layers, self.size), torch.nan, **double)
        self.gated[list(self.gates)] = 0

    def run(self) -> MapSums:
        for start in range(0, self.size, self.rows):
            self._block(start, min(start + self.rows, self.size))
        contribution = self.columns.new_zeros(self.layers, 2)
        for layer, heads in enumerate(self.heads):
            for of_heads in (self.columns, self.diagonal, self.last):
                of_heads[layer, heads:] = torch.nan
            if self.norms:
                norms = self.norms[layer].double()  # (H_kv, S)
                parts = self.columns[layer, :heads] * norms.repeat_interleave(heads // len(norms), dim=0)  # (H, S)
                contribution[layer] = torch.stack([parts[:, 0].sum(), parts.sum()])
        for layer, gate in self.gates.items():
            self.gated[layer] /= gate.sum()
        return MapSums(
            self.columns, self.diagonal, self.last, self.gram, self.rest, self.by_head, contribution, self.gated
        )

    def _block(self, start: int, stop: int) -> None:
        width = self.masks.width(stop)
        shape = (self.layers, stop - start, width)
        count = shape[0] * shape[1] * shape[2]
        scores, mean = self.scores[:count].view(shape), self.mean[:count].view(shape)
        biases = self.masks.biases(start, stop, width)
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
            torch.addmm(out, query, key, beta=0, alpha=call.scaling, out=out)
            if call.position_bias is not None:
                bias = call.position_bias
                out += bias[0, head % bias.shape[1], start:stop, :width]
            if call.softcap is not None:
                out.div_(call.softcap).tanh_().mul_(call.softcap)
        masked = [(scores, biases[0])] if self.masks.shared else zip(scores, biases, strict=True)
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


class _Masks:
    """What the layers' masks add to the scores, built once per block and distinct mask."""

    def __init__(self, calls: list[AttentionCall]):
        self.size, self.device = calls[0].key.shape[2], calls[0].key.device
        self.dtype = working(calls[0].query).dtype
        self.keys, self.kinds = [], {}
        for call in calls:
            key = (id(call.mask), call.causal, call.window) if call.mask is None else id(call.mask)
            self.keys.append(key)
            self.kinds.setdefault(key, call)
        self.shared = len(self.kinds) == 1
        self.all_causal = all(is_causal(call) for call in self.kinds.values())

    def width(self, stop: int) -> int:
        """Return how many keys rows below `stop` can see."""
        return stop if self.all_causal else self.size

    def biases(self, start: int, stop: int, width: int) -> list[Tensor | None]:
        """Return, per layer, what to add to the last columns of the scores: (1 or H, R, ≤ width) or None."""
        biases = {key: self._bias(call, start, stop, width) for key, call in self.kinds.items()}
        return [biases[key] for key in self.keys]

    def _bias(self, call: AttentionCall, start: int, stop: int, width: int) -> Tensor | None:
        if call.mask is not None:
            block = call.mask[0, :, start:stop, :width]
            if block.dtype == torch.bool:
                return torch.zeros(block.shape, dtype=self.dtype, device=self.device).masked_fill_(~block, BLOCKED)
            return block.to(self.dtype).clamp_min(BLOCKED)
        if not call.causal:
            return None
        windowed = call.window is not None and call.window < self.size
        left = 0 if windowed or width != stop else start  # keys before `start` are seen by every row
        rows = torch.arange(start, stop, device=self.device)[:, None]
        keys = torch.arange(left, width, device=self.device)
        blocked = keys > rows
        if windowed:
            assert call.window is not None
            blocked |= keys <= rows - call.window
        return torch.zeros(1, *blocked.shape, dtype=self.dtype, device=self.device).masked_fill_(blocked, BLOCKED)


def is_causal(call: AttentionCall) -> bool:
    """Return whether no row sees a later key, looking at the mask itself, if any."""
    tensor = call.tensor_mask
    if tensor is None:
        return call.causal
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
    """Return all inner products between layers, (L, R, S) → (L, L), as a small product per row."""
    by_row = rows.transpose(0, 1)  # (R, L, S)
    return torch.bmm(by_row, by_row.transpose(1, 2)).double().sum(dim=0)


def has_entries(call: AttentionCall) -> bool:
    """Return whether a call without a cache has more keys than tokens."""
    return call.key.shape[2] > call.query.shape[2]


def over_tokens(call: AttentionCall) -> AttentionCall:
    """Return a call of a single sequence whose keys are its tokens; entries become a further logit of each row."""
    if not has_entries(call):
        return call
    tokens = call.query.shape[2]
    outside = torch.stack([_entry_logits(call, head) for head in range(call.query.shape[1])])  # (H, T)
    outside = outside[None, :, :, None]  # (1, H, T, 1)
    if call.sinks is not None:
        outside = torch.logaddexp(outside, working(call.sinks))
    options = {name: option for name, option in call.options.items() if name != "s_aux"}
    return replace(
        call,
        key=call.key[:, :, :tokens],
        value=call.value[:, :, :tokens],
        mask=call.mask if call.mask is None else call.mask[..., :tokens],
        options={**options, "sinks": outside, "entries": True},
    )


def _entry_logits(call: AttentionCall, head: int) -> Tensor:
    """Return the log-sum-exp of a head's scores over the entries, (T,)."""
    tokens = call.query.shape[2]
    kv_head = head * call.key.shape[1] // call.query.shape[1]
    query, key = working(call.query[0, head]), working(call.key[0, kv_head, tokens:])  # (T, D), (E, D)
    scores = query @ key.T * call.scaling  # (T, E)
    if call.mask is not None:
        mask = call.mask[0, head % call.mask.shape[1], :, tokens:]  # (T, E)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + working(mask)
    return scores.logsumexp(dim=-1)


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
