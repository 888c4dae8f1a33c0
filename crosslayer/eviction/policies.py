"""Which cached tokens stay: one function a policy, which ranks them by what has been read so far.

Shapes: B batch, H_kv key-value heads, S tokens that are cached, W query tokens of a window, G query heads a key-value
head. A rank is (B, H_kv, S), larger for tokens that stay longer; ties are settled by the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from crosslayer.core.methods import hint, users_module

SINKS = 4  # StreamingLLM's: the first tokens of a text
SINK = 0.3  # of all attention from a token on: the share from which `diagnose` calls it a sink
TOP = 2.0**22  # above every position and every sum of attention: the rank of what stays before all else
WINDOW, KERNEL = 64, 5  # SnapKV's observation window and the width over which it smooths, in tokens


@dataclass(frozen=True)
class Cached:
    """What is known of the cached tokens when some must go.

    `positions` (B, H_kv, S) count the tokens of a text from 0. `attention` (B, H_kv, S) is what each has received in
    probability mass, summed over the queries so far and over the query heads of its key-value head; None where the
    policy does not ask for it. `seen` (B, 1, 1) is how many tokens the text has so far, `keep` (B, 1, 1) how many stay.
    `groups` is G.
    """

    positions: Tensor
    attention: Tensor | None
    seen: Tensor
    keep: Tensor
    groups: int


@dataclass(frozen=True)
class Policy:
    """A rule by which tokens stay.

    Attributes:
        rank: the rule.
        about: what it keeps, in words.
        attention: whether it asks for the attention that tokens have received.
        window: 0 for a rule that evicts as the text goes on; else it evicts a single time, when the prompt has been
            read, by the attention of the prompt's last `window` tokens alone.

    """

    rank: Callable[[Cached], Tensor]
    about: str
    attention: bool = False
    window: int = 0


def _streaming(cached: Cached) -> Tensor:
    """Rank the first tokens of the text above all, then the latest (StreamingLLM, arXiv 2309.17453)."""
    return protected(cached.positions, cached.positions < SINKS)


def _h2o(cached: Cached) -> Tensor:
    """Rank the latest tokens above all, half of what stays; then those that received most attention.

    H2O (arXiv 2306.14048), section 4: the sum is over queries that have been read, never over those to come.
    """
    assert cached.attention is not None
    latest = cached.positions >= cached.seen - cached.keep // 2
    return protected(cached.attention, latest)


def _sinks(cached: Cached) -> Tensor:
    """Rank the sinks that are found above all, then the latest tokens.

    A sink is a token that has received more than `SINK` of the attention of an average query since it was read, in
    its own head: where a head has no sink all that stays is recent, and a sink anywhere in the text is kept.
    """
    assert cached.attention is not None
    queries = (cached.seen - cached.positions) * cached.groups  # that could have looked at the token
    return protected(cached.positions, cached.attention / queries > SINK)


def _snapkv(cached: Cached) -> Tensor:
    """Rank the window above all, then by the attention that the window pays, smoothed over neighbours.

    SnapKV (arXiv 2404.14469), section 4.2, with the mean for pooling.
    """
    assert cached.attention is not None
    window = cached.positions >= cached.seen - WINDOW
    earlier = cached.attention.masked_fill(window, 0.0)
    smooth = F.avg_pool1d(earlier, KERNEL, stride=1, padding=KERNEL // 2)
    return protected(smooth, window)


def protected(rank: Tensor, above: Tensor) -> Tensor:
    """Return a rank (B, H_kv, S) in which some tokens stand above all others, the earliest of them highest."""
    earliest = TOP + torch.arange(rank.shape[-1], 0, -1, device=rank.device, dtype=torch.float32)
    return torch.where(above, earliest, rank.to(torch.float32))


POLICIES = {
    "streaming": Policy(_streaming, f"the first {SINKS} tokens and the latest"),
    "h2o": Policy(_h2o, "half the latest, half those that received most attention", attention=True),
    "sinks": Policy(_sinks, "the sinks that each head has, wherever they are, and the latest", attention=True),
    "snapkv": Policy(
        _snapkv, "the end of the prompt, what it looks at, and all that follows", attention=True, window=WINDOW
    ),
}


def policy(name: str) -> Policy:
    """Return a policy of this file, or the only one that a user's module defines, if it is imported or allowed."""
    if name in POLICIES:
        return POLICIES[name]
    module = users_module(f"eviction policy {name!r}", name)
    if module is None:
        raise ValueError(f"no eviction policy is called {name!r}; {hint(name, [*POLICIES])}")
    own = [value for value in vars(module).values() if isinstance(value, Policy)]
    if len(own) != 1:
        raise ValueError(f"module {name!r} defines {len(own)} eviction policies; it must define exactly one `Policy`")
    return own[0]
