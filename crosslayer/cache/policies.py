"""Eviction policies: each is a function that ranks the cached tokens by what has been read so far.

Shapes: B batch, H_kv key-value heads, S cached tokens, G query heads per key-value head. A rank is (B, H_kv, S), larger
for tokens that are kept longer; the caller breaks ties.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crosslayer.core.methods import hint, users_module

SINKS = 4  # StreamingLLM's: the first tokens of a text
SINK = 0.3  # a token with a larger share of all attention since it was read is a sink, as in `diagnose`
# Above every position and every sum of attention: the rank of tokens that are always kept. Float32 holds whole numbers
# up to 2^24 exactly, so that these tokens have an order, too.
TOP = 2.0**22


@dataclass(frozen=True)
class Cached:
    """What is known of the cached tokens when some are evicted.

    `positions` (B, H_kv, S) count the tokens of a text from 0. `attention` (B, H_kv, S) is the probability mass that
    each has received, summed over the queries so far and over the query heads of its key-value head; None if the policy
    does not use it. `seen` (B, 1, 1) is how many tokens of the text have been read, `keep` (B, 1, 1) how many will be
    kept. `groups` is G.
    """

    positions: Tensor
    attention: Tensor | None
    seen: Tensor
    keep: Tensor
    groups: int


@dataclass(frozen=True)
class Policy:
    """A rule that decides which tokens are kept.

    Attributes:
        rank: the function that ranks the cached tokens.
        about: a phrase that says which tokens it keeps.
        attention: whether it needs the attention that tokens have received.
    """

    rank: Callable[[Cached], Tensor]
    about: str
    attention: bool = False


def streaming(cached: Cached) -> Tensor:
    """Rank the first tokens of the text highest, then the latest (StreamingLLM, arXiv 2309.17453)."""
    return protected(cached.positions, cached.positions < SINKS)


def h2o(cached: Cached) -> Tensor:
    """Rank the latest tokens highest, half of those kept; then the tokens that received most attention.

    H2O (arXiv 2306.14048), section 4: the sum is over the queries read so far, never over later ones.
    """
    assert cached.attention is not None
    latest = cached.positions >= cached.seen - cached.keep // 2
    return protected(cached.attention, latest)


def sinks(cached: Cached) -> Tensor:
    """Rank the attention sinks highest, then the latest tokens.

    A sink is a token that has received more than `SINK` of the attention of an average query since it was read, in the
    same head. So a sink anywhere in the text is kept, and a head without sinks keeps only recent tokens.
    """
    assert cached.attention is not None
    queries = (cached.seen - cached.positions) * cached.groups  # that could have attended to the token
    return protected(cached.positions, cached.attention / queries > SINK)


def protected(rank: Tensor, above: Tensor) -> Tensor:
    """Return a rank (B, H_kv, S) with the tokens of `above` (B, H_kv, S) above all others, the earliest highest."""
    earliest = TOP + torch.arange(rank.shape[-1], 0, -1, device=rank.device, dtype=torch.float32)
    return torch.where(above, earliest, rank.to(torch.float32))


POLICIES = {
    "streaming": Policy(streaming, f"the first {SINKS} tokens and the latest ones"),
    "h2o": Policy(h2o, "the latest tokens and as many that received the most attention", attention=True),
    "sinks": Policy(sinks, "each head's sinks, at any position, and the latest tokens", attention=True),
}


def policy(name: str) -> Policy:
    """Return a policy of this file, or the one that a user's module defines, if it is imported or allowed."""
    if name in POLICIES:
        return POLICIES[name]
    module = users_module(f"eviction policy {name!r}", name)
    if module is None:
        raise ValueError(f"eviction policy {name!r} is not known; {hint(name, [*POLICIES])}")
    own = [value for value in vars(module).values() if isinstance(value, Policy)]
    if len(own) != 1:
        raise ValueError(f"module {name!r} must define exactly one eviction `Policy`, got {len(own)}")
    return own[0]
