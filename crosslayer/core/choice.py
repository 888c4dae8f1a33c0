"""A layer chooses tokens, by its attention to them, to which it or other layers attend.

For a new token t, key-value head h and its query heads H_h, the choice is the K tokens with the largest

    m_j = Σ_{i ∈ H_h} softmax(q_i K_hᵀ / √d)_j

the first `sinks` and the latest `window` tokens before any other. Every token has a choice of its own, also in a
prompt, so that a text gives the same numbers however it is cut.

Shapes: B batch, T new tokens, S cached + new tokens, H heads, H_kv key-value heads, G = H / H_kv, K chosen tokens, D
head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from crosslayer.core.method import Config, Method, Mixing, Wiring
from crosslayer.core.plan import ROUNDING, TokenCount

# scores in memory at a time: 64 MiB in float32
AT_ONCE = 2**24
# of a prompt in a block, which reads no keys behind those that its rows may see: a prompt of 2,048 tokens takes 1.45 of
# the plain decoder's time, in one block of all rows 2.15
ROWS = 256
NONE = -1  # in a choice: fewer than K tokens are chosen
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # (q, k, v, mask) → (B, T, H, D)


class TokenChoice(Mixing):
    """Chooses tokens, and lets a layer attend to chosen ones alone; it has no parameters.

    `count` is K. The first `sinks` and the latest `window` tokens are always chosen. `heads` names, for each key-value
    head of a layer, the head of the chooser whose choice it takes; None: its own number.
    """

    needs_mask = True

    def __init__(self, count: TokenCount, sinks: int, window: int, heads: tuple[int, ...] | None = None):
        super().__init__()
        self.count, self.sinks, self.window, self.heads = count, sinks, window, heads

    @torch.no_grad()
    def choose(
        self, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, softcap: float | None = None
    ) -> Tensor | None:
        """Return the chosen tokens by their index in S, (B, H_kv, T, K) in int32; None if every token is chosen.

        Args:
            q: queries (B, H, T, D).
            k: keys (B, H_kv, S, D).
            mask: as attention takes it, (B or 1, 1, T, S), True or 0 where it is allowed; None: one new token attends
                to all tokens, several are the first of the sequence and attend causally.
            scaling: factor on the scores.
            softcap: caps the scores.
        """
        new, total = q.shape[2], k.shape[2]
        count = self.count.of(total)
        if count == total:
            return None
        choices = []
        for block in _blocks(q, total):
            allowed, seen = _allowed(mask, block, new, k), total
            if allowed is not None:
                # The columns up to the last that any row of the block sees. To ask for it breaks a compiled graph.
                if len(block) > 1 and not torch.compiler.is_compiling():
                    columns = allowed.flatten(0, 2).any(0).nonzero()
                    seen = int(columns[-1]) + 1 if len(columns) else 1
                allowed = allowed[..., :seen]
            queries = q[:, :, block.start : block.stop]
            weights = attention_weights(queries, k[:, :, :seen], allowed, scaling, softcap)  # (B, H_kv, G, R, seen)
            largest = self.largest(weights.sum(2), allowed, min(count, seen))
            choices.append(functional.pad(largest, (0, count - largest.shape[-1]), value=NONE))
        return torch.cat(choices, 2)

    def largest(self, mass: Tensor, allowed: Tensor | None, most: int) -> Tensor:
        """Return the tokens with the largest mass (B, H_kv, R, S), in falling order, (B, H_kv, R, K)."""
        total = mass.shape[-1]
        if allowed is None:
            mass[..., : self.sinks] = math.inf
            mass[..., total - self.window :] = math.inf
            return mass.topk(most, -1, sorted=False).indices.int()
        place = allowed.cumsum(-1)  # (B or 1, 1, R, S), of each token among those that a row sees, from 1
        seen = place[..., -1:]
        always = allowed & ((place <= self.sinks) | (place > seen - self.window))
        # A mass is a sum of probabilities, so that −1 is below that of every token that a row may see.
        mass = mass.masked_fill_(always, math.inf).masked_fill_(~allowed, -1)
        largest = mass.topk(most, -1)
        if self.count.tokens >= 1:
            counts = torch.full_like(seen, int(self.count.tokens))  # (B or 1, 1, R, 1)
        else:
            # In float64 with the same rounding as `TokenCount.of`, which counts for the last row of the same text.
            share = seen.double() * self.count.tokens
            counts = (share - ROUNDING).ceil().long().clamp_min(self.count.least)
        # Earlier rows choose fewer tokens: those at the end of a row's falling order are cut off.
        excess = torch.arange(most, device=mass.device) >= counts
        return largest.indices.int().masked_fill_(excess | (largest.values < 0), NONE)

    def attend_and_choose(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sparse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, 1, H, D) of attention for one new token, and the choice, from the same scores.

        Keys are read once. With `sparse` the output is that of attention to the chosen tokens, whose values are read.
        """
        total = k.shape[2]
        count, allowed = self.count.of(total), _allowed(mask, range(1), 1, k)
        weights = attention_weights(q, k, allowed, scaling, softcap)  # (B, H_kv, G, 1, S)
        choice = None
        if count < total:
            choice = self.largest(weights.detach().sum(2), allowed, count)  # (B, H_kv, 1, K)
        if choice is not None and sparse:
            # The softmax over chosen tokens is the softmax over all of them, taken there and divided by its sum.
            tokens = self.of_reader(choice)
            weights = weights.gather(-1, tokens.clamp_min(0).long().unsqueeze(2).expand(*weights.shape[:3], -1, -1))
            weights = weights.masked_fill(tokens.unsqueeze(2) == NONE, 0)
            weights = weights / weights.sum(-1, keepdim=True)
            v = _states_at(v, tokens.squeeze(2))
        out = weights.squeeze(3).to(v.dtype) @ v  # (B, H_kv, G, D)
        return out.flatten(1, 2).unsqueeze(1), choice

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, choice: Tensor | None, attend: Attend
    ) -> Tensor:
        """Return the output (B, T, H, D) of attention to chosen tokens; `attend` is attention to all it gets."""
        if choice is None:
            return attend(q, k, v, mask)
        choice = self.of_reader(choice)
        groups, new, total = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
        if new == 1:
            tokens = choice.squeeze(2)  # (B, H_kv, K)
            k, v = _states_at(k, tokens), _states_at(v, tokens)
            # Without a mask of the model there is no padding, and all K tokens of the newest token are chosen.
            return attend(q, k, v, None if mask is None else _like(mask, choice != NONE, groups))
        outputs = []
        for block in _blocks(q, total, 4 * AT_ONCE):
            of_block = choice[:, :, block.start : block.stop]
            # Later columns are chosen by no row of the block. To ask for the last one breaks a compiled graph.
            seen = total if torch.compiler.is_compiling() else max(1, int(of_block.max()) + 1)
            chosen_mask = mask_of(of_block, seen, groups, mask)
            outputs.append(attend(q[:, :, block.start : block.stop], k[:, :, :seen], v[:, :, :seen], chosen_mask))
        return torch.cat(outputs, 1)

    def of_reader(self, choice: Tensor) -> Tensor:
        """Return the choice that each key-value head of a layer takes of its chooser's, (B, H_kv, T, K)."""
        if self.heads is None:
            return choice
        if len(self.heads) != choice.shape[1]:  # a rank has the choices of its own heads alone
            raise ValueError("tensor parallelism does not support layers with chooser_heads")
        return choice[:, list(self.heads)]


