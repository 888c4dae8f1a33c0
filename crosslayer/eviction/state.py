"""What layers that share keys or values know of their cached tokens, and the choice of those that stay.

Layers that share form a group: the first of them is the leader, whose attention decides for all, so that keys and
values of the same token stay or go together. A text is read in blocks of `BLOCK` tokens by its own positions, padding
aside; between two blocks tokens go. So what stays is the same however the text is cut into calls, alone or in a batch.

Shapes: B batch, T new tokens, S cached + new tokens, H heads, H_kv key-value heads, G = H / H_kv, D head size.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from crosslayer.eviction.eviction import BLOCK, Amount
from crosslayer.eviction.policies import Cached, Policy
from crosslayer.probe.intercept import AttentionCall

QUERIES = 128  # whose scores are computed at a time: memory


@dataclass(frozen=True)
class Step:
    """What a call changes for every layer of a group.

    With `replaces`, `mask` (B, H_kv, T, S) says what each query attends to, None for everything, and the model's own
    mask holds no more. `kept` (B, H_kv, W) are the columns that stay in the cache, in their order; None where all do.
    `room` says for how many columns memory is needed until tokens go again.
    """

    replaces: bool
    mask: Tensor | None
    kept: Tensor | None
    room: int


class GroupState:
    """The cached tokens of a group: what a policy knows of them."""

    def __init__(self, policy: Policy, amount: Amount | None):
        self.policy, self.amount = policy, amount
        self.positions: Tensor | None = None  # (B, H_kv, S) int32; -1 where a column holds no token
        self.attention: Tensor | None = None  # (B, H_kv, S) float32, summed over queries; None where nobody asks
        self.seen: list[int] = []  # (B,) tokens of each text so far
        self.held: list[int] = []  # (B,) how many of them are cached
        self.evicted = False

    @property
    def width(self) -> int:
        """Columns of the cache."""
        return 0 if self.positions is None else self.positions.shape[-1]

    def step(self, call: AttentionCall, pads: list[int]) -> Step:
        """Take in a call of the leader, of whose new columns `pads` (B,) are padding; see `padding`.

        Returns what the group attends to and keeps.
        """
        reading = _Reading(self, call, pads)
        due = reading.due_columns()
        changes = self.evicted or bool(due)
        mask = reading.empty_mask() if changes and not reading.is_plain else None
        start = 0
        for end in sorted({*due, reading.new}):
            reading.attend(start, end, mask)
            reading.evict(end, due.get(end, {}))
            start = end
        kept = reading.close(bool(due))
        self.evicted = changes
        return Step(changes, mask, kept, reading.room())

    def reset(self) -> None:
        """Forget everything."""
        self.positions = self.attention = None
        self.seen, self.held, self.evicted = [], [], False

    def select(self, rows: Tensor) -> None:
        """Keep some texts, in their order, or some of them several times, as beam search does; `rows` (B',)."""
        if self.positions is None:
            return
        order = rows.tolist()
        self.positions = self.positions[rows]
        self.attention = None if self.attention is None else self.attention[rows]
        self.seen, self.held = [self.seen[row] for row in order], [self.held[row] for row in order]

    def overhead_bytes(self) -> int:
        """Return bytes of what is known of the tokens, beside their keys and values."""
        tensors = [tensor for tensor in (self.positions, self.attention) if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)


class _Reading:
    """A call of the leader while it is taken in; columns are counted from the first that was cached before it."""

    def __init__(self, state: GroupState, call: AttentionCall, pads: list[int]):
        self.state, self.call, self.pads = state, call, pads
        self.batch, heads, self.new, _ = call.query.shape
        self.before, self.heads = state.width, call.key.shape[1]
        self.groups = heads // self.heads
        if call.key.shape[2] != self.before + self.new:
            raise ValueError("keys of several layers stand in a row; no eviction is defined for them")
        if call.sinks is not None or call.position_bias is not None:
            raise ValueError("attention with a learned sink or a bias by position; no eviction is defined for it")
        nothing = [0] * self.batch
        self.seen, self.held = list(state.seen or nothing), list(state.held or nothing)
        self.is_plain = self.new == 1 and self.held == [self.before] * self.batch  # a token that sees every column
        columns, padded = np.arange(self.new), np.array(pads)[:, None]
        places = np.where(columns < padded, -1, np.array(self.seen)[:, None] + columns - padded).astype(np.int32)
        new = torch.from_numpy(places).to(call.key.device)[:, None].expand(-1, self.heads, -1)  # (B, H_kv, T)
        self.positions = new if state.positions is None else torch.cat([state.positions, new], dim=-1)
        self.attention = self._attention()

    @cached_property
    def alive(self) -> Tensor:
        """Whether a column holds a token that has not gone, (B, H_kv, S)."""
        return self.positions >= 0

    def _attention(self) -> Tensor | None:
        """Return what the tokens have received (B, H_kv, S); None where the policy does not ask."""
        state = self.state
        asks = state.policy.attention and state.amount is not None
        if not asks or (state.policy.window and state.positions is not None):
            return None
        fresh = torch.zeros((self.batch, self.heads, self.new), dtype=torch.float32, device=self.call.key.device)
        return fresh if state.attention is None else torch.cat([state.attention, fresh], dim=-1)

    def due_columns(self) -> dict[int, dict[int, int]]:
        """Return after how many new columns tokens go, and of which texts how many stay then."""
        amount, due = self.state.amount, {}
        if amount is None:
            return due
        if self.state.policy.window:  # evicts when the prompt, the first call, has been read
            prompts = [] if self.state.positions is not None else [self.new - pads for pads in self.pads]
            stay = {row: max(amount.keep(tokens, 0), self.state.policy.window) for row, tokens in enumerate(prompts)}
            keeps = {row: keep for row, keep in stay.items() if keep < prompts[row]}
            return {self.new: keeps} if keeps else {}
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

    def empty_mask(self) -> Tensor:
        """Return a mask (B, H_kv, T, S) that hides everything."""
        shape = (self.batch, self.heads, self.new, self.before + self.new)
        return torch.zeros(shape, dtype=torch.bool, device=self.call.key.device)

    def attend(self, start: int, end: int, mask: Tensor | None) -> None:
        """Let new columns `start` to `end` attend to what is there: fill the mask, sum what tokens receive."""
        asks = self.attention is not None
        for first in range(start, end, QUERIES):
            last = min(first + QUERIES, end)
            if mask is None and not asks:
                continue
            allowed = None if self.is_plain else self._allowed(first, last)  # (B, H_kv, T', S')
            if mask is not None and allowed is not None:
                mask[:, :, first:last, : allowed.shape[-1]] = allowed
            if asks:
                self._receive(first, last, allowed)
        for row in range(self.batch):
            tokens = max(end - self.pads[row], 0) - max(start - self.pads[row], 0)
            self.seen[row] += tokens
            self.held[row] += tokens

    def _allowed(self, first: int, last: int) -> Tensor:
        """Return what new columns `first` to `last` may attend to, (B, H_kv, last - first, columns so far).

        Padding attends to itself alone: no row of a softmax may be empty.
        """
        width, device = self.before + last, self.call.key.device
        columns = torch.arange(width, device=device)
        own = self.before + torch.arange(first, last, device=device)[:, None]
        return self.alive[:, :, None, :width] & (columns <= own) | (columns == own)

    def _receive(self, first: int, last: int, allowed: Tensor | None) -> None:
        """Add what tokens receive from new columns `first` to `last`; of a policy of a window, from those in it.

        `allowed` (B, H_kv, last - first, columns so far) says what they attend to, None for everything.
        """
        assert self.attention is not None
        window, width, call = self.state.policy.window, self.before + last, self.call
        start = max(first, self.new - window) if window else first
        if start >= last:
            return
        query = call.query[:, :, start:last].unflatten(1, (self.heads, self.groups))  # (B, H_kv, G, T', D)
        key = call.key[:, :, :width].transpose(2, 3)  # (B, H_kv, D, S')
        scores = ((query.flatten(2, 3) * call.scaling) @ key).to(torch.float32)  # (B, H_kv, G·T', S')
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if allowed is None:
            self.attention += scores.softmax(-1).sum(2)
            return
        scores = scores.unflatten(2, (self.groups, -1))  # (B, H_kv, G, T', S')
        hidden = ~allowed[:, :, None, start - first :]
        real = self.positions[:, :, None, self.before + start : self.before + last, None] >= 0
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1) * real
        self.attention[..., :width] += weights.sum((2, 3))

    def evict(self, end: int, keeps: dict[int, int]) -> None:
        """Let tokens go after new column `end`, of the texts in `keeps`."""
        if not keeps:
            return
        device, width = self.call.key.device, self.before + end
        rows = sorted(keeps)
        keep = torch.tensor([keeps[row] for row in rows], device=device)[:, None, None]
        seen = torch.tensor([self.seen[row] for row in rows], device=device)[:, None, None]
        index = torch.tensor(rows, device=device)
        alive = self.alive[index, :, :width]
        attention = None if self.attention is None else self.attention[index, :, :width]
        cached = Cached(self.positions[index, :, :width], attention, seen, keep, self.groups)
        rank = self.state.policy.rank(cached).masked_fill(~alive, -torch.inf)
        most = int(max(keeps.values()))
        chosen = rank.topk(most, dim=-1).indices  # (rows, H_kv, most), the first of them stay longest
        stays = torch.arange(most, device=device) < keep
        self.alive[index, :, :width] = torch.zeros_like(alive).scatter(-1, chosen, stays.expand_as(chosen))
        for row in rows:
            self.held[row] = keeps[row]

    def room(self) -> int:
        """Return for how many columns memory is needed until the end of every text's block."""
        return max(held + (-seen % BLOCK or BLOCK) for held, seen in zip(self.held, self.seen, strict=True))

    def close(self, evicts: bool) -> Tensor | None:
        """Leave what is known of the tokens to the group; return the columns that stay, where some go."""
        state, kept = self.state, None
        positions, attention = self.positions, self.attention
        if evicts:
            positions = positions.masked_fill(~self.alive, -1)
            width, size = max(self.held), positions.shape[-1]
            columns = torch.arange(size, device=positions.device)
            order = torch.where(self.alive, columns, size).sort(dim=-1).values[..., :width]  # (B, H_kv, W)
            kept = order.clamp(max=size - 1)
            positions = positions.gather(-1, kept).masked_fill(order == size, -1)
            attention = None if attention is None else attention.gather(-1, kept)
        state.positions, state.attention = positions, attention
        state.seen, state.held = self.seen, self.held
        return kept


