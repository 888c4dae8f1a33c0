"""An eviction: a policy, and how much of the cache it evicts or how many tokens it keeps, in all layers or in some.

As text, `h2o:0.4` evicts 40% of the cache, `h2o:512` keeps 512 tokens, `h2o:0.2@0-11,0.6@12-29` evicts by layer.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from crosslayer.cache.policies import policy
from crosslayer.core.options import ByLayer, by_layer

# Tokens that are read between two evictions: one gather of keys and values for all of them.
BLOCK = 16
AMOUNT = re.compile(r"\d+\.\d*|\.\d+|\d+", re.ASCII)
EXAMPLE = "as h2o:0.4 (evicts 40%), h2o:512 (keeps 512 tokens) or h2o:0.2@0-11,0.6@12-29 (by layer)"


@dataclass(frozen=True)
class Amount:
    """How much of its cache a layer evicts: a `share` (0 to below 1) of the tokens read so far, or all but `tokens`."""

    share: float | None = None
    tokens: int | None = None

    def keep(self, seen: int) -> int:
        """Return how many of `seen` tokens an eviction keeps; of `tokens`, a block is left free for new ones."""
        if self.share is not None:
            return math.ceil((1 - self.share) * seen - 1e-9)  # 0.6 · 10 is 6, in floating point as well
        assert self.tokens is not None
        return self.tokens - BLOCK

    def __post_init__(self):
        if (self.share is None) == (self.tokens is None):
            raise ValueError("an eviction needs either a share or a number of tokens")
        if self.share is not None and not 0 <= self.share < 1:
            raise ValueError(f"the evicted share must be at least 0 and below 1, got {self.share:g}")
        # a block is free for new tokens, so with less than two an eviction would leave less than a block
        if self.tokens is not None and self.tokens < 2 * BLOCK:
            raise ValueError(f"an eviction must keep at least {2 * BLOCK} tokens, got {self.tokens}")


@dataclass(frozen=True, kw_only=True)
class Eviction(ByLayer[Amount]):
    """A policy, by its name or the name of your own module, and the amounts of layers; one without keeps all tokens."""

    policy: str

    def __post_init__(self):
        policy(self.policy)  # refuses an unknown name

    def evicts_from(self, tokens: int) -> bool:
        """Return whether tokens are evicted before the last of a text is read."""
        amounts = [amount for amount in (self.everywhere, *self.layers) if amount is not None]
        last = (tokens - 1) // BLOCK * BLOCK  # the last eviction that is followed by a token
        return any(amount.keep(last) < last for amount in amounts)

    def check_layers(self, layers: int, groups: Sequence[Sequence[int]]) -> None:
        """Refuse an eviction that does not fit the number of layers or the groups that share and may evict."""
        self.check_count(layers, f"eviction {self.text!r}")
        if not groups:
            raise ValueError(f"eviction {self.text!r}: eviction needs a layer that attends to all tokens")
        for group in groups:
            if any(self.at(layer) != self.at(group[0]) for layer in group):
                names = ", ".join(map(str, group))
                raise ValueError(f"eviction {self.text!r}: layers {names} share a cache; give them the same amount")
        attending = {layer for group in groups for layer in group}
        for layer, amount in enumerate(self.layers):
            if amount is not None and layer not in attending:
                raise ValueError(f"eviction {self.text!r}: layer {layer} has a window or no attention; leave it out")


def parse_eviction(text: str) -> Eviction:
    """Return the eviction that a text describes.

    Args:
        text: the policy's name, a colon, and amounts separated by commas: a share to evict (with a decimal point) or a
            whole number of tokens to keep. `@0-11` after an amount limits it to these layers; others keep all.

    Raises:
        ValueError: the policy is unknown, or an amount cannot be read or keeps too little.
    """
    name, colon, rest = text.strip().partition(":")
    Eviction(text, policy=name)  # refuses an unknown name, before amounts are read
    if not colon:
        raise ValueError(f"eviction {text!r} has no amount; write it {EXAMPLE}")

    def amount(digits: str) -> Amount:
        if AMOUNT.fullmatch(digits) is None:
            raise ValueError(f"eviction {text!r} cannot be parsed at {digits!r}; write it {EXAMPLE}")
        return Amount(share=float(digits)) if "." in digits else Amount(tokens=int(digits))

    return Eviction(text.strip(), *by_layer(rest, f"eviction {text!r}", EXAMPLE, amount), policy=name)


Evict = Annotated[str, AfterValidator(lambda text: parse_eviction(text).text)]  # an eviction as text, of an option