@dataclass(frozen=True, kw_only=True)
class ChoiceMethod(Method):
    """A method whose layers attend to tokens that they or other layers choose; its own `plan` says which."""

    needs_long_text = True

    groups: tuple[tuple[int, ...], ...] = ()
    """Groups of 0-based layers in rising order; the first chooses. Layers in no group attend to all tokens."""
    tokens: float = 0.25
    """How many tokens are chosen: below 1 a share of the tokens so far, from 1 a number."""
    sinks: int = 4
    """The first tokens, which are always among the chosen."""
    window: int = 16
    """The latest tokens, with the new one, which are always among the chosen."""
    least: int = 64
    """How many tokens are chosen at least where `tokens` is a share, which is few of a short text."""
    sparse_choosers: tuple[int, ...] = ()
    """Choosers that attend to the tokens that they choose alone; other choosers attend to all."""
    chooser_heads: tuple[tuple[int, ...], ...] = ()
    """For each layer the chooser's key-value heads whose choices its own take; empty: those of the same number."""

    @property
    def count(self) -> TokenCount:
        """How many tokens are chosen: with a share never fewer than those that are always chosen."""
        return TokenCount(self.tokens, 0 if self.tokens >= 1 else max(self.least, self.sinks + self.window))

    @classmethod
    def search_space(cls) -> str:
        """Return that a budget can choose who chooses tokens for whom."""
        return "choosers"

    def check_text(self, length: int) -> None:
        """Refuse windows that are so short that all of their tokens are chosen."""
        if self.count.of(length) == length:
            raise ValueError(f"`length` must be larger: all tokens are chosen (tokens = {self.tokens:g}), got {length}")

    def check_options(self, layers: int) -> None:
        """Refuse options that are impossible whatever the model's heads."""
        name = self.name()
        idle = set(self.sparse_choosers) - {group[0] for group in self.groups if group}
        if idle:
            raise ValueError(f"{name}: each of sparse_choosers must be the first layer of a group, got {sorted(idle)}")
        if self.tokens <= 0 or (self.tokens > 1 and self.tokens != int(self.tokens)):
            raise ValueError(f"{name}: tokens must be a share below 1 or a whole number, got {self.tokens:g}")
        if self.sinks < 0 or self.window < 1:
            raise ValueError(f"{name}: sinks must be at least 0 and window at least 1, got {self.sinks}, {self.window}")
        always = self.sinks + self.window
        if 1 <= self.tokens < always:
            raise ValueError(f"{name}: tokens must be at least sinks + window = {always}, got {self.tokens:g}")
        if self.least < 0:
            raise ValueError(f"{name}: least must be at least 0, got {self.least}")
        if self.chooser_heads and len(self.chooser_heads) != layers:
            raise ValueError(f"{name}: chooser_heads must have {layers} entries, got {len(self.chooser_heads)}")

    def choice(self, config: Config, wiring: Wiring, layer: int) -> TokenChoice:
        """Return the module with which a layer chooses tokens, or attends to chosen ones."""
        heads, count = self.chooser_heads[layer] if self.chooser_heads else (), config.num_key_value_heads
        assert count is not None
        if heads and (len(heads) != count or not all(0 <= head < count for head in heads)):
            where = f"{self.name()}: chooser_heads of layer {layer}"
            raise ValueError(f"{where} must be {count} heads from 0 to {count - 1}, got {list(heads)}")
        return TokenChoice(self.count, self.sinks, self.window, heads or None)


