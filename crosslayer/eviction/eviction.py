"""What is asked for: a policy, and how much of the cache goes or how many tokens stay, in all layers or in some.

In words: `h2o:0.4` evicts 40 % of what is cached, `h2o:512` keeps 512 tokens, `h2o:0.2@0-11,0.6@12-29` evicts by layer.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from crosslayer.eviction.policies import Policy, policy

BLOCK = 16  # tokens that are read between two evictions
AMOUNT = re.compile(r"(?P<amount>\d+\.\d*|\.\d+|\d+)(?:@(?P<first>\d+)(?:-(?P<last>\d+))?)?", re.ASCII)
EXAMPLE = "as h2o:0.4 (evicts 40 %), h2o:512 (keeps 512 tokens) or h2o:0.2@0-11,0.6@12-29 (by layer)"


@dataclass(frozen=True)
class Amount:
    """How much of the cache a layer gives up at every eviction.

    Either a `share` of the tokens read so far goes (0 to below 1), or as many stay as the cache has room for: `tokens`.
    """

    share: float | None = None
    tokens: int | None = None

    def keep(self, seen: int, room: int = BLOCK) -> int:
        """Return how many of `seen` tokens an eviction leaves, so that another `room` of them fits beside them."""
        if self.share is not None:
            return math.ceil((1 - self.share) * seen - 1e-9)  # 0.6 · 10 is 6, in floating point as well
        assert self.tokens is not None
        return self.tokens - room

    def __post_init__(self):
        if (self.share is None) == (self.tokens is None):
            raise ValueError("an eviction takes either a share or a number of tokens")
        if self.share is not None and not 0 <= self.share < 1:
            raise ValueError(f"an eviction of {self.share:g} of the cache; give a share from 0 to below 1")
        if self.tokens is not None and self.tokens < 2 * BLOCK:
            raise ValueError(f"an eviction that keeps {self.tokens} tokens; at least {2 * BLOCK} must stay")


@dataclass(frozen=True)
class Eviction:
    """A policy, by its name or that of a module of your own, with its amounts; `text` is as it was asked for.

    `everywhere` is the amount of all layers; where it is None, `by_layer` has those of the first layers, None for those
    that keep all, as the layers behind them do.
    """

    policy: str
    text: str
    everywhere: Amount | None = None
    by_layer: tuple[Amount | None, ...] = ()

    def __post_init__(self):
        policy(self.policy)  # refuses a name that is unknown

    @property
    def rule(self) -> Policy:
        """The policy itself."""
        return policy(self.policy)

    def amount(self, layer: int) -> Amount | None:
        """Return what a layer gives up; None where it keeps all."""
        if self.everywhere is not None:
            return self.everywhere
        return self.by_layer[layer] if layer < len(self.by_layer) else None

    def takes_from(self, tokens: int) -> bool:
        """Return whether a text has lost tokens when its last one is read; a prompt, of SnapKV, at its end."""
        amounts = [self.everywhere] if self.everywhere is not None else [a for a in self.by_layer if a is not None]
        window = self.rule.window
        if window:
            return any(max(amount.keep(tokens, room=0), window) < tokens for amount in amounts)
        last = (tokens - 1) // BLOCK * BLOCK  # the last eviction that a token comes after
        return any(amount.keep(last) < last for amount in amounts)

    def check_layers(self, layers: int, groups: Sequence[Sequence[int]]) -> None:
        """Refuse an eviction by layer that a model of so many layers, some of which share, cannot have."""
        if self.everywhere is not None:
            return
        if len(self.by_layer) > layers:
            raise ValueError(f"eviction {self.text!r} names layer {len(self.by_layer) - 1}; the last is {layers - 1}")
        for group in groups:
            if any(self.amount(layer) != self.amount(group[0]) for layer in group):
                names = ", ".join(map(str, group))
                raise ValueError(f"eviction {self.text!r}: layers {names} share what is cached; give them all the same")
        attending = {layer for group in groups for layer in group}
        for layer, amount in enumerate(self.by_layer):
            if amount is not None and layer not in attending:
                raise ValueError(f"eviction {self.text!r} names layer {layer}, which has no attention")


def parse_eviction(text: str) -> Eviction:
    """Return the eviction that a text asks for.

    Args:
        text: the policy's name, a colon, and amounts with commas between: a share with a decimal point goes, or a
            whole number of tokens stays; `@0-11` behind an amount says in which layers, and others keep all.

    Raises:
        ValueError: the policy is unknown, or an amount cannot be read or leaves nothing.

    """
    name, colon, rest = text.strip().partition(":")
    Eviction(name, text)  # refuses a name that is unknown, before amounts are read
    if not colon:
        raise ValueError(f"eviction {text!r} does not say how much; write it {EXAMPLE}")
    pieces = rest.split(",")
    amounts: dict[int, Amount] = {}
    for piece in pieces:
        match = AMOUNT.fullmatch(piece.strip())
        if match is None:
            raise ValueError(f"eviction {text!r} cannot be read at {piece!r}; write it {EXAMPLE}")
        digits = match["amount"]
        amount = Amount(share=float(digits)) if "." in digits else Amount(tokens=int(digits))
        if match["first"] is None:
            if len(pieces) > 1:
                raise ValueError(f"eviction {text!r}: with several amounts, each says its layers, {EXAMPLE}")
            return Eviction(name, text.strip(), everywhere=amount)
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if not first <= last < 10_000:
            raise ValueError(f"eviction {text!r}: layers {first}-{last} are none")
        for layer in range(first, last + 1):
            if layer in amounts:
                raise ValueError(f"eviction {text!r} names layer {layer} twice")
            amounts[layer] = amount
    by_layer = tuple(amounts.get(layer) for layer in range(max(amounts) + 1))
    return Eviction(name, text.strip(), by_layer=by_layer)


def _readable(text: str) -> str:
    parse_eviction(text)
    return text


Evict = Annotated[str, AfterValidator(_readable)]  # the text of an eviction, as an option
