"""The cached tokens of layers that share keys or values, and the choice of the tokens to keep.

Layers that share form a group. The attention of its first layer decides for all of them, so that keys and values of a
token are kept or evicted together. A text is read in blocks of `BLOCK` tokens, counted without padding, and tokens are
evicted between two blocks. So the kept tokens do not depend on how the text is cut into calls or batched.

Shapes: B batch, T new tokens, S cached + new tokens, H heads, H_kv key-value heads, G = H / H_kv, D head size.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from crosslayer.cache.eviction import BLOCK, Amount
from crosslayer.cache.policies import Cached, Policy
from crosslayer.probe.intercept import AttentionCall

QUERIES = 128  # whose scores are computed at a time: those of all would take H · T · S numbers


@dataclass(frozen=True)
class Step:
    """What a call changes for every layer of a group.

    If `replaces` is set, `mask` (B, H_kv, T, S) replaces the model's own: what each query attends to, None for
    everything. `kept` (B, H_kv, W) are the columns to keep in the cache, in order; None if all are kept. `capacity` is
    the number of columns that need memory until the next eviction.
    """

    replaces: bool
    mask: Tensor | None
    kept: Tensor | None
    capacity: int


class GroupState:
    """The cached tokens of a group of layers, as far as a policy needs to know them."""

    def __init__(self, policy: Policy, amount: Amount | None):
        self.policy, self.amount = policy, amount
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.positions: Tensor | None = None  # (B, H_kv, S) int32; -1 for a column without a token
        self.attention: Tensor | None = None  # (B, H_kv, S) float32, summed over queries; None if not needed
        self.seen: list[int] = []  # (B,) tokens read of each text
        self.held: list[int] = []  # (B,) how many of them are cached
        self.evicted = False

    def step(self, call: AttentionCall, pads: list[int]) -> Step:
        """Process a call of the group's first layer, whose first `pads` (B,) new columns are padding; see `padding`.

        Returns what the group attends to and keeps.
        """
        group_call = _GroupCall(self, call, pads)
        due = group_call.due_columns()
        changes = self.evicted or bool(due)
        mask = None
        if changes and not group_call.is_plain:  # hides everything at first
            batch, heads, columns = group_call.positions.shape
            mask = torch.zeros(batch, heads, group_call.new, columns, dtype=torch.bool, device=call.key.device)
        start = 0
        for end in sorted({*due, group_call.new}):
            group_call.attend(start, end, mask)
            group_call.evict(end, due.get(end, {}))
            start = end
        kept = group_call.close(bool(due))
        self.evicted = changes
        ends = (held + (-seen % BLOCK or BLOCK) for held, seen in zip(self.held, self.seen, strict=True))  # of blocks
        return Step(changes, mask, kept, max(ends))

    def select(self, rows: Tensor) -> None:
        """Select texts by `rows` (B',), in this order; a text may occur several times, as in beam search."""
        if self.positions is None:
            return
        order = rows.tolist()
        self.positions = self.positions[rows]
        self.attention = None if self.attention is None else self.attention[rows]
        self.seen = [self.seen[row] for row in order]
        self.held = [self.held[row] for row in order]


class _GroupCall:
    """A call of a group's first layer while it is processed; columns count from the first in the cache before it."""

    def __init__(self, state: GroupState, call: AttentionCall, pads: list[int]):
        self.state, self.call, self.pads = state, call, pads
        self.batch, heads, self.new, _ = call.query.shape
        self.before, self.heads = call.key.shape[2] - self.new, call.key.shape[1]
        self.groups = heads // self.heads
        if self.before != (0 if state.positions is None else state.positions.shape[-1]):
            raise ValueError("a layer reads keys of several layers; eviction does not support that")
        if call.sinks is not None or call.position_bias is not None:
            raise ValueError("eviction does not support attention with a learned sink or a position bias")
        nothing = [0] * self.batch
        self.seen, self.held = list(state.seen or nothing), list(state.held or nothing)
        self.is_plain = self.new == 1 and self.held == [self.before] * self.batch  # attends to every column
        columns, padded = np.arange(self.new), np.array(pads)[:, None]
        positions = np.where(columns < padded, -1, np.array(self.seen)[:, None] + columns - padded).astype(np.int32)
        new = torch.from_numpy(positions).to(call.key.device)[:, None].expand(-1, self.heads, -1)  # (B, H_kv, T)
        self.positions = new if state.positions is None else torch.cat([state.positions, new], dim=-1)
        self.attention: Tensor | None = None  # that tokens have received, (B, H_kv, S)
        if state.policy.attention and state.amount is not None:
            fresh = torch.zeros(new.shape, dtype=torch.float32, device=call.key.device)
            self.attention = fresh if state.attention is None else torch.cat([state.attention, fresh], dim=-1)

    @cached_property
    def in_cache(self) -> Tensor:
        """Whether a column holds a token that is not evicted, (B, H_kv, S)."""
        return self.positions >= 0

    def due_columns(self) -> dict[int, dict[int, int]]:
        """Return after how many new columns tokens are evicted, and how many tokens each text then keeps."""
        amount, due = self.state.amount, {}
        if amount is None:
            return due
        for row in range(self.batch):
            seen, held = self.seen[row], self.held[row]
            last = seen + self.new - self.pads[row]
            for tokens in range(seen // BLOCK * BLOCK + BLOCK, last + 1, BLOCK):
                held += tokens - seen
                seen, keep = tokens, amount.keep(tokens)
                if keep < held:
                    column = tokens - self.seen[row] + self.pads[row]
                    due.setdefault(column, {})[row] = keep
                    held = keep
        return due

    def attend(self, start: int, end: int, mask: Tensor | None) -> None:
        """Let new columns `start` to `end` attend: fill the mask, and add up the attention that tokens receive."""
        call, device = self.call, self.call.key.device
        for first in range(start, end, QUERIES):
            if mask is None and self.attention is None:
                break
            # what these columns may attend to, (B, H_kv, T', S'); None: everything
            last = min(first + QUERIES, end)
            width = self.before + last
            allowed = None
            if not self.is_plain:
                columns = torch.arange(width, device=device)
                queries = self.before + torch.arange(first, last, device=device)[:, None]
                # padding attends to itself alone: no row of a softmax may be empty
                allowed = self.in_cache[:, :, None, :width] & (columns <= queries) | (columns == queries)
                if mask is not None:
                    mask[:, :, first:last, :width] = allowed
            if self.attention is None:
                continue

            # the attention that they pay
            query = call.query[:, :, first:last].unflatten(1, (self.heads, self.groups))  # (B, H_kv, G, T', D)
            key = call.key[:, :, :width].transpose(2, 3)  # (B, H_kv, D, S')
            scores = ((query.flatten(2, 3) * call.scaling) @ key).to(torch.float32)  # (B, H_kv, G·T', S')
            if call.softcap is not None:
                scores = torch.tanh(scores / call.softcap) * call.softcap
            if allowed is None:  # a single query, which sees every column
                self.attention += scores.softmax(-1).sum(2)
                continue
            scores = scores.unflatten(2, (self.groups, -1))  # (B, H_kv, G, T', S')
            real = self.positions[:, :, None, self.before + first : width, None] >= 0  # padding pays none
            weights = scores.masked_fill(~allowed[:, :, None], -torch.inf).softmax(-1) * real
            self.attention[..., :width] += weights.sum((2, 3))
        for row in range(self.batch):
            tokens = max(end - self.pads[row], 0) - max(start - self.pads[row], 0)
            self.seen[row] += tokens
            self.held[row] += tokens

    def evict(self, end: int, keeps: dict[int, int]) -> None:
        """Evict tokens of the texts in `keeps` after new column `end`."""
        if not keeps:
            return
        device, width = self.call.key.device, self.before + end
        rows = sorted(keeps)
        keep = torch.tensor([keeps[row] for row in rows], device=device)[:, None, None]
        seen = torch.tensor([self.seen[row] for row in rows], device=device)[:, None, None]
        index = torch.tensor(rows, device=device)
        in_cache = self.in_cache[index, :, :width]
        attention = None if self.attention is None else self.attention[index, :, :width]
        cached = Cached(self.positions[index, :, :width], attention, seen, keep, self.groups)
        rank = self.state.policy.rank(cached).masked_fill(~in_cache, -torch.inf)
        # texts keep different numbers of tokens: take as many as the longest, then each text keeps its first `keep`
        most = int(max(keeps.values()))
        chosen = rank.topk(most, dim=-1).indices  # (rows, H_kv, most), highest rank first
        is_kept = torch.arange(most, device=device) < keep
        self.in_cache[index, :, :width] = torch.zeros_like(in_cache).scatter(-1, chosen, is_kept.expand_as(chosen))
        for row in rows:
            self.held[row] = keeps[row]

    def close(self, evicts: bool) -> Tensor | None:
        """Write the tokens back to the group; return the columns to keep, or None if nothing was evicted."""
        state = self.state
        kept = None
        positions, attention = self.positions, self.attention
        if evicts:
            # the columns of each head in order, its empty ones behind them; as wide as the text that holds most
            positions = positions.masked_fill(~self.in_cache, -1)
            width, size = max(self.held), positions.shape[-1]
            columns = torch.arange(size, device=positions.device)
            order = torch.where(self.in_cache, columns, size).sort(dim=-1).values[..., :width]  # (B, H_kv, W)
            kept = order.clamp(max=size - 1)
            positions = positions.gather(-1, kept).masked_fill(order == size, -1)
            attention = None if attention is None else attention.gather(-1, kept)
        state.positions, state.attention = positions, attention
        state.seen, state.held = self.seen, self.held
        return kept


def padding(mask: Tensor | None, seen: list[int], new: int) -> list[int]:
    """Return how many new columns of each text are padding on the left, (B,); refuse a mask that hides more.

    `mask` (B, 1, T, S) is the model's own over all columns so far, `seen` (B,) how many tokens of each text were
    read before.
    """
    if mask is None:
        return [0] * len(seen)
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise ValueError("eviction needs the mask that transformers builds for sdpa or eager attention")
    visible = mask if mask.dtype == torch.bool else mask == 0
    visible = visible.expand(len(seen), -1, -1, -1)[:, 0]  # (B, T, S)
    last = visible[:, -1]  # (B, S): the last token sees everything but padding
    pads = (~last).to(torch.int32).cumprod(-1).sum(-1)  # (B,), of all columns
    columns = torch.arange(last.shape[-1], device=mask.device)
    rows = columns[-new:, None]
    expected = (columns <= rows) & (columns >= pads[:, None, None])  # (B, T, S)
    text = rows[:, 0] >= pads[:, None]  # (B, T): what padding sees does not matter
    before, padding = last.shape[-1] - new, pads.tolist()
    known = [min(before, padded) + tokens for padded, tokens in zip(padding, seen, strict=True)]
    if bool(((visible != expected) & text[:, :, None]).any()) or known != [before] * len(seen):
        raise ValueError("eviction supports only padding on the left, but the mask hides more")
    return [max(0, padded - before) for padded in padding]