def padding(mask: Tensor | None, seen: list[int], new: int) -> list[int]:
    """Return how many of the new columns of each text are padding on its left, (B,); a mask that hides more is refused.

    `mask` (B, 1, T, S) is the model's own over all columns so far, `seen` (B,) how many tokens each text had before.
    """
    if mask is None:
        return [0] * len(seen)
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise ValueError("eviction needs a mask as transformers makes it for sdpa or eager attention")
    visible = mask if mask.dtype == torch.bool else mask == 0
    visible = visible.expand(len(seen), -1, -1, -1)[:, 0]  # (B, T, S)
    last = visible[:, -1]  # (B, S): the last token sees all that are no padding
    pads = (~last).to(torch.int32).cumprod(-1).sum(-1)  # (B,), of all columns
    columns = torch.arange(last.shape[-1], device=mask.device)
    rows = columns[-new:, None]
    expected = (columns <= rows) & (columns >= pads[:, None, None])  # (B, T, S)
    text = rows[:, 0] >= pads[:, None]  # (B, T): what padding sees does not matter
    before, padding = last.shape[-1] - new, pads.tolist()
    known = [min(before, padded) + tokens for padded, tokens in zip(padding, seen, strict=True)]
    if bool(((visible != expected) & text[:, :, None]).any()) or known != [before] * len(seen):
        raise ValueError("the mask hides more than padding on the left; no eviction is defined for that")
    return [max(0, padded - before) for padded in padding]