def _blocks(q: Tensor, total: int, scores: int = AT_ONCE) -> list[range]:
    """Return ranges of rows of q (B, H, T, D) with a bounded number of scores.

    Blocks are small, since the first ones attend to few tokens; in compiled code, where each is unrolled, as large as
    possible.
    """
    new, size = q.shape[2], max(1, scores // (q.shape[0] * q.shape[1] * total))
    if not torch.compiler.is_compiling():
        size = min(size, ROWS)
    return [range(start, min(start + size, new)) for start in range(0, new, size)]


def mask_of(choice: Tensor, total: int, groups: int, mask: Tensor | None) -> Tensor:
    """Return a mask (B, H, R, S) of chosen tokens (B, H_kv, R, K), in the form of the model's `mask`."""
    # `NONE` marks a column behind the last, which is cut off again
    indices = torch.where(choice == NONE, total, choice).long()
    chosen = torch.zeros(*choice.shape[:3], total + 1, dtype=torch.bool, device=choice.device)
    return _like(mask, chosen.scatter_(3, indices, True)[..., :total], groups)


def _allowed(mask: Tensor | None, rows: range, new: int, keys: Tensor) -> Tensor | None:
    """Return which tokens some rows may attend to, (B or 1, 1, R, S); None: all."""
    total = keys.shape[2]
    if mask is not None:
        allowed = mask[:, :, rows.start : rows.stop, :total]
        # added to scores: 0, or the least number of the dtype
        return allowed if allowed.dtype == torch.bool else allowed > torch.finfo(allowed.dtype).min / 2
    if new == 1:
        return None
    columns = torch.arange(total, device=keys.device)
    return (columns <= columns[rows.start : rows.stop, None])[None, None]


def attention_weights(q: Tensor, k: Tensor, allowed: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
    """Return the softmax of scores, (B, H_kv, G, R, S), in float32 or wider."""
    groups, new = q.shape[1] // k.shape[1], q.shape[2]
    by_head = q.unflatten(1, (-1, groups)).flatten(2, 3)  # (B, H_kv, G·R, D)
    scores = (by_head @ k.transpose(2, 3) * scaling).unflatten(2, (groups, new))  # (B, H_kv, G, R, S)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if allowed is not None:
        scores = scores.masked_fill(~allowed.unsqueeze(2), torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide)


def _states_at(states: Tensor, tokens: Tensor) -> Tensor:
    """Return the states (B, H_kv, S, D) of chosen tokens (B, H_kv, K), as (B, H_kv, K, D); any for `NONE`."""
    batch, heads, total, size = states.shape
    head = torch.arange(batch * heads, device=states.device).view(batch, heads, 1)  # of all sequences
    tokens = tokens.clamp_min(0)
    # rows of one matrix are gathered three times as fast as by three indices
    if states.is_contiguous():
        rows = (tokens + head * total).flatten()
        return states.view(-1, size).index_select(0, rows).view(batch, heads, -1, size)
    return states[head // heads, head % heads, tokens]


def _like(mask: Tensor | None, chosen: Tensor, groups: int) -> Tensor:
    """Return a mask (B, H, R, columns) of chosen tokens (B, H_kv, R, columns), in the form of the model's mask."""
    chosen = chosen.repeat_interleave(groups, 1)
    if mask is None or mask.dtype == torch.bool:
        return chosen
    nothing = torch.zeros(chosen.shape, dtype=mask.dtype, device=mask.device)
    return nothing.masked_fill_(~chosen, torch.finfo(mask.dtype).min)
